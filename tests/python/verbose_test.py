"""FOVEA_VERBOSE=1 prints a line for each call, and without it the library prints nothing, refused calls included.

usage: verbose_test.py --library libfovea.so [unittest options]
"""

import argparse
import array
import os
import re
import subprocess
import sys
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


class Verbose(unittest.TestCase):
    def lines(self, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FOVEA_")} | variables
        done = subprocess.run([sys.executable, "-B", __file__, "--library", OPTIONS.library, "--calls"], env=environment,
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--calls", action="store_true")
    OPTIONS, rest = parser.parse_known_args()
    if OPTIONS.calls:
        every_call(OPTIONS.library)
    else:
        unittest.main(argv=[sys.argv[0], *rest])
