"""Finds and loads libfovea, and turns its errors into exceptions."""

from __future__ import annotations

import ctypes
import os
import pathlib
from typing import Any

from . import _abi
from ._files import installed
from .errors import FoveaError, Unsupported, error_of

#: The file of another build, for developers: it wins over the library beside this package.
VARIABLE = "FOVEA_LIBRARY"
_NAME = "libfovea.so.0"


def path() -> pathlib.Path:
    """The library file: that of FOVEA_LIBRARY, else the one that was installed with this package."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return pathlib.Path(chosen)
    return installed("lib", _NAME) or pathlib.Path(__file__).with_name("lib") / _NAME


def _load() -> ctypes.CDLL:
    file = path()
    try:
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise ImportError(
            f"fovea: {file} cannot be loaded ({error}); reinstall the wheel, or set {VARIABLE} to a libfovea.so"
        ) from None
    found = loaded.fovea_abi_version()
    if found != _abi.ABI_VERSION:
        raise ImportError(f"fovea: {file} has ABI version {found}; expected {_abi.ABI_VERSION}, that of this package")
    try:
        _abi.declare(loaded)
    except AttributeError as error:
        raise ImportError(f"fovea: {file} is older than this package ({error})") from None
    return loaded


library: Any = _load()


def take_error(error: ctypes.c_void_p, kind: int, text: str | None = None) -> FoveaError:
    """The exception of an error object, which is freed."""
    message = library.fovea_error_message(error).decode()
    column = library.fovea_error_column(error)
    library.fovea_error_free(error)
    return error_of(kind, message, column, text)


def check(name: str, *arguments: object, text: str | None = None) -> None:
    """Calls a function that reports errors; raises what it reports."""
    error = ctypes.c_void_p()
    kind = getattr(library, name)(*arguments, ctypes.byref(error))
    if kind != 0:
        raise take_error(error, kind, text)


def take_text(name: str, *arguments: object) -> str:
    """Calls a function whose last argument receives a text; the text, freed in the library."""
    text = ctypes.c_void_p()
    check(name, *arguments, ctypes.byref(text))
    try:
        return ctypes.string_at(text.value or 0).decode()
    finally:
        library.fovea_string_free(text)


def address_of(name: str) -> int:
    """Where a function of the library is."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class OfThisProcess:
    """What holds memory or a handle of the library: two copies would free it twice, and another process does not know it."""

    _made_by = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported(
            f"{type(self).__name__}: it belongs to this process, and is neither copied nor pickled; expected its arguments, and a new "
            f"one of {self._made_by} where they arrive"
        )


def version() -> str:
    """That of the library, such as "0.1.0"."""
    return library.fovea_version().decode()  # type: ignore[no-any-return]
