"""fovea.jax.dot_product_attention beside jax.nn's, and fovea.jax.decode beside fovea.decode."""

import dataclasses
import inspect

import numpy as np
import pytest

import fovea

jax = pytest.importorskip("jax")
fovea_jax = pytest.importorskip("fovea.jax")
jnp = jax.numpy

from jax_formula import KEYS, ROWS, draw  # noqa: E402

Q, K, V = draw(2, ROWS, 4, 8), draw(2, KEYS, 2, 8, seed=1), draw(2, KEYS, 2, 8, seed=2)
ROWS_USED, KEYS_USED = np.int32([ROWS, 3]), np.int32([4, KEYS])


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (1, 2)},
    "window of one number, causal": {"local_window_size": 2, "is_causal": True},
    "lengths": {"query_seq_lengths": ROWS_USED, "key_value_seq_lengths": KEYS_USED},
    "lengths of keys, causal": {"key_value_seq_lengths": KEYS_USED, "is_causal": True},
    "bias": {"bias": draw(1, 4, ROWS, KEYS)},
    "bias of all heads": {"bias": draw(2, 1, 1, KEYS)},
    "mask": {"mask": (draw(2, 1, ROWS, KEYS) > -0.5) | (np.arange(KEYS) == 0)},
    "mask and bias and lengths": {
        "mask": np.arange(KEYS)[None, None, None] != 2, "bias": draw(2, 4, ROWS, KEYS), "key_value_seq_lengths": KEYS_USED,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_same_as_jax_nn(name: str) -> None:
    if name == "window" and jax.__version_info__ < (0, 7):
        pytest.skip("this version does not look at a window that stands alone")
    def results(function):
        def loss(q, k, v):
            return (function(q, k, v, **CASES[name]) ** 2).sum()

        gradients = jax.grad(loss, (0, 1, 2)) if name in ("plain", "lengths", "mask and bias and lengths") else lambda *_: ()
        return jax.jit(lambda *x: (function(*x, **CASES[name]), gradients(*x)))(Q, K, V)

    for got, expected in zip(*(jax.tree.leaves(results(of)) for of in (fovea_jax.dot_product_attention, jax.nn.dot_product_attention))):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_signature_is_that_of_jax_nn() -> None:
    ours, theirs = (inspect.signature(module.dot_product_attention).parameters for module in (fovea_jax, jax.nn))
    assert [(x.name, x.kind, x.default) for x in theirs.values()] == [(x.name, x.kind, x.default) for x in ours.values()][: len(theirs)]


def test_one_sequence_without_a_batch_and_its_residual() -> None:
    out = fovea_jax.dot_product_attention(Q[0], K[0], V[0], bias=draw(4, ROWS, KEYS))
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(Q[0], K[0], V[0], bias=draw(4, ROWS, KEYS)), rtol=1e-5, atol=1e-5)
    out, residual = fovea_jax.dot_product_attention(Q, K, V, return_residual=True)
    np.testing.assert_allclose(residual, fovea.attention(Q, K, V, return_lse=True)[1].transpose(0, 2, 1), rtol=1e-6)
    assert fovea_jax.dot_product_attention(Q[0], K[0], V[0], return_residual=True)[1].shape == (ROWS, 4)


def test_wrong_lengths_are_refused_by_name() -> None:
    with pytest.raises(fovea.InvalidArgument, match=r"key_value_seq_lengths has shape \(3,\).*expected \(2,\)"):
        fovea_jax.dot_product_attention(Q, K, V, key_value_seq_lengths=np.int32([1, 2, 3]))


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_does_not_broadcast_is_refused_by_name(name) -> None:
    scores = (Q.shape[0], Q.shape[2], Q.shape[1], K.shape[1])
    for dim in range(4):
        shape = tuple(extent + (axis == dim) for axis, extent in enumerate(scores))
        with pytest.raises(fovea.InvalidArgument, match=f"{name} has shape .*; expected one that broadcasts to the scores'"):
            fovea_jax.dot_product_attention(Q, K, V, **{name: np.ones(shape, bool if name == "mask" else np.float32)})


# ---- Caches ----


def cache_of(module=np, **changed):
    arrays = {"k": draw(2, 16, 2, 8, seed=4), "v": draw(2, 16, 2, 8, seed=5), "seqlens": np.int32([3, 9]), **changed}
    return fovea.KvCache(**{name: module.array(x) for name, x in arrays.items()})


