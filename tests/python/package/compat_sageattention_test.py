"""fovea.compat.sageattention: each function against its kernel's rounding written out, and against exact attention; its words and errors."""

import inspect
import math

import pytest

import fovea

torch = pytest.importorskip("torch")
import sage_formula as formula  # noqa: E402
from flash_formula import draw  # noqa: E402
from fovea.compat import sageattention as sage  # noqa: E402
from fovea.compat._drop_ins import DROP_INS  # noqa: E402
from fovea.compat.sageattention import blackwell, core, quant  # noqa: E402

HEADS, HEADS_K, DIM = 2, 1, 64
TILES = {"block_kv": 64, "is_fp8": False}
BLOCKS = {**TILES, "q_size": 128, "q_kind": "rows", "k_kind": "rows"}
WARPS = {**TILES, "q_size": 32, "q_kind": "rows", "k_kind": "rows"}
THREADS = {**TILES, "q_size": 32, "q_kind": "query_threads", "k_kind": "key_threads"}
HOPPER = {**THREADS, "q_size": 16, "block_kv": 128, "is_fp8": True}
#: (function, its options, its rounding)
KERNELS = [
    (sage.sageattn_qk_int8_pv_fp16_triton, {}, BLOCKS),
    (sage.sageattn_qk_int8_pv_fp16_triton, {"quantization_backend": "cuda", "smooth_k": False}, {**BLOCKS, "smooth_k": False}),
    (sage.sageattn_qk_int8_pv_fp16_cuda, {}, {**THREADS, "sums_codes": True}),
    (sage.sageattn_qk_int8_pv_fp16_cuda, {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp16+fp32"}, {**WARPS, "sums_codes": True}),
    (sage.sageattn_qk_int8_pv_fp16_cuda, {"pv_accum_dtype": "fp16", "smooth_v": True}, {**THREADS, "sums_codes": True, "smooth_v": True}),
    (sage.sageattn_qk_int8_pv_fp8_cuda, {}, {**THREADS, "is_fp8": True, "v_max": 2.25}),
    (sage.sageattn_qk_int8_pv_fp8_cuda, {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32+fp32"}, {**WARPS, "is_fp8": True}),
    (sage.sageattn_qk_int8_pv_fp8_cuda, {"pv_accum_dtype": "fp32", "smooth_v": True}, {**THREADS, "is_fp8": True, "smooth_v": True}),
    (sage.sageattn_qk_int8_pv_fp8_cuda_sm90, {}, HOPPER),
    (sage.sageattn_qk_int8_pv_fp8_cuda_sm90, {"qk_quant_gran": "per_warp", "smooth_v": True}, {**HOPPER, "q_kind": "rows", "k_kind": "rows", "smooth_v": True}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def route() -> str:
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


def qkv(seqlen_q: int = 150, seqlen_k: int = 200, dim: int = DIM):
    """Heads first; keys and values with a mean that smoothing takes, and grouped heads."""
    shapes = ((2, HEADS, seqlen_q, dim), (2, HEADS_K, seqlen_k, dim), (2, HEADS_K, seqlen_k, dim))
    q, k, v = (draw(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return q, k + 3 * draw(dim, seed=7), v + 1


def error(got, expected) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def exact(q, k, v, mask=None, scale=None):
    """Of heads-first tensors, in f64; a bool mask shows keys, any other is added. (out, lse)."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    s = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.double()
    return torch.nan_to_num(torch.softmax(s, -1)) @ v, torch.logsumexp(s, -1)


# ---- What each kernel rounds ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function, options, rounding", KERNELS)
def test_rounds_as_its_kernel(function, options, rounding, causal) -> None:
    """Two kernels that differ in a granularity alone differ by 1e-3 here."""
    q, k, v = qkv()
    out, lse = function(q, k, v, is_causal=causal, return_lse=True, **options)
    expected, expected_lse = formula.attention(q, k, v, causal=causal, **rounding)
    assert error(out, expected) < 1e-4
    assert (lse - expected_lse).abs().max() < 1e-4
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    true_out, true_lse = exact(q, k, v, mask)
    spread = error(out - true_out.mean(), true_out - true_out.mean())  # the mean of v is not counted for
    assert spread < (0.06 if rounding["is_fp8"] else 0.03)
    allowed = 0.1 if rounding.get("smooth_k", True) else 0.3  # of keys with a mean
    assert lse.shape == (2, HEADS, 150) and (lse - true_lse).abs().max() < allowed


def test_two_levels_of_wide_heads_have_narrower_warps() -> None:
    q, k, v = qkv(64, 64, 96)  # upstream pads to 128
    out = sage.sageattn_qk_int8_pv_fp16_cuda(q, k, v, qk_quant_gran="per_warp", pv_accum_dtype="fp16+fp32")
    expected = {size: formula.attention(q, k, v, **{**WARPS, "q_size": size}, sums_codes=True)[0] for size in (16, 32)}
    assert error(out, expected[16]) < 1e-4 < error(out, expected[32])


@pytest.mark.parametrize("function", [sage.sageattn, *dict.fromkeys(function for function, _, _ in KERNELS)])
def test_layouts_and_dtypes(function) -> None:
    q, k, v = (x.bfloat16() for x in qkv(65, 70))
    out, lse = function(q, k, v, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.shape == q.shape and lse.dtype == torch.float32
    turned, same = function(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), "NHD", return_lse=True)
    assert torch.equal(turned.transpose(1, 2), out) and torch.equal(lse, same)
    assert isinstance(function(q, k, v), torch.Tensor)


def test_what_runs_where(monkeypatch) -> None:
    """Of each architecture upstream's function; of those that upstream refuses that of sm80."""
    q, k, v = qkv()
    assert torch.equal(sage.sageattn(q, k, v), sage.sageattn_qk_int8_pv_fp16_cuda(q, k, v, pv_accum_dtype="fp32"))
    chosen = {}
    for major, minor in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, pair=(major, minor): pair)
        function, options = core._backend_of(torch.device("cuda", 0))
        chosen[f"sm{major}{minor}"] = (function.__name__.removeprefix("sageattn_qk_int8_pv_"), *options.values())
    assert chosen == {
        "sm80": ("fp16_cuda", "fp32"), "sm86": ("fp16_triton",), "sm87": ("fp16_cuda", "fp32"), "sm89": ("fp8_cuda", "fp32+fp16"),
        "sm90": ("fp8_cuda_sm90", "fp32+fp32"), "sm100": ("fp16_cuda", "fp32"), "sm120": ("fp8_cuda", "fp32+fp16", "per_warp"),
        "sm121": ("fp8_cuda", "fp32+fp16", "per_warp"),
    }  # fmt: skip


def test_packed_sequences() -> None:
    q, k, v = qkv()
    q_rows, k_rows, v_rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    cu_q, cu_k = (torch.tensor([0, n, n, 2 * n], dtype=torch.int32) for n in (150, 200))  # one sequence is empty
    for words, mask in (({}, None), ({"is_causal": True}, torch.ones(150, 200, dtype=torch.bool).tril())):
        out, lse = sage.sageattn_varlen(q_rows, k_rows, v_rows, cu_q, cu_k, 150, 200, return_lse=True, **words)
        expected, expected_lse = formula.attention(q, k, v, causal=mask is not None, **BLOCKS)
        assert error(out.unflatten(0, (2, 150)).transpose(1, 2), expected) < 1e-4
        assert (lse.unflatten(1, (2, 150)).transpose(0, 1) - expected_lse).abs().max() < 1e-4
    bare = sage.sageattn_varlen(q_rows, k_rows, v_rows, cu_q, cu_k, 150, 200, is_causal=True, sm_scale=0.1, smooth_k=False)
    expected, _ = formula.attention(q, k, v, causal=True, smooth_k=False, scale=0.1, **BLOCKS)
    assert error(bare.unflatten(0, (2, 150)).transpose(1, 2), expected) < 1e-4


# ---- Words ----


def test_masks() -> None:
    q, k, v = qkv(48, 64)
    shown = draw(2, 1, 48, 64, seed=5) > -0.5
    shown[0, 0, 3] = False  # a row that sees nothing
    for function in (sage.sageattn, sage.sageattn_qk_int8_pv_fp16_triton, sage.sageattn_qk_int8_pv_fp8_cuda_sm90):
        out, lse = function(q, k, v, attn_mask=shown, return_lse=True)
        assert error(out, exact(q, k, v, shown)[0]) < 0.05
        assert not out[0, :, 3].any() and torch.isneginf(lse[0, :, 3]).all()
    keys = torch.arange(64) < 40
    assert error(sage.sageattn(q, k, v, attn_mask=keys), exact(q, k, v, keys)[0]) < 0.03
    added = 2 * draw(HEADS, 48, 64, seed=6)
    assert error(sage.sageattn(q, k, v, attn_mask=added), exact(q, k, v, added)[0]) < 0.03
    triton = sage.sageattn_qk_int8_pv_fp16_triton
    in_twos, in_es = triton(q, k, v, attn_mask=added / math.log(2)), triton(q, k, v, bias=added)
    assert error(in_twos, exact(q, k, v, added)[0]) < 0.03 and error(in_es, in_twos.double()) < 1e-5
    with pytest.raises(fovea.InvalidArgument, match="sageattn_qk_int8_pv_fp16_triton: attn_mask of torch.bool beside mask; expected one of them"):
        triton(q, k, v, attn_mask=shown, mask=shown)


@pytest.mark.parametrize("name, shift", [("causal_upper_left", 0), ("causal_lower_right", 16)])
def test_causal_biases_of_pytorch_are_masks(name, shift) -> None:
    """Tensors whose elements nobody has written: their kind says what they mean."""
    q, k, v = qkv(48, 64)
    bias = getattr(pytest.importorskip("torch.nn.attention.bias"), name)(48, 64)
    expected = exact(q, k, v, torch.ones(48, 64, dtype=torch.bool).tril(shift))[0]
    for function in (sage.sageattn, sage.sageattn_qk_int8_pv_fp16_triton, sage.sageattn_qk_int8_pv_fp8_cuda_sm90):
        assert error(function(q, k, v, attn_mask=bias), expected) < 0.05
    for words in ({"is_causal": True}, {"align": "top_left"}):
        with pytest.raises(fovea.InvalidArgument, match="sageattn_qk_int8_pv_fp16_triton: attn_mask is a CausalBias beside is_causal or align; expected it alone"):
            sage.sageattn_qk_int8_pv_fp16_triton(q, k, v, attn_mask=bias, **words)


def test_a_float_mask_counts_in_es_on_every_device(monkeypatch) -> None:
    q, k, v = qkv(48, 64)
    added = 2 * draw(48, 64, seed=6)
    monkeypatch.setattr(core, "_backend_of", lambda device: core._BACKENDS["sm86"])  # whose function counts in twos
    assert error(sage.sageattn(q, k, v, attn_mask=added), exact(q, k, v, added)[0]) < 0.03


def test_words_of_fovea() -> None:
    q, k, v = qkv(70, 70)
    places = torch.arange(70)[:, None] - torch.arange(70)
    out = sage.sageattn(q, k, v, window=(9, 2))
    assert error(out, exact(q, k, v, (places <= 9) & (places >= -2))[0]) < 0.03
    out = sage.sageattn(q, k, v, score_mod="score - 0.25 * abs(q_idx - kv_idx)")
    assert error(out, exact(q, k, v, -0.25 * places.abs())[0]) < 0.03
    short = q[:, :, :30]
    for align, mask in (("top_left", torch.ones(30, 70).tril()), ("bottom_right", torch.ones(30, 70).tril(40))):
        words = {} if align == "top_left" else {"align": align}  # upstream's is the default
        assert error(sage.sageattn(short, k, v, is_causal=True, **words), exact(short, k, v, mask.bool())[0]) < 0.03
    assert torch.equal(sage.sageattn(q, k, v, quant="none"), fovea.attention(q, k, v, layout="bhsd"))
    assert torch.equal(sage.sageattn(q, k, v, quant="fast"), fovea.attention(q, k, v, layout="bhsd", quant="fast"))


def test_words_of_sdpa() -> None:
    q, k, v = qkv(48, 64)
    out = sage.sageattn(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.2, enable_gqa=True)
    assert torch.equal(out, sage.sageattn(q, k, v, sm_scale=0.2)) and error(out, exact(q, k, v, scale=0.2)[0]) < 0.03
    torch.manual_seed(3)
    dropped = sage.sageattn(q, k, torch.ones_like(v), dropout_p=0.5)
    assert dropped.std() > 0.05 and dropped.mean() == pytest.approx(1, abs=0.05)


def test_gradients_are_refused_when_they_are_asked_for() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(16, 16))
    out, lse = sage.sageattn(q, k, v, return_lse=True)
    with torch.no_grad():
        assert torch.equal(out, sage.sageattn(q, k, v))
    with pytest.raises(fovea.Unsupported, match="sageattn_qk_int8_pv_fp16_cuda: a gradient through attention by a recipe; expected none"):
        (out.sum() + lse.sum()).backward()


def test_a_graph_breaks_and_goes_on() -> None:
    q, k, v = qkv(16, 16)
    compiled = torch.compile(lambda *x: 2 * sage.sageattn(*x), backend="eager")
    assert torch.equal(compiled(q, k, v), 2 * sage.sageattn(q, k, v))


REFUSED = [
    (sage.sageattn, ("XYZ",), {}, "tensor_layout is 'XYZ'; expected 'HND' or 'NHD'"),
    (sage.sageattn, (None, 0.0, True), {}, "tensor_layout is None; .*attn_mask, dropout_p and is_causal by name"),  # as SDPA is called
    (sage.sageattn, (), {"is_casual": True}, "got is_casual; expected, beside its own arguments, some of attn_mask, dropout_p"),
    (sage.sageattn, (), {"scale": 0.1, "sm_scale": 0.1}, "scale is 0.1 beside sm_scale 0.1; expected one of them"),
    (sage.sageattn, (), {"attn_mask": torch.zeros(8, 9)}, "attn_mask has shape .8, 9.; expected one that broadcasts to the scores'"),
    (sage.sageattn, (), {"quant": "quick"}, "no recipe is called 'quick'"),
    (sage.sageattn_qk_int8_pv_fp16_triton, (), {"quantization_backend": "cute"}, "quantization_backend is 'cute'; expected 'triton' or 'cuda'"),
    (sage.sageattn_qk_int8_pv_fp16_cuda, (), {"qk_quant_gran": "per_block"}, "qk_quant_gran is 'per_block'; expected one of 'per_warp', 'per_thread'"),
    (sage.sageattn_qk_int8_pv_fp16_cuda, (), {"pv_accum_dtype": "bf16"}, "pv_accum_dtype is 'bf16'; expected one of 'fp16', 'fp16.fp32', 'fp32'"),
    (sage.sageattn_qk_int8_pv_fp8_cuda, (), {"pv_accum_dtype": "fp16"}, "pv_accum_dtype is 'fp16'; expected one of 'fp32', 'fp32.fp32', 'fp32.fp16'"),
    (sage.sageattn_qk_int8_pv_fp8_cuda_sm90, (), {"pv_accum_dtype": "fp32"}, "pv_accum_dtype is 'fp32'; expected one of 'fp32.fp32'"),
]  # fmt: skip


@pytest.mark.parametrize("function, positions, words, message", REFUSED)
def test_refusals(function, positions, words, message) -> None:
    with pytest.raises(fovea.InvalidArgument, match=message):
        function(*qkv(8, 8), *positions, **words)


def test_a_recipe_without_a_kernel_is_refused_with_every_reason_and_a_hint() -> None:
    message = r"sageattn_varlen: nothing here runs quant 'qk=int8,.*; expected another recipe, .* or quant='none'[^\n]*\n(.|\n)*cpu/attention_quantized amx_bf16  codes are f16, which bf16 would round"
    q, k, v = (x[0].transpose(0, 1) for x in qkv(8, 8))
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(fovea.Unsupported, match=message):
        sage.sageattn_varlen(q, k, v, offsets, offsets, 8, 8, cpu_target="amx_bf16")


# ---- Codes ----


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_quantisers(layout, rows) -> None:
    q, k, _ = (x.half() for x in qkv(rows, rows))
    k[0, 0] = 0  # scales of zeros
    km = k.mean(2)
    turn = (lambda x: x) if layout == "HND" else (lambda x: x.transpose(1, 2))
    given = [turn(x).contiguous() for x in (q, k)]
    centred = k.float() - km.float()[:, :, None]
    for size in (64, 128):
        got = quant.per_block_int8(*given, km, BLKQ=size, BLKK=64, sm_scale=0.3, tensor_layout=layout)
        for codes, scale, expected in ((*got[:2], formula.by_rows(q.float() * (0.3 * math.log2(math.e)), size)), (*got[2:], formula.by_rows(centred, 64))):
            assert codes.dtype == torch.int8 and codes.is_contiguous() and torch.equal(turn(codes).float(), expected[0])
            torch.testing.assert_close(scale, expected[1], rtol=1e-6, atol=0)
    q_int8, q_scale, k_int8, k_scale = quant.per_warp_int8(*given, turn(km[:, :, None]), BLKQ=128, WARPQ=16, tensor_layout=layout)
    codes, scale = formula.by_rows(q.float(), 16)
    assert torch.equal(turn(q_int8).float(), codes) and q_scale.shape == (2, HEADS, -(-rows // 128) * 8)
    torch.testing.assert_close(q_scale[:, :, : scale.shape[2]], scale, rtol=1e-6, atol=0)
    assert torch.equal(turn(k_int8).float(), formula.by_rows(centred, 64)[0]) and not turn(k_int8)[0, 0].any()
    whole = quant.per_block_int8(*given, tensor_layout=layout)  # its defaults, and a mean that stays
    assert torch.equal(turn(whole[0]).float(), formula.by_rows(q.float() * (DIM**-0.5 * math.log2(math.e)), 128)[0])
    assert torch.equal(turn(whole[2]).float(), formula.by_rows(k.float(), 64)[0])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_values_in_columns(layout, rows) -> None:
    v = qkv(rows, rows)[2].bfloat16()
    v[0, 0, :, 3] = 0  # a channel of zeros, not a number of it
    given = v if layout == "HND" else v.transpose(1, 2).contiguous()
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    for words in ({}, {"smooth_v": False}, {"scale_max": 2.25}):
        codes, scale, mean = quant.per_channel_fp8(given, layout, **words)
        columns = codes if layout == "HND" else codes.transpose(1, 2)
        assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and columns.shape == (2, HEADS_K, DIM, -(-rows // 64) * 64)
        straight = torch.empty_like(columns.float())
        for place, row in enumerate(order):
            straight[..., row::16] = columns[..., place::16].float()
        assert not straight[..., rows:].any()
        taken = 0 if words.get("smooth_v") is False else v.float().mean(2)
        assert (mean is None) == (words.get("smooth_v") is False)
        values = straight[..., :rows] * scale[..., None] + (0 if mean is None else mean[..., None])
        centred = (v.float() - (0 if mean is None else taken[:, :, None])).transpose(2, 3)
        most = centred.abs().amax(3)
        torch.testing.assert_close(scale, (most / words.get("scale_max", 448)).clamp(min=1e-12), rtol=1e-5, atol=1e-6)
        # Half a step of 3 bits of mantissa, or of the least numbers.
        allowed = (centred.abs() / 16).maximum(scale[..., None] * 2**-10) * (1 + 1e-5) + 1e-6
        assert ((values - v.float().transpose(2, 3)).abs() <= allowed).all()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sub_mean(layout) -> None:
    v = qkv(8, 200)[2].bfloat16()
    given = v if layout == "HND" else v.transpose(1, 2)
    centred, mean = quant.sub_mean(given, layout)
    assert centred.dtype == torch.float16 and mean.dtype == torch.bfloat16 and mean.shape == (2, HEADS_K, DIM)
    expected = (v - v.mean(2, keepdim=True)).half()
    assert torch.equal(centred if layout == "HND" else centred.transpose(1, 2), expected) and torch.equal(mean, v.mean(2))


def test_refusals_of_quantisers() -> None:
    q, k, v = qkv(8, 8)
    with pytest.raises(fovea.InvalidArgument, match="per_warp_int8: WARPQ is 48; expected a divisor of BLKQ, 128"):
        quant.per_warp_int8(q, k, WARPQ=48)
    with pytest.raises(fovea.InvalidArgument, match="per_block_int8: BLKK is 0; expected rows, at least one"):
        quant.per_block_int8(q, k, BLKK=0)
    with pytest.raises(fovea.InvalidArgument, match="per_block_int8: tensor_layout is 'HDN'; expected 'HND' or 'NHD'"):
        quant.per_block_int8(q, k, tensor_layout="HDN")
    with pytest.raises(fovea.InvalidArgument, match="per_channel_fp8: scale_max is 500; expected above 0, at most 448"):
        quant.per_channel_fp8(v, scale_max=500)
    with pytest.raises(fovea.InvalidArgument, match=r"sub_mean: a tensor of shape \(1, 8, 64\); expected rank 4"):
        quant.sub_mean(v[0])


# ---- The table ----


def test_the_table_is_whole() -> None:
    functions = [getattr(sage, name) for name in sage.__all__] + [getattr(quant, name) for name in ("per_block_int8", "per_warp_int8", "sub_mean", "per_channel_fp8")]
    arguments = {name for function in functions for name in inspect.signature(function).parameters} | set(core._SDPA_WORDS) | set(core._WORDS)
    listed = [name for row in DROP_INS["sageattention"].arguments for name in row.name.split(", ")]
    assert arguments - {"kwargs"} == set(listed) and len(listed) == len(set(listed))
    assert "sm" not in core.get_cuda_arch_versions() and len(core.get_cuda_version()) == 2 and core.SM90_ENABLED


# ---- SageAttention3 ----


def test_rounds_as_sageattention3() -> None:
    """One block of queries and one tile of keys."""
    q, k, v = qkv(120, 128)
    out, lse = blackwell.sageattn3_blackwell(q, k, v, return_lse=True)
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 1) for x in (k, v))
    expected, expected_lse = formula.attention_in_fp4(q, k, v)
    assert error(out, expected.double()) < 1e-4 < 0.02 < error(out, exact(q, k, v)[0])  # v has a mean of 1
    assert (lse - expected_lse).abs().max() < 1e-4


def test_sageattention3_drops_nothing() -> None:
    q, k, v = qkv(40, 40)
    causal = blackwell.sageattn3_blackwell(q, k, v, is_causal=True)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    assert torch.equal(causal, blackwell.sageattn3_blackwell(q, k, v, mask))
    before = k.clone()
    assert torch.equal(blackwell.sageattn3_blackwell(q, k, v, quant="none"), fovea.attention(q, k, v, layout="bhsd"))
    assert torch.equal(k, before)  # from which upstream takes the mean in place
    with pytest.raises(fovea.Unsupported, match="sageattn3_blackwell: per_block_mean is False; expected True"):
        blackwell.sageattn3_blackwell(q, k, v, per_block_mean=False)
    with pytest.raises(Exception, match="sageattn3_blackwell: got smooth_k; expected"):
        blackwell.sageattn3_blackwell(q, k, v, smooth_k=True)
