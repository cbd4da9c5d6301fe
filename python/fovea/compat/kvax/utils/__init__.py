"""What kvax's callers need beside attention."""

from .common import PADDING_SEGMENT_ID, FlashAttentionParamsConfig
from .permutation import permute_tokens_context_parallelism, unpermute_tokens_context_parallelism
from .specs import attention_specs

__all__ = [
    "FlashAttentionParamsConfig",
    "PADDING_SEGMENT_ID",
    "attention_specs",
    "permute_tokens_context_parallelism",
    "unpermute_tokens_context_parallelism",
]
