#!/usr/bin/env python3
"""Random attention problems through the C ABI, against float64, element by element: dtypes, layouts, strides, heads, masks, programs, sinks, packed
sequences and caches, contiguous and paged, drawn together; on a GPU in many processes, since compiling takes the time, or on the CPU.

usage: random_check.py --library libfovea.so [--problems 1000] [--seed 1] [--processes N] [--device cuda:0] [--only KERNEL]
exit:  0 right; 1 wrong, each with a command that repeats it; 77 where there is no PyTorch, or none with a GPU

Problems come in kernels: what shapes a kernel (dtype, head dims, programs) is drawn once for every sixteen problems, which differ in lengths, strides,
values and what programs read. What no row sees is NaN or infinity, outputs and workspaces start as NaN, gaps between rows must keep what they held, and
every problem runs twice with the same bits.

An element of out may err by its weights' rounding (their dtype's half unit, of each weight times |v|; in f16 at least half a denormal beside a largest
power of 1), by the error that scores of f32 products have (their dot product's absolute sum, one rounding each), and by its own rounding. Nothing is
allowed for luck. GPUs may flush what scales a row, beside powers up to 2^8, where that is below the normal range of f32 (large sinks).
"""

import argparse
import ctypes
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass, field

import fovea_ctypes as fovea

try:
    import torch
except ImportError:
    torch = None

PROBLEMS_PER_KERNEL = 16
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # half a unit in the last place of 1, and of a weight just below 1
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
HEAD_DIMS = [(64, 64)] * 4 + [(128, 128)] * 5 + [(96, 96), (192, 128), (256, 256), (192, 192), (40, 40), (80, 72), (33, 65), (8, 256), (128, 64)]
HEADS = [(1, 1), (2, 2), (4, 4), (4, 2), (8, 2), (8, 1), (6, 2), (7, 1), (16, 1)]
LENGTHS = [0, 1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 176, 191, 192, 193, 255, 256, 257, 333, 500, 512, 700, 1031]


@dataclass
class Kernel:
    """What is drawn once for all problems of a kernel."""

    dtype: str = "bfloat16"
    head_dims: tuple = (64, 64)
    heads: tuple = (2, 2)
    layout: str = "dense"  # dense, packed, slots (a contiguous cache), pages
    page_size: int = 16
    words: list = field(default_factory=list)  # of WORDS
    has_sinks: bool = False
    wants_row_max: bool = False
    scale: float = 0.0  # 0: the default


def positions(seqlen_q, seqlen_kv):
    return torch.arange(seqlen_q).view(-1, 1), torch.arange(seqlen_kv).view(1, -1)


