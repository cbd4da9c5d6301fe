"""FOVEA_VERBOSE=1 prints a line for each call, and without it the library prints nothing, refused calls included.

A driver that computes nothing and a compiler that can be held stand in for a GPU where plans have stages.

usage: verbose_test.py --library libfovea.so [--driver fake_libcuda.so --compiler fake_libnvrtc.so] [unittest options]
"""

import argparse
import array
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import fovea_ctypes as fovea

SHAPE = (1, 6, 2, 8)


def tensor(data, shape=SHAPE):
    return fovea.tensor(data.buffer_info()[0], shape)


def zeros():
    return array.array("f", [0.0]) * (6 * 2 * 8)


def every_call(path):
    """In a process of its own: seven calls, and three that are refused."""
    library = fovea.Library(path)
    q, out, lse, dq = zeros(), zeros(), array.array("f", [0.0]) * 12, zeros()
    args = fovea.forward_args(q=tensor(q), k=tensor(q), v=tensor(q), out=tensor(out), lse=tensor(lse, (1, 2, 6)), causal=1)
    library.attention_forward(args)
    library.attention_forward(args)  # the plan is there
    library.plan(args).run(args)
    library.attention_backward(fovea.backward_args(args, dout=tensor(q), dq=tensor(dq)))
    lengths = array.array("i", [4])
    cache = fovea.forward_args(q=tensor(q, (1, 1, 2, 8)), k=tensor(q), v=tensor(q), out=tensor(out, (1, 1, 2, 8)))
    library.attention_decode(fovea.decode_args(cache, seqlens=fovea.tensor(lengths.buffer_info()[0], (1,), "i32")))
    for wrong in (dict(score_mod="nonsense"), dict(window_left=-1, has_window_left=1), dict(softcap=-1.0)):
        try:
            library.attention_forward(fovea.forward_args(q=tensor(q), k=tensor(q), v=tensor(q), out=tensor(out), **wrong))
        except fovea.FoveaError:
            continue
        raise AssertionError(f"{wrong} is accepted")


def calls_of_a_staged_plan(path, compiler):
    """In a process of its own: a run by the first stage, and one by the second."""
    library, compiler = fovea.Library(path), ctypes.CDLL(compiler)
    shape, gpu = (1, 4096, 8, 128), fovea.Device(fovea.CUDA, 0)
    x, out = (fovea.tensor(address, shape, "bf16", device=gpu) for address in (1 << 40, 1 << 41))  # where nobody reads
    args = fovea.forward_args(q=x, k=x, v=x, out=out)
    compiler.fake_nvrtc_hold(b"sm90/attention_forward.cuh")
    plan = library.plan(args, fovea.sized(fovea.PlanOptions, compile_mode=2))
    plan.run(args)
    compiler.fake_nvrtc_hold(None)
    library.call(library.c.fovea_plan_wait, plan.handle)
    plan.run(args)


class Verbose(unittest.TestCase):
    def lines(self, *options, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FOVEA_")} | variables
        done = subprocess.run([sys.executable, "-B", __file__, "--library", OPTIONS.library, "--calls", *options], env=environment,
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "")
        return done.stderr.splitlines()

    def test_nothing_is_printed_unless_it_is_asked_for(self):
        for variables in ({}, {"FOVEA_VERBOSE": "0"}, {"FOVEA_VERBOSE": ""}):
            self.assertEqual(self.lines(**variables), [])

    def test_a_line_for_each_call(self):
        lines = self.lines(FOVEA_VERBOSE="1", FOVEA_CPU_TARGET="scalar")
        expected = [("attention_forward", "cpu/attention_forward", True), ("attention_forward", "cpu/attention_forward", False),
                    ("Plan::run", "cpu/attention_forward", False), ("attention_backward", "cpu/attention_backward", True),
                    ("attention_decode", "cpu/attention_forward", True)]
        self.assertEqual(len(lines), len(expected), lines)
        for line, (operation, kernel, is_planned) in zip(lines, expected):
            planned = r" planned in [\d.]+ us;" if is_planned else ""
            self.assertRegex(line, rf"^fovea: {operation}: f32 batch 1, .*heads 2/2.*; {kernel} on scalar;{planned} [\d.]+ us on the host$")

    def test_a_staged_plan_names_what_runs_and_says_when_that_changes(self):
        if OPTIONS.driver is None:
            self.skipTest("needs the fake driver")
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "libcuda.so.1").symlink_to(OPTIONS.driver)
            places = {"LD_LIBRARY_PATH": folder, "FOVEA_CACHE_DIR": folder, "FOVEA_NVRTC": OPTIONS.compiler}
            lines = self.lines("--compiler", OPTIONS.compiler, FOVEA_VERBOSE="1", **places)
            self.assertEqual(self.lines("--compiler", OPTIONS.compiler, **places), [])
        first, last = "cuda/sm80/attention_forward", "cuda/sm90/attention_forward"
        expected = [("Plan::run", first), ("staged plan", f"{last} takes over from {first}"), ("Plan::run", last)]
        self.assertEqual(len(lines), len(expected), lines)
        for line, (operation, kernel) in zip(lines, expected):
            self.assertRegex(line, rf"^fovea: {operation}: bf16 batch 1, .*; {kernel} on cuda:0; [\d.]+ us on the host$")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--driver")
    parser.add_argument("--compiler")
    parser.add_argument("--calls", action="store_true")
    OPTIONS, rest = parser.parse_known_args()
    if OPTIONS.calls and OPTIONS.compiler:
        calls_of_a_staged_plan(OPTIONS.library, OPTIONS.compiler)
    elif OPTIONS.calls:
        every_call(OPTIONS.library)
    else:
        unittest.main(argv=[sys.argv[0], *rest])
