"""Attention of some rows over some keys, and what these keys contribute to gradients: the parts that devices add up."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _calls
from ._attention import FEATURES, arguments_of
from ._sharding import alike

Array = Any


class Rows(NamedTuple):
    """Rows of a forward call with what a loss says of them. `out` and `lse` are those of all keys that a row sees."""

    q: Array
    out: Array
    lse: Array
    dout: Array
    dlse: Array | None = None


class Gradients(NamedTuple):
    """Parts of sums, in f32; by `sinks` and by what scores capture, as `captured` names it. None where they were not asked for."""

    dq: Array = None
    dk: Array = None
    dv: Array = None
    dsinks: Array = None
    captured: dict[str, Array] = {}


def _run(operation: str, kind: _calls.Kind, inputs: tuple[Array, ...], operands: dict[str, Array], results: dict[str, Any]) -> tuple[Array, ...]:
    """The operation; results vary over a mesh as the inputs do, which JAX does not see."""
    return alike((*_calls.run(operation, kind, inputs, operands, results), inputs[0]))[:-1]


def attend(function: str, q: Array, k: Array, v: Array, features: dict[str, Any], dtype: Any = None) -> tuple[Array, Array]:
    """out, of q's dtype unless another one is given, and lse: no derivatives."""
    arguments = arguments_of(function, q, k, v, {**FEATURES, **features})
    kind = _calls.kind_of(arguments)
    _calls.check(arguments, kind)
    out, lse = _calls.out_shapes(kind, arguments.tensors)
    out = jax.ShapeDtypeStruct(out.shape, dtype or out.dtype)
    made_out, made_lse = _run("forward", kind, arguments.tensors, {}, {"out": out, "lse": lse})
    return made_out, made_lse


def differentiate(
    function: str, rows: Rows, k: Array, v: Array, features: dict[str, Any], wanted: tuple[str, ...] = ("q", "k", "v"),
    captured: tuple[str, ...] = (),
) -> Gradients:  # fmt: skip
    """What comes from these rows and keys alone; `wanted` are some of q, k, v and sinks."""
    arguments = arguments_of(function, rows.q, k, v, {**FEATURES, **features})
    kind = _calls.kind_of(arguments)
    by_name = dict(zip(kind.names, arguments.tensors))
    results = {f"d{name}": jax.ShapeDtypeStruct(by_name[name].shape, jnp.float32) for name in wanted if name in by_name}
    results |= {f"dcaptured:{name}": by_name[f"score:{name}"] for name in captured}
    operands = {"out": rows.out, "lse": rows.lse, "dout": rows.dout}
    if rows.dlse is not None:
        operands["dlse"] = rows.dlse
    made = dict(zip(results, _run("backward", kind, arguments.tensors, operands, results)))
    of_captured = {name: made.pop(f"dcaptured:{name}") for name in captured}
    return Gradients(**made, captured=of_captured)