class Programs:
    """The fields of a call that pose its score and mask, and what they mean for one sequence."""

    def __init__(self, draw, kernel, batch, longest_q, longest_kv):
        self.draw, self.kernel = draw, kernel
        self.batch, self.longest_q, self.longest_kv = batch, max(longest_q, 1), max(longest_kv, 1)
        self.fields, self.tensors, self.texts, self.mask_texts = {}, {}, [], []
        self.scores, self.masks = [], []  # functions of (batch, row, column, seqlen_q, seqlen_kv, score)
        for word in kernel.words:
            getattr(self, word)()
        if self.texts:
            self.fields["score_mod"] = self.texts[0]
        if self.mask_texts:
            self.fields["mask_mod"] = " && ".join(f"({text})" for text in self.mask_texts)

    def capture(self, name, t):
        """Any strides, gaps of NaN where they can be."""
        self.tensors[name] = strided(self.draw, t)
        return t.double() if t.is_floating_point() else t

    def softcap(self):
        self.fields["softcap"] = 5.0
        self.scores.append(lambda b, i, j, nq, nk, s: 5 * torch.tanh(s / 5))

    def alibi(self):
        slopes = self.capture("slopes", torch.rand(self.kernel.heads[0]) * 0.2)
        self.texts.append("score - slopes[q_head] * abs(q_idx + (seqlen_kv - seqlen_q) - kv_idx)")
        self.scores.append(lambda b, i, j, nq, nk, s: s - slopes.view(-1, 1, 1) * (i + nk - nq - j).abs())

    def bias(self):
        table = torch.randn(self.kernel.heads[0], self.longest_kv)
        if self.draw.random() < 0.3:
            table[self.draw.randrange(len(table))] = torch.finfo(torch.float32).min  # what hides keys elsewhere: an ordinary score here
        table = self.capture("table", table)
        self.texts.append("score + table[q_head, kv_idx]")
        self.scores.append(lambda b, i, j, nq, nk, s: (s.float() + table[:, j.view(-1)].float().unsqueeze(1)).double()
                           if bool((table < -1e30).any()) else s + table[:, j.view(-1)].unsqueeze(1))

    def relative(self):
        reach = 32
        table = self.capture("near", torch.randn(2 * reach + 1))
        self.texts.append(f"score + near[min(max(kv_idx - q_idx, -{reach}), {reach}) + {reach}]")
        self.scores.append(lambda b, i, j, nq, nk, s: s + table[(j - i).clamp(-reach, reach) + reach])

    def causal(self):
        self.fields["causal"] = 1
        self.masks.append(lambda b, i, j, nq, nk: j <= i + nk - nq)

    def window(self):
        left, right = self.draw.choice([(0, 0), (10, 5), (64, 0), (200, 64)])
        self.fields |= {"has_window_left": 1, "window_left": left, "has_window_right": 1, "window_right": right}
        self.masks.append(lambda b, i, j, nq, nk: (j >= i + nk - nq - left) & (j <= i + nk - nq + right))

    def prefix(self):
        lengths = self.capture("prefix", torch.randint(0, self.longest_kv + 1, (self.batch,), dtype=torch.int32))
        self.mask_texts.append("kv_idx < prefix[batch] || q_idx >= kv_idx")
        self.masks.append(lambda b, i, j, nq, nk: (j < lengths[b]) | (i >= j))

    def documents(self):
        ids = [self.capture(name, torch.sort(torch.randint(-1, 4, (self.batch, n), dtype=torch.int32)).values)
               for name, n in (("doc_q", self.longest_q), ("doc_kv", self.longest_kv))]
        self.mask_texts.append("doc_q[batch, q_idx] == doc_kv[batch, kv_idx] && doc_q[batch, q_idx] >= 0")
        self.masks.append(lambda b, i, j, nq, nk: (ids[0][b][i] == ids[1][b][j]) & (ids[0][b][i] >= 0))

    def scattered(self):
        keep = self.capture("keep", torch.rand(self.longest_kv) < 0.6)
        self.mask_texts.append("keep[kv_idx]")
        self.masks.append(lambda b, i, j, nq, nk: keep[j] & (i >= 0))

    def score(self, b, nq, nk, s):
        i, j = positions(nq, nk)
        for change in self.scores:
            s = change(b, i, j, nq, nk, s)
        return s

    def visible(self, b, nq, nk):
        i, j = positions(nq, nk)
        result = torch.ones(nq, nk, dtype=torch.bool)
        for mask in self.masks:
            result = result & mask(b, i, j, nq, nk)
        return result


SCORE_WORDS, MASK_WORDS = ("alibi", "bias", "relative"), ("causal", "window", "prefix", "documents", "scattered")


def draw_kernel(draw):
    kernel = Kernel(dtype=draw.choice(["bfloat16"] * 3 + ["float16"] * 2 + ["float32"]), head_dims=draw.choice(HEAD_DIMS), heads=draw.choice(HEADS),
                    layout=draw.choice(["dense"] * 3 + ["packed"] * 2 + ["slots", "pages"]), page_size=draw.choice([1, 7, 8, 16, 64, 256]),
                    has_sinks=draw.random() < 0.25, scale=draw.choice([0.0] * 6 + [-0.1, 0.0371]))
    kernel.wants_row_max = kernel.layout in ("dense", "packed") and draw.random() < 0.2
    if draw.random() < 0.2:
        kernel.words.append("softcap")
    if draw.random() < 0.4:
        kernel.words.append(draw.choice(SCORE_WORDS))
    kernel.words += draw.sample(MASK_WORDS, draw.choice([0, 0, 1, 1, 1, 2]))
    return kernel


