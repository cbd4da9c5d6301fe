"""fovea.compat.flash_attn against the dense formula: each function, its defaults, its conventions and its errors."""

import inspect

import pytest

import fovea

torch = pytest.importorskip("torch")
import flash_formula as formula  # noqa: E402
from fovea.compat import flash_attn  # noqa: E402
from fovea.compat._drop_ins import DROP_INS  # noqa: E402
from fovea.compat.flash_attn import bert_padding, flash_attn_interface as interface  # noqa: E402
from fovea.compat.flash_attn.layers import rotary  # noqa: E402

HEADS, DIM = 4, 16


@pytest.fixture(autouse=True)
def route() -> str:
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


def qkv(seqlen_q: int, seqlen_k: int, heads_k: int = HEADS):
    shapes = ((2, seqlen_q, HEADS, DIM), (2, seqlen_k, heads_k, DIM), (2, seqlen_k, heads_k, DIM))
    return [formula.draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def offsets(seqlen: int):
    return torch.tensor([0, seqlen, 2 * seqlen], dtype=torch.int32)


def packed_attention(function, q, k, v, features):
    """Two sequences of one length, packed, by a function of (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    lengths = q.shape[1], k.shape[1]
    out, lse, scores = function(*map(offsets, lengths), *lengths, **features, return_attn_probs=True)
    return out.unflatten(0, (2, -1)), lse.unflatten(1, (2, -1)).transpose(0, 1), scores


def by_func(q, k, v, **features):
    return flash_attn.flash_attn_func(q, k, v, **features, return_attn_probs=True)


def by_kvpacked(q, k, v, **features):
    return flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **features, return_attn_probs=True)


def by_qkvpacked(q, k, v, **features):
    return flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **features, return_attn_probs=True)


def by_varlen(q, k, v, **features):
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    return packed_attention(lambda *args, **kwargs: flash_attn.flash_attn_varlen_func(*rows, *args, **kwargs), q, k, v, features)


def by_varlen_kvpacked(q, k, v, **features):
    rows = q.flatten(0, 1), torch.stack([k, v], 2).flatten(0, 1)
    return packed_attention(lambda *args, **kwargs: flash_attn.flash_attn_varlen_kvpacked_func(*rows, *args, **kwargs), q, k, v, features)


def by_varlen_qkvpacked(q, k, v, **features):
    rows = torch.stack([q, k, v], 2).flatten(0, 1)
    call = lambda cu, _, longest, __, **kwargs: flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, longest, **kwargs)  # noqa: E731
    return packed_attention(call, q, k, v, features)


def by_pages(q, k, v, **features):
    """Pages of 3 keys, those of the two sequences interleaved."""
    num_pages = -(-k.shape[1] // 3)
    pages = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3 * num_pages - x.shape[1]), value=torch.nan) for x in (k, v)]
    pages = [x.unflatten(1, (num_pages, 3)).transpose(0, 1).flatten(0, 1) for x in pages]
    table = torch.arange(2 * num_pages, dtype=torch.int32).reshape(num_pages, 2).T
    call = lambda *args, **kwargs: flash_attn.flash_attn_varlen_func(q.flatten(0, 1), *pages, *args, **kwargs, block_table=table)  # noqa: E731
    return packed_attention(call, q, k, v, features)


def by_kvcache(q, k, v, **features):
    out, lse = flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), **features, return_softmax_lse=True)
    return out, lse, None


CROSS = {"func": by_func, "kvpacked": by_kvpacked, "varlen": by_varlen, "varlen_kvpacked": by_varlen_kvpacked, "pages": by_pages, "kvcache": by_kvcache}
SELF = {"qkvpacked": by_qkvpacked, "varlen_qkvpacked": by_varlen_qkvpacked}
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
# Names of the formula's; ours where they differ.
FEATURES = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (3, 2)}, "left": {"window": (2, -1)}, "right": {"window": (-1, 1)},
    "causal_window": {"causal": True, "window": (4, 3)}, "window_tensor": {"window": torch.tensor([1, 4])}, "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5}, "alibi": {"alibi": SLOPES}, "alibi_causal": {"alibi": torch.stack([SLOPES, 2 * SLOPES]), "causal": True},
    "softcap_alibi_window": {"softcap": 2.0, "alibi": SLOPES, "window": (5, 0)},
}  # fmt: skip
OURS = {"scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes"}


def ours(features):
    return {OURS.get(name, name): value for name, value in features.items()}


def check(door, tensors, features) -> None:
    out, lse, _ = door(*tensors, **ours(features))
    assert not (lse == -torch.inf).any()  # the peer's is +inf where a row sees no key
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    formula.assert_close((out, lse), lambda dtype: formula.attention(*(x.to(dtype) for x in tensors), **features))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("door", CROSS)
@pytest.mark.parametrize("seqlens", [(5, 11), (11, 5)], ids=str)  # the second has rows that see no key
def test_results_are_the_formulas(door, features, seqlens) -> None:
    check(CROSS[door], qkv(*seqlens, heads_k=2), features)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("door", SELF)
def test_results_of_one_tensor_are_the_formulas(door, features) -> None:
    check(SELF[door], qkv(9, 9), features)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("door", [door for door in (*CROSS, *SELF) if door not in ("pages", "kvcache")])
def test_gradients_are_the_formulas(door, features) -> None:
    tensors = qkv(9, 9)
    got = formula.gradients(lambda *x: {**CROSS, **SELF}[door](*x, **ours(features))[0], tensors)
    formula.assert_close(got, lambda dtype: formula.gradients(lambda *x: formula.attention(*x, **features)[0], [x.to(dtype) for x in tensors]))


def test_a_packed_tensor_has_one_gradient() -> None:
    tensors = torch.stack(qkv(9, 9), 2)
    (got,) = formula.gradients(lambda x: flash_attn.flash_attn_qkvpacked_func(x, causal=True), [tensors])
    expected = formula.gradients(lambda *x: flash_attn.flash_attn_func(*x, causal=True), tensors.unbind(2))
    assert torch.equal(got, torch.stack(expected, 2))


def test_without_probs_out_stands_alone() -> None:
    q, k, v = qkv(5, 11)
    out, lse, scores = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), out) and scores.shape == (0,)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, v), out)


def test_a_right_side_of_all_keys_is_open() -> None:
    q, k, v = qkv(13, 4)
    check(by_func, (q, k, v), {})
    expected, _ = formula.attention(q, k, v)
    assert torch.allclose(flash_attn.flash_attn_func(q, k, v, window_size=(-1, 4)), expected, atol=1e-6)
    assert not torch.allclose(flash_attn.flash_attn_func(q, k, v, window_size=(-1, 3)), expected, atol=1e-3)


def test_sequences_of_any_length() -> None:
    lengths_q, lengths_k = (3, 0, 9), (5, 4, 2)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (lengths_q, lengths_k))
    q, k, v = formula.draw(sum(lengths_q), HEADS, DIM), *(formula.draw(sum(lengths_k), 2, DIM, seed=seed) for seed in (1, 2))
    # More than the longest: the lengths only bound.
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 50, 70, causal=True, return_attn_probs=True)
    assert lse.shape == (HEADS, sum(lengths_q))
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone = flash_attn.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True, return_attn_probs=True)
        assert torch.equal(out[None, rows], alone[0]) and torch.equal(lse[None, :, rows], alone[1])


# ---- Dropout ----


@pytest.mark.parametrize("door", [by_func, by_varlen], ids=lambda door: door.__name__)
def test_dropout_drops_what_the_signs_say(door) -> None:
    tensors = qkv(7, 150)
    torch.manual_seed(3)
    out, lse, scores = door(*tensors, dropout_p=0.3, causal=True)
    assert scores.shape == (2, HEADS, 128, 256)
    scores = scores[..., :7, :150]
    dropped = torch.signbit(scores)
    visible = ~formula.hidden_keys(7, 150, True, (-1, -1), 0)
    assert abs(float(dropped[..., visible].float().mean()) - 0.3) < 0.02
    assert torch.allclose(scores.abs().amax(-1), torch.ones(2, HEADS, 7), atol=1e-5)  # relative to the row's maximum
    kept = (~dropped).double() / 0.7
    formula.assert_close((out, lse), lambda dtype: formula.attention(*(x.to(dtype) for x in tensors), causal=True, kept=kept.to(dtype)))
    torch.manual_seed(3)
    assert torch.equal(door(*tensors, dropout_p=0.3, causal=True)[0], out)
    assert not torch.equal(door(*tensors, dropout_p=0.3, causal=True)[0], out)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_scores_are_those_of_the_plain_formula(is_packed) -> None:
    """Signs exactly; nothing behind a sequence's end."""
    lengths_q, lengths_k = (5, 0, 130, 41), (140, 3, 9, 60)
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    q, k, v = (formula.draw(int(cu[-1]), heads, DIM, seed=i) for i, (cu, heads) in enumerate(((cu_q, HEADS), (cu_k, 2), (cu_k, 2))))
    features = {"softcap": 3.0, "alibi_slopes": SLOPES, "window_size_left": 70, "window_size_right": 4}
    if is_packed:
        _, _, scores, state = interface._flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), 0.3, 0.25, False, **features, return_softmax=True
        )
        assert scores.shape == (4, HEADS, 256, 256)
    else:
        q, k, v = (x[None] for x in (q, k, v))
        _, _, scores, state = interface._flash_attn_forward(q, k, v, 0.3, 0.25, False, **features, return_softmax=True)
        assert scores.shape == (1, HEADS, 256, 256)
    p = fovea.attention_probabilities(
        q, k, dropout=fovea.Dropout(0.3, *state.tolist()), scale=0.25, softcap=3.0, alibi=SLOPES, window=(70, 4),
        cu_seqlens=(cu_q, cu_k) if is_packed else None,
    )  # fmt: skip
    expected = p / p.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    rows, keys = p.shape[2:]
    assert torch.allclose(scores[..., :rows, :keys], expected, atol=1e-6)
    assert not scores[..., rows:, :].any() and not scores[..., keys:].any()
    is_visible = p != 0
    assert torch.equal(torch.signbit(scores[..., :rows, :keys])[is_visible], torch.signbit(p)[is_visible])


