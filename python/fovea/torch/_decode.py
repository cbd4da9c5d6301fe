"""`fovea.decode` and `fovea.append_to_cache` as operators of PyTorch, for graphs and modes: one that reads a cache, two that write to it.

    fovea::decode             out and lse of queries over a cache
    fovea::decode_append      the same after new keys and values were written; k and v are written
    fovea::append_to_cache    k and v are written
    fovea::decode_append_codes, fovea::append_codes_to_cache
                              the same of caches of codes, whose scales are written too

Eager calls do not come here. A gradient through a cache is refused when it is asked for, not when a graph is made: that has a backward
part wherever an input wants gradients, though nobody may ever run it.
"""

from __future__ import annotations

from typing import Any

import torch

from .._attention import lse_shape
from .._arrays import check_bias
from .._cache import CACHE_FIELDS, KvCache, Rotary, append_to_cache as _append_now, decode as _decode_now
from ..errors import Unsupported
from ._ops import _joined_masks, _library, _program, _text_and_captures

_FEATURES = (
    "Tensor[] tensors, str names, str score, str mask, bool causal, str align, int? left, int? right, float? scale, float? softcap, "
    "bool is_interleaved, bool sees_all_keys, SymInt max_seqlen_q, SymInt shared_prefix, int sm_margin, str refusal"
)
_library.define(f"decode(Tensor q, Tensor k, Tensor v, {_FEATURES}) -> (Tensor, Tensor)")
_library.define(f"decode_append(Tensor q, Tensor(k!) k, Tensor(v!) v, {_FEATURES}) -> (Tensor, Tensor)")
_library.define("append_to_cache(Tensor(k!) k, Tensor(v!) v, Tensor[] tensors, str names, bool is_interleaved) -> ()")
_SCALES = "Tensor(s!)? k_scale, Tensor(t!)? v_scale"
_library.define(f"decode_append_codes(Tensor q, Tensor(k!) k, Tensor(v!) v, {_SCALES}, {_FEATURES}) -> (Tensor, Tensor)")
_library.define(
    f"append_codes_to_cache(Tensor(k!) k, Tensor(v!) v, {_SCALES}, Tensor[] tensors, str names, bool is_interleaved) -> ()"
)
_library.define("refused_gradient(Tensor like, SymInt[] shape, str refusal) -> Tensor")

#: Tensors of a call by the names of `decode`'s arguments, beside those of the cache and of `rotary`.
_TENSORS = ("append_k", "append_v", "append_cu_seqlens", "cu_seqlens", "shared_cu_sequences", "bias", "alibi", "mask", "sinks")


# ---- Kernels ----


def _cache_of(k: Any, v: Any, given: dict[str, Any]) -> KvCache:
    return KvCache(k, v, **{name: given.get(name) for name in CACHE_FIELDS})


def _rotary_of(given: dict[str, Any], is_interleaved: bool) -> Rotary | None:
    if "rotary_cos" not in given:
        return None
    positions, positions_q = given.get("rotary_positions"), given.get("rotary_positions_q")
    return Rotary(given["rotary_cos"], given["rotary_sin"], positions, is_interleaved, positions_q)


def _decode(
    q: Any, k: Any, v: Any, tensors: list[Any], names: str, score: str, mask: str, causal: bool, align: str, left: int | None,
    right: int | None, scale: float | None, softcap: float | None, is_interleaved: bool, sees_all_keys: bool, max_seqlen_q: int,
    shared_prefix: int, sm_margin: int, refusal: str,
) -> Any:  # fmt: skip
    given = dict(zip(names.split(","), tensors))
    with torch.no_grad():
        return _decode_now(
            q, _cache_of(k, v, given), **{name: given.get(name) for name in _TENSORS}, rotary=_rotary_of(given, is_interleaved),
            score_mod=_program("score", score, given) if score else None, mask_mod=_program("mask", mask, given) if mask else None,
            causal=causal, align=align, window=None if left is None and right is None else (left, right), scale=scale,
            softcap=softcap, sees_all_keys=sees_all_keys, max_seqlen_q=max_seqlen_q, shared_prefix=shared_prefix,
            sm_margin=sm_margin, return_lse=True,
        )  # fmt: skip


