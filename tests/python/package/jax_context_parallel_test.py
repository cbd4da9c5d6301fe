"""Context parallelism on eight devices of the host, in a process of its own: every scheme equals one device, forward and backward.

FOVEA_TEST_LONG=1: every scheme with every mask, number of kv heads and number of ranks.
"""

import functools
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import fovea
from fovea import parallel

jax = pytest.importorskip("jax")
fovea_jax = pytest.importorskip("fovea.jax")
jnp = jax.numpy

from jax.sharding import Mesh, PartitionSpec as P  # noqa: E402

from jax_formula import draw  # noqa: E402

# 24 heads divide among 1, 2, 3, 4 and 8 ranks. A rank of four has 12 rows: with as few as 8 the CPU would read them in
# another order than the whole's (docs/design/contract.md).
BATCH, SEQLEN, HEADS, DIM, DIM_V = 2, 48, 24, 4, 8
TENSORS = ("out", "lse", "dq", "dk", "dv")
INVARIANT = ("all_gather", "head_group_all_gather", "ulysses")
IDS = np.random.default_rng(0).integers(0, 2, (BATCH, SEQLEN)).cumsum(1).astype(np.int32) // 6
IDS[:, -5:] = -1
MASKS = {
    "none": {}, "causal": {"causal": True}, "window": {"window": (5, 2)}, "documents": {"causal": True, "segment_ids": IDS},
    "heads": {"mask_mod": "kv_idx <= q_idx && (q_head % 2 == 0 || kv_idx > q_idx - 9)"}, "nothing": {"mask_mod": "kv_idx < 0"},
}  # fmt: skip
# Each scheme with few and with many ranks, each mask with several schemes.
CASES = [
    ("all_gather", "documents", 4, 3), ("all_gather", "window", 1, 1), ("head_group_all_gather", "heads", 4, 4), ("ring", "documents", 4, 3),
    ("ring", "nothing", 1, 2), ("ulysses", "heads", 4, 4), ("ulysses", "causal", 4, 8), ("hybrid", "documents", 4, 8), ("needed_only", "window", 4, 8),
    ("needed_only", "nothing", 1, 4), ("needed_only", "none", 4, 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def route() -> None:
    """XLA calls the library itself: the routes of the other tests are one."""


def test_every_scheme_equals_one_device() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-B", __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


def test_refusals() -> None:
    plan, x = plan_of("all_gather", {"causal": True}, 4, 1), [jnp.zeros((1, SEQLEN, heads, 4)) for heads in (HEADS, 4, 4)]
    with pytest.raises(fovea.InvalidArgument, match="no axis 'context' here; expected a call within jax.shard_map"):
        fovea_jax.context_parallel_attention(*x, plan, axis_name="context")

    def within(plan, *arrays, **words):
        call = functools.partial(fovea_jax.context_parallel_attention, shards=plan, axis_name="context", **words)
        mapped(1, call)(*arrays)

    with pytest.raises(fovea.InvalidArgument, match="axis 'context' has 1 devices; expected 2, those of the plan"):
        within(plan_of("all_gather", {}, 4, 2), *x)
    with pytest.raises(fovea.InvalidArgument, match=r"k has shape \(1, 48, 24, 4\); expected \[batch, 48, 4, head_dim\]"):
        within(plan, x[0], x[0], x[2])
    with pytest.raises(fovea.InvalidArgument, match="do not begin and end at multiples of 4"):
        uneven = parallel.context_parallel_plan(*(fovea.TensorSpec(y.shape, "f32") for y in x), world_size=1, scheme="needed_only", tile_kv=3, mask_mod="kv_idx > 4")
        within(uneven, *x, dropout=(0.5, 1))
    with pytest.raises(fovea.InvalidArgument, match="shards is a str; expected a ShardPlan"):
        within("causal", *x)
    with pytest.raises(fovea.InvalidArgument, match=r"x has shape \(1, 48\); expected 48 tokens in dimension 0"):
        fovea_jax.device_plan(plan).permute(jnp.zeros((1, SEQLEN)), dim=0)
    with pytest.raises(fovea.InvalidArgument, match="bias is a list"):
        within(plan, *x, bias=[0.0])
    packed = parallel.context_parallel_plan(x[0][0], x[1][0], world_size=1, cu_seqlens=np.array([0, SEQLEN]))
    with pytest.raises(fovea.InvalidArgument, match=r"q has shape \(1, 48, 24, 4\); expected \[48, 24, head_dim\]"):
        within(packed, *x)
    rows = [y[0] for y in x]

    def of_packed(*arrays, **words):
        call = functools.partial(fovea_jax.context_parallel_attention, shards=packed, axis_name="context", **words)
        mapped(1, call, P("context"), P("context"))(*arrays)

    with pytest.raises(fovea.InvalidArgument, match="bias is dense and sequences are packed"):
        of_packed(*rows, bias=jnp.zeros((1, HEADS, SEQLEN, SEQLEN)))
    with pytest.raises(fovea.InvalidArgument, match="batch_axis is 'data' and sequences are packed"):
        of_packed(*rows, batch_axis="data")
    with pytest.raises(fovea.InvalidArgument, match="dropout"):
        of_packed(*rows, dropout=(0.5, 1))


def test_refusals_of_decoding() -> None:
    q, pages = jnp.zeros((SEQUENCES, 1, 4, DIM)), [jnp.zeros((12, PAGE_SIZE, CACHE_HEADS, dim)) for dim in (DIM, DIM_V)]
    cache = fovea.KvCache(*pages, jnp.zeros(SEQUENCES, jnp.int32), page_table=jnp.zeros((SEQUENCES, 1), jnp.int32))

    def decode(q, cache, **words):
        step = functools.partial(fovea_jax.context_parallel_decode, axis_name="context", **words)
        return mapped(1, step, (P(), P()), (P(), P()))(q, cache)

    with pytest.raises(fovea.InvalidArgument, match="no axis 'context' here; expected a call within jax.shard_map"):
        fovea_jax.context_parallel_decode(q, cache, axis_name="context")
    contiguous = fovea.KvCache(*(jnp.zeros((SEQUENCES, 8, *x.shape[2:])) for x in pages), cache.seqlens)
    with pytest.raises(fovea.InvalidArgument, match="cache has no page_table"):
        decode(q, contiguous)
    with pytest.raises(fovea.InvalidArgument, match="q has 5 sequences; expected 12, all of cache.seqlens, or a 1th of them"):
        decode(q[:5], cache)
    with pytest.raises(fovea.InvalidArgument, match="one of append_k and append_v is given"):
        decode(q, cache, append_k=jnp.zeros((SEQUENCES, 1, CACHE_HEADS, DIM)))
    with pytest.raises(fovea.InvalidArgument, match="append_k has 3 sequences; expected 12, those of q"):
        decode(q, cache, append_k=jnp.zeros((3, 1, CACHE_HEADS, DIM)), append_v=jnp.zeros((3, 1, CACHE_HEADS, DIM_V)))


# ---- What runs there ----


def plan_of(scheme, words, num_heads_kv, num_ranks):
    """None of heads that do not divide."""
    q, k, v = (fovea.TensorSpec((BATCH, SEQLEN, *shape), "f32") for shape in ((HEADS, DIM), (num_heads_kv, DIM), (num_heads_kv, DIM_V)))
    try:
        return parallel.context_parallel_plan(q, k, v, world_size=num_ranks, scheme=scheme, tile_q=4, tile_kv=4, **words)
    except fovea.InvalidArgument:
        return None


def mapped(num_ranks, call, in_specs=P(None, "context"), out_specs=P(None, "context"), checks=False):
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("context",))
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checks)


