"""Puts modules of Fovea where ``import`` and package managers look for another package's, and takes them away again."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any, Iterator

from ..errors import InvalidArgument
from ._drop_ins import DROP_INS, DropIn


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata tells of the package."""

    def __init__(self, drop_in: DropIn) -> None:
        roots = dict.fromkeys(name.partition(".")[0] for name in drop_in.modules)
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {drop_in.distribution}\nVersion: {drop_in.version}\nSummary: a part of Fovea\n",
            "top_level.txt": "".join(f"{root}\n" for root in roots),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: a drop-in of Fovea has no files of its own")


def _normalized(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


class _MetadataFinder:
    """Stands on sys.meta_path: answers for the distribution and finds no modules, which are in sys.modules already."""

    def __init__(self, drop_in: DropIn) -> None:
        self._drop_in = drop_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Iterator[_Distribution]:
        if context.name is None or _normalized(context.name) == _normalized(self._drop_in.distribution):
            yield _Distribution(self._drop_in)


class _Installed:
    """A package whose place is taken, and what was there."""

    def __init__(self, drop_in: DropIn) -> None:
        self._finder: Any = _MetadataFinder(drop_in)
        ours = {name: importlib.import_module(module) for name, module in drop_in.modules.items()}
        roots = tuple({name.partition(".")[0] for name in ours})
        # All below the package goes, so that no half of it is the other's.
        self._before = {name: module for name, module in sys.modules.items() if name.startswith(tuple(f"{root}." for root in roots)) or name in roots}
        self._names = tuple(ours)
        for name in self._before:
            del sys.modules[name]
        sys.modules.update(ours)
        sys.meta_path.insert(0, self._finder)
        self._operators = None if drop_in.operators is None else importlib.import_module(drop_in.operators).register()

    def remove(self) -> None:
        if self._operators is not None:
            self._operators.remove()
        sys.meta_path.remove(self._finder)
        for name in self._names:
            sys.modules.pop(name, None)
        sys.modules.update(self._before)


_installed: dict[str, _Installed] = {}


def _drop_in(function: str, name: str) -> DropIn:
    if name not in DROP_INS:
        raise InvalidArgument(f"{function}: name is {name!r}; expected one of {', '.join(DROP_INS)}")
    return DROP_INS[name]


def install(name: str) -> None:
    """Lets ``import flash_attn`` give Fovea's functions in the whole process, and package managers find a distribution.

    Call it before the host is imported: many hosts look once, at their import, for what there is. A module that was imported
    from the real package before keeps what it has. `uninstall` undoes it.

    Parameters
    ----------
    name : {"flash_attn", "flash_attn_3", "pallas_flexattn", "sageattention", "kvax"}
        ``python -m fovea.compat list`` says what each does. "flash_attn_3" is the module flash_attn_interface.

    Raises
    ------
    InvalidArgument
        Of another name.

    Examples
    --------
    >>> fovea.compat.install("flash_attn")
    >>> from flash_attn import flash_attn_func
    """
    drop_in = _drop_in("install", name)
    if name not in _installed:
        _installed[name] = _Installed(drop_in)


def uninstall(name: str) -> None:
    """Undoes `install`: imports find the real package again, or none. Names that were imported meanwhile stay Fovea's.

    Parameters
    ----------
    name : {"flash_attn", "flash_attn_3", "pallas_flexattn", "sageattention", "kvax"}
        Nothing happens where it is not installed.

    Raises
    ------
    InvalidArgument
        Of another name.
    """
    _drop_in("uninstall", name)
    found = _installed.pop(name, None)
    if found is not None:
        found.remove()


def installed() -> tuple[str, ...]:
    """The drop-ins that are installed.

    Returns
    -------
    tuple of str
    """
    return tuple(_installed)
