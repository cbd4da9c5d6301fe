"""A call as data: a template of C structs, and the places where arrays and numbers of a call go.

Templates are made once for a kind of call and kept; a call then is `invoke`, in C where the extension is there, else here.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
from typing import Any, Sequence

from . import _abi
from ._arrays import Array, Description, NotAnArray, describe
from ._library import address_of, check, library, take_error
from .errors import InvalidArgument, error_of

def _find_extension() -> Any:
    """The part in C; None where there is none.

    A free-threaded interpreter has objects of another layout than the limited API of 3.10 knows; 3.13 loads the file
    all the same, and crashes in it.
    """
    if "t" in sys.abiflags:
        return None
    try:
        return importlib.import_module("fovea._fovea")
    except ImportError:  # a checkout without a build
        return None


extension = _find_extension()

#: "extension" or "ctypes": which of the two runs calls.
ROUTE = "ctypes" if extension is None else "extension"

if extension is not None:
    extension.setup(
        describe,
        error_of,
        address_of("fovea_error_message"),
        address_of("fovea_error_column"),
        address_of("fovea_error_free"),
    )


class Template:
    """What is equal in many calls.

    Attributes
    ----------
    names : tuple of str
        Of the tensors of a call, for messages.
    """

    __slots__ = ("function", "memory", "pointers", "places", "word_places", "names", "kept")

    def __init__(self, builder: Builder) -> None:
        self.function = builder.function
        self.memory = bytes(builder.memory)
        self.pointers = struct.pack(f"={len(builder.pointers)}i", *builder.pointers)
        self.places = struct.pack(f"={len(builder.places)}i", *builder.places)
        self.word_places = struct.pack(f"={len(builder.word_places)}i", *builder.word_places)
        self.names = tuple(builder.names)
        self.kept = tuple(builder.kept)

    def invoke(self, tensors: tuple[Array, ...], words: tuple[int, ...] = (), function: int = 0, plan: int = 0) -> None:
        """Runs the call: `function` of these arrays and numbers of 64 bits, in the order of their places."""
        try:
            invoke(function, plan, self.memory, self.pointers, self.places, self.word_places, tensors, words)
        except NotAnArray:
            raise self._not_an_array(tensors) from None

    def bind(self, tensors: tuple[Array, ...], words: tuple[int, ...] = ()) -> Bound:
        """The structs of one call, for a function that `invoke` does not serve."""
        try:
            return Bound(self.memory, self.pointers, self.places, self.word_places, tensors, words)
        except NotAnArray:
            raise self._not_an_array(tensors) from None

    def _not_an_array(self, tensors: tuple[Array, ...]) -> InvalidArgument:
        for name, array in zip(self.names, tensors):
            try:
                describe(array)
            except NotAnArray as error:
                return InvalidArgument(f"{self.function}: {name} {error}")
        return InvalidArgument(f"{self.function}: an argument is no array")


class Builder:
    """Makes a template: adds structs, then says what goes where."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.memory = bytearray()
        self.pointers: list[int] = []
        self.places: list[int] = []
        self.word_places: list[int] = []
        self.names: list[str] = []
        self.kept: list[object] = []

    def add(self, part: ctypes.Structure | int) -> int:
        """Adds a struct, or so many zero bytes; where it starts."""
        self.memory += bytes(-len(self.memory) % 8)
        at = len(self.memory)
        self.memory += bytes(part) if isinstance(part, int) else bytes(memoryview(part).cast("B"))
        return at

    def point(self, at: int, to: int) -> None:
        """The pointer at byte `at` will point at byte `to`."""
        self.pointers += (at, to)

    def tensor(self, at: int, name: str, is_swapped: bool = False) -> None:
        """The pointer at byte `at` will point at the call's next tensor, its axes 1 and 2 exchanged where it is swapped."""
        self.places += (at, int(is_swapped))
        self.names.append(name)

    def word(self, at: int) -> None:
        """The call's next number goes to byte `at`."""
        self.word_places.append(at)

    def done(self) -> Template:
        return Template(self)


def offset(of: type[ctypes.Structure], field: str) -> int:
    """Where a field lies in its struct."""
    return int(getattr(of, field).offset)


def word_of_float(value: float) -> int:
    """The 64 bits of a double."""
    return int.from_bytes(struct.pack("=d", value), sys.byteorder)


# ---- The same without the extension ----


def _tensor_of(description: Description, is_swapped: bool) -> tuple[_abi.Tensor, tuple[object, object]]:
    address, shape, strides, code, bits, device_type, device_id = description
    if is_swapped and len(shape) == 4:
        if strides is None:
            strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        shape = (shape[0], shape[2], shape[1], shape[3])
        strides = (strides[0], strides[2], strides[1], strides[3])
    extents = (ctypes.c_int64 * len(shape))(*shape)
    steps = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
    tensor = _abi.Tensor(
        address, _abi.Device(device_type, device_id), len(shape), _abi.DataType(code, bits, 1), extents, steps, 0
    )
    return tensor, (extents, steps)


class Bound:
    """Structs of one call in memory of their own, at `address`; lives as long as the call needs them."""

    def __init__(
        self,
        memory: bytes,
        pointers: bytes,
        places: bytes,
        word_places: bytes,
        tensors: Sequence[Array],
        words: Sequence[int],
    ) -> None:
        self._memory = ctypes.create_string_buffer(memory, max(len(memory), 1))
        self.address = base = ctypes.addressof(self._memory)
        self._kept: list[Any] = [tensors]
        for at, to in struct.iter_unpack("=ii", pointers):
            ctypes.c_uint64.from_address(base + at).value = base + to
        for (at, is_swapped), array in zip(struct.iter_unpack("=ii", places), tensors):
            tensor, parts = _tensor_of(describe(array), bool(is_swapped))
            self._kept += (tensor, parts)
            ctypes.c_uint64.from_address(base + at).value = ctypes.addressof(tensor)
        for (at,), word in zip(struct.iter_unpack("=i", word_places), words):
            ctypes.c_uint64.from_address(base + at).value = word & 0xFFFF_FFFF_FFFF_FFFF


_RUN_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_PLAN_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


def _invoke_by_ctypes(
    function: int,
    plan: int,
    memory: bytes,
    pointers: bytes,
    places: bytes,
    word_places: bytes,
    tensors: tuple[Array, ...],
    words: tuple[int, ...],
) -> None:
    bound = Bound(memory, pointers, places, word_places, tensors, words)
    error = ctypes.c_void_p()
    if plan:
        kind = _PLAN_PROTOTYPE(function)(plan, bound.address, ctypes.byref(error))
    else:
        kind = _RUN_PROTOTYPE(function)(bound.address, ctypes.byref(error))
    if kind != 0:
        raise take_error(error, kind)


invoke = _invoke_by_ctypes if extension is None else extension.invoke

__all__ = ["ROUTE", "Bound", "Builder", "Template", "check", "invoke", "library", "offset", "word_of_float"]
