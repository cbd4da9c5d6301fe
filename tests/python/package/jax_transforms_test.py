"""fovea.jax under JAX's transformations, and what it refuses."""

import numpy as np
import pytest

import fovea

jax = pytest.importorskip("jax")
fovea_jax = pytest.importorskip("fovea.jax")
export = pytest.importorskip("jax.export")
jnp = jax.numpy

from jax_formula import KEYS, OPTIONS, ROWS, SEGMENTS_KV, SEGMENTS_Q, attend, draw, inputs, qkv  # noqa: E402

attention = fovea_jax.attention
Q, K, V = qkv()


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


def equal(got, expected, tolerance: float = 2e-6) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance)


# ---- Recipes of given scales ----

STATIC = "fp8_static"
SCALES = {f"{name}_scale": (0.01 + 0.004 * abs(draw(len(x), K.shape[2], seed=i))).astype(np.float32) for i, (name, x) in enumerate(zip("qkv", (Q, K, V)))}


def by_scales(q, k, v, q_scale, k_scale, v_scale):
    return attention(q, k, v, causal=True, quant=STATIC, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)


def test_scales_are_arrays_of_a_call() -> None:
    """Under jit, vmap and grad, with strides of any kind before them: what the library alone makes of them."""
    arrays = (Q, K, V, *SCALES.values())
    expected = fovea.attention(Q, K, V, causal=True, quant=STATIC, **SCALES, return_lse=True)
    for name, one, other in zip(("out", "lse"), jax.jit(by_scales)(*arrays), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other, err_msg=name)
    for place in range(len(arrays)):
        stacked = np.stack([arrays[place], 1.5 * arrays[place]], -1).astype(np.float32)
        axes = [stacked.ndim - 1 if i == place else None for i in range(len(arrays))]
        got = jax.jit(jax.vmap(by_scales, in_axes=axes))(*arrays[:place], stacked, *arrays[place + 1 :])
        for i in range(2):
            one = by_scales(*arrays[:place], stacked[..., i], *arrays[place + 1 :])
            equal([x[i] for x in got], one, 0)
    gradients = jax.jit(jax.grad(lambda *x: by_scales(*x)[0].sum(), argnums=range(6)))(*arrays)
    library = fovea.attention_backward(np.ones_like(expected[0]), Q, K, V, *expected, causal=True, quant=STATIC, **SCALES)
    for name, one in zip("qkv", gradients):
        np.testing.assert_array_equal(np.asarray(one), getattr(library, name), err_msg=name)
    assert not any(np.asarray(x).any() for x in gradients[3:]), "scales are constants"
    with pytest.raises(Exception, match="q_scale is missing"):
        attention(Q, K, V, quant=STATIC).block_until_ready()
    with pytest.raises(Exception, match="k_scale is f32"):
        by_scales(Q, K, V, SCALES["q_scale"], SCALES["k_scale"][:, :1], SCALES["v_scale"])[0].block_until_ready()


def test_codes_are_arrays_of_a_call() -> None:
    codes = [(0.3 * x / SCALES[f"{name}_scale"].mean()).astype(jnp.float8_e4m3fn) for name, x in zip("qkv", (Q, K, V))]
    expected = fovea.attention(*codes, causal=True, quant=STATIC, **SCALES, return_lse=True)
    got = jax.jit(by_scales)(*codes, *SCALES.values())
    assert got[0].dtype == jnp.bfloat16
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    with pytest.raises(fovea.InvalidArgument, match="codes have no gradients"):
        jax.grad(lambda v: by_scales(*codes[:2], v, *SCALES.values())[0].astype(jnp.float32).sum())(codes[2])


# ---- vmap ----

# Each argument of a call that has them all; the formula asks for no batch, so that places can be sequences of one batch.
ARGUMENTS = {
    "q": Q, "k": K, "v": V, "bias": draw(2, 4, ROWS, KEYS), "alibi": draw(4), "mask": draw(2, 1, ROWS, KEYS) > -1, "slopes": draw(4),
    "sinks": draw(4), "segments_q": SEGMENTS_Q, "segments_kv": SEGMENTS_KV,
}  # fmt: skip


def call(**given):
    given = {name: jnp.asarray(x) for name, x in given.items()}
    q, k, v, slopes, *segments = (given.pop(name) for name in ("q", "k", "v", "slopes", "segments_q", "segments_kv"))
    return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j), segment_ids=tuple(segments), return_lse=True, **given)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_vmap_over_each_argument(name: str) -> None:
    """Values, and gradients in each way of batching them, are those of a loop; the axis is any."""
    array = ARGUMENTS[name]
    changed = array[::-1] if array.dtype != np.float32 else draw(*array.shape, seed=7)
    stacked = np.stack([array, changed], -1)

    def loss(x):
        out, lse = call(**{**ARGUMENTS, name: x})
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    of = jax.value_and_grad(loss) if name in ("q", "bias", "slopes") else loss
    got = jax.jit(jax.vmap(of, in_axes=stacked.ndim - 1))(stacked)
    equal(got, jax.tree.map(lambda *x: np.stack(x), *(of(jnp.asarray(stacked[..., place])) for place in range(2))), 1e-5)


