"""How queries and keys are split over a mesh: checked once, and kept for calls that do not say it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from contextvars import ContextVar
from typing import Any, Iterator, Optional

from .typing import Specs


@dataclasses.dataclass(frozen=True)
class AttentionSpecs:
    """Axes of the mesh for each dimension of queries, and of keys and values."""

    query_specs: Any = None
    kv_specs: Any = None


class Axes(enum.IntEnum):
    """Places of dimensions in specs."""

    batch = 0
    query_sequence = 1
    kv_sequence = 1
    heads = 2
    kv_heads = 2
    head_dim = 3


# Of the process, as the peer's; a block's are of the thread or task that is in it.
_of_process: Optional[AttentionSpecs] = None
_of_block: ContextVar[Optional[AttentionSpecs]] = ContextVar("fovea_kvax_attention_specs", default=None)


def checked(query_specs: Any, kv_specs: Any) -> AttentionSpecs:
    """The pair, where it is one that attention can be split by."""
    for name, specs in (("query_specs", query_specs), ("kv_specs", kv_specs)):
        if specs is None or len(specs) != 4:
            got = "None" if specs is None else len(specs)
            raise ValueError(f"{name} must have exactly 4 dimensions, got {got}.")
    q, kv = tuple(query_specs), tuple(kv_specs)
    if q[Axes.batch] != kv[Axes.batch]:
        raise ValueError("Batch dimension sharding must match between query_specs and kv_specs.")
    if q[Axes.head_dim] != kv[Axes.head_dim]:
        raise ValueError("head_dim dimension sharding must match between query_specs and kv_specs.")
    if kv[Axes.kv_sequence] is not None:
        raise ValueError(
            "Context parallelism with sharded key/value tensors is not supported. "
            "fovea.jax.context_parallel_attention has schemes for it, such as a ring."
        )
    if q[Axes.head_dim] is not None:
        raise ValueError("Sharding of attention_head_dim is not supported.")
    if kv[Axes.kv_heads] not in (None, q[Axes.heads]):
        raise ValueError(f"kv_specs split heads over {kv[Axes.kv_heads]!r}, query_specs over {q[Axes.heads]!r}; expected the same, or None.")
    return AttentionSpecs(q, kv)


def set_attention_specs(query_specs: Specs, kv_specs: Specs) -> None:
    """Sets the pair that holds outside of `attention_specs`, in every thread."""
    global _of_process
    _of_process = checked(query_specs, kv_specs)


def held_specs() -> Optional[AttentionSpecs]:
    """The pair that holds, or None where none was set."""
    return _of_block.get() or _of_process


def get_attention_specs() -> AttentionSpecs:
    """The pair that holds.

    Raises
    ------
    ValueError
        None was set.
    """
    found = held_specs()
    if found is None:
        raise ValueError("Attention specifications must be initialised: call within `with attention_specs(query_specs, kv_specs)`.")
    return found


@contextlib.contextmanager
def attention_specs(query_specs: Specs, kv_specs: Specs) -> Iterator[None]:
    """The pair that holds within a block, in its thread or task."""
    token = _of_block.set(checked(query_specs, kv_specs))
    try:
        yield
    finally:
        _of_block.reset(token)
