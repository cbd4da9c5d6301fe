#!/usr/bin/env python3
"""Fovea next to PyTorch on the CPU: one process, the same tensors, contenders taking turns.

usage: cpu_peers.py --library libfovea.so [--threads 1,all] [--dtypes f32,f16,bf16] [--rounds 9] [--seconds S] [--json FILE]

Six tables: attention against PyTorch's scaled_dot_product_attention and against the f32 2048^3 matrix product of
PyTorch's BLAS; forward and backward together, likewise, against its autograd; what masks cost against the share that they
leave visible; what dense masks and biases cost against plain attention, and probabilities as a tensor against attention, with PyTorch's of
the same; decode against the read bandwidth. A figure is
the median over rounds, and in each round every contender runs once, so a machine that slows down slows all of them.
GFLOP/s count 4 * batch * heads * visible pairs * head_dim (3.5 times that for forward and backward), with peers'
convention of half of all pairs for causal. Tensors are [batch, heads, seqlen, head_dim] in memory, which is PyTorch's own layout; Fovea gets strides. PyTorch allocates its
output, Fovea runs a plan (backward: the plan that the runtime remembers). Results are compared, because a wrong result has no speed.

--json is written anew after every case, so a run that is cut off keeps what it has. With --seconds a case takes fewer rounds, but
three at least, once it has used its share of the time left; cases for which none is left are named and not measured.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import fovea_ctypes as fovea  # noqa: E402

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# (batch, heads, seqlen, head_dim, causal): the shapes of the speed bars.
FORWARD_CASES = ((1, 16, 2048, 64, False), (1, 8, 2048, 128, False), (1, 8, 4096, 128, True))
MASK_SHAPE = (1, 8, 4096, 128)
MASK_WINDOW = 1024
DENSE_SHAPES = ((1, 4, 1024, 64), (1, 4, 1024, 128), (1, 4, 4096, 64), (1, 4, 4096, 128))
DENSE_VISIBLE = 0.7  # of a bool mask, at random: no tile is empty or full
PROBABILITY_SHAPES = DENSE_SHAPES[:2]
DECODE_SHAPE = (1, 8, 32768, 128)
DECODE_BYTES_TO_CYCLE = 1 << 30  # so much memory is walked before a byte is read again: beyond any cache
MATMUL_SIZE = 2048
PAUSE_S = 0.02  # between turns: another library's threads stop spinning
LEAST_ROUNDS = 3  # a median of fewer is no median


class Contest:
    """Contenders that take turns; `medians` are seconds. Stops after `rounds`, or when `setup.case_end` has passed."""

    def __init__(self, setup, rounds=None):
        self.setup, self.rounds, self.contenders = setup, rounds or setup.rounds, {}

    def add(self, name, call):
        self.contenders[name] = call

    def medians(self):
        times = {name: [] for name in self.contenders}
        for call in self.contenders.values():
            call()  # first calls make plans, threads and pages
        for done in range(self.rounds):
            if done >= LEAST_ROUNDS and time.monotonic() > self.setup.case_end:
                break
            for name, call in self.contenders.items():
                time.sleep(PAUSE_S)
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
        self.setup.rounds_of_case = len(next(iter(times.values())))
        return {name: statistics.median(taken) for name, taken in times.items()}


class FoveaCall:
    """A plan of these tensors ([batch, heads, seqlen, head_dim]) and its output."""

    def __init__(self, library, runtime, q, k, v, **fields):
        self.q, self.k, self.v = q, k, v
        self.out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
        tensors = {name: fovea.torch_tensor(getattr(self, name).transpose(1, 2)) for name in ("q", "k", "v", "out")}
        self.args = fovea.forward_args(**tensors, runtime=runtime, **fields)
        self.plan = library.plan(self.args)

    def __call__(self):
        self.plan.run(self.args)


class FoveaGradients:
    """A forward call and its backward."""

    def __init__(self, library, runtime, q, k, v, dout, **fields):
        self.library, self.inputs = library, (q, k, v, dout)
        batch, heads, seqlen, _ = q.shape
        self.lse = torch.full((batch, heads, seqlen), math.nan)
        self.forward = FoveaCall(library, runtime, q, k, v, lse=fovea.torch_tensor(self.lse), **fields)
        self.gradients = [torch.full_like(t, math.nan) for t in (q, k, v)]
        named = {"dout": dout, **dict(zip(("dq", "dk", "dv"), self.gradients))}
        self.args = fovea.backward_args(
            self.forward.args, **{name: fovea.torch_tensor(t.transpose(1, 2)) for name, t in named.items()})

    def __call__(self):
        self.forward()
        self.library.attention_backward(self.args)


def matmul_call():
    a, b = torch.randn(MATMUL_SIZE, MATMUL_SIZE), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    out = torch.empty(MATMUL_SIZE, MATMUL_SIZE)
    return lambda: torch.matmul(a, b, out=out)


def sdpa(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def largest_difference(a, b):
    return (a.float() - b.float()).abs().max().item()


def check_equal(ours, theirs, v):
    """Ten roundings to the dtype, and a random walk of one float32 rounding per key, are no accident yet."""
    difference = largest_difference(ours, theirs)
    walk = torch.finfo(torch.float32).eps * math.sqrt(v.shape[2])
    allowed = (10 * torch.finfo(v.dtype).eps + walk) * v.float().abs().max().item()
    if not difference <= allowed:
        sys.exit(f"cpu_peers: outputs differ by {difference:.2g}, more than {allowed:.2g}; expected equal results")
    return difference


def progress(text):
    print(f"cpu_peers: {text}", file=sys.stderr, flush=True)


# ---- The tables ----


def case_name(case):
    batch, heads, seqlen, head_dim, causal = case
    return f"{batch}x{heads}x{seqlen}x{head_dim}{' causal' if causal else ''}"


def measure_backward(setup, case, dtype):
    batch, heads, seqlen, head_dim, causal = case
    q, k, v, dout = (torch.randn(batch, heads, seqlen, head_dim, dtype=DTYPES[dtype]) for _ in range(4))
    ours = FoveaGradients(setup.library, setup.runtime, q, k, v, dout, causal=int(causal))
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]

    def autograd():
        return torch.autograd.grad(sdpa(*inputs, is_causal=causal), inputs, dout)

    contest = Contest(setup)
    contest.add("fovea", ours)
    contest.add("torch", autograd)
    contest.add("matmul", matmul_call())
    seconds = contest.medians()
    flops = 3.5 * 4 * batch * heads * seqlen * seqlen * head_dim * (0.5 if causal else 1)
    rates = {"fovea": flops / seconds["fovea"] / 1e9, "torch": flops / seconds["torch"] / 1e9,
             "matmul": 2 * MATMUL_SIZE**3 / seconds["matmul"] / 1e9}
    bar = (1.05, 0.75) if dtype == "f32" else (1.5 if setup.has_amx else 1.8, 0.0)
    to_torch, of_matmul = rates["fovea"] / rates["torch"], rates["fovea"] / rates["matmul"]
    return {"case": case_name(case), "dtype": dtype, "threads": setup.threads, "fovea_gflops": rates["fovea"],
            "torch_gflops": rates["torch"], "matmul_f32_gflops": rates["matmul"], "to_torch": to_torch,
            "of_matmul": of_matmul,
            "difference": max(check_equal(a, b, b) for a, b in zip(ours.gradients, autograd())),
            "bar": f"{bar[0]:.2f}x" + (f", {bar[1]:.0%}" if bar[1] else ""),
            "is_met": to_torch >= bar[0] and of_matmul >= bar[1]}


def measure_forward(setup, case, dtype):
    batch, heads, seqlen, head_dim, causal = case
    q, k, v = (torch.randn(batch, heads, seqlen, head_dim, dtype=DTYPES[dtype]) for _ in range(3))
    ours = FoveaCall(setup.library, setup.runtime, q, k, v, causal=int(causal))
    contest = Contest(setup)
    contest.add("fovea", ours)
    contest.add("torch", lambda: sdpa(q, k, v, is_causal=causal))
    contest.add("matmul", matmul_call())
    seconds = contest.medians()
    flops = 4 * batch * heads * seqlen * seqlen * head_dim * (0.5 if causal else 1)
    rates = {"fovea": flops / seconds["fovea"] / 1e9, "torch": flops / seconds["torch"] / 1e9,
             "matmul": 2 * MATMUL_SIZE**3 / seconds["matmul"] / 1e9}
    bar = (1.05, 0.85) if dtype == "f32" else (1.5 if setup.has_amx else 1.8, 0.0)
    to_torch, of_matmul = rates["fovea"] / rates["torch"], rates["fovea"] / rates["matmul"]
    return {"case": case_name(case), "dtype": dtype,
            "threads": setup.threads, "fovea_gflops": rates["fovea"], "torch_gflops": rates["torch"],
            "matmul_f32_gflops": rates["matmul"], "to_torch": to_torch, "of_matmul": of_matmul,
            "difference": check_equal(ours.out, sdpa(q, k, v, is_causal=causal), v),
            "bar": f"{bar[0]:.2f}x" + (f", {bar[1]:.0%}" if bar[1] else ""),
            "is_met": to_torch >= bar[0] and of_matmul >= bar[1]}


def visible_share(seqlen, window):
    """Of all pairs, what causal with `window` keys to the left leaves; None: causal alone."""
    rows = (min(i, window if window is not None else i) + 1 for i in range(seqlen))
    return sum(rows) / seqlen**2


def measure_masks(setup, dtype):
    batch, heads, seqlen, head_dim = MASK_SHAPE
    q, k, v = (torch.randn(MASK_SHAPE, dtype=DTYPES[dtype]) for _ in range(3))
    masks = {"causal": ({"causal": 1}, visible_share(seqlen, None)),
             f"causal window {MASK_WINDOW},0": (
                 {"causal": 1, "has_window_left": 1, "window_left": MASK_WINDOW}, visible_share(seqlen, MASK_WINDOW))}
    contest = Contest(setup)
    contest.add("full", FoveaCall(setup.library, setup.runtime, q, k, v))
    for name, (fields, _) in masks.items():
        contest.add(name, FoveaCall(setup.library, setup.runtime, q, k, v, **fields))
    seconds = contest.medians()
    rows = []
    for name, (_, share) in masks.items():
        time_share = seconds[name] / seconds["full"]
        rows.append({"case": f"{batch}x{heads}x{seqlen}x{head_dim} {name}", "dtype": dtype, "threads": setup.threads,
                     "full_ms": 1e3 * seconds["full"], "masked_ms": 1e3 * seconds[name], "visible_share": share,
                     "time_share": time_share, "surcharge": time_share / share - 1,
                     "is_met": time_share <= 1.15 * share})
    return rows


def measure_dense(setup, shape, dtype):
    """A bool mask and an additive bias in the dtype of q, [seqlen, seqlen], beside plain attention."""
    q, k, v = (torch.randn(shape, dtype=DTYPES[dtype]) for _ in range(3))
    mask = torch.rand(shape[2], shape[2]) < DENSE_VISIBLE
    bias = torch.randn(shape[2], shape[2]).to(DTYPES[dtype])
    dense = {"bool mask": ("mask", mask), "bias": ("bias", bias)}
    contest = Contest(setup)
    contest.add("plain", FoveaCall(setup.library, setup.runtime, q, k, v))
    contest.add("plain torch", lambda: sdpa(q, k, v))
    ours = {}
    for name, (field, tensor) in dense.items():
        ours[name] = FoveaCall(setup.library, setup.runtime, q, k, v, **{field: fovea.torch_tensor(tensor)})
        contest.add(name, ours[name])
        contest.add(f"{name} torch", lambda tensor=tensor: sdpa(q, k, v, attn_mask=tensor))
    seconds = contest.medians()
    rows = []
    for name, (_, tensor) in dense.items():
        to_plain = seconds[name] / seconds["plain"]
        rows.append({"case": "x".join(map(str, shape)) + f" {name}", "dtype": dtype, "threads": setup.threads,
                     "plain_ms": 1e3 * seconds["plain"], "ms": 1e3 * seconds[name], "to_plain": to_plain,
                     "torch_plain_ms": 1e3 * seconds["plain torch"], "torch_ms": 1e3 * seconds[f"{name} torch"],
                     "to_torch": seconds[f"{name} torch"] / seconds[name],
                     "difference": check_equal(ours[name].out, sdpa(q, k, v, attn_mask=tensor), v), "is_met": to_plain <= 1.3})
    return rows


def measure_probabilities(setup, shape, dtype):
    """PyTorch's are what its MultiheadAttention does for need_weights: a product and a softmax."""
    q, k, v = (torch.randn(shape, dtype=DTYPES[dtype]) for _ in range(3))
    attention = FoveaCall(setup.library, setup.runtime, q, k, v)
    p = torch.full((*shape[:3], shape[2]), math.nan, dtype=q.dtype)
    args = fovea.probabilities_args(attention.args, fovea.torch_tensor(p))

    def plain():
        return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(shape[3]), -1)

    contest = Contest(setup)
    contest.add("attention", attention)
    contest.add("fovea", lambda: setup.library.attention_probabilities(args))
    contest.add("torch", plain)
    seconds = contest.medians()
    to_attention = seconds["fovea"] / seconds["attention"]
    return {"case": "x".join(map(str, shape)), "dtype": dtype, "threads": setup.threads,
            "attention_ms": 1e3 * seconds["attention"], "ms": 1e3 * seconds["fovea"], "to_attention": to_attention,
            "torch_ms": 1e3 * seconds["torch"], "to_torch": seconds["torch"] / seconds["fovea"],
            "difference": check_equal(p, plain(), torch.ones(1, dtype=v.dtype).expand(shape)), "is_met": to_attention <= 3}


