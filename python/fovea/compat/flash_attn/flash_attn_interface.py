"""flash_attn.flash_attn_interface by Fovea: the public functions, and the private ones that other packages import."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._attention import attention, attention_backward
from ..._cache import KvCache
from ..._forward import Dropout
from ...errors import Unsupported
from ...torch._sdpa import random_dropout
from .._flash import (
    InvalidCall,
    Rows,
    Turning,
    attend_cache,
    capacity_of,
    check_append,
    check_room,
    compact,
    empty_rows_are,
    lengths_of,
    parts_of,
    seqlens_of,
    softcap_of,
    window_of,
)

_MAX_SPLITS = 128
_INFINITY = float("inf")

#: Tests ask whether AMD's Triton kernels stand in.
USE_TRITON_ROCM = False


class _Sequences(NamedTuple):
    """Offsets of packed rows and the longest lengths; of padded batches the lengths alone."""

    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None

    @property
    def features(self) -> dict[str, Any]:
        return {} if self.cu_seqlens_q is None else {"cu_seqlens": (self.cu_seqlens_q, self.cu_seqlens_k)}


def _features(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, alibi_slopes: Any, deterministic: bool, seqlen_k: int
) -> dict[str, Any]:
    """What `fovea.attention` calls them."""
    return {
        "scale": softmax_scale, "causal": causal, "window": window_of(window_size, causal, seqlen_k), "softcap": softcap_of(softcap),
        "alibi": alibi_slopes, "deterministic": deterministic,
    }  # fmt: skip


# ---- What return_attn_probs returns ----


_UNITS = 128  # keys whose probabilities one call gives; S_dmask has multiples of them


def _rounded(length: int) -> int:
    return max(-(-length // _UNITS), 1) * _UNITS


def _places(k: Any, cu_seqlens: Any) -> Any:
    """Of each key in its sequence."""
    if cu_seqlens is None:
        return torch.arange(k.shape[1], device=k.device)
    return Rows(k.shape[0], cu_seqlens).positions(torch.zeros_like(cu_seqlens[1:]), 1)


def _probabilities(q: Any, k: Any, sequences: _Sequences, **features: Any) -> Any:
    """[batch, rows, heads, keys] or [total_q, heads, keys], keys up to a multiple of _UNITS: what attention gives of unit vectors as values."""
    places, blocks = _places(k, sequences.cu_seqlens_k), []
    for first in range(0, _rounded(sequences.max_seqlen_k), _UNITS):
        units = (places[:, None] == torch.arange(first, first + _UNITS, device=k.device)).to(k.dtype)
        values = units.unsqueeze(-2).expand(*k.shape[:-1], _UNITS).contiguous()
        blocks.append(attention(q, k, values, **features, **sequences.features))
    return torch.cat(blocks, -1)


def _padded_rows(values: Any, sequences: _Sequences) -> Any:
    """[batch, heads, rows, keys], rows up to a multiple of 128, of what `_probabilities` gives; 0 behind a sequence's end."""
    num_rows = _rounded(sequences.max_seqlen_q)
    if sequences.cu_seqlens_q is None:
        values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, num_rows - values.shape[1]))
    else:
        rows = sequences.cu_seqlens_q[:-1, None] + torch.arange(num_rows, device=values.device)
        is_inside = rows < sequences.cu_seqlens_q[1:, None]
        values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 1))  # no row at all has one to be read
        values = values[rows.where(is_inside, 0)] * is_inside[..., None, None]
    return values.transpose(1, 2)


