"""The KV cache, and results over parts of the keys."""

import numpy as np
import pytest

import fovea
import oracle
from attention_test import draw, qkv


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_decoding_token_by_token_equals_one_causal_call(page_size) -> None:
    batch, steps = 2, 19
    q, k, v = qkv(batch, steps, steps, 4, 2, 32, 24)
    cache = fovea.kv_cache(q, batch, 33, 2, 32, head_dim_v=24, page_size=page_size)
    cache.k[:], cache.v[:] = np.nan, np.nan
    outs, lses = [], []
    for begin, end in ((0, 7), *((t, t + 1) for t in range(7, steps))):
        part = slice(begin, end)
        out, lse = fovea.decode(q[:, part], cache, append_k=k[:, part], append_v=v[:, part], return_lse=True)
        cache.seqlens += end - begin
        outs.append(out)
        lses.append(lse)
    got = oracle.Result(np.concatenate(outs, 1), np.concatenate(lses, 2))
    oracle.assert_close(got, q, k, v, visible=lambda p: p.kv_idx <= p.q_idx)


def test_a_shared_prefix_is_that_of_a_groups_first_sequence() -> None:
    q, k, v = qkv(4, 1, 20, 4, 2, 32, 32)
    k[1, :12], v[1, :12], k[3, :12], v[3, :12] = k[0, :12], v[0, :12], k[2, :12], v[2, :12]
    plain = fovea.decode(q, fovea.KvCache(k, v, np.full(4, 20, np.int32)))
    for sequence in (1, 3):
        k[sequence, :12] = v[sequence, :12] = np.nan
    cache = fovea.KvCache(k, v, np.full(4, 20, np.int32))
    shared = fovea.decode(q, cache, shared_prefix=12, shared_cu_sequences=np.array([0, 2, 4], np.int32))
    np.testing.assert_allclose(shared, plain, atol=1e-6)
    with pytest.raises(fovea.InvalidArgument, match="shared_prefix is -1; expected >= 0"):
        fovea.decode(q, cache, shared_prefix=-1)
    with pytest.raises(fovea.InvalidArgument, match="queries stand behind the prefix"):
        fovea.decode(q, cache, shared_prefix=20)


def test_append_alone_then_decode() -> None:
    q, k, v = qkv(2, 1, 8, 4, 2, 32, 32)
    cache = fovea.kv_cache(q, 2, 8, 2, 32)
    fovea.append_to_cache(cache, k, v)
    np.testing.assert_array_equal(cache.k, k)
    cache.seqlens[:] = [8, 5]
    out, lse = fovea.decode(q, cache, sees_all_keys=True, softcap=3.0, return_lse=True)
    for sequence, length in enumerate((8, 5)):
        part = slice(sequence, sequence + 1)
        got = oracle.Result(out[part], lse[part])
        oracle.assert_close(got, q[part], k[part, :length], v[part, :length], score=lambda s, p: 3 * np.tanh(s / 3))


@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_queries_over_a_cache_equal_each_sequence_alone(page_size) -> None:
    lengths, before = [1, 0, 5, 3], np.int32([9, 4, 0, 20])
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = draw((9, 4, 32), 1), draw((9, 2, 32), 2), draw((9, 2, 32), 3)
    packed, alone = (fovea.kv_cache(q, 4, 32, 2, 32, page_size=page_size) for _ in range(2))
    for cache in (packed, alone):
        cache.k[:], cache.v[:] = draw(cache.k.shape, 4), draw(cache.v.shape, 5)
        cache.seqlens[:] = before
    out, lse = fovea.decode(q, packed, append_k=k, append_v=v, cu_seqlens=offsets, max_seqlen_q=5, return_lse=True)
    assert lse.shape == (4, 9)
    for sequence, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        table = None if alone.page_table is None else alone.page_table[sequence : sequence + 1]
        slot = np.int32([sequence]) if table is None else None
        one = fovea.KvCache(alone.k, alone.v, before[sequence : sequence + 1], table, slot)
        part = slice(begin, end)
        expected = fovea.decode(q[None, part], one, append_k=k[None, part], append_v=v[None, part], return_lse=True)
        np.testing.assert_array_equal(out[None, part], expected[0])
        np.testing.assert_array_equal(lse[None, :, part], expected[1])
    np.testing.assert_array_equal(packed.k, alone.k)


