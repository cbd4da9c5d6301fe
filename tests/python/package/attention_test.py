"""fovea.attention of NumPy arrays against the oracle, and what it refuses."""

import concurrent.futures
import gc
import sys

import numpy as np
import pytest

import fovea
import oracle
from fovea import _calls


# The CPU target without vectors on x86-64; NEON on 64-bit Arm, which always has it.
PLAIN_TARGET = next(target["name"] for target in fovea.describe()["targets"] if target["runs_here"])


def draw(shape: tuple, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv(batch=2, seqlen_q=33, seqlen_kv=70, heads_q=4, heads_kv=2, dim=32, dim_v=24):
    """Lengths that are no multiple of a vector or a tile; other head dims for v."""
    return (
        draw((batch, seqlen_q, heads_q, dim), 1),
        draw((batch, seqlen_kv, heads_kv, dim), 2),
        draw((batch, seqlen_kv, heads_kv, dim_v), 3),
    )


SHIFT = 70 - 33
SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])
SEGMENTS_Q = np.int32([[0] * 20 + [1] * 10 + [-1] * 3, [5] * 33])
SEGMENTS_KV = np.int32([[0] * 30 + [1] * 40, [5] * 50 + [-1] * 20])

CASES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"visible": lambda p: p.kv_idx <= p.q_idx + SHIFT}),
    "causal top left": ({"causal": True, "align": "top_left"}, {"visible": lambda p: p.kv_idx <= p.q_idx}),
    "window": (
        {"window": (5, None)},
        {"visible": lambda p: p.kv_idx >= p.q_idx + SHIFT - 5},
    ),
    "scale": ({"scale": 0.5}, {"scale": 0.5}),
    "softcap": ({"softcap": 2.0}, {"score": lambda s, p: 2 * np.tanh(s / 2)}),
    "bias": ({"bias": draw((4, 33, 70))}, {"score": lambda s, p: s + draw((4, 33, 70))}),
    "alibi": (
        {"alibi": SLOPES},
        {"score": lambda s, p: s - SLOPES[p.head] * abs(p.q_idx + SHIFT - p.kv_idx)},
    ),
    "mask": (
        {"mask": draw((33, 70)) > 0},
        {"visible": lambda p: (draw((33, 70)) > 0)[p.q_idx, p.kv_idx]},
    ),
    "segments": (
        {"segment_ids": (SEGMENTS_Q, SEGMENTS_KV)},
        {"visible": lambda p: (SEGMENTS_Q[p.batch, p.q_idx] == SEGMENTS_KV[p.batch, p.kv_idx]) & (SEGMENTS_Q[p.batch, p.q_idx] != -1)},
    ),
    "sinks": ({"sinks": np.float32([0, 1, -1, 3])}, {"sinks": np.float32([0, 1, -1, 3])}),
    "no key": ({"mask_mod": "q_idx > 3"}, {"visible": lambda p: p.q_idx + 0 * p.kv_idx > 3}),
    "text": (
        {"score_mod": fovea.score_mod("score + reach * slopes[q_head]", slopes=SLOPES, reach=3)},
        {"score": lambda s, p: s + 3 * SLOPES[p.head]},
    ),
    "mask program beside mask_mod": (
        {"mask": fovea.causal(), "mask_mod": "kv_idx % 2 == 0"},
        {"visible": lambda p: (p.kv_idx <= p.q_idx + SHIFT) & (p.kv_idx % 2 == 0)},
    ),
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, layout: str) -> None:
    features, expected = CASES[name]
    arrays = qkv()
    given = arrays
    if layout == "bhsd":
        given = tuple(np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays)
    out, lse = fovea.attention(*given, **features, layout=layout, return_lse=True)
    if layout == "bhsd":
        out = out.swapaxes(1, 2)
    oracle.assert_close(oracle.Result(out, lse), *arrays, **expected)


