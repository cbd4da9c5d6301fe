"""FlashAttention-3's functions by Fovea, on every device and in f32, too: its module flash_attn_interface.

`fovea.compat.install("flash_attn_3")` puts it where ``import flash_attn_interface`` finds it; ``python -m fovea.compat list
flash_attn_3`` says what each argument does.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._attention import attention
from ..._cache import KvCache, merge_states
from ...errors import Unsupported
from ...torch._varlen import offsets_in_use
from .._flash import (
    InvalidCall,
    Rows,
    Turning,
    attend_cache,
    check_append,
    check_room,
    parts_of,
    seqlens_of,
    softcap_of,
    window_of,
)

#: The version whose functions these are.
__version__ = "3.0.0"

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_MAX_SPLITS = 256
_MAX_MERGED = 32  # states that one call of `merge_states` takes on a GPU


def _check(function: str, q: Any, num_splits: int, attention_chunk: int) -> None:
    if num_splits > _MAX_SPLITS:
        raise InvalidCall(f"{function}: num_splits is {num_splits}; num_splits > {_MAX_SPLITS} is not supported")
    if attention_chunk < 0:
        raise InvalidCall(f"{function}: attention_chunk is {attention_chunk}; expected >= 0, 0 for none")


def _features(
    q: Any, v: Any, qv: Any, softmax_scale: float | None, causal: bool, window_size: Any, attention_chunk: int, softcap: float,
    sm_margin: int,
) -> dict[str, Any]:  # fmt: skip
    """What `fovea.attention` calls them."""
    if softmax_scale is None and qv is not None:
        softmax_scale = (q.shape[-1] + v.shape[-1]) ** -0.5
    features: dict[str, Any] = {
        "scale": softmax_scale, "causal": causal, "window": window_of(window_size, causal), "softcap": softcap_of(softcap),
        "sm_margin": sm_margin,
    }  # fmt: skip
    if attention_chunk:  # fovea.chunked as a text, which compiled graphs take
        features["mask_mod"] = f"(q_idx + seqlen_kv - seqlen_q) // {attention_chunk} == kv_idx // {attention_chunk}"
    return features


def _refuse_codes(function: str, q: Any) -> None:
    if "float8" in str(q.dtype):
        raise Unsupported(f"{function}: q is {q.dtype}; expected f32, f16 or bf16: q.to(torch.bfloat16), scales multiplied in")


def _recipe_of_codes(function: str, q: Any, k: Any, v: Any, qv: Any, descales: tuple[Any, Any, Any], batch: int) -> dict[str, Any]:
    """What `fovea.attention` takes q, k and v in float8 by: their scales, 1 where there are none. Of other dtypes nothing, and
    descales have no effect, as there."""
    if "float8" not in str(q.dtype):
        return {}
    if q.dtype != torch.float8_e4m3fn or not q.dtype == k.dtype == v.dtype:
        raise Unsupported(f"{function}: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one dtype, of float8 torch.float8_e4m3fn")
    if qv is not None:
        raise Unsupported(f"{function}: qv beside q in float8; expected f16 or bf16")
    shape = (batch, k.shape[-2])
    recipe: dict[str, Any] = {"quant": "fp8_static"}
    for name, descale in zip(("q", "k", "v"), descales):
        scale = q.new_ones((), dtype=torch.float32).expand(shape) if descale is None else descale
        if tuple(scale.shape) != shape or scale.dtype != torch.float32:
            raise InvalidCall(f"{function}: {name}_descale is {scale.dtype} {tuple(scale.shape)}; expected f32 {shape}, of each sequence and kv head")
        recipe[f"{name}_scale"] = scale
    return recipe


def _of_parts(rounding: dict[str, Any], seqused_q: Any, seqused_k: Any) -> dict[str, Any]:
    """The same for the sequences that `offsets_in_use` makes of each."""
    count = 1 + (seqused_q is not None) + (seqused_k is not None)
    return {name: value if name == "quant" else value.repeat_interleave(count, 0) for name, value in rounding.items()}


def _latent(function: str, q: Any, k: Any, v: Any, qv: Any) -> tuple[Any, Any]:
    """q and k whose product is q k + qv v. Where k lies behind v in each row, as in latent caches, nothing is copied."""
    if qv is None:
        return q, k
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise InvalidCall(f"{function}: qv has shape {tuple(qv.shape)}; expected that of q with head_dim_v, {(*q.shape[:-1], v.shape[-1])}")
    is_one = k.data_ptr() == v.data_ptr() + v.shape[-1] * v.element_size() and k.stride() == v.stride() and v.stride(-1) == 1
    if is_one and not (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)):
        joined = v.as_strided((*v.shape[:-1], v.shape[-1] + k.shape[-1]), v.stride())
        return torch.cat([qv, q], -1), joined
    return torch.cat([qv, q], -1), torch.cat([v, k], -1)


# ---- Dense and packed ----


def flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, dim] over k, v [batch, seqlen_k, heads_k, dim]; causal is bottom right.

    In float8_e4m3fn q, k and v are numbers times their descales, f32 [batch, heads_k], 1 where there are none; out is bf16.
    ``python -m fovea.compat list flash_attn_3`` has the arguments. Returns out; with `return_attn_probs` (out, lse).
    """
    _check("flash_attn_func", q, num_splits, attention_chunk)
    rounding = _recipe_of_codes("flash_attn_func", q, k, v, qv, (q_descale, k_descale, v_descale), q.shape[0])
    features = _features(q, v, qv, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin) | rounding
    q, k = _latent("flash_attn_func", q, k, v, qv)
    return attention(q, k, v, deterministic=deterministic, return_lse=return_attn_probs, **features)


