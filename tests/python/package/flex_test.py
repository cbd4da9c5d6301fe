"""flex_attention and create_block_mask beside PyTorch's own, in float64."""

import copy
import inspect
import pickle

import pytest

import fovea

torch = pytest.importorskip("torch")
import fovea.torch  # noqa: E402

try:
    from torch.nn.attention import flex_attention as theirs
except ImportError:
    pytest.skip("this PyTorch has no FlexAttention", allow_module_level=True)

from sdpa_test import tensors  # noqa: E402

Q, KV = 150, 200
SHAPES = ((2, 4, Q, 16), (2, 4, KV, 16), (2, 4, KV, 16))
SLOPES, DOC = tensors((4,))[0], torch.arange(256, dtype=torch.int32) // 60


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return (DOC[q] == DOC[k]) & (h >= b)


def alibi(score, b, h, q, k):
    return score - SLOPES[h].abs() * (q - k).abs()


def softcap(score, b, h, q, k):
    return 5 * torch.tanh(score / 5)


pytestmark = pytest.mark.filterwarnings("ignore")  # that theirs is slow uncompiled


def expected(given, score_mod, mask_mod, **features):
    block_mask = None if mask_mod is None else theirs.create_block_mask(mask_mod, 2, 4, Q, KV, device="cpu")
    return theirs.flex_attention(*(x.double() for x in given), score_mod=score_mod, block_mask=block_mask, return_lse=True, **features)


@pytest.mark.parametrize("mask_mod", [None, causal, documents])
@pytest.mark.parametrize("score_mod", [None, alibi, softcap])
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_equals_pytorchs(mask_mod, score_mod, whose) -> None:
    given = tensors(*SHAPES)
    maker = fovea.torch.create_block_mask if whose == "ours" else theirs.create_block_mask
    block_mask = None if mask_mod is None else maker(mask_mod, 2, 4, Q, KV, device="cpu")
    out, lse = fovea.torch.flex_attention(*given, score_mod=score_mod, block_mask=block_mask, return_lse=True)
    exact_out, exact_lse = expected(given, score_mod, mask_mod)
    assert (out - exact_out).abs().max() <= 2e-6
    is_finite = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), is_finite)
    assert (lse - exact_lse)[is_finite].abs().max() <= 4e-6


def test_grouped_heads_and_one_cache_for_all() -> None:
    q, k, v = tensors((2, 4, Q, 16), (1, 2, KV, 16), (1, 2, KV, 16))
    out = fovea.torch.flex_attention(q, k, v, enable_gqa=True, scale=0.5)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), *(x.double().repeat_interleave(2, 1).expand(2, -1, -1, -1) for x in (k, v)), scale=0.5
    )
    assert (out - exact).abs().max() <= 2e-6


def test_a_mask_of_given_blocks_alone() -> None:
    given = tensors(*SHAPES)
    num_blocks = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    block_mask = theirs.BlockMask.from_kv_blocks(num_blocks, indices, BLOCK_SIZE=128, seq_lengths=(Q, KV))
    out = fovea.torch.flex_attention(*given, block_mask=block_mask)
    visible = torch.ones(Q, KV, dtype=torch.bool)
    visible[:128, :128] = False
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in given), attn_mask=visible)
    assert (out - exact).abs().max() <= 2e-6


def test_what_a_score_reads_learns() -> None:
    given = tensors(*SHAPES)
    slopes = SLOPES.clone().requires_grad_()
    out = fovea.torch.flex_attention(
        *given, score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q), block_mask=fovea.torch.create_block_mask(causal, None, None, Q, KV)
    )
    (gradient,) = torch.autograd.grad(out.sum(), slopes)
    double = SLOPES.double().requires_grad_()
    bias = double[:, None, None] * (torch.arange(KV) - torch.arange(Q)[:, None])
    bias = bias.masked_fill(torch.ones(Q, KV, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in given), attn_mask=bias)
    (wanted,) = torch.autograd.grad(exact.sum(), double)
    assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.skipif(not hasattr(theirs, "AuxRequest"), reason="this PyTorch has no AuxRequest")
