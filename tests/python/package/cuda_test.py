"""CUDA tensors of PyTorch, beside the same call on the host."""

import functools

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402
from sdpa_test import tensors  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPES = ((2, 133, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
TOLERANCE = 2 * 2.0**-8  # a rounding of the output and as much of rounded probabilities, in bf16


def on_gpu():
    return [x.cuda() for x in tensors(*SHAPES, dtype=torch.bfloat16)]


def on_host(**features):
    return fovea.attention(*tensors(*SHAPES, dtype=torch.bfloat16), **features)


def close(got, expected) -> bool:
    assert got.is_cuda
    return (got.cpu().float() - expected.float()).abs().max() <= TOLERANCE * expected.float().abs().max()


def test_forward_on_the_current_stream() -> None:
    given = on_gpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        filled = [torch.empty_like(x) for x in given]
        for x, y in zip(filled, given):
            x.copy_(y)
        out, lse = fovea.attention(*filled, causal=True, window=(90, 0), return_lse=True)
    stream.synchronize()
    expected, exact_lse = on_host(causal=True, window=(90, 0), return_lse=True)
    assert close(out, expected) and (lse.cpu() - exact_lse).abs().max() < 1e-2


def test_callables_read_tensors_there() -> None:
    slopes = tensors((4,))[0]
    there = slopes.cuda()
    got = fovea.attention(*on_gpu(), score_mod=lambda s, b, h, q, k: s + there[h] * (k - q), mask_mod=lambda b, h, q, k: k < q + 90)
    expected = on_host(score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q), mask_mod=lambda b, h, q, k: k < q + 90)
    assert close(got, expected)


def test_a_plan_in_a_captured_graph() -> None:
    given = on_gpu()
    plan = fovea.plan(*given, causal=True)
    out = torch.empty_like(given[0])
    plan.run(*given, out=out)
    torch.cuda.synchronize()
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*given, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, on_host(causal=True))


def test_decode_from_pages() -> None:
    def run(device):
        q, k, v = (x.to(device) for x in tensors(*SHAPES, dtype=torch.bfloat16))
        cache = fovea.kv_cache(q, 2, 256, 2, 64, page_size=16)
        return fovea.decode(q, cache, append_k=k, append_v=v)

    assert close(run("cuda"), run("cpu"))


def test_a_decode_plan_in_a_captured_graph() -> None:
    q, k, v = on_gpu()
    cache = fovea.kv_cache(q, 2, 256, 2, 64, page_size=16)
    tokens = {"append_k": k, "append_v": v}
    plan = fovea.plan_decode(q, cache, **tokens, window=(90, None))
    out = plan.run(q, cache, **tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan.run(q, cache, **tokens)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, out)
    assert torch.equal(out, fovea.decode(q, cache, **tokens, window=(90, None)))


def test_a_backward_plan() -> None:
    call = on_gpu()
    out, lse = fovea.attention(*call, causal=True, return_lse=True)
    plan = fovea.plan_backward(*call, causal=True)
    got = plan.run(torch.ones_like(out), *call, out, lse)
    expected = fovea.attention_backward(torch.ones_like(out), *call, out, lse, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(got[:3], expected[:3]))


def test_probabilities_are_refused_there() -> None:
    with pytest.raises(fovea.Unsupported, match="q lives on cuda:0; expected the cpu"):
        fovea.attention_probabilities(*on_gpu()[:2])


@pytest.mark.parametrize("is_packed", [False, True])
def test_scores_of_dropout_are_made_there(is_packed) -> None:
    from fovea.compat.flash_attn import flash_attn_interface as interface

    def scores(tensors):
        features = interface._features(None, True, (60, 0), 0.0, None, True, 200)
        dropout = fovea.Dropout(0.3, *(torch.tensor([x], device=tensors[0].device) for x in (7, 0)))
        rows = [x.flatten(0, 1) for x in tensors[:2]] if is_packed else tensors[:2]
        offsets = [torch.arange(3, dtype=torch.int32, device=x.device) * x.shape[1] for x in tensors[:2]] if is_packed else []
        return interface._dropped_scores(*rows, dropout, features, interface._Sequences(133, 200, *offsets))

    got, expected = scores(on_gpu()), scores(tensors(*SHAPES, dtype=torch.bfloat16))
    assert got.is_cuda and torch.equal(torch.signbit(got).cpu()[..., :133, :200], torch.signbit(expected)[..., :133, :200])
    assert (got.cpu() - expected).abs().max() <= 2.0**-8


