"""Attention as a node of PyTorch's graph: forward keeps lse, backward is `fovea_attention_backward`."""

from __future__ import annotations

from typing import Any

import torch

from .._attention import forward_template, lse_shape, run_backward
from .._forward import FIELDS, Arguments
from .._library import address_of
from ..errors import InvalidArgument, Unsupported

_ATTENTION = address_of("fovea_attention_forward")
_OUT, _LSE, _ROW_MAX = (FIELDS.index(name) for name in ("out", "lse", "row_max"))
_WRITTEN = {"out", "lse", "row_max"}
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks"}
CAPTURED_FIELDS = {"bias", "alibi"}


def _fields(arguments: Arguments) -> list[str]:
    """The names of a call's tensors; what programs capture has "score:NAME" or "mask:NAME"."""
    names = [name for index, name in enumerate(FIELDS) if arguments.key.present >> index & 1]
    for kind, program in zip(("score", "mask"), arguments.kept):
        names += [f"{kind}:{name}" for name in program.tensor_names] if program is not None else []
    return names


def _with_outputs(arguments: Arguments, inputs: tuple[Any, ...], names: list[str], out: Any, lse: Any) -> Arguments:
    """The call of these inputs, which writes out and lse and nothing else."""
    given = dict(zip(names, inputs))
    given |= {"out": out, "lse": lse}
    order = [name for name in FIELDS if name in given] + [name for name in names if ":" in name]
    present = sum(1 << index for index, name in enumerate(FIELDS) if name in given)
    return arguments._replace(
        key=arguments.key._replace(present=present), tensors=tuple(given[name] for name in order)
    )


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(arguments, names, *inputs) -> (out, lse)."""

    @staticmethod
    def forward(arguments: Arguments, names: list[str], *inputs: Any) -> tuple[Any, Any]:
        q, v = inputs[0], inputs[2]
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(lse_shape(tuple(q.shape), arguments.key.layout), dtype=torch.float32)
        call = _with_outputs(arguments, inputs, names, out, lse)
        forward_template(call, "attention").invoke(call.tensors, call.words, _ATTENTION)
        return out, lse

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        context.arguments, context.names, *tensors = inputs
        context.set_materialize_grads(False)
        context.save_for_backward(*tensors, *output)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(context: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        *inputs, out, lse = context.saved_tensors
        names, needed = context.names, context.needs_input_grad[2:]
        call = _with_outputs(context.arguments, tuple(inputs), names, out, lse)
        wanted, captured = {}, {}
        made: list[Any] = [None] * len(inputs)
        for index, (name, tensor, is_needed) in enumerate(zip(names, inputs, needed)):
            if not is_needed:
                continue
            made[index] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if name in GRADIENTS:
                wanted[GRADIENTS[name]] = made[index]
            else:
                captured[name.removeprefix("score:")] = made[index]
        if dout is None:
            dout = torch.zeros_like(out)
        run_backward(call, dout.resolve_neg(), None if dlse is None else dlse.resolve_neg(), wanted, captured)
        return None, None, *made


def _check(arguments: Arguments, names: list[str], inputs: list[Any]) -> None:
    for name, tensor in zip(names, inputs):
        if not tensor.requires_grad or name in GRADIENTS or name in CAPTURED_FIELDS or name.startswith("score:"):
            continue
        raise Unsupported(
            f"attention: {name.removeprefix('mask:')} requires a gradient, which a mask does not have; detach it, or move it to "
            "score_mod"
        )
    program = arguments.kept[0]
    clash = CAPTURED_FIELDS & set(program.tensor_names if program is not None else ()) & set(names)
    if clash:
        name = clash.pop()
        raise InvalidArgument(f"attention: {name} and an array of that name in score_mod; rename that of the program")


def attention(arguments: Arguments, return_lse: bool) -> Any:
    """The call with its gradients recorded. What programs capture must be PyTorch's too."""
    names = _fields(arguments)
    for name, tensor in zip(names, arguments.tensors):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"attention: {name} is a {type(tensor).__name__} where gradients are recorded; expected a torch.Tensor")
    kept = [(name, tensor) for name, tensor in zip(names, arguments.tensors) if name not in _WRITTEN]
    inputs = [tensor for _, tensor in kept]
    names = [name for name, _ in kept]
    _check(arguments, names, inputs)
    out, lse = _Attention.apply(arguments, names, *inputs)
    return (out, lse) if return_lse else out
