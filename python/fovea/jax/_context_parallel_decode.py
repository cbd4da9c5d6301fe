"""Decoding over caches whose pages are dealt over the devices along an axis of a mesh: queries travel, partial results are merged.

All devices run one program; lengths are contents.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _abi
from .._cache import KvCache, Rotary, _check_cache
from .._forward import ScoreMod, _number
from .._joined import mask_program, score_program
from .._programs import Program
from ..errors import InvalidArgument
from ._attention import _traced, _with_arrays, array_of
from ._decode import over_cache
from ._sharding import alike

Array = Any
_FUNCTION = "context_parallel_decode"


class _Pages(NamedTuple):
    """This device's pages of whole sequences: page n lies on device n % size."""

    rank: Array
    size: int
    page_size: int

    def are_own(self, kv_idx: Array) -> Array:
        return kv_idx // self.page_size % self.size == self.rank

    def own(self, seqlens: Array) -> Array:
        """Keys of this device."""
        full = seqlens // self.page_size
        rest = jnp.where(full % self.size == self.rank, seqlens % self.page_size, 0)
        return (full + (self.size - 1 - self.rank)) // self.size * self.page_size + rest

    def placed(self, program: Program, seqlens: Array) -> Program:
        """Over positions and lengths of whole sequences."""
        places = {
            "kv_idx": "((kv_idx // page_size * num_ranks + page_rank) * page_size + kv_idx % page_size)",
            "seqlen_kv": "whole_seqlens[batch]",
        }
        rank = jnp.asarray(self.rank, jnp.int32)
        captures = {"page_size": self.page_size, "num_ranks": self.size, "page_rank": rank, "whole_seqlens": seqlens}
        return program.placed(places, captures)


