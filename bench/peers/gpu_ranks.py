#!/usr/bin/env python3
"""Context parallelism over all GPUs of a machine, forward and backward: every scheme against one GPU, then times of both.

usage: gpu_ranks.py torch|jax [--seqlens 32768,131072] [--masks causal,documents] [--schemes all_gather,...] [--rounds 5]
       [--steps 4] [--checked 4096] [--json FILE]

"torch" has a process for each GPU, over NCCL (without a GPU two of them, over gloo: to try this script); "jax" one process for all of them. bf16, 32 query heads and 8 of keys, of 128; "documents" are 12
of them under a causal mask. Before anything is timed, --checked tokens with every scheme (0: none): rows that one call computes equal those of one GPU
bit for bit where docs/guides/context_parallel.md says so, and all else is no farther off than 2 % (the norm of the difference over that of the
whole). A figure is the median of forward and backward (deterministic=False) in milliseconds, of --steps that are enqueued one behind the other as
in training, efficiency the time of one GPU over that of all of them times their number; "host" is what a rank's calls of a step take
before it waits for the device.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

HEADS, HEADS_KV, HEAD_DIM, NUM_DOCUMENTS = 32, 8, 128, 12
SCHEMES = ("all_gather", "head_group_all_gather", "ring", "ulysses", "needed_only")
INVARIANT = ("all_gather", "head_group_all_gather", "ulysses")
TENSORS = ("out", "lse", "dq", "dk", "dv")


def documents(seqlen: int) -> np.ndarray:
    """Ids of documents of random lengths."""
    generator = np.random.default_rng(seqlen)
    ends = np.sort(generator.choice(np.arange(1, seqlen), NUM_DOCUMENTS - 1, replace=False))
    return np.searchsorted(ends, np.arange(seqlen), side="right").astype(np.int32)[None]


def mask_words(name: str, seqlen: int) -> dict:
    return {"causal": True} | ({"segment_ids": documents(seqlen)} if name == "documents" else {})


def plan_of(fovea, scheme: str, name: str, seqlen: int, num_ranks: int):
    spec, kv = (fovea.TensorSpec((1, seqlen, heads, HEAD_DIM), "bf16") for heads in (HEADS, HEADS_KV))
    return fovea.parallel.context_parallel_plan(spec, kv, kv, world_size=num_ranks, scheme=scheme, **mask_words(name, seqlen))


def is_exact(scheme: str, tensor: str, deterministic: bool) -> bool:
    return scheme in INVARIANT and (deterministic or tensor in ("out", "lse"))


def medians(run, rounds: int, steps: int) -> tuple[float, float]:
    """Milliseconds of a run() with what it waits for, and of the host before that; run returns what waits."""
    whole, host = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            wait = run()
        host.append(time.perf_counter() - start)
        wait()
        whole.append(time.perf_counter() - start)
    return statistics.median(whole) * 1e3 / steps, statistics.median(host) * 1e3 / steps


# ---- PyTorch ----


class TorchRanks:
    """One rank of a process group."""

    def __init__(self, rank: int, size: int, store: str, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import fovea
        import fovea.torch

        self.torch, self.dist, self.fovea = torch, dist, fovea
        self.rank, self.size, self.options = rank, size, options
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        self.synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)

    def inputs(self, seqlen: int) -> list:
        """The same on all ranks."""
        generator = self.torch.Generator(self.device).manual_seed(seqlen)
        shapes = [(1, seqlen, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
        return [self.torch.randn(shape, generator=generator, device=self.device, dtype=self.torch.bfloat16) for shape in shapes]

    def step(self, attend, q, k, v, dout) -> list:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*leaves)
        out.backward(dout)
        return [out.detach(), lse.detach(), *(x.grad for x in leaves)]

    def whole(self, name: str, seqlen: int, deterministic: bool):
        words = mask_words(name, seqlen)
        if "segment_ids" in words:
            words["segment_ids"] = self.torch.as_tensor(words["segment_ids"], device=self.device)
        return lambda q, k, v: self.fovea.attention(q, k, v, return_lse=True, deterministic=deterministic, **words)

    def own(self, plan, x):
        return plan.shard(x, self.rank).contiguous()

    def ranks_attend(self, plan, deterministic: bool):
        call = self.fovea.torch.context_parallel_attention
        return lambda q, k, v: call(q, k, v, plan, return_lse=True, deterministic=deterministic)

    def check(self, scheme: str, name: str, deterministic: bool) -> str:
        seqlen = self.options.checked
        tensors = self.inputs(seqlen)
        expected = self.step(self.whole(name, seqlen, deterministic), *tensors)
        plan = plan_of(self.fovea, scheme, name, seqlen, self.size)
        made = self.step(self.ranks_attend(plan, deterministic), *(self.own(plan, x) for x in tensors))
        wrong = []
        for tensor, got, whole in zip(TENSORS, made, expected):
            mine = plan.shard(whole, self.rank, dim=2 if tensor == "lse" else 1)
            away = float((got.float() - mine.float()).norm() / mine.float().norm())
            if is_exact(scheme, tensor, deterministic) and not self.torch.equal(got, mine):
                wrong.append(f"{tensor} has other bits, {away:.1e} away")
            elif not away < 0.02:
                wrong.append(f"{tensor} is {away:.1e} away")
        return self.told("; ".join(wrong))

    def told(self, words: str) -> str:
        every = [None] * self.size
        self.dist.all_gather_object(every, words)
        return "; ".join(f"rank {rank}: {x}" for rank, x in enumerate(every) if x)

    def time_one(self, name: str, seqlen: int) -> float:
        """On the first rank, while others wait."""
        result = [0.0]
        if self.rank == 0:
            tensors, attend = self.inputs(seqlen), self.whole(name, seqlen, False)
            result = [self.timed(lambda: self.step(attend, *tensors))[0]]
        self.dist.broadcast_object_list(result, src=0)
        return result[0]

    def time_ranks(self, scheme: str, name: str, seqlen: int) -> tuple[float, float]:
        """Of the slowest rank."""
        plan = plan_of(self.fovea, scheme, name, seqlen, self.size)
        tensors = [self.own(plan, x) for x in self.inputs(seqlen)]
        attend = self.ranks_attend(plan, False)
        every = [None] * self.size
        self.dist.all_gather_object(every, self.timed(lambda: self.step(attend, *tensors), self.dist.barrier))
        return max(whole for whole, _ in every), max(host for _, host in every)

    def timed(self, step, meet=lambda: None) -> tuple[float, float]:
        def run():
            step()
            return self.synchronize

        for _ in range(2):
            run()()
        rounds = []
        for _ in range(self.options.rounds):
            meet()
            self.synchronize()
            rounds.append(medians(run, 1, self.options.steps))
        return tuple(statistics.median(x) for x in zip(*rounds))


def torch_rank(rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    ranks = TorchRanks(rank, size, store, options)
    report(ranks, options, is_speaker=rank == 0)
    ranks.dist.destroy_process_group()


# ---- JAX ----


class JaxRanks:
    """All devices of this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        import jax

        import fovea
        import fovea.jax

        self.jax, self.fovea, self.options = jax, fovea, options
        self.size = len(jax.devices())
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("context",))

    def inputs(self, seqlen: int) -> list:
        shapes = [(1, seqlen, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
        keys = self.jax.random.split(self.jax.random.key(seqlen), 4)
        return [self.jax.random.normal(key, shape, self.jax.numpy.bfloat16) for key, shape in zip(keys, shapes)]

    def step(self, attend):
        def run(q, k, v, dout):
            (out, lse), pull = self.jax.vjp(attend, q, k, v)
            return (out, lse, *pull((dout, self.jax.numpy.zeros_like(lse))))

        return self.jax.jit(run)

    def whole(self, name: str, seqlen: int, deterministic: bool):
        return self.step(lambda q, k, v: self.fovea.jax.attention(q, k, v, return_lse=True, deterministic=deterministic, **mask_words(name, seqlen)))

    def ranks_step(self, plan, deterministic: bool):
        spec = self.jax.sharding.PartitionSpec

        def attend(q, k, v):
            return self.fovea.jax.context_parallel_attention(
                q, k, v, plan, axis_name="context", return_lse=True, deterministic=deterministic
            )

        specs = {"in_specs": spec(None, "context"), "out_specs": (spec(None, "context"), spec(None, None, "context"))}
        return self.step(self.jax.shard_map(attend, mesh=self.mesh, **specs))

    def dealt(self, plan, x):
        sharding = self.jax.sharding.NamedSharding(self.mesh, self.jax.sharding.PartitionSpec(None, "context"))
        return self.jax.device_put(plan.permute(x), sharding)

    def check(self, scheme: str, name: str, deterministic: bool) -> str:
        seqlen = self.options.checked
        tensors = self.inputs(seqlen)
        expected = self.whole(name, seqlen, deterministic)(*tensors)
        plan = self.fovea.jax.device_plan(plan_of(self.fovea, scheme, name, seqlen, self.size))
        made = self.ranks_step(plan, deterministic)(*(self.dealt(plan, x) for x in tensors))
        wrong = []
        for tensor, got, whole in zip(TENSORS, made, expected):
            dim = 2 if tensor == "lse" else 1
            got, whole = (np.asarray(x, np.float32) for x in (got, whole))
            got = np.take(got, np.asarray(plan.inverse), axis=dim)
            away = float(np.linalg.norm(got - whole) / np.linalg.norm(whole))
            if is_exact(scheme, tensor, deterministic) and not np.array_equal(got, whole):
                wrong.append(f"{tensor} has other bits, {away:.1e} away")
            elif not away < 0.02:
                wrong.append(f"{tensor} is {away:.1e} away")
        return "; ".join(wrong)

    def timed(self, step, tensors) -> tuple[float, float]:
        def run():
            made = step(*tensors)
            return lambda: self.jax.block_until_ready(made)

        for _ in range(2):
            run()()
        return medians(run, self.options.rounds, self.options.steps)

    def time_one(self, name: str, seqlen: int) -> float:
        return self.timed(self.whole(name, seqlen, False), self.inputs(seqlen))[0]

    def time_ranks(self, scheme: str, name: str, seqlen: int) -> tuple[float, float]:
        plan = self.fovea.jax.device_plan(plan_of(self.fovea, scheme, name, seqlen, self.size))
        tensors = [self.dealt(plan, x) for x in self.inputs(seqlen)]
        return self.timed(self.ranks_step(plan, False), tensors)


# ---- Both ----


def report(ranks, options: argparse.Namespace, is_speaker: bool) -> None:
    """Every rank calls it; one speaks."""
    say = (lambda *words: print(*words, flush=True)) if is_speaker else (lambda *words: None)
    schemes, masks = options.schemes.split(","), options.masks.split(",")
    wrong = 0
    for scheme in schemes if options.checked else []:
        for name in masks:
            for deterministic in (True, False):
                found = ranks.check(scheme, name, deterministic)
                wrong += bool(found)
                say(f"{scheme}, {name}, {options.checked} tokens{', deterministic' if deterministic else ''}: {found or 'right'}")
    figures = []
    for seqlen in map(int, filter(None, options.seqlens.split(","))):
        for name in masks:
            one = ranks.time_one(name, seqlen)
            for scheme in schemes:
                several, host = ranks.time_ranks(scheme, name, seqlen)
                efficiency = one / several / ranks.size
                figures.append({"mask": name, "seqlen": seqlen, "scheme": scheme, "one_ms": one, "ranks_ms": several, "host_ms": host})
                say(f"{seqlen:7} {name:9} {scheme:22} one {one:8.2f} ms, {ranks.size} {several:8.2f} ms ({100 * efficiency:4.1f} %), host {host:6.2f} ms")
    if options.json and is_speaker:
        options.json.write_text(json.dumps({"framework": options.framework, "ranks": ranks.size, "figures": figures}, indent=1))
    if wrong:
        sys.exit(f"{wrong} cases are wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("torch", "jax"))
    parser.add_argument("--seqlens", default="32768,131072", help="what is timed; none: nothing")
    parser.add_argument("--masks", default="causal,documents")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="enqueued in a row; 1: what the host does first is seen, too")
    parser.add_argument("--checked", type=int, default=4096, metavar="TOKENS", help="what is compared with one GPU; 0: nothing")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="keep the figures")
    options = parser.parse_args()
    if options.framework == "jax":
        return report(JaxRanks(options), options, is_speaker=True)
    import torch

    size = torch.cuda.device_count() or 2  # processes of the CPU, to try this
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(torch_rank, (size, f"{folder}/store", options), size)


if __name__ == "__main__":
    main()
