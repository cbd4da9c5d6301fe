#!/usr/bin/env python3
"""Kernels on a GPU whose lengths, offsets, slots, tables, positions and captured tensors hold anything: nothing but outputs may change,
and every call ends.

usage: gpu_memory_fuzz.py --library libfovea.so [--draws 200] [--seed 0] [--match paged] [--separate]     77: no GPU

All tensors of a draw lie in one arena, apart from each other; after the call the arena is read back and compared, but for the
outputs and a cache that is appended to; and so are the surroundings of the workspace. Accesses outside the arena end in an error
of the driver; reads inside it are what compute-sanitizer sees with --separate, where every tensor has memory of its own:

    compute-sanitizer --padding 4096 --error-exitcode 9 python3 gpu_memory_fuzz.py --library libfovea.so --separate --draws 40

A draw that takes longer than --limit seconds is a hang: the process says which one, and ends with exit code 2. Each draw depends on its
seed alone: --seed S --draws 1 --match FAMILY repeats it. Needs libcuda and no other package.
"""

import argparse
import ctypes
import math
import os
import random
import sys
import threading
from dataclasses import dataclass, field

import fovea_ctypes as fovea

SIZES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "u8": 1}
GAP = 1 << 20  # between tensors of an arena
TWO31 = 1 << 31


class Cuda:
    """What is asked of libcuda."""

    def __init__(self):
        self.c = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *args):
        code = getattr(self.c, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def allocate(self, size):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def free(self, address):
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address, content):
        if content:
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))

    def read(self, address, size):
        content = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return content.raw

    def synchronize(self):
        self.call("cuCtxSynchronize")


@dataclass
class Field:
    """A tensor of a call: what it holds, and whether the call may write it."""

    name: str
    shape: list
    dtype: str
    content: bytes
    is_written: bool = False
    address: int = 0

    def tensor(self):
        return fovea.tensor(self.address, self.shape, self.dtype, device=fovea.Device(fovea.CUDA, 0))


@dataclass
class Problem:
    """One family of kernels, by its shapes."""

    lengths: list  # of keys; packed: of queries too; dense: all the same
    seqlen_q: int = 1
    is_packed: bool = False
    is_dense: bool = False
    num_new: int = 0
    heads_q: int = 8
    heads_kv: int = 2
    head_dim: int = 128
    dtype: str = "bf16"
    page_size: int = 0
    has_slots: bool = False
    has_left_padding: bool = False
    has_rotary: bool = False
    captured: dict = field(default_factory=dict)  # name: (shape, dtype), for the programs of `fields`
    fields: dict = field(default_factory=dict)


# A mask by what stands beside queries and keys, and a bias that is found by way of a list.
DOCUMENTS = dict(captured={"document": ([3, 2000], "i32"), "slopes": ([8], "f16")},
                 fields={"mask_mod": "document[batch, q_idx] == document[batch, kv_idx]",
                         "score_mod": "score + slopes[q_head] * (kv_idx - q_idx)"})
INDICES = dict(captured={"list": ([500], "i64"), "table": ([40, 8], "f32"), "last": ([2], "i32")},
               fields={"mask_mod": "kv_idx < last[batch]", "score_mod": "score + table[list[kv_idx], q_head]"})

