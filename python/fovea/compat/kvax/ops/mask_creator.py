"""Masks of blocks: which blocks of keys a block of queries visits, and the other way round. Their pictures, and how much they leave."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np

from ..utils.common import PADDING_SEGMENT_ID, FlashAttentionParamsConfig, get_default_flash_attention_params, pad_to_block_size
from ..utils.sharding import size_of
from ..utils.specs import AttentionSpecs, Axes, get_attention_specs, held_specs
from ..utils.typing import AttentionMask, Specs

_LARGEST = int(np.iinfo(np.int32).max)
_MOST_ROWS, _MOST_COLUMNS = 32, 64  # of a picture that fits

logger = logging.getLogger(__name__)


# ---- Masks ----


class _Blocks(NamedTuple):
    """The least and the greatest position and id of each block: [batch, shards, blocks]. Padding's id is above all others."""

    least_position: Any
    greatest_position: Any
    least_id: Any
    greatest_id: Any

    @classmethod
    def of(cls, positions: Any, ids: Any, num_shards: int, block_size: int, fill: int) -> _Blocks:
        """Of tokens [batch, seqlen]: shards are padded each to whole blocks."""
        batch = positions.shape[0]
        positions, ids = (x.reshape(batch * num_shards, -1) for x in (positions, ids))
        _, positions, ids = pad_to_block_size(None, positions, ids, block_size, fill)
        ids = jnp.where(ids == PADDING_SEGMENT_ID, _LARGEST, ids)
        positions, ids = (x.reshape(batch, num_shards, -1, block_size) for x in (positions, ids))
        return cls(positions.min(-1), positions.max(-1), ids.min(-1), ids.max(-1))

    def along(self, axis: int) -> _Blocks:
        """With an axis of one block, to be compared with each of others."""
        return _Blocks(*(jnp.expand_dims(x, axis) for x in self))

    def is_single(self) -> Any:
        return self.least_id == self.greatest_id

    def is_padding(self) -> Any:
        return self.least_id == _LARGEST


def _bounds(is_in: Any) -> tuple[Any, Any]:
    """The first of the last axis, and the one behind the last; both 0 where there is none."""
    count = is_in.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    lower = jnp.where(is_in, index, count).min(-1, initial=count)
    upper = jnp.where(is_in, index + 1, 0).max(-1, initial=0)
    return jnp.where(upper > 0, lower, 0).astype(jnp.int32), upper.astype(jnp.int32)


def _mask_of(queries: _Blocks, keys: _Blocks, skip_pad_tokens: bool, rows_are_keys: bool, block_sizes: tuple[int, int]) -> AttentionMask:
    q, kv = (queries.along(2), keys.along(3)) if rows_are_keys else (queries.along(3), keys.along(2))
    is_visited = (q.greatest_position >= kv.least_position) & (q.least_id <= kv.greatest_id) & (kv.least_id <= q.greatest_id)
    if skip_pad_tokens:
        is_visited &= ~q.is_padding() & ~kv.is_padding()
    is_full = is_visited & q.is_single() & kv.is_single() & (q.least_position >= kv.greatest_position)
    lower, upper = _bounds(is_visited)
    lower_full, upper_full = _bounds(is_full)
    # Where full blocks do not lie together, as those of a document in several pieces, or there are none, all are partial.
    has_full = (upper_full > lower_full) & (is_full.sum(-1) == upper_full - lower_full)
    without = upper if rows_are_keys else lower
    lower_full, upper_full = (jnp.where(has_full, x, without) for x in (lower_full, upper_full))
    return AttentionMask(lower, upper, lower_full, upper_full, block_sizes)


@functools.partial(jax.jit, static_argnames=("kv_block_size", "query_block_size", "skip_pad_tokens", "rows_are_keys", "num_shards"))
def _computed(
    query_positions: Any, query_segment_ids: Any, kv_positions: Any, kv_segment_ids: Any, *, kv_block_size: int, query_block_size: int,
    skip_pad_tokens: bool, rows_are_keys: bool, num_shards: int,
) -> AttentionMask:  # fmt: skip
    queries = _Blocks.of(query_positions, query_segment_ids, num_shards, query_block_size, PADDING_SEGMENT_ID)
    keys = _Blocks.of(kv_positions, kv_segment_ids, 1, kv_block_size, _LARGEST)
    sizes = (kv_block_size, query_block_size) if rows_are_keys else (query_block_size, kv_block_size)
    mask = _mask_of(queries, keys, skip_pad_tokens, rows_are_keys, sizes)
    if rows_are_keys:
        return mask
    batch = mask.lower_bounds.shape[0]
    # Rows of all devices, one's behind the other's.
    lower, upper, lower_full, upper_full = (x.reshape(batch, 1, -1) for x in mask.flatten())
    return AttentionMask(lower, upper, lower_full, upper_full, sizes)


