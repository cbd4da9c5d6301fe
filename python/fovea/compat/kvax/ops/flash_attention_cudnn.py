"""The reference that kvax compares itself with: `jax.nn.dot_product_attention`, by cuDNN where there is a GPU."""

from __future__ import annotations

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..utils.common import PADDING_SEGMENT_ID
from ..utils.sharding import mesh_or_global
from ..utils.specs import get_attention_specs


def make_segment_mask(query_segment_ids: Any, kv_segment_ids: Any) -> Any:
    """[..., seqlen_q, seqlen_kv] bool: where ids are the same.

    Raises
    ------
    ValueError
        Ids are no integers, or of other ranks.
    """
    q, kv = jnp.asarray(query_segment_ids), jnp.asarray(kv_segment_ids)
    if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in (q, kv)) or q.ndim != kv.ndim:
        raise ValueError(f"make_segment_mask: ids have dtypes {q.dtype}, {kv.dtype} and ranks {q.ndim}, {kv.ndim}; expected integers of one rank.")
    return q[..., :, None] == kv[..., None, :]


def create_cudnn_attn_mask(query_segment_ids: Any, kv_segment_ids: Any) -> Any:
    """[batch, 1, seqlen_q, seqlen_kv] bool: where documents are the same."""
    return make_segment_mask(query_segment_ids, kv_segment_ids)[:, None]


def _part(scale: float, is_causal: bool, skip_pad_tokens: bool, q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any, mask: Any = None) -> Any:
    lengths = [(ids != PADDING_SEGMENT_ID).sum(1, dtype=jnp.int32) if skip_pad_tokens else None for ids in (q_ids, kv_ids)]
    on_gpu = jax.default_backend() == "gpu" and q.dtype != jnp.float32
    head_dim_v, width = v.shape[-1], max(q.shape[-1], v.shape[-1])  # JAX has one head dim for all
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),)) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=is_causal, query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1],
        implementation="cudnn" if on_gpu else None,
    )  # fmt: skip
    return out[..., :head_dim_v]


def flash_attention_cudnn(
    query: Any,
    key: Any,
    value: Any,
    query_segment_ids: Any,
    kv_segment_ids: Any,
    mask: Optional[Any] = None,
    scale: float = 1.0,
    is_causal: bool = False,
    skip_pad_tokens: bool = True,
    mesh: Any = None,
) -> Any:
    """JAX's own attention, split as the specs which hold say.

    Parameters
    ----------
    query, key, value, scale, mesh
        As `flash_attention_triton`'s.
    query_segment_ids, kv_segment_ids : array, [batch, seqlen] i32
        With `skip_pad_tokens` padding, which is at the end, is left out. Documents are in `mask`.
    mask : array, [batch, 1, seqlen_q, seqlen_kv] bool, optional
    is_causal : bool
        The first query meets the first key.
    """
    specs = get_attention_specs()
    q, kv = (PartitionSpec(*x) for x in (specs.query_specs, specs.kv_specs))
    ids = [PartitionSpec(x[0], x[1]) for x in (q, kv)]
    of_mask = () if mask is None else (PartitionSpec(q[0], None, q[1], kv[1]),)
    part = functools.partial(_part, float(scale), is_causal, skip_pad_tokens)
    mapped = jax.shard_map(part, mesh=mesh_or_global(mesh), in_specs=(q, kv, kv, *ids, *of_mask), out_specs=q, check_vma=False)
    arrays = (query, key, value, query_segment_ids, kv_segment_ids)
    return mapped(*arrays) if mask is None else mapped(*arrays, mask)
