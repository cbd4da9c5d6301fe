"""Workspace of calls that bring none: from whom it is taken."""

import ctypes
import types

import numpy as np
import pytest

import fovea
from fovea import _abi, _memory
from fovea._library import check


def register(allocator: _abi.Allocator) -> None:
    check("fovea_runtime_set_allocator", None, ctypes.byref(allocator))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[_abi.Allocator]:
    """What a test registers; what was registered before it is so again after it."""
    kept: list[_abi.Allocator] = []
    with monkeypatch.context() as patch:
        patch.setattr(_memory, "_kept", kept)
        yield kept
        register(_abi.sized(_abi.Allocator))
    for allocator in _memory._kept:
        register(allocator)


def test_calls_ask_the_allocator_of_their_device(registered: list[_abi.Allocator]) -> None:
    lent: dict[int, object] = {}
    seen = []

    def allocate(context, num_bytes, alignment, device, stream):
        seen.append((device.device_type, device.device_id, stream, num_bytes > 0))
        memory = ctypes.create_string_buffer(num_bytes + alignment)
        address = (ctypes.addressof(memory) + alignment - 1) // alignment * alignment
        lent[address] = memory
        return address

    q = np.random.default_rng(1).standard_normal((1, 70, 2, 16), np.float32)
    expected = fovea.attention(q, q, q)
    _memory.set_allocator(_abi.CPU, allocate, lambda context, address, *_: lent.pop(address))
    _memory.set_allocator(_abi.CUDA, lambda *_: None, lambda *_: None)
    np.testing.assert_array_equal(fovea.attention(q, q, q), expected)
    assert seen == [(_abi.CPU, 0, None, True)]
    assert not lent


class Torch:
    """As much of PyTorch as its memory is."""

    def __init__(self, cuda: str | None, hip: str | None = None) -> None:
        self.version = types.SimpleNamespace(cuda=cuda, hip=hip)
        self.cuda = self
        self.calls: list[tuple[object, ...]] = []
        self.free = 1 << 20

    def caching_allocator_alloc(self, num_bytes: int, device: int, stream: int) -> int:
        self.calls.append(("alloc", num_bytes, device, stream))
        if num_bytes > self.free:
            raise RuntimeError("out of memory")
        return 512

    def caching_allocator_delete(self, address: int) -> None:
        self.calls.append(("delete", address))


def test_pytorchs_memory_is_of_the_device_and_stream_of_the_call(registered: list[_abi.Allocator]) -> None:
    torch = Torch("13.0")
    _memory.lend_torch_memory(torch)
    _memory.lend_torch_memory(torch)
    (allocator,) = registered
    device = _abi.Device(_abi.CUDA, 3)
    assert allocator.device_type == _abi.CUDA
    assert allocator.allocate(None, 1000, 256, device, 77) == 512
    assert allocator.allocate(None, 1000, 256, device, None) == 512
    assert allocator.allocate(None, 1 << 21, 256, device, 77) is None
    allocator.deallocate(None, 512, 1000, device, 77)
    assert torch.calls == [("alloc", 1000, 3, 77), ("alloc", 1000, 3, 0), ("alloc", 1 << 21, 3, 77), ("delete", 512)]


def test_a_pytorch_for_rocm_lends_memory_of_amds_gpus(registered: list[_abi.Allocator]) -> None:
    torch = Torch(None, hip="6.2")
    _memory.lend_torch_memory(torch)
    (allocator,) = registered
    assert allocator.device_type == _abi.ROCM
    assert allocator.allocate(None, 1000, 256, _abi.Device(_abi.ROCM, 3), 77) == 512


def test_a_pytorch_without_gpus_lends_nothing(registered: list[_abi.Allocator]) -> None:
    _memory.lend_torch_memory(Torch(None))
    assert not registered
