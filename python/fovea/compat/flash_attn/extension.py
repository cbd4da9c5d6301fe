"""flash_attn's extension module, flash_attn_2_cuda, by Fovea: raw calls by position, as flash_attn's own Python makes them."""

from __future__ import annotations

from typing import Any

from .._flash import InvalidCall
from .flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_with_kvcache,
)


def _check_generator(function: str, generator: Any) -> None:
    if generator is not None:
        raise InvalidCall(f"{function}: the `generator` argument is no longer supported; expected None, and torch.manual_seed before the call")


def _into(out: Any, made: Any) -> Any:
    return made if out is None else out.copy_(made)


def fwd(
    q: Any, k: Any, v: Any, out: Any, alibi_slopes: Any, p_dropout: float, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, return_softmax: bool, generator: Any,
) -> list[Any]:  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state] of padded batches."""
    _check_generator("fwd", generator)
    if return_softmax and not p_dropout:
        raise InvalidCall("fwd: return_softmax without dropout; return_softmax is only supported when p_dropout > 0.0")
    made, *rest = _flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
    )
    return [_into(out, made), *rest]


def varlen_fwd(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, leftpad_k: Any, block_table: Any,
    alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float, softmax_scale: float, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int, softcap: float, return_softmax: bool, generator: Any,
    num_splits: int = 0,
) -> list[Any]:  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state] of packed sequences."""
    _check_generator("varlen_fwd", generator)
    made, *rest = _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k, zero_tensors, num_splits,
    )  # fmt: skip
    return [_into(out, made), *rest]


def _output(written: Any, like: Any) -> Any:
    return like.new_empty(like.shape) if written is None else written


def bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, alibi_slopes: Any, p_dropout: float,
    softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int, softcap: float, deterministic: bool,
    generator: Any, rng_state: Any = None,
) -> list[Any]:  # fmt: skip
    """[dq, dk, dv, softmax_d] of padded batches."""
    _check_generator("bwd", generator)
    dq, dk, dv = _output(dq, q), _output(dk, k), _output(dv, v)
    delta = _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return [dq, dk, dv, delta]


def varlen_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    alibi_slopes: Any, max_seqlen_q: int, max_seqlen_k: int, p_dropout: float, softmax_scale: float, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int, softcap: float, deterministic: bool, generator: Any,
    rng_state: Any = None,
) -> list[Any]:  # fmt: skip
    """[dq, dk, dv, softmax_d] of packed sequences."""
    _check_generator("varlen_bwd", generator)
    dq, dk, dv = _output(dq, q), _output(dk, k), _output(dv, v)
    delta = _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale,
        is_causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state, zero_tensors,
    )  # fmt: skip
    return [dq, dk, dv, delta]


def fwd_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, rotary_cos: Any, rotary_sin: Any, cache_batch_idx: Any,
    cache_leftpad: Any, block_table: Any, alibi_slopes: Any, out: Any, softmax_scale: float, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, rotary_interleaved: bool, num_splits: int,
) -> list[Any]:  # fmt: skip
    """[out, softmax_lse] over a cache."""
    made, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale,
        is_causal, (window_size_left, window_size_right), softcap, rotary_interleaved, alibi_slopes, num_splits, True,
    )  # fmt: skip
    return [_into(out, made), lse]
