"""fovea.jax.attention against float64 of its formula: values and derivatives, of each option and of each pair."""

import functools
import itertools

import numpy as np
import pytest

import fovea

jax = pytest.importorskip("jax")
fovea_jax = pytest.importorskip("fovea.jax")
jnp = jax.numpy

from jax_formula import OPTIONS, attend, double, draw, formula, inputs  # noqa: E402


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


PAIRS = [(), *((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2)]


def seeds_of(out, lse):
    return draw(*out.shape, seed=8), np.where(np.isfinite(lse), draw(*lse.shape, seed=9), 0)


def assert_close(got, exact, what: str, tolerance: float = 2e-5) -> None:
    got, exact = np.asarray(got, np.float64), np.asarray(exact)
    assert got.shape == exact.shape, what
    is_finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(got), is_finite), f"{what}: other elements are finite"
    error = np.abs(np.where(is_finite, got - np.where(is_finite, exact, 0), 0)).max(initial=0)
    assert error <= tolerance * max(1, np.abs(np.where(is_finite, exact, 0)).max(initial=0)), f"{what}: error {error:.3g}"


def exactly(options, seeds, tensors):
    """Values and gradients in float64."""
    with double():
        doubles = [jnp.asarray(x, jnp.float64) for x in tensors]
        (out, lse), pull = jax.vjp(lambda *x: formula(options, *x), *doubles)
        dout, dlse = (jnp.asarray(x, jnp.float64) for x in seeds(out, lse))
        return [np.asarray(x) for x in (out, lse, *pull((dout, dlse)))]


@pytest.mark.parametrize("first", ["", *OPTIONS])
def test_gradients_of_options_and_pairs(first: str) -> None:
    """The first option alone, and with each that comes behind it."""
    for names in PAIRS:
        if (names or ("",))[0] != first:
            continue
        options = [OPTIONS[name] for name in names]
        tensors = inputs(options)
        exact = exactly(options, seeds_of, tensors)

        def value_and_gradients(*x, options=options):
            (out, lse), pull = jax.vjp(lambda *y: attend(options, *y), *x)
            return out, lse, *pull(tuple(jnp.asarray(seed, jnp.float32) for seed in seeds_of(*exact[:2])))

        got = jax.jit(value_and_gradients)(*tensors)
        for index, (value, expected) in enumerate(zip(got, exact)):
            assert_close(value, expected, f"{' and '.join(names) or 'plain'}: result {index}")


GROUPS = [("causal", "bias", "softcap"), ("window", "alibi", "sinks"), ("mask", "score_mod", "dropout"), ("segments", "mask_mod", "scale")]
assert sorted(sum(GROUPS, ())) == sorted(OPTIONS)


@pytest.mark.parametrize("names", GROUPS, ids=" and ".join)
def test_forward_mode(names: tuple[str, ...]) -> None:
    options = [OPTIONS[name] for name in names]
    tensors = inputs(options)
    along = [draw(*x.shape, seed=20 + i) for i, x in enumerate(tensors)]
    with double():
        doubles = [tuple(jnp.asarray(x, jnp.float64) for x in group) for group in (tensors, along)]
        exact = jax.tree.map(np.asarray, jax.jvp(lambda *x: formula(options, *x), *doubles))
    got = jax.jvp(lambda *x: attend(options, *x), tuple(map(jnp.asarray, tensors)), tuple(map(jnp.asarray, along)))
    is_seen = np.isfinite(exact[0][1])
    assert_close(got[0][1], exact[0][1], "lse")
    assert_close(got[1][0], exact[1][0], "tangent of out")
    assert_close(np.where(is_seen, got[1][1], 0), np.where(is_seen, exact[1][1], 0), "tangent of lse")