def test_no_rows_have_probabilities_of_padding_alone() -> None:
    nothing, lengths = torch.zeros(0, 4, 16), torch.zeros(3, dtype=torch.int32)
    out, lse, signs = flash_attn.flash_attn_varlen_func(nothing, nothing, nothing, lengths, lengths, 0, 0, dropout_p=0.2, return_attn_probs=True)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0) and signs.shape == (2, 4, 128, 128) and not signs.any()


def test_signs_live_in_half_precision() -> None:
    tensors = [x.bfloat16() for x in qkv(7, 150)]
    out, lse, scores = by_func(*tensors, dropout_p=0.3)
    assert (out.dtype, lse.dtype, scores.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert abs(float(torch.signbit(scores[..., :7, :150]).float().mean()) - 0.3) < 0.02


def test_gradients_of_dropout_are_those_of_what_was_kept() -> None:
    tensors = qkv(7, 20)
    torch.manual_seed(3)
    kept = (~torch.signbit(by_func(*tensors, dropout_p=0.4)[2][..., :7, :20])).double() / 0.6

    def ours(*x):
        torch.manual_seed(3)
        return flash_attn.flash_attn_func(*x, dropout_p=0.4)

    formula.assert_close(
        formula.gradients(ours, tensors),
        lambda dtype: formula.gradients(lambda *x: formula.attention(*x, kept=kept.to(dtype))[0], [x.to(dtype) for x in tensors]),
    )


# ---- Caches ----


def turned(x, positions, cos, sin, interleaved):
    """Rows of [batch, rows, heads, dim] at positions [batch, rows]."""
    width = 2 * cos.shape[1]
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    a, b = (x[..., 0:width:2], x[..., 1:width:2]) if interleaved else (x[..., : width // 2], x[..., width // 2 : width])
    pair = (a * c - b * s, a * s + b * c)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined, x[..., width:]], -1)


CACHES = {
    "contiguous": {}, "slots": {"slots": [2, 0]}, "leftpad": {"leftpad": [1, 3]}, "pages": {"page_size": 4}, "pages_leftpad": {"page_size": 4, "leftpad": [1, 3]},
}  # fmt: skip


def make_cache(rows, slots=(0, 1), page_size=0):
    """rows [2, capacity, heads, dim] as slots of three, or as pages in reversed order, with the table."""
    if not page_size:
        slot_rows = torch.full((3, *rows.shape[1:]), torch.nan)
        slot_rows[list(slots)] = rows
        return slot_rows, None
    pages = rows.unflatten(1, (-1, page_size)).flatten(0, 1).flip(0)
    return pages, torch.arange(len(pages) - 1, -1, -1, dtype=torch.int32).reshape(2, -1)


def rows_of(cache, table, slots=(0, 1)):
    return cache[list(slots)] if table is None else cache[table.long()].flatten(1, 2)


@pytest.mark.parametrize("rotary_kind", [None, "interleaved", "halves"])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window": (6, 1)}], ids=["plain", "causal", "window"])
@pytest.mark.parametrize("num_new", [0, 1, 3])
@pytest.mark.parametrize("kind", CACHES)
def test_caches_are_appended_to_and_attended(kind, num_new, features, rotary_kind) -> None:
    if rotary_kind and not num_new:
        return
    layout = CACHES[kind]
    slots, page_size, leftpad = layout.get("slots", [0, 1]), layout.get("page_size", 0), layout.get("leftpad", [0, 0])
    capacity, seqlens = 12, torch.tensor([5, 8], dtype=torch.int32)
    q = formula.draw(2, 3, HEADS, DIM)
    before = [formula.draw(2, capacity, 2, DIM, seed=seed) for seed in (1, 2)]
    new = [formula.draw(2, num_new, 2, DIM, seed=seed) for seed in (3, 4)]
    cos, sin = (f(torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1])) for f in (torch.cos, torch.sin))
    (k_cache, table), (v_cache, _) = (make_cache(rows, slots, page_size) for rows in before)
    args = {"cache_seqlens": seqlens, "block_table": table}
    if "slots" in layout:
        args["cache_batch_idx"] = torch.tensor(slots, dtype=torch.int32)
    elif not page_size:
        k_cache, v_cache = k_cache[:2], v_cache[:2]
    if "leftpad" in layout:
        args["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    if num_new:
        args |= {"k": new[0], "v": new[1]}
    if rotary_kind:
        args |= {"rotary_cos": cos, "rotary_sin": sin}
        if rotary_kind == "halves":
            args["rotary_interleaved"] = False
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **args, **ours(features), return_softmax_lse=True)

    is_masked = bool(features)
    for b in range(2):

        def expected(dtype, b=b):
            length = int(seqlens[b])
            queries, (k_new, v_new) = q[b : b + 1].to(dtype), (x[b : b + 1].to(dtype) for x in new)
            if rotary_kind:
                angles = cos.to(dtype), sin.to(dtype), rotary_kind == "interleaved"
                at_queries = length + (torch.arange(3) if is_masked else torch.zeros(3, dtype=torch.long))
                queries = turned(queries, at_queries[None], *angles)
                k_new = turned(k_new, length + torch.arange(num_new)[None], *angles)
            kept = slice(leftpad[b], length)
            k = torch.cat([before[0][b : b + 1, kept].to(dtype), k_new], 1)
            v = torch.cat([before[1][b : b + 1, kept].to(dtype), v_new], 1)
            return *formula.attention(queries, k, v, **features), k_new

        written = rows_of(k_cache, table, slots)[b : b + 1, seqlens[b] : seqlens[b] + num_new]
        formula.assert_close((out[b : b + 1], lse[b : b + 1], written), expected)
        after = rows_of(v_cache, table, slots)[b]
        assert torch.equal(after[seqlens[b] : seqlens[b] + num_new], new[1][b])
        assert torch.equal(after[: seqlens[b]], before[1][b, : seqlens[b]])


