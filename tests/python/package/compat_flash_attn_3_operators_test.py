"""torch.ops.flash_attn_3: every way in which rows can lie, graphs, PyTorch's own word "FA3", and another package's operators."""

import importlib
import itertools

import pytest

import fovea

torch = pytest.importorskip("torch")
import flash_formula as formula  # noqa: E402
from compat_flash_attn_test import ANGLES, DIM, HEADS, make_cache, offsets, qkv, route, rows_of  # noqa: E402, F401
from fovea import compat  # noqa: E402
from fovea.compat import flash_attn_3 as flash  # noqa: E402

OPS = torch.ops.flash_attn_3
NAMES = ("fwd", "bwd", "fwd_combine", "get_scheduler_metadata")
MASKS = {"is_causal": True, "window_size_left": 6, "softcap": 5.0}
FEATURES = {"causal": True, "window": (6, -1), "softcap": 5.0}


@pytest.fixture(autouse=True)
def operators():
    compat.install("flash_attn_3")
    yield
    compat.uninstall("flash_attn_3")


# ---- Where rows lie, and how many count ----

SEQLENS = 5, 9
USED = {"q": torch.tensor([3, 5], dtype=torch.int32), "k": torch.tensor([9, 4], dtype=torch.int32)}


def placed(x, kind: str):
    return x if kind == "padded" else x.flatten(0, 1)


def arguments(q_kind: str, k_kind: str, used: str):
    """Of the operators: offsets and rows in use."""
    given = {f"cu_seqlens_{side}": offsets(n) for side, n, kind in zip("qk", SEQLENS, (q_kind, k_kind)) if kind == "packed"}
    return given | {f"seqused_{side}": USED[side] for side in used}


def poisoned(tensors, used: str):
    """NaN in rows that do not count."""
    for x, side in zip(tensors, "qkk"):
        for sequence, length in enumerate(USED[side] if side in used else ()):
            x[sequence, length:] = torch.nan
    return tensors


def by_formula(tensors, used: str):
    """(out, lse), sequence by sequence; 0 and -inf in rows that do not count."""
    q, k, v = tensors
    out, lse = torch.zeros_like(q), q.new_full((2, HEADS, SEQLENS[0]), -torch.inf)
    for b in range(2):
        rows, keys = (slice(USED[side][b] if side in used else None) for side in "qk")
        out[b, rows], lse[b, :, rows] = (x[0] for x in formula.attention(q[b : b + 1, rows], k[b : b + 1, keys], v[b : b + 1, keys], **FEATURES))
    return out, lse


def as_padded(out, lse):
    return (out, lse) if out.dim() == 4 else (out.unflatten(0, (2, -1)), lse.unflatten(1, (2, -1)).transpose(0, 1))


@pytest.mark.parametrize("used", ["", "q", "k", "qk"])
@pytest.mark.parametrize("q_kind, k_kind", list(itertools.product(["padded", "packed"], ["padded", "packed", "pages"])))
def test_rows_lie_in_every_way(q_kind, k_kind, used) -> None:
    tensors = poisoned(qkv(*SEQLENS, heads_k=2), used)
    q, (k, v) = placed(tensors[0], q_kind), (placed(x, k_kind) if k_kind != "pages" else x for x in tensors[1:])
    given = arguments(q_kind, k_kind, used)
    if q_kind == "packed":
        given["max_seqlen_q"] = SEQLENS[0]
    if k_kind == "pages":
        (k, given["page_table"]), (v, _) = (make_cache(x, page_size=3) for x in (k, v))
        given.setdefault("seqused_k", torch.full((2,), SEQLENS[1], dtype=torch.int32))
    out, lse, *accumulated = OPS.fwd(q, k, v, **given, **MASKS)
    written = torch.full_like(q, 7.0).transpose(-1, -2).contiguous().transpose(-1, -2)  # any strides
    again, lse_again, *_ = OPS.fwd(q, k, v, out=written, **given, **MASKS)
    assert again.data_ptr() == written.data_ptr() and torch.equal(written, out) and torch.equal(lse, lse_again)
    assert [x.shape for x in accumulated] == [(0,), (0,)]
    formula.assert_close(as_padded(out, lse), lambda dtype: by_formula([x.to(dtype) for x in tensors], used))


