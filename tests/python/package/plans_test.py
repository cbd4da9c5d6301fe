"""Plans of decode, append and backward: made without data, run with the bits of the calls that they stand for."""

import concurrent.futures
import copy
import gc
import pickle

import numpy as np
import pytest

import fovea
import fovea.parallel
from attention_test import draw, qkv

SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])


def spec_of(array: np.ndarray) -> fovea.TensorSpec:
    return fovea.TensorSpec(array.shape, {"float32": "f32", "int32": "i32"}[array.dtype.name])


def spec_of_cache(cache: fovea.KvCache) -> fovea.KvCache:
    table = None if cache.page_table is None else spec_of(cache.page_table)
    return fovea.KvCache(spec_of(cache.k), spec_of(cache.v), spec_of(cache.seqlens), table)


# ---- decode ----


def filled_cache(page_size=None, batch=2, capacity=48) -> fovea.KvCache:
    cache = fovea.kv_cache(draw((1,)), batch, capacity, 2, 32, head_dim_v=24, page_size=page_size)
    cache.k[:], cache.v[:] = draw(cache.k.shape, 4), draw(cache.v.shape, 5)
    cache.seqlens[:] = np.arange(7, 7 + batch)
    return cache


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_a_decode_plan_gives_the_bits_of_decode(page_size) -> None:
    angles = np.arange(48)[:, None] / 10.0 ** np.arange(8)
    options = {
        "rotary": fovea.Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)),
        "score_mod": fovea.score_mod("score - slopes[q_head] * (q_idx + 2)", slopes=SLOPES), "window": (9, None), "softcap": 5.0,
    }  # fmt: skip
    q, k, v = (draw((2, 3, heads, dim), seed) for seed, (heads, dim) in enumerate([(4, 32), (2, 32), (2, 24)]))
    planned, called = filled_cache(page_size), filled_cache(page_size)
    plan = fovea.plan_decode(
        spec_of(q), spec_of_cache(planned), append_k=spec_of(k), append_v=spec_of(v), return_lse=True, **options
    )
    assert isinstance(plan.workspace_bytes, int) and plan.workspace_bytes > 0
    for step in range(3):  # lengths grow under one plan
        tokens = {"append_k": k + step, "append_v": v - step}
        got = plan.run(q, planned, **tokens)
        expected = fovea.decode(q, called, **tokens, **options, return_lse=True)
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])
        np.testing.assert_array_equal(planned.k, called.k)
        planned.seqlens += 3
        called.seqlens += 3
    other = options["score_mod"].with_captures(slopes=SLOPES * 2)
    called.seqlens[:] = planned.seqlens[:] = 5
    out = np.full((2, 3, 4, 24), np.nan, np.float32)
    assert plan.run(q, planned, append_k=k, append_v=v, score_mod=other, out=out)[0] is out
    options["score_mod"] = other
    np.testing.assert_array_equal(out, fovea.decode(q, called, append_k=k, append_v=v, **options))


def test_a_decode_plan_of_packed_queries_and_a_shared_prefix() -> None:
    q, offsets = draw((6, 4, 32), 1), np.int32([0, 1, 6])
    cache = filled_cache()
    cache.seqlens[:] = [20, 30]
    options = {"max_seqlen_q": 5, "shared_prefix": 8}
    plan = fovea.plan_decode(q, cache, cu_seqlens=offsets, **options)
    np.testing.assert_array_equal(plan.run(q, cache, cu_seqlens=offsets), fovea.decode(q, cache, cu_seqlens=offsets, **options))


def test_a_decode_plan_takes_views_and_copies() -> None:
    # Strides of an axis of one element: those of the array that it was cut from, or of a packed one. NumPy 2.2 hands over the latter through DLPack.
    steps = draw((1, 64, 4, 32))
    view, copy = steps[:, :1], steps[:, :1].copy()
    assert view.strides != copy.strides
    cache = fovea.kv_cache(copy, 1, 48, 2, 32, head_dim_v=24)
    cache.k[:], cache.v[:], cache.seqlens[:] = draw(cache.k.shape, 1), draw(cache.v.shape, 2), 30
    expected = fovea.decode(copy, cache)
    for planned in (view, copy):
        plan = fovea.plan_decode(planned, cache)
        for q in (view, copy):
            np.testing.assert_array_equal(plan.run(q, cache), expected)


def test_a_decode_plan_explains_itself() -> None:
    q, cache = draw((2, 1, 4, 32)), filled_cache()
    plan = fovea.plan_decode(q, cache, max_seqlen_kv=40)
    assert plan.explain(as_json=True)["kernel"] == "cpu/attention_forward"
    assert "cpu/attention_forward" in plan.explain()
    assert fovea.plan_decode(q, cache, sees_all_keys=True).explain(as_json=True)["mask"] != plan.explain(as_json=True)["mask"]