@functools.cache
def drawn(num_heads_kv):
    shapes = ((SEQLEN, HEADS, DIM), (SEQLEN, num_heads_kv, DIM), (SEQLEN, num_heads_kv, DIM_V), (SEQLEN, HEADS, DIM_V), (HEADS, SEQLEN))
    return [jnp.asarray(draw(BATCH, *shape, seed=i)) for i, shape in enumerate(shapes)]


def with_gradients(attend):
    def run(q, k, v, dout, dlse):
        (out, lse), pull = jax.vjp(attend, q, k, v)
        return (out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0))))

    return jax.jit(run)


@functools.cache
def expected_of(name, num_heads_kv):
    return with_gradients(functools.partial(fovea_jax.attention, return_lse=True, **MASKS[name]))(*drawn(num_heads_kv))


def compare(scheme, name, num_heads_kv, num_ranks, checks) -> bool:
    plan = plan_of(scheme, MASKS[name], num_heads_kv, num_ranks)
    if plan is None:
        return False
    call = functools.partial(fovea_jax.context_parallel_attention, shards=plan, axis_name="context", return_lse=True)
    attend = mapped(num_ranks, call, out_specs=(P(None, "context"), P(None, None, "context")), checks=checks)
    *rows, dlse = drawn(num_heads_kv)
    made = with_gradients(attend)(*map(plan.permute, rows), plan.permute(dlse, dim=2))
    shares_heads = scheme == "ulysses" and num_ranks > num_heads_kv
    for tensor, got, expected in zip(TENSORS, made, expected_of(name, num_heads_kv)):
        got = plan.restore(got, dim=2 if tensor == "lse" else 1)
        what = f"{tensor} of {scheme}, {name}, {num_heads_kv} kv heads, {num_ranks} ranks"
        if scheme in INVARIANT and num_ranks <= 4 and not (shares_heads and tensor in ("dk", "dv")):
            np.testing.assert_array_equal(got, expected, err_msg=what)
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=what)
    return True


