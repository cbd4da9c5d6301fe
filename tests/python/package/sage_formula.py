"""SageAttention's formulas in PyTorch's own operators, from its papers: codes by padded blocks, online softmax by tiles of keys."""

from __future__ import annotations

from typing import Any

import torch


def pad_rows(x: Any, size: int) -> Any:
    """[batch, heads, rows, head_dim] with zeros up to a multiple of `size` rows."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size))


def codes_of(x: Any, size: int, shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Any, Any]:
    """int8 codes of f32 rows, as f32, and a scale for what is reduced of each block of `size` rows seen as `shape`."""
    blocks = pad_rows(x, size).unflatten(2, (-1, *shape))
    scales = blocks.abs().amax(dims, keepdim=True).clamp(min=1e-7) / 127
    codes = (blocks / scales).round().flatten(2, 2 + len(shape))[:, :, : x.shape[2]]
    return codes, scales.flatten(2)


def by_rows(x: Any, size: int) -> tuple[Any, Any]:
    """A scale for each `size` rows."""
    return codes_of(x, size, (size,), (3, 4))


def by_query_threads(x: Any, size: int) -> tuple[Any, Any]:
    """A scale for rows n mod 8 of each `size` rows."""
    return codes_of(x, size, (size // 8, 8), (3, 5))


def by_key_threads(x: Any, size: int) -> tuple[Any, Any]:
    """A scale for rows (n mod 8) / 2 of each `size` rows."""
    return codes_of(x, size, (size // 8, 4, 2), (3, 5, 6))


def spread(scales: Any, rows: int, size: int, kind: str) -> Any:
    """The scale of each row, [batch, heads, rows, 1]."""
    n = torch.arange(rows)
    index = {"rows": n // size, "query_threads": n // size * 8 + n % 8, "key_threads": n // size * 4 + n % 8 // 2}[kind]
    return scales[:, :, index, None]


def rounded(x: Any, size: int, kind: str) -> Any:
    """What the codes of x stand for."""
    codes, scales = {"rows": by_rows, "query_threads": by_query_threads, "key_threads": by_key_threads}[kind](x, size)
    return codes * spread(scales, x.shape[2], size, kind)


def values_of(v: Any, is_fp8: bool, v_max: float) -> Any:
    """f16, or e4m3 by channels."""
    if not is_fp8:
        return v.half().float()
    scale = v.abs().amax(2, keepdim=True).clamp(min=1e-7) / v_max
    return (v / scale).to(torch.float8_e4m3fn).float() * scale


def attention(
    q: Any, k: Any, v: Any, *, q_size: int, q_kind: str, block_kv: int, k_kind: str, is_fp8: bool, sums_codes: bool = False,
    v_max: float = 448.0, causal: bool = False, smooth_k: bool = True, smooth_v: bool = False, scale: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) in f64 of f32 tensors [batch, heads, rows, head_dim], as the kernels of upstream round them; causal is top left."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    km = k.mean(2, keepdim=True) if smooth_k else torch.zeros_like(k[:, :, :1])
    vm = v.mean(2, keepdim=True) if smooth_v else torch.zeros_like(v[:, :, :1])
    v = values_of(v - vm, is_fp8, v_max).double()
    s = scale * rounded(q, q_size, q_kind).double() @ rounded(k - km, block_kv, k_kind).double().transpose(2, 3)
    if causal:
        s = s.masked_fill(torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None], -torch.inf)
    peak, total, out = torch.full_like(s[..., :1], -torch.inf), 0.0, 0.0
    for start in range(0, k.shape[2], block_kv):
        tile = s[..., start : start + block_kv]
        raised = torch.maximum(peak, tile.amax(-1, keepdim=True))
        fade, p = (peak - raised).exp(), (tile - raised).exp()
        kept = (p * 448).to(torch.float8_e4m3fn).double() / 448 if is_fp8 else p.half().double()
        total = fade * total + (kept if sums_codes else p).sum(-1, keepdim=True)
        out, peak = fade * out + kept @ v[:, :, start : start + block_kv], raised
    shift = scale * (q.double() * km.double()).sum(-1)
    return out / total + vm, (total.log() + peak)[..., 0] + shift


def in_fp4(x: Any) -> Any:
    """The last dimension in e2m1, 16 numbers by a scale of e4m3: SageAttention3's rounding."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    magnitudes = torch.nan_to_num(groups / scales, 0.0).abs()
    steps = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    codes = ((magnitudes / steps).round() * steps).clamp(max=6).copysign(groups)
    return (codes * scales).flatten(-2)[..., : x.shape[-1]]


def attention_in_fp4(q: Any, k: Any, v: Any) -> Any:
    """Of at most 128 queries and keys, which have one mean and one reference a row. (out, lse)."""
    k_mean = k.float().mean(2, keepdim=True).to(k.dtype).float()
    q, k, v = q.float(), k.float(), v.float()
    q_mean = q.mean(2, keepdim=True)
    s = in_fp4(q - q_mean) @ in_fp4(k - k_mean).transpose(2, 3) + q_mean @ (k - k_mean).transpose(2, 3)
    s = s * q.shape[-1] ** -0.5
    p = torch.exp(s - s.amax(-1, keepdim=True))
    out = in_fp4(2688 * p) @ in_fp4(v.transpose(2, 3)).transpose(2, 3) / 2688 / p.sum(-1, keepdim=True)
    return out, torch.logsumexp(s, -1) + (q @ k_mean.transpose(2, 3))[..., 0] * q.shape[-1] ** -0.5
