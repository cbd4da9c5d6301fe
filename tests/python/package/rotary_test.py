"""Rotary embedding of rows by themselves, against the plain formula in float64."""

import numpy as np
import pytest

import fovea
from attention_test import draw

MAX_POSITIONS = 40


def angles(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    rates = np.arange(MAX_POSITIONS)[:, None] / 7.0 ** np.arange(pairs)
    return np.cos(rates).astype(np.float32), np.sin(rates).astype(np.float32)


def plain(x, cos, sin, positions, is_interleaved=False, is_conjugate=False) -> np.ndarray:
    """Of rows [..., heads, head_dim] that stand at `positions`."""
    pairs = cos.shape[1]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if is_interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    c, s = (table.astype(np.float64)[positions][..., None, :] for table in (cos, sin))
    s = -s if is_conjugate else s
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    result = x.astype(np.float64)
    result[..., first], result[..., second] = a * c - b * s, a * s + b * c
    return result


def assert_turned(got: np.ndarray, expected: np.ndarray) -> None:
    # Two products and a sum in float32, of numbers below 8.
    np.testing.assert_allclose(got, expected, rtol=0, atol=4 * 2.0**-24 * 8)


@pytest.mark.parametrize("is_conjugate", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("pairs", [0, 1, 6, 9])  # none, the least, some columns are copied, all are turned
def test_equals_the_plain_formula(pairs: int, is_interleaved: bool, is_conjugate: bool) -> None:
    x, tables = draw((2, 17, 3, 18)), angles(pairs)
    got = fovea.rotary(x, *tables, is_interleaved=is_interleaved, is_conjugate=is_conjugate)
    assert_turned(got, plain(x, *tables, np.arange(17), is_interleaved, is_conjugate))
    back = fovea.rotary(got, *tables, is_interleaved=is_interleaved, is_conjugate=not is_conjugate)
    np.testing.assert_allclose(back, x, atol=2e-6)


def test_positions_and_offsets_say_where_rows_stand() -> None:
    x, tables = draw((2, 5, 3, 16)), angles(8)
    positions = np.int64([[3, 3, 39, 0, 7], [1, 2, 3, 4, 5]])
    assert_turned(fovea.rotary(x, *tables, positions=positions), plain(x, *tables, positions))
    offsets = np.int32([11, 0])
    assert_turned(fovea.rotary(x, *tables, offsets=offsets), plain(x, *tables, offsets[:, None] + np.arange(5)))


@pytest.mark.parametrize("offsets", [None, np.int32([5, 0, 20])])
def test_packed_rows_stand_in_their_sequence(offsets) -> None:
    x, tables = draw((9, 2, 8)), angles(4)
    places = np.int64([0, 1, 2, 0, 1, 2, 3])
    if offsets is not None:
        places = places + np.repeat(offsets, [3, 0, 4])
    got = fovea.rotary(x, *tables, offsets=offsets, cu_seqlens=np.int32([0, 3, 3, 7]))
    assert_turned(got[:7], plain(x[:7], *tables, places))
    np.testing.assert_array_equal(got[7:], x[7:])  # behind the last sequence


def test_in_place_and_into_strided_memory() -> None:
    x, tables = draw((2, 5, 3, 16)), angles(6)
    expected = plain(x, *tables, np.arange(5))
    memory = np.full((2, 5, 6, 16), np.nan, np.float32)
    out = memory[:, :, ::2]
    assert fovea.rotary(x, *tables, out=out) is out
    assert_turned(out, expected)
    assert np.isnan(memory[:, :, 1::2]).all()
    heads_first = np.ascontiguousarray(x.swapaxes(1, 2))
    assert_turned(fovea.rotary(heads_first, *tables, layout="bhsd").swapaxes(1, 2), expected)
    assert fovea.rotary(x, *tables, out=x) is x
    assert_turned(x, expected)


def test_refusals_name_the_argument() -> None:
    x, (cos, sin) = draw((2, 5, 3, 16)), angles(8)
    before = x.copy()
    for arguments, message in (
        ({"layout": "sbhd"}, "layout is 'sbhd'; expected one of 'bshd', 'bhsd'"),
        ({"positions": np.zeros((2, 5), np.int32), "offsets": np.zeros(2, np.int32)}, "positions is given beside offsets"),
        ({"positions": np.full((2, 5), 40)}, "stands at position 40; expected 0 to 39"),
        ({"out": x[:, ::-1]}, "overlap"),
        ({"cu_seqlens": np.int32([0, 5])}, r"expected \[total, num_heads, head_dim\]"),
    ):
        with pytest.raises(fovea.InvalidArgument, match=message):
            fovea.rotary(x, cos, sin, **arguments)
    with pytest.raises(fovea.InvalidArgument, match="for a rotary_dim of 2 x 9; expected at most 16"):
        fovea.rotary(x, *angles(9))
    with pytest.raises(fovea.InvalidArgument, match="sin is a list"):
        fovea.rotary(x, cos, [1.0])
    x.flags.writeable = False
    with pytest.raises(fovea.InvalidArgument, match="out is read-only"):
        fovea.rotary(x, cos, sin, out=x)
    np.testing.assert_array_equal(x, before)


# ---- PyTorch ----


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    import fovea.torch  # noqa: F401

    return module


def turned_by_torch(torch, x, cos, sin, is_interleaved=False):
    """In operations that PyTorch differentiates itself."""
    pairs = cos.shape[1]
    c, s = (table[: x.shape[1], None].to(x.dtype) for table in (cos, sin))
    if is_interleaved:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        mixed = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        mixed = torch.cat([a * c - b * s, a * s + b * c], -1)
    return torch.cat([mixed, x[..., 2 * pairs :]], -1)


def torch_case(torch, pairs=6):
    x = torch.from_numpy(draw((2, 5, 3, 16)))
    return x, *(torch.from_numpy(table) for table in angles(pairs))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_the_gradient_turns_back(torch, is_interleaved: bool) -> None:
    x, cos, sin = torch_case(torch)
    x.requires_grad_()
    seed = torch.from_numpy(draw((2, 5, 3, 16), 7)).requires_grad_()
    ours = torch.autograd.grad(fovea.rotary(x, cos, sin, is_interleaved=is_interleaved), x, seed, create_graph=True)[0]
    expected = torch.autograd.grad(turned_by_torch(torch, x, cos, sin, is_interleaved), x, seed, create_graph=True)[0]
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=0)
    # Linear in the seed, too: the gradient's gradient turns forth.
    direction = torch.from_numpy(draw((2, 5, 3, 16), 8))
    moved, exact = (torch.autograd.grad(gradient, seed, direction)[0] for gradient in (ours, expected))
    torch.testing.assert_close(moved, exact, atol=2e-6, rtol=0)


def test_in_place_records_its_gradient(torch) -> None:
    x, cos, sin = torch_case(torch)
    leaf = x.clone().requires_grad_()
    y = leaf * 2
    assert fovea.rotary(y, cos, sin, out=y) is y
    torch.testing.assert_close(y.detach(), turned_by_torch(torch, 2 * x, cos, sin), atol=4e-6, rtol=0)
    y.sum().backward()
    again = x.clone().requires_grad_()
    turned_by_torch(torch, 2 * again, cos, sin).sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad, atol=4e-6, rtol=0)


