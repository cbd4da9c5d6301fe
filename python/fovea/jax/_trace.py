"""Callables that use jax.numpy, as formulas: JAX writes down what they do, and each of its operations becomes a symbol's.

Arrays that a callable encloses are constants of what JAX wrote, traced ones too, so that jit, grad and vmap see them.
"""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import core

from .. import _abi
from .._programs import Program
from .._trace import (
    _REDUCTIONS, _SCORE_NAMES, MAX_ELEMENTS, Row, Symbol, _cast_all, _dtype_word, _Graph, _located, _Refusal, _result, call,
)  # fmt: skip
from ..errors import InvalidArgument, ProgramError

# Operations that are called here as there.
_SAME = {
    "add", "sub", "mul", "neg", "sign", "abs", "exp", "exp2", "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "sqrt", "rsqrt",
    "erf", "floor", "ceil", "pow", "square", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor",
}  # fmt: skip
_RENAMED = {
    "max": "maximum", "min": "minimum", "logistic": "sigmoid", "not": "invert", "is_finite": "isfinite",
    "shift_left": "lshift", "shift_right_arithmetic": "rshift",
}  # fmt: skip
_REDUCED = {"reduce_sum": "sum", "reduce_prod": "prod", "reduce_max": "amax", "reduce_min": "amin", "reduce_and": "all", "reduce_or": "any"}
# Functions of jax.numpy that are operators here; what they are made of would hide it from interval analysis.
_NAMED_CALLS = {"floor_divide": "floordiv", "remainder": "mod"}
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat2"}
_UNCHANGED = {"copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "sharding_constraint"}

Places = Sequence[Any]  # a number or a symbol for each dimension


def _plus(place: Any, other: Any) -> Any:
    """The sum of two places; numbers stay numbers."""
    if isinstance(place, int) and isinstance(other, int):
        return place + other
    if isinstance(other, Symbol):
        place, other = other, place
    return place if isinstance(other, int) and other == 0 else call("add", (place, other), {})


def _element(value: Any, places: Places) -> Any:
    return value.element(tuple(places)) if isinstance(value, Row) else value


def _row(graph: _Graph, shape: Sequence[int], element: Callable[[tuple[Any, ...]], Any]) -> Any:
    """An array of this shape; of rank 0 its one element."""
    return Row(graph, tuple(shape), element) if shape else graph.lift(element(()))


def _wraps(left: Any, right: Any) -> bool:
    """Whether this asks if a place that is never below 0 is: what jax.numpy does before each load."""
    return isinstance(left, Symbol) and left.is_natural and isinstance(right, Symbol) and right.graph.nodes[right.number] == ("name", "0")


def _is_false(value: Any) -> bool:
    return isinstance(value, Symbol) and bool(value.graph.nodes[value.number] == ("name", "false"))


class _Interpreter:
    """Runs what JAX wrote down over symbols."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants))
        values.update(zip(jaxpr.invars, arguments))

        def read(variable: Any) -> Any:
            return self.constant(variable.val) if hasattr(variable, "val") else values[variable]

        for equation in jaxpr.eqns:
            results = self.apply(equation, [read(variable) for variable in equation.invars])
            values.update(zip(equation.outvars, results))
        return [read(variable) for variable in jaxpr.outvars]

    def constant(self, value: Any) -> Any:
        """A number, or an array as a symbol of all its elements."""
        for type_ in (bool, int, float):
            if isinstance(value, type_):  # or a kind of it that JAX has for its own ends
                return self.graph.constant(type_(value))
        if not isinstance(value, core.Tracer) and not isinstance(value, jax.Array) and value.shape == ():
            return self.graph.constant(value.item())
        row = self.graph.capture(value)
        return row.element(()) if row.shape == () else row

    def apply(self, equation: Any, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if name in _CALLS:
            return self.call(equation.params, operands)
        if name in _UNCHANGED:
            return operands
        return [self.operation(name, equation, operands)]

    def call(self, params: dict[str, Any], operands: list[Any]) -> list[Any]:
        named = _NAMED_CALLS.get(params.get("name", ""))
        if named is not None:
            return [call(named, operands, {})]
        body = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
        constants = [self.constant(value) for value in getattr(body, "consts", ())]
        return self.run(getattr(body, "jaxpr", body), constants, operands)

    def operation(self, name: str, equation: Any, operands: list[Any]) -> Any:
        if name == "lt" and _wraps(*operands):
            return self.graph.constant(False)
        if name in _SAME or name in _RENAMED:
            return call(_RENAMED.get(name, name), operands, {})
        if name in _REDUCED:
            return self.reduce(_REDUCED[name], operands[0], equation.params["axes"])
        found = getattr(self, f"do_{name}", None)
        if found is None:
            raise _Refusal(f"{name} of JAX is not in the language of formulas (docs/guides/programs.md)")
        return found(equation, *operands)

    # ---- Numbers ----

    def do_div(self, _: Any, left: Any, right: Any) -> Any:
        return call("truediv" if self.is_float(left, right) else self.of_naturals("floordiv", left, right), (left, right), {})

    def do_rem(self, _: Any, left: Any, right: Any) -> Any:
        return call("fmod" if self.is_float(left, right) else self.of_naturals("mod", left, right), (left, right), {})

    def is_float(self, *values: Any) -> bool:
        return any(self.sample(value).type == "float" for value in values)

    def sample(self, value: Any) -> Symbol:
        return self.graph.lift(_element(value, (0,) * len(value.shape)))

    def of_naturals(self, name: str, *values: Any) -> str:
        if not all(self.sample(value).is_natural for value in values):
            raise _Refusal("an integer division of lax that rounds to zero; write // or % of jax.numpy")
        return name

    def do_select_n(self, _: Any, condition: Any, *cases: Any) -> Any:
        if len(cases) != 2:
            raise _Refusal(f"select_n of {len(cases)} cases; expected two")
        if _is_false(condition):
            return cases[0]
        return call("where", (condition, cases[1], cases[0]), {})

    def do_clamp(self, _: Any, least: Any, value: Any, greatest: Any) -> Any:
        return call("minimum", (call("maximum", (value, least), {}), greatest), {})

    def do_integer_pow(self, equation: Any, base: Any) -> Any:
        return call("pow", (base, self.graph.constant(equation.params["y"])), {})

    def do_round(self, equation: Any, value: Any) -> Any:
        if equation.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
            raise _Refusal("lax.round away from zero; write jnp.round, which rounds halves to even")
        return call("round", (value,), {})

    def do_convert_element_type(self, equation: Any, value: Any) -> Any:
        return _cast_all(value, _dtype_word(equation.params["new_dtype"]))

    # ---- Arrays ----

    def reduce(self, name: str, value: Any, axes: Sequence[int]) -> Any:
        count = math.prod(value.shape[axis] for axis in axes)
        if count > MAX_ELEMENTS:
            raise _Refusal(f"a reduction over {count} elements; expected at most {MAX_ELEMENTS}, which are written out")
        rest = [axis for axis in range(len(value.shape)) if axis not in axes]

        def element(place: Places) -> Symbol:
            at = dict(zip(rest, place))
            parts = []
            for inner in itertools.product(*(range(value.shape[axis]) for axis in axes)):
                whole = {**at, **dict(zip(axes, inner))}
                parts.append(self.graph.lift(_element(value, [whole[axis] for axis in range(len(value.shape))])))
            return _REDUCTIONS[name](self.graph, parts)

        return _row(self.graph, [value.shape[axis] for axis in rest], element)

    def do_dot_general(self, equation: Any, left: Any, right: Any) -> Any:
        (left_sums, right_sums), (left_batch, right_batch) = equation.params["dimension_numbers"]
        left_rest = [axis for axis in range(len(left.shape)) if axis not in (*left_sums, *left_batch)]
        right_rest = [axis for axis in range(len(right.shape)) if axis not in (*right_sums, *right_batch)]
        extents = [left.shape[axis] for axis in left_sums]
        num_batch, num_left = len(left_batch), len(left_rest)

        def element(place: Places) -> Symbol:
            shared = place[:num_batch]
            left_at = {**dict(zip(left_batch, shared)), **dict(zip(left_rest, place[num_batch:]))}
            right_at = {**dict(zip(right_batch, shared)), **dict(zip(right_rest, place[num_batch + num_left :]))}

            def product(inner: Places) -> Symbol:
                one, other = {**left_at, **dict(zip(left_sums, inner))}, {**right_at, **dict(zip(right_sums, inner))}
                parts = _element(left, [one[axis] for axis in sorted(one)]), _element(right, [other[axis] for axis in sorted(other)])
                return call("mul", parts, {})  # type: ignore[no-any-return]

            return self.reduce("sum", Row(self.graph, tuple(extents), product), range(len(extents)))  # type: ignore[no-any-return]

        return _row(self.graph, equation.outvars[0].aval.shape, element)

    def do_broadcast_in_dim(self, equation: Any, value: Any, *_: Any) -> Any:
        axes = equation.params["broadcast_dimensions"]

        def element(place: Places) -> Any:
            return _element(value, [0 if extent == 1 else place[axis] for extent, axis in zip(value.shape, axes)])

        return _row(self.graph, equation.params["shape"], element)

    def do_squeeze(self, equation: Any, value: Any) -> Any:
        return self.reshaped(value, equation.outvars[0].aval.shape)

    def do_expand_dims(self, equation: Any, value: Any) -> Any:
        return self.reshaped(value, equation.outvars[0].aval.shape)

    def do_reshape(self, equation: Any, value: Any, *_: Any) -> Any:
        return self.reshaped(value, equation.outvars[0].aval.shape)

    def reshaped(self, value: Any, shape: Sequence[int]) -> Any:
        wide = [axis for axis, extent in enumerate(value.shape) if extent != 1]
        new_wide = [axis for axis, extent in enumerate(shape) if extent != 1]
        if [value.shape[axis] for axis in wide] != [shape[axis] for axis in new_wide]:
            raise _Refusal(f"a reshape from {value.shape} to {tuple(shape)}; expected one that adds or drops dimensions of 1")

        def element(place: Places) -> Any:
            at = dict(zip(wide, (place[axis] for axis in new_wide)))
            return _element(value, [at.get(axis, 0) for axis in range(len(value.shape))])

        return _row(self.graph, shape, element)

    def do_transpose(self, equation: Any, value: Any) -> Any:
        order = equation.params["permutation"]

        def element(place: Places) -> Any:
            at = dict(zip(order, place))
            return _element(value, [at[axis] for axis in range(len(order))])

        return _row(self.graph, equation.outvars[0].aval.shape, element)

    def do_iota(self, equation: Any) -> Any:
        axis = equation.params["dimension"]
        made = Row(self.graph, equation.outvars[0].aval.shape, lambda place: self.graph.lift(place[axis]))
        return _cast_all(made, _dtype_word(equation.params["dtype"]))

    def do_concatenate(self, equation: Any, *values: Any) -> Any:
        axis = equation.params["dimension"]

        def element(place: Places) -> Any:
            at = place[axis]
            if isinstance(at, Symbol):
                raise _Refusal("an index of arrays that were joined; index each of them, and choose with jnp.where")
            for value in values:
                if at < value.shape[axis]:
                    return _element(value, (*place[:axis], at, *place[axis + 1 :]))
                at -= value.shape[axis]
            raise _Refusal("an index behind arrays that were joined")

        return _row(self.graph, equation.outvars[0].aval.shape, element)

    def do_slice(self, equation: Any, value: Any) -> Any:
        starts, strides = equation.params["start_indices"], equation.params["strides"]
        if strides is not None and any(stride != 1 for stride in strides):
            raise _Refusal("a slice with steps; expected a step of 1")
        return self.moved(value, starts, equation.outvars[0].aval.shape)

    def do_dynamic_slice(self, equation: Any, value: Any, *starts: Any) -> Any:
        return self.moved(value, starts, equation.outvars[0].aval.shape)

    def moved(self, value: Any, starts: Sequence[Any], shape: Sequence[int]) -> Any:
        return _row(self.graph, shape, lambda place: _element(value, [_plus(start, at) for start, at in zip(starts, place)]))

    def do_gather(self, equation: Any, value: Any, indices: Any) -> Any:
        params = equation.params
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        batching = tuple(getattr(numbers, "operand_batching_dims", ()))
        index_batching = tuple(getattr(numbers, "start_indices_batching_dims", ()))
        shape = equation.outvars[0].aval.shape
        of_slice = [axis for axis in range(len(sizes)) if axis not in (*numbers.collapsed_slice_dims, *batching)]
        of_indices = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]

        def element(place: Places) -> Any:
            at: list[Any] = [0] * len(sizes)
            for axis, offset in zip(of_slice, numbers.offset_dims):
                at[axis] = place[offset]
            outer = [place[axis] for axis in of_indices]
            for axis, index_axis in zip(batching, index_batching):
                at[axis] = outer[index_axis]
            for number, axis in enumerate(numbers.start_index_map):
                at[axis] = _plus(_element(indices, (*outer, number)), at[axis])
            return _element(value, at)

        return _row(self.graph, shape, element)


def _names_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Arrays as the callable calls them."""
    inner = getattr(function, "__func__", function)
    if not inspect.isfunction(inner):
        return
    seen = inspect.getclosurevars(inner)
    for group in (seen.nonlocals, seen.globals):
        for name, value in group.items():
            if isinstance(value, (jax.Array, core.Tracer)) or type(value).__module__ == "numpy":
                yield name, value


def _formula(graph: _Graph, kind: int, function: Callable[..., Any]) -> Symbol:
    names = _SCORE_NAMES if kind == _abi.SCORE_MOD else _SCORE_NAMES[1:]
    kinds = [jax.ShapeDtypeStruct((), jnp.float32 if name == "score" else jnp.int32) for name in names]
    written, shape = jax.make_jaxpr(function, return_shape=True)(*kinds)
    if not hasattr(shape, "dtype") or shape.shape != ():
        raise _Refusal("the callable returns no single number; expected " + ("a score" if kind == _abi.SCORE_MOD else "a condition"))
    interpreter = _Interpreter(graph)
    constants = [interpreter.constant(value) for value in written.consts]
    (result,) = interpreter.run(written.jaxpr, constants, [graph.variable(name) for name in names])
    return _result(graph, kind, result)


def trace(kind: int, function: Callable[..., Any]) -> Program:
    """The program that a callable of jax.numpy is.

    Raises
    ------
    TraceError
        Of what a formula cannot say.
    """
    word = ("score_mod", "mask_mod")[kind]
    graph = _Graph()
    graph.names += _names_of(function)
    try:
        symbol = _formula(graph, kind, function)
    except InvalidArgument:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, _Refusal) else f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if isinstance(error, jax.errors.TracerArrayConversionError):
            text += "; arrays that the callable indexes are to be JAX's: jnp.asarray(...)"
        elif isinstance(error, jax.errors.ConcretizationTypeError):
            text += "; write jnp.where(condition, a, b), &, | and ~ for if, and, or and not"
        raise _located(error, function, word, text) from (None if isinstance(error, _Refusal) else error)
    lets, formula = graph.text(symbol)
    try:
        return Program(kind, formula, graph.captures_of(symbol), lets)
    except ProgramError as error:
        raise _located(error, function, word, f"the formula {error.text!r} is refused: {error}") from None
