"""A plugin of pytest that runs another package's own tests on Fovea; they are read where the caller has them, nothing is fetched.

    pytest -p fovea.compat.testing --drop-in flash_attn --per-test 16 --max-len 130 --device cpu flash-attention/tests/test_flash_attn.py
"""

from __future__ import annotations

import hashlib
import importlib
import pathlib
import re
import sys
import tempfile
from typing import Any

import pytest

from ._drop_ins import DROP_INS
from ._install import install

_FOLDER = pytest.StashKey[Any]()
_SPARE = 16  # cases of a test that stay while they are made, for each that will run
_CPU_TEXT = (
    (re.compile(r"""(\bdevice\s*=\s*)(["'])cuda\2"""), r'\1"cpu"'),
    (re.compile(r"""torch\.cuda\.get_device_capability\((["'])cuda\1\)"""), "(9, 0)"),
    (re.compile(r"""torch\.cuda\.get_device_properties\((["'])cuda\1\)\.total_memory"""), "(64 << 30)"),
)


def pytest_addoption(parser: Any) -> None:
    """Options of the plugin."""
    group = parser.getgroup("fovea")
    group.addoption("--drop-in", action="append", default=[], choices=list(DROP_INS), metavar="NAME", help=f"what to install first: {', '.join(DROP_INS)}")
    group.addoption("--per-test", type=int, metavar="N", help="at most N cases of each test, the same ones in every run")
    group.addoption("--max-len", type=int, metavar="N", help="no case whose arguments named seqlen... are longer")
    group.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test files say cpu where they say cuda")


def on_cpu(text: str) -> str:
    """A test file whose tensors live on the CPU; what it asks of a GPU is answered as of a Hopper."""
    for pattern, replacement in _CPU_TEXT:
        text = pattern.sub(replacement, text)
    return text


class _CpuModule(pytest.Module):
    """A test file of which a copy by `on_cpu` is imported; it finds its neighbours as the file does."""

    def collect(self) -> Any:
        folder = self.config.stash[_FOLDER].name
        (pathlib.Path(folder) / self.path.name).write_text(on_cpu(self.path.read_text()))
        sys.path[:0] = [folder, str(self.path.parent)]
        pytest.register_assert_rewrite(self.path.stem)
        self.obj = importlib.import_module(self.path.stem)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Any, parent: Any) -> Any:
    """The file on the CPU, where --device says so."""
    return _CpuModule.from_parent(parent, path=module_path) if parent.config.getoption("device") == "cpu" else None


def pytest_configure(config: Any) -> None:
    """Installs before a test file is imported."""
    config.stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="fovea_compat_")
    for name in config.getoption("drop_in"):
        install(name)


def pytest_unconfigure(config: Any) -> None:
    """Nothing stays."""
    config.stash[_FOLDER].cleanup()


def _longest(callspec: Any) -> int:
    """Of all arguments named seqlen, seqlen_q, ..."""
    arguments = callspec.params if callspec is not None else {}
    return max((value for name, value in arguments.items() if name.startswith("seqlen") and isinstance(value, int)), default=0)


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def thinned(calls: list[Any], count: int, max_len: int | None) -> list[Any]:
    """The first `count` by the hash of their ids in the order that they had, long ones only where there are too few short ones."""
    if len(calls) <= count:
        return calls
    kept = sorted(calls, key=lambda call: (max_len is not None and _longest(call) > max_len, _hash(call.id)))[:count]
    places = {id(call) for call in kept}
    return [call for call in calls if id(call) in places]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """Thins the cases of a test after each of its decorators: flash_attn's file would make half a million, which takes a minute."""
    per_test = metafunc.config.getoption("per_test")
    if per_test is None or not hasattr(metafunc, "_calls"):
        return
    parametrize = metafunc.parametrize

    def parametrize_and_thin(*arguments: Any, **options: Any) -> None:
        parametrize(*arguments, **options)
        metafunc._calls = thinned(metafunc._calls, _SPARE * per_test, metafunc.config.getoption("max_len"))

    metafunc.parametrize = parametrize_and_thin


def chosen(items: list[Any], per_test: int | None, max_len: int | None) -> list[Any]:
    """The first `per_test` cases of each test by the hash of their names, in the order that they had."""
    short = [item for item in items if max_len is None or _longest(getattr(item, "callspec", None)) <= max_len]
    if per_test is None:
        return short
    cases: dict[str, list[Any]] = {}
    for item in short:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for of_test in cases.values() for item in sorted(of_test, key=lambda item: _hash(item.name))[:per_test]}
    return [item for item in short if id(item) in kept]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves the chosen cases."""
    kept = chosen(items, config.getoption("per_test"), config.getoption("max_len"))
    left_out = {id(item) for item in items} - {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = kept