def test_vmap_is_one_call_where_places_can_be_sequences() -> None:
    stacked = np.stack([Q, 2 * Q])
    folded = jax.make_jaxpr(jax.vmap(lambda q: attention(q, K, V, causal=True)))(stacked)
    assert "fovea_attention" in str(folded) and "scan" not in str(folded)
    looped = jax.make_jaxpr(jax.vmap(lambda q: attention(q, K, V, score_mod="score + batch")))(stacked)
    assert "scan" in str(looped)
    equal(
        jax.vmap(lambda q: attention(q, K, V, score_mod="score + batch * kv_idx"))(stacked),
        np.stack([attention(q, K, V, score_mod="score + batch * kv_idx") for q in stacked]),
    )


def test_vmap_of_forward_mode_and_of_packed_sequences() -> None:
    def moved(q, t):
        return jax.jvp(lambda x: attention(x, K, V, causal=True), (q,), (t,))

    pairs = np.stack([Q, 2 * Q]), np.stack([3 * Q, draw(*Q.shape)])
    equal(jax.vmap(moved)(*pairs), jax.tree.map(lambda *x: np.stack(x), *(moved(q, t) for q, t in zip(*pairs))))
    offsets = np.int32([0, 2, ROWS]), np.int32([0, 5, KEYS])
    packed = lambda q: attention(q, K[0], V[0], cu_seqlens=offsets)  # noqa: E731
    equal(jax.vmap(packed)(Q), np.stack([packed(q) for q in Q]))


# ---- jit and checkpoint ----


def test_equals_the_eager_function_bit_for_bit() -> None:
    for layout in ("bshd", "bhsd"):
        q, k, v = (x if layout == "bshd" else np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (Q, K, V))
        features = {"causal": True, "layout": layout, "softcap": 2.0, "alibi": draw(4)}
        expected = fovea.attention(q, k, v, return_lse=True, **features)
        got = jax.jit(lambda *x: attention(*x, return_lse=True, **features))(q, k, v)  # noqa: B023
        for one, other in zip(got, expected):
            np.testing.assert_array_equal(one, other)


def test_numbers_of_numpy_and_jax_are_numbers() -> None:
    features = {"scale": np.float32(0.5), "softcap": jnp.float32(2.0), "window": (np.int64(2), None), "dropout": (np.float64(0.5), 3)}
    equal(attention(Q, K, V, **features), fovea.attention(Q, K, V, scale=0.5, softcap=2.0, window=(2, None), dropout=(0.5, 3)))
    with pytest.raises(fovea.InvalidArgument, match="scale is .*; expected a number"):
        jax.jit(lambda scale: attention(Q, K, V, scale=scale))(0.5)


def test_new_contents_and_lengths_do_not_trace_anew() -> None:
    traces = []

    @jax.jit
    def packed(q, offsets, slopes, seed):
        traces.append(1)
        formula = lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j)  # noqa: E731
        return attention(q, q, q, cu_seqlens=offsets, causal=True, score_mod=formula, dropout=(0.5, seed))

    q = draw(11, 4, 8)
    for offsets in ([0, 4, 11], [0, 9, 11], [0, 0, 6]):
        for seed in (3, 4):
            slopes = draw(4, seed=seed)
            got = packed(q, np.int32(offsets), slopes, seed)
            text = fovea.score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)", slopes=slopes)
            expected = fovea.attention(q, q, q, cu_seqlens=np.int32(offsets), causal=True, score_mod=text, dropout=(0.5, seed))
            equal(got, expected)
    assert len(traces) == 1


def test_seeds_are_numbers_arrays_and_keys() -> None:
    def dropped(seed, offset=0):
        return fovea.attention(Q, K, V, dropout=(0.5, seed, offset))

    np.testing.assert_array_equal(attention(Q, K, V, dropout=(0.5, 7, 3)), dropped(7, 3))
    np.testing.assert_array_equal(attention(Q, K, V, dropout=(0.5, -7, 2**64 - 3)), dropped(2**64 - 7, -3))
    np.testing.assert_array_equal(attention(Q, K, V, dropout=(0.5, jnp.int32(7), jnp.int32(3))), dropped(7, 3))
    np.testing.assert_array_equal(attention(Q, K, V, dropout=(0.5, jnp.int32(-7))), dropped(2**64 - 7))
    key = jax.random.key(7)
    high, low = map(int, jax.random.key_data(key))
    expected = dropped(high + (low << 32))  # the key's words as they lie in memory
    np.testing.assert_array_equal(attention(Q, K, V, dropout=(0.5, key)), expected)
    with pytest.raises(fovea.InvalidArgument, match="dropout.seed has dtype float32"):
        attention(Q, K, V, dropout=(0.5, jnp.float32(7)))


