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


def attention(
    q: Any, k: Any, v: Any, *, causal: bool, align: str, window: Any, scale: float | None, softcap: float | None, bias: Any,
    alibi: Any, score_mod: Any, mask: Any, mask_mod: Any, segment_ids: Any, cu_seqlens: Any, sinks: Any, dropout: Any,
    return_lse: bool, layout: str, deterministic: bool,
) -> Any:  # fmt: skip
    """`fovea.attention` where a graph is compiled: programs were made before, outside of it."""
    for name, program in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if program is not None and not isinstance(program, (Program, str)):
            raise Unsupported(
                f"attention: {name} is a callable in a compiled graph; make a program of it before, with fovea.{name}(...)"
            )
    names, tensors = ["q", "k", "v"], [q, k, v]
    score_text = mask_text = ""
    dense = None if isinstance(mask, Program) else mask
    segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, None)
    offsets = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    optional = (bias, alibi, dense, segments[0], segments[1], sinks, offsets[0], offsets[1])
    for name, tensor in zip(FIELDS[6:], optional):
        if tensor is not None:
            names.append(name)
            tensors.append(tensor)
    if isinstance(score_mod, str):
        score_text = score_mod
    elif score_mod is not None:
        score_text = score_mod.text_with_numbers
        names += [f"score:{name}" for name in score_mod.tensor_names]
        tensors += score_mod.tensors
    if isinstance(mask, Program) and mask_mod is not None:
        raise Unsupported("attention: mask and mask_mod are both programs in a compiled graph; join them before, with &")
    seen = mask if isinstance(mask, Program) else mask_mod
    if isinstance(seen, str):
        mask_text = seen
    elif seen is not None:
        mask_text = seen.text_with_numbers
        names += [f"mask:{name}" for name in seen.tensor_names]
        tensors += seen.tensors
    left, right = (None, None) if window is None else window
    p, seed, offset = (0.0, 0, 0) if dropout is None else (*dropout, 0)[:3]
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
