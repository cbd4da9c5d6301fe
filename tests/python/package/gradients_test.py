"""fovea.attention_backward against differences of the oracle."""

import numpy as np
import pytest

import fovea
import oracle
from attention_test import SLOPES, draw, qkv

STEP = 1e-5


def loss_gradient(arrays: dict, name: str, direction: np.ndarray, dout: np.ndarray, dlse: np.ndarray, **features) -> float:
    """The derivative of <dout, out> + <dlse, lse> along a direction, by central differences in float64."""

    def loss(step: float) -> float:
        moved = {key: value.astype(np.float64) for key, value in arrays.items()}
        moved[name] = moved[name] + step * direction
        given = {key: moved[key] for key in ("q", "k", "v")}
        score = features["score"]
        result = oracle.attention(**given, score=lambda s, p: score(s, p, moved), sinks=moved["sinks"])
        return float((result.out * dout).sum() + (result.lse * dlse).sum())

    return (loss(STEP) - loss(-STEP)) / (2 * STEP)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_are_derivatives(layout: str) -> None:
    q, k, v = qkv(1, 5, 9, 4, 2, 8, 6)
    arrays = {"q": q, "k": k, "v": v, "sinks": draw((4,)), "bias": draw((4, 5, 9)), "slopes": SLOPES}

    def score(s, p, a):
        return s + a["bias"] + a["slopes"][p.head] * (p.kv_idx - p.q_idx)

    program = fovea.score_mod("score + slopes[q_head] * (kv_idx - q_idx)", slopes=SLOPES)
    features = {"bias": arrays["bias"], "score_mod": program, "sinks": arrays["sinks"], "layout": layout}

    def laid(x: np.ndarray) -> np.ndarray:
        return x if layout == "bshd" else np.ascontiguousarray(x.swapaxes(1, 2))

    given = [laid(x) for x in (q, k, v)]
    out, lse = fovea.attention(*given, **features, return_lse=True)
    dout, dlse = draw((1, 5, 4, 6), 5), draw((1, 4, 5), 6)
    got = fovea.attention_backward(laid(dout), *given, out, lse, dlse=dlse, captured=("bias", "slopes"), **features)
    gradients = {"q": laid(got.q), "k": laid(got.k), "v": laid(got.v), "sinks": got.sinks, **got.captured}
    for name, gradient in gradients.items():
        assert gradient.shape == arrays[name].shape
        direction = draw(arrays[name].shape, 9)
        expected = loss_gradient(arrays, name, direction, dout, dlse, score=score)
        size = np.abs(gradient * direction).sum()
        assert abs((gradient * direction).sum() - expected) <= 1e-5 * size, name


def test_names_that_are_not_captured_are_refused() -> None:
    q, k, v = qkv()
    out, lse = fovea.attention(q, k, v, return_lse=True)
    with pytest.raises(fovea.InvalidArgument, match="'slopes'"):
        fovea.attention_backward(out, q, k, v, out, lse, captured=["slopes"])
