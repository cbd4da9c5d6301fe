"""Arrays of any DLPack library: what they are, in numbers, and how to make one of the same kind.

No framework is imported here: an array that comes in belongs to one that already is.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Callable, NamedTuple

from . import _abi
from ._memory import lend_torch_memory, torch_gpu_type
from .errors import InvalidArgument, Unsupported

Array = Any


class Description(NamedTuple):
    """What DLTensor holds; `strides` in elements, None for row-major."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    code: int
    bits: int
    device_type: int
    device_id: int


class TensorSpec:
    """A tensor without data: what plans and explanations need to know.

    Parameters
    ----------
    shape : tuple of int
    dtype : str
        "f32", "f16", "bf16", "bool", "u8", "i8", "i32", "i64" or "e4m3".
    device : str
        "cpu", or "cuda:0" and so on; "rocm:0" of AMD.
    strides : tuple of int, optional
        In elements; row-major unless given.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: str = "f32", device: str = "cpu", strides: tuple[int, ...] | None = None
    ) -> None:
        if dtype not in _abi.DTYPES:
            raise InvalidArgument(f"TensorSpec: dtype is {dtype!r}; expected one of {', '.join(_abi.DTYPES)}")
        if strides is not None and len(strides) != len(shape):
            raise InvalidArgument(f"TensorSpec: strides has {len(strides)} numbers; expected {len(shape)}, as shape")
        self.shape = tuple(int(extent) for extent in shape)
        self.strides = None if strides is None else tuple(int(stride) for stride in strides)
        self.dtype = dtype
        self.device = device
        kind, _, index = device.partition(":")
        kinds = {"cpu": _abi.CPU, "cuda": _abi.CUDA, "rocm": _abi.ROCM}
        if kind not in kinds or (index and not index.isdigit()):
            raise InvalidArgument(f'TensorSpec: device is {device!r}; expected "cpu", or "cuda:0" or "rocm:0" and so on')
        self._device = (kinds[kind], int(index or 0))

    @property
    def ndim(self) -> int:
        """How many dimensions there are."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"TensorSpec({self.shape}, {self.dtype!r}, {self.device!r})"


class NotAnArray(TypeError):
    """The object is no array that Fovea can read; the text says why."""


# ---- Reading ----

_NUMPY_CODES = {"b": 6, "i": 0, "u": 1, "f": 2}


def _describe_numpy(array: Array) -> Description:
    interface = array.__array_interface__
    kind, width = interface["typestr"][1], array.dtype.itemsize
    if array.dtype.name == "bfloat16":
        code = 4
    elif array.dtype.name == "float8_e4m3fn":
        code = 10
    elif kind in _NUMPY_CODES and array.dtype.isnative:
        code = _NUMPY_CODES[kind]
    else:
        raise NotAnArray(f"has dtype {array.dtype}; expected floats, integers or bools in native byte order")
    if any(stride % width for stride in array.strides):
        raise NotAnArray(f"has strides {array.strides} in bytes; expected multiples of its {width}-byte elements")
    strides = tuple(stride // width for stride in array.strides)
    return Description(interface["data"][0], array.shape, strides, code, 8 * width, _abi.CPU, 0)


_NAMED_CODES = {"bool": (6, 8), "bfloat16": (4, 16), "uint8": (1, 8), "float8_e4m3fn": (10, 8)}
_NAMED_CODES |= {f"float{bits}": (2, bits) for bits in (16, 32, 64)} | {f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)}


