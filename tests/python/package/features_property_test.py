"""Every feature beside every other, drawn by hypothesis: attention, plans, packed calls and block maps against one NumPy formula in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import fovea
import oracle

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

# 1, primes, and what lies about a vector.
LENGTHS = st.sampled_from([1, 2, 5, 13, 16, 17, 31, 33])
QUIET = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@dataclasses.dataclass
class Drawn:
    """Arrays of a call, its features, and the same features as a formula."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    features: dict[str, Any]
    align: str

    @property
    def shift(self) -> int:
        return self.k.shape[1] - self.q.shape[1] if self.align == "bottom_right" else 0

    def score(self, s: np.ndarray, p: oracle.Positions) -> np.ndarray:
        f, position = self.features, p.q_idx + self.shift
        if "softcap" in f:
            s = f["softcap"] * np.tanh(s / f["softcap"])
        if "bias" in f:
            s = s + f["bias"]
        if "alibi" in f:
            slopes = f["alibi"] if f["alibi"].ndim == 2 else f["alibi"][None]
            s = s - slopes[:, :, None, None] * abs(position - p.kv_idx)
        if "score_mod" in f:
            s = s * 0.5 + f["score_mod"].captures["t"][p.q_idx % 3, p.head]
        return s

    def visible(self, p: oracle.Positions) -> np.ndarray:
        f, position = self.features, p.q_idx + self.shift
        seen = (p.batch + p.head + p.q_idx + p.kv_idx) >= 0
        if f.get("causal"):
            seen = seen & (p.kv_idx <= position)
        left, right = f.get("window", (None, None))
        if left is not None:
            seen = seen & (p.kv_idx >= position - left)
        if right is not None:
            seen = seen & (p.kv_idx <= position + right)
        if "segment_ids" in f:
            ids_q, ids_kv = f["segment_ids"]
            seen = seen & (ids_q[p.batch, p.q_idx] == ids_kv[p.batch, p.kv_idx]) & (ids_q[p.batch, p.q_idx] != -1)
        if "mask" in f:
            seen = seen & f["mask"]
        if "mask_mod" in f:
            seen = seen & ((p.q_idx * 7 + p.kv_idx) % 5 != 0)
        return seen

    def check(self, out: np.ndarray, lse: np.ndarray) -> None:
        oracle.assert_close(
            oracle.Result(out, lse), self.q, self.k, self.v, scale=self.features.get("scale"), score=self.score, visible=self.visible,
            sinks=self.features.get("sinks"),
        )  # fmt: skip


def broadcast_shape(draw: Any, full: tuple[int, ...]) -> tuple[int, ...]:
    """A rank of 2 to 4, some extents 1."""
    rank = draw(st.integers(2, 4))
    return tuple(extent if draw(st.booleans()) else 1 for extent in full[4 - rank :])


@st.composite
def calls(draw: Any) -> Drawn:
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))

    def array(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape).astype(np.float32)

    batch, heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, seqlen_q, seqlen_kv, dim = heads_kv * group, draw(LENGTHS), draw(LENGTHS), draw(st.sampled_from([1, 7, 16]))
    q, k, v = array(batch, seqlen_q, heads, dim), array(batch, seqlen_kv, heads_kv, dim), array(batch, seqlen_kv, heads_kv, draw(st.sampled_from([3, 16])))
    full = (batch, heads, seqlen_q, seqlen_kv)
    align = draw(st.sampled_from(["bottom_right", "top_left"]))
    sides = st.none() | st.integers(0, 40)
    offered = {
        "scale": lambda: draw(st.floats(0.1, 2.0)),
        "softcap": lambda: draw(st.sampled_from([0.5, 2.0, 30.0])),
        "bias": lambda: array(*broadcast_shape(draw, full)),
        "alibi": lambda: array(*((heads,) if draw(st.booleans()) else (batch, heads))),
        "score_mod": lambda: fovea.score_mod("score * 0.5 + t[q_idx % 3, q_head]", t=array(3, heads)),
        "causal": lambda: True,
        "window": lambda: (draw(sides), draw(sides)),
        "segment_ids": lambda: tuple(numbers.integers(-1, 3, (batch, length)).astype(np.int32) for length in (seqlen_q, seqlen_kv)),
        "mask": lambda: numbers.random(broadcast_shape(draw, full)) > 0.3,
        "mask_mod": lambda: "(q_idx * 7 + kv_idx) % 5 != 0",
        "sinks": lambda: array(heads),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(offered)), max_size=7))
    return Drawn(q, k, v, {name: offered[name]() for name in sorted(chosen)}, align)


