"""Python callables with FlexAttention's signatures, as formulas.

A callable is called once with symbols in place of numbers. Each operator on a symbol is written down; arrays that symbols index become
captures. The symbols look like scalars of the caller's array library: PyTorch's functions reach them by `__torch_function__`
(`tensor[symbol]` by a mode, since indexing asks nobody else), NumPy's by `__array_ufunc__`. NumPy gives no say in `array[symbol]`, so
arrays that a function encloses are replaced by symbols of the whole array before it is called.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import os
import sys
import types
from typing import Any, Callable, Iterator, Sequence

from . import _abi
from ._arrays import Array
from ._programs import Program
from .errors import InvalidArgument, ProgramError, TraceError

MAX_ELEMENTS = 256  # of a reduction, which writes each of them out

_SCORE_NAMES = ("score", "batch", "q_head", "q_idx", "kv_idx")
_WORDS = set(
    "score batch q_head kv_head q_idx kv_idx seqlen_q seqlen_kv let true false inf nan and or not bias alibi "
    "select min max abs floor ceil trunc round exp exp2 expm1 log log2 log1p tanh sqrt rsqrt sigmoid erf sin cos tan fmod pow int float".split()
)
_TYPES = ("bool", "int", "float")  # a later one wins where two meet


class _Refusal(Exception):
    """What a formula cannot say; `trace` adds the line."""


# ---- The formula under construction ----

# How strongly operators bind, as in docs/guides/programs.md.
_CHOICE, _ATOM = 1, 13
_BINDING = {"||": 2, "&&": 3, "<": 5, "<=": 5, ">": 5, ">=": 5, "==": 5, "!=": 5, "|": 6, "^": 7, "&": 8, "<<": 9, ">>": 9}
_BINDING |= {"+": 10, "-": 10, "*": 11, "/": 11, "//": 11, "%": 11}
_NOT, _UNARY = 4, 12
_COMPARISON = 5


class _Graph:
    """Nodes are (operator, operands): operands are numbers of earlier nodes; equal nodes are one."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self.types: list[str] = []
        self.is_natural: list[bool] = []  # proven >= 0
        self.captures: dict[str, Array] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.names: list[tuple[str, Any]] = []  # of arrays, as the caller calls them

    def add(self, type_: str, is_natural: bool, *node: Any) -> Symbol:
        key = (type_, *node)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.types.append(type_)
            self.is_natural.append(is_natural)
        return Symbol(self, number)

    def variable(self, name: str) -> Symbol:
        return self.add("float" if name == "score" else "int", name != "score", "name", name)

    def constant(self, value: Any) -> Symbol:
        if isinstance(value, bool):
            return self.add("bool", True, "name", "true" if value else "false")
        if isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                raise _Refusal(f"the integer {value} does not fit 32 bits, those of a formula's ints")
            return self.add("int", value >= 0, "name" if value >= 0 else "number", str(value))
        text = repr(float(value))
        return self.add("float", value >= 0, "name" if text[0] != "-" else "number", text)

    def capture(self, array: Array) -> Row:
        """The array as a symbol of all its elements."""
        for name, known in self.captures.items():
            if known is array:
                return self._row(name, array)
        name = self._new_name(array)
        self.captures[name] = array
        return self._row(name, array)

    def _new_name(self, array: Array) -> str:
        name = next((name for name, value in self.names if value is array), f"c{len(self.captures)}")
        # Without patterns: where their cache is empty, Dynamo of PyTorch 2.9 to 2.11 does not follow how one is made.
        is_name = name.isascii() and name.isidentifier() and name not in _WORDS
        if not is_name or (name[0] == "t" and name[1:].isdigit()):  # t0, t1, ... are parts of the formula
            name = f"c{len(self.captures)}"
        while name in self.captures:
            name += "_"
        return name

    def _row(self, name: str, array: Array) -> Row:
        kind = _element_type(array)

        def load(index: tuple[Any, ...]) -> Symbol:
            numbers = tuple(self.lift(place).number for place in index)
            return self.add(kind, kind == "bool", "load", name, *numbers)

        return Row(self, tuple(array.shape), load)

    def lift(self, value: Any) -> Symbol:
        """A symbol for a symbol, a number, or an array of rank 0."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, (bool, int, float)):
            return self.constant(value)
        if isinstance(value, Row):
            if value.shape == ():
                return value.element(())
            raise _Refusal(f"an array of shape {value.shape} where one number is needed; index it, or reduce it (sum, any, ...)")
        if _is_array(value):
            if type(value).__module__ == "numpy" and not hasattr(value, "__setitem__"):
                return self.constant(value.item())  # numpy.float32(3)
            return self.lift(self.capture(value))
        raise _Refusal(f"a {type(value).__name__} in a formula; expected numbers, arrays and what was computed of the arguments")

    # ---- As text ----

    def text(self, result: Symbol) -> tuple[tuple[tuple[str, str], ...], str]:
        """Named parts, those that stand more than once, and the formula."""
        uses = self._uses(result)
        texts: dict[int, tuple[str, int]] = {}
        lets: list[tuple[str, str]] = []
        for number in sorted(uses):
            text, binding = self._print(number, texts)
            is_atom = self.nodes[number][0] in ("name", "number") or (self.nodes[number][0] == "load" and len(text) < 12)
            if uses[number] > 1 and not is_atom:
                name = f"t{len(lets)}"
                lets.append((name, text))
                text, binding = name, _ATOM
            texts[number] = text, binding
        return tuple(lets), texts[result.number][0]

    def captures_of(self, result: Symbol) -> dict[str, Array]:
        """What the formula reads."""
        names = {self.nodes[number][1] for number in self._uses(result) if self.nodes[number][0] == "load"}
        return {name: array for name, array in self.captures.items() if name in names}

    def _uses(self, result: Symbol) -> dict[int, int]:
        """How often each node stands in the formula."""
        uses = {result.number: 0}
        for number in range(result.number, -1, -1):  # operands come before what is computed of them
            if number in uses:
                for operand in self._operands(number):
                    uses[operand] = uses.get(operand, 0) + 1
        return uses

    def _operands(self, number: int) -> tuple[int, ...]:
        kind, *rest = self.nodes[number]
        return () if kind in ("name", "number") else tuple(rest[1:])

    def _print(self, number: int, texts: dict[int, tuple[str, int]]) -> tuple[str, int]:
        kind, *rest = self.nodes[number]
        if kind == "name":
            return rest[0], _ATOM
        if kind == "number":
            return rest[0], _UNARY
        parts = [texts[operand] for operand in rest[1:]]
        if kind == "load":
            return (f"{rest[0]}[{', '.join(text for text, _ in parts)}]" if parts else rest[0]), _ATOM
        if kind == "call":
            return f"{rest[0]}({', '.join(text for text, _ in parts)})", _ATOM
        if kind == "choice":
            condition, one, other = (text if binding > _CHOICE else f"({text})" for text, binding in parts)
            return f"{condition} ? {one} : {other}", _CHOICE
        if kind == "prefix":
            (text, binding), own = parts[0], _NOT if rest[0] == "!" else _UNARY
            return f"{rest[0]}{text if binding > _UNARY else f'({text})'}", own
        own = _BINDING[rest[0]]
        (left, left_binding), (right, right_binding) = parts
        is_left_bare = left_binding > own or (left_binding == own and own != _COMPARISON)
        left = left if is_left_bare else f"({left})"
        right = right if right_binding > own else f"({right})"
        return f"{left} {rest[0]} {right}", own


def _is_array(value: Any) -> bool:
    if isinstance(value, slice):  # Dynamo asks no slice for attributes
        return False
    return hasattr(value, "shape") and (hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__"))


def _element_type(array: Array) -> str:
    name = str(array.dtype)
    if "bool" in name:
        return "bool"
    if "int" in name:
        return "int"
    if "float" in name:
        return "float"
    raise _Refusal(f"an array of dtype {name}; expected floats, integers or bools")


# ---- Operators ----


def _unified(graph: _Graph, *symbols: Symbol, least: str = "bool") -> list[Symbol]:
    """All of the type that wins among them."""
    type_ = max((least, *(symbol.type for symbol in symbols)), key=_TYPES.index)
    return [_cast(symbol, type_) for symbol in symbols]


def _cast(symbol: Symbol, type_: str) -> Symbol:
    graph = symbol.graph
    if symbol.type == type_:
        return symbol
    if symbol.type == "bool":
        one, zero = (graph.constant(1), graph.constant(0)) if type_ == "int" else (graph.constant(1.0), graph.constant(0.0))
        return graph.add(type_, True, "choice", "", symbol.number, one.number, zero.number)
    if type_ == "bool":
        return _compare("!=", symbol, graph.constant(0))
    return graph.add(type_, symbol.is_natural, "call", type_, symbol.number)


def _numbers(left: Symbol, right: Symbol) -> tuple[str, Symbol, Symbol]:
    """Two numbers, and the type of what is computed of them: an int beside a float is one without a word."""
    type_ = max("int", left.type, right.type, key=_TYPES.index)
    first, second = (_cast(symbol, type_) if symbol.type == "bool" else symbol for symbol in (left, right))
    return type_, first, second


def _compare(sign: str, left: Symbol, right: Symbol) -> Symbol:
    if left.type != right.type:
        _, left, right = _numbers(left, right)
    return left.graph.add("bool", True, "binary", sign, left.number, right.number)


def _arithmetic(sign: str) -> Callable[..., Symbol]:
    def apply(left: Symbol, right: Symbol) -> Symbol:
        type_, left, right = _numbers(left, right)
        natural = sign != "-" and left.is_natural and right.is_natural
        return left.graph.add(type_, natural, "binary", sign, left.number, right.number)

    return apply


def _divide(left: Symbol, right: Symbol, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return _floor_divide(left, right)
    _, dividend, divisor = _numbers(left, right)
    natural = left.is_natural and right.is_natural
    quotient = left.graph.add("float", natural, "binary", "/", dividend.number, divisor.number)
    if rounding_mode is None:
        return quotient
    if left.type == right.type == "int":
        raise _Refusal("an integer division that rounds to zero; write rounding_mode='floor', or // of numbers >= 0")
    return _unary("trunc")(quotient)


def _floor_divide(left: Symbol, right: Symbol) -> Symbol:
    type_, left, right = _numbers(left, right)
    natural = left.is_natural and right.is_natural
    return left.graph.add(type_, natural, "binary", "//", left.number, right.number)


def _remainder(left: Symbol, right: Symbol) -> Symbol:
    type_, left, right = _numbers(left, right)
    return left.graph.add(type_, right.is_natural, "binary", "%", left.number, right.number)


def _bits(sign: str, logic: str) -> Callable[..., Symbol]:
    def apply(left: Symbol, right: Symbol) -> Symbol:
        left, right = _unified(left.graph, left, right)
        if left.type == "float":
            raise _Refusal(f"{sign} of floats; expected bools or ints, such as comparisons give")
        if left.type == "bool":
            return left.graph.add("bool", True, "binary", logic, left.number, right.number)
        natural = (left.is_natural or right.is_natural) if sign == "&" else (left.is_natural and right.is_natural)
        return left.graph.add("int", natural, "binary", sign, left.number, right.number)

    return apply


def _shift(sign: str) -> Callable[..., Symbol]:
    def apply(left: Symbol, right: Symbol) -> Symbol:
        left, right = _unified(left.graph, left, right, least="int")
        if left.type == "float":
            raise _Refusal(f"{sign} of floats; expected ints")
        return left.graph.add("int", sign == ">>" and left.is_natural, "binary", sign, left.number, right.number)

    return apply


def _logic(sign: str) -> Callable[..., Symbol]:
    def apply(left: Symbol, right: Symbol) -> Symbol:
        return left.graph.add("bool", True, "binary", sign, _cast(left, "bool").number, _cast(right, "bool").number)

    return apply


def _negate(operand: Symbol) -> Symbol:
    (operand,) = _unified(operand.graph, operand, least="int")
    return operand.graph.add(operand.type, False, "prefix", "-", operand.number)


def _logical_not(operand: Symbol) -> Symbol:
    return operand.graph.add("bool", True, "prefix", "!", _cast(operand, "bool").number)


def _invert(operand: Symbol) -> Symbol:
    if operand.type == "float":
        raise _Refusal("~ of a float; expected a bool or an int")
    if operand.type == "bool":
        return _logical_not(operand)
    return operand.graph.add("int", False, "prefix", "~", operand.number)


_NATURAL_RESULTS = {"exp", "exp2", "sqrt", "rsqrt", "sigmoid"}


def _unary(name: str) -> Callable[..., Symbol]:
    def apply(operand: Symbol) -> Symbol:
        operand = _cast(operand, "float")
        return operand.graph.add("float", name in _NATURAL_RESULTS, "call", name, operand.number)

    return apply


def _rounding(name: str) -> Callable[..., Symbol]:
    def apply(operand: Symbol, decimals: Any = 0) -> Symbol:
        if _number_of(decimals) != 0:
            raise _Refusal("round to decimals; expected none")
        if operand.type != "float":
            return operand
        return operand.graph.add("float", operand.is_natural, "call", name, operand.number)

    return apply


def _absolute(operand: Symbol) -> Symbol:
    (operand,) = _unified(operand.graph, operand, least="int")
    return operand.graph.add(operand.type, True, "call", "abs", operand.number)


def _extremum(name: str) -> Callable[..., Symbol]:
    def apply(left: Symbol, right: Symbol) -> Symbol:
        left, right = _unified(left.graph, left, right, least="int")
        natural = (left.is_natural or right.is_natural) if name == "max" else (left.is_natural and right.is_natural)
        return left.graph.add(left.type, natural, "call", name, left.number, right.number)

    return apply


_minimum, _maximum = _extremum("min"), _extremum("max")


def _where(condition: Symbol, one: Symbol, other: Symbol) -> Symbol:
    one, other = _unified(condition.graph, one, other)
    natural = one.is_natural and other.is_natural
    number = _cast(condition, "bool").number
    return condition.graph.add(one.type, natural, "choice", "", number, one.number, other.number)


def _clamp(operand: Symbol, min: Symbol | None = None, max: Symbol | None = None) -> Symbol:  # noqa: A002
    if min is not None:
        operand = _maximum(operand, min)
    return operand if max is None else _minimum(operand, max)


def _number_of(value: Any) -> Any:
    """The number that a constant symbol is; None for every other symbol."""
    if not isinstance(value, Symbol):
        return value
    kind, *rest = value.graph.nodes[value.number]
    is_literal = kind == "name" and (rest[0][0] in "0123456789.-" or rest[0].startswith(("inf", "nan")))
    if kind == "number" or (is_literal and value.type != "bool"):
        return int(rest[0]) if value.type == "int" else float(rest[0])
    return None


def _power(base: Symbol, exponent: Symbol) -> Symbol:
    number = _number_of(exponent)
    if number is not None and number == int(number) and 1 <= number <= 4:
        result = base
        for _ in range(int(number) - 1):
            result = _OPERATIONS["mul"](result, base)
        return result if exponent.type == "int" else _cast(result, "float")
    if base.type == exponent.type == "int":
        if _number_of(base) == 2 and exponent.is_natural:
            return _shift("<<")(base.graph.constant(1), exponent)
        raise _Refusal("an integer to a power that varies; make one of them a float")
    base, exponent = _cast(base, "float"), _cast(exponent, "float")
    return base.graph.add("float", False, "call", "pow", base.number, exponent.number)


def _fmod(left: Symbol, right: Symbol) -> Symbol:
    if left.type != "float" and right.type != "float":
        raise _Refusal("fmod of integers; write %, whose result has the sign of the divisor, or make one of them a float")
    left, right = _cast(left, "float"), _cast(right, "float")
    return left.graph.add("float", left.is_natural, "call", "fmod", left.number, right.number)


def _sign(operand: Symbol) -> Symbol:
    graph, type_ = operand.graph, "int" if operand.type == "bool" else operand.type
    operand = _cast(operand, type_)
    zero, one, minus = (_cast(graph.constant(value), type_) for value in (0, 1, -1))
    # NaN is neither above nor below 0 and stays what it is.
    below = _where(_compare("<", operand, zero), minus, operand)
    return _where(_compare(">", operand, zero), one, below)


def _is_infinite(operand: Symbol) -> Symbol:
    return _compare("==", _absolute(_cast(operand, "float")), operand.graph.constant(math.inf))


def _scaled_add(sign: str) -> Callable[..., Symbol]:
    def apply(left: Symbol, right: Symbol, alpha: Symbol | None = None) -> Symbol:
        return _arithmetic(sign)(left, right if alpha is None else _arithmetic("*")(right, alpha))

    return apply


def _reversed(function: Callable[..., Symbol]) -> Callable[..., Symbol]:
    return lambda left, right: function(right, left)


_OPERATIONS: dict[str, Callable[..., Symbol]] = {
    "add": _scaled_add("+"),
    "sub": _scaled_add("-"),
    "mul": _arithmetic("*"),
    "truediv": _divide,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "pow": _power,
    "and": _bits("&", "&&"),
    "or": _bits("|", "||"),
    "xor": _bits("^", "!="),
    "lshift": _shift("<<"),
    "rshift": _shift(">>"),
    "neg": _negate,
    "pos": lambda operand: operand,
    "invert": _invert,
    "abs": _absolute,
    "logical_and": _logic("&&"),
    "logical_or": _logic("||"),
    "logical_xor": lambda left, right: _compare("!=", _cast(left, "bool"), _cast(right, "bool")),
    "logical_not": _logical_not,
    "minimum": _minimum,
    "maximum": _maximum,
    "where": _where,
    "clamp": _clamp,
    "clamp_min": _maximum,
    "clamp_max": _minimum,
    "fmod": _fmod,
    "sign": _sign,
    "square": lambda operand: _arithmetic("*")(operand, operand),
    "reciprocal": lambda operand: _divide(operand.graph.constant(1.0), operand),
    "relu": lambda operand: _maximum(operand, operand.graph.constant(0)),
    "silu": lambda operand: _arithmetic("*")(operand, _unary("sigmoid")(operand)),
    "isnan": lambda operand: _compare("!=", operand, operand),
    "isinf": _is_infinite,
    "isfinite": lambda operand: _compare("<", _absolute(_cast(operand, "float")), operand.graph.constant(math.inf)),
}
_OPERATIONS |= {name: functools.partial(_compare, sign) for name, sign in
                (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="))}  # fmt: skip
_OPERATIONS |= {name: _unary(name) for name in
                "exp exp2 expm1 log log2 log1p tanh sqrt rsqrt sigmoid erf sin cos tan".split()}  # fmt: skip
_OPERATIONS |= {name: _rounding(name) for name in ("floor", "ceil", "trunc", "round")}
_OPERATIONS |= {f"r{name}": _reversed(_OPERATIONS[name]) for name in
                "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}  # fmt: skip

# Other names of the same, in PyTorch and NumPy.
_ALIASES = {
    "subtract": "sub", "multiply": "mul", "div": "truediv", "divide": "truediv", "true_divide": "truediv",
    "floor_divide": "floordiv", "remainder": "mod", "power": "pow", "float_power": "pow", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "invert", "bitwise_invert": "invert",
    "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "left_shift": "lshift", "right_shift": "rshift",
    "negative": "neg", "positive": "pos", "absolute": "abs", "fabs": "abs", "clip": "clamp", "sgn": "sign", "fix": "trunc",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
    "rint": "round", "expit": "sigmoid", "rdiv": "rtruediv", "rsub": "rsub",
}  # fmt: skip


# ---- Symbols ----


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, (Symbol, Row))


def _graph_of(values: Sequence[Any]) -> _Graph:
    return next(value.graph for value in values if isinstance(value, (Symbol, Row)))


def _needs_a_value(what: str, remedy: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise _Refusal(f"{what} needs a number where the formula has a symbol; {remedy}")

    return refuse


_ONE_BY_ONE = "write torch.where(condition, a, b), &, | and ~ for if, and, or and not; torch.minimum and torch.maximum for min and max"


class _Symbolic:
    """Operators and methods of both kinds of symbols."""

    graph: _Graph

    __hash__ = None  # type: ignore[assignment]
    __bool__ = _needs_a_value("a Python if, and, or, not, min or max", _ONE_BY_ONE)
    __index__ = _needs_a_value("indexing a list, tuple or range", "index a tensor or an array")
    __int__ = _needs_a_value("int()", "write x.to(torch.int32)")
    __float__ = _needs_a_value("float()", "write x.to(torch.float32)")
    __iter__ = _needs_a_value("a loop", "loop over numbers, and index by them")
    __len__ = _needs_a_value("len()", "use a number")
    __contains__ = _needs_a_value("in", "write comparisons joined by |")
    __array__ = _needs_a_value(
        "an array", "arrays that a formula indexes are variables that the function encloses, or globals; PyTorch tensors may be anywhere"
    )
    item = _needs_a_value("item()", "use it as it is")
    tolist = _needs_a_value("tolist()", "use it as it is")
    __setitem__ = _needs_a_value("an assignment to an element", "write torch.where(condition, new, old)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_") and _known(name[:-1]):
            raise _Refusal(f"{name}() writes in place; write x = x.{name[:-1]}(...)")
        if not _known(name):
            raise _Refusal(f"{name} is not in the language of formulas (docs/guides/programs.md)")
        return lambda *args, **kwargs: call(name, (self, *args), kwargs)

    @property
    def device(self) -> Any:
        torch = sys.modules.get("torch")
        return torch.device("cpu") if torch else "cpu"

    @property
    def is_cuda(self) -> bool:
        return False

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return self.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(_name_of(function), args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs.get("out") is not None:
            raise _Refusal(f"numpy.{ufunc.__name__}.{method} is not in the language of formulas")
        return call(ufunc.__name__, inputs, {})

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return call(function.__name__, args, kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Any, *others: Any) -> Any:
        return call(name, (self, *others), {})

    return apply


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(_Symbolic, f"__{_name}__", _operator(_name))
    setattr(_Symbolic, f"__r{_name}__", _operator(f"r{_name}"))
for _name in "lt le gt ge eq ne neg pos invert abs matmul rmatmul".split():
    setattr(_Symbolic, f"__{_name}__", _operator(_name))


class Symbol(_Symbolic):
    """One number or truth value of a formula."""

    __slots__ = ("graph", "number")

    def __init__(self, graph: _Graph, number: int) -> None:
        self.graph = graph
        self.number = number

    @property
    def type(self) -> Any:
        return self.graph.types[self.number]

    @property
    def is_natural(self) -> bool:
        return self.graph.is_natural[self.number]

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> Any:
        names = {"bool": "bool", "int": "int32", "float": "float32"}
        library = sys.modules.get("torch") or sys.modules.get("numpy")
        return getattr(library, names[self.type]) if library else names[self.type]

    def __getitem__(self, index: Any) -> Any:
        if index in ((), Ellipsis):
            return self
        raise _Refusal("a number is indexed; expected an array")

    def __repr__(self) -> str:
        lets, formula = self.graph.text(self)
        return "".join(f"let {name} = {part}; " for name, part in lets) + formula


class Row(_Symbolic):
    """Some elements of an array, or what is computed of them one by one; written out only where they are reduced."""

    __slots__ = ("graph", "shape", "element")

    def __init__(self, graph: _Graph, shape: tuple[int, ...], element: Callable[[tuple[Any, ...]], Symbol]) -> None:
        self.graph = graph
        self.shape = shape
        self.element = element

    @property
    def dtype(self) -> Any:
        return self.element((0,) * len(self.shape)).dtype

    def __getitem__(self, index: Any) -> Any:
        return _index(self, index if isinstance(index, tuple) else (index,))

    def indices(self) -> Iterator[tuple[int, ...]]:
        count = math.prod(self.shape)
        if count > MAX_ELEMENTS:
            raise _Refusal(f"a reduction over {count} elements; expected at most {MAX_ELEMENTS}, which are written out")
        return itertools.product(*(range(extent) for extent in self.shape))


def _index(row: Row, index: tuple[Any, ...]) -> Any:
    """What basic indexing gives, where integers may be symbols."""
    num_given = sum(place is not Ellipsis for place in index)
    if num_given > len(row.shape):
        raise _Refusal(f"{num_given} indices of an array of rank {len(row.shape)}")
    missing = len(row.shape) - num_given
    if Ellipsis in [place for place in index if not _is_symbolic(place) and not _is_array(place)]:
        at = next(i for i, place in enumerate(index) if place is Ellipsis)
        index = (*index[:at], *(slice(None),) * missing, *index[at + 1 :])
    else:
        index = (*index, *(slice(None),) * missing)
    fixed: list[Any] = []  # a place for each dimension: a number, or a range that stays a dimension
    for extent, place in zip(row.shape, index):
        fixed.append(range(extent)[place] if isinstance(place, slice) else _place(row.graph, place, extent))
    shape = tuple(len(place) for place in fixed if isinstance(place, range))

    def element(inner: tuple[Any, ...]) -> Symbol:
        rest = iter(inner)
        return row.element(tuple(_within(place, next(rest)) if isinstance(place, range) else place for place in fixed))

    made = Row(row.graph, shape, element)
    return made if shape else made.element(())


def _within(place: range, inner: Any) -> Any:
    if not isinstance(inner, Symbol):
        return place[inner]
    if (place.start, place.step) == (0, 1):
        return inner
    graph = inner.graph
    return _arithmetic("+")(_arithmetic("*")(inner, graph.constant(place.step)), graph.constant(place.start))


def _place(graph: _Graph, place: Any, extent: int) -> Any:
    """An index of one dimension; negative ones count from the end."""
    if place is None:
        raise _Refusal("None in an index; expected numbers, slices and symbols")
    symbol = graph.lift(place)
    number = _number_of(symbol)
    if symbol.type != "int":
        raise _Refusal(f"an index of type {symbol.type}; expected an int" + (" (write torch.where for a bool mask)" if symbol.type == "bool" else ""))
    if number is not None:
        if not -extent <= number < extent:
            raise _Refusal(f"index {number} of a dimension of {extent} elements")
        return number % extent
    if symbol.is_natural:
        return symbol
    return _where(_compare("<", symbol, graph.constant(0)), _arithmetic("+")(symbol, graph.constant(extent)), symbol)


# ---- Calls of functions and methods ----


def _tree(graph: _Graph, elements: list[Symbol], function: Callable[..., Symbol]) -> Symbol:
    """Pairs of pairs: calls nest at most 200 deep."""
    while len(elements) > 1:
        pairs = [function(*pair) for pair in zip(elements[::2], elements[1::2])]
        elements = pairs + elements[len(pairs) * 2 :]
    return elements[0]


def _chain(elements: list[Symbol], function: Callable[..., Symbol]) -> Symbol:
    """From left to right: a flat sum nests once."""
    return functools.reduce(function, elements)


def _sum(graph: _Graph, elements: list[Symbol]) -> Symbol:
    return _chain(elements, _arithmetic("+")) if elements else graph.constant(0)


def _mean(graph: _Graph, elements: list[Symbol]) -> Symbol:
    return _divide(_sum(graph, elements), graph.constant(len(elements)))


def _some(graph: _Graph, elements: list[Symbol]) -> Symbol:
    return _chain(elements, _logic("||")) if elements else graph.constant(False)


def _every(graph: _Graph, elements: list[Symbol]) -> Symbol:
    return _chain(elements, _logic("&&")) if elements else graph.constant(True)


_REDUCTIONS: dict[str, Callable[[_Graph, list[Symbol]], Symbol]] = {
    "sum": _sum,
    "mean": _mean,
    "prod": lambda graph, elements: _chain(elements, _arithmetic("*")) if elements else graph.constant(1),
    "any": _some,
    "all": _every,
    "amax": lambda graph, elements: _tree(graph, elements, _maximum),
    "amin": lambda graph, elements: _tree(graph, elements, _minimum),
}


def _reduce(name: str, row: Any, axis: Any = None, keepdim: bool = False) -> Any:
    if isinstance(row, Symbol):
        symbol = row
        row = Row(symbol.graph, (), lambda _: symbol)
    if keepdim:
        raise _Refusal("keepdim of a reduction; expected False")
    reduction = _REDUCTIONS[name]
    if axis is None or len(row.shape) <= 1:
        elements = [row.element(place) for place in row.indices()]
        if name in ("sum", "prod", "mean"):
            elements = [_cast(element, "int") if element.type == "bool" else element for element in elements]
        return reduction(row.graph, elements)
    if not isinstance(axis, int):
        raise _Refusal(f"a reduction over {axis!r}; expected one dimension, or all")
    axis %= len(row.shape)

    def element(place: tuple[Any, ...]) -> Symbol:
        column = Row(row.graph, (row.shape[axis],), lambda inner: row.element((*place[:axis], *inner, *place[axis:])))
        return _reduce(name, column)  # type: ignore[no-any-return]

    return Row(row.graph, row.shape[:axis] + row.shape[axis + 1 :], element)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    result = []
    for extents in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes)):
        wide = {extent for extent in extents if extent != 1}
        if len(wide) > 1:
            raise _Refusal(f"arrays of shapes {', '.join(map(str, shapes))} do not broadcast")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def _part(value: Any, place: tuple[Any, ...]) -> Any:
    """The element of a row that meets `place` of the broadcast shape; a number is every element."""
    if not isinstance(value, Row):
        return value
    own = place[len(place) - len(value.shape) :]
    return value.element(tuple(0 if extent == 1 else inner for extent, inner in zip(value.shape, own)))


def _elementwise(name: str, graph: _Graph, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    function = _OPERATIONS[_ALIASES.get(name, name)]
    operands = [graph.capture(value) if _is_array(value) and tuple(value.shape) else value for value in args]
    shapes = [value.shape for value in operands if isinstance(value, Row)]
    lifted = {key: value if isinstance(value, (str, type(None))) else graph.lift(value) for key, value in kwargs.items()}

    def at(place: tuple[Any, ...]) -> Symbol:
        parts = (value if isinstance(value, (str, type(None))) else graph.lift(_part(value, place)) for value in operands)
        try:
            return function(*parts, **lifted)
        except TypeError as error:
            raise _Refusal(f"{name}: {error}") from None

    return Row(graph, _broadcast(shapes), at) if shapes else at(())


def _dtype_word(dtype: Any) -> str:
    name = str(dtype).rpartition(".")[2].strip("<>'")
    if "bool" in name:
        return "bool"
    if name.startswith(("int", "uint")) or name in ("long", "short"):
        return "int"
    if name in ("float", "float32", "float64", "double"):
        return "float"
    raise _Refusal(f"a cast to {name}; formulas compute in float32, int32 and bool")


def _cast_method(name: str) -> Callable[..., Any]:
    def apply(graph: _Graph, operand: Any, *_: Any, **__: Any) -> Any:
        return _cast_all(operand, name)

    return apply


def _cast_all(operand: Any, type_: str) -> Any:
    if isinstance(operand, Row):
        return Row(operand.graph, operand.shape, lambda place: _cast(operand.element(place), type_))
    return _cast(operand.graph.lift(operand), type_)


def _to(graph: _Graph, operand: Any, *args: Any, **kwargs: Any) -> Any:
    for target in (*args, *kwargs.values()):
        if hasattr(target, "dtype"):
            target = target.dtype
        if "dtype" in type(target).__name__.lower() or isinstance(target, type) or str(target).startswith(("torch.", "float", "int", "bool")):
            if "device" not in type(target).__name__.lower():
                operand = _cast_all(operand, _dtype_word(target))
    return operand


def _filled(value: Any) -> Callable[..., Any]:
    def apply(graph: _Graph, _: Any, size: Any = (), dtype: Any = None, **__: Any) -> Any:
        if tuple(size if isinstance(size, (tuple, list)) else (size,)) != ():
            raise _Refusal(f"a new array of shape {size}; expected (), one number")
        made = graph.constant(value)
        return made if dtype is None else _cast(made, _dtype_word(dtype))

    return apply


def _like(value: Any) -> Callable[..., Any]:
    def apply(graph: _Graph, operand: Any, *given: Any, dtype: Any = None, **kwargs: Any) -> Any:
        fill = given[0] if given else kwargs.get("fill_value", value)
        made = graph.lift(fill)
        return _cast(made, operand.type if dtype is None else _dtype_word(dtype))

    return apply


def _dot(graph: _Graph, left: Any, right: Any) -> Any:
    left, right = (graph.capture(value) if _is_array(value) else value for value in (left, right))
    if not (isinstance(left, Row) and isinstance(right, Row) and len(left.shape) == 1 and left.shape == right.shape):
        raise _Refusal("a product of matrices; expected two rows of one length")
    return _reduce("sum", _elementwise("mul", graph, (left, right), {}))


def _take(graph: _Graph, array: Any, index: Any, *_: Any, **__: Any) -> Any:
    row = graph.capture(array) if _is_array(array) else array
    if len(row.shape) == 1:
        return row[index]
    symbol, places = graph.lift(index), []
    for extent in reversed(row.shape):
        places.append(_remainder(symbol, graph.constant(extent)))
        symbol = _floor_divide(symbol, graph.constant(extent))
    return row[tuple(reversed(places))]


def _index_select(graph: _Graph, array: Any, dim: int, index: Any) -> Any:
    row = graph.capture(array) if _is_array(array) else array
    return row[(*(slice(None),) * (dim % len(row.shape)), index)]


def _get_item(graph: _Graph, array: Any, index: Any) -> Any:
    row = graph.capture(array) if _is_array(array) else array
    return row[index]


def _extreme(name: str) -> Callable[..., Any]:
    def apply(graph: _Graph, first: Any, *others: Any, **kwargs: Any) -> Any:
        if others and (_is_symbolic(others[0]) or _is_array(others[0])):
            return _elementwise({"max": "maximum", "min": "minimum"}[name], graph, (first, *others), {})
        if others or kwargs:
            raise _Refusal(f"{name} over a dimension also gives places; write a{name}")
        return _reduce(f"a{name}", first)

    return apply


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": _get_item, "to": _to, "type": _to, "astype": _to, "type_as": _to, "float": _cast_method("float"),
    "double": _cast_method("float"), "int": _cast_method("int"), "long": _cast_method("int"), "bool": _cast_method("bool"),
    "new_ones": _filled(1), "new_zeros": _filled(0), "ones_like": _like(1), "zeros_like": _like(0), "full_like": _like(0),
    "dot": _dot, "inner": _dot, "vdot": _dot, "matmul": _dot, "rmatmul": _dot, "take": _take, "index_select": _index_select,
    "gather": lambda graph, array, dim, index, **_: _index_select(graph, array, dim, index),
    "max": _extreme("max"), "min": _extreme("min"), "clone": lambda graph, operand, **_: operand,
    "detach": lambda graph, operand: operand, "contiguous": lambda graph, operand: operand,
    "new_full": lambda graph, operand, size, value, **kwargs: _filled(value)(graph, operand, size, **kwargs),
}  # fmt: skip


def _known(name: str) -> bool:
    name = _ALIASES.get(name, name)
    return name in _OPERATIONS or name in _FUNCTIONS or name in _REDUCTIONS


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function, method or operator by its name, of symbols beside numbers and arrays."""
    if name == "get":  # a property, which __torch_function__ hands on as its getter
        raise _Refusal("an attribute that is not in the language of formulas")
    if not _known(name):
        raise _Refusal(f"{name} is not in the language of formulas (docs/guides/programs.md)")
    flat = [*args, *kwargs.values()]
    for value in args:
        if isinstance(value, (tuple, list)):
            flat += value
    graph = _graph_of(flat)
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](graph, *args, **kwargs)
    if name in _REDUCTIONS:
        row = graph.capture(args[0]) if _is_array(args[0]) else args[0]
        axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        return _reduce(name, row, axis, bool(kwargs.get("keepdim", False)))
    kwargs = {key: value for key, value in kwargs.items() if key in ("min", "max", "alpha", "rounding_mode", "decimals")}
    return _elementwise(name, graph, args, kwargs)