def _dtype_name(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def are_codes(array: Array) -> bool:
    """Does an array, or a TensorSpec, hold e4m3? What has no dtype does not."""
    return hasattr(array, "dtype") and _dtype_name(array) in ("float8_e4m3fn", "e4m3")


def _named_code(tensor: Array) -> tuple[int, int]:
    code = _NAMED_CODES.get(_dtype_name(tensor))
    if code is None:
        raise NotAnArray(f"has dtype {tensor.dtype}; expected floats, integers or bools")
    return code


def _describe_torch(tensor: Array) -> Description:
    code, bits = _named_code(tensor)
    torch = sys.modules["torch"]
    kinds = {"cpu": _abi.CPU, "cuda": torch_gpu_type(torch)}
    if tensor.layout is not torch.strided or tensor.device.type not in kinds:
        raise NotAnArray(f"is a {tensor.layout} tensor on {tensor.device}; expected a strided one on cpu or cuda")
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise NotAnArray(f"is a {type(tensor).__name__} without memory of its own ({error})") from None
    index = tensor.device.index or 0
    return Description(address, tuple(tensor.shape), tensor.stride(), code, bits, kinds[tensor.device.type], index)


class _Managed(ctypes.Structure):
    _fields_ = [("dl_tensor", _abi.Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _abi.Tensor),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype, _capsule_is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def _describe_capsule(array: Array) -> Description:
    try:
        capsule = array.__dlpack__(max_version=(1, 3))
    except TypeError:
        capsule = array.__dlpack__()
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _ManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise NotAnArray(f"speaks DLPack {managed.major}.{managed.minor}; expected version 1")
        tensor = managed.dl_tensor
    else:
        tensor = _Managed.from_address(_capsule_pointer(capsule, b"dltensor")).dl_tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    # An unconsumed capsule frees its tensor when it goes; the memory is the array's, which the caller holds.
    return Description(
        address, shape, strides, tensor.dtype.code, tensor.dtype.bits, tensor.device.device_type, tensor.device.device_id
    )


def root_module(array: Array) -> str:
    """The package whose array this is."""
    return type(array).__module__.partition(".")[0]


def describe(array: Array) -> Description:
    """The numbers of any array; raises NotAnArray where it is none."""
    if isinstance(array, TensorSpec):
        code, bits = _abi.DTYPES[array.dtype]
        return Description(0, array.shape, array.strides, code, bits, *array._device)
    for library, reader in (("numpy", _describe_numpy), ("torch", _describe_torch)):
        module = sys.modules.get(library)
        base: Any = getattr(module, "ndarray" if library == "numpy" else "Tensor", None)
        if base is not None and isinstance(array, base):
            return reader(array)
    if not hasattr(array, "__dlpack__"):
        raise NotAnArray(f"is a {type(array).__name__}; expected an array that speaks DLPack")
    try:
        return _describe_capsule(array)
    except NotAnArray:
        raise
    except Exception as error:
        raise NotAnArray(f"cannot be read through DLPack: {error}") from error


def check_writable(array: Array, name: str, function: str) -> None:
    """Refuses an array that the caller gave as an output and that is not to be written."""
    flags = getattr(array, "flags", None)
    if root_module(array) in ("jax", "jaxlib"):
        raise InvalidArgument(f"{function}: {name} is an array of JAX, whose arrays cannot be written; expected one of NumPy or none")
    if getattr(flags, "writeable", True) is False:
        raise InvalidArgument(f"{function}: {name} is read-only; expected an array that can be written")


def causal_features(bias: Array) -> dict[str, Any] | None:
    """What `attention` calls PyTorch's CausalBias, a tensor whose elements nobody has written; None of all else."""
    variant = getattr(bias, "variant", None)
    if variant is None or type(bias).__name__ != "CausalBias":
        return None
    return {"causal": True, "align": "top_left" if variant.name == "UPPER_LEFT" else "bottom_right"}


def check_bias(bias: Array, name: str, function: str) -> None:
    """Refuses a CausalBias: its kind says what it means."""
    causal = causal_features(bias)
    if causal is not None:
        raise InvalidArgument(
            f"{function}: {name} is a CausalBias, which has no elements; expected causal=True, align={causal['align']!r} in its place"
        )


def element_of(array: Array) -> tuple[int, int, int]:
    """DLPack's code and bits, and the rank, of arrays without memory, too: those of transforms and tracers of PyTorch and JAX."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        return *_named_code(array), array.dim()
    if jax is not None and isinstance(array, jax.core.Tracer):
        return *_named_code(array), array.ndim
    described = describe(array)
    return described.code, described.bits, len(described.shape)


def dtype_name(array: Array) -> str:
    """Fovea's name of an array's dtype; DLPack's code and bits where it has none."""
    described = describe(array)
    return _abi.DTYPE_NAMES.get((described.code, described.bits), f"code {described.code}, {described.bits} bits")


# ---- Making ----


class Framework(NamedTuple):
    """What is different from one library to another.

    `empty(like, shape, dtype)` makes an array beside `like`, of its dtype where `dtype` is None, else of that one of
    Fovea's names; `numbered(like, rows, columns)` one of i32 with 0, 1, 2, ... row by row. `stream(like)` is the current stream of
    its device, 0 on the host. `finish(array)` is what the caller gets.
    `prepare(arguments)` gives the arguments of a forward call as DLPack carries them, and whether gradients are recorded.
    `is_observed()` says whether anything else of the library's looks at calls: its transforms, modes and casts.
    `must_be_deterministic()` says whether the library is told to be. `empty_like(like)` is the quickest way to an array like a
    row-major one.
    """

    name: str
    empty: Callable[[Array, tuple[int, ...], str | None], Array]
    numbered: Callable[[Array, int, int], Array]
    stream: Callable[[Array], int]
    finish: Callable[[Array], Array] = lambda array: array
    prepare: Callable[[Any], tuple[Any, bool]] | None = None
    is_observed: Callable[[], bool] | None = None
    must_be_deterministic: Callable[[], bool] | None = None
    empty_like: Callable[[Array], Array] | None = None


_LONG_NAMES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "bool": "bool",
    "u8": "uint8", "i8": "int8", "i32": "int32", "i64": "int64", "e4m3": "float8_e4m3fn",
}  # fmt: skip


def _on_the_host(_: Array) -> int:
    return 0


def _numpy_e4m3() -> Any:
    """NumPy has no such dtype of its own."""
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported("dtype is 'e4m3', which NumPy gets from the package ml_dtypes; expected it to be installed") from None
    return ml_dtypes.float8_e4m3fn


def _numpy_framework(numpy: Any) -> Framework:
    empty = numpy.empty

    def make(like: Array, shape: tuple[int, ...], dtype: str | None) -> Array:
        if dtype == "e4m3":
            return empty(shape, _numpy_e4m3())
        return empty(shape, like.dtype if dtype is None else _LONG_NAMES[dtype])

    def numbered(_: Array, rows: int, columns: int) -> Array:
        return numpy.arange(rows * columns, dtype="int32").reshape(rows, columns)

    return Framework("numpy", make, numbered, _on_the_host, empty_like=numpy.empty_like)


def _torch_framework(torch: Any) -> Framework:
    lend_torch_memory(torch)
    dtypes = {name: getattr(torch, long_name, None) for name, long_name in _LONG_NAMES.items()}

    def make(like: Array, shape: tuple[int, ...], dtype: str | None) -> Array:
        if like.is_nested:
            raise InvalidArgument("q is a nested tensor; expected a dense one: packed rows, values() of a jagged one, with cu_seqlens, its offsets()")
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtypes[dtype])

    def numbered(like: Array, rows: int, columns: int) -> Array:
        return torch.arange(rows * columns, dtype=torch.int32, device=like.device).view(rows, columns)

    def stream(like: Array) -> int:
        return torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0

    is_grad_enabled, tensor_type = torch.is_grad_enabled, torch.Tensor

    def prepare(arguments: Any) -> tuple[Any, bool]:
        is_recorded = has_negative = False
        for tensor in arguments.tensors:
            if isinstance(tensor, tensor_type):
                is_recorded |= tensor.requires_grad
                has_negative |= tensor.is_neg()
        if has_negative:  # its sign is a flag that DLPack does not carry
            resolved = (t.resolve_neg() if isinstance(t, tensor_type) else t for t in arguments.tensors)
            arguments = arguments._replace(tensors=tuple(resolved))
        return arguments, is_recorded and is_grad_enabled()

    observers, forward_mode = torch_observers(torch)
    transforms, modes, casts = observers

    def is_observed() -> bool:
        return transforms() or modes() > 0 or casts() or forward_mode._current_level >= 0  # type: ignore[no-any-return]

    return Framework(
        "torch", make, numbered, stream, prepare=prepare, is_observed=is_observed, empty_like=torch.empty_like,
        must_be_deterministic=torch.are_deterministic_algorithms_enabled,
    )  # fmt: skip


