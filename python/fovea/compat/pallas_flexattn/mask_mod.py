"""Masks as callables of (q_idx, kv_idx), arrays that broadcast."""

from __future__ import annotations

from typing import Any, Callable

import jax.numpy as jnp

MaskMod = Callable[..., Any]


def causal_mask(q_idx: Any, kv_idx: Any) -> Any:
    """A query sees the keys up to its own place."""
    return q_idx >= kv_idx


def bidirectional_mask(q_idx: Any, kv_idx: Any) -> Any:
    """Every query sees every key."""
    return jnp.ones_like(q_idx, dtype=bool)


def sliding_window_mask(left: int, right: int) -> MaskMod:
    """A query sees `left` keys before its place and `right` behind it; a negative number leaves a side open."""

    def mask(q_idx: Any, kv_idx: Any) -> Any:
        sees_left = (q_idx - kv_idx <= left) if left >= 0 else bidirectional_mask(q_idx, kv_idx)
        return sees_left & (kv_idx - q_idx <= right) if right >= 0 else sees_left

    return mask


def document_mask(seq_lengths: Any) -> MaskMod:
    """A query sees the keys of its own document; documents of these lengths follow one another."""
    ends = jnp.cumsum(jnp.asarray(seq_lengths, jnp.int32))
    ids = jnp.searchsorted(ends, jnp.arange(int(ends[-1])), side="right").astype(jnp.int32)
    return lambda q_idx, kv_idx: ids[q_idx] == ids[kv_idx]