def strided(draw, t, poison=None):
    """The same elements at a random layout: dimensions in another order in memory, rows padded, some turned round; gaps hold `poison`."""
    if t.dim() == 0 or t.numel() == 0:
        return t.clone()
    order = list(range(t.dim()))
    if draw.random() < 0.4:
        head, last = order[:-1], order[-1:]
        draw.shuffle(head)
        order = head + last if draw.random() < 0.8 else draw.sample(order, len(order))
    shape = [t.shape[d] for d in order]
    padded = [n + draw.choice([0, 0, 1, 8]) if draw.random() < 0.3 else n for n in shape]
    fill = poison if poison is not None else (math.nan if t.is_floating_point() else 1)
    base = torch.full(padded, fill, dtype=t.dtype, device=t.device)
    view = base[tuple(slice(0, n) for n in shape)].permute([order.index(d) for d in range(t.dim())])
    view.copy_(t)
    return view


def draw_values(draw, kernel, *shape):
    """Heavy tails among them, and sizes far from 1."""
    t = torch.randn(*shape)
    kind = draw.random()
    if kind < 0.15:
        t = t * (1 + 20 * (torch.rand_like(t) < 0.01))
    elif kind < 0.2:
        t = t * 1e-3
    elif kind < 0.23:
        t = torch.ones_like(t) * draw.choice([0.0, 1.0, -0.5])
    return t.to(getattr(torch, kernel.dtype))


def draw_sinks(draw, num_heads):
    sinks = torch.randn(num_heads).double() * 2
    if draw.random() < 0.3:
        sinks[draw.randrange(num_heads)] = draw.choice([math.inf, -math.inf, math.nan, 100.0, torch.finfo(torch.float32).min])
    return sinks


def with_sink(p, total, shift, top, sink):
    """A row's powers, their sum and what they are relative to, beside a sink that is any float: -inf is none, +inf takes all the weight, NaN makes NaN
    but of out where a row sees no key."""
    is_empty = (top == -math.inf).expand_as(total)
    shift_all = torch.where(is_empty, sink, torch.maximum(shift, sink))
    shift_all = torch.where(shift_all == -math.inf, torch.zeros_like(shift_all), shift_all)
    own = torch.where(is_empty, torch.zeros_like(total), torch.exp(shift - shift_all))
    of_sink = torch.where(sink == shift_all, torch.ones_like(total), torch.exp(sink - shift_all))
    return torch.where(is_empty, torch.zeros_like(p), p * own), total * own + of_sink, shift_all


def reference(q, k, v, kernel, programs, sinks, b, is_gpu):
    """One sequence, [rows, heads, head_dim], in float64: out, lse, row_max, and what an element of out, and of lse, may err by."""
    group = kernel.heads[0] // kernel.heads[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    scale = kernel.scale or 1 / math.sqrt(q.shape[-1])
    nq, nk = q.shape[1], k.shape[1]
    visible = programs.visible(b, nq, nk)
    hidden = ~visible.any(0) if nq else torch.ones(nk, dtype=torch.bool)
    k, v = (t.masked_fill(hidden.view(1, -1, 1), 0) for t in (k, v))
    raw = q @ k.transpose(-1, -2) * scale
    dots = (q.abs() @ k.abs().transpose(-1, -2)) * abs(scale)  # what a dot product's roundings are a share of
    s = programs.score(b, nq, nk, raw)
    s = s.masked_fill(~visible, -math.inf)
    top = s.amax(-1, keepdim=True) if nk else torch.full((*s.shape[:2], 1), -math.inf, dtype=torch.double)
    shift = torch.where(top == -math.inf, torch.zeros_like(top), top)
    p = torch.exp(s - shift)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        p, total, shift = with_sink(p, total, shift, top, sinks.view(-1, 1, 1))
    weights = torch.where((total == 0) | (top == -math.inf), torch.zeros_like(p), p / total)
    out = weights @ v
    lse = torch.where(total == 0, torch.full_like(total, -math.inf), shift + torch.log(total))
    finite = s.masked_fill(~visible | (s.abs() > 1e30), 0).abs()  # scores of the lowest float are exact, and so are their differences
    error = 2.0**-23 * (dots.masked_fill(~visible, 0).amax(-1, keepdim=True) + 8 * finite.amax(-1, keepdim=True) + 8) if nk else torch.zeros_like(top)
    error = error + 2.0**-17  # exponents of the fastest kernels are rounded at 2^-18
    spread = weights @ v.abs()
    if kernel.dtype == "float16" and nk:
        spread = spread + 2.0**-25 / ROUNDING["bfloat16"] * weights.amax(-1, keepdim=True) * (visible.double() @ v.abs())
    out_error = spread * (2 * error + ROUNDING["float32" if kernel.dtype == "float32" else "bfloat16"])
    if is_gpu and nk:
        out_error = out_error + 2.0**-118 * (1 + visible.double() @ v.abs())
    return (out.transpose(0, 1), lse.squeeze(-1), top.squeeze(-1), out_error.transpose(0, 1), error.squeeze(-1).expand(-1, nq), hidden)


