"""The Python of README and guide runs as printed."""

import inspect
import math
import re

import numpy as np
import pytest

import fovea
from attention_test import draw
from conftest import PACKAGE_SOURCES

ROOT = PACKAGE_SOURCES.parents[1]
GUIDES = ROOT / "docs" / "guides"
PAGES = [ROOT / "README.md", GUIDES / "python.md", GUIDES / "jax.md", GUIDES / "block_sparse.md"]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    if page.exists()
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(block: str, capsys) -> None:
    names = {
        "fovea": fovea, "math": math, "np": np, "num_heads": 8, "q": draw((1, 64, 8, 32), 1), "k": draw((1, 64, 8, 32), 2), "v": draw((1, 64, 8, 32), 3),
        "slopes": draw((8,)), "ids": np.zeros((1, 64), np.int32), "doc": np.zeros((1, 64), np.int32),
    }  # fmt: skip
    if "torch" in block:
        torch = pytest.importorskip("torch")
        names = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in names.items()}
        names["torch"] = torch
    elif "jax" in block or "pallas" in block:
        jax = pytest.importorskip("jax")
        names = {name: jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in names.items()}
        names["jax"], names["jnp"] = jax, jax.numpy
    # A file of its own, since traced callables name their lines.
    exec(compile(block, "<block>", "exec"), names)
    assert "out" in names


def names_of(cell: str) -> list[str]:
    """The identifiers of a cell's code."""
    return [name for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"\w*[a-z_]{2}\w*", code)]


def test_names_of_the_table_exist_in_their_language() -> None:
    table = (ROOT / "docs" / "guides" / "python.md").read_text().partition("## Names in C++ and C")[2].partition("## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    python = set(fovea.__all__)
    for name in fovea.__all__:
        thing = getattr(fovea, name)
        if inspect.isfunction(thing):
            python |= set(inspect.signature(thing).parameters)
    headers = ROOT / "include" / "fovea"
    c = (headers / "fovea.h").read_text()
    cxx = "\n".join(path.read_text() for path in headers.glob("*.hpp"))
    for in_python, in_cxx, in_c in rows:
        assert set(names_of(in_python)) <= python
        for names, text in ((names_of(in_cxx), cxx), (names_of(in_c), c)):
            assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
