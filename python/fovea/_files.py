"""Where the files of this package are."""

from __future__ import annotations

import pathlib
import sys


def installed(*parts: str) -> pathlib.Path | None:
    """The file of this package by that name; None where there is none. An editable install has folders in two places."""
    for folder in sys.modules[__package__ or "fovea"].__path__:
        file = pathlib.Path(folder, *parts)
        if file.is_file():
            return file
    return None