def test_one_length_serves_all_sequences() -> None:
    q, k, v = qkv(1, 12)
    expected = flash_attn.flash_attn_func(q, k[:, :7], v[:, :7])
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=7), expected)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([7, 7]), num_splits=3), expected)


def test_models_in_training_mode_may_read_caches() -> None:
    q, k, v = qkv(1, 12)
    q.requires_grad_()
    out = flash_attn.flash_attn_with_kvcache(q, k, v)
    assert torch.equal(out.detach(), flash_attn.flash_attn_func(q.detach(), k, v))
    with pytest.raises(fovea.Unsupported, match="a gradient through a KV cache; expected none"):
        out.sum().backward()


def test_compiled_graphs_take_caches_whole() -> None:
    torch._dynamo.reset()
    seqlens, leftpad = torch.tensor([5, 8], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)

    def call(q, k_cache, v_cache, k, v):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, *ANGLES, seqlens, None, leftpad, causal=True, window_size=(7, -1), softcap=2.0,
            alibi_slopes=SLOPES, return_softmax_lse=True,
        )  # fmt: skip
        return out * 2, lse, flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)

    q, k_cache, v_cache = qkv(2, 12)
    written = [[x.clone() for x in (k_cache, v_cache)] for _ in range(2)]
    new = qkv(2, 2)[1:]
    expected, got = call(q, *written[0], *new), torch.compile(call, backend="aot_eager", fullgraph=True)(q, *written[1], *new)
    assert all(map(torch.equal, got, expected)) and all(map(torch.equal, *written))


