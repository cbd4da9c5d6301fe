#!/usr/bin/env python3
"""Host time of fovea.jax: microseconds around a problem of one element, the best of many short loops.

usage: PYTHONPATH=build/release/python python bench/python/jax_host_time.py [--json FILE]

A jitted call is followed by what it is above a jitted function of the same arrays that returns one of them: no less than what any
operation of XLA's foreign function interface costs that computes nothing. Inside of scan the program alone is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Callable

import jax
import jax.numpy as jnp

import fovea.jax

LOOPS, CALLS, STEPS = 200, 100, 1000
SHAPE = (1, 1, 1, 8)


def best(function: Callable[[], object], loops: int = LOOPS, calls: int = CALLS) -> float:
    jax.block_until_ready(function())
    least = float("inf")
    for _ in range(loops):
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        least = min(least, (time.perf_counter() - start) / calls)
    return least * 1e6


def relative(slopes: Any) -> Any:
    return lambda s, b, h, q_idx, kv_idx: s - slopes[h] * jnp.abs(q_idx - kv_idx)


def in_scan(step: Callable[[Any], Any], x: Any) -> float:
    """A step, of a scan over many."""
    loop = jax.jit(lambda x: jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length=STEPS)[0])
    return best(lambda: loop(x), 20, 1) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="keep the figures")
    options = parser.parse_args()
    x, slopes = jnp.ones(SHAPE), jnp.ones(1)
    attention = fovea.jax.attention
    floor = best(lambda call=jax.jit(lambda q, k, v, slopes: q): call(x, x, x, slopes))
    figures = {"a jitted function that computes nothing": floor}
    print(f"{next(iter(figures)):52} {floor:7.2f} us")
    calls = {
        "attention": lambda q, k, v, _: attention(q, k, v),
        "attention, causal and a window": lambda q, k, v, _: attention(q, k, v, causal=True, window=(8, 0)),
        "attention, a score program that captures an array": lambda q, k, v, slopes: attention(q, k, v, score_mod=relative(slopes)),
        "attention and its gradient": jax.grad(lambda q, k, v, _: attention(q, k, v).sum(), (0, 1, 2)),
    }
    for name, function in calls.items():
        figures[name] = found = best(lambda call=jax.jit(function): call(x, x, x, slopes))
        print(f"{name:52} {found:7.2f} us   {found - floor:6.2f} above that", flush=True)
    for name, step in (("a step of scan: attention", lambda x: attention(x, x, x)), ("a step of scan: an addition", lambda x: x + 1)):
        figures[name] = found = in_scan(step, x)
        print(f"{name:52} {found:7.2f} us", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
