#!/usr/bin/env python3
"""Attention forward on a GPU through the C ABI, against the plain formula in float64: features alone and together, twice each.

usage: gpu_forward_check.py --library libfovea.so [--match causal]        exit code 77 where there is no PyTorch with a GPU

Outputs and workspaces start poisoned, both runs must give the same bits, and each line names the kernel that ran.
"""

import argparse
import ctypes
import math
import sys
import time

import fovea_ctypes as fovea

try:
    import torch
except ImportError:
    torch = None

RELATIVE_OUT, ABSOLUTE_LSE = 6e-3, 1e-3  # of the whole output: P and out are rounded to 8 bits; of lse, for scores up to 1


def reference(q, k, v, scale, score=None, mask=None, sinks=None):
    """out [batch, seqlen_q, heads, head_dim_v] and lse; V's infinities and NaN are taken as hidden."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * scale
    s = score(s) if score else s
    s = s.masked_fill(~mask, -math.inf) if mask is not None else s
    top = s.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(1, -1, 1, 1) - top)
    v = torch.where(torch.isfinite(v), v, torch.zeros_like(v))
    out = torch.where(total > 0, p @ v / total, torch.zeros_like(total))
    return out.transpose(1, 2), (top + torch.log(total)).squeeze(-1)


class Checker:
    def __init__(self, library, match):
        self.library, self.match, self.num_wrong = library, match, 0

    def run(self, q, k, v, **fields):
        """Poisoned out and lse, filled by a plan in a poisoned workspace; and what explain says of it."""
        out = torch.full((*q.shape[:3], v.shape[3]), math.nan, device="cuda", dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device="cuda")
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
        expected, expected_lse = reference(q, k, v, scale if scale is not None else 1 / math.sqrt(head_dim), score, mask, sinks)
        error = ((out.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        is_finite = torch.isfinite(expected_lse)
        lse_error = (lse.double() - expected_lse)[is_finite].abs().max().item() if is_finite.any() else 0.0
        greatest = expected_lse[is_finite].abs().max().item() if is_finite.any() else 0.0
        has_same_bits = torch.equal(out.view(torch.int16), again.view(torch.int16)) and torch.equal(lse, lse_again)
        is_right = (error < RELATIVE_OUT and lse_error < ABSOLUTE_LSE * max(1, greatest) and has_same_bits
                    and bool((torch.isfinite(lse) == is_finite).all()))
        self.num_wrong += not is_right
        kernel = next(line for line in explained.splitlines() if line.startswith("kernel")).split()[1]
        print(f"{'right' if is_right else 'WRONG'}  {name:28} out {error:.1e}  lse {lse_error:.1e}"
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


def check_graph(checker, name, dtype, **fields):
    """A captured run, replayed on other contents of the same tensors, gives what a run on them gives."""
    q, k, v = (torch.randn(2, 400, 4, 128, device="cuda").to(dtype) for _ in range(3))
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
    if not args.match:
        check_graph(checker, "captured, causal (sm90 on Hopper)", torch.bfloat16, causal=1)
        check_graph(checker, "captured, dropout (sm80)", torch.bfloat16, dropout=fovea.Dropout(0.1, 7, 0))
        print(f"a run takes {host_microseconds(checker):.1f} us of the host, the call from Python included")
    print(f"{checker.num_wrong} wrong")
    return 1 if checker.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
