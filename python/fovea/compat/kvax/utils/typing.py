"""The types of kvax's signatures."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence, Union

import jax

DeviceArray = Any  # a jax.Array, traced or not
PRNGKey = Any
#: (batch, sequence, heads, head_dim): names of axes of a mesh, tuples of them, or None.
Specs = Sequence[Any]
FlattenedAttentionMask = tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]


@dataclasses.dataclass
class AttentionMask:
    """For each block of rows the blocks that it visits, from `lower_bounds` up to `upper_bounds`, and among them those of which every
    pair is visible, from `lower_full_bounds` up to `upper_full_bounds`.

    Attributes
    ----------
    lower_bounds, upper_bounds, lower_full_bounds, upper_full_bounds : array, [batch, shards, blocks] i32
    block_sizes : (int, int), optional
        Tokens of a block of rows and of a block that is visited. `flash_attention` compares them with its parameters; of masks that
        callers put together themselves they are not known.
    """

    lower_bounds: DeviceArray
    upper_bounds: DeviceArray
    lower_full_bounds: DeviceArray
    upper_full_bounds: DeviceArray
    block_sizes: Optional[tuple[int, int]] = None

    def flatten(self) -> FlattenedAttentionMask:
        """The four arrays, in the order of the attributes."""
        return self.lower_bounds, self.upper_bounds, self.lower_full_bounds, self.upper_full_bounds

    @classmethod
    def unflatten(cls, arrays: Union[FlattenedAttentionMask, Sequence[DeviceArray]]) -> AttentionMask:
        """A mask of four arrays, in that order."""
        return cls(*arrays)


jax.tree_util.register_dataclass(
    AttentionMask,
    data_fields=("lower_bounds", "upper_bounds", "lower_full_bounds", "upper_full_bounds"),
    meta_fields=("block_sizes",),
)
