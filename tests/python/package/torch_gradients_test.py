"""Gradients that PyTorch records through fovea.attention, against float64 of the formula written in PyTorch."""

import contextlib
import copy

import numpy as np
import pytest

import fovea
from attention_test import qkv

torch = pytest.importorskip("torch")
pytest.importorskip("torch.utils.checkpoint")

SHIFT = 70 - 33


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def inputs(dtype=None):
    return [leaf(torch.from_numpy(array).to(dtype or torch.float32)) for array in qkv()]


def formula(q, k, v, score=lambda s: s, visible=None, sinks=None):
    """bshd, in the inputs' dtype; out and lse."""
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    s = score(torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    logits = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    p = torch.exp(s - lse[..., None])
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def assert_gradients(call, expected, tensors, tolerance=1e-5):
    """Of the same loss of out and lse, by each of the tensors; the formula in float64 is exact beside the tolerance."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    seeds = torch.Generator().manual_seed(0)
    out, lse = call(*tensors)
    exact_out, exact_lse = expected(*doubles)
    dout, dlse = (torch.randn(x.shape, generator=seeds) for x in (out, lse))
    got = torch.autograd.grad([out, lse], tensors, [dout.to(out.dtype), dlse])
    wanted = torch.autograd.grad([exact_out, exact_lse], doubles, [dout.double(), dlse.double()])
    for index, (gradient, exact) in enumerate(zip(got, wanted)):
        assert gradient.shape == exact.shape and gradient.dtype == tensors[index].dtype
        error = (gradient.double() - exact).abs().max() / exact.abs().max()
        assert error <= tolerance, f"tensor {index}: {error:.3g}"


def test_q_k_v() -> None:
    assert_gradients(lambda *t: fovea.attention(*t, return_lse=True), formula, inputs())


def test_causal_with_sinks_and_softcap() -> None:
    visible = torch.ones(33, 70, dtype=torch.bool).tril(SHIFT)
    sinks = leaf(torch.tensor([0.0, 1, -1, 2]))
    assert_gradients(
        lambda q, k, v, s: fovea.attention(q, k, v, causal=True, sinks=s, softcap=2.0, return_lse=True),
        lambda q, k, v, s: formula(q, k, v, lambda x: 2 * torch.tanh(x / 2), visible, s),
        [*inputs(), sinks],
    )


@pytest.mark.parametrize("shape", [(33, 70), (4, 1, 70), (2, 1, 33, 1)])
def test_bias_of_any_broadcast_shape(shape) -> None:
    bias = leaf(torch.from_numpy(np.random.default_rng(1).standard_normal(shape).astype(np.float32)))
    assert_gradients(
        lambda q, k, v, b: fovea.attention(q, k, v, bias=b, return_lse=True),
        lambda q, k, v, b: formula(q, k, v, lambda x: x + b),
        [*inputs(), bias],
    )


def test_alibi_slopes() -> None:
    distance = (torch.arange(33)[:, None] + SHIFT - torch.arange(70)).abs()
    assert_gradients(
        lambda q, k, v, a: fovea.attention(q, k, v, alibi=a, return_lse=True),
        lambda q, k, v, a: formula(q, k, v, lambda x: x - a[:, None, None] * distance),
        [*inputs(), leaf(torch.tensor([0.5, 0.25, 0.125, 0.0625]))],
    )


def test_what_a_callable_captures() -> None:
    table, temperature = leaf(torch.randn(4, 70, generator=torch.Generator().manual_seed(1))), leaf(torch.tensor(0.7))

    def call(q, k, v, table, temperature):
        return fovea.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s * temperature + table[h][j], mask_mod=lambda b, h, i, j: i + j > 3, return_lse=True
        )

    visible = torch.arange(33)[:, None] + torch.arange(70) > 3
    assert_gradients(
        call, lambda q, k, v, t, c: formula(q, k, v, lambda x: x * c + t[:, None], visible), [*inputs(), table, temperature]
    )


def test_dropout_is_the_same_in_both_directions() -> None:
    q, k, v = inputs()
    out = fovea.attention(q, k, v, dropout=(0.5, 3))
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    # out is linear in v.
    assert torch.allclose((dv * v).sum(), out.sum(), rtol=1e-4)


def test_packed_and_bhsd() -> None:
    q, k, v = inputs()
    for layout, arrange in (("bhsd", lambda x: x.transpose(1, 2)),):
        assert_gradients(
            lambda *t: tuple(
                arrange(x) if x.dim() == 4 else x for x in fovea.attention(*map(arrange, t), layout=layout, return_lse=True)
            ),
            formula,
            [q, k, v],
        )
    offsets = torch.tensor([0, 33], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)

    def packed(q, k, v):
        out, lse = fovea.attention(q[0], k[0], v[0], cu_seqlens=offsets, return_lse=True)
        return out[None], lse[None]

    assert_gradients(packed, formula, [leaf(x[:1]) for x in (q, k, v)])


@pytest.mark.parametrize("is_grouped", [False, True])
def test_packed_projections(is_grouped) -> None:
    """q, k and v as views of one tensor, whose gradient is one tensor."""
    heads = (4, 2, 2) if is_grouped else (4, 4, 4)
    packed = leaf(torch.randn(2, 33, sum(heads), 16, generator=torch.Generator().manual_seed(1)))
    visible = torch.ones(33, 33, dtype=torch.bool).tril()

    def expected(x):
        q, k, v = x.split(heads, 2)
        return formula(q, k, v, visible=visible) if is_grouped else plain(q, k, v)

    def plain(q, k, v):
        s = (torch.einsum("bihd,bjhd->bhij", q, k) / 4).masked_fill(~visible, -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)

    assert_gradients(lambda x: fovea.attention(*x.split(heads, 2), causal=True, return_lse=True), expected, [packed])


def test_bf16() -> None:
    assert_gradients(lambda *t: fovea.attention(*t, return_lse=True), formula, inputs(torch.bfloat16), tolerance=2.0**-6)


def test_inputs_that_need_no_gradient_get_none() -> None:
    q, k, v = inputs()
    k.requires_grad_(False)
    fovea.attention(q, k, v).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None
    with torch.no_grad():
        assert not fovea.attention(q, k, v).requires_grad


def test_checkpointing_and_modules() -> None:
    q, k, v = inputs()
    out = torch.utils.checkpoint.checkpoint(lambda *t: fovea.attention(*t, causal=True), q, k, v, use_reentrant=False)
    (again,) = torch.autograd.grad(out.sum(), q)
    (plain,) = torch.autograd.grad(fovea.attention(q, k, v, causal=True).sum(), q)
    assert torch.equal(again, plain)


def test_refusals_name_the_argument() -> None:
    q, k, v = inputs()
    with pytest.raises(fovea.Unsupported, match="out, lse or row_max"):
        fovea.attention(q, k, v, out=torch.empty(2, 33, 4, 24))
    with pytest.raises(fovea.Unsupported, match="Plan.run: gradients are recorded"):
        fovea.plan(q, k, v).run(q, k, v)
    with pytest.raises(fovea.Unsupported, match="decode: gradients are recorded"):
        fovea.decode(q, fovea.KvCache(k, v, torch.tensor([70, 70])))
    weights = leaf(torch.randn(70))
    with pytest.raises(fovea.Unsupported, match="weights requires a gradient, which a mask"):
        fovea.attention(q, k, v, mask_mod=lambda b, h, i, j: weights[j] > 0)
    scales = {f"{name}_scale": torch.ones(2, 2) for name in "qkv"} | {"quant": "fp8_static"}
    with pytest.raises(fovea.Unsupported, match="k_scale requires a gradient, which scales of a recipe do not have; detach it"):
        fovea.attention(q, k, v, **scales | {"k_scale": leaf(torch.ones(2, 2))})
    codes = [x.detach().to(torch.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(fovea.InvalidArgument, match="q is torch.float8_e4m3fn where gradients are recorded; expected f32, f16 or bf16"):
        fovea.attention(*codes, **scales, sinks=leaf(torch.zeros(4)))
    with pytest.raises(fovea.InvalidArgument, match="score:t is a ndarray"):
        fovea.attention(q, k, v, score_mod=fovea.score_mod("score + t[q_head]", t=np.zeros(4, np.float32)))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_in_a_tensor_is_read_at_each_call(name) -> None:
    q, k, v = inputs()
    number = torch.tensor(0.1)
    for value in (0.5, 4.0):
        number.fill_(value)
        assert torch.equal(fovea.attention(q, k, v, **{name: number}), fovea.attention(q, k, v, **{name: value}))
    with pytest.raises(fovea.Unsupported, match=f"attention: {name} requires a gradient, .* detach it, or"):
        fovea.attention(q, k, v, **{name: torch.nn.Parameter(number)})


def test_a_copied_model_has_programs_of_its_own_parameters() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.rand(4))
            self.score = fovea.score_mod("score + slopes[q_head]", slopes=self.slopes)

        def forward(self, q, k, v):
            return fovea.attention(q, k, v, score_mod=self.score, return_lse=True)[1]

    first = Layer()
    second = copy.deepcopy(first)
    assert second.score.captures["slopes"] is second.slopes and second.slopes is not first.slopes
    second(*inputs()).sum().backward()
    assert second.slopes.grad is not None and first.slopes.grad is None


# ---- What PyTorch's modes ask for ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_dtype_as_for_pytorchs_own(dtype) -> None:
    q, k, v = inputs()
    bias = leaf(torch.zeros(33, 70))
    with torch.autocast("cpu", dtype):
        out = fovea.attention(q, k.bfloat16(), v, bias=bias)
        given = torch.empty(2, 33, 4, 24)
        with torch.no_grad():
            fovea.attention(q, k, v, out=given)  # `out` says its dtype itself
    assert out.dtype == dtype
    out.float().sum().backward()
    assert [x.grad.dtype for x in (q, v, bias)] == [torch.float32] * 3
    low = [x.detach().to(dtype) for x in (q, k.bfloat16(), v)]
    assert torch.equal(out, fovea.attention(*low, bias=bias.detach())) and torch.equal(given, fovea.attention(q, k, v))
    with torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert fovea.attention(q, k, v).dtype == torch.float32


def test_deterministic_mode_is_honoured(monkeypatch, route) -> None:
    from fovea import _abi, _attention, _calls
    from fovea.torch import _autograd

    seen, template = [], _attention.forward_template
    monkeypatch.setattr(_attention, "forward_template", lambda *args: seen.append(args[0].key.deterministic) or template(*args))

    def record(call, *inputs):
        seen.append(not _abi.ForwardArgs.from_buffer_copy(call[0]).allows_nondeterminism)
        return _autograd.record(call, *inputs)

    q, k, v = inputs()
    if route == "ctypes":
        q, k, v = (x.detach() for x in (q, k, v))
    else:
        _calls.extension.set_recorder(record, _autograd._attend)
    try:
        fovea.attention(q, k, v, deterministic=False)
        torch.use_deterministic_algorithms(True)
        fovea.attention(q, k, v, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
        if route == "extension":
            _calls.extension.set_recorder(_autograd.record, _autograd._attend)
    assert seen == [False, True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_dropout(use_reentrant) -> None:
    q, k, v = inputs()

    def layer(*tensors):
        return fovea.attention(*tensors, causal=True, dropout=(0.3, 5)).sin()

    expected = torch.autograd.grad(layer(q, k, v).sum(), [q, k, v])
    torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=use_reentrant).sum().backward()
    for tensor, gradient in zip((q, k, v), expected):
        assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_of_gradients_are_the_same_where_a_mode_watches(layout) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def penalty(*, is_watched: bool):
        q, k, v = (leaf(x[:, :5] if layout == "bshd" else x[:, :5].transpose(1, 2)) for x in inputs())
        bias, sinks, slopes = (leaf(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)) for shape in ((5, 5), (4,), (4,)))
        score = fovea.score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)", slopes=slopes)
        with FlopCounterMode(display=False) if is_watched else contextlib.nullcontext():
            out, lse = fovea.attention(q, k, v, bias=bias, sinks=sinks, score_mod=score, causal=True, layout=layout, return_lse=True)
        leaves = (q, k, v, bias, sinks, slopes)
        first = torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first) + q.sum(), leaves)

    for watched, expected in zip(penalty(is_watched=True), penalty(is_watched=False)):
        assert torch.equal(watched, expected)


def test_gradients_of_gradients_want_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.zeros(1, 4, 2, 8, requires_grad=True)
        (first,) = torch.autograd.grad(fovea.attention(q, q, q).sum(), q, create_graph=True)
        assert first.shape == q.shape
        with pytest.raises(fovea.Unsupported, match="a gradient of a gradient of tensors without memory"):
            torch.autograd.grad(first.sum(), q)


def test_modes_see_an_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = inputs()
    program = fovea.score_mod("score * scale + s[q_head]", s=torch.ones(4), scale=0.5)
    features = {"causal": True, "score_mod": program, "window": (9, None), "sinks": torch.zeros(4), "dropout": (0.1, 3)}
    expected = fovea.attention(q, k, v, **features)
    with Watch():
        out = fovea.attention(q, k, v, **features)
    assert torch.equal(out, expected) and any("fovea.attention" in name for name in seen)
    got, wanted = (torch.autograd.grad(x.square().sum(), [q, k, v]) for x in (out, expected))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted))


def test_fake_tensors_have_shapes() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape) for x in inputs())
        table = torch.empty(4)
        out, lse = fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h], return_lse=True)
    assert tuple(out.shape) == (2, 33, 4, 24) and tuple(lse.shape) == (2, 4, 33)
