"""`fovea.rotary` as a node of PyTorch's graph, and as the operator `fovea::rotary` for compiled graphs and modes.

It is linear in x: its derivative in forward mode is itself, in reverse mode the rotation back, of any order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._rotary import RotaryArguments, gather, inputs_of, turn
from ..errors import InvalidArgument, Unsupported
from ._ops import _library

_library.define(
    "rotary(Tensor x, Tensor cos, Tensor sin, Tensor? positions, Tensor? offsets, Tensor? cu_seqlens, bool is_interleaved, "
    "bool is_conjugate, str layout) -> Tensor"
)
_NUM_TENSORS, _NUM_WORDS = 6, 3  # of the operator's arguments; the words are is_interleaved, is_conjugate, layout


def _stream(x: Any) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def _turn_into(out: Any, *args: Any) -> Any:
    turn(gather(args[:_NUM_TENSORS], *args[_NUM_TENSORS:]), out, _stream(out))
    return out


def _turned(x: Any, *rest: Any) -> Any:
    return _turn_into(x.new_empty(x.shape), x.resolve_neg(), *rest)


def _fake(x: Any, *_: Any) -> Any:
    return x.new_empty(x.shape)


for _device in ("CPU", "CUDA"):
    _library.impl("rotary", _turned, _device)
torch.library.register_fake("fovea::rotary", _fake, lib=_library)


def _back(words: tuple[bool, bool, str]) -> tuple[bool, bool, str]:
    is_interleaved, is_conjugate, layout = words
    return is_interleaved, not is_conjugate, layout


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:_NUM_TENSORS])
    ctx.words = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, dout: Any) -> tuple[Any, ...]:
    dx = torch.ops.fovea.rotary(dout, *ctx.saved_tensors, *_back(ctx.words))
    return dx, *(None,) * (_NUM_TENSORS - 1 + _NUM_WORDS)


torch.library.register_autograd("fovea::rotary", _differentiate, setup_context=_setup_context, lib=_library)


def _at_each_place(operator: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, int]:
    """What vmap does: a call for each place."""

    def part(value: Any, dim: int | None, place: int) -> Any:
        return value if dim is None else value.select(dim, place)

    places = range(info.batch_size)
    return torch.stack([operator(*(part(x, dim, place) for x, dim in zip(args, in_dims))) for place in places]), 0


if hasattr(torch.library, "register_vmap"):  # PyTorch 2.5 and newer
    torch.library.register_vmap("fovea::rotary", functools.partial(_at_each_place, torch.ops.fovea.rotary), lib=_library)


class _Rotary(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(is_in_place, *arguments of the operator) -> rows turned."""

    @staticmethod
    def forward(is_in_place: bool, x: Any, *rest: Any) -> Any:
        return _turn_into(x, x, *rest) if is_in_place else _turned(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        is_in_place, x, *rest = inputs
        if is_in_place:
            ctx.mark_dirty(x)
        ctx.is_in_place = is_in_place
        ctx.save_for_backward(*rest[: _NUM_TENSORS - 1])
        ctx.save_for_forward(*rest[: _NUM_TENSORS - 1])
        ctx.words = tuple(rest[_NUM_TENSORS - 1 :])

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        dx = _Rotary.apply(False, dout, *ctx.saved_tensors, *_back(ctx.words))
        return None, dx, *(None,) * (_NUM_TENSORS - 1 + _NUM_WORDS)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Any, *__: Any) -> Any:
        # In place, PyTorch wants the tangent itself, as it wants x.
        return _Rotary.apply(ctx.is_in_place, tangent, *ctx.saved_tensors, *ctx.words)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], is_in_place: bool, *args: Any) -> Any:
        if is_in_place:
            raise Unsupported("rotary: out in torch.func.vmap; expected none")
        return _at_each_place(functools.partial(_Rotary.apply, False), info, in_dims[1:], *args)


def _check(inputs: tuple[Any, ...]) -> None:
    for name, table in zip(("cos", "sin"), inputs[1:3]):
        if not isinstance(table, torch.Tensor):
            raise InvalidArgument(f"rotary: {name} is a {type(table).__name__}; expected a tensor, as x")
        if table.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"rotary: {name} wants a gradient; expected angles without, {name}.detach()")


def rotary(call: RotaryArguments, is_in_place: bool) -> Any:
    """The call as PyTorch's graph, transforms and modes want it."""
    inputs = inputs_of(call)
    _check(inputs)
    words = call.key[1:]
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        return _Rotary.apply(is_in_place, *inputs, *words)
    turned = torch.ops.fovea.rotary(*inputs, *words)
    return inputs[0].copy_(turned) if is_in_place else turned
