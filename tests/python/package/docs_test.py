"""The Python of README and guide runs as printed."""

import math
import re

import numpy as np
import pytest

import fovea
from attention_test import draw
from conftest import PACKAGE_SOURCES

ROOT = PACKAGE_SOURCES.parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "guides" / "python.md"]
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
    # A file of its own, since traced callables name their lines.
    exec(compile(block, "<block>", "exec"), names)
    assert "out" in names
