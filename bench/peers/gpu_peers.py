#!/usr/bin/env python3
"""Fovea next to its peers on one GPU: one process, the same tensors and stream, contenders in random order.

usage: gpu_peers.py --library libfovea.so [--before libother.so] [--tables forward,packed,shapes,short,inputs,programs,blocks] [--match REGEX] [--seconds 300]
       [--rounds 9] [--sustained SECONDS] [--json FILE] [--picture FILE.svg]

Contenders are Fovea through the C ABI, PyTorch's scaled_dot_product_attention with its flash and cuDNN backends, compiled
FlexAttention, and FlashAttention-3 where the wheel fa3-fwd is installed. A figure is a median of CUDA-event times. Each contender is
captured in a CUDA graph and replayed, so that its host's time does not show; one that cannot be captured is called: the JSON says of
every figure which it was. Before each call the L2 cache is overwritten, which hides the host's time behind the device's too. --sustained
adds what each contender makes in so many seconds without rest and without overwriting: clocks are then what heat and power allow.
Bounds are measured in the same run: an 8192^3 bf16 product and a device copy. TFLOP/s count 2 * heads * visible pairs * both head dims,
half of all pairs for causal. A case starts only while the time budget lasts, and every finished case is kept at once: a run that is cut
off keeps what it has.
Outputs are compared with PyTorch's before they are timed, and what a graph writes over poison with what the call wrote: a wrong result
has no speed.
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import fovea_ctypes as fovea  # noqa: E402
import gpu_picture  # noqa: E402

try:
    from fa3_fwd_interface import flash_attn_func as fa3
    from fa3_fwd_interface import flash_attn_varlen_func as fa3_packed
except ImportError:
    fa3 = None

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
TOTAL_TOKENS = 16384  # batch = TOTAL_TOKENS / seqlen
WIDTH = 2048  # heads * head_dim
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (128, 64, 256)
WINDOW, NUM_DOCUMENTS, SOFTCAP = 1024, 12, 30.0
# Tiles that a table selects: tokens, heads, head_dim, side of a tile, how many of each row. A minute of video, and contexts of text.
SELECTIONS = ((109632, 7, 128, 128, 64), (109632, 7, 128, 64, 64), (32768, 16, 128, 64, 32), (32768, 32, 64, 64, 32), (32768, 16, 128, 32, 64))
NUM_PACKED = 16  # sequences
# Encoders of images (7 x 7 windows, 14 x 14 and 16 x 16 patches beside a class token) and of text (77): tokens, batch, heads * head_dim
SHORT = ((49, 64, 1024), (77, 64, 1280), (197, 16, 1024), (257, 16, 1024), (384, 16, 1024))
SHORT_HEAD_DIMS = (32, 64, 72, 80, 128)
PRODUCT_SIZE, COPY_BYTES = 8192, 1 << 30
FLUSH_BYTES = 1 << 30  # some 0.25 ms: more than the host takes for any call
REST_S = 0.05  # between rounds: a power-capped part cools a little


@dataclass
class Figure:
    """Of one contender: a median and its spread; of calls or of a graph's replays; and without rest, where that was asked for."""

    ms: float
    spread: float
    is_replayed: bool
    sustained_ms: float | None = None


def captured(call):
    """Replays what the call launches; None where it cannot be captured. It has run before."""
    written = first(call()).clone()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            output = call()  # in the graph's memory
    except Exception:  # noqa: BLE001: whatever it is, the caller falls back, and says so
        torch.cuda.synchronize()
        return None
    first(output).fill_(math.nan if written.is_floating_point() else 0)
    graph.replay()
    torch.cuda.synchronize()
    require_close(first(output), written, "what a graph writes and what its call wrote")

    def replay(kept=output):
        graph.replay()
    return replay


