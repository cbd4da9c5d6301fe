"""CUDA tensors of PyTorch, beside the same call on the host."""

import pytest

import fovea

torch = pytest.importorskip("torch")
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


def test_gradients_are_refused_by_name() -> None:
    given = [x.requires_grad_() for x in on_gpu()]
    with pytest.raises((fovea.InvalidArgument, fovea.Unsupported)):
        fovea.attention(*given).sum().backward()


def test_tensors_of_two_devices_are_refused() -> None:
    q, k, v = on_gpu()
    with pytest.raises(fovea.InvalidArgument):
        fovea.attention(q, k.cpu(), v)
