#!/usr/bin/env python3
"""Gradients on one GPU: Fovea's attention_backward next to PyTorch's FlashAttention-2 and cuDNN kernels.

usage: gpu_backward_peers.py [--cases full,causal,gqa,packed,window,mask_mod,alibi,documents,bias,table] [--head-dims 128,64,256]
       [--seqlens 512,2048,8192,16384] [--rounds 7] [--json FILE] [--markdown FILE]

bf16, 16,384 tokens in all, heads x head_dim = 2,048. A figure is TFLOP/s of the whole backward: 10 head_dim for each head and visible pair,
half of all pairs for causal, over the median of CUDA-event times; contenders in random order, the L2 cache overwritten before each, which hides the
host's time behind the device's. "any order" gives determinism up (deterministic=False). Gradients are compared with PyTorch's autograd in f64 on a slice of
heads before anything is timed: one that is farther off than FlashAttention-2 by three tenths has no speed.

"bias" and "table" learn what a score program reads, a bias [heads, seqlen, seqlen] or a table [heads, 257] by distance, both of bf16: the
gradient of that and of q, k and v, beside compiled FlexAttention. Their errors are those of the first head's, at most a hundredth.

"plain" is Fovea in the same run on what a case is to be as fast as: of "gqa" (a quarter of the heads are those of keys) as many heads of
keys as of queries; of "packed" (16 lengths that fall as 1/n) a batch of one length, of about the same tokens and pairs; of "window" (1,024 keys,
causal), "mask_mod" (causal by a formula), "alibi" (causal) and "documents" (12 of them in each row) plain causal attention.
--markdown writes tables as gpu_peers.py does: figures, ratios to each other contender, and the part of an 8192^3 bf16 product of the same run.
"""

import argparse
import json
import math
import pathlib
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fovea

TOTAL_TOKENS, WIDTH = 16384, 2048
CHECKED_HEADS = 2
FLUSH_BYTES = 1 << 30
DISTANCE = 128  # beyond, the table's last element stands for all
GROUP = 4  # query heads that share keys in "gqa"
WINDOW, NUM_DOCUMENTS, NUM_PACKED = 1024, 12, 16
PRODUCT_SIZE = 8192
CAPTURED_CASES = ("bias", "table")
CAPTURED_ERROR = 1e-2  # sums of a table's ends cancel: Flex's and ours are off by 1.6e-3 to 6.8e-3, now one more, now the other


def fovea_call(tensors, dout, **features):
    of_forward = {name: value for name, value in features.items() if name != "deterministic"}
    out, lse = fovea.attention(*tensors, return_lse=True, **of_forward)

    def call():
        gradients = fovea.attention_backward(dout, *tensors, out, lse, **features)
        return [gradients.q, gradients.k, gradients.v]

    return call


def torch_call(tensors, dout, causal, backend):
    given = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=given[0].shape[1] != given[1].shape[1])
    return lambda: [x.transpose(1, 2) for x in torch.autograd.grad(out, given, dout.transpose(1, 2), retain_graph=True)]


def packed_torch_call(tensors, dout, ends, longest):
    """FlashAttention-2 as PyTorch has it for packed rows."""
    lengths = (ends, ends, longest, longest, 0.0, True)
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(*tensors, *lengths, False)
    return lambda: torch.ops.aten._flash_attention_backward(dout, *tensors, out, lse, *lengths, state, unused)


def flex_call(tensors, dout, mods):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # each case compiles anew: past a handful PyTorch would run the rest uncompiled
    given = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    seqlen = given[0].shape[2]
    mask = create_block_mask(mods["mask_mod"], None, None, seqlen, seqlen, device=given[0].device)
    out = torch.compile(flex_attention, dynamic=False)(*given, score_mod=mods.get("score_mod"), block_mask=mask)
    return lambda: [x.transpose(1, 2) for x in torch.autograd.grad(out, given, dout.transpose(1, 2), retain_graph=True)]


def errors_of(result, exact):
    return [((x[:1, : y.shape[1], : y.shape[2]].double() - y).norm() / y.norm()).item() for x, y in zip(result, exact)]


def is_causal(q_idx, kv_idx):
    return kv_idx <= q_idx