def test_a_decode_plan_refuses_what_does_not_fit() -> None:
    q, cache = draw((2, 1, 4, 32)), filled_cache()
    k, v = draw((2, 1, 2, 32)), draw((2, 1, 2, 24))
    plan = fovea.plan_decode(q, cache, append_k=k, append_v=v, max_seqlen_kv=9)
    before = cache.k.copy()
    for change, message in (
        ({"append_k": k, "append_v": v[:, :, :, :16]}, r"append.v is f32 \[2, 1, 2, 16\]"),
        ({"append_k": k, "append_v": v, "softcap": 2.0}, "another problem than the plan's"),
    ):
        with pytest.raises(fovea.InvalidArgument, match=message):
            plan.run(q, cache, **change)
    np.testing.assert_array_equal(cache.k, before)
    plan.run(q, cache, append_k=k, append_v=v)
    cache.seqlens[:] = 9
    with pytest.raises(fovea.InvalidArgument, match="a sequence has 10 keys; expected at most 9"):
        plan.run(q, cache, append_k=k, append_v=v)
    with pytest.raises(fovea.InvalidArgument, match="plan_decode: cache is a ndarray"):
        fovea.plan_decode(q, k)
    with pytest.raises(fovea.InvalidArgument, match="plan_decode: q is a list"):
        fovea.plan_decode([1.0], cache)
    indices = fovea.KvCache(cache.k, cache.v, cache.seqlens, page_indptr=np.int32([0, 1, 2]), page_indices=np.int32([0, 1]))
    with pytest.raises(fovea.InvalidArgument, match="max_seqlen_kv is None and the cache has page_indices"):
        fovea.plan_decode(q, indices)
    assert fovea.plan_decode(q, indices, max_seqlen_kv=48).workspace_bytes > 0


def test_threads_share_a_decode_plan() -> None:
    q, cache = draw((2, 1, 4, 32)), filled_cache()
    plan = fovea.plan_decode(q, cache)
    expected = fovea.decode(q, cache)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: plan.run(q, cache), range(200)):
            np.testing.assert_array_equal(got, expected)


# ---- append ----


@pytest.mark.parametrize("page_size", [None, 16])
def test_an_append_plan_writes_what_append_does(page_size) -> None:
    k, v, offsets = draw((5, 2, 32), 1), draw((5, 2, 24), 2), np.int32([0, 2, 5])
    angles = draw((48, 8))
    rotary = fovea.Rotary(angles, angles + 1, is_interleaved=True)
    planned, called = filled_cache(page_size), filled_cache(page_size)
    plan = fovea.plan_append(spec_of_cache(planned), spec_of(k), spec_of(v), rotary, cu_seqlens=spec_of(offsets))
    assert plan.workspace_bytes == 0
    assert plan.explain(as_json=True)["kernel"] == "cpu/append_to_cache"
    plan.run(planned, k, v, cu_seqlens=offsets)
    fovea.append_to_cache(called, k, v, rotary, cu_seqlens=offsets)
    np.testing.assert_array_equal(planned.k, called.k)
    np.testing.assert_array_equal(planned.v, called.v)
    other = fovea.Rotary(angles + 1, angles, is_interleaved=True)
    plan.run(planned, k, v, other, cu_seqlens=offsets)
    fovea.append_to_cache(called, k, v, other, cu_seqlens=offsets)
    np.testing.assert_array_equal(planned.k, called.k)
    with pytest.raises(fovea.InvalidArgument, match="append.v is missing"):
        plan.run(planned, k, None, cu_seqlens=offsets)


# ---- backward ----

CASES = {
    "plain": {},
    "features": {"causal": True, "softcap": 3.0, "sinks": SLOPES, "bias": draw((4, 33, 70)), "dropout": (0.2, 5)},
    "program": {"score_mod": fovea.score_mod("score * slopes[q_head]", slopes=SLOPES)},
}
CAPTURED = {"plain": (), "features": ("bias",), "program": ("slopes",)}


