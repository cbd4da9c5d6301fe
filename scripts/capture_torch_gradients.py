#!/usr/bin/env python3
"""Writes tests/unit/reference/data/torch_gradients.txt: gradients, and gradients of gradients, by PyTorch's float64 autograd.

    pip install torch
    scripts/capture_torch_gradients.py

The oracle is compared with them (torch_gradients_test.cpp), so that its backward has a judge that shares no idea with it.
Inputs are multiples of 1/64: exact in float32, short in print.
"""

import argparse
import dataclasses
import math
import pathlib
import typing

import torch

OUTPUT = pathlib.Path(__file__).parents[1] / "tests/unit/reference/data/torch_gradients.txt"
BATCH = 1


@dataclasses.dataclass
class Problem:
    """A problem in both languages: text for Fovea, `score` and `visible` for PyTorch.

    score(s, captured, i, j) takes the scaled scores [batch, heads, q, kv]; i and j are q_idx and kv_idx.
    """

    name: str
    seqlen_q: int = 3
    seqlen_kv: int = 5
    num_heads_q: int = 2
    num_heads_kv: int = 2
    head_dim_qk: int = 3
    head_dim_v: int = 2
    softmax_scale: float | None = None
    has_sinks: bool = False
    score_text: str = "score"
    mask_text: str = "true"
    captured: dict = dataclasses.field(default_factory=dict)  # name -> shape, () for a scalar
    score: typing.Callable = lambda s, captured, i, j: s
    visible: typing.Callable = lambda i, j: (i == i) & (j == j)


CAUSAL = {"mask_text": "kv_idx <= q_idx + (seqlen_kv - seqlen_q)"}
ALIBI = "score - slopes[q_head] * abs(q_idx + (seqlen_kv - seqlen_q) - kv_idx)"
PROBLEMS = [
    Problem("plain"),
    Problem("causal", **CAUSAL, visible=lambda i, j: j <= i + 2),
    Problem("causal_with_empty_rows", seqlen_q=5, seqlen_kv=3, **CAUSAL, visible=lambda i, j: j <= i - 2),
    Problem("grouped_heads", num_heads_q=4, num_heads_kv=2),
    Problem("negative_scale", softmax_scale=-0.75),
    Problem("softcap", score_text="cap * tanh(score / cap)", captured={"cap": ()},
            score=lambda s, c, i, j: c["cap"] * torch.tanh(s / c["cap"])),
    Problem("sinks", has_sinks=True),
    Problem("alibi", score_text=ALIBI, captured={"slopes": (2,)},
            score=lambda s, c, i, j: s - c["slopes"][:, None, None] * (i + 2 - j).abs()),
    Problem("bias", score_text="score + bias[q_head, q_idx, kv_idx]", captured={"bias": (2, 3, 5)},
            score=lambda s, c, i, j: s + c["bias"]),
    Problem("bias_of_keys", score_text="score + bias[0, kv_idx]", captured={"bias": (1, 5)},
            score=lambda s, c, i, j: s + c["bias"]),
    Problem("clamped_table", score_text="score + table[q_head, kv_idx - q_idx + 1]", captured={"table": (2, 4)},
            score=lambda s, c, i, j: s + c["table"][:, (j - i + 1).clamp(0, 3)]),
    Problem("temperatures", score_text="score * exp(temperature[q_head]) + sigmoid(score) / (2 + score * score)",
            captured={"temperature": (2,)},
            score=lambda s, c, i, j: s * c["temperature"].exp()[:, None, None] + torch.sigmoid(s) / (2 + s * s)),
    Problem("everything", num_heads_q=4, num_heads_kv=2, has_sinks=True, softmax_scale=0.625, **CAUSAL,
            score_text="2 * tanh(score / 2) * gain + bias[q_head, q_idx, kv_idx]",
            captured={"gain": (), "bias": (4, 3, 5)}, visible=lambda i, j: j <= i + 2,
            score=lambda s, c, i, j: 2 * torch.tanh(s / 2) * c["gain"] + c["bias"]),
]


