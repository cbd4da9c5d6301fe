"""The four operators torch.ops.flash_attn_3 by Fovea, and the module flash_attn_3._C whose import hosts take for their being there.

`fovea.compat.install("flash_attn_3")` registers them unless another package has; PyTorch's own word "FA3"
(`torch.nn.attention.activate_flash_attention_impl`) runs on them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable

import torch

from ..._attention import attention, attention_backward, lse_shape
from ...errors import Unsupported
from ...torch._varlen import offsets_in_use
from .._flash import InvalidCall, compact, softcap_of, window_of
from . import (
    _check,
    _features,
    _latent,
    _of_parts,
    _recipe_of_codes,
    flash_attn_combine,
    flash_attn_with_kvcache,
)

_NAMESPACE = "flash_attn_3"

#: Arguments and defaults as FlashAttention-3 declares them: compiled graphs and PyTorch's own code pass them by position.
SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
    "float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, "
    "Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0) -> "
    "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)",
    "get_scheduler_metadata": "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, "
    "int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor",
}


class _Rows:
    """Rows of q, or of k and v, padded or packed: as packed rows, and back; no row moves."""

    def __init__(self, like: Any, cu_seqlens: Any) -> None:
        self._padded: tuple[int, int] | None = None
        if cu_seqlens is None:
            batch, seqlen = self._padded = like.shape[:2]
            cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=like.device) * seqlen
        self.cu_seqlens = cu_seqlens

    def pack(self, x: Any) -> Any:
        """[total, ...]."""
        return x if self._padded is None else x.flatten(0, 1)

    def unpack(self, rows: Any) -> Any:
        """The shape that `pack` took."""
        return rows if self._padded is None else rows.unflatten(0, self._padded)

    def pack_lse(self, lse: Any) -> Any:
        """[heads, total] of [batch, heads, seqlen] or of packed ones."""
        return self.pack(lse.transpose(-1, -2)).transpose(0, 1).contiguous()

    def unpack_lse(self, lse: Any) -> Any:
        """The shape that `pack_lse` took."""
        return self.unpack(lse.transpose(0, 1)).transpose(-1, -2).contiguous()


# ---- Kernels ----


def _over_cache(q: Any, k: Any, v: Any, cu_seqlens_q: Any, max_seqlen_q: int | None, seqused_q: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse) of queries over slots or pages."""
    if seqused_q is None:
        more = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "return_softmax_lse": True}
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, **options, **more)
        return out, lse
    if options["rotary_cos"] is not None:
        raise Unsupported("fwd: seqused_q beside rotary_cos; expected packed queries that all count: cu_seqlens_q alone")
    rows, longest = _Rows(q, cu_seqlens_q), q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    packed = rows.pack(q)
    used = compact(rows.cu_seqlens, packed.shape[0], end=seqused_q)
    qv = None if options["qv"] is None else used.pack(rows.pack(options["qv"]))
    out, lse = _over_cache(used.pack(packed), k, v, used.cu_seqlens, longest, None, {**options, "qv": qv})
    return rows.unpack(used.unpack(out)), rows.unpack_lse(used.unpack(lse, 1))


def _without_cache(
    q: Any, k: Any, v: Any, offsets: tuple[Any, Any], seqused: tuple[Any, Any], out: Any, features: dict[str, Any]
) -> tuple[Any, Any]:
    """(out, lse) of padded or packed rows; `out` is written where all are padded, or all packed, and all count."""
    if seqused == (None, None) and (offsets[0] is None) == (offsets[1] is None):
        packed: dict[str, Any] = {} if offsets[0] is None else {"cu_seqlens": offsets}
        made: tuple[Any, Any] = attention(q, k, v, out=out, return_lse=True, **packed, **features)
        return made
    queries, keys = _Rows(q, offsets[0]), _Rows(k, offsets[1])
    in_use = offsets_in_use(queries.cu_seqlens, keys.cu_seqlens, *seqused)
    features |= _of_parts({name: features[name] for name in ("q_scale", "k_scale", "v_scale") if name in features}, *seqused)
    made_out, lse = attention(queries.pack(q), keys.pack(k), keys.pack(v), cu_seqlens=in_use, return_lse=True, **features)
    return queries.unpack(made_out), queries.unpack_lse(lse)


