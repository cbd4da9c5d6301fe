"""Probabilities as an array: against the oracle, and against what `attention` makes of them."""

import numpy as np
import pytest

import fovea
from attention_test import CASES, SEGMENTS_KV, SEGMENTS_Q, draw, qkv
import oracle


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, layout: str) -> None:
    features, expected = CASES[name]
    q, k, _ = qkv()
    # Its out is the probabilities where values are unit vectors.
    identity = np.broadcast_to(np.eye(70, dtype=np.float32)[None, :, None], (2, 70, 2, 70))
    exact = oracle.attention(q, k, identity, **expected).out.transpose(0, 2, 1, 3)
    given = (q, k) if layout == "bshd" else tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k))
    got = fovea.attention_probabilities(*given, **features, layout=layout)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=0)  # scores in float32, some roundings of numbers up to 32


def test_what_is_dropped_has_its_sign() -> None:
    q, k, v = qkv()
    features = {"causal": True, "dropout": fovea.Dropout(0.3, 7, 2), "sinks": np.float32([0, 1, -1, 3])}
    p = fovea.attention_probabilities(q, k, **features)
    undropped = fovea.attention_probabilities(q, k, causal=True, sinks=features["sinks"])
    np.testing.assert_array_equal(abs(p), undropped)
    is_dropped = np.signbit(p)
    assert 0.25 < is_dropped[undropped > 0].mean() < 0.35
    assert not is_dropped[undropped == 0].any()
    out = np.einsum("bhij,bjhd->bihd", np.where(is_dropped, 0, p) / 0.7, v.repeat(2, 2))
    np.testing.assert_allclose(fovea.attention(q, k, v, **features), out, atol=2e-6)


def test_packed_sequences_and_strided_output() -> None:
    q, k = draw((12, 4, 16), 1), draw((30, 2, 16), 2)
    offsets = (np.int32([0, 5, 5, 12]), np.int32([0, 20, 25, 30]))
    got = fovea.attention_probabilities(q, k, cu_seqlens=offsets, softcap=2.0)
    assert got.shape == (3, 4, 7, 20)
    memory = np.full((3, 9, 22, 8), np.nan, np.float32)
    out = memory.transpose(0, 3, 1, 2)[:, ::2]
    assert fovea.attention_probabilities(q, k, cu_seqlens=offsets, softcap=2.0, out=out) is out
    assert not out[:, :, 7:].any() and not out[..., 20:].any()
    np.testing.assert_array_equal(out[:, :, :7, :20], got)
    assert np.isnan(memory[..., 1::2]).all()
    for sequence, ((q0, q1), (k0, k1)) in enumerate(zip(zip(offsets[0], offsets[0][1:]), zip(offsets[1], offsets[1][1:]))):
        alone = fovea.attention_probabilities(q[None, q0:q1], k[None, k0:k1], softcap=2.0)
        np.testing.assert_array_equal(got[sequence, :, : q1 - q0, : k1 - k0], alone[0])
        assert not got[sequence, :, q1 - q0 :].any() and not got[sequence, ..., k1 - k0 :].any()


def test_nan_where_nobody_looks_changes_nothing() -> None:
    q, k, _ = qkv()
    ids = (SEGMENTS_Q, SEGMENTS_KV)
    expected = fovea.attention_probabilities(q, k, segment_ids=ids)
    q[SEGMENTS_Q == -1], k[SEGMENTS_KV == -1] = np.nan, np.inf
    np.testing.assert_array_equal(fovea.attention_probabilities(q, k, segment_ids=ids), expected)


def test_refusals_name_the_argument() -> None:
    q, k, _ = qkv()
    for arguments, message in (
        (((q, k), {"out": np.zeros((2, 4, 33, 69), np.float32)}), r"probabilities is f32 \[2, 4, 33, 69\]"),
        (((q[0], k), {}), r"q is of shape \(33, 4, 32\); expected an array \[batch, seqlen, num_heads, head_dim\]"),
        (((q, [1.0]), {}), "k is a list; expected an array"),
        (((q, k), {"window": (-1, 0)}), "window"),
        (((q, k[:, :, :, :16]), {}), "k has head_dim 16 but q has 32"),
    ):
        with pytest.raises(fovea.InvalidArgument, match=message):
            fovea.attention_probabilities(*arguments[0], **arguments[1])
    read_only = np.zeros((2, 4, 33, 70), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(fovea.InvalidArgument, match="out is read-only"):
        fovea.attention_probabilities(q, k, out=read_only)


def test_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    q, k, _ = (torch.from_numpy(x).bfloat16() for x in qkv())
    got = fovea.attention_probabilities(q, k, score_mod=lambda score, b, h, q_idx, kv_idx: score - 0.1 * abs(q_idx - kv_idx))
    assert got.dtype == torch.bfloat16 and got.shape == (2, 4, 33, 70)
    torch.testing.assert_close(got.float().sum(-1), torch.ones(2, 4, 33), atol=70 * 2.0**-9, rtol=0)
    with pytest.raises(fovea.Unsupported, match="gradients are recorded"):
        fovea.attention_probabilities(q.requires_grad_(), k)