@pytest.mark.parametrize("recipe", ["accurate", "fast", "int8", "sage2", "accurate,hadamard=yes", "nvfp4", "mxfp4"])
def test_recipes_round_and_stay_near(recipe: str) -> None:
    arrays = qkv()
    features = {"causal": True, "softcap": 4.0, "sinks": np.float32([0, 1, -1, 3]), "return_lse": True}
    out, lse = fovea.attention(*arrays, **features, quant=recipe)
    exact, exact_lse = fovea.attention(*arrays, **features)
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    has_four_bits = recipe.endswith("fp4")
    assert 0.002 < error < (0.3 if has_four_bits else 0.08 if recipe in ("fast", "sage2") else 0.02)
    # Codes that are linear in the exponent are corrected by their mean, which rows of few keys do not meet.
    np.testing.assert_allclose(lse, exact_lse, atol=0.2 if has_four_bits else 0.05 if recipe == "fast" else 0.02)
    plan = fovea.plan(*arrays, **features, quant=recipe)
    assert np.array_equal(plan.run(*arrays)[0], out)
    explained = fovea.explain(*arrays, **features, quant=recipe, as_json=True)
    assert explained["kernel"] == "cpu/attention_quantized" and f"quant {recipe}" in explained["problem"]
    assert np.array_equal(fovea.attention(*arrays, **features, quant="none")[0], exact)


def test_an_accuracy_chooses_a_recipe_or_none() -> None:
    arrays = qkv()
    exact = fovea.attention(*arrays, causal=True)
    for accuracy in (0.05, 1e-5):  # no recipe is faster on the CPU
        assert np.array_equal(fovea.attention(*arrays, causal=True, accuracy=accuracy), exact)
    assert np.array_equal(fovea.plan(*arrays, causal=True, accuracy=0.05).run(*arrays), exact)
    explained = fovea.explain(*arrays, accuracy=0.02, as_json=True)
    assert explained["quant"] == "none: no recipe is within 0.02 and faster here"
    assert explained["refused"][0] == {"candidate": "quant fast", "reason": "its error is 0.045; 0.02 is allowed"}


def test_recipes_of_files(tmp_path) -> None:
    arrays = qkv()
    file = tmp_path / "layer.json"
    text = '{"format": "fovea recipe 1", "quant": "int8", "error": 0.01, "accuracy": 0.02, "heads": [{"q_head": 0}]}'
    file.write_text(text)
    recipe = fovea.load_recipe(file)
    assert recipe == fovea.Recipe("int8", 0.01, 0.02, ({"q_head": 0},))
    expected = fovea.attention(*arrays, quant="int8")
    for quant in (recipe, file, str(file)):
        assert np.array_equal(fovea.attention(*arrays, quant=quant), expected)
        plan = fovea.plan(*arrays, quant=quant)
        file.unlink()  # a plan reads it once
        assert np.array_equal(plan.run(*arrays), expected)
        file.write_text(text)
    for text in ("{", "[]", '{"quant": "int8"}', '{"format": "fovea recipe 1", "quant": 3}'):
        file.write_text(text)
        with pytest.raises(fovea.InvalidArgument, match="load_recipe: .*layer.json is no recipe; expected what fovea calibrate --out writes"):
            fovea.load_recipe(file)


def test_strides_of_any_kind_are_right() -> None:
    q, k, v = qkv()
    strided = np.full((2, 33, 4, 64), np.nan, np.float32)[:, :, ::-1, ::2]
    strided[...] = q
    broadcast = np.broadcast_to(k[:, :, :1], k.shape)
    out, lse = fovea.attention(strided, broadcast, v, return_lse=True)
    oracle.assert_close(oracle.Result(out, lse), q, broadcast, v)


def test_read_only_arrays_are_taken() -> None:
    q, k, v = qkv()
    for array in (q, k, v):
        array.flags.writeable = False
    out, lse = fovea.attention(q, k, v, return_lse=True)
    oracle.assert_close(oracle.Result(out, lse), q, k, v)


