"""Attention and its derivatives on plain tensors: what the nodes of PyTorch's graph compute."""

from __future__ import annotations

import ctypes
from typing import Any, Iterable, NamedTuple, Sequence

import torch

from .. import _abi
from .._arrays import framework_of
from .._attention import forward_template, lse_shape
from .._calls import Builder, Template, offset
from .._forward import FIELDS, Arguments, Key, add_forward, gather
from .._library import address_of
from .._programs import Program
from .._quick import FEATURES
from ..errors import InvalidArgument, Unsupported

_FORWARD = address_of("fovea_attention_forward")
_PLAIN = ("q", "k", "v", "sinks")  # inputs whose derivatives have fields of their own; the others' are named
_CAPTURED_FIELDS = ("bias", "alibi")
#: Fields of the arrays that a call reads, in the order in which calls have them.
INPUTS = tuple(name for name in FIELDS if name not in ("out", "lse", "row_max"))
_OUT, _LSE, _ROW_MAX = (1 << FIELDS.index(name) for name in ("out", "lse", "row_max"))
_MAX_KINDS = 512


def has_derivative(name: str) -> bool:
    """Whether there are derivatives by an input of this name."""
    return name in _PLAIN or name in _CAPTURED_FIELDS or name.startswith("score:")


class _Operation(NamedTuple):
    """A C function, and how it calls what belongs to an input."""

    struct: type[ctypes.Structure]
    address: int
    function: str
    roles: dict[str, tuple[str, str]]  # role: (field of an input of _PLAIN, list of the named)


_BACKWARD = _Operation(
    _abi.BackwardArgs, address_of("fovea_attention_backward"), "attention_backward", {"gradient": ("d{}", "dcaptured")}
)
_DOUBLE_BACKWARD = _Operation(
    _abi.DoubleBackwardArgs, address_of("fovea_attention_double_backward"), "attention_double_backward",
    {"direction": ("dd{}", "ddcaptured"), "gradient": ("grad_{}", "grad_captured")},
)  # fmt: skip
_JVP = _Operation(
    _abi.JvpArgs, address_of("fovea_attention_jvp"), "attention_jvp", {"tangent": ("{}_tangent", "captured_tangents")}
)


class Kind:
    """All calls of one key: the names of their inputs, and templates.

    Attributes
    ----------
    names : tuple of str
        Of the inputs: fields of forward's struct but outputs; what programs capture has "score:NAME" or "mask:NAME".
    is_differentiable : tuple of bool
        Whether there are derivatives by an input.
    """

    def __init__(self, arguments: Arguments) -> None:
        key = arguments.key
        present = [name for index, name in enumerate(FIELDS) if key.present >> index & 1]
        names = [name for name in present if name not in ("out", "lse", "row_max")]
        for word, program in zip(("score", "mask"), arguments.kept):
            names += [f"{word}:{name}" for name in program.tensor_names] if program is not None else []
        self.names = tuple(names)
        self.key = key._replace(present=(key.present | _OUT | _LSE) & ~_ROW_MAX)
        self.is_differentiable = tuple(map(has_derivative, names))
        self.takes_all = all(self.is_differentiable)
        clash = set(_CAPTURED_FIELDS) & set(names) & {name[6:] for name in names if name.startswith("score:")}
        if clash:
            name = clash.pop()
            raise InvalidArgument(f"attention: {name} and an array of that name in score_mod; rename that of the program")
        self.forward: Template | None = None
        self._templates: dict[Any, Template] = {}
        # The key has their addresses, which must not come again; tensors that they capture are the calls'.
        self._handles = [program and program._handle for program in arguments.kept]

    def gradients(self, call: Call, needed: tuple[bool, ...], has_dlse: bool) -> Template:
        """Of a backward call, for the inputs that are needed."""
        found = self._templates.get((needed, has_dlse))
        if found is None:
            names = tuple(name for name, is_needed in zip(self.names, needed) if is_needed)
            seeds = ("dout", "dlse") if has_dlse else ("dout",)
            found = self._templates[needed, has_dlse] = self.template(_BACKWARD, call, seeds, (("gradient", names),))
        return found

    def template(self, operation: _Operation, call: Call, plain: tuple[str, ...], roles: tuple[tuple[str, tuple[str, ...]], ...]) -> Template:
        """Of a struct whose tensors are those of forward, `plain`, and for each role those of the inputs named."""
        key = (operation.function, plain, roles)
        found = self._templates.get(key)
        if found is None:
            found = self._templates[key] = _make_template(operation, call.arguments(), plain, roles)
        return found


