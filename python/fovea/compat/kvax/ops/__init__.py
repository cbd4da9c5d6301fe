"""Attention with document masks and padding, and the masks of blocks that it takes."""

from .flash_attention_triton import flash_attention_triton as flash_attention
from .mask_creator import create_attention_mask

__all__ = ["create_attention_mask", "flash_attention"]