class Problem:
    """Tensors of one problem on one device, and what they should become."""

    def __init__(self, kernel, draw, device):
        self.kernel, self.draw, self.device = kernel, draw, device
        torch.manual_seed(draw.randrange(2**31))
        count = draw.choice([1, 2, 3]) if kernel.layout == "dense" else draw.choice([1, 2, 5, 33])
        short = kernel.layout in ("slots", "pages") or draw.random() < 0.3
        limit = 300 if count > 5 else 1100
        pick = lambda most: draw.choice([n for n in LENGTHS if n <= most])
        same_q = kernel.layout != "packed"
        first_q = draw.choice([1, 1, 2, 5, 17]) if short else max(pick(limit), 1)
        self.lengths_q = [first_q if same_q else pick(limit) for _ in range(count)]
        first_kv = pick(limit)
        self.lengths_kv = [first_kv if kernel.layout == "dense" else pick(limit) for _ in range(count)]
        self.programs = Programs(draw, kernel, count, max(self.lengths_q), max(self.lengths_kv))
        self.sinks = draw_sinks(draw, kernel.heads[0]) if kernel.has_sinks else None
        self.q, self.k, self.v = (
            [draw_values(draw, kernel, n, heads, head_dim) for n in lengths]
            for lengths, heads, head_dim in ((self.lengths_q, kernel.heads[0], kernel.head_dims[0]), (self.lengths_kv, kernel.heads[1], kernel.head_dims[0]),
                                             (self.lengths_kv, kernel.heads[1], kernel.head_dims[1])))
        self.expected = [reference(q, k, v, kernel, self.programs, self.sinks, b, device != "cpu") for b, (q, k, v) in enumerate(zip(self.q, self.k, self.v))]
        if draw.random() < 0.5:
            for k, v, (*_, hidden) in zip(self.k, self.v, self.expected):
                k[hidden], v[hidden] = draw.choice([math.nan, math.inf]), math.nan
        self.place()

    def place(self):
        """The tensors of the call, on the device."""
        kernel, draw, to = self.kernel, self.draw, lambda t: strided(draw, t.to(self.device))
        self.t = {}
        if kernel.layout == "packed":
            trailing = draw.choice([0, 0, 5])
            for name, parts in (("q", self.q), ("k", self.k), ("v", self.v)):
                packed = torch.cat(parts)
                tail = torch.full((trailing, *packed.shape[1:]), math.nan, dtype=packed.dtype)
                self.t[name] = to(torch.cat((packed, tail)))
            for name, lengths in (("cu_seqlens_q", self.lengths_q), ("cu_seqlens_kv", self.lengths_kv)):
                bounds = torch.tensor([0, *lengths]).cumsum(0)
                self.t[name] = to(bounds if draw.random() < 0.5 else bounds.int())
        else:
            self.t["q"] = to(torch.stack(self.q))
            if kernel.layout == "dense":
                self.t["k"], self.t["v"] = to(torch.stack(self.k)), to(torch.stack(self.v))
            else:
                self.place_in_cache(to)
        if self.sinks is not None:
            self.t["sinks"] = to(self.sinks.float())
        rows = self.t["q"].shape[:-2]
        heads = kernel.heads[0]
        self.out_shape = (*rows, heads, kernel.head_dims[1])
        self.lse_shape = (heads, *rows) if kernel.layout == "packed" else (rows[0], heads, rows[1])
        self.captured = {name: fovea.torch_tensor(t) for name, t in self.moved().items()}
        self.before_outputs = draw.getstate()

    def moved(self):
        self.on_device = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device).copy_(t)
                          for name, t in self.programs.tensors.items()}
        return self.on_device

    def place_in_cache(self, to):
        kernel, draw = self.kernel, self.draw
        longest, count = max(self.lengths_kv), len(self.lengths_kv)
        lengths = torch.tensor(self.lengths_kv)
        self.t["seqlens"] = to(lengths if draw.random() < 0.5 else lengths.int())
        if kernel.layout == "slots":
            slots = draw.sample(range(count + 2), count)
            self.t["batch_idx"] = to(torch.tensor(slots, dtype=torch.int32))
            capacity = longest + draw.choice([1, 8])
            for name, parts in (("k", self.k), ("v", self.v)):
                cache = torch.full((count + 2, capacity, *parts[0].shape[1:]), math.nan, dtype=parts[0].dtype)
                for slot, part in zip(slots, parts):
                    cache[slot, :len(part)] = part
                self.t[name] = to(cache)
            return
        size = kernel.page_size
        width = math.ceil(max(longest, 1) / size) + 1
        order = list(range(sum(math.ceil(n / size) for n in self.lengths_kv) + 2))
        draw.shuffle(order)
        table, first = torch.full((count, width), -1, dtype=torch.int32), 0
        caches = {name: torch.full((len(order), size, *parts[0].shape[1:]), math.nan, dtype=parts[0].dtype) for name, parts in (("k", self.k), ("v", self.v))}
        for b, n in enumerate(self.lengths_kv):
            pages = order[first:first + math.ceil(n / size)]
            table[b, :len(pages)] = torch.tensor(pages, dtype=torch.int32)
            for name, parts in (("k", self.k), ("v", self.v)):
                for at, page in enumerate(pages):
                    part = parts[b][at * size:(at + 1) * size]
                    caches[name][page, :len(part)] = part
            first += len(pages)
        self.t["page_table"] = to(table)
        self.t |= {name: to(cache) for name, cache in caches.items()}

    def run(self, library):
        """(out, lse, row_max) of poisoned tensors with gaps, the same ones in every run: bits may depend on what addresses are multiples of."""
        self.draw.setstate(self.before_outputs)
        torch_dtype = getattr(torch, self.kernel.dtype)
        outputs = {"out": strided(self.draw, torch.full(self.out_shape, math.nan, dtype=torch_dtype, device=self.device), 7.0),
                   "lse": strided(self.draw, torch.full(self.lse_shape, math.nan, device=self.device), 7.0)}
        if self.kernel.wants_row_max:
            outputs["row_max"] = torch.full(self.lse_shape, math.nan, device=self.device)
        t = {name: fovea.torch_tensor(x) for name, x in (self.t | outputs).items()}
        fields = {"stream": torch.cuda.current_stream().cuda_stream} if self.device != "cpu" else {}
        if self.kernel.scale:
            fields["softmax_scale"] = self.kernel.scale
        is_cached = self.kernel.layout in ("slots", "pages")
        forward_names = ("q", "k", "v", "out", "lse", "row_max", "sinks", "cu_seqlens_q", "cu_seqlens_kv")
        forward = fovea.forward_args(tensors=self.captured, **{n: t[n] for n in forward_names if n in t}, **fields, **self.programs.fields)
        if is_cached:
            rest = {n: ctypes.pointer(x) for n, x in t.items() if n not in forward_names}
            library.attention_decode(fovea.sized(fovea.DecodeArgs, forward=ctypes.pointer(forward), sees_all_keys=1, **rest))
        else:
            library.attention_forward(forward)
        if self.device != "cpu":
            torch.cuda.synchronize()
        for name in ("out", "lse"):
            if gaps_changed(outputs[name]):
                raise Wrong(f"{name}: memory between its rows was written")
        return outputs

    def found(self, outputs):
        """What is wrong, in words; empty: nothing."""
        out, lse = outputs["out"].cpu().double(), outputs["lse"].cpu().double()
        row_max = outputs["row_max"].cpu().double() if "row_max" in outputs else None
        first = 0
        for b, (expected, expected_lse, top, out_error, lse_error, _) in enumerate(self.expected):
            if self.kernel.layout == "packed":
                rows = slice(first, first + len(expected))
                got = (out[rows], lse[:, rows], None if row_max is None else row_max[:, rows])
                first += len(expected)
            else:
                got = (out[b], lse[b], None if row_max is None else row_max[b])
            rounding = expected.abs() * ROUNDING[self.kernel.dtype] + SMALLEST[self.kernel.dtype]
            lse_allowed = lse_error + 2.0**-22 * expected_lse.abs().nan_to_num(0, 0, 0) + 2.0**-20
            for name, a, e, allowed in (("out", got[0], expected, out_error + rounding), ("lse", got[1], expected_lse, lse_allowed),
                                        ("row_max", got[2], top, lse_allowed)):
                if a is None or a.numel() == 0:
                    continue
                wrong = torch.where(e.isfinite(), ~((a - e).abs() <= allowed), (a != e) & ~(a.isnan() & e.isnan()))
                if wrong.any():
                    at = tuple(int(x) for x in wrong.nonzero()[0])
                    return f"{name} of sequence {b} at {at}: {a[at].item():.6g}, expected {e[at].item():.6g}, allowed {allowed[at].item():.2g}; {int(wrong.sum())} such"
        if self.kernel.layout == "packed" and (out[first:] != 0).any():
            return "rows after the last sequence are not 0"
        return ""