def test_rotary_and_its_gradient() -> None:
    def run(device):
        x = tensors(*SHAPES)[0].to(device).requires_grad_()
        rates = torch.arange(200.0, device=device)[:, None] / 10.0 ** torch.arange(24, device=device)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            offsets = torch.tensor([60, 3], device=device)
            turned = fovea.rotary(x, rates.cos(), rates.sin(), offsets=offsets, is_interleaved=True)
            turned.square().sum().backward()
        if stream is not None:
            stream.synchronize()
        return turned.detach().cpu(), x.grad.cpu()

    for got, expected in zip(run("cuda"), run("cpu")):
        torch.testing.assert_close(got, expected, atol=4e-5, rtol=0)


# ---- fovea.torch ----

BHSD = ((2, 4, 133, 64), (2, 4, 200, 64), (2, 4, 200, 64))


def exact_sdpa(given, **features):
    """In float64, on the host."""
    features = {key: x.cpu() if torch.is_tensor(x) else x for key, x in features.items()}
    return torch.nn.functional.scaled_dot_product_attention(*(x.cpu().double() for x in given), **features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("features", [{}, {"is_causal": True}, {"scale": 0.2}, {"attn_mask": True}])
def test_sdpa_beside_float64(dtype, features) -> None:
    given = [x.cuda() for x in tensors(*BHSD, dtype=dtype)]
    if "attn_mask" in features:
        features = {"attn_mask": torch.ones(133, 200, dtype=torch.bool, device="cuda").tril(40)}
    exact = exact_sdpa(given, **features)
    got = fovea.torch.scaled_dot_product_attention(*given, **features)
    assert got.is_cuda and got.dtype == dtype
    allowed = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-10, torch.float32: 4e-6}[dtype]
    assert (got.cpu().double() - exact).abs().max() <= allowed * exact.abs().max()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["words", "callables"])
def test_compiled_graphs(backend, kind) -> None:
    if kind == "callables" and not fovea.torch._ops._FOLLOWS_SYMBOLS:
        pytest.skip("this PyTorch's Dynamo follows no symbols")
    torch._dynamo.reset()
    slopes = tensors((4,))[0].cuda()

    def call(q, k, v):
        if kind == "words":
            return fovea.attention(q, k, v, causal=True, window=(90, 0), softcap=5.0)
        return fovea.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i), mask_mod=lambda b, h, i, j: j <= i + 67)

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for length in (200, 150):
        q, k, v = on_gpu()
        given = q, k[:, :length].contiguous(), v[:, :length].contiguous()
        assert torch.equal(compiled(*given), call(*given))


def test_compiled_graphs_decode_there() -> None:
    torch._dynamo.reset()

    def call(q, k, v, cache):
        first = fovea.decode(q[:, :100], cache, append_k=k[:, :100], append_v=v[:, :100])
        cache.seqlens = cache.seqlens + 100
        return first, fovea.decode(q[:, 100:101], cache, append_k=k[:, 100:101], append_v=v[:, 100:101])

    def run(call):
        q, k, v = on_gpu()
        cache = fovea.kv_cache(q, 2, 256, 2, 64, page_size=16)
        cache.k.zero_(), cache.v.zero_()
        return *call(q, k, v, cache), cache.k, cache.v, cache.seqlens

    assert all(map(torch.equal, run(torch.compile(call, backend="inductor", fullgraph=True)), run(call)))


def test_flex_attention_there() -> None:
    given = [x.cuda() for x in tensors(*BHSD, dtype=torch.bfloat16)]
    ids = (torch.arange(200, device="cuda") // 60).int()
    block_mask = fovea.torch.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 133, 200)
    got = fovea.torch.flex_attention(*given, block_mask=block_mask)
    mask = (ids[:133, None] == ids).cpu()
    exact = exact_sdpa(given, attn_mask=mask)
    assert (got.cpu().double() - exact).abs().max() <= TOLERANCE * exact.abs().max()