def check_features() -> None:
    """Scores that learn, sinks, and a batch that is split, too; gradients by what devices share are sums of all of them."""
    plans = {scheme: plan_of(scheme, {"causal": True, "segment_ids": IDS}, 4, 4) for scheme in ("all_gather", "ulysses", "ring")}
    leaves = {"table": draw(HEADS, 7), "bias": draw(BATCH, HEADS, SEQLEN, SEQLEN), "alibi": np.abs(draw(HEADS)), "sinks": draw(HEADS, seed=1)}
    q, k, v, dout, _ = drawn(4)

    def words(leaves):
        score = lambda s, b, h, i, j: s + leaves["table"][h, (i - j) % 7] * (b + 1)  # noqa: E731
        return {"score_mod": score, "softcap": 20.0, "scale": 0.3, **{name: leaves[name] for name in ("bias", "alibi", "sinks")}}

    def gradients(attend, rows, dout):
        return jax.jit(jax.grad(lambda rows, leaves: (attend(*rows, leaves) * dout).sum(), argnums=(0, 1)))(rows, leaves)

    expected = gradients(lambda q, k, v, leaves: fovea_jax.attention(q, k, v, causal=True, segment_ids=IDS, **words(leaves)), (q, k, v), dout)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"))
    split = P("data", "context")
    for number, (scheme, plan) in enumerate(plans.items()):

        def here(q, k, v, leaves, plan=plan):
            return fovea_jax.context_parallel_attention(
                q, k, v, plan, axis_name="context", batch_axis="data", deterministic=number > 0, **words(leaves)
            )

        attend = jax.shard_map(here, mesh=mesh, in_specs=(split, split, split, P()), out_specs=split, check_vma=number % 2 == 0)
        of_rows, of_leaves = gradients(attend, tuple(map(plan.permute, (q, k, v))), plan.permute(dout))
        made = (tuple(map(plan.restore, of_rows)), of_leaves)
        for got, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, other, rtol=2e-5, atol=2e-5, err_msg=scheme)


