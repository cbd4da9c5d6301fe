#!/usr/bin/env python3
"""Multi-head latent attention over a cache next to FlashMLA on one GPU: bytes of keys a second and products a second.

usage: gpu_latent_peers.py --library libfovea.so [--before libother.so] [--match REGEX] [--seconds 300] [--rounds 9] [--json FILE]

One key head of 576 columns whose first 512 are the values, bf16, in shuffled pages of 64; 16 and 128 query heads of one query, 1 to 128 sequences of
4,096 to 32,768 keys; a few contiguous, of two queries, of 64 heads and of pages of 16 beside. Contenders are Fovea through the C ABI and
flash_mla_with_kvcache where the package flash_mla is installed, its metadata made before, as serving engines do. Clocks, flushes and rounds are
gpu_peers.py's. Bounds are measured in the same run: a sum of as many bytes, which only reads, and an 8192^3 bf16 product. Keys count once, 1,152 bytes
each, whatever a kernel reads again; products are 2 * rows * keys * (576 + 512). Outputs are compared with a formula in f32 first; a case in which any
contender is wrong has no row.
"""

import ctypes
import math
import re
import sys
import time

import torch

from gpu_decode_peers import libraries_of, parse_args
from gpu_peers import Clock, fovea, keep, started

try:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata
except ImportError:
    flash_mla_with_kvcache = None

KEY_WIDTH, VALUE_WIDTH = 576, 512
BATCHES, KEYS = (1, 8, 64, 128), (4096, 8192, 32768)
MOST_BYTES = 8 << 30  # of keys
PRODUCT_SIZE = 8192
DIFFERENCE = 1e-2  # of the whole: outputs and probabilities are rounded to 16 bits


class Problem:
    """Queries and a cache; every sequence is full but for one key, so that lengths are read."""

    def __init__(self, batch, keys, heads, seqlen_q=1, page_size=64):
        self.batch, self.keys, self.heads, self.seqlen_q, self.page_size = batch, keys, heads, seqlen_q, page_size
        self.label = f"{batch} x {keys} keys, {heads} heads, {seqlen_q} queries, " + (f"pages of {page_size}" if page_size else "contiguous")

    def bytes(self):
        return 2 * self.batch * (self.keys - 1) * KEY_WIDTH

    def flops(self):
        return 2 * self.batch * self.heads * self.seqlen_q * (self.keys - 1) * (KEY_WIDTH + VALUE_WIDTH)

    def make(self):
        normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        self.q = normal(self.batch, self.seqlen_q, self.heads, KEY_WIDTH)
        self.page_table = None
        shape = (self.batch, self.keys)
        if self.page_size:
            pages = self.batch * self.keys // self.page_size
            self.page_table = torch.randperm(pages, device="cuda").int().view(self.batch, -1)
            shape = (pages, self.page_size)
        self.k = normal(*shape, 1, KEY_WIDTH)
        self.v = self.k[..., :VALUE_WIDTH]
        self.seqlens = torch.full((self.batch,), self.keys - 1, device="cuda", dtype=torch.int32)

    def expected(self):
        """Of the last sequence, in f32."""
        keys = self.k[-1] if self.page_table is None else self.k[self.page_table[-1].long()].flatten(0, 1)
        keys = keys[:-1, 0].float()
        length = keys.shape[0]
        hidden = torch.ones(self.seqlen_q, length, device="cuda", dtype=torch.bool).triu(length - self.seqlen_q + 1)
        scores = torch.einsum("qhd,kd->hqk", self.q[-1].float(), keys) / math.sqrt(KEY_WIDTH)
        return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), keys[:, :VALUE_WIDTH])


class FoveaLatent:
    def __init__(self, library, problem):
        self.library = library
        self.out = torch.full((*problem.q.shape[:-1], VALUE_WIDTH), math.nan, dtype=problem.q.dtype, device="cuda")
        forward = fovea.forward_args(**{name: fovea.torch_tensor(t) for name, t in (
            ("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", self.out))})
        cache = {"seqlens": problem.seqlens} | ({} if problem.page_table is None else {"page_table": problem.page_table})
        self.kept = forward, {name: fovea.torch_tensor(t) for name, t in cache.items()}
        self.args = fovea.sized(fovea.DecodeArgs, forward=ctypes.pointer(forward),
                                **{name: ctypes.pointer(t) for name, t in self.kept[1].items()})
        size = ctypes.c_size_t()
        library.call(library.c.fovea_decode_workspace_bytes, ctypes.byref(self.args), problem.keys, ctypes.byref(size))
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        forward.workspace, forward.workspace_bytes = self.workspace.data_ptr(), size.value

    def __call__(self):
        self.kept[0].stream = torch.cuda.current_stream().cuda_stream
        self.library.attention_decode(self.args)
        return self.out


def flash_mla_call(problem):
    if problem.page_size != 64:
        raise RuntimeError(f"pages of {problem.page_size}; it has pages of 64")
    metadata, num_splits = get_mla_metadata(problem.seqlens, problem.seqlen_q * problem.heads, 1)
    return lambda: flash_mla_with_kvcache(problem.q, problem.k, problem.page_table, problem.seqlens, VALUE_WIDTH, metadata, num_splits,
                                          softmax_scale=1 / math.sqrt(KEY_WIDTH), causal=True)[0]


