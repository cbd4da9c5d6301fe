"""Sharding over batch and heads: what each device computes of a call, inside jit's partitioner and inside shard_map.

Sequences, positions and head dims stay whole on each device. A formula that asks for the batch or for a head is shifted to the
device's part; gradients by what is shared over batch or heads are summed over the devices. Dropout is keyed by batch and head, so
that such calls stay whole.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
from jax import core
from jax._src import dispatch
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from ._calls import Kind, argument_names, result_names

# Axes of arrays: b batch, h heads of queries, g heads of keys; all else stays whole. Those of q, k, v and out in layout bshd.
_AXES = {
    "q": "b.h.", "k": "b.g.", "v": "b.g.", "out": "b.h.", "lse": "bh.", "bias": "bh..", "mask": "bh..", "alibi": "bh", "sinks": "h",
    "segments_q": "b.", "segments_kv": "b.", "q_scale": "bg", "k_scale": "bg", "v_scale": "bg",
}  # fmt: skip
_PACKED = {
    "q": ".h.", "k": ".g.", "v": ".g.", "out": ".h.", "lse": "h.", "segments_q": ".", "segments_kv": ".",
    "q_scale": ".g", "k_scale": ".g", "v_scale": ".g",
}  # fmt: skip


class _Split(NamedTuple):
    """Axes of the mesh that the batch and the heads are split over."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]


def _axes(name: str, kind: Kind, shape: Sequence[int], is_packed: bool) -> str:
    """What each dimension of an array is."""
    letters = _PACKED.get(name, _AXES.get(name, "")) if is_packed else _AXES.get(name, "")
    if not letters:
        return "." * len(shape)
    if kind.key.layout == "bhsd" and name in ("q", "k", "v", "out") and not is_packed:
        letters = letters[0] + letters[2] + letters[1] + letters[3]
    letters = letters[len(letters) - len(shape) :]
    return "".join("." if extent == 1 else letter for letter, extent in zip(letters, shape))


def _spec(letters: str, split: _Split) -> PartitionSpec:
    axes = {"b": split.batch, "h": split.heads, "g": split.heads, ".": ()}
    return PartitionSpec(*(axes[letter] or None for letter in letters))


def _split_of(mesh: Any, kind: Kind, letters: Sequence[str], shapes: Sequence[Any]) -> _Split:
    """How q, else k, else v came, as far as it can stay: whole sequences, whole groups of heads."""
    parts: dict[str, tuple[str, ...]] = {"b": (), "h": ()}
    for own, x in zip(letters[:3], shapes):
        for letter, axes in zip(own.replace("g", "h"), (*x.sharding.spec, *(None,) * len(own))):
            if letter in parts and axes is not None and not parts[letter]:
                parts[letter] = axes if isinstance(axes, tuple) else (axes,)
    if kind.key.dropout_p or set(parts["b"]) & set(parts["h"]):
        return _Split((), ())
    q, k = (dict(zip(own, x.shape)) for own, x in zip(letters[:2], shapes))
    counts = {"b": q.get("b", 1), "h": k.get("g", q.get("h", 1))}
    kept = [axes if counts[letter] % math.prod(mesh.shape[axis] for axis in axes) == 0 else () for letter, axes in parts.items()]
    return _Split(*kept)


# ---- A device's part of a call ----


def _shifted(kind: Kind, starts: dict[str, Any]) -> tuple[Kind, list[Any]]:
    """The same call with places counted from the device's part on, and the arrays that it reads for that."""
    names, arrays, texts = list(kind.names), [], []
    for word, text in (("score", kind.score), ("mask", kind.mask)):
        for place, start in starts.items():
            pattern = re.compile(rf"(?<![\w.]){place}\b")
            if not pattern.search(text):
                continue
            name = f"first_{place}"
            while name in text:
                name += "_"
            text = pattern.sub(f"({place} + {name})", text)
            names.append(f"{word}:{name}")
            arrays.append(start)
        texts.append(text)
    return kind._replace(names=tuple(names), score=texts[0], mask=texts[1]), arrays


def _starts(split: _Split, letters: Sequence[str], local: Sequence[Any]) -> dict[str, Any]:
    """The device's first sequence and heads, where they are not 0."""
    q, k = (dict(zip(own, x.shape)) for own, x in zip(letters[:2], local))
    starts = {}
    if split.batch:
        starts["batch"] = jax.lax.axis_index(split.batch) * q["b"]
    if split.heads:
        starts["q_head"] = jax.lax.axis_index(split.heads) * q["h"]
        if "g" in k:
            starts["kv_head"] = jax.lax.axis_index(split.heads) * k["g"]
    return {name: start.astype(jnp.int32) for name, start in starts.items()}