# ---- PyTorch: indexing ----


@functools.lru_cache(maxsize=None)
def torch_mode() -> Any:
    """The mode that sees `tensor[symbol]`; None where PyTorch is not imported."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            for value in args:
                parts = value if isinstance(value, (tuple, list)) else (value,)
                if any(_is_symbolic(part) for part in parts):
                    return call(_name_of(function), args, kwargs or {})
            return function(*args, **(kwargs or {}))

    return Mode


# ---- NumPy and others: arrays that a function encloses ----


class _Rebinder:
    """Copies of functions in which arrays are symbols of all their elements; notes the names of arrays on its way."""

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.known: list[tuple[types.FunctionType, types.FunctionType]] = []
        self.open: list[tuple[types.FunctionType, list[Any]]] = []  # cells that wait for a copy not made yet
        self.torch_tensor = getattr(sys.modules.get("torch"), "Tensor", ())

    def value(self, value: Any, depth: int = 0, name: str = "") -> Any:
        """The value itself where it holds no such array."""
        if depth > 8:
            return value
        if isinstance(value, types.FunctionType):
            return self.function(value, depth)
        if isinstance(value, functools.partial):
            args = tuple(self.value(part, depth + 1) for part in value.args)
            keywords = {name: self.value(part, depth + 1) for name, part in value.keywords.items()}
            return functools.partial(self.value(value.func, depth + 1), *args, **keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.value(value.__func__, depth + 1), value.__self__)
        if type(value) in (tuple, list):
            parts = [self.value(part, depth + 1) for part in value]
            return value if all(new is old for new, old in zip(parts, value)) else type(value)(parts)
        if not _is_array(value) or _is_symbolic(value):
            return value
        if name:
            self.graph.names.append((name, value))
        if not isinstance(value, self.torch_tensor):
            return self.graph.capture(value) if tuple(value.shape) else self.graph.lift(value)
        return value

    def function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        for known, made in self.known:
            if known is function:
                return made
        if any(known is function for known, _ in self.open):
            return function  # a global function that calls itself: its inner calls see arrays as they are
        if _is_library_file(function.__code__.co_filename):
            return function
        self.open.append((function, []))
        made = self.rebound(function, depth)
        for cell in self.open.pop()[1]:
            cell.cell_contents = made
        self.known.append((function, made))
        return made

    def rebound(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        closure = function.__closure__ or ()
        code = function.__code__
        cells = tuple(self.cell(cell, depth, name) for name, cell in zip(code.co_freevars, closure))
        changed = {}
        for name in sorted(_names_in(code)):
            if name in function.__globals__:
                old = function.__globals__[name]
                new = self.value(old, depth + 1, name)
                if new is not old:
                    changed[name] = new
        given = function.__defaults__ or ()
        last = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        defaults = tuple(self.value(part, depth + 1, name) for name, part in zip(last, given))
        if not changed and all(new is old for new, old in zip(cells + defaults, closure + given)):
            return function
        scope = {**function.__globals__, **changed} if changed else function.__globals__
        made = types.FunctionType(code, scope, function.__name__, defaults or None, cells or None)
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def cell(self, cell: Any, depth: int, name: str) -> Any:
        try:
            old = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        for function, waiting in self.open:
            if old is function:  # it encloses itself
                waiting.append(types.CellType())
                return waiting[-1]
        new = self.value(old, depth + 1, name)
        return cell if new is old else types.CellType(new)


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


# ---- Callables as programs ----


_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _is_library_file(filename: str) -> bool:
    """Whether a line there is of this package or of a framework, not of the caller."""
    if filename.startswith(_OWN_FOLDER) or filename.startswith("<frozen"):
        return True
    for library in ("torch", "numpy", "jax", "cupy", "functools"):
        module = sys.modules.get(library)
        file = getattr(module, "__file__", None)
        if file and filename.startswith(os.path.dirname(file) + os.sep if file.endswith("__init__.py") else file):
            return True
    return False


def _located(error: BaseException, function: Any, kind: str, message: str) -> TraceError:
    """The refusal, with the innermost line that is the caller's."""
    found: tuple[str, int] | None = None
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not _is_library_file(filename):
            found = filename, traceback.tb_lineno
        traceback = traceback.tb_next
    if found is None:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is None:
            return TraceError(f"{kind}: {message}")
        found = code.co_filename, code.co_firstlineno
    line = linecache.getline(*found).strip()
    shown = f"\n    {line}" if line else ""
    return TraceError(f"{kind}: {found[0]}:{found[1]}: {message}{shown}", found[0], found[1])