_Tokens = tuple[Any, Any, Any, Any]  # positions and ids of queries, then of keys


def _mask(tokens: _Tokens, kv_block_size: int, query_block_size: int, skip_pad_tokens: bool, rows_are_keys: bool, num_shards: int) -> AttentionMask:
    for name, (positions, ids), parts in (("query", tokens[:2], num_shards), ("kv", tokens[2:], 1)):
        if jnp.ndim(positions) != 2 or jnp.shape(positions) != jnp.shape(ids):
            raise ValueError(
                f"create_attention_mask: {name}_positions and {name}_segment_ids have shapes {jnp.shape(positions)} and {jnp.shape(ids)}; "
                "expected [batch, seqlen] of both."
            )
        if positions.shape[1] % parts:
            raise ValueError(f"create_attention_mask: {positions.shape[1]} queries over {parts} devices; expected a multiple.")
    mask: AttentionMask = _computed(
        *tokens, kv_block_size=kv_block_size, query_block_size=query_block_size, skip_pad_tokens=skip_pad_tokens, rows_are_keys=rows_are_keys,
        num_shards=num_shards,
    )  # fmt: skip
    return mask


def compute_attention_mask_single_device(
    query_positions: Any,
    query_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    kv_block_size: int,
    query_block_size: int,
    skip_pad_tokens: bool = True,
    calculate_dkdv_mask: bool = False,
) -> AttentionMask:
    """One mask of tokens that lie on one device: rows are blocks of queries, with `calculate_dkdv_mask` blocks of keys."""
    tokens = (query_positions, query_segment_ids, kv_positions, kv_segment_ids)
    return _mask(tokens, kv_block_size, query_block_size, skip_pad_tokens, calculate_dkdv_mask, num_shards=1)


def num_query_shards(specs: Optional[AttentionSpecs], mesh: Any) -> int:
    """Devices that split the queries' sequences."""
    axis = None if specs is None else specs.query_specs[Axes.query_sequence]
    return 1 if axis is None else size_of(mesh, axis)


def compute_attention_mask(
    query_positions: Any,
    query_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    kv_block_size: int,
    query_block_size: int,
    skip_pad_tokens: bool = True,
    calculate_dkdv_mask: bool = False,
    mesh: Any = None,
) -> AttentionMask:
    """One mask of tokens that are split as the specs which hold say."""
    tokens = (query_positions, query_segment_ids, kv_positions, kv_segment_ids)
    return _mask(tokens, kv_block_size, query_block_size, skip_pad_tokens, calculate_dkdv_mask, num_query_shards(get_attention_specs(), mesh))


def masks_of(
    tokens: _Tokens,
    fwd_params: Optional[FlashAttentionParamsConfig],
    bwd_params: Optional[FlashAttentionParamsConfig],
    calc_bwd_mask: bool,
    skip_pad_tokens: bool,
    num_shards: int,
) -> tuple[AttentionMask, ...]:
    """The masks of a step: of forward, and with `calc_bwd_mask` those of dq and of dk and dv."""
    fwd = fwd_params or get_default_flash_attention_params(backward=False)
    bwd = bwd_params or get_default_flash_attention_params(backward=True)

    def mask(kv_block_size: int, query_block_size: int, rows_are_keys: bool = False) -> AttentionMask:
        return _mask(tokens, kv_block_size, query_block_size, skip_pad_tokens, rows_are_keys, num_shards)

    forward = mask(fwd.kv_block_size, fwd.query_block_size)
    if not calc_bwd_mask:
        return (forward,)
    # Sizes of dq's are exchanged, as the peer's kernels exchange them.
    dq = mask(bwd.query_block_size, bwd.kv_block_size)
    return forward, dq, mask(bwd.kv_block_size, bwd.query_block_size, rows_are_keys=True)