def test_compiled_graphs_take_pages_whole() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(5, 12)
    table = torch.tensor([[0, 2, 4], [1, 3, 5]], dtype=torch.int32)
    pages = [x.unflatten(1, (3, 4)).transpose(0, 1).flatten(0, 1) for x in (k, v)]

    def call(q, k, v):
        return flash_attn.flash_attn_varlen_func(q, k, v, offsets(5), offsets(12), 5, 12, causal=True, block_table=table)

    rows = q.flatten(0, 1).requires_grad_()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(rows, *pages)
    assert torch.equal(got.detach(), call(rows.detach(), *pages))
    with pytest.raises(fovea.Unsupported, match="flash_attn_varlen_func: a gradient through a KV cache; expected none"):
        got.sum().backward()


# ---- Private functions ----


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_raw_functions_make_a_training_step(is_packed, dropout_p) -> None:
    tensors = qkv(5, 11)
    weights = formula.draw(*tensors[0].shape, seed=9)
    torch.manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = (flash_attn.flash_attn_func(*leaves, dropout_p=dropout_p, causal=True) * weights).sum()
    expected = torch.autograd.grad(expected, leaves)
    made = [torch.empty_like(x) for x in tensors]
    words = (dropout_p, DIM**-0.5, True)
    torch.manual_seed(5)
    if is_packed:
        rows, lengths = [x.flatten(0, 1) for x in tensors], (offsets(5), offsets(11), 5, 11)
        out, lse, _, state = interface._flash_attn_varlen_forward(*rows, *lengths, *words)
        delta = interface._flash_attn_varlen_backward(
            weights.flatten(0, 1), *rows, out, lse, *(x.flatten(0, 1) for x in made), *lengths, *words, -1, -1, 0.0, None, True, state
        )
        assert delta.shape == (HEADS, 10)
    else:
        out, lse, _, state = interface._wrapped_flash_attn_forward(*tensors, *words)
        delta = interface._wrapped_flash_attn_backward(weights, *tensors, out, lse, *made, *words, -1, -1, 0.0, None, True, state)
        assert torch.allclose(delta, (out * weights).sum(-1).transpose(1, 2), atol=1e-5)
    for got, gradient in zip(made, expected):
        assert torch.allclose(got, gradient, atol=1e-6)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_the_extension_takes_all_by_position(is_packed) -> None:
    gpu = interface.flash_attn_gpu
    tensors, weights = qkv(5, 11), formula.draw(2, 5, HEADS, DIM, seed=9)
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.manual_seed(4)
    expected, expected_lse, expected_scores = by_func(*leaves, dropout_p=0.2, causal=True, window_size=(6, 0), alibi_slopes=SLOPES)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    dq = torch.empty_like(tensors[0])
    out = torch.empty_like(dq)
    words = (0.2, 0.25)  # dropout_p, softmax_scale
    torch.manual_seed(4)
    if is_packed:
        rows, lengths = [x.flatten(0, 1) for x in tensors], (5, 11)
        cu, dq_rows, out_rows = (offsets(5), offsets(11)), dq.flatten(0, 1), out.flatten(0, 1)
        made, lse, scores, state = gpu.varlen_fwd(
            *rows, out_rows, *cu, None, None, None, SLOPES, *lengths, *words, False, True, 6, 0, 0.0, True, None, 0
        )
        assert made is out_rows
        got = gpu.varlen_bwd(
            weights.flatten(0, 1), *rows, made, lse, dq_rows, None, None, *cu, SLOPES, *lengths, *words, False, True, 6, 0, 0.0, True, None, state
        )
        assert got[0] is dq_rows
        got, lse = [x.unflatten(0, (2, -1)) for x in got[:3]], lse.unflatten(1, (2, -1)).transpose(0, 1)
    else:
        made, lse, scores, state = gpu.fwd(*tensors, out, SLOPES, *words, True, 6, 0, 0.0, True, None)
        assert made is out
        got = gpu.bwd(weights, *tensors, made, lse, dq, None, None, SLOPES, *words, True, 6, 0, 0.0, True, None, state)
        assert got[0] is dq
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and torch.equal(scores, expected_scores)
    for gradient, value in zip(gradients, got):
        assert torch.allclose(value, gradient, atol=1e-6)


