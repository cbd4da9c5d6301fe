"""flash_attn.ops.rms_norm: the module, and the function."""

from __future__ import annotations

from typing import Any

from .triton.layer_norm import RMSNorm, rms_norm_fn

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """x / sqrt(mean(x²) + epsilon) * weight."""
    return rms_norm_fn(x, weight, None, eps=epsilon)
