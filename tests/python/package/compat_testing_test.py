"""fovea.compat.testing: a peer's test file, unchanged, on the drop-in; which of its cases are taken."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from fovea.compat import testing  # noqa: E402

# As the files of peers are written.
SUITE = """
import flash_attn
import pytest
import torch
from beside_it import scale_of

is_sm90 = torch.cuda.get_device_capability("cuda") >= (9, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(n, n + 1) for n in range(1, 12)])
def test_output(seqlen_q, seqlen_k, causal):
    device = "cuda"
    if torch.cuda.get_device_properties("cuda").total_memory < 2**30:
        pytest.skip()
    q = torch.randn(1, seqlen_q, 2, 8, device=device)
    k = torch.randn(1, seqlen_k, 2, 8, device="cuda")
    out = flash_attn.flash_attn_func(q, k, k, softmax_scale=scale_of(8), causal=causal)
    assert is_sm90 and out.device.type == "cpu" and flash_attn.__name__ == "fovea.compat.flash_attn"


def test_alone():
    assert False, "the suite's own failure"
"""


@pytest.fixture(autouse=True)
def route():
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_peer.py").write_text(SUITE)
    (tmp_path / "beside_it.py").write_text("def scale_of(dim):\n    return dim**-0.5\n")

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        options = ["-q", "-p", "no:cacheprovider", "-p", "fovea.compat.testing", "-rA", "--rootdir", str(tmp_path), "--device", "cpu"]
        command = [sys.executable, "-B", "-m", "pytest", *options, *words, str(tmp_path / "test_peer.py")]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240).stdout

    return run


def test_chosen_cases_run_on_the_drop_in(suite) -> None:
    answer = suite("--drop-in", "flash_attn", "--per-test", "3", "--max-len", "9")
    ran = re.findall(r"^PASSED .*\[(True|False)-(\d+)-(\d+)\]|^PASSED .*\[(\d+)-(\d+)-(True|False)\]", answer, re.MULTILINE)
    assert len(ran) == 3, answer
    assert max(int(word) for case in ran for word in case if word.isdigit()) <= 9
    assert "3 passed" in answer and "1 failed" in answer and "19 deselected" in answer and "the suite's own failure" in answer


def test_without_the_drop_in_the_package_is_missing(suite) -> None:
    assert "No module named 'flash_attn'" in suite()


class Item:
    def __init__(self, test: str, case: int) -> None:
        self.name, self.nodeid = f"{test}[{case}]", f"file.py::{test}[{case}]"
        self.callspec = type("Spec", (), {"params": {"seqlen_q": case, "dim": 1000, "seqlens": [5]}})


def test_the_same_cases_are_chosen_again_in_their_order() -> None:
    items = [Item(test, case) for test in ("a", "b") for case in range(50)]
    kept = testing.chosen(items, 5, 40)
    assert [item.name[0] for item in kept] == ["a"] * 5 + ["b"] * 5
    assert kept == [item for item in items if item in kept]
    cases = [int(item.name[2:-1]) for item in kept]
    assert max(cases) <= 40 and cases[:5] != list(range(5))
    assert testing.chosen(items[::-1], 5, 40) == kept[::-1]
    assert len(testing.chosen(items, None, None)) == 100


class Call:
    def __init__(self, case: int) -> None:
        self.id, self.params = str(case), {"seqlen": case}


def test_cases_are_thinned_while_they_are_made() -> None:
    calls = [Call(case) for case in range(100)]
    kept = testing.thinned(calls, 10, 40)
    assert len(kept) == 10 and kept == [call for call in calls if call in kept]
    assert [call.id for call in testing.thinned(calls[::-1], 10, 40)] == [call.id for call in kept[::-1]]
    cases = [int(call.id) for call in kept]
    assert max(cases) <= 40 and cases != list(range(10))
    assert len(testing.thinned(calls, 50, 40)) == 50  # long ones, where there are too few short ones
    assert testing.thinned(calls, 100, 40) == calls


def test_few_cases_are_made_for_the_few_that_run(suite) -> None:
    # Of 22 cases 16 are made for the one that runs; 15 of them and test_alone are not chosen.
    assert "1 passed, 16 deselected" in suite("--drop-in", "flash_attn", "--per-test", "1", "-k", "test_output")


def test_devices_alone_are_changed() -> None:
    assert testing.on_cpu("x = f(device='cuda', kind='cuda')") == 'x = f(device="cpu", kind=\'cuda\')'