def test_the_extension_reads_caches_by_position() -> None:
    q, k, v = qkv(2, 12)
    new, seqlens, leftpad = qkv(1, 2)[1:], torch.tensor([5, 8], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    caches = [[x.clone() for x in (k, v)] for _ in range(2)]
    expected = flash_attn.flash_attn_with_kvcache(
        q, *caches[0], *new, *ANGLES, seqlens, None, leftpad, softmax_scale=0.3, causal=True, window_size=(7, -1), softcap=2.0,
        rotary_interleaved=False, alibi_slopes=SLOPES, return_softmax_lse=True,
    )  # fmt: skip
    out = torch.empty_like(q)
    words = (0.3, True, 7, -1, 2.0, False, 0)  # the window reaches the left padding
    got, lse = interface.flash_attn_gpu.fwd_kvcache(q, *caches[1], *new, seqlens, *ANGLES, None, leftpad, None, SLOPES, out, *words)
    assert got is out and torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert all(torch.equal(*pair) for pair in zip(*caches))


def test_the_extension_refuses_what_it_did() -> None:
    gpu, generator = interface.flash_attn_gpu, torch.Generator()
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        gpu.fwd(Q, K, V, None, None, 0.1, 0.25, False, -1, -1, 0.0, False, generator)
    with pytest.raises(RuntimeError, match="return_softmax is only supported when p_dropout > 0.0"):
        gpu.fwd(Q, K, V, None, None, 0.0, 0.25, False, -1, -1, 0.0, True, None)
    with pytest.raises(AttributeError, match="has no attribute 'flash_attn_cpu'"):
        _ = interface.flash_attn_cpu


def test_gradients_of_empty_rows_are_zero(monkeypatch) -> None:
    q, k, v = qkv(11, 5)
    out, lse, _, state = interface._flash_attn_forward(q, k, v, 0.0, 0.25, True)
    assert (lse[..., :6] == torch.inf).all()
    given = []
    monkeypatch.setattr(interface, "attention_backward", lambda *args, **more: given.append(args[5]) or fovea.attention_backward(*args, **more))
    dq = torch.full_like(q, torch.nan)
    interface._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, dq, None, None, 0.0, 0.25, True, -1, -1, 0.0, None, True, state)
    assert not dq[:, :6].any() and dq[:, 6:].isfinite().all()
    assert (given[0][..., :6] == -torch.inf).all()  # what Fovea's gradients take


