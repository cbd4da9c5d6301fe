"""What models of flash_attn keep between the calls of a generation."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class InferenceParams:
    """Caches of all layers, and how far they are filled.

    Attributes
    ----------
    max_seqlen, max_batch_size : int
        What caches have room for.
    seqlen_offset : int
        Tokens in the caches; the caller adds those of each call.
    batch_size_offset : int
        The slot of the first sequence of a call.
    key_value_memory_dict : dict
        By layer: [max_batch_size, max_seqlen, 2, num_heads_kv, head_dim].
    lengths_per_sample : Tensor, [max_batch_size] i32, optional
        Tokens of each sequence, in place of seqlen_offset.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = dataclasses.field(default_factory=dict)
    lengths_per_sample: Any = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begins anew in the caches that are there."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
