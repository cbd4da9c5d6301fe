"""Helpers of flash_attn: what generation keeps between calls."""
