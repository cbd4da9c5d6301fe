"""kvax's attention by the specs that hold, or by those of the call: the signatures of both of its versions in one."""

from __future__ import annotations

from typing import Any, Optional

from .._attend import attend
from ..utils.common import FlashAttentionParamsConfig
from ..utils.sharding import mesh_or_global
from ..utils.specs import checked, get_attention_specs, held_specs
from ..utils.typing import AttentionMask, Specs


def flash_attention_triton(
    query: Any,
    key: Any,
    value: Any,
    query_positions: Any,
    query_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    mask: Optional[tuple[AttentionMask, ...]] = None,
    scale: float = 1.0,
    bias: Any = None,
    fwd_params: Optional[FlashAttentionParamsConfig] = None,
    bwd_params: Optional[FlashAttentionParamsConfig] = None,
    assume_sequential_positions: bool = False,
    memory_optimized_gqa_backward: bool = False,
    permute_tokens_for_load_balance: bool = True,
    debug: bool = False,
    mesh: Any = None,
    *,
    query_spec: Optional[Specs] = None,
    kv_spec: Optional[Specs] = None,
) -> Any:
    """A query sees keys of its own document that are not behind its position, as far as the mask's blocks go; padding sees nothing and is seen
    by nobody. Differentiable once, in reverse mode, by query, key and value.

    Parameters
    ----------
    query : array, [batch, seqlen_q, num_heads_q, head_dim_qk], f32, f16 or bf16
    key : array, [batch, seqlen_kv, num_heads_kv, head_dim_qk], dtype of query
    value : array, [batch, seqlen_kv, num_heads_kv, head_dim_v], dtype of query
    query_positions, query_segment_ids : array, [batch, seqlen_q] i32
    kv_positions, kv_segment_ids : array, [batch, seqlen_kv] i32
        Under context parallelism in the sequence's own order, where key and value are permuted as query is.
    mask : tuple of AttentionMask, optional
        Of `create_attention_mask`. Gradients are those of the first, which is all that they need.
    scale : float
    bias
        Refused, as there.
    fwd_params : FlashAttentionParamsConfig, optional
        The one that the mask was made with.
    assume_sequential_positions : bool
        Whether a token's position is its index, so that positions are not read.
    permute_tokens_for_load_balance : bool
        Under context parallelism: whether tokens are in the order of `permute_tokens_context_parallelism`.
    mesh : Mesh, optional
        The one that is set unless given.
    query_spec, kv_spec : tuple of four, optional
        In place of the specs that hold. Without either and without a mesh the call is of one device.
    bwd_params, memory_optimized_gqa_backward, debug
        Taken and not needed: plans choose their tiles, and heads of a group are summed in the kernels.

    Returns
    -------
    array, [batch, seqlen_q, num_heads_q, head_dim_v]
        0 where a query sees no key.

    Raises
    ------
    NotImplementedError
        Of a bias.
    ValueError
        Shapes, masks, specs and mesh that do not go together.
    """
    if bias is not None:
        raise NotImplementedError("Bias is not supported by kvax; fovea.jax.attention takes one.")
    if query_spec is not None or kv_spec is not None:
        specs: Any = checked(query_spec, kv_spec)
    else:
        specs = held_specs() if mesh is None else get_attention_specs()
    return attend(
        query, key, value, (query_positions, query_segment_ids, kv_positions, kv_segment_ids), mask,
        None if specs is None else mesh_or_global(mesh), specs, scale, fwd_params, assume_sequential_positions, permute_tokens_for_load_balance,
    )  # fmt: skip


flash_attention_triton_legacy = flash_attention_triton
