"""fovea of PyTorch tensors."""

import numpy as np
import pytest

import fovea
import oracle
from attention_test import SHIFT, qkv

torch = pytest.importorskip("torch")


def tensors() -> list:
    return [torch.from_numpy(array) for array in qkv()]


def test_tensors_in_tensors_out() -> None:
    out, lse = fovea.attention(*tensors(), causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    oracle.assert_close(oracle.Result(out.numpy(), lse.numpy()), *qkv(), visible=lambda p: p.kv_idx <= p.q_idx + SHIFT)


def test_parameters_and_views_are_tensors() -> None:
    q, k, v = (torch.nn.Parameter(x.transpose(1, 2).contiguous(), requires_grad=False) for x in tensors())
    out = fovea.attention(q, k, v, layout="bhsd")
    np.testing.assert_array_equal(out.transpose(1, 2).numpy(), fovea.attention(*qkv()))


def test_bf16_gives_bf16() -> None:
    q, k, v = (x.bfloat16() for x in tensors())
    out = fovea.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    exact = oracle.attention(*(x.float().numpy() for x in (q, k, v))).out
    assert np.abs(out.double().numpy() - exact).max() <= 2 * 2.0**-8 * np.abs(exact).max()


def test_negative_views_have_their_signs() -> None:
    q, k, v = tensors()
    negative = torch.complex(k, k).conj().imag
    assert negative.is_neg()
    expected = fovea.attention(q, -k, v).numpy()
    np.testing.assert_array_equal(fovea.attention(q, negative, v).numpy(), expected)
    np.testing.assert_array_equal(fovea.plan(q, k, v).run(q, negative, v).numpy(), expected)


def test_tensors_without_memory_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(fovea.InvalidArgument, match="k is a"):
        fovea.attention(q, k.to("meta"), v)
    with pytest.raises(fovea.InvalidArgument, match="v is a torch.sparse"):
        fovea.attention(q, k, v.to_sparse())


def test_nested_tensors_are_refused_and_their_rows_are_packed_sequences() -> None:
    parts = [torch.randn(length, 2, 8) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(fovea.InvalidArgument, match=r"q is a nested tensor; expected a dense one: packed rows, values\(\) .*cu_seqlens"):
        fovea.attention(nested, nested, nested)
    rows, offsets = nested.values(), nested.offsets()
    out = fovea.attention(rows, rows, rows, cu_seqlens=offsets)
    for part, got in zip(parts, out.split([3, 5])):
        assert torch.equal(got, fovea.attention(*[part[None]] * 3)[0])


def test_a_cache_of_tensors() -> None:
    q, k, v = tensors()
    cache = fovea.kv_cache(q, 2, 80, 2, 32, head_dim_v=24, page_size=16)
    out = fovea.decode(q, cache, append_k=k, append_v=v)
    np.testing.assert_array_equal(out.numpy(), fovea.attention(*qkv(), causal=True))


def test_a_page_table_takes_no_operator_for_each_page() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(operator)
            return operator(*args, **(kwargs or {}))

    counts = []
    for capacity in (16, 1600):
        seen: list = []
        with Operators():
            cache = fovea.kv_cache(torch.zeros(1), 2, capacity, 2, 8, page_size=16)
        counts.append(len(seen))
    assert counts[0] == counts[1]
    assert torch.equal(cache.page_table, torch.arange(200, dtype=torch.int32).view(2, 100))


@pytest.mark.parametrize("recipe", ["int8", "accurate,hadamard=yes"])
def test_gradients_pass_straight_through_a_recipe(recipe: str) -> None:
    tensors_of = [torch.randn(1, 65, 2, 32) for _ in range(3)]
    gradients = []
    for quant in (recipe, None):
        q, k, v = (x.clone().requires_grad_() for x in tensors_of)
        out, lse = fovea.attention(q, k, v, causal=True, quant=quant, return_lse=True)
        (out.square().sum() + lse.sum()).backward()
        gradients.append([x.grad for x in (q, k, v)])
    for rounded, exact in zip(*gradients):
        error = float((rounded - exact).norm() / exact.norm())
        assert 1e-3 < error < 0.05


def test_recipes_are_refused_in_forward_mode() -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    with pytest.raises(fovea.Unsupported, match="quant is 'int8' where calls are transformed"):
        torch.func.jvp(lambda x: fovea.attention(x, k, v, quant="int8"), (q,), (q,))


def test_an_accuracy_takes_no_recipe_where_gradients_are_recorded(monkeypatch) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(fovea.attention(q, k, v, accuracy=0.05).sum(), q)
    assert torch.equal(gradient, torch.autograd.grad(fovea.attention(q, k, v).sum(), q)[0])
    with monkeypatch.context() as patch:
        patch.setattr(fovea._attention, "recorded", lambda arguments, return_lse: arguments.key)
        assert fovea.attention(q, k, v, accuracy=0.05).quant is None
