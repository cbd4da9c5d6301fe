#!/usr/bin/env python3
"""Decoding over caches of codes beside a cache of bf16 on one GPU: times, ratios, errors.

usage: gpu_coded_peers.py --library libfovea.so [--before libother.so] [--match REGEX] [--seconds 300] [--rounds 9] [--json FILE]

gpu_decode_peers.py's problems of 8 to 128 sequences, and one, from 4,096 keys on, contiguous and in shuffled pages of 16, head_dim 128 and 64, causal or without a mask; and chunks of prompts of 512 and 4,096 queries. Codes and a scale of each row and head are
made by PyTorch; scales of a head lie side by side, as fovea.kv_cache has them, or rows' do ("scales by rows"). Contenders are Fovea over bf16, int8 and e4m3, of chunks by recipes of eight bits too, the other library over codes, and FlashAttention-3 over bf16 where the wheel fa3-fwd has it. Outputs are compared with
a formula in f64 over the numbers that codes stand for; what is reported as an error is against the numbers before they were rounded, too. Clocks, flushes and rounds are gpu_peers.py's; a bound is what a kernel makes that only reads as many bytes as codes are.
"""

import ctypes
import json
import math
import re
import sys
import time
from dataclasses import dataclass

import torch

from gpu_decode_peers import HEAD_DIM, HEADS_KV, FoveaDecode, Problem, fa3_call, fa3_decode, libraries_of, parse_args
from gpu_peers import Clock, fovea, keep
from gpu_reader import reader_of

CODES = {"int8": (torch.int8, 127.0), "e4m3": (torch.float8_e4m3fn, 448.0)}
DIFFERENCE = 4e-3  # of the whole, of the kernel from its codes: outputs are rounded to bf16
FEWEST_OF_A_CHUNK = 64
RECIPES = {"fast": 0.06, "accurate": 0.02}  # of chunks of prompts, and how far from its codes such an output may be


@dataclass(frozen=True)
class Case:
    batch: int
    keys: int
    rows: int = 8
    page_size: int = 0
    head_dim: int = HEAD_DIM
    sees_all_keys: bool = False
    group: int | None = None  # of heads; 8 of more rows than one
    has_scales_by_rows: bool = False
    has_heads_first: bool = False  # then rows of a head follow each other
    appends: bool = False  # a token, in the same call

    def problem(self):
        features = {"append": self.appends, "heads first": self.has_heads_first, f"head_dim {self.head_dim}": self.head_dim != HEAD_DIM, "no mask": self.sees_all_keys, "scales by rows": self.has_scales_by_rows}
        problem = Problem(f"{self.batch} x {self.keys} keys", [self.keys] * self.batch, self.rows, self.page_size, self.group, self.head_dim, self.sees_all_keys)
        problem.label += "".join(f", {name}" for name, is_there in features.items() if is_there)
        return problem


SHAPES = ((8, 32768), (32, 8192), (8, 8192), (32, 32768), (128, 8192), (1, 32768), (1, 4096), (128, 1024))
CASES = [Case(batch, keys, rows, page_size, sees_all_keys=sees_all_keys) for rows in (8, 16, 1) for page_size in (0, 16) for sees_all_keys in (False, True) for batch, keys in SHAPES]
# A group of four and three queries; narrow heads.
CASES += [Case(8, 32768, 12, page_size, sees_all_keys=sees_all_keys, group=4) for page_size in (0, 16) for sees_all_keys in (False, True)]
CASES += [Case(batch, keys, 8, page_size, 64, sees_all_keys) for page_size in (0, 16) for sees_all_keys in (False, True) for batch, keys in SHAPES[:4]]
CASES += [Case(batch, keys, page_size=page_size, appends=True) for page_size in (0, 16) for batch, keys in ((8, 32768), (32, 8192), (8, 8192), (1, 4096))]
CASES += [Case(8, 32768, 8, page_size, has_scales_by_rows=by_rows, has_heads_first=not by_rows) for page_size in (0, 16) for by_rows in (False, True)]
# Chunks of prompts, 512 and 4,096 queries of groups of four heads.
CASES += [Case(batch, keys, 4 * queries, page_size, head_dim, group=4) for head_dim in (128, 64) for page_size in (0, 16) for batch, keys, queries in ((1, 32768, 512), (1, 32768, 4096), (4, 8192, 512), (1, 8192, 4096))]


