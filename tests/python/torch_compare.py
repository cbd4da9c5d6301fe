"""Fovea's CPU backend, through the C ABI, against PyTorch's float64 attention on problems that PyTorch can express.

usage: torch_compare.py --library libfovea.so

Independent of Fovea's own oracle: masks are built by PyTorch, the expected output is its scaled_dot_product_attention in
float64. What is allowed is computed: twice the error of the plain formula in the kernel's dtypes, plus one rounding of the
output. Exit 0 all right, 1 a difference, 77 no PyTorch here.
"""

import argparse
import dataclasses
import math
import sys
import typing

import fovea_ctypes as fovea

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print("skipped: this python3 has no torch")
    sys.exit(77)


@dataclasses.dataclass
class Case:
    """A problem in both languages: `bias(q_pos, kv_pos)` for PyTorch, `fields` for Fovea.

    Lengths 33 x 70 are no multiple of a vector or tile; 300 spans several tiles.
    """

    name: str
    dtype: str = "f32"
    batch: int = 2
    seqlen_q: int = 33
    seqlen_kv: int = 70
    num_heads_q: int = 4
    num_heads_kv: int = 4
    head_dim: int = 32
    head_dim_v: int = 0
    scale: float | None = None
    visible: typing.Callable | None = None  # (q_idx, kv_idx) -> bool tensor
    dense_mask: bool = False
    dense_bias: bool = False
    sinks: bool = False
    fields: dict = dataclasses.field(default_factory=dict)


SHIFT = 70 - 33  # of bottom_right alignment
CASES = [
    *(Case(f"plain {dtype}", dtype) for dtype in ("f32", "f16", "bf16")),
    *(Case(f"causal bottom_right {dtype}", dtype, visible=lambda i, j: j <= i + SHIFT, fields={"causal": 1})
      for dtype in ("f32", "f16", "bf16")),
    *(Case(f"causal top_left {dtype}", dtype, visible=lambda i, j: j <= i, fields={"causal": 1, "align": 1})
      for dtype in ("f32", "bf16")),
    Case("causal, more queries than keys: empty rows", seqlen_q=70, seqlen_kv=33,
         visible=lambda i, j: j <= i - SHIFT, fields={"causal": 1}),
    *(Case(f"GQA 8/2 {dtype}", dtype, num_heads_q=8, num_heads_kv=2) for dtype in ("f32", "f16", "bf16")),
    Case("MQA causal", num_heads_q=6, num_heads_kv=1, visible=lambda i, j: j <= i + SHIFT, fields={"causal": 1}),
    Case("head_dim_v 80", head_dim=48, head_dim_v=80),
    Case("head_dim 5", head_dim=5),
    Case("scale 0.5", scale=0.5, fields={"softmax_scale": 0.5}),
    Case("window 7,3 as mask", visible=lambda i, j: (j >= i + SHIFT - 7) & (j <= i + SHIFT + 3),
         fields={"has_window_left": 1, "has_window_right": 1, "window_left": 7, "window_right": 3}),
    Case("window and causal bf16", "bf16", visible=lambda i, j: (j >= i + SHIFT - 20) & (j <= i + SHIFT),
         fields={"has_window_left": 1, "window_left": 20, "causal": 1}),
    Case("random bool mask", dense_mask=True),
    Case("random bool mask f16", "f16", dense_mask=True),
    Case("additive bias", dense_bias=True),
    Case("sinks", sinks=True),
    Case("mask program", visible=lambda i, j: (i + j) % 3 != 1, fields={"mask_mod": "(q_idx + kv_idx) % 3 != 1"}),
    Case("several tiles", seqlen_q=300, seqlen_kv=300, visible=lambda i, j: j <= i, fields={"causal": 1}),
    Case("decode, 1 x 1000", seqlen_q=1, seqlen_kv=1000, num_heads_q=8, num_heads_kv=2),
    Case("decode, 1 x 1000 bf16", "bf16", seqlen_q=1, seqlen_kv=1000, num_heads_q=8, num_heads_kv=2),
]
TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Inputs:
    """Tensors of a case, and the additive term (with -inf for hidden keys) that PyTorch sees."""

    def __init__(self, case, seed):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        dtype, dim_v = TORCH_DTYPES[case.dtype], case.head_dim_v or case.head_dim
        self.q = normal(case.batch, case.seqlen_q, case.num_heads_q, case.head_dim).to(dtype)
        self.k = normal(case.batch, case.seqlen_kv, case.num_heads_kv, case.head_dim).to(dtype)
        self.v = normal(case.batch, case.seqlen_kv, case.num_heads_kv, dim_v).to(dtype)
        self.sinks = normal(case.num_heads_q).float() if case.sinks else None
        shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_kv)
        self.mask = torch.rand(shape, generator=generator) < 0.7 if case.dense_mask else None
        self.bias = normal(*shape).float() if case.dense_bias else None

        self.term = torch.zeros(shape, dtype=torch.float64)
        if self.bias is not None:
            self.term += self.bias
        if self.mask is not None:
            self.term.masked_fill_(~self.mask, -math.inf)
        if case.visible is not None:
            i, j = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_kv)[None]
            self.term.masked_fill_(~case.visible(i, j), -math.inf)