@pytest.mark.parametrize("mode", ["reverse over reverse", "forward over reverse"])
def test_gradients_of_gradients(mode: str) -> None:
    options = [OPTIONS[name] for name in ("causal", "bias", "score_mod", "sinks")]
    tensors = inputs(options)
    along = [draw(*x.shape, seed=20 + i) for i, x in enumerate(tensors)]
    seeds = None

    def second(of, *x):
        def gradient(*y):
            return jax.grad(lambda *z: sum((a * b).sum() for a, b in zip(of(*z), seeds)), tuple(range(len(y))))(*y)

        if mode == "forward over reverse":
            return jax.jvp(gradient, x, directions)[1]
        return jax.grad(lambda *y: sum((a * b).sum() for a, b in zip(gradient(*y), directions)), tuple(range(len(x))))(*x)

    with double():
        doubles, directions = ([jnp.asarray(x, jnp.float64) for x in group] for group in (tensors, along))
        directions = tuple(directions)
        seeds = [jnp.asarray(x, jnp.float64) for x in seeds_of(*formula(options, *doubles))]
        exact = [np.asarray(x) for x in jax.jit(lambda *x: second(lambda *y: formula(options, *y), *x))(*doubles)]
        seeds = [np.asarray(x, np.float32) for x in seeds]
    directions = tuple(map(jnp.asarray, along))
    got = jax.jit(lambda *x: second(lambda *y: attend(options, *y), *x))(*tensors)
    for index, (value, expected) in enumerate(zip(got, exact)):
        assert_close(value, expected, f"input {index}")


def test_third_derivatives_are_refused_by_name() -> None:
    q, k, v = map(jnp.asarray, inputs([]))
    first = jax.grad(lambda x: fovea_jax.attention(x, k, v).sum())
    second = jax.grad(lambda x: first(x).sum())
    with pytest.raises(fovea.Unsupported, match="a third derivative; expected two at most"):
        jax.grad(lambda x: second(x).sum())(q)
    with pytest.raises(fovea.Unsupported, match="a derivative of forward mode; take the inner one"):
        jax.jvp(lambda x: jax.jvp(lambda y: fovea_jax.attention(y, k, v), (x,), (x,))[1], (q,), (q,))


def test_half_precision() -> None:
    """bf16: the plain formula's own rounding sets the scale."""
    options = [OPTIONS["causal"], OPTIONS["bias"]]
    tensors = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in inputs(options)]
    exact = exactly(options, seeds_of, tensors)
    seeds = [jnp.asarray(x, dtype) for x, dtype in zip(seeds_of(*exact[:2]), (jnp.bfloat16, jnp.float32))]

    def gradients(of, *x):
        (out, lse), pull = jax.vjp(lambda *y: of(options, *y), *(jnp.asarray(y, jnp.bfloat16) for y in x))
        return out, lse, *pull((seeds[0], seeds[1].astype(lse.dtype)))

    got, plain = (jax.jit(functools.partial(gradients, of))(*tensors) for of in (attend, formula))
    for index, (value, rough, expected) in enumerate(zip(got, plain, exact)):
        assert value.dtype == (jnp.float32 if index == 1 else jnp.bfloat16)
        is_finite = np.isfinite(expected)
        error, allowed = (np.abs(np.asarray(x, np.float64) - expected)[is_finite].max() for x in (value, rough))
        assert error <= 2 * allowed + 2**-8 * np.abs(expected[is_finite]).max(), f"result {index}: {error:.3g}, plain {allowed:.3g}"


def test_a_recipe_has_the_gradients_of_the_library() -> None:
    """Under jit and vmap; what forward mode and gradients of gradients do with it is a refusal by name."""
    q, k, v = (draw(2, 3, 40, heads, 32, seed=seed) for heads, seed in ((4, 1), (2, 2), (2, 3)))
    dout = draw(2, 3, 40, 4, 32, seed=4)
    recipe = "int8,hadamard=yes"
    attend_by = functools.partial(fovea_jax.attention, causal=True, quant=recipe)

    def loss(q, k, v):
        return (jax.vmap(attend_by)(q, k, v) * dout).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for batch in range(2):
        rows = [np.asarray(x[batch], np.float32) for x in (q, k, v, dout)]
        out, lse = fovea.attention(*rows[:3], causal=True, quant=recipe, return_lse=True)
        assert np.array_equal(np.asarray(attend_by(*rows[:3])), out)
        expected = fovea.attention_backward(rows[3], *rows[:3], out, lse, causal=True, quant=recipe)
        for name, gradient in zip("qkv", got):
            assert np.array_equal(np.asarray(gradient[batch]), getattr(expected, name)), name
    exact = jax.grad(lambda q: (jax.vmap(functools.partial(fovea_jax.attention, causal=True))(q, k, v) * dout).sum())(q)
    assert not np.array_equal(np.asarray(got[0]), np.asarray(exact))
    with pytest.raises(Exception, match="quant is int8,hadamard=yes"):
        jax.jvp(lambda x: attend_by(x, k[0], v[0]), (q[0],), (q[0],))[1].block_until_ready()
