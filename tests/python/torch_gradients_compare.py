"""Gradients of Fovea's CPU backend, through the C ABI, against PyTorch's float64 autograd on problems that PyTorch can express.

usage: torch_gradients_compare.py --library libfovea.so

The twin of torch_compare.py, with its problems' inputs and its rule of what is allowed: twice the error of the plain formula
in the kernel's dtypes (a backward that reads out in its dtype, products of rounded probabilities and score gradients), plus
one rounding. A gradient that sums all rows of a head is one number, whose error may happen to be near zero: there, four
standard deviations of a sum of the plain formula's errors row by row. Exit 0 all right, 1 a difference, 77 no PyTorch here.
"""

import argparse
import dataclasses
import math
import sys

import fovea_ctypes as fovea
import torch_compare  # leaves with 77 where there is no torch

import torch


@dataclasses.dataclass
class Case(torch_compare.Case):
    softcap: float = 0.0
    alibi: bool = False


SHIFT = torch_compare.SHIFT
CAUSAL = {"visible": lambda i, j: j <= i + SHIFT, "fields": {"causal": 1}}
CASES = [
    *(Case(f"plain {dtype}", dtype) for dtype in ("f32", "f16", "bf16")),
    *(Case(f"causal {dtype}", dtype, **CAUSAL) for dtype in ("f32", "f16", "bf16")),
    Case("causal, more queries than keys: empty rows", seqlen_q=70, seqlen_kv=33,
         visible=lambda i, j: j <= i - SHIFT, fields={"causal": 1}),
    *(Case(f"GQA 8/2 {dtype}", dtype, num_heads_q=8, num_heads_kv=2) for dtype in ("f32", "f16", "bf16")),
    Case("MQA causal", num_heads_q=6, num_heads_kv=1, **CAUSAL),
    Case("head_dim_v 80", head_dim=48, head_dim_v=80),
    Case("head_dim 5", head_dim=5),
    Case("scale 0.5", scale=0.5, fields={"softmax_scale": 0.5}),
    Case("window 7,3 as mask", visible=lambda i, j: (j >= i + SHIFT - 7) & (j <= i + SHIFT + 3),
         fields={"has_window_left": 1, "has_window_right": 1, "window_left": 7, "window_right": 3}),
    Case("random bool mask", dense_mask=True),
    Case("random bool mask bf16", "bf16", dense_mask=True),
    *(Case(f"bias {dtype}", dtype, dense_bias=True) for dtype in ("f32", "bf16")),
    *(Case(f"sinks {dtype}", dtype, sinks=True) for dtype in ("f32", "bf16")),
    *(Case(f"softcap 2 {dtype}", dtype, softcap=2, fields={"softcap": 2.0}) for dtype in ("f32", "bf16")),
    *(Case(f"alibi {dtype}", dtype, alibi=True) for dtype in ("f32", "bf16")),
    *(Case(f"everything {dtype}", dtype, num_heads_q=4, num_heads_kv=2, sinks=True, dense_bias=True, alibi=True,
           softcap=3, visible=lambda i, j: j <= i + SHIFT, fields={"causal": 1, "softcap": 3.0})
      for dtype in ("f32", "bf16")),
    Case("several tiles", batch=1, seqlen_q=300, seqlen_kv=300, visible=lambda i, j: j <= i, fields={"causal": 1}),
    Case("several chunks of keys, bias", batch=1, seqlen_q=20, seqlen_kv=1100, num_heads_q=2, num_heads_kv=1,
         dense_bias=True),
]


class Inputs(torch_compare.Inputs):
    """As there; and slopes, gradients of the outputs, and what is hidden."""

    def __init__(self, case, seed):
        super().__init__(case, seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        rows = (case.batch, case.seqlen_q, case.num_heads_q)
        dim_v = case.head_dim_v or case.head_dim
        self.dout = torch.randn(*rows, dim_v, generator=generator).to(self.q.dtype)
        self.dlse = torch.randn(rows[0], rows[2], rows[1], generator=generator)
        self.slopes = torch.rand(case.num_heads_q, generator=generator) if case.alibi else None
        self.hidden = torch.isneginf(self.term)
        i, j = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_kv)[None]
        self.distance = (i + case.seqlen_kv - case.seqlen_q - j).abs()

    def differentiable(self, dtype):
        """What has a gradient, by name, as leaves of this dtype."""
        names = ("q", "k", "v", "sinks", "bias", "slopes")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {name: t.detach().to(dtype, copy=True).requires_grad_() for name, t in given.items()}


def scale_of(case):
    return case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim)


