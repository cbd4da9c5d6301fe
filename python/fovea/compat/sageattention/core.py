"""sageattention.core by Fovea: each function is a recipe, and attention with it.

A recipe has the rows that share a scale, the tiles, the format of p and v and the levels of sums of the function's kernel. Sums
are f32 here whatever `pv_accum_dtype` says of them.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import torch

from ..._arrays import causal_features
from ..._attention import attention
from ...errors import Unsupported
from ...torch._sdpa import check_mask, random_dropout
from .._flash import InvalidCall, without_gradient

#: Which kernels upstream has compiled: here none is needed before a call.
SM80_ENABLED = SM89_ENABLED = SM90_ENABLED = True

_LAYOUTS = {"HND": "bhsd", "NHD": "bshd"}
_GRANULARITIES = ("per_warp", "per_thread")
_LN2 = math.log(2.0)
#: Keywords of `fovea.attention` that these functions take beside their own.
_WORDS = (
    "align", "window", "softcap", "bias", "alibi", "score_mod", "mask", "mask_mod", "segment_ids", "sinks", "dropout", "quant",
    "cpu_target", "deterministic", "sm_margin",
)  # fmt: skip
#: Those of PyTorch's scaled_dot_product_attention, in whose place sageattn is put.
_SDPA_WORDS = ("attn_mask", "dropout_p", "scale", "enable_gqa")


def get_cuda_version() -> tuple[int | None, int | None]:
    """(major, minor) of the CUDA that PyTorch was built for; (None, None) of one without."""
    version = torch.version.cuda
    return (None, None) if version is None else tuple(map(int, version.split(".")[:2]))  # type: ignore[return-value]


def get_cuda_arch_versions() -> list[str]:
    """The architecture of each GPU: ["sm90"]."""
    return ["sm%d%d" % torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


# ---- Recipes ----


class _Tiles(NamedTuple):
    """Rows of q of a CTA and of a warp, and keys of a tile."""

    block_q: int = 128
    warp_q: int = 32
    block_kv: int = 64

    @property
    def text(self) -> str:
        return f"block_q={self.block_q},warp_q={self.warp_q},block_kv={self.block_kv}"


def _recipe(tiles: _Tiles, granularity: str, smooth_k: bool, values: str, has_two_levels: bool, smooth_v: bool = False) -> str:
    """The text of a recipe; `values` are the fields of p and v."""
    k_scales = "thread" if granularity == "thread" else "block"
    fields = f"qk=int8,q_scales={granularity},k_scales={k_scales},{values},{tiles.text}"
    fields += f",accumulation={'two' if has_two_levels else 'one'}_level"
    fields += ",smooth_k=sequence" if smooth_k else ""
    return fields + (",smooth_v=sequence" if smooth_v else "")


def _granularity(function: str, qk_quant_gran: str) -> str:
    if qk_quant_gran not in _GRANULARITIES:
        raise InvalidCall(f"{function}: qk_quant_gran is {qk_quant_gran!r}; expected one of {', '.join(map(repr, _GRANULARITIES))}")
    return qk_quant_gran.removeprefix("per_")


def _accumulation(function: str, pv_accum_dtype: str, expected: tuple[str, ...]) -> bool:
    """Whether sums have two levels."""
    if pv_accum_dtype not in expected:
        raise InvalidCall(f"{function}: pv_accum_dtype is {pv_accum_dtype!r}; expected one of {', '.join(map(repr, expected))}")
    return "+" in pv_accum_dtype


# ---- Calls ----


def _layout(function: str, tensor_layout: Any) -> str:
    if not isinstance(tensor_layout, str) or tensor_layout not in _LAYOUTS:
        raise InvalidCall(
            f"{function}: tensor_layout is {tensor_layout!r}; expected 'HND' or 'NHD' (scaled_dot_product_attention's attn_mask, "
            "dropout_p and is_causal by name)"
        )
    return _LAYOUTS[tensor_layout]


def _with_mask(function: str, mask: Any, factor: float, features: dict[str, Any]) -> None:
    """A bool mask hides keys, any other is added to the scores, times `factor`. [Nk], [Nq, Nk], [heads, ...] or [batch, ...]."""
    name = "mask" if mask.dtype == torch.bool else "bias"
    if features.get(name) is not None:
        raise InvalidCall(f"{function}: attn_mask of {mask.dtype} beside {name}; expected one of them")
    mask = mask if mask.dim() > 1 else mask[None]
    features[name] = mask if mask.dtype == torch.bool else mask if factor == 1 else mask.float() * factor


def _features(function: str, q: Any, is_causal: bool, sm_scale: Any, words: dict[str, Any], mask_factor: float = 1.0) -> dict[str, Any]:
    """What `fovea.attention` calls them."""
    for word in words:
        if word not in _WORDS + _SDPA_WORDS:
            raise InvalidCall(f"{function}: got {word}; expected, beside its own arguments, some of {', '.join(_SDPA_WORDS + _WORDS)}")
    features = {"align": "top_left", **{word: value for word, value in words.items() if word in _WORDS}}
    if words.get("scale") is not None:
        if sm_scale is not None:
            raise InvalidCall(f"{function}: scale is {words['scale']} beside sm_scale {sm_scale}; expected one of them")
        sm_scale = words["scale"]
    if words.get("dropout_p"):
        features["dropout"] = random_dropout(words["dropout_p"], q)
    features |= {"causal": is_causal, "scale": sm_scale}
    mask = words.get("attn_mask")
    causal = causal_features(mask)
    if causal is not None:
        if is_causal or "align" in words:
            raise InvalidCall(f"{function}: attn_mask is a CausalBias beside is_causal or align; expected it alone")
        features |= causal
    elif mask is not None:
        _with_mask(function, mask, mask_factor, features)
    return features


def _attend_by(function: str, q: Any, k: Any, v: Any, recipe: str, features: dict[str, Any]) -> Any:
    """`quant` of the caller's stands before the function's recipe."""
    features = {**features, "quant": features.get("quant") or recipe}

    def call() -> Any:
        try:
            with torch.no_grad():
                return attention(q, k, v, **features)
        except Unsupported as error:
            hint = "expected another recipe, quant='accurate' or 'fast', or quant='none' for sixteen bits"
            raise Unsupported(f"{function}: nothing here runs quant {features['quant']!r}; {hint}\n{error}") from error

    refusal = (
        f"{function}: a gradient through attention by a recipe; expected none: call it under torch.no_grad(), or fovea.attention "
        "without quant"
    )
    return without_gradient(refusal, call, q, k, v)


#: Recipes are no part of PyTorch's operators yet: a graph breaks here, once and silently.
_attend: Any = torch.compiler.disable(_attend_by)


def _dense(
    function: str, q: Any, k: Any, v: Any, tensor_layout: Any, recipe: str, is_causal: bool, sm_scale: Any, return_lse: bool,
    words: dict[str, Any], mask_factor: float = 1.0,
) -> Any:  # fmt: skip
    """(out, lse) with `return_lse`, else out, both as upstream gives them."""
    layout = _layout(function, tensor_layout)
    if words.get("attn_mask") is not None:
        heads, rows = (1, 2) if layout == "bhsd" else (2, 1)
        check_mask(function, words["attn_mask"], (q.shape[0], q.shape[heads], q.shape[rows], k.shape[rows]))
    features = _features(function, q, is_causal, sm_scale, words, mask_factor)
    return _attend(function, q, k, v, recipe, {"layout": layout, "return_lse": return_lse, **features})


def sageattn_qk_int8_pv_fp16_triton(
    q: Any, k: Any, v: Any, tensor_layout: str = "HND", quantization_backend: str = "triton", is_causal: bool = False,
    attn_mask: Any = None, sm_scale: float | None = None, smooth_k: bool = True, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """q and k in int8, a scale for 128 queries and for 64 keys; p and v in f16.

    A float `attn_mask` counts in powers of two, as upstream: ``bias=`` is in those of e. ``python -m fovea.compat list
    sageattention`` has the arguments. Returns out; with `return_lse` (out, lse [batch, heads, seqlen_q]).
    """
    function = "sageattn_qk_int8_pv_fp16_triton"
    if quantization_backend not in ("triton", "cuda"):
        raise InvalidCall(f"{function}: quantization_backend is {quantization_backend!r}; expected 'triton' or 'cuda'")
    recipe = _recipe(_Tiles(), "block", smooth_k, "pv=f16,p_max=1", has_two_levels=True)
    words = {**kwargs, "attn_mask": attn_mask}
    return _dense(function, q, k, v, tensor_layout, recipe, is_causal, sm_scale, return_lse, words, mask_factor=_LN2)


def sageattn_qk_int8_pv_fp16_cuda(
    q: Any, k: Any, v: Any, tensor_layout: str = "HND", is_causal: bool = False, qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None, pv_accum_dtype: str = "fp32", smooth_k: bool = True, smooth_v: bool = False,
    return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """q and k in int8 by warps or threads; p and v in f16, row sums of the rounded p.

    ``python -m fovea.compat list sageattention`` has the arguments. Returns out; with `return_lse` (out, lse).
    """
    function = "sageattn_qk_int8_pv_fp16_cuda"
    granularity = _granularity(function, qk_quant_gran)
    has_two_levels = _accumulation(function, pv_accum_dtype, ("fp16", "fp16+fp32", "fp32"))
    tiles = _Tiles(warp_q=16 if has_two_levels and q.shape[-1] > 64 else 32)  # upstream has fewer registers to spare there
    values = "pv=f16,p_max=1,row_sums=codes"
    recipe = _recipe(tiles, granularity, smooth_k, values, has_two_levels, smooth_v)
    return _dense(function, q, k, v, tensor_layout, recipe, is_causal, sm_scale, return_lse, kwargs)


def sageattn_qk_int8_pv_fp8_cuda(
    q: Any, k: Any, v: Any, tensor_layout: str = "HND", is_causal: bool = False, qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None, pv_accum_dtype: str = "fp32+fp16", smooth_k: bool = True, smooth_v: bool = False,
    return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """q and k in int8 by warps or threads; p in e4m3, v in e4m3 by channels.

    ``python -m fovea.compat list sageattention`` has the arguments. Returns out; with `return_lse` (out, lse).
    """
    function = "sageattn_qk_int8_pv_fp8_cuda"
    granularity = _granularity(function, qk_quant_gran)
    has_two_levels = _accumulation(function, pv_accum_dtype, ("fp32", "fp32+fp32", "fp32+fp16"))
    v_max = 2.25 if pv_accum_dtype == "fp32+fp16" else 448  # sums of 64 keys stay in the range of f16 there
    recipe = _recipe(_Tiles(), granularity, smooth_k, f"pv=e4m3,v_max={v_max}", has_two_levels, smooth_v)
    return _dense(function, q, k, v, tensor_layout, recipe, is_causal, sm_scale, return_lse, kwargs)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Any, k: Any, v: Any, tensor_layout: str = "HND", is_causal: bool = False, qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None, pv_accum_dtype: str = "fp32+fp32", smooth_k: bool = True, return_lse: bool = False,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """`sageattn_qk_int8_pv_fp8_cuda` with Hopper's tiles: 64 queries, 16 a warp, and 128 keys.

    ``python -m fovea.compat list sageattention`` has the arguments. Returns out; with `return_lse` (out, lse).
    """
    function = "sageattn_qk_int8_pv_fp8_cuda_sm90"
    granularity = _granularity(function, qk_quant_gran)
    has_two_levels = _accumulation(function, pv_accum_dtype, ("fp32+fp32",))
    smooth_v = bool(kwargs.pop("smooth_v", False))
    recipe = _recipe(_Tiles(64, 16, 128), granularity, smooth_k, "pv=e4m3", has_two_levels, smooth_v)
    return _dense(function, q, k, v, tensor_layout, recipe, is_causal, sm_scale, return_lse, kwargs)


#: What upstream runs on an architecture; on others, and on the CPU, what it runs on sm80.
_BACKENDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sm80": (sageattn_qk_int8_pv_fp16_cuda, {"pv_accum_dtype": "fp32"}),
    "sm86": (sageattn_qk_int8_pv_fp16_triton, {}),
    "sm89": (sageattn_qk_int8_pv_fp8_cuda, {"pv_accum_dtype": "fp32+fp16"}),
    "sm90": (sageattn_qk_int8_pv_fp8_cuda_sm90, {"pv_accum_dtype": "fp32+fp32"}),
    "sm120": (sageattn_qk_int8_pv_fp8_cuda, {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),
    "sm121": (sageattn_qk_int8_pv_fp8_cuda, {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),
}


def _backend_of(device: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    name = "sm%d%d" % torch.cuda.get_device_capability(device) if device.type == "cuda" else "cpu"
    return _BACKENDS.get(name, _BACKENDS["sm80"])


def sageattn(
    q: Any, k: Any, v: Any, tensor_layout: str = "HND", is_causal: bool = False, sm_scale: float | None = None,
    return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """The function of q's device: in e4m3 from compute capability 8.9 on, in f16 before and on the CPU.

    A float `attn_mask` is added to the scores, as scaled_dot_product_attention does it. ``python -m fovea.compat list
    sageattention`` has the arguments. Returns out; with `return_lse` (out, lse).
    """
    function, options = _backend_of(q.device)
    options = {**options, **kwargs}
    mask = options.get("attn_mask")
    if function is sageattn_qk_int8_pv_fp16_triton and mask is not None and mask.dtype != torch.bool and causal_features(mask) is None:
        options["attn_mask"] = mask.float() / _LN2  # which counts in powers of two
    return function(q, k, v, tensor_layout=tensor_layout, is_causal=is_causal, sm_scale=sm_scale, return_lse=return_lse, **options)


def sageattn_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
    sm_scale: float | None = None, smooth_k: bool = True, **kwargs: Any,
) -> Any:  # fmt: skip
    """`sageattn_qk_int8_pv_fp16_triton` of packed sequences: q [total_q, heads, dim], k and v [total_k, heads_k, dim].

    ``python -m fovea.compat list sageattention`` has the arguments. Returns out; with `return_lse` (out, lse [heads, total_q]).
    """
    function = "sageattn_varlen"
    recipe = _recipe(_Tiles(), "block", smooth_k, "pv=f16,p_max=1", has_two_levels=True)
    return_lse = bool(kwargs.pop("return_lse", False))
    features = _features(function, q, is_causal, sm_scale, kwargs)
    return _attend(function, q, k, v, recipe, {"cu_seqlens": (cu_seqlens_q, cu_seqlens_k), "return_lse": return_lse, **features})