def torch_observers(torch: Any) -> tuple[tuple[Callable[[], Any], ...], Any]:
    """What may look at a call: transforms, modes and casts, true or above 0 where they do; and the module whose _current_level
    is 0 or more in forward mode."""
    core = torch._C
    observers = core._are_functorch_transforms_active, core._len_torch_dispatch_stack, core._is_any_autocast_enabled
    return observers, torch.autograd.forward_ad


def _cupy_framework(cupy: Any) -> Framework:
    def make(like: Array, shape: tuple[int, ...], dtype: str | None) -> Array:
        with like.device:
            return cupy.empty(shape, like.dtype if dtype is None else _LONG_NAMES[dtype])

    def numbered(like: Array, rows: int, columns: int) -> Array:
        with like.device:
            return cupy.arange(rows * columns, dtype="int32").reshape(rows, columns)

    return Framework("cupy", make, numbered, lambda like: cupy.cuda.get_current_stream().ptr)


def _jax_framework(jax: Any) -> Framework:
    import numpy

    def make(like: Array, shape: tuple[int, ...], dtype: str | None) -> Array:
        if isinstance(like, jax.core.Tracer):
            raise Unsupported(f"q is a {type(like).__name__} of JAX, which has no data yet; expected arrays, outside of jit, grad and vmap")
        if like.device.platform != "cpu":
            raise Unsupported("JAX arrays on GPUs are not taken by this function; expected arrays on the cpu")
        return numpy.empty(shape, like.dtype if dtype is None else _LONG_NAMES[dtype])

    return Framework("jax", make, _numpy_framework(numpy).numbered, _on_the_host, jax.numpy.asarray)