def measure_decode(setup, dtype):
    batch, heads, seqlen, head_dim = DECODE_SHAPE
    kv_bytes = 2 * batch * heads * seqlen * head_dim * torch.finfo(DTYPES[dtype]).bits // 8
    num_copies = max(2, math.ceil(DECODE_BYTES_TO_CYCLE / kv_bytes))
    q = torch.randn(batch, heads, 1, head_dim, dtype=DTYPES[dtype])
    # Values do not matter for time, freshness of the memory does: the copies are random numbers of a small block, repeated.
    block = torch.randn(batch, heads, 256, head_dim, dtype=DTYPES[dtype])
    pairs = [[block.repeat(1, 1, seqlen // 256, 1) for _ in range(2)] for _ in range(num_copies)]
    calls = [FoveaCall(setup.library, setup.runtime, q, k, v) for k, v in pairs]

    def taking_turns(act):
        state = {"next": 0}

        def call():
            act(state["next"])
            state["next"] = (state["next"] + 1) % num_copies
        return call

    def read(i):  # 64-bit sums: the widest plain read that PyTorch has
        for t in pairs[i]:
            t.view(torch.int64).sum()

    contest = Contest(setup, max(setup.rounds, num_copies))
    contest.add("fovea", taking_turns(lambda i: calls[i]()))
    contest.add("torch", taking_turns(lambda i: sdpa(q, *pairs[i])))
    contest.add("read", taking_turns(read))
    seconds = contest.medians()
    rates = {name: kv_bytes / taken / 1e9 for name, taken in seconds.items()}
    of_read = rates["fovea"] / rates["read"]
    return {"case": f"{batch}x{heads} heads, 1 query, {seqlen} keys, head_dim {head_dim}", "dtype": dtype,
            "threads": setup.threads, "fovea_gbs": rates["fovea"], "torch_gbs": rates["torch"],
            "read_gbs": rates["read"], "to_torch": rates["fovea"] / rates["torch"], "of_read": of_read,
            "difference": check_equal(calls[0].out, sdpa(q, *pairs[0]), pairs[0][1]), "is_met": of_read >= 0.8}


# ---- Report ----

RATES = (
    ("case", "case", "{}"), ("dtype", "dtype", "{}"), ("threads", "threads", "{}"),
    ("Fovea GFLOP/s", "fovea_gflops", "{:.0f}"), ("PyTorch GFLOP/s", "torch_gflops", "{:.0f}"),
    ("ratio", "to_torch", "{:.2f}x"), ("f32 product GFLOP/s", "matmul_f32_gflops", "{:.0f}"),
    ("of the product", "of_matmul", "{:.0%}"), ("largest difference", "difference", "{:.1e}"), ("bar", "bar", "{}"),
    ("met", "is_met", "{}"))
TABLES = {
    "forward": ("Attention forward", RATES),
    "backward": ("Attention forward and backward", RATES),
    "masks": ("What masks cost", (
        ("case", "case", "{}"), ("dtype", "dtype", "{}"), ("threads", "threads", "{}"), ("full ms", "full_ms", "{:.1f}"),
        ("masked ms", "masked_ms", "{:.1f}"), ("visible share", "visible_share", "{:.1%}"),
        ("time share", "time_share", "{:.1%}"), ("surcharge (bar 15%)", "surcharge", "{:+.1%}"), ("met", "is_met", "{}"))),
    "dense": ("What dense masks and biases cost", (
        ("case", "case", "{}"), ("dtype", "dtype", "{}"), ("threads", "threads", "{}"), ("plain ms", "plain_ms", "{:.1f}"), ("ms", "ms", "{:.1f}"),
        ("of plain (bar 1.3)", "to_plain", "{:.2f}x"), ("PyTorch plain ms", "torch_plain_ms", "{:.1f}"), ("PyTorch ms", "torch_ms", "{:.1f}"),
        ("ratio", "to_torch", "{:.2f}x"), ("largest difference", "difference", "{:.1e}"), ("met", "is_met", "{}"))),
    "probabilities": ("Probabilities as a tensor", (
        ("case", "case", "{}"), ("dtype", "dtype", "{}"), ("threads", "threads", "{}"), ("attention ms", "attention_ms", "{:.1f}"), ("ms", "ms", "{:.1f}"),
        ("of attention (bar 3)", "to_attention", "{:.2f}x"), ("PyTorch ms", "torch_ms", "{:.1f}"), ("ratio", "to_torch", "{:.2f}x"),
        ("largest difference", "difference", "{:.1e}"), ("met", "is_met", "{}"))),
    "decode": ("Decode", (
        ("case", "case", "{}"), ("dtype", "dtype", "{}"), ("threads", "threads", "{}"), ("Fovea GB/s", "fovea_gbs", "{:.1f}"),
        ("PyTorch GB/s", "torch_gbs", "{:.1f}"), ("ratio", "to_torch", "{:.2f}x"), ("read GB/s", "read_gbs", "{:.1f}"),
        ("of read (bar 80%)", "of_read", "{:.0%}"), ("largest difference", "difference", "{:.1e}"), ("met", "is_met", "{}"))),
}


def markdown(table, rows):
    title, columns = TABLES[table]
    lines = [f"## {title}", "", "| " + " | ".join(head for head, _, _ in columns) + " |",
             "|" + "---|" * len(columns)]
    for row in rows:
        cells = (("yes" if row[key] else "no") if key == "is_met" else shown.format(row[key])
                 for _, key, shown in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine(library):
    info = pathlib.Path("/proc/cpuinfo").read_text()
    fields = dict(map(str.strip, line.split(":", 1)) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    described = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {"processor": fields.get("model name", "unknown"), "cores": len(os.sched_getaffinity(0)),
            "has_amx": "amx_bf16" in fields.get("flags", ""), "commit": described.stdout.strip(),
            "fovea": library.version(), "torch": torch.__version__}


class Setup:
    """What every measurement of one thread count shares."""

    def __init__(self, library, threads, rounds, has_amx):
        torch.set_num_threads(threads)
        self.library, self.runtime = library, library.runtime(threads)
        self.threads, self.rounds, self.has_amx = threads, rounds, has_amx
        self.case_end, self.rounds_of_case = math.inf, 0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--threads", default="1,all", help="thread counts, comma separated (default 1,all)")
    parser.add_argument("--dtypes", default="f32,f16,bf16")
    parser.add_argument("--tables", default="forward,backward,masks,dense,probabilities,decode")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for the whole run (default: as long as it takes)")
    parser.add_argument("--json", type=pathlib.Path, help="keep all figures in this file")
    return parser.parse_args()


def cases_of(tables, dtypes):
    """(table, what, measure(setup)) of every case; measure gives a list of rows."""
    for dtype in dtypes:
        for table, measure in (("forward", measure_forward), ("backward", measure_backward)):
            for case in FORWARD_CASES if table in tables else ():
                yield table, f"{dtype}, {table}, {case_name(case)}", lambda s, m=measure, c=case, d=dtype: [m(s, c, d)]
        if "masks" in tables:
            yield "masks", f"{dtype}, masks", lambda s, d=dtype: measure_masks(s, d)
        for shape in DENSE_SHAPES if "dense" in tables else ():
            yield "dense", f"{dtype}, dense, {shape}", lambda s, x=shape, d=dtype: measure_dense(s, x, d)
        for shape in PROBABILITY_SHAPES if "probabilities" in tables else ():
            yield "probabilities", f"{dtype}, probabilities, {shape}", lambda s, x=shape, d=dtype: [measure_probabilities(s, x, d)]
        if "decode" in tables:
            yield "decode", f"{dtype}, decode", lambda s, d=dtype: [measure_decode(s, d)]


def keep(path, results):
    """Written aside and renamed: a run that is killed leaves the figures before it or with it, never half."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(aside, path)


def measure_all(args, library, here, results):
    counts = sorted({here["cores"] if word == "all" else int(word) for word in args.threads.split(",")})
    cases = list(cases_of(args.tables.split(","), args.dtypes.split(",")))
    left = len(counts) * len(cases)
    end = time.monotonic() + args.seconds
    for threads in counts:
        setup = Setup(library, threads, args.rounds, here["has_amx"])
        for table, what, measure in cases:
            now = time.monotonic()
            if now >= end:
                results["not_measured"].append(f"{threads} threads, {what}")
                continue
            setup.case_end = now + (end - now) / left
            left -= 1
            progress(f"{threads} threads, {what}")
            results[table] += [{**row, "rounds": setup.rounds_of_case} for row in measure(setup)]
            if args.json:
                keep(args.json, results)


def main():
    args = parse_args()
    torch.manual_seed(0)
    library = fovea.Library(args.library)
    here = machine(library)
    tables = args.tables.split(",")
    results = {"machine": here, "rounds": args.rounds, "not_measured": [], **{table: [] for table in tables}}
    measure_all(args, library, here, results)
    print("Machine: {processor}, {cores} cores{amx}. Commit {commit}, PyTorch {torch}. Medians of {rounds} rounds.".format(
        **here, amx=" with AMX" if here["has_amx"] else ", no AMX", rounds=args.rounds))
    for table in tables:
        print(f"\n{markdown(table, results[table])}")
    for what in results["not_measured"]:
        print(f"not measured, no time left: {what}")
    if args.json:
        keep(args.json, results)
    measured = [row for table in tables for row in results[table]]
    print(f"\n{sum(row['is_met'] for row in measured)} of {len(measured)} bars met")


if __name__ == "__main__":
    main()