def test_outputs_are_written_in_place() -> None:
    q, k, v = qkv()
    out = np.full((2, 33, 4, 24), np.nan, np.float32)
    lse = np.full((2, 4, 33), np.nan, np.float32)
    row_max = np.full((2, 4, 33), np.nan, np.float32)
    returned = fovea.attention(q, k, v, out=out, lse=lse, row_max=row_max)
    assert returned is out
    oracle.assert_close(oracle.Result(out, lse), q, k, v)
    scores = np.einsum("bihd,bjhd->bhij", q, k.repeat(2, 2)) / np.sqrt(32)
    np.testing.assert_allclose(row_max, scores.max(-1), rtol=1e-5)


def test_f16_gives_f16() -> None:
    q, k, v = (array.astype(np.float16) for array in qkv())
    out = fovea.attention(q, k, v)
    assert out.dtype == np.float16
    exact = oracle.attention(q, k, v).out
    # One rounding of the output, as much for products of rounded probabilities.
    assert np.abs(out - exact).max() <= 2 * 2.0**-11 * np.abs(exact).max()


def test_bf16_of_ml_dtypes_gives_bf16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (array.astype(ml_dtypes.bfloat16) for array in qkv())
    out = fovea.attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    exact = oracle.attention(q, k, v).out
    assert np.abs(out.astype(np.float64) - exact).max() <= 2 * 2.0**-8 * np.abs(exact).max()


SCALES = {f"{name}_scale": np.float32([[0.5, 2], [4, 0.25]]) for name in "qkv"}


def test_a_plan_keeps_its_scales() -> None:
    arrays = qkv()
    plan = fovea.plan(*arrays, quant="fp8_static", **SCALES)
    expected = fovea.attention(*arrays, quant="fp8_static", **SCALES)
    np.testing.assert_array_equal(plan.run(*arrays), expected)
    others = SCALES | {"v_scale": SCALES["v_scale"] / 2}
    expected = fovea.attention(*arrays, quant="fp8_static", **others)
    np.testing.assert_array_equal(plan.run(*arrays, v_scale=others["v_scale"]), expected)


def test_codes_of_e4m3_have_the_bits_of_their_numbers() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = tuple(array.astype(ml_dtypes.float8_e4m3fn) for array in qkv())
    numbers = [x.astype(np.float32) * scale[:, None].repeat(x.shape[2] // 2, 2)[..., None] for x, scale in zip(codes, SCALES.values())]
    features = {"quant": "fp8_static", **SCALES, "causal": True}
    out = fovea.attention(*codes, **features)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, fovea.attention(*numbers, **features, out=np.empty_like(out)))
    specs = [fovea.TensorSpec(x.shape, "e4m3") for x in codes]
    for planned in (codes, specs):
        made = fovea.plan(*planned, **features).run(*codes)
        assert made.dtype == out.dtype
        np.testing.assert_array_equal(made, out)
        assert "e4m3 batch 2" in fovea.explain(*planned, **features)


def test_packed_equals_each_sequence() -> None:
    lengths = [0, 1, 17, 64]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = draw((82, 4, 32), 1), draw((82, 2, 32), 2), draw((82, 2, 24), 3)
    out, lse = fovea.attention(q, k, v, cu_seqlens=offsets, causal=True, return_lse=True)
    assert lse.shape == (4, 82)
    for begin, end in zip(offsets, offsets[1:]):
        part = slice(begin, end)
        got = oracle.Result(out[None, part], lse[None, :, part])
        oracle.assert_close(got, q[None, part], k[None, part], v[None, part], visible=lambda p: p.kv_idx <= p.q_idx)


def test_documents_within_packed_sequences() -> None:
    offsets = np.int32([0, 7, 17])
    q, k, v = draw((17, 4, 32), 1), draw((17, 2, 32), 2), draw((17, 2, 24), 3)
    ids = np.int32([0, 0, 1, 1, 1, -1, 2] + [0] * 4 + [1] * 5 + [-1])
    got = fovea.attention(q, k, v, cu_seqlens=offsets, mask=fovea.causal() & fovea.documents(ids, cu_seqlens=offsets), return_lse=True)
    other = fovea.documents(ids, ids.copy(), cu_seqlens=(offsets, offsets.copy()))
    again = fovea.attention(q, k, v, cu_seqlens=offsets, mask=fovea.causal() & other, return_lse=True)
    for begin, end in zip(offsets, offsets[1:]):
        part, own = slice(begin, end), ids[begin:end]

        def visible(p, own=own):
            return (p.kv_idx <= p.q_idx) & (own[p.q_idx] == own[p.kv_idx]) & (own[p.q_idx] != -1)

        for out, lse in (got, again):
            oracle.assert_close(oracle.Result(out[None, part], lse[None, :, part]), q[None, part], k[None, part], v[None, part], visible=visible)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (1, 0, 2, 8), (1, 1, 1, 1)])