def check_dropout() -> None:
    """What one device drops, whatever the seed is made of, and where the batch is split, too."""
    q, k, v, dout, _ = drawn(4)
    words, mesh = {"causal": True, "segment_ids": IDS}, Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"))

    def gradients(attend, *rows):
        return jax.jit(lambda seed: jax.vjp(lambda *rows: attend(*rows, seed), *rows[:3])[1](rows[3]))(jnp.int32(9))

    for number, scheme in enumerate(("all_gather", "head_group_all_gather", "ring", "ulysses", "needed_only")):
        drop = (lambda seed: (0.4, 9, 2)) if number % 2 == 0 else (lambda seed: (0.4, seed))
        plan = parallel.context_parallel_plan(
            *(fovea.TensorSpec(x.shape, "f32") for x in (q, k, v)), world_size=4, scheme=scheme, tile_q=4, tile_kv=4, chunk=4, **words
        )
        split = P("data" if number < 3 else None, "context")

        def attend(q, k, v, seed, plan=plan, drop=drop, number=number):
            axis = "data" if number < 3 else None
            return fovea_jax.context_parallel_attention(
                q, k, v, plan, axis_name="context", batch_axis=axis, deterministic=number > 0, dropout=drop(seed)
            )

        mapped_attend = jax.shard_map(attend, mesh=mesh, in_specs=(split, split, split, P()), out_specs=split, check_vma=number == 1)
        expected = gradients(lambda q, k, v, seed, drop=drop: fovea_jax.attention(q, k, v, dropout=drop(seed), **words), q, k, v, dout)
        made = gradients(mapped_attend, *map(plan.permute, (q, k, v, dout)))
        for got, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(plan.restore(got), other, rtol=2e-5, atol=2e-5, err_msg=scheme)


def check_packed() -> None:
    """Packed sequences, dealt as one and masked by their own positions, as one device attends to them; other lengths in one program."""
    total, heads_kv = 2 * SEQLEN, 4
    rows = [jnp.asarray(draw(total, *shape, seed=i)) for i, shape in enumerate(((HEADS, DIM), (heads_kv, DIM), (heads_kv, DIM_V), (HEADS, DIM_V)))]
    table = jnp.asarray(draw(HEADS, 7))

    def words(table):
        score = lambda s, b, h, i, j: s + table[h, (i - j) % 7] * (b + 1)  # noqa: E731
        return {"score_mod": score, "alibi": jnp.abs(table[:, 0])}

    def gradients(attend):
        def run(table, *rows):
            out, pull = jax.vjp(lambda table, *rows: attend(table, *rows), table, *rows[:3])
            return (out, *pull(rows[3]))

        return jax.jit(run)

    for scheme in ("all_gather", "needed_only", "ring", "ulysses"):
        # No sequence divides; the last tokens are nobody's.
        for lengths in ([0, 37, 37, 41, 90], [0, 50, 83]):
            cu_seqlens = np.array(lengths, np.int32)
            specs = [fovea.TensorSpec(x.shape, "f32") for x in rows[:3]]
            plan = fovea_jax.device_plan(
                parallel.context_parallel_plan(
                    *specs, world_size=4, scheme=scheme, tile_q=4, tile_kv=4, cu_seqlens=cu_seqlens, causal=True, mask_mod="kv_idx != 3 || seqlen_q < 40"
                )
            )

            def attend(table, *rows, plan=plan):
                call = functools.partial(fovea_jax.context_parallel_attention, shards=plan, axis_name="context", **words(table))
                return mapped(4, call, P("context"), P("context"))(*rows)

            def whole(table, *rows, cu_seqlens=cu_seqlens):
                mask = {"causal": True, "mask_mod": "kv_idx != 3 || seqlen_q < 40"}
                return fovea_jax.attention(*rows, cu_seqlens=cu_seqlens, **mask, **words(table))

            expected = gradients(whole)(table, *rows)
            made = gradients(attend)(table, *(plan.permute(x, dim=0) for x in rows))
            for number, (got, other) in enumerate(zip(made, expected, strict=True)):
                got = got if number == 1 else plan.restore(got, dim=0)
                tolerance = 1e-4 if number == 1 else 2e-5  # sums over all rows
                np.testing.assert_allclose(got, other, rtol=tolerance, atol=tolerance, err_msg=f"{scheme}, tensor {number} of {lengths}")


