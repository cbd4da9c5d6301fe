"""What plans of every operation have in common: a handle of the library, its workspace, its explanation."""

from __future__ import annotations

import ctypes
import json
import threading
from typing import Any, Literal, overload

from . import _abi
from ._arrays import Array, Framework, NotAnArray, TensorSpec, describe
from ._calls import Template
from ._library import OfThisProcess, check, library, take_text
from ._programs import mask_mod, score_mod
from ._recipes import recipe_text
from .errors import InvalidArgument

_ALIGNMENT = 256


def _aligned(address: int) -> int:
    return (address + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def rendered(text: str, as_json: bool) -> str | dict[str, Any]:
    """An explanation as it was asked for."""
    if not as_json:
        return text
    answer: dict[str, Any] = json.loads(text)
    return answer


def is_on_host(array: Array) -> bool:
    """Whether an array or a TensorSpec lives on the cpu."""
    return describe(array).device_type == _abi.CPU


def spec_beside(array: Array, name: str, shape: tuple[int, ...], dtype: str | None, function: str) -> TensorSpec:
    """A tensor without data on the device of `array`, which is argument `name`, and of its dtype where none is named."""
    try:
        described = describe(array)
    except NotAnArray as error:
        raise InvalidArgument(f"{function}: {name} {error}") from None
    element = dtype or _abi.DTYPE_NAMES.get((described.code, described.bits), "f32")
    kinds = {_abi.CUDA: "cuda", _abi.ROCM: "rocm"}
    device = f"{kinds[described.device_type]}:{described.device_id}" if described.device_type in kinds else "cpu"
    return TensorSpec(shape, element, device)


_OUTPUTS = ("out", "lse", "row_max", "return_lse")


def kept_features(features: dict[str, Any]) -> dict[str, Any]:
    """What a plan keeps for its runs: no outputs; programs parsed or traced once."""
    kept = {name: value for name, value in features.items() if name not in _OUTPUTS}
    for name, make in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if kept.get(name) is not None:
            kept[name] = make(kept[name])
    if kept.get("quant") is not None:
        kept["quant"] = recipe_text(kept["quant"], kept.pop("accuracy", None), "plan")  # a file is read once
    return kept


class PreparedPlan(OfThisProcess):
    """A problem that was validated, with its kernel and its exact workspace. Threads may share it.

    Attributes
    ----------
    workspace_bytes : int
        Bytes of workspace that a run takes.
    """

    def __init__(self, create: str, *arguments: object, is_on_host: bool) -> None:
        handle = ctypes.c_void_p()
        check(create, *arguments, ctypes.byref(handle))
        self._handle = handle.value or 0
        self._destroy = library.fovea_plan_destroy
        self._is_on_host = is_on_host
        self._workspaces = threading.local()
        self.workspace_bytes: int = library.fovea_plan_workspace_bytes(self._handle)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            self._destroy(handle)

    def _workspace(self, framework: Framework, like: Array) -> tuple[object, int]:
        """Memory for a run, and its address: on the host a buffer for each thread, on a GPU one of `like`'s library."""
        if self.workspace_bytes == 0:
            return None, 0
        if self._is_on_host:
            found = getattr(self._workspaces, "found", None)
            if found is None:
                memory = ctypes.create_string_buffer(self.workspace_bytes + _ALIGNMENT)
                found = self._workspaces.found = (memory, _aligned(ctypes.addressof(memory)))
            return found
        array = framework.empty(like, (self.workspace_bytes + _ALIGNMENT,), "u8")
        return array, _aligned(array.data_ptr() if framework.name == "torch" else describe(array).address)

    def _invoke(
        self, template: Template, tensors: tuple[Array, ...], words: tuple[int, ...], function: int, framework: Framework, like: Array
    ) -> None:
        """Runs a call whose last numbers are the workspace's address and size."""
        workspace, address = self._workspace(framework, like)
        template.invoke(tensors, (*words, address, self.workspace_bytes), function, self._handle)
        del workspace  # alive until here: from then on a GPU library may lend it to later work of the same stream

    @overload
    def explain(self, as_json: Literal[False] = ...) -> str: ...
    @overload
    def explain(self, as_json: Literal[True]) -> dict[str, Any]: ...
    def explain(self, as_json: bool = False) -> str | dict[str, Any]:
        """What was decided and why, as `explain`: a page, or a dict."""
        return rendered(take_text("fovea_plan_explain", self._handle, _abi.JSON if as_json else _abi.TEXT), as_json)