@pytest.mark.parametrize("request_lse, request_max", [(False, False), (True, False), (False, True), (True, True)])
def test_what_else_is_asked_for(request_lse: bool, request_max: bool) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(*SHAPES))
    words = {"score_mod": softcap, "block_mask": fovea.torch.create_block_mask(documents, 2, 4, Q, KV)}
    out, aux = fovea.torch.flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=request_lse, max_scores=request_max), **words)
    expected, lse = fovea.torch.flex_attention(q, k, v, return_lse=True, **words)
    assert isinstance(aux, theirs.AuxOutput) and torch.equal(out, expected)
    assert aux.lse is None if not request_lse else torch.equal(aux.lse, lse) and aux.lse.requires_grad
    if not request_max:
        assert aux.max_scores is None
        return
    scores = softcap((q.double() @ k.double().transpose(-1, -2)) / 4, 0, 0, 0, 0)
    batch, head, row, key = (torch.arange(size).view([-1 if dim == axis else 1 for axis in range(4)]) for dim, size in enumerate(scores.shape))
    exact = scores.masked_fill(~documents(batch, head, row, key), -torch.inf).amax(-1)
    assert torch.equal(exact.isfinite(), aux.max_scores.isfinite()) and not exact.isfinite().all()
    assert (exact - aux.max_scores).nan_to_num().abs().max() < 1e-5 and not aux.max_scores.requires_grad


def test_signatures_are_pytorchs() -> None:
    for name in ("flex_attention", "create_block_mask"):
        mine, peers = (inspect.signature(getattr(module, name)).parameters for module in (fovea.torch, theirs))
        for word, parameter in peers.items():
            assert (mine[word].kind, mine[word].default) == (parameter.kind, parameter.default), (name, word)


def test_block_masks_are_copied_moved_and_adjusted() -> None:
    q, k, v = tensors(*SHAPES)
    made = fovea.torch.create_block_mask(documents, 2, 4, Q + 7, KV + 9, BLOCK_SIZE=(32, 64))
    fitting = copy.deepcopy(made).to("cpu")._adjust(Q, KV)
    assert fitting.shape == (2, 4, Q, KV) and fitting.BLOCK_SIZE == (32, 64)
    expected = fovea.torch.flex_attention(q, k, v, block_mask=fovea.torch.create_block_mask(documents, 2, 4, Q, KV))
    assert torch.equal(fovea.torch.flex_attention(q, k, v, block_mask=fitting), expected)


LENGTHS = torch.tensor([70, 160, 199], dtype=torch.int32)


def ragged(b, h, q, k):
    return (k < LENGTHS[b]) & (q + 20 * h >= k)


@pytest.mark.parametrize(
    "index", [0, -1, (1, 2), (slice(1, 3), slice(2, None)), (slice(None), slice(None), 1), (slice(None), 3, -1), (2, slice(1, 3), slice(1, 4))], ids=str
)
def test_parts_of_block_masks_are_those_of_the_whole(index) -> None:
    """Batch entries and heads without a step, and blocks of 32 queries, the last of them of 22."""
    q, k, v = tensors((3, 4, Q, 16), (3, 4, KV, 16), (3, 4, KV, 16))
    whole = fovea.torch.create_block_mask(ragged, 3, 4, Q, KV, BLOCK_SIZE=(32, 64))
    part = whole[index]
    b, h, rows, keys = torch.meshgrid(*map(torch.arange, (3, 4, Q, KV)), indexing="ij")
    given = index if isinstance(index, tuple) else (index,)
    places = [slice(i % n, i % n + 1) if isinstance(i, int) else i for i, n in zip(given, (3, 4, 5))]
    if len(places) == 3:
        first, end, _ = places[2].indices(5)
        places[2] = slice(32 * first, 32 * end)
    visible = ragged(b, h, rows, keys)[tuple(places)]
    assert part.shape == tuple(visible.shape) and part.BLOCK_SIZE == (32, 64)
    dense = theirs.create_block_mask(ragged, 3, 4, Q, KV, device="cpu", BLOCK_SIZE=(32, 64))[index]
    assert torch.equal(part.to_dense(), dense.to_dense()) and part.shape == dense.shape
    given = [q[tuple(places)], k[tuple(places[:2])], v[tuple(places[:2])]]
    out = fovea.torch.flex_attention(*given, block_mask=pickle.loads(pickle.dumps(part)))
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in given), visible)
    assert (out - exact).abs().max() <= 2e-6
    again = part[-1, :, :1]  # a part of a part
    assert (again.block_map().dense() == visible[-1:, :, :32].numpy()).all()


