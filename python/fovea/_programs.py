"""Score and mask programs: formulas with what they read, from text, from a Python callable, or as a word of the library."""

from __future__ import annotations

import ctypes
import math
import operator
import re
import threading
import warnings
from collections import OrderedDict
from typing import Any, Callable, Literal, Mapping, Union

from . import _abi
from ._arrays import Array, NotAnArray, check_bias, element_of, root_module
from ._library import check, library, take_text
from .errors import InvalidArgument

Capture = Union[Array, int, float]
Align = Literal["bottom_right", "top_left"]

_KIND_NAMES = ("score_mod", "mask_mod")
# A name, not the exponent of a number or the end of a hexadecimal one.
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_LET = re.compile(r"\s*let\s+([A-Za-z_]\w*)\s*=")


class _Handle:
    """A parsed program of the library; destroyed with its last user."""

    def __init__(self, kind: int, text: str, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> None:
        slots = (_abi.TensorSlot * len(tensors))(
            *(_abi.TensorSlot(name.encode(), _abi.DataType(code, bits, 1), rank) for name, code, bits, rank in tensors)
        )
        numbers = (_abi.ScalarSlot * len(scalars))(*(_abi.ScalarSlot(name.encode(), type_) for name, type_ in scalars))
        args = _abi.sized(
            _abi.ProgramArgs,
            kind=kind,
            text=text.encode(),
            tensors=slots,
            num_tensors=len(tensors),
            scalars=numbers,
            num_scalars=len(scalars),
        )
        handle = ctypes.c_void_p()
        check("fovea_program_create", ctypes.byref(args), ctypes.byref(handle), text=text)
        self.address = handle.value or 0
        self._destroy = library.fovea_program_destroy

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            self._destroy(address)


_handles: OrderedDict[tuple[Any, ...], _Handle] = OrderedDict()
_handles_lock = threading.Lock()
_MAX_HANDLES = 512


def _handle_of(kind: int, text: str, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> _Handle:
    key = (kind, text, tensors, scalars)
    with _handles_lock:
        found = _handles.get(key)
        if found is not None:
            _handles.move_to_end(key)
            return found
    made = _Handle(*key)
    with _handles_lock:
        _handles[key] = made
        while len(_handles) > _MAX_HANDLES:
            _handles.popitem(last=False)
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _checked_capture(name: str, value: Any) -> Capture:
    """A number, or an array of a dtype that formulas read; float64 is cast to float32, which a warning says."""
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, bool) else value
    if root_module(value) == "torch" and value.is_neg():
        value = value.resolve_neg()  # its sign is a flag that DLPack does not carry
    try:
        code, bits, _ = element_of(value)
    except NotAnArray as error:
        raise InvalidArgument(f"{name} {error}, or a number") from None
    if (code, bits) == (2, 64):
        warnings.warn(f"fovea: {name} has float64 elements, which formulas read as float32", stacklevel=4)
        return value.float() if root_module(value) == "torch" else value.astype("float32")
    if (code, bits) not in _abi.DTYPE_NAMES:
        raise InvalidArgument(f"{name} has a dtype that formulas cannot read; expected one of {', '.join(_abi.DTYPES)}")
    return value


class Program:
    """A formula and what it reads; made by `score_mod`, `mask_mod` and the words of the library. Immutable.

    Masks combine with ``&``, ``|`` and ``~``; scores with ``|``, left to right as in a pipe.

    Attributes
    ----------
    kind : str
        "score_mod" or "mask_mod".
    text : str
        The formula, in the language of docs/guides/programs.md.
    text_with_numbers : str
        The same with captured numbers written in.
    captures : dict
        Name to array or number: contents may change between calls.
    """

    def __init__(
        self, kind: int, formula: str, captures: Mapping[str, Capture], lets: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._kind = kind
        self._lets = lets
        self._formula = formula
        self.captures = {name: _checked_capture(name, value) for name, value in captures.items()}
        self.text = "".join(f"let {name} = {part}; " for name, part in lets) + formula
        tensors: dict[str, Any] = {name: value for name, value in self.captures.items() if not _is_number(value)}
        scalars: dict[str, Any] = {name: value for name, value in self.captures.items() if _is_number(value)}
        self.tensor_names, self.tensors = tuple(tensors), tuple(tensors.values())
        self.scalar_names, self.scalars = tuple(scalars), tuple(float(value) for value in scalars.values())
        numbers = "".join(f"let {name} = {value!r}; " for name, value in scalars.items())
        self.text_with_numbers = numbers + self.text
        slots = [(name, *element_of(value)) for name, value in tensors.items()]
        types = tuple((name, int(isinstance(value, float))) for name, value in scalars.items())
        self._handle = _handle_of(kind, self.text, tuple(slots), types)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew of the formula: the library's handle is this process's own."""
        return Program, (self._kind, self._formula, self.captures, self._lets)

    @property
    def kind(self) -> str:
        """ "score_mod" or "mask_mod"."""
        return _KIND_NAMES[self._kind]

    @property
    def address(self) -> int:
        """Of the library's handle."""
        return self._handle.address

    def canonical_text(self) -> str:
        """The formula as the library writes it: equal formulas have equal texts."""
        return take_text("fovea_program_text", self.address)

    def with_captures(self, **captures: Capture) -> Program:
        """The same formula with other arrays or numbers under some of its names; dtypes and ranks may differ.

        Raises
        ------
        InvalidArgument
            A name that the program does not have.
        """
        unknown = [name for name in captures if name not in self.captures]
        if unknown:
            raise InvalidArgument(
                f"with_captures: {unknown[0]} is no name of the program; expected some of {', '.join(self.captures) or 'none'}"
            )
        return Program(self._kind, self._formula, {**self.captures, **captures}, self._lets)

    def _rebound(self, tensors: tuple[Array, ...]) -> Program:
        """The same over tensors of the same dtypes and ranks, which nobody looks at again."""
        made = object.__new__(Program)
        made.__dict__.update(self.__dict__)
        made.tensors = tensors
        made.captures = {**self.captures, **dict(zip(self.tensor_names, tensors))}
        return made

    def _renamed(self, names: Mapping[str, str]) -> Program:
        def rename(text: str) -> str:
            return _NAME.sub(lambda match: names.get(match[0], match[0]), text)

        lets = tuple((names.get(name, name), rename(part)) for name, part in self._lets)
        captures = {names.get(name, name): value for name, value in self.captures.items()}
        return Program(self._kind, rename(self._formula), captures, lets)

    def placed(self, places: Mapping[str, str], captures: Mapping[str, Capture]) -> Program:
        """The same formula where variables are read as other formulas.

        Parameters
        ----------
        places : dict
            A variable, ``"q_idx"``, to the formula in its place, ``"places[q_idx]"``.
        captures : dict
            What these formulas read, by names of their own: a name that the program has already is changed.

        Returns
        -------
        Program
        """
        taken = {name for name, _ in self._lets} | set(self.captures)
        names = {}
        for name in captures:
            number, chosen = 1, name
            while chosen in taken:
                number += 1
                chosen = f"{name}_{number}"
            names[name] = chosen
            taken.add(chosen)

        def substitute(text: str, found: Mapping[str, str]) -> str:
            return _NAME.sub(lambda match: found.get(match[0], match[0]), text)

        there = {variable: substitute(text, names) for variable, text in places.items()}
        lets = tuple((name, substitute(part, there)) for name, part in self._lets)
        read = {**self.captures, **{names[name]: value for name, value in captures.items()}}
        return Program(self._kind, substitute(self._formula, there), read, lets)

    def _beside(self, other: Program) -> Program:
        """`other` with no name that means something else here."""
        taken = {name for name, _ in self._lets} | set(self.captures)
        shared = {name for name, value in other.captures.items() if name in self.captures and self.captures[name] is value}
        own = {name for name, _ in other._lets} | set(other.captures)
        names = {}
        for name in own & taken - shared:
            number = 2
            while f"{name}_{number}" in taken | own:
                number += 1
            names[name] = f"{name}_{number}"
            taken.add(names[name])
        return other._renamed(names) if names else other

    def _joined(self, other: Program, sign: str) -> Program:
        if self._kind != other._kind:
            raise InvalidArgument(f"a {self.kind} {sign} a {other.kind}; expected two programs of one kind")
        other = self._beside(other)
        captures = {**self.captures, **other.captures}
        if self._kind == _abi.MASK_MOD:
            return Program(self._kind, f"({self._formula}) {sign * 2} ({other._formula})", captures, self._lets + other._lets)
        number = 0
        taken = {name for name, _ in self._lets + other._lets} | set(captures)
        while f"s{number}" in taken:
            number += 1
        name = f"s{number}"

        def through(text: str) -> str:
            return _NAME.sub(lambda match: name if match[0] == "score" else match[0], text)

        lets = self._lets + ((name, self._formula),) + tuple((let, through(part)) for let, part in other._lets)
        return Program(self._kind, through(other._formula), captures, lets)

    def __and__(self, other: object) -> Program:
        if not isinstance(other, Program):
            return NotImplemented
        if self._kind == _abi.SCORE_MOD:
            raise InvalidArgument("scores do not combine with &; expected |, left to right as in a pipe")
        return self._joined(other, "&")

    def __or__(self, other: object) -> Program:
        if not isinstance(other, Program):
            return NotImplemented
        return self._joined(other, "|")

    def __invert__(self) -> Program:
        if self._kind == _abi.SCORE_MOD:
            raise InvalidArgument("a score has no ~; expected a mask")
        return Program(self._kind, f"!({self._formula})", self.captures, self._lets)

    def __repr__(self) -> str:
        captures: dict[str, Any] = self.captures
        captured = "".join(
            f", {name}={value!r}" if _is_number(value) else f", {name}={type(value).__name__}{tuple(value.shape)}"
            for name, value in captures.items()
        )
        return f"{self.kind}({self.text!r}{captured})"


def split_lets(text: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """`let a = b; c`: the named parts and the formula."""
    lets = []
    while match := _LET.match(text):
        part, semicolon, rest = text[match.end() :].partition(";")
        if not semicolon:
            break  # refused by the parser, which names the column
        lets.append((match[1], part.strip()))
        text = rest
    return tuple(lets), text.strip()


def _program(kind: int, source: object, captures: Mapping[str, Capture], function: str) -> Program:
    if isinstance(source, str):
        lets, formula = split_lets(source)
        if not lets:
            return Program(kind, source, captures)
        return Program(kind, formula, captures, lets)
    if captures:
        raise InvalidArgument(f"{function}: names are captured by a text alone; a callable reads what it encloses")
    if isinstance(source, Program):
        if source._kind != kind:
            raise InvalidArgument(f"{function}: the program is a {source.kind}; expected a {_KIND_NAMES[kind]}")
        return source
    if callable(source):
        from ._trace import trace

        return trace(kind, source)
    raise InvalidArgument(
        f"{function}: got a {type(source).__name__}; expected a text, a callable or a program"
    )


def score_mod(source: str | Callable[..., Any] | Program, /, **captures: Capture) -> Program:
    """A score program: the score of a (query, key) pair becomes what the formula says.

    Parameters
    ----------
    source : str, callable or Program
        A text, ``"score - slopes[q_head] * abs(q_idx - kv_idx)"``; or a callable of
        ``(score, batch, head, q_idx, kv_idx)``, as FlexAttention's, which is traced once.
    **captures
        What a text reads by name: arrays (one index per dimension; f32, f16, bf16, bool, u8, i8, i32, i64) and numbers.

    Returns
    -------
    Program

    Raises
    ------
    ProgramError
        The text is wrong; `column` says where.
    TraceError
        The callable does something that a formula cannot say; `filename` and `lineno` say where.
    """
    return _program(_abi.SCORE_MOD, source, captures, "score_mod")


def mask_mod(source: str | Callable[..., Any] | Program, /, **captures: Capture) -> Program:
    """A mask program: whether a query sees a key.

    Parameters
    ----------
    source : str, callable or Program
        A text, ``"q_idx >= kv_idx && doc[batch, q_idx] == doc[batch, kv_idx]"``; or a callable of
        ``(batch, head, q_idx, kv_idx)``, as FlexAttention's, which is traced once.
    **captures
        As for `score_mod`.

    Returns
    -------
    Program

    Raises
    ------
    ProgramError, TraceError
        As for `score_mod`.
    """
    return _program(_abi.MASK_MOD, source, captures, "mask_mod")


# ---- The words of the library, each with its text ----


def _position(align: Align, function: str) -> str:
    """The query's position among the keys."""
    if align == "bottom_right":
        return "(q_idx + (seqlen_kv - seqlen_q))"
    if align == "top_left":
        return "q_idx"
    raise InvalidArgument(f'{function}: align is {align!r}; expected "bottom_right" or "top_left"')


def _count(value: int, name: str, function: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{function}: {name} is {value!r}; expected a whole number") from None
    if number < least:
        raise InvalidArgument(f"{function}: {name} is {number}; expected >= {least}")
    return number


def causal(align: Align = "bottom_right") -> Program:
    """A query sees the keys up to its own position: ``kv_idx <= pos``.

    Parameters
    ----------
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `align` is another word.
    """
    return mask_mod(f"kv_idx <= {_position(align, 'causal')}")


def window(left: int | None, right: int | None, align: Align = "bottom_right") -> Program:
    """A query sees the keys near its position: ``kv_idx >= pos - left && kv_idx <= pos + right``.

    Parameters
    ----------
    left, right : int or None
        Both ends are visible; None leaves a side open.
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        A side is negative or no whole number, or `align` is another word.
    """
    position = _position(align, "window")
    parts, captures = [], {}
    if left is not None:
        parts.append(f"kv_idx >= {position} - window_left")
        captures["window_left"] = _count(left, "left", "window", 0)
    if right is not None:
        parts.append(f"kv_idx <= {position} + window_right")
        captures["window_right"] = _count(right, "right", "window", 0)
    return mask_mod(" && ".join(parts) or "true", **captures)


def documents(segments_q: Array, segments_kv: Array | None = None, *, cu_seqlens: Any = None) -> Program:
    """A query sees the keys of its own document: ``segments_q[batch, q_idx] == segments_kv[batch, kv_idx]``, unless that is -1.

    Parameters
    ----------
    segments_q : array, [batch, seqlen_q] i32 or i64
        Ids; -1 is padding, which sees nothing and is seen by nobody. With `cu_seqlens`: [total_q].
    segments_kv : array, [batch, seqlen_kv] i32 or i64, optional
        Those of keys; `segments_q` serves both sides unless given.
    cu_seqlens : array or (q, kv) of arrays, [num_sequences + 1] i32 or i64, optional
        Those of a packed call: documents within its sequences.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        An array has no integers, or another rank.
    """
    ids_q = ids_kv = "segments"
    captures = {"segments": segments_q}
    if segments_kv is not None and segments_kv is not segments_q:
        ids_q, ids_kv = "segments_q", "segments_kv"
        captures = {ids_q: segments_q, ids_kv: segments_kv}
    query, key = "batch, q_idx", "batch, kv_idx"
    if cu_seqlens is not None:
        offsets_q, offsets_kv = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        captures |= {"cu_seqlens_q": offsets_q, "cu_seqlens_kv": offsets_kv}
        query, key = "cu_seqlens_q[batch] + q_idx", "cu_seqlens_kv[batch] + kv_idx"
    return mask_mod(f"{ids_q}[{query}] == {ids_kv}[{key}] && {ids_q}[{query}] != -1", **captures)


def prefix_lm(prefix_lengths: Array, align: Align = "bottom_right") -> Program:
    """All keys of a prefix, and causal behind it: ``kv_idx < prefix_lengths[batch] || kv_idx <= pos``.

    Parameters
    ----------
    prefix_lengths : array, [batch] i32 or i64
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `prefix_lengths` is no array of integers, or `align` is another word.
    """
    return mask_mod(
        f"kv_idx < prefix_lengths[batch] || kv_idx <= {_position(align, 'prefix_lm')}", prefix_lengths=prefix_lengths
    )


def chunked(chunk_size: int, align: Align = "bottom_right") -> Program:
    """Local attention in chunks: ``pos // chunk_size == kv_idx // chunk_size``.

    Parameters
    ----------
    chunk_size : int
        At least 1.
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `chunk_size` is below 1 or no whole number, or `align` is another word.
    """
    size = _count(chunk_size, "chunk_size", "chunked", 1)
    return mask_mod(f"{_position(align, 'chunked')} // {size} == kv_idx // {size}")


def dilated(step: int, align: Align = "bottom_right") -> Program:
    """Every so many keys: ``(pos - kv_idx) % step == 0``.

    Parameters
    ----------
    step : int
        At least 1.
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `step` is below 1 or no whole number, or `align` is another word.
    """
    return mask_mod(f"({_position(align, 'dilated')} - kv_idx) % {_count(step, 'step', 'dilated', 1)} == 0")


def tree(tree_bits: Array) -> Program:
    """The last seqlen_q keys form a tree of draft tokens; all before them are visible.

    Parameters
    ----------
    tree_bits : array, [seqlen_q, ceil(seqlen_q / 32)] or [batch, seqlen_q, words], i32
        Bit j of a query's row says whether it sees draft token j.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `tree_bits` is no array of integers.
    """
    batch = "batch, " if len(tree_bits.shape) == 3 else ""
    return mask_mod(
        "let first = seqlen_kv - seqlen_q; kv_idx < first || "
        f"(tree_bits[{batch}q_idx, (kv_idx - first) // 32] >> (kv_idx - first) % 32 & 1) == 1",
        tree_bits=tree_bits,
    )


def streaming(num_sinks: int, window_left: int, align: Align = "bottom_right") -> Program:
    """The first keys and a window to the left: ``(kv_idx < num_sinks || kv_idx >= pos - window_left) && kv_idx <= pos``.

    Parameters
    ----------
    num_sinks, window_left : int
        At least 0.
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        A number is negative or not whole, or `align` is another word.
    """
    position = _position(align, "streaming")
    sinks = _count(num_sinks, "num_sinks", "streaming", 0)
    left = _count(window_left, "window_left", "streaming", 0)
    return mask_mod(
        f"(kv_idx < num_sinks || kv_idx >= {position} - window_left) && kv_idx <= {position}",
        num_sinks=sinks,
        window_left=left,
    )


def _broadcast_indices(array: Array, function: str, argument: str, pair: tuple[str, str] = ("q_idx", "kv_idx")) -> str:
    names = ("batch", "q_head", *pair)
    shape = tuple(array.shape)
    if not 2 <= len(shape) <= 4:
        raise InvalidArgument(f"{function}: {argument} has rank {len(shape)}; expected 2, 3 or 4")
    chosen = names[4 - len(shape) :]
    return ", ".join("0" if extent == 1 else name for extent, name in zip(shape, chosen))


def dense_mask(mask: Array) -> Program:
    """A mask as an array: ``mask[batch, q_head, q_idx, kv_idx] != 0``.

    Parameters
    ----------
    mask : array, [q, kv], [heads, q, kv] or [batch, heads, q, kv], bool or u8
        Extents of 1 broadcast.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `mask` has another rank or dtype.
    """
    return mask_mod(f"visible[{_broadcast_indices(mask, 'dense_mask', 'mask')}] != 0", visible=mask)


def tile_mask(table: Array, tile_q: int, tile_kv: int) -> Program:
    """Tiles that are visible or hidden whole: ``table[batch, q_head, q_idx // tile_q, kv_idx // tile_kv] != 0``.

    Kernels choose their own tiles by these. `tile_table` makes a table of lists, `top_k_tiles` one of mean-pooled scores.

    Parameters
    ----------
    table : array, [q_tiles, kv_tiles], [heads, q_tiles, kv_tiles] or [batch, heads, q_tiles, kv_tiles], bool or u8
        Extents of 1 broadcast. Positions behind its end are as its last tiles.
    tile_q, tile_kv : int
        Queries and keys of a tile.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `table` has another rank or dtype, or a size is below 1 or no whole number.
    """
    pair = (
        f"q_idx // {_count(tile_q, 'tile_q', 'tile_mask', 1)}",
        f"kv_idx // {_count(tile_kv, 'tile_kv', 'tile_mask', 1)}",
    )
    return mask_mod(f"table[{_broadcast_indices(table, 'tile_mask', 'table', pair)}] != 0", table=table)


def softcap(cap: float) -> Program:
    """Scores in a bounded range: ``cap * tanh(score / cap)``.

    Parameters
    ----------
    cap : float
        Above 0.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `cap` is not above 0, or not finite.
    """
    if not (cap > 0 and math.isfinite(cap)):
        raise InvalidArgument(f"softcap: cap is {cap}; expected a finite number above 0")
    return score_mod("cap * tanh(score / cap)", cap=float(cap))


def alibi(slopes: Array, align: Align = "bottom_right") -> Program:
    """A penalty for distance: ``score - slopes[q_head] * abs(pos - kv_idx)``.

    Parameters
    ----------
    slopes : array, [num_heads_q] or [batch, num_heads_q], f32, f16 or bf16
    align : {"bottom_right", "top_left"}
        Where the diagonal lies where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `slopes` is no array of floats, or `align` is another word.
    """
    index = "batch, q_head" if len(slopes.shape) == 2 else "q_head"
    return score_mod(f"score - slopes[{index}] * abs({_position(align, 'alibi')} - kv_idx)", slopes=slopes)


def bias(table: Array) -> Program:
    """Something added to each score: ``score + table[batch, q_head, q_idx, kv_idx]``.

    Parameters
    ----------
    table : array, [q, kv], [heads, q, kv] or [batch, heads, q, kv], f32, f16 or bf16
        Extents of 1 broadcast.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `table` has another rank or dtype.
    """
    check_bias(table, "table", "bias")
    return score_mod(f"score + table[{_broadcast_indices(table, 'bias', 'table')}]", table=table)


def relative_bias(table: Array, bucket: str) -> Program:
    """A learnable bias by distance: ``score + table[q_head, bucket]``.

    Parameters
    ----------
    table : array, [num_heads_q, num_buckets], f32, f16 or bf16
    bucket : str
        A formula of positions, ``"q_idx - kv_idx + 128"``; what lies outside of the table reads its nearest end.

    Returns
    -------
    Program

    Raises
    ------
    InvalidArgument
        `table` has another rank or dtype; of `bucket` its subclass ProgramError.
    """
    last = int(table.shape[-1]) - 1
    return score_mod(f"score + table[q_head, min(max({bucket}, 0), {last})]", table=table)