def forward_of(layout="bshd", **features):
    arrays = qkv()
    if layout == "bhsd":
        arrays = tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays)
    out, lse = fovea.attention(*arrays, **features, layout=layout, return_lse=True)
    return (*arrays, out, lse)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_backward_plan_gives_the_bits_of_backward(name: str, has_dlse: bool, layout: str) -> None:
    features = CASES[name] | {"layout": layout}
    call = forward_of(**features)
    dout, dlse = draw(call[3].shape, 7), draw(call[4].shape, 8) if has_dlse else None
    plan = fovea.plan_backward(*map(spec_of, call[:3]), has_dlse=has_dlse, captured=CAPTURED[name], **features)
    assert plan.workspace_bytes > 0
    assert plan.explain(as_json=True)["kernel"] == "cpu/attention_backward"
    got = plan.run(dout, *call, dlse=dlse)
    expected = fovea.attention_backward(dout, *call, dlse=dlse, captured=CAPTURED[name], **features)
    for field in ("q", "k", "v"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))
    assert (got.sinks is None) == (expected.sinks is None)
    if got.sinks is not None:
        np.testing.assert_array_equal(got.sinks, expected.sinks)
    assert got.captured.keys() == expected.captured.keys() == set(CAPTURED[name])
    for field, value in expected.captured.items():
        np.testing.assert_array_equal(got.captured[field], value)


def test_a_backward_plan_takes_other_captures() -> None:
    features = CASES["program"]
    call = forward_of(**features)
    plan = fovea.plan_backward(*call[:3], captured=["slopes"], **features)
    other = features["score_mod"].with_captures(slopes=SLOPES * 2)
    call = forward_of(score_mod=other)
    dout = draw(call[3].shape, 7)
    got = plan.run(dout, *call, score_mod=other)
    expected = fovea.attention_backward(dout, *call, captured=["slopes"], score_mod=other)
    np.testing.assert_array_equal(got.q, expected.q)
    np.testing.assert_array_equal(got.captured["slopes"], expected.captured["slopes"])


def test_a_backward_plan_refuses_what_does_not_fit() -> None:
    call = forward_of()
    dout, dlse = draw(call[3].shape, 7), draw(call[4].shape, 8)
    plan = fovea.plan_backward(*call[:3])
    with pytest.raises(fovea.InvalidArgument, match="dlse is given; the plan was made without it"):
        plan.run(dout, *call, dlse=dlse)
    with pytest.raises(fovea.InvalidArgument, match="mask is"):
        plan.run(dout, *call, causal=True)
    with pytest.raises(fovea.InvalidArgument, match="dout is f32"):
        plan.run(dout[:1], *call)
    with pytest.raises(fovea.InvalidArgument, match="plan_backward: captured names 'bias', which this call does not capture"):
        fovea.plan_backward(*call[:3], captured=["bias"])
    with pytest.raises(fovea.InvalidArgument, match="k has head_dim 16"):
        fovea.plan_backward(call[0], call[1][..., :16], call[2])
    with pytest.raises(fovea.InvalidArgument, match="plan_backward: v is a list"):
        fovea.plan_backward(call[0], call[1], [1.0])


def test_plans_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    q, k, v, out, lse = (torch.from_numpy(x) for x in forward_of())
    dout = torch.from_numpy(draw(tuple(out.shape), 7))
    got = fovea.plan_backward(q, k, v).run(dout, q, k, v, out, lse)
    assert torch.equal(got.q, fovea.attention_backward(dout, q, k, v, out, lse).q)
    with pytest.raises(fovea.Unsupported, match="DecodePlan.run: gradients are recorded"):
        cache = fovea.KvCache(k, v, torch.tensor([70, 70], dtype=torch.int32))
        fovea.plan_decode(q, cache).run(q.clone().requires_grad_(), cache)


def plans_of_all_kinds() -> dict:
    q, k, v = forward_of()[:3]
    cache = fovea.kv_cache(q, q.shape[0], 128, k.shape[2], k.shape[3], head_dim_v=v.shape[3])
    specs = [fovea.TensorSpec((1, 1024, 4, 16))] * 2
    return {
        "plan": fovea.plan(q, k, v), "plan_backward": fovea.plan_backward(q, k, v), "plan_decode": fovea.plan_decode(q, cache),
        "plan_append": fovea.plan_append(cache, k, v), "block_map": fovea.block_map(q, k),
        "context_parallel_plan": fovea.parallel.context_parallel_plan(*specs, world_size=2),
    }  # fmt: skip


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda plan: pickle.dumps(plan, 0)])
def test_plans_are_neither_copied_nor_pickled(duplicate) -> None:
    for maker, made in plans_of_all_kinds().items():
        with pytest.raises(fovea.Unsupported, match=f"^{type(made).__name__}: .*neither copied nor pickled; expected .* a new one of {maker} "):
            duplicate(made)


def test_plans_are_freed() -> None:
    call = forward_of()
    destroyed = []
    plan = fovea.plan_backward(*call[:3])
    plan._destroy = destroyed.append
    handle = plan._handle
    del plan
    gc.collect()
    assert destroyed == [handle]
    from fovea._library import library

    library.fovea_plan_destroy(handle)
