"""The `fovea` command from outside: results, files, exit codes, one clear line for each mistake.

usage: cli_test.py PATH_OF_FOVEA [unittest options]
"""

import json
import math
import os
import pty
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib
from pathlib import Path

from files import bf16, count, e4m3, elements, from_bf16, from_e4m3, normal, npy, read_npy, read_safetensors, safetensors

FOVEA = ""
ROOT = Path(__file__).resolve().parents[2]
# seqlen_q 5 and seqlen_kv 7 differ from each other and from every other extent, so swapped axes show.
BATCH, SEQLEN_Q, SEQLEN_KV, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 2, 5, 7, 4, 2, 8, 6
Q_SHAPE = (BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM)
K_SHAPE = (BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM)
V_SHAPE = (BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM_V)
OUT_SHAPE = (BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM_V)


def attention(q, k, v, visible=lambda b, h, i, j: True, score=lambda s, b, h, i, j: s):
    """out and lse of the shapes above, in Python's floats."""
    out, lse = [0.0] * count(OUT_SHAPE), [-math.inf] * (BATCH * HEADS_Q * SEQLEN_Q)
    for b in range(BATCH):
        for h in range(HEADS_Q):
            g = h // (HEADS_Q // HEADS_KV)
            for i in range(SEQLEN_Q):
                weights = {}
                for j in range(SEQLEN_KV):
                    if not visible(b, h, i, j):
                        continue
                    at_q = ((b * SEQLEN_Q + i) * HEADS_Q + h) * HEAD_DIM
                    at_k = ((b * SEQLEN_KV + j) * HEADS_KV + g) * HEAD_DIM
                    product = sum(q[at_q + d] * k[at_k + d] for d in range(HEAD_DIM)) / math.sqrt(HEAD_DIM)
                    weights[j] = math.exp(score(product, b, h, i, j))
                if not weights:
                    continue
                total = sum(weights.values())
                lse[(b * HEADS_Q + h) * SEQLEN_Q + i] = math.log(total)
                for d in range(HEAD_DIM_V):
                    at_out = ((b * SEQLEN_Q + i) * HEADS_Q + h) * HEAD_DIM_V + d
                    values = (w * v[((b * SEQLEN_KV + j) * HEADS_KV + g) * HEAD_DIM_V + d] for j, w in weights.items())
                    out[at_out] = sum(values) / total
    return out, lse


