"""Plans of context parallelism: what ranks hold, receive and compute, in Python's own terms."""

import re

import numpy as np
import pytest

import fovea
from fovea import parallel

SPEC = fovea.TensorSpec((1, 4096, 8, 64), "bf16")
KV = fovea.TensorSpec((1, 4096, 2, 64), "bf16")


def test_one_causal_sequence_in_zigzag() -> None:
    plan = parallel.context_parallel_plan(SPEC, KV, world_size=4, causal=True)
    assert (plan.scheme, plan.dealing, plan.world_size, plan.seqlen, plan.balance) == ("all_gather", "zigzag", 4, 4096, 1.0)
    assert plan.tokens(1) == plan.rows(1) == [(512, 1024), (3072, 3584)]
    assert plan.needed_kv(1) == [(0, 3584)]
    assert (plan.q_heads(1), plan.kv_heads(1)) == ((0, 8), (0, 2))
    assert plan.load(1).forward_bytes == 3 * 1024 * 2 * 128 * 2
    assert "zigzag" in repr(plan) and "512..1024" in str(plan) and "0" in plan.print_ranks()


@pytest.mark.parametrize("scheme", parallel.SCHEMES)
def test_permute_and_shard_and_restore_are_one_order(scheme) -> None:
    ids = np.repeat(np.arange(16, dtype=np.int32), [4096 // 64] * 8 + [7 * 4096 // 64] * 8)[None]
    words = {"head_ranks": 2} if scheme == "hybrid" else {}
    plan = parallel.context_parallel_plan(
        SPEC, fovea.TensorSpec((1, 4096, 4, 64), "bf16"), world_size=4, scheme=scheme, causal=True, segment_ids=ids, **words
    )
    x = np.random.default_rng(1).standard_normal((2, 4096, 3))
    moved = plan.permute(x)
    assert (np.concatenate([plan.shard(x, rank) for rank in range(4)], 1) == moved).all()
    assert (plan.restore(moved) == x).all()
    turned = np.moveaxis(x, 1, -1)
    assert (plan.restore(plan.permute(turned, dim=-1), dim=2) == turned).all()
    assert plan.balance < 1.1


def test_transfers_are_the_bytes_of_the_load() -> None:
    plan = parallel.context_parallel_plan(SPEC, KV, world_size=2, scheme="ulysses", causal=True)
    dims = {"q": 64, "kv": 128, "out": 64}
    for rank in range(2):
        received = plan.transfers(rank)
        assert {x.source for x in received} == {1 - rank}
        size = sum(2 * dims[x.tensor] * (x.tokens[1] - x.tokens[0]) * (x.heads[1] - x.heads[0]) for x in received)
        assert size == plan.load(rank).forward_bytes
    assert parallel.context_parallel_plan(SPEC, KV, world_size=1).transfers(0) == []


def test_forecasts_name_every_scheme_and_why_not() -> None:
    made = parallel.forecast(SPEC, KV, world_size=4, causal=True)
    assert [x.scheme for x in made] == list(parallel.SCHEMES)
    assert made[0].forward_bytes == 3 * 1024 * 2 * 128 * 2
    assert made[3].refusal == "" and made[3].kv_bytes < made[0].kv_bytes
    five = parallel.forecast(fovea.TensorSpec((1, 50, 8, 64)), fovea.TensorSpec((1, 50, 2, 64)), world_size=5)
    assert "do not divide among 5 ranks" in five[3].refusal
    fast = parallel.forecast(SPEC, KV, world_size=4, causal=True, tflops=1300, gigabytes_per_second=500)
    assert fast[0].forward_ms == pytest.approx(made[0].forward_ms / 2, rel=1e-4)


def test_refusals() -> None:
    with pytest.raises(fovea.InvalidArgument, match="scheme is 'gather'; expected one of 'all_gather'"):
        parallel.context_parallel_plan(SPEC, KV, world_size=4, scheme="gather")
    with pytest.raises(fovea.InvalidArgument, match="pad to 4098"):
        parallel.context_parallel_plan(SPEC, KV, world_size=3)
    plan = parallel.context_parallel_plan(SPEC, KV, world_size=4)
    with pytest.raises(fovea.InvalidArgument, match="rank is 4; expected 0 to 3"):
        plan.transfers(4)
    with pytest.raises(fovea.InvalidArgument, match="expected 4096 tokens in dimension 0"):
        plan.permute(np.zeros((5, 4096)), dim=0)
    with pytest.raises(fovea.InvalidArgument, match="tflops is 0"):
        parallel.forecast(SPEC, KV, world_size=4, tflops=0)


def test_packed_tokens_are_one_sequence_whose_programs_speak_of_each() -> None:
    spec = fovea.TensorSpec((8, 1, 8))
    plan = parallel.context_parallel_plan(spec, spec, world_size=2, tile_q=1, tile_kv=1, causal=True, cu_seqlens=np.array([0, 3, 3, 7]))
    assert [x.tolist() for x in plan.packed] == [[0, 0, 0, 2, 2, 2, 2, -1], [0, 1, 2, 0, 1, 2, 3, 0], [3, 3, 3, 4, 4, 4, 4, 0]]
    assert sum(plan.load(rank).full + plan.load(rank).partial for rank in range(2)) == 6 + 10  # triangles of 3 and 4
    none = parallel.context_parallel_plan(spec, spec, world_size=2, mask_mod="kv_idx >= seqlen_kv", cu_seqlens=np.array([0, 3, 7]))
    assert all(none.load(rank).work == 0 for rank in range(2))


@pytest.mark.parametrize(
    "words, text",
    [
        ({"cu_seqlens": [0, 5, 9]}, "cu_seqlens is [0, 5, 9]; expected offsets that start at 0, never decrease and end at most at 8"),
        ({"cu_seqlens": [0, 5, 4]}, "cu_seqlens is [0, 5, 4]; expected"),
        ({"cu_seqlens": [1, 5]}, "cu_seqlens is [1, 5]; expected"),
        ({"cu_seqlens": [0, 8], "segment_ids": np.zeros((1, 8), np.int32)}, "cu_seqlens beside a dense mask or segment_ids"),
        ({"cu_seqlens": [0, 8], "mask": np.ones((8, 8), bool)}, "cu_seqlens beside a dense mask or segment_ids"),
    ],
)
def test_packed_refusals(words, text) -> None:
    spec = fovea.TensorSpec((8, 1, 8))
    words = {**words, "cu_seqlens": np.array(words["cu_seqlens"])}
    with pytest.raises(fovea.InvalidArgument, match=re.escape(text)):
        parallel.context_parallel_plan(spec, spec, world_size=2, **words)
    with pytest.raises(fovea.InvalidArgument, match=re.escape("q has shape (1, 8, 1, 8); expected [total, heads, head_dim]")):
        parallel.context_parallel_plan(fovea.TensorSpec((1, 8, 1, 8)), spec, world_size=2, cu_seqlens=np.array([0, 8]))
