"""Attention as FlashAttention means it, in PyTorch's own operators: to be compared with in float64, and allowed for in float32."""

from __future__ import annotations

from typing import Any, Callable

import torch


def draw(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hidden_keys(seqlen_q: int, seqlen_k: int, causal: bool, window: Any, chunk: int) -> Any:
    """[seqlen_q, seqlen_k]; the last query stands at the last key."""
    left, right = (int(size) for size in window)
    right = 0 if causal else right
    place = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        hidden |= key < place - left
    if right >= 0:
        hidden |= key > place + right
    if chunk:
        hidden |= key.div(chunk, rounding_mode="floor") != place.div(chunk, rounding_mode="floor")
    return hidden


def attention(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, window: Any = (-1, -1), softcap: float = 0.0,
    alibi: Any = None, chunk: int = 0, kept: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of one dense batch; 0 and -inf where a row sees no key. `kept` is a factor of each probability."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[-2:]
    if alibi is not None:
        distance = (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)).abs()
        scores = scores - alibi.to(scores)[..., None, None] * distance
    hidden = hidden_keys(seqlen_q, seqlen_k, causal, window, chunk)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", p if kept is None else p * kept, v), lse


def assert_close(got: Any, formula: Callable[[Any], Any]) -> None:
    """`formula(dtype)` gives what is expected; allowed are twice its error in float32, and a rounding."""
    exact, plain = formula(torch.float64), formula(torch.float32)
    assert len(got) == len(exact)
    for value, expected, rounded in zip(got, exact, plain):
        assert value.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(value.isfinite(), finite)
        expected, rounded, value = (x.double().where(finite, 0) for x in (expected, rounded, value))
        allowed = 2 * (rounded - expected).abs().max() + 5e-7 * max(1.0, float(expected.abs().max())) if expected.numel() else 0
        assert not expected.numel() or (value - expected).abs().max() <= allowed


def gradients(function: Callable[..., Any], inputs: Any, seed: int = 9) -> list[Any]:
    """Of a fixed weighing of what the function gives first."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = draw(*out.shape, seed=seed).to(out)
    return list(torch.autograd.grad((out * weights).sum(), leaves))
