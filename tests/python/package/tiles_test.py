"""Tables of visible tiles: from lists, and of the tiles whose mean keys mean queries like best."""

import math

import numpy as np
import pytest

import fovea
import oracle
from attention_test import draw

INDPTR = np.int64([0, 2, 2, 3, 7, 8, 9])
INDICES = np.int32([0, 3, 1, 0, 1, 2, 3, 2, 0])
SHAPE = (2, 3, 4)
TABLE = np.bool_([[[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], [[1, 1, 1, 1], [0, 0, 1, 0], [1, 0, 0, 0]]])


def test_lists_become_their_table() -> None:
    table = fovea.tile_table(INDPTR, INDICES, SHAPE)
    assert table.dtype == np.bool_
    np.testing.assert_array_equal(table, TABLE)
    np.testing.assert_array_equal(fovea.tile_table(INDPTR[:4], INDICES[:3], (3, 4)), TABLE[0])


def test_lists_of_torch_become_a_table_of_torch() -> None:
    torch = pytest.importorskip("torch")
    table = fovea.tile_table(torch.from_numpy(INDPTR), torch.from_numpy(INDICES), SHAPE)
    assert torch.equal(table, torch.from_numpy(TABLE))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.int32([0, 4, 1, 0, 1, 2, 3, 2, 0]), r"tile_table: indices\[1\] is 4, in row 0; expected 0 to 3"),
        (np.int32([0, 3, 1, 0, 1, 1, 3, 2, 0]), r"tile_table: indices\[5\] is 1 behind 1, in row 3; expected each tile once"),
        (INDICES[:8], r"tile_table: indptr ends at 9; expected 8"),
        (INDICES.astype(np.float32), r"tile_table: indices is f32 \[9\]; expected i32 or i64"),
    ],
)
def test_wrong_lists_are_refused(indices: np.ndarray, message: str) -> None:
    with pytest.raises(fovea.InvalidArgument, match=message):
        fovea.tile_table(INDPTR, indices, SHAPE)


def test_masks_by_lists_equal_the_dense_mask() -> None:
    q, k, v = draw((1, 40, 2, 8)), draw((1, 50, 2, 8), 1), draw((1, 50, 2, 8), 2)
    mask = fovea.tile_mask(fovea.tile_table(INDPTR, INDICES, SHAPE), 16, 13)
    got = oracle.Result(*fovea.attention(q, k, v, mask=mask, return_lse=True))
    oracle.assert_close(got, q, k, v, visible=lambda p: TABLE[p.head, p.q_idx // 16, p.kv_idx // 13])


def test_gradients_are_those_of_the_dense_mask() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(draw((1, 48, 2, 8), seed)).requires_grad_() for seed in range(3))
    table = torch.from_numpy(TABLE)
    dout = torch.from_numpy(draw((1, 48, 2, 8), 3))
    got = torch.autograd.grad(fovea.attention(q, k, v, mask=fovea.tile_mask(table, 16, 12)), (q, k, v), dout)
    dense = table.repeat_interleave(16, 1).repeat_interleave(12, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    p = torch.softmax(scores.masked_fill(~dense, -math.inf), -1).nan_to_num()
    expected = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", p, v), (q, k, v), dout)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs.nan_to_num(), rtol=1e-4, atol=1e-5)


def chosen_by_loops(q, k, top_k, tile_q, tile_kv, causal, align) -> np.ndarray:
    (batch, length_q, heads, _), (_, length_kv, heads_kv, _) = q.shape, k.shape
    rows, columns = -(-length_q // tile_q), -(-length_kv // tile_kv)
    table = np.zeros((batch, heads, rows, columns), np.bool_)
    shift = length_kv - length_q if align == "bottom_right" else 0
    for b, h, row in np.ndindex(batch, heads, rows):
        queries = np.arange(row * tile_q, min((row + 1) * tile_q, length_q))
        weights = {}
        for column in range(columns):
            keys = np.arange(column * tile_kv, min((column + 1) * tile_kv, length_kv))
            weights[column] = q[b, queries, h].mean(0) @ k[b, keys, h // (heads // heads_kv)].mean(0)
            positions = queries + shift
            if causal and keys[0] > positions[-1]:
                del weights[column]
            elif causal and any(column * tile_kv <= position < (column + 1) * tile_kv for position in positions):
                weights[column] = math.inf
        for column in sorted(weights, key=weights.__getitem__, reverse=True)[:top_k]:
            table[b, h, row, column] = True
    return table


@pytest.mark.parametrize(
    ("causal", "align", "tile_q", "tile_kv", "top_k"),
    [
        (False, "bottom_right", 16, 8, 3),  # both last tiles are cut
        (True, "bottom_right", 8, 16, 2),
        (True, "bottom_right", 16, 4, 6),  # a diagonal of four tiles and more
        (True, "top_left", 8, 8, 3),
        (False, "bottom_right", 1, 16, 2),  # each query for itself
        (True, "bottom_right", 16, 16, 9),  # more than there are
    ],
)
def test_tiles_are_those_of_the_greatest_means(causal, align, tile_q, tile_kv, top_k) -> None:
    q, k = draw((2, 37, 4, 8)), draw((2, 59, 2, 8), 1)
    expected = chosen_by_loops(q.astype(np.float64), k.astype(np.float64), top_k, tile_q, tile_kv, causal, align)
    choose = {"top_k": top_k, "tile_q": tile_q, "tile_kv": tile_kv, "causal": causal, "align": align}
    np.testing.assert_array_equal(fovea.top_k_tiles(q, k, **choose), expected)
    turned = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k))
    np.testing.assert_array_equal(fovea.top_k_tiles(*turned, **choose, layout="bhsd"), expected)


def test_tiles_of_torch_are_those_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    q, k = draw((2, 37, 4, 8)), draw((2, 59, 2, 8), 1)
    for causal in (False, True):
        expected = fovea.top_k_tiles(q, k, 3, 16, 8, causal=causal)
        table = fovea.top_k_tiles(torch.from_numpy(q).requires_grad_(), torch.from_numpy(k), 3, 16, 8, causal=causal)
        assert not table.requires_grad
        np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k_tiles: top_k is 0; expected >= 1"),
        ({"tile_kv": 2.5}, "top_k_tiles: tile_kv is 2.5; expected a whole number"),
        ({"align": "left"}, "top_k_tiles: align is 'left'"),
        ({"k": draw((2, 59, 3, 8))}, "top_k_tiles: q has 4 heads and k 3; expected a multiple"),
        ({"k": draw((2, 59, 2, 9))}, r"top_k_tiles: q is \[2, 37, 4, 8\] and k \[2, 59, 2, 9\]"),
        ({"k": draw((2, 0, 2, 8))}, r"top_k_tiles: q is \[2, 37, 4, 8\] and k \[2, 0, 2, 8\]; expected extents of at least 1"),
        ({"layout": "shbd"}, "top_k_tiles: layout is 'shbd'"),
    ],
)
def test_wrong_choices_are_refused(change: dict, message: str) -> None:
    with pytest.raises(fovea.InvalidArgument, match=message):
        fovea.top_k_tiles(**{"q": draw((2, 37, 4, 8)), "k": draw((2, 59, 2, 8)), "top_k": 2, **change})