class Clock:
    """Times calls on the current stream; before each, L2 is overwritten, and long enough that the host is ahead by then. Calls return
    their output. sustained_s: of each contender, without rest, besides."""

    def __init__(self, sustained_s=0.0):
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.sustained_s = sustained_s

    def milliseconds(self, call, count=1):
        """Of so many calls, one behind the other."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def figures(self, contenders, rounds, as_calls=()):
        """{name: Figure}; each round runs every contender once, in random order. as_calls: names of those that a graph would run another
        way, as a copy, whose node takes half as long again."""
        times = {name: [] for name in contenders}
        for call in contenders.values():
            call()
        torch.cuda.synchronize()
        replays = {name: captured(call) for name, call in contenders.items() if name not in as_calls}
        contenders = {name: replays.get(name) or call for name, call in contenders.items()}
        for _ in range(rounds):
            time.sleep(REST_S)
            for name in random.sample(list(contenders), len(contenders)):
                times[name].append(self.milliseconds(contenders[name]))
        figures = {}
        for name, t in times.items():
            median = statistics.median(t)
            figures[name] = Figure(median, (max(t) - min(t)) / median, replays.get(name) is not None)
            if self.sustained_s > 0:
                count = max(1, round(1e3 * self.sustained_s / median))
                figures[name].sustained_ms = self.milliseconds(contenders[name], count) / count
        return figures


class FoveaCall:
    """A plan of these bshd or packed tensors and its output."""

    def __init__(self, library, q, k, v, **fields):
        self.tensors = q, k, v
        self.out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype, device="cuda")
        named = {"q": q, "k": k, "v": v, "out": self.out}
        self.args = fovea.forward_args(**{name: fovea.torch_tensor(t) for name, t in named.items()}, **fields)
        self.plan = library.plan(self.args)
        self.workspace = torch.empty(max(self.plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        self.args.workspace, self.args.workspace_bytes = self.workspace.data_ptr(), self.plan.workspace_bytes
        self.library = library

    def __call__(self):
        self.args.stream = torch.cuda.current_stream().cuda_stream
        self.library.call(self.library.c.fovea_plan_run, self.plan.handle, ctypes.byref(self.args))
        return self.out


def sdpa(q, k, v, backend, **options):
    """On bshd tensors; PyTorch's own order is bhsd."""
    def call():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    return call


def compiled_flex(q, k, v, score_mod=None, mask_mod=None):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch._dynamo.reset()  # each case compiles anew: past a handful PyTorch would run the rest uncompiled
    inputs = [t.transpose(1, 2) for t in (q, k, v)]
    mask = mask_mod and create_block_mask(mask_mod, None, None, q.shape[1], k.shape[1], device="cuda", BLOCK_SIZE=128)
    compiled = torch.compile(flex_attention, dynamic=False)
    is_grouped = q.shape[2] != k.shape[2]
    return lambda: compiled(*inputs, score_mod=score_mod, block_mask=mask, enable_gqa=is_grouped)


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def require_close(ours, theirs, what):
    """Relative error of the whole, as both round outputs and probabilities to 16 bits."""
    a, b = ours.float(), theirs.float()
    error = ((a - b).norm() / b.norm()).item()
    if not error <= 1e-2:
        raise AssertionError(f"{what}: relative difference {error:.2g}; expected at most 1e-2")
    return error


def random_inputs(batch, seqlen, heads, head_dim, dtype, kind="normal", heads_kv=None, head_dim_v=None):
    shapes = ((heads, head_dim), (heads_kv or heads, head_dim), (heads_kv or heads, head_dim_v or head_dim))
    tensors = [torch.randn(batch, seqlen, *shape, device="cuda") for shape in shapes]
    if kind.startswith("heavy"):
        factor = 100 if kind == "heavy100" else 20
        tensors = [t * (1 + factor * (torch.rand_like(t) < 0.005)) for t in tensors]
    if kind == "sink":  # key 0 wins every row by some 30 nats
        tensors[1][:, 0] = 30 * math.sqrt(head_dim) / head_dim
        tensors[0] += 1
    if kind == "climbing":  # each row's greatest score so far grows with every tile of keys, by some 60 nats in all
        tensors[1] += torch.linspace(0, 60 * math.sqrt(head_dim) / head_dim, seqlen, device="cuda").view(1, -1, 1, 1)
        tensors[0] += 1
    return [t.to(DTYPES[dtype]) for t in tensors]


