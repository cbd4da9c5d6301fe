"""vmap: one call over a larger batch where that says the same, else a loop of calls inside the XLA program."""

from __future__ import annotations

import re
from typing import Any, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ._calls import Kind, argument_names

_BATCH = re.compile(r"(?<![\w.])batch\b")
# Arrays with a batch, and their ranks with it.
_RANKS = {
    "q": 4, "k": 4, "v": 4, "out": 4, "lse": 3, "bias": 4, "mask": 4, "alibi": 2, "segments_q": 2, "segments_kv": 2,
    "q_scale": 2, "k_scale": 2, "v_scale": 2,
}  # fmt: skip


def _can_fold(kind: Kind, names: Sequence[str], dims: Sequence[Any], args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether the places may be sequences of a batch: nothing that they share varies, and no formula asks which is which."""
    if kind.key.dropout_p or args[0].ndim - (dims[0] is not None) != 4:
        return False
    if _BATCH.search(kind.score) or _BATCH.search(kind.mask):
        return False
    by_batch = ("q", "k", "v")
    wanted = [name for name, is_wanted in zip(kind.names, params.get("wanted", ())) if is_wanted]
    given = [name for name, is_given in zip(kind.names, params.get("given", ())) if is_given]
    if any(name not in by_batch for name in (*wanted, *given)):  # summed over all sequences, or of a shape that broadcasts
        return False
    return all(name in _RANKS for name, dim in zip(names, dims) if dim is not None)


def _fold(name: str, x: Any, dim: int | None, num_places: int, batch: int) -> Any:
    rank = _RANKS.get(name)
    if rank is None:  # what a formula reads, sinks: the same for all
        return x
    if dim is None:
        if x.ndim < rank or (x.shape[0] == 1 and name in ("bias", "mask")):
            return x  # broadcasts over the batch
        x = x[None]
    else:
        x = jnp.moveaxis(x, dim, 0)
        x = x.reshape(x.shape[0], *(1,) * (rank + 1 - x.ndim), *x.shape[1:])
    rest = x.shape[2:]
    return jnp.broadcast_to(x, (num_places, batch, *rest)).reshape(num_places * batch, *rest)


def _loop(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    varying = [jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims) if dim is not None]

    def at(parts: Sequence[Any]) -> Any:
        rest = iter(parts)
        return primitive.bind(*(x if dim is None else next(rest) for x, dim in zip(args, dims)), **params)

    return list(jax.lax.map(at, varying))


def batch(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    """The primitive at each place of a batch."""
    kind = params["kind"]
    names = argument_names(kind, params, len(args))
    if not _can_fold(kind, names, dims, args, params):
        results = _loop(primitive, args, dims, params)
    else:
        num_places = next(x.shape[dim] for x, dim in zip(args, dims) if dim is not None)
        q_shape = args[0].shape if dims[0] is None else jnp.moveaxis(args[0], dims[0], 0).shape[1:]
        folded = [_fold(name, x, dim, num_places, q_shape[0]) for name, x, dim in zip(names, args, dims)]
        results = [x.reshape(num_places, q_shape[0], *x.shape[1:]) for x in primitive.bind(*folded, **params)]
    return results, [0] * len(results)