class _New(NamedTuple):
    """New tokens whose pages are this device's, packed; the others stand behind the last sequence, where nobody looks."""

    order: Array
    kv_idx: Array
    cu_seqlens: Array

    def packed(self, x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[self.order]


def _new_tokens(pages: _Pages, seqlens: Array, count: int) -> _New:
    kv_idx = seqlens[:, None] + jnp.arange(count, dtype=seqlens.dtype)
    are_own = pages.are_own(kv_idx)
    order = jnp.argsort(~are_own.reshape(-1), stable=True)
    counts = jnp.pad(jnp.cumsum(are_own.sum(1)), (1, 0)).astype(seqlens.dtype)
    return _New(order, kv_idx, counts)


def _check(axis_name: str, q: Array, cache: KvCache, append_k: Array | None, append_v: Array | None) -> int:
    """The number of devices."""
    try:
        size = int(jax.lax.psum(1, axis_name))
    except NameError:
        raise InvalidArgument(f"{_FUNCTION}: no axis {axis_name!r} here; expected a call within jax.shard_map over a mesh that has it") from None
    _check_cache(cache, _FUNCTION)
    others = (cache.batch_idx, cache.left_padding, cache.page_indptr, cache.page_indices, cache.k_scale, cache.v_scale)
    if cache.page_table is None or any(x is not None for x in others):
        raise InvalidArgument(f"{_FUNCTION}: cache has no page_table, or slots, left padding, pages by offsets or scales; expected page_table and seqlens alone")
    if (append_k is None) != (append_v is None):
        raise InvalidArgument(f"{_FUNCTION}: one of append_k and append_v is given; expected both, or neither")
    for name, x in (("q", q), ("append_k", append_k), ("append_v", append_v)):
        if x is not None and x.ndim != 4:
            raise InvalidArgument(f"{_FUNCTION}: {name} has shape {x.shape}; expected four dimensions")
    batch = len(cache.seqlens)
    if len(q) not in (batch, batch / size):
        raise InvalidArgument(f"{_FUNCTION}: q has {len(q)} sequences; expected {batch}, all of cache.seqlens, or a {size}th of them")
    for name, x in (("append_k", append_k), ("append_v", append_v)):
        if x is not None and len(x) != len(q):
            raise InvalidArgument(f"{_FUNCTION}: {name} has {len(x)} sequences; expected {len(q)}, those of q")
    return size


def _merged(outs: Array, lses: Array) -> tuple[Array, Array]:
    """States of parts of the keys, [parts, rows, heads, head_dim] and [parts, heads, rows], as one: in the order of parts."""
    lse = functools.reduce(jnp.logaddexp, lses)
    weights = jnp.where(lses == -jnp.inf, 0, jnp.exp(lses - lse)).transpose(0, 2, 1)[..., None]
    return functools.reduce(jnp.add, weights * outs), lse


def context_parallel_decode(
    q: Array,
    cache: KvCache,
    *,
    axis_name: str,
    append_k: Array | None = None,
    append_v: Array | None = None,
    rotary: Rotary | None = None,
    sees_all_keys: bool = False,
    causal: bool = False,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    mask_mod: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention over caches whose pages are dealt over the devices along an axis of a mesh; called within `jax.shard_map`.

    Queries travel, which are few, and keys stay: every device attends to the keys that it has, and partial results are merged in the
    order of devices. There are no derivatives, as over every cache.

    Parameters
    ----------
    q, append_k, append_v : array, [batch, seqlen, heads, head_dim]
        Of all sequences, the same on every device; or of batch / size of them, device r those from r * batch / size on: then they travel
        to all devices, and partial results back.
    cache : KvCache
        Page n of every sequence lies on device n % size, in column n // size of this device's page_table. seqlens are those of whole
        sequences, the same on all devices. New tokens are written by the device that has their page.
    axis_name : str
        The axis of the mesh.
    rotary, sees_all_keys, causal, align, window, mask, mask_mod, scale, softcap, bias, alibi, score_mod, sinks
        As `fovea.jax.decode`'s; positions and lengths are those of whole sequences.
    return_lse : bool
        Whether `lse` is returned, too.

    Returns
    -------
    out : array
        Of the sequences of q.
    lse : array
        With `return_lse`.
    cache : KvCache
        This device's, with its new tokens; `seqlens` stays as it is.

    Raises
    ------
    InvalidArgument, Unsupported
        Where the call is traced: shapes and axis do not go together, or as `fovea.jax.decode`.

    Examples
    --------
    >>> decode = functools.partial(fovea.jax.context_parallel_decode, axis_name="context")
    >>> specs = KvCache(P("context"), P("context"), P(), page_table=P(None, "context"))
    >>> out, cache = jax.shard_map(decode, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False)(q, cache)
    """
    q = array_of(q, "q", _FUNCTION)
    append_k, append_v = (None if x is None else array_of(x, name, _FUNCTION) for x, name in ((append_k, "append_k"), (append_v, "append_v")))
    size = _check(axis_name, q, cache, append_k, append_v)
    pages = _Pages(jax.lax.axis_index(axis_name), size, cache.k.shape[1])
    (own, seqlen_q), batch = q.shape[:2], len(cache.seqlens)
    is_shared_out = own != batch

    def of_all(x: Array | None) -> Any:
        return jax.lax.all_gather(x, axis_name, axis=0, tiled=True) if x is not None and is_shared_out else x

    before = jnp.asarray(cache.seqlens)
    num_new = 0 if append_k is None else append_k.shape[1]
    after = before + num_new
    new = _new_tokens(pages, before, num_new)
    given = {"append_k": of_all(append_k), "append_v": of_all(append_v)}
    if append_k is not None:
        given = {name: new.packed(x) for name, x in given.items()} | {"append_cu_seqlens": new.cu_seqlens}

    def turned() -> Rotary | None:
        if rotary is None:
            return None
        of_queries = of_all(rotary.positions if rotary.positions_q is None else rotary.positions_q)
        if of_queries is None:
            of_queries = after[:, None] - seqlen_q + jnp.arange(seqlen_q)
        of_queries = of_queries.reshape(-1).astype(before.dtype)
        if append_k is None:
            return rotary._replace(positions=of_queries, positions_q=None)
        of_new = new.kv_idx if rotary.positions is None else of_all(rotary.positions)
        return rotary._replace(positions=new.packed(of_new[..., None])[:, 0].astype(before.dtype), positions_q=of_queries)

    words = {"causal": causal, "align": align, "window": window, "mask": _traced(mask, _abi.MASK_MOD), "segment_ids": None}
    words["mask_mod"] = _traced(mask_mod, _abi.MASK_MOD)
    is_unmasked = not causal and window is None and mask is None and mask_mod is None
    seen = None if is_unmasked and sees_all_keys else _with_arrays(mask_program({**words, "causal": causal or is_unmasked}))
    score = _with_arrays(score_program(bias, alibi, _traced(score_mod, _abi.SCORE_MOD)))
    if sinks is not None:  # joins one partial result, and with it the whole
        sinks = jnp.where(pages.rank == 0, array_of(sinks, "sinks", _FUNCTION), -jnp.inf)
    features = {
        "mask_mod": None if seen is None else pages.placed(seen, after), "score_mod": None if score is None else pages.placed(score, after),
        "scale": None if scale is None else _number(scale, "scale", _FUNCTION),
        "softcap": None if softcap is None else _number(softcap, "softcap", _FUNCTION), "sinks": sinks,
        "cu_seqlens": jnp.arange(batch + 1, dtype=before.dtype) * seqlen_q,
    }  # fmt: skip
    every_q = of_all(q)
    numbers = {"sees_all_keys": int(seen is None), "max_seqlen_q": seqlen_q, "shared_prefix": 0}
    here = KvCache(cache.k, cache.v, pages.own(before), page_table=cache.page_table)
    partial, lse, here = over_cache(
        _FUNCTION, every_q.reshape(-1, *q.shape[2:]), here, features, turned(), given, numbers, jnp.float32
    )
    partial, lse, keys, values, _ = alike((partial, lse, here.k, here.v, pages.rank))
    if is_shared_out:
        outs = jax.lax.all_to_all(partial.reshape(size, -1, *partial.shape[1:]), axis_name, 0, 0)
        lses = jax.lax.all_to_all(lse.reshape(len(lse), size, -1).transpose(1, 0, 2), axis_name, 0, 0)
    else:
        outs, lses = jax.lax.all_gather(partial, axis_name), jax.lax.all_gather(lse, axis_name)
    merged, merged_lse = _merged(outs, lses)
    out = merged.reshape(own, seqlen_q, *merged.shape[1:]).astype(q.dtype)
    made = KvCache(keys, values, cache.seqlens, page_table=cache.page_table)
    if not return_lse:
        return out, made
    return out, merged_lse.reshape(-1, own, seqlen_q).transpose(1, 0, 2), made