def test_sizes_of_0_and_1(shape: tuple) -> None:
    array = draw(shape)
    out, lse = fovea.attention(array, array, array, return_lse=True)
    oracle.assert_close(oracle.Result(out, lse), array, array, array)


def test_dropout_is_a_function_of_its_seed() -> None:
    q, k, v = qkv()
    first = fovea.attention(q, k, v, dropout=fovea.Dropout(0.5, 7))
    assert np.array_equal(first, fovea.attention(q, k, v, dropout=(0.5, 7)))
    assert not np.array_equal(first, fovea.attention(q, k, v, dropout=(0.5, 8)))
    assert np.array_equal(fovea.attention(q, k, v), fovea.attention(q, k, v, dropout=0.0))


@pytest.mark.parametrize("place", ["seed", "offset"])
def test_seeds_of_dropout_have_64_bits(place: str) -> None:
    q, k, v = qkv()

    def out(number: int) -> np.ndarray:
        return fovea.attention(q, k, v, dropout=fovea.Dropout(0.5, **{"seed": 1, place: number}))

    np.testing.assert_array_equal(out(-1), out(2**64 - 1))
    np.testing.assert_array_equal(out(-(2**63)), out(2**63))
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(fovea.InvalidArgument, match=rf"^attention: dropout\.{place} is {number}; expected a number of 64 bits$"):
            out(number)


def test_seeds_of_dropout_may_lie_in_arrays() -> None:
    q, k, v = qkv()
    seed, offset = np.int64([7]), np.array(3, np.int64)
    first = fovea.attention(q, k, v, dropout=fovea.Dropout(0.5, seed, offset))
    np.testing.assert_array_equal(first, fovea.attention(q, k, v, dropout=(0.5, np.int64(7), 3)))
    seed += 1  # read when the call runs
    np.testing.assert_array_equal(
        fovea.attention(q, k, v, dropout=fovea.Dropout(0.5, seed, offset)), fovea.attention(q, k, v, dropout=(0.5, 8, 3))
    )


def test_numbers_in_arrays_are_read_at_each_call() -> None:
    """What is written to an array of rank 0 counts from the next call on."""
    arrays = qkv()
    flag, number, side = np.zeros((), bool), np.zeros(()), np.zeros((), np.int64)
    features = {"causal": flag, "scale": number, "softcap": number, "window": (side, None), "dropout": (number, 3)}
    for causal, value, reach in ((True, 0.5, 9), (False, 0.25, 2)):
        flag[...], number[...], side[...] = causal, value, reach
        expected = {"causal": causal, "scale": value, "softcap": value, "window": (reach, None), "dropout": (value, 3)}
        for name in features:
            got = fovea.attention(*arrays, **{name: features[name]})
            np.testing.assert_array_equal(got, fovea.attention(*arrays, **{name: expected[name]}), err_msg=name)


