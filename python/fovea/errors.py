"""What Fovea raises. Messages are the library's: function, argument, got, expected, and what to do."""

from __future__ import annotations


class FoveaError(Exception):
    """Any error of Fovea's."""


class InvalidArgument(FoveaError, ValueError):
    """A value is wrong: the message names the argument, what it is and what was expected. Nothing was written."""


class ProgramError(InvalidArgument):
    """The text of a formula is wrong.

    Attributes
    ----------
    text : str or None
        The formula.
    column : int
        Where in the text, from 1; 0 where no place is known.
    """

    def __init__(self, message: str, text: str | None = None, column: int = 0) -> None:
        super().__init__(message)
        self.text = text
        self.column = column


class TraceError(ProgramError, TypeError):
    """A callable does something that a formula cannot say.

    Attributes
    ----------
    filename : str or None
        The file of the offending line.
    lineno : int
        The line, from 1; 0 where it is not known.
    """

    def __init__(self, message: str, filename: str | None = None, lineno: int = 0) -> None:
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno


class Unsupported(FoveaError, NotImplementedError):
    """A right problem that nothing here can run: the message has every candidate's reason."""


class CompileError(FoveaError, RuntimeError):
    """A kernel did not compile."""


class DeviceError(FoveaError, RuntimeError):
    """A call of the GPU's driver failed."""


class InternalError(FoveaError, RuntimeError):
    """A mistake of Fovea's own, or no memory."""


_KINDS: dict[int, type[FoveaError]] = {
    1: InvalidArgument,
    2: Unsupported,
    3: CompileError,
    4: DeviceError,
    5: InternalError,
}


def error_of(kind: int, message: str, column: int = 0, text: str | None = None) -> FoveaError:
    """The exception that stands for a `fovea_kind`."""
    if column:
        return ProgramError(message, text, column)
    return _KINDS.get(kind, InternalError)(message)