def _dropped_scores(q: Any, k: Any, dropout: Dropout | None, features: dict[str, Any], sequences: _Sequences) -> Any:
    """S_dmask: exp(score - row_max), the sign bit set where dropout drops; [batch, heads, rows, keys], both padded to multiples of 128.

    What is dropped depends on places alone: of equal scores no probability is 0 unless it is dropped.
    """
    if dropout is None:
        return q.new_empty(0)
    with torch.no_grad():
        p = _probabilities(q.detach().float(), k.detach().float(), sequences, **features)
        scores = p / p.amax(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        kept = _probabilities(torch.zeros_like(q), torch.zeros_like(k), sequences, dropout=dropout) != 0
        return _padded_rows(torch.where(kept, scores, -scores), sequences).to(q.dtype)


def _attend(
    q: Any, k: Any, v: Any, sequences: _Sequences, dropout_p: float, features: dict[str, Any], return_attn_probs: bool
) -> Any:
    """A public function's result."""
    dropout = random_dropout(dropout_p, q)
    if not return_attn_probs:
        return attention(q, k, v, dropout=dropout, **features, **sequences.features)
    out, lse = attention(q, k, v, dropout=dropout, return_lse=True, **features, **sequences.features)
    return out, empty_rows_are(lse, _INFINITY), _dropped_scores(q, k, dropout, features, sequences)


# ---- Padded batches ----


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, dim] over k, v [batch, seqlen_k, heads_k, dim]; causal is bottom right.

    ``python -m fovea.compat list flash_attn`` has the arguments. Returns out [batch, seqlen_q, heads, dim]; with
    `return_attn_probs` (out, lse, S_dmask).
    """
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, k.shape[1])
    return _attend(q, k, v, _Sequences(q.shape[1], k.shape[1]), dropout_p, features, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of kv [batch, seqlen_k, 2, heads_k, dim]."""
    k, v = parts_of("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of qkv [batch, seqlen, 3, heads, dim]."""
    q, k, v = parts_of("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


# ---- Packed sequences ----


def _attend_pages(
    q: Any, k: Any, v: Any, sequences: _Sequences, lengths: Any, block_table: Any, dropout_p: float, features: dict[str, Any],
    num_splits: int,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of packed queries over pages."""
    function = "flash_attn_varlen_func"
    if num_splits > 1:
        raise InvalidCall(f"{function}: num_splits is {num_splits}; num_splits > 1 is not supported beside block_table, expected 0 or 1")
    if dropout_p:
        raise Unsupported(f"{function}: dropout_p is {dropout_p} beside block_table; expected 0, as in inference")
    check_room(function, "block_table", lengths, 0, k, block_table)
    results: tuple[Any, Any] = attend_cache(
        function, q, KvCache(k, v, lengths, page_table=block_table), cu_seqlens=sequences.cu_seqlens_q,
        max_seqlen_q=sequences.max_seqlen_q, **features,
    )  # fmt: skip
    return results


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    """Attention of packed sequences: q [total_q, heads, dim], k, v [total_k, heads_k, dim], or pages by `block_table`.

    ``python -m fovea.compat list flash_attn`` has the arguments. Returns out [total_q, heads, dim]; with `return_attn_probs`
    (out, lse, S_dmask).
    """
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, max_seqlen_k)
    sequences = _Sequences(max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k)
    if block_table is None:
        return _attend(q, k, v, sequences, dropout_p, features, return_attn_probs)
    out, lse = _attend_pages(q, k, v, sequences, lengths_of(cu_seqlens_k), block_table, dropout_p, features, 0)
    return (out, empty_rows_are(lse, _INFINITY), q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of kv [total_k, 2, heads_k, dim]."""
    k, v = parts_of("kv", kv, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of qkv [total, 3, heads, dim]."""
    q, k, v = parts_of("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


# ---- Over a cache ----


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, dim] over a cache, behind whose rows new keys and values are written.

    k and v are [batch, seqlen_new, heads_k, dim]; k_cache and v_cache are [slots, capacity, heads_k, dim], or pages [num_pages, page_size, heads_k, dim] of any size beside a
    `block_table`. ``python -m fovea.compat list flash_attn`` has the arguments. Returns out, or (out, lse).
    """
    function = "flash_attn_with_kvcache"
    check_append(function, k, v, cache_seqlens, rotary_cos, rotary_sin)
    if num_splits > _MAX_SPLITS:
        raise InvalidCall(f"{function}: num_splits is {num_splits}; num_splits > {_MAX_SPLITS} is not supported")
    if cache_batch_idx is not None and block_table is not None:
        raise InvalidCall(f"{function}: cache_batch_idx beside block_table; expected one of them: a table's rows name the pages")
    batch, seqlen_q = q.shape[:2]
    seqlens = seqlens_of(cache_seqlens, batch, k_cache, block_table)
    check_room(function, "block_table", seqlens, 0 if k is None else k.shape[1], k_cache, block_table)
    capacity = capacity_of(k_cache, block_table)
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, True, capacity)
    rotary = None
    if rotary_cos is not None and k is not None:
        turning = Turning(rotary_cos, rotary_sin, rotary_interleaved, seqlens, cache_leftpad is None)
        rotary = turning.rotary(Rows(seqlen_q), Rows(k.shape[1]), causal or features["window"] is not None)
    cache = KvCache(k_cache, v_cache, seqlens, block_table, cache_batch_idx, cache_leftpad)
    out, lse = attend_cache(function, q, cache, k, v, rotary=rotary, **features)
    return (out, empty_rows_are(lse, _INFINITY)) if return_softmax_lse else out


# ---- Private functions that other packages import ----


def _flash_attn_forward(
    q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(out, lse, S_dmask, rng_state), without gradients."""
    window_size = (window_size_left, window_size_right)
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, True, k.shape[1])
    return _raw_forward(q, k, v, _Sequences(q.shape[1], k.shape[1]), dropout_p, features, return_softmax)


def _raw_forward(
    q: Any, k: Any, v: Any, sequences: _Sequences, dropout_p: float, features: dict[str, Any], return_softmax: bool
) -> tuple[Any, Any, Any, Any]:
    with torch.no_grad():
        dropout = random_dropout(dropout_p, q)
        out, lse = attention(q, k, v, dropout=dropout, return_lse=True, **features, **sequences.features)
        scores = _dropped_scores(q, k, dropout if return_softmax else None, features, sequences)
    return out, empty_rows_are(lse, _INFINITY), scores, _rng_state(dropout, q)


def _rng_state(dropout: Dropout | None, like: Any) -> Any:
    """[2] i64: seed and offset."""
    if dropout is None:
        return torch.zeros(2, dtype=torch.int64, device=like.device)
    return torch.cat([dropout.seed, dropout.offset])


def _flash_attn_varlen_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None, leftpad_k: Any = None, seqused_k: Any = None,
    zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(out, lse, S_dmask, rng_state) of packed sequences; keys `leftpad_k` to `seqused_k` of each count."""
    window_size = (window_size_left, window_size_right)
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, True, max_seqlen_k)
    sequences = _Sequences(max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        if leftpad_k is not None:
            raise InvalidCall("_flash_attn_varlen_forward: leftpad_k beside block_table; expected one of them")
        lengths = lengths_of(cu_seqlens_k) if seqused_k is None else seqused_k
        with torch.no_grad():
            out, lse = _attend_pages(q, k, v, sequences, lengths, block_table, dropout_p, features, num_splits)
        return out, empty_rows_are(lse, _INFINITY), q.new_empty(0), _rng_state(None, q)
    if leftpad_k is not None or seqused_k is not None:
        rows = compact(cu_seqlens_k, k.shape[0], leftpad_k, seqused_k)
        k, v, sequences = rows.pack(k), rows.pack(v), sequences._replace(cu_seqlens_k=rows.cu_seqlens)
    return _raw_forward(q, k, v, sequences, dropout_p, features, return_softmax)


def _flash_attn_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool,
    rng_state: Any = None,
) -> Any:  # fmt: skip
    """Writes dq, dk and dv where they are tensors; returns the row sums of dout * out, [batch, heads, seqlen_q] f32."""
    window_size = (window_size_left, window_size_right)
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, k.shape[1])
    return _raw_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, features, rng_state)


def _raw_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, outputs: tuple[Any, ...], dropout_p: float, features: dict[str, Any],
    rng_state: Any,
) -> Any:  # fmt: skip
    if dropout_p:
        if rng_state is None:
            raise InvalidCall("_flash_attn_backward: dropout_p without rng_state; expected what the forward call returned")
        features["dropout"] = Dropout(dropout_p, *rng_state.split(1))
    made = attention_backward(dout, q, k, v, out, lse.masked_fill(lse == _INFINITY, -_INFINITY), **features)
    for written, gradient in zip(outputs, (made.q, made.k, made.v)):
        if written is not None:
            written.copy_(gradient)
    return (dout.float() * out).sum(-1).transpose(-1, -2)


def _flash_attn_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool, rng_state: Any = None, zero_tensors: bool = False,
) -> Any:  # fmt: skip
    """`_flash_attn_backward` of packed sequences; returns [heads, total_q]."""
    window_size = (window_size_left, window_size_right)
    features = _features(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, max_seqlen_k)
    features["cu_seqlens"] = (cu_seqlens_q, cu_seqlens_k)
    return _raw_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, features, rng_state)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys that share a reference in S_dmask: a whole row's."""
    return 1 << 30


def __getattr__(name: str) -> Any:
    """The extension module, which imports this one."""
    if name == "flash_attn_gpu":
        from . import extension

        return extension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