class Wrong(Exception):
    pass


def gaps_changed(view):
    """Whether bytes of the storage that are no element of the view differ from what strided() left there."""
    storage = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    is_element = torch.zeros(storage.shape, dtype=torch.bool, device=view.device)
    is_element.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return bool((storage[~is_element] != 7.0).any())


def same_bits(a, b):
    bits = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(*(t[name].view(bits[t[name].element_size()]) for t in (a, b))) for name in a)


def check_kernel(library, seed, index, count, device, tally):
    draw = random.Random(f"{seed}/{index}")
    kernel = draw_kernel(draw)
    for n in range(count):
        at = f"--seed {seed} --only {index}"
        try:
            problem = Problem(kernel, random.Random(f"{seed}/{index}/{n}"), device)
            first, second = problem.run(library), problem.run(library)
            wrong = problem.found(first) or ("" if same_bits(first, second) else "another run gave other bits")
        except fovea.Unsupported as error:
            tally["unsupported"] += 1
            tally.setdefault("reasons", {}).setdefault(str(error)[:200], f"{at}")
            continue
        except Exception as error:  # noqa: BLE001: whatever a call raises is a finding
            wrong = f"{type(error).__name__}: {error}" if isinstance(error, (Wrong, fovea.FoveaError)) else traceback.format_exc()
        tally["problems"] += 1
        if wrong:
            tally["wrong"] += 1
            print(f"WRONG  {at}, problem {n}: {wrong}\n       {kernel}", flush=True)


