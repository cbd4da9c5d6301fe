#!/usr/bin/env python3
"""Gradients on one GPU: Fovea's attention_backward next to PyTorch's FlashAttention-2 and cuDNN kernels.

usage: gpu_backward_peers.py [--cases full,causal] [--head-dims 128,64,256] [--seqlens 512,2048,8192,16384] [--rounds 7] [--json FILE]

bf16, 16,384 tokens in all, heads x head_dim = 2,048. A figure is TFLOP/s of the whole backward: 10 batch heads head_dim seqlen^2, half of
that for causal, over the median of CUDA-event times; contenders in random order, the L2 cache overwritten before each, which hides the
host's time behind the device's. "any order" gives determinism up (deterministic=False). Gradients are compared with PyTorch's autograd in f64 on a slice of
heads before anything is timed: one that is farther off than FlashAttention-2 by three tenths has no speed.
"""

import argparse
import json
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fovea

TOTAL_TOKENS, WIDTH = 16384, 2048
CHECKED_HEADS = 2
FLUSH_BYTES = 1 << 30


def fovea_call(tensors, dout, causal, is_deterministic):
    features = {"causal": causal, "deterministic": is_deterministic}
    out, lse = fovea.attention(*tensors, causal=causal, return_lse=True)

    def call():
        gradients = fovea.attention_backward(dout, *tensors, out, lse, **features)
        return [gradients.q, gradients.k, gradients.v]

    return call


def torch_call(tensors, dout, causal, backend):
    given = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*given, is_causal=causal)
    return lambda: [x.transpose(1, 2) for x in torch.autograd.grad(out, given, dout.transpose(1, 2), retain_graph=True)]


def errors_of(result, exact):
    return [((x[:1, :, :CHECKED_HEADS].double() - y).norm() / y.norm()).item() for x, y in zip(result, exact)]


def exact_gradients(tensors, dout, causal):
    """Of the first sequence's first heads, a block of rows at a time: all scores in f64 do not fit at once."""
    q, k, v, d = (x[:1, :, :CHECKED_HEADS].double().transpose(1, 2) for x in (*tensors, dout))
    dk, dv, blocks = torch.zeros_like(k), torch.zeros_like(v), []
    for begin in range(0, q.shape[2], 1024):
        rows = q[:, :, begin : begin + 1024].detach().requires_grad_()
        keys, values = (x.detach().requires_grad_() for x in (k, v))
        scores = rows @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(begin + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        dq_rows, dk_part, dv_part = torch.autograd.grad(scores.softmax(-1) @ values, (rows, keys, values), d[:, :, begin : begin + 1024])
        blocks.append(dq_rows)
        dk += dk_part
        dv += dv_part
    return [x.transpose(1, 2) for x in (torch.cat(blocks, 2), dk, dv)]


def row_of(case: str, head_dim: int, seqlen: int, rounds: int) -> dict:
    causal = case == "causal"
    batch, heads = TOTAL_TOKENS // seqlen, WIDTH // head_dim
    tensors = [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    calls = {
        "fa2": torch_call(tensors, dout, causal, SDPBackend.FLASH_ATTENTION),
        "cudnn": torch_call(tensors, dout, causal, SDPBackend.CUDNN_ATTENTION),
        "fovea": fovea_call(tensors, dout, causal, True),
        "any order": fovea_call(tensors, dout, causal, False),
    }
    exact = exact_gradients(tensors, dout, causal)
    row = {"case": case, "head_dim": head_dim, "seqlen": seqlen, "refused": {}, "errors": {}, "tflops": {}}
    for name, call in list(calls.items()):
        try:
            row["errors"][name] = errors_of(call(), exact)
        except RuntimeError as error:  # cuDNN has no kernel for some head dims
            row["refused"][name] = str(error).splitlines()[0]
            del calls[name]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(sorted(calls), len(calls)):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    work = 10 * batch * heads * head_dim * seqlen**2 / (2 if causal else 1)
    allowed = [1.3 * error for error in row["errors"]["fa2"]]
    for name, values in times.items():
        is_right = all(error <= most for error, most in zip(row["errors"][name], allowed))
        row["tflops"][name] = work / statistics.median(values) / 1e9 if is_right or name == "cudnn" else float("nan")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="full,causal")
    parser.add_argument("--head-dims", default="128,64,256")
    parser.add_argument("--seqlens", default="512,2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(1)
    rows = []
    for head_dim in map(int, args.head_dims.split(",")):
        for case in args.cases.split(","):
            for seqlen in map(int, args.seqlens.split(",")):
                row = row_of(case, head_dim, seqlen, args.rounds)
                rows.append(row)
                figures = "  ".join(f"{name} {row['tflops'][name]:.1f}" for name in row["tflops"])
                shown = " ".join(f"{name} {max(e):.1e}" for name, e in row["errors"].items())
                print(f"d{head_dim} {case} {seqlen}:  {figures}   errors {shown}  {row['refused'] or ''}", flush=True)
                if args.json:
                    with open(args.json, "w", encoding="utf-8") as file:
                        json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
