"""fovea.attention in compiled graphs, and the operators that it becomes there."""

import re
import shutil

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402
import trace_test  # noqa: E402
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


# ---- Callables, which are traced as parts of the graph ----

follows = fovea.torch._ops._FOLLOWS_SYMBOLS
in_graph = pytest.mark.skipif(not follows, reason="this PyTorch's Dynamo follows no symbols")


@pytest.mark.skipif(follows, reason="this PyTorch's Dynamo follows them")
def test_callables_in_a_graph_of_an_old_pytorch_are_refused_by_name() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda q, k, v: fovea.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="fovea.mask_mod|Unsupported|determine type"):  # some stop before our refusal, with one of their own
        call(*tensors(*SHAPES))


ALL = [("mask_mod", name) for name in trace_test.MASKS] + [("score_mod", name) for name in trace_test.SCORES]


@in_graph
@pytest.mark.parametrize("first", range(0, len(ALL), 11))
def test_callables_that_trace_do_so_in_graphs(first: int, route: str) -> None:
    if route == "ctypes":
        pytest.skip("the graph is the same")
    torch._dynamo.reset()
    chosen = ALL[first : first + 11]
    batch, heads, seqlen_q, seqlen_kv = trace_test.B, trace_test.H, trace_test.Q, trace_test.KV
    given = tensors(*((batch, length, heads, 8) for length in (seqlen_q, seqlen_kv, seqlen_kv)))

    def call(q, k, v):
        return [fovea.attention(q, k, v, **{kind: (trace_test.MASKS if kind == "mask_mod" else trace_test.SCORES)[name]}) for kind, name in chosen]

    re.purge()  # Dynamo sees the first use of everything
    for case, got, expected in zip(chosen, torch.compile(call, backend="eager", fullgraph=True)(*given), call(*given)):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num()), case


class Layer(torch.nn.Module):
    """What callables enclose in models: parameters, buffers, attributes, a tensor of the call, each other."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(tensors((4,))[0])
        self.temperature = torch.nn.Parameter(torch.tensor(0.7))
        self.register_buffer("table", tensors((4, 200))[0])
        self.reach = 9

    def forward(self, q, k, v, ids):
        def near(b, h, i, j):
            return i - j < self.reach

        def together(*masks):
            def joined(b, h, i, j):
                seen = b.new_ones((), dtype=torch.bool)
                for mask in masks:
                    seen = seen & mask(b, h, i, j)
                return seen

            return joined

        return fovea.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s * self.temperature + self.slopes[h] * (j - i) + self.table[h][i],
            mask_mod=together(near, together(lambda b, h, i, j: ids[b, i] <= ids[b, j])),
        )  # fmt: skip


def layer_inputs(length: int, seed: int):
    seeds = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, heads, 8, generator=seeds).requires_grad_() for heads in (4, 2, 2))
    return q, k, v, torch.randint(0, 3, (2, length), generator=seeds, dtype=torch.int32)


@in_graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_closures_learn_and_compile_once(backend: str) -> None:
    torch._dynamo.reset()
    layer = Layer()
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, examples)

    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for length, seed in ((20, 1), (20, 2), (37, 3), (64, 4)):
        given = layer_inputs(length, seed)
        results = []
        for function in (layer, compiled):
            out = function(*given)
            results.append((out, *torch.autograd.grad(out.square().sum(), [*given[:3], layer.slopes, layer.temperature])))
        for got, expected in zip(results[1], results[0]):
            assert torch.equal(got, expected)
    assert len(graphs) == 1


@in_graph
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_flex_attention_in_graphs(whose: str) -> None:
    from torch.nn.attention import flex_attention as theirs

    torch._dynamo.reset()
    given = tensors(*((2, 4, 150, 16),) * 3)
    maker = fovea.torch.create_block_mask if whose == "ours" else theirs.create_block_mask
    block_mask = maker(lambda b, h, i, j: (i >= j) & (i - j < 70), None, None, 150, 150, device="cpu")

    def call(q, k, v):
        return fovea.torch.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (j - i), block_mask=block_mask)

    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(*given), call(*given))


def test_dropout_is_drawn_anew_in_each_run_of_a_graph() -> None:
    torch._dynamo.reset()
    given = [x.requires_grad_() for x in tensors(*((2, 4, 33, 16),) * 3)]
    compiled = torch.compile(
        lambda q, k, v: fovea.torch.scaled_dot_product_attention(q, k, v, dropout_p=0.5), backend="aot_eager", fullgraph=True
    )
    torch.manual_seed(3)
    first, second = compiled(*given), compiled(*given)
    torch.manual_seed(3)
    again = compiled(*given)
    assert torch.equal(first, again) and not torch.equal(first, second)
    (dv,) = torch.autograd.grad(first, given[2], torch.ones_like(first))
    assert torch.allclose((dv * given[2]).sum(), first.sum(), rtol=1e-4)  # linear in v, with the keys that forward kept


def test_seeds_in_memory() -> None:
    torch._dynamo.reset()
    given = tensors(*SHAPES)
    seed, offset = torch.tensor([5]), torch.tensor([0])

    def call(q, k, v, seed):
        return fovea.attention(q, k, v, dropout=fovea.Dropout(0.5, seed, offset))

    expected = fovea.attention(*given, dropout=(0.5, 5))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(*given, seed), expected) and torch.equal(compiled(*given, seed), expected)
    assert not torch.equal(compiled(*given, seed + 1), expected)


def test_seeds_of_64_bits_in_a_graph() -> None:
    torch._dynamo.reset()
    given = tensors(*SHAPES)

    def call(q, k, v, seed):
        return fovea.attention(q, k, v, dropout=fovea.Dropout(0.5, seed))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for seed in (5, 6, 7, -1, 2**63, 2**64 - 1):  # from the second one on a number of the graph
        assert torch.equal(compiled(*given, seed), call(*given, seed)), seed
    with pytest.raises(Exception, match="dropout.seed is 18446744073709551616; expected a number of 64 bits"):
        compiled(*given, 2**64)


def test_autocast_in_a_graph() -> None:
    torch._dynamo.reset()
    given = tensors(*SHAPES)

    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return fovea.attention(q, k, v, causal=True)

    got = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    assert got.dtype == torch.bfloat16 and torch.equal(got, call(*given))
    with pytest.raises(fovea.InvalidArgument, match="q: dtype"):  # as PyTorch's own autocast, it leaves float64
        torch.compile(call, backend="eager", fullgraph=True)(*(x.double() for x in given))


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler here")
def test_inductor(route: str) -> None:
    if route == "ctypes":
        pytest.skip("the graph is the same")
    torch._dynamo.reset()
    layer = Layer() if follows else None

    def call(q, k, v, ids):
        x = fovea.attention(q.sin(), k, v, causal=True, window=(9, 0))
        return (x if layer is None else x + layer(q, k, v, ids)).relu()

    given = layer_inputs(20, 1)
    compiled = torch.compile(call, backend="inductor", fullgraph=True, dynamic=True)
    for mine, theirs in zip(*([out, *torch.autograd.grad(out.sum(), given[:3])] for out in (compiled(*given), call(*given)))):
        assert torch.allclose(mine, theirs, atol=1e-6)


class Exported(torch.nn.Module):
    def forward(self, q, k, v):
        return fovea.attention(q, k, v, causal=True, score_mod=ALIBI) * 2


@pytest.mark.skipif(not has_place, reason="an old PyTorch exports no tensors of programs")
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, tmp_path) -> None:
    torch._dynamo.reset()
    length = torch.export.Dim("length", min=2, max=500)
    shapes = ({1: length},) * 3
    exported = torch.export.export(Exported(), tuple(tensors(*((2, 40, 4, 16),) * 3)), dynamic_shapes=shapes, strict=strict)
    torch.export.save(exported, str(tmp_path / "model.pt2"))
    loaded = torch.export.load(str(tmp_path / "model.pt2")).module()
    given = tensors(*((2, 71, 4, 16),) * 3)
    assert torch.equal(loaded(*given), Exported()(*given))


@pytest.mark.skipif(not has_place, reason="an old PyTorch has no batching of operators here")
def test_vmap_in_a_graph() -> None:
    torch._dynamo.reset()
    q, k, v = (torch.stack([x, -x]) for x in tensors(*SHAPES))

    def call(q, v):
        return torch.func.vmap(lambda q, v: fovea.attention(q, k[0], v, causal=True, return_lse=True))(q, v)

    for got, expected in zip(torch.compile(call, backend="aot_eager", fullgraph=True)(q, v), call(q, v)):
        assert torch.equal(got, expected)


def operator_arguments(**features):
    """Of the operator, as a mode that watches it sees them; the tensors first."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.fovea.attention.default:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    with Watch():
        fovea.attention(*tensors(*SHAPES), **features)
    return seen[0]