def test_packed_and_cached_calls_know_their_heads_and_sequences() -> None:
    """Rows and keys of theirs are in memory that a GPU reads alone: a table for the longest is theirs to give."""
    q, k, v = (array[0] for array in qkv())
    offsets = {"cu_seqlens": (np.int32([0, 13, 33]), np.int32([0, 30, 70]))}
    fovea.attention(q, k, v, bias=draw((2, 4, 20, 40)), alibi=draw((2, 4)), **offsets)
    fovea.attention(q, k, v, mask=draw((3, 4, 20, 40)) > 0, **offsets)  # more sequences than there are
    with pytest.raises(fovea.InvalidArgument, match=r"bias is f32 \[3, 20, 40\]; expected \[4, any, any\]"):
        fovea.attention(q, k, v, bias=draw((3, 20, 40)), **offsets)
    with pytest.raises(fovea.InvalidArgument, match=r"dense_mask: mask is bool \[1, 2, 20, 40\]; expected \[1, 4, any, any\]"):
        fovea.attention(q, k, v, mask=draw((1, 2, 20, 40)) > 0, **offsets)
    cache, token = fovea.kv_cache(q, 2, 96, 2, 32), draw((2, 1, 4, 32))
    fovea.decode(token, cache, bias=draw((1, 90)), segment_ids=(np.zeros((2, 1), np.int32), np.zeros((2, 90), np.int32)))
    with pytest.raises(fovea.InvalidArgument, match=r"alibi: slopes is f32 \[5\]; expected \[4\]"):
        fovea.decode(token, cache, alibi=draw((5,)))


