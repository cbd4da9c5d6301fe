"""flash_attn's modules and models on Fovea: attention against a plain formula over the same weights, whole models against transformers'."""

import pytest

import fovea
from fovea.errors import Unsupported

torch = pytest.importorskip("torch")
import flash_formula as formula  # noqa: E402
from compat_flash_attn_test import route, turned  # noqa: E402, F401
from fovea.compat import flash_attn  # noqa: E402
from fovea.compat.flash_attn.modules import block as blocks, mha, mlp  # noqa: E402
from fovea.compat.flash_attn.modules.embedding import BertEmbeddings, GPT2Embeddings  # noqa: E402
from fovea.compat.flash_attn.ops.fused_dense import FusedDense, fused_dense_func  # noqa: E402
from fovea.compat.flash_attn.ops.rms_norm import RMSNorm, rms_norm  # noqa: E402
from fovea.compat.flash_attn.ops.triton import layer_norm  # noqa: E402
from fovea.compat.flash_attn.utils.generation import InferenceParams  # noqa: E402

nn, F = torch.nn, torch.nn.functional
WIDTH, HEADS = 64, 4
DIM = WIDTH // HEADS


def made(**options):
    torch.manual_seed(0)
    return mha.MHA(WIDTH, HEADS, layer_idx=0, **options).eval()


def rows(*shape, seed=1):
    return formula.draw(*shape, WIDTH, seed=seed)


# ---- Attention between projections ----


def angles(module, num_positions, dtype):
    places = torch.arange(num_positions, dtype=dtype)
    table = places[:, None] * module.rotary_emb.base ** (-torch.arange(0, module.rotary_emb_dim, 2, dtype=dtype) / module.rotary_emb_dim)
    return table.cos(), table.sin()


def linear(module, name, x):
    layer = getattr(module, name)
    return F.linear(x, layer.weight.to(x), None if layer.bias is None else layer.bias.to(x))


def convolved(module, name, x):
    """Each row, the one before it and the one before that, by three weights a channel."""
    layer, padded = getattr(module, name), F.pad(x, (0, 0, 2, 0))
    parts = [padded[:, i : i + x.shape[1]] * layer.weight[:, 0, i].to(x) for i in range(3)]
    return sum(parts) + layer.bias.to(x)


def plain(module, x, x_kv=None, keep=None, **features):
    """MHA by PyTorch's operators, [batch, seqlen, width]."""
    q_part, kv_parts = DIM * HEADS, 2 * DIM * module.num_heads_kv
    if module.cross_attn:
        projected = torch.cat([linear(module, "Wq", x), linear(module, "Wkv", x)], -1) if x_kv is None else None
        q, kv = (linear(module, "Wq", x), linear(module, "Wkv", x_kv)) if projected is None else projected.split([q_part, kv_parts], -1)
    else:
        qkv = linear(module, "Wqkv", x)
        if hasattr(module, "dwconv_qkv"):
            qkv = convolved(module, "dwconv_qkv", qkv)
        q, kv = qkv.split([q_part, kv_parts], -1)
    if hasattr(module, "dwconv_q"):
        q, kv = convolved(module, "dwconv_q", q), convolved(module, "dwconv_kv", kv)
    q = q.unflatten(-1, (HEADS, DIM))
    k, v = kv.unflatten(-1, (2, module.num_heads_kv, DIM)).unbind(2)
    if module.rotary_emb_dim:
        tables, places = angles(module, x.shape[1], x.dtype), torch.arange(x.shape[1]).repeat(len(x), 1)
        q, k = (turned(part, places, *tables, module.rotary_emb.interleaved) for part in (q, k))
    if keep is None:
        out, _ = formula.attention(q, k, v, **features)
    else:  # sequences without the keys that are hidden
        out = torch.cat([formula.attention(q[b : b + 1], k[b : b + 1, keep[b]], v[b : b + 1, keep[b]], **features)[0] for b in range(len(q))])
    return linear(module, "out_proj", out.flatten(-2))


def check(module, got, *tensors, **features) -> None:
    formula.assert_close([got.detach()], lambda dtype: [plain(module, *(x.to(dtype) for x in tensors), **features).detach()])


