"""Whole problems drawn by hypothesis, against the oracle."""

import numpy as np
import pytest

import fovea
import oracle

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

# 0, 1, a prime, and what lies about a vector and a tile.
LENGTHS = st.sampled_from([0, 1, 2, 7, 15, 16, 17, 33, 64, 65])
MASKS = {
    "none": (None, lambda p, shift: p.q_idx + p.kv_idx >= 0),
    "text": ("q_idx + kv_idx != 5", lambda p, shift: p.q_idx + p.kv_idx != 5),
    "word": (fovea.dilated(3), lambda p, shift: (p.q_idx + shift - p.kv_idx) % 3 == 0),
    "callable": (lambda b, h, q, k: (q - k < 9) | (h == b), lambda p, shift: (p.q_idx - p.kv_idx < 9) | (p.head == p.batch)),
}
SCORES = {
    "none": (None, lambda s, p: s),
    "text": ("score * 0.5 + q_head", lambda s, p: s * 0.5 + p.head),
    "callable": (lambda s, b, h, q, k: s - abs(q - k) * 0.125, lambda s, p: s - abs(p.q_idx - p.kv_idx) * 0.125),
    "word": (fovea.softcap(2.0), lambda s, p: 2 * np.tanh(s / 2)),
}


@st.composite
def problems(draw):
    heads_kv = draw(st.integers(1, 3))
    shape = {
        "batch": draw(st.integers(1, 3)), "heads_kv": heads_kv, "heads_q": heads_kv * draw(st.integers(1, 3)),
        "seqlen_q": draw(LENGTHS), "seqlen_kv": draw(LENGTHS), "dim": draw(st.sampled_from([1, 3, 8, 40])),
        "dim_v": draw(st.sampled_from([1, 5, 16])),
    }  # fmt: skip
    sides = st.none() | st.integers(0, 70)
    features = {
        "causal": draw(st.booleans()), "align": draw(st.sampled_from(["bottom_right", "top_left"])),
        "window": draw(st.none() | st.tuples(sides, sides)), "scale": draw(st.none() | st.floats(0.1, 2.0)),
    }  # fmt: skip
    return shape, features, draw(st.sampled_from(sorted(MASKS))), draw(st.sampled_from(sorted(SCORES))), draw(st.booleans()), draw(st.booleans())


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_any_problem_equals_the_oracle(problem) -> None:
    shape, features, mask, score, has_sinks, is_strided = problem
    numbers = np.random.default_rng(0)

    def draw_array(*extents):
        array = numbers.standard_normal(extents).astype(np.float32)
        if not is_strided:
            return array
        wide = np.full((*extents[:2], 2 * extents[2], extents[3] + 3), np.nan, np.float32)
        wide[:, :, ::2, 1 : 1 + extents[3]] = array
        return wide[:, :, ::2, 1 : 1 + extents[3]]

    q = draw_array(shape["batch"], shape["seqlen_q"], shape["heads_q"], shape["dim"])
    k = draw_array(shape["batch"], shape["seqlen_kv"], shape["heads_kv"], shape["dim"])
    v = draw_array(shape["batch"], shape["seqlen_kv"], shape["heads_kv"], shape["dim_v"])
    sinks = numbers.standard_normal(shape["heads_q"]).astype(np.float32) if has_sinks else None
    shift = shape["seqlen_kv"] - shape["seqlen_q"]
    aligned = shift if features["align"] == "bottom_right" else 0

    def visible(p):
        seen = MASKS[mask][1](p, shift)
        position = p.q_idx + aligned
        if features["causal"]:
            seen = seen & (p.kv_idx <= position)
        left, right = features["window"] or (None, None)
        if left is not None:
            seen = seen & (p.kv_idx >= position - left)
        return seen if right is None else seen & (p.kv_idx <= position + right)

    out, lse = fovea.attention(q, k, v, **features, mask_mod=MASKS[mask][0], score_mod=SCORES[score][0], sinks=sinks, return_lse=True)
    oracle.assert_close(oracle.Result(out, lse), q, k, v, scale=features["scale"], score=SCORES[score][1], visible=visible, sinks=sinks)