def check_rounding() -> None:
    """Partial results in bf16 would be rounded once for each: the error is that of one call, rounded once."""
    plan, rows = plan_of("ring", {"causal": True}, 4, 2), [x.astype(jnp.bfloat16) for x in drawn(4)[:3]]
    ring = mapped(2, functools.partial(fovea_jax.context_parallel_attention, shards=plan, axis_name="context"))
    got, once = plan.restore(jax.jit(ring)(*map(plan.permute, rows))), fovea_jax.attention(*rows, causal=True)
    exact = fovea_jax.attention(*(x.astype(jnp.float32) for x in rows), causal=True)
    error, of_once = (float(((x.astype(jnp.float32) - exact) ** 2).sum() ** 0.5) for x in (got, once))
    assert error < 1.05 * of_once, (error, of_once)


def check_plans_of_one_structure() -> None:
    """Other documents are an argument of the same program; needed_only's, too, where messages are as long."""
    q, k, v = drawn(4)[:3]
    for scheme in ("all_gather", "needed_only"):
        compiled = 0

        @jax.jit
        def attend(q, k, v, shards):
            nonlocal compiled
            compiled += 1
            call = functools.partial(fovea_jax.context_parallel_attention, axis_name="context")
            out = mapped(4, call, in_specs=(P(None, "context"),) * 3 + (P(),))(*map(shards.permute, (q, k, v)), shards)
            return shards.restore(out)

        for ids in (IDS, IDS[::-1] if scheme == "all_gather" else np.where(IDS < 0, IDS, IDS + 5)):
            shards = fovea_jax.device_plan(plan_of(scheme, {"causal": True, "segment_ids": ids}, 4, 4))
            expected = fovea_jax.attention(q, k, v, causal=True, segment_ids=ids)
            np.testing.assert_allclose(attend(q, k, v, shards), expected, rtol=1e-5, atol=1e-5, err_msg=scheme)
        assert compiled == 1, scheme


# ---- Decoding: 12 sequences go into 2 and 4 devices ----

SEQUENCES, PAGE_SIZE, MAX_PAGES, CACHE_HEADS, ROTARY_DIM = 12, 4, 8, 2, 4


