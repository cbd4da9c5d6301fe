"""`fovea::attention` and its gradient as operators of PyTorch, for compiled graphs and exported programs.

Programs travel as texts in the operators' arguments, so that a graph stays valid in another process. Eager calls do not come here: a
node of autograd is quicker.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _abi
from .._attention import lse_shape
from .._forward import FIELDS, gather
from .._programs import Program, split_lets
from .._trace import torch_mode, trace_in_graph
from ..errors import Unsupported
from . import _derivatives
from ._derivatives import Call

_FEATURES = (
    "str names, str score, str mask, bool causal, str align, int? left, int? right, float? scale, float? softcap, float p, int seed, "
    "int offset, str layout, bool deterministic"
)
_library = torch.library.Library("fovea", "DEF")
_library.define(f"attention(Tensor[] tensors, {_FEATURES}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] tensors, bool[] wanted, {_FEATURES}) -> Tensor[]"
)


def _program(kind: str, text: str, given: dict[str, Any]) -> Program | None:
    if not text:
        return None
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
        "attention", q, given["k"], given["v"], None, None, **fields,
        segment_ids=pairs["segments"] if pairs["segments"][0] is not None else None,
        cu_seqlens=pairs["cu_seqlens"] if pairs["cu_seqlens"][0] is not None else None,
        score_mod=_program("score", score, given), mask_mod=_program("mask", mask, given), causal=causal, align=align,
        window=None if left is None and right is None else (left, right), scale=scale, softcap=softcap,
        dropout=(p, seed, offset) if p else None, layout=layout, deterministic=deterministic,
        stream=torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0,
    )  # fmt: skip
    return _derivatives.call_of(arguments), _derivatives.inputs_of(arguments)


def _outputs(tensors: list[Any], layout: str) -> tuple[Any, Any]:
    q, v = tensors[0], tensors[2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(tuple(q.shape), layout), dtype=torch.float32)


def _forward(tensors: list[Any], *features: Any) -> tuple[Any, Any]:
    return _derivatives.forward(*_call(tensors, *features))


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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    tensors, *ctx.features = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(context: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, out, lse = context.saved_tensors
    names = context.features[0].split(",")
    wanted = [_derivatives.has_derivative(name) and tensor.is_floating_point() for name, tensor in zip(names, tensors)]
    dout = torch.zeros_like(out) if dout is None else dout
    made = iter(torch.ops.fovea.attention_backward(dout, dlse, out, lse, tensors, wanted, *context.features))
    gradients = [next(made) if is_wanted else None for is_wanted in wanted]
    return (gradients, *(None for _ in context.features))


torch.library.register_autograd("fovea::attention", _differentiate, setup_context=_setup_context, lib=_library)


def _at_each_place(operator: Any) -> Any:
    """What vmap does with an operator in a graph: a call for each place."""

    def call(info: Any, in_dims: Any, *args: Any) -> Any:
        def part(value: Any, dims: Any, place: int) -> Any:
            if isinstance(value, list):
                return [part(x, dim, place) for x, dim in zip(value, dims if isinstance(dims, (list, tuple)) else [dims] * len(value))]
            return value if dims is None else value.select(dims, place)

        results = [operator(*(part(x, dims, place) for x, dims in zip(args, in_dims))) for place in range(info.batch_size)]
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


def attention(
    q: Any, k: Any, v: Any, *, causal: bool, align: str, window: Any, scale: float | None, softcap: float | None, bias: Any,
    alibi: Any, score_mod: Any, mask: Any, mask_mod: Any, segment_ids: Any, cu_seqlens: Any, sinks: Any, dropout: Any,
    return_lse: bool, layout: str, deterministic: bool,
) -> Any:  # fmt: skip
    """`fovea.attention` where a graph is compiled: all of it becomes one operator, with programs as texts."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    names, tensors = ["q", "k", "v"], [q, k, v]
    score_text = mask_text = ""
    is_formula = isinstance(mask, Program) or callable(mask)
    segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, None)
    offsets = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    p, seed, offset = (0.0, 0, 0) if dropout is None else (*dropout, 0)[:3]
    seeds = (None, None)
    if isinstance(seed, torch.Tensor):
        seeds, seed, offset = (seed, offset), 0, 0
    optional = (bias, alibi, None if is_formula else mask, segments[0], segments[1], sinks, offsets[0], offsets[1], *seeds)
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
    seed, offset = call.words[:2]
    return torch.ops.fovea.attention(  # type: ignore[no-any-return]
        list(inputs), ",".join(call.kind.names), score.text_with_numbers if score else "", mask.text_with_numbers if mask else "",
        key.causal, key.align, left, right, key.scale, key.softcap, key.dropout_p, seed, offset, key.layout, key.deterministic,
    )  # fmt: skip
