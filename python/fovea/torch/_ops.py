"""`fovea::attention` and its gradient as operators of PyTorch, for compiled graphs and exported programs.

Programs travel as texts in the operators' arguments, so that a graph stays valid in another process. Eager calls do not come here: a
node of autograd is quicker.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import _abi, _quick
from .._arrays import check_bias
from .._attention import lse_shape
from .._forward import FIELDS, Dropout, bits_of, gather
from .._programs import Program, split_lets
from .._trace import torch_mode, trace_in_graph
from ..errors import Unsupported
from . import _derivatives
from ._derivatives import INPUTS, Call

_FEATURES = (
    "str names, str score, str mask, bool causal, str align, int? left, int? right, float? scale, float? softcap, float p, int seed, "
    "int offset, str layout, bool deterministic"
)
_library = torch.library.Library("fovea", "DEF")
_library.define(f"attention(Tensor[] tensors, {_FEATURES}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] tensors, bool[] wanted, {_FEATURES}) -> Tensor[]"
)


def _program(kind: str, text: str, given: dict[str, Any]) -> Program:
    captures = {name.partition(":")[2]: tensor for name, tensor in given.items() if name.startswith(f"{kind}:")}
    lets, formula = split_lets(text)
    return Program(_abi.SCORE_MOD if kind == "score" else _abi.MASK_MOD, formula, captures, lets)


def _call(
    tensors: list[Any], names: str, score: str, mask: str, causal: bool, align: str, left: int | None, right: int | None,
    scale: float | None, softcap: float | None, p: float, seed: int, offset: int, layout: str, deterministic: bool,
) -> tuple[Call, tuple[Any, ...]]:  # fmt: skip
    """The call of an operator's arguments, and its inputs."""
    given = dict(zip(names.split(","), (tensor.resolve_neg() for tensor in tensors)))
    fields: dict[str, Any] = {name: given.get(name) for name in ("bias", "alibi", "mask", "sinks")}
    pairs = {name: (given.get(f"{name}_q"), given.get(f"{name}_kv")) for name in ("segments", "cu_seqlens")}
    q = given["q"]
    if "dropout_seed" in given:
        seed, offset = given["dropout_seed"], given["dropout_offset"]
    arguments = gather(
        "attention", q, given["k"], given["v"], None, None, torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0, **fields,
        segment_ids=pairs["segments"] if pairs["segments"][0] is not None else None,
        cu_seqlens=pairs["cu_seqlens"] if pairs["cu_seqlens"][0] is not None else None,
        score_mod=_program("score", score, given) if score else None, mask_mod=_program("mask", mask, given) if mask else None,
        causal=causal, align=align, window=None if left is None and right is None else (left, right), scale=scale, softcap=softcap,
        dropout=(p, seed, offset, given.get("dropout_places")) if p else None, layout=layout, deterministic=deterministic,
    )  # fmt: skip
    return _derivatives.call_of(arguments), _derivatives.inputs_of(arguments)


# ---- The same in C ----

_places: dict[str, tuple[Any, tuple[tuple[int, str], ...]]] = {}
_programs: dict[Any, Program] = {}
_MAX_KEPT = 512


def _places_of(names: str) -> tuple[Any, tuple[tuple[int, str], ...]]:
    """What gives the values of INPUTS from the operator's tensors and a None behind them; places and names of what programs read."""
    found = _places.get(names)
    if found is None:
        parts = names.split(",")
        getter = operator.itemgetter(*(parts.index(name) if name in parts else len(parts) for name in INPUTS))
        if len(_places) >= _MAX_KEPT:
            _places.clear()
        found = _places[names] = getter, tuple((place, name) for place, name in enumerate(parts) if ":" in name)
    return found


def _kept_program(kind: str, text: str, captured: tuple[tuple[int, str], ...], tensors: list[Any]) -> Program | None:
    """That of a text, made once for each list of names, dtypes and ranks."""
    if not text:
        return None
    own = [(name, tensors[place]) for place, name in captured if name.startswith(kind)]
    key = (kind, text, *((name, tensor.dtype, tensor.dim()) for name, tensor in own))
    found = _programs.get(key)
    if found is not None and not any(tensor.is_neg() or tensor.dtype == torch.float64 for _, tensor in own):
        return found._rebound(tuple(tensor for _, tensor in own))
    if len(_programs) >= _MAX_KEPT:
        _programs.clear()
    made = _program(kind, text, dict(own))
    _programs[key] = made._rebound((None,) * len(own))  # kept without the tensors of this call
    return made


