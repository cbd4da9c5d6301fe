#!/usr/bin/env python3
"""Attention over a KV cache on a GPU through the C ABI, against the plain formula in float64 and the CPU's append: twice each.

usage: gpu_decode_check.py --library libfovea.so [--match paged] [--device cpu]     exit code 77 where there is no PyTorch with a GPU

--device cpu asks the same of the CPU, which says that these questions are put rightly. Rows, pages and table entries that no sequence uses are poison, as are outputs and workspaces; both runs must give the same bits.
"""

import argparse
import ctypes
import math
import sys
from dataclasses import dataclass, field, replace

import fovea_ctypes as fovea

try:
    import torch
except ImportError:
    torch = None

RELATIVE_OUT, ABSOLUTE_LSE = 6e-3, 2e-3  # as gpu_forward_check.py; lse beside queries that are rounded after they are turned
MAX_POSITIONS = 4096


@dataclass
class Case:
    lengths: list  # of each sequence, before the append
    seqlen_q: int = 1
    num_new: int = 0
    heads_q: int = 8
    heads_kv: int = 2
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "bfloat16"
    new_dtype: str = ""  # of the appended tokens; empty: dtype
    page_size: int = 0
    capacity: int = 0  # rows; 0: what is needed and some more
    has_slots: bool = False
    has_left_padding: bool = False
    has_heads_first: bool = False
    is_latent: bool = False  # v is the view of k's first columns
    rotary: str = ""  # halves, pairs, positions
    fields: dict = field(default_factory=dict)
    mask: object = None  # of positions: (q_idx, kv_idx, seqlen_q, seqlen_kv); default causal
    score: object = None

    def torch_dtype(self):
        return getattr(torch, self.dtype)