def started(makers):
    """Contenders by name, each run once, and by name why others could not."""
    calls, why_not = {}, {}
    for name, make in makers.items():
        try:
            calls[name] = make()
            calls[name]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001: a peer that cannot is a line of the table
            calls.pop(name, None)
            why_not[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return calls, why_not


def contest(setup, q, k, v, peers, flops, fields, label, flops_of=None):
    """Fovea and its peers on one case: a row, or the reason why there is none. flops_of: of contenders that do other work."""
    if not re.search(setup.match, label):
        return None
    contenders, why_not = started({**setup.own_calls(q, k, v, fields), **peers})
    row = {"case": label, "tflops": {}, "spread": {}, "measured": {}, "sustained_tflops": {}, "why_not": why_not}
    reference = next((name for name in ("cudnn", "flash", "flex", "math") if name in contenders), None)
    if "fovea" in contenders and reference:
        theirs = first(contenders[reference]()).transpose(1, 2)
        row["difference"] = require_close(contenders["fovea"].out, theirs, f"{label}: fovea and {reference}")
    for name, figure in setup.clock.figures(contenders, setup.rounds).items():
        work = (flops_of or {}).get(name, flops)
        row["tflops"][name], row["spread"][name] = work / figure.ms / 1e9, figure.spread
        row["measured"][name] = "replayed" if figure.is_replayed else "called"
        if figure.sustained_ms is not None:
            row["sustained_tflops"][name] = work / figure.sustained_ms / 1e9
    return row


def standard_peers(q, k, v, causal):
    peers = {"flash": lambda: sdpa(q, k, v, SDPBackend.FLASH_ATTENTION, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]),
             "cudnn": lambda: sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])}
    if fa3 is not None and q.dtype == torch.bfloat16:
        peers["fa3"] = lambda: lambda: fa3(q, k, v, causal=causal)
    return peers


def attention_flops(batch, heads, seqlen, head_dim, visible=1.0, head_dim_v=None):
    return 2 * batch * heads * seqlen * seqlen * (head_dim + (head_dim_v or head_dim)) * visible


# ---- Tables: generators of (key, function that measures it) ----


def forward_cases(setup):
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for seqlen in SEQLENS:
                yield lambda h=head_dim, c=causal, s=seqlen: measure_forward(setup, "bf16", h, c, s, "normal")


def packed_cases(setup):
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for order in ("shuffled", "longest last"):
                yield lambda h=head_dim, c=causal, o=order: measure_packed(setup, h, c, o)


def measure_packed(setup, head_dim, causal, order):
    """NUM_PACKED lengths that fall as 1/n. "dense" is Fovea on a batch of one length, of about the same tokens and pairs."""
    shares = [1 / (i + 1) for i in range(NUM_PACKED)]
    lengths = [int(TOTAL_TOKENS * share / sum(shares)) for share in reversed(shares)]
    if order == "shuffled":
        random.Random(1).shuffle(lengths)
    total, heads, pairs = sum(lengths), WIDTH // head_dim, sum(n * n for n in lengths)
    q, k, v = (t[0] for t in random_inputs(1, total, heads, head_dim, "bf16"))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    seqlen = round(pairs / total)
    dense = random_inputs(round(total / seqlen), seqlen, heads, head_dim, "bf16")
    visible = 0.5 if causal else 1
    peers = {"dense": lambda: FoveaCall(setup.libraries["fovea"], *dense, causal=int(causal)),
             "flash": lambda: lambda: torch.ops.aten._flash_attention_forward(
                 q, k, v, ends, ends, max(lengths), max(lengths), 0.0, causal, False)[0].transpose(0, 1)[None]}
    if fa3 is not None:
        peers["fa3"] = lambda: lambda: fa3_packed(q, k, v, ends, ends, max(lengths), max(lengths), causal=causal)
    fields = {"causal": int(causal), "cu_seqlens_q": fovea.torch_tensor(ends), "cu_seqlens_kv": fovea.torch_tensor(ends)}
    label = f"bf16 {NUM_PACKED} of {max(lengths)} to {min(lengths)} x{heads}x{head_dim}{' causal' if causal else ''}, {order}"
    return contest(setup, q, k, v, peers, 4 * heads * head_dim * pairs * visible, fields, label,
                   {"dense": attention_flops(dense[0].shape[0], heads, seqlen, head_dim, visible)})


def shape_cases(setup):
    """Heads that share keys, and head dims beside 64, 128 and 256."""
    for causal in (False, True):
        for seqlen in (1024, 4096, 16384):
            for heads, heads_kv, head_dim, head_dim_v in ((32, 8, 128, 128), (32, 8, 64, 64), (16, 1, 128, 128), (16, 16, 72, 72), (16, 16, 80, 80),
                                                          (16, 16, 96, 96), (8, 8, 192, 192), (8, 8, 192, 128)):
                yield lambda h=heads, kv=heads_kv, d=head_dim, v=head_dim_v, c=causal, s=seqlen: measure_shape(setup, h, kv, d, v, c, s)


