"""The usual call of `attention` and of `Plan.run`, all of it in C: what the extension needs for that.

`attend` gives NotImplemented where a call is not usual, and is None where there is no extension: then Python gathers, runs or refuses.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _abi
from ._arrays import torch_observers, usual_framework
from ._calls import extension
from ._forward import LAYOUTS, Dropout
from ._library import address_of
from ._programs import Program

#: Features in the order in which `attend` takes them, behind q, k and v.
FEATURES = (
    "causal", "align", "window", "scale", "softcap", "bias", "alibi", "score_mod", "mask", "mask_mod", "segment_ids", "cu_seqlens",
    "sinks", "dropout", "layout", "compute_dtype", "cpu_target", "deterministic", "sm_margin",
)  # fmt: skip


def _introduce(kind: type) -> tuple[Any, Any, bool] | None:
    """How arrays of a type are made: (empty_like, empty, is_torch); None where calls with such an array are for Python."""
    framework = usual_framework(kind)
    if framework is None:
        return None
    is_torch = framework.name == "torch"
    if is_torch:
        torch = sys.modules["torch"]
        extension.set_up_torch(*torch_observers(torch), torch.is_grad_enabled, framework.must_be_deterministic)
    return framework.empty_like, framework.empty, is_torch


def _record(*arguments: Any) -> Any:
    """The first recorded call: fovea.torch puts its own function in the place of this one."""
    from .torch import _autograd

    return _autograd.record(*arguments)


attend: Any = None
if extension is not None:
    extension.set_up_attention(
        address_of("fovea_attention_forward"), address_of("fovea_plan_run"), LAYOUTS, _abi.ALIGN, _abi.COMPUTE_DTYPE,
        _abi.CPU_TARGET, Program, Dropout, _introduce,
    )  # fmt: skip
    extension.set_up_recorded(address_of("fovea_attention_backward"))
    extension.set_recorder(_record, None)
    attend = extension.attend