class Memory:
    """The tensors of a case on one device; the same contents for the same seed."""

    def __init__(self, case, seed=1):
        self.case, random = case, torch.Generator().manual_seed(seed)
        batch = len(case.lengths)
        normal = lambda *shape: torch.randn(*shape, generator=random)
        padding = [3 + 5 * i if case.has_left_padding else 0 for i in range(batch)]
        rows = [length + pad for length, pad in zip(case.lengths, padding)]
        capacity = case.capacity or max(rows) + case.num_new + 7
        self.keys = [normal(length, case.heads_kv, case.head_dim).to(case.torch_dtype()) for length in case.lengths]
        self.values = [keys[..., :case.head_dim_v] if case.is_latent else normal(*keys.shape[:2], case.head_dim_v).to(case.torch_dtype())
                       for keys in self.keys]
        self.t = {"q": normal(batch, case.seqlen_q, case.heads_q, case.head_dim).to(case.torch_dtype())}
        if case.page_size:
            self.place_in_pages(rows, capacity, random)
        else:
            num_slots = batch + 2
            slots = torch.randperm(num_slots, generator=random)[:batch] if case.has_slots else torch.arange(batch)
            self.places = [(torch.full((row,), int(slots[i])), torch.arange(row)) for i, row in enumerate(rows)]
            self.shape = (num_slots, capacity)
            if case.has_slots:
                self.t["batch_idx"] = slots.int()
        self.t["k"], self.t["v"] = self.cache(self.keys, case.head_dim, padding), self.cache(self.values, case.head_dim_v, padding)
        self.share_memory()
        self.t["seqlens"] = torch.tensor(rows, dtype=torch.int32)
        if case.has_left_padding:
            self.t["left_padding"] = torch.tensor(padding, dtype=torch.int64)
        new_dtype = getattr(torch, case.new_dtype or case.dtype)
        if case.num_new:
            self.t["append_k"] = normal(batch, case.num_new, case.heads_kv, case.head_dim).to(new_dtype)
            self.t["append_v"] = normal(batch, case.num_new, case.heads_kv, case.head_dim_v).to(new_dtype)
        if case.rotary:
            half = case.head_dim // 2 - 8
            angles = torch.arange(MAX_POSITIONS).view(-1, 1) * 10000.0 ** -(torch.arange(half) / half)
            self.t["rotary_cos"], self.t["rotary_sin"] = angles.cos(), angles.sin()
            if case.rotary == "positions":
                self.t["rotary_positions"] = torch.randint(0, 300, (batch, case.seqlen_q), generator=random)
        self.t["out"] = torch.full((batch, case.seqlen_q, case.heads_q, case.head_dim_v), math.nan, dtype=case.torch_dtype())
        self.t["lse"] = torch.full((batch, case.heads_q, case.seqlen_q), math.nan)

    def place_in_pages(self, rows, capacity, random):
        page_size, used = self.case.page_size, [row + self.case.num_new for row in rows]
        pages_of = [math.ceil(row / page_size) for row in used]
        order = torch.randperm(sum(pages_of) + 2, generator=random)
        width = math.ceil(capacity / page_size) + 1
        table = torch.tensor([-1, 2_000_000_000] * width, dtype=torch.int32)[:width].repeat(len(rows), 1)
        self.places, first = [], 0
        for i, (row, count) in enumerate(zip(rows, pages_of)):
            table[i, :count] = order[first:first + count].int()
            self.places.append((order[first + torch.arange(row) // page_size], torch.arange(row) % page_size))
            first += count
        self.t["page_table"], self.shape = table, (sum(pages_of) + 2, page_size)

    def cache(self, sequences, head_dim, padding):
        heads, dtype = self.case.heads_kv, self.case.torch_dtype()
        if self.case.has_heads_first:
            tensor = torch.full((self.shape[0], heads, self.shape[1], head_dim), math.nan, dtype=dtype).transpose(1, 2)
        else:
            tensor = torch.full((*self.shape, heads, head_dim), math.nan, dtype=dtype)
        for (slots, rows), sequence, pad in zip(self.places, sequences, padding):
            tensor[slots[pad:], rows[pad:]] = sequence
        return tensor

    def share_memory(self):
        if self.case.is_latent:
            self.t["v"] = self.t["k"][..., :self.case.head_dim_v]

    def to(self, device):
        """Strides are kept."""
        def copied(t):
            result = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            return result.copy_(t)
        self.t = {name: copied(t) for name, t in self.t.items()}
        self.share_memory()
        return self

    def turned(self, x, positions):
        """x [rows, heads, head_dim] in float64, rows at these positions; negative ones are left."""
        if not self.case.rotary:
            return x
        cos, sin = (self.t[name].double().cpu()[positions.clamp(min=0)].unsqueeze(1) for name in ("rotary_cos", "rotary_sin"))
        half = cos.shape[-1]
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if self.case.rotary == "pairs" else (
            slice(0, half), slice(half, 2 * half))
        result = x.clone()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., first] * sin + x[..., second] * cos
        return torch.where((positions >= 0).view(-1, 1, 1), result, x)

    def reference(self):
        """out and lse in float64; turned keys are rounded as the cache rounds them."""
        case, outs, lses = self.case, [], []
        for i, length in enumerate(case.lengths):
            keys, values = self.keys[i].double(), self.values[i].double()
            seqlen_kv = length + case.num_new
            q, given = self.t["q"][i].double().cpu(), self.t.get("rotary_positions")
            at = lambda count: given[i].cpu() if given is not None else torch.arange(seqlen_kv - count, seqlen_kv)
            if case.num_new:
                new_k = self.turned(self.t["append_k"][i].double().cpu(), at(case.num_new)) if case.rotary else \
                    self.t["append_k"][i].double().cpu()
                keys = torch.cat((keys, new_k.to(case.torch_dtype()).double()))
                values = torch.cat((values, self.t["append_v"][i].cpu().to(case.torch_dtype()).double()))
            if case.rotary:
                q = self.turned(q, at(case.seqlen_q)).to(case.torch_dtype()).double()
            group = case.heads_q // case.heads_kv
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            s = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(case.head_dim)
            row, col = torch.arange(case.seqlen_q).view(-1, 1), torch.arange(seqlen_kv).view(1, -1)
            if case.score:
                s = case.score(s, row, col, case.seqlen_q, seqlen_kv)
            mask = case.mask or (lambda q_idx, kv_idx, nq, nk: kv_idx <= q_idx + nk - nq)
            s = s.masked_fill(~mask(row, col, case.seqlen_q, seqlen_kv).unsqueeze(0), -math.inf)
            top = s.amax(-1, keepdim=True).clamp(min=-1e300) if seqlen_kv else torch.zeros(*s.shape[:2], 1, dtype=s.dtype)
            p = torch.exp(s - top)
            total = p.sum(-1, keepdim=True)
            out = torch.einsum("hqk,khd->qhd", torch.where(total > 0, p / total, torch.zeros_like(p)), values)
            outs.append(out)
            lses.append(torch.where(total > 0, top + torch.log(total), torch.full_like(total, -math.inf)).squeeze(-1))
        return torch.stack(outs), torch.stack(lses)


def decode_args(memory, stream=None, **fields):
    t = {name: fovea.torch_tensor(x) for name, x in memory.t.items()}
    forward = fovea.forward_args(stream=stream, **{name: t.pop(name) for name in ("q", "k", "v", "out", "lse")}, **fields)
    return fovea.sized(fovea.DecodeArgs, forward=ctypes.pointer(forward), is_interleaved=int(memory.case.rotary == "pairs"),
                       **{name: ctypes.pointer(x) for name, x in t.items()})


class Checker:
    def __init__(self, library, match, device):
        self.library, self.match, self.device, self.num_wrong = library, match, device, 0

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None

    def report(self, name, is_right, text=""):
        self.num_wrong += not is_right
        print(f"{'right' if is_right else 'WRONG'}  {name:36} {text}", flush=True)

    def workspace(self, args, case):
        size, longest = ctypes.c_size_t(), max(case.lengths) + case.num_new
        self.library.call(self.library.c.fovea_decode_workspace_bytes, ctypes.byref(args), longest, ctypes.byref(size))
        return torch.full((max(size.value, 1),), 255, device=self.device, dtype=torch.uint8)

    def run(self, case, seed=1):
        memory = Memory(case, seed).to(self.device)
        args = decode_args(memory, self.stream(), **case.fields)
        workspace = self.workspace(args, case)
        args.forward.contents.workspace, args.forward.contents.workspace_bytes = workspace.data_ptr(), workspace.numel()
        self.library.attention_decode(args)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return memory

    def run_on_cpu(self, case):
        """What the CPU's append leaves in the cache."""
        memory = Memory(case)
        self.library.append_to_cache(decode_args(memory))
        return memory

    def check(self, name, case):
        if self.match not in name:
            return
        got, again = self.run(case), self.run(case)
        expected, expected_lse = got.reference()
        out, lse = got.t["out"].double().cpu(), got.t["lse"].double().cpu()
        error = ((out - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        is_finite = torch.isfinite(expected_lse)
        lse_error = (lse - expected_lse)[is_finite].abs().max().item() if is_finite.any() else 0.0
        is_right = error < RELATIVE_OUT and lse_error < ABSOLUTE_LSE and bool((torch.isfinite(lse) == is_finite).all())
        text = f"out {error:.1e}  lse {lse_error:.1e}"
        if not all(same_bits(got.t[x], again.t[x]) for x in ("out", "lse", "k", "v")):
            is_right, text = False, text + "  DIFFERENT BITS"
        cpu = self.run_on_cpu(case) if case.num_new else Memory(case)
        for x in ("k", "v"):
            if not same_bits(got.t[x].cpu(), cpu.t[x]):
                is_right, text = False, text + f"  cache.{x} IS NOT THE CPU'S"
        self.report(name, is_right, text)


def same_bits(a, b):
    as_ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(as_ints), b.contiguous().view(as_ints))


def check_all(checker):
    decode = Case(lengths=[600, 17, 256, 0], page_size=16)
    contiguous = replace(decode, page_size=0)
    for name, layout in (("paged", decode), ("contiguous", contiguous),
                         ("pages of 5", replace(decode, page_size=5)),
                         ("pages of 1", replace(decode, page_size=1)),
                         ("pages of 8", replace(decode, page_size=8)),
                         ("pages of 24", replace(decode, page_size=24)),
                         ("pages, heads first, padding", replace(decode, has_heads_first=True, has_left_padding=True)),
                         ("slots, padding", replace(contiguous, has_slots=True, has_left_padding=True))):
        checker.check(name, layout)
        checker.check(f"{name}, append", replace(layout, num_new=1))
        checker.check(f"{name}, append, rotary", replace(layout, num_new=1, rotary="halves"))
        checker.check(f"{name}, prefill of 70", replace(layout, num_new=70, seqlen_q=70, rotary="pairs"))
    chunk = Case(lengths=[0, 1, 129, 900], seqlen_q=200, page_size=16)
    for page_size in (8, 16, 32, 64, 128, 256, 48):  # of 48: another kernel
        checker.check(f"chunk of 200, pages of {page_size}", replace(chunk, page_size=page_size))
    for head_dim, head_dim_v in ((64, 64), (192, 128), (192, 192), (256, 256), (72, 40)):
        checker.check(f"chunk of 200, head_dim {head_dim}, {head_dim_v}", replace(chunk, head_dim=head_dim, head_dim_v=head_dim_v))
    checker.check("chunk of 200, f16, heads first", replace(chunk, dtype="float16", has_heads_first=True, page_size=64))
    checker.check("chunk of 200, append, rotary", replace(chunk, num_new=200, rotary="halves"))
    checker.check("chunk of 200, window, one head each", replace(
        chunk, heads_kv=8, fields={"causal": 1, "has_window_left": 1, "window_left": 100},
        mask=lambda q, k, nq, nk: (k <= q + nk - nq) & (k >= q + nk - nq - 100)))
    checker.check("chunk of 200, softcap", replace(chunk, fields={"softcap": 5.0, "causal": 1},
                                                   score=lambda s, q, k, nq, nk: 5 * torch.tanh(s / 5)))
    checker.check("chunk of 3000, 40000 keys", replace(chunk, lengths=[40000, 7, 3000], seqlen_q=3000, heads_q=4, heads_kv=1))
    for head_dim in (64, 80, 192, 256):
        checker.check(f"paged, head_dim {head_dim}", replace(decode, head_dim=head_dim, head_dim_v=head_dim, num_new=1, rotary="pairs"))
    for seqlen_q, heads_q in ((1, 34), (4, 16), (11, 6), (16, 6), (8, 16)):  # 17, 32, 33, 48 and 64 rows of a key head
        rows = replace(decode, lengths=[5000, 17, 256, 0], seqlen_q=seqlen_q, heads_q=heads_q)
        checker.check(f"paged, {seqlen_q * heads_q // 2} rows", rows)
        checker.check(f"slots, {seqlen_q * heads_q // 2} rows, f16", replace(rows, page_size=0, has_slots=True, dtype="float16"))
        checker.check(f"paged, {seqlen_q * heads_q // 2} rows, head_dim 256", replace(rows, page_size=24, head_dim=256, head_dim_v=256))
    # More splits than half a warp has lanes, and columns for half of them in the last 64.
    checker.check("slots, head_dim 192, 31 splits", replace(contiguous, has_slots=True, lengths=[7700, 300], head_dim=192, head_dim_v=192))
    # One key head whose values are its first columns: on Hopper sm90/decode_latent, once splits of 512 keys and of 2,048.
    latent = Case(lengths=[5000, 17, 512, 0, 64], heads_q=16, heads_kv=1, head_dim=576, head_dim_v=512, page_size=64, is_latent=True)
    for heads_q, seqlen_q in ((16, 1), (16, 5), (1, 1), (5, 3), (33, 2), (64, 1), (80, 2), (128, 1), (128, 4)):
        rows = replace(latent, heads_q=heads_q, seqlen_q=seqlen_q)
        checker.check(f"latent, {heads_q} heads, {seqlen_q} queries", rows)
        checker.check(f"latent slots, {heads_q} heads, {seqlen_q} queries, f16", replace(
            rows, page_size=0, has_slots=True, has_left_padding=True, dtype="float16"))
    for page_size in (8, 16, 24, 128, 5):  # of 5: another kernel
        checker.check(f"latent, pages of {page_size}", replace(latent, page_size=page_size, seqlen_q=2))
    checker.check("latent, 40 sequences, 128 heads", replace(latent, lengths=[300 * i % 4100 for i in range(40)], heads_q=128))
    checker.check("latent, window", replace(latent, seqlen_q=7, fields={"causal": 1, "has_window_left": 1, "window_left": 100},
                                            mask=lambda q, k, nq, nk: (k <= q + nk - nq) & (k >= q + nk - nq - 100)))
    checker.check("latent, softcap, sees all", replace(latent, fields={"softcap": 5.0, "causal": 1}, seqlen_q=3,
                                                       score=lambda s, q, k, nq, nk: 5 * torch.tanh(s / 5)))
    checker.check("latent, chunk of 200", replace(latent, lengths=[900, 200, 7], heads_q=8, seqlen_q=200))
    checker.check("paged, NaN behind, 12 rows of 3 heads", replace(decode, lengths=[700, 2100], seqlen_q=12, heads_q=6, heads_kv=2))
    checker.check("paged, f16, positions", replace(decode, dtype="float16", num_new=4, seqlen_q=4, rotary="positions"))
    checker.check("paged, f32", replace(decode, dtype="float32", num_new=2, seqlen_q=2, rotary="halves"))
    checker.check("paged, tokens of f32", replace(decode, new_dtype="float32", num_new=3, seqlen_q=3, rotary="halves"))
    checker.check("slots, 8 heads a key head", replace(contiguous, has_slots=True, heads_q=64, heads_kv=8, num_new=1))
    checker.check("paged, one head each", replace(decode, heads_q=4, heads_kv=4))
    checker.check("paged, long", replace(decode, lengths=[20000, 1, 5000], num_new=1))
    checker.check("paged, capacity far beyond", replace(decode, capacity=200_000, num_new=1))
    checker.check("queries before the first key", replace(decode, lengths=[3, 40], seqlen_q=9, rotary="halves"))
    checker.check("paged, window", replace(decode, fields={"causal": 1, "has_window_left": 1, "window_left": 100}, num_new=1,
                                           mask=lambda q, k, nq, nk: (k <= q + nk - nq) & (k >= q + nk - nq - 100)))
    checker.check("paged, softcap, sees all", replace(decode, fields={"softcap": 5.0, "causal": 1}, seqlen_q=3,
                                                      score=lambda s, q, k, nq, nk: 5 * torch.tanh(s / 5)))
    slopes = torch.tensor([2.0**-h for h in range(8)], device=checker.device)
    checker.check("paged, program with a tensor", replace(
        decode, seqlen_q=2, num_new=2, fields={"causal": 1, "score_mod": "score + slopes[q_head] * (kv_idx - seqlen_kv)",
                                               "tensors": {"slopes": fovea.torch_tensor(slopes)}},
        score=lambda s, q, k, nq, nk: s + slopes.cpu().double().view(-1, 1, 1) * (k - nk)))


def check_layouts(checker):
    """The bits of few rows do not know where the keys lie, how many could, or who else is in the batch."""
    case = Case(lengths=[600, 17, 5000], seqlen_q=2)
    outs = {name: checker.run(other).t["out"] for name, other in (
        ("contiguous", case), ("pages of 16", replace(case, page_size=16)), ("pages of 24", replace(case, page_size=24)),
        ("capacity", replace(case, capacity=100_000)))}
    alone = Memory(case).to("cuda")
    for x in ("q", "out", "lse", "seqlens"):
        alone.t[x] = alone.t[x][1:2]
    alone.t["k"], alone.t["v"] = alone.t["k"][1:2], alone.t["v"][1:2]
    checker.library.attention_decode(decode_args(alone, checker.stream()))
    torch.cuda.synchronize()
    is_right = all(same_bits(out, outs["contiguous"]) for out in outs.values())
    checker.report("the same bits in every layout", is_right and same_bits(alone.t["out"][0], outs["contiguous"][1]))


def check_graph(checker, name, case):
    """A captured step, replayed for growing lengths, gives what calls give one by one."""
    steps, replayed, called = 5, Memory(case).to("cuda"), Memory(case).to("cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    args = decode_args(replayed, side.cuda_stream)
    workspace = checker.workspace(args, case)
    args.forward.contents.workspace, args.forward.contents.workspace_bytes = workspace.data_ptr(), workspace.numel()
    decode = lambda a: checker.library.attention_decode(a)
    decode(decode_args(Memory(case).to("cuda"), torch.cuda.current_stream().cuda_stream))  # kernels are loaded before a capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        decode(args)
    is_right = True
    for step in range(steps):
        for x in ("q", "append_k", "append_v"):
            replayed.t[x].copy_(torch.randn_like(replayed.t[x]))
            called.t[x].copy_(replayed.t[x])
        torch.cuda.synchronize()
        graph.replay()
        decode(decode_args(called, torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        is_right &= all(same_bits(replayed.t[x], called.t[x]) for x in ("out", "lse", "k", "v"))
        is_right &= not bool(torch.isnan(replayed.t["out"]).any())
        for memory in (replayed, called):
            memory.t["seqlens"] += case.num_new
    checker.report(name, is_right, f"{steps} steps")


def check_refusals(checker):
    """By name, before anything is written."""
    memory = Memory(Case(lengths=[40, 7], num_new=1)).to("cuda")
    before = memory.t["k"].clone()
    memory.t["q"], memory.t["out"] = memory.t["q"].half(), memory.t["out"].half()
    try:
        checker.library.attention_decode(decode_args(memory, torch.cuda.current_stream().cuda_stream))
        text = "not refused"
    except fovea.Unsupported as error:
        text = str(error)
    torch.cuda.synchronize()
    checker.report("mixed dtypes are refused", "k is bf16 and q is f16" in text and same_bits(memory.t["k"], before))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--match", default="", help="only cases whose names hold this, and no graphs: for compute-sanitizer")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if torch is None or (args.device == "cuda" and not torch.cuda.is_available()):
        print("gpu_decode_check: skipped, no PyTorch with a GPU")
        return 77
    torch.manual_seed(0)
    checker = Checker(fovea.Library(args.library), args.match, args.device)
    check_all(checker)
    if not args.match and args.device == "cuda":
        growing = Case(lengths=[5, 250, 1000], num_new=1, rotary="halves", page_size=16)
        growing.capacity = 1100
        check_graph(checker, "captured, slots", replace(growing, page_size=0, has_slots=True))
        check_graph(checker, "captured, pages", growing)
        check_layouts(checker)
        check_refusals(checker)
    print(f"{checker.num_wrong} wrong")
    return 1 if checker.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
