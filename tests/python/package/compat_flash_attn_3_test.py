"""fovea.compat.flash_attn_3 against the dense formula: what differs from version 2, and what is new."""

import inspect

import pytest

import fovea

torch = pytest.importorskip("torch")
import flash_formula as formula  # noqa: E402
from compat_flash_attn_test import ANGLES, DIM, HEADS, make_cache, offsets, plain_signature, qkv, route, rows_of, turned  # noqa: E402, F401
from fovea.compat import flash_attn_3 as flash  # noqa: E402
from fovea.compat._drop_ins import DROP_INS  # noqa: E402


def check(got, tensors, **features) -> None:
    formula.assert_close(got, lambda dtype: formula.attention(*(x.to(dtype) for x in tensors), **features))


FEATURES = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (3, 2)}, "chunk": {"chunk": 4}, "chunk_causal": {"chunk": 3, "causal": True},
    "chunk_window": {"chunk": 5, "window": (2, 1)}, "softcap_scale": {"softcap": 1.5, "scale": 0.7},
}  # fmt: skip
OURS = {"scale": "softmax_scale", "window": "window_size", "chunk": "attention_chunk"}


def ours(features):
    return {OURS.get(name, name): value for name, value in features.items()}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("seqlens", [(5, 11), (11, 5)], ids=str)
def test_results_are_the_formulas(seqlens, features) -> None:
    q, k, v = qkv(*seqlens, heads_k=2)
    v = torch.cat([v, -2 * v[..., :3]], -1)  # head_dim_v is its own
    check(flash.flash_attn_func(q, k, v, **ours(features), return_attn_probs=True), (q, k, v), **features)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = flash.flash_attn_varlen_func(*rows, *map(offsets, seqlens), *seqlens, **ours(features), return_attn_probs=True)
    check((out.unflatten(0, (2, -1)), lse.unflatten(1, (2, -1)).transpose(0, 1)), (q, k, v), **features)
    out, lse, *accumulated = flash.flash_attn_with_kvcache(q, k, v, **ours(features), return_softmax_lse=True)
    check((out, lse), (q, k, v), **features)
    assert [x.shape for x in accumulated] == [(0,), (0,)]
    assert torch.equal(flash.flash_attn_with_kvcache(q, k, v, **ours(features)), out)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_gradients_are_the_formulas(features) -> None:
    tensors = qkv(9, 9)
    got = formula.gradients(lambda *x: flash.flash_attn_func(*x, **ours(features)), tensors)
    formula.assert_close(got, lambda dtype: formula.gradients(lambda *x: formula.attention(*x, **features)[0], [x.to(dtype) for x in tensors]))


@pytest.mark.parametrize("is_flat", [False, True])
def test_one_tensor_of_queries_keys_and_values(is_flat) -> None:
    q, k, v = qkv(9, 9, heads_k=2 if is_flat else HEADS)
    qkv_, heads = (torch.cat([q, k, v], 2), HEADS) if is_flat else (torch.stack([q, k, v], 2), None)
    out, lse = flash.flash_attn_qkvpacked_func(qkv_, causal=True, window_size=(4, 0), num_heads_q=heads, return_attn_probs=True)
    check((out, lse), (q, k, v), causal=True, window=(4, 0))


def test_compiled_graphs_take_chunks() -> None:
    tensors = qkv(9, 9)
    call = lambda *x: flash.flash_attn_func(*x, attention_chunk=4)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors))


# ---- Rows in use ----


