"""The code of the migration pages: old calls and new ones agree; and the examples run."""

import importlib
import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

from conftest import PACKAGE_SOURCES

torch = pytest.importorskip("torch")
import fovea.compat.flash_attn.bert_padding  # noqa: E402
import fovea.compat.flash_attn.modules.mha  # noqa: E402
import fovea.torch  # noqa: E402
from fovea.compat import flash_attn, flash_attn_3, sageattention  # noqa: E402
from fovea.compat.sageattention import blackwell  # noqa: E402

ROOT = PACKAGE_SOURCES.parents[1]


def blocks_of(page) -> list[str]:
    """Each block; behind the formula of old calls, where a page begins with one."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    formula = blocks[0] if blocks[0].startswith("def formula") else ""
    return [formula + block for block in (blocks[1:] if formula else blocks)]


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{index}")
    for page in sorted((ROOT / "docs" / "guides").glob("migrate_*.md"))
    for index, block in enumerate(blocks_of(page))
]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))


@pytest.mark.parametrize("block", BLOCKS)
def test_old_and_new_agree(block: str) -> None:
    if "flex." in block:
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        if not hasattr(flex, "or_masks") or "device" not in flex.create_block_mask.__code__.co_varnames:
            pytest.skip("this PyTorch's FlexAttention is older than the page")
    else:
        flex = None
    seeds = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 16, generator=seeds) for _ in range(3))
    if "flash_attn" in block or "def formula" in block:  # [batch, seqlen, heads, head_dim]
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    names = {
        "torch": torch, "fovea": fovea, "flex": flex, "q": q, "k": k, "v": v, "x": torch.randn(2, 64, 32, generator=seeds),
        "weight": torch.randn(192, 32, generator=seeds) / 6, "slopes": torch.rand(4, generator=seeds), "lengths": torch.tensor([40, 64]),
        "ids": (torch.arange(64) // 20).repeat(2, 1).int(), "flash_attn": flash_attn, "flash_attn_interface": flash_attn_3,
        "sageattention": sageattention,
        "sageattn3": blackwell,
    }  # fmt: skip
    if "jax" in block:
        jax = pytest.importorskip("jax")
        importlib.import_module("fovea.jax")
        names |= {name: jax.numpy.asarray(x) for name, x in (("q", q), ("k", k), ("v", v))}
        names["jax"], names["jnp"] = jax, jax.numpy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FlexAttention is slow uncompiled
        exec(compile(block, "<block>", "exec"), names)
    old, new = (torch.tensor(np.asarray(names[name])) if "jax" in block else names[name] for name in ("old", "new"))
    assert torch.allclose(old, new, atol=2e-5, rtol=1e-5)


@pytest.mark.skipif(not EXAMPLES, reason="the examples are not here")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example, route: str) -> None:
    if route == "ctypes":
        pytest.skip("once is enough")
    if "transformers" in example.read_text():
        pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-B", str(example)], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=300)