def measure_shape(setup, heads, heads_kv, head_dim, head_dim_v, causal, seqlen):
    batch = TOTAL_TOKENS // seqlen
    q, k, v = random_inputs(batch, seqlen, heads, head_dim, "bf16", heads_kv=heads_kv, head_dim_v=head_dim_v)
    dims = str(head_dim) if head_dim == head_dim_v else f"({head_dim}, {head_dim_v})"
    shown = str(heads) if heads == heads_kv else f"{heads}/{heads_kv}"
    label = f"bf16 {batch}x{seqlen}x{shown}x{dims}{' causal' if causal else ''}"
    flops = attention_flops(batch, heads, seqlen, head_dim, 0.5 if causal else 1, head_dim_v)
    return contest(setup, q, k, v, standard_peers(q, k, v, causal), flops, {"causal": int(causal)}, label)


def short_cases(setup):
    """So few tokens that a launch, a latency and the last, cut tile count."""
    for causal in (False, True):
        for seqlen, batch, width in SHORT:
            for head_dim in SHORT_HEAD_DIMS:
                yield lambda n=seqlen, b=batch, h=width // head_dim, d=head_dim, c=causal: measure_short(setup, b, n, h, d, c)


def measure_short(setup, batch, seqlen, heads, head_dim, causal):
    q, k, v = random_inputs(batch, seqlen, heads, head_dim, "bf16")
    label = f"bf16 {batch}x{seqlen}x{heads}x{head_dim}{' causal' if causal else ''}"
    flops = attention_flops(batch, heads, seqlen, head_dim, 0.5 if causal else 1)
    return contest(setup, q, k, v, standard_peers(q, k, v, causal), flops, {"causal": int(causal)}, label)


def input_cases(setup):
    for kind in ("heavy", "heavy100", "sink", "climbing"):
        for head_dim in (128, 64):
            for seqlen in (1024, 4096):
                yield lambda h=head_dim, s=seqlen, i=kind: measure_forward(setup, "bf16", h, False, s, i)
    for head_dim in (128, 64):
        yield lambda h=head_dim: measure_forward(setup, "f16", h, False, 4096, "normal")


def measure_forward(setup, dtype, head_dim, causal, seqlen, kind):
    batch, heads = TOTAL_TOKENS // seqlen, WIDTH // head_dim
    q, k, v = random_inputs(batch, seqlen, heads, head_dim, dtype, kind)
    label = f"{dtype} {batch}x{seqlen}x{heads}x{head_dim}{' causal' if causal else ''}{'' if kind == 'normal' else ' ' + kind}"
    flops = attention_flops(batch, heads, seqlen, head_dim, 0.5 if causal else 1)
    return contest(setup, q, k, v, standard_peers(q, k, v, causal), flops, {"causal": int(causal)}, label)


def program_cases(setup):
    for seqlen in (4096, 16384):
        for name in ("full", "causal mask_mod", "document", "window", "alibi", "softcap"):
            yield lambda n=name, s=seqlen: measure_program(setup, n, s)


def measure_program(setup, name, seqlen, head_dim=128):
    batch, heads = TOTAL_TOKENS // seqlen, WIDTH // head_dim
    q, k, v = random_inputs(batch, seqlen, heads, head_dim, "bf16")
    ends = torch.randint(1, seqlen, (NUM_DOCUMENTS - 1,), device="cuda").sort().values
    documents = torch.searchsorted(ends, torch.arange(seqlen, device="cuda"), right=True).to(torch.int32)
    documents = documents.repeat(batch, 1).contiguous()
    slopes = torch.logspace(-1, -8, heads, base=2, device="cuda")
    index = torch.arange(seqlen, device="cuda")
    share = {"causal mask_mod": 0.5,
             "document": (torch.bincount(documents[0].long()).double() ** 2).sum().item() / seqlen**2,
             "window": (torch.minimum(index, torch.tensor(WINDOW)) + 1).double().sum().item() / seqlen**2}.get(name, 1.0)
    fields, mods = {
        "full": ({}, {}),
        "causal mask_mod": ({"mask_mod": "q_idx >= kv_idx"}, {"mask_mod": lambda b, h, i, j: i >= j}),
        "document": ({"mask_mod": "doc[batch, q_idx] == doc[batch, kv_idx]", "tensors": {"doc": fovea.torch_tensor(documents)}},
                     {"mask_mod": lambda b, h, i, j: documents[b, i] == documents[b, j]}),
        "window": ({"causal": 1, "has_window_left": 1, "window_left": WINDOW},
                   {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j <= WINDOW)}),
        "alibi": ({"score_mod": "score + slopes[q_head] * (kv_idx - q_idx)",
                   "tensors": {"slopes": fovea.torch_tensor(slopes)}},
                  {"score_mod": lambda s, b, h, i, j: s + slopes[h] * (j - i)}),
        "softcap": ({"softcap": SOFTCAP}, {"score_mod": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP)}),
    }[name]
    flops = attention_flops(batch, heads, seqlen, head_dim, share)
    peers = {"flex": lambda: compiled_flex(q, k, v, **mods)}
    return contest(setup, q, k, v, peers, flops, fields, f"{name} {batch}x{seqlen}x{heads}x{head_dim}")