def _attend(
    tensors: list[Any], names: str, score: str, mask: str, causal: bool, align: str, left: int | None, right: int | None,
    scale: float | None, softcap: float | None, p: float, seed: Any, offset: Any, layout: str, deterministic: bool,
) -> Any:  # fmt: skip
    """out and lse; NotImplemented where the call is for Python to make."""
    if _quick.attend is None:
        return NotImplemented
    getter, captured = _places_of(names)
    q, k, v, bias, alibi, dense, segments_q, segments_kv, sinks, cu_q, cu_kv, seeds, offsets, *others = getter((*tensors, None))
    if any(other is not None for other in others):
        return NotImplemented
    if seeds is not None:
        seed, offset = seeds, offsets
    return _quick.attend(
        0, 0, 0, True, None, None, None, q, k, v, causal, align, None if left is None and right is None else (left, right), scale,
        softcap, bias, alibi, _kept_program("score", score, captured, tensors), dense,
        _kept_program("mask", mask, captured, tensors), None if segments_q is None else (segments_q, segments_kv),
        None if cu_q is None else (cu_q, cu_kv), sinks, (p, seed, offset) if p else None, layout, "auto", "auto", deterministic, 0,
    )  # fmt: skip


# ---- Kernels of the operators ----


def _outputs(tensors: list[Any], layout: str) -> tuple[Any, Any]:
    q, v = tensors[0], tensors[2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(tuple(q.shape), layout), dtype=torch.float32)


def _forward(tensors: list[Any], *features: Any) -> tuple[Any, Any]:
    is_recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # autograd's kernel has seen the call
    try:
        made = _attend(tensors, *features)
    finally:
        torch._C._set_grad_enabled(is_recording)
    return _derivatives.forward(*_call(tensors, *features)) if made is NotImplemented else made


def _fake_forward(tensors: list[Any], *features: Any) -> tuple[Any, Any]:
    return _outputs(tensors, features[-2])


def _fake_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, tensors: list[Any], wanted: list[bool], *features: Any
) -> list[Any]:
    return [tensor.new_empty(tensor.shape) for tensor, is_wanted in zip(tensors, wanted) if is_wanted]


def _backward(
    dout: Any, dlse: Any, out: Any, lse: Any, tensors: list[Any], wanted: list[bool], *features: Any
) -> list[Any]:
    call, inputs = _call(tensors, *features)
    return list(_derivatives.backward(call, wanted, dout, dlse, out, lse, inputs))


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _device)
    _library.impl("attention_backward", _backward, _device)
torch.library.register_fake("fovea::attention", _fake_forward, lib=_library)
torch.library.register_fake("fovea::attention_backward", _fake_backward, lib=_library)


