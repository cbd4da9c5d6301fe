"""Tiles, counts, pictures and the dense mask."""

import struct
import zlib

import numpy as np
import pytest

import fovea
from attention_test import SHIFT, qkv

Q, K = fovea.TensorSpec((2, 33, 4, 32)), fovea.TensorSpec((2, 70, 2, 32))


def test_counts_of_a_causal_square() -> None:
    square = fovea.TensorSpec((1, 1024, 1, 64))
    counts = fovea.block_map(square, square, causal=True, tile_q=128, tile_kv=128).counts
    assert counts == (28, 8, 28)


def test_tiles_agree_with_the_dense_mask() -> None:
    made = fovea.block_map(Q, K, mask=fovea.causal() & fovea.dilated(2), tile_q=16, tile_kv=8)
    dense = made.dense()
    q_idx, kv_idx = np.ogrid[:33, :70]
    assert dense.shape == (2, 4, 33, 70)
    assert (dense == ((kv_idx <= q_idx + SHIFT) & ((q_idx + SHIFT - kv_idx) % 2 == 0))).all()
    assert made.kinds.shape == made.shape == (2, 4, 3, 9)
    for row in range(3):
        for column in range(9):
            tile = dense[0, 0, 16 * row : 16 * row + 16, 8 * column : 8 * column + 8]
            kind = made.kinds[0, 0, row, column]
            assert kind != 0 or not tile.any()
            assert kind != 2 or tile.all()
    assert 0 < made.sparsity < 1


def test_one_sequence_and_head_alone() -> None:
    assert fovea.block_map(Q, K, causal=True, sequence=1, q_head=2).shape == (1, 1, 1, 2)


def test_packed_sequences() -> None:
    offsets = np.int32([0, 3, 10])
    spec = fovea.TensorSpec((10, 2, 8))
    made = fovea.block_map(spec, spec, cu_seqlens=offsets, causal=True, tile_q=4, tile_kv=4)
    assert made.shape == (2, 2, 2, 2)
    assert made.dense().shape == (2, 2, 7, 7)
    assert made.dense()[0].sum() == 2 * 6


def test_pictures() -> None:
    made = fovea.block_map(*qkv()[:2], causal=True, tile_q=8, tile_kv=8)
    assert "█" in made.print() and "BlockMap" in str(made)
    picture = made.png(max_size=64)
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    data = picture[picture.index(b"IDAT") + 4 : picture.index(b"IEND") - 8]
    assert len(zlib.decompress(data)) == height * (1 + 3 * width)
    assert "data:image/png;base64," in made._repr_html_()


def test_a_notebook_shows_picture_and_legend() -> None:
    page = fovea.block_map(Q, K, causal=True, tile_q=16, tile_kv=16)._repr_html_()
    counts = fovea.block_map(Q, K, causal=True, tile_q=16, tile_kv=16).counts
    for word in (f"empty {counts.empty} ", f"partial {counts.partial} ", f"full {counts.full} ", "3 x 5 tiles of 16 queries", "2 sequences and 4 heads"):
        assert word in page
    alone = fovea.block_map(Q, K, causal=True, sequence=0, q_head=0)._repr_html_()
    assert "first of" not in alone


def test_png_is_written(tmp_path) -> None:
    file = tmp_path / "mask.png"
    assert fovea.block_map(Q, K, causal=True).png(file) == file.read_bytes()


def test_no_tiles() -> None:
    empty = fovea.TensorSpec((1, 0, 1, 8))
    made = fovea.block_map(empty, empty, causal=True)
    assert made.counts == (0, 0, 0) and made.sparsity == 0.0


def test_refuses_by_name() -> None:
    with pytest.raises(fovea.InvalidArgument, match="tile_q"):
        fovea.block_map(Q, K, tile_q=-1)
    with pytest.raises(TypeError, match="softcap"):
        fovea.block_map(Q, K, softcap=2.0)
