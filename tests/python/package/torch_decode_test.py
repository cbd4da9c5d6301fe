"""Decoding and appending in compiled graphs, and the operators that they become there."""

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402
from sdpa_test import tensors  # noqa: E402

BATCH, CAPACITY, HEADS, HEADS_KV, DIM, NEW = 2, 24, 4, 2, 16, 3
LENGTHS = torch.tensor([5, 17], dtype=torch.int32)
ANGLES = torch.arange(CAPACITY)[:, None] / 10.0 ** torch.arange(DIM // 2)
ROTARY = fovea.Rotary(ANGLES.cos(), ANGLES.sin())
SLOPES = tensors((HEADS,))[0]
PACKED = {"cu_seqlens": torch.tensor([0, 1, NEW], dtype=torch.int32), "max_seqlen_q": 2}

CASES = {
    "plain": {},
    "window, softcap and sinks": {"window": (9, 0), "softcap": 3.0, "sinks": SLOPES, "causal": True},
    "rotary": {"rotary": ROTARY},
    "positions": {"rotary": ROTARY._replace(positions=torch.tensor([[1, 2, 4], [3, 0, 2]], dtype=torch.int32), is_interleaved=True)},
    "programs": {
        "score_mod": fovea.score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)", slopes=SLOPES),
        "mask": fovea.causal() & fovea.mask_mod("kv_idx > 3"),
    },
    "a callable": {"mask_mod": lambda b, h, q, k: k != 5},
    "texts": {"score_mod": "score * 2", "mask_mod": "kv_idx > 3"},
    "alibi, a scale, every key": {"alibi": SLOPES, "scale": 0.3, "sees_all_keys": True},
    "a shared prefix": {"shared_prefix": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def route() -> str:
    """In place of conftest's: who runs the calls is tested elsewhere. Nothing compiled before counts."""
    torch._dynamo.reset()
    return "extension"


def cache(kind="contiguous"):
    k, v = tensors((BATCH, CAPACITY, HEADS_KV, DIM), (BATCH, CAPACITY, HEADS_KV, DIM))
    if kind == "pages":
        table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)
        return fovea.KvCache(k.reshape(-1, 8, HEADS_KV, DIM), v.reshape(-1, 8, HEADS_KV, DIM), LENGTHS, page_table=table)
    if kind == "slots":
        return fovea.KvCache(k, v, LENGTHS, batch_idx=LENGTHS.flip(0) // 16, left_padding=LENGTHS // 4)
    return fovea.KvCache(k, v, LENGTHS)


def tokens(is_packed=False):
    made = tensors((BATCH, NEW, HEADS, DIM), (BATCH, NEW, HEADS_KV, DIM), (BATCH, NEW, HEADS_KV, DIM))
    return [x[0] for x in made] if is_packed else made


def run(call, kind, is_packed=False):
    """What the call gives of tokens and a new cache, and what stands in the cache then."""
    given = cache(kind)
    return *call(given, *tokens(is_packed)), given.k, given.v


APPENDING = [*(("contiguous", name) for name in CASES), ("pages", "rotary"), ("slots", "plain"), ("pages", "packed")]
READING = [("contiguous", "plain"), ("slots", "programs"), ("pages", "packed"), ("contiguous", "a shared prefix")]


@pytest.mark.parametrize(
    "appends, kind, name", [*((True, *case) for case in APPENDING), *((False, *case) for case in READING)]
)
def test_a_graph_is_whole_and_gives_the_same(appends, kind, name) -> None:
    features = PACKED if name == "packed" else CASES[name]

    def call(cache, q, k, v):
        new = {"append_k": k, "append_v": v} if appends else {}
        return fovea.decode(q, cache, **new, **features, return_lse=True)

    expected = run(call, kind, name == "packed")
    got = run(torch.compile(call, backend="aot_eager", fullgraph=True), kind, name == "packed")
    assert all(map(torch.equal, got, expected))


def step(cache, q, k, v):
    """Two tokens behind each other, lengths kept in the graph."""
    fovea.append_to_cache(cache, k[:, :1], v[:, :1], ROTARY)
    cache.seqlens = cache.seqlens + 1
    first = fovea.decode(q[:, :1], cache)
    return first, fovea.decode(q[:, 1:2], cache, append_k=k[:, 1:2], append_v=v[:, 1:2])


def test_writes_come_before_what_reads_them() -> None:
    assert all(map(torch.equal, run(torch.compile(step, backend="aot_eager", fullgraph=True), "pages"), run(step, "pages")))


def test_an_append_that_nobody_reads_is_no_dead_code() -> None:
    def call(cache, q, k, v):
        fovea.append_to_cache(cache, k, v)
        return (q + 1,)

    got = run(torch.compile(call, backend="aot_eager", fullgraph=True), "slots")
    assert all(map(torch.equal, got, run(call, "slots"))) and not torch.equal(got[1], cache("slots").k)


@pytest.mark.skipif(not fovea.torch._decode._TAKES_TWO_VIEWS, reason="graphs of this PyTorch copy two views of one tensor")
@pytest.mark.parametrize("is_made_within", [False, True])
def test_values_may_be_columns_of_keys(is_made_within) -> None:
    def call(rows, values, q, new):
        view = rows[..., :12] if is_made_within else values
        out = fovea.decode(q, fovea.KvCache(rows, view, LENGTHS), append_k=new)
        return out, rows + 0

    def run_on(call):
        rows, q, new = tensors((BATCH, CAPACITY, 1, DIM), (BATCH, NEW, HEADS, DIM), (BATCH, NEW, 1, DIM))
        return *call(rows, rows[..., :12], q, new), rows

    assert all(map(torch.equal, run_on(torch.compile(call, backend="aot_eager", fullgraph=True)), run_on(call)))


def test_values_that_are_columns_of_keys_are_refused_where_graphs_copy_both(monkeypatch) -> None:
    monkeypatch.setattr(fovea.torch._decode, "_TAKES_TWO_VIEWS", False)
    rows, new = tensors((BATCH, CAPACITY, 1, DIM), (BATCH, NEW, 1, DIM))
    given, q = fovea.KvCache(rows, rows[..., :12], LENGTHS), tokens()[0]
    for call in (lambda: fovea.append_to_cache(given, new), lambda: fovea.decode(q, given, append_k=new)):
        with pytest.raises(Exception, match="columns of its keys, in a graph of PyTorch"):
            torch.compile(call, backend="eager", fullgraph=True)()


def test_shapes_may_be_dynamic() -> None:
    compiled = torch.compile(lambda q, cache, n: fovea.decode(q, cache, max_seqlen_q=n), backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, length in ((1, 5), (3, 2), (2, 7)):
        q, k, v = tensors(*((batch, n, 2, 8) for n in (length, 9, 9)))
        given = fovea.KvCache(k, v, torch.arange(batch, dtype=torch.int32) + 7)
        assert torch.equal(compiled(q, given, 0), fovea.decode(q, given))


def test_modes_see_operators() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(k_cache, v_cache, q, k, v):
        given = fovea.KvCache(k_cache, v_cache, LENGTHS)
        fovea.append_to_cache(given, k, v)
        return fovea.decode(q, given)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = cache()
        made = call(*(mode.from_tensor(x) for x in (given.k, given.v, *tokens())))
        assert made.shape == tokens()[0].shape and type(made).__name__ == "FakeTensor"
    given = cache()
    graph = make_fx(call)(given.k, given.v, *tokens())
    names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "fovea" in name or "cache" in name or "decode" in name] == ["append_to_cache.default", "decode.default"]
    assert torch.equal(graph(cache().k, cache().v, *tokens()), call(cache().k, cache().v, *tokens()))


@pytest.mark.parametrize("name", ["decode", "decode_append", "append_to_cache"])
def test_opcheck(name, monkeypatch) -> None:
    """What the operator writes to is what its schema says, its shapes are those without elements, and graphs of it are right."""
    operator, seen = getattr(torch.ops.fovea, name), []
    # Not called: what it would write must be new to the cache.
    monkeypatch.setattr(torch.ops.fovea, name, lambda *args: seen.append(args) or (None, None))
    if name == "append_to_cache":
        fovea.torch._decode.append_to_cache(cache(), *tokens()[1:], ROTARY, None)
    else:
        new = dict(zip(("append_k", "append_v"), tokens()[1:])) if name == "decode_append" else {}
        fovea.torch._decode.decode(tokens()[0], cache(), **new, sinks=SLOPES, mask_mod="kv_idx > 3")
    monkeypatch.undo()
    torch.library.opcheck(operator.default, seen[0])


def test_a_gradient_is_refused_when_it_is_asked_for() -> None:
    def call(cache, q, k, v):
        return fovea.decode(q * 2, cache, append_k=k, append_v=v)

    for compiled in (torch.compile(call, backend=backend, fullgraph=True) for backend in ("eager", "aot_eager")):
        q, k, v = tokens()
        q.requires_grad_()
        out = compiled(cache(), q, k, v)
        assert torch.equal(out.detach(), call(cache(), q.detach(), k, v))
        with pytest.raises(fovea.Unsupported, match="decode: a gradient through a KV cache; expected none"):
            out.sum().backward()


def test_what_graphs_do_not_take_is_named() -> None:
    compiled = torch.compile(lambda cache, q: fovea.decode(q, cache, quant="int8"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="quant in a compiled graph; expected none of them"):
        compiled(cache(), tokens()[0])


def test_graphs_write_codes_and_scales() -> None:
    made, results = tokens(), []
    for call in (fovea.decode, torch.compile(fovea.decode, fullgraph=True)):
        given = fovea.kv_cache(made[0], BATCH, CAPACITY, HEADS_KV, DIM, dtype="e4m3", page_size=8)
        for written in (given.k.view(torch.int8), given.v.view(torch.int8), given.k_scale, given.v_scale):
            written.zero_()
        fovea.append_to_cache(given, made[1], made[2])
        given.seqlens += NEW
        out = call(made[0], given, append_k=made[1], append_v=made[2], causal=True)
        results.append((out, given.k.view(torch.int8), given.v.view(torch.int8), given.k_scale, given.v_scale))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    assert (results[1][3] > 0).sum() == 2 * NEW * BATCH * HEADS_KV


def test_graphs_append_codes() -> None:
    made = tokens()
    eager, compiled = (fovea.kv_cache(made[0], BATCH, CAPACITY, HEADS_KV, DIM, dtype="i8") for _ in range(2))
    fovea.append_to_cache(eager, made[1], made[2])
    torch.compile(fovea.append_to_cache, fullgraph=True)(compiled, made[1], made[2])
    assert torch.equal(compiled.k[:, :NEW], eager.k[:, :NEW]) and torch.equal(compiled.v_scale[:, :NEW], eager.v_scale[:, :NEW])
