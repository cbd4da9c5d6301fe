"""fovea.attention in compiled graphs, and the operators that it becomes there."""

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402
from sdpa_test import has_place, tensors  # noqa: E402

SHAPES = ((2, 33, 4, 16), (2, 70, 2, 16), (2, 70, 2, 24))
SLOPES, IDS = tensors((4,))[0], torch.arange(70, dtype=torch.int32) // 30
ALIBI = fovea.score_mod("score - slopes[q_head] * abs(q_idx - kv_idx) * n", slopes=SLOPES, n=0.5)
MASK = fovea.mask_mod(lambda b, h, q, k: IDS[q] == IDS[k]) | fovea.causal()
BIAS = tensors((4, 33, 70))[0]

CASES = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window and softcap": {"window": (9, None), "softcap": 3.0},
    "programs": {"score_mod": ALIBI, "mask": MASK},
    "texts": {"score_mod": "score * 2", "mask_mod": "kv_idx > 3"},
    "bias and sinks": {"bias": BIAS, "sinks": SLOPES},
    "segments": {"segment_ids": (IDS[:33].expand(2, -1), IDS.expand(2, -1))},
    "dropout": {"dropout": (0.5, 7)},
}


def run(function, **features):
    given = [x.requires_grad_() for x in tensors(*SHAPES)]
    out, lse = function(*given, **features)
    loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum() + lse.sum()
    return out, lse, *torch.autograd.grad(loss, given)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_whole_and_gives_the_same(name: str, backend: str) -> None:
    torch._dynamo.reset()

    def call(q, k, v):
        return fovea.attention(q, k, v, **CASES[name], return_lse=True)

    for got, expected in zip(run(torch.compile(call, backend=backend, fullgraph=True)), run(call)):
        assert torch.equal(got, expected)


def test_shapes_may_be_dynamic() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: fovea.attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 9, 17):
        given = tensors(*((1, length, 2, 8),) * 3)
        assert torch.equal(compiled(*given), fovea.attention(*given, causal=True))


def test_what_is_captured_learns_in_a_graph() -> None:
    torch._dynamo.reset()
    slopes = SLOPES.clone().requires_grad_()
    program = fovea.score_mod("score + slopes[q_head] * kv_idx", slopes=slopes)

    def loss(q, k, v):
        return fovea.attention(q, k, v, score_mod=program).square().sum()

    given = tensors(*SHAPES)
    (expected,) = torch.autograd.grad(loss(*given), slopes)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*given), slopes)
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ["causal", "programs", "bias and sinks"])
def test_opcheck(name: str) -> None:
    seen = []

    def record(*args):
        seen.append(args)
        return operator(*args)

    operator = torch.ops.fovea.attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.fovea, "attention", record)
        given = [x.requires_grad_() for x in tensors(*SHAPES)]
        defaults = dict.fromkeys(
            "window scale softcap bias alibi score_mod mask mask_mod segment_ids cu_seqlens sinks dropout".split()
        )
        fixed = {"causal": False, "align": "bottom_right", "return_lse": False, "layout": "bshd", "deterministic": True}
        fovea.torch._ops.attention(*given, **{**defaults, **fixed, **CASES[name]})
    torch.library.opcheck(operator.default, seen[0])


@pytest.mark.skipif(not has_place, reason="an old Dynamo stops before our refusal, with one of its own")
def test_callables_in_a_graph_are_refused_by_name() -> None:
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, k, v: fovea.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="fovea.mask_mod"):
        call(*tensors(*SHAPES))
