"""Arrays as they come: views of every kind, read-only ones, those that speak DLPack and nothing else."""

import numpy as np
import pytest

import fovea
import oracle
from attention_test import SLOPES, draw, qkv
from fovea import _arrays


class OnlyDlpack:
    """An array of a library that Fovea has never heard of."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class OlderDlpack(OnlyDlpack):
    def __dlpack__(self):
        return self._array.__dlpack__()


def reversed_view(array: np.ndarray, axis: int) -> np.ndarray:
    """The same elements with a negative stride."""
    return np.flip(np.ascontiguousarray(np.flip(array, axis)), axis)


@pytest.mark.parametrize("axis", range(4))
def test_negative_strides_of_every_axis(axis: int) -> None:
    q, k, v = qkv()
    views = [reversed_view(array, axis) for array in (q, k, v)]
    assert views[0].strides[axis] < 0
    out, lse = fovea.attention(*views, return_lse=True)
    oracle.assert_close(oracle.Result(out, lse), q, k, v)


def test_outputs_may_be_views() -> None:
    q, k, v = qkv()
    wide = np.full((2, 4, 33, 50), np.nan, np.float32)
    out = wide[:, ::-1, :, 1:49:2].swapaxes(1, 2)
    assert fovea.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, fovea.attention(q, k, v))
    assert np.isnan(wide[..., ::2]).all()


def test_read_only_captures_biases_and_masks() -> None:
    q, k, v = qkv()
    arrays = {"bias": draw((33, 70)), "mask": draw((33, 70), 1) > 0, "alibi": SLOPES.copy()}
    expected = fovea.attention(q, k, v, **arrays)
    for array in arrays.values():
        array.flags.writeable = False
    np.testing.assert_array_equal(fovea.attention(q, k, v, **arrays), expected)


def test_read_only_outputs_are_refused() -> None:
    q, k, v = qkv()
    out = np.zeros((2, 33, 4, 24), np.float32)
    out.flags.writeable = False
    with pytest.raises(fovea.InvalidArgument, match="out"):
        fovea.attention(q, k, v, out=out)
    assert not out.any()
    cache = fovea.kv_cache(q, 2, 80, 2, 32, head_dim_v=24)
    cache.v.flags.writeable = False
    with pytest.raises(fovea.InvalidArgument, match="cache.v is read-only"):
        fovea.append_to_cache(cache, k, v)
    lse = np.zeros((2, 4, 33), np.float32)
    lse.flags.writeable = False
    with pytest.raises(fovea.InvalidArgument, match="lse is read-only"):
        fovea.attention(q, k, v, lse=lse)


@pytest.mark.parametrize("kind", [OnlyDlpack, OlderDlpack])
def test_arrays_that_speak_dlpack_alone(kind) -> None:
    q, k, v = qkv()
    out = np.empty((2, 33, 4, 24), np.float32)
    fovea.attention(kind(q), kind(k), kind(v), out=out)
    np.testing.assert_array_equal(out, fovea.attention(q, k, v))
    assert _arrays.describe(kind(q)).address == q.ctypes.data
    with pytest.raises(fovea.Unsupported, match="give `out` arrays"):
        fovea.attention(kind(q), kind(k), kind(v))


def test_float64_biases_are_refused_and_float64_captures_are_cast() -> None:
    q, k, v = qkv()
    with pytest.raises(fovea.InvalidArgument, match="bias"):
        fovea.attention(q, k, v, bias=draw((33, 70)).astype(np.float64))
    slopes = SLOPES.astype(np.float64)
    with pytest.warns(UserWarning, match="float64"):
        out = fovea.attention(q, k, v, score_mod=fovea.score_mod("score + slopes[q_head]", slopes=slopes))
    np.testing.assert_array_equal(out, fovea.attention(q, k, v, score_mod=fovea.score_mod("score + slopes[q_head]", slopes=SLOPES)))


def test_cupy_arrays_on_their_stream() -> None:
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    arrays = [cupy.asarray(array) for array in qkv()]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, lse = fovea.attention(*arrays, causal=True, return_lse=True)
    stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    oracle.assert_close(oracle.Result(out.get(), lse.get()), *qkv(), visible=lambda p: p.kv_idx <= p.q_idx + 37)