def _make_template(
    operation: _Operation, arguments: Arguments, plain: tuple[str, ...], roles: tuple[tuple[str, tuple[str, ...]], ...]
) -> Template:
    builder, struct = Builder(operation.function), operation.struct
    is_swapped = arguments.key.layout == "bhsd"
    named = {role: [name for name in names if name not in _PLAIN] for role, names in roles}
    counts = {f"num_{operation.roles[role][1]}": len(names) for role, names in named.items()}
    at = builder.add(_abi.sized(struct, **counts))  # first: a call is given the address of its start
    builder.point(at + offset(struct, "forward"), add_forward(builder, arguments, operation.function))
    for field in plain:
        builder.tensor(at + offset(struct, field), field, is_swapped and "lse" not in field)
    for role, names in roles:
        pattern, list_field = operation.roles[role]
        pairs = builder.add(ctypes.sizeof(_abi.NamedTensor) * len(named[role]))
        builder.point(at + offset(struct, list_field), pairs)
        for name in names:
            if name in _PLAIN:
                field = pattern.format(name)
                builder.tensor(at + offset(struct, field), field, is_swapped and name != "sinks")
            else:
                _add_named(builder, pairs, named[role].index(name), name.removeprefix("score:"))
    return builder.done()


def _add_named(builder: Builder, pairs: int, index: int, name: str) -> None:
    size = ctypes.sizeof(_abi.NamedTensor)
    text = name.encode() + b"\0"
    place = builder.add(len(text))
    builder.memory[place : place + len(text)] = text
    builder.point(pairs + index * size, place)
    builder.tensor(pairs + index * size + offset(_abi.NamedTensor, "tensor"), name)


_kinds: dict[Key, Kind] = {}
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Call:
    """All of a call but its tensors; opaque to PyTorch's transforms, which look into tuples."""

    __slots__ = ("kind", "words", "programs", "made")

    def __init__(self, kind: Kind, words: tuple[int, ...], programs: tuple[Program | None, Program | None], made: Any = None) -> None:
        self.kind = kind
        self.words = words
        self.programs = programs
        self.made = made  # memory for out, which the first run of forward takes

    def arguments(self, tensors: tuple[Any, ...] = ()) -> Arguments:
        return Arguments(self.kind.key, tensors, self.words, self.programs)

    def with_seed_of(self, place: int) -> Call:
        """The same with dropout of its own."""
        seed, *rest = self.words
        return Call(self.kind, ((seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**64, *rest), self.programs)


def call_of(arguments: Arguments, made: Any = None) -> Call:
    """The call; `inputs_of` has its tensors."""
    kind = _kinds.get(arguments.key)
    if kind is None:
        if len(_kinds) >= _MAX_KINDS:
            _kinds.clear()
        kind = _kinds[arguments.key] = Kind(arguments)
    return Call(kind, arguments.words, arguments.kept, made)


def call_of_recorded(recorded: Any, inputs: Sequence[Any]) -> Call:
    """That of a call which the extension recorded."""
    _, present, values, _ = recorded
    names = [name for index, name in enumerate(INPUTS) if present >> index & 1]
    features: dict[str, Any] = dict(zip(FEATURES, values))
    given = dict(zip(names, inputs))
    features.update((name, given.get(name)) for name in ("bias", "alibi", "sinks"))
    if "mask" in given:
        features["mask"] = given["mask"]
    for feature, field in (("segment_ids", "segments"), ("cu_seqlens", "cu_seqlens")):
        if f"{field}_q" in given or f"{field}_kv" in given:
            features[feature] = given.get(f"{field}_q"), given.get(f"{field}_kv")
    features["deterministic"] |= torch.are_deterministic_algorithms_enabled()
    q, k, v = inputs[:3]
    stream = framework_of(q, "attention", "q").stream(q)
    return call_of(gather("attention", q, k, v, None, None, stream, **features))


def inputs_of(arguments: Arguments) -> tuple[Any, ...]:
    """The tensors that a call reads: all but its outputs, which stand behind q, k and v."""
    tensors = arguments.tensors
    return tensors[:3] + tensors[3 + (arguments.key.present & (_OUT | _LSE | _ROW_MAX)).bit_count() :]


def no_gradient_of(name: str) -> str:
    """Why there is none by an input of this name."""
    if name in ("q_scale", "k_scale", "v_scale"):
        return f"attention: {name} requires a gradient, which scales of a recipe do not have; detach it"
    return (
        f"attention: {name.removeprefix('mask:')} requires a gradient, which a mask does not have; detach it, or move it to score_mod"
    )


def check(call: Call, inputs: Sequence[Any]) -> None:
    """Refuses what cannot be recorded, by name."""
    if all(type(tensor) in _TENSORS for tensor in inputs) and call.kind.takes_all:
        return
    for name, tensor, is_differentiable in zip(call.kind.names, inputs, call.kind.is_differentiable):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"attention: {name} is a {type(tensor).__name__} where gradients are recorded; expected a torch.Tensor")
        if tensor.requires_grad and not is_differentiable:
            raise Unsupported(no_gradient_of(name))


