"""`jax.nn.dot_product_attention` on Fovea."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._programs import Program, mask_mod
from ..errors import InvalidArgument
from ._attention import array_of, attention

Array = Any
_FUNCTION = "dot_product_attention"


def _rank_4(value: Any, name: str) -> Any:
    array = array_of(value, name, _FUNCTION)
    if array.ndim > 4:
        raise InvalidArgument(f"{_FUNCTION}: {name} has rank {array.ndim}; expected at most 4")
    return array.reshape(*(1,) * (4 - array.ndim), *array.shape)


def _over_scores(value: Any, name: str, q: Any, k: Any) -> Any:
    """What broadcasts to the scores; longer extents, which Fovea's own calls take for capacity, are a mistake there."""
    array, scores = _rank_4(value, name), (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if any(extent not in (1, score) for extent, score in zip(array.shape, scores)):
        raise InvalidArgument(f"{_FUNCTION}: {name} has shape {jnp.shape(value)}; expected one that broadcasts to the scores', {scores}")
    return array


def _window(size: Any) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _lengths_mask(query_seq_lengths: Any, key_value_seq_lengths: Any, batch: int) -> Program | None:
    """What lies behind the end of a sequence sees nothing, and nobody sees it."""
    sides = (("query_seq_lengths", query_seq_lengths, "q_idx"), ("key_value_seq_lengths", key_value_seq_lengths, "kv_idx"))
    made = None
    for name, lengths, place in sides:
        if lengths is None:
            continue
        array = array_of(lengths, name, _FUNCTION)
        if array.shape != (batch,) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise InvalidArgument(f"{_FUNCTION}: {name} has shape {array.shape} and dtype {array.dtype}; expected {(batch,)} of i32")
        part = mask_mod(f"{place} < {name}[batch]", **{name: array.astype(jnp.int32)})
        made = part if made is None else made & part
    return made


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, by Fovea.

    A row that sees no key gives 0, where JAX's own, which masks by a large number, gives the mean of all values.

    Parameters
    ----------
    query : array, [batch, seqlen_q, num_heads_q, head_dim] or [seqlen_q, num_heads_q, head_dim], f32, f16 or bf16
    key, value : array, [batch, seqlen_kv, num_heads_kv, head_dim], or without batch
        num_heads_q is a multiple of num_heads_kv.
    bias : array, broadcasts to [batch, num_heads_q, seqlen_q, seqlen_kv], optional
    mask : array of bool, broadcasts as bias, optional
        True: visible.
    scale : float, optional
        ``1 / sqrt(head_dim)`` unless given.
    is_causal : bool
        The first query meets the first key.
    query_seq_lengths, key_value_seq_lengths : array, [batch] i32, optional
        Rows behind them are padding.
    local_window_size : int or (left, right), optional
        Keys on either side of a query, both ends visible.
    implementation
        Taken and not needed.
    return_residual : bool
        Whether lse is returned, too: [batch, seqlen_q, num_heads_q], of key's dtype, without gradients.

    Returns
    -------
    array, shape of query; with `return_residual` also lse

    Raises
    ------
    InvalidArgument, Unsupported
        As `fovea.jax.attention`.
    """
    q, k, v = _rank_4(query, "query"), _rank_4(key, "key"), _rank_4(value, "value")
    if mask is not None:
        mask = _over_scores(mask, "mask", q, k)
    if bias is not None:
        bias = _over_scores(bias, "bias", q, k)
    rank = jnp.ndim(query)
    out, lse = attention(
        q, k, v, bias=bias, mask=mask, scale=scale, causal=is_causal, align="top_left", window=_window(local_window_size),
        mask_mod=_lengths_mask(query_seq_lengths, key_value_seq_lengths, q.shape[0]), return_lse=True,
    )  # fmt: skip
    out = out if rank == 4 else out[0]
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(lse.transpose(0, 2, 1).astype(k.dtype))
    return out, residual if rank == 4 else residual[0]
