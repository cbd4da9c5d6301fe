"""Attention written in jax.numpy, for derivatives in float64; options of fovea.jax.attention, and what each is in the formula."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import numpy as np

import fovea

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

# What is compiled here runs once: compiling it well took most of the time of these tests.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would multiply f32 in TF32

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM, DIM_V = 2, 5, 7, 4, 2, 8, 6


def double() -> Any:
    """Where arrays are of float64."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv() -> tuple[np.ndarray, ...]:
    return draw(BATCH, ROWS, HEADS, DIM, seed=1), draw(BATCH, KEYS, HEADS_KV, DIM, seed=2), draw(BATCH, KEYS, HEADS_KV, DIM_V, seed=3)


B, H, I, J = np.ogrid[:BATCH, :HEADS, :ROWS, :KEYS]
POSITION = I + KEYS - ROWS


class Option(NamedTuple):
    """`features(array)` of the call and `score(s, array)`, `visible` of the formula; `array` can be differentiated, where there is one."""

    features: Callable[[Any], dict[str, Any]]
    score: Callable[[Any, Any], Any] | None = None
    visible: np.ndarray | None = None
    array: np.ndarray | None = None
    order: int = 0  # in which scores act
    scale: float | None = None
    sinks: bool = False
    kept: np.ndarray | None = None


SEGMENTS_Q, SEGMENTS_KV = np.int32([[0, 0, 1, 1, -1], [3] * 5]), np.int32([[0, 0, 0, 1, 1, 1, -1], [3] * 6 + [4]])
SEEN = (draw(BATCH, 1, ROWS, KEYS) > -0.5) | (J == 1)
SLOPES, RATES, SINKS, BIAS = draw(HEADS), draw(HEADS), draw(HEADS), draw(HEADS, ROWS, KEYS)
TABLE = draw(HEADS, ROWS + KEYS)


def relative(table: Any) -> dict[str, Any]:
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score * jnp.where(q_idx % 2 == 0, 1.0, 0.5) + table[h, q_idx - kv_idx + KEYS]}


OPTIONS = {
    "causal": Option(lambda _: {"causal": True}, visible=J <= POSITION),
    "window": Option(lambda _: {"window": (2, 1)}, visible=(J >= POSITION - 2) & (J <= POSITION + 1)),
    "scale": Option(lambda _: {"scale": 0.75}, scale=0.75),
    "softcap": Option(lambda _: {"softcap": 1.5}, lambda s, _: 1.5 * jnp.tanh(s / 1.5), order=1),
    "bias": Option(lambda x: {"bias": x}, lambda s, x: s + x, array=BIAS, order=2),
    "alibi": Option(lambda x: {"alibi": x}, lambda s, x: s - x[:, None, None] * abs(POSITION - J), array=SLOPES, order=3),
    "score_mod": Option(
        relative, lambda s, x: s * np.where(I % 2 == 0, 1.0, 0.5) + x[H, I - J + KEYS], array=TABLE, order=4,
    ),
    "mask": Option(lambda _: {"mask": SEEN}, visible=SEEN),
    "mask_mod": Option(
        lambda _: {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx * (b + 1)) % 3 != h % 2}, visible=(I + J * (B + 1)) % 3 != H % 2
    ),
    "segments": Option(
        lambda _: {"segment_ids": (SEGMENTS_Q, SEGMENTS_KV)},
        visible=(SEGMENTS_Q[B, I] == SEGMENTS_KV[B, J]) & (SEGMENTS_Q[B, I] != -1),
    ),
    "sinks": Option(lambda x: {"sinks": x}, array=SINKS, sinks=True),
    "dropout": Option(lambda _: {"dropout": (0.3, 5)}, kept=np.signbit(
        fovea.attention_probabilities(*(x[:BATCH] for x in qkv()[:2]), dropout=(0.3, 5))) == 0),
}  # fmt: skip


def formula(options: list[Option], q: Any, k: Any, v: Any, *arrays: Any) -> tuple[Any, Any]:
    """out and lse; `arrays` are those of the options that have one."""
    given = iter(arrays)
    own = [next(given) if option.array is not None else None for option in options]
    k, v = jnp.repeat(k, HEADS // HEADS_KV, 2), jnp.repeat(v, HEADS // HEADS_KV, 2)
    scale = next((option.scale for option in options if option.scale is not None), DIM**-0.5)
    s = jnp.einsum("bihd,bjhd->bhij", q, k) * scale
    for option, array in sorted(zip(options, own), key=lambda pair: pair[0].order):
        s = s if option.score is None else option.score(s, array)
    visible = np.ones((BATCH, HEADS, ROWS, KEYS), bool)
    for option in options:
        visible = visible if option.visible is None else visible & option.visible
    # Rows that see no key: 0 and no gradient, lse -inf.
    is_seen = visible.any(-1, keepdims=True)
    s = jnp.where(visible, s, -jnp.inf)
    logits = jnp.where(is_seen, s, 0.0)
    sinks = [array for option, array in zip(options, own) if option.sinks]
    if sinks:
        sink = jnp.broadcast_to(sinks[0][:, None, None], (*s.shape[:3], 1))
        lse = jax.nn.logsumexp(jnp.concatenate([jnp.where(is_seen, s, -jnp.inf), sink], -1), -1)
    else:
        lse = jnp.where(is_seen[..., 0], jax.nn.logsumexp(logits, -1), 0.0)
    p = jnp.where(visible, jnp.exp(logits - lse[..., None]), 0.0)
    kept = [option.kept for option in options if option.kept is not None]
    p = p * kept[0] / 0.7 if kept else p
    return jnp.einsum("bhij,bjhd->bihd", p, v), lse if sinks else jnp.where(is_seen[..., 0], lse, -jnp.inf)


def attend(options: list[Option], q: Any, k: Any, v: Any, *arrays: Any) -> tuple[Any, Any]:
    """The same by fovea.jax."""
    given = iter(arrays)
    features: dict[str, Any] = {}
    for option in options:
        features |= option.features(next(given) if option.array is not None else None)
    return fovea.jax.attention(q, k, v, return_lse=True, **features)  # type: ignore[no-any-return]


def inputs(options: list[Option]) -> list[np.ndarray]:
    return [*qkv(), *(option.array for option in options if option.array is not None)]
