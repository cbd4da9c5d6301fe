"""kvax's functions on `fovea.jax`, by its names and signatures: with `attention_specs` and a mesh, or all as arguments."""

from .ops import create_attention_mask, flash_attention
from .utils import (
    PADDING_SEGMENT_ID,
    FlashAttentionParamsConfig,
    attention_specs,
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)

__version_info__ = (0, 1, 1)
__version__ = ".".join(map(str, __version_info__))

__all__ = [
    "FlashAttentionParamsConfig",
    "PADDING_SEGMENT_ID",
    "attention_specs",
    "create_attention_mask",
    "flash_attention",
    "permute_tokens_context_parallelism",
    "unpermute_tokens_context_parallelism",
]
