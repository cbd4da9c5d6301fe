"""Callables over NumPy arrays, where there is no other framework."""

import numpy as np
import pytest

import fovea
import oracle
from attention_test import SLOPES, draw, qkv

TABLE = draw((4, 99))
VISIBLE = draw((70,)) > -1


def test_arrays_in_closures_globals_and_defaults() -> None:
    slopes = SLOPES.copy()

    def helper(head, distance):
        return TABLE[head, np.clip(distance, -20, 70) + 20]

    def score_mod(score, b, h, q_idx, kv_idx, n=slopes):
        return np.where(q_idx > kv_idx, np.tanh(score) + n[h], score) + helper(h, kv_idx - q_idx)

    arrays = qkv()
    out, lse = fovea.attention(*arrays, score_mod=score_mod, mask_mod=lambda b, h, q, k: VISIBLE[k] | (q == k), return_lse=True)
    oracle.assert_close(
        oracle.Result(out, lse), *arrays,
        score=lambda s, p: np.where(p.q_idx > p.kv_idx, np.tanh(s) + slopes[p.head], s) + TABLE[p.head, np.clip(p.kv_idx - p.q_idx, -20, 70) + 20],
        visible=lambda p: VISIBLE[p.kv_idx] | (p.q_idx == p.kv_idx),
    )  # fmt: skip
    slopes += 1  # read when a call runs
    program = fovea.score_mod(score_mod)
    assert set(program.captures) == {"n", "TABLE"} and program.captures["n"] is slopes


def test_one_function_may_stand_twice_and_call_itself() -> None:
    def sees(b, h, q, k, depth=2):
        return VISIBLE[k] if depth == 0 else sees(b, h, q, k, depth - 1)

    masks = [sees, sees]
    program = fovea.mask_mod(lambda b, h, q, k: masks[0](b, h, q, k) & masks[1](b, h, q, k, 0))
    assert program.text == "let t0 = VISIBLE[kv_idx]; t0 && t0"


def test_a_formula_needs_no_array() -> None:
    assert fovea.mask_mod(lambda b, h, q, k: q >= k).text == "q_idx >= kv_idx"


def test_the_line_is_named() -> None:
    with pytest.raises(fovea.TraceError, match=r"trace_numpy_test.py:\d+: sort is not in the language"):
        fovea.score_mod(lambda s, b, h, q, k: np.sort(SLOPES)[h] + np.sort(s))