def trace(kind: int, function: Callable[..., Any]) -> Program:
    """The program that a callable is.

    Parameters
    ----------
    kind : int
        SCORE_MOD: a callable of (score, batch, head, q_idx, kv_idx); MASK_MOD: of (batch, head, q_idx, kv_idx).

    Raises
    ------
    TraceError
        With the line that a formula cannot say, and what to write instead.
    """
    word = ("score_mod", "mask_mod")[kind]
    graph = _Graph()
    arguments = [graph.variable(name) for name in (_SCORE_NAMES if kind == _abi.SCORE_MOD else _SCORE_NAMES[1:])]
    try:
        result = _call(graph, function, arguments)
        symbol = _result(graph, kind, result)
    except InvalidArgument:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, _Refusal) else f"{type(error).__name__}: {error}"
        raise _located(error, function, word, text) from (None if isinstance(error, _Refusal) else error)
    lets, formula = graph.text(symbol)
    try:
        return Program(kind, formula, graph.captures_of(symbol), lets)
    except ProgramError as error:
        text = f"the formula {error.text!r} is refused: {error}"
        raise _located(error, function, word, text) from None


def trace_in_graph(kind: int, function: Callable[..., Any], mode: Any) -> tuple[str, dict[str, Array]]:
    """The formula of a callable and what it reads, while PyTorch compiles a graph: Dynamo follows each of its steps.

    Arrays are PyTorch's alone, and have no names of the caller's. `mode` is what `torch_mode` gave before: no class is made in a graph.
    """
    graph = _Graph()
    arguments = [graph.variable(name) for name in (_SCORE_NAMES if kind == _abi.SCORE_MOD else _SCORE_NAMES[1:])]
    with mode():
        result = function(*arguments)
    symbol = _result(graph, kind, result)
    lets, formula = graph.text(symbol)
    return "".join(f"let {name} = {part}; " for name, part in lets) + formula, graph.captures_of(symbol)


def _call(graph: _Graph, function: Callable[..., Any], arguments: list[Symbol]) -> Any:
    rebound = _Rebinder(graph).value(function)
    if "torch" not in sys.modules:
        return rebound(*arguments)
    with torch_mode()():
        return rebound(*arguments)


def _result(graph: _Graph, kind: int, result: Any) -> Symbol:
    if result is None:
        raise _Refusal("the callable returns nothing; expected " + ("a score" if kind == _abi.SCORE_MOD else "a condition"))
    symbol = graph.lift(result)
    if kind == _abi.MASK_MOD and symbol.type != "bool":
        raise _Refusal(f"the callable returns a number ({symbol.type}); expected a condition, such as a comparison gives")
    if kind == _abi.SCORE_MOD and symbol.type == "bool":
        raise _Refusal("the callable returns a condition; expected a score")
    return symbol