def repeated(case, t):
    """[batch, seqlen, kv heads, dim] as [batch, heads, seqlen, dim]."""
    return t.transpose(1, 2).repeat_interleave(case.num_heads_q // case.num_heads_kv, dim=1)


def final_scores(case, inputs, leaves, raw):
    """Softcap, bias, ALiBi, mask; a row that sees nothing gets zeros, its results are taken out later."""
    scores = case.softcap * torch.tanh(raw / case.softcap) if case.softcap else raw
    if "bias" in leaves:
        scores = scores + leaves["bias"]
    if "slopes" in leaves:
        scores = scores - leaves["slopes"][:, None, None] * inputs.distance
    is_empty = inputs.hidden.all(dim=-1, keepdim=True)
    return scores.masked_fill(inputs.hidden & ~is_empty, -math.inf)


def expected(case, inputs):
    """Every gradient by autograd in float64."""
    leaves = inputs.differentiable(torch.float64)
    k, v = repeated(case, leaves["k"]), repeated(case, leaves["v"])
    raw = leaves["q"].transpose(1, 2) @ k.transpose(-1, -2) * scale_of(case)
    scores = final_scores(case, inputs, leaves, raw)
    if "sinks" in leaves:
        column = leaves["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    is_empty = inputs.hidden.all(dim=-1)
    out = (torch.softmax(scores, dim=-1)[..., : case.seqlen_kv] @ v).masked_fill(is_empty[..., None], 0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(is_empty, 0)
    loss = (out.transpose(1, 2) * inputs.dout).sum() + (lse * inputs.dlse).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


SUMS_OF_ROWS = ("sinks", "slopes")


@torch.no_grad()
def plain(case, inputs, accumulator, storage):
    """The formulas of backward in the dtype `accumulator`; products take what was rounded to `storage`.

    SUMS_OF_ROWS are returned before their sum, as [batch, heads, seqlen_q].
    """
    leaves = inputs.differentiable(accumulator)
    scale, group = scale_of(case), case.num_heads_q // case.num_heads_kv
    q, k, v = leaves["q"].transpose(1, 2), repeated(case, leaves["k"]), repeated(case, leaves["v"])
    dout = inputs.dout.to(accumulator).transpose(1, 2)

    def rounded(t):
        return t.to(storage).to(accumulator)

    raw = q @ k.transpose(-1, -2) * scale
    scores = final_scores(case, inputs, leaves, raw)
    is_empty = inputs.hidden.all(dim=-1, keepdim=True)
    sinks = leaves["sinks"][None, :, None] if "sinks" in leaves else torch.tensor(-math.inf)
    lse = torch.logaddexp(torch.logsumexp(scores, dim=-1), sinks)[..., None]
    p = torch.exp(scores - lse).masked_fill(is_empty, 0)
    out = rounded(rounded(p) @ v)
    delta = (dout * out).sum(dim=-1, keepdim=True) - inputs.dlse[..., None].masked_fill(is_empty, 0)
    ds = p * (dout @ v.transpose(-1, -2) - delta)
    dz = ds * (1 - torch.tanh(raw / case.softcap) ** 2) if case.softcap else ds
    dz = rounded(dz)

    def of_groups(t):
        return t.unflatten(1, (case.num_heads_kv, group)).sum(dim=2).transpose(1, 2)

    gradients = {"q": (dz @ k * scale).transpose(1, 2), "k": of_groups(dz.transpose(-1, -2) @ q * scale),
                 "v": of_groups(rounded(p).transpose(-1, -2) @ dout)}
    if "sinks" in leaves:
        gradients["sinks"] = -(torch.exp(sinks[..., None] - lse) * delta).sum(dim=3)
    if "bias" in leaves:
        gradients["bias"] = ds
    if "slopes" in leaves:
        gradients["slopes"] = -(ds * inputs.distance).sum(dim=3)
    return gradients


def run_fovea(library, case, inputs):
    """Forward, then backward, with every output full of NaN before."""
    out = torch.full_like(inputs.dout, math.nan)
    lse = torch.full_like(inputs.dlse, math.nan)
    fields = dict(case.fields)
    for name, field in (("q", "q"), ("k", "k"), ("v", "v"), ("sinks", "sinks"), ("mask", "mask"), ("bias", "bias"),
                        ("slopes", "alibi")):
        if getattr(inputs, name) is not None:
            fields[field] = fovea.torch_tensor(getattr(inputs, name))
    forward = fovea.forward_args(**fields, out=fovea.torch_tensor(out), lse=fovea.torch_tensor(lse))
    library.attention_forward(forward)
    gradients = {name: torch.full_like(t, math.nan) for name, t in inputs.differentiable(torch.float32).items()}
    for name in ("q", "k", "v"):
        gradients[name] = gradients[name].to(inputs.q.dtype)
    named = {field: fovea.torch_tensor(gradients[name].detach()) for name, field in (("bias", "bias"), ("slopes", "alibi"))
             if name in gradients}
    views = {f"d{name}": fovea.torch_tensor(gradients[name].detach()) for name in ("q", "k", "v", "sinks")
             if name in gradients}
    library.attention_backward(fovea.backward_args(
        forward, named, dout=fovea.torch_tensor(inputs.dout), dlse=fovea.torch_tensor(inputs.dlse), **views))
    return {name: gradient.detach().double() for name, gradient in gradients.items()}


def compare(library, case, seed):
    """[(name, error, allowed)] of every gradient."""
    inputs = Inputs(case, seed)
    want, got = expected(case, inputs), run_fovea(library, case, inputs)
    near = plain(case, inputs, torch.float32, inputs.q.dtype)
    exact = plain(case, inputs, torch.float64, torch.float64)
    rows = []
    for name, gradient in want.items():
        largest = gradient.abs().max().item()
        dtype = inputs.q.dtype if name in ("q", "k", "v") else torch.float32
        rounding = torch.finfo(dtype).eps / 2 * largest
        floor = 8 * torch.finfo(torch.float32).eps * largest
        error = torch_compare.worst_difference(got[name], gradient)
        if name in SUMS_OF_ROWS:
            plain_error = 4 * (near[name] - exact[name]).square().sum(dim=(0, 2)).sqrt().max().item()
        else:
            plain_error = 2 * torch_compare.worst_difference(near[name].double(), gradient)
        rows.append((name, error, plain_error + rounding + floor))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    library = fovea.Library(parser.parse_args().library)
    num_wrong = 0
    for seed, case in enumerate(CASES):
        rows = compare(library, case, seed)
        is_right = all(error <= allowed for _, error, allowed in rows)
        num_wrong += not is_right
        text = ", ".join(f"d{name} {error:.1e} of {allowed:.1e}" for name, error, allowed in rows)
        print(f"{'ok   ' if is_right else 'WRONG'} {case.name:43} {text}")
    print(f"{len(CASES) - num_wrong} of {len(CASES)} problems have the gradients of PyTorch {torch.__version__} in float64")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
