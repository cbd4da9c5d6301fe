"""flash_attn.ops.fused_dense by PyTorch's linear layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from ....errors import Unsupported
from ..modules.mlp import FusedMLP

__all__ = ["FusedDense", "FusedMLP", "fused_dense_func"]


def fused_dense_func(
    x: Any, weight: Any, bias: Any = None, return_residual: bool = False, process_group: Any = None, sequence_parallel: bool = True
) -> Any:
    """x weightᵀ + bias; with return_residual (result, x)."""
    if process_group is not None:
        raise Unsupported("fused_dense_func: process_group; expected None: tensor parallel layers are not here")
    y = F.linear(x, weight, bias)
    return (y, x) if return_residual else y


class FusedDense(nn.Linear):  # type: ignore[misc, unused-ignore]
    """A linear layer that may return its input, too."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, return_residual: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, input: Any, process_group: Any = None) -> Any:
        """The result; with return_residual (result, input)."""
        return fused_dense_func(input, self.weight, self.bias, self.return_residual, process_group)
