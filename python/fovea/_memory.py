"""Where calls on a GPU take the workspace that they were not given: from PyTorch's memory, in processes that use PyTorch.

The library's own way is the driver's pool, which gives memory back to the system whenever a stream is waited for, so that the next
call pays for it again; and PyTorch cannot make room in its cache for what it does not know of.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable

from . import _abi
from ._library import check

_kept: list[_abi.Allocator] = []  # the library calls their functions
_lenders: list[Any] = []  # PyTorch, once it lends


def set_allocator(device_type: int, allocate: Callable[..., int | None], deallocate: Callable[..., None]) -> None:
    """Workspace on devices of this type comes from here, for calls without a runtime: arguments are those of _abi.ALLOCATE."""
    allocator = _abi.sized(
        _abi.Allocator, device_type=device_type, allocate=_abi.ALLOCATE(allocate), deallocate=_abi.DEALLOCATE(deallocate)
    )
    check("fovea_runtime_set_allocator", None, ctypes.byref(allocator))
    _kept.append(allocator)


def torch_gpu_type(torch: Any) -> int:
    """DLPack's type of the devices that this PyTorch calls cuda: they are AMD's where it is built for ROCm."""
    return _abi.CUDA if torch.version.hip is None else _abi.ROCM


def lend_torch_memory(torch: Any) -> None:
    """From now on workspace on a GPU is PyTorch's, of the call's stream. Nothing happens where this PyTorch has no GPUs.

    An allocator that C or C++ code has set before for calls without a runtime is replaced.
    """
    has_gpus = torch.version.cuda is not None or torch.version.hip is not None
    if not has_gpus or torch in _lenders:
        return

    def allocate(_context: int, num_bytes: int, _alignment: int, device: _abi.Device, stream: int | None) -> int | None:
        try:  # its blocks begin at multiples of 512 bytes
            return torch.cuda.caching_allocator_alloc(num_bytes, device.device_id, stream or 0)  # type: ignore[no-any-return]
        except RuntimeError:  # out of memory: the library refuses the call
            return None

    def deallocate(_context: int, address: int, _num_bytes: int, _device: _abi.Device, _stream: int | None) -> None:
        torch.cuda.caching_allocator_delete(address)

    set_allocator(torch_gpu_type(torch), allocate, deallocate)
    _lenders.append(torch)