def _append(k: Any, v: Any, tensors: list[Any], names: str, is_interleaved: bool) -> None:
    given = dict(zip(names.split(","), tensors))
    with torch.no_grad():
        rotary = _rotary_of(given, is_interleaved)
        _append_now(
            _cache_of(k, v, given), given["append_k"], given.get("append_v"), rotary, cu_seqlens=given.get("append_cu_seqlens")
        )


def _with_scales(names: str, tensors: list[Any], k_scale: Any, v_scale: Any) -> tuple[list[Any], str]:
    """Tensors and names of a call over numbers, scales among them."""
    scales = {name: scale for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if scale is not None}
    return [*tensors, *scales.values()], ",".join((names, *scales))


def _decode_codes(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, tensors: list[Any], names: str, *features: Any) -> Any:
    return _decode(q, k, v, *_with_scales(names, tensors, k_scale, v_scale), *features)


def _append_codes(k: Any, v: Any, k_scale: Any, v_scale: Any, tensors: list[Any], names: str, is_interleaved: bool) -> None:
    _append(k, v, *_with_scales(names, tensors, k_scale, v_scale), is_interleaved)


def _refused_gradient(like: Any, shape: list[int], refusal: str) -> Any:
    raise Unsupported(refusal)


def _fake_decode(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(tuple(q.shape), "bshd"), dtype=torch.float32)


def _fake_append(*_: Any) -> None:
    return None


def _fake_gradient(like: Any, shape: list[int], refusal: str) -> Any:
    return like.new_empty(shape)


for _name, _kernel, _fake in (
    ("decode", _decode, _fake_decode), ("decode_append", _decode, _fake_decode), ("append_to_cache", _append, _fake_append),
    ("refused_gradient", _refused_gradient, _fake_gradient), ("decode_append_codes", _decode_codes, _fake_decode),
    ("append_codes_to_cache", _append_codes, _fake_append),
):  # fmt: skip
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"fovea::{_name}", _fake, lib=_library)


class _Node(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(operator, features, scales, q, k, v, *tensors) -> (out, lse); scales: none, or the two of codes."""

    @staticmethod
    def forward(
        ctx: Any, operator: Any, features: tuple[Any, ...], scales: tuple[Any, ...], q: Any, k: Any, v: Any, *tensors: Any
    ) -> tuple[Any, Any]:
        ctx.refusal, ctx.shapes = features[-1], [x.shape for x in (q, k, v, *tensors)]
        with torch._C._AutoDispatchBelowAutograd():
            made: tuple[Any, Any] = operator(q, k, v, *scales, list(tensors), *features)
        return made

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        refuse = torch.ops.fovea.refused_gradient
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(refuse(dout, shape, ctx.refusal) if is_needed else None for shape, is_needed in zip(ctx.shapes, needed))


def _recorded(operator: Any, num_scales: int) -> Any:
    """The operator's kernel for autograd."""

    def record(q: Any, k: Any, v: Any, *others: Any) -> Any:
        scales, tensors, features = others[:num_scales], others[num_scales], others[num_scales + 1 :]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tensors)):
            return _Node.apply(operator, features, scales, q, k, v, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, *others)

    return record


for _name, _num_scales in (("decode", 0), ("decode_append", 0), ("decode_append_codes", 2)):
    _library.impl(_name, _recorded(getattr(torch.ops.fovea, _name), _num_scales), "Autograd")


# ---- Calls in a graph ----

# Before, a graph gave an operator that writes two views of one tensor a copy of each.
_TAKES_TWO_VIEWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)


def _check_views(function: str, is_latent: bool) -> None:
    if is_latent and not _TAKES_TWO_VIEWS:
        raise Unsupported(
            f"{function}: new keys without values, of a cache whose values are columns of its keys, in a graph of PyTorch {torch.__version__}; "
            "expected 2.6 or newer"
        )