def _nameless_framework(like: Array) -> Framework:
    """Of a library that says nothing but DLPack: outputs are the caller's."""

    def make(like: Array, *_: Any) -> Array:
        raise Unsupported(f"q is a {type(like).__name__}, of which no other can be made; give `out` arrays, and `lse` where it is wanted")

    def stream(like: Array) -> int:
        if describe(like).device_type != _abi.CPU:
            raise Unsupported(f"q is a {type(like).__name__} on a GPU, whose current stream is not known; expected arrays on the cpu")
        return 0

    return Framework("", make, make, stream)


def _array_api_framework(like: Array) -> Framework:
    namespace = like.__array_namespace__()

    def make(like: Array, shape: tuple[int, ...], dtype: str | None) -> Array:
        element = like.dtype if dtype is None else getattr(namespace, _LONG_NAMES[dtype])
        return namespace.empty(shape, dtype=element, device=like.device)

    def numbered(like: Array, rows: int, columns: int) -> Array:
        numbers = namespace.arange(rows * columns, dtype=namespace.int32, device=like.device)
        return namespace.reshape(numbers, (rows, columns))

    return Framework(namespace.__name__, make, numbered, _on_the_host)


_MAKERS: dict[str, Callable[[Any], Framework]] = {
    "numpy": _numpy_framework,
    "ml_dtypes": _numpy_framework,
    "torch": _torch_framework,
    "cupy": _cupy_framework,
    "jax": _jax_framework,
    "jaxlib": lambda _: _jax_framework(sys.modules["jax"]),
}
_frameworks: dict[type, Framework] = {}


def framework_of(array: Array, function: str, argument: str) -> Framework:
    """The library of an array, which makes what a call returns."""
    found = _frameworks.get(type(array))
    if found is None:
        found = _frameworks[type(array)] = _find_framework(array, function, argument)
    return found


def usual_framework(kind: type) -> Framework | None:
    """That of NumPy's and PyTorch's own types; None of all others, which may see a call in ways of their own."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind is numpy.ndarray:
        return _numpy_framework(numpy)
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _torch_framework(torch)
    return None


def _find_framework(array: Array, function: str, argument: str) -> Framework:
    for base in type(array).__mro__:
        root = base.__module__.partition(".")[0]
        if root in _MAKERS:
            return _MAKERS[root](sys.modules[root])
    if hasattr(array, "__array_namespace__"):
        return _array_api_framework(array)
    if hasattr(array, "__dlpack__"):
        return _nameless_framework(array)
    raise InvalidArgument(
        f"{function}: {argument} is a {type(array).__name__}; expected an array of NumPy, PyTorch, CuPy, JAX, or of another "
        "library that speaks DLPack"
    )