SLOPES = torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(HEADS)])
OPTIONS = {
    "plain": ({}, {}), "causal": ({"causal": True}, {"causal": True}), "grouped": ({"num_heads_kv": 2}, {}), "one_kv": ({"num_heads_kv": 1, "causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.7}, {"scale": 0.7}), "flash": ({"use_flash_attn": True, "causal": True}, {"causal": True}),
    "no_bias": ({"qkv_proj_bias": False, "out_proj_bias": False}, {}),
    "rotary": ({"rotary_emb_dim": DIM, "causal": True}, {"causal": True}),
    "rotary_part": ({"rotary_emb_dim": 8, "rotary_emb_interleaved": True, "num_heads_kv": 2, "rotary_emb_base": 500.0}, {}),
    "alibi": ({"use_alibi": True, "use_flash_attn": True, "causal": True}, {"alibi": SLOPES, "causal": True}),
    "window": ({"window_size": (3, 0), "use_flash_attn": True, "num_heads_kv": 2}, {"window": (3, 0)}),
    "dwconv": ({"dwconv": True}, {}), "dwconv_grouped": ({"dwconv": True, "num_heads_kv": 2}, {}), "dwconv_cross": ({"dwconv": True, "cross_attn": True}, {}),
    "checkpointing": ({"checkpointing": True, "rotary_emb_dim": DIM}, {}), "cross": ({"cross_attn": True, "num_heads_kv": 2}, {}),
}  # fmt: skip


@pytest.mark.parametrize("options, features", OPTIONS.values(), ids=OPTIONS)
def test_attention_is_the_formulas(options, features) -> None:
    module, x = made(**options), rows(2, 9)
    check(module, module(x), x, **features)


@pytest.mark.parametrize("name", ["plain", "grouped", "rotary", "alibi", "checkpointing", "cross"])
def test_gradients_are_the_formulas(name) -> None:
    options, features = OPTIONS[name]
    module, x = made(**options), rows(2, 9)
    weight = module.Wkv.weight if name == "cross" else module.Wqkv.weight

    def gradients(function, dtype):
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad((function(leaf) * rows(2, 9, seed=5).to(dtype)).sum(), (leaf, weight))

    formula.assert_close(gradients(module, torch.float32), lambda dtype: gradients(lambda leaf: plain(module, leaf, **features), dtype))


@pytest.mark.parametrize("num_heads", [4, 8, 6, 12])
def test_slopes_of_alibi(num_heads) -> None:
    powers = {4: [-2, -4, -6, -8], 8: range(-1, -9, -1), 6: [-2, -4, -6, -8, -1, -3], 12: [*range(-1, -9, -1), -0.5, -1.5, -2.5, -3.5]}
    assert mha.get_alibi_slopes(num_heads) == pytest.approx([2.0**power for power in powers[num_heads]])


def test_what_was_given_comes_back() -> None:
    x, x_kv = rows(2, 9), rows(2, 5, seed=2)
    module = made(return_residual=True)
    out, back = module(x)
    assert back is x
    check(module, out, x)
    module = made(return_residual=True, cross_attn=True)
    out, back = module(x, x_kv)
    assert back is x_kv
    check(module, out, x, x_kv)


@pytest.mark.parametrize("num_heads_kv", [4, 2])
def test_packed_rows_are_sequences_of_their_own(num_heads_kv) -> None:
    module, x = made(use_flash_attn=True, causal=True, num_heads_kv=num_heads_kv), rows(12)
    out = module(x, cu_seqlens=torch.tensor([0, 5, 5, 12], dtype=torch.int32), max_seqlen=7)
    for part in (slice(0, 5), slice(5, 12)):
        check(module, out[None, part], x[None, part], causal=True)


def test_packed_rows_over_other_packed_rows() -> None:
    module, x, x_kv = made(use_flash_attn=True, cross_attn=True), rows(8), rows(9, seed=2)
    offsets, offsets_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 8], [0, 7, 9]))
    out = module(x, x_kv, cu_seqlens=offsets, max_seqlen=5, cu_seqlens_k=offsets_k, max_seqlen_k=7)
    for i in range(2):
        part, keys = slice(offsets[i], offsets[i + 1]), slice(offsets_k[i], offsets_k[i + 1])
        check(module, out[None, part], x[None, part], x_kv[None, keys])