@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_rows_in_use_are_sequences_of_their_own(which) -> None:
    cu_q, cu_k = torch.tensor([0, 5, 5, 11], dtype=torch.int32), torch.tensor([0, 4, 9, 16], dtype=torch.int32)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([3, 0, 6], [4, 2, 0]))
    if which == "q":
        used_k = cu_k[1:] - cu_k[:-1]
    if which == "k":
        used_q = cu_q[1:] - cu_q[:-1]
    # Two rows behind the last sequence.
    tensors = [formula.draw(total + 2, heads, DIM, seed=seed) for seed, (total, heads) in enumerate(((11, HEADS), (16, 2), (16, 2)))]
    for x, cu, used in zip(tensors, (cu_q, cu_k, cu_k), (used_q, used_k, used_k)):
        for i in range(3):
            x[cu[i] + used[i] : cu[i + 1]] = torch.nan
        x[cu[-1] :] = torch.nan
    args = {"seqused_q": used_q if which != "k" else None, "seqused_k": used_k if which != "q" else None, "causal": True}

    def call(*x, **more):
        return flash.flash_attn_varlen_func(*x, cu_q, cu_k, 6, 7, **args, **more)

    out, lse = call(*tensors, return_attn_probs=True)
    expected, expected_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    parts = []
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i] + used_q[i]), slice(cu_k[i], cu_k[i] + used_k[i])
        parts.append((rows, keys))
        alone = flash.flash_attn_func(*(x[None, part] for x, part in zip(tensors, (rows, keys, keys))), causal=True, return_attn_probs=True)
        expected[rows], expected_lse[:, rows] = alone[0][0], alone[1][0]
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)

    got = formula.gradients(call, tensors)

    def plain(q, k, v):
        made = torch.zeros_like(q)
        for rows, keys in parts:
            made[rows] = formula.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)[0][0]
        return made

    finite = [x.nan_to_num(0.0) for x in tensors]
    formula.assert_close(got, lambda dtype: formula.gradients(plain, [x.to(dtype) for x in finite]))


# ---- A second product ----


@pytest.mark.parametrize("kind", ["apart", "columns apart", "one tensor"])
def test_qv_joins_the_scores(kind) -> None:
    q, qv = formula.draw(2, 5, HEADS, 8), formula.draw(2, 5, HEADS, 24, seed=1)
    cache = formula.draw(2, 11, 1, 32, seed=2)
    v, k = cache[..., :24], cache[..., 24:]
    if kind == "apart":
        v, k = v.clone(), k.clone()
    if kind == "columns apart":  # with the strides that they have in one tensor
        v = cache.clone()[..., :24]
        cache[..., :24] = torch.nan
    joined = torch.cat([qv, q], -1), torch.cat([v, k], -1), v  # the scale is that of both dims
    check(flash.flash_attn_func(q, k, v, qv=qv, causal=True, return_attn_probs=True), joined, causal=True)
    if kind == "one tensor":
        out = flash.flash_attn_with_kvcache(q, k, v, qv=qv, causal=True)
        assert torch.equal(out, flash.flash_attn_func(q, k, v, qv=qv, causal=True))
        assert not out.equal(flash.flash_attn_func(q, k, v, causal=True))
    else:
        with pytest.raises(fovea.Unsupported, match="qv over caches that lie apart; expected v_cache and k_cache to be"):
            flash.flash_attn_with_kvcache(q, k, v, qv=qv)


def test_qv_has_gradients() -> None:
    inputs = [formula.draw(1, 5, 2, 8), formula.draw(1, 5, 2, 16, seed=1), formula.draw(1, 7, 1, 8, seed=2), formula.draw(1, 7, 1, 16, seed=3)]
    got = formula.gradients(lambda q, qv, k, v: flash.flash_attn_func(q, k, v, qv=qv), inputs)

    def plain(q, qv, k, v):
        return formula.attention(torch.cat([qv, q], -1), torch.cat([v, k], -1), v)[0]

    formula.assert_close(got, lambda dtype: formula.gradients(plain, [x.to(dtype) for x in inputs]))


# ---- Caches ----