def test_checkpoint_keeps_what_its_policy_names() -> None:
    def loss(q):
        return attention(q, K, V, causal=True).sum()

    def num_forward_calls(of):
        return str(jax.make_jaxpr(jax.grad(of))(Q)).count("fovea_attention[")

    names = jax.checkpoint_policies.save_only_these_names("fovea_out", "fovea_lse")
    kept, anew = jax.checkpoint(loss, policy=names), jax.checkpoint(loss)
    equal([jax.grad(kept)(Q), jax.grad(anew)(Q)], [jax.grad(loss)(Q)] * 2)
    assert num_forward_calls(jax.jit(kept)) == num_forward_calls(loss) == num_forward_calls(anew) - 1


def test_scan_and_while() -> None:
    def step(x, _):
        return attention(x, K[..., :8], K[..., :8]), None

    x = jnp.asarray(Q)
    looped = jax.jit(lambda x: jax.lax.scan(step, x, None, length=3)[0])
    equal(looped(x), step(step(step(x, None)[0], None)[0], None)[0])
    equal(jax.grad(lambda x: looped(x).sum())(x), jax.grad(lambda x: step(step(step(x, None)[0], None)[0], None)[0].sum())(x))


def test_a_mask_has_no_gradient_and_does_not_stop_others() -> None:
    def loss(q, threshold):
        return attention(q, K, V, mask_mod=lambda b, h, i, j: j >= threshold[i]).sum()

    threshold = np.float32([0, 1, 2, 0, 3])
    dq, by_threshold = jax.grad(loss, (0, 1))(Q, threshold)
    assert not by_threshold.any() and dq.any()
    assert not jax.grad(loss, 1)(Q, threshold).any()


def test_exported_programs_hold_their_formulas() -> None:
    options = [OPTIONS["score_mod"], OPTIONS["mask_mod"]]
    tensors = [jnp.asarray(x) for x in inputs(options)]
    checks = [export.DisabledSafetyCheck.custom_call(f"fovea_{name}") for name in ("forward", "backward")]
    made = export.export(jax.jit(lambda *x: attend(options, *x)), disabled_checks=checks)(*tensors)
    assert b"kv_idx" in bytes(made.mlir_module(), "utf-8")
    equal(made.call(*tensors), attend(options, *tensors))


# ---- Refusals ----


def test_what_shapes_show_is_refused_where_it_is_traced() -> None:
    refused = {
        "k has head_dim 4 but q has 8": lambda: attention(Q, K[..., :4], V),
        "q is i32; expected f32, f16 or bf16": lambda: attention(Q.astype(np.int32), K, V),
        "q has dtype int16": lambda: attention(Q.astype(np.int16), K, V),
        r"q has shape \(5, 8\)": lambda: attention(Q[0, :, 0], K, V),
        "q is a list; expected an array of JAX or NumPy": lambda: attention(Q.tolist(), K, V),
        "softcap is -1": lambda: attention(Q, K, V, softcap=-1),
        "window is": lambda: attention(Q, K, V, window=(-1, 0)),
        "bias and an array of that name in score_mod": lambda: attention(
            Q, K, V, bias=draw(ROWS, KEYS), score_mod=fovea.score_mod("score + bias[q_head]", bias=draw(4))
        ),
    }
    for message, wrong in refused.items():
        with pytest.raises(fovea.InvalidArgument, match=message):
            jax.jit(wrong)()


def test_what_contents_show_is_an_error_of_the_run() -> None:
    offsets = np.int32([0, 4, 2, ROWS])
    kinds = (ValueError, jax.errors.JaxRuntimeError)  # XLA has one where it waits, and another where it does not
    with pytest.raises(kinds, match="INVALID_ARGUMENT: attention_forward: cu_seqlens_q.2. is 2 after 4"):
        jax.block_until_ready(attention(Q[0], Q[0], Q[0], cu_seqlens=offsets))


# ---- Callables ----

