"""scaled_dot_product_attention: ours beside PyTorch's, and PyTorch's with our kernel in its place."""

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
has_place = hasattr(torch.nn.attention, "register_flash_attention_impl")


def tensors(*shapes, dtype=None):
    seeds = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=seeds, dtype=torch.float32).to(dtype or torch.float32) for shape in shapes]


Q, K, V = (2, 4, 33, 16), (2, 4, 70, 16), (2, 4, 70, 24)
CASES = {
    "plain": ((Q, K, V), {}),
    "causal": ((Q, K, V), {"is_causal": True}),
    "scale": ((Q, K, V), {"scale": 0.5}),
    "bool mask": ((Q, K, V), {"attn_mask": torch.ones(33, 70, dtype=torch.bool).tril(3)}),
    "mask of each batch": ((Q, K, V), {"attn_mask": tensors((2, 1, 33, 70))[0] > 0}),
    "additive mask": ((Q, K, V), {"attn_mask": tensors((4, 33, 70))[0]}),
    "grouped heads": ((Q, (2, 2, 70, 16), (2, 2, 70, 24)), {"enable_gqa": True}),
    "rank 3": ((Q[1:], K[1:], V[1:]), {"is_causal": True}),
    "rank 2": ((Q[2:], K[2:], V[2:]), {}),
    "rank 5": (((3, *Q), (3, *K), (1, *V)), {"attn_mask": tensors((3, 1, 1, 33, 70))[0] > 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_pytorchs_in_float64(name: str) -> None:
    shapes, features = CASES[name]
    given = tensors(*shapes)
    double = {key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value for key, value in features.items()}
    exact = [tensor.double() for tensor in given]
    if double.pop("enable_gqa", False):  # an old PyTorch does not know it
        exact[1:] = [tensor.repeat_interleave(2, 1) for tensor in exact[1:]]
    expected = sdpa(*exact, **double)
    got = fovea.torch.scaled_dot_product_attention(*given, **features)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 2e-6


def test_dropout_follows_manual_seed() -> None:
    given = tensors(Q, K, V)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(fovea.torch.scaled_dot_product_attention(*given, dropout_p=0.3))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_a_mask_may_learn() -> None:
    q, k, v, bias = (x.requires_grad_() for x in tensors(Q, K, V, (33, 70)))
    got = torch.autograd.grad(fovea.torch.scaled_dot_product_attention(q, k, v, bias).sum(), [q, bias])
    expected = torch.autograd.grad(sdpa(q, k, v, bias).sum(), [q, bias])
    for mine, theirs in zip(got, expected):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_causal_biases_of_pytorch_are_masks(name, is_compiled) -> None:
    """Tensors whose elements nobody has written: their kind says what they mean."""
    q, k, v = tensors((2, 4, 33, 16), (2, 2, 70, 16), (2, 2, 70, 16))
    bias = getattr(pytest.importorskip("torch.nn.attention.bias"), name)(33, 70)

    def call(q, k, v):
        return fovea.torch.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)

    torch._dynamo.reset()
    got = torch.compile(call, backend="eager", fullgraph=True)(q, k, v) if is_compiled else call(q, k, v)
    shift = 37 if name == "causal_lower_right" else 0
    visible = torch.ones(33, 70, dtype=torch.bool).tril(shift)
    expected = sdpa(*(x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))), visible)
    assert (got - expected).abs().max() <= 2e-6


@pytest.mark.parametrize("name, align", [("causal_upper_left", "top_left"), ("causal_lower_right", "bottom_right")])
def test_a_causal_bias_is_no_bias(name, align) -> None:
    q, k = tensors((2, 33, 4, 16), (2, 70, 4, 16))
    bias = getattr(pytest.importorskip("torch.nn.attention.bias"), name)(33, 70)
    cache = fovea.KvCache(k, k, torch.full((2,), 70, dtype=torch.int32))
    refusal = rf"(bias|table) is a CausalBias, which has no elements; expected causal=True, align='{align}' in its place"
    for function, call in {
        "attention": lambda: fovea.attention(q, k, k, bias=bias),
        "Plan.run": lambda: fovea.plan(q, k, k, bias=torch.zeros(33, 70)).run(q, k, k, bias=bias),
        "decode": lambda: fovea.decode(q, cache, bias=bias),
        "bias": lambda: fovea.bias(bias),
    }.items():
        with pytest.raises(fovea.InvalidArgument, match=f"^{function}: {refusal}"):
            call()
    for call in (lambda q: fovea.attention(q, k, k, bias=bias), lambda q: fovea.decode(q, cache, bias=bias)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="is a CausalBias"):
            torch.compile(call, backend="eager", fullgraph=True)(q)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8), (2, 0, 5, 8), (0, 3, 2, 5, 8)], ids=str)