def forward(problem, t):
    """out [batch, q, heads, dim] and lse [batch, heads, q]; rows that see nothing give 0 to every gradient."""
    group = problem.num_heads_q // problem.num_heads_kv
    k, v = (t[name].repeat_interleave(group, dim=2) for name in ("k", "v"))
    scale = problem.softmax_scale if problem.softmax_scale is not None else 1 / math.sqrt(problem.head_dim_qk)
    i, j = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_kv)[None]
    scores = torch.einsum("bihd,bjhd->bhij", t["q"], k) * scale
    scores = problem.score(scores, t, i, j)
    hidden = ~problem.visible(i, j)
    is_empty = hidden.all(dim=1)
    scores = scores.masked_fill(hidden & ~is_empty[:, None], -math.inf)
    if problem.has_sinks:
        sinks = t["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : problem.seqlen_kv]
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    lse = torch.logsumexp(scores, dim=-1)
    return out.masked_fill(is_empty[None, :, None, None], 0), lse.masked_fill(is_empty, 0)


def tensors(problem, seed):
    """Inputs, gradients of outputs and directions, on a grid of 1/64."""
    generator = torch.Generator().manual_seed(seed)
    q = (BATCH, problem.seqlen_q, problem.num_heads_q, problem.head_dim_qk)
    k = (BATCH, problem.seqlen_kv, problem.num_heads_kv, problem.head_dim_qk)
    shapes = {"q": q, "k": k, "v": (*k[:3], problem.head_dim_v), "dout": (*q[:3], problem.head_dim_v),
              "dlse": (BATCH, problem.num_heads_q, problem.seqlen_q)}
    if problem.has_sinks:
        shapes["sinks"] = (problem.num_heads_q,)
    shapes |= problem.captured | {"ddq": q, "ddk": k, "ddv": shapes["v"]}
    grid = {name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 64).round() / 64
            for name, shape in shapes.items()}
    for name in problem.captured:  # a divisor among them: away from 0
        if problem.captured[name] == ():
            grid[name] = grid[name].abs() + 1
    return grid


def gradients(problem, t):
    """The expected tensors, by name."""
    constants = ("ddq", "ddk", "ddv")
    for name, tensor in t.items():
        tensor.requires_grad_(name not in constants)
    out, lse = forward(problem, t)
    loss = (out * t["dout"]).sum() + (lse * t["dlse"]).sum()
    first = ["q", "k", "v", *(["sinks"] if problem.has_sinks else []), *problem.captured]
    by_first = torch.autograd.grad(loss, [t[name] for name in first], create_graph=True)
    expected = {f"d{name}": gradient for name, gradient in zip(first, by_first)}
    second_loss = sum((expected[f"d{name}"] * t[f"dd{name}"]).sum() for name in ("q", "k", "v"))
    second = ["q", "k", "v", "dout", "dlse"]
    by_second = torch.autograd.grad(second_loss, [t[name] for name in second])
    return expected | {f"grad_{name}": gradient for name, gradient in zip(second, by_second)}


def numbers(tensor):
    """Ten digits: all of an input on the grid, enough of a gradient."""
    return " ".join(f"{value:.10g}" for value in tensor.detach().flatten().tolist())


INPUTS = ("q", "k", "v", "sinks", "dout", "dlse", "ddq", "ddk", "ddv")
EXPECTED = ("dq", "dk", "dv", "dsinks", "grad_q", "grad_k", "grad_v", "grad_dout", "grad_dlse")


def as_text(problem, seed):
    """A problem as torch_gradients_test.cpp reads it: a field a line."""
    t = tensors(problem, seed)
    expected = gradients(problem, t)
    lines = [f"problem {problem.name}", f"seqlens {problem.seqlen_q} {problem.seqlen_kv}",
             f"heads {problem.num_heads_q} {problem.num_heads_kv}"]
    if problem.softmax_scale is not None:
        lines.append(f"softmax_scale {problem.softmax_scale}")
    lines += [f"score {problem.score_text}", f"mask {problem.mask_text}"]
    for name, shape in problem.captured.items():
        lines += [" ".join(["captured", name, *map(str, shape)]), f"values {numbers(t[name])}",
                  f"expected {numbers(expected['d' + name])}"]
    lines += [f"{name} {numbers(t[name])}" for name in INPUTS if name in t]
    lines += [f"expected_{name} {numbers(expected[name])}" for name in EXPECTED if name in expected]
    return "\n".join(lines) + "\n"


HEADER = f"""\
# Problems, and their gradients by the float64 autograd of PyTorch {torch.__version__.split("+")[0]}: written by scripts/capture_torch_gradients.py. A field a line;
# values are row-major, expected_x is the gradient by x of a problem's loss, expected_grad_x that of its directional derivative.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    output = parser.parse_args().output
    problems = [as_text(problem, seed) for seed, problem in enumerate(PROBLEMS)]
    output.write_text("\n".join([HEADER, *problems]))
    print(f"{output}: {len(PROBLEMS)} problems, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