@pytest.mark.parametrize("has_rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 1, 4])
def test_packed_queries_and_keys_join_a_cache(page_size, causal, has_rotary) -> None:
    seqlens, starts = torch.tensor([5, 8], dtype=torch.int32), torch.tensor([2, 7], dtype=torch.int32)
    cu_q, cu_new = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    q, new = formula.draw(4, HEADS, DIM), [formula.draw(4, 2, DIM, seed=seed) for seed in (3, 4)]
    before = [formula.draw(2, 12, 2, DIM, seed=seed) for seed in (1, 2)]
    (k_cache, table), (v_cache, _) = (make_cache(rows, (0, 1), page_size) for rows in before)
    args = {"page_table": table, "causal": causal}
    if has_rotary:
        args |= {"rotary_cos": ANGLES[0], "rotary_sin": ANGLES[1], "rotary_seqlens": starts}
    out, lse, *_ = flash.flash_attn_with_kvcache(
        q, k_cache if page_size else k_cache[:2], v_cache if page_size else v_cache[:2], *new, cache_seqlens=seqlens, cu_seqlens_q=cu_q,
        cu_seqlens_k_new=cu_new, max_seqlen_q=3, **args, return_softmax_lse=True,
    )  # fmt: skip
    for b in range(2):

        def expected(dtype, b=b):
            queries, (k_new, v_new) = q[None, cu_q[b] : cu_q[b + 1]].to(dtype), (x[None, cu_new[b] : cu_new[b + 1]].to(dtype) for x in new)
            if has_rotary:
                angles = [x.to(dtype) for x in ANGLES]
                places = torch.arange(queries.shape[1]) if causal else torch.zeros(queries.shape[1], dtype=torch.long)
                queries = turned(queries, (starts[b] + places)[None], *angles, True)
                k_new = turned(k_new, (starts[b] + torch.arange(k_new.shape[1]))[None], *angles, True)
            k, v = (torch.cat([x[b : b + 1, : seqlens[b]].to(dtype), y], 1) for x, y in zip(before, (k_new, v_new)))
            return *formula.attention(queries, k, v, causal=causal), k_new

        rows = slice(cu_q[b], cu_q[b + 1])
        written = rows_of(k_cache, table)[b : b + 1, seqlens[b] : seqlens[b] + cu_new[b + 1] - cu_new[b]]
        formula.assert_close((out[None, rows], lse[None, :, rows], written), expected)


def test_compiled_graphs_take_packed_queries_over_caches() -> None:
    torch._dynamo.reset()
    cu, seqlens = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    angles = torch.arange(16)[:, None] / 10.0 ** torch.arange(DIM // 2)

    def call(q, k_cache, v_cache, k, v):
        return flash.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=seqlens, cu_seqlens_q=cu,
            cu_seqlens_k_new=cu, max_seqlen_q=3, rotary_seqlens=seqlens + 1, causal=True, attention_chunk=6, return_softmax_lse=True,
        )  # fmt: skip

    q, k, v = (x.flatten(0, 1)[:4] for x in qkv(4, 4, 2))
    written = [[x.clone() for x in qkv(1, 16, 2)[1:]] for _ in range(2)]
    expected, got = call(q, *written[0], k, v), torch.compile(call, backend="aot_eager", fullgraph=True)(q, *written[1], k, v)
    assert all(map(torch.equal, got, expected)) and all(map(torch.equal, *written))


def test_slots_beside_pages_are_rows_of_the_table() -> None:
    q, rows = formula.draw(2, 1, HEADS, DIM), formula.draw(2, 8, 2, DIM, seed=1)
    pages, table = make_cache(rows, page_size=4)
    out = flash.flash_attn_with_kvcache(q, pages, pages, page_table=table, cache_batch_idx=torch.tensor([1, 0]))
    assert torch.equal(out, flash.flash_attn_func(q, rows.flip(0), rows.flip(0)))


# ---- Splits ----


@pytest.mark.parametrize("num_splits", [1, 3, 40])  # 40: more than one call joins
def test_splits_are_joined(num_splits) -> None:
    q, k, v = qkv(5, 80)
    parts = [flash.flash_attn_func(q, *part, return_attn_probs=True) for part in zip(k.chunk(num_splits, 1), v.chunk(num_splits, 1))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]).transpose(-1, -2)
    out, lse = flash.flash_attn_combine(outs, lses)
    assert lse.shape == (2, 5, HEADS) and lse.transpose(-1, -2).is_contiguous()
    check((out, lse.transpose(-1, -2)), (q, k, v))
    assert flash.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    given = torch.empty_like(q, dtype=torch.float16)
    assert flash.flash_attn_combine(outs, lses, given)[0] is given and torch.equal(given, out.half())


