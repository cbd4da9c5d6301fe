#!/usr/bin/env python3
"""Attention forward on a GPU through the C ABI, against the plain formula in float64: features alone and together, twice each.

usage: gpu_forward_check.py --library libfovea.so [--match causal]        exit code 77 where there is no PyTorch with a GPU

Outputs and workspaces start poisoned, both runs must give the same bits, and each line names the kernel that ran.
"""

import argparse
import ctypes
import math
import random
import sys
import time

import fovea_ctypes as fovea

try:
    import torch
except ImportError:
    torch = None

# Half a unit of 1: a weight is rounded to it (f16 kernels round theirs finer), and so is an element of out.
WEIGHT, ROUNDING = 2.0**-8, {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
EXPONENT = 2.0**-17  # exponents of the fastest kernels are rounded at 2^-18


def reference(q, k, v, scale, score=None, mask=None, sinks=None):
    """out [batch, seqlen_q, heads, head_dim_v], lse, and what they may err by, element by element; V's infinities and NaN are taken as
    hidden. A score may err by a rounding of each product's size and a few of its own; a weight by that and by its rounding, of |v|."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * scale
    sizes = q.abs() @ k.abs().transpose(-1, -2) * abs(scale)
    s = score(s) if score else s
    s = s.masked_fill(~mask, -math.inf) if mask is not None else s
    top = s.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(1, -1, 1, 1) - top)
    v = torch.where(torch.isfinite(v), v, torch.zeros_like(v))
    p = torch.where(total > 0, p / total, torch.zeros_like(total))
    error = 2.0**-23 * (torch.where(p > 0, sizes + 8 * s.abs(), 0.0).nan_to_num().amax(-1, keepdim=True) + 8) + EXPONENT
    lse = (top + torch.log(total)).squeeze(-1)
    return ((p @ v).transpose(1, 2), lse, ((2 * error + WEIGHT) * (p @ v.abs())).transpose(1, 2),
            error.squeeze(-1) + 2.0**-22 * lse.abs().nan_to_num(0, 0, 0))


class Checker:
    def __init__(self, library, match):
        self.library, self.match, self.num_wrong = library, match, 0

    def wrong(self, name, what):
        self.num_wrong += 1
        print(f"WRONG  {name}: {what}", flush=True)

    def run(self, q, k, v, **fields):
        """Poisoned out and lse, filled by a plan in a poisoned workspace; and what explain says of it. Dense or packed."""
        out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, device="cuda", dtype=q.dtype)
        lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), math.nan, device="cuda")
        named = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        args = fovea.forward_args(**{name: fovea.torch_tensor(t) for name, t in named.items()},
                                  stream=torch.cuda.current_stream().cuda_stream, **fields)
        plan = self.library.plan(args)
        workspace = torch.full((max(plan.workspace_bytes, 1),), 255, device="cuda", dtype=torch.uint8)
        args.workspace, args.workspace_bytes = workspace.data_ptr(), plan.workspace_bytes
        self.library.call(self.library.c.fovea_plan_run, plan.handle, ctypes.byref(args))
        torch.cuda.synchronize()
        return out, lse, plan.explain()

    def check(self, name, shape, dtype=None, scale=None, change=None, score=None, mask=None, sinks=None, **fields):
        """shape: batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim_qk[, head_dim_v]."""
        if self.match not in name:
            return
        batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, *head_dim_v = shape
        q, k, v = (torch.randn(batch, *rest, device="cuda") for rest in (
            (seqlen_q, heads_q, head_dim), (seqlen_kv, heads_kv, head_dim), (seqlen_kv, heads_kv, *(head_dim_v or [head_dim]))))
        q, k, v = (t.to(dtype or torch.bfloat16) for t in (change(q, k, v) if change else (q, k, v)))
        if sinks is not None:
            fields["sinks"] = fovea.torch_tensor(sinks)
        if scale is not None:
            fields["softmax_scale"] = scale
        (out, lse, explained), (again, lse_again, _) = (self.run(q, k, v, **fields) for _ in range(2))
        expected = reference(q, k, v, scale if scale is not None else 1 / math.sqrt(head_dim), score, mask, sinks)
        self.judge(name, (out, lse), (again, lse_again), expected, explained)

    def check_packed(self, name, lengths, heads, head_dim, trailing=0, nan_in=None, dtype=None, mask=None, sinks=None, **fields):
        """lengths: (seqlen_q, seqlen_kv) of each sequence; heads: of q, of k. Trailing rows are NaN, and so are the values of sequence
        nan_in: its own rows alone may see them. mask(seqlen_q, seqlen_kv) is that of a sequence."""
        if self.match not in name:
            return
        bounds = torch.tensor([(0, 0), *lengths]).cumsum(0).int()
        ends_q, ends_kv = bounds[:, 0].tolist(), bounds[:, 1].tolist()
        q, k, v = (torch.randn(total + trailing, n, head_dim, device="cuda").to(dtype or torch.bfloat16)
                   for total, n in ((ends_q[-1], heads[0]), (ends_kv[-1], heads[1]), (ends_kv[-1], heads[1])))
        for t, ends in ((q, ends_q), (k, ends_kv), (v, ends_kv)):
            t[ends[-1]:] = math.nan
        if nan_in is not None:
            v[ends_kv[nan_in]:ends_kv[nan_in + 1]] = math.nan
        cu_seqlens = [bounds[:, side].contiguous().cuda() for side in (0, 1)]
        fields |= {"cu_seqlens_q": fovea.torch_tensor(cu_seqlens[0]), "cu_seqlens_kv": fovea.torch_tensor(cu_seqlens[1])}
        if sinks is not None:
            fields["sinks"] = fovea.torch_tensor(sinks)
        (out, lse, explained), (again, lse_again, _) = (self.run(q, k, v, **fields) for _ in range(2))
        expected = torch.zeros(q.shape, device="cuda", dtype=torch.double)
        expected_lse = torch.full(lse.shape, -math.inf, device="cuda", dtype=torch.double)
        allowed, allowed_lse = torch.zeros_like(expected), torch.zeros_like(expected_lse)
        for i, (seqlen_q, seqlen_kv) in enumerate(lengths):
            rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_kv[i], ends_kv[i + 1])
            if seqlen_kv == 0 and sinks is not None:
                expected_lse[:, rows] = sinks.double().view(-1, 1)
            if seqlen_q == 0 or seqlen_kv == 0:
                continue
            one = reference(q[None, rows], k[None, keys], v[None, keys], 1 / math.sqrt(head_dim), None,
                            mask(seqlen_q, seqlen_kv) if mask else None, sinks)
            expected[rows], expected_lse[:, rows], allowed[rows], allowed_lse[:, rows] = one[0][0], one[1][0], one[2][0], one[3][0]
        if nan_in is not None:
            rows = slice(ends_q[nan_in], ends_q[nan_in + 1])
            if not torch.isnan(out[rows]).all():
                self.wrong(name, "rows that see NaN are not NaN")
            out[rows], again[rows], expected[rows] = 0, 0, 0
        self.judge(name, (out, lse), (again, lse_again), (expected, expected_lse, allowed, allowed_lse), explained)

    def check_beside_cpu(self, name, shape, wants_row_max=False, dtype=None, **fields):
        """Against the same library on the CPU, in f32: which keys are dropped, and maxima. shape as check."""
        if self.match not in name:
            return
        batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim = shape
        q, k, v = (torch.randn(batch, rows, heads, head_dim, device="cuda").to(dtype or torch.bfloat16) for rows, heads in (
            (seqlen_q, heads_q), (seqlen_kv, heads_kv), (seqlen_kv, heads_kv)))
        maxima = [torch.full((batch, heads_q, seqlen_q), math.nan, device="cuda") for _ in range(2)] if wants_row_max else [None, None]
        (out, lse, explained), (again, lse_again, _) = (
            self.run(q, k, v, **({} if m is None else {"row_max": fovea.torch_tensor(m)}), **fields) for m in maxima)
        named = {n: t.float().cpu() for n, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("row_max", maxima[0]))
                 if t is not None}
        self.library.attention_forward(fovea.forward_args(**{n: fovea.torch_tensor(t) for n, t in named.items()}, **fields))
        sizes = named | {"v": named["v"].abs(), "out": torch.empty_like(named["out"])}  # the same keys dropped, of |v|
        self.library.attention_forward(fovea.forward_args(**{n: fovea.torch_tensor(t) for n, t in sizes.items()}, **fields))
        if wants_row_max and not torch.allclose(maxima[0].cpu(), named["row_max"], 1e-5, 1e-5):
            self.wrong(name, "row_max")
        error = 2.0**-23 * (4 * head_dim**0.5 * 8 + 8) + EXPONENT  # dot products of normal values
        self.judge(name, (out, lse), (again, lse_again), (named["out"].double().cuda(), named["lse"].double().cuda(),
                                                          (2 * error + WEIGHT) * sizes["out"].double().cuda(),
                                                          torch.full_like(lse, error).double()), explained)

    def check_infinities(self, name, shape, mask, dtype=None, has_huge_value=False, **fields):
        """NaN and infinities of both signs in some of V: each reaches the rows that see it, and changes no bit of a row that sees none.
        shape: batch, seqlen_q, seqlen_kv, heads, head_dim. A huge value may change bits: all of its row tile is computed otherwise."""
        if self.match not in name:
            return
        batch, seqlen_q, seqlen_kv, heads, head_dim = shape
        dtype = dtype or torch.bfloat16
        q, k, v = (torch.randn(batch, rows, heads, head_dim, device="cuda").to(dtype) for rows in (seqlen_q, seqlen_kv, seqlen_kv))
        if has_huge_value:
            v[:, seqlen_kv // 3, :, 5] = 2.0**124
        specials = torch.tensor([math.nan, math.inf, -math.inf], device="cuda", dtype=dtype)
        is_special = torch.rand(v.shape, device="cuda") < 40 / v.numel()
        dirty = torch.where(is_special, specials[torch.randint(0, 3, v.shape, device="cuda")], v)
        (out, lse, explained), (again, lse_again, _), (clean, clean_lse, _) = (
            self.run(q, k, values, **fields) for values in (dirty, dirty, torch.where(is_special, torch.zeros_like(v), v)))
        expected, *rest = reference(q, k, dirty, 1 / math.sqrt(head_dim), mask=mask)
        reached = [torch.einsum("qk,bkhd->bqhd", mask.double(), ((dirty == sign) | dirty.isnan()).double()) > 0 for sign in (math.inf, -math.inf)]
        told = [(out == math.inf) | out.isnan(), (out == -math.inf) | out.isnan()]
        rows = ~(reached[0] | reached[1]).any(-1)
        if not all(torch.equal(a, b) for a, b in zip(reached, told)):
            self.wrong(name, "NaN and infinity are not where rows see them")
        if not has_huge_value and not (torch.equal(out[rows], clean[rows]) and torch.equal(lse, clean_lse)):
            self.wrong(name, "bits of rows that see neither")
        for t in (out, again, expected):
            t[reached[0] | reached[1]] = 0
        self.judge(name, (out, lse), (again, lse_again), (expected, *rest), explained)

    def judge(self, name, result, repeated, reference_result, explained):
        """Each element of out and lse beside what it may err by; shown is the largest share of that."""
        (out, lse), (again, lse_again), (expected, expected_lse, allowed, allowed_lse) = result, repeated, reference_result
        dtype = str(out.dtype).removeprefix("torch.")
        allowed = allowed + ROUNDING[dtype] * expected.abs() + torch.finfo(out.dtype).smallest_normal * ROUNDING[dtype]
        error = ((out.double() - expected).abs() / allowed).max().item()
        is_finite = torch.isfinite(expected_lse)
        lse_error = ((lse.double() - expected_lse).abs() / allowed_lse.clamp_min(1e-30))[is_finite].max().item() if is_finite.any() else 0.0
        has_same_bits = torch.equal(out.view(torch.int16), again.view(torch.int16)) and torch.equal(lse, lse_again)
        is_right = error <= 1 and lse_error <= 1 and has_same_bits and torch.equal(lse[~is_finite].double(), expected_lse[~is_finite])
        self.num_wrong += not is_right
        kernel = next(line for line in explained.splitlines() if line.startswith("kernel")).split()[1]
        print(f"{'right' if is_right else 'WRONG'}  {name:28} out {error:.2f}  lse {lse_error:.2f}"
              f"{'' if has_same_bits else '  DIFFERENT BITS'}  {kernel}", flush=True)


def index(seqlen_q, seqlen_kv):
    return (torch.arange(seqlen_q, device="cuda").view(-1, 1), torch.arange(seqlen_kv, device="cuda").view(1, -1))


def causal(seqlen_q, seqlen_kv):
    i, j = index(seqlen_q, seqlen_kv)
    return j <= i + seqlen_kv - seqlen_q


def outliers(factor):
    return lambda q, k, v: tuple(t * (1 + factor * (torch.rand_like(t) < 0.005)) for t in (q, k, v))


def ramp(sign):
    """Scores that change by 200 nats along the keys."""
    def change(q, k, v):
        q[..., 0] = 10
        k[..., 0] = sign * torch.linspace(-200, 200, k.shape[1], device="cuda").view(1, -1, 1)
        return q, k, v
    return change


def poison_the_end(q, k, v):
    v[:, -50:], k[:, -20:] = math.nan, math.inf
    return q, k, v


def check_all(checker):
    for head_dim in (40, 64, 96, 128, 192, 256):
        checker.check(f"full {head_dim}", (2, 300, 333, 4, 2, head_dim))
        checker.check(f"causal {head_dim}", (2, 300, 333, 4, 4, head_dim), mask=causal(300, 333), causal=1)
    checker.check("192 and 128", (2, 256, 512, 4, 4, 192, 128))
    checker.check("64 and 256", (1, 200, 300, 2, 2, 64, 256))
    checker.check("f16", (2, 500, 777, 4, 2, 128), dtype=torch.float16)
    checker.check("f16 causal outliers", (2, 500, 777, 4, 2, 128), dtype=torch.float16, change=outliers(20), mask=causal(500, 777), causal=1)
    checker.check("empty rows", (1, 333, 200, 2, 1, 128), mask=causal(333, 200), causal=1)
    checker.check("one key", (2, 130, 1, 4, 4, 128))
    checker.check("long", (1, 1000, 5000, 4, 4, 128), mask=causal(1000, 5000), causal=1)
    for head_dim in (72, 96):  # three groups of warps compute
        checker.check(f"long {head_dim}", (1, 1000, 5000, 4, 2, head_dim), mask=causal(1000, 5000), causal=1)
        checker.check(f"long full {head_dim}", (1, 500, 1100, 4, 2, head_dim))
    i, j = index(1111, 1111)
    checker.check("window", (1, 1111, 1111, 4, 4, 128), mask=(j <= i) & (i - j <= 100), causal=1, has_window_left=1, window_left=100)
    documents = torch.sort(torch.randint(0, 7, (2, 1000), device="cuda")).values.int()
    checker.check("documents", (2, 1000, 1000, 4, 4, 128), mask=documents.view(2, 1, -1, 1) == documents.view(2, 1, 1, -1),
                  mask_mod="doc[batch, q_idx] == doc[batch, kv_idx]", tensors={"doc": fovea.torch_tensor(documents)})
    slopes = torch.logspace(-1, -8, 4, base=2, device="cuda")
    i, j = index(700, 700)
    checker.check("alibi", (2, 700, 700, 4, 4, 64), score=lambda s: s + slopes.double().view(1, -1, 1, 1) * (j - i),
                  score_mod="score + slopes[q_head] * (kv_idx - q_idx)", tensors={"slopes": fovea.torch_tensor(slopes)})
    checker.check("softcap causal", (2, 700, 700, 4, 4, 128), score=lambda s: 30 * torch.tanh(s / 30), mask=causal(700, 700),
                  softcap=30.0, causal=1)
    check_programs(checker)
    sinks = torch.randn(4, device="cuda") * 3
    checker.check("sinks", (2, 300, 500, 4, 4, 128), sinks=sinks)
    checker.check("sinks, empty rows", (1, 333, 200, 4, 4, 64), sinks=sinks, mask=causal(333, 200), causal=1)
    checker.check("negative scale", (1, 200, 300, 2, 2, 128), scale=-0.1)
    for factor in (20, 100):
        for head_dim in (64, 128):
            checker.check(f"outliers {factor}, {head_dim}", (2, 512, 2048, 4, 4, head_dim), change=outliers(factor))
    checker.check("growing scores", (1, 300, 2048, 2, 2, 128), change=ramp(1))
    checker.check("falling scores", (1, 300, 2048, 2, 2, 128), change=ramp(-1))
    i, j = index(600, 600)
    checker.check("NaN at hidden keys", (1, 600, 600, 2, 2, 128), change=poison_the_end, mask=(j < 550) & (j <= i),
                  mask_mod="kv_idx < 550 && kv_idx <= q_idx")


def check_programs(checker):
    """Lines along the keys, loads by keys and by rows, scores within a cap and beyond it; behind masks, with fewer kv heads and sinks."""
    sinks = torch.randn(4, device="cuda")
    documents = torch.sort(torch.randint(0, 5, (2, 1200), device="cuda")).values.int()
    bias = torch.randn(1200, device="cuda")
    slopes = torch.tensor([0.5, -0.25, 0.03, 0.0], device="cuda")
    named = {name: fovea.torch_tensor(t) for name, t in (("doc", documents), ("bias", bias), ("slopes", slopes))}
    i, j = index(1200, 1200)
    same, lower = documents.view(2, 1, -1, 1) == documents.view(2, 1, 1, -1), j <= i
    is_same = "doc[batch, q_idx] == doc[batch, kv_idx]"
    line = "score + slopes[q_head] * (kv_idx - q_idx)"
    for head_dim in (64, 128, 192, 256):
        shape = (2, 1200, 1200, 4, 2, head_dim)
        checker.check(f"line, causal {head_dim}", shape, score=lambda s: s + slopes.double().view(1, -1, 1, 1) * (j - i), mask=lower,
                      sinks=sinks, score_mod=line, mask_mod="kv_idx <= q_idx", tensors={"slopes": named["slopes"]})
        checker.check(f"causal documents {head_dim}", shape, mask=same & lower, sinks=sinks,
                      mask_mod=f"{is_same} && kv_idx <= q_idx", tensors={"doc": named["doc"]})
        checker.check(f"bias of keys {head_dim}", shape, score=lambda s: s * 2 + bias.double().view(1, 1, 1, -1), mask=same,
                      score_mod="score * 2 + bias[kv_idx]", mask_mod=is_same,
                      tensors={"doc": named["doc"], "bias": named["bias"]})
        for cap in (1, 30):
            checker.check(f"cap {cap}, documents {head_dim}", shape, score=lambda s, cap=cap: cap * torch.tanh(s / cap), mask=same,
                          softcap=float(cap), mask_mod=is_same, tensors={"doc": named["doc"]})
    checker.check("line, full f16", (1, 300, 4096, 4, 4, 128), dtype=torch.float16, sinks=sinks,
                  score=lambda s: s + slopes.double().view(1, -1, 1, 1) * (torch.arange(4096, device="cuda") - 4000),
                  score_mod="score + slopes[q_head] * (kv_idx - 4000)", tensors={"slopes": named["slopes"]})
    checker.check("line, negative scale", (1, 300, 900, 4, 4, 128), scale=-0.1,
                  score=lambda s: s + slopes.double().view(1, -1, 1, 1) * torch.arange(900, device="cuda"),
                  score_mod="score + slopes[q_head] * kv_idx", tensors={"slopes": named["slopes"]})


def check_dropout_and_maxima(checker):
    for head_dim in (64, 128, 256):
        checker.check_beside_cpu(f"dropout {head_dim}", (2, 300, 333, 4, 2, head_dim), dropout=fovea.Dropout(0.3, 7, 5))
        checker.check_beside_cpu(f"dropout and row_max {head_dim}", (1, 300, 500, 4, 4, head_dim), True, causal=1, dropout=fovea.Dropout(0.1, 8, 0))
        checker.check_beside_cpu(f"row_max {head_dim}", (2, 300, 777, 4, 2, head_dim), True)
    checker.check_beside_cpu("row_max f16, softcap", (1, 200, 300, 2, 2, 128), True, dtype=torch.float16, softcap=5.0)
    checker.check_beside_cpu("row_max, negative scale, empty rows", (1, 300, 100, 2, 2, 64), True, causal=1, softmax_scale=-0.2)


EDGES = [(n, n) for n in (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193)]  # of tiles of 64, 128 and 192 rows


def check_infinities_all(checker):
    rows, keys = index(700, 913)
    causal = keys <= rows + 213
    for head_dim in (64, 96, 128, 192, 256):
        shape = (2, 700, 913, 3, head_dim)
        for dtype in (torch.bfloat16, torch.float16):
            label = f"{'bf16' if dtype == torch.bfloat16 else 'f16'} d{head_dim}"
            checker.check_infinities(f"infinities {label}", shape, torch.ones_like(causal), dtype)
            checker.check_infinities(f"infinities causal {label}", shape, causal, dtype, causal=1)
            checker.check_infinities(f"infinities window {label}", shape, causal & (keys >= rows + 213 - 200), dtype,
                                     causal=1, has_window_left=1, window_left=200)
            checker.check_infinities(f"infinities mask {label}", shape, (keys % 7 != 3).expand_as(causal), dtype,
                                     mask_mod="kv_idx % 7 != 3")
        checker.check_infinities(f"infinities huge value d{head_dim}", shape, causal, has_huge_value=True, causal=1)


def check_packed_all(checker):
    random.seed(0)
    for head_dim in (64, 96, 128, 192, 256):
        checker.check_packed(f"packed {head_dim}", [*EDGES, (300, 1000)], (4, 2), head_dim)
        checker.check_packed(f"packed causal {head_dim}", [*EDGES, (300, 1000), (200, 77)], (4, 4), head_dim, trailing=150,
                             mask=causal, causal=1)
    many = [(random.randrange(40), random.randrange(300)) for _ in range(200)]
    checker.check_packed("packed 200", many, (2, 1), 128, trailing=1, dtype=torch.float16)
    checker.check_packed("packed 200 causal", many, (2, 1), 64, mask=causal, causal=1)
    skewed = [(n, n) for n in (3000, 5, 170, 1, 900, 64, 0, 2000, 333)]
    checker.check_packed("packed skewed", skewed, (8, 2), 128, mask=causal, causal=1)
    checker.check_packed("packed, sinks", [*skewed, (10, 0)], (2, 2), 128, trailing=3, sinks=torch.randn(2, device="cuda") * 3)
    window = lambda n, m: (index(n, m)[1] <= index(n, m)[0] + m - n) & (index(n, m)[0] + m - n - index(n, m)[1] <= 100)  # noqa: E731
    checker.check_packed("packed window", skewed, (4, 4), 128, mask=window, causal=1, has_window_left=1, window_left=100)
    checker.check_packed("packed, NaN in a neighbour", skewed, (4, 2), 128, nan_in=2, mask=causal, causal=1)
    checker.check_packed("packed, NaN beside full", skewed, (4, 2), 64, nan_in=4)


def check_graph(checker, name, lengths=None, others=None, **fields):
    """A captured run, replayed on other contents of the same tensors, gives what a run on them gives. lengths: of packed sequences, as
    captured, and the others as replayed."""
    q, k, v = (torch.randn(*([sum(lengths)] if lengths else [2, 400]), 4, 128, device="cuda").bfloat16() for _ in range(3))
    if lengths:
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        fields |= {"cu_seqlens_q": fovea.torch_tensor(ends), "cu_seqlens_kv": fovea.torch_tensor(ends)}
    out, side = torch.full_like(q, math.nan), torch.cuda.Stream()
    named = {"q": q, "k": k, "v": v, "out": out}
    args = fovea.forward_args(**{n: fovea.torch_tensor(t) for n, t in named.items()}, stream=side.cuda_stream, **fields)
    plan = checker.library.plan(args)
    workspace = torch.empty(max(plan.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
    args.workspace, args.workspace_bytes = workspace.data_ptr(), plan.workspace_bytes
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        checker.library.call(checker.library.c.fovea_plan_run, plan.handle, ctypes.byref(args))
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    if lengths:
        ends.copy_(torch.tensor([0, *others]).cumsum(0))
    graph.replay()
    torch.cuda.synchronize()
    expected, _, _ = checker.run(q, k, v, **fields)
    is_right = torch.equal(out.view(torch.int16), expected.view(torch.int16))
    checker.num_wrong += not is_right
    print(f"{'right' if is_right else 'WRONG'}  {name}", flush=True)


def host_microseconds(checker, calls=2000):
    """Of a plan's run on the host, this script's own call into C included."""
    named = {name: torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for name in ("q", "k", "v", "out")}
    args = fovea.forward_args(**{name: fovea.torch_tensor(t) for name, t in named.items()},
                              stream=torch.cuda.current_stream().cuda_stream)
    plan = checker.library.plan(args)
    workspace = torch.empty(max(plan.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
    args.workspace, args.workspace_bytes = workspace.data_ptr(), plan.workspace_bytes
    run, handle, where, error = checker.library.c.fovea_plan_run, plan.handle, ctypes.byref(args), ctypes.byref(ctypes.c_void_p())
    best = math.inf
    for _ in range(20):  # short bursts: a full queue would make the host wait
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls // 20):
            run(handle, where, error)
        best = min(best, (time.perf_counter() - begin) / (calls // 20))
    return 1e6 * best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--match", default="", help="only cases whose names hold this, and no graphs: for compute-sanitizer")
    args = parser.parse_args()
    if torch is None or not torch.cuda.is_available():
        print("gpu_forward_check: skipped, no PyTorch with a GPU")
        return 77
    torch.manual_seed(0)
    checker = Checker(fovea.Library(args.library), args.match)
    check_all(checker)
    check_infinities_all(checker)
    check_packed_all(checker)
    check_dropout_and_maxima(checker)
    if not args.match:
        check_graph(checker, "captured, causal (sm90 on Hopper)", causal=1)
        check_graph(checker, "captured, packed (sm90 on Hopper)", lengths=(700, 3, 0, 197), others=(100, 400, 390, 10), causal=1)
        check_graph(checker, "captured, dropout", dropout=fovea.Dropout(0.1, 7, 0))
        print(f"a run takes {host_microseconds(checker):.1f} us of the host, the call from Python included")
    print(f"{checker.num_wrong} wrong")
    return 1 if checker.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