def work(options, first, step, num_kernels, results):
    torch.set_num_threads(1)
    tally = {"problems": 0, "wrong": 0, "unsupported": 0}
    library = fovea.Library(options.library)
    for index in range(first, num_kernels, step):
        check_kernel(library, options.seed, index, PROBLEMS_PER_KERNEL, options.device, tally)
        results.put(("kernel", index))
    results.put(("tally", tally))


def run_all(options):
    num_kernels = math.ceil(options.problems / PROBLEMS_PER_KERNEL)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(options, i, options.processes, num_kernels, results)) for i in range(options.processes)]
    for process in processes:
        process.start()
    total, done, begin, left = {"problems": 0, "wrong": 0, "unsupported": 0}, 0, time.monotonic(), len(processes)
    while left:
        try:
            kind, what = results.get(timeout=5)
        except Exception:  # noqa: BLE001: queue.Empty
            if any(p.exitcode not in (None, 0) for p in processes):
                print("WRONG  a process died", flush=True)
                total["wrong"] += 1
                break
            continue
        if kind == "tally":
            left -= 1
            for key in ("problems", "wrong", "unsupported"):
                total[key] += what[key]
            for reason, at in what.get("reasons", {}).items():
                print(f"unsupported, {at}: {reason}")
        else:
            done += 1
            if done % max(1, num_kernels // 10) == 0:
                print(f"{done} of {num_kernels} kernels, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    for process in processes:
        process.join(10)
        process.kill()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", type=int, help="the sixteen problems of this kernel")
    options = parser.parse_args()
    if torch is None or (options.device != "cpu" and not torch.cuda.is_available()):
        print("random_check: skipped, no PyTorch" + ("" if torch is None else " with a GPU"))
        return 77
    if options.only is not None:
        torch.set_num_threads(1)
        total = {"problems": 0, "wrong": 0, "unsupported": 0}
        check_kernel(fovea.Library(options.library), options.seed, options.only, PROBLEMS_PER_KERNEL, options.device, total)
    else:
        total = run_all(options)
    print(f"{total['problems']} problems, {total['wrong']} wrong, {total['unsupported']} unsupported (seed {options.seed})")
    return 1 if total["wrong"] or not total["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