def flash_attn_qkvpacked_func(
    qkv: Any, softmax_scale: float | None = None, causal: bool = False, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of qkv [batch, seqlen, 3, heads, dim], or [batch, seqlen, num_heads_q + 2 * heads_k, dim]."""
    if qkv.dim() == 5:
        q, k, v = parts_of("qkv", qkv, 3)
    elif num_heads_q is None:
        raise InvalidCall("flash_attn_qkvpacked_func: qkv has rank 4 without num_heads_q; expected [batch, seqlen, 3, heads, dim] or num_heads_q")
    else:
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, num_heads_k, num_heads_k], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, seqused_q: Any = None,
    seqused_k: Any = None, softmax_scale: float | None = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of packed sequences: q [total_q, heads, dim], k and v [total_k, heads_k, dim].

    Of each sequence the first `seqused_q` queries and `seqused_k` keys count; rows of other queries get out 0 and lse -inf.
    ``python -m fovea.compat list flash_attn_3`` has the arguments. Returns out; with `return_attn_probs` (out, lse [heads, total_q]).
    """
    function = "flash_attn_varlen_func"
    _check(function, q, num_splits, attention_chunk)
    rounding = _recipe_of_codes(function, q, k, v, qv, (q_descale, k_descale, v_descale), len(cu_seqlens_q) - 1)
    features = _features(q, v, qv, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin) | rounding
    q, k = _latent(function, q, k, v, qv)
    if seqused_q is not None or seqused_k is not None:
        cu_seqlens_q, cu_seqlens_k = offsets_in_use(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        features |= _of_parts(rounding, seqused_q, seqused_k)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    return attention(q, k, v, cu_seqlens=cu_seqlens, deterministic=deterministic, return_lse=return_attn_probs, **features)


# ---- Over a cache ----


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, page_table: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None, rotary_seqlens: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, dim] over a cache, behind whose rows k and v are written.

    With `cu_seqlens_q` q is packed. k_cache and v_cache are [slots, capacity, heads_k, dim], or pages [num_pages, page_size, heads_k, dim] of any size beside a
    `page_table`. ``python -m fovea.compat list flash_attn_3`` has the arguments. Returns out; with `return_softmax_lse` (out, lse,
    out_accum, lse_accum), the last two without elements: splits are joined already.
    """
    function = "flash_attn_with_kvcache"
    _check(function, q, num_splits, attention_chunk)
    _refuse_codes(function, q)
    check_append(function, k, v, cache_seqlens, rotary_cos, rotary_sin)
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise InvalidCall(f"{function}: cu_seqlens_q without max_seqlen_q; max_seqlen_q must be provided beside it")
    if cu_seqlens_k_new is not None and k is None:
        raise InvalidCall(f"{function}: cu_seqlens_k_new without k; expected the packed new keys")
    if cache_batch_idx is not None and page_table is not None:
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    seqlens = seqlens_of(cache_seqlens, batch, k_cache, page_table)
    num_new = 0 if k is None or cu_seqlens_k_new is not None else k.shape[1]
    check_room(function, "page_table", seqlens, num_new, k_cache, page_table)
    features = _features(q, v_cache, qv, softmax_scale, causal, window_size, attention_chunk, softcap, sm_margin)
    rotary = None
    if rotary_cos is not None and k is not None:
        starts = seqlens if rotary_seqlens is None else rotary_seqlens
        turning = Turning(rotary_cos, rotary_sin, rotary_interleaved, starts, cache_leftpad is None and rotary_seqlens is None)
        queries = Rows(q.shape[1]) if cu_seqlens_q is None else Rows(q.shape[0], cu_seqlens_q)
        keys = Rows(k.shape[1]) if cu_seqlens_k_new is None else Rows(k.shape[0], cu_seqlens_k_new)
        rotary = turning.rotary(queries, keys, causal or features["window"] is not None or attention_chunk > 0)
    if qv is not None:
        q, k_cache = _latent_cache(function, q, k_cache, v_cache, qv, k)
    packed = {} if cu_seqlens_q is None else {"cu_seqlens": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    scales = _scales_of(q, k_cache, v_cache, k_descale, v_descale)
    cache = KvCache(k_cache, v_cache, seqlens, page_table, cache_batch_idx, cache_leftpad, None, None, *scales)
    out, lse = attend_cache(function, q, cache, k, v, rotary=rotary, append_cu_seqlens=cu_seqlens_k_new, **packed, **features)
    if not return_softmax_lse:
        return out
    empty = q.new_empty(0, dtype=torch.float32)
    return out, lse, empty, empty


def _scales_of(q: Any, k_cache: Any, v_cache: Any, k_descale: Any, v_descale: Any) -> list[Any]:
    """Of caches in float8, [batch, heads_k]: 1 where none are given, as there. Of others they have no effect."""
    caches = ((k_cache, k_descale), (v_cache, v_descale))
    one = q.new_ones(1, dtype=torch.float32)
    return [(one if given is None else given) if "float8" in str(cache.dtype) else None for cache, given in caches]


def _latent_cache(function: str, q: Any, k_cache: Any, v_cache: Any, qv: Any, k: Any) -> tuple[Any, Any]:
    if k is not None:
        raise Unsupported(f"{function}: k beside qv; expected new keys written before (fovea.append_to_cache of the joined cache)")
    q, joined = _latent(function, q, k_cache, v_cache, qv)
    if joined.data_ptr() != v_cache.data_ptr():
        raise Unsupported(
            f"{function}: qv over caches that lie apart; expected v_cache and k_cache to be the first and the last columns of one tensor, "
            "cache[..., :head_dim_v] and cache[..., head_dim_v:], so that neither is copied"
        )
    return q, joined


def flash_attn_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> tuple[Any, Any]:
    """Joins results over parts of the keys.

    out_partial is [num_splits, batch, seqlen, heads, dim], lse_partial [num_splits, batch, seqlen, heads], both f32.
    Returns (out [batch, seqlen, heads, dim], f32 unless `out` or `out_dtype` is given; lse [batch, seqlen, heads] f32).
    """
    function = "flash_attn_combine"
    if out_partial.dtype != torch.float32 or lse_partial.dtype != torch.float32:
        raise InvalidCall(f"{function}: out_partial is {out_partial.dtype}, lse_partial {lse_partial.dtype}; only support fp32 data type")
    if not 1 <= len(out_partial) <= _MAX_SPLITS:
        raise InvalidCall(f"{function}: {len(out_partial)} splits; expected at least one, num_splits at most {_MAX_SPLITS}")
    outs, lses = list(out_partial), [lse.transpose(-1, -2).contiguous() for lse in lse_partial]
    while len(outs) > _MAX_MERGED:
        joined = [merge_states(outs[i : i + _MAX_MERGED], lses[i : i + _MAX_MERGED]) for i in range(0, len(outs), _MAX_MERGED)]
        outs, lses = [o for o, _ in joined], [lse for _, lse in joined]
    if out is None:
        out = torch.empty_like(outs[0], dtype=out_dtype or torch.float32)
    out, lse = merge_states(outs, lses, out=out)
    return out, lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int, cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16, headdim_v: int | None = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None, page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: Any = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """A tensor of i32 without elements, for `scheduler_metadata`: kernels here read lengths themselves."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
