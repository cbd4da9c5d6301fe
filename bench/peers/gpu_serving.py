#!/usr/bin/env python3
"""A step of a serving engine on one GPU: 64 sequences in one packed call over a paged cache, next to the decode call of as many dense queries.

usage: gpu_serving.py --library libfovea.so [--rounds 9] [--json FILE]

64 sequences of 1,000 to 8,000 keys in shuffled pages of 16, 64 heads over 8 key heads of head_dim 128, bf16. Every step appends its tokens. `dense` is a token of each sequence by the call without
packing; `packed` the same tokens packed; `bound of 256` the same call with room for chunks of 256 tokens, as an engine's graph has it; `and a chunk` gives one more sequence 256 tokens of its prompt,
behind so many keys; `chunk alone` is that without the 64. Bandwidth counts keys and values of the 64 sequences; a step with a chunk is counted by its time less the chunk's own.
Clocks and flushes are gpu_peers.py's. Each token of a packed step is compared with the bits of the steps beside it where one kernel computes both, and by norm with the dense call.
"""

import argparse
import ctypes
import pathlib
import sys

import torch

from gpu_peers import Clock, fovea, keep
from gpu_reader import reader_of

SEQUENCES, SHORTEST, LONGEST, PAGE_SIZE = 64, 1000, 8000, 16
HEADS, HEADS_KV, HEAD_DIM = 64, 8, 128
CHUNK, CHUNK_BEHIND = 256, (0, 4096)
DIFFERENCE = 1e-2  # of the whole: outputs and probabilities are rounded to 16 bits


class Cache:
    """Keys and values of all sequences, the one of the chunk last."""

    def __init__(self):
        self.lengths = torch.randint(SHORTEST, LONGEST, (SEQUENCES,)).tolist()
        longest = max(self.lengths) + CHUNK
        self.width = -(-longest // PAGE_SIZE)
        num_pages = (SEQUENCES + 1) * self.width
        self.table = torch.randperm(num_pages, dtype=torch.int32).reshape(SEQUENCES + 1, self.width).cuda()
        self.k, self.v = (normal(num_pages, PAGE_SIZE, HEADS_KV, HEAD_DIM) for _ in range(2))


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Step:
    """The call of some sequences: `sizes` are the new tokens of each, `before` its keys before them; packed where there is a bound."""

    def __init__(self, library, cache, rows, before, sizes, tokens, bound=None):
        self.library, total = library, sum(sizes)
        q, k, v = (x[:total] for x in tokens)
        tensors = {"seqlens": torch.tensor(before, dtype=torch.int32).cuda(), "page_table": cache.table[rows].contiguous(), "append_k": k, "append_v": v}
        forward = {"q": q, "k": cache.k, "v": cache.v, "out": torch.empty_like(q)}
        if bound is None:
            forward |= {name: forward[name].unsqueeze(1) for name in ("q", "out")}
            tensors |= {name: tensors[name].unsqueeze(1) for name in ("append_k", "append_v")}
        else:
            forward["cu_seqlens_q"] = torch.tensor([0, *sizes]).cumsum(0).int().cuda()
        self.kept, self.out = (tensors, forward), forward["out"].view(total, HEADS, HEAD_DIM)
        self.forward = fovea.forward_args(**{name: fovea.torch_tensor(t) for name, t in forward.items()})
        self.pointers = {name: ctypes.pointer(fovea.torch_tensor(t)) for name, t in tensors.items()}
        self.args = fovea.sized(fovea.DecodeArgs, forward=ctypes.pointer(self.forward), max_seqlen_q=bound or 0, **self.pointers)
        size = ctypes.c_size_t()
        library.call(library.c.fovea_decode_workspace_bytes, ctypes.byref(self.args), LONGEST + CHUNK, ctypes.byref(size))
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        self.forward.workspace, self.forward.workspace_bytes = self.workspace.data_ptr(), size.value

    def __call__(self):
        self.forward.stream = torch.cuda.current_stream().cuda_stream
        self.library.attention_decode(self.args)
        return self.out


def steps_of(library, cache):
    """Steps by name. All of them write the same tokens to the same places."""
    tokens = normal(SEQUENCES + CHUNK, HEADS, HEAD_DIM), *(normal(SEQUENCES + CHUNK, HEADS_KV, HEAD_DIM) for _ in range(2))
    chunk_tokens = [x[SEQUENCES:].contiguous() for x in tokens]
    decoding, ones, last = list(range(SEQUENCES)), [1] * SEQUENCES, [SEQUENCES]
    steps = {
        "dense": Step(library, cache, decoding, cache.lengths, ones, tokens),
        "packed": Step(library, cache, decoding, cache.lengths, ones, tokens, 1),
        f"bound of {CHUNK}": Step(library, cache, decoding, cache.lengths, ones, tokens, CHUNK),
    }
    for behind in CHUNK_BEHIND:
        steps[f"and a chunk behind {behind}"] = Step(library, cache, decoding + last, [*cache.lengths, behind], [*ones, CHUNK], tokens, CHUNK)
        steps[f"chunk alone behind {behind}"] = Step(library, cache, last, [behind], [CHUNK], chunk_tokens, CHUNK)
    return steps


def wrong_steps(steps):
    """What differs and should not."""
    outs = {name: step().clone() for name, step in steps.items()}
    bounded, dense = outs[f"bound of {CHUNK}"], outs["dense"].float()
    wrong = [name for name in ("packed", f"bound of {CHUNK}") if not (outs[name].float() - dense).norm() <= DIFFERENCE * dense.norm()]
    for behind in CHUNK_BEHIND:
        mixed = f"and a chunk behind {behind}"
        if not torch.equal(outs[mixed], torch.cat([bounded, outs[f"chunk alone behind {behind}"]])):
            wrong.append(mixed)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfovea.so")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path, help="keep all figures in this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_serving: skipped, PyTorch has no GPU")
        return 77
    torch.manual_seed(0)
    clock, cache = Clock(), Cache()
    steps = steps_of(fovea.Library(args.library), cache)
    wrong = wrong_steps(steps)
    size = 2 * 2 * (sum(cache.lengths) + SEQUENCES) * HEADS_KV * HEAD_DIM
    bounds = {"a kernel that only reads": reader_of(size)}
    times = {name: figure.ms for name, figure in clock.figures(steps | bounds, args.rounds, as_calls=tuple(bounds)).items()}
    rows = {}
    for name, ms in times.items():
        decoding_ms = ms - times[name.replace("and a chunk", "chunk alone")] if name.startswith("and") else ms
        rows[name] = {"us": 1e3 * ms, "tbs": None if name.startswith("chunk alone") else size / decoding_ms / 1e9}
    print(f"{torch.cuda.get_device_name(0)}; {size / 1e6:.0f} MB of keys and values; medians of {args.rounds}.\n\n| step | us | TB/s |\n|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['us']:.1f} | {'' if row['tbs'] is None else format(row['tbs'], '.2f')} |")
    for name in wrong:
        print(f"WRONG  {name}")
    if args.json:
        keep(args.json, {"gpu": torch.cuda.get_device_name(0), "bytes": size, "rows": rows, "wrong": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