def _no_elements(like: Any, count: int) -> list[Any]:
    return [like.new_empty(0, dtype=torch.float32) for _ in range(count)]


def _fwd(
    q: Any, k: Any, v: Any, k_new: Any = None, v_new: Any = None, q_v: Any = None, out: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None, seqused_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, page_table: Any = None, kv_batch_idx: Any = None,
    leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None, seqlens_rotary: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    is_rotary_interleaved: bool = False, scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """(out, lse, out_accum, lse_accum), the last two without elements: splits are joined."""
    _check("fwd", q, num_splits, attention_chunk)
    window_size = (window_size_left, window_size_right)
    cache = {
        "k": k_new, "v": v_new, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": kv_batch_idx,
        "cache_leftpad": leftpad_k, "page_table": page_table, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": seqlens_rotary,
    }  # fmt: skip
    is_cache = any(part is not None for part in cache.values())
    if is_cache and cu_seqlens_k is not None:
        raise InvalidCall("fwd: cu_seqlens_k over a cache; expected seqused_k, the length of each sequence")
    with torch.no_grad():
        if is_cache or (seqused_k is not None and cu_seqlens_k is None):
            options = {
                **cache, "qv": q_v, "cache_seqlens": seqused_k, "rotary_interleaved": is_rotary_interleaved, "causal": is_causal,
                "softmax_scale": softmax_scale, "window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap,
                "sm_margin": sm_margin,
            }  # fmt: skip
            made, lse = _over_cache(q, k, v, cu_seqlens_q, max_seqlen_q, seqused_q, options)
        else:
            batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
            rounding = _recipe_of_codes("fwd", q, k, v, q_v, (q_descale, k_descale, v_descale), batch)
            features = _features(q, v, q_v, softmax_scale, is_causal, window_size, attention_chunk, softcap, sm_margin) | rounding
            q, k = _latent("fwd", q, k, v, q_v)
            made, lse = _without_cache(q, k, v, (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k), out, features)
        if out is not None and made is not out:
            made = out.copy_(made)
    return made, lse, *_no_elements(q, 2)


def _bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any = None, dk: Any = None, dv: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None, seqused_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """(dq, dk, dv, delta) and four tensors without elements; delta is rowsum(dout * out), f32 in lse's shape."""
    features: dict[str, Any] = {
        "scale": softmax_scale, "causal": is_causal, "window": window_of((window_size_left, window_size_right), is_causal),
        "softcap": softcap_of(softcap), "deterministic": deterministic, "sm_margin": sm_margin,
    }  # fmt: skip
    with torch.no_grad():
        if cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None:
            got = attention_backward(dout, q, k, v, out, softmax_lse, **features)
            made = got.q, got.k, got.v
        else:
            queries, keys = _Rows(q, cu_seqlens_q), _Rows(k, cu_seqlens_k)
            got = attention_backward(
                queries.pack(dout), queries.pack(q), keys.pack(k), keys.pack(v), queries.pack(out), queries.pack_lse(softmax_lse),
                cu_seqlens=offsets_in_use(queries.cu_seqlens, keys.cu_seqlens, seqused_q, seqused_k), **features,
            )  # fmt: skip
            made = queries.unpack(got.q), keys.unpack(got.k), keys.unpack(got.v)
        gradients = [x if given is None else given.copy_(x) for given, x in zip((dq, dk, dv), made)]
        delta = (dout.float() * out).sum(-1).transpose(-1, -2).contiguous()
    return *gradients, delta, *_no_elements(q, 4)


def _fwd_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> tuple[Any, Any]:
    with torch.no_grad():
        return flash_attn_combine(out_partial, lse_partial, out, out_dtype)


def _get_scheduler_metadata(*arguments: Any) -> Any:
    """No elements: kernels read lengths themselves."""
    seqused_k = arguments[8]
    return seqused_k.new_empty(0, dtype=torch.int32)


# ---- Shapes, for compiled graphs ----


def _fake_fwd(q: Any, k: Any, v: Any, k_new: Any = None, v_new: Any = None, q_v: Any = None, out: Any = None, *_: Any) -> tuple[Any, ...]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1])) if out is None else out
    return out, q.new_empty(lse_shape(tuple(q.shape), "bshd"), dtype=torch.float32), *_no_elements(q, 2)


