"""`import fovea`: what it brings along, what it costs, and that it needs no extension."""

import os
import subprocess
import sys

import pytest


def in_new_python(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_no_framework_is_imported() -> None:
    program = 'import sys, fovea; print({"numpy", "torch", "jax", "transformers"} & set(sys.modules))'
    assert in_new_python(program) == "set()"


def test_import_takes_at_most_100_ms_beside_numpy() -> None:
    pytest.importorskip("numpy")
    # Processor time, which other processes of a busy machine do not lengthen; the least of three, since the first may have to compile.
    program = "import time, numpy; begin = time.process_time(); import fovea; print(time.process_time() - begin)"
    assert min(float(in_new_python(program)) for _ in range(3)) < 0.1


def test_a_free_threaded_interpreter_takes_no_extension() -> None:
    # 3.13t finds the file, and would crash in it.
    program = 'import sys; sys.abiflags = "t"; import fovea; from fovea import _calls; print(_calls.ROUTE, "fovea._fovea" in sys.modules)'
    assert in_new_python(program) == "ctypes False"
