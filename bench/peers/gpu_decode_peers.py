#!/usr/bin/env python3
"""Decoding over a KV cache next to its peers on one GPU: times, and shares of what a kernel that only reads makes of as many bytes in the same run.

usage: gpu_decode_peers.py --library libfovea.so [--before libother.so] [--match REGEX] [--seconds 300] [--rounds 9] [--json FILE]

8 key heads of head_dim 128, bf16, 1 to 128 sequences of 1,024 to 131,072 keys; 8, 16, 32 and 64 rows of a key head (1, 2, 4 and 8 queries of a group of 8 heads) and 1 row
(of one head); contiguous and in shuffled pages of 16; and, over pages, one long sequence among short ones beside as many of equal length. Contenders are Fovea through the C ABI and FlashAttention-3's
flash_attn_with_kvcache where the wheel fa3-fwd has it, with the scheduler's metadata made before, as serving engines do. Clocks, flushes and rounds
are gpu_peers.py's. Outputs are compared with a formula in f64 first; a case in which any contender is wrong has no row. Ratios are of one row.
"""

import argparse
import ctypes
import math
import pathlib
import re
import sys
import time

import torch

from gpu_peers import Clock, fovea, keep, started
from gpu_reader import reader_of

try:
    from fa3_fwd_interface import flash_attn_with_kvcache as fa3_decode
    from fa3_fwd_interface import get_scheduler_metadata as fa3_metadata
except ImportError:
    fa3_decode = None

BATCHES, KEYS = (1, 8, 32, 128), (1024, 4096, 8192, 32768, 131072)
ROWS, PAGE_SIZES = (8, 16, 32, 64, 1), (0, 16)
HEADS_KV, HEAD_DIM = 8, 128
MOST_BYTES = 8 << 30  # of keys and values
RAGGED = {"one of 131,072 keys among 127 of 1,024": [131072] + [1024] * 127, "128 of 2,040, as many keys": [2040] * 128}
DIFFERENCE = 1e-2  # of the whole: outputs and probabilities are rounded to 16 bits