TABLE, WIDE, IDS = (jnp.asarray(x) for x in (draw(4, 12), draw(4, 3, 6), np.int32([[0, 0, 1, 1, 2, 2, 2], [5] * 7])))
SCORES = {
    "where and exp": lambda s, b, h, i, j: jnp.where(i >= j, s, s * jnp.exp(-0.1 * (j - i))),
    "floor division and remainder": lambda s, b, h, i, j: s + ((i - j) // 2) % 3 - (j - i) % 2,
    "loads of two indices": lambda s, b, h, i, j: s + TABLE[h, i + j] + TABLE[h][j],
    "negative indices": lambda s, b, h, i, j: s + TABLE[h, -1 - i] + TABLE[-1, j],
    "a row's sum": lambda s, b, h, i, j: s + jnp.sum(WIDE[h, i % 3] * WIDE[h, j % 3]),
    "a product of rows": lambda s, b, h, i, j: s + jnp.dot(WIDE[h, i % 3], WIDE[0, 1]),
    "a slice of each row": lambda s, b, h, i, j: s + jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (3,)))(TABLE, i + jnp.arange(4))[h].sum(),
    "a slice": lambda s, b, h, i, j: s + WIDE[h, 1, 2:5].max() - TABLE[:, 3][h],
    "functions of jax.nn": lambda s, b, h, i, j: jax.nn.relu(s) - jax.nn.sigmoid(s) + jnp.clip(s, -0.5, 0.5) ** 2,
    "min, max, sign, casts": lambda s, b, h, i, j: s * jnp.sign(s) + jnp.maximum(i, j).astype(jnp.float32) * (i < j) + jnp.float32(b),
    "bits": lambda s, b, h, i, j: s + ((i ^ j) & 3) + ((i << 1) | (j >> 1)),
    "rounding": lambda s, b, h, i, j: jnp.floor(s) + jnp.round(s) + jnp.ceil(s) + jnp.log1p(jnp.abs(s)),
    "logic": lambda s, b, h, i, j: jnp.where(jnp.logical_or(i == j, ~(i > j)) & jnp.isfinite(s), s, 0.0),
}  # fmt: skip
MASKS = {
    "documents": lambda b, h, i, j: IDS[b, i] == IDS[b, j],
    "blocks": lambda b, h, i, j: (i // 2 >= j // 2) | (j < 1),
    "any of a row": lambda b, h, i, j: jnp.any(IDS[b, :3] == j),
}


def dense(function, *scores):
    """The callable itself at each place."""
    for place in (3, 2, 1, 0):
        function = jax.vmap(function, (*(0 for _ in scores), *(0 if axis == place else None for axis in range(4))))
    return function(*scores, *(jnp.arange(extent) for extent in (2, 4, ROWS, KEYS)))


@pytest.mark.parametrize("name", SCORES)
def test_score_callables_are_what_jax_computes(name: str) -> None:
    scores = np.einsum("bihd,bjhd->bhij", Q, K.repeat(2, 2)) / np.float32(8**0.5)
    expected = fovea.attention(Q, K, V, scale=0.0, bias=np.asarray(dense(SCORES[name], scores), np.float32), return_lse=True)
    equal(attention(Q, K, V, score_mod=SCORES[name], return_lse=True), expected, 1e-5)  # lse sees what is the same for all keys


@pytest.mark.parametrize("name", MASKS)
def test_mask_callables_are_what_jax_computes(name: str) -> None:
    expected = fovea.attention(Q, K, V, mask=np.array(dense(MASKS[name])))
    equal(attention(Q, K, V, mask_mod=MASKS[name]), expected)
    equal(attention(Q, K, V, mask=MASKS[name]), expected)


def test_places_are_known_never_to_be_negative() -> None:
    """What jax.numpy does to negative places and quotients would hide masks from interval analysis."""
    traced = fovea_jax._trace.trace(1, MASKS["documents"])
    assert "?" not in traced.text
    assert fovea_jax._trace.trace(1, MASKS["blocks"]).text == "q_idx // 2 >= kv_idx // 2 || kv_idx < 1"


def test_callables_are_refused_with_their_line() -> None:
    refused = {
        "write jnp.where": lambda s, b, h, i, j: s if i > j else 0.0,
        "sort of JAX is not in the language": lambda s, b, h, i, j: s + jnp.sort(TABLE[h])[j],
        "returns no single number": lambda s, b, h, i, j: (s, s),
        "a reduction over 300 elements": lambda s, b, h, i, j: s + jnp.ones((4, 300))[h].sum(),
        "are to be JAX's": lambda s, b, h, i, j: s + SEGMENTS_Q[b, i],
        "rounds to zero": lambda s, b, h, i, j: s + jax.lax.div(i - j, jnp.int32(2)),
    }
    for message, wrong in refused.items():
        with pytest.raises(fovea.TraceError, match=message) as caught:
            attention(Q, K, V, score_mod=wrong)
        assert caught.value.filename == __file__ and caught.value.lineno > 0
