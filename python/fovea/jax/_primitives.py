"""Attention as operations of JAX: derivatives in both modes, batching, and what they lower to.

`attention` has a derivative that is linear in the tangents, `jvp`; transposed it is `backward`. What moves `backward` along its
inputs is `second`, which is its own transpose, since a Hessian is symmetric. So jvp, grad, linearize, checkpoint and gradients of
gradients are JAX's own, over four operations.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._arrays import are_codes
from ..errors import InvalidArgument, Unsupported
from . import _batching, _calls, _sharding
from ._calls import Kind, named

#: Of what a forward call gives, for policies of jax.checkpoint.
OUT_NAME, LSE_NAME = "fovea_out", "fovea_lse"


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _primitive(name: str) -> Primitive:
    made = Primitive(f"fovea_{name}")
    made.multiple_results = True
    made.def_impl(lambda *args, **params: _jitted(made, tuple(params.items()))(*args))
    return made


attention_p = _primitive("attention")
jvp_p = _primitive("attention_jvp")
backward_p = _primitive("attention_backward")
second_p = _primitive("attention_second")


def _select(names: Sequence[str], flags: Sequence[bool]) -> list[str]:
    return [name for name, is_given in zip(names, flags) if is_given]


def _is_given(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0


def _zeros(like: Any) -> Any:
    return jnp.zeros(like.shape, like.dtype)


def _zero_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _instantiated(cotangent: Any) -> Any:
    return ad.instantiate_zeros(cotangent) if type(cotangent) is ad.Zero else cotangent


class _Seeds:
    """The arguments of backward and second: inputs, out, lse, dout, dlse where it is given, directions."""

    def __init__(self, args: Sequence[Any], kind: Kind, has_dlse: bool) -> None:
        count = len(kind.names)
        self.inputs, (self.out, self.lse) = args[:count], args[count : count + 2]
        self.seeds = args[count + 2 : count + 3 + has_dlse]
        self.directions = args[count + 3 + has_dlse :]
        self.operands = dict(zip(("dout", "dlse"), self.seeds))


# ---- What runs ----


def _run_attention(*inputs: Any, kind: Kind) -> list[Any]:
    out, lse = _calls.out_shapes(kind, inputs)
    return _calls.run("forward", kind, inputs, {}, {"out": out, "lse": lse})


def _run_jvp(*args: Any, kind: Kind, given: tuple[bool, ...]) -> list[Any]:
    count = len(kind.names)
    inputs, tangents = args[:count], args[count + 2 :]
    names = [named("{}_tangent", "captured_tangents", name) for name in _select(kind.names, given)]
    out, lse = _calls.out_shapes(kind, inputs)
    results = {"out": out, "lse": lse, "out_tangent": out, "lse_tangent": lse}
    return _calls.run("jvp", kind, inputs, dict(zip(names, tangents)), results)[2:]


def _run_backward(*args: Any, kind: Kind, has_dlse: bool, wanted: tuple[bool, ...]) -> list[Any]:
    given = _Seeds(args, kind, has_dlse)
    results = {named("d{}", "dcaptured", name): x for name, x, is_wanted in zip(kind.names, given.inputs, wanted) if is_wanted}
    return _calls.run("backward", kind, given.inputs, {"out": given.out, "lse": given.lse, **given.operands}, results)


def _run_second(*args: Any, kind: Kind, has_dlse: bool, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> list[Any]:
    parts = _Seeds(args, kind, has_dlse)
    names = [named("dd{}", "ddcaptured", name) for name in _select(kind.names, given)]
    operands = {"out": parts.out, "lse": parts.lse, **parts.operands, **dict(zip(names, parts.directions))}
    results = {named("grad_{}", "grad_captured", name): x for name, x, is_wanted in zip(kind.names, parts.inputs, wanted) if is_wanted}
    return _calls.run("double_backward", kind, parts.inputs, operands, results)


# ---- Shapes ----


def _attention_shapes(*inputs: Any, kind: Kind, **_: Any) -> list[Any]:
    return list(_calls.out_shapes(kind, inputs))


def _gradient_shapes(*args: Any, kind: Kind, wanted: tuple[bool, ...], **_: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, is_wanted in zip(args, wanted) if is_wanted]


# ---- Derivatives ----


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, kind: Kind) -> tuple[Any, Any]:
    out, lse = attention_p.bind(*primals, kind=kind)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    # By a mask there is no derivative: 0, as of comparisons of JAX.
    given = tuple(_is_given(x) and kind.has_derivative(name) for name, x in zip(kind.names, tangents))
    if not any(given):
        return (out, lse), (_zero_tangent(out), _zero_tangent(lse))
    if are_codes(primals[0]):
        raise InvalidArgument(f"attention: q is {primals[0].dtype} where it is differentiated; expected f32, f16 or bf16: codes have no gradients")
    along = (x for x, is_given in zip(tangents, given) if is_given)
    return (out, lse), jvp_p.bind(*primals, out, lse, *along, kind=kind, given=given)


def _jvp_transpose(cotangents: Sequence[Any], *args: Any, kind: Kind, given: tuple[bool, ...]) -> Any:
    count = len(kind.names)
    dout, dlse = cotangents
    has_dlse = type(dlse) is not ad.Zero
    seeds = (_instantiated(dout), dlse) if has_dlse else (_instantiated(dout),)
    return [None] * (count + 2) + backward_p.bind(*args[: count + 2], *seeds, kind=kind, has_dlse=has_dlse, wanted=given)


def _backward_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, kind: Kind, has_dlse: bool, wanted: tuple[bool, ...]
) -> tuple[Any, Any]:
    """`backward` is linear in its seeds; out and lse are functions of the inputs, along which `second` moves it."""
    params: dict[str, Any] = {"kind": kind, "has_dlse": has_dlse, "wanted": wanted}
    gradients = backward_p.bind(*primals, **params)
    count = len(kind.names)
    moved: list[Any] = []
    if any(map(_is_given, tangents[count + 2 :])):
        seeds = [x if _is_given(x) else _zeros(primal) for primal, x in zip(primals[count + 2 :], tangents[count + 2 :])]
        moved.append(backward_p.bind(*primals[: count + 2], *seeds, **params))
    given = tuple(_is_given(x) and kind.has_derivative(name) for name, x in zip(kind.names, tangents))
    if any(given):
        along = (x for x, is_given in zip(tangents, given) if is_given)
        moved.append(second_p.bind(*primals, *along, given=given, **params))
    if not moved:
        return gradients, [_zero_tangent(x) for x in gradients]
    return gradients, [functools.reduce(jnp.add, parts) for parts in zip(*moved)]


def _backward_transpose(cotangents: Sequence[Any], *args: Any, kind: Kind, has_dlse: bool, wanted: tuple[bool, ...]) -> Any:
    count = len(kind.names)
    directions = [_instantiated(x) for x in cotangents]
    moved = jvp_p.bind(*args[: count + 2], *directions, kind=kind, given=wanted)
    return [None] * (count + 2) + moved[: 1 + has_dlse]


def _second_transpose(
    cotangents: Sequence[Any], *args: Any, kind: Kind, has_dlse: bool, given: tuple[bool, ...], wanted: tuple[bool, ...]
) -> Any:
    fixed = args[: len(kind.names) + 3 + has_dlse]
    directions = [_instantiated(x) for x in cotangents]
    return [None] * len(fixed) + second_p.bind(*fixed, *directions, kind=kind, has_dlse=has_dlse, given=wanted, wanted=given)


def _refuse(what: str) -> Callable[..., Any]:
    def rule(*_: Any, **__: Any) -> Any:
        raise Unsupported(f"attention: {what}")

    return rule


# ---- Registration ----


def _define(primitive: Primitive, run: Callable[..., Any], shapes: Callable[..., Any], jvp: Any, transpose: Any) -> None:
    primitive.def_abstract_eval(lambda *args, **params: [_sharding.beside(args[0], x) for x in shapes(*args, **params)])
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batching.batch, primitive)
    _sharding.register_lowering(primitive, run, shapes)


_define(attention_p, _run_attention, _attention_shapes, _attention_jvp, None)
_define(
    jvp_p, _run_jvp, _attention_shapes, _refuse("a derivative of forward mode; take the inner one of the two in reverse mode"),
    _jvp_transpose,
)  # fmt: skip
_define(backward_p, _run_backward, _gradient_shapes, _backward_jvp, _backward_transpose)
_define(second_p, _run_second, _gradient_shapes, _refuse("a third derivative; expected two at most"), _second_transpose)
