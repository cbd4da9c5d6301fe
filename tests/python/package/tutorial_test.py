"""The tutorial runs from end to end, and says today what it said when it was written."""

import json
import os
import pathlib
import re
import sys

import pytest

from conftest import PACKAGE_SOURCES

NOTEBOOK = PACKAGE_SOURCES.parents[1] / "docs" / "tutorial.ipynb"
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="the notebook is not here")


def text_of(output) -> str:
    data = output.get("data", {})
    return "".join(output.get("text", "")) + "".join(data.get("text/html", data.get("text/plain", "")))


def shape_of(text: str) -> str:
    """What is equal on every machine: pictures, counts and words, but for numbers with a point, kernels and places of files."""
    text = re.sub(r"^(kernel|tile|tiles|work|workspace|refused) .*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"/\S*\.py", "FILE", text)
    return re.sub(r"\d+\.\d*(e-\d+)?", "NUMBER", text)


@pytest.fixture(autouse=True)
def once(route: str) -> None:
    if route == "ctypes":
        pytest.skip("once is enough")


def test_tutorial_runs_and_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for needed in ("ipykernel", "torch"):
        pytest.importorskip(needed)
    written = nbformat.read(NOTEBOOK, 4)
    expected = json.loads(json.dumps(written))
    # The kernel is a process of its own: it finds the package where this one did.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path and pathlib.Path(path).is_dir()))
    nbclient.NotebookClient(written, timeout=300, kernel_name="python3").execute()
    for before, after in zip(expected["cells"], written["cells"]):
        if before["cell_type"] != "code":
            continue
        old, new = ("".join(text_of(output) for output in cell["outputs"]) for cell in (before, after))
        assert shape_of(new) == shape_of(old), before["source"]


def test_results_agree_where_two_ways_are_compared() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    compared = [cell for cell in cells if "".join(cell["source"]).rstrip().endswith(".abs().max()")]
    assert len(compared) >= 4
    for cell in compared:
        error = re.search(r"tensor\((.*)\)", text_of(cell["outputs"][-1]))
        assert error is not None and float(error[1]) < 1e-5