class _Node(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(features, *tensors) -> (out, lse): the operator below autograd, where something watches it."""

    @staticmethod
    def forward(ctx: Any, features: tuple[Any, ...], *tensors: Any) -> tuple[Any, Any]:
        ctx.features = features
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.fovea.attention(list(tensors), *features)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        wanted = [needed and tensor.is_floating_point() for needed, tensor in zip(ctx.needs_input_grad[1:], tensors)]
        if dout is None and dlse is None:
            return (None,) * (1 + len(tensors))
        dout = torch.zeros_like(out) if dout is None else dout
        made = iter(_Gradients.apply(ctx.features, tuple(wanted), dout, dlse, out, lse, *tensors))
        return None, *(next(made) if is_wanted else None for is_wanted in wanted)


class _Gradients(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(features, wanted, dout, dlse or None, out, lse, *tensors) -> gradients by what is wanted, which may be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, features: tuple[Any, ...], wanted: tuple[bool, ...], *tensors: Any) -> tuple[Any, ...]:
        ctx.features, ctx.wanted = features, wanted
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        dout, dlse, out, lse, *inputs = tensors
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.fovea.attention_backward(dout, dlse, out, lse, inputs, list(wanted), *features))

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> tuple[Any, ...]:
        from ._autograd import double_backward

        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        if isinstance(dout, FakeTensor):
            raise Unsupported("attention: a gradient of a gradient of tensors without memory; expected tensors that have some")
        call, inputs = _call(tensors, *ctx.features)
        grad_dout, grad_dlse, *made = double_backward(
            call, ctx.wanted, ctx.needs_input_grad[6:], directions, dout, dlse, out, lse, inputs
        )
        return None, None, grad_dout, grad_dlse, None, None, *made


def _record(tensors: list[Any], *features: Any) -> Any:
    """The operator's kernel for autograd. torch.library.register_autograd does the same in 50 microseconds more."""
    made = _attend(tensors, *features)
    if made is not NotImplemented:
        return made
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        _refuse_gradients_of_masks(tensors, features[0])
        return _Node.apply(features, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fovea.attention(tensors, *features)


def _refuse_gradients_of_masks(tensors: list[Any], names: str) -> None:
    for name, tensor in zip(names.split(","), tensors):
        if tensor.requires_grad and not _derivatives.has_derivative(name):
            raise Unsupported(_derivatives.no_gradient_of(name))


_library.impl("attention", _record, "Autograd")


def _at_each_place(of: Any) -> Any:
    """What vmap does with an operator in a graph: a call for each place."""

    def call(info: Any, in_dims: Any, *args: Any) -> Any:
        def part(value: Any, dims: Any, place: int) -> Any:
            if isinstance(value, list):
                return [part(x, dim, place) for x, dim in zip(value, dims if isinstance(dims, (list, tuple)) else [dims] * len(value))]
            return value if dims is None else value.select(dims, place)

        results = [of(*(part(x, dims, place) for x, dims in zip(args, in_dims))) for place in range(info.batch_size)]
        stacked = [torch.stack(column) for column in zip(*results)]
        return (stacked, [0] * len(stacked)) if isinstance(results[0], list) else (tuple(stacked), (0,) * len(stacked))

    return call


if hasattr(torch.library, "register_vmap"):  # PyTorch 2.5 and newer
    torch.library.register_vmap("fovea::attention", _at_each_place(torch.ops.fovea.attention), lib=_library)
    torch.library.register_vmap("fovea::attention_backward", _at_each_place(torch.ops.fovea.attention_backward), lib=_library)


_MODE = torch_mode()
# Where Dynamo follows operators on objects of a user's class.
_FOLLOWS_SYMBOLS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


def _text_and_captures(kind: str, source: Any) -> tuple[str, dict[str, Any]]:
    """Of a text, a program, or a callable, which is traced as a part of the graph."""
    if isinstance(source, str):
        return source, {}
    if isinstance(source, Program):
        return source.text_with_numbers, dict(zip(source.tensor_names, source.tensors))
    if not _FOLLOWS_SYMBOLS:
        raise Unsupported(
            f"attention: {kind}_mod is a callable in a graph of PyTorch {torch.__version__}; expected 2.9 or newer, or a program made "
            f"before, with fovea.{kind}_mod(...)"
        )
    return trace_in_graph(_abi.SCORE_MOD if kind == "score" else _abi.MASK_MOD, source, _MODE)


def _joined_masks(mask: Any, mask_mod: Any) -> Any:
    if isinstance(mask, Program) or isinstance(mask_mod, (Program, str)):
        raise Unsupported("attention: mask and mask_mod are both programs in a compiled graph; join them before, with &")
    return lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx) & mask_mod(b, h, q_idx, kv_idx)


def _as_i64(value: int, name: str) -> int:
    """64 bits as the operator's schema has them: signed."""
    number = bits_of(value, name, "attention")
    return number - 2**64 if number >= 2**63 else number


def attention(
    q: Any, k: Any, v: Any, *, causal: bool, align: str, window: Any, scale: float | None, softcap: float | None, bias: Any,
    alibi: Any, score_mod: Any, mask: Any, mask_mod: Any, segment_ids: Any, cu_seqlens: Any, sinks: Any, dropout: Any,
    return_lse: bool, layout: str, deterministic: bool,
) -> Any:  # fmt: skip
    """`fovea.attention` where a graph is compiled: all of it becomes one operator, with programs as texts."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, torch.Tensor):
            raise Unsupported(f"attention: {name} is a tensor in a compiled graph; expected a number (a factor of scores may multiply q)")
    check_bias(bias, "bias", "attention")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    names, tensors = ["q", "k", "v"], [q, k, v]
    score_text = mask_text = ""
    is_formula = isinstance(mask, Program) or callable(mask)
    segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, None)
    offsets = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    p, seed, offset, places = (0.0, 0, 0, None) if dropout is None else Dropout(*dropout)
    seeds: tuple[Any, Any] = (None, None)
    if isinstance(seed, torch.Tensor):
        seeds, seed, offset = (seed, offset), 0, 0
    else:
        seed, offset = _as_i64(seed, "dropout.seed"), _as_i64(offset, "dropout.offset")
    optional = (bias, alibi, None if is_formula else mask, segments[0], segments[1], sinks, offsets[0], offsets[1], *seeds, places)
    for name, tensor in zip(FIELDS[6:], optional):
        if tensor is not None:
            names.append(name)
            tensors.append(tensor)
    if score_mod is not None:
        score_text, captures = _text_and_captures("score", score_mod)
        names += [f"score:{name}" for name in captures]
        tensors += captures.values()
    seen = mask if is_formula else mask_mod
    if is_formula and mask_mod is not None:
        seen = _joined_masks(mask, mask_mod)
    if seen is not None:
        mask_text, captures = _text_and_captures("mask", seen)
        names += [f"mask:{name}" for name in captures]
        tensors += captures.values()
    left, right = (None, None) if window is None else window
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    out, lse = torch.ops.fovea.attention(
        tensors, ",".join(names), score_text, mask_text, causal, align, left, right, scale, softcap, p, seed, offset, layout,
        deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def apply(call: Call, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """The operator of a call, for modes that watch operators: fake tensors, tracers, selective checkpoints."""
    key, (score, mask) = call.kind.key, call.programs
    left, right = (None, None) if key.window is None else key.window
    seed, offset = map(_as_i64, call.words[:2], ("dropout.seed", "dropout.offset"))
    return torch.ops.fovea.attention(  # type: ignore[no-any-return]
        list(inputs), ",".join(call.kind.names), score.text_with_numbers if score else "", mask.text_with_numbers if mask else "",
        key.causal, key.align, left, right, key.scale, key.softcap, key.dropout_p, seed, offset, key.layout, key.deterministic,
    )  # fmt: skip