TOKENS = {"append_k": draw(2, 2, 2, 8, seed=6), "append_v": draw(2, 2, 2, 8, seed=7)}
ANGLES = np.outer(np.arange(16), [1.0, 0.1]).astype(np.float32)
DECODES = {
    "tokens": (cache_of, TOKENS),
    "no new tokens": (cache_of, {}),
    "window and softcap": (cache_of, {**TOKENS, "window": (4, 0), "softcap": 2.0}),
    "a formula": (cache_of, {**TOKENS, "score_mod": "score - 0.5 * abs(q_idx - kv_idx)"}),
    "rotary": (cache_of, {**TOKENS, "rotary": fovea.Rotary(np.cos(ANGLES), np.sin(ANGLES), is_interleaved=True)}),
    "pages": (
        lambda module=np: cache_of(
            module, k=draw(6, 4, 2, 8, seed=4), v=draw(6, 4, 2, 8, seed=5), page_table=np.int32([[5, 1, 2], [0, 3, 4]])
        ),
        TOKENS,
    ),
    "slots and left padding": (lambda module=np: cache_of(module, batch_idx=np.int32([1, 0]), left_padding=np.int32([1, 2])), TOKENS),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODES)
def test_decode_over_a_donated_cache(name: str) -> None:
    make, options = DECODES[name]
    q, expected_cache, cache = draw(2, 2, 4, 8), make(), make(jnp)
    expected, expected_lse = fovea.decode(q, expected_cache, return_lse=True, **options)
    step = jax.jit(lambda q, cache: fovea_jax.decode(q, cache, return_lse=True, **options), donate_argnames="cache")
    address = cache.k.unsafe_buffer_pointer()
    out, lse, written = step(q, cache=cache)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    np.testing.assert_array_equal(written.k, expected_cache.k)
    np.testing.assert_array_equal(written.v, expected_cache.v)
    assert cache.k.is_deleted() and written.k.unsafe_buffer_pointer() == address


def test_an_array_that_is_not_donated_stays_as_it_is() -> None:
    cache = cache_of(jnp)
    _, written = fovea_jax.decode(draw(2, 2, 4, 8), cache, **TOKENS)
    np.testing.assert_array_equal(cache.k, cache_of().k)
    assert np.any(np.asarray(written.k) != cache_of().k)


def test_new_lengths_do_not_trace_anew_and_steps_chain() -> None:
    traces = []

    @jax.jit
    def steps(cache, q, k, v):
        traces.append(1)

        def step(cache, token):
            q, k, v = (x[:, None] for x in token)
            out, cache = fovea_jax.decode(q, cache, append_k=k, append_v=v)
            return dataclasses.replace(cache, seqlens=cache.seqlens + 1), out

        return jax.lax.scan(step, cache, (q, k, v))

    q, k, v = draw(4, 2, 4, 8), draw(4, 2, 2, 8, seed=1), draw(4, 2, 2, 8, seed=2)
    for lengths in ([3, 9], [0, 11]):
        _, outs = steps(cache_of(jnp, seqlens=np.int32(lengths)), q, k, v)
        plain = cache_of(seqlens=np.int32(lengths))
        for i in range(4):
            np.testing.assert_array_equal(outs[i], fovea.decode(q[i][:, None], plain, append_k=k[i][:, None], append_v=v[i][:, None]))
            plain.seqlens += 1
    assert len(traces) == 1


def test_packed_queries() -> None:
    q, offsets = draw(5, 4, 8), np.int32([0, 4, 5])
    tokens = {"append_k": draw(5, 2, 8, seed=6), "append_v": draw(5, 2, 8, seed=7)}
    out, _ = fovea_jax.decode(q, cache_of(jnp), cu_seqlens=offsets, max_seqlen_q=4, **tokens)
    np.testing.assert_array_equal(out, fovea.decode(q, cache_of(), cu_seqlens=offsets, max_seqlen_q=4, **tokens))


def test_refusals() -> None:
    q = draw(2, 2, 4, 8)
    with pytest.raises(fovea.InvalidArgument, match="one of append_k and append_v is given"):
        fovea_jax.decode(q, cache_of(jnp), append_k=TOKENS["append_k"])
    with pytest.raises(fovea.InvalidArgument, match="layout is no option"):
        fovea_jax.decode(q, cache_of(jnp), layout="bhsd")
    with pytest.raises(fovea.InvalidArgument, match="cache is a tuple; expected a KvCache"):
        fovea_jax.decode(q, (K, V))
    with pytest.raises(fovea.InvalidArgument, match="k has head_dim 8 but q has 4"):
        fovea_jax.decode(q[..., :4], cache_of(jnp), **TOKENS)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="INVALID_ARGUMENT: attention_decode: .* is 15"):
        jax.block_until_ready(fovea_jax.decode(q, cache_of(jnp, seqlens=np.int32([3, 15])), **TOKENS))
