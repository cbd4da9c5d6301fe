"""Tests of the Python package. Each runs by the extension and by its stand-in, ctypes.

usage: PYTHONPATH=build/release/python pytest tests/python/package
"""

import pathlib

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
