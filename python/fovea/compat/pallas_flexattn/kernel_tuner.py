"""Sizes that the peer's kernels would take; Fovea's plans choose their own, and take these without a use."""

from __future__ import annotations

import functools
from typing import Any

# Up to a length: rows and columns of a block, warps, stages.
_BY_LENGTH = ((256, (32, 32, 4, 2)), (512, (64, 64, 4, 3)), (2048, (128, 64, 4, 3)), (4096, (128, 128, 8, 4)))
_LONGER = (128, 128, 8, 5)


@functools.lru_cache(maxsize=128)
def get_optimal_params(seq_len: int, head_dim: int = 64, use_block_sparsity: bool = False) -> tuple[int, int, int, int]:
    """(block_r, block_c, num_warps, num_stages)."""
    block_r, block_c, num_warps, num_stages = next((sizes for limit, sizes in _BY_LENGTH if seq_len <= limit), _LONGER)
    if head_dim > 128:
        block_r, block_c, num_stages = min(block_r, 64), min(block_c, 64), min(num_stages, 3)
    elif head_dim <= 32:
        num_stages = max(num_stages, 4)
    if use_block_sparsity:
        block_r, block_c = min(block_r, 64), min(block_c, 64)
    return block_r, block_c, num_warps, num_stages


def get_kernel_config(batch_size: int, num_heads: int, seq_len: int, head_dim: int, mask_type: str | None = None) -> dict[str, Any]:
    """The same with what it is for."""
    sizes = get_optimal_params(seq_len, head_dim, mask_type in ("causal", "sliding_window"))
    problem = {"batch_size": batch_size, "num_heads": num_heads, "seq_len": seq_len, "head_dim": head_dim}
    return problem | dict(zip(("block_r", "block_c", "num_warps", "num_stages"), sizes))


def print_kernel_config(batch_size: int, num_heads: int, seq_len: int, head_dim: int, mask_type: str | None = None) -> None:
    """Prints it, a line for each number."""
    for name, value in get_kernel_config(batch_size, num_heads, seq_len, head_dim, mask_type).items():
        print(f"{name:<12} {value}")