REFUSED = {
    "head_dim": (lambda q, k, v: fovea.attention(q, k[..., :16], v), "k has head_dim 16 but q has 32"),
    "list": (lambda q, k, v: fovea.attention([1], k, v), "q is a list"),
    "list as k": (lambda q, k, v: fovea.attention(q, [1], v), "k is a list"),
    "float64": (lambda q, k, v: fovea.attention(q.astype(np.float64), k, v), "q: dtype is f64; expected f32, f16"),
    "float64 as bias": (lambda q, k, v: fovea.attention(q, k, v, bias=np.zeros((33, 70))), "bias: dtype is f64; expected f32"),
    "byte order": (lambda q, k, v: fovea.attention(q, k.astype(">f4"), v), "k has dtype >f4"),
    "window": (lambda q, k, v: fovea.attention(q, k, v, window=(1, -2)), "window is (1, -2)"),
    "window of one": (lambda q, k, v: fovea.attention(q, k, v, window=3), "window is 3"),
    "window of floats": (lambda q, k, v: fovea.attention(q, k, v, window=(1.5, 0)), "window has 1.5"),
    "unhashable window": (lambda q, k, v: fovea.attention(q, k, v, window=[1, 2]), "window is [1, 2]"),
    "causal": (lambda q, k, v: fovea.attention(q, k, v, causal="no"), "attention: causal is 'no'; expected True or False"),
    "causal of several": (lambda q, k, v: fovea.attention(q, k, v, causal=np.array([True, False])), "attention: causal is array([ True, False]); expected True or False"),
    "align": (lambda q, k, v: fovea.attention(q, k, v, align="left"), "align is 'left'"),
    "layout": (lambda q, k, v: fovea.attention(q, k, v, layout="sbhd"), "layout is 'sbhd'"),
    "softcap": (lambda q, k, v: fovea.attention(q, k, v, softcap=0.0), "softcap is 0.0"),
    "scale": (lambda q, k, v: fovea.attention(q, k, v, scale="big"), "scale is 'big'"),
    "dropout without a seed": (lambda q, k, v: fovea.attention(q, k, v, dropout=0.5), "Dropout(p, seed)"),
    "dropout": (lambda q, k, v: fovea.attention(q, k, v, dropout=(1.5, 1)), "1.5"),
    "seed of two kinds": (lambda q, k, v: fovea.attention(q, k, v, dropout=(0.5, np.int64([1]))), "one of dropout.seed and dropout.offset is an array"),
    "seed": (lambda q, k, v: fovea.attention(q, k, v, dropout=(0.5, 1.5)), "dropout.seed is 1.5"),
    "quant": (lambda q, k, v: fovea.attention(q, k, v, quant="acurate"), "quant 'acurate': no recipe is called 'acurate'; expected none, accurate"),
    "accuracy": (lambda q, k, v: fovea.attention(q, k, v, accuracy=-1), "accuracy is -1; expected a relative error above 0"),
    "accuracy 0": (lambda q, k, v: fovea.attention(q, k, v, accuracy=0), "accuracy is 0; expected a relative error above 0"),
    "accuracy beside a recipe": (lambda q, k, v: fovea.attention(q, k, v, quant="fast", accuracy=0.1), "accuracy is 0.1 beside quant 'fast'; expected one"),
    "quant of another type": (lambda q, k, v: fovea.attention(q, k, v, quant=8), "quant is 8; expected the text of a recipe"),
    "sm_margin": (lambda q, k, v: fovea.attention(q, k, v, sm_margin=-1), "sm_margin"),
    "segments": (lambda q, k, v: fovea.attention(q, k, v, segment_ids=(1, 2, 3)), "attention: segment_ids is a tuple of 3"),
    "segments too short": (lambda q, k, v: fovea.attention(q, k, v, segment_ids=(np.zeros((2, 30), np.int32), np.zeros((2, 70), np.int32))), "documents: segments_q is i32 [2, 30]; expected [2, 33]"),
    "bias too narrow": (lambda q, k, v: fovea.attention(q, k, v, bias=draw((33, 69))), "bias is f32 [33, 69]; expected [33, 70]"),
    "mask of other heads": (lambda q, k, v: fovea.attention(q, k, v, mask=draw((5, 33, 70)) > 0), "dense_mask: mask is bool [5, 33, 70]; expected [4, 33, 70]"),
    "alibi of other heads": (lambda q, k, v: fovea.attention(q, k, v, alibi=draw((3,))), "alibi: slopes is f32 [3]; expected [4]"),
    "overlap": (lambda q, k, v: fovea.attention(q, k, k, out=q), "out"),
    "rank": (lambda q, k, v: fovea.attention(q[0, 0, 0], k, v), "expected rank 4"),
    "rank 0": (lambda q, k, v: fovea.attention(q[0, 0, 0, 0], k, v), "q"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(fovea.InvalidArgument) as caught:
        call(*qkv())
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_refused_call_writes_nothing() -> None:
    q, k, v = qkv()
    out = np.full((2, 33, 4, 24), np.nan, np.float32)
    with pytest.raises(fovea.InvalidArgument):
        fovea.attention(q, k[..., :16], v, out=out)
    assert np.isnan(out).all()


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        fovea.attention(*qkv(), is_causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        fovea.plan(*qkv(), is_causal=True)


UNKNOWN = {
    "plan": lambda q, k, v, words: fovea.plan(q, k, v, **words),
    "Plan.run": lambda q, k, v, words: fovea.plan(q, k, v).run(q, k, v, **words),
    "explain": lambda q, k, v, words: fovea.explain(q, k, v, **words),
    "attention_backward": lambda q, k, v, words: fovea.attention_backward(q, q, k, k, q, q, **words),
    "plan_backward": lambda q, k, v, words: fovea.plan_backward(q, k, k, **words),
    "attention_probabilities": lambda q, k, v, words: fovea.attention_probabilities(q, k, **words),
    "decode": lambda q, k, v, words: fovea.decode(q, fovea.KvCache(k, v, np.zeros(2, np.int32)), **words),
    "plan_decode": lambda q, k, v, words: fovea.plan_decode(q, fovea.KvCache(k, v, np.zeros(2, np.int32)), **words),
}


@pytest.mark.parametrize("function", UNKNOWN)
@pytest.mark.parametrize("word", ["is_causal", "stream", "function"])
def test_unknown_keywords_are_refused_by_the_function_that_was_called(function: str, word: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument '{word}'$"):
        UNKNOWN[function](*qkv(), {word: 1})


# ---- Plans, explanations ----


def test_a_plan_serves_every_length_up_to_its_bounds() -> None:
    q, k, v = qkv()
    plan = fovea.plan(q, k, v, causal=True, max_seqlen_q=64, max_seqlen_kv=128, return_lse=True)
    for seqlen_q, seqlen_kv in ((1, 128), (33, 70), (64, 64)):
        arrays = qkv(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        shift = seqlen_kv - seqlen_q
        got = oracle.Result(*plan.run(*arrays))
        oracle.assert_close(got, *arrays, visible=lambda p: p.kv_idx <= p.q_idx + shift)
    with pytest.raises(fovea.InvalidArgument, match="129"):
        plan.run(*qkv(seqlen_kv=129))


@pytest.mark.parametrize("mode", ("auto", "complete", "staged"))
def test_a_plan_of_the_cpu_is_final_whatever_is_compiled_elsewhere(mode: str) -> None:
    arrays = qkv()
    plan = fovea.plan(*arrays, compile=mode)
    assert plan.is_final
    plan.wait()
    np.testing.assert_array_equal(plan.run(*arrays), fovea.attention(*arrays))


def test_other_words_for_when_a_plan_is_ready_are_refused() -> None:
    for function in (fovea.plan, fovea.explain):
        with pytest.raises(fovea.InvalidArgument, match=f"{function.__name__}: compile is 'later'; expected one of"):
            function(*qkv(), compile="later")


def test_a_plan_is_made_of_shapes_alone() -> None:
    arrays = qkv()
    specs = [fovea.TensorSpec(array.shape) for array in arrays]
    plan = fovea.plan(*specs, softcap=2.0)
    np.testing.assert_array_equal(plan.run(*arrays), fovea.attention(*arrays, softcap=2.0))


def test_a_plan_takes_other_captures() -> None:
    arrays = qkv()
    program = fovea.score_mod("score + slopes[q_head]", slopes=SLOPES)
    plan = fovea.plan(*arrays, score_mod=program)
    other = program.with_captures(slopes=2 * SLOPES)
    np.testing.assert_array_equal(plan.run(*arrays, score_mod=other), fovea.attention(*arrays, score_mod=other))


def test_threads_share_a_plan() -> None:
    arrays = qkv()
    plan = fovea.plan(*arrays, causal=True)
    expected = plan.run(*arrays)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda _: plan.run(*arrays), range(64)))
    assert all(np.array_equal(result, expected) for result in results)


def test_explanations_are_pages_and_data() -> None:
    arrays = qkv()
    assert "kernel" in fovea.explain(*arrays, causal=True)
    assert fovea.explain(*(fovea.TensorSpec(a.shape, "bf16") for a in arrays), as_json=True)
    assert "attention_forward" in fovea.plan(*arrays).explain()
    assert fovea.plan(*arrays).explain(as_json=True)


def test_describe_says_what_there_is() -> None:
    described = fovea.describe()
    assert described["fovea"] and described["targets"] and described["operations"]


def test_many_calls_leak_nothing(route: str) -> None:
    q = draw((1, 1, 1, 8))
    program = fovea.score_mod("score + slopes[q_head]", slopes=SLOPES[:1])
    calls = 10_000 if route == _calls.ROUTE else 1_000

    def run() -> int:
        for _ in range(calls // 10):
            fovea.attention(q, q, q, score_mod=program)
            with pytest.raises(fovea.InvalidArgument):
                fovea.attention(q, q[..., :4], q)
        gc.collect()
        return len(gc.get_objects())

    references = sys.getrefcount(q)
    run()
    before = run()
    for _ in range(8):
        after = run()
    assert after - before < 100
    assert sys.getrefcount(q) == references
