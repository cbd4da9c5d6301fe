#!/usr/bin/env python3
"""Host time of a call from Python: microseconds around a problem of one element, the best of many short loops.

usage: PYTHONPATH=build/release/python python bench/python/host_time.py [--ctypes] [--compiled] [--json FILE]

Figures that have a floor are followed by what they are above it: fovea_plan_run of the same tensors, an operator of PyTorch with the
same arguments that only makes its outputs, or the gradient of a node that only makes its own.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Callable

import numpy
import torch

import fovea
import fovea.torch
from fovea import _attention, _calls, _quick
from fovea.torch import _ops

LOOPS, CALLS = 200, 100
SHAPE = (1, 1, 1, 8)
PLAN_RUN = "fovea_plan_run"


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


class Table:
    """Figures by name, and the floor of each that has one."""

    def __init__(self) -> None:
        self.microseconds: dict[str, float] = {}
        self.floors: dict[str, str] = {}

    def add(self, name: str, function: Callable[[], object], floor: str | None = None) -> None:
        self.microseconds[name] = found = best(function)
        above = ""
        if floor is not None:
            self.floors[name] = floor
            above = f"   {found - self.microseconds[floor]:6.2f} above {floor}"
        print(f"{name:62} {found:7.2f} us{above}", flush=True)


def plan_run(q: Any, k: Any, v: Any, **features: Any) -> Callable[[], object]:
    """The C function of a plan, its arrays already gathered."""
    plan = fovea.plan(q, k, v, **features)
    arguments = _attention.gather("host_time", q, k, v, torch.empty_like(q), None, **features)
    template = _attention._plan_template(arguments)
    words = (*arguments.words, plan._workspace(None, q)[1], plan.workspace_bytes)
    return lambda: template.invoke(arguments.tensors, words, _attention._PLAN_RUN, plan._handle)


def measure_forward(table: Table) -> None:
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    out, table_of_one = torch.empty_like(q), torch.ones(1)
    program = fovea.score_mod("score + slopes[q_head]", slopes=table_of_one)
    arrays = [x.numpy() for x in (q, k, v)]
    plan = fovea.plan(q, k, v)
    table.add(PLAN_RUN, plan_run(q, k, v))
    table.add("Plan.run", lambda: plan.run(q, k, v), PLAN_RUN)
    table.add("attention, out given", lambda: fovea.attention(q, k, v, out=out), PLAN_RUN)
    table.add("attention", lambda: fovea.attention(q, k, v), PLAN_RUN)
    table.add("attention, causal and a window", lambda: fovea.attention(q, k, v, causal=True, window=(4, 0)), PLAN_RUN)
    table.add("attention of NumPy's arrays", lambda: fovea.attention(*arrays), PLAN_RUN)
    table.add(f"{PLAN_RUN} that captures a tensor", plan_run(q, k, v, score_mod=program))
    table.add("attention that captures a tensor", lambda: fovea.attention(q, k, v, score_mod=program), f"{PLAN_RUN} that captures a tensor")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    table.add("scaled_dot_product_attention of PyTorch", lambda: sdpa(q, k, v))
    table.add("an empty tensor", lambda: q.new_empty(SHAPE))


class EmptyNode(torch.autograd.Function):
    """What saves and makes tensors as a call of attention does, and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty_like(q))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None, None


def measure_gradients(table: Table) -> None:
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    q.requires_grad_()
    table.add("attention, gradients recorded", lambda: fovea.attention(q, k, v), PLAN_RUN)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    table.add("scaled_dot_product_attention of PyTorch, gradients recorded", lambda: sdpa(q, k, v))
    for name, function, floor in (
        ("the gradient of an empty node", EmptyNode.apply, None),
        ("the gradient of attention", fovea.attention, "the gradient of an empty node"),
        ("the gradient of PyTorch's", lambda *x: sdpa(*x), "the gradient of an empty node"),
    ):
        result = function(q, k, v)
        seed = torch.ones_like(result)
        table.add(name, lambda: torch.autograd.grad(result, [q], seed, retain_graph=True), floor)


def empty_operator() -> Any:
    """Of the arguments of fovea::attention."""
    library = torch.library.Library("fovea_host_time", "DEF")
    library.define(f"attention(Tensor[] tensors, {_ops._FEATURES}) -> (Tensor, Tensor)")

    def outputs(tensors: list[Any], *features: Any) -> tuple[Any, Any]:
        return torch.empty_like(tensors[0]), tensors[0].new_empty(SHAPE[:3], dtype=torch.float32)

    library.impl("attention", outputs, "CPU")
    torch.library.register_fake("fovea_host_time::attention", outputs, lib=library)
    return library


def measure_operators(table: Table, is_compiled: bool) -> None:
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    library = empty_operator()  # gone with its last reference
    features = ("q,k,v", "", "", False, "bottom_right", None, None, None, None, 0.0, 0, 0, "bshd", True)
    ours, empty = torch.ops.fovea.attention, torch.ops.fovea_host_time.attention
    for suffix in ("", ", gradients recorded"):
        q.requires_grad_(bool(suffix))
        floor = f"an empty operator{suffix}"
        table.add(floor, lambda: empty([q, k, v], *features))
        table.add(f"fovea::attention{suffix}", lambda: ours([q, k, v], *features), floor)
    if is_compiled:
        q.requires_grad_(False)
        graphs = [torch.compile(f) for f in (lambda *x: empty(list(x), *features)[0], lambda *x: fovea.attention(*x))]
        table.add("a compiled graph of the empty operator", lambda: graphs[0](q, k, v))
        table.add("a compiled graph of attention", lambda: graphs[1](q, k, v), "a compiled graph of the empty operator")
    del library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ctypes", action="store_true", help="without the extension")
    parser.add_argument("--compiled", action="store_true", help="graphs of torch.compile, too, which need a C++ compiler")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ctypes:
        _quick.attend, _calls.invoke = None, _calls._invoke_by_ctypes
    print(f"fovea {fovea.__version__}, NumPy {numpy.__version__}, PyTorch {torch.__version__}, calls by", "ctypes" if options.ctypes else _calls.ROUTE)
    table = Table()
    measure_forward(table)
    measure_gradients(table)
    measure_operators(table, options.compiled)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"microseconds": table.microseconds, "floors": table.floors}, file, indent=1)


if __name__ == "__main__":
    main()
