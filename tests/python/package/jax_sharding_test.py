"""Shardings over batch and heads on eight devices of the host, in a process of its own: JAX counts its devices when it starts."""

import os
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
fovea_jax = pytest.importorskip("fovea.jax")


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


def test_shardings() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-B", __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- What runs there ----


def check() -> None:
    import re

    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    from jax_formula import draw

    attention = fovea_jax.attention
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    q, k, v = (jnp.asarray(draw(4, 6, heads, 8, seed=heads + i)) for i, heads in enumerate((8, 4, 4)))
    one = [x[:, :, :1] for x in (k, v)]
    first, packed = [x.transpose(0, 2, 1, 3) for x in (q, k, v)], [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    slopes, sinks, bias = (jnp.asarray(x) for x in (draw(8), draw(8, seed=1), draw(1, 8, 6, 6)))
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (4, 6)), 1).astype(np.int32))
    offsets = jnp.int32([0, 7, 16, 24])

    def everything(q, k, v, slopes, bias, sinks):
        score = lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j)  # noqa: E731
        mask = lambda b, h, i, j: (i + b) % 5 != j % (h + 2)  # noqa: E731
        return attention(q, k, v, score_mod=score, mask_mod=mask, segment_ids=ids, bias=bias, sinks=sinks, return_lse=True)

    def loss(of):
        return lambda *x: sum((jnp.where(jnp.isfinite(part), part, 0) ** 2).sum() for part in jax.tree.leaves(of(*x)))

    def assert_close(got, expected, what) -> None:
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5, err_msg=what)

    def compare(what, of, arrays, specs, local, expected_spec, has_gradients=False) -> None:
        """Values, gradients, how the result is split, and that each device computes its own part alone."""
        args = range(len(arrays))
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
        if has_gradients:
            gradients = jax.jit(jax.grad(loss(of), argnums=args))
            assert_close(gradients(*sharded), gradients(*arrays), what)
        run = jax.jit(of)
        outs = run(*sharded)
        assert_close(outs, of(*arrays), what)
        out = jax.tree.leaves(outs)[0]
        assert expected_spec is None or out.sharding.is_equivalent_to(NamedSharding(mesh, expected_spec), out.ndim), f"{what}: {out.sharding}"
        program = run.lower(*sharded).compile().as_text()
        shapes = re.findall(r"= \(f32\[([\d,]+)\][^=]*custom-call", program)
        assert shapes == [local], f"{what}: {shapes}, expected {local}"

    rest = [P(), P(), P()]
    batch, both = P("data"), P("data", None, "model")
    compare("batch", everything, (q, k, v, slopes, bias, sinks), [batch] * 3 + rest, "2,6,8,8", batch)
    compare("both", everything, (q, k, v, slopes, bias, sinks), [both] * 3 + rest, "2,6,2,8", both, has_gradients=True)
    text = "score + kv_head * 0.2 - q_head * 0.1 * kv_idx"
    compare("one head of keys", lambda *x: attention(*x, score_mod=text), (q, *one), [both, batch, batch], "2,6,2,8", both, has_gradients=True)
    compare("heads of keys", lambda *x: attention(*x, score_mod=text), (q, k, v), [both] * 3, "2,6,2,8", both, has_gradients=True)
    compare("bhsd", lambda *x: attention(*x, layout="bhsd", causal=True), first, [P("data", "model")] * 3, "2,2,6,8", P("data", "model"))
    compare(
        "packed", lambda *x: attention(*x, cu_seqlens=offsets, alibi=slopes), packed, [P(None, "model")] * 3, "24,2,8", P(None, "model"),
        has_gradients=True,
    )
    scales = [jnp.asarray(0.01 + 0.004 * abs(draw(4, 4, seed=i))) for i in range(3)]
    def by_scales(q, k, v, *x):
        of_rows = {} if q.ndim == 4 else {"cu_seqlens": offsets}
        return attention(q, k, v, quant="fp8_static", **dict(zip(("q_scale", "k_scale", "v_scale"), x)), **of_rows)

    compare("scales", by_scales, (q, k, v, *scales), [both] * 3 + [P("data", "model")] * 3, "2,6,2,8", both)
    compare("scales of packed rows", by_scales, (*packed, *(x[:3] for x in scales)), [P(None, "model")] * 6, "24,2,8", P(None, "model"))
    compare("sequences stay whole", lambda *x: attention(*x, causal=True), (q, k, v), [P(None, "data")] * 3, "4,6,8,8", None)
    compare("dropout stays whole", lambda *x: attention(*x, dropout=(0.2, 3)), (q, k, v), [both] * 3, "4,6,8,8", None)
    alike = [jnp.asarray(draw(4, 6, 8, 8, seed=i)) for i in range(3)]
    compare("queries alone are split", lambda *x: attention(*x, causal=True), alike, [both, P(), P()], "2,6,2,8", both)
    two = [x[:, :, :2] for x in (k, v)]
    compare("groups stay whole", lambda *x: attention(*x, causal=True), (q, *two), [both, batch, batch], "2,6,8,8", None)

    moved = jax.jit(lambda *x: jax.jvp(lambda *y: attention(*y, score_mod=text), x, x))
    sharded = [jax.device_put(x, NamedSharding(mesh, both)) for x in (q, k, v)]
    assert_close(moved(*sharded), moved(q, k, v), "forward mode")

    def part(q, k, v, slopes, bias, sinks, ids):
        return attention(q, k, v, alibi=slopes, segment_ids=ids, bias=bias, sinks=sinks)

    if hasattr(jax, "shard_map"):
        for checks in (True, False):
            split = jax.shard_map(part, mesh=mesh, in_specs=(batch, batch, batch, *rest, batch), out_specs=batch, check_vma=checks)
            arrays = (q, k, v, slopes, bias, sinks)
            got, expected = (
                jax.jit(jax.value_and_grad(lambda *x: (of(*x, ids) ** 2).sum(), argnums=range(6)))(*arrays) for of in (split, part)
            )
            assert_close(got, expected, f"shard_map, check_vma={checks}")
    if jax.__version_info__ >= (0, 7):  # older partitioners abort on any custom call there
        some = jax.jit(jax.shard_map(lambda *x: attention(*x, causal=True), mesh=mesh, in_specs=batch, out_specs=batch, axis_names={"data"}))
        assert_close(some(*sharded), attention(q, k, v, causal=True), "shard_map over one axis of two")


if __name__ == "__main__":
    check()
