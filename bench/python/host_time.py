#!/usr/bin/env python3
"""Host time of a call from PyTorch: microseconds around a problem of one element, the best of many short loops.

usage: PYTHONPATH=build/release/python python bench/python/host_time.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Callable

import torch

import fovea
import fovea.torch
from fovea import _attention

LOOPS, CALLS = 200, 100


def best(function: Callable[[], object]) -> float:
    for _ in range(CALLS):
        function()
    least = float("inf")
    for _ in range(LOOPS):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        least = min(least, (time.perf_counter() - start) / CALLS)
    return least * 1e6


def measure() -> dict[str, float]:
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    out = torch.empty_like(q)
    plan = fovea.plan(q, k, v)
    arguments = _attention.gather("host_time", q, k, v, out, None)
    template = _attention._plan_template(arguments)
    words = (*arguments.words, plan._workspace(None, q)[1], plan.workspace_bytes)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = {
        "fovea_plan_run": best(lambda: template.invoke(arguments.tensors, words, _attention._PLAN_RUN, plan._handle)),
        "Plan.run": best(lambda: plan.run(q, k, v)),
        "attention, out given": best(lambda: fovea.attention(q, k, v, out=out)),
        "attention": best(lambda: fovea.attention(q, k, v)),
        "scaled_dot_product_attention of PyTorch": best(lambda: sdpa(q, k, v)),
        "an empty tensor": best(lambda: q.new_empty((1, 1, 1, 8))),
    }
    q.requires_grad_()
    found["attention, gradients recorded"] = best(lambda: fovea.attention(q, k, v))
    found["scaled_dot_product_attention of PyTorch, gradients recorded"] = best(lambda: sdpa(q, k, v))
    result = fovea.attention(q, k, v)
    seed = torch.ones_like(result)
    found["its gradient"] = best(lambda: torch.autograd.grad(result, [q], seed, retain_graph=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure()
    for name, microseconds in found.items():
        print(f"{name:60} {microseconds:7.2f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