def create_attention_mask(
    query_positions: Any,
    query_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    fwd_params: Optional[FlashAttentionParamsConfig] = None,
    bwd_params: Optional[FlashAttentionParamsConfig] = None,
    calc_bwd_mask: bool = False,
    skip_pad_tokens: bool = True,
    mesh: Any = None,
) -> tuple[AttentionMask, ...]:
    """Masks of blocks, once for all layers of a step; by the specs that hold, of one device where there are none.

    Parameters
    ----------
    query_positions, query_segment_ids : array, [batch, seqlen_q] i32
    kv_positions, kv_segment_ids : array, [batch, seqlen_kv] i32
        `PADDING_SEGMENT_ID` is padding.
    fwd_params, bwd_params : FlashAttentionParamsConfig, optional
        Sizes of blocks; the same ones go to `flash_attention`.
    calc_bwd_mask : bool
        Whether the masks of both parts of backward are made, too.
    skip_pad_tokens : bool
        Whether blocks of padding alone are not visited.
    mesh : Mesh, optional
        The one that is set unless given.

    Returns
    -------
    tuple of one or three AttentionMask

    Raises
    ------
    ValueError
        Shapes differ, or queries do not divide among devices.
    """
    tokens = (query_positions, query_segment_ids, kv_positions, kv_segment_ids)
    return masks_of(tokens, fwd_params, bwd_params, calc_bwd_mask, skip_pad_tokens, num_query_shards(held_specs(), mesh))


def make_attention_mask_spec(dkdv_mask: bool) -> Specs:
    """How a mask's arrays are split, by the specs that hold."""
    specs = get_attention_specs()
    q, kv = specs.query_specs, specs.kv_specs
    sequences = (q[Axes.query_sequence], kv[Axes.kv_sequence])
    return (q[Axes.batch], *(sequences if dkdv_mask else sequences[::-1]))


def make_attention_mask_specs(dkdv_mask: bool = False) -> tuple[tuple[Specs, ...], tuple[Specs, ...]]:
    """How positions and ids of queries and keys are split, and the four arrays of their mask."""
    specs = get_attention_specs()
    queries, keys = (tuple(x[:2]) for x in (specs.query_specs, specs.kv_specs))
    return (queries, queries, keys, keys), (make_attention_mask_spec(dkdv_mask),) * 4


# ---- Pictures ----


def cells_of(mask: AttentionMask, num_inner_blocks: int, sequence: int = 0) -> Any:
    """[blocks of rows, inner blocks of all shards] i32: 2 for full, 1 for partial, 0 for those that are not visited."""
    lower, upper, lower_full, upper_full = (np.asarray(x)[sequence] for x in mask.flatten())
    num_shards = lower.shape[0]
    inner = np.arange(num_inner_blocks // num_shards)
    of_shards = []
    for shard in range(num_shards):
        visited, full = (
            (inner >= low[shard, :, None]) & (inner < high[shard, :, None]) for low, high in ((lower, upper), (lower_full, upper_full))
        )
        of_shards.append(visited.astype(np.int32) + (visited & full))
    return np.concatenate(of_shards, 1)


def _fitted(cells: Any) -> Any:
    """At most 32 x 64 cells: of several that are alike the same, else partial."""
    steps = [-(-extent // most) for extent, most in zip(cells.shape, (_MOST_ROWS, _MOST_COLUMNS))]
    starts = [np.arange(0, extent, step) for extent, step in zip(cells.shape, steps)]

    def reduced(reduce: Any) -> Any:
        return reduce.reduceat(reduce.reduceat(cells, starts[0], 0), starts[1], 1)

    least, most = reduced(np.minimum), reduced(np.maximum)
    return np.where(least == most, least, 1)


def picture(cells: Any) -> str:
    """Cells within a frame: full ones dark, partial ones grey."""
    edge: str = "  " + "==" * cells.shape[1] + "  \n"
    return edge + "".join(f"||{''.join(('  ', '░░', '██')[cell] for cell in row)}||\n" for row in cells) + edge


def print_mask(mask: AttentionMask, num_inner_blocks: int, print_only_first_in_batch: bool = True, fit_in_screen: bool = True) -> None:
    """Logs pictures of a mask.

    Parameters
    ----------
    mask : AttentionMask
    num_inner_blocks : int
        Blocks that a row could visit, of all shards.
    print_only_first_in_batch : bool
        Else one for each sequence.
    fit_in_screen : bool
        Whether a large one is made smaller, to 32 x 64 cells.
    """
    sequences = 1 if print_only_first_in_batch else mask.lower_bounds.shape[0]
    every = [cells_of(mask, num_inner_blocks, sequence) for sequence in range(sequences)]
    logger.info("Attention masks:\n\n%s", "\n".join(picture(_fitted(cells) if fit_in_screen else cells) for cells in every))


def calculate_mask_sparsity(mask: AttentionMask, query_block_size: int, kv_block_size: int, query_seq_len: int, kv_seq_len: int) -> float:
    """The part of all blocks that is visited, from 0 to 1; the peer calls it sparsity."""
    num_blocks = -(-query_seq_len // query_block_size) * -(-kv_seq_len // kv_block_size)
    visited = np.asarray(mask.upper_bounds, np.int64) - np.asarray(mask.lower_bounds)
    return float(visited.sum() / (visited.shape[0] * num_blocks))