class CommandTest(unittest.TestCase):
    """A folder with q.npy, k.npy, v.npy; commands run in it."""

    def setUp(self):
        self.q, self.k, self.v = normal(count(Q_SHAPE), 1), normal(count(K_SHAPE), 2), normal(count(V_SHAPE), 3)
        folder = tempfile.TemporaryDirectory(prefix="fovea-cli-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.write("q.npy", npy(Q_SHAPE, self.q))
        self.write("k.npy", npy(K_SHAPE, self.k))
        self.write("v.npy", npy(V_SHAPE, self.v))

    def write(self, name, data):
        (self.folder / name).write_bytes(data)

    def run_fovea(self, *words, **options):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FOVEA_")}
        return subprocess.run(
            [FOVEA, *words], cwd=self.folder, capture_output=True, text=True, timeout=120, env=environment, **options
        )

    def attend(self, *words, **options):
        threads = [] if "cuda" in words else ["--threads", "1"]
        return self.run_fovea("attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", *threads, *words, **options)

    def expect(self, result, code, *needles):
        """The exit code, and one line on stderr that holds every needle."""
        self.assertEqual(result.returncode, code, result.stderr + result.stdout)
        if code == 0:
            self.assertEqual(result.stderr, "")
            return
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for needle in needles:
            self.assertIn(needle, result.stderr)

    def expect_close(self, got, expected, tolerance=2e-5):
        self.assertEqual(len(got), len(expected))
        for index, (a, b) in enumerate(zip(got, expected)):
            self.assertTrue(a == b or abs(a - b) <= tolerance, f"element {index}: got {a}, expected {b}")

    def expect_out(self, result, expected, tolerance=2e-5):
        self.expect(result, 0)
        descr, shape, values = read_npy(self.folder / "out.npy")
        self.assertEqual((descr, shape), ("<f4", OUT_SHAPE))
        self.expect_close(values, expected, tolerance)


class Results(CommandTest):
    def test_plain(self):
        out, lse = attention(self.q, self.k, self.v)
        self.expect_out(self.attend("--out", "out.npy", "--lse", "lse.npy"), out)
        descr, shape, values = read_npy(self.folder / "lse.npy")
        self.assertEqual((descr, shape), ("<f4", (BATCH, HEADS_Q, SEQLEN_Q)))
        self.expect_close(values, lse)

    def test_causal_is_bottom_right_unless_said(self):
        shift = SEQLEN_KV - SEQLEN_Q
        for words, offset in ((["--causal"], shift), (["--causal=top_left"], 0), (["--causal", "bottom_right"], shift),
                              (["--causal", "--align", "top_left"], 0)):
            out, _ = attention(self.q, self.k, self.v, lambda b, h, i, j: j <= i + offset)
            self.expect_out(self.attend(*words, "--out", "out.npy"), out)

    def test_window_with_open_sides(self):
        for text, left, right in (("1,2", 1, 2), ("-,0", 99, 0), ("2,-", 2, 99)):
            out, _ = attention(self.q, self.k, self.v, lambda b, h, i, j: i + 2 - left <= j <= i + 2 + right)
            self.expect_out(self.attend("--window", text, "--out", "out.npy"), out)
        out, _ = attention(self.q, self.k, self.v, lambda b, h, i, j: i - 1 <= j <= i)
        self.expect_out(self.attend("--window=1,0", "--align", "top_left", "--out", "out.npy"), out)

    def test_score_features_apply_in_order(self):
        slopes, bias = [0.5, 0.25, 0.125, 0.0625], normal(SEQLEN_Q * SEQLEN_KV, 4)
        self.write("slopes.npy", npy((HEADS_Q,), slopes))
        self.write("bias.npy", npy((SEQLEN_Q, SEQLEN_KV), bias))

        def score(s, b, h, i, j):
            s = 0.7 * s * math.sqrt(HEAD_DIM)
            s = 3 * math.tanh(s / 3) + bias[i * SEQLEN_KV + j] - slopes[h] * abs(i + 2 - j)
            return s * 2 + 1

        out, _ = attention(self.q, self.k, self.v, score=score)
        result = self.attend("--scale", "0.7", "--softcap", "3", "--bias", "bias.npy", "--alibi", "slopes.npy",
                             "--score-mod", "score * n + 1", "--scalar", "n=2.0", "--out", "out.npy")
        self.expect_out(result, out, 1e-4)

    def test_mask_file_segments_and_formula_meet(self):
        mask = [(i * 3 + j) % 4 != 0 for i in range(SEQLEN_Q) for j in range(SEQLEN_KV)]
        ids_q, ids_kv = [0, 0, 1, 1, -1] * 2, [0, 0, 0, 1, 1, 1, -1] * 2
        self.write("mask.npy", npy((SEQLEN_Q, SEQLEN_KV), mask, "|b1"))
        self.write("ids_q.npy", npy((BATCH, SEQLEN_Q), ids_q, "<i4"))
        self.write("ids_kv.npy", npy((BATCH, SEQLEN_KV), ids_kv, "<i8"))
        self.write("keep.npy", npy((SEQLEN_KV,), [1, 1, 0, 1, 1, 1, 1], "<i4"))

        def visible(b, h, i, j):
            return mask[i * SEQLEN_KV + j] and ids_q[i] == ids_kv[j] and ids_q[i] != -1 and j != 2

        out, lse = attention(self.q, self.k, self.v, visible)
        result = self.attend("--mask", "mask.npy", "--segments-q", "ids_q.npy", "--segments-kv", "ids_kv.npy",
                             "--mask-mod", "keep[kv_idx] == 1", "--tensor", "keep=keep.npy", "--out", "out.npy",
                             "--lse", "lse.npy")
        self.expect_out(result, out)
        _, _, values = read_npy(self.folder / "lse.npy")
        self.expect_close(values, lse)
        self.assertEqual(values[SEQLEN_Q - 1], -math.inf)  # the padded query

    def test_sinks_join_the_denominator(self):
        self.write("sinks.npy", npy((HEADS_Q,), [0.5, 1, -1, 2]))
        self.expect(self.attend("--sinks", "sinks.npy", "--check"), 0)
        out, lse = attention(self.q, self.k, self.v)
        self.expect(self.attend("--sinks", "sinks.npy", "--lse", "lse.npy"), 0)
        _, _, values = read_npy(self.folder / "lse.npy")
        self.assertAlmostEqual(values[0], math.log(math.exp(lse[0]) + math.exp(0.5)), places=5)

    def test_dropout_of_everything_gives_zero(self):
        self.expect_out(self.attend("--dropout", "1", "--seed", "3", "--out", "out.npy"), [0.0] * count(OUT_SHAPE))
        self.expect(self.attend("--dropout", "0.5", "--seed", "3", "--check"), 0)
        self.expect(self.attend("--dropout", "0.5", "--seed", str(2**64 - 1), "--check"), 0)

    def test_recipes_round_and_are_checked_against_their_own_oracle(self):
        for recipe in ("accurate", "fast", "int8,hadamard=yes", "sage1", "sage2", "nvfp4", "mxfp4,block_kv=64"):
            result = self.attend("--quant", recipe, "--causal", "--check", "--json")
            self.expect(result, 0)
            report = json.loads(result.stdout)
            self.assertEqual(report["explanation"]["kernel"], "cpu/attention_quantized")
            self.assertIn(f"quant {recipe}", report["explanation"]["problem"])
        self.expect(self.attend("--quant", "fp8_static"), 2, "--quant: fp8_static wants scales", "q_scale, k_scale and v_scale in --input")

    def test_codes_of_e4m3_are_numbers_times_their_scales(self):
        codes, numbers = {}, {}
        scales = [2.0**-6, 2.0**-7, 0.01, 0.02]  # of each batch entry and kv head
        for name, values, shape in (("q", self.q, Q_SHAPE), ("k", self.k, K_SHAPE), ("v", self.v, V_SHAPE)):
            of_element = [scales[b * HEADS_KV + h * HEADS_KV // shape[2]]
                          for b in range(shape[0]) for _ in range(shape[1]) for h in range(shape[2]) for _ in range(shape[3])]  # fmt: skip
            stored = [e4m3(value / scale) for value, scale in zip(values, of_element)]
            codes[name] = ("F8_E4M3", shape, bytes(stored))
            numbers[name] = [from_e4m3(bits) * scale for bits, scale in zip(stored, of_element)]
            codes[f"{name}_scale"] = ("F32", (BATCH, HEADS_KV), elements(scales, "<f4"))
        self.write("codes.safetensors", safetensors(codes))
        words = ["attend", "--input", "codes.safetensors", "--threads", "1"]
        result = self.run_fovea(*words, "--quant", "fp8_static", "--out-dtype", "f32", "--out", "out.npy", "--check")
        self.assertIn("e4m3 batch", result.stdout)
        self.expect_out(result, attention(*numbers.values())[0], 0.1)
        self.expect(self.run_fovea(*words, "--quant", "fp8_static", "--out", "out.safetensors"), 0)
        self.assertEqual(read_safetensors(self.folder / "out.safetensors")["out"][0], "BF16")
        page = self.run_fovea("explain", "--input", "codes.safetensors", "--quant", "fp8_static").stdout
        self.assertIn("out bf16, quant fp8_static", page)
        self.expect(self.run_fovea(*words), 2, "q, k and v are e4m3 and quant is none; expected fp8_static")
        codes["k_scale"] = ("F64", (BATCH, HEADS_KV), elements(scales, "<f8"))
        self.write("codes.safetensors", safetensors(codes))
        self.expect(self.run_fovea(*words, "--quant", "fp8_static"), 2, "'k_scale' has dtype F64; expected one of F32,", "I64, F8_E4M3")
        del codes["k_scale"]
        self.write("codes.safetensors", safetensors(codes))
        self.expect(self.run_fovea(*words, "--quant", "fp8_static"), 2, "expected q_scale, k_scale and v_scale in --input")

    def test_an_accuracy_chooses_a_recipe_or_none(self):
        report = json.loads(self.attend("--accuracy", "0.05", "--check", "--json").stdout)
        self.assertEqual(report["explanation"]["kernel"], "cpu/attention_forward")
        self.assertIn("none: no recipe is within 0.05", report["explanation"]["quant"])
        page = self.run_fovea("explain", "--seqlen-q", "64", "--accuracy", "0.02").stdout
        self.assertIn("refused    quant fast: its error is 0.045; 0.02 is allowed", page)
        for words in (("--accuracy", "0.02", "--quant", "fast"), ("--quant", "fast", "--accuracy", "0.02")):
            self.expect(self.attend(*words), 2, "quant.accuracy is 0.02 beside fast; expected one of them")

    def test_bhsd_is_bshd_transposed(self):
        def transposed(values, shape):
            b, s, h, d = shape
            order = [((x * s + z) * h + y) * d + w for x in range(b) for y in range(h) for z in range(s) for w in range(d)]
            return npy((b, h, s, d), [values[i] for i in order])

        for name, values, shape in (("q", self.q, Q_SHAPE), ("k", self.k, K_SHAPE), ("v", self.v, V_SHAPE)):
            self.write(f"{name}.npy", transposed(values, shape))
        out, _ = attention(self.q, self.k, self.v)
        self.expect(self.attend("--layout", "bhsd", "--causal", "--mask-mod", "q_idx >= 0", "--out", "out.npy"), 0)
        causal, _ = attention(self.q, self.k, self.v, lambda b, h, i, j: j <= i + 2)
        _, shape, values = read_npy(self.folder / "out.npy")
        self.assertEqual(shape, (BATCH, HEADS_Q, SEQLEN_Q, HEAD_DIM_V))
        self.write("expected.npy", transposed(causal, OUT_SHAPE))
        self.expect_close(values, read_npy(self.folder / "expected.npy")[2])

    def test_thd_packs_sequences(self):
        # The batch of two as two packed sequences, and three rows after the last.
        rest = [7.0] * (3 * HEADS_Q * HEAD_DIM)
        self.write("q.npy", npy((BATCH * SEQLEN_Q + 3, HEADS_Q, HEAD_DIM), self.q + rest))
        self.write("k.npy", npy((BATCH * SEQLEN_KV, HEADS_KV, HEAD_DIM), self.k))
        self.write("v.npy", npy((BATCH * SEQLEN_KV, HEADS_KV, HEAD_DIM_V), self.v))
        self.write("cu_q.npy", npy((3,), [0, SEQLEN_Q, 2 * SEQLEN_Q], "<i4"))
        self.write("cu_kv.npy", npy((3,), [0, SEQLEN_KV, 2 * SEQLEN_KV], "<i8"))
        ids = [0, 0, 1, 1, -1] * 2
        self.write("ids_q.npy", npy((13,), ids + [0, 0, 0], "<i4"))
        self.write("ids_kv.npy", npy((14,), [0, 0, 0, 1, 1, 1, -1] * 2, "<i4"))
        words = ["--layout", "thd", "--cu-seqlens-q", "cu_q.npy", "--cu-seqlens-kv", "cu_kv.npy", "--out", "out.npy"]
        for extra, visible in (
            (["--causal"], lambda b, h, i, j: j <= i + 2),
            (["--segments-q", "ids_q.npy", "--segments-kv", "ids_kv.npy"],
             lambda b, h, i, j: ids[i] != -1 and ids[i] == [0, 0, 0, 1, 1, 1, -1][j]),
        ):
            out, lse = attention(self.q, self.k, self.v, visible)
            self.expect(self.attend(*words, *extra, "--lse", "lse.npy", "--check"), 0)
            _, shape, values = read_npy(self.folder / "out.npy")
            self.assertEqual(shape, (13, HEADS_Q, HEAD_DIM_V))
            self.expect_close(values, out + [0.0] * (3 * HEADS_Q * HEAD_DIM_V))
            _, shape, values = read_npy(self.folder / "lse.npy")
            self.assertEqual(shape, (HEADS_Q, 13))
            self.expect_close(values[:5] + values[10:13], lse[:5] + [-math.inf] * 3)

    def test_fortran_order_and_header_versions(self):
        out, _ = attention(self.q, self.k, self.v)
        b, s, h, d = Q_SHAPE
        order = [((x * s + y) * h + z) * d + w for w in range(d) for z in range(h) for y in range(s) for x in range(b)]
        self.write("q.npy", npy(Q_SHAPE, [self.q[i] for i in order], fortran=True))
        self.write("k.npy", npy(K_SHAPE, self.k, version=2))
        self.write("v.npy", npy(V_SHAPE, self.v, version=3))
        self.expect_out(self.attend("--out", "out.npy"), out)

    def test_float16(self):
        for name, values, shape in (("q", self.q, Q_SHAPE), ("k", self.k, K_SHAPE), ("v", self.v, V_SHAPE)):
            self.write(f"{name}.npy", npy(shape, values, "<f2"))
        out, _ = attention(self.q, self.k, self.v)
        self.expect(self.attend("--out", "out.npy", "--check"), 0)
        descr, _, values = read_npy(self.folder / "out.npy")
        self.assertEqual(descr, "<f2")
        self.expect_close(values, out, 1e-2)
        self.expect(self.attend("--out", "out.npy", "--out-dtype", "f32"), 0)
        self.assertEqual(read_npy(self.folder / "out.npy")[0], "<f4")

    def test_bf16_travels_as_uint16(self):
        for name, values, shape in (("q", self.q, Q_SHAPE), ("k", self.k, K_SHAPE), ("v", self.v, V_SHAPE)):
            self.write(f"{name}.npy", npy(shape, [bf16(x) for x in values], "<u2"))
        out, _ = attention(self.q, self.k, self.v)
        self.expect(self.attend("--dtype", "bf16", "--out", "out.npy", "--check"), 0)
        descr, _, values = read_npy(self.folder / "out.npy")
        self.assertEqual(descr, "<u2")
        self.expect_close([from_bf16(x) for x in values], out, 4e-2)

    def test_safetensors_in_and_out(self):
        content = lambda values: struct.pack(f"<{len(values)}H", *(bf16(x) for x in values))
        self.write("x.safetensors", safetensors({
            "v": ("BF16", V_SHAPE, content(self.v)), "q": ("BF16", Q_SHAPE, content(self.q)),
            "unused": ("F64", (1,), bytes(8)), "k": ("BF16", K_SHAPE, content(self.k))}))
        self.expect(self.run_fovea("attend", "--input", "x.safetensors", "--out", "y.safetensors", "--check"), 0)
        tensors = read_safetensors(self.folder / "y.safetensors")
        self.assertEqual({name: entry[:2] for name, entry in tensors.items()},
                         {"out": ("BF16", OUT_SHAPE), "lse": ("F32", (BATCH, HEADS_Q, SEQLEN_Q))})
        out, lse = attention(self.q, self.k, self.v)
        self.expect_close(struct.unpack(f"<{len(lse)}f", tensors["lse"][2]), lse, 4e-2)
        got = [from_bf16(x) for x in struct.unpack(f"<{len(out)}H", tensors["out"][2])]
        self.expect_close(got, out, 4e-2)

    def test_axes_of_size_zero(self):
        self.write("q.npy", npy((0, SEQLEN_Q, HEADS_Q, HEAD_DIM), []))
        self.write("k.npy", npy((0, SEQLEN_KV, HEADS_KV, HEAD_DIM), []))
        self.write("v.npy", npy((0, SEQLEN_KV, HEADS_KV, HEAD_DIM_V), []))
        self.expect(self.attend("--out", "out.npy", "--check"), 0)
        self.assertEqual(read_npy(self.folder / "out.npy")[1], (0, SEQLEN_Q, HEADS_Q, HEAD_DIM_V))
        self.write("q.npy", npy(Q_SHAPE, self.q))
        self.write("k.npy", npy((BATCH, 0, HEADS_KV, HEAD_DIM), []))
        self.write("v.npy", npy((BATCH, 0, HEADS_KV, HEAD_DIM_V), []))
        self.expect_out(self.attend("--out", "out.npy", "--check"), [0.0] * count(OUT_SHAPE))

    def test_any_number_of_threads_gives_the_same_bits(self):
        self.expect(self.attend("--out", "a.npy"), 0)
        self.expect(self.run_fovea("attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--threads", "3",
                                   "--deterministic", "--out", "b.npy"), 0)
        self.assertEqual((self.folder / "a.npy").read_bytes(), (self.folder / "b.npy").read_bytes())


class Check(CommandTest):
    """--check where results are not finite, or known to no digit."""

    def check(self, code, *words):
        result = self.attend("--check", "--json", *words)
        self.expect(result, code)
        return json.loads(result.stdout)["check"], result.stderr

    def test_scores_beyond_f32_are_not_called_right(self):
        self.write("q.npy", npy(Q_SHAPE, [1e19 * x for x in self.q]))
        self.write("k.npy", npy(K_SHAPE, [1e19 * x for x in self.k]))
        check, message = self.check(1, "--scale", "1", "--lse", "lse.npy")
        self.assertTrue(any(math.isnan(x) for x in read_npy(self.folder / "lse.npy")[2]))
        self.assertGreater(check["lse"]["num_wrong"], 0)
        self.assertGreater(check["lse"]["num_beyond_f32"], 0)
        self.assertIn("range of f32", message)
        self.assertIn("beyond f32 lse: ", self.attend("--check", "--scale", "1").stdout)
        self.write("dout.npy", npy(OUT_SHAPE, normal(count(OUT_SHAPE), 5)))
        check, _ = self.check(1, "--scale", "1", "--backward", "--dout", "dout.npy")
        for name in ("dq", "dk", "dv"):
            self.assertGreater(check[name]["num_wrong"], 0)

    def test_what_is_allowed_is_no_more_than_the_range_of_values(self):
        check, _ = self.check(0, "--scale", "1e30")
        self.assertLessEqual(check["out"]["allowed"], 2.001 * max(map(abs, self.v)))
        self.assertEqual(check["out"]["num_beyond_f32"], 0)

    def test_nan_and_infinity_where_they_belong_are_right(self):
        v = [*self.v]
        v[0], v[1] = math.inf, math.nan
        self.write("v.npy", npy(V_SHAPE, v))
        check, _ = self.check(0, "--out", "out.npy")
        self.assertEqual(read_npy(self.folder / "out.npy")[2][0], math.inf)
        self.assertEqual(check["out"]["num_wrong"], 0)

    def test_denormal_values(self):
        self.write("v.npy", npy(V_SHAPE, [1e-39 * x for x in self.v]))
        self.check(0)
        tensors = {name: ("BF16", shape, elements([bf16(x * scale) for x in values], "<u2"))
                   for name, shape, values, scale in (("q", Q_SHAPE, self.q, 1), ("k", K_SHAPE, self.k, 1), ("v", V_SHAPE, self.v, 1e-39))}
        self.write("tiny.safetensors", safetensors(tensors))
        self.expect(self.run_fovea("attend", "--input", "tiny.safetensors", "--check"), 0)


class Gradients(CommandTest):
    """Gradients of sum(dout * out) + sum(dlse * lse), beside central differences of the same sum."""

    def setUp(self):
        super().setUp()
        self.dout, self.dlse = normal(count(OUT_SHAPE), 5), normal(BATCH * HEADS_Q * SEQLEN_Q, 6)
        self.write("dout.npy", npy(OUT_SHAPE, self.dout))
        self.write("dlse.npy", npy((BATCH, HEADS_Q, SEQLEN_Q), self.dlse))

    def backward(self, *words):
        return self.attend("--backward", "--dout", "dout.npy", *words)

    def test_gradients_of_a_recipe_are_checked_against_their_own_oracle(self):
        result = self.backward("--quant", "int8,hadamard=yes", "--causal", "--check")
        self.expect(result, 0)

    def expect_slopes(self, file, shape, values, loss):
        """Some elements of a gradient; `loss` is a function of all values."""
        descr, got_shape, got = read_npy(self.folder / file)
        self.assertEqual((descr, got_shape), ("<f4", shape))
        for at in sorted({0, len(values) - 1, *range(3, len(values), max(1, len(values) // 7))}):
            moved = [values[:at] + [values[at] + step] + values[at + 1:] for step in (1e-4, -1e-4)]
            slope = (loss(moved[0]) - loss(moved[1])) / 2e-4
            self.assertAlmostEqual(got[at], slope, delta=1e-4 * (1 + abs(slope)), msg=f"{file} [{at}]")

    def loss(self, q, k, v, with_lse=True, **features):
        out, lse = attention(q, k, v, **features)
        total = sum(a * b for a, b in zip(self.dout, out))
        return total + (sum(a * b for a, b in zip(self.dlse, lse)) if with_lse else 0)

    def test_of_q_k_and_v(self):
        visible = lambda b, h, i, j: j <= i + SEQLEN_KV - SEQLEN_Q
        words = ["--causal", "--dq", "dq.npy", "--dk", "dk.npy", "--dv", "dv.npy", "--check"]
        for with_lse in (False, True):
            result = self.backward(*words, *(["--dlse", "dlse.npy"] if with_lse else []))
            self.expect(result, 0)
            self.assertIn("backward   cpu/attention_backward", result.stdout)
            loss = lambda q, k, v: self.loss(q, k, v, with_lse, visible=visible)
            self.expect_slopes("dq.npy", Q_SHAPE, self.q, lambda x: loss(x, self.k, self.v))
            self.expect_slopes("dk.npy", K_SHAPE, self.k, lambda x: loss(self.q, x, self.v))
            self.expect_slopes("dv.npy", V_SHAPE, self.v, lambda x: loss(self.q, self.k, x))

    def test_of_everything_that_has_a_name(self):
        bias, slopes, table = normal(SEQLEN_Q * SEQLEN_KV, 7), [0.5, 0.25, 0.125, 0.0625], normal(HEADS_Q, 8)
        sinks = normal(HEADS_Q, 9)
        self.write("bias.npy", npy((SEQLEN_Q, SEQLEN_KV), bias))
        self.write("slopes.npy", npy((HEADS_Q,), slopes))
        self.write("table.npy", npy((HEADS_Q,), table))
        self.write("sinks.npy", npy((HEADS_Q,), sinks))
        result = self.backward(
            "--bias", "bias.npy", "--alibi", "slopes.npy", "--sinks", "sinks.npy", "--dlse", "dlse.npy", "--check",
            "--score-mod", "score * gain + bias_table[q_head] * tanh(score)", "--tensor", "bias_table=table.npy",
            "--scalar", "gain=1.5", "--grad", "bias=dbias.npy", "--grad", "alibi=dslopes.npy",
            "--grad", "bias_table=dtable.npy", "--grad", "gain=dgain.npy", "--grad", "sinks=dsinks.npy", "--json")
        self.expect(result, 0)
        check = json.loads(result.stdout)["check"]
        for name in ("dq", "dk", "dv", "bias", "alibi", "bias_table", "gain", "sinks"):
            self.assertTrue(check[name]["passes"], name)

        def loss(bias=bias, slopes=slopes, table=table, gain=1.5):
            def score(s, b, h, i, j):
                s += bias[i * SEQLEN_KV + j] - slopes[h] * abs(i + 2 - j)
                return s * gain + table[h] * math.tanh(s)

            out, lse = attention(self.q, self.k, self.v, score=score)
            total = 0
            for row, old in enumerate(lse):  # the sink joins the denominator
                h, i, b = row // SEQLEN_Q % HEADS_Q, row % SEQLEN_Q, row // (SEQLEN_Q * HEADS_Q)
                new = math.log(math.exp(old) + math.exp(sinks[h]))
                at = ((b * SEQLEN_Q + i) * HEADS_Q + h) * HEAD_DIM_V
                total += self.dlse[row] * new
                total += math.exp(old - new) * sum(self.dout[at + d] * out[at + d] for d in range(HEAD_DIM_V))
            return total

        self.expect_slopes("dbias.npy", (SEQLEN_Q, SEQLEN_KV), bias, lambda x: loss(bias=x))
        self.expect_slopes("dslopes.npy", (HEADS_Q,), slopes, lambda x: loss(slopes=x))
        self.expect_slopes("dtable.npy", (HEADS_Q,), table, lambda x: loss(table=x))
        self.expect_slopes("dgain.npy", (1,), [1.5], lambda x: loss(gain=x[0]))

    def test_layouts_agree(self):
        def transposed(values, shape):
            b, s, h, d = shape
            return [values[((i * s + j) * h + g) * d + e]
                    for i in range(b) for g in range(h) for j in range(s) for e in range(d)]

        self.expect(self.backward("--dq", "dq.npy"), 0)
        _, _, expected = read_npy(self.folder / "dq.npy")
        for name, shape, values in (("q", Q_SHAPE, self.q), ("k", K_SHAPE, self.k), ("v", V_SHAPE, self.v),
                                    ("dout", OUT_SHAPE, self.dout)):
            b, s, h, d = shape
            self.write(f"{name}.npy", npy((b, h, s, d), transposed(values, shape)))
        self.expect(self.backward("--layout", "bhsd", "--dq", "dq.npy"), 0)
        _, shape, got = read_npy(self.folder / "dq.npy")
        self.assertEqual(shape, (BATCH, HEADS_Q, SEQLEN_Q, HEAD_DIM))
        self.assertEqual(got, transposed(expected, Q_SHAPE))

    def test_bf16_is_checked_too(self):
        for name, shape, values in (("q", Q_SHAPE, self.q), ("k", K_SHAPE, self.k), ("v", V_SHAPE, self.v),
                                    ("dout", OUT_SHAPE, self.dout)):
            self.write(f"{name}.npy", npy(shape, [bf16(x) for x in values], "<u2"))
        result = self.backward("--dtype", "bf16", "--dv", "dv.npy", "--check")
        self.expect(result, 0)
        self.assertEqual(read_npy(self.folder / "dv.npy")[:2], ("<u2", V_SHAPE))

    def test_mistakes(self):
        self.write("short.npy", npy((BATCH, SEQLEN_Q), [0.0] * (BATCH * SEQLEN_Q)))
        self.expect(self.attend("--dq", "dq.npy"), 2, "--dq: needs --backward")
        self.expect(self.attend("--grad", "bias=x.npy"), 2, "--grad: needs --backward")
        self.expect(self.attend("--backward"), 2, "--backward: needs --dout")
        self.expect(self.backward("--dlse", "short.npy"), 2, "--dlse", "f32 [2, 5]", "f32 [2, 4, 5]")
        self.expect(self.backward("--grad", "bias=x.npy"), 2, "--grad bias: no such input of the score")
        self.expect(self.backward("--dq", "dq.txt"), 2, "--dq: got 'dq.txt'", ".npy")
        self.expect(self.backward("--dq", "dout.npy"), 2, "dout.npy")
        self.expect(self.backward("--dq", "x.npy", "--dk", "x.npy"), 2, "x.npy")
        self.assertFalse((self.folder / "dq.npy").exists())


class Decode(CommandTest):
    """A text token by token, from caches of several kinds."""

    SHAPE, KV_SHAPE = (2, 21, 4, 8), (2, 21, 2, 8)  # 21 tokens: pages of 4 are cut

    def setUp(self):
        super().setUp()
        def tensor(shape, seed):
            return ("F32", shape, elements(normal(count(shape), seed), "<f4"))
        self.tensors = {"q": tensor(self.SHAPE, 1), "k": tensor(self.KV_SHAPE, 2), "v": tensor(self.KV_SHAPE, 3)}
        self.write("a.safetensors", safetensors(self.tensors))
        self.write("b.safetensors", safetensors({**self.tensors, "v": tensor(self.KV_SHAPE, 4)}))

    def decode(self, *words):
        return self.run_fovea("decode", "--input", "a.safetensors", "--threads", "1", *words)

    def test_two_calls_that_lose_everything_are_not_right(self):
        def tensor(shape, scale):
            return ("F32", shape, elements([scale * x for x in normal(count(shape), 7)], "<f4"))
        shape = (1, 20, 2, 8)
        self.write("huge.safetensors", safetensors({"q": tensor(shape, 1e25), "k": tensor(shape, 1e25), "v": tensor(shape, 1)}))
        result = self.run_fovea("decode", "--input", "huge.safetensors", "--json")
        self.expect(result, 1, "not finite")
        self.assertGreater(json.loads(result.stdout)["check"]["num_wrong"], 0)

    def test_every_kind_of_cache_serves_what_prefill_gives(self):
        for words in ([], ["--page-size", "1"], ["--page-size", "4"], ["--page-size", "0"], ["--prompt", "0"],
                      ["--prompt", "21"], ["--input", "b.safetensors"]):
            result = self.decode("--json", *words)
            self.expect(result, 0)
            report = json.loads(result.stdout)
            self.assertTrue(report["check"]["passes"])
            self.assertLess(report["check"]["max_difference"], 1e-5)
            self.assertEqual(report["prompt_tokens"] + report["decode_tokens"], 42)
        text = self.decode("--page-size", "4").stdout
        self.assertIn("cache      pages of 4 keys", text)
        self.assertIn("tokens/s", text)

    def test_mistakes(self):
        self.expect(self.run_fovea("decode"), 2, "--input: is missing")
        self.expect(self.decode("--prompt", "22"), 2, "--prompt: got 22", "at most 21")
        self.expect(self.decode("--page-size", "x"), 2, "--page-size")
        self.write("c.safetensors", safetensors({**self.tensors, "q": self.tensors["k"]}))
        self.expect(self.decode("--input", "c.safetensors"), 2, "c.safetensors", "the shape of the first layer")


class Calibrate(CommandTest):
    """Two sequences; in head 2 one channel of k is forty times as large: int8 rounds the others away, a rotation spreads it."""

    SHAPE = (2, 24, 4, 16)

    def setUp(self):
        super().setUp()
        tensors = {}
        for seed, name in enumerate("qkv"):
            gain = {"q": 1 / 40, "k": 40, "v": 1}[name]
            values = [gain * x if i // 16 % 4 == 2 and i % 16 == 5 else x for i, x in enumerate(normal(count(self.SHAPE), seed))]
            tensors[name] = ("F32", self.SHAPE, elements(values, "<f4"))
        self.write("layer.safetensors", safetensors(tensors))

    def attended(self, *words):
        """out of each head, as f32."""
        self.expect(self.run_fovea("attend", "--input", "layer.safetensors", "--causal", "--out", "out.npy", *words), 0)
        values = read_npy(self.folder / "out.npy")[2]
        return [[x for i, x in enumerate(values) if i // 16 % 4 == head] for head in range(4)]

    def test_errors_are_those_of_attend(self):
        result = self.run_fovea("calibrate", "layer.safetensors", "--causal", "--json")
        self.expect(result, 0)
        report = json.loads(result.stdout)
        self.assertEqual([head["q_head"] for head in report["heads"]], [0, 1, 2, 3])
        names = ["fast", "fast,hadamard=yes", "accurate", "accurate,hadamard=yes", "int8", "sage1", "sage2", "fp8_static,scales=measured"]
        exact = self.attended("--compute-dtype", "f32")
        for name in names:
            got = self.attended("--quant", name)
            for head, (a, b) in enumerate(zip(got, exact)):
                error = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b))
                self.assertEqual(list(report["heads"][head]["errors"]), names)
                self.assertAlmostEqual(report["heads"][head]["errors"][name], error, delta=1e-3 * error)

    def test_the_choice_is_the_first_that_the_worst_head_bears(self):
        report = json.loads(self.run_fovea("calibrate", "layer.safetensors", "--json").stdout)
        errors = {name: [head["errors"][name] for head in report["heads"]] for name in report["heads"][0]["errors"]}
        self.assertGreater(errors["accurate"][2], 2 * errors["accurate,hadamard=yes"][2])
        between = (max(errors["accurate,hadamard=yes"]) + errors["accurate"][2]) / 2
        words = ("calibrate", "layer.safetensors", "--recipe", "accurate", "--recipe", "accurate,hadamard=yes", "--accuracy", f"{between:.9f}")
        report = json.loads(self.run_fovea(*words, "--json").stdout)
        self.assertEqual((report["quant"], report["error"]), ("accurate,hadamard=yes", max(errors["accurate,hadamard=yes"])))
        self.assertEqual([head["quant"] for head in report["heads"]], ["accurate", "accurate", "accurate,hadamard=yes", "accurate"])
        self.assertEqual(report["heads"][0]["error"], errors["accurate"][0])
        table = self.run_fovea(*words, "--out", "recipe.json", "--png", "recipe.png")
        self.expect(table, 0)
        lines = table.stdout.splitlines()
        self.assertEqual(lines[0].split()[:3], ["q_head", "accurate", "accurate,hadamard=yes"])
        self.assertEqual(lines[1].split()[0], "2")  # the worst first
        self.assertIn(f"chosen  accurate,hadamard=yes, of all heads: the worst has {report['error']:.4f}", lines)
        self.assertEqual(json.loads((self.folder / "recipe.json").read_text()), report)
        data = (self.folder / "recipe.png").read_bytes()
        self.assertEqual(struct.unpack(">II", data[16:24]), (2 * 24, 4 * 24))
        begin = data.index(b"IDAT")
        (length,) = struct.unpack(">I", data[begin - 4 : begin])
        rows = zlib.decompress(data[begin + 4 : begin + 4 + length])
        red, green = (rows[12 * (1 + 3 * 48) + 1 + 3 * 12 + channel] for channel in range(2))  # head 2, accurate: beyond
        self.assertGreater(red, green)
        red, green = (rows[84 * (1 + 3 * 48) + 1 + 3 * 12 + channel] for channel in range(2))  # the best head: within
        self.assertGreater(green, red)
        # What takes it.
        chosen = self.attended("--quant", "accurate,hadamard=yes")
        self.assertEqual(self.attended("--quant", "recipe.json"), chosen)
        explained = self.run_fovea("explain", "--seqlen-q", "64", "--quant", "recipe.json")
        self.assertIn("quant accurate,hadamard=yes", explained.stdout)

    def test_the_guide_shows_what_it_prints(self):
        guide = (ROOT / "docs" / "guides" / "quantization.md").read_text()
        command, _, rest = guide.partition("$ fovea calibrate ")[2].partition("\n")
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in command.split()]
        result = self.run_fovea("calibrate", *words)
        self.expect(result, 0)
        printed, shown = result.stdout.split(), rest.partition("```")[0].split()
        self.assertEqual(len(printed), len(shown))
        for got, expected in zip(printed, shown):
            if "." in expected and expected.replace(".", "").isdigit():
                self.assertAlmostEqual(float(got), float(expected), delta=3e-4)
            else:
                self.assertEqual(got, expected)

    def test_heads_without_a_finite_result_are_refused(self):
        for name, shape, value in (("NaN", (1, 6, 4, 16), math.nan), ("no rows", (1, 0, 4, 16), 0), ("no heads", (1, 6, 0, 16), 0)):
            with self.subTest(name=name):
                self.write("nothing.safetensors", safetensors({each: ("F32", shape, elements([value] * count(shape), "<f4")) for each in "qkv"}))
                self.expect(self.run_fovea("calibrate", "nothing.safetensors", "--json"), 2, "nothing.safetensors: out of q_head 0 has no finite number")

    def test_a_recipe_that_overflows_is_not_chosen(self):
        def head_of_large_keys(values, num_heads, gain):
            return [gain * max(-3, min(3, x)) if i // 16 % num_heads >= num_heads // 2 else x for i, x in enumerate(values)]

        queries, keys = head_of_large_keys(normal(6 * 64, 0), 4, 1e-38), head_of_large_keys(normal(9 * 32, 1), 2, 1e38)
        tensors = {"q": ("F32", (1, 6, 4, 16), elements(queries, "<f4")), "k": ("F32", (1, 9, 2, 16), elements(keys, "<f4")),
                   "v": ("F32", (1, 9, 2, 16), elements(normal(9 * 32, 2), "<f4"))}
        self.write("large.safetensors", safetensors(tensors))
        report = json.loads(self.run_fovea("calibrate", "large.safetensors", "--recipe", "accurate,hadamard=yes", "--json").stdout)
        errors = [head["errors"]["accurate,hadamard=yes"] for head in report["heads"]]
        self.assertEqual([error is None for error in errors], [False, False, True, True])  # JSON has no infinity
        self.assertEqual(report["quant"], "none")

    def test_nothing_good_enough_is_none(self):
        report = json.loads(self.run_fovea("calibrate", "layer.safetensors", "--accuracy", "1e-6", "--json", "--out", "none.json").stdout)
        self.assertEqual((report["quant"], report["heads"][0]["quant"]), ("none", "none"))
        self.assertEqual(self.attended("--quant", "none.json"), self.attended())

    def test_refusals(self):
        for words, *needles in (
            (("missing.safetensors",), "missing.safetensors", "No such file"),
            (("layer.safetensors", "--accuracy", "0"), "--accuracy: got '0'; expected a relative error above 0"),
            (("layer.safetensors", "--recipe", "acurate"), "--recipe: quant 'acurate': no recipe is called"),
            (("layer.safetensors", "--out", "recipe.txt"), "--out: recipe.txt; expected a name that ends in .json"),
            (("layer.safetensors", "--out", "missing/recipe.json"), "--out", "No such file"),
            ((), "FILE"),
        ):
            with self.subTest(words=words):
                self.expect(self.run_fovea("calibrate", *words), 2, *needles)
        for text, needle in (("{", "no JSON object"), ("[]", "no JSON object"), ("{}", 'another "format", or none'),
                             ('{"format": "fovea recipe 1", "quant": 3}', 'no text "quant"'),
                             ('{"format": "fovea recipe 1", "quant": "acurate"}', "no recipe is called 'acurate'")):
            self.write("wrong.json", text.encode())
            self.expect(self.attend("--quant", "wrong.json"), 2, "--quant: wrong.json: ", needle)
        self.expect(self.attend("--quant", "missing.json"), 2, "--quant: cannot read missing.json: No such file")


class Reports(CommandTest):
    def test_json_is_one_object(self):
        result = self.attend("--causal", "--json", "--check", "--out", "out.npy")
        self.expect(result, 0)
        report = json.loads(result.stdout)
        self.assertEqual(report["command"], "attend")
        self.assertEqual(report["explanation"]["kernel"], "cpu/attention_forward")
        self.assertTrue(report["check"]["passes"])
        self.assertLessEqual(report["check"]["out"]["max_error"], report["check"]["out"]["allowed"])
        self.assertGreater(report["time_ms"], 0)
        visible = sum(min(SEQLEN_KV, i + 3) for i in range(SEQLEN_Q)) * BATCH * HEADS_Q
        self.assertEqual(report["flops"], 2 * visible * (HEAD_DIM + HEAD_DIM_V))

    def test_text_says_what_ran(self):
        text = self.attend("--check").stdout
        for needle in ("ran ", "time ", "GFLOP/s", "skipped", "check ", "allowed"):
            self.assertIn(needle, text)

    def test_without_out_nothing_is_written(self):
        before = sorted(self.folder.iterdir())
        self.expect(self.attend("--check"), 0)
        self.assertEqual(sorted(self.folder.iterdir()), before)

    def test_explain_of_files_and_shapes(self):
        self.expect(self.run_fovea("explain", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--causal"), 0)
        result = self.run_fovea("explain", "--seqlen-q", "1000", "--num-heads-q", "8", "--num-heads-kv", "2", "--json")
        self.expect(result, 0)
        self.assertEqual(json.loads(result.stdout)["kernel"], "cpu/attention_forward")
        self.expect(self.run_fovea("explain", "--q", "q.npy", "--seqlen-q", "3"), 2, "shapes stand beside files")

    def test_explain_of_gpus_that_are_not_here(self):
        words = ("explain", "--seqlen-q", "4096", "--num-heads-q", "8", "--head-dim", "128", "--dtype", "bf16")
        plan = self.run_fovea(*words, "--quant", "nvfp4", "--arch", "sm_120a", "--json")
        self.expect(plan, 0)
        found = json.loads(plan.stdout)
        self.assertEqual((found["kernel"], found["target"]), ("cuda/sm120/attention_fp4", "sm_120a"))
        for arch in ("sm_100a", "sm_103a"):
            found = json.loads(self.run_fovea(*words, "--quant", "mxfp4", "--arch", arch, "--json").stdout)
            self.assertEqual((found["kernel"], found["target"]), ("cuda/sm100/attention_fp4", arch))
        refused = self.run_fovea(*words, "--quant", "nvfp4", "--arch", "sm_90a")
        self.expect(refused, 3)
        self.assertIn("compute capability 9.0; expected 12.0 or 12.1, whose warps multiply four bits", refused.stdout)
        self.expect(self.run_fovea(*words, "--arch", "sm_1"), 2, "--arch")
        self.expect(self.run_fovea(*words, "--arch", "sm_90a", "--device", "cuda"), 2, "--device")
        gradients = json.loads(self.run_fovea(*words, "--arch", "sm_90a", "--backward", "--json").stdout)
        self.assertEqual((gradients["kernel"], gradients["target"]), ("cuda/sm90/attention_backward", "sm_90a"))
        self.expect(self.run_fovea(*words, "--arch", "sm_90a", "--accuracy", "0.1"), 2, "--quant")

    def test_what_cannot_run_here_is_exit_code_3(self):
        reasons = {t["name"]: t.get("reason") for t in json.loads(self.run_fovea("doctor", "--json").stdout)["targets"]}
        missing = next(name for name, reason in reasons.items() if reason)
        self.expect(self.attend("--target", missing), 3, missing)
        self.expect(self.run_fovea("explain", "--seqlen-q", "8", "--target", missing), 3)

    def test_draw_mask(self):
        result = self.run_fovea("draw-mask", "--seqlen-q", "256", "--causal", "--window", "64,0", "--png", "mask.png")
        self.expect(result, 0)
        self.assertIn("4 partial", self.run_fovea("draw-mask", "--seqlen-q", "256", "--causal").stdout)
        data = (self.folder / "mask.png").read_bytes()
        self.assertTrue(data.startswith(b"\x89PNG\r\n\x1a\n"))
        width, height = struct.unpack(">II", data[16:24])
        begin = data.index(b"IDAT")
        (length,) = struct.unpack(">I", data[begin - 4 : begin])
        pixels = zlib.decompress(data[begin + 4 : begin + 4 + length])
        self.assertEqual(len(pixels), height * (3 * width + 1))
        (crc,) = struct.unpack(">I", data[begin + 4 + length : begin + 8 + length])
        self.assertEqual(crc, zlib.crc32(data[begin : begin + 4 + length]))

    def test_draw_mask_counts_tiles(self):
        result = self.run_fovea("draw-mask", "--seqlen-q", "128", "--mask-mod", "kv_idx <= q_idx", "--tile-q", "32",
                                "--tile-kv", "32", "--json")
        self.expect(result, 0)
        self.assertEqual(json.loads(result.stdout)["tiles"], {"empty": 6, "partial": 4, "full": 6})

    def test_draw_mask_over_ranks(self):
        words = ("--seqlen-q", "64", "--causal", "--tile-q", "8", "--tile-kv", "8", "--ranks", "4")
        result = self.run_fovea("draw-mask", *words, "--png", "ranks.png")
        self.expect(result, 0)
        rows = [line.strip("│") for line in result.stdout.splitlines() if line.startswith("│")]
        self.assertEqual([row[0] for row in rows], list("01233210"))
        self.assertIn("all_gather over 4 ranks, zigzag", result.stdout)
        self.run_fovea("draw-mask", *words[:-2], "--png", "kinds.png")
        self.assertNotEqual((self.folder / "ranks.png").read_bytes(), (self.folder / "kinds.png").read_bytes())
        counts = json.loads(self.run_fovea("draw-mask", *words, "--scheme", "ring", "--json").stdout)["context_parallel"]
        self.assertEqual((counts["scheme"], counts["ranks"][0]["tokens"]), ("ring", [[0, 8], [56, 64]]))

    def test_options_that_say_nothing_alone_are_refused(self):
        for command, *words in (("draw-mask", "--scheme", "ring"), ("explain", "--scheme", "ring"), ("explain", "--rank-tflops", "600")):
            self.expect(self.run_fovea(command, "--seqlen-q", "64", *words), 2, f"{words[0]}: needs --ranks")
        self.expect(self.run_fovea("explain", "--seqlen-q", "64", "--arch", ""), 2, "--arch: architecture is ''")

    def test_explain_over_ranks(self):
        words = ("explain", "--seqlen-q", "4096", "--num-heads-q", "8", "--num-heads-kv", "2", "--head-dim", "64", "--dtype",
                 "bf16", "--causal", "--ranks", "4")
        result = self.run_fovea(*words)
        self.expect(result, 0)
        for needle in ("all_gather over 4 ranks, zigzag", "512..1024 3072..3584", "predicted", "ulysses", "needed_only"):
            self.assertIn(needle, result.stdout)
        schemes = {x["scheme"]: x for x in json.loads(self.run_fovea(*words, "--json").stdout)["context_parallel"]["predicted"]}
        self.assertEqual(schemes["all_gather"]["forward_bytes"], 3 * 1024 * 2 * 128 * 2)
        twice = json.loads(self.run_fovea(*words, "--json", "--rank-tflops", "1300", "--rank-gbps", "500").stdout)
        self.assertAlmostEqual(2 * twice["context_parallel"]["predicted"][0]["forward_ms"], schemes["all_gather"]["forward_ms"], 5)

    def test_doctor(self):
        result = self.run_fovea("doctor")
        self.expect(result, 0)
        for needle in ("processor", "scalar", "threads", "FOVEA_NUM_THREADS", "FOVEA_CPU_TARGET"):
            self.assertIn(needle, result.stdout)

    def test_every_command_has_a_page(self):
        for command in ("attend", "decode", "bench", "tune", "explain", "draw-mask", "pack", "cache",
                        "doctor"):
            result = self.run_fovea(command, "--help")
            self.expect(result, 0)
            self.assertIn(f"fovea {command}", result.stdout)
            self.assertIn("Examples", result.stdout)
        self.expect(self.run_fovea("--help"), 0)
        self.expect(self.run_fovea("--version"), 0)


class Devices(CommandTest):
    """--device: right on a GPU, one clear line where there is none."""

    def cuda(self):
        return json.loads(self.run_fovea("doctor", "--json").stdout)["cuda"]

    def need_gpu(self):
        if not any(device["runs_here"] for device in self.cuda()["devices"]):
            self.skipTest("needs a GPU")

    def attend_there(self, *words):
        return self.run_fovea("attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--device", "cuda", *words)

    def test_no_gpu_is_said_in_one_line(self):
        driver = self.cuda()["driver"]
        if driver["is_present"]:
            self.skipTest("there is a driver")
        self.expect(self.attend_there("--out", "out.npy"), 3, "--device cuda:0: ", driver["reason"])
        self.assertFalse((self.folder / "out.npy").exists())
        result = self.run_fovea("explain", "--seqlen-q", "64", "--device", "cuda")
        self.expect(result, 3, "nothing here can run this problem")
        self.assertIn(f"refused    cuda/sm80/attention_forward: {driver['reason']}", result.stdout)
        result = self.run_fovea("bench", "--seqlen-q", "64", "--device", "cuda", "--json", "kept.json")
        self.expect(result, 3, "--device cuda:0: ", driver["reason"])
        self.assertFalse((self.folder / "kept.json").exists())

    def test_bad_input_is_found_before_a_gpu_is_looked_for(self):
        self.expect(self.attend_there("--mask-mod", "kv_idx"), 2, "the formula is int")
        for name in ("gpu", "cuda:", "cuda:-1", "cuda0", "cuda:x"):
            self.expect(self.attend("--device", name), 2, f"--device: got '{name}'", "cuda:N")
        self.expect(self.attend_there("--threads", "2"), 2, "--threads: is for the cpu")
        self.expect(self.attend_there("--target", "avx2"), 2, "--target: is for the cpu")
        self.expect(self.run_fovea("bench", "--device", "cuda", "--threads", "1,0"), 2, "--threads: is for the cpu")
        self.expect(self.run_fovea("bench", "--sm-margin", "8"), 2, "--sm-margin: is for GPUs; expected none with --device cpu")
        self.expect(self.attend_there("--sm-margin", "-1"), 2, "--sm-margin", "-1")
        self.expect(self.run_fovea("bench", "--device", "cuda", "--case", "nonsense"), 2, "--case", "nonsense")

    def test_gradients_equal_the_oracle_where_there_is_a_gpu(self):
        self.write("dout.npy", npy(OUT_SHAPE, normal(count(OUT_SHAPE), 5)))
        self.write("bias.npy", npy((SEQLEN_Q, SEQLEN_KV), normal(SEQLEN_Q * SEQLEN_KV, 4)))
        self.write("sinks.npy", npy((HEADS_Q,), normal(HEADS_Q, 6)))
        result = self.attend_there("--backward", "--dout", "dout.npy", "--dq", "dq.npy", "--bias", "bias.npy", "--sinks", "sinks.npy",
                                   "--grad", "bias=dbias.npy", "--grad", "sinks=dsinks.npy", "--check")
        if any(device["runs_here"] for device in self.cuda()["devices"]):
            self.expect(result, 0)
        else:
            self.expect(result, 3, "--device cuda:0: ")
            self.assertFalse((self.folder / "dq.npy").exists())

    def test_bench_names_its_bounds_and_compares(self):
        self.need_gpu()
        case = {"name": "pages", "why": "small", "batch": 2, "seqlen_q": 2, "seqlen_kv": 24, "num_heads_q": 2, "head_dim": 64,
                "dtype": "bf16", "page_size": 8}
        dense = {"name": "dense", "why": "small", "batch": 2, "seqlen_q": 256, "num_heads_q": 2, "head_dim": 64, "dtype": "bf16"}
        plain = {**dense, "name": "plain", "dtype": "f32"}
        (self.folder / "cases.json").write_text(json.dumps({"cases": [case, dense, plain]}))
        words = ("bench", "--cases", "cases.json", "--device", "cuda", "--runs", "5")
        self.expect(self.run_fovea(*words, "--json", "kept.json"), 0)
        kept = json.loads((self.folder / "kept.json").read_text())
        for row in kept["rows"]:
            self.assertEqual(row["device"], "cuda:0")
            self.assertTrue(row["kernel"].startswith("cuda/"))
            self.assertTrue(0 < row["fraction_of_bound"] < 1)
            row["fraction_of_bound"] *= 100
            row["spread"] = 0
            self.assertGreater(row["bound_copy_gigabytes_per_second"], 0)
        self.assertGreater(kept["rows"][1]["bound_product_gflops_per_second"], kept["rows"][2]["bound_fma_gflops_per_second"])
        (self.folder / "kept.json").write_text(json.dumps(kept))
        self.expect(self.run_fovea(*words, "--against", "kept.json"), 1, "--against", "beyond noise")

    def test_every_feature_is_right_there(self):
        self.need_gpu()
        self.write("slopes.npy", npy((HEADS_Q,), [0.5, 0.25, 0.125, 0.0625]))
        self.write("bias.npy", npy((SEQLEN_Q, SEQLEN_KV), normal(SEQLEN_Q * SEQLEN_KV, 4)))
        self.write("sinks.npy", npy((HEADS_Q,), [0.5, -1.0, 2.0, 0.0]))
        self.write("q_ids.npy", npy((BATCH, SEQLEN_Q), [0, 0, 1, 1, -1, 2, 2, 2, 2, 2], "<i4"))
        self.write("kv_ids.npy", npy((BATCH, SEQLEN_KV), [0, 0, 1, 1, 1, 1, -1, 3, 2, 2, 2, 2, 2, 2], "<i4"))
        for words in ([], ["--causal"], ["--window", "2,1"], ["--alibi", "slopes.npy", "--softcap", "3"],
                      ["--bias", "bias.npy", "--sinks", "sinks.npy"], ["--dropout", "0.3", "--seed", "7"],
                      ["--segments-q", "q_ids.npy", "--segments-kv", "kv_ids.npy"], ["--out-dtype", "bf16"],
                      ["--score-mod", "score + slopes[q_head] * n", "--tensor", "slopes=slopes.npy", "--scalar", "n=3"]):
            result = self.attend_there("--check", "--json", *words)
            self.expect(result, 0)
            report = json.loads(result.stdout)
            self.assertTrue(report["check"]["passes"])
            self.assertTrue(report["explanation"]["kernel"].startswith("cuda/"))
            self.assertGreater(report["time_ms"], 0)
            self.assertTrue(report["gpu"])

    def test_files_are_those_of_the_cpu(self):
        self.need_gpu()
        out, lse = attention(self.q, self.k, self.v)
        self.expect_out(self.attend_there("--out", "out.npy", "--lse", "lse.npy"), out)
        self.expect_close(read_npy(self.folder / "lse.npy")[2], lse)

    def test_packed_sequences_and_half_precision_there(self):
        self.need_gpu()
        def tensor(seed):
            return ("BF16", (9, 2, 8), elements([bf16(x) for x in normal(9 * 2 * 8, seed)], "<u2"))
        self.write("packed.safetensors", safetensors({name: tensor(seed) for seed, name in enumerate("qkv")}))
        self.write("cu.npy", npy((3,), [0, 4, 9], "<i4"))
        result = self.run_fovea("attend", "--input", "packed.safetensors", "--layout", "thd", "--cu-seqlens-q", "cu.npy",
                                "--cu-seqlens-kv", "cu.npy", "--causal", "--device", "cuda", "--check")
        self.expect(result, 0)
        self.assertIn("bf16 products", result.stdout)


def calls_of_models():
    """What a user of fovea-kernels meets first, by shapes of well-known models and of nobody's; lengths are none of cases.py."""
    causal = {"causal": "bottom_right"}
    text = [{"head_dim": 128, "num_heads_q": 32, "num_heads_kv": 8}, {"head_dim": 64, "num_heads_q": 14, "num_heads_kv": 2},
            {"head_dim": 96, "num_heads_q": 32}, {"head_dim": 256, "num_heads_q": 8, "num_heads_kv": 4}]
    image = [{"head_dim": 64, "num_heads_q": 12}, {"head_dim": 72, "num_heads_q": 16}, {"head_dim": 80, "num_heads_q": 16}]
    packed = {"seqlen_q": [900, 31, 4100], "seqlen_kv": [900, 31, 4100]}
    calls = {
        "prompts": [{"batch": batch, "seqlen_q": length} | model | causal for model in text for batch in (1, 3) for length in (77, 700, 6000)],
        "images": [{"batch": 5, "seqlen_q": length} | model for model in image for length in (197, 1024, 4900)],
        "a window": [{"batch": 1, "seqlen_q": 5000, "window": [511, 0]} | text[i] | causal for i in (0, 1, 3)],
        "prompts of multi-head latent attention": [{"batch": 1, "seqlen_q": 900, "head_dim": 192, "head_dim_v": 128, "num_heads_q": 16} | causal],
        "packed text": [packed | model | causal for model in text],
        "packed images": [packed | model for model in image],
        "steps of generation": [{"batch": batch, "seqlen_q": 1, "seqlen_kv": 7040} | model | causal | pages
                                for model in text for batch in (1, 4, 64) for pages in ({"cached": True}, {"page_size": 16}, {"page_size": 64})],
        "steps over caches of codes": [{"batch": batch, "seqlen_q": 1, "seqlen_kv": 7040, "codes": codes} | text[0] | causal | pages
                                       for codes in ("i8", "e4m3") for batch in (1, 16) for pages in ({"cached": True}, {"page_size": 16}, {"page_size": 64})],
        "chunks of prompts": [{"batch": 1, "seqlen_q": 300, "seqlen_kv": 7040} | model | causal | pages
                              for model in (text[0], text[1], text[3]) for pages in ({"cached": True}, {"page_size": 64})],
        "windows, softcap, ALiBi": [{"batch": 2, "seqlen_q": 1, "seqlen_kv": 7040, "window": [127, 0], "sinks": True, "head_dim": 64, "num_heads_q": 64,
                                     "num_heads_kv": 8} | causal | pages for pages in ({"cached": True}, {"page_size": 64})]
                                   + [{"seqlen_q": 5000, "softcap": 30.0} | text[3] | mask for mask in (causal, causal | {"window": [4095, 0]})]
                                   + [{"seqlen_q": 2000, "alibi": True, "head_dim": 128, "num_heads_q": 32} | causal],
        "recipes": [{"seqlen_q": 5000, "quant": recipe} | model | mask for recipe in ("accurate", "fast") for model in text[:2] for mask in ({}, causal)],
        "training": [{"batch": 2, "seqlen_q": 3000, "backward": True} | model | causal for model in text]
                    + [packed | {"backward": True} | model | causal for model in text[:2]]
                    + [{"batch": 9, "seqlen_q": 197, "backward": True} | model for model in image],
    }
    return {call: [{"name": f"case {i}", "why": call, "dtype": "bf16"} | case for i, case in enumerate(cases)] for call, cases in calls.items()}


class Kernels(CommandTest):
    """GPU kernels without a GPU: compiled, packed, kept, damaged, cleared."""

    CASES = {"cases": [{"name": "tiny", "why": "the quickest to compile", "batch": 1, "seqlen_q": 64, "num_heads_q": 1,
                        "head_dim": 64, "dtype": "f32"}]}

    def run_with(self, *words, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FOVEA_")}
        environment |= {"FOVEA_CACHE_DIR": str(self.folder / "cache"), **variables}
        return subprocess.run([FOVEA, *words], cwd=self.folder, capture_output=True, text=True, timeout=120, env=environment)

    def cuda(self, **variables):
        return json.loads(self.run_with("doctor", "--json", **variables).stdout)["cuda"]

    def pack(self, *words, **variables):
        (self.folder / "cases.json").write_text(json.dumps(self.CASES))
        return self.run_with("pack", "--cases", "cases.json", "--arch", "sm_80", *words, **variables)

    def need_compiler(self):
        compiler = self.cuda()["compiler"]
        if not compiler["is_present"]:
            self.skipTest(f"needs NVRTC: {compiler['reason']}")

    def test_doctor_says_what_amds_gpus_need(self):
        nothing = {"FOVEA_HIP": "/nowhere/libamdhip64.so", "FOVEA_HIPRTC": "/nowhere"}
        text = self.run_with("doctor", **nothing).stdout
        self.assertIn("AMD driver  none: no AMD driver: /nowhere/libamdhip64.so cannot be opened", text)
        self.assertIn("FOVEA_HIPRTC is '/nowhere'", text)
        fakes = {"FOVEA_HIP": os.environ["FOVEA_FAKE_LIBAMDHIP64"], "FOVEA_HIPRTC": os.environ["FOVEA_FAKE_LIBHIPRTC"]}
        report = json.loads(self.run_with("doctor", "--json", **fakes).stdout)["rocm"]
        self.assertEqual(report["driver"], {"is_present": True, "hip": "6.2", "path": fakes["FOVEA_HIP"]})
        (device,) = report["devices"]
        self.assertEqual((device["name"], device["architecture"], device["runs_here"]), ("rocm:0", "gfx942", True))
        self.assertEqual(report["compiler"]["architectures"], ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
        text = self.run_with("doctor", **fakes).stdout
        self.assertIn(f"AMD driver  HIP 6.2, {fakes['FOVEA_HIP']}; kernels for AMD's GPUs are not measured on hardware", text)
        self.assertIn("rocm:0      Fake MI300X, gfx942, 304 SMs, 192 GiB: runs here", text)
        self.assertIn("compiler    hipRTC 20.0.0git for gfx90a gfx942 gfx950 gfx1100 gfx1201, ", text)

    def test_explain_and_pack_for_amd(self):
        shape = ["--seqlen-q", "64", "--head-dim", "64", "--dtype", "bf16"]
        result = self.run_with("explain", *shape, "--arch", "gfx942")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("kernel     cuda/cdna/attention_forward on gfx942", result.stdout)
        self.assertIn("tuning     not measured on hardware", result.stdout)
        self.assertIn("this is gfx942 of AMD; expected a GPU of NVIDIA", result.stdout)
        for name, is_measured in (("sm_90a", True), ("sm_80", True), ("sm_75", False), ("sm_103a", False)):
            result = self.run_with("explain", *shape[:-1], "f16", "--arch", name)
            self.assertIn(f"on {name}", result.stdout)
            self.assertEqual("not measured on hardware" in result.stdout, not is_measured, name)
        result = self.run_with("explain", *shape, "--arch", "gfx942", "--backward")
        self.expect(result, 3, "nothing here can run this problem")
        self.expect(self.run_with("explain", *shape, "--arch", "gfx900"), 2, "expected gfx90a, gfx942")
        fakes = {"FOVEA_HIP": os.environ["FOVEA_FAKE_LIBAMDHIP64"], "FOVEA_HIPRTC": os.environ["FOVEA_FAKE_LIBHIPRTC"]}
        (self.folder / "cases.json").write_text(json.dumps(self.CASES))
        words = ["pack", "--cases", "cases.json", "--arch", "gfx942,gfx1100", "--out", "amd.pack"]
        self.expect(self.run_with(*words, FOVEA_HIPRTC="/nowhere"), 3, "FOVEA_HIPRTC is '/nowhere'")
        self.expect(self.run_with(*words, **fakes), 0)
        without = fakes | {"FOVEA_HIPRTC": "/nowhere", "FOVEA_PACK": "amd.pack"}
        result = self.run_with("explain", "--seqlen-q", "64", "--num-heads-q", "1", "--head-dim", "64", "--dtype", "f32",
                               "--device", "rocm", **without)
        self.assertIn("kernel pack amd.pack", result.stdout)

    def test_bench_and_tune_on_a_driver_of_amd_that_computes_nothing(self):
        fakes = {"FOVEA_HIP": os.environ["FOVEA_FAKE_LIBAMDHIP64"], "FOVEA_HIPRTC": os.environ["FOVEA_FAKE_LIBHIPRTC"]}
        case = self.CASES["cases"][0] | {"dtype": "bf16"}
        (self.folder / "cases.json").write_text(json.dumps({"cases": [case]}))
        result = self.run_with("bench", "--cases", "cases.json", "--device", "rocm", **fakes)
        self.expect(result, 0)
        self.assertRegex(result.stdout, r"tiny +- rocm:0 .* unknown +-\n")
        (row,) = json.loads(self.run_with("bench", "--cases", "cases.json", "--device", "rocm", "--json", **fakes).stdout)["rows"]
        self.assertEqual((row["kernel"], row["device"], row["bound"]), ("cuda/cdna/attention_forward", "rocm:0", "unknown"))
        self.assertNotIn("fraction_of_bound", row)
        (self.folder / "kept.json").write_text(json.dumps({"rows": [row]}))
        self.expect(self.run_with("bench", "--cases", "cases.json", "--device", "rocm", "--against", "kept.json", **fakes), 2,
                    "none is known of GPUs of AMD")
        self.expect(self.run_with("bench", "--cases", "cases.json", "--device", "rocm", "--backward", **fakes), 3,
                    "this is gfx942 of AMD; expected a GPU of NVIDIA")
        # Its choices are raced, and what is wrong is not kept.
        result = self.run_with("tune", "--cases", "cases.json", "--device", "rocm", "--seconds", "1", **fakes)
        self.expect(result, 1, "none of them is kept")
        self.assertIn("OUT cuda/cdna/attention_forward", result.stdout + result.stderr)

    def test_doctor_names_every_piece(self):
        report = self.cuda(FOVEA_NVRTC="/nowhere")
        self.assertIn("/nowhere", report["compiler"]["reason"])
        self.assertEqual(report["cache"]["folder"], str(self.folder / "cache" / "kernels"))
        text = self.run_with("doctor", FOVEA_NVRTC="/nowhere", FOVEA_PACK="missing.pack").stdout
        for needle in ("driver ", "compiler    none: ", "kernel pack none: ", "missing.pack", "cache ",
                       "operation   attention_backward: f32 f16 bf16 on cpu cuda; packed "):
            self.assertIn(needle, text)
        text = self.run_with("doctor", FOVEA_CACHE_MAX_MIB="many").stdout
        self.assertIn("FOVEA_CACHE_MAX_MIB is 'many'", text)

    def test_doctor_says_why_a_folder_or_a_pack_that_others_may_write_is_not_used(self):
        kernels = self.folder / "cache" / "kernels"
        kernels.mkdir(parents=True)
        kernels.chmod(0o777)
        pack = self.folder / "fovea.pack"
        pack.write_bytes(b"")
        pack.chmod(0o666)
        report = self.cuda(FOVEA_PACK="fovea.pack")
        self.assertIn("kernels has mode 777", report["cache"]["reason"])
        self.assertIn("has mode 666", report["pack"]["reason"])
        result = self.run_with("cache", "list")
        self.assertEqual(result.returncode, 2)
        self.assertIn("nobody but its owner may write", result.stderr)

    def test_pack_is_made_and_found(self):
        self.need_compiler()
        result = self.pack("--out", "fovea.pack")
        self.expect(result, 0)
        self.assertRegex(result.stdout, r"sm_80 +\d+ registers")
        pack = self.cuda(FOVEA_PACK="fovea.pack")["pack"]
        self.assertTrue(pack["is_present"])
        self.assertEqual(pack["kernels"], result.stdout.count(" registers, "))

    def test_pack_takes_a_kernel_before_its_turn_and_leaves_its_machine_code(self):
        self.need_compiler()
        case = {"name": "rows", "why": "both kernels take it", "seqlen_q": 256, "num_heads_q": 1, "head_dim": 64, "dtype": "bf16"}
        (self.folder / "rows.json").write_text(json.dumps({"cases": [case]}))

        def kernels(*words):
            result = self.run_with("pack", "--cases", "rows.json", "--arch", "sm_100a", "--json", *words)
            self.expect(result, 0)
            return {row["kernel"].split()[0]: row for row in json.loads(result.stdout)["kernels"]}

        by_table = kernels()
        self.assertIn("sm80/attention_forward", by_table)
        self.assertNotIn("stem", by_table["sm80/attention_forward"])
        first = kernels("--first", "cuda/sm100/attention_forward", "--cubins", "machine/code")
        self.assertNotIn("sm80/attention_forward", first)
        stem = self.folder / "machine" / "code" / first["sm100/attention_forward"]["stem"]
        self.assertIn("s.polynomial_keys = ", stem.with_suffix(".cu").read_text())
        self.assertTrue(stem.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF"))
        result = self.run_with("pack", "--arch", "sm_100a", "--first", "sm100/attention_forward")
        self.expect(result, 2, "--first: unknown kernel 'sm100/attention_forward'; expected ")
        self.assertIn("cuda/sm100/attention_forward", result.stderr)

    def test_pack_has_the_kernel_for_tensors_that_start_anywhere(self):
        """A machine without a compiler must run them too; without a file, nothing that no case asks for is compiled."""
        self.need_compiler()
        decode = {"name": "decode", "why": "small kernels", "seqlen_q": 1, "seqlen_kv": 1024, "num_heads_q": 1, "head_dim": 64}
        (self.folder / "decode.json").write_text(json.dumps({"cases": [decode | {"dtype": "bf16"}]}))

        def labels(*words):
            result = self.run_with("pack", "--cases", "decode.json", "--arch", "sm_90a", "--json", *words)
            self.expect(result, 0)
            return " ".join(kernel["kernel"] for kernel in json.loads(result.stdout)["kernels"])

        self.assertIn("sm90/decode", labels())
        self.assertNotIn("sm80/attention_forward", labels())
        self.assertIn("sm80/attention_forward", labels("--out", "fovea.pack"))

    def test_pack_has_both_calls_of_a_shared_prefix_and_what_joins_them(self):
        self.need_compiler()
        case = {"name": "prefix", "why": "small kernels", "batch": 16, "seqlen_q": 1, "seqlen_kv": 1024, "num_heads_q": 1,
                "head_dim": 64, "dtype": "bf16", "causal": "bottom_right", "page_size": 16}
        for shared in ({}, {"shared_prefix": 512}):
            (self.folder / "cases.json").write_text(json.dumps({"cases": [case | shared]}))
            result = self.run_with("pack", "--cases", "cases.json", "--arch", "sm_90a", "--json")
            self.expect(result, 0)
            labels = [kernel["kernel"].split(" ")[0] for kernel in json.loads(result.stdout)["kernels"]]
            self.assertEqual(labels.count("common/prefix_places"), int(bool(shared)))
            self.assertEqual(labels.count("sm90/decode"), 2 if shared else 1)
            self.assertTrue({"common/append_to_cache", "common/merge_states", "common/rank_pages"} <= set(labels))
        self.expect(self.run_with("bench", "--cases", "cases.json"), 2, "case 'prefix' has a shared_prefix, which fovea pack alone takes")
        (self.folder / "cases.json").write_text(json.dumps({"cases": [{"name": "steps", "why": "", "seqlen_q": 1, "cached": True}]}))
        self.expect(self.run_with("bench", "--cases", "cases.json"), 2, "case 'steps' has a contiguous cache, which fovea pack alone takes")

    def test_pack_has_kernels_over_caches_of_codes(self):
        self.need_compiler()
        case = {"name": "step", "why": "", "seqlen_q": 1, "seqlen_kv": 4096, "num_heads_q": 1, "head_dim": 64, "dtype": "bf16", "cached": True}
        for codes, kernel in (({}, "sm90/decode"), ({"codes": "i8"}, "sm90/decode_coded"), ({"codes": "e4m3"}, "sm90/decode_coded")):
            (self.folder / "cases.json").write_text(json.dumps({"cases": [case | codes]}))
            result = self.run_with("pack", "--cases", "cases.json", "--arch", "sm_90a", "--strict", "--json")
            self.expect(result, 0)
            labels = [each["kernel"].split(" ")[0] for each in json.loads(result.stdout)["kernels"]]
            self.assertIn(kernel, labels)
        self.expect(self.run_with("bench", "--cases", "cases.json"), 2, "case 'step' has a cache of codes, which fovea pack alone takes")

    def test_a_plan_of_gradients_finds_its_kernels_in_a_pack(self):
        """A step of training on a machine without a compiler: forward with lse, and gradients."""
        self.need_compiler()
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        case = {"name": "gradients", "why": "small kernels", "seqlen_q": 2048, "num_heads_q": 1, "head_dim": 64, "dtype": "bf16", "backward": True}
        (self.folder / "cases.json").write_text(json.dumps({"cases": [case]}))

        def labels(*words):
            result = self.run_with("pack", "--cases", "cases.json", "--arch", "sm_90a", "--json", *words)
            self.expect(result, 0)
            return {kernel["kernel"].split(" ")[0] for kernel in json.loads(result.stdout)["kernels"]}

        gradients = {"sm90/attention_backward", "sm90::prepare_rows", "common/backward_delta"}
        self.assertEqual(labels(), gradients)
        self.assertTrue(gradients | {"sm90/attention_forward", "common/merge_states"} <= labels("--out", "fovea.pack"))
        source = self.plan_there("--dtype", "bf16", "--backward", FOVEA_PACK="fovea.pack")["kernel_source"]
        self.assertEqual(source, "kernel pack fovea.pack")
        other_head_dim = ("explain", "--seqlen-q", "64", "--head-dim", "128", "--dtype", "bf16", "--device", "cuda", "--backward")
        other = self.run_with(*other_head_dim, LD_LIBRARY_PATH=str(self.folder), FOVEA_NVRTC="/nowhere", FOVEA_PACK="fovea.pack")
        self.expect(other, 3)
        self.assertIn("no kernel compiler", other.stdout)

    def test_explain_says_how_kernels_are_compiled_where_that_says_something(self):
        words = ("explain", "--seqlen-q", "4096", "--head-dim", "128", "--dtype", "bf16", "--compile")
        self.expect(self.run_with(*words, "later"), 2, "--compile: 'later'; expected auto, complete or staged")
        self.expect(self.run_with(*words, "staged"), 2, "--compile: is for GPUs; expected none with --device cpu")
        self.expect(self.run_with(*words, "staged", "--arch", "sm_90a"), 2, "--compile: beside --arch")
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        places = {"LD_LIBRARY_PATH": str(self.folder), "FOVEA_NVRTC": os.environ["FOVEA_FAKE_LIBNVRTC"]}
        told = self.run_with(*words, "staged", "--device", "cuda", **places)
        self.expect(told, 0)
        self.assertIn("cuda/sm80/attention_forward runs the calls until it has", told.stdout)
        self.assertIn("compiled in stages", told.stdout)
        self.expect(self.run_with(*words, "staged", "--device", "cuda", "--backward", **places), 2, "gradients have no kernel")

    def test_second_pack_compiles_nothing(self):
        self.need_compiler()
        first = json.loads(self.pack("--json").stdout)
        begin = time.monotonic()
        self.assertEqual(json.loads(self.pack("--json").stdout), first)
        self.assertLess(time.monotonic() - begin, 2)

    def test_cache_is_listed_verified_and_cleared(self):
        self.need_compiler()
        self.expect(self.run_with("cache", "list"), 0)
        made = json.loads(self.pack("--json").stdout)["kernels"]
        kernels = json.loads(self.run_with("cache", "list", "--json").stdout)["kernels"]
        self.assertEqual(len(kernels), len(made))
        self.assertEqual(kernels[0]["architecture"], "sm_80")
        self.expect(self.run_with("cache", "verify"), 0)
        damaged = self.folder / "cache" / "kernels" / kernels[0]["file"]
        damaged.write_bytes(damaged.read_bytes()[:-1])
        self.assertIn("problem", json.loads(self.run_with("cache", "list", "--json").stdout)["kernels"][0])
        self.assertEqual(self.run_with("cache", "verify").returncode, 1)
        self.assertEqual(len(json.loads(self.run_with("cache", "list", "--json").stdout)["kernels"]), len(made) - 1)
        self.expect(self.run_with("cache", "clear"), 0)
        self.assertEqual(json.loads(self.run_with("cache", "list", "--json").stdout)["kernels"], [])

    # Another tile for TINY than the table's, on a device of sm_80.
    TILE = ("cuda/sm80/attention_forward_f32 tile_q=64 tile_kv=64 num_warps=8 stages=1 q_stages=1 ctas_per_sm=1 "
            "heads_per_tile=1 is_split=0 is_dynamic=0 takes_groups=0")
    CLASS = "f32 to f32 head_dim 64/64 group 1 seqlen_q 64 seqlen_kv 64 rows 64"

    def write_tuning(self, *winners, kernels=None, device="8.0 108"):
        lines = ["fovea tuning 1", f"kernels {kernels or self.cuda()['kernel_text']}", f"device {device}"]
        lines += [f"winner {tile} | 1.500 us, 2.500 us | {problem}" for tile, problem in sorted(winners, key=lambda w: w[1])]
        (self.folder / "made.tuning").write_text("\n".join(lines) + "\n")

    def test_pack_carries_a_tuning_and_its_kernels(self):
        self.need_compiler()
        plain = json.loads(self.pack("--json").stdout)["kernels"]
        self.write_tuning((self.TILE, self.CLASS), (self.TILE, "another class"))
        result = self.pack("--tuning", "made.tuning", "--out", "fovea.pack", "--json")
        self.expect(result, 0)
        report = json.loads(result.stdout)
        self.assertEqual(len(report["kernels"]), len(plain) + 1)
        self.assertTrue(any("tile 64x64" in kernel["kernel"] for kernel in report["kernels"]), report)
        self.assertEqual([row["case"] for row in report["left_out"]], ["another class"])
        tuning = self.cuda(FOVEA_PACK="fovea.pack")["tuning"]
        self.assertTrue(tuning["path"].endswith("fovea.pack"))
        self.assertEqual(tuning["devices"], [{"compute_capability": "8.0", "num_sms": 108, "choices": 1}])

    def test_tuning_that_does_not_serve_is_said(self):
        self.write_tuning((self.TILE, self.CLASS))
        self.assertIn("1 choices for 8.0 with 108 SMs, made.tuning", self.run_with("doctor", FOVEA_TUNING="made.tuning").stdout)
        self.assertIn("missing.tuning cannot be read", self.run_with("doctor", FOVEA_TUNING="missing.tuning").stdout)
        self.write_tuning((self.TILE, self.CLASS), kernels="0" * 64)
        self.assertIn("kernels of another version", self.cuda(FOVEA_TUNING="made.tuning")["tuning"]["reason"])
        self.expect(self.pack("--tuning", "made.tuning"), 2, "--tuning", "another version")
        (self.folder / "made.tuning").write_text("fovea tuning 1\nkernels of another world\n")
        self.assertIn("line 2", self.cuda(FOVEA_TUNING="made.tuning")["tuning"]["reason"])
        self.expect(self.pack("--tuning", "made.tuning"), 2, "--tuning: made.tuning", "line 2")
        self.expect(self.run_with("tune", "--out", "made.tuning"), 2, "--out: made.tuning", "line 2")

    LARGE = {"cases": [{"name": "large", "why": "too many scores for the oracle: kernels are compared with each other",
                        "seqlen_q": 2048, "num_heads_q": 1, "head_dim": 64, "dtype": "f32"}]}

    def test_tune_runs_through_on_a_driver_that_computes_nothing(self):
        """Every kernel leaves equal zeros and takes a millisecond: the table's choice stands, and what cannot be loaded is out."""
        self.need_compiler()
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        (self.folder / "large.json").write_text(json.dumps(self.LARGE))
        large = self.CLASS.replace(" 64 seqlen_kv 64 rows 64", " 2048 seqlen_kv 2048 rows 2048")
        self.write_tuning((self.TILE, large), (self.TILE, "another class"), device="9.0 132")
        self.expect(self.run_with("pack", "--cases", "large.json", "--arch", "sm_90a", "--tuning", "made.tuning", "--out",
                                  "fovea.pack"), 0)
        result = self.run_with("tune", "--cases", "large.json", "--out", "made.tuning", "--json", LD_LIBRARY_PATH=str(self.folder),
                               FOVEA_NVRTC="/nowhere", FOVEA_PACK="fovea.pack")
        self.expect(result, 1, "3 choices were wrong or did not run")
        self.assertEqual(self.plan_there(FOVEA_PACK="fovea.pack")["tile_kv"], 64)
        (row,) = json.loads(result.stdout)["rows"]
        self.assertEqual((row["class"], row["verdict"], row["num_choices"], row["us"]), (large, "table", 5, 1000))
        self.assertTrue(all("no kernel compiler" in out["reason"] for out in row["out"]), row["out"])
        kept = (self.folder / "made.tuning").read_text()
        self.assertIn("another class", kept)
        self.assertNotIn(large, kept)

    def test_the_wheels_pack_has_what_models_call(self):
        """Kernels of fovea-kernels by a compiler that makes no code: what these calls compile is in it already, or it lacks them."""
        if "FOVEA_FAKE_LIBNVRTC" not in os.environ:
            self.skipTest("needs the fake compiler")
        variables = {"FOVEA_NVRTC": os.environ["FOVEA_FAKE_LIBNVRTC"]}

        def compiled(cases, *words, arch="sm_90a"):
            """Of all so far, labels by file."""
            (self.folder / "cases.json").write_text(json.dumps({"cases": cases}))
            self.expect(self.run_with("pack", "--cases", "cases.json", "--arch", arch, *words, **variables), 0)
            return {row["file"]: row["kernel"] for row in json.loads(self.run_with("cache", "list", "--json").stdout)["kernels"]}

        carried = subprocess.run([sys.executable, "-B", ROOT / "python" / "kernels" / "cases.py"], capture_output=True, text=True, check=True)
        before = compiled(json.loads(carried.stdout)["cases"], "--out", "fovea.pack")
        for call, cases in calls_of_models().items():
            with self.subTest(call):
                found, before = before, compiled(cases)
                self.assertEqual([label for file, label in before.items() if file not in found], [])
        # Of Turing, in f16.
        halves = [case for case in json.loads(carried.stdout)["cases"] if case["dtype"] == "f16"]
        before = compiled(halves, "--out", "turing.pack", arch="sm_75")
        calls = calls_of_models()
        groups = [case | {"dtype": "f16"} for call in ("prompts", "steps of generation") for case in calls[call]
                  if case["num_heads_q"] // case.get("num_heads_kv", case["num_heads_q"]) in (1, 4)]
        found, before = before, compiled(groups, arch="sm_75")
        self.assertEqual([label for file, label in before.items() if file not in found], [])

    def test_bench_times_gradients_on_a_driver_that_computes_nothing(self):
        """A call takes a millisecond there: gradients alone are five products, with forward seven, of what is visible."""
        self.need_compiler()
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        case = {"name": "small", "why": "a kernel of Hopper's", "seqlen_q": 64, "num_heads_q": 2, "head_dim": 64, "dtype": "bf16",
                "causal": "bottom_right"}
        cases = [case, {**case, "name": "gradients", "backward": True}]
        (self.folder / "cases.json").write_text(json.dumps({"cases": cases}))

        def rows(*words):
            result = self.run_with("bench", "--cases", "cases.json", "--device", "cuda", "--json", *words, LD_LIBRARY_PATH=str(self.folder))
            self.expect(result, 0)
            return [(row["name"], row["kernel"].split("/")[-1], row["flops"], row["median_ms"]) for row in json.loads(result.stdout)["rows"]]

        product = 2 * 2 * (64 * 65 // 2) * 64
        backward = "attention_backward"
        self.assertEqual(rows(), [("small", "attention_forward_short", 2 * product, 1), ("gradients", backward, 5 * product, 1)])
        self.assertEqual(rows("--backward"), [(f"{case['name']}+backward", backward, 7 * product, 1) for case in cases])

    def test_tune_measures_gradients_too(self):
        """As above: the winner of a file is raced against the table's choice, which stands where all take a millisecond."""
        self.need_compiler()
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        case = {**self.LARGE["cases"][0], "backward": True}
        (self.folder / "large.json").write_text(json.dumps({"cases": [case]}))
        tile = "tile_q={} tile_kv={} num_warps={} stages=1 q_stages=1 ctas_per_sm=1 heads_per_tile=1 is_split=0 is_dynamic=0 takes_groups=0"
        winner = f"cuda/sm80/attention_backward_f32 {tile.format(8, 16, 2)} + {tile.format(32, 16, 4)}"
        problem = "gradients of q k v: " + self.CLASS.replace(" 64 seqlen_kv 64 rows 64", " 2048 seqlen_kv 2048 rows 2048")
        self.write_tuning((winner, problem), device="9.0 132")
        pack = self.run_with("pack", "--cases", "large.json", "--arch", "sm_90a", "--tuning", "made.tuning", "--out", "fovea.pack", "--json")
        self.expect(pack, 0)
        self.assertEqual(json.loads(pack.stdout)["left_out"], [])
        plan = self.plan_there("--backward", FOVEA_PACK="fovea.pack")
        self.assertEqual((plan["tile_q"], plan["tile_kv"]), (8, 16))
        self.assertIn("fovea.pack: 1.5 us measured there, 2.5 us without", plan["tuning"])
        result = self.run_with("tune", "--cases", "large.json", "--out", "made.tuning", "--json", LD_LIBRARY_PATH=str(self.folder),
                               FOVEA_NVRTC="/nowhere", FOVEA_PACK="fovea.pack")
        self.expect(result, 1, "choices were wrong or did not run")
        (row,) = json.loads(result.stdout)["rows"]
        self.assertEqual((row["class"], row["verdict"], row["num_choices"]), (problem, "table", 25))
        self.assertNotIn(problem, (self.folder / "made.tuning").read_text())

    def plan_there(self, *words, **variables):
        result = self.run_with("explain", "--seqlen-q", "2048", "--head-dim", "64", "--device", "cuda", "--json", *words,
                               LD_LIBRARY_PATH=str(self.folder), FOVEA_NVRTC="/nowhere", **variables)
        self.expect(result, 0)
        return json.loads(result.stdout)

    def test_without_the_winners_kernel_the_tables_is_taken(self):
        self.need_compiler()
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        (self.folder / "large.json").write_text(json.dumps(self.LARGE))
        self.expect(self.run_with("pack", "--cases", "large.json", "--arch", "sm_90a", "--out", "fovea.pack"), 0)
        self.write_tuning((self.TILE, self.CLASS.replace(" 64 seqlen_kv 64 rows 64", " 2048 seqlen_kv 2048 rows 2048")), device="9.0 132")
        plan = self.plan_there(FOVEA_PACK="fovea.pack", FOVEA_TUNING="made.tuning")
        self.assertEqual((plan["tile_q"], plan["tile_kv"]), (32, 32))
        self.assertIn("made.tuning: ", plan["tuning"])

    def test_kernels_say_where_they_come_from(self):
        """With the wheel of kernels in an environment, a machine without a compiler plans, and nothing is compiled."""
        self.need_compiler()
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        (self.folder / "large.json").write_text(json.dumps(self.LARGE))
        wheel = self.folder / "lib" / "python3.12" / "site-packages" / "fovea_kernels"
        wheel.mkdir(parents=True)
        self.expect(self.run_with("pack", "--cases", "large.json", "--arch", "sm_90a", "--out", str(wheel / "fovea.pack")), 0)
        plan = self.plan_there(VIRTUAL_ENV=str(self.folder))
        self.assertEqual(plan["kernel_source"], f"kernel pack {wheel / 'fovea.pack'}")
        words = ("explain", "--seqlen-q", "2048", "--head-dim", "64", "--device", "cuda")
        page = self.run_with(*words, LD_LIBRARY_PATH=str(self.folder), FOVEA_NVRTC="/nowhere")
        self.assertIn("no kernel compiler", page.stdout)
        page = self.run_with(*words, LD_LIBRARY_PATH=str(self.folder))
        self.assertIn("from       disk cache", page.stdout)

    def test_gradients_are_explained_with_the_order_of_their_sums(self):
        if "FOVEA_FAKE_LIBCUDA" not in os.environ:
            self.skipTest("needs the fake driver")
        (self.folder / "libcuda.so.1").symlink_to(os.environ["FOVEA_FAKE_LIBCUDA"])
        words = ("explain", "--seqlen-q", "2048", "--dtype", "bf16", "--device", "cuda", "--backward")

        def sums(*more, head_dim="64"):
            page = self.run_with(*words, "--head-dim", head_dim, *more, LD_LIBRARY_PATH=str(self.folder)).stdout
            return next((line.split(maxsplit=1)[1] for line in page.splitlines() if line.startswith("sums ")), None)

        self.need_compiler()
        self.assertRegex(sums(), "dq in the order of keys, in [0-9]+ bytes of the workspace; the same bits in every run")
        self.assertRegex(sums("--nondeterministic"), "dq in any order, in [0-9]+ bytes of the workspace; its last bits differ")
        self.assertEqual(sums(head_dim="256"), "each by one CTA, in registers; the same bits in every run")
        page = self.run_with("explain", "--seqlen-q", "64", "--backward").stdout
        self.assertIn("kernel     cpu/attention_backward", page)
        self.assertNotIn("\nsums ", page)

    def test_tune_asks_for_a_gpu_in_one_line(self):
        self.expect(self.run_with("tune", "--device", "cpu"), 2, "--device", "expected cuda")
        self.expect(self.run_with("tune", "--seconds", "0"), 2, "--seconds", "positive")
        self.expect(self.run_with("tune", "--case", "nobody"), 2, "--case", "nobody")
        self.expect(self.run_with("tune", "--threads", "2"), 2, "--threads")
        if self.cuda()["driver"]["is_present"]:
            self.skipTest("there is a driver")
        self.expect(self.run_with("tune", "--out", "fovea.tuning"), 3, "--device cuda:0", self.cuda()["driver"]["reason"])
        self.assertFalse((self.folder / "fovea.tuning").exists())

    def test_mistakes_are_one_line(self):
        self.expect(self.run_with("cache", "wipe"), 2, "wipe", "list, verify or clear")
        self.expect(self.pack("--arch", "sm_70"), 2, "--arch")
        self.expect(self.run_with("pack", "--arch", "turing"), 2, "turing", "sm_75 or later")
        self.expect(self.pack(FOVEA_NVRTC="/nowhere"), 3, "no kernel compiler", "/nowhere")
        self.expect(self.pack("--strict", "--known-spills", "missing.txt"), 2, "--known-spills", "missing.txt")
        self.expect(self.run_with("cache", "list", FOVEA_CACHE_MAX_MIB="0"), 2, "no cache folder")


class Bench(CommandTest):
    SHAPES = ("--seqlen-q", "64", "--num-heads-q", "2", "--runs", "3", "--threads", "1")

    def test_a_run_is_kept_and_compared(self):
        self.expect(self.run_fovea("bench", *self.SHAPES, "--json", "kept.json"), 0)
        kept = json.loads((self.folder / "kept.json").read_text())
        row = kept["rows"][0]
        self.assertEqual(row["flops"], 2 * 2 * 64 * 64 * 128)
        self.assertGreater(row["bound_fma_gflops_per_second"], 0)
        row["fraction_of_bound"] *= 100
        row["spread"] = 0
        (self.folder / "kept.json").write_text(json.dumps(kept))
        # A spread of more than the whole would hide any loss; three runs of a tiny problem may have one.
        results = [self.run_fovea("bench", *self.SHAPES, "--against", "kept.json") for _ in range(3)]
        lost = [result for result in results if result.returncode == 1]
        self.assertTrue(lost, results[0].stdout)
        self.expect(lost[0], 1, "--against", "beyond noise")
        row["fraction_of_bound"] = 1e-9
        (self.folder / "kept.json").write_text(json.dumps(kept))
        self.expect(self.run_fovea("bench", *self.SHAPES, "--against", "kept.json"), 0)
        self.expect(self.run_fovea("bench", *self.SHAPES, "--head-dim", "32", "--against", "kept.json"), 2,
                    "--against: 'given shapes' is kept of another problem", "head_dim 64", "expected", "head_dim 32")

    def test_backward_counts_seven_products(self):
        result = self.run_fovea("bench", *self.SHAPES, "--backward", "--json")
        self.expect(result, 0)
        row = json.loads(result.stdout)["rows"][0]
        self.assertEqual(row["flops"], 3.5 * 2 * 2 * 64 * 64 * 128)
        self.assertEqual(row["name"], "given shapes+backward")
        self.assertEqual(row["kernel"], "cpu/attention_backward")

    def test_cases_of_backward_count_five_products(self):
        case = {"name": "x", "why": "small", "seqlen_q": 64, "num_heads_q": 2, "head_dim": 64, "head_dim_v": 32, "backward": True, "sinks": True}
        (self.folder / "cases.json").write_text(json.dumps({"cases": [case]}))
        words = ("bench", "--cases", "cases.json", "--runs", "3", "--threads", "1", "--json")
        result = self.run_fovea(*words)
        self.expect(result, 0)
        row = json.loads(result.stdout)["rows"][0]
        self.assertEqual((row["name"], row["kernel"]), ("x", "cpu/attention_backward"))
        self.assertEqual(row["flops"], 2 * 2 * 64 * 64 * (3 * 64 + 2 * 32))
        (self.folder / "kept.json").write_text(result.stdout)
        self.expect(self.run_fovea(*words, "--against", "kept.json", "--backward"), 2, "none of these cases")
        (self.folder / "cases.json").write_text(json.dumps({"cases": [{**case, "page_size": 8}]}))
        self.expect(self.run_fovea(*words), 2, "page_size stands beside backward: a cache has no gradients")

    def test_sums_are_deterministic_or_not(self):
        self.expect(self.run_fovea("bench", *self.SHAPES, "--nondeterministic"), 0)
        self.expect(self.run_fovea("bench", *self.SHAPES, "--nondeterministic", "--deterministic"), 2, "--nondeterministic", "--deterministic")

    def test_paged_cases(self):
        case = {"name": "pages", "why": "small", "batch": 2, "seqlen_q": 2, "seqlen_kv": 24, "num_heads_q": 2, "page_size": 8}
        (self.folder / "cases.json").write_text(json.dumps({"cases": [case]}))
        self.expect(self.run_fovea("bench", "--cases", "cases.json", "--runs", "2", "--threads", "1"), 0)
        self.expect(self.run_fovea("bench", "--cases", "cases.json", "--case", "pages", "--backward"), 2, "'pages'", "cache")
        (self.folder / "cases.json").write_text(json.dumps({"cases": [{**case, "page_size": 7}]}))
        self.expect(self.run_fovea("bench", "--cases", "cases.json"), 2, "page_size does not divide seqlen_kv")

    def test_a_recipe_stands_behind_the_call_without_one(self):
        for words, name, operation in (((), "given shapes", "attention"), (("--backward",), "given shapes+backward", "attention_backward")):
            result = self.run_fovea("bench", *self.SHAPES, *words, "--quant", "int8", "--json")
            self.expect(result, 0)
            rows = json.loads(result.stdout)["rows"]
            self.assertEqual([row["name"] for row in rows], [name, f"{name} int8"])
            rounded = "cpu/attention_quantized" + operation.removeprefix("attention")
            plain = "cpu/attention_forward" if operation == "attention" else f"cpu/{operation}"
            self.assertEqual([row["kernel"] for row in rows], [plain, rounded])
        case = {"name": "pages", "why": "small", "seqlen_q": 2, "seqlen_kv": 24, "num_heads_q": 2, "page_size": 8}
        (self.folder / "cases.json").write_text(json.dumps({"cases": [case]}))
        self.expect(self.run_fovea("bench", "--cases", "cases.json", "--quant", "int8"), 2, "--quant", "cache")

    def test_json_on_stdout(self):
        result = self.run_fovea("bench", *self.SHAPES, "--json")
        self.expect(result, 0)
        self.assertEqual(len(json.loads(result.stdout)["rows"]), 1)

    def test_named_cases(self):
        result = self.run_fovea("bench", "--list")
        self.expect(result, 0)
        self.assertIn("llama_decode", result.stdout)
        self.expect(self.run_fovea("bench", "--case", "nonsense"), 2, "--case", "nonsense")
        self.expect(self.run_fovea("bench", "--case", "gpt2_prefill", "--seqlen-q", "3"), 2, "--case")
        (self.folder / "cases.json").write_text(json.dumps({"cases": [
            {"name": "packed", "why": "small", "seqlen_q": [5, 9], "seqlen_kv": [5, 9], "causal": "bottom_right"},
            {"name": "all", "why": "everything", "seqlen_q": 16, "num_heads_q": 2, "dtype": "bf16", "alibi": True,
             "sinks": True, "documents": 2, "softcap": 5, "window": [4, None], "score_mod": "score * n",
             "scalars": {"n": 0.5}}]}))
        self.expect(self.run_fovea("bench", "--cases", "cases.json", "--runs", "2", "--threads", "1"), 0)
        (self.folder / "cases.json").write_text('{"cases": [{"name": "x", "why": "y", "seqlen_q": 3, "seqlen_z": 3}]}')
        self.expect(self.run_fovea("bench", "--cases", "cases.json"), 2, "'x'", "seqlen_z")

    def test_kept_runs_are_checked(self):
        row = {"name": "given shapes", "threads": 1, "fraction_of_bound": 0.5, "spread": 0, "device": 5}
        for text in ("", "[]", '{"rows": [1]}', '{"rows": [{"name": "given shapes"}]}', json.dumps({"rows": [row]})):
            (self.folder / "kept.json").write_text(text)
            self.expect(self.run_fovea("bench", *self.SHAPES, "--against", "kept.json"), 2, "--against")
        (self.folder / "kept.json").write_text('{"rows": []}')
        self.expect(self.run_fovea("bench", *self.SHAPES, "--against", "kept.json"), 2, "none of these cases")


class Refusals(CommandTest):
    """Bad input: exit code 2, one line that names the option, nothing written."""

    def refuse(self, result, *needles):
        self.expect(result, 2, *needles)
        self.assertFalse((self.folder / "out.npy").exists())

    def test_commands_and_options(self):
        self.refuse(self.run_fovea(), "which command")
        self.refuse(self.run_fovea("tunes"), "unknown command 'tunes'")
        self.refuse(self.attend("--nonsense"), "unknown option '--nonsense'")
        self.refuse(self.attend("surplus"), "surplus")
        self.refuse(self.attend("--deterministic=no"), "deterministic was given")
        self.refuse(self.attend("--softcap"), "--softcap")
        self.refuse(self.attend("--q", "q.npy"), "--q")
        self.refuse(self.run_fovea("doctor", "--q", "q.npy"), "unknown option '--q'")

    def test_values(self):
        for option, values in {
            "--window": ("3", "1,2,3", "-1,0", "a,b", "1;2", ""), "--scale": ("x", "nan", "inf", ""),
            "--softcap": ("-1", "0", "x"), "--dropout": ("-0.1", "1.5", "x"), "--seed": ("-1", "x", "1.5", str(2**64)),
            "--threads": ("-1", "x", "1,2"), "--layout": ("bsdh", ""), "--dtype": ("f64", ""), "--align": ("left",),
            "--target": ("sse9",), "--compute-dtype": ("f16",), "--out-dtype": ("f64",), "--scalar": ("n", "n=x", "=3", "1n=3"),
            "--quant": ("acurate", "accurate,block_kv=x", ""), "--accuracy": ("0", "-1", "inf", "x"), "--tensor": ("t", "t=", "a-b=q.npy"), "--score-mod": ("", "score +", "nonsense"),
            "--mask-mod": ("", "score > 0", "q_idx"),
        }.items():
            for value in values:
                with self.subTest(option=option, value=value):
                    self.refuse(self.attend(option, value, "--out", "out.npy"), option.removeprefix("--").replace("-", "")[:4]
                                if option in ("--score-mod", "--mask-mod", "--softcap") else option)
        self.refuse(self.attend("--causal=left"), "--causal")
        self.refuse(self.attend("--causal=top_left", "--align", "bottom_right"), "--align")

    def test_parse_errors_point_at_the_column(self):
        self.refuse(self.attend("--score-mod", "score + nonsense"), "column 9", "nonsense")

    def test_names_are_given_once_and_read(self):
        self.refuse(self.attend("--scalar", "n=3", "--scalar", "n=4", "--score-mod", "score * n"), "n is given twice")
        self.refuse(self.attend("--scalar", "n=3"), "--scalar n", "no program reads it")
        self.refuse(self.attend("--tensor", "t=q.npy", "--score-mod", "score"), "--tensor t", "no program reads it")

    def test_missing_inputs(self):
        self.refuse(self.run_fovea("attend", "--q", "q.npy", "--k", "k.npy"), "--v", "is missing")
        self.refuse(self.run_fovea("attend"), "--q", "is missing")
        self.refuse(self.run_fovea("attend", "--input", "none.safetensors"), "none.safetensors", "No such file")
        self.refuse(self.run_fovea("attend", "--input", "q.npy"), "--input", ".npy")
        self.refuse(self.attend("--input", "x.safetensors"), "--input")
        self.refuse(self.attend("--bias", "."), "--bias", "a folder")
        self.refuse(self.attend("--bias", "/dev/zero"), "--bias", "a device")

    def test_malformed_npy(self):
        good = npy(Q_SHAPE, self.q)
        faults = {
            "truncated": good[:-1], "trailing bytes": good + b"\0", "header is cut off": good[:40],
            "float64": npy(Q_SHAPE, self.q, "<f8"), "big-endian": npy(Q_SHAPE, self.q, ">f4"),
            "--dtype bf16": npy(Q_SHAPE, [0] * len(self.q), "<u2"), "Python objects": good.replace(b"'<f4'", b"'|O' "),
            "structured": good.replace(b"'<f4'", b"[('a',"), "not a .npy file": b"hello", "version 4.0": good[:6] + b"\4" + good[7:],
            "stands twice": good.replace(b"'fortran_order': False", b"'descr': '<f4'        "),
            "overflow": good.replace(str(Q_SHAPE).encode() + b", }    ", b"(99999999999, 99999999999)}"),
            "expected rank 4": npy((len(self.q),), self.q), "holds i32": npy(Q_SHAPE, [0] * len(self.q), "<i4"),
        }
        for needle, data in faults.items():
            with self.subTest(needle):
                self.write("q.npy", data)
                self.refuse(self.attend("--out", "out.npy"), "q", needle)
        self.write("q.npy", b"")
        self.refuse(self.attend("--out", "out.npy"), "--q", "q.npy")

    def test_malformed_safetensors(self):
        tensor = lambda shape: ("F32", shape, bytes(4 * count(shape)))
        good = safetensors({"q": tensor(Q_SHAPE), "k": tensor(K_SHAPE), "v": tensor(V_SHAPE)})
        faults = {
            "no tensor 'v'": safetensors({"q": tensor(Q_SHAPE), "k": tensor(K_SHAPE)}),
            "truncated": good[:-1], "trailing": good + b"\0", "length": b"abc",
            "header is truncated": struct.pack("<Q", 1 << 20) + b"{}", "at most": struct.pack("<Q", 1 << 60) + b"{}",
            "twice": with_header(b'{"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"q":{}}'),
            "overlaps": with_header(b'{"q":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
                                    b'"k":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
            "unknown key": with_header(b'{"q":' * 5000 + b"1" + b"}" * 5000), "not JSON": with_header(b'{"q":'),
            "negative": with_header(b'{"q":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}'),
            "F64": safetensors({"q": ("F64", (1,), bytes(8))}),
        }
        for needle, data in faults.items():
            with self.subTest(needle):
                self.write("x.safetensors", data)
                self.refuse(self.run_fovea("attend", "--input", "x.safetensors", "--out", "out.npy"), "--input", needle)

    def test_shapes_and_dtypes_that_do_not_fit(self):
        self.write("k.npy", npy((BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM + 1), [0.0] * (BATCH * SEQLEN_KV * HEADS_KV * 9)))
        self.refuse(self.attend("--out", "out.npy"), "--k: k.npy", "head_dim 8")
        self.write("k.npy", npy(K_SHAPE, self.k, "<f2"))
        self.refuse(self.attend("--out", "out.npy"), "--k: k.npy", "f16")
        self.write("k.npy", npy((BATCH, SEQLEN_KV, 3, HEAD_DIM), [0.0] * (BATCH * SEQLEN_KV * 3 * HEAD_DIM)))
        self.write("v.npy", npy((BATCH, SEQLEN_KV, 3, HEAD_DIM_V), [0.0] * (BATCH * SEQLEN_KV * 3 * HEAD_DIM_V)))
        self.refuse(self.attend("--out", "out.npy"), "4", "3")

    def test_dtype_bf16_over_anything_else(self):
        self.refuse(self.attend("--dtype", "bf16", "--out", "out.npy"), "--dtype", "bf16", "f32")

    def test_side_tensors_that_do_not_fit(self):
        self.write("bad.npy", npy((3,), [0.0] * 3))
        for option in ("--bias", "--alibi", "--sinks"):
            self.refuse(self.attend(option, "bad.npy", "--out", "out.npy"), option.removeprefix("--"))
        # Extents that a program would read clamped.
        self.write("bad.npy", npy((SEQLEN_Q, SEQLEN_KV - 1), [0.0] * 30))
        self.refuse(self.attend("--bias", "bad.npy", "--out", "out.npy"), "--bias", "[2, 4, 5, 7]")
        self.write("bad.npy", npy((3, SEQLEN_Q, SEQLEN_KV), [True] * 105, "|b1"))
        self.refuse(self.attend("--mask", "bad.npy", "--out", "out.npy"), "--mask", "[2, 4, 5, 7]")
        self.write("bad.npy", npy((SEQLEN_Q, SEQLEN_KV), [0.0] * 35))
        self.refuse(self.attend("--mask", "bad.npy", "--out", "out.npy"), "mask", "f32")
        self.write("bad.npy", npy((BATCH, SEQLEN_Q), [0.0] * 10))
        self.write("ids.npy", npy((BATCH, SEQLEN_Q), [0] * 10, "<i4"))
        self.refuse(self.attend("--segments-q", "ids.npy"), "--segments-q", "--segments-kv")
        self.refuse(self.attend("--segments-q", "ids.npy", "--segments-kv", "ids.npy"), "--segments-kv", "[2, 7]")
        self.refuse(self.attend("--segments-q", "bad.npy", "--segments-kv", "ids.npy"), "--segments-q", "int32")

    def test_thd_refuses_dense_tensors_and_bad_offsets(self):
        self.write("q.npy", npy((10, HEADS_Q, HEAD_DIM), self.q))
        self.write("k.npy", npy((14, HEADS_KV, HEAD_DIM), self.k))
        self.write("v.npy", npy((14, HEADS_KV, HEAD_DIM_V), self.v))
        self.write("cu.npy", npy((3,), [0, 5, 10], "<i4"))
        thd = ["--layout", "thd", "--cu-seqlens-q", "cu.npy", "--cu-seqlens-kv", "cu.npy"]
        self.refuse(self.attend(*thd, "--mask", "cu.npy"), "--mask", "--mask-mod")
        self.refuse(self.attend(*thd, "--bias", "cu.npy"), "--bias", "--score-mod")
        self.refuse(self.attend(*thd[:4]), "--cu-seqlens-kv")
        self.refuse(self.attend("--cu-seqlens-q", "cu.npy"), "--cu-seqlens-q", "--layout thd")
        for values in ([1, 5, 10], [0, 6, 5], [0, 5, 11]):
            self.write("cu.npy", npy((3,), values, "<i4"))
            self.refuse(self.attend(*thd, "--out", "out.npy"), "--cu-seqlens-q: cu.npy")
        self.write("cu.npy", npy((3,), [0.0, 5.0, 10.0]))
        self.refuse(self.attend(*thd, "--out", "out.npy"), "--cu-seqlens-q: cu.npy", "f32", "int32")

    def test_offsets_are_refused_by_their_own_name_whatever_computes(self):
        self.write("q.npy", npy((10, HEADS_Q, HEAD_DIM), self.q))
        self.write("k.npy", npy((14, HEADS_KV, HEAD_DIM), self.k))
        self.write("v.npy", npy((14, HEADS_KV, HEAD_DIM_V), self.v))
        self.write("good.npy", npy((3,), [0, 5, 10], "<i4"))
        faults = {
            ((0,), ()): "[sequences + 1]", ((1, 3), (0, 5, 10)): "[sequences + 1]", ((1,), (0,)): "3 entries",
            ((2,), (0, 5)): "3 entries", ((3,), (1, 5, 10)): "entry 0 is 1; expected 0",
            ((3,), (0, 6, 5)): "entry 2 is 5; expected at least 6", ((3,), (0, 5, 2**31 - 1)): "entry 2 is 2147483647; expected at most",
            ((3,), (-1, 5, 10)): "entry 0 is -1",
        }
        for (shape, values), needle in faults.items():
            self.write("bad.npy", npy(shape, list(values), "<i4"))
            for option in ("--cu-seqlens-q", "--cu-seqlens-kv"):
                for device in ("cpu", "cuda"):
                    with self.subTest((values, option, device)):
                        files = {"--cu-seqlens-q": "good.npy", "--cu-seqlens-kv": "good.npy", option: "bad.npy"}
                        words = [word for pair in files.items() for word in pair]
                        self.refuse(self.attend("--layout", "thd", *words, "--device", device), f"{option}: bad.npy: ", needle)

    def test_messages_name_option_and_file_whatever_computes(self):
        self.write("bad.npy", npy((1, 2, 3, 5), [0.0] * 30))
        self.write("ints.npy", npy((HEADS_Q,), [1] * HEADS_Q, "<i4"))
        self.write("square.npy", npy((SEQLEN_Q, SEQLEN_KV), [1] * 35, "<i4"))
        wrong = {"--bias": ("bad.npy", "square.npy"), "--mask": ("bad.npy", "square.npy"), "--alibi": ("bad.npy", "ints.npy"),
                 "--sinks": ("bad.npy", "ints.npy"), "--segments-q": ("bad.npy",)}
        for option, files in wrong.items():
            other = ["--segments-kv", "square.npy"] if option == "--segments-q" else []
            for file in files:
                for device in ("cpu", "cuda"):
                    with self.subTest((option, file, device)):
                        self.refuse(self.attend(option, file, *other, "--device", device), f"{option}: {file}: holds ")
        for name, shape, needle in (("k", (BATCH, SEQLEN_KV, HEADS_KV, 9), "head_dim 8, as --q: q.npy has"),
                                    ("k", (3, SEQLEN_KV, HEADS_KV, HEAD_DIM), "batch 2"), ("q", (3, 4), "rank 4"),
                                    ("v", (BATCH, 6, HEADS_KV, HEAD_DIM_V), "seqlen 7, as --k: k.npy has"),
                                    ("v", (BATCH, SEQLEN_KV, 4, HEAD_DIM_V), "num_heads_kv 2, as --k: k.npy has")):
            with self.subTest((name, shape)):
                self.write("bad.npy", npy(shape, [0.0] * count(shape)))
                files = {"--q": "q.npy", "--k": "k.npy", "--v": "v.npy", f"--{name}": "bad.npy"}
                result = self.run_fovea("attend", *[word for pair in files.items() for word in pair])
                self.refuse(result, f"--{name}: bad.npy: holds f32 [", needle)
        tensors = {name: ("F32", shape, elements([0.0] * count(shape), "<f4"))
                   for name, shape in (("q", Q_SHAPE), ("k", (*K_SHAPE[:3], 9)), ("v", V_SHAPE))}
        self.write("x.safetensors", safetensors(tensors))
        self.refuse(self.run_fovea("attend", "--input", "x.safetensors"), "--input: x.safetensors: k: holds f32 [2, 7, 2, 9]")

    def test_outputs_that_cannot_be_written(self):
        (self.folder / "folder.npy").mkdir()
        os.link(self.folder / "q.npy", self.folder / "linked.npy")
        os.symlink("v.npy", self.folder / "symlinked.npy")
        for words, needle in {
            ("--out", "missing/out.npy"): "No such file", ("--out", "folder.npy"): "folder", ("--out", "out.txt"): ".npy",
            ("--lse", "lse.safetensors"): ".npy", ("--out", "q.npy"): "--q reads", ("--lse", "./k.npy"): "--k reads",
            ("--out", "linked.npy"): "--q reads", ("--out", "symlinked.npy"): "--v reads", ("--out", ""): "--out",
            ("--out", "same.npy", "--lse", "./same.npy"): "--out writes",
        }.items():
            with self.subTest(words):
                self.refuse(self.attend(*words), needle)
        self.assertEqual(read_npy(self.folder / "k.npy")[1], K_SHAPE)
        self.assertFalse([path.name for path in self.folder.iterdir() if path.name.startswith(".")])
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "8", "--png", "missing/x.png"), "--png", "No such file")

    def test_draw_mask(self):
        self.refuse(self.run_fovea("draw-mask", "--causal"), "--seqlen-q", "is missing")
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "8", "--sequence", "1"), "--sequence")
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "8", "--tile-q", "0"), "--tile-q")
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "1000000000"), "--tile-q", "take larger ones")
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "8", "--mask-mod", "kv_idx <"), "column")

    def test_ranks(self):
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "8", "--ranks", "0"), "--ranks")
        self.refuse(self.run_fovea("draw-mask", "--seqlen-q", "9", "--ranks", "2"), "pad to 10")
        self.refuse(self.run_fovea("explain", "--seqlen-q", "8", "--ranks", "2", "--scheme", "all-gather"), "--scheme", "needed_only")
        self.refuse(self.run_fovea("explain", "--seqlen-q", "8", "--ranks", "2", "--rank-gbps", "0"), "--rank-gbps", "above 0")


def with_header(text: bytes, size: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(size)


class Writing(CommandTest):
    def test_old_file_keeps_its_mode_and_links_stay_links(self):
        (self.folder / "target.npy").write_bytes(b"old")
        (self.folder / "target.npy").chmod(0o640)
        os.symlink("target.npy", self.folder / "out.npy")
        self.expect(self.attend("--out", "out.npy"), 0)
        self.assertTrue((self.folder / "out.npy").is_symlink())
        self.assertEqual((self.folder / "target.npy").stat().st_mode & 0o777, 0o640)
        self.assertEqual(read_npy(self.folder / "target.npy")[1], OUT_SHAPE)

    def test_a_full_disk_is_exit_code_1_and_leaves_the_old_file(self):
        (self.folder / "out.npy").write_bytes(b"old")

        def limit_file_size():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))

        self.expect(self.attend("--out", "out.npy", preexec_fn=limit_file_size), 1, "out.npy", "File too large")
        self.assertEqual((self.folder / "out.npy").read_bytes(), b"old")
        self.assertFalse([path.name for path in self.folder.iterdir() if path.name.startswith(".")])

    def test_stdout_that_takes_nothing_is_exit_code_1(self):
        with open("/dev/full", "w") as full:
            result = subprocess.run([FOVEA, "doctor", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (1, 1))
        self.assertIn("stdout", result.stderr)

    def test_a_killed_run_leaves_the_old_file_or_the_new_one(self):
        # 4 MiB of output, killed at moments spread over a whole run.
        shape = (1, 1024, 8, 128)
        tokens = npy((1, 1, 8, 128), normal(1024, 5))
        self.write("k.npy", tokens)
        self.write("v.npy", tokens)
        self.write("q.npy", npy(shape, [0.5] * count(shape)))
        begin = time.monotonic()
        self.expect(self.attend("--out", "out.npy"), 0)
        duration = time.monotonic() - begin
        new = (self.folder / "out.npy").read_bytes()
        words = [FOVEA, "attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--threads", "1", "--out", "out.npy"]
        seen = set()
        for moment in range(30):
            (self.folder / "out.npy").write_bytes(b"old")
            process = subprocess.Popen(words, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(duration * moment / 24)
            process.kill()
            process.wait()
            content = (self.folder / "out.npy").read_bytes()
            self.assertIn(content, (b"old", new), "a torn file")
            seen.add(content == new)
        self.assertIn(False, seen)


class Progress(CommandTest):
    def test_silent_where_stderr_is_no_terminal(self):
        words = ["bench", "--seqlen-q", "256", "--num-heads-q", "4", "--runs", "1000000", "--json"]
        process = subprocess.Popen([FOVEA, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(3)
        process.kill()
        self.assertEqual(process.communicate()[1], "")

    def test_a_line_on_a_terminal_after_two_seconds(self):
        try:
            controller, terminal = pty.openpty()
        except OSError as error:
            self.skipTest(f"no terminal can be opened: {error}")
        self.addCleanup(os.close, controller)
        words = ["bench", "--seqlen-q", "256", "--num-heads-q", "4", "--runs", "1000000", "--json"]
        begin = time.monotonic()
        process = subprocess.Popen([FOVEA, *words], stdout=subprocess.DEVNULL, stderr=terminal)
        os.close(terminal)
        self.assertTrue(select.select([controller], [], [], 60)[0], "no progress in a minute")
        self.assertGreaterEqual(time.monotonic() - begin, 2)
        text = os.read(controller, 1000).decode()
        process.kill()
        process.wait()
        self.assertIn("fovea bench", text)


if __name__ == "__main__":
    FOVEA = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
