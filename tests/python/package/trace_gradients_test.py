"""Gradients through traced callables, against float64 of PyTorch's own evaluation on the whole grid."""

import pytest

import fovea

torch = pytest.importorskip("torch")
import trace_test  # noqa: E402
from trace_test import B, H, KV, MASKS, SCORES, Q, dense, drawn  # noqa: E402

DIM = 8
# Steps, whose derivative float32 takes on the other side of a jump than float64; a detached score; and 1 + s / 2**16 to the power
# 2**14, which has four digits in float32.
NOT_SMOOTH = {"rounding", "fmod", "clone", "fourteen squarings"}


def of_scores(given, scores_of, visible):
    """out and lse of [batch, seqlen, heads, dim] where scores are what a callable makes of them."""
    q, k, v = given
    s = torch.einsum("bihd,bjhd->bhij", q, k) / DIM**0.5
    s = scores_of(s)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]), v), lse


def gradients(given, out, lse):
    seeds = torch.Generator().manual_seed(0)
    dout, dlse = (torch.randn(x.shape, generator=seeds).to(x.dtype) for x in (out, lse))
    dlse = torch.where(lse.isfinite(), dlse, 0)  # a row that sees no key has none
    lse = torch.where(lse.isfinite(), lse, 0)
    return torch.autograd.grad([(out * dout).sum() + (lse * dlse).sum()], given)


def assert_close(got, expected) -> None:
    for mine, exact in zip(got, expected):
        assert (mine - exact).abs().max() <= 1e-5 * max(1.0, float(exact.abs().max()))


def inputs():
    return [drawn(B, length, H, DIM, seed=index) for index, length in enumerate((Q, KV, KV))]


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    given = [x.requires_grad_() for x in inputs()]
    doubles = [x.detach().double().requires_grad_() for x in given]
    got = gradients(given, *fovea.attention(*given, mask_mod=MASKS[name], return_lse=True))
    visible = dense(MASKS[name])
    sees = visible.any(-1)
    q, k, v = doubles
    s = (torch.einsum("bihd,bjhd->bhij", q, k) / DIM**0.5).masked_fill(~visible, -torch.inf)
    s = torch.where(sees[..., None], s, 0)
    lse = torch.where(sees, s.logsumexp(-1), -torch.inf)
    p = torch.where(sees[..., None], s.softmax(-1), 0)
    assert_close(got, gradients(doubles, torch.einsum("bhij,bjhd->bihd", p, v), lse))


@pytest.mark.parametrize("name", [name for name in SCORES if name not in NOT_SMOOTH])
def test_scores(name: str) -> None:
    given = [x.requires_grad_() for x in inputs()]
    doubles = [x.detach().double().requires_grad_() for x in given]
    program = SCORES[name]
    got = gradients(given, *fovea.attention(*given, score_mod=program, return_lse=True))
    exact = of_scores(doubles, lambda s: dense_in_double(program, s), None)
    assert_close(got, gradients(doubles, *exact))


def dense_in_double(function, scores):
    """PyTorch's own evaluation, whose gradient is recorded."""
    dims = [(0, 0, None, None, None), (0, None, 0, None, None), (0, None, None, 0, None), (0, None, None, None, 0)]
    mapped = function
    for dim in reversed(dims):
        mapped = torch.vmap(mapped, in_dims=dim)
    with trace_test.warnings.catch_warnings():
        trace_test.warnings.simplefilter("ignore")
        with trace_test._IndexBySymbols():
            try:
                return mapped(scores, *(torch.arange(extent, dtype=torch.int32) for extent in (B, H, Q, KV)))
            except RuntimeError as error:
                if "calling .item()" not in str(error):
                    raise
                pytest.skip("this PyTorch's vmap cannot index so")