# ---- What runs ----


def _readable(tensor: Any) -> Any:
    """With its signs, and with memory."""
    if tensor.is_neg():
        return tensor.resolve_neg()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if tensor._is_zerotensor() else tensor


def _beside(tensor: Any) -> Any:
    return tensor.new_empty(tensor.shape)


def _with_outputs(inputs: Sequence[Any], out: Any, lse: Any) -> tuple[Any, ...]:
    return (*inputs[:3], out, lse, *inputs[3:])


def _run(
    operation: _Operation, call: Call, forward: tuple[Any, ...], plain: dict[str, Any], roles: Iterable[tuple[str, dict[str, Any]]]
) -> None:
    roles = tuple(roles)
    names = tuple((role, tuple(tensors)) for role, tensors in roles)
    template = call.kind.template(operation, call, tuple(plain), names)
    tensors = (*forward, *map(_readable, plain.values()), *(_readable(x) for _, group in roles for x in group.values()))
    template.invoke(tensors, call.words, operation.address)


def forward(call: Call, inputs: Sequence[Any]) -> tuple[Any, Any]:
    """out and lse."""
    q, v = inputs[0], inputs[2]
    shape = q.shape
    out, call.made = call.made, None
    if out is None:
        out = q.new_empty((*shape[:-1], v.shape[-1]))
    kind = call.kind
    lse = torch.empty(lse_shape(shape, kind.key.layout), dtype=torch.float32, device=q.device)
    tensors = _with_outputs(inputs, out, lse)
    if kind.forward is None:
        kind.forward = forward_template(call.arguments(tensors), "attention")
    kind.forward.invoke(tensors, call.words, _FORWARD)
    return out, lse


def backward(call: Call, needed: Sequence[bool], dout: Any, dlse: Any, out: Any, lse: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients by the inputs that are needed."""
    wanted = tuple(_beside(tensor) for tensor, is_needed in zip(inputs, needed) if is_needed)
    seeds = (_readable(dout),) if dlse is None else (_readable(dout), _readable(dlse))
    template = call.kind.gradients(call, tuple(needed), dlse is not None)
    template.invoke((*_with_outputs(inputs, out, lse), *seeds, *wanted), call.words, _BACKWARD.address)
    return wanted


def double_backward(
    call: Call, needed: Sequence[bool], directions: Sequence[Any], dout: Any, dlse: Any, out: Any, lse: Any, inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Gradients of <directions, gradients by the inputs>, by dout, by dlse where it is given, and by the inputs that are needed.

    A direction that is None is 0.
    """
    names = call.kind.names
    along = {name: x for name, x in zip(names, directions) if x is not None}
    wanted = {name: _beside(x) for name, x, is_needed in zip(names, inputs, needed) if is_needed}
    plain = {"dout": dout, "grad_dout": _beside(dout)}
    if dlse is not None:
        plain |= {"dlse": dlse, "grad_dlse": _beside(dlse)}
    _run(_DOUBLE_BACKWARD, call, _with_outputs(inputs, out, lse), plain, [("direction", along), ("gradient", wanted)])
    return plain["grad_dout"], *((plain["grad_dlse"],) if dlse is not None else ()), *wanted.values()


def jvp(call: Call, tangents: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """How out and lse move; a tangent that is None is 0."""
    q, v = inputs[0], inputs[2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(lse_shape(tuple(q.shape), call.kind.key.layout), dtype=torch.float32)
    moved = {"out_tangent": torch.empty_like(out), "lse_tangent": torch.empty_like(lse)}
    along = {name: x for name, x in zip(call.kind.names, tangents) if x is not None}
    _run(_JVP, call, _with_outputs(inputs, out, lse), moved, [("tangent", along)])
    return moved["out_tangent"], moved["lse_tangent"]