def test_packed_tokens_are_appended() -> None:
    offsets = np.int32([0, 2, 2, 5])
    k, v = draw((5, 2, 8), 1), draw((5, 2, 8), 2)
    cache = fovea.kv_cache(k, 3, 4, 2, 8)
    cache.k[:], cache.v[:] = 0, 0
    fovea.append_to_cache(cache, k, v, cu_seqlens=offsets)
    for sequence, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        np.testing.assert_array_equal(cache.k[sequence, : end - begin], k[begin:end])
        assert not cache.k[sequence, end - begin :].any()


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotary_turns_queries_and_appended_keys(is_interleaved: bool) -> None:
    q, k, v = qkv(1, 3, 3, 2, 2, 8, 8)
    angles = np.arange(16)[:, None] / 10 ** np.arange(4)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cache = fovea.kv_cache(q, 1, 8, 2, 8)
    rotary = fovea.Rotary(cos, sin, is_interleaved=is_interleaved)
    out, lse = fovea.decode(q, cache, append_k=k, append_v=v, rotary=rotary, return_lse=True)

    def turned(x: np.ndarray) -> np.ndarray:
        first = (slice(0, None, 2), slice(1, None, 2)) if is_interleaved else (slice(0, 4), slice(4, 8))
        a, b = x[..., first[0]], x[..., first[1]]
        c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
        result = np.empty_like(x)
        result[..., first[0]], result[..., first[1]] = a * c - b * s, a * s + b * c
        return result

    oracle.assert_close(oracle.Result(out, lse), turned(q), turned(k), v, visible=lambda p: p.kv_idx <= p.q_idx)


def test_refusals_name_the_argument() -> None:
    q, k, v = qkv(2, 1, 8, 4, 2, 32, 32)
    cache = fovea.kv_cache(q, 2, 4, 2, 32)
    with pytest.raises(fovea.InvalidArgument, match="cache is a ndarray"):
        fovea.decode(q, k)
    with pytest.raises(fovea.InvalidArgument, match="bhsd"):
        fovea.decode(q, cache, layout="bhsd")
    with pytest.raises(fovea.Unsupported, match="keys lie in a cache; expected tensors"):  # of CPUs
        fovea.decode(q, cache, quant="fast")
    with pytest.raises(fovea.InvalidArgument, match="quant is fp8_static, whose scales the call gives"):
        fovea.decode(q, cache, quant="fp8_static")
    with pytest.raises(fovea.InvalidArgument, match="page_size is 0"):
        fovea.kv_cache(q, 2, 4, 2, 32, page_size=0)
    with pytest.raises(fovea.InvalidArgument, match="kv_cache: page_size is 2.5; expected a whole number"):
        fovea.kv_cache(q, 2, 4, 2, 32, page_size=2.5)
    with pytest.raises(fovea.InvalidArgument, match="kv_cache: dtype is 'f64'; expected one of 'f32', 'f16', 'bf16', 'i8', 'e4m3'"):
        fovea.kv_cache(q, 2, 4, 2, 32, dtype="f64")
    with pytest.raises(fovea.InvalidArgument, match="kv_cache: capacity is -4; expected >= 0"):
        fovea.kv_cache(q, 2, -4, 2, 32)
    for name, value in {"sees_all_keys": "no", "max_seqlen_q": 4.5, "shared_prefix": None}.items():
        with pytest.raises(fovea.InvalidArgument, match=f"decode: {name} is {value!r}; expected"):
            fovea.decode(q, cache, **{name: value})
    with pytest.raises(fovea.InvalidArgument, match="4"):
        fovea.append_to_cache(cache, k, v)  # eight tokens where there is room for four