def block_cases(setup):
    for selection in SELECTIONS:
        yield lambda s=selection: measure_blocks(setup, *s, causal=False)
    yield lambda: measure_blocks(setup, *SELECTIONS[2], causal=True)


def measure_blocks(setup, seqlen, heads, head_dim, side, count, causal):
    """Of each head and row of tiles, so many tiles at random; under a causal mask of those up to the diagonal, which is always among them."""
    q, k, v = random_inputs(1, seqlen, heads, head_dim, "bf16")
    tiles = -(-seqlen // side)
    weights = torch.rand(heads, tiles, tiles, device="cuda")
    if causal:
        weights = weights.tril().diagonal_scatter(torch.full((heads, tiles), 2.0, device="cuda"), dim1=1, dim2=2)
    chosen = weights.topk(count, dim=-1).indices
    table = torch.zeros_like(weights, dtype=torch.bool).scatter_(2, chosen, True)
    if causal:
        table = table.tril()
    sizes = torch.full((tiles,), side, device="cuda", dtype=torch.float64)
    sizes[-1] = seqlen - side * (tiles - 1)
    pairs = (sizes @ table.double() @ sizes).sum().item()
    text = f"sel[q_head, q_idx // {side}, kv_idx // {side}]"
    if causal:
        text += " && kv_idx <= q_idx"
        pairs -= heads * (sizes * (sizes - 1) / 2).sum().item()
    label = f"{count} of {tiles} tiles of {side} 1x{seqlen}x{heads}x{head_dim}{' causal' if causal else ''}"
    fields = {"mask_mod": text, "tensors": {"sel": fovea.torch_tensor(table)}}
    peers = {"flex": lambda: compiled_flex_of_tiles(q, k, v, table, side, causal)}
    return contest(setup, q, k, v, peers, 4 * head_dim * pairs, fields, label)


def compiled_flex_of_tiles(q, k, v, table, side, causal):
    """Of the lists of tiles that FlexAttention's kernel walks: full ones, but on the diagonal of a causal mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    torch._dynamo.reset()
    diagonal = torch.eye(table.shape[-1], dtype=torch.bool, device="cuda") if causal else torch.zeros_like(table[0])

    def lists(tiles):
        return tiles.sum(-1, dtype=torch.int32)[None], tiles.int().argsort(dim=-1, descending=True, stable=True).int()[None]
    mask = BlockMask.from_kv_blocks(*lists(table & diagonal), *lists(table & ~diagonal), BLOCK_SIZE=side,
                                    mask_mod=(lambda b, h, i, j: i >= j) if causal else None, seq_lengths=(q.shape[1], k.shape[1]))
    options = {"BLOCK_M": min(side, 128), "BLOCK_N": min(side, 64)}
    inputs = [t.transpose(1, 2) for t in (q, k, v)]
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*inputs, block_mask=mask, kernel_options=options)


TABLES = {"forward": ("Forward", forward_cases), "packed": ("Packed sequences", packed_cases),
          "shapes": ("Other shapes", shape_cases), "short": ("Short sequences", short_cases), "inputs": ("Other inputs", input_cases),
          "programs": ("Programs (TFLOP/s of visible pairs)", program_cases),
          "blocks": ("Tiles that a table selects (TFLOP/s of visible pairs)", block_cases)}
PEERS = ("fovea", "before", "dense", "fa3", "cudnn", "flash", "flex")


# ---- Report ----


def bounds(clock):
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    figures = clock.figures({"product": lambda: torch.matmul(a, b), "copy": lambda: target.copy_(source)}, 9, as_calls=("copy",))
    rates = {"product_tflops": 2 * PRODUCT_SIZE**3 / figures["product"].ms / 1e9, "copy_tbs": 2 * COPY_BYTES / figures["copy"].ms / 1e9}
    if figures["product"].sustained_ms is not None:
        rates["sustained_product_tflops"] = 2 * PRODUCT_SIZE**3 / figures["product"].sustained_ms / 1e9
    return rates


def markdown(title, rows, product, sustained_product=None):
    lines = table(title, rows, "tflops", product)
    if any(row["sustained_tflops"] for row in rows):
        lines += ["", *table(f"{title}, without rest", rows, "sustained_tflops", sustained_product)]
    called = sorted({name for row in rows for name, how in row["measured"].items() if how == "called"})
    lines += [""] + ([f"Called, not replayed from a graph: {', '.join(called)}."] if called else [])
    reasons = {(name, why) for row in rows for name, why in row["why_not"].items()}
    return "\n".join(lines + [f"{name} did not run: {why}" for name, why in sorted(reasons)])


def table(title, rows, which, product):
    peers = [p for p in PEERS if any(p in row[which] for row in rows)]
    lines = [f"## {title}", "", "| case | " + " | ".join(peers) + " | of the product | " +
             " | ".join(f"to {p}" for p in peers[1:]) + " | difference | spread |", "|---" * (2 * len(peers) + 3) + "|"]
    for row in rows:
        rates = row[which]
        ours = rates.get("fovea")
        cells = [f"{rates[p]:.0f}" if p in rates else "-" for p in peers]
        cells.append(f"{ours / product:.0%}" if ours else "-")
        cells += [f"{ours / rates[p]:.3f}" if ours and p in rates else "-" for p in peers[1:]]
        cells += [f"{row['difference']:.1e}" if "difference" in row else "-", f"{row['spread'].get('fovea', math.nan):.0%}"]
        lines.append("| " + " | ".join([row["case"], *cells]) + " |")
    return lines


def keep(path, result):
    """Written aside, then renamed: a reader sees a whole file or none."""
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(aside, path)


class Setup:
    def __init__(self, args):
        self.libraries = {"fovea": fovea.Library(args.library)}
        if args.before:
            self.libraries["before"] = fovea.Library(args.before)
        self.rounds, self.match, self.clock = args.rounds, args.match, Clock(args.sustained)

    def own_calls(self, q, k, v, fields):
        return {name: lambda library=library: FoveaCall(library, q, k, v, **fields) for name, library in self.libraries.items()}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--before", help="another libfovea.so, as one more contender")
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--match", default="", help="cases whose names contain this regular expression")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=300, help="no case starts later than this")
    parser.add_argument("--sustained", type=float, default=0, metavar="SECONDS", help="of each contender and case, without rest, besides")
    parser.add_argument("--json", type=pathlib.Path, help="keep all figures in this file, case by case")
    parser.add_argument("--picture", type=pathlib.Path, help="draw the forward table: throughput over sequence length, as SVG")
    return parser.parse_args()


def main():
    args = parse_args()
    begin = time.monotonic()
    random.seed(0), torch.manual_seed(0)
    setup = Setup(args)
    described = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    result = {"machine": {"gpu": torch.cuda.get_device_name(0), "commit": described.stdout.strip(),
                          "torch": torch.__version__, "has_fa3": fa3 is not None},
              "rounds": args.rounds, "bounds": bounds(setup.clock)}
    for name in args.tables.split(","):
        rows = result[name] = []
        for measure in TABLES[name][1](setup):
            if time.monotonic() - begin > args.seconds:
                print(f"gpu_peers: {args.seconds:.0f} s are over; {name} is cut off", file=sys.stderr)
                break
            try:
                row = measure()
                if row is None:
                    continue
                rows.append(row)
                rates = ", ".join(f"{name} {rate:.0f}" for name, rate in rows[-1]["tflops"].items())
                print(f"gpu_peers: {rows[-1]['case']}: {rates}", file=sys.stderr, flush=True)
            except AssertionError as error:
                print(f"gpu_peers: {error}", file=sys.stderr, flush=True)
                result.setdefault("wrong", []).append(str(error))
            if args.json:
                keep(args.json, result)
    print("{gpu}, commit {commit}, PyTorch {torch}; medians of {rounds}.".format(**result["machine"], rounds=args.rounds))
    print("bf16 product {product_tflops:.0f} TFLOP/s, copy {copy_tbs:.2f} TB/s.".format(**result["bounds"]))
    for name in args.tables.split(","):
        print("\n" + markdown(TABLES[name][0], result[name], result["bounds"]["product_tflops"], result["bounds"].get("sustained_product_tflops")))
    if args.picture and not gpu_picture.write_picture(result, args.picture):
        print("gpu_peers: no forward case was measured, so there is no picture", file=sys.stderr)
    for wrong in result.get("wrong", []):
        print(f"WRONG  {wrong}")
    return 1 if "wrong" in result else 0


if __name__ == "__main__":
    sys.exit(main())