def test_there_is_no_metadata() -> None:
    metadata = flash.get_scheduler_metadata(2, 1, 12, HEADS, HEADS, DIM, torch.tensor([7, 7]))
    assert (metadata.shape, metadata.dtype) == ((0,), torch.int32)
    q, k, v = qkv(1, 12)
    out = flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, scheduler_metadata=metadata, num_splits=4, pack_gqa=True)
    assert torch.equal(out, flash.flash_attn_func(q, k[:, :7], v[:, :7]))


def test_caches_in_float8_have_scales() -> None:
    q, k, v = qkv(3, 20, heads_k=2)
    k_codes, v_codes = k.to(torch.float8_e4m3fn), (4 * v).to(torch.float8_e4m3fn)
    descale = torch.tensor([[0.5, 0.25]]).expand(len(q), 2)
    numbers = k_codes.float() * descale[:, None, :, None], v_codes.float() / 4
    out = flash.flash_attn_with_kvcache(q, k_codes, v_codes, cache_seqlens=17, k_descale=descale, v_descale=descale.new_full((len(q), 2), 0.25))
    assert torch.equal(out, flash.flash_attn_with_kvcache(q, *numbers, cache_seqlens=17))
    out = flash.flash_attn_with_kvcache(q, k_codes, v_codes, cache_seqlens=17)
    assert torch.equal(out, flash.flash_attn_with_kvcache(q, k_codes.float(), v_codes.float(), cache_seqlens=17))


