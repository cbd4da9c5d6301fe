"""Sizes of blocks, and the id of padding."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence

import jax
import jax.numpy as jnp

PADDING_SEGMENT_ID = -1
H100_NAME = "H100"


@dataclasses.dataclass(frozen=True)
class FlashAttentionParamsConfig:
    """The sizes of the peer's kernels. Masks have rows and columns of these blocks; Fovea's plans choose their own tiles."""

    query_block_size: int = 64
    kv_block_size: int = 64
    num_warps: int = 4
    num_stages: int = 3


_OF_H100 = {
    False: FlashAttentionParamsConfig(query_block_size=128, kv_block_size=128, num_warps=8),
    True: FlashAttentionParamsConfig(query_block_size=64, kv_block_size=128, num_warps=8),
}


def get_default_flash_attention_params(backward: bool) -> FlashAttentionParamsConfig:
    """The peer's choice for the first device, which may be a CPU here."""
    is_h100 = H100_NAME in jax.devices()[0].device_kind
    return _OF_H100[backward] if is_h100 else FlashAttentionParamsConfig()


def pad_to_block_size(
    embeddings: Optional[Sequence[Any]],
    positions: Any,
    segment_ids: Any,
    block_size: int,
    pos_fill_value: int,
    transposed_inputs: bool = False,
) -> tuple[Any, Any, Any]:
    """Lengths made multiples of `block_size` by padding at the end; what is None stays so.

    Parameters
    ----------
    embeddings : sequence of arrays, [batch, seqlen, heads, head_dim], or with `transposed_inputs` [batch, heads, seqlen, head_dim]
        Padded with 0.
    positions : array, [batch, seqlen]
        Padded with `pos_fill_value`.
    segment_ids : array, [batch, seqlen]
        Padded with `PADDING_SEGMENT_ID`.

    Returns
    -------
    (embeddings, positions, segment_ids)
    """

    def padded(x: Any, axis: int, value: int) -> Any:
        if x is None:
            return None
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % block_size)
        return jnp.pad(x, widths, constant_values=value)

    axis = 2 if transposed_inputs else 1
    made = None if embeddings is None else tuple(padded(x, axis, 0) for x in embeddings)
    return made, padded(positions, 1, pos_fill_value), padded(segment_ids, 1, PADDING_SEGMENT_ID)