@pytest.mark.parametrize("name", CASES)
def test_the_operator_alone(name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = CASES[name]
    (_, _, _, *extra), *arguments = operator_arguments(**features)
    if route == "extension":
        monkeypatch.setattr(fovea.torch._ops, "_call", None)  # Python has no part in it

    def operator(q, k, v):
        return torch.ops.fovea.attention([q, k, v, *extra], *arguments)

    expected = run(fovea.attention, **features, return_lse=True)
    for got, wanted in zip(run(operator), expected):
        assert torch.equal(got, wanted)
    with torch.inference_mode():
        assert torch.equal(operator(*tensors(*SHAPES))[0], expected[0])
    with torch._C._AutoDispatchBelowAutograd():  # where compiled graphs call it
        out, lse = operator(*(x.requires_grad_() for x in tensors(*SHAPES)))
    assert torch.equal(out, expected[0]) and not out.requires_grad and not lse.requires_grad


def test_the_operator_keeps_no_tensor_that_programs_read() -> None:
    import gc
    import weakref

    slopes = SLOPES.clone()
    (given, *features) = operator_arguments(score_mod=fovea.score_mod("score - kept[q_head]", kept=slopes))
    first = torch.ops.fovea.attention(given, *features)[0]
    others = [*given[:3], slopes + 1]
    second = torch.ops.fovea.attention(others, *features)[0]
    assert torch.equal(second, torch.ops.fovea.attention(others, *features)[0]) and (first - second).abs().max() < 1e-5
    gone = weakref.ref(slopes)
    del given, slopes
    gc.collect()
    assert gone() is None


def test_masks_that_would_learn_are_refused_by_the_operator() -> None:
    reach = torch.full((4,), 9.0)
    given, *features = operator_arguments(mask_mod=fovea.mask_mod("kv_idx < reach[q_head]", reach=reach))
    with pytest.raises(fovea.Unsupported, match="reach requires a gradient"):
        torch.ops.fovea.attention([*given[:3], reach.requires_grad_()], *features)


@pytest.mark.parametrize("features", [{"sm_margin": 4}, {"compute_dtype": "f32"}, {"quant": "int8"}])
def test_what_graphs_do_not_take_is_named(features) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: fovea.attention(*given, **features), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{next(iter(features))}.* in a compiled graph; expected none"):
        compiled(*tensors(*SHAPES))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_tensors_in_place_of_numbers_are_named_in_graphs(name) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, number: fovea.attention(q, k, v, **{name: number}), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"attention: {name} is a tensor in a compiled graph; expected a number"):
        compiled(*tensors(*SHAPES), torch.tensor(0.5))