PROBLEMS = {
    "packed": Problem([70, 0, 300, 129], is_packed=True, fields={"causal": 1}),
    "packed, head_dim 64": Problem([5, 191, 64, 700], is_packed=True, head_dim=64),
    "packed, f32": Problem([70, 0, 300], is_packed=True, head_dim=64, dtype="f32"),
    "packed, wide": Problem([200, 31, 1], is_packed=True, head_dim=256, fields={"causal": 1}),
    "packed, odd": Problem([200, 31, 1], is_packed=True, head_dim=72),
    "packed, many": Problem([i % 5 for i in range(256)] + [300], is_packed=True, fields={"causal": 1}),
    "paged decode": Problem([600, 17, 5000, 0], page_size=16),
    "paged decode, append": Problem([600, 17, 5000, 0], page_size=16, num_new=1, has_rotary=True),
    "pages of 5": Problem([600, 17, 256, 0], page_size=5, num_new=2, seqlen_q=2),
    "pages of 24": Problem([600, 17, 3000, 0], page_size=24),
    "paged, f32": Problem([600, 17, 256], page_size=16, dtype="f32", num_new=1, has_rotary=True),
    "paged, padding": Problem([600, 17, 256], page_size=16, has_left_padding=True, num_new=1),
    "paged, few rows": Problem([5000, 17, 256], page_size=16, seqlen_q=12),
    "paged, chunk": Problem([900, 1, 129], page_size=16, seqlen_q=200, num_new=200, has_rotary=True),
    "paged, chunk, f16": Problem([900, 1, 129], page_size=64, seqlen_q=200, dtype="f16", head_dim=64),
    "slots decode": Problem([600, 17, 5000], has_slots=True, num_new=1, has_rotary=True),
    "slots, padding": Problem([600, 17, 256], has_slots=True, has_left_padding=True, num_new=3, seqlen_q=3),
    "slots, few rows": Problem([5000, 17, 256], has_slots=True, seqlen_q=9),
    "slots, wide": Problem([5000, 17, 256], has_slots=True, head_dim=256),
    "slots, f32": Problem([600, 17, 256], has_slots=True, dtype="f32"),
    "documents": Problem([700] * 3, seqlen_q=300, is_dense=True, **DOCUMENTS),
    "documents, f16": Problem([2000] * 3, seqlen_q=2000, is_dense=True, head_dim=64, dtype="f16", **DOCUMENTS),
    "documents, wide": Problem([700] * 3, seqlen_q=300, is_dense=True, head_dim=256, **DOCUMENTS),
    "documents, f32": Problem([700] * 3, seqlen_q=70, is_dense=True, head_dim=64, dtype="f32", **DOCUMENTS),
    "indices": Problem([700] * 3, seqlen_q=300, is_dense=True, **INDICES),
    "indices, few rows": Problem([4000] * 3, seqlen_q=3, is_dense=True, **INDICES),
    "indices, packed": Problem([70, 0, 300, 129], is_packed=True, **INDICES),
    "indices, paged": Problem([600, 17, 5000], page_size=16, num_new=1, **INDICES),
    "indices, slots": Problem([600, 17, 5000], has_slots=True, seqlen_q=9, **INDICES),
}


def numbers_of(chance, count, most, dtype, right):
    """The right numbers with some of them replaced by any."""
    one_in = chance.randint(1, 4)
    values = list(right)
    for i in range(count):
        if chance.randrange(one_in) == 0:
            values[i] = chance.choice((0, 1, most, most + 1, -1, TWO31 - 1, TWO31, -TWO31, (1 << 63) - 1, -(1 << 63),
                                       chance.randint(0, most), chance.randint(0, most), chance.getrandbits(64)))
    size = SIZES[dtype]
    return b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in values)


