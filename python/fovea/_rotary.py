"""Rotary position embedding of queries and keys that no cache turns."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _abi
from ._arrays import Array, check_writable, framework_of
from ._attention import keep_template
from ._calls import Builder, Template, offset
from ._library import address_of
from .errors import InvalidArgument, Unsupported

_ROTARY = address_of("fovea_rotary")
_FUNCTION = "rotary"
_FIELDS = ("x", "cos", "sin", "positions", "offsets", "cu_seqlens")
_SWAPPED = ("x", "out")


class RotaryKey(NamedTuple):
    """All that decides a template."""

    given: tuple[str, ...]  # of _FIELDS, in their order
    is_interleaved: bool
    is_conjugate: bool
    layout: str


class RotaryArguments(NamedTuple):
    """A key, and its arrays in the order of `given`."""

    key: RotaryKey
    tensors: tuple[Array, ...]


_templates: dict[Any, Template] = {}

#: What PyTorch differentiates, batches and compiles, (call, is_in_place) -> the rows turned, and whether it compiles a
#: graph. Set by fovea.torch, which is imported by the first call that PyTorch watches.
recorded: Any = None
is_compiling: Any = None


def _recorder() -> Any:
    from . import torch  # noqa: F401, which sets it

    return recorded


def gather(inputs: tuple[Array | None, ...], is_interleaved: bool, is_conjugate: bool, layout: str) -> RotaryArguments:
    """A call of inputs in the order of _FIELDS, sorted into what a template holds and what it is filled with."""
    given = {name: array for name, array in zip(_FIELDS, inputs) if array is not None}
    return RotaryArguments(RotaryKey(tuple(given), is_interleaved, is_conjugate, layout), tuple(given.values()))


def inputs_of(call: RotaryArguments) -> tuple[Array, ...]:
    """What `gather` was given."""
    given = dict(zip(call.key.given, call.tensors))
    return tuple(given.get(name) for name in _FIELDS)


def _template(key: RotaryKey) -> Template:
    found = _templates.get(key)
    if found is not None:
        return found
    if key.layout not in ("bshd", "bhsd"):
        raise InvalidArgument(f"{_FUNCTION}: layout is {key.layout!r}; expected one of 'bshd', 'bhsd'")
    builder = Builder(_FUNCTION)
    struct = _abi.RotaryArgs
    flags = {"is_interleaved": int(key.is_interleaved), "is_conjugate": int(key.is_conjugate)}
    at = builder.add(_abi.sized(struct, **flags))
    for name in ("out", *key.given):
        builder.tensor(at + offset(struct, name), name, key.layout == "bhsd" and name in _SWAPPED)
    builder.word(at + offset(struct, "stream"))
    return keep_template(_templates, key, builder.done())


def turn(call: RotaryArguments, out: Array, stream: int) -> None:
    """Writes the rows of `call`, turned, to `out`."""
    _template(call.key).invoke((out, *call.tensors), (stream,), _ROTARY)


def rotary(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    positions: Array | None = None,
    offsets: Array | None = None,
    cu_seqlens: Array | None = None,
    is_interleaved: bool = False,
    is_conjugate: bool = False,
    out: Array | None = None,
    layout: str = "bshd",
) -> Any:
    """Rotary position embedding: pair j of each head turns by the angle of its row's position.

    ``(a, b) -> (a cos - b sin, a sin + b cos)``, in f32, rounded once; columns from rotary_dim on stay as they are.
    `decode` and `append_to_cache` turn theirs by themselves. PyTorch records the gradient by x, which is the rotation
    back; angles have none.

    Parameters
    ----------
    x : array, [batch, seqlen, num_heads, head_dim], f32, f16 or bf16
        ``layout="bhsd"``: [batch, num_heads, seqlen, head_dim]. With `cu_seqlens` packed: [total, num_heads, head_dim].
        Any strides.
    cos, sin : array, [max_positions, rotary_dim / 2] f32, f16 or bf16
        rotary_dim is at most head_dim, and at most 512.
    positions : array, [batch, seqlen], packed [total], i32 or i64, optional
        The position of each row; 0, 1, ... in each sequence unless given.
    offsets : array, [batch] i32 or i64, optional
        In place of positions: that of each sequence's first row.
    cu_seqlens : array, [batch + 1] i32 or i64, optional
        Where each packed sequence begins; rows behind the last one are copied.
    is_interleaved : bool
        Pairs (2j, 2j + 1) instead of (j, j + rotary_dim / 2).
    is_conjugate : bool
        Turns back, by the negative angle.
    out : array, shape of x, f32, f16 or bf16, optional
        Written, and returned; x itself: in place.
    layout : {"bshd", "bhsd"}
        Order of the dimensions of x and out.

    Returns
    -------
    array
        Shape and dtype of x, of x's library.

    Raises
    ------
    InvalidArgument
        A shape, dtype or value is wrong, or a position has no angles; nothing was written. On a GPU what positions hold
        is not looked at: rows of a negative one are copied, beyond the last angles rows take those.
    Unsupported
        Gradients are recorded and `out` is another array than x, or an angle wants one.

    Examples
    --------
    >>> q = fovea.rotary(q, cos, sin)
    >>> fovea.rotary(k, cos, sin, offsets=lengths, out=k)  # in place, behind the tokens that are there
    """
    call = gather((x, cos, sin, positions, offsets, cu_seqlens), is_interleaved, is_conjugate, layout)
    if is_compiling is not None and is_compiling():
        if out is not None:
            raise Unsupported("rotary: out in a compiled graph; expected none")
        return recorded(call, False)
    framework = framework_of(x, _FUNCTION, "x")
    if out is not None:
        check_writable(out, "out", _FUNCTION)
        if hasattr(out, "is_neg") and out.is_neg():
            raise InvalidArgument("rotary: out is a negative view; expected a tensor whose elements have their own signs")
    if framework.prepare is not None:
        call, is_recorded = framework.prepare(call)
        if is_recorded or (framework.is_observed is not None and framework.is_observed()):
            if out is not None and out is not x:
                raise Unsupported("rotary: out where gradients are recorded or PyTorch watches; expected none, or x itself")
            return (recorded or _recorder())(call, out is x)
    if out is None:
        out = framework.empty(x, tuple(x.shape), None)
    turn(call, out, framework.stream(x))
    return framework.finish(out)
