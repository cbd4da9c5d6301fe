"""flash_attn.modules.mlp by PyTorch's layers: the same constructor arguments and names of weights."""

from __future__ import annotations

from typing import Any, Callable

import torch.nn.functional as F
from torch import nn

from ..ops.activations import ACTIVATIONS


class Mlp(nn.Module):  # type: ignore[misc, unused-ignore]
    """fc2(activation(fc1(x))), with 4 * in_features hidden columns unless said."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, activation: Any = F.gelu,
        bias1: bool = True, bias2: bool = True, return_residual: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, in_features if out_features is None else out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Any) -> Any:
        """The result; with return_residual (result, x)."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):  # type: ignore[misc, unused-ignore]
    """fc2(value * activation(gate)), value and gate being the halves of fc1(x); 8/3 * in_features hidden columns unless said."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, activation: Any = F.sigmoid,
        bias1: bool = True, bias2: bool = True, multiple_of: int = 128, return_residual: bool = False, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = 8 * in_features // 3 if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, in_features if out_features is None else out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Any) -> Any:
        """The result; with return_residual (result, x)."""
        value, gate = self.fc1(x).chunk(2, -1)
        y = self.fc2(value * self.activation(gate))
        return (y, x) if self.return_residual else y


class FusedMLP(Mlp):
    """`Mlp` by the name of its activation; `checkpoint_lvl` and `heuristic` change nothing here."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, bias1: bool = True,
        bias2: bool = True, activation: str = "gelu_approx", return_residual: bool = False, checkpoint_lvl: int = 0,
        heuristic: Any = "auto", device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        function: Callable[..., Any] = ACTIVATIONS[activation]
        super().__init__(in_features, hidden_features, out_features, function, bias1, bias2, return_residual, device, dtype)