def test_varlen_attn_there() -> None:
    q, k, v = (x[0].cuda() for x in tensors(*SHAPES, dtype=torch.bfloat16))
    offsets = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 50, 133], [0, 90, 200])]
    got = fovea.torch.varlen_attn(q, k, v, *offsets, 83, 110, window_size=(40, 0), enable_gqa=True)
    host = fovea.torch.varlen_attn(*(x.cpu() for x in (q, k, v, *offsets)), 83, 110, window_size=(40, 0), enable_gqa=True)
    assert close(got, host)


def test_a_captured_graph_draws_dropout_anew() -> None:
    given = [x.cuda() for x in tensors(*BHSD, dtype=torch.bfloat16)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fovea.torch.scaled_dot_product_attention(*given, dropout_p=0.5)  # kernels are compiled outside of the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = fovea.torch.scaled_dot_product_attention(*given, dropout_p=0.5)
    results = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        results.append(out.clone())
    assert not torch.equal(*results)


def test_seeds_in_memory_draw_what_numbers_draw() -> None:
    given = on_gpu()
    seed, offset = (torch.tensor([n], device="cuda") for n in (5, 3))
    got = fovea.attention(*given, dropout=fovea.Dropout(0.5, seed, offset))
    assert torch.equal(got, fovea.attention(*given, dropout=fovea.Dropout(0.5, 5, 3)))


def test_the_module_generates_there() -> None:
    torch.manual_seed(0)
    layer = fovea.torch.MultiheadAttention(256, 4, 2, rotary_dim=64, window=(30, 0), dtype=torch.bfloat16).eval()
    (x,) = tensors((2, 13, 256), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x, is_causal=True)
        layer.cuda()
        assert close(layer(x.cuda(), is_causal=True), expected)
        cache, parts = layer.make_cache(2, 16, page_size=8), []
        for part in x.cuda().split([6, 1, 1, 5], 1):
            parts.append(layer(part, cache=cache))
            cache.seqlens += part.shape[1]
    assert (torch.cat(parts, 1).cpu().float() - expected.float()).abs().max() <= 2 * TOLERANCE * expected.float().abs().max()


def test_autocast_and_vmap_there() -> None:
    q, k, v = (x.cuda() for x in tensors(*SHAPES))
    with torch.autocast("cuda", torch.bfloat16):
        assert fovea.attention(q, k, v).dtype == torch.bfloat16
    many = [torch.stack([x, -x]) for x in on_gpu()]
    got = torch.func.vmap(lambda *x: fovea.attention(*x, causal=True))(*many)
    expected = torch.stack([fovea.attention(*(x[place] for x in many), causal=True) for place in range(2)])
    assert torch.equal(got, expected)


@pytest.mark.parametrize("attention", ["llama", "gpt-oss"])
def test_models_of_transformers_there(attention) -> None:
    pytest.importorskip("transformers")
    import transformers_test

    fovea.torch.install_transformers()
    model = transformers_test.build(attention).cuda()
    tokens, visible = (x.cuda() for x in transformers_test.padded("left"))
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=visible).logits[visible.bool()]
        model.set_attn_implementation("fovea")
        got = model(input_ids=tokens, attention_mask=visible).logits[visible.bool()]
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()  # PyTorch's products there are of TF32 where it chooses


@pytest.mark.parametrize("features", [{}, {"causal": True, "softcap": 5.0}, {"window": (90, 0), "dropout": (0.2, 3)}])
def test_gradients_beside_the_host(features) -> None:
    seed = tensors((2, 133, 4, 64))[0].bfloat16()
    results = []
    for given in (on_gpu(), tensors(*SHAPES, dtype=torch.bfloat16)):
        given = [x.requires_grad_() for x in given]
        out = fovea.attention(*given, **features)
        results.append(torch.autograd.grad(out, given, seed.to(out.device)))
    for got, expected in zip(*results):
        assert got.is_cuda
        assert (got.cpu().float() - expected.float()).abs().max() <= 4 * TOLERANCE * expected.float().abs().max()