@pytest.mark.parametrize("options", [{}, {"num_heads_kv": 2}, {"cross_attn": True}, {"rotary_emb_dim": DIM}], ids=str)
def test_padding_is_hidden(options) -> None:
    module, x = made(**options), rows(2, 9)
    keep = torch.arange(9) < torch.tensor([[6], [9]])
    x[0, 6:] = 1e4  # no number that is added to the scores would hide these
    out = module(x, key_padding_mask=keep)
    # By the formula a row at a time: what stands behind the keys is not asked.
    check(module, out[:1, :6], x[:1, :6])
    check(module, out[1:], x[1:])
    assert out.isfinite().all()


def test_some_rows_ask() -> None:
    module, x, subset = made(cross_attn=True), rows(2, 9), torch.tensor([0, 4, 7])
    check(module, module(x, mixer_subset=subset), x[:, subset], x)


@pytest.mark.parametrize("use_flash_attn", [False, True])
@pytest.mark.parametrize("num_heads_kv", [4, 2])
def test_dropout_is_of_training_alone(num_heads_kv, use_flash_attn) -> None:
    module, x = made(dropout=0.5, use_flash_attn=use_flash_attn, num_heads_kv=num_heads_kv), rows(2, 9)
    check(module, module(x), x)
    q, kv = module.Wqkv(x).split([WIDTH, 2 * DIM * num_heads_kv], -1)
    k, v = kv.unflatten(-1, (2, num_heads_kv, DIM)).unbind(2)
    torch.manual_seed(1)
    dropped = flash_attn.flash_attn_func(q.unflatten(-1, (HEADS, DIM)), k, v, 0.5)
    torch.manual_seed(1)
    assert torch.allclose(module.train()(x), module.out_proj(dropped.flatten(-2)), atol=1e-6)


# ---- Caches ----

CACHED = {
    "plain": {}, "flash": {"use_flash_attn": True}, "grouped": {"num_heads_kv": 2, "use_flash_attn": True}, "rotary": {"rotary_emb_dim": DIM},
    "interleaved": {"rotary_emb_dim": 8, "rotary_emb_interleaved": True, "num_heads_kv": 2}, "xpos": {"rotary_emb_dim": DIM, "rotary_emb_scale_base": 64.0},
    "alibi": {"use_alibi": True, "use_flash_attn": True}, "window": {"use_flash_attn": True, "window_size": (3, 0)},
}  # fmt: skip


@pytest.mark.parametrize("options", CACHED.values(), ids=CACHED)
@pytest.mark.parametrize("has_lengths", [False, True])
def test_steps_over_a_cache_are_one_pass(options, has_lengths) -> None:
    module, x = made(causal=True, **options), rows(2, 9)
    expected = module(x)
    lengths = torch.zeros(3, dtype=torch.int32) if has_lengths else None
    state = InferenceParams(12, 3, batch_size_offset=1, lengths_per_sample=lengths)
    state.key_value_memory_dict[0] = module.allocate_inference_cache(3, 12).fill_(torch.nan)
    outs = []
    for part in x.split([4, 3, 1, 1], 1):
        outs.append(module(part, inference_params=state))
        state.seqlen_offset += part.shape[1]
        if has_lengths:
            state.seqlen_offset = -1  # is not asked
            lengths += part.shape[1]
    assert torch.allclose(torch.cat(outs, 1), expected, atol=2e-6)
    cache = state.key_value_memory_dict[0]
    assert cache.shape == (3, 12, 2, module.num_heads_kv, DIM) and cache[0].isnan().all() and not cache[1:, :9].isnan().any()


def test_a_cache_begins_anew() -> None:
    module, x = made(causal=True), rows(2, 5)
    state = InferenceParams(8, 2, lengths_per_sample=torch.zeros(2, dtype=torch.int32))
    expected = module(x, inference_params=state)
    state.lengths_per_sample += 5
    state.seqlen_offset = 5
    state.reset(8, 2)
    assert state.seqlen_offset == 0 and torch.equal(module(x, inference_params=state), expected)