def _run_part(
    run: Callable[..., Any], split: _Split, letters: Sequence[str], result_letters: Sequence[str], args: Sequence[Any],
    params: dict[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    kind: Kind = params["kind"]
    count = len(kind.names)
    shifted, arrays = _shifted(kind, _starts(split, letters, args))
    params = {**params, "kind": shifted}
    for flags in ("given", "wanted"):
        if flags in params:
            params[flags] = (*params[flags], *(False,) * len(arrays))
    summed = []
    for own, x in zip(result_letters, run(*args[:count], *arrays, *args[count:], **params)):
        over = (split.batch if "b" not in own else ()) + (split.heads if "h" not in own and "g" not in own else ())
        summed.append(jax.lax.psum(x, over) if over else x)
    return tuple(summed)


# ---- jit ----


def _rule(letters: Sequence[str], result_letters: Sequence[str], has_groups: bool) -> SdyShardingRule:
    """Which dimensions are one, for the partitioner.

    Heads of queries and fewer heads of keys are two: the partitioner would cut an axis of the mesh to split both, which JAX cannot
    name. `partition` still splits them alike.
    """
    numbers = itertools.count()

    def factor(letter: str) -> str:
        if letter == ".":
            return f"n{next(numbers)}"
        return letter if has_groups else letter.replace("g", "h")

    def mappings(words: Sequence[str]) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*map(factor, own)) for own in words)

    return SdyShardingRule(mappings(letters), mappings(result_letters))


def _partitioned(run: Callable[..., list[Any]], shapes_of: Callable[..., Any], *args: Any, **params: Any) -> list[Any]:
    """`run`, which the partitioner may split."""
    kind: Kind = params["kind"]

    def letters_of(names: Sequence[str], arrays: Sequence[Any]) -> tuple[str, ...]:
        return tuple(_axes(name, kind, x.shape, is_packed=args[0].ndim == 3) for name, x in zip(names, arrays))

    letters = letters_of(argument_names(kind, params, len(args)), args)
    result_letters = letters_of(result_names(kind, params), shapes_of(*args, **params))

    def shardings(mesh: Any, split: _Split, words: Sequence[str]) -> tuple[Any, ...]:
        return tuple(NamedSharding(mesh, _spec(own, split)) for own in words)

    def infer(mesh: Any, arg_shapes: Sequence[Any], _: Any) -> tuple[Any, ...]:
        return shardings(mesh, _split_of(mesh, kind, letters, arg_shapes), result_letters)

    def partition(mesh: Any, arg_shapes: Sequence[Any], _: Any) -> Any:
        split = _split_of(mesh, kind, letters, arg_shapes)

        def part(*args: Any) -> tuple[Any, ...]:
            return _run_part(run, split, letters, result_letters, args, params)

        return mesh, part, shardings(mesh, split, result_letters), shardings(mesh, split, letters)

    made = custom_partitioning(lambda *args: tuple(run(*args, **params)))
    num_heads_q, num_heads_kv = (dict(zip(own, x.shape)).get(letter) for own, x, letter in zip(letters, args, "hg"))
    rule = _rule(letters, result_letters, has_groups=num_heads_q != num_heads_kv)
    made.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return list(made(*args))


def register_lowering(primitive: Any, run: Callable[..., list[Any]], shapes_of: Callable[..., Any]) -> None:
    """How a primitive that `run` computes is lowered; `shapes_of` gives its results' shapes."""
    whole = mlir.lower_fun(run, multiple_results=True)
    split = mlir.lower_fun(functools.partial(_partitioned, run, shapes_of), multiple_results=True)

    def lower(context: Any, *values: Any, **params: Any) -> Any:
        axes = context.module_context.axis_context
        # JAX's partitioner wants devices and a mesh by name: not there for one device or for none yet, nor inside of shard_map.
        has_mesh = getattr(axes, "abstract_mesh", None) is not None
        is_split = has_mesh and len(getattr(axes, "device_assignment", None) or ()) > 1
        return (split if is_split else whole)(context, *values, **params)

    mlir.register_lowering(primitive, lower)
    # JAX names the devices to lowerings that ask, as custom_partitioning's own primitive does; it has no public name for this. Without
    # it calls stay whole.
    dispatch.prim_requires_devices_during_lowering.add(primitive)


# ---- shard_map ----


def _varying(x: Any) -> frozenset[str]:
    """The axes of a mesh along which shard_map knows that an array varies."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # jax 0.9 and newer
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def alike(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """All as varying as any of them; transposed, a sum over the devices that shared one."""
    every: frozenset[str] = frozenset().union(*map(_varying, arrays))

    def cast(x: Any) -> Any:
        missing = tuple(every - _varying(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        older: Any = jax.lax
        return older.pvary(x, missing)

    return tuple(map(cast, arrays))


def beside(like: Any, x: Any) -> Any:
    """The abstract array of the shape and dtype of `x`, as varying as `like`."""
    sharding = like.sharding
    if sharding is not None and not sharding.mesh.empty:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(None,) * len(x.shape)))
        return like.update(shape=x.shape, dtype=x.dtype, sharding=sharding, weak_type=False)
    return core.ShapedArray(x.shape, x.dtype)