@pytest.mark.parametrize("used", ["", "q", "k", "qk"])
@pytest.mark.parametrize("q_kind, k_kind", list(itertools.product(["padded", "packed"], ["padded", "packed"])))
def test_gradients_of_rows_that_lie_in_every_way(q_kind, k_kind, used) -> None:
    tensors = poisoned(qkv(*SEQLENS, heads_k=2), used)
    rows = [placed(x, kind) for x, kind in zip(tensors, (q_kind, k_kind, k_kind))]
    given = arguments(q_kind, k_kind, used)
    out, lse, *_ = OPS.fwd(*rows, **given, **({"max_seqlen_q": 5} if q_kind == "packed" else {}), **MASKS)
    weights = formula.draw(2, SEQLENS[0], HEADS, DIM, seed=9)
    buffers = [torch.full_like(x, 7.0) for x in rows]
    dout = placed(weights, q_kind)
    *made, delta = OPS.bwd(dout, *rows, out, lse, *buffers, **given, deterministic=True, **MASKS)[:4]
    assert all(x.data_ptr() == buffer.data_ptr() for x, buffer in zip(made, buffers))
    for x, buffer in zip(OPS.bwd(dout, *rows, out, lse, **given, deterministic=True, sm_margin=2, **MASKS), buffers):
        assert torch.equal(x, buffer)
    assert torch.allclose(delta, (dout * out).sum(-1).transpose(-1, -2), atol=1e-5)
    finite = [x.nan_to_num(0.0) for x in tensors]

    def expected(dtype):
        return formula.gradients(lambda *x: by_formula(x, used)[0], [x.to(dtype) for x in finite])

    formula.assert_close([x.reshape(like.shape) for x, like in zip(buffers, tensors)], expected)


def test_new_keys_turn_and_join_a_cache() -> None:
    q, new = formula.draw(2, 1, HEADS, DIM), [formula.draw(2, 1, 2, DIM, seed=seed) for seed in (1, 2)]
    caches = [formula.draw(3, 12, 2, DIM, seed=seed) for seed in (3, 4)]
    lengths, slots = (torch.tensor(x, dtype=torch.int32) for x in ([5, 8], [2, 0]))
    expected_caches = [x.clone() for x in caches]
    angles = {"rotary_cos": ANGLES[0], "rotary_sin": ANGLES[1]}
    expected = flash.flash_attn_with_kvcache(
        q, *expected_caches, *new, cache_seqlens=lengths, cache_batch_idx=slots, **angles, rotary_interleaved=False, causal=True
    )
    # By position, as FlashAttention-3's own Python calls it.
    out, *_ = OPS.fwd(
        q, *caches, *new, None, None, None, None, None, None, lengths, None, None, None, slots, None, *angles.values(), None, None, None,
        None, None, True, -1, -1, 0, 0.0, False, None, 0, None, 0,
    )  # fmt: skip
    assert torch.equal(out, expected) and all(map(torch.equal, caches, expected_caches))


def test_a_second_product_and_chunks() -> None:
    q, k, v = formula.draw(2, 5, HEADS, 8), formula.draw(2, 11, 1, 8, seed=1), formula.draw(2, 11, 1, 24, seed=2)
    qv, features = formula.draw(2, 5, HEADS, 24, seed=3), {"attention_chunk": 4}
    assert torch.equal(OPS.fwd(q, k, v, None, None, qv, **features)[0], flash.flash_attn_func(q, k, v, qv=qv, **features))
    joined = formula.draw(2, 11, 1, 32, seed=4)
    v, k, used = joined[..., :24], joined[..., 24:], torch.tensor([3, 5], dtype=torch.int32)
    out = OPS.fwd(q, k, v, q_v=qv, seqused_q=used, seqused_k=torch.tensor([11, 11], dtype=torch.int32))[0]
    for b in range(2):
        expected = flash.flash_attn_func(*(x[b : b + 1] for x in (q[:, : used[b]], k, v)), qv=qv[b : b + 1, : used[b]])
        assert torch.equal(out[b, : used[b]], expected[0]) and not out[b, used[b] :].any()


def test_splits_are_joined() -> None:
    q, k, v = qkv(5, 12)
    parts = [OPS.fwd(q, *part)[:2] for part in zip(k.chunk(3, 1), v.chunk(3, 1))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]).transpose(-1, -2)
    out, lse = OPS.fwd_combine(outs, lses, None, torch.bfloat16)
    assert torch.equal(out, flash.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0]) and out.dtype == torch.bfloat16
    written = torch.empty_like(out)
    assert OPS.fwd_combine(outs, lses, written)[0].data_ptr() == written.data_ptr() and torch.equal(written, out)
    assert torch.allclose(lse.transpose(-1, -2), OPS.fwd(q, k, v)[1], atol=1e-6)