def rounded(x, scale):
    """Codes of x [batch, seqlen, heads, dim] by a scale of each sequence and kv head, and the numbers that they are."""
    of_rows = scale.repeat_interleave(x.shape[2] // scale.shape[1], 1)[:, None, :, None]
    codes = (x / of_rows).to(torch.float8_e4m3fn)
    return codes, codes.float() * of_rows


def float8_call():
    """Codes of three sequences, their descales (strides of 0 among them) and the numbers, whose codes by these are the same."""
    q, k, v = qkv(37, 45, heads_k=2)
    scales = [torch.linspace(0.004, 0.02, 2 * len(q)).reshape(len(q), 2), torch.full((1, 1), 0.0075).expand(len(q), 2),
              torch.linspace(0.02, 0.005, 2 * len(q)).reshape(2, len(q)).T]  # fmt: skip
    codes, numbers = zip(*map(rounded, (q, k, v), scales))
    return codes, dict(zip(("q_descale", "k_descale", "v_descale"), scales)), numbers


def by_recipe(numbers, descales, **features):
    """In f32, where nothing is widened."""
    scales = {name.replace("descale", "scale"): scale for name, scale in descales.items()}
    out, lse = fovea.attention(*numbers, quant="fp8_static", return_lse=True, **scales, **features)
    return out.bfloat16(), lse


def test_queries_in_float8_are_codes_by_their_descales() -> None:
    codes, descales, numbers = float8_call()
    out, lse = flash.flash_attn_func(*codes, causal=True, softcap=9.0, return_attn_probs=True, **descales)
    assert out.dtype == torch.bfloat16
    expected = by_recipe(numbers, descales, causal=True, softcap=9.0)
    assert torch.equal(out, expected[0]) and torch.allclose(lse, expected[1], atol=1e-5)
    exact = fovea.attention(*numbers, causal=True, softcap=9.0)
    assert 0 < (out.float() - exact).norm() / exact.norm() < 0.05  # codes of probabilities
    ones = {name: torch.ones_like(scale) for name, scale in descales.items()}
    assert torch.equal(flash.flash_attn_func(*codes), by_recipe([x.float() for x in codes], ones)[0])


def test_packed_queries_in_float8_have_descales_of_their_sequences() -> None:
    codes, descales, _ = float8_call()
    expected, lse = flash.flash_attn_func(*codes, causal=True, return_attn_probs=True, **descales)
    rows = [x.flatten(0, 1) for x in codes]
    lengths = [len(x) // len(expected) for x in rows[:2]]
    cu = [torch.arange(len(expected) + 1, dtype=torch.int32) * length for length in lengths]
    out, packed_lse = flash.flash_attn_varlen_func(*rows, *cu, *lengths, causal=True, return_attn_probs=True, **descales)
    assert torch.equal(out.unflatten(0, expected.shape[:2]), expected)
    assert torch.equal(packed_lse.unflatten(1, expected.shape[:2]).transpose(0, 1), lse)
    used = torch.full((len(expected),), lengths[1] - 5, dtype=torch.int32)
    part = flash.flash_attn_func(codes[0], *(x[:, :-5] for x in codes[1:]), **descales)
    out = flash.flash_attn_varlen_func(*rows, *cu, *lengths, seqused_k=used, **descales)
    assert torch.equal(out.unflatten(0, expected.shape[:2]), part)


# ---- Errors ----

Q, K, V = qkv(2, 8)
REFUSED = {
    "float8 over a cache": (lambda: flash.flash_attn_with_kvcache(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), cache_seqlens=3),
                            "q is torch.float8_e4m3fn; expected f32, f16 or bf16"),
    "float8 of another kind": (lambda: flash.flash_attn_func(*(x.to(torch.float8_e5m2) for x in (Q, K, V))), "q, k and v are torch.float8_e5m2.*expected one dtype"),
    "float8 and qv": (lambda: flash.flash_attn_func(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), qv=V), "qv beside q in float8"),
    "descale": (lambda: flash.flash_attn_func(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), k_descale=torch.ones(1)), "k_descale is torch.float32 .1,.; expected f32"),
    "splits": (lambda: flash.flash_attn_func(Q, K, V, num_splits=257), "num_splits > 256 is not supported"),
    "chunk": (lambda: flash.flash_attn_func(Q, K, V, attention_chunk=-1), "attention_chunk is -1; expected >= 0"),
    "qv": (lambda: flash.flash_attn_func(Q, K, V, qv=Q[..., :8]), "qv has shape .*; expected that of q with head_dim_v"),
    "qv and k": (lambda: flash.flash_attn_with_kvcache(Q, K, V, K[:, :1], V[:, :1], Q, cache_seqlens=3), "k beside qv; expected new keys written before"),
    "heads": (lambda: flash.flash_attn_qkvpacked_func(Q), "qkv has rank 4 without num_heads_q"),
    "longest": (lambda: flash.flash_attn_with_kvcache(Q[0], K, V, cu_seqlens_q=offsets(1)), "max_seqlen_q must be provided"),
    "new": (lambda: flash.flash_attn_with_kvcache(Q, K, V, cu_seqlens_k_new=offsets(1)), "cu_seqlens_k_new without k"),
    "lengths": (lambda: flash.flash_attn_with_kvcache(Q, K, V, K[:, :1], V[:, :1]), "k without cache_seqlens"),
    "partials": (lambda: flash.flash_attn_combine(Q[None].half(), Q[None, ..., 0]), "only support fp32 data type"),
    "no partials": (lambda: flash.flash_attn_combine(Q[:0, None], Q[:0, None, ..., 0]), "0 splits; expected at least one"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_wrong_calls_are_refused(call, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


# ---- Signatures ----

SCALES = "q_descale=None, k_descale=None, v_descale=None"
DENSE = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TAIL = f"softmax_scale=None, causal=False, qv=None, {SCALES}, {DENSE}, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {SCALES}, {DENSE}, deterministic=False, num_heads_q=None, sm_margin=0, "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
    f"rotary_seqlens=None, {SCALES}, softmax_scale=None, causal=False, {DENSE}, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
    "max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_the_peers(name) -> None:
    assert set(flash.__all__) == set(SIGNATURES)
    assert plain_signature(getattr(flash, name)) == SIGNATURES[name]


def test_the_table_has_every_argument() -> None:
    arguments = {name for function in SIGNATURES for name in inspect.signature(getattr(flash, function)).parameters}
    listed = [name for row in DROP_INS["flash_attn_3"].arguments for name in row.name.split(", ")]
    assert sorted(listed) == sorted(arguments | {"num_heads_q"})