def test_queries_of_no_mask_see_the_whole_cache() -> None:
    module, x = made(rotary_emb_dim=DIM), rows(2, 9)
    state = InferenceParams(9, 2)
    module(x[:, :5], inference_params=state)
    state.seqlen_offset = 5
    assert torch.allclose(module(x[:, 5:], inference_params=state), module(x)[:, 5:], atol=2e-6)


# ---- Errors ----

X = rows(2, 4)
CU = torch.tensor([0, 4], dtype=torch.int32)
KEEP = torch.ones(2, 4, dtype=torch.bool)
REFUSED = {
    "heads": (lambda: mha.MHA(66, 4), "embed_dim 66, num_heads 4, num_heads_kv 4; expected each to be a multiple"),
    "kv heads": (lambda: mha.MHA(64, 4, num_heads_kv=3), "num_heads_kv 3; expected each to be a multiple"),
    "alibi": (lambda: made(use_alibi=True), "use_alibi or window_size without use_flash_attn"),
    "window": (lambda: made(window_size=(2, 0)), "use_alibi or window_size without use_flash_attn"),
    "angles": (lambda: made(cross_attn=True, rotary_emb_dim=8), "rotary_emb_dim beside cross_attn"),
    "offsets": (lambda: made()(X[0], cu_seqlens=CU, max_seqlen=4), "cu_seqlens; expected use_flash_attn=True"),
    "packed angles": (lambda: made(use_flash_attn=True, rotary_emb_dim=8)(X[0], cu_seqlens=CU, max_seqlen=4), "neither rotary_emb_dim nor"),
    "longest": (lambda: made(use_flash_attn=True)(X[0], cu_seqlens=CU), "cu_seqlens without max_seqlen"),
    "other offsets": (lambda: made(use_flash_attn=True, cross_attn=True)(X[0], X[1], cu_seqlens=CU, max_seqlen=4), "cu_seqlens without cu_seqlens_k"),
    "padding": (lambda: made(use_flash_attn=True)(X, key_padding_mask=KEEP), "key_padding_mask; expected use_flash_attn=False"),
    "subset": (lambda: made()(X, mixer_subset=torch.tensor([0])), "mixer_subset; expected cross_attn=True"),
    "cache": (lambda: mha.MHA(WIDTH, HEADS)(X, inference_params=InferenceParams(8, 2)), "inference_params; expected layer_idx"),
    "beside a cache": (lambda: made(causal=True)(X, inference_params=InferenceParams(8, 2), causal=False), "causal beside inference_params"),
    "group": (lambda: fused_dense_func(X, X[0], process_group=1), "process_group; expected None"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_wrong_calls_are_refused(call, message) -> None:
    with pytest.raises((fovea.InvalidArgument, Unsupported), match=message):
        call()


# ---- MLPs, norms, blocks, embeddings ----


def test_mlps() -> None:
    torch.manual_seed(0)
    x = rows(2, 5)
    plain_mlp = mlp.Mlp(WIDTH)
    assert plain_mlp.fc1.out_features == 4 * WIDTH
    assert torch.allclose(plain_mlp(x), plain_mlp.fc2(F.gelu(plain_mlp.fc1(x))))
    gated = mlp.GatedMlp(WIDTH, activation=F.silu, bias1=False, return_residual=True)
    assert gated.fc1.out_features == 2 * 256 and gated.fc1.bias is None  # 8/3 * 64, rounded up to 128s
    value, gate = x @ gated.fc1.weight[:256].T, x @ gated.fc1.weight[256:].T
    out, back = gated(x)
    assert back is x and torch.allclose(out, gated.fc2(value * F.silu(gate)), atol=1e-6)
    fused = mlp.FusedMLP(WIDTH, 96, 32, activation="sqrelu", checkpoint_lvl=2)
    assert torch.allclose(fused(x), fused.fc2(F.relu(fused.fc1(x)) ** 2))
    dense = FusedDense(WIDTH, 8, return_residual=True)
    assert torch.equal(dense(x)[0], F.linear(x, dense.weight, dense.bias)) and dense(x)[1] is x


@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("has_residual, has_second, prenorm", [(False, False, False), (True, False, True), (True, True, True), (False, True, False)])
def test_norms_of_sums(is_rms, has_residual, has_second, prenorm) -> None:
    x, residual, x1 = (rows(2, 5, seed=seed) for seed in (1, 2, 3))
    weight, bias, weight1, scale = (formula.draw(n, seed=4 + i) for i, n in enumerate((WIDTH, WIDTH, WIDTH, 10)))
    function = layer_norm.rms_norm_fn if is_rms else layer_norm.layer_norm_fn
    more = {"x1": x1, "weight1": weight1} if has_second else {}
    got = function(
        x, weight, bias, residual if has_residual else None, **more, eps=1e-3, rowscale=scale.view(2, 5), prenorm=prenorm,
        zero_centered_weight=True, residual_in_fp32=True,
    )  # fmt: skip
    summed = x * scale.view(2, 5, 1) + (residual if has_residual else 0) + (x1 if has_second else 0)

    def normed(w, b):
        if is_rms:
            return F.rms_norm(summed, (WIDTH,), w + 1, 1e-3) + (0 if b is None else b)
        return F.layer_norm(summed, (WIDTH,), w + 1, b, 1e-3)

    expected = [normed(weight, bias)] + ([normed(weight1, None)] if has_second else []) + ([summed] if prenorm else [])
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(expected) and all(torch.allclose(x, y, atol=1e-5) for x, y in zip(got, expected))


def test_norms_behind_dropout() -> None:
    x, x1, weight = rows(2, 50).abs() + 1, rows(2, 50, seed=2).abs() + 1, torch.ones(WIDTH)
    torch.manual_seed(0)
    y, summed, kept, kept1 = layer_norm.layer_norm_fn(x, weight, None, x1=x1, dropout_p=0.25, prenorm=True, return_dropout_mask=True)
    assert torch.allclose(summed, (x * kept + x1 * kept1) / 0.75) and torch.allclose(y, F.layer_norm(summed, (WIDTH,), weight, None, 1e-6), atol=1e-5)
    assert abs(kept.float().mean() - 0.75) < 0.02 and not torch.equal(kept, kept1)
    half = layer_norm.layer_norm_fn(x.bfloat16(), weight, None, prenorm=True, residual_in_fp32=True, out_dtype=torch.float16)
    assert [part.dtype for part in half] == [torch.float16, torch.float32]
    into = torch.empty_like(x)
    assert layer_norm.layer_norm_fn(x, weight, None, out=into) is into and torch.equal(into, layer_norm.layer_norm_fn(x, weight, None))


def test_the_norm_of_the_mean_square() -> None:
    norm, x = RMSNorm(WIDTH, eps=1e-3, dropout_p=0.5), rows(2, 5)
    assert list(norm.state_dict()) == ["weight"] and torch.allclose(norm.eval()(x), F.rms_norm(x, (WIDTH,), None, 1e-3), atol=1e-6)
    assert not torch.allclose(norm.train()(x), norm.eval()(x))
    assert torch.equal(rms_norm(x, norm.weight, 1e-3), norm(x))
    assert torch.equal(RMSNorm(WIDTH, zero_centered_weight=True).eval()(x), RMSNorm(WIDTH).eval()(x))


def block_of(cls=blocks.Block, parts=None, **options):
    torch.manual_seed(0)
    made_block = cls(WIDTH, lambda dim: mha.MHA(dim, HEADS, causal=True, **(parts or {})), lambda dim: mlp.Mlp(dim, **(parts or {})), **options)
    for name, parameter in made_block.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    return made_block.eval()


def test_blocks_with_norms_before() -> None:
    block, x, residual = block_of(residual_in_fp32=True), rows(2, 5).bfloat16().float(), rows(2, 5, seed=2)
    hidden, left = block(x, residual)
    after = block.mixer(block.norm1(x + residual)) + x + residual
    assert torch.allclose(left, after, atol=1e-6) and torch.allclose(hidden, block.mlp(block.norm2(after)), atol=1e-5)
    first, left = block(x)
    assert torch.allclose(left, block.mixer(block.norm1(x)) + x, atol=1e-6)
    half = block.bfloat16()(x.bfloat16())
    assert (half[0].dtype, half[1].dtype) == (torch.bfloat16, torch.float32)


def test_blocks_without_an_mlp() -> None:
    block = blocks.Block(WIDTH, lambda dim: mha.MHA(dim, HEADS), lambda dim: nn.Identity()).eval()
    hidden, residual = block(X)
    assert torch.equal(residual, X) and torch.equal(hidden, block.mixer(block.norm1(X))) and not hasattr(block, "norm2")


def test_blocks_with_norms_behind() -> None:
    for returned in (False, True):
        block, x = block_of(parts={"return_residual": returned}, prenorm=False, return_residual=returned), rows(2, 5)
        after = block.norm1((block.mixer(x)[0] if returned else block.mixer(x)) + x)
        assert torch.allclose(block(x), block.norm2((block.mlp(after)[0] if returned else block.mlp(after)) + after), atol=1e-5)


@pytest.mark.parametrize("tied_norm", [False, True])
def test_blocks_side_by_side(tied_norm) -> None:
    block, x, y, residual = block_of(blocks.ParallelBlock, tied_norm=tied_norm), rows(2, 5), rows(2, 5, seed=2), rows(2, 5, seed=3)
    attended, fed, summed = block(x, y, residual)
    assert torch.allclose(summed, x + y + residual)
    assert torch.allclose(attended, block.mixer(block.norm1(summed))) and hasattr(block, "norm2") != tied_norm
    assert torch.allclose(fed, block.mlp((block.norm1 if tied_norm else block.norm2)(summed)))


def test_some_rows_of_a_block_ask() -> None:
    block = blocks.Block(WIDTH, lambda dim: mha.MHA(dim, HEADS, cross_attn=True), mlp.Mlp).eval()
    subset, x = torch.tensor([1, 3]), rows(2, 5)
    for got, whole in zip(block(x, mixer_subset=subset), block(x)):
        assert torch.allclose(got, whole[:, subset], atol=1e-6)


def test_whole_samples_are_left_out() -> None:
    block, x = block_of(drop_path1=0.5, drop_path2=0.5), torch.ones(64, 1, WIDTH)
    assert torch.equal(block(x)[1], block.eval()(x)[1])
    block.train()
    _, residual = block(x)
    sums = block.norm1(torch.tensor([0.0, 2.0])[:, None, None].expand(2, 1, WIDTH))
    mixed = block.mixer(sums)
    # Of the input 0 or twice itself, of the attention 0 or twice itself.
    kinds = torch.stack([a + b for a, row in ((0.0, 0), (2.0, 1)) for b in (torch.zeros(WIDTH), 2 * mixed[row, 0])])
    nearest = (residual[:, 0, None] - kinds).abs().amax(-1).min(1)
    assert nearest.values.max() < 1e-5 and set(nearest.indices.tolist()) == {0, 1, 2, 3}


def test_embeddings() -> None:
    torch.manual_seed(0)
    ids, places = torch.tensor([[3, 1, 2]]), torch.tensor([[5, 4, 0]])
    gpt = GPT2Embeddings(WIDTH, 10, 8, word_embed_proj_dim=16)
    words = gpt.word_embeddings.weight[ids] @ gpt.project_in.weight.T
    assert torch.allclose(gpt(ids, places), words + gpt.position_embeddings.weight[places])
    assert torch.allclose(gpt(ids), words + gpt.position_embeddings.weight[:3])
    bert = BertEmbeddings(WIDTH, 10, 8, 2)
    plain_sum = bert.word_embeddings.weight[ids] + bert.position_embeddings.weight[:3]
    assert torch.allclose(bert(ids), plain_sum + bert.token_type_embeddings.weight[0])
    assert torch.allclose(bert(ids, None, torch.ones_like(ids)), plain_sum + bert.token_type_embeddings.weight[1])
    assert list(GPT2Embeddings(WIDTH, 10, 0).state_dict()) == ["word_embeddings.weight"]
