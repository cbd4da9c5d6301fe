"""What every call that attends has in common: keywords become a key, arrays and numbers; a key becomes structs."""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, NamedTuple, Union

from . import _abi
from ._arrays import Array, Framework, check_bias
from ._calls import Builder, offset, word_of_float
from ._programs import Program, mask_mod as make_mask_mod, score_mod as make_score_mod
from ._recipes import recipe_text
from .errors import InvalidArgument, Unsupported

ScoreMod = Union[str, Callable[..., Any], Program]
MaskMod = Union[str, Callable[..., Any], Program]


class Dropout(NamedTuple):
    """Which probabilities are dropped: a function of (seed, offset, batch, head, query, key) and of nothing else.

    Attributes
    ----------
    p : float
        In [0, 1]; what is kept is scaled by ``1 / (1 - p)``.
    seed, offset : int, or arrays of one i64, rank 0 or [1]
        Of 64 bits, signed or not. Arrays on the call's device are read when the call runs: a captured CUDA graph draws anew when they have changed.
    places : array, [batch + num_heads_q + seqlen_q + seqlen_kv] i32, optional
        Of a part of a problem: where its batch entries, query heads, queries and keys, one list behind the other, stand in the whole, so
        that the part drops what the whole does. Four keys from a multiple of 4 on stand side by side in the whole, from a multiple of 4 on.
    """

    p: float
    seed: Any
    offset: Any = 0
    places: Any = None


class Key(NamedTuple):
    """All that decides a template of forward's struct; what changes from call to call is in `Arguments`."""

    layout: str
    causal: bool
    align: str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    compute_dtype: str
    cpu_target: str
    deterministic: bool
    sm_margin: int
    quant: str | None
    present: int  # bit i: FIELDS[i] is given
    score: int  # addresses of programs, 0 for none
    mask: int
    num_score_tensors: int
    num_score_scalars: int
    num_mask_tensors: int
    num_mask_scalars: int


class Arguments(NamedTuple):
    """A key, with arrays in the order of the template's places and numbers in that of its words."""

    key: Key
    tensors: tuple[Array, ...]
    words: tuple[int, ...]
    kept: tuple[Program | None, Program | None]


