"""Attention as nodes of PyTorch's graph: reverse and forward mode, both of both, and batching by vmap.

Forward keeps lse; a gradient is a node of its own where somebody may differentiate it, and its gradient takes the plain path in
fp64, which `fovea_explain_double_backward` reports.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.autograd import forward_ad

from .._calls import extension as _extension
from .._forward import Arguments
from ..errors import Unsupported
from . import _derivatives, _ops, _vmap
from ._derivatives import Call

_are_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled


def _may_be_differentiated() -> bool:
    return bool(_is_grad_enabled() or _are_transforms_active() or forward_ad._current_level >= 0)


class _Node(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Functions of (call, words..., tensors...); a place of vmap is a call of its own."""

    num_words = 0  # arguments between the call and the tensors

    @classmethod
    def looped(cls, info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
        first = 1 + cls.num_words
        return _vmap.loop(cls, info, in_dims[first:], args[0], tuple(args[1:first]), args[first:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.call = inputs[0]


class _Attention(_Node):
    """(call, *inputs) -> (out, lse)."""

    @staticmethod
    def forward(call: Call, *inputs: Any) -> tuple[Any, Any]:
        return _derivatives.forward(call, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        ctx.call, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        *inputs, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if dout is None:
            if dlse is None:
                return (None,) * (1 + len(inputs))
            dout = torch.zeros_like(out)
        if _may_be_differentiated():
            made = iter(_Backward.apply(ctx.call, needed, dout, dlse, out, lse, *inputs))
        else:
            made = iter(_derivatives.backward(ctx.call, needed, dout, dlse, out, lse, inputs))
        return None, *(next(made) if is_needed else None for is_needed in needed)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        given = tuple(x is not None for x in tangents)
        moved: tuple[Any, Any] = _Jvp.apply(ctx.call, given, out, lse, *inputs, *(x for x in tangents if x is not None))
        return moved

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        call, *inputs = args
        if not _vmap.can_fold(call, in_dims[1:], inputs):
            return _Attention.looped(info, in_dims, args)
        results = _Attention.apply(call, *_vmap.fold(call, in_dims[1:], inputs, info.batch_size))
        return tuple(_vmap.unfold(x, info.batch_size) for x in results), (0, 0)


class _Recorded(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """_Attention where no transform is active: PyTorch takes a sixth of the time for a forward that saves by itself."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Any) -> tuple[Any, Any]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        output = _derivatives.forward(call, inputs)
        ctx.save_for_backward(*inputs, *output)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs, *output)
        return output

    backward: Any = _Attention.backward
    jvp = _Attention.jvp


class _Quick(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """_Recorded of a call that the extension has read: (recorded call, *inputs) -> out, or (out, lse) where lse is returned."""

    forward: Any = None if _extension is None else staticmethod(_extension.attend_recorded)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        if not _may_be_differentiated():
            made = _extension.differentiate(ctx.recorded, ctx.needs_input_grad, dout, dlse, *ctx.saved_tensors)
            if made is not NotImplemented:
                return made
        ctx.call = _derivatives.call_of_recorded(ctx.recorded, ctx.saved_tensors[:-2])
        return _Attention.backward(ctx, dout, dlse)


def _attend(recorded: Any, *inputs: Any) -> tuple[Any, Any]:
    """out and lse of a recorded call whose arrays are for Python to read."""
    return _derivatives.forward(_derivatives.call_of_recorded(recorded, inputs), inputs)


class _Backward(_Node):
    """(call, needed, dout, dlse or None, out, lse, *inputs) -> gradients by the inputs that are needed."""

    num_words = 1

    @staticmethod
    def forward(call: Call, needed: tuple[bool, ...], dout: Any, dlse: Any, out: Any, lse: Any, *inputs: Any) -> tuple[Any, ...]:
        return _derivatives.backward(call, needed, dout, dlse, out, lse, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.call, ctx.needed, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> tuple[Any, ...]:
        dout, dlse, out, lse, *inputs = ctx.saved_tensors
        wanted = ctx.needs_input_grad[6:]
        if all(x is None for x in directions):
            return (None,) * (6 + len(inputs))
        grad_dout, grad_dlse, *made = double_backward(ctx.call, ctx.needed, wanted, directions, dout, dlse, out, lse, inputs)
        # Of all that depends on q, k and v; out and lse are not looked at.
        return None, None, grad_dout, grad_dlse, None, None, *made

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, dout_tangent: Any, dlse_tangent: Any, ___: Any, ____: Any, *tangents: Any) -> tuple[Any, ...]:
        dout, dlse, out, lse, *inputs = ctx.saved_tensors
        # The Hessian is symmetric: along the inputs, gradients move by the gradient of themselves along the same direction.
        moved: list[Any] = [torch.zeros_like(x) if is_needed else None for x, is_needed in zip(inputs, ctx.needed)]
        if any(x is not None for x in tangents):
            given = tuple(x is not None for x in tangents)
            along = [x for x in tangents if x is not None]
            _, _, *moved = double_backward(ctx.call, given, ctx.needed, along, dout, dlse, out, lse, inputs)
        if dout_tangent is not None or dlse_tangent is not None:
            seed = torch.zeros_like(out) if dout_tangent is None else dout_tangent
            made = iter(_Backward.apply(ctx.call, ctx.needed, seed, dlse_tangent, out, lse, *inputs))
            moved = [x + next(made) if is_needed else None for x, is_needed in zip(moved, ctx.needed)]
        return tuple(x for x in moved if x is not None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        call, needed, dout, dlse, out, lse, *inputs = args
        input_dims = in_dims[6:]
        names = [name for name, is_needed in zip(call.kind.names, needed) if is_needed]
        # A gradient by what sequences share would be summed over the places.
        if not set(names) <= {"q", "k", "v"} or not _vmap.can_fold(call, input_dims, inputs):
            return _Backward.looped(info, in_dims, args)
        num_places = info.batch_size

        def place_by_place(x: Any, dim: int | None) -> Any:
            if x is None:
                return None
            x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
            return x.expand(num_places, *x.shape[1:]).reshape(num_places * x.shape[1], *x.shape[2:])

        seeds = [place_by_place(x, dim) for x, dim in zip((dout, dlse, out, lse), in_dims[2:6])]
        made = _Backward.apply(call, needed, *seeds, *_vmap.fold(call, input_dims, inputs, num_places))
        return tuple(_vmap.unfold(x, num_places) for x in made), (0,) * len(made)


def double_backward(
    call: Call, given: Sequence[bool], wanted: Sequence[bool], directions: Sequence[Any], dout: Any, dlse: Any, out: Any, lse: Any,
    inputs: Sequence[Any],
) -> list[Any]:  # fmt: skip
    """Gradients by dout, by dlse (None where there is none) and by each of the inputs, None where it is not wanted.

    `given` says of which inputs the directions are; a direction that is None is 0.
    """
    remaining = iter(directions)
    along = [next(remaining) if is_given else None for is_given in given]
    moves = tuple(x is not None for x in along)
    tensors = (dout, dlse, out, lse, *inputs, *(x for x in along if x is not None))
    made = list(_DoubleBackward.apply(call, moves, tuple(wanted), *tensors))
    grad_dout = made.pop(0)
    grad_dlse = None if dlse is None else made.pop(0)
    rest = iter(made)
    return [grad_dout, grad_dlse, *(next(rest) if is_wanted else None for is_wanted in wanted)]


class _DoubleBackward(_Node):
    """(call, moves, wanted, dout, dlse or None, out, lse, *inputs, *directions) -> gradients by dout, dlse, inputs."""

    num_words = 2

    @staticmethod
    def forward(
        call: Call, moves: tuple[bool, ...], wanted: tuple[bool, ...], dout: Any, dlse: Any, out: Any, lse: Any, *tensors: Any
    ) -> tuple[Any, ...]:
        inputs, given = tensors[: len(moves)], iter(tensors[len(moves) :])
        directions = [next(given) if is_given else None for is_given in moves]
        return _derivatives.double_backward(call, wanted, directions, dout, dlse, out, lse, inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported("attention: a gradient of a gradient of a gradient; expected two at most")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise Unsupported("attention: a third derivative; expected two at most")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _DoubleBackward.looped(info, in_dims, args)


class _Jvp(_Node):
    """(call, given, out, lse, *inputs, *tangents) -> tangents of out and lse."""

    num_words = 1

    @staticmethod
    def forward(call: Call, given: tuple[bool, ...], out: Any, lse: Any, *tensors: Any) -> tuple[Any, Any]:
        inputs, tangents = _split(given, tensors)
        return _derivatives.jvp(call, tangents, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        ctx.call, ctx.given, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        inputs, tangents = _split(ctx.given, tensors)
        if dout is None and dlse is None:
            return (None,) * (4 + len(tensors))
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = ctx.needs_input_grad[4 : 4 + len(inputs)]
        by_inputs: list[Any] = [None] * len(inputs)
        if any(wanted):
            along = [x for x in tangents if x is not None]
            _, _, *by_inputs = double_backward(ctx.call, ctx.given, wanted, along, dout, dlse, out, lse, inputs)
        by_tangents = _Backward.apply(ctx.call, ctx.given, dout, dlse, out, lse, *inputs)
        return None, None, None, None, *by_inputs, *by_tangents

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise Unsupported("attention: forward mode of forward mode; take one of the two derivatives in reverse mode")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _Jvp.looped(info, in_dims, args)


def _split(given: tuple[bool, ...], tensors: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Inputs, and a tangent or None for each."""
    remaining = iter(tensors[len(given) :])
    return tuple(tensors[: len(given)]), [next(remaining) if is_given else None for is_given in given]


if _extension is not None:
    #: (recorded call, *inputs) -> what `fovea.attention` returns.
    record = _Quick.apply
    _extension.set_recorder(record, _attend)


_num_modes = torch._C._len_torch_dispatch_stack
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def _autocast(arguments: Arguments) -> Arguments:
    """q, k and v in the dtype that autocast chose, as those of PyTorch's own attention; bias, sinks and captures keep theirs."""
    device = arguments.tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return arguments
    dtype = torch.get_autocast_dtype(device)
    cast = tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in arguments.tensors[:3])
    return arguments._replace(tensors=cast + arguments.tensors[3:])


def attention(arguments: Arguments, return_lse: bool) -> Any:
    """The call as PyTorch's graph, transforms, modes and casts want it. What programs capture must be PyTorch's too."""
    if _is_any_autocast_enabled():
        arguments = _autocast(arguments)
    inputs = _derivatives.inputs_of(arguments)
    if _are_transforms_active():
        call = _derivatives.call_of(arguments)
        _derivatives.check(call, inputs)
        out, lse = _Attention.apply(call, *inputs)
    elif _num_modes():
        call = _derivatives.call_of(arguments)
        _derivatives.check(call, inputs)
        out, lse = _ops.apply(call, inputs)
    else:
        made = arguments.tensors[3]
        call = _derivatives.call_of(arguments, made if made.dtype == inputs[0].dtype else None)
        _derivatives.check(call, inputs)
        out, lse = _Recorded.apply(call, *inputs)
    return (out, lse) if return_lse else out