def test_the_part_of_one_batch_entry_serves_all() -> None:
    q, k, v = tensors((3, 4, Q, 16), (3, 4, KV, 16), (3, 4, KV, 16))
    part = fovea.torch.create_block_mask(ragged, 3, 4, Q, KV)[1]
    out = fovea.torch.flex_attention(q, k, v, block_mask=part)
    for entry in range(3):
        alone = fovea.torch.flex_attention(q[entry : entry + 1], k[entry : entry + 1], v[entry : entry + 1], block_mask=part)
        assert torch.equal(out[entry : entry + 1], alone)


def test_another_formula_may_be_assigned() -> None:
    """PyTorch's way of decoding: blocks of a query, and a mask_mod that knows where it is."""
    q, k, v = tensors((2, 4, 1, 16), (2, 4, KV, 16), (2, 4, KV, 16))
    block_mask = fovea.torch.create_block_mask(causal, None, None, KV, KV)[:, :, 1]._adjust(1, KV)
    assert block_mask.sparsity() == 0 and len(str(block_mask)) > 0
    block_mask.mask_mod = lambda b, h, q, k: causal(b, h, q + 77, k)
    out = fovea.torch.flex_attention(q, k, v, block_mask=block_mask)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k[:, :, :78].double(), v[:, :, :78].double())
    assert (out - exact).abs().max() <= 2e-6 and block_mask.sparsity() == 50


def test_indices_of_block_masks_are_refused_by_name() -> None:
    block_mask = fovea.torch.create_block_mask(causal, 2, 4, Q, KV)
    for index in (torch.tensor([0]), slice(None, None, 2), 1.0, None):
        with pytest.raises(fovea.InvalidArgument, match="BlockMask: the index of heads is .*; expected a whole number, or a slice"):
            block_mask[:, index]
    for index in ((2,), (0, -5), (0, 0, 2), (0, 0, 0, 0)):
        with pytest.raises(IndexError, match="BlockMask: "):
            block_mask[index]


def test_block_masks_say_what_they_leave() -> None:
    mine = fovea.torch.create_block_mask(causal, None, None, 1024, 1024)
    dense = theirs.create_block_mask(causal, 1, 1, 1024, 1024, device="cpu")
    assert torch.equal(mine.to_dense(), dense.to_dense()) and mine.sparsity() == dense.sparsity()
    assert mine.shape == (1, 1, 1024, 1024) and mine.numel() == 2**20
    assert "sparsity=43.75%" in str(mine) and "kv_idx" in repr(mine)
    huge = fovea.torch.create_block_mask(causal, None, None, 2**20, 2**20)
    assert huge.seq_lengths == (2**20, 2**20)


def test_refusals() -> None:
    q, k, v = tensors(*SHAPES)
    with pytest.raises(fovea.InvalidArgument, match="lengths"):
        fovea.torch.flex_attention(q, k, v, block_mask=fovea.torch.create_block_mask(causal, 1, 1, Q, KV + 1))
    with pytest.raises(fovea.InvalidArgument, match="enable_gqa"):
        fovea.torch.flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(fovea.InvalidArgument, match="rank 3"):
        fovea.torch.flex_attention(q[0], k, v)
    with pytest.raises(fovea.InvalidArgument, match="block_mask is a function; expected what create_block_mask makes"):
        fovea.torch.flex_attention(q, k, v, block_mask=causal)
    with pytest.raises(fovea.InvalidArgument, match="return_lse beside return_aux"):
        fovea.torch.flex_attention(q, k, v, return_lse=True, return_aux=object())
    with pytest.raises(fovea.InvalidArgument, match="BLOCK_SIZE"):
        fovea.torch.create_block_mask(causal, 1, 1, Q, KV, BLOCK_SIZE=0)