def heads_first(case, inputs, dtype):
    """q, k, v as [batch, heads, seqlen, dim] of this dtype, kv heads repeated for their group."""
    group = case.num_heads_q // case.num_heads_kv
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    if inputs.sinks is not None:  # one more key: its score is the sink, its value 0
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
    return q, k, v


def term_with_sink(inputs, dtype):
    if inputs.sinks is None:
        return inputs.term.to(dtype)
    column = inputs.sinks.to(dtype)[None, :, None, None].expand(*inputs.term.shape[:3], 1)
    return torch.cat((inputs.term.to(dtype), column), dim=-1)


def expected(case, inputs):
    """out by PyTorch's own attention in float64, lse by logsumexp; empty rows are 0 and -inf by Fovea's contract."""
    q, k, v = heads_first(case, inputs, torch.float64)
    term = term_with_sink(inputs, torch.float64)
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim)
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=term, scale=scale)
    lse = torch.logsumexp(q @ k.transpose(-1, -2) * scale + term, dim=-1)
    out = out.masked_fill(torch.isneginf(lse)[..., None], 0)
    return out.transpose(1, 2), lse


def plain(case, inputs):
    """The formula in the kernel's dtypes: float32 sums, weights rounded to 16 bits where inputs are."""
    q, k, v = heads_first(case, inputs, torch.float32)
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim)
    scores = q @ k.transpose(-1, -2) * scale + term_with_sink(inputs, torch.float32)
    row_max = scores.amax(dim=-1, keepdim=True).clamp_min(-1e30)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(dim=-1, keepdim=True)
    out = weights.to(inputs.v.dtype).float() @ v / row_sum
    lse = (row_max + torch.log(row_sum))[..., 0]
    out = torch.nan_to_num(out, nan=0.0).to(inputs.v.dtype)
    return out.transpose(1, 2).double(), lse.double()


def run_fovea(library, case, inputs):
    out = torch.full((*inputs.q.shape[:3], inputs.v.shape[3]), math.nan, dtype=inputs.q.dtype)
    lse = torch.full((case.batch, case.num_heads_q, case.seqlen_q), math.nan)
    fields = dict(case.fields)
    for name in ("q", "k", "v", "sinks", "mask", "bias"):
        if getattr(inputs, name) is not None:
            fields[name] = fovea.torch_tensor(getattr(inputs, name))
    library.attention_forward(
        fovea.forward_args(**fields, out=fovea.torch_tensor(out), lse=fovea.torch_tensor(lse)))
    return out.double(), lse.double()


def worst_difference(got, want):
    """Infinite where one is -inf or NaN and the other is not."""
    same = got == want  # -inf equals -inf
    difference = torch.where(same, 0.0, (got - want).abs())
    return torch.nan_to_num(difference, nan=math.inf).max().item()


def compare(library, case, seed):
    """(error of out, allowed, error of lse, allowed)."""
    inputs = Inputs(case, seed)
    want_out, want_lse = expected(case, inputs)
    plain_out, plain_lse = plain(case, inputs)
    out, lse = run_fovea(library, case, inputs)
    rounding = torch.finfo(inputs.q.dtype).eps / 2 * want_out.abs().max().item()
    floor = 4 * torch.finfo(torch.float32).eps * inputs.v.double().abs().max().item()
    finite = want_lse[torch.isfinite(want_lse)]
    lse_floor = 4 * torch.finfo(torch.float32).eps * max(1.0, finite.abs().max().item() if len(finite) else 1.0)
    return (worst_difference(out, want_out), 2 * worst_difference(plain_out, want_out) + rounding + floor,
            worst_difference(lse, want_lse), 2 * worst_difference(plain_lse, want_lse) + lse_floor)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    args = parser.parse_args()
    library = fovea.Library(args.library)
    num_wrong = 0
    for seed, case in enumerate(CASES):
        out_error, out_allowed, lse_error, lse_allowed = compare(library, case, seed)
        is_right = out_error <= out_allowed and lse_error <= lse_allowed
        num_wrong += not is_right
        print(f"{'ok   ' if is_right else 'WRONG'} {case.name:45} out {out_error:.2e} of {out_allowed:.2e} allowed, "
              f"lse {lse_error:.2e} of {lse_allowed:.2e}")
    print(f"{len(CASES) - num_wrong} of {len(CASES)} problems equal PyTorch {torch.__version__} in float64")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