def contenders_of(problem, libraries):
    """{name: call that gives out}, and the reasons of those that cannot."""
    made = {name: lambda library=library: FoveaLatent(library, problem) for name, library in libraries.items()}
    if flash_mla_with_kvcache is not None:
        made["flash_mla"] = lambda: flash_mla_call(problem)
    return started(made)


def measure(problem, libraries, clock, rounds, product_tflops):
    problem.make()
    calls, why_not = contenders_of(problem, libraries)
    expected = problem.expected()
    row = {"case": problem.label, "bytes": problem.bytes(), "us": {}, "tbs": {}, "of_read": {}, "tflops": {}, "of_product": {}, "measured": {},
           "difference": {}, "why_not": why_not}
    for name, call in calls.items():
        row["difference"][name] = ((call()[-1].float() - expected).norm() / expected.norm()).item()
        if not row["difference"][name] <= DIFFERENCE:
            raise AssertionError(f"{problem.label}: {name} differs by {row['difference'][name]:.2g}; expected at most {DIFFERENCE}")
    numbers = torch.zeros(problem.bytes() // 4, device="cuda")
    figures = clock.figures(calls | {"read": lambda: numbers.sum()}, rounds, as_calls=("read",))
    read_ms = figures.pop("read").ms
    row["read_tbs"] = problem.bytes() / read_ms / 1e9
    for name, figure in figures.items():
        row["us"][name], row["tbs"][name] = 1e3 * figure.ms, problem.bytes() / figure.ms / 1e9
        row["tflops"][name], row["of_read"][name] = problem.flops() / figure.ms / 1e9, read_ms / figure.ms
        row["of_product"][name] = row["tflops"][name] / product_tflops
        row["measured"][name] = "replayed" if figure.is_replayed else "called"
    return row


def product_rate(clock, rounds):
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / clock.figures({"product": lambda: a @ b}, rounds, as_calls=("product",))["product"].ms / 1e9


def problems(match):
    grid = [Problem(batch, keys, heads) for heads in (16, 128) for batch in BATCHES for keys in KEYS]
    others = [Problem(batch, 8192, heads, seqlen_q, page_size) for batch in (8, 128)
              for heads, seqlen_q, page_size in ((16, 1, 0), (16, 1, 16), (128, 1, 0), (64, 1, 64), (16, 2, 64), (128, 2, 64))]
    for problem in grid + others:
        if problem.bytes() <= MOST_BYTES and re.search(match, problem.label):
            yield problem


def markdown(rows):
    names = [name for name in ("fovea", "before", "flash_mla") if any(name in row["us"] for row in rows)]
    lines = ["| case | MB | read TB/s | " + " | ".join(f"{name} us | TB/s | of the read | TFLOP/s | of the product" for name in names) + " | difference |",
             "|---" * (5 * len(names) + 4) + "|"]
    for row in rows:
        cells = []
        for name in names:
            cells += [f"{row['us'][name]:.1f}", f"{row['tbs'][name]:.2f}", f"{row['of_read'][name]:.0%}", f"{row['tflops'][name]:.0f}",
                      f"{row['of_product'][name]:.0%}"] if name in row["us"] else ["-"] * 5
        difference = row["difference"].get("fovea")
        lines.append(f"| {row['case']} | {row['bytes'] / 1e6:.0f} | {row['read_tbs']:.2f} | " + " | ".join(cells) +
                     f" | {'-' if difference is None else f'{difference:.1e}'} |")
    reasons = {(name, why) for row in rows for name, why in row["why_not"].items()}
    return "\n".join(lines + [""] + [f"{name} did not run: {why}" for name, why in sorted(reasons)])


def main():
    args = parse_args(__doc__)
    if not torch.cuda.is_available():
        print("gpu_latent_peers: skipped, PyTorch has no GPU")
        return 77
    begin, clock = time.monotonic(), Clock()
    torch.manual_seed(0)
    libraries = libraries_of(args)
    product = product_rate(clock, args.rounds)
    result = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rounds": args.rounds, "product_tflops": product, "rows": [],
              "wrong": []}
    for problem in problems(args.match):
        if time.monotonic() - begin > args.seconds:
            print(f"gpu_latent_peers: {args.seconds:.0f} s are over; the rest is cut off", file=sys.stderr)
            break
        try:
            row = measure(problem, libraries, clock, args.rounds, product)
            result["rows"].append(row)
            print(f"gpu_latent_peers: {problem.label}: {row['us']} us, of the read {row['of_read']}, of the product {row['of_product']}",
                  file=sys.stderr, flush=True)
        except AssertionError as error:
            result["wrong"].append(str(error))
        if args.json:
            keep(args.json, result)
    print(f"{result['gpu']}, PyTorch {result['torch']}; medians of {args.rounds}; product {product:.0f} TFLOP/s.\n\n{markdown(result['rows'])}")
    for wrong in result["wrong"]:
        print(f"WRONG  {wrong}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