def codes_of(numbers, kind, by_rows):
    """Codes, and scales [slots, rows, heads] in the order of a cache."""
    dtype, largest = CODES[kind]
    codes = torch.empty_like(numbers, dtype=dtype)
    slots, rows, heads, _ = numbers.shape
    scales = torch.empty((slots, rows, heads), device=numbers.device) if by_rows else torch.empty((slots, heads, rows), device=numbers.device).transpose(1, 2)
    step = max(1, (1 << 18) // rows)
    for begin in range(0, slots, step):
        part = numbers[begin:begin + step].float()
        scale = part.abs().amax(-1).div(largest).clamp(min=2.0**-126)
        scaled = part / scale.unsqueeze(-1)
        codes[begin:begin + step] = (scaled.round() if kind == "int8" else scaled).to(dtype)
        scales[begin:begin + step] = scale
    return codes, scales


class CodedProblem(Problem):
    """The same queries, lengths and pages, with codes in place of what they stand for."""

    def __init__(self, of, kind, by_rows):
        self.__dict__.update(of.__dict__)
        (self.k, self.k_scale), (self.v, self.v_scale) = (codes_of(t, kind, by_rows) for t in (of.k, of.v))

    def first_sequence(self):
        length = self.lengths[0] - 1
        at = (lambda t: t[0]) if self.page_table is None else (lambda t: t[self.page_table[0].long()].flatten(0, 1))
        return tuple((at(t)[:length].float() * at(scale)[:length].unsqueeze(-1)) for t, scale in ((self.k, self.k_scale), (self.v, self.v_scale)))


class FoveaDecodeCodes(FoveaDecode):
    def __init__(self, library, problem, quant=None):
        scales = {name: fovea.torch_tensor(getattr(problem, name)) for name in ("k_scale", "v_scale")}
        super().__init__(library, problem, quant, **{name: ctypes.pointer(t) for name, t in scales.items()})
        self.kept += scales, problem


def distance(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def measure(case, libraries, clock, rounds):
    problem = case.problem()
    problem.make()
    if case.has_heads_first:
        problem.k, problem.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (problem.k, problem.v))
    if case.appends:
        problem.new = tuple(torch.randn(case.batch, 1, HEADS_KV, case.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    unrounded = problem.expected()
    row = {"case": problem.label, "us": {}, "error": {}, "from_codes": {}, "wrong": []}
    calls = {"bf16": FoveaDecode(libraries["fovea"], problem)}
    expected = {"bf16": unrounded}
    if fa3_decode is not None and problem.seqlen_q > 1 and not case.page_size and not case.sees_all_keys and not case.appends:
        calls["fa3"], expected["fa3"] = fa3_call(problem), unrounded
    for kind in CODES:
        coded = CodedProblem(problem, kind, case.has_scales_by_rows)
        for name, library in libraries.items():
            label = kind if name == "fovea" else f"{kind} {name}"
            calls[label] = FoveaDecodeCodes(library, coded)
            expected[label] = coded.expected()
        for recipe in RECIPES if problem.seqlen_q >= FEWEST_OF_A_CHUNK else ():
            calls[f"{kind} {recipe}"] = FoveaDecodeCodes(libraries["fovea"], coded, recipe)
            expected[f"{kind} {recipe}"] = expected[kind]
    for name, call in calls.items():
        out = call()
        out = (out[0] if isinstance(out, (tuple, list)) else out)[0]
        row["from_codes"][name], row["error"][name] = distance(out, expected[name]), distance(out, unrounded)
        most = next((most for recipe, most in RECIPES.items() if name.endswith(recipe)), DIFFERENCE)
        if not row["from_codes"][name] <= most:
            row["wrong"].append(f"{problem.label}: {name} differs from its codes by {row['from_codes'][name]:.2g}; expected at most {most}")
    size = problem.bytes() // 2 + problem.bytes() // (case.head_dim // 2)  # and scales
    figures = clock.figures(calls | {"read": reader_of(size)}, rounds, as_calls=("read",))
    row["us"] = {name: 1e3 * figure.ms for name, figure in figures.items()}
    return row


def markdown(rows):
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    lines = ["| case | " + " | ".join(f"{name} us" for name in names) + " | int8: of bf16 | of a read | from its codes | error | e4m3: of bf16 | of a read | from its codes | error |", "|---" * (len(names) + 9) + "|"]
    for row in rows:
        us = row["us"]
        cells = [f"{us[name]:.1f}" if name in us else "-" for name in names]
        for kind in CODES:
            cells += [f"{us['bf16'] / us[kind]:.2f}", f"{us['read'] / us[kind]:.0%}", f"{row['from_codes'][kind]:.4f}", f"{row['error'][kind]:.4f}"]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    args = parse_args(__doc__)
    if not torch.cuda.is_available():
        print("gpu_coded_peers: skipped, PyTorch has no GPU")
        return 77
    begin, clock = time.monotonic(), Clock()
    torch.manual_seed(0)
    libraries = libraries_of(args)
    rows = []
    for case in CASES:
        if time.monotonic() - begin > args.seconds:
            print(f"gpu_coded_peers: {args.seconds:.0f} s are over; the rest is cut off", file=sys.stderr)
            break
        if not re.search(args.match, case.problem().label):
            continue
        rows.append(measure(case, libraries, clock, args.rounds))
        print(f"gpu_coded_peers: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
        if args.json:
            keep(args.json, {"gpu": torch.cuda.get_device_name(0), "rounds": args.rounds, "rows": rows})
    print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}; medians of {args.rounds}.\n\n{markdown(rows)}")
    wrong = [text for row in rows for text in row["wrong"]]
    for text in wrong:
        print(f"WRONG  {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