def _fake_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any = None, dk: Any = None, dv: Any = None, *_: Any
) -> tuple[Any, ...]:
    gradients = [like.new_empty(like.shape) if given is None else given for given, like in zip((dq, dk, dv), (q, k, v))]
    return *gradients, torch.empty_like(softmax_lse), *_no_elements(q, 4)


def _fake_fwd_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> tuple[Any, Any]:
    if out is None:
        out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype or torch.float32)
    batch, seqlen, heads = lse_partial.shape[1:]
    return out, lse_partial.new_empty(batch, heads, seqlen).transpose(-1, -2)


_KERNELS: dict[str, Callable[..., Any]] = {"fwd": _fwd, "bwd": _bwd, "fwd_combine": _fwd_combine, "get_scheduler_metadata": _get_scheduler_metadata}
_FAKES = {"fwd": _fake_fwd, "bwd": _fake_bwd, "fwd_combine": _fake_fwd_combine, "get_scheduler_metadata": _get_scheduler_metadata}
_OUTPUTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv"), "fwd_combine": ("out",)}


# ---- Without results that share memory with arguments, which PyTorch refuses in graphs ----


def _functional_schema(schema: str, written: str = "") -> str:
    """The schema without its marks of what is written, but for arguments `written`."""
    schema = re.sub(r"Tensor\(\w+!\)", "Tensor", schema)
    return re.sub(rf"\bTensor ({written})\b", r"Tensor(\1!) \1", schema) if written else schema


def _decomposed(name: str) -> Callable[..., Any]:
    """The operator by its twin, which makes tensors of its own; they are copied to those that were given."""
    signature = inspect.signature(_KERNELS[name])

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        given = [bound.arguments.pop(output, None) for output in _OUTPUTS[name]]
        twin = "append" if bound.arguments.get("k_new") is not None else name
        made = getattr(getattr(torch.ops, _NAMESPACE), f"functional_{twin}")(**bound.arguments)
        written = [x if output is None else output.copy_(x) for output, x in zip(given, made)]
        return *written, *made[len(written) :]

    return call


# ---- Registration ----


class Registration:
    """The operators in place, until `remove`."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")
        for name, schema in SCHEMAS.items():
            self._define(name, schema, name)
        for name in _OUTPUTS:
            self._define(f"functional_{name}", _functional_schema(SCHEMAS[name]), name)
            self._library.impl(name, _decomposed(name), "CompositeImplicitAutograd")
        # New keys are written to caches, which FlashAttention-3's schema does not say: graphs must know.
        self._define("functional_append", _functional_schema(SCHEMAS["fwd"], "k|v"), "fwd")

    def _define(self, name: str, schema: str, kernel: str) -> None:
        self._library.define(name + schema)
        for device in ("CPU", "CUDA"):
            self._library.impl(name, _KERNELS[kernel], device)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", _FAKES[kernel], lib=self._library)

    def remove(self) -> None:
        """Takes them away."""
        self._library._destroy()


def register() -> Registration | None:
    """Registers the operators; None, and nothing happens, where another package has."""
    there = getattr(torch.ops, _NAMESPACE)
    return None if any(hasattr(there, name) for name in SCHEMAS) else Registration()