@pytest.mark.parametrize("has_table", [False, True])
def test_raw_forward_takes_keys_in_use(has_table) -> None:
    q, k, v = qkv(5, 12)
    used, first = torch.tensor([7, 12], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    words = (offsets(5), offsets(12), 5, 12, 0.0, 0.25, True)
    if has_table:
        pages = [x.reshape(6, 4, HEADS, DIM) for x in (k, v)]
        out, lse, *_ = interface._flash_attn_varlen_forward(
            q.flatten(0, 1), *pages, *words, block_table=torch.arange(6, dtype=torch.int32).reshape(2, 3), seqused_k=used
        )
        first = torch.zeros(2, dtype=torch.int32)
    else:
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse, *_ = interface._flash_attn_varlen_forward(*rows, *words, leftpad_k=first, seqused_k=used)
    for b in range(2):
        keys = slice(first[b], used[b])
        alone = interface._flash_attn_forward(q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys], 0.0, 0.25, True)
        assert torch.equal(out.unflatten(0, (2, 5))[b : b + 1], alone[0])
        assert torch.equal(lse.unflatten(1, (2, 5))[:, b], alone[1][0])


# ---- Padding ----


def test_padding_comes_off_and_on() -> None:
    x, mask = formula.draw(2, 5, 3).requires_grad_(), torch.tensor([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and indices.tolist() == [0, 1, 3, 6]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest, used.tolist()) == ([0, 3, 4], torch.int32, 3, [3, 1])
    back = bert_padding.pad_input(rows, indices, 2, 5)
    assert torch.equal(back, x * mask[..., None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, mask[..., None].expand(2, 5, 3).float())


def test_unused_rows_are_packed_and_do_not_count() -> None:
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 1]])
    rows, _, cu_seqlens, longest, used = bert_padding.unpad_input(torch.arange(6).reshape(2, 3, 1), mask, unused)
    assert (rows.flatten().tolist(), cu_seqlens.tolist(), longest, used.tolist()) == ([0, 1, 3, 4, 5], [0, 2, 5], 3, [1, 2])


def test_documents_of_a_row_are_sequences() -> None:
    lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(torch.arange(8).reshape(2, 4, 1), lengths)
    assert (rows.flatten().tolist(), cu_seqlens.tolist(), longest) == ([0, 1, 2, 4, 5, 6, 7], [0, 2, 3, 7], 4)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_rows_are_gathered_and_scattered() -> None:
    x, places = formula.draw(4, 2).requires_grad_(), torch.tensor([3, 1])
    rows, same = bert_padding.index_first_axis_residual(x, places)
    assert torch.equal(rows, x[[3, 1]]) and torch.equal(same, x) and not same.requires_grad
    for indices in (places, places.int()):  # transformers has both
        assert torch.equal(bert_padding.index_put_first_axis(rows, indices, 5)[[1, 3]], x[[1, 3]])


# ---- Rotary ----

ANGLES = [f(torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1])) for f in (torch.cos, torch.sin)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 4, torch.tensor([2, 9])], ids=str)
def test_rows_turn_by_their_positions(start, interleaved) -> None:
    x = formula.draw(2, 5, HEADS, DIM)
    positions = (start[:, None] if isinstance(start, torch.Tensor) else start) + torch.arange(5).expand(2, 5)

    def expected(dtype):
        return (turned(x.to(dtype), positions, *(table.to(dtype) for table in ANGLES), interleaved),)

    got = rotary.apply_rotary_emb(x, *ANGLES, interleaved, seqlen_offsets=start)
    formula.assert_close((got,), expected)
    if isinstance(start, int) and not start:
        formula.assert_close((rotary.apply_rotary_emb_torch(x, *ANGLES, interleaved),), expected)
    packed = rotary.apply_rotary_emb_func(x.flatten(0, 1), *ANGLES, interleaved, seqlen_offsets=start, cu_seqlens=offsets(5), max_seqlen=5)
    assert torch.equal(packed, got.flatten(0, 1))
    assert rotary.apply_rotary_emb(x, *ANGLES, interleaved, inplace=True, seqlen_offsets=start) is x
    assert torch.equal(x, got)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("has_own_angles", [False, True])
def test_packed_tensors_turn_in_place(is_flat, has_own_angles) -> None:
    q, k, v = qkv(5, 5, heads_k=2 if is_flat else HEADS)
    of_keys = [-x for x in ANGLES] if has_own_angles else [None, None]
    qkv_ = torch.cat([q, k, v], 2) if is_flat else torch.stack([q, k, v], 2)
    leaf = qkv_.clone().requires_grad_()
    got = rotary.apply_rotary_emb_qkv_(leaf.clone(), *ANGLES, *of_keys, seqlen_offsets=1, num_heads_q=HEADS if is_flat else None)
    angles_k = of_keys if has_own_angles else ANGLES
    parts = [rotary.apply_rotary_emb(q, *ANGLES, seqlen_offsets=1), rotary.apply_rotary_emb(k, *angles_k, seqlen_offsets=1), v]
    assert torch.equal(got, torch.cat(parts, 2) if is_flat else torch.stack(parts, 2))
    (gradient,) = torch.autograd.grad((got * got).sum() / 2, leaf)  # a rotation keeps lengths
    if not has_own_angles:
        assert torch.allclose(gradient, leaf, atol=1e-5)


