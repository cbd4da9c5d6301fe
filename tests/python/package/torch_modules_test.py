"""varlen_attn and MultiheadAttention beside the formula in PyTorch, in float64."""

import copy
import inspect
from types import SimpleNamespace

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402
from sdpa_test import tensors  # noqa: E402

LENGTHS_Q, LENGTHS_K = (3, 0, 9), (5, 4, 9)
CU_Q, CU_K = (torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32) for lengths in (LENGTHS_Q, LENGTHS_K))


def dense(q, k, v, visible, scale=None):
    """[seqlen, heads, dim], in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s.masked_fill(~visible, -torch.inf)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1).nan_to_num(), v), s.logsumexp(-1)


def visible_of(rows: int, keys: int, window) -> "torch.Tensor":
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    left, right = (10**6 if size < 0 else size for size in window)
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("keys", ["packed", "some of them", "pages"])
def test_varlen_attn(window, keys) -> None:
    q, k, v = tensors((12, 4, 16), (18, 2, 16), (18, 2, 8))
    used = (2, 4, 7) if keys != "packed" else LENGTHS_K
    features = {} if keys == "packed" else {"seqused_k": torch.tensor(used, dtype=torch.int32)}
    given = k, v
    if keys == "pages":
        features["block_table"] = torch.tensor([[3, 0, 5], [1, 6, 2], [4, 8, 7]], dtype=torch.int32)
        given = [torch.full((9, 4, *x.shape[1:]), torch.nan) for x in (k, v)]
        for sequence, (begin, count) in enumerate(zip(CU_K.tolist(), used)):
            for row in range(count):
                for pages, x in zip(given, (k, v)):
                    pages[features["block_table"][sequence, row // 4], row % 4] = x[begin + row]
    out, lse = fovea.torch.varlen_attn(
        q, *given, CU_Q, CU_K if keys != "pages" else None, 9, 9, window_size=window, enable_gqa=True, scale=0.3,
        return_aux=SimpleNamespace(lse=True), **features,
    )  # fmt: skip
    for sequence, count in enumerate(used):
        rows = slice(CU_Q[sequence], CU_Q[sequence + 1])
        part = slice(CU_K[sequence], CU_K[sequence] + count)
        exact, exact_lse = dense(q[rows], k[part], v[part], visible_of(LENGTHS_Q[sequence], count, window), 0.3)
        assert torch.allclose(out[rows].double(), exact, atol=2e-6)
        assert torch.allclose(lse[:, rows].double(), exact_lse, atol=4e-6)


def test_rows_that_do_not_count_are_sequences_of_their_own() -> None:
    cu_q, cu_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 4, 9, 16])
    used_q, used_k = torch.tensor([2, 0, 9]), torch.tensor([4, 2, -1])  # limited to what there is
    in_use = fovea.torch._varlen.offsets_in_use
    assert [x.tolist() for x in in_use(cu_q, cu_k, seqused_k=used_k)] == [[0, 3, 3, 3, 3, 7, 7], [0, 4, 4, 6, 9, 9, 16]]
    assert [x.tolist() for x in in_use(cu_q, cu_k, seqused_q=used_q)] == [[0, 2, 3, 3, 3, 7, 7], [0, 4, 4, 9, 9, 16, 16]]
    both = [[0, 2, 3, 3, 3, 3, 3, 7, 7, 7], [0, 4, 4, 4, 6, 6, 9, 9, 9, 16]]
    assert [x.tolist() for x in in_use(cu_q, cu_k, used_q, used_k)] == both
    with pytest.raises(fovea.InvalidArgument, match=r"seqused_k has shape \(1,\); expected \[num_sequences\], \(3,\)"):
        in_use(cu_q, cu_k, seqused_k=used_k[:1])


def test_varlen_attn_learns_from_the_keys_that_count() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((12, 4, 16), (18, 4, 16), (18, 4, 8)))
    used = torch.tensor([2, 4, 7], dtype=torch.int32)
    call = lambda k, v, **features: fovea.torch.varlen_attn(q, k, v, CU_Q, CU_K, 9, 9, **features).square().sum()  # noqa: E731
    got = torch.autograd.grad(call(k, v, seqused_k=used), (q, k, v))
    kept = torch.cat([torch.arange(CU_K[i], CU_K[i] + used[i]) for i in range(3)])
    offsets = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    alone = fovea.torch.varlen_attn(q, k[kept], v[kept], CU_Q, offsets, 9, 9).square().sum()
    assert all(map(torch.equal, got, torch.autograd.grad(alone, (q, k, v))))


def test_varlen_attn_learns_and_has_pytorchs_signature() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((12, 4, 16), (18, 4, 16), (18, 4, 8)))
    fovea.torch.varlen_attn(q, k, v, CU_Q, CU_K, 9, 9).square().sum().backward()
    assert all(x.grad.abs().max() > 0 for x in (q, k, v))
    theirs = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    parameters = set(inspect.signature(theirs).parameters)
    assert parameters - {"is_causal"} <= set(inspect.signature(fovea.torch.varlen_attn).parameters)


def test_varlen_attn_refuses_by_name() -> None:
    q, k, v = tensors((12, 4, 16), (18, 2, 16), (18, 2, 8))
    with pytest.raises(fovea.InvalidArgument, match="enable_gqa"):
        fovea.torch.varlen_attn(q, k, v, CU_Q, CU_K, 9, 9)
    with pytest.raises(fovea.InvalidArgument, match="block_table without seqused_k"):
        fovea.torch.varlen_attn(q, k, v, CU_Q, CU_K, 9, 9, enable_gqa=True, block_table=torch.zeros(3, 1, dtype=torch.int32))
    with pytest.raises(fovea.InvalidArgument, match="window_size has 1"):
        fovea.torch.varlen_attn(q, k, v, CU_Q, CU_K, 9, 9, enable_gqa=True, window_size=(3,))


# ---- The module ----


def module(**features):
    torch.manual_seed(0)
    made = fovea.torch.MultiheadAttention(32, 4, 2, window=(7, 0), softcap=5.0, sinks=True, **features)
    torch.nn.init.normal_(made.sinks)
    return made


def formula(layer, x, context=None, positions=None):
    """The same of a layer in float64, in the words of a textbook."""
    width = layer.head_dim
    q, k, v = (
        (torch.nn.functional.linear(y, w, b)).unflatten(-1, (-1, width))
        for y, w, b in zip(
            (x, x if context is None else context, x if context is None else context),
            layer.in_proj.weight.split(layer._widths), layer.in_proj.bias.split(layer._widths),
        )
    )  # fmt: skip
    if layer.cos is not None:
        half = layer.cos.shape[-1]
        places = torch.arange(x.shape[1]).expand(x.shape[0], -1) if positions is None else positions
        turn = torch.polar(torch.ones(()).double(), places[..., None, None] * 100.0 ** (-torch.arange(half).double() / half))

        def turned(y):
            z = torch.complex(y[..., :half], y[..., half : 2 * half]) * turn
            return torch.cat([z.real, z.imag, y[..., 2 * half :]], -1)

        q, k = turned(q), turned(k)
    k, v = (y.repeat_interleave(2, 2) for y in (k, v))
    s = 5 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / width**0.5 / 5)
    s = s.masked_fill(~visible_of(x.shape[1], k.shape[1], (7, 0)), -torch.inf)
    logits = torch.cat([s, layer.sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    return layer.out_proj(torch.einsum("bhij,bjhd->bihd", logits.softmax(-1)[..., :-1], v).flatten(2))


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
@pytest.mark.parametrize("has_positions", [False, True])
def test_the_module_is_the_formula_and_learns(rotary_dim, has_positions) -> None:
    layer = module(rotary_dim=rotary_dim, rotary_base=100.0)
    exact = copy.deepcopy(layer).double()
    (x,) = tensors((2, 13, 32))
    positions = torch.randperm(26, generator=torch.Generator().manual_seed(0)).reshape(2, 13) if has_positions else None
    results = []
    for function, given in ((layer, x), (lambda y, positions: formula(exact, y, positions=positions), x.double())):
        given = given.clone().requires_grad_()
        out = function(given, positions=positions)
        owner = layer if function is layer else exact
        results.append((out, *torch.autograd.grad(out.square().sum(), [given, *owner.parameters()])))
    for got, expected in zip(*results):
        assert (got - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())


def test_context() -> None:
    layer = module()
    x, context = tensors((2, 13, 32), (2, 20, 32))
    expected = formula(copy.deepcopy(layer).double(), x.double(), context.double())
    assert (layer(x, context) - expected).abs().max() <= 1e-5
    with pytest.raises(fovea.Unsupported, match="context beside a rotary"):
        module(rotary_dim=4)(x, context)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("rotary_dim", [0, 6])
def test_token_by_token_is_all_at_once(page_size, rotary_dim) -> None:
    layer = module(rotary_dim=rotary_dim).eval()
    (x,) = tensors((2, 13, 32))
    with torch.no_grad():
        expected = layer(x, is_causal=True)
        cache = layer.make_cache(2, 16, page_size=page_size)
        begin, parts = 0, []
        for count in (6, 1, 1, 3, 2):
            parts.append(layer(x[:, begin : begin + count], cache=cache))
            cache.seqlens += count
            begin += count
    assert (torch.cat(parts, 1) - expected).abs().max() <= 2e-6
    with pytest.raises(fovea.Unsupported, match="gradients are recorded"):
        layer(x[:, :1], cache=cache)


def test_dropout_while_training_and_a_whole_graph() -> None:
    layer = module(dropout=0.5, rotary_dim=4)
    (x,) = tensors((2, 13, 32))
    torch.manual_seed(1)
    one, two = layer(x, is_causal=True), layer(x, is_causal=True)
    assert not torch.equal(one, two)
    layer.eval()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x, is_causal=True), layer(x, is_causal=True), atol=1e-6)


def test_wrong_sizes_are_refused() -> None:
    for sizes in ((32, 5), (32, 4, 3)):
        with pytest.raises(fovea.InvalidArgument, match="divide"):
            fovea.torch.MultiheadAttention(*sizes)
    with pytest.raises(fovea.InvalidArgument, match="rotary_dim is 3"):
        fovea.torch.MultiheadAttention(32, 4, rotary_dim=3)