@QUIET
@given(call=calls(), layout=st.sampled_from(["bshd", "bhsd"]))
def test_any_combination_equals_the_formula(call: Drawn, layout: str) -> None:
    given_arrays = [array if layout == "bshd" else array.swapaxes(1, 2) for array in (call.q, call.k, call.v)]
    out, lse = fovea.attention(*given_arrays, **call.features, align=call.align, layout=layout, return_lse=True)
    call.check(out if layout == "bshd" else out.swapaxes(1, 2), lse)


@QUIET
@given(call=calls())
def test_a_plan_gives_the_bits_of_a_call(call: Drawn) -> None:
    features = {**call.features, "align": call.align}
    expected = fovea.attention(call.q, call.k, call.v, **features, return_lse=True)
    got = fovea.plan(call.q, call.k, call.v, **features, return_lse=True).run(call.q, call.k, call.v)
    for one, other in zip(got, expected):
        np.testing.assert_array_equal(one, other)


@QUIET
@given(call=calls(), others=st.lists(calls(), max_size=2))
def test_packed_sequences_equal_each_alone(call: Drawn, others: list[Drawn]) -> None:
    """Sequences of other lengths, with the heads and head dims of the first, lie behind one another; features that packing takes."""
    lengths = [(call.q.shape[1], call.k.shape[1])] + [(other.q.shape[1], other.k.shape[1]) for other in others]
    features = {name: value for name, value in call.features.items() if name in ("scale", "softcap", "causal", "window", "mask_mod", "sinks", "score_mod")}
    offsets = [np.cumsum([0, *side]).astype(np.int32) for side in zip(*lengths)]
    numbers = np.random.default_rng(0)
    heads, dim, heads_kv, dim_v = *call.q.shape[2:], call.v.shape[2], call.v.shape[3]
    q, k, v = (numbers.standard_normal(shape).astype(np.float32) for shape in (
        (offsets[0][-1], heads, dim), (offsets[1][-1], heads_kv, dim), (offsets[1][-1], heads_kv, dim_v)))  # fmt: skip
    out, lse = fovea.attention(q, k, v, cu_seqlens=tuple(offsets), **features, align=call.align, return_lse=True)
    for (q0, q1), (k0, k1) in zip(zip(offsets[0], offsets[0][1:]), zip(offsets[1], offsets[1][1:])):
        alone = Drawn(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], features, call.align)
        alone.check(out[None, q0:q1], lse[None, :, q0:q1])


@QUIET
@given(call=calls(), tile_q=st.integers(1, 20), tile_kv=st.integers(1, 20))
def test_block_maps_are_sound_and_dense_masks_exact(call: Drawn, tile_q: int, tile_kv: int) -> None:
    features = {name: value for name, value in call.features.items() if name in ("causal", "window", "segment_ids", "mask", "mask_mod")}
    made = fovea.block_map(call.q, call.k, **features, align=call.align, tile_q=tile_q, tile_kv=tile_kv)
    batch, seqlen_q, heads, _ = call.q.shape
    expected = np.broadcast_to(call.visible(oracle.positions(batch, heads, seqlen_q, call.k.shape[1])), (batch, heads, seqlen_q, call.k.shape[1]))
    dense = np.broadcast_to(made.dense(), expected.shape)
    np.testing.assert_array_equal(dense, expected)
    for index in np.ndindex(*made.shape):
        b, h, row, column = index
        tile = expected[b, h, row * tile_q : (row + 1) * tile_q, column * tile_kv : (column + 1) * tile_kv]
        assert made.kinds[index] != 0 or not tile.any()
        assert made.kinds[index] != 2 or tile.all()
