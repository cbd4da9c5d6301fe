"""`python -m fovea`: the command of the package."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import fovea
from conftest import PACKAGE_SOURCES
from fovea import __main__, _files

pytestmark = pytest.mark.skipif(_files.installed("bin", "fovea") is None, reason="this build has no command")

ROOT = PACKAGE_SOURCES.parents[1]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    command = [sys.executable, "-m", "fovea", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"fovea {fovea.__version__}\n"


def test_pages_name_the_commands() -> None:
    page = run("--help")
    assert page.returncode == 0
    for name in ("attend", "bench", "calibrate", "decode", "doctor", "draw-mask", "explain", "pack", "tune"):
        assert name in page.stdout


def test_explain_says_what_the_package_says() -> None:
    page = json.loads(run("explain", "--seqlen-q", "128", "--head-dim", "64", "--causal", "--json").stdout)
    spec = fovea.TensorSpec((1, 128, 1, 64))
    ours = fovea.explain(spec, spec, spec, causal=True, as_json=True)
    assert {name: page[name] for name in ("kernel", "mask", "tiles")} == {name: ours[name] for name in ("kernel", "mask", "tiles")}


def test_pictures_are_equal() -> None:
    picture = run("draw-mask", "--seqlen-q", "64", "--causal", "--window", "16,0").stdout
    spec = fovea.TensorSpec((1, 64, 1, 8))
    rows = [line for line in fovea.block_map(spec, spec, causal=True, window=(16, 0)).print().splitlines() if "█" in line]
    assert rows and all(row in picture for row in rows)


def test_a_calibrated_recipe_is_taken(tmp_path) -> None:
    """Of the pattern whose outliers a rotation spreads: the recipe is a rotated one, and costs in a call what the file says."""
    script = ROOT / "scripts" / "outliers.py"
    if not script.exists():
        pytest.skip("the scripts are not here")
    layer, file = str(tmp_path / "layer.safetensors"), str(tmp_path / "recipe.json")
    subprocess.run([sys.executable, "-B", str(script), "spikes", layer, "--seqlen", "192", "--heads", "2"], check=True, timeout=120)
    answer = run("calibrate", layer, "--out", file)
    assert answer.returncode == 0, answer.stderr
    recipe = fovea.load_recipe(file)
    assert recipe.quant == "accurate,hadamard=yes" and recipe.error <= recipe.accuracy == 0.02
    data = pathlib.Path(layer).read_bytes()
    floats = np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], "<f4").reshape(3, 1, 192, 2, 64)
    assert np.abs(floats).max() > 10
    got, exact = fovea.attention(*floats, quant=recipe), fovea.attention(*floats)
    errors = [np.linalg.norm((got - exact)[:, :, head]) / np.linalg.norm(exact[:, :, head]) for head in range(2)]
    assert max(errors) == pytest.approx(recipe.error, rel=1e-2)
    assert [head["errors"][recipe.quant] for head in recipe.heads] == pytest.approx(errors, rel=1e-2)


def test_exit_codes_and_messages_come_through() -> None:
    refused = run("explain", "--head-dim", "none")
    assert refused.returncode == 2 and "--head-dim" in refused.stderr and refused.stdout == ""
    assert run("unknown").returncode == 2


def test_files_pass_through(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.random.default_rng(0).standard_normal((1, 33, 2, 16)).astype(numpy.float32)
    numpy.save(tmp_path / "q.npy", array)
    words = [word for name in "qkv" for word in (f"--{name}", str(tmp_path / "q.npy"))]
    result = run("attend", *words, "--causal", "--check", "--out", str(tmp_path / "out.npy"))
    assert result.returncode == 0, result.stderr
    numpy.testing.assert_array_equal(numpy.load(tmp_path / "out.npy"), fovea.attention(array, array, array, causal=True))


def test_doctor_sees_the_packages_of_this_python() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert report["fovea"] == fovea.__version__
    assert report["cuda"]["pack"].get("path") == fovea.describe()["cuda"]["pack"].get("path")


def test_signals_reach_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-m", "fovea", "bench", "--seqlen-q", "16384", "--num-heads-q", "64", "--head-dim", "128", "--runs", "100"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_a_package_without_a_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(__main__, "installed", lambda *parts: None)
    assert __main__.main() == 3
    assert "no command" in capsys.readouterr().err
