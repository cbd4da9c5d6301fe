"""pallas-flexattn's functions on `fovea.jax`, by its names and signatures; what it planned (score_mod, block masks that skip) works."""

from .block_mask import BlockMask, create_block_mask, create_causal_block_mask, create_sliding_window_block_mask
from .flash_attn import flash_attention, flash_attention_bwd, flash_attention_fwd, mha_reference
from .kernel_tuner import get_kernel_config, get_optimal_params, print_kernel_config
from .mask_mod import MaskMod, bidirectional_mask, causal_mask, sliding_window_mask

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "MaskMod",
    "bidirectional_mask",
    "causal_mask",
    "create_block_mask",
    "create_causal_block_mask",
    "create_sliding_window_block_mask",
    "flash_attention",
    "flash_attention_bwd",
    "flash_attention_fwd",
    "get_kernel_config",
    "get_optimal_params",
    "mha_reference",
    "print_kernel_config",
    "sliding_window_mask",
]
