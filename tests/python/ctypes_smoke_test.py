"""The shared library as another language sees it: loaded by ctypes, called, refused, planned, explained.

usage: ctypes_smoke_test.py --library libfovea.so [unittest options]
"""

import argparse
import array
import ctypes
import json
import math
import pathlib
import re
import sys
import unittest

import fovea_ctypes as fovea

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "fovea" / "fovea.h"
BATCH, SEQLEN, HEADS, DIM = 1, 6, 2, 4


def values(count, step):
    return array.array("f", (math.sin(step * i) for i in range(count)))


def as_tensor(data, shape):
    return fovea.tensor(data.buffer_info()[0], shape)


def plain_attention(q, k, v, score_mod, is_visible):
    """The formula in Python's doubles, row by row."""
    out = []
    for i in range(SEQLEN):
        for h in range(HEADS):
            row = {}
            for j in range(SEQLEN):
                at_q, at_k = (i * HEADS + h) * DIM, (j * HEADS + h) * DIM
                dot = sum(q[at_q + d] * k[at_k + d] for d in range(DIM))
                if is_visible(i, j):
                    row[j] = math.exp(score_mod(dot / math.sqrt(DIM), h, i, j))
            total = sum(row.values())
            for d in range(DIM):
                out.append(sum(p * v[(j * HEADS + h) * DIM + d] for j, p in row.items()) / total)
    return out


class CtypesSmoke(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.library = fovea.Library(OPTIONS.library)

    def setUp(self):
        count, self.shape = BATCH * SEQLEN * HEADS * DIM, (BATCH, SEQLEN, HEADS, DIM)
        self.q, self.k, self.v = values(count, 0.7), values(count, 1.3), values(count, 0.4)
        self.out = array.array("f", [math.nan]) * count

    def args(self, **fields):
        tensors = {name: as_tensor(getattr(self, name), self.shape) for name in ("q", "k", "v", "out")}
        return fovea.forward_args(**{**tensors, **fields})

    def assert_close(self, expected):
        for i, (got, want) in enumerate(zip(self.out, expected, strict=True)):
            self.assertAlmostEqual(got, want, delta=1e-6, msg=f"element {i}")  # a few roundings of values below 1

    def test_version_and_abi(self):
        self.assertRegex(self.library.version(), r"^\d+\.\d+\.\d+")
        self.assertEqual(self.library.c.fovea_abi_version(), fovea.ABI_VERSION)

    def test_forward_equals_the_formula(self):
        self.library.attention_forward(self.args(causal=1))
        self.assert_close(plain_attention(self.q, self.k, self.v, lambda s, h, i, j: s, lambda i, j: j <= i))

    def test_programs_are_text_with_named_tensors_and_scalars(self):
        slopes = array.array("f", [0.5, 0.25])
        args = self.args(score_mod="score + slopes[q_head] * (kv_idx - q_idx)", mask_mod="kv_idx != hidden",
                         tensors={"slopes": as_tensor(slopes, (HEADS,))}, scalars={"hidden": 2})
        self.library.attention_forward(args)
        self.assert_close(plain_attention(self.q, self.k, self.v, lambda s, h, i, j: s + slopes[h] * (j - i),
                                          lambda i, j: j != 2))

    def test_backward_hands_each_row_of_dout_to_the_values_it_saw(self):
        count = BATCH * SEQLEN * HEADS * DIM
        ones, lse = array.array("f", [1.0]) * count, array.array("f", [math.nan]) * (BATCH * HEADS * SEQLEN)
        dq, dv = array.array("f", [math.nan]) * count, array.array("f", [math.nan]) * count
        args = self.args(causal=1, lse=as_tensor(lse, (BATCH, HEADS, SEQLEN)))
        self.library.attention_forward(args)
        self.library.attention_backward(fovea.backward_args(
            args, dout=as_tensor(ones, self.shape), dq=as_tensor(dq, self.shape), dv=as_tensor(dv, self.shape)))
        for h in range(HEADS):
            for d in range(DIM):
                total = sum(dv[(j * HEADS + h) * DIM + d] for j in range(SEQLEN))
                self.assertAlmostEqual(total, SEQLEN, places=5)  # probabilities of a row sum to 1
        self.assertTrue(all(dq[d] == 0 for d in range(HEADS * DIM)))  # the first row sees one key: no choice, no gradient

    def test_plan_runs_and_explains(self):
        args = self.args(causal=1)
        plan = self.library.plan(args)
        plan.run(args)
        self.assert_close(plain_attention(self.q, self.k, self.v, lambda s, h, i, j: s, lambda i, j: j <= i))
        explained = json.loads(plan.explain(is_json=True))
        self.assertEqual(explained["kernel"], "cpu/attention_forward")
        self.assertIn("cpu/attention_forward", plan.explain())
        self.assertEqual(json.loads(self.library.explain(args, is_json=True))["mask"], explained["mask"])

    def test_describe_is_one_json_object(self):
        here = json.loads(self.library.describe())
        self.assertEqual(here["fovea"], self.library.version())
        self.assertIn("attention_forward", [operation["name"] for operation in here["operations"]])
        self.assertTrue(any(target["runs_here"] for target in here["targets"]))

    def test_tiles_of_a_mask_into_an_array(self):
        args = self.args(causal=1)
        block_map = fovea.sized(fovea.BlockMapArgs, forward=ctypes.pointer(args), tile_q=2, tile_kv=2)
        shape, kinds = (ctypes.c_int64 * 4)(), (ctypes.c_uint8 * (HEADS * 9))()
        self.library.call(self.library.c.fovea_mask_tiles, ctypes.byref(block_map), kinds, len(kinds), shape)
        self.assertEqual(list(shape), [BATCH, HEADS, 3, 3])
        self.assertEqual(list(kinds), [1, 0, 0, 2, 1, 0, 2, 2, 1] * HEADS)

    def test_errors_have_kind_and_message(self):
        with self.assertRaisesRegex(fovea.InvalidArgument, "nonsense") as caught:
            self.library.attention_forward(self.args(score_mod="score + nonsense"))
        self.assertEqual(caught.exception.kind, 1)
        self.assertTrue(all(math.isnan(x) for x in self.out), "a refused call wrote its output")

    def test_python_can_be_the_executor(self):
        indices = []

        def run(context, count, task, task_context):
            for i in range(count):
                indices.append(i)
                task(task_context, 0, i)

        executor = fovea.sized(fovea.Executor, concurrency=fovea.CONCURRENCY(lambda context: 1), run=fovea.RUN(run))
        self.library.attention_forward(self.args(executor=executor))
        self.assertTrue(indices)
        self.assert_close(plain_attention(self.q, self.k, self.v, lambda s, h, i, j: s, lambda i, j: True))

    def test_runtimes_of_any_size_give_the_same_bits(self):
        results = []
        for num_threads in (1, 2):
            self.library.attention_forward(self.args(runtime=self.library.runtime(num_threads)))
            results.append(self.out.tobytes())
        self.assertEqual(results[0], results[1])


class Mirror(unittest.TestCase):
    """fovea_ctypes.py has the header's structs, field by field, and their C sizes."""

    def test_structs_have_the_headers_fields(self):
        text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
        for name, struct in fovea.STRUCTS.items():
            body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, re.DOTALL)[1]
            declared = [re.search(r"(\w+)\)?(?:\([^)]*\))?$", line.strip())[1]
                        for line in body.split(";") if line.strip()]
            self.assertEqual([field[0] for field in struct._fields_], declared, name)

    def test_dltensor_has_dlpacks_size(self):
        self.assertEqual(ctypes.sizeof(fovea.Tensor), 48)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