FIELDS = (
    "q", "k", "v", "out", "lse", "row_max", "bias", "alibi", "mask", "segments_q", "segments_kv", "sinks",
    "cu_seqlens_q", "cu_seqlens_kv", "dropout_seed", "dropout_offset", "dropout_places", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_BITS = tuple(1 << index for index in range(len(FIELDS)))
_SWAPPED = {"q", "k", "v", "out"}
#: By word: whether axes 1 and 2 are exchanged.
LAYOUTS = {"bshd": 0, "bhsd": 1}


# What a named tuple's own constructor does, without looking at names: a microsecond of each call.
_new = tuple.__new__


def _pair(value: Any, name: str, function: str) -> tuple[Any, Any]:
    """One array for both sides, or one for each."""
    if isinstance(value, tuple):
        if len(value) != 2:
            raise InvalidArgument(f"{function}: {name} is a tuple of {len(value)} arrays; expected one array, or a pair for q and kv")
        return value
    return value, None


def _side(value: Any, function: str) -> int | None:
    if value is None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{function}: window has {value!r}; expected a whole number, or None for an open side") from None


def _window(value: Any, function: str) -> tuple[int | None, int | None] | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 2:
        raise InvalidArgument(f"{function}: window is {value!r}; expected (left, right), None for an open side")
    left, right = _side(value[0], function), _side(value[1], function)
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise InvalidArgument(f"{function}: window is {value!r}; expected numbers >= 0, or None for an open side")
    return left, right


def _number(value: Any, name: str, function: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{function}: {name} is {value!r}; expected a number") from None


# What a key holds must not change behind it: a tensor that somebody writes to would still find the template of its first value.


def _constant(value: Any, name: str, function: str, instead: str) -> float | None:
    """A keyword that is a number of the call, whatever holds it."""
    if value is None or type(value) is float:
        return value
    if getattr(value, "requires_grad", False):
        raise Unsupported(f"{function}: {name} requires a gradient, which a number of a call does not have; detach it, or {instead}")
    return _number(value, name, function)


def _flag(value: Any, name: str, function: str) -> bool:
    """A keyword that is yes or no, whatever holds it."""
    if type(value) is bool:
        return value
    try:
        for known in (False, True):
            if value == known:
                return known
    except (RuntimeError, TypeError, ValueError):  # of several numbers
        pass
    raise InvalidArgument(f"{function}: {name} is {value!r}; expected True or False")


def dropout_of(value: Any, function: str) -> Dropout:
    """What a keyword says."""
    if value is None:
        return _NO_DROPOUT
    if isinstance(value, Dropout):
        return value
    if isinstance(value, tuple) and 2 <= len(value) <= 4:
        return Dropout(*value)
    if isinstance(value, (int, float)) and value == 0:
        return _NO_DROPOUT
    raise InvalidArgument(f"{function}: dropout is {value!r}; expected Dropout(p, seed), so that the call can be repeated")


_NO_DROPOUT = Dropout(0.0, 0)


def _whole(value: Any, name: str, function: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{function}: {name} is {value!r}; expected a whole number") from None


def bits_of(value: Any, name: str, function: str) -> int:
    """A number of 64 bits, signed or not."""
    number = _whole(value, name, function)
    if not -(2**63) <= number < 2**64:
        raise InvalidArgument(f"{function}: {name} is {value!r}; expected a number of 64 bits")
    return number


def _seeds(seed: Any, offset: Any, function: str) -> tuple[int, int, Any, Any]:
    """Numbers for the struct, or arrays that the call reads."""
    are_arrays = [hasattr(value, "__dlpack__") for value in (seed, offset)]
    if all(are_arrays):
        return 0, 0, seed, offset
    if any(are_arrays):
        raise InvalidArgument(f"{function}: one of dropout.seed and dropout.offset is an array; expected two numbers, or two arrays")
    return bits_of(seed, "dropout.seed", function), bits_of(offset, "dropout.offset", function), None, None


def check_choice(value: Any, name: str, choices: Any, function: str) -> None:
    if value not in choices:
        raise InvalidArgument(f"{function}: {name} is {value!r}; expected one of {', '.join(map(repr, choices))}")


def resolve_mask(mask: Any, mask_mod: MaskMod | None) -> tuple[Any, Program | None]:
    """`mask` may be an array or a program; a program beside a mask_mod is joined with it."""
    program = None if mask_mod is None else make_mask_mod(mask_mod)
    if isinstance(mask, Program) or callable(mask):
        word = make_mask_mod(mask)
        return None, word if program is None else word & program
    return mask, program


def gather(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array = None,
    stream: int = 0,
    /,
    *,
    causal: bool = False,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array = None,
    alibi: Array = None,
    score_mod: ScoreMod | None = None,
    mask: Any = None,
    mask_mod: MaskMod | None = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    sinks: Array = None,
    dropout: Any = None,
    row_max: Array = None,
    layout: str = "bshd",
    compute_dtype: str = "auto",
    cpu_target: str = "auto",
    deterministic: bool = True,
    sm_margin: int = 0,
    quant: Any = None,
    accuracy: float | None = None,
    q_scale: Array = None,
    k_scale: Array = None,
    v_scale: Array = None,
    **unknown: Any,
) -> Arguments:
    """Everything that was said of a forward call, sorted into what a template holds and what it is filled with."""
    if unknown:  # in Python's words, by the name of the function that the user called
        raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(unknown))!r}")
    if quant is not None or accuracy is not None:
        quant = recipe_text(quant, accuracy, function)
    score_program = None if score_mod is None else make_score_mod(score_mod)
    if mask is not None or mask_mod is not None:
        mask, mask_program = resolve_mask(mask, mask_mod)
    else:
        mask_program = None
    if bias is not None:
        check_bias(bias, "bias", function)
    segments_q, segments_kv = (None, None) if segment_ids is None else _pair(segment_ids, "segment_ids", function)
    if cu_seqlens is None:
        cu_seqlens_q = cu_seqlens_kv = None
    else:
        cu_seqlens_q, cu_seqlens_kv = _pair(cu_seqlens, "cu_seqlens", function) if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    drop = dropout_of(dropout, function)
    seed, offset = drop.seed, drop.offset
    seed_array = offset_array = None
    if drop is not _NO_DROPOUT:
        seed, offset, seed_array, offset_array = _seeds(seed, offset, function)
    present = 0
    tensors = []
    for bit, value in zip(
        _BITS,
        (q, k, v, out, lse, row_max, bias, alibi, mask, segments_q, segments_kv, sinks, cu_seqlens_q, cu_seqlens_kv,
         seed_array, offset_array, drop.places, q_scale, k_scale, v_scale),
    ):
        if value is not None:
            present |= bit
            tensors.append(value)
    words = [seed, offset, stream]
    score = mask_address = 0
    counts = (0, 0, 0, 0)
    if score_program is not None:
        score = score_program.address
        tensors += score_program.tensors
        words += [word_of_float(value) for value in score_program.scalars]
        counts = (len(score_program.tensors), len(score_program.scalars), 0, 0)
    if mask_program is not None:
        mask_address = mask_program.address
        tensors += mask_program.tensors
        words += [word_of_float(value) for value in mask_program.scalars]
        counts = (counts[0], counts[1], len(mask_program.tensors), len(mask_program.scalars))
    key = _new(Key, (
        layout, _flag(causal, "causal", function), align, None if window is None else _window(window, function),
        _constant(scale, "scale", function, "multiply q by it"),
        _constant(softcap, "softcap", function, "write score_mod, whose tensors learn"),
        _constant(drop[0], "dropout.p", function, "keep it a number"), compute_dtype, cpu_target,
        _flag(deterministic, "deterministic", function), _whole(sm_margin, "sm_margin", function), quant, present, score,
        mask_address, *counts,
    ))  # fmt: skip
    return _new(Arguments, (key, tuple(tensors), tuple(words), (score_program, mask_program)))


def resolved(framework: Framework, arguments: Arguments, function: str | None = None) -> Arguments:
    """The arguments as DLPack carries them; a function that is named records no gradients, and refuses where some are recorded."""
    if framework.prepare is None:
        return arguments
    arguments, is_recorded = framework.prepare(arguments)
    if is_recorded and function is not None:
        raise Unsupported(f"{function}: gradients are recorded; call it under torch.no_grad(), or fovea.attention, which records them")
    return arguments


def check_key(key: Key, function: str) -> None:
    """What the library cannot see: words of these keywords, and how values are written."""
    check_choice(key.layout, "layout", LAYOUTS, function)
    check_choice(key.align, "align", _abi.ALIGN, function)
    check_choice(key.compute_dtype, "compute_dtype", _abi.COMPUTE_DTYPE, function)
    check_choice(key.cpu_target, "cpu_target", _abi.CPU_TARGET, function)
    if key.quant is not None and not isinstance(key.quant, str):
        raise InvalidArgument(f"{function}: quant is {key.quant!r}; expected the text of a recipe, such as 'accurate', a Recipe or its file")
    if key.softcap is not None and not key.softcap > 0:
        raise InvalidArgument(f"{function}: softcap is {key.softcap}; expected a number above 0, or None")
    if key.scale is not None and not math.isfinite(key.scale):
        raise InvalidArgument(f"{function}: scale is {key.scale}; expected a finite number")


def _static_struct(key: Key, function: str) -> _abi.ForwardArgs:
    args = _abi.sized(
        _abi.ForwardArgs,
        has_softmax_scale=int(key.scale is not None),
        softmax_scale=key.scale or 0.0,
        softcap=key.softcap or 0.0,
        causal=int(key.causal),
        align=_abi.ALIGN[key.align],
        compute_dtype=_abi.COMPUTE_DTYPE[key.compute_dtype],
        cpu_target=_abi.CPU_TARGET[key.cpu_target],
        allows_nondeterminism=int(not key.deterministic),
        sm_margin=key.sm_margin,
        score_program=key.score or None,
        num_score_tensors=key.num_score_tensors,
        num_score_scalars=key.num_score_scalars,
        mask_program=key.mask or None,
        num_mask_tensors=key.num_mask_tensors,
        num_mask_scalars=key.num_mask_scalars,
    )
    args.dropout.p = key.dropout_p
    if key.window is not None:
        left, right = key.window
        args.has_window_left, args.window_left = int(left is not None), left or 0
        args.has_window_right, args.window_right = int(right is not None), right or 0
    return args


def add_forward(builder: Builder, arguments: Arguments, function: str) -> int:
    """Adds forward's struct with its places, in the order of `gather`; where it starts."""
    key = arguments.key
    check_key(key, function)
    struct = _abi.ForwardArgs
    static = _static_struct(key, function)
    if key.quant is not None:
        static.quant = recipe = key.quant.encode()
        builder.kept.append(recipe)  # the struct has its address
    at = builder.add(static)
    # The struct has their addresses, which must not come again; tensors that they capture are the calls'.
    builder.kept += [program._handle for program in arguments.kept if program is not None]
    for index, field in enumerate(FIELDS):
        if key.present >> index & 1:
            builder.tensor(at + offset(struct, field), field, key.layout == "bhsd" and field in _SWAPPED)
    dropout = at + offset(struct, "dropout")
    builder.word(dropout + offset(_abi.Dropout, "seed"))
    builder.word(dropout + offset(_abi.Dropout, "offset"))
    builder.word(at + offset(struct, "stream"))
    for kind, program in zip(("score", "mask"), arguments.kept):
        if program is not None:
            _add_captures(builder, at, kind, program)
    return at


def _add_captures(builder: Builder, at: int, kind: str, program: Program) -> None:
    pointers = builder.add(8 * len(program.tensors))
    builder.point(at + offset(_abi.ForwardArgs, f"{kind}_tensors"), pointers)
    for index, name in enumerate(program.tensor_names):
        builder.tensor(pointers + 8 * index, name)
    numbers = builder.add(8 * len(program.scalars))
    builder.point(at + offset(_abi.ForwardArgs, f"{kind}_scalars"), numbers)
    for index in range(len(program.scalars)):
        builder.word(numbers + 8 * index)
