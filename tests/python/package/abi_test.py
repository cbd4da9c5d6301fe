"""fovea._abi is fovea.h."""

import ctypes
import re

import pytest

from conftest import PACKAGE_SOURCES
from fovea import _abi, _library

HEADER = PACKAGE_SOURCES.parents[1] / "include" / "fovea" / "fovea.h"
pytestmark = pytest.mark.skipif(not HEADER.exists(), reason="the header is not here")


def header_text() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("name", _abi.STRUCTS)
def test_fields_are_those_of_the_header(name: str) -> None:
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", header_text(), re.DOTALL)
    assert body is not None
    declared = [re.search(r"\(\*(\w+)\)|(\w+)$", line.strip()) for line in body[1].split(";") if line.strip()]
    ours = [field[0] for field in _abi.STRUCTS[name]._fields_]
    # Later headers add fields at the end; a smaller struct leaves them at their defaults.
    assert ours == [name[1] or name[2] for name in declared[: len(ours)]]


@pytest.mark.parametrize("name", [*_abi.FALLIBLE, *_abi.PLAIN])
def test_functions_have_the_arguments_of_the_header(name: str) -> None:
    declared = re.search(rf"\b{name}\((.*?)\);", header_text(), re.DOTALL)
    assert declared is not None
    count = 0 if declared[1].strip() == "void" else declared[1].count(",") + 1
    ours = len(_abi.FALLIBLE[name]) + 1 if name in _abi.FALLIBLE else len(_abi.PLAIN[name][0])
    assert ours == count


def test_version_is_that_of_the_header() -> None:
    assert f"#define FOVEA_ABI_VERSION {_abi.ABI_VERSION}u" in HEADER.read_text()
    parts = re.findall(r"#define FOVEA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", HEADER.with_name("version.h").read_text())
    assert _library.version() == ".".join(parts)


def test_dltensor_has_dlpacks_size() -> None:
    assert ctypes.sizeof(_abi.Tensor) == 48
