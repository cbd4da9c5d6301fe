"""Calls of PyTorch's tensors that the extension makes and records alone, beside those that Python makes."""

import gc
import sys

import pytest

import fovea
from fovea import _quick

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402

SHAPES = {"bshd": ((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 8)), "bhsd": ((2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 8))}


def tensors(*shapes):
    torch.manual_seed(3)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


TABLE, SLOPES, SINKS, BIAS = tensors((4, 21), (4,), (4,), (9, 12))
PROGRAM = fovea.score_mod("score * gain + table[q_head, q_idx - kv_idx + 11]", table=TABLE, gain=0.5)
CASES = {
    "plain": {},
    "words": {"causal": True, "window": (6, 1), "scale": 0.3, "softcap": 5.0, "dropout": (0.2, 7)},
    "a program": {"score_mod": PROGRAM, "mask_mod": fovea.causal()},
    "fields": {"bias": BIAS, "alibi": SLOPES, "sinks": SINKS, "mask": torch.rand(9, 12) > 0.3},
    "fields beside a program": {"bias": BIAS, "score_mod": PROGRAM, "segment_ids": (torch.zeros(2, 9, dtype=torch.int32),
                                                                                     torch.zeros(2, 12, dtype=torch.int32))},
}  # fmt: skip
LEARNT = (TABLE, SLOPES, SINKS, BIAS)


def results(features, layout="bshd", given=None):
    """out, lse, and gradients by all that is learnt."""
    given = given or tensors(*SHAPES[layout])
    out, lse = fovea.attention(*given, return_lse=True, layout=layout, **features)
    loss = (out * torch.arange(8.0)).sum() + lse.square().sum()
    return [out, lse, *torch.autograd.grad(loss, [*given, *LEARNT], allow_unused=True)], out


def expect_equal(mine, theirs):
    for x, y in zip(mine, theirs, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_the_extension_records_what_python_records(name, layout, route, monkeypatch) -> None:
    if route != "extension":
        pytest.skip("compares the two")
    mine, out = results(CASES[name], layout)
    assert out.grad_fn.name() == "_QuickBackward"
    monkeypatch.setattr(_quick, "attend", None)
    theirs, out = results(CASES[name], layout)
    assert out.grad_fn.name() == "_RecordedBackward"
    expect_equal(mine, theirs)


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 3)])
def test_views_are_recorded_as_they_lie(axes, route, monkeypatch) -> None:
    if route != "extension":
        pytest.skip("compares the two")
    given = [x.transpose(*axes).contiguous().transpose(*axes) for x in tensors(*SHAPES["bshd"])]
    mine, _ = results({}, given=given)
    monkeypatch.setattr(_quick, "attend", None)
    expect_equal(mine, results({}, given=given)[0])


def test_signs_that_are_flags() -> None:
    q, k, v = (torch.view_as_complex(torch.randn(*shape, 2)).conj().imag for shape in SHAPES["bshd"])
    assert q.is_neg()
    expected = fovea.attention(*(x.resolve_neg() for x in (q, k, v)))
    assert torch.equal(fovea.attention(q, k, v), expected)
    seed = torch.view_as_complex(torch.randn(*expected.shape, 2)).conj().imag
    given = [x.resolve_neg().requires_grad_() for x in (q, k, v)]
    got, wanted = (torch.autograd.grad(fovea.attention(*given), given, x) for x in (seed, seed.resolve_neg()))
    expect_equal(got, wanted)


def test_seeds_that_repeat_and_that_are_not_there() -> None:
    given = tensors(*SHAPES["bshd"])
    out, lse = fovea.attention(*given, return_lse=True)
    by_sum = torch.autograd.grad(out.sum(), given, retain_graph=True)  # a seed of stride 0
    expect_equal(by_sum, torch.autograd.grad(out, given, torch.ones_like(out), retain_graph=True))
    by_lse = torch.autograd.grad(lse.sum(), given, retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), given)
    assert by_lse[2] is None or not by_lse[2].any()
    for x, y, z in zip(both, by_sum, by_lse):
        assert (x - y - (0 if z is None else z)).abs().max() < 1e-5


def test_second_derivatives_of_a_recorded_call() -> None:
    given = [x.detach().double().float().requires_grad_() for x in tensors((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4))]
    out = fovea.attention(*given, causal=True, score_mod=fovea.score_mod("score * g", g=0.5))
    (dq,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
    got = torch.autograd.grad(dq.square().sum(), given)
    q, k, v = (x.detach().double().requires_grad_() for x in given)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    dense = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)
    (dq,) = torch.autograd.grad(dense.square().sum(), q, create_graph=True)
    for x, y in zip(got, torch.autograd.grad(dq.square().sum(), [q, k, v])):
        assert (x - y).abs().max() < 1e-4 * max(1, y.abs().max())


def test_saved_tensors_pass_hooks() -> None:
    given = tensors(*SHAPES["bshd"])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x.clone(), lambda x: x):
        out = fovea.attention(*given)
    assert len(packed) == 5  # q, k, v, out, lse
    expect_equal(torch.autograd.grad(out.sum(), given), torch.autograd.grad(fovea.attention(*given).sum(), given))


def test_given_outputs_are_no_part_of_a_graph() -> None:
    q, k, v = (x.detach() for x in tensors(*SHAPES["bshd"]))
    out = torch.empty(2, 9, 4, 8)
    assert fovea.attention(q, k, v, out=out) is out
    with pytest.raises(fovea.Unsupported, match="gradients are recorded"):
        fovea.attention(q, k, v, out=out.clone().requires_grad_())
    with pytest.raises(fovea.Unsupported, match="gradients are recorded"):
        fovea.attention(q, k, v.clone().requires_grad_(), out=out)
    with torch.no_grad():
        fovea.attention(q, k, v.clone().requires_grad_(), out=out)


def test_masks_have_no_gradients() -> None:
    given = tensors(*SHAPES["bshd"])
    mask = fovea.mask_mod("slopes[q_head] > 0.0", slopes=SLOPES)
    with pytest.raises(fovea.Unsupported, match="slopes requires a gradient"):
        fovea.attention(*given, mask_mod=mask)
    clash = fovea.score_mod("score + bias[q_head]", bias=SLOPES)
    with pytest.raises(fovea.InvalidArgument, match="rename"):
        fovea.attention(*given, bias=BIAS, score_mod=clash)


def test_recorded_calls_leave_no_references() -> None:
    given = tensors(*SHAPES["bshd"])
    seed = torch.ones(2, 9, 4, 8)
    wrong = torch.randn(2, 12, 2, 15).requires_grad_()
    watched = [*given, *LEARNT, seed, wrong, PROGRAM, PROGRAM.tensors, PROGRAM.tensor_names, PROGRAM.captures]

    def run() -> None:
        for features in CASES.values():
            out = fovea.attention(*given, **features)
            torch.autograd.grad(out, [*given, *LEARNT], seed, retain_graph=True, allow_unused=True)
            torch.autograd.grad(out, given[:1], seed)
            with torch.no_grad():
                fovea.attention(*given, **features)
            with pytest.raises(fovea.InvalidArgument):
                fovea.attention(given[0], wrong, given[2], **features)

    run()
    gc.collect()
    before, objects = [sys.getrefcount(thing) for thing in watched], len(gc.get_objects())
    for _ in range(30):
        run()
    gc.collect()
    assert [sys.getrefcount(thing) for thing in watched] == before
    assert len(gc.get_objects()) - objects < 30