def exact_gradients(tensors, dout, shown=None, added=None):
    """Of the first sequence's first heads, a block of rows at a time: all scores in f64 do not fit at once.

    shown(q_idx, kv_idx) says which pairs are visible, added(head, q_idx, kv_idx) what is added to scores.
    """
    group = tensors[0].shape[2] // tensors[1].shape[2]
    heads = max(CHECKED_HEADS, group)
    q, d = (x[:1, :, :heads].double().transpose(1, 2) for x in (tensors[0], dout))
    k, v = (x[:1, :, : heads // group].double().transpose(1, 2) for x in tensors[1:])
    dk, dv, blocks = torch.zeros_like(k), torch.zeros_like(v), []
    kv_idx = torch.arange(k.shape[2], device=k.device)
    head = torch.arange(heads, device=k.device)[:, None, None]
    for begin in range(0, q.shape[2], 1024):
        rows = q[:, :, begin : begin + 1024].detach().requires_grad_()
        q_idx = torch.arange(begin, begin + rows.shape[2], device=q.device)[:, None]
        keys, values = (x.detach().requires_grad_() for x in (k, v))
        scores = rows @ keys.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
        if added is not None:
            scores = scores + added(head, q_idx, kv_idx).double()
        if shown is not None:
            scores = scores.masked_fill(~shown(q_idx, kv_idx), -torch.inf)
        out = scores.softmax(-1) @ values.repeat_interleave(group, 1)
        dq_rows, dk_part, dv_part = torch.autograd.grad(out, (rows, keys, values), d[:, :, begin : begin + 1024])
        blocks.append(dq_rows)
        dk += dk_part
        dv += dv_part
    return [x.transpose(1, 2) for x in (torch.cat(blocks, 2), dk, dv)]


def started_row(case: str, head_dim: int, seqlen: int) -> dict:
    return {"case": case, "head_dim": head_dim, "seqlen": seqlen, "refused": {}, "errors": {}, "tflops": {}, "spread": {}}


def times_of(calls: dict, rounds: int) -> dict:
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
    return times


def random_inputs(batch: int, seqlen: int, heads: int, heads_kv: int, head_dim: int):
    """q, k, v and dout."""
    shapes = [(batch, seqlen, count, head_dim) for count in (heads, heads_kv, heads_kv, heads)]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return (q, k, v), dout


@dataclass
class Posed:
    """A case: contenders, the work of each, and what is known of the first sequence in f64."""

    calls: dict[str, Callable[[], Callable]]  # made when asked for: some refuse
    exact: list[torch.Tensor]
    work: float
    works: dict[str, float] = field(default_factory=dict)  # of those that do other work

    def work_of(self, name: str) -> float:
        return self.works.get(name, self.work)


def forms(tensors, dout, **features):
    return {
        "fovea": lambda: fovea_call(tensors, dout, **features),
        "any order": lambda: fovea_call(tensors, dout, deterministic=False, **features),
    }


def peers(tensors, dout, causal: bool):
    return {
        "fa2": lambda: torch_call(tensors, dout, causal, SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: torch_call(tensors, dout, causal, SDPBackend.CUDNN_ATTENTION),
    }


def work_of(batch: int, heads: int, head_dim: int, pairs: float) -> float:
    return 10 * batch * heads * head_dim * pairs


def pose_dense(case: str, head_dim: int, seqlen: int) -> Posed:
    """full, causal and gqa."""
    batch, heads, causal = TOTAL_TOKENS // seqlen, WIDTH // head_dim, case != "full"
    tensors, dout = random_inputs(batch, seqlen, heads, heads // GROUP if case == "gqa" else heads, head_dim)
    calls = forms(tensors, dout, causal=causal) | peers(tensors, dout, causal)
    if case == "gqa":
        calls["plain"] = lambda: fovea_call(*random_inputs(batch, seqlen, heads, heads, head_dim), causal=True)
    exact = exact_gradients(tensors, dout, is_causal if causal else None)
    return Posed(calls, exact, work_of(batch, heads, head_dim, seqlen**2 * (0.5 if causal else 1)))


def pose_packed(head_dim: int) -> Posed:
    shares = [1 / (i + 1) for i in range(NUM_PACKED)]
    lengths = [int(TOTAL_TOKENS * share / sum(shares)) for share in shares]
    random.Random(1).shuffle(lengths)
    total, heads, pairs = sum(lengths), WIDTH // head_dim, sum(n * n for n in lengths)
    tensors, dout = random_inputs(1, total, heads, heads, head_dim)
    exact = exact_gradients([x[:, : lengths[0]] for x in tensors], dout[:, : lengths[0]], is_causal)
    rows, dout_rows = [x[0] for x in tensors], dout[0]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    seqlen = round(pairs / total)
    batch = round(total / seqlen)

    def seen_as_batch(make):
        def made():
            call = make()
            return lambda: [x[None] for x in call()]

        return made

    calls = {name: seen_as_batch(make) for name, make in forms(rows, dout_rows, causal=True, cu_seqlens=ends).items()}
    calls["fa2"] = seen_as_batch(lambda: packed_torch_call(rows, dout_rows, ends, max(lengths)))
    calls["plain"] = lambda: fovea_call(*random_inputs(batch, seqlen, heads, heads, head_dim), causal=True)
    return Posed(calls, exact, work_of(1, heads, head_dim, pairs / 2), {"plain": work_of(batch, heads, head_dim, seqlen**2 / 2)})


def pose_program(case: str, head_dim: int, seqlen: int) -> Posed:
    """window, mask_mod, alibi and documents, beside compiled FlexAttention."""
    batch, heads = TOTAL_TOKENS // seqlen, WIDTH // head_dim
    tensors, dout = random_inputs(batch, seqlen, heads, heads, head_dim)
    ends = torch.randint(1, seqlen, (NUM_DOCUMENTS - 1,), device="cuda").sort().values
    ids = torch.searchsorted(ends, torch.arange(seqlen, device="cuda"), right=True).to(torch.int32)
    slopes = torch.logspace(-1, -8, heads, base=2, device="cuda")
    shown, added, features = {
        "window": (lambda i, j: (j <= i) & (i - j <= WINDOW), None, {"causal": True, "window": (WINDOW, 0)}),
        "mask_mod": (is_causal, None, {"mask_mod": "kv_idx <= q_idx"}),
        "alibi": (is_causal, lambda h, i, j: slopes[h] * (j - i),
                  {"causal": True, "score_mod": fovea.score_mod("score + slopes[q_head] * (kv_idx - q_idx)", slopes=slopes)}),
        "documents": (lambda i, j: ids[i] == ids[j], None, {"segment_ids": ids.repeat(batch, 1)}),
    }[case]
    mods = {"mask_mod": lambda b, h, i, j: shown(i, j)}
    if added is not None:
        mods["score_mod"] = lambda score, b, h, i, j: score + added(h, i, j)
    calls = forms(tensors, dout, **features)
    calls["plain"] = lambda: fovea_call(tensors, dout, causal=True)
    calls["flex"] = lambda: flex_call(tensors, dout, mods)
    pairs = {"window": (torch.arange(seqlen).clamp(max=WINDOW) + 1).double().sum().item(),
             "documents": (torch.bincount(ids.long()).double() ** 2).sum().item()}.get(case, seqlen**2 / 2)
    return Posed(calls, exact_gradients(tensors, dout, shown, added), work_of(batch, heads, head_dim, pairs),
                 {"plain": work_of(batch, heads, head_dim, seqlen**2 / 2)})


def row_of(case: str, head_dim: int, seqlen: int, rounds: int) -> dict:
    if case == "packed":
        posed = pose_packed(head_dim)
    elif case in ("full", "causal", "gqa"):
        posed = pose_dense(case, head_dim, seqlen)
    else:
        posed = pose_program(case, head_dim, seqlen)
    row, calls = started_row(case, head_dim, seqlen), {}
    for name, make in posed.calls.items():
        try:
            call = make()
            result = call()
        except RuntimeError as error:  # cuDNN has no kernel for some head dims, Flex too little shared memory
            row["refused"][name] = str(error).splitlines()[0]
            continue
        calls[name] = call
        if name != "plain":  # other tensors, or another mask
            row["errors"][name] = errors_of(result, posed.exact)
    peer = next((name for name in ("fa2", "flex") if name in row["errors"]), None)
    allowed = [1.3 * error for error in row["errors"][peer]] if peer else [1e-2] * 3
    for name, values in times_of(calls, rounds).items():
        is_ours = name in ("fovea", "any order")
        is_right = not is_ours or all(error <= most for error, most in zip(row["errors"][name], allowed))
        median = statistics.median(values)
        row["tflops"][name] = posed.work_of(name) / median / 1e9 if is_right else math.nan
        row["spread"][name] = (max(values) - min(values)) / median
    return row


def added(case: str, table):
    if case == "bias":
        return lambda score, batch, head, q_idx, kv_idx: score + table[head, q_idx, kv_idx]
    return lambda score, batch, head, q_idx, kv_idx: score + table[head, (q_idx - kv_idx).clamp(-DISTANCE, DISTANCE) + DISTANCE]


def autograd_call(attention, tensors, table, dout, is_bhsd: bool):
    given = [(x.transpose(1, 2) if is_bhsd else x).detach().requires_grad_() for x in tensors]
    out = attention(*given)
    seed = dout.transpose(1, 2) if is_bhsd else dout
    return lambda: torch.autograd.grad(out, (*given, table), seed, retain_graph=True)[-1]


def exact_captured(case: str, tensors, table, dout):
    """The table's gradient of the first head, a sequence at a time."""
    scale, total = tensors[0].shape[-1] ** -0.5, torch.zeros_like(table[0], dtype=torch.float64)
    seqlen = tensors[0].shape[1]
    distances = torch.arange(seqlen, device="cuda")
    distances = (distances[:, None] - distances).clamp(-DISTANCE, DISTANCE) + DISTANCE
    for q, k, v, seed in zip(*(x[:, :, 0].double() for x in (*tensors, dout))):
        scores = q @ k.T * scale + (table[0] if case == "bias" else table[0][distances]).double()
        weights = scores.softmax(-1)
        dweights = seed @ v.T
        gradients = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        total += gradients if case == "bias" else torch.zeros_like(total).index_add_(0, distances.flatten(), gradients.flatten())
    return total


def captured_row_of(case: str, head_dim: int, seqlen: int, rounds: int) -> dict:
    from torch.nn.attention.flex_attention import flex_attention

    batch, heads = TOTAL_TOKENS // seqlen, WIDTH // head_dim
    tensors = [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    width = (seqlen, seqlen) if case == "bias" else (2 * DISTANCE + 1,)
    table = torch.randn(heads, *width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    compiled = torch.compile(flex_attention, dynamic=False)
    attentions = {
        "fovea": (lambda *given: fovea.attention(*given, score_mod=added(case, table)), False),
        "flex": (lambda *given: compiled(*given, score_mod=added(case, table)), True),
    }
    row, calls = started_row(case, head_dim, seqlen), {}
    with torch.no_grad():
        exact = exact_captured(case, tensors, table, dout)
    for name, (attention, is_bhsd) in attentions.items():
        try:
            call = autograd_call(attention, tensors, table, dout, is_bhsd)
            error = (call()[0].double() - exact).norm() / exact.norm()
        except RuntimeError as refusal:  # Flex runs out of memory, or of shared memory
            row["refused"][name] = str(refusal).splitlines()[0]
            continue
        row["errors"][name] = [error.item()]
        calls[name] = call
    for name, values in times_of(calls, rounds).items():
        is_right = row["errors"][name][0] <= CAPTURED_ERROR
        median = statistics.median(values)
        row["tflops"][name] = work_of(batch, heads, head_dim, seqlen**2) / median / 1e9 if is_right else math.nan
        row["spread"][name] = (max(values) - min(values)) / median
    return row


def product_tflops() -> float:
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / statistics.median(times_of({"product": lambda: a @ b}, 9)["product"]) / 1e9


CONTENDERS = ("fovea", "any order", "plain", "fa2", "cudnn", "flex")


def markdown(case: str, rows: list[dict], product: float) -> str:
    names = [name for name in CONTENDERS if any(name in row["tflops"] for row in rows)]
    lines = [f"## Backward, {case}", "", "| case | " + " | ".join(names) + " | of the product | " +
             " | ".join(f"to {name}" for name in names[1:]) + " | error | spread |", "|---" * (2 * len(names) + 3) + "|"]
    for row in rows:
        rates = row["tflops"]
        ours = rates.get("fovea", math.nan)
        cells = [f"{rates[name]:.0f}" if name in rates else "-" for name in names]
        cells.append(f"{ours / product:.0%}")
        cells += [f"{ours / rates[name]:.3f}" if name in rates else "-" for name in names[1:]]
        cells += [f"{max(row['errors'].get('fovea', [math.nan])):.1e}", f"{row['spread'].get('fovea', math.nan):.0%}"]
        lines.append("| " + " | ".join([f"d{row['head_dim']} {row['seqlen']}", *cells]) + " |")
    refused = sorted({(name, why) for row in rows for name, why in row["refused"].items()})
    return "\n".join([*lines, "", *(f"{name} did not run: {why}" for name, why in refused)])


def show(row: dict) -> None:
    figures = "  ".join(f"{name} {value:.1f}" for name, value in row["tflops"].items())
    errors = " ".join(f"{name} {max(each):.1e}" for name, each in row["errors"].items())
    print(f"d{row['head_dim']} {row['case']} {row['seqlen']}:  {figures}   errors {errors}  {row['refused'] or ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="full,causal")
    parser.add_argument("--head-dims", default="128,64,256")
    parser.add_argument("--seqlens", default="512,2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    product, rows, cases = product_tflops(), [], args.cases.split(",")
    for head_dim in map(int, args.head_dims.split(",")):
        for case in cases:
            seqlens = [TOTAL_TOKENS] if case == "packed" else map(int, args.seqlens.split(","))
            for seqlen in seqlens:
                row = (captured_row_of if case in CAPTURED_CASES else row_of)(case, head_dim, seqlen, args.rounds)
                rows.append(row)
                show(row)
                kept = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "product_tflops": product, "rows": rows}
                if args.json:
                    args.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
                if args.markdown:
                    tables = [markdown(each, [row for row in rows if row["case"] == each], product) for each in cases]
                    args.markdown.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
