#!/usr/bin/env python3
"""Attention of eight bits next to that of sixteen on one GPU: error and speed of recipes, quantisation passes included.

usage: gpu_quant_peers.py --library libfovea.so [--recipes fast,accurate] [--seqlens 2048,4096,16384] [--head-dims 128,64] [--rounds 9] [--seconds 120] [--json FILE]

Contenders are Fovea with each recipe and without one, PyTorch's scaled_dot_product_attention by cuDNN and FlashAttention-2, and
FlashAttention-3 where the wheel fa3-fwd is installed, also in fp8, whose rounding is not in its figure; how they are timed is gpu_peers.py's. Errors are ||got - exact|| / ||exact|| of the last
rows of some heads against attention in f64, on four kinds of inputs, and the largest of lse. TFLOP/s count 4 * heads * head_dim * visible pairs.
"""

import argparse
import json
import math
import random
import sys
import time

import gpu_peers as peers
import torch

ROWS, HEADS = 512, 2  # that errors are measured on
KINDS = ("normal", "biased", "outliers", "sharp")


def inputs(kind, batch, seqlen, heads, head_dim):
    q, k, v = (torch.randn(batch, seqlen, heads, head_dim, device="cuda") for _ in range(3))
    if kind == "biased":
        k[..., :8] += torch.where(torch.arange(8, device="cuda") % 2 == 0, 20.0, -20.0)
    if kind == "outliers":
        q, k, v = (t + 10 * torch.randn_like(t) * (torch.rand_like(t) < 1e-3) for t in (q, k, v))
    if kind == "sharp":
        q = 3 * q
    return [t.bfloat16() for t in (q, k, v)]


def exact(q, k, v, causal):
    """out and lse of the last rows of the first heads."""
    q, k, v = (t[:1, :, :HEADS].double().transpose(1, 2) for t in (q, k, v))
    scores = q[:, :, -ROWS:] @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        rows = torch.arange(q.shape[2], device="cuda")
        scores.masked_fill_(rows > rows[-ROWS:, None], -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def errors(setup, kind, causal, seqlen, head_dim):
    q, k, v = inputs(kind, 1, seqlen, HEADS, head_dim)
    out, lse = exact(q, k, v, causal)
    row = {"case": f"{seqlen}x{head_dim}{' causal' if causal else ''} {kind}", "error": {}, "lse": {}}
    for name, fields in setup.own(causal).items():
        got_lse = torch.empty(1, HEADS, seqlen, device="cuda")
        call = peers.FoveaCall(setup.library, q, k, v, lse=peers.fovea.torch_tensor(got_lse), **fields)
        got = call()[:, -ROWS:].double()
        row["error"][name] = ((got - out).norm() / out.norm()).item()
        row["lse"][name] = (got_lse[:, :, -ROWS:] - lse).abs().max().item()
    return row


def fa3_fp8(q, k, v, causal):
    """FlashAttention-3 of operands that were rounded before, by a scale for each."""
    largest = torch.finfo(torch.float8_e4m3fn).max

    def rounded(x):
        scale = x.abs().max().float() / largest
        return (x.float() / scale).to(torch.float8_e4m3fn), scale.expand(x.shape[0], x.shape[2]).contiguous()

    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (rounded(x) for x in (q, k, v))
    return lambda: peers.fa3(q8, k8, v8, causal=causal, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)


def speeds(setup, causal, seqlen, head_dim):
    batch, heads = peers.TOTAL_TOKENS // seqlen, peers.WIDTH // head_dim
    q, k, v = inputs("normal", batch, seqlen, heads, head_dim)
    own = {name: lambda fields=fields: peers.FoveaCall(setup.library, q, k, v, **fields) for name, fields in setup.own(causal).items()}
    fp8 = {} if peers.fa3 is None else {"fa3 fp8": lambda: fa3_fp8(q, k, v, causal)}
    contenders, why_not = peers.started({**own, **peers.standard_peers(q, k, v, causal), **fp8})
    flops = peers.attention_flops(batch, heads, seqlen, head_dim, 0.5 if causal else 1)
    row = {"case": f"{batch}x{seqlen}x{heads}x{head_dim}{' causal' if causal else ''}", "tflops": {}, "spread": {}, "why_not": why_not}
    for name, figure in setup.clock.figures(contenders, setup.rounds).items():
        row["tflops"][name], row["spread"][name] = flops / figure.ms / 1e9, figure.spread
    return row


class Setup:
    def __init__(self, args):
        self.library, self.clock, self.rounds = peers.fovea.Library(args.library), peers.Clock(), args.rounds
        self.recipes = args.recipes.split(",") if args.recipes else []

    def own(self, causal):
        return {name: {"causal": int(causal), **({"quant": name} if name != "bf16" else {})} for name in (*self.recipes, "bf16")}


def table(title, rows, which, form):
    names = list(dict.fromkeys(name for row in rows for name in row[which]))
    lines = [f"## {title}", "", "| case | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return "\n".join(lines + [f"| {row['case']} | " + " | ".join(format(row[which][n], form) if n in row[which] else "-" for n in names) + " |" for row in rows])


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--recipes", default="fast,accurate", help="separated by commas; a recipe with fields of its own has no place here")
    parser.add_argument("--seqlens", default="2048,4096,16384")
    parser.add_argument("--head-dims", default="128,64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json")
    return parser.parse_args()


def main():
    args = parse_args()
    begin = time.monotonic()
    random.seed(0), torch.manual_seed(0)
    setup = Setup(args)
    seqlens, head_dims = ([int(x) for x in text.split(",")] for text in (args.seqlens, args.head_dims))
    result = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "errors": [], "speeds": []}
    cases = [("errors", lambda k=k, d=d, c=c: errors(setup, k, c, 4096, d)) for d in head_dims for c in (False, True) for k in KINDS]
    cases += [("speeds", lambda d=d, c=c, s=s: speeds(setup, c, s, d)) for d in head_dims for c in (False, True) for s in seqlens]
    for name, measure in cases:
        if time.monotonic() - begin > args.seconds:
            print(f"gpu_quant_peers: {args.seconds:.0f} s are over; {name} are cut off", file=sys.stderr)
            break
        result[name].append(measure())
    print(f"{result['gpu']}, PyTorch {result['torch']}; medians of {args.rounds}.\n")
    print(table("Relative error of out", result["errors"], "error", ".4f"), "\n")
    print(table("Largest error of lse", result["errors"], "lse", ".1e"), "\n")
    print(table("TFLOP/s, quantisation included", result["speeds"], "tflops", ".0f"))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
