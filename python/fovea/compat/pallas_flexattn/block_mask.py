"""Which blocks of keys a block of queries sees, as lists; exact: a block stays where any of its cells is visible."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .mask_mod import MaskMod, causal_mask, sliding_window_mask


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """The visible blocks of each row of blocks.

    Attributes
    ----------
    num_blocks_in_row : array, [num_q_blocks] i32
    col_indices : array, [num_q_blocks, most blocks of a row] i32
        Ascending; -1 behind a row's last.
    block_size, q_len, kv_len : int
    """

    num_blocks_in_row: Any
    col_indices: Any
    block_size: int
    q_len: int
    kv_len: int

    @property
    def num_q_blocks(self) -> int:
        """Rows of blocks."""
        return -(-self.q_len // self.block_size)

    @property
    def num_kv_blocks(self) -> int:
        """Columns of blocks."""
        return -(-self.kv_len // self.block_size)

    @property
    def sparsity(self) -> float:
        """The part of all blocks that nobody sees, from 0 to 1."""
        return 1.0 - float(jnp.sum(self.num_blocks_in_row)) / max(self.num_q_blocks * self.num_kv_blocks, 1)

    def is_visible(self) -> Any:
        """[num_q_blocks, num_kv_blocks] bool."""
        return (self.col_indices[:, :, None] == jnp.arange(self.num_kv_blocks)).any(1)


jax.tree_util.register_dataclass(
    BlockMask, data_fields=("num_blocks_in_row", "col_indices"), meta_fields=("block_size", "q_len", "kv_len")
)


def create_block_mask(mask_mod: MaskMod, B: Any, H: Any, Q_LEN: int, KV_LEN: int, block_size: int = 128) -> BlockMask:  # noqa: N803
    """The blocks of a mask in which some query sees some key; B and H are not looked at, since a mask asks for neither."""
    num_columns = -(-KV_LEN // block_size)
    keys = jnp.arange(KV_LEN)[None]
    rows = []
    for first in range(0, Q_LEN, block_size):
        queries = jnp.arange(first, min(first + block_size, Q_LEN))[:, None]
        seen = np.asarray(jnp.broadcast_to(mask_mod(queries, keys), (len(queries), KV_LEN))).any(0)
        seen = np.pad(seen, (0, num_columns * block_size - KV_LEN))
        rows.append(np.flatnonzero(seen.reshape(num_columns, block_size).any(1)))
    counts = [len(row) for row in rows]
    columns = np.full((len(rows), max(counts, default=0)), -1, np.int32)
    for row, blocks in zip(columns, rows):
        row[: len(blocks)] = blocks
    return BlockMask(jnp.asarray(counts, jnp.int32), jnp.asarray(columns), block_size, Q_LEN, KV_LEN)


def create_causal_block_mask(seq_len: int, block_size: int = 128) -> BlockMask:
    """That of `causal_mask`."""
    return create_block_mask(causal_mask, 1, 1, seq_len, seq_len, block_size)


def create_sliding_window_block_mask(seq_len: int, window_size: int, block_size: int = 128) -> BlockMask:
    """That of a window of `window_size` keys on both sides."""
    return create_block_mask(sliding_window_mask(window_size, window_size), 1, 1, seq_len, seq_len, block_size)
