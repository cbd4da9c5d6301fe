"""Plans in stages, in processes of their own: they end while a kernel is compiled, wait for it, or are forked.

A driver that computes nothing stands in for a GPU: FOVEA_FAKE_LIBCUDA names its file. The compiler is the real one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import fovea

spec = fovea.TensorSpec((1, 4096, 8, 128), "bf16", "cuda")
try:
    plan = fovea.plan(spec, spec, spec, score_mod="score * 3.25", compile="staged")
except fovea.Unsupported as error:
    sys.exit(f"skip: {error}")
kernel = lambda: plan.explain(as_json=True)["kernel"]
assert not plan.is_final and kernel() == "cuda/sm80/attention_forward", kernel()
"""


@pytest.fixture
def environment(fake_gpu: dict[str, str], route: str) -> dict[str, str]:
    if route == "extension":
        pytest.skip("once is enough")
    return fake_gpu


def run(program: str, environment: dict[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if ran.stderr.startswith("skip: "):
        pytest.skip(ran.stderr)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_process_ends_while_a_kernel_is_compiled(environment: dict[str, str]) -> None:
    run("", environment)


def test_whoever_waits_gets_the_tables_kernel_and_the_disk_keeps_it(environment: dict[str, str]) -> None:
    run(
        "plan.wait()\n"
        "assert plan.is_final and kernel() == 'cuda/sm90/attention_forward', kernel()\n"
        "again = fovea.plan(spec, spec, spec, score_mod='score * 3.25', compile='staged')\n"
        "assert again.is_final\n",
        environment,
    )
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("assert not plan.is_final and kernel() ==", "assert plan.is_final and kernel() !=")],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_forked_child_is_told_instead_of_waiting(environment: dict[str, str]) -> None:
    run(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        plan.wait()\n"
        "    except fovea.DeviceError:\n"
        "        sys.exit(0)\n"
        "    sys.exit(1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n",
        environment,
    )


def test_the_variable_asks_for_stages_and_the_argument_wins(environment: dict[str, str]) -> None:
    staged = {**environment, "FOVEA_COMPILE": "staged"}
    run("", {**staged, "FOVEA_COMPILE": "complete"})
    program = (
        "import fovea\n"
        "spec = fovea.TensorSpec((1, 4096, 8, 128), 'bf16', 'cuda')\n"
        "try:\n"
        "    assert '{}' in fovea.explain(spec, spec, spec, score_mod='score * 3.25', compile='{}')\n"
        "except AssertionError:\n"
        "    raise SystemExit('not told')\n"
    )
    for mode, words in (("auto", "runs the calls until it has"), ("complete", "from       ")):
        ran = subprocess.run(
            [sys.executable, "-c", program.format(words, mode)], env=staged, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.stderr == ""