def test_metadata_has_no_elements() -> None:
    metadata = OPS.get_scheduler_metadata(2, 1, 12, HEADS, HEADS, DIM, DIM, torch.bfloat16, USED["k"], num_splits=3)
    assert (metadata.shape, metadata.dtype) == ((0,), torch.int32)
    tensors = qkv(1, 12)
    assert torch.equal(OPS.fwd(*tensors, scheduler_metadata=metadata)[0], OPS.fwd(*tensors)[0])


# ---- Graphs ----


def append(q, k_cache, v_cache, k, v, lengths):
    return OPS.fwd(q, k_cache, v_cache, k, v, seqused_k=lengths, is_causal=True)[0] + 1


def append_alone(*inputs):
    """What nobody reads is left out of graphs, unless it writes."""
    OPS.fwd(*inputs[:-1], seqused_k=inputs[-1])
    return inputs[1].sum()


def into(q, k, v, out):
    OPS.fwd(q, k, v, out=out, is_causal=True)
    return out + 1


def backward(q, k, v, dout):
    out, lse, *_ = OPS.fwd(q, k, v, is_causal=True)
    dk = torch.zeros_like(k)
    made = OPS.bwd(dout, q, k, v, out, lse, dk=dk, is_causal=True)
    return made[0], dk, made[2], made[3]


def combine(outs, lses):
    return OPS.fwd_combine(outs, lses, out_dtype=torch.float16)


def metadata(seqused_k):
    return OPS.get_scheduler_metadata(2, 1, 12, HEADS, HEADS, DIM, DIM, torch.bfloat16, seqused_k)


NEW = [formula.draw(2, 1, HEADS, DIM, seed=seed) for seed in (4, 5, 6)]
CACHED = (NEW[0], *qkv(12, 12)[1:], *NEW[1:], torch.tensor([3, 7], dtype=torch.int32))
GRAPHS = {
    "append": (append, CACHED), "append_alone": (append_alone, CACHED),
    "into": (into, (*qkv(5, 11, 2), torch.zeros(2, 5, HEADS, DIM))),
    "backward": (backward, (*qkv(5, 11, 2), formula.draw(2, 5, HEADS, DIM, seed=7))),
    "combine": (combine, (formula.draw(3, 2, 5, HEADS, DIM), formula.draw(3, 2, HEADS, 5).transpose(-1, -2))),
    "metadata": (metadata, (USED["k"],)),
}  # fmt: skip


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5), reason="graphs of PyTorch 2.4 do not take results written in place")
@pytest.mark.parametrize("function, inputs", GRAPHS.values(), ids=GRAPHS)
def test_graphs_take_them(function, inputs) -> None:
    eager, compiled = ([x.clone() for x in inputs] for _ in range(2))
    expected = function(*eager)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*compiled)
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected)))
    assert all(map(torch.equal, compiled, eager))  # what is written is written by both


@pytest.mark.parametrize("q_kind", ["padded", "packed"])
def test_shapes_are_known_without_elements(q_kind) -> None:
    tensors = [placed(x, q_kind) for x in qkv(5, 5, 2)]
    given = {"cu_seqlens_q": offsets(5), "cu_seqlens_k": offsets(5), "max_seqlen_q": 5} if q_kind == "packed" else {}
    expected = OPS.fwd(*tensors, **given)
    meta = OPS.fwd(*(x.to("meta") for x in tensors), **{name: x if name == "max_seqlen_q" else x.to("meta") for name, x in given.items()})
    assert [(x.shape, x.stride(), x.dtype) for x in meta] == [(x.shape, x.stride(), x.dtype) for x in expected]


# ---- Registration ----


def test_modules_of_the_package_are_found() -> None:
    assert importlib.import_module("flash_attn_3._C").__name__ == "fovea.compat.flash_attn_3.operators"
    assert hasattr(importlib.import_module("flash_attn_interface"), "flash_attn_func")


def test_operators_go_and_come_with_the_drop_in() -> None:
    for _ in range(2):
        compat.uninstall("flash_attn_3")
        assert not any(hasattr(OPS, name) for name in NAMES)
        compat.install("flash_attn_3")
        assert OPS.fwd(*qkv(2, 3))[0].shape == (2, 2, HEADS, DIM)


def test_another_packages_operators_stay() -> None:
    compat.uninstall("flash_attn_3")
    theirs = torch.library.Library("flash_attn_3", "FRAGMENT")
    theirs.define("fwd(Tensor q) -> Tensor")
    theirs.impl("fwd", lambda q: q + 1, "CPU")
    try:
        compat.install("flash_attn_3")
        assert OPS.fwd(torch.tensor(1)) == 2 and not hasattr(OPS, "bwd")
        compat.uninstall("flash_attn_3")
        assert OPS.fwd(torch.tensor(1)) == 2
    finally:
        theirs._destroy()