def test_transforms(torch) -> None:
    x, cos, sin = torch_case(torch)
    direction = torch.from_numpy(draw((2, 5, 3, 16), 7))
    out, moved = torch.func.jvp(lambda t: fovea.rotary(t, cos, sin), (x,), (direction,))
    torch.testing.assert_close(out, turned_by_torch(torch, x, cos, sin), atol=2e-6, rtol=0)
    torch.testing.assert_close(moved, turned_by_torch(torch, direction, cos, sin), atol=2e-6, rtol=0)
    batched = torch.stack([x, direction], 1)
    got = torch.func.vmap(lambda t: fovea.rotary(t, cos, sin), in_dims=1, out_dims=1)(batched)
    torch.testing.assert_close(got, torch.stack([out, moved], 1))
    gradient = torch.func.vmap(torch.func.grad(lambda t: (fovea.rotary(t, cos, sin) * direction).sum()), in_dims=1)(batched)
    torch.testing.assert_close(gradient[1], fovea.rotary(direction, cos, sin, is_conjugate=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_operator_is_what_pytorch_expects(torch) -> None:
    x, cos, sin = torch_case(torch)
    x.requires_grad_()
    offsets = torch.tensor([3, 0])
    torch.library.opcheck(torch.ops.fovea.rotary, (x, cos, sin, None, offsets, None, True, False, "bshd"))


def test_a_compiled_graph_holds_it(torch) -> None:
    x, cos, sin = torch_case(torch)
    compiled = torch.compile(lambda t: fovea.rotary(t * 2, cos, sin).sum(), backend="aot_eager", fullgraph=True)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(first).backward()
    turned_by_torch(torch, second * 2, cos, sin).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, atol=2e-6, rtol=0)


def test_what_pytorch_cannot_record_is_refused(torch) -> None:
    x, cos, sin = torch_case(torch)
    recorded = x.clone().requires_grad_()
    with pytest.raises(fovea.Unsupported, match="out where gradients are recorded"):
        fovea.rotary(recorded, cos, sin, out=torch.empty_like(x))
    with pytest.raises(fovea.Unsupported, match="cos wants a gradient"):
        fovea.rotary(x, cos.clone().requires_grad_(), sin)
    with pytest.raises(fovea.InvalidArgument, match="sin is a ndarray; expected a tensor"):
        fovea.rotary(recorded, cos, sin.numpy())
    negative = torch.complex(x, x).conj().imag
    with pytest.raises(fovea.InvalidArgument, match="out is a negative view"):
        fovea.rotary(negative, cos, sin, out=negative)
    torch.testing.assert_close(fovea.rotary(negative, cos, sin), fovea.rotary(-x, cos, sin))
