"""Words, texts and their combinations, each beside the mask or score written out in NumPy."""

import copy
import pickle

import numpy as np
import pytest

import fovea
import oracle
from attention_test import SEGMENTS_KV, SEGMENTS_Q, SHIFT, SLOPES, draw, qkv

TABLE = draw((4, 7))
BITS = np.random.default_rng(0).integers(-(2**31), 2**31, (33, 2), np.int32)


def tree_mask(p: oracle.Positions) -> np.ndarray:
    token = np.maximum(p.kv_idx - SHIFT, 0)
    return (p.kv_idx < SHIFT) | ((BITS[p.q_idx, token // 32].astype(np.int64) >> (token % 32)) & 1 == 1)


def same_segment(p: oracle.Positions) -> np.ndarray:
    ids = SEGMENTS_Q[p.batch, p.q_idx]
    return (ids == SEGMENTS_KV[p.batch, p.kv_idx]) & (ids != -1)


MASKS = {
    "causal": (fovea.causal(), lambda p: p.kv_idx <= p.q_idx + SHIFT),
    "causal top left": (fovea.causal("top_left"), lambda p: p.kv_idx <= p.q_idx),
    "window": (fovea.window(3, 2), lambda p: abs(p.kv_idx - p.q_idx - SHIFT + 0.5) <= 2.5),
    "open window": (fovea.window(None, None), lambda p: p.q_idx + p.kv_idx >= 0),
    "documents": (fovea.documents(SEGMENTS_Q, SEGMENTS_KV), same_segment),
    "prefix": (fovea.prefix_lm(np.int32([50, 3])), lambda p: (p.kv_idx < np.int32([50, 3])[p.batch]) | (p.kv_idx <= p.q_idx + SHIFT)),
    "chunked": (fovea.chunked(16), lambda p: (p.q_idx + SHIFT) // 16 == p.kv_idx // 16),
    "dilated": (fovea.dilated(3), lambda p: (p.q_idx + SHIFT - p.kv_idx) % 3 == 0),
    "tree": (fovea.tree(BITS), tree_mask),
    "streaming": (
        fovea.streaming(4, 8),
        lambda p: ((p.kv_idx < 4) | (p.kv_idx >= p.q_idx + SHIFT - 8)) & (p.kv_idx <= p.q_idx + SHIFT),
    ),
    "dense": (fovea.dense_mask(draw((4, 33, 1)) > 0), lambda p: (draw((4, 33, 1)) > 0)[p.head, p.q_idx, 0 * p.kv_idx]),
    "tiles": (
        fovea.tile_mask(draw((4, 3, 5)) > 0, 12, 16),
        lambda p: (draw((4, 3, 5)) > 0)[p.head, p.q_idx // 12, p.kv_idx // 16],
    ),
    "and, or, not": (
        (fovea.causal() & ~fovea.dilated(2)) | fovea.window(0, 0),
        lambda p: ((p.kv_idx <= p.q_idx + SHIFT) & ((p.q_idx + SHIFT - p.kv_idx) % 2 != 0)) | (p.kv_idx == p.q_idx + SHIFT),
    ),
    "one name, two arrays": (
        fovea.mask_mod("t[q_idx]", t=draw((33,)) > 0) & fovea.mask_mod("t[kv_idx]", t=draw((70,)) > 0),
        lambda p: (draw((33,)) > 0)[p.q_idx] & (draw((70,)) > 0)[p.kv_idx],
    ),
    "one let, two formulas": (
        fovea.mask_mod("let d = q_idx - kv_idx; d > -9") & fovea.mask_mod("let d = kv_idx - 1e0; d > 5"),
        lambda p: (p.q_idx - p.kv_idx > -9) & (p.kv_idx - 1 > 5),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    program, visible = MASKS[name]
    arrays = qkv()
    got = oracle.Result(*fovea.attention(*arrays, mask=program, return_lse=True))
    oracle.assert_close(got, *arrays, visible=visible)


SCORES = {
    "softcap": (fovea.softcap(2.0), lambda s, p: 2 * np.tanh(s / 2)),
    "alibi": (fovea.alibi(SLOPES), lambda s, p: s - SLOPES[p.head] * abs(p.q_idx + SHIFT - p.kv_idx)),
    "bias": (fovea.bias(draw((2, 1, 33, 70))), lambda s, p: s + draw((2, 1, 33, 70))),
    "relative bias": (
        fovea.relative_bias(TABLE, "q_idx - kv_idx + 3"),
        lambda s, p: s + TABLE[p.head, np.clip(p.q_idx - p.kv_idx + 3, 0, 6)],
    ),
    "pipe": (
        fovea.softcap(2.0) | fovea.score_mod("score * slopes[q_head]", slopes=SLOPES) | fovea.softcap(1.0),
        lambda s, p: np.tanh(2 * np.tanh(s / 2) * SLOPES[p.head]),
    ),
    "rank 0": (fovea.score_mod("score * n", n=np.array(0.5, np.float32)), lambda s, p: s / 2),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    program, score = SCORES[name]
    arrays = qkv()
    got = oracle.Result(*fovea.attention(*arrays, score_mod=program, return_lse=True))
    oracle.assert_close(got, *arrays, score=score)


def test_score_and_mask_have_names_of_their_own() -> None:
    arrays = qkv()
    out, lse = fovea.attention(
        *arrays,
        score_mod=fovea.score_mod("score + t[q_head] * n", t=SLOPES, n=2.0),
        mask_mod=fovea.mask_mod("t[kv_idx] && kv_idx > n", t=draw((70,)) > 0, n=3),
        return_lse=True,
    )
    oracle.assert_close(
        oracle.Result(out, lse), *arrays,
        score=lambda s, p: s + 2 * SLOPES[p.head],
        visible=lambda p: (draw((70,)) > 0)[p.kv_idx] & (p.kv_idx > 3),
    )  # fmt: skip


def test_captures_are_read_when_the_call_runs() -> None:
    arrays = qkv()
    slopes = SLOPES.copy()
    program = fovea.score_mod("score + slopes[q_head]", slopes=slopes)
    fovea.attention(*arrays, score_mod=program)
    slopes[:] = [1, 2, 3, 4]
    out, lse = fovea.attention(*arrays, score_mod=program, return_lse=True)
    oracle.assert_close(oracle.Result(out, lse), *arrays, score=lambda s, p: s + np.float32([1, 2, 3, 4])[p.head])


@pytest.mark.parametrize("made_again", [copy.copy, copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))], ids=["copy", "deepcopy", "pickle"])
def test_programs_are_copied_and_pickled(made_again) -> None:
    arrays, slopes = qkv(), SLOPES.copy()
    score = fovea.score_mod("let far = abs(q_idx - kv_idx); score - slopes[q_head] * far / reach", slopes=slopes, reach=2.5) | fovea.softcap(3.0)
    mask = fovea.causal() & ~fovea.mask_mod("kv_idx == hole", hole=3)
    expected = fovea.attention(*arrays, score_mod=score, mask=mask)
    score, mask = made_again(score), made_again(mask)
    np.testing.assert_array_equal(fovea.attention(*arrays, score_mod=score, mask=mask), expected)
    assert (score.captures["slopes"] is slopes) == (made_again is copy.copy)


def test_a_sum_of_256_terms_is_one_text() -> None:
    row = draw((256,)) / 256
    text = "score + " + " + ".join(f"row[{i}] * row[{i}]" for i in range(256))
    arrays = qkv()
    got = oracle.Result(*fovea.attention(*arrays, score_mod=fovea.score_mod(text, row=row), return_lse=True))
    oracle.assert_close(got, *arrays, score=lambda s, p: s + (row * row).sum())


def test_equal_formulas_have_one_text() -> None:
    assert fovea.mask_mod("(kv_idx) <= q_idx").canonical_text() == fovea.mask_mod("kv_idx<=q_idx").canonical_text()


def test_a_wrong_text_names_its_column() -> None:
    with pytest.raises(fovea.ProgramError) as caught:
        fovea.score_mod("score - slpoes[q_head]", slopes=SLOPES)
    assert caught.value.column == 9
    assert "did you mean 'slopes'" in str(caught.value)


REFUSED = {
    "two kinds": (lambda: fovea.causal() & fovea.softcap(1.0), "a mask_mod & a score_mod"),
    "scores and": (lambda: fovea.softcap(1.0) & fovea.softcap(2.0), "expected |"),
    "scores not": (lambda: ~fovea.softcap(1.0), "has no ~"),
    "a score as mask": (lambda: fovea.mask_mod(fovea.softcap(1.0)), "is a score_mod"),
    "number": (lambda: fovea.mask_mod(3), "got a int"),
    "captures of a program": (lambda: fovea.mask_mod(fovea.causal(), n=1), "by a text alone"),
    "window": (lambda: fovea.window(-1, 0), "left is -1"),
    "chunk": (lambda: fovea.chunked(0), "chunk_size is 0"),
    "step": (lambda: fovea.dilated(1.5), "step is 1.5"),
    "cap": (lambda: fovea.softcap(0.0), "cap is 0.0"),
    "bias of rank 1": (lambda: fovea.bias(SLOPES), "table has rank 1"),
    "align": (lambda: fovea.causal("left"), "align is 'left'"),
    "a captured list": (lambda: fovea.score_mod("score + t[0]", t=[1.0]), "t is a list"),
    "a captured complex": (lambda: fovea.score_mod("score + t[0]", t=np.zeros(1, np.complex64)), "t has dtype complex64"),
    "unknown name": (lambda: fovea.causal().with_captures(n=1), "n is no name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(fovea.InvalidArgument) as caught:
        call()
    assert text in str(caught.value)


def test_float64_captures_are_cast_and_said() -> None:
    arrays = qkv()
    with pytest.warns(UserWarning, match="t has float64 elements"):
        program = fovea.score_mod("score + t[q_head]", t=SLOPES.astype(np.float64))
    got = oracle.Result(*fovea.attention(*arrays, score_mod=program, return_lse=True))
    oracle.assert_close(got, *arrays, score=lambda s, p: s + SLOPES[p.head])
