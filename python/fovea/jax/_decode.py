"""Decoding over a cache that is donated."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._cache import KvCache, Rotary, _CacheCall, _check_cache
from .._prepared import PreparedPlan
from ..errors import InvalidArgument, Unsupported
from . import _calls
from ._attention import FEATURES, arguments_of, array_of

Array = Any

_FIELDS = tuple(field.name for field in dataclasses.fields(KvCache))
jax.tree_util.register_dataclass(KvCache, data_fields=_FIELDS, meta_fields=())


def _beside_forward(cache: KvCache, rotary: Rotary | None, given: dict[str, Array | None]) -> dict[str, Array]:
    """What the call reads beside its inputs, by its names in the C struct."""
    if cache.page_indptr is not None or cache.page_indices is not None:
        raise InvalidArgument("decode: cache has page_indptr, which is of the host alone; expected a page_table")
    if cache.k_scale is not None or cache.v_scale is not None:
        raise Unsupported("decode: cache has k_scale or v_scale; expected none: JAX decodes over f32, f16 and bf16, codes are read outside of it")
    operands = {name: getattr(cache, name) for name in ("seqlens", "page_table", "batch_idx", "left_padding")}
    operands.update(given)
    if rotary is not None:
        operands |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_positions": rotary.positions}
        operands |= {"rotary_positions_q": rotary.positions_q}
    return {name: array_of(x, name, "decode") for name, x in operands.items() if x is not None}


def decode(
    q: Array,
    cache: KvCache,
    *,
    append_k: Array | None = None,
    append_v: Array | None = None,
    append_cu_seqlens: Array | None = None,
    rotary: Rotary | None = None,
    sees_all_keys: bool = False,
    cu_seqlens: Array | None = None,
    max_seqlen_q: int = 0,
    shared_prefix: int = 0,
    shared_cu_sequences: Array | None = None,
    return_lse: bool = False,
    **features: Any,
) -> Any:
    """Attention over the keys of a cache, after new ones were appended to it; gives the cache with them.

    Parameters and meanings are those of `fovea.decode`; here are only the differences. Arrays of JAX are not written: what comes back is
    another cache, in the memory of the one that was given where jit may take it (``donate_argnums``), else in a copy. There are no
    derivatives, as over every cache.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim_qk], f32, f16 or bf16
    cache : KvCache
        A pytree of arrays of JAX. Its seqlens are contents: jit compiles once for all of them.
    append_k, append_v : array, [batch, seqlen_new, num_heads_kv, head_dim], optional
        Both or neither.
    append_cu_seqlens, rotary, sees_all_keys, cu_seqlens, max_seqlen_q, shared_prefix, shared_cu_sequences
        As `fovea.decode`'s; the numbers are constants of the compiled program.
    return_lse : bool
        Whether `lse` is returned, too.
    **features
        Others of `attention`'s: window, softcap, score_mod, mask_mod, sinks, ...

    Returns
    -------
    out : array
    lse : array
        With `return_lse`.
    cache : KvCache
        `seqlens` stays as it is: add the appended tokens after the last layer.

    Raises
    ------
    InvalidArgument, Unsupported
        As `fovea.jax.attention`.

    Examples
    --------
    >>> step = jax.jit(fovea.jax.decode, donate_argnames="cache")
    >>> out, cache = step(q, cache=cache, append_k=k, append_v=v)
    """
    _check_cache(cache, "decode")
    if (append_k is None) != (append_v is None):
        raise InvalidArgument("decode: one of append_k and append_v is given; expected both, or neither")
    unknown = [name for name in features if name not in FEATURES or name == "layout"]
    if unknown:
        known = ", ".join(name for name in FEATURES if name != "layout")
        raise InvalidArgument(f"decode: {unknown[0]} is no option; expected one of {known}")
    given = {
        "append_k": append_k, "append_v": append_v, "append_cu_seqlens": append_cu_seqlens, "shared_cu_sequences": shared_cu_sequences,
    }  # fmt: skip
    numbers = {"sees_all_keys": int(sees_all_keys), "max_seqlen_q": max_seqlen_q, "shared_prefix": shared_prefix}
    out, lse, cache = over_cache("decode", q, cache, {**features, "cu_seqlens": cu_seqlens}, rotary, given, numbers)
    return (out, lse, cache) if return_lse else (out, cache)


def over_cache(
    function: str, q: Array, cache: KvCache, features: dict[str, Any], rotary: Rotary | None, given: dict[str, Array | None],
    numbers: dict[str, int], dtype: Any = None,
) -> tuple[Array, Array, KvCache]:  # fmt: skip
    """out, of q's dtype unless another one is given, lse, and the cache with the new tokens."""
    # A cache has lengths of its own.
    cu = None if features["cu_seqlens"] is None else (features["cu_seqlens"], None)
    arguments = arguments_of(function, q, cache.k, cache.v, {**FEATURES, **features, "cu_seqlens": cu})
    kind = _calls.kind_of(arguments)
    operands = _beside_forward(cache, rotary, given)
    numbers = {"is_interleaved": int(rotary is not None and rotary.is_interleaved), **numbers}
    _check(arguments, kind, operands, numbers)
    out, lse = _calls.out_shapes(kind, arguments.tensors)
    results = {"out": jax.ShapeDtypeStruct(out.shape, dtype or out.dtype), "lse": lse}
    if given.get("append_k") is not None:
        results |= {"k": arguments.tensors[1], "v": arguments.tensors[2]}
    made_out, made_lse, *written = _calls.run("decode", kind, arguments.tensors, operands, results, numbers)
    if written:
        cache = dataclasses.replace(cache, k=written[0], v=written[1])
    return made_out, made_lse, cache


def _check(arguments: Any, kind: _calls.Kind, operands: dict[str, Array], numbers: dict[str, int]) -> None:
    """Refuses what the library would."""
    forward = _calls.specs_of(arguments, kind, "decode")
    given = {name: _calls.spec_of(name, x, "decode") for name, x in operands.items()}
    flags = bool(numbers["is_interleaved"]), bool(numbers["sees_all_keys"])
    call = _CacheCall(forward, given, *flags, numbers["max_seqlen_q"], numbers["shared_prefix"])
    bound = call.template("decode").bind(call.tensors, (*call.words, 0, 0))
    pages = operands.get("page_table")
    capacity = arguments.tensors[1].shape[1] * (1 if pages is None else pages.shape[1])
    PreparedPlan("fovea_plan_create_decode", bound.address, capacity, is_on_host=True)
