"""Tests of the Python package. Each runs by the extension and by its stand-in, ctypes.

usage: PYTHONPATH=build/release/python pytest tests/python/package
"""

import os
import pathlib
import sys

import pytest

import fovea
from fovea import _calls, _quick

PACKAGE_SOURCES = pathlib.Path(__file__).resolve().parents[3] / "python" / "fovea"


def pytest_report_header() -> str:
    return f"fovea {fovea.__version__} of {pathlib.Path(fovea.__file__).parent}, calls by {_calls.ROUTE}"


@pytest.fixture(params=["extension", "ctypes"], autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who runs the calls."""
    if request.param == "extension" and _calls.ROUTE != "extension":
        pytest.skip("this interpreter has no extension")
    if request.param == "ctypes":
        monkeypatch.setattr(_calls, "invoke", _calls._invoke_by_ctypes)
        monkeypatch.setattr(_quick, "attend", None)
    return request.param


@pytest.fixture
def fake_gpu(tmp_path: pathlib.Path) -> dict[str, str]:
    """The environment of a process of its own, whose GPU is a driver that computes nothing."""
    if "FOVEA_FAKE_LIBCUDA" not in os.environ:
        pytest.skip("needs the fake driver")
    (tmp_path / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
    places = {"LD_LIBRARY_PATH": str(tmp_path), "FOVEA_CACHE_DIR": str(tmp_path / "cache")}
    return {**os.environ, **places, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