@pytest.mark.parametrize("batch, capacity", [(3, 33), (1, 16), (0, 33), (2, 0)])
def test_the_pages_of_sequences_follow_each_other(batch: int, capacity: int) -> None:
    cache = fovea.kv_cache(np.zeros(1, np.float32), batch, capacity, 2, 8, page_size=16)
    max_pages = -(-capacity // 16)
    expected = [[sequence * max_pages + page for page in range(max_pages)] for sequence in range(batch)]
    assert cache.page_table.dtype == np.int32 and cache.page_table.shape == (batch, max_pages)
    assert cache.page_table.tolist() == expected and cache.k.shape == (batch * max_pages, 16, 2, 8)


@pytest.mark.parametrize("num_states", [1, 2, 40])
def test_states_of_parts_join_to_the_whole(num_states: int) -> None:
    q, k, v = qkv(seqlen_kv=80)
    edges = np.linspace(0, 80, num_states + 1).astype(int)
    parts = [
        fovea.attention(q, k[:, begin:end], v[:, begin:end], return_lse=True) for begin, end in zip(edges, edges[1:])
    ]
    out, lse = fovea.merge_states([part[0] for part in parts], [part[1] for part in parts])
    oracle.assert_close(oracle.Result(out, lse), q, k, v)


def test_merge_states_refuses_by_name() -> None:
    out, lse = draw((1, 2, 1, 8)), draw((1, 1, 2))
    with pytest.raises(fovea.InvalidArgument, match="1 outs and 2 lses"):
        fovea.merge_states([out], [lse, lse])
    with pytest.raises(fovea.InvalidArgument, match="0 outs"):
        fovea.merge_states([], [])
    with pytest.raises(fovea.InvalidArgument, match=r"lses\[1\] is a list"):
        fovea.merge_states([out, out], [lse, [1.0]])


# ---- Codes ----


def as_codes(x, largest=127):
    """The rows of x as int8, and the scale of each: the rules of kv_cache.hpp in NumPy, f32 in each step."""
    scale = np.maximum(np.abs(x).max(-1) / np.float32(largest), np.float32(2.0**-126))
    return np.rint(x * (1 / scale)[..., None]).astype(np.int8), scale


@pytest.mark.parametrize("page_size", [None, 16])
def test_an_int8_cache_holds_rounded_rows_and_their_scales(page_size) -> None:
    q, k, v = qkv(2, 3, 20, 4, 2, 32, 24)
    cache = fovea.kv_cache(q, 2, 32, 2, 32, head_dim_v=24, page_size=page_size, dtype="i8")
    assert cache.k.dtype == np.int8 and cache.k_scale.shape == cache.k.shape[:3]
    fovea.append_to_cache(cache, k[:, :17], v[:, :17])
    cache.seqlens += 17
    out, lse = fovea.decode(q, cache, append_k=k[:, 17:], append_v=v[:, 17:], return_lse=True)
    held = []
    for rows, scales, exact in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
        if page_size is not None:
            rows, scales = (x[cache.page_table].reshape(2, -1, *x.shape[2:]) for x in (rows, scales))
        codes, expected = as_codes(exact)
        np.testing.assert_array_equal(rows[:, :20], codes)
        np.testing.assert_array_equal(scales[:, :20], expected)
        held.append(codes * expected[..., None])
    oracle.assert_close(oracle.Result(out, lse), q, *held, visible=lambda p: p.kv_idx <= p.q_idx + 17)


def test_plans_of_codes() -> None:
    q, k, v = qkv(2, 1, 9, 4, 2, 32, 32)
    cache, planned = (fovea.kv_cache(q, 2, 16, 2, 32, dtype="i8") for _ in range(2))
    fovea.append_to_cache(cache, k, v)
    fovea.plan_append(planned, k, v).run(planned, k, v)
    np.testing.assert_array_equal(planned.k_scale[:, :9], cache.k_scale[:, :9])
    cache.seqlens[:] = planned.seqlens[:] = 9
    np.testing.assert_array_equal(fovea.plan_decode(q, planned).run(q, planned), fovea.decode(q, cache))


def test_codes_without_scales_are_refused() -> None:
    q, k, v = qkv(2, 1, 9, 4, 2, 32, 32)
    cache = fovea.kv_cache(q, 2, 16, 2, 32, dtype="i8")
    cache.k_scale = None
    with pytest.raises(fovea.InvalidArgument, match="cache.k is i8 and cache.k_scale is missing; expected f32"):
        fovea.append_to_cache(cache, k, v)
    cache = fovea.kv_cache(q, 2, 16, 2, 32)
    cache.v_scale = np.ones(1, np.float32)
    with pytest.raises(fovea.InvalidArgument, match="cache.v_scale is given and cache.v is f32; expected none"):
        fovea.decode(q, cache)