class Draw:
    def __init__(self, problem, seed):
        self.problem, self.fields, self.chance = problem, {}, random.Random(seed)
        self.index_dtype = self.chance.choice(("i32", "i64"))
        if problem.is_packed:
            self.pose_packed()
        elif problem.is_dense:
            self.pose_dense()
        else:
            self.pose_cached()
        for name, (shape, dtype) in problem.captured.items():
            count = math.prod(shape)
            numbers = [self.chance.randrange(8) for _ in range(count)]
            content = numbers_of(self.chance, count, 40, dtype, numbers) if dtype in ("i32", "i64") else None
            self.add(name, shape, dtype, content)

    def add(self, name, shape, dtype, content=None, is_written=False):
        size = SIZES[dtype]
        for extent in shape:
            size *= extent
        content = self.chance.randbytes(size) if content is None else content
        self.fields[name] = Field(name, shape, dtype, content, is_written)

    def add_numbers(self, name, shape, most, right):
        self.add(name, shape, self.index_dtype, numbers_of(self.chance, len(right), most, self.index_dtype, right))

    def pose_packed(self):
        p, ends = self.problem, [0]
        for length in p.lengths:
            ends.append(ends[-1] + length)
        total = ends[-1] + 3  # rows behind the last sequence
        for name, heads in (("q", p.heads_q), ("k", p.heads_kv), ("v", p.heads_kv)):
            self.add(name, [total, heads, p.head_dim], p.dtype)
        self.add("out", [total, p.heads_q, p.head_dim], p.dtype, is_written=True)
        self.add("lse", [p.heads_q, total], "f32", is_written=True)
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            self.add_numbers(name, [len(ends)], total, ends)

    def pose_dense(self):
        p, batch = self.problem, len(self.problem.lengths)
        self.add("q", [batch, p.seqlen_q, p.heads_q, p.head_dim], p.dtype)
        for name in ("k", "v"):
            self.add(name, [batch, p.lengths[0], p.heads_kv, p.head_dim], p.dtype)
        self.add("out", [batch, p.seqlen_q, p.heads_q, p.head_dim], p.dtype, is_written=True)
        self.add("lse", [batch, p.heads_q, p.seqlen_q], "f32", is_written=True)

    def pose_cached(self):
        p, batch = self.problem, len(self.problem.lengths)
        capacity = max(p.lengths) + p.num_new + 3 + 5 * batch
        width = -(-capacity // p.page_size) if p.page_size else 0
        pages = batch * width + 2
        shape = [pages, p.page_size] if p.page_size else [batch + 2, capacity]
        self.add("q", [batch, p.seqlen_q, p.heads_q, p.head_dim], p.dtype)
        for name in ("k", "v"):
            self.add(name, [*shape, p.heads_kv, p.head_dim], p.dtype, is_written=p.num_new > 0)
            if p.num_new:
                self.add(f"append_{name}", [batch, p.num_new, p.heads_kv, p.head_dim], p.dtype)
        self.add("out", [batch, p.seqlen_q, p.heads_q, p.head_dim], p.dtype, is_written=True)
        self.add("lse", [batch, p.heads_q, p.seqlen_q], "f32", is_written=True)
        rows = width * p.page_size if p.page_size else capacity
        self.add_numbers("seqlens", [batch], rows, p.lengths)
        if p.has_left_padding:
            self.add_numbers("left_padding", [batch], rows, [0] * batch)
        if p.has_slots:
            self.add_numbers("batch_idx", [batch], shape[0], range(batch))
        if p.page_size:
            self.add_numbers("page_table", [batch, width], pages, range(batch * width))
        if p.has_rotary:
            positions = 300
            for name in ("rotary_cos", "rotary_sin"):
                self.add(name, [max(positions, rows), p.head_dim // 2], "f32")
            self.add_numbers("rotary_positions", [batch, p.seqlen_q], max(positions, rows), [7] * (batch * p.seqlen_q))

    def decode_args(self):
        t, captured = self.tensors()
        named = {name: t.pop(name) for name in ("q", "k", "v", "out", "lse")}
        forward = fovea.forward_args(captured, **named, **self.problem.fields)
        return fovea.sized(fovea.DecodeArgs, forward=ctypes.pointer(forward),
                           **{name: ctypes.pointer(x) for name, x in t.items()})

    def forward_args(self):
        t, captured = self.tensors()
        return fovea.forward_args(captured, **t, **self.problem.fields)

    def tensors(self):
        """Those of the call, and those of its programs."""
        t = {name: each.tensor() for name, each in self.fields.items()}
        return t, {name: t.pop(name) for name in self.problem.captured}


class Memory:
    """Where the fields of a draw lie: in an arena, or each by itself."""

    def __init__(self, cuda, draw, is_separate):
        self.cuda, self.is_separate, self.addresses = cuda, is_separate, []
        self.workspace, self.workspace_bytes = 0, 0
        fields = list(draw.fields.values())
        draw.chance.shuffle(fields)
        self.fields = fields
        if is_separate:
            for each in fields:
                each.address = self.new(len(each.content))
        else:
            self.size = GAP + sum(len(each.content) // 256 * 256 + 256 + GAP for each in fields)
            at = self.base = self.new(self.size)
            at += GAP
            for each in fields:
                each.address = at
                at += len(each.content) // 256 * 256 + 256 + GAP
            cuda.write(self.base, self.expected())
        for each in fields:
            cuda.write(each.address, each.content)

    def new(self, size):
        self.addresses.append(self.cuda.allocate(size))
        return self.addresses[-1]

    def add_workspace(self, size):
        guard = 0 if self.is_separate else GAP
        self.workspace, self.workspace_bytes = self.new(size + 2 * guard) + guard, size
        for at in (self.workspace - guard, self.workspace + size):
            self.cuda.write(at, b"\xa5" * guard)
        self.cuda.write(self.workspace, b"\x5a" * size)

    def workspace_damage(self):
        guards = [self.cuda.read(at, GAP) for at in (self.workspace - GAP, self.workspace + self.workspace_bytes)]
        return "" if guards == [b"\xa5" * GAP] * 2 else "around the workspace was written"

    def expected(self):
        arena, end = [], self.base
        for each in sorted(self.fields, key=lambda f: f.address):
            arena += [b"\xa5" * (each.address - end), each.content]
            end = each.address + len(each.content)
        arena.append(b"\xa5" * (self.base + self.size - end))
        return b"".join(arena)

    def damage(self):
        """What changed that no call writes."""
        if self.is_separate:
            wrong = [each.name for each in self.fields
                     if not each.is_written and self.cuda.read(each.address, len(each.content)) != each.content]
            return f"{', '.join(wrong)} was written" if wrong else ""
        got = self.cuda.read(self.base, self.size)
        for each in self.fields:
            if each.is_written:
                begin = each.address - self.base
                got = got[:begin] + each.content + got[begin + len(each.content):]
        expected = self.expected()
        if got == expected:
            return self.workspace_damage() if self.workspace else ""
        at = next(i for i in range(self.size) if got[i] != expected[i])
        return f"byte {at} of the arena was written: {self.place(self.base + at)}"

    def place(self, address):
        before = [each for each in self.fields if each.address <= address]
        nearest = max(before, key=lambda f: f.address, default=None)
        return "before all tensors" if nearest is None else f"{nearest.name} + {address - nearest.address}"

    def free(self):
        for address in self.addresses:
            self.cuda.free(address)


class Fuzz:
    def __init__(self, library, cuda, limit, is_separate):
        self.library, self.cuda, self.limit, self.is_separate = library, cuda, limit, is_separate

    def run(self, name, seed):
        def hang():
            print(f"HANG   {name}, seed {seed}: no end after {self.limit} s", flush=True)
            os._exit(2)

        draw = Draw(PROBLEMS[name], seed)
        memory = Memory(self.cuda, draw, self.is_separate)
        timer = threading.Timer(self.limit, hang)
        timer.start()
        try:
            self.call(draw, memory)
            self.cuda.synchronize()
        finally:
            timer.cancel()
        damage = memory.damage()
        memory.free()
        return damage

    def call(self, draw, memory):
        if draw.problem.is_packed or draw.problem.is_dense:
            args = draw.forward_args()
            plan = self.library.plan(args)
            memory.add_workspace(plan.workspace_bytes)
            args.workspace, args.workspace_bytes = memory.workspace, memory.workspace_bytes
            self.library.call(self.library.c.fovea_plan_run, plan.handle, ctypes.byref(args))
            return
        args, size = draw.decode_args(), ctypes.c_size_t()
        self.library.call(self.library.c.fovea_decode_workspace_bytes, ctypes.byref(args), max(draw.problem.lengths),
                          ctypes.byref(size))
        memory.add_workspace(size.value)
        forward = args.forward.contents
        forward.workspace, forward.workspace_bytes = memory.workspace, memory.workspace_bytes
        self.library.attention_decode(args)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--draws", type=int, default=200, help="of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--match", default="", help="only families whose names hold this")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a draw, compiling its kernel included")
    parser.add_argument("--separate", action="store_true", help="memory of its own for each tensor: for compute-sanitizer")
    args = parser.parse_args()
    try:
        cuda = Cuda()
    except (OSError, RuntimeError) as error:
        print(f"gpu_memory_fuzz: skipped, no GPU: {error}")
        return 77
    fuzz, num_wrong, num_draws = Fuzz(fovea.Library(args.library), cuda, args.limit, args.separate), 0, 0
    for name in (name for name in PROBLEMS if args.match in name):
        for seed in range(args.seed, args.seed + args.draws):
            num_draws += 1
            try:
                damage = fuzz.run(name, seed)
            except RuntimeError as error:  # of the driver, or an error of the library: the context may be lost
                print(f"WRONG  {name}, seed {seed}: {error}", flush=True)
                return 1
            if damage:
                num_wrong += 1
                print(f"WRONG  {name}, seed {seed}: {damage}", flush=True)
        print(f"done   {name}", flush=True)
    print(f"{num_draws} draws, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