def test_gradients_on_the_current_stream() -> None:
    given = [x.requires_grad_() for x in on_gpu()]
    expected = torch.autograd.grad(fovea.attention(*given, causal=True).float().square().sum(), given)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what runs on another stream reads what is not there yet
        late = [x.detach().mul(1.0).requires_grad_() for x in given]
        got = torch.autograd.grad(fovea.attention(*late, causal=True).float().square().sum(), late)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_calls_from_c_and_from_python_are_equal(monkeypatch) -> None:
    from fovea import _quick

    given = on_gpu()
    plan = fovea.plan(*given, causal=True)
    results = []
    for attend in (_quick.attend, None):
        monkeypatch.setattr(_quick, "attend", attend)
        out, lse = fovea.attention(*given, causal=True, return_lse=True)
        results.append((out, lse, plan.run(*given)))
    assert all(torch.equal(x, y) and x.device == y.device for x, y in zip(*results))


def captured_gradients(device, dtype, is_dense: bool):
    """Two captures of one program: of a dense bias or a table by distance, and of slopes that multiply."""
    given = [x.to(device) for x in tensors(*SHAPES, dtype=dtype)]
    table, slopes = (x.to(device, dtype).requires_grad_() for x in tensors((4, 133, 200) if is_dense else (4, 40), (4,)))
    if is_dense:
        out = fovea.attention(*given, causal=True, score_mod=lambda s, b, h, i, j: s + table[h, i, j] + slopes[h] * s)
    else:
        out = fovea.attention(
            *given, causal=True, score_mod=lambda s, b, h, i, j: s + table[h, (i - j).clamp(-20, 19) + 20] + slopes[h] * (j - i) / 64
        )
    seed = tensors((2, 133, 4, 64))[0].to(device, dtype)
    return [x.cpu() for x in torch.autograd.grad(out, (table, slopes), seed)]


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_what_is_captured(dtype, is_dense) -> None:
    got, again, expected = (captured_gradients(device, dtype, is_dense) for device in ("cuda", "cuda", "cpu"))
    for one, same, there in zip(got, again, expected):
        assert torch.equal(one, same)  # in whatever order CTAs add
        assert (one.float() - there.float()).abs().max() <= 4 * TOLERANCE * there.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_mode(dtype) -> None:
    """Of everything that moves, out and its tangent, as on the CPU."""
    shapes = (*SHAPES, (4,))
    both = tensors(*shapes, *shapes, dtype=dtype)
    given, tangents = both[:4], both[4:]

    def attend(q, k, v, slopes):
        return fovea.attention(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i) / 64)

    def run(device):
        return torch.func.jvp(attend, *(tuple(x.to(device) for x in group) for group in (given, tangents)))

    for got, expected in zip(run("cuda"), run("cpu")):
        assert got.is_cuda and got.dtype == dtype
        assert (got.cpu().float() - expected.float()).abs().max() <= 4 * TOLERANCE * expected.float().abs().max()


def test_gradients_of_gradients_are_refused_by_name() -> None:
    given = [x.requires_grad_() for x in on_gpu()]
    (dq,) = torch.autograd.grad(fovea.attention(*given).sum(), given[0], create_graph=True)
    with pytest.raises((fovea.InvalidArgument, fovea.Unsupported)):
        dq.sum().backward()


def test_workspace_is_pytorchs_memory(monkeypatch) -> None:
    lent, returned = [], []
    alloc, delete = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *given: (lent.append(given), alloc(*given))[1])
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: (returned.append(address), delete(address))[1])
    given = [x.requires_grad_() for x in on_gpu()]
    out = fovea.attention(*given)
    torch.autograd.grad(out, given, torch.ones_like(out))
    plans = [make(*[x.detach() for x in given]) for make in (functools.partial(fovea.plan, return_lse=True), fovea.plan_backward)]
    place = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    assert lent == [(plan.workspace_bytes, *place) for plan in plans if plan.workspace_bytes > 0]
    assert len(lent) == len(returned) > 0


def test_tensors_of_two_devices_are_refused() -> None:
    q, k, v = on_gpu()
    with pytest.raises(fovea.InvalidArgument):
        fovea.attention(q, k.cpu(), v)