def _given(cache: KvCache, rotary: Rotary | None, tensors: dict[str, Any]) -> dict[str, Any]:
    """All tensors but those of q and of the cache's rows."""
    given = {name: getattr(cache, name) for name in CACHE_FIELDS} | tensors
    if rotary is not None:
        given |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_positions": rotary.positions}
        given |= {"rotary_positions_q": rotary.positions_q}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def _taken_scales(given: dict[str, Any]) -> list[Any]:
    """Of codes: k_scale and v_scale, which the operator writes, no longer among the tensors that it reads."""
    scales = [given.pop(name, None) for name in ("k_scale", "v_scale")]
    return scales if any(scale is not None for scale in scales) else []


def decode(
    q: Any, cache: KvCache, *, refusal: str = "decode: a gradient through a KV cache; expected none: fovea.attention records them",
    append_k: Any = None, append_v: Any = None, append_cu_seqlens: Any = None, rotary: Rotary | None = None, sees_all_keys: bool = False,
    cu_seqlens: Any = None, max_seqlen_q: int = 0, shared_prefix: int = 0, shared_cu_sequences: Any = None, return_lse: bool = False,
    causal: bool = False, align: str = "bottom_right", window: Any = None, scale: float | None = None, softcap: float | None = None,
    bias: Any = None, alibi: Any = None, score_mod: Any = None, mask: Any = None, mask_mod: Any = None, sinks: Any = None,
    deterministic: bool = True, sm_margin: int = 0, **others: Any,
) -> Any:  # fmt: skip
    """`fovea.decode` where operators are watched; `refusal` is the error of who asks for a gradient. Forward is deterministic anyway."""
    if any(value is not None for value in others.values()):
        raise Unsupported(f"decode: {', '.join(others)} in a compiled graph; expected none of them")
    _check_views("decode", append_k is not None and append_v is None)
    check_bias(bias, "bias", "decode")
    tensors = {
        "append_k": append_k, "append_v": append_v, "append_cu_seqlens": append_cu_seqlens, "cu_seqlens": cu_seqlens,
        "shared_cu_sequences": shared_cu_sequences, "bias": bias, "alibi": alibi, "sinks": sinks,
    }  # fmt: skip
    if isinstance(mask, torch.Tensor):
        tensors["mask"], mask = mask, None
    seen = mask_mod if mask is None else mask if mask_mod is None else _joined_masks(mask, mask_mod)
    given, texts = _given(cache, rotary, tensors), {"score": "", "mask": ""}
    for kind, source in (("score", score_mod), ("mask", seen)):
        if source is not None:
            texts[kind], captures = _text_and_captures(kind, source)
            given |= {f"{kind}:{name}": tensor for name, tensor in captures.items()}
    left, right = (None, None) if window is None else window
    operator, scales = torch.ops.fovea.decode, []
    if append_k is not None:
        scales = _taken_scales(given)
        operator = torch.ops.fovea.decode_append_codes if scales else torch.ops.fovea.decode_append
    out, lse = operator(
        q, cache.k, cache.v, *scales, list(given.values()), ",".join(given), texts["score"], texts["mask"], causal, align, left, right, scale,
        softcap, rotary is not None and rotary.is_interleaved, sees_all_keys, max_seqlen_q, shared_prefix, sm_margin, refusal,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def append_to_cache(cache: KvCache, k: Any, v: Any, rotary: Rotary | None, cu_seqlens: Any) -> None:
    """`fovea.append_to_cache` where operators are watched."""
    _check_views("append_to_cache", v is None)
    given = _given(cache, rotary, {"append_k": k, "append_v": v, "append_cu_seqlens": cu_seqlens})
    is_interleaved = rotary is not None and rotary.is_interleaved
    scales = _taken_scales(given)
    operator = torch.ops.fovea.append_codes_to_cache if scales else torch.ops.fovea.append_to_cache
    operator(cache.k, cache.v, *scales, list(given.values()), ",".join(given), is_interleaved)