SCHEMAS = {
    "fwd": "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k page_table "
    "kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale is_causal=False "
    "window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 is_rotary_interleaved=False scheduler_metadata num_splits=0 "
    "pack_gqa sm_margin=0 -> 4",
    "bwd": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k softmax_scale "
    "is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0 -> 8",
    "fwd_combine": "out_partial lse_partial out out_dtype -> 2",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k "
    "cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size max_seqlen_k_new=0 is_causal=False window_size_left=-1 "
    "window_size_right=-1 attention_chunk=0 has_softcap=False num_splits=0 pack_gqa sm_margin=0 -> 1",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_defaults_are_the_peers(name) -> None:
    schema = getattr(OPS, name).default._schema
    words = [x.name if x.default_value is None else f"{x.name}={x.default_value}" for x in schema.arguments]
    assert " ".join([*words, "->", str(len(schema.returns))]) == SCHEMAS[name]


# ---- PyTorch's own FlashAttention-3 ----


def test_pytorch_finds_and_runs_them(monkeypatch) -> None:
    """It asks for a GPU of compute capability 9.0; that question apart, its code runs here."""
    fa3 = pytest.importorskip("torch.nn.attention._fa3")
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("FA3")
    try:
        assert current_flash_attention_impl() == "FA3"
        monkeypatch.setattr(fa3, "_fa3_common_support_error", lambda *_: None)
        q, k, v = (x.bfloat16().transpose(1, 2) for x in qkv(7, 7))  # [batch, heads, seqlen, dim]
        out, lse, *_ = fa3._fa3_scaled_dot_product_flash_attention_forward_impl_default(q, k, v, 0.0, True)
        expected, expected_lse = fovea.attention(q, k, v, causal=True, layout="bhsd", return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        dout = torch.ones_like(out)
        backward_ = fa3._fa3_scaled_dot_product_flash_attention_backward_impl
        got = backward_(dout, q, k, v, out, lse, None, None, 7, 7, 0.0, True, None, None)
        gradients = fovea.attention_backward(dout, q, k, v, out, lse, causal=True, layout="bhsd")
        assert all(map(torch.equal, got, (gradients.q, gradients.k, gradients.v)))
        rows, cu = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)], offsets(7)
        packed, *_ = fa3._fa3_flash_attention_forward_impl_default(*rows, cu, cu, 7, 7, 0.0, True, False)
        assert torch.equal(packed, expected.transpose(1, 2).flatten(0, 1))
    finally:
        restore_flash_attention_impl()


def test_float8_has_descales() -> None:
    codes = [x.to(torch.float8_e4m3fn) for x in qkv(9, 13, heads_k=2)]
    descales = [torch.full((len(codes[0]), 2), scale) for scale in (0.5, 0.75, 0.25)]
    names = ("q_descale", "k_descale", "v_descale")
    out, lse, *_ = OPS.fwd(*codes, **dict(zip(names, descales)))
    expected = flash.flash_attn_func(*codes, **dict(zip(names, descales)), return_attn_probs=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


# ---- Errors ----

Q, K, V = qkv(2, 8)
REFUSED = {
    "float8": (lambda: OPS.fwd(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), seqused_k=USED["k"]), "q is torch.float8_e4m3fn; expected f32, f16 or bf16"),
    "splits": (lambda: OPS.fwd(Q, K, V, num_splits=257), "num_splits > 256 is not supported"),
    "offsets": (lambda: OPS.fwd(Q, K, V, page_table=USED["k"][:, None], cu_seqlens_k=offsets(4)), "cu_seqlens_k over a cache; expected seqused_k"),
    "margin": (lambda: OPS.fwd(Q, K, V, sm_margin=-1), "sm_margin is -1"),
    "margin of gradients": (lambda: OPS.bwd(Q, Q, K, V, Q, OPS.fwd(Q, K, V)[1], sm_margin=-1), "sm_margin is -1"),
    "angles": (lambda: OPS.fwd(Q, K, V, rotary_cos=ANGLES[0], rotary_sin=ANGLES[1]), "rotary_cos without k; expected new keys"),
    "used": (lambda: OPS.fwd(Q, K, V, K[:, :1], V[:, :1], rotary_cos=ANGLES[0], rotary_sin=ANGLES[1], seqused_q=USED["q"], seqused_k=USED["k"]),
             "seqused_q beside rotary_cos; expected packed queries"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_wrong_calls_are_refused(call, message) -> None:
    with pytest.raises((fovea.InvalidArgument, fovea.Unsupported), match=message):
        call()