def test_nothing_is_no_error(shape) -> None:
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    out = fovea.torch.scaled_dot_product_attention(q, k, v, torch.ones(shape[-2], shape[-2], dtype=torch.bool))
    out.sum().backward()
    assert out.shape == q.grad.shape == shape
    q, none = torch.zeros(2, 4, 33, 16), torch.zeros(2, 4, 0, 16)
    assert torch.equal(fovea.torch.scaled_dot_product_attention(q, none, none, torch.zeros(33, 0)), q)


def test_refusals() -> None:
    q, k, v = tensors(Q, K, V)
    with pytest.raises(fovea.InvalidArgument, match="beside is_causal"):
        fovea.torch.scaled_dot_product_attention(q, k, v, torch.ones(33, 70), is_causal=True)
    with pytest.raises(fovea.InvalidArgument, match="enable_gqa"):
        fovea.torch.scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    for shape in ((33, 71), (34, 70), (5, 33, 70), (3, 4, 33, 70), (1, 2, 4, 33, 70), ()):
        with pytest.raises(fovea.InvalidArgument, match=r"attn_mask has shape .*; expected one that broadcasts to the scores', \(2, 4, 33, 70\)"):
            fovea.torch.scaled_dot_product_attention(q, k, v, torch.zeros(shape))
    with pytest.raises(fovea.InvalidArgument, match="attn_mask is a list; expected a tensor"):
        fovea.torch.scaled_dot_product_attention(q, k, v, [[True]])


# ---- In PyTorch's place ----


@pytest.fixture
def installed(monkeypatch):
    """Ours in place, and a list of the calls that it gets."""
    if not has_place:
        pytest.skip("this PyTorch has no place for other kernels")
    from fovea.torch import _sdpa

    calls = []
    for name in ("_forward", "_backward"):
        function = getattr(_sdpa, name)

        def counted(*args, _function=function, _name=name, **kwargs):
            calls.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(_sdpa, name, counted)
    fovea.torch.install_sdpa()
    yield calls
    fovea.torch.uninstall_sdpa()


SAME = ((2, 4, 33, 16),) * 3


@pytest.mark.parametrize("features", [{}, {"is_causal": True}, {"attn_mask": torch.ones(33, 33, dtype=torch.bool).tril()}, {"scale": 0.3}])
def test_models_run_as_they_are(installed, features) -> None:
    given = [x.requires_grad_() for x in tensors(*SAME)]
    out = sdpa(*given, **features)
    got = torch.autograd.grad(out.square().sum(), given)
    assert installed == ["_forward", "_backward"]
    doubles = [x.detach().double().requires_grad_() for x in given]
    fovea.torch.uninstall_sdpa()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = sdpa(*doubles, **features)
    wanted = torch.autograd.grad(expected.square().sum(), doubles)
    assert (out - expected).abs().max() <= 2e-6
    for mine, theirs in zip(got, wanted):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("dtype, dim", [(torch.float64, 16), (torch.float32, 520)])
def test_what_we_lack_takes_the_plain_formula(installed, dtype, dim) -> None:
    given = [x.requires_grad_() for x in tensors(*((2, 4, 33, dim),) * 3, dtype=dtype)]
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    for features in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.to(dtype)}):
        out = sdpa(*given, **features)
        got = torch.autograd.grad(out.square().sum(), given)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            expected = sdpa(*given, **features)
        wanted = torch.autograd.grad(expected.square().sum(), given)
        for mine, theirs in zip((out, *got), (expected, *wanted)):
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert installed


def test_pytorch_has_its_own_back_afterwards(installed) -> None:
    given = tensors(*SAME)
    fovea.torch.uninstall_sdpa()
    sdpa(*given)
    assert installed == []


def test_compiled_graphs(installed) -> None:
    given = [x.requires_grad_() for x in tensors(*SAME)]
    compiled = torch.compile(lambda q, k, v: sdpa(q * 2, k, v, is_causal=True) + 1, backend="aot_eager", fullgraph=True)
    out = compiled(*given)
    out.sum().backward()
    assert installed == ["_forward", "_backward"]
    assert torch.allclose(out, sdpa(given[0] * 2, *given[1:], is_causal=True) + 1, atol=1e-6)


@pytest.mark.skipif(has_place, reason="this PyTorch has it")
def test_an_old_pytorch_is_refused_by_name() -> None:
    with pytest.raises(fovea.Unsupported, match="2.10"):
        fovea.torch.install_sdpa()