class Problem:
    """Queries and a cache; every sequence is full but for one key, so that lengths are read. Queries see no keys behind their own, or all."""

    def __init__(self, label, lengths, rows, page_size, group=None, head_dim=HEAD_DIM, sees_all_keys=False):
        self.lengths, self.page_size, self.head_dim, self.sees_all_keys = lengths, page_size, head_dim, sees_all_keys
        self.batch, self.keys = len(lengths), max(lengths)
        self.group = group or (1 if rows == 1 else 8)
        self.seqlen_q = rows // self.group
        self.label = f"{label}, {rows} rows{f', pages of {page_size}' if page_size else ''}"

    def bytes(self):
        """Of keys and values that a call reads."""
        return 2 * 2 * (sum(self.lengths) - self.batch) * HEADS_KV * self.head_dim

    def make(self):
        normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        self.q = normal(self.batch, self.seqlen_q, self.group * HEADS_KV, self.head_dim)
        self.page_table = self.pages_of_all() if self.page_size else None
        shape = (self.batch, self.keys) if self.page_table is None else (int(self.page_table.max()) + 1, self.page_size)
        self.k, self.v = (normal(*shape, HEADS_KV, self.head_dim) for _ in range(2))
        self.seqlens = torch.tensor(self.lengths, device="cuda", dtype=torch.int32) - 1
        self.new = None  # keys and values of a token that a call appends

    def pages_of_all(self):
        """[batch, pages of the longest]: shuffled; what lies behind a sequence names page 0."""
        counts = torch.tensor([-(-length // self.page_size) for length in self.lengths])
        table = torch.zeros(self.batch, int(counts.max()), dtype=torch.int32)
        table[torch.arange(table.shape[1]) < counts[:, None]] = torch.randperm(int(counts.sum())).int()
        return table.to("cuda")

    def first_sequence(self):
        """Keys and values [keys, heads, head_dim] of sequence 0."""
        length = self.lengths[0] - 1
        if self.page_table is None:
            return self.k[0, :length], self.v[0, :length]
        pages = self.page_table[0].long()
        return tuple(t[pages].flatten(0, 1)[:length] for t in (self.k, self.v))

    def expected(self):
        """Of sequence 0, in f64, a key head at a time."""
        keys, values = self.first_sequence()
        if self.new is not None:
            keys, values = (torch.cat((old, new[0])) for old, new in zip((keys, values), self.new))
        length = keys.shape[0]
        hidden = torch.ones(self.seqlen_q, length, device="cuda", dtype=torch.bool).triu(length - self.seqlen_q + 1)
        if self.sees_all_keys:
            hidden = torch.zeros_like(hidden)
        out = torch.empty(self.seqlen_q, self.group * HEADS_KV, self.head_dim, device="cuda", dtype=torch.float64)
        for head in range(HEADS_KV):
            heads = slice(head * self.group, (head + 1) * self.group)
            scores = torch.einsum("qhd,kd->hqk", self.q[0, :, heads].double(), keys[:, head].double()) / math.sqrt(self.head_dim)
            out[:, heads] = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values[:, head].double())
        return out


class FoveaDecode:
    def __init__(self, library, problem, quant=None, **fields):
        self.library = library
        self.out = torch.full_like(problem.q, math.nan)
        forward = fovea.forward_args(**{name: fovea.torch_tensor(t) for name, t in (
            ("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", self.out))})
        forward.quant = None if quant is None else quant.encode()
        cache = {"seqlens": problem.seqlens} | ({} if problem.page_table is None else {"page_table": problem.page_table})
        cache |= {} if problem.new is None else dict(zip(("append_k", "append_v"), problem.new))
        self.kept = forward, {name: fovea.torch_tensor(t) for name, t in cache.items()}
        self.args = fovea.sized(fovea.DecodeArgs, forward=ctypes.pointer(forward), sees_all_keys=int(problem.sees_all_keys),
                                **{name: ctypes.pointer(t) for name, t in self.kept[1].items()}, **fields)
        size = ctypes.c_size_t()
        library.call(library.c.fovea_decode_workspace_bytes, ctypes.byref(self.args), problem.keys, ctypes.byref(size))
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        forward.workspace, forward.workspace_bytes = self.workspace.data_ptr(), size.value

    def __call__(self):
        self.kept[0].stream = torch.cuda.current_stream().cuda_stream
        self.library.attention_decode(self.args)
        return self.out


def contenders_of(problem, libraries):
    """{name: call that gives out}, and the reasons of those that cannot."""
    made = {name: lambda library=library: FoveaDecode(library, problem) for name, library in libraries.items()}
    if fa3_decode is not None:
        made["fa3"] = lambda: fa3_call(problem)
    return started(made)


def fa3_call(problem):
    metadata = fa3_metadata(problem.batch, problem.seqlen_q, problem.keys, problem.group * HEADS_KV, HEADS_KV, problem.head_dim, problem.seqlens,
                            qkv_dtype=problem.q.dtype, page_size=problem.page_size or None, causal=True)
    return lambda: fa3_decode(problem.q, problem.k, problem.v, cache_seqlens=problem.seqlens, page_table=problem.page_table, causal=True,
                              scheduler_metadata=metadata)


def measure(problem, libraries, clock, rounds):
    problem.make()
    calls, why_not = contenders_of(problem, libraries)
    expected = problem.expected()
    row = {"case": problem.label, "bytes": problem.bytes(), "us": {}, "of_read": {}, "to": {}, "measured": {}, "difference": {}, "why_not": why_not}
    for name, call in calls.items():
        out = call()
        out = out[0] if isinstance(out, (tuple, list)) else out
        row["difference"][name] = ((out[0].float() - expected).norm() / expected.norm()).item()
        if not row["difference"][name] <= DIFFERENCE:
            raise AssertionError(f"{problem.label}: {name} differs by {row['difference'][name]:.2g}; expected at most {DIFFERENCE}")
    source = torch.empty(problem.bytes() // 2, dtype=torch.uint8, device="cuda")  # read and written: as many bytes
    target = torch.empty_like(source)
    bounds = {"copy": lambda: target.copy_(source), "read": reader_of(problem.bytes())}
    figures = clock.figures(calls | bounds, rounds, as_calls=tuple(bounds))
    copy_ms, read_ms = (figures.pop(name).ms for name in bounds)
    row["copy_tbs"], row["read_tbs"] = (problem.bytes() / ms / 1e9 for ms in (copy_ms, read_ms))
    for name, figure in figures.items():
        row["us"][name], row["of_read"][name] = 1e3 * figure.ms, read_ms / figure.ms
        row["measured"][name] = "replayed" if figure.is_replayed else "called"
    row["to"] = {name: us / row["us"]["fovea"] for name, us in row["us"].items() if name != "fovea" and "fovea" in row["us"]}
    return row


def every_problem():
    for rows in ROWS:
        for page_size in PAGE_SIZES:
            for batch in BATCHES:
                for keys in KEYS:
                    yield Problem(f"{batch} x {keys} keys", [keys] * batch, rows, page_size)
        for label, lengths in RAGGED.items():
            yield Problem(label, lengths, rows, PAGE_SIZES[-1])


def problems(match):
    for problem in every_problem():
        if problem.bytes() <= MOST_BYTES and re.search(match, problem.label):
            yield problem


def markdown(rows):
    names = [name for name in ("fovea", "before", "fa3") if any(name in row["us"] for row in rows)]
    others = names[1:]
    lines = ["| case | MB | copy TB/s | read TB/s | " + " | ".join(f"{name} us | of the read" for name in names) + " | " +
             "".join(f"to {name} | " for name in others) + "difference |",
             "|---" * (2 * len(names) + len(others) + 5) + "|"]
    for row in rows:
        cells = [cell for name in names for cell in (
            (f"{row['us'][name]:.1f}", f"{row['of_read'][name]:.0%}") if name in row["us"] else ("-", "-"))]
        difference = row["difference"].get("fovea")
        cells += [f"{row['to'][name]:.2f}" if name in row["to"] else "-" for name in others]
        lines.append(f"| {row['case']} | {row['bytes'] / 1e6:.0f} | {row['copy_tbs']:.2f} | {row['read_tbs']:.2f} | " + " | ".join(cells) +
                     f" | {'-' if difference is None else f'{difference:.1e}'} |")
    reasons = {(name, why) for row in rows for name, why in row["why_not"].items()}
    return "\n".join(lines + [""] + [f"{name} did not run: {why}" for name, why in sorted(reasons)])


def parse_args(doc):
    """Options of the program whose docstring this is: of all that measure decoding."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--before", help="another libfovea.so, as one more contender")
    parser.add_argument("--match", default="", help="cases whose names contain this regular expression")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=300, help="no case starts later than this")
    parser.add_argument("--json", type=pathlib.Path, help="keep all figures in this file, case by case")
    return parser.parse_args()


def libraries_of(args):
    return {"fovea": fovea.Library(args.library)} | ({"before": fovea.Library(args.before)} if args.before else {})


def main():
    args = parse_args(__doc__)
    if not torch.cuda.is_available():
        print("gpu_decode_peers: skipped, PyTorch has no GPU")
        return 77
    begin, clock = time.monotonic(), Clock()
    torch.manual_seed(0)
    libraries = libraries_of(args)
    result = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rounds": args.rounds, "rows": [], "wrong": []}
    for problem in problems(args.match):
        if time.monotonic() - begin > args.seconds:
            print(f"gpu_decode_peers: {args.seconds:.0f} s are over; the rest is cut off", file=sys.stderr)
            break
        try:
            result["rows"].append(measure(problem, libraries, clock, args.rounds))
            print(f"gpu_decode_peers: {problem.label}: {result['rows'][-1]['us']} us, of a read {result['rows'][-1]['of_read']}", file=sys.stderr, flush=True)
        except AssertionError as error:
            result["wrong"].append(str(error))
        if args.json:
            keep(args.json, result)
    print(f"{result['gpu']}, PyTorch {result['torch']}; medians of {args.rounds}.\n\n{markdown(result['rows'])}")
    for wrong in result["wrong"]:
        print(f"WRONG  {wrong}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