@pytest.mark.parametrize("name", ["apply_rotary_emb", "apply_rotary_emb_qkv_", "apply_rotary_emb_kv_"])
def test_leaves_turn_in_place_and_have_gradients(name) -> None:
    q, k, v = qkv(5, 5)
    x = {"apply_rotary_emb": q, "apply_rotary_emb_qkv_": torch.stack([q, k, v], 2), "apply_rotary_emb_kv_": torch.stack([k, v], 2)}[name]
    options = {"inplace": True} if name == "apply_rotary_emb" else {}
    starts = torch.tensor([3, 0])[: len(x)]
    leaf, copy = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = getattr(rotary, name)(leaf, *ANGLES, seqlen_offsets=starts, **options)
    expected = getattr(rotary, name)(copy.clone(), *ANGLES, seqlen_offsets=starts, **options)
    assert torch.equal(out, expected) and out.data_ptr() == leaf.data_ptr()
    seed = formula.draw(*x.shape)
    (got,), (wanted,) = torch.autograd.grad(out, leaf, seed.clone()), torch.autograd.grad(expected, copy, seed.clone())
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_formula_takes_angles_of_each_sequence(interleaved) -> None:
    x, starts = formula.draw(2, 5, HEADS, DIM), torch.tensor([3, 1])
    cos, sin = (table[starts[:, None] + torch.arange(5)] for table in ANGLES)
    got = rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)
    assert torch.allclose(got, rotary.apply_rotary_emb(x, *ANGLES, interleaved, seqlen_offsets=starts), atol=1e-5)


def test_keys_beside_values_turn_in_place() -> None:
    k, v = qkv(5, 5)[1:]
    kv = torch.stack([k, v], 2)
    assert rotary.apply_rotary_emb_kv_(kv, *ANGLES, True) is kv
    assert torch.equal(kv[:, :, 0], rotary.apply_rotary_emb(k, *ANGLES, True)) and torch.equal(kv[:, :, 1], v)


@pytest.mark.parametrize("scale_base", [None, 8.0])
@pytest.mark.parametrize("kind", ["qkv", "flat", "kv"])
def test_the_layer_turns_queries_and_keys(kind, scale_base) -> None:
    q, k, v = qkv(5, 5)
    layer, start = rotary.RotaryEmbedding(6, base=100.0, interleaved=True, scale_base=scale_base), torch.tensor([2, 4])
    assert not layer.state_dict()
    if kind == "kv":
        got_q, kv = layer(q.clone(), torch.stack([k, v], 2), seqlen_offset=start, max_seqlen=12)
        got_k, got_v = kv.unbind(2)
    else:
        joined = torch.cat([q, k, v], 2) if kind == "flat" else torch.stack([q, k, v], 2)
        made = layer(joined, seqlen_offset=start, max_seqlen=12, num_heads_q=HEADS if kind == "flat" else None)
        assert made is joined
        got_q, got_k, got_v = made.chunk(3, 2) if kind == "flat" else made.unbind(2)
    positions = start[:, None] + torch.arange(5)

    def expected(dtype):
        even = torch.arange(0, 6, 2, dtype=dtype)
        places = torch.arange(12, dtype=dtype)[:, None]
        angles = places * 100.0 ** (-even / 6)
        scale = 1.0 if scale_base is None else ((even + 2.4) / 8.4) ** ((places - 6) / scale_base)
        tables = angles.cos() * scale, angles.sin() * scale, angles.cos() / scale, angles.sin() / scale
        return turned(q.to(dtype), positions, *tables[:2], True), turned(k.to(dtype), positions, *tables[2:], True)

    formula.assert_close((got_q, got_k), expected)
    assert torch.equal(got_v, v)


def test_the_layer_makes_tables_when_it_must() -> None:
    layer = rotary.RotaryEmbedding(6)
    x = torch.stack(qkv(5, 5), 2)
    with torch.inference_mode():
        layer.eval()(x.clone())
    first = layer._angles
    layer(x[:, :3].clone())
    assert layer._angles is first  # shorter ones serve
    layer.train()(x.clone().requires_grad_().clone()).sum().backward()  # those of inference mode do not
    assert layer._angles is not first
    layer(x.clone(), seqlen_offset=4)
    assert len(layer._angles.cos) == 9
    layer(x.bfloat16())
    assert layer._angles.cos.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="seqlen_offset is a tensor without max_seqlen"):
        layer(x, seqlen_offset=torch.tensor([1, 2]))