def decode_cases():
    """Devices, whether each has queries of its own, queries and new tokens of a sequence, keywords."""
    cos, sin = (jnp.asarray(draw(64, ROTARY_DIM // 2, seed=seed)) for seed in (1, 2))
    positions = jnp.arange(SEQUENCES, dtype=jnp.int32)[:, None] + jnp.arange(2, dtype=jnp.int32)
    return {
        "a token": (4, True, 1, 1, {}),
        "nothing new": (2, False, 1, 0, {"window": (6, 0), "sinks": jnp.asarray(draw(4, seed=3))}),
        "a chunk": (4, True, 6, 6, {"score_mod": "score + float(kv_idx) / float(seqlen_kv)", "softcap": 9.0, "alibi": jnp.abs(jnp.asarray(draw(4)))}),
        "all keys": (2, True, 2, 2, {"sees_all_keys": True, "rotary": fovea.Rotary(cos, sin), "scale": 0.4}),
        "positions": (4, False, 2, 2, {"mask_mod": lambda b, h, i, j: (j <= i) & (j != 3), "rotary": fovea.Rotary(cos, sin, positions)}),
        "positions of queries": (2, False, 2, 0, {"rotary": fovea.Rotary(cos, sin, positions)}),
    }  # fmt: skip


def check_decoding() -> None:
    """As one cache, whichever pages a device has; new tokens are where the next step looks for them."""
    for name, (size, is_shared_out, seqlen_q, seqlen_new, words) in decode_cases().items():
        q = jnp.asarray(draw(SEQUENCES, seqlen_q, 4, DIM))
        pages = [jnp.asarray(draw(SEQUENCES * MAX_PAGES, PAGE_SIZE, CACHE_HEADS, dim, seed=dim)) for dim in (DIM, DIM_V)]
        new = [jnp.asarray(draw(SEQUENCES, seqlen_new, CACHE_HEADS, dim, seed=dim)) for dim in (DIM, DIM_V)]
        seqlens = jnp.arange(SEQUENCES, dtype=jnp.int32) * 2  # from none on: devices have no key of some
        table = jnp.arange(SEQUENCES * MAX_PAGES, dtype=jnp.int32).reshape(SEQUENCES, MAX_PAGES)
        append = dict(zip(("append_k", "append_v"), new)) if seqlen_new else {}
        whole = fovea.KvCache(*pages, seqlens, page_table=table)
        *expected, grown = fovea_jax.decode(q, whole, return_lse=True, **append, **words)
        # Device by device: its pages, and a table of them in columns of its own.
        dealt = jnp.concatenate([table[:, rank::size].reshape(-1) for rank in range(size)])
        own_table = jnp.tile(jnp.arange(SEQUENCES * MAX_PAGES // size, dtype=jnp.int32).reshape(SEQUENCES, -1), (1, size))
        cache = fovea.KvCache(*(x[dealt] for x in pages), seqlens, page_table=own_table)
        of_queries = P("context") if is_shared_out else P()
        spec = fovea.KvCache(P("context"), P("context"), P(), page_table=P(None, "context"))

        def step(q, cache, append, words=words):
            return fovea_jax.context_parallel_decode(q, cache, axis_name="context", return_lse=True, **append, **words)

        run = jax.jit(mapped(size, step, (of_queries, spec, of_queries), (of_queries, of_queries, spec)))
        *got, after = run(q, cache, append)
        for mine, other in zip(got, expected):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(after.k, grown.k[dealt], err_msg=name)
        np.testing.assert_array_equal(after.v, grown.v[dealt], err_msg=name)


def check_rounding_of_decoding() -> None:
    """Partial results are of f32: out in bf16 is rounded once."""
    q = jnp.asarray(draw(SEQUENCES, 1, 4, DIM), jnp.bfloat16)
    pages = [jnp.asarray(draw(SEQUENCES * MAX_PAGES, PAGE_SIZE, CACHE_HEADS, dim, seed=dim), jnp.bfloat16) for dim in (DIM, DIM_V)]
    table = jnp.arange(SEQUENCES * MAX_PAGES, dtype=jnp.int32).reshape(SEQUENCES, MAX_PAGES)
    seqlens = jnp.full(SEQUENCES, 31, jnp.int32)
    once, _ = fovea_jax.decode(q, fovea.KvCache(*pages, seqlens, page_table=table))
    exact, _ = fovea_jax.decode(q.astype(jnp.float32), fovea.KvCache(*(x.astype(jnp.float32) for x in pages), seqlens, page_table=table))
    dealt = jnp.concatenate([table[:, rank::4].reshape(-1) for rank in range(4)])
    own_table = jnp.tile(jnp.arange(SEQUENCES * MAX_PAGES // 4, dtype=jnp.int32).reshape(SEQUENCES, -1), (1, 4))
    spec = fovea.KvCache(P("context"), P("context"), P(), page_table=P(None, "context"))
    step = functools.partial(fovea_jax.context_parallel_decode, axis_name="context")
    got, _ = mapped(4, step, (P(), spec), (P(), spec))(q, fovea.KvCache(*(x[dealt] for x in pages), seqlens, page_table=own_table))
    error, of_once = (float(((x.astype(jnp.float32) - exact) ** 2).sum() ** 0.5) for x in (got, once))
    assert got.dtype == jnp.bfloat16 and error < 1.05 * of_once, (error, of_once)


def main() -> None:
    cases = CASES
    if os.environ.get("FOVEA_TEST_LONG"):
        cases = list(itertools.product(parallel.SCHEMES, MASKS, (24, 4, 1), (1, 2, 3, 4, 8)))
    ran = [compare(*case, checks=number % 2 == 0) for number, case in enumerate(cases)]
    assert sum(ran) > len(cases) // 2 and (cases is not CASES or all(ran)), ran
    check_features()
    check_dropout()
    check_packed()
    check_rounding()
    check_plans_of_one_structure()
    check_decoding()
    check_rounding_of_decoding()


if __name__ == "__main__":
    main()
