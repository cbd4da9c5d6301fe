#!/usr/bin/env python3
"""A llama-like stack under torch.compile on one GPU: its attention by fovea.torch, and by PyTorch's cuDNN and flash kernels.

usage: gpu_llama_peers.py [--seqlens 2048,4096,8192,16384] [--layers 8] [--rounds 7] [--json FILE]

Forward alone, bf16, batch 1, causal: width 2048, 16 query heads and 4 key heads of 128, rotary, RMS norms, gated units of 8192. One set of
weights; each contender is compiled with fullgraph=True, so that a graph break is an error. A figure is the median of CUDA-event times of
contenders in random order. Errors are relative L2 distances from the same stack with attention in f32 (its other products stay bf16): a
contender that is farther off than PyTorch's own kernels by half is wrong, and has no speed.
"""

import argparse
import json
import random
import statistics

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fovea.torch

WIDTH, HEADS_Q, HEADS_KV, HEAD_DIM, HIDDEN = 2048, 16, 4, 128, 8192


def by_fovea(q, k, v):
    return fovea.torch.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def in_f32(q, k, v):
    """A row block at a time: scores of 16,384 tokens do not fit at once."""
    k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, 1).float() for x in (k, v))
    blocks = []
    for begin in range(0, q.shape[2], 512):
        rows = q[:, :, begin : begin + 512].float()
        end = begin + rows.shape[2]
        scores = rows @ k[:, :, :end].transpose(-1, -2) * HEAD_DIM**-0.5
        hidden = torch.ones(rows.shape[2], end, dtype=torch.bool, device=q.device).triu(begin + 1)
        blocks.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, :, :end])
    return torch.cat(blocks, 2).to(q.dtype)


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_units = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.joined = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH, bias=False)
        self.gates, self.back = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin, attend):
        batch, seqlen, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, seqlen, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split((HEADS_Q, HEADS_KV, HEADS_KV), 1)
        out = attend(turned(q, cos, sin), turned(k, cos, sin), v)
        x = x + self.joined(out.transpose(1, 2).reshape(batch, seqlen, -1))
        gate, unit = self.gates(self.before_units(x)).chunk(2, -1)
        return x + self.back(F.silu(gate) * unit)


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList, attend) -> None:
        super().__init__()
        self.layers, self.attend = layers, attend

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin, self.attend)
        return x


def contenders(layers: nn.ModuleList):
    compiled = {name: torch.compile(Stack(layers, attend), fullgraph=True) for name, attend in
                (("fovea", by_fovea), ("cudnn", by_torch), ("flash", by_torch))}  # fmt: skip
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def call(name, *inputs):
        if name not in kernels:
            return compiled[name](*inputs)
        with sdpa_kernel(kernels[name]):
            return compiled[name](*inputs)

    return compiled.keys(), call


def milliseconds(function) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def row_of(layers: nn.ModuleList, seqlen: int, rounds: int) -> dict:
    torch._dynamo.reset()
    x = torch.randn(1, seqlen, WIDTH, device="cuda", dtype=torch.bfloat16)
    angles = torch.arange(seqlen, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, 1, 2 / HEAD_DIM, device="cuda"))
    inputs = (x, angles.cos().bfloat16(), angles.sin().bfloat16())
    exact = Stack(layers, in_f32)(*inputs).float()
    names, call = contenders(layers)
    row = {"seqlen": seqlen}
    for name in names:
        for _ in range(3):
            out = call(name, *inputs)
        row[f"{name}_error"] = ((out.float() - exact).norm() / exact.norm()).item()
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(sorted(names), len(names)):
            times[name].append(milliseconds(lambda name=name: call(name, *inputs)))
    allowed = 1.5 * max(row["cudnn_error"], row["flash_error"])
    for name in names:
        row[f"{name}_ms"] = statistics.median(times[name]) if row[f"{name}_error"] <= allowed else float("nan")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="2048,4096,8192,16384")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(1)
    rows = []
    with torch.no_grad():
        layers = nn.ModuleList(Layer() for _ in range(args.layers)).to("cuda", torch.bfloat16)
        print(f"{'seqlen':>7} {'fovea ms':>9} {'cuDNN ms':>9} {'flash ms':>9} {'to cuDNN':>9}   errors fovea, cuDNN, flash")
        for seqlen in map(int, args.seqlens.split(",")):
            row = row_of(layers, seqlen, args.rounds)
            rows.append(row)
            print(f"{seqlen:>7} {row['fovea_ms']:>9.3f} {row['cudnn_ms']:>9.3f} {row['flash_ms']:>9.3f} "
                  f"{row['cudnn_ms'] / row['fovea_ms']:>9.3f}   {row['fovea_error']:.2e} {row['cudnn_error']:.2e} {row['flash_error']:.2e}",
                  flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
