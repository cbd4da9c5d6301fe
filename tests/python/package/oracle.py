"""Attention in float64, written to be read; and what an evaluation of the same formula in float32 may differ from it."""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np


class Result(NamedTuple):
    out: np.ndarray  # [batch, seqlen_q, num_heads_q, head_dim_v]
    lse: np.ndarray  # [batch, num_heads_q, seqlen_q]
    largest_score: float = 0.0


class Positions(NamedTuple):
    """Indices that broadcast to [batch, heads, seqlen_q, seqlen_kv]."""

    batch: np.ndarray
    head: np.ndarray
    q_idx: np.ndarray
    kv_idx: np.ndarray


def positions(batch: int, heads: int, seqlen_q: int, seqlen_kv: int) -> Positions:
    return Positions(*np.ogrid[:batch, :heads, :seqlen_q, :seqlen_kv])


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, without NumPy's warnings: on 64-bit Arm its BLAS computes lanes beside the product, too, and reports what is divided there."""
    with np.errstate(all="ignore"):
        return a @ b


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    score: Callable[[np.ndarray, Positions], np.ndarray] | None = None,
    visible: Callable[[Positions], np.ndarray] | None = None,
    sinks: np.ndarray | None = None,
    dtype: type = np.float64,
) -> Result:
    """Of bshd arrays; rows that see no key give 0 and -inf (with a sink: 0 and the sink)."""
    q, k, v = (array.astype(dtype).transpose(0, 2, 1, 3) for array in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat(repeats, 1), v.repeat(repeats, 1)
    s = product(q, k.transpose(0, 1, 3, 2)) * dtype(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    places = positions(*s.shape)
    if score is not None:
        s = score(s, places).astype(dtype)
    if visible is not None:
        s = np.where(np.broadcast_to(visible(places), s.shape), s, -np.inf)
    logits = s if sinks is None else np.concatenate([s, np.broadcast_to(sinks.astype(dtype)[:, None, None], (*s.shape[:3], 1))], -1)
    peak = logits.max(-1, keepdims=True, initial=-np.inf)
    peak = np.where(np.isfinite(peak), peak, 0)
    total = np.exp(logits - peak).sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0]
    p = np.exp(s - peak) / np.where(total == 0, 1, total)
    largest = np.abs(np.where(np.isfinite(s), s, 0)).max(initial=0)
    return Result(product(p, v).transpose(0, 2, 1, 3), lse, float(largest))


def assert_close(got: Result, q: np.ndarray, k: np.ndarray, v: np.ndarray, **features: object) -> None:
    """Allowed are twice the error of the same formula in float32, a rounding of results, and of the scores that they are made of."""
    exact = attention(q, k, v, **features)
    plain = attention(q, k, v, **features, dtype=np.float32)
    for name in ("out", "lse"):
        expected, value = getattr(exact, name), np.asarray(getattr(got, name), np.float64)
        assert value.shape == expected.shape, f"{name}: shape {value.shape}, expected {expected.shape}"
        is_finite = np.isfinite(expected)
        assert np.array_equal(np.isfinite(value), is_finite), f"{name}: other elements are finite"
        spread = np.abs(np.where(is_finite, getattr(plain, name) - np.where(is_finite, expected, 0), 0)).max(initial=0)
        allowed = 2 * spread + 2e-7 * max(1.0, exact.largest_score, np.abs(np.where(is_finite, expected, 0)).max(initial=0))
        error = np.abs(np.where(is_finite, value - np.where(is_finite, expected, 0), 0)).max(initial=0)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
