"""flash_attn.ops.activations by PyTorch's functions, which have gradients of their own."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch.nn.functional as F


def swiglu(x: Any, y: Any) -> Any:
    """silu(x) * y."""
    return F.silu(x) * y


def sqrelu_fwd(x: Any) -> Any:
    """relu(x) squared."""
    return F.relu(x).square()


#: By the names that configurations of models use.
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": F.gelu, "relu": F.relu, "sqrelu": sqrelu_fwd, "glu": F.sigmoid, "swiglu": F.silu, "geglu": F.gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_approx", "gelu_pytorch_tanh"), partial(F.gelu, approximate="tanh")),
}  # fmt: skip

#: Those whose MLP has a gate.
GATED = ("glu", "swiglu", "geglu")
