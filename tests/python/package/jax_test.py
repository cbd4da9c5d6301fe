"""Arrays of JAX on the CPU: read where they lie, results are JAX's."""

import numpy as np
import pytest

import fovea
import oracle
from attention_test import SLOPES, qkv
from fovea import _arrays

jax = pytest.importorskip("jax")
jnp = jax.numpy


def jax_qkv(dtype=np.float32):
    return tuple(jnp.asarray(array.astype(dtype)) for array in qkv())


def test_equals_the_oracle_and_is_jaxs() -> None:
    out, lse = fovea.attention(*jax_qkv(), causal=True, align="top_left", alibi=jnp.asarray(SLOPES), return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    oracle.assert_close(
        oracle.Result(np.asarray(out), np.asarray(lse)), *qkv(), visible=lambda p: p.kv_idx <= p.q_idx,
        score=lambda s, p: s - SLOPES[p.head] * abs(p.q_idx - p.kv_idx),
    )  # fmt: skip


def test_nothing_is_copied() -> None:
    for array in jax_qkv():
        described = _arrays.describe(array)
        assert described.address == array.unsafe_buffer_pointer()
        assert described.shape == array.shape
    q, k, v = jax_qkv()
    before = np.asarray(q).copy()
    fovea.attention(q, k, v)
    np.testing.assert_array_equal(q, before)  # and JAX's arrays stay as they were


def test_what_jax_still_computes_is_awaited() -> None:
    """JAX computes in the background: a call that read at once would see what was there before."""
    wide = jnp.full((1200, 1200), 1 / 1200, jnp.float32)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ wide, x))
    q = slow(jnp.ones((1200, 1200))).reshape(1, 1200, 10, 120)
    np.testing.assert_allclose(fovea.attention(q, q, q), 1.0, rtol=1e-4)


def test_outputs_cannot_be_jaxs() -> None:
    q, k, v = jax_qkv()
    with pytest.raises(fovea.InvalidArgument, match="out is an array of JAX"):
        fovea.attention(q, k, v, out=jnp.zeros((2, 33, 4, 24)))


def test_bf16_stays_bf16() -> None:
    out = fovea.attention(*(array.astype(jnp.bfloat16) for array in jax_qkv()))
    assert out.dtype == jnp.bfloat16


def test_captured_arrays_and_callables() -> None:
    q, k, v = jax_qkv()
    slopes = jnp.asarray(SLOPES)
    out = fovea.attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * abs(q_idx - kv_idx))
    text = fovea.score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)", slopes=slopes)
    np.testing.assert_array_equal(out, fovea.attention(q, k, v, score_mod=text))


def test_gradients_and_states() -> None:
    q, k, v = jax_qkv()
    out, lse = fovea.attention(q, k, v, return_lse=True)
    gradients = fovea.attention_backward(jnp.ones_like(out), q, k, v, out, lse)
    expected = fovea.attention_backward(np.ones_like(out), *qkv(), np.asarray(out), np.asarray(lse))
    assert isinstance(gradients.q, jax.Array)
    np.testing.assert_array_equal(gradients.k, expected.k)
    joined, _ = fovea.merge_states([out, out], [lse, lse])
    np.testing.assert_allclose(joined, out, rtol=1e-6, atol=1e-6)


def test_caches_cannot_be_jaxs() -> None:
    with pytest.raises(fovea.InvalidArgument, match="array of JAX"):
        fovea.kv_cache(jax_qkv()[0], 1, 8, 2, 32)


def test_traced_arrays_are_refused_by_name() -> None:
    q, k, v = jax_qkv()
    with pytest.raises(fovea.Unsupported, match="JAX, which has no data yet"):
        jax.jit(lambda q: fovea.attention(q, k, v))(q)