# ---- Errors ----

Q, K, V = qkv(2, 8)
TABLE = torch.arange(4, dtype=torch.int32).reshape(2, 2)
PAGES = torch.zeros(4, 4, HEADS, DIM)
WITH_CACHE = {
    "k without v": ({"k": K[:, :1], "cache_seqlens": 3}, "flash_attn_with_kvcache: k without v; expected both or none"),
    "v without k": ({"v": V[:, :1], "cache_seqlens": 3}, "v without k"),
    "k without lengths": ({"k": K[:, :1], "v": V[:, :1]}, "k without cache_seqlens; expected the lengths"),
    "rotary without k": ({"rotary_cos": ANGLES[0], "rotary_sin": ANGLES[1]}, "rotary_cos without k; expected new keys"),
    "half of rotary": ({"rotary_cos": ANGLES[0]}, "one of rotary_cos and rotary_sin"),
    "splits": ({"num_splits": 129}, "num_splits > 128 is not supported"),
    "slots beside pages": ({"cache_batch_idx": TABLE[0], "block_table": TABLE}, "cache_batch_idx beside block_table"),
    "window": ({"window_size": (1, 2, 3)}, "window_size has 3 numbers"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, message", WITH_CACHE.values(), ids=WITH_CACHE)
def test_wrong_calls_of_a_cache_are_refused(arguments, message) -> None:
    with pytest.raises(RuntimeError, match=message) as caught:
        flash_attn.flash_attn_with_kvcache(Q, K, V, **arguments)
    assert isinstance(caught.value, fovea.InvalidArgument)


def test_a_sequence_without_pages_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a sequence has 9 keys with the new ones; expected at most the 8 that block_table has"):
        flash_attn.flash_attn_with_kvcache(Q, PAGES, PAGES, K[:, :1], V[:, :1], cache_seqlens=8, block_table=TABLE)
    assert not PAGES.any()


def test_packed_queries_over_pages_refuse_dropout_and_splits() -> None:
    rows, lengths = Q.flatten(0, 1), (offsets(2), offsets(8), 2, 8)
    with pytest.raises(fovea.Unsupported, match="dropout_p is 0.1 beside block_table; expected 0"):
        flash_attn.flash_attn_varlen_func(rows, PAGES, PAGES, *lengths, dropout_p=0.1, block_table=TABLE)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        interface._flash_attn_varlen_forward(rows, PAGES, PAGES, *lengths, 0.0, 0.25, False, block_table=TABLE, num_splits=2)
    with pytest.raises(RuntimeError, match="leftpad_k beside block_table"):
        interface._flash_attn_varlen_forward(rows, PAGES, PAGES, *lengths, 0.0, 0.25, False, block_table=TABLE, leftpad_k=TABLE[0])


def test_other_wrong_calls_are_refused() -> None:
    with pytest.raises(RuntimeError, match="dropout_p without rng_state"):
        interface._flash_attn_backward(Q, Q, Q, Q, Q, Q[..., 0], Q, Q, Q, 0.1, 0.25, False, -1, -1, 0.0, None, True)
    with pytest.raises(RuntimeError, match=r"qkv has shape \(2, 8, 2, 2, 16\); expected 3 parts"):
        flash_attn.flash_attn_qkvpacked_func(torch.zeros(2, 8, 2, 2, 16))
    with pytest.raises(RuntimeError, match=r"kv has shape \(8, 3, 2, 16\); expected 2 parts"):
        flash_attn.flash_attn_varlen_kvpacked_func(Q.flatten(0, 1), torch.zeros(8, 3, 2, 16), offsets(2), offsets(8), 2, 8)
    for window in (None, 4):
        with pytest.raises(RuntimeError, match=f"window_size is {window}; expected .left, right., -1 for an open side"):
            flash_attn.flash_attn_func(Q, K, V, window_size=window)
    with pytest.raises(RuntimeError, match=r"window_size is \(None, 0\); expected whole numbers, -1 for an open side"):
        flash_attn.flash_attn_func(Q, K, V, window_size=(None, 0))
    with pytest.raises(RuntimeError, match="qkv has rank 4 without num_heads_q"):
        rotary.apply_rotary_emb_qkv_(K, *ANGLES)


# ---- Signatures ----

TAIL = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}


def plain_signature(function) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_the_peers(name) -> None:
    assert set(flash_attn.__all__) == set(SIGNATURES)
    assert plain_signature(getattr(flash_attn, name)) == SIGNATURES[name]


def test_the_table_has_every_argument() -> None:
    functions = [getattr(flash_attn, name) for name in SIGNATURES]
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    listed = [name for row in DROP_INS["flash_attn"].arguments for name in row.name.split(", ")]
    assert sorted(listed) == sorted(arguments)
