"""fovea.h through ctypes: the structs, and a thin Library that raises errors. Used by tests and by bench/peers."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16
from ctypes import c_uint32, c_uint64, c_void_p

ABI_VERSION = 1
CPU, CUDA = 1, 2
# Fovea's name of a dtype: DLPack's code and bits.
DTYPES = {"f32": (2, 32), "f16": (2, 16), "bf16": (4, 16), "bool": (6, 8),
          "u8": (1, 8), "i8": (0, 8), "e4m3": (10, 8), "i32": (0, 32), "i64": (0, 64)}
TASK = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_int64)
CONCURRENCY = ctypes.CFUNCTYPE(c_int32, c_void_p)
RUN = ctypes.CFUNCTYPE(None, c_void_p, c_int64, TASK, c_void_p)


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t, Device, c_void_p)
DEALLOCATE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, Device, c_void_p)


class DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [("data", c_void_p), ("device", Device), ("ndim", c_int32), ("dtype", DataType),
                ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


class NamedTensor(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("tensor", POINTER(Tensor))]


class NamedScalar(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("type", c_int32), ("value", c_double)]


class Executor(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("context", c_void_p),
                ("concurrency", CONCURRENCY), ("run", RUN)]


class Dropout(ctypes.Structure):
    _fields_ = [("p", c_float), ("seed", c_uint64), ("offset", c_uint64)]


_TENSOR = POINTER(Tensor)


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32),
        ("q", _TENSOR), ("k", _TENSOR), ("v", _TENSOR), ("out", _TENSOR), ("lse", _TENSOR), ("row_max", _TENSOR),
        ("has_softmax_scale", c_int32), ("softmax_scale", c_float), ("softcap", c_float), ("reserved_1", c_uint32),
        ("bias", _TENSOR), ("alibi", _TENSOR), ("score_mod", c_char_p),
        ("causal", c_int32), ("align", c_int32), ("has_window_left", c_int32), ("has_window_right", c_int32),
        ("window_left", c_int64), ("window_right", c_int64),
        ("mask", _TENSOR), ("segments_q", _TENSOR), ("segments_kv", _TENSOR), ("mask_mod", c_char_p),
        ("tensors", POINTER(NamedTensor)), ("num_tensors", c_size_t),
        ("scalars", POINTER(NamedScalar)), ("num_scalars", c_size_t),
        ("sinks", _TENSOR), ("dropout", Dropout), ("cu_seqlens_q", _TENSOR), ("cu_seqlens_kv", _TENSOR),
        ("compute_dtype", c_int32), ("cpu_target", c_int32), ("allows_nondeterminism", c_int32),
        ("reserved_2", c_uint32),
        ("workspace", c_void_p), ("workspace_bytes", c_size_t), ("runtime", c_void_p), ("executor", POINTER(Executor)),
        ("stream", c_void_p), ("score_program", c_void_p),
        ("score_tensors", POINTER(_TENSOR)), ("num_score_tensors", c_size_t), ("score_scalars", POINTER(ctypes.c_double)),
        ("num_score_scalars", c_size_t), ("mask_program", c_void_p), ("mask_tensors", POINTER(_TENSOR)), ("num_mask_tensors", c_size_t),
        ("mask_scalars", POINTER(ctypes.c_double)), ("num_mask_scalars", c_size_t), ("sm_margin", c_int32), ("reserved_3", c_uint32),
        ("dropout_seed", _TENSOR), ("dropout_offset", _TENSOR),
        ("quant", c_char_p), ("q_scale", _TENSOR), ("k_scale", _TENSOR), ("v_scale", _TENSOR),
        ("dropout_places", _TENSOR)]


class PlanOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("max_seqlen_q", c_int64),
                ("max_seqlen_kv", c_int64), ("num_threads", c_int32), ("reserved_1", c_uint32),
                ("compile_mode", c_int32), ("reserved_2", c_uint32)]


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
        ("dout", _TENSOR), ("dlse", _TENSOR), ("dq", _TENSOR), ("dk", _TENSOR), ("dv", _TENSOR), ("dsinks", _TENSOR),
        ("dcaptured", POINTER(NamedTensor)), ("num_dcaptured", c_size_t),
        ("workspace", c_void_p), ("workspace_bytes", c_size_t),
    ]


class DoubleBackwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
        ("dout", _TENSOR), ("dlse", _TENSOR), ("ddq", _TENSOR), ("ddk", _TENSOR), ("ddv", _TENSOR), ("ddsinks", _TENSOR),
        ("ddcaptured", POINTER(NamedTensor)), ("num_ddcaptured", c_size_t),
        ("grad_dout", _TENSOR), ("grad_dlse", _TENSOR), ("grad_q", _TENSOR), ("grad_k", _TENSOR), ("grad_v", _TENSOR),
        ("grad_sinks", _TENSOR), ("grad_captured", POINTER(NamedTensor)), ("num_grad_captured", c_size_t),
    ]


class ProbabilitiesArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
                ("probabilities", _TENSOR)]


class JvpArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
        ("q_tangent", _TENSOR), ("k_tangent", _TENSOR), ("v_tangent", _TENSOR), ("sinks_tangent", _TENSOR),
        ("captured_tangents", POINTER(NamedTensor)), ("num_captured_tangents", c_size_t),
        ("out_tangent", _TENSOR), ("lse_tangent", _TENSOR), ("workspace", c_void_p), ("workspace_bytes", c_size_t),
    ]


class MergeStatesArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("outs", POINTER(_TENSOR)), ("lses", POINTER(_TENSOR)),
                ("num_states", c_size_t), ("out", _TENSOR), ("lse", _TENSOR), ("runtime", c_void_p),
                ("executor", POINTER(Executor)), ("stream", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t)]


class DecodeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
        ("seqlens", _TENSOR), ("page_table", _TENSOR), ("batch_idx", _TENSOR), ("left_padding", _TENSOR),
        ("append_k", _TENSOR), ("append_v", _TENSOR),
        ("rotary_cos", _TENSOR), ("rotary_sin", _TENSOR), ("rotary_positions", _TENSOR),
        ("is_interleaved", c_int32), ("sees_all_keys", c_int32),
        ("page_indptr", _TENSOR), ("page_indices", _TENSOR),
        ("append_cu_seqlens", _TENSOR), ("max_seqlen_q", c_int64),
        ("shared_prefix", c_int64), ("shared_cu_sequences", _TENSOR), ("rotary_positions_q", _TENSOR),
        ("k_scale", _TENSOR), ("v_scale", _TENSOR),
    ]


class BlockMapArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
        ("tile_q", c_int64), ("tile_kv", c_int64), ("has_sequence", c_int32), ("has_q_head", c_int32),
        ("sequence", c_int64), ("q_head", c_int64),
    ]


class ShardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32), ("forward", POINTER(ForwardArgs)),
        ("world_size", c_int32), ("scheme", c_int32), ("tile_q", c_int64), ("tile_kv", c_int64), ("chunk", c_int64),
        ("head_parts", c_int64), ("head_ranks", c_int32), ("reserved_1", c_uint32),
    ]


class Allocator(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", c_uint32), ("device_type", c_int32), ("context", c_void_p),
                ("allocate", ALLOCATE), ("deallocate", DEALLOCATE)]


# C name: our struct. The smoke test compares every one with the header.
STRUCTS = {"fovea_named_tensor": NamedTensor, "fovea_named_scalar": NamedScalar, "fovea_executor": Executor,
           "fovea_dropout": Dropout, "fovea_attention_forward_args": ForwardArgs, "fovea_plan_options": PlanOptions,
           "fovea_attention_backward_args": BackwardArgs, "fovea_attention_jvp_args": JvpArgs,
           "fovea_attention_double_backward_args": DoubleBackwardArgs,
           "fovea_merge_states_args": MergeStatesArgs, "fovea_attention_decode_args": DecodeArgs,
           "fovea_block_map_args": BlockMapArgs, "fovea_shard_args": ShardArgs, "fovea_allocator": Allocator}


class FoveaError(RuntimeError):
    """Any kind; `kind` is the number of fovea_kind."""

    kind = 5


class InvalidArgument(FoveaError, ValueError):
    kind = 1


class Unsupported(FoveaError, NotImplementedError):
    kind = 2


def sized(struct_type, **fields):
    """A struct that says its size and version, with these fields set."""
    return struct_type(struct_size=ctypes.sizeof(struct_type), version=ABI_VERSION, **fields)


def tensor(address, shape, dtype="f32", strides=None, device=Device(CPU, 0)):
    """A borrowed tensor; the memory at `address` is the caller's to keep."""
    code, bits = DTYPES[dtype]
    extents = (c_int64 * len(shape))(*shape)
    steps = None if strides is None else (c_int64 * len(shape))(*strides)
    return Tensor(address, device, len(shape), DataType(code, bits, 1), extents, steps, 0)


def torch_tensor(t):
    """The tensor that a PyTorch tensor is, on the host or on a GPU."""
    name = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "bool", "uint8": "u8",
            "int8": "i8", "float8_e4m3fn": "e4m3", "int32": "i32", "int64": "i64"}[str(t.dtype).removeprefix("torch.")]
    device = Device(CUDA, t.device.index) if t.is_cuda else Device(CPU, 0)
    return tensor(t.data_ptr(), t.shape, name, t.stride(), device)


def forward_args(tensors=None, scalars=None, **fields):
    """ForwardArgs from plain values: Tensor for tensors, str for programs, dicts for what programs read."""
    values = {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            value = ctypes.pointer(value)
        elif isinstance(value, str):
            value = value.encode()
        elif isinstance(value, Executor):
            value = ctypes.pointer(value)
        values[name] = value
    if "softmax_scale" in values:
        values["has_softmax_scale"] = 1
    args = sized(ForwardArgs, **values)
    named = [NamedTensor(name.encode(), ctypes.pointer(t)) for name, t in (tensors or {}).items()]
    numbers = [NamedScalar(name.encode(), isinstance(x, float), x) for name, x in (scalars or {}).items()]
    args.tensors, args.num_tensors = (NamedTensor * len(named))(*named), len(named)
    args.scalars, args.num_scalars = (NamedScalar * len(numbers))(*numbers), len(numbers)
    return args


def backward_args(forward, dcaptured=None, **fields):
    """BackwardArgs from plain values: Tensor for tensors, a dict of Tensor for the gradients of what programs read."""
    values = {name: ctypes.pointer(value) for name, value in fields.items()}
    args = sized(BackwardArgs, forward=ctypes.pointer(forward), **values)
    named = [NamedTensor(name.encode(), ctypes.pointer(t)) for name, t in (dcaptured or {}).items()]
    args.dcaptured, args.num_dcaptured = (NamedTensor * len(named))(*named), len(named)
    return args


def probabilities_args(forward, probabilities):
    return sized(ProbabilitiesArgs, forward=ctypes.pointer(forward), probabilities=ctypes.pointer(probabilities))


def decode_args(forward, **fields):
    """DecodeArgs from plain values: Tensor for tensors."""
    values = {name: ctypes.pointer(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
    return sized(DecodeArgs, forward=ctypes.pointer(forward), **values)


class Library:
    """The loaded libfovea; every method raises what the C function reports."""

    def __init__(self, path):
        self.c = c = ctypes.CDLL(str(path))
        c.fovea_version.restype = c.fovea_error_message.restype = c_char_p
        c.fovea_abi_version.restype = c_uint32
        c.fovea_error_message.argtypes = c.fovea_error_free.argtypes = c.fovea_string_free.argtypes = [c_void_p]
        c.fovea_error_kind.argtypes = c.fovea_plan_destroy.argtypes = c.fovea_runtime_destroy.argtypes = [c_void_p]
        c.fovea_plan_workspace_bytes.argtypes, c.fovea_plan_workspace_bytes.restype = [c_void_p], c_size_t
        error = POINTER(c_void_p)
        args, options, text = POINTER(ForwardArgs), POINTER(PlanOptions), POINTER(c_void_p)
        declared = {
            "attention_forward": [args, error],
            "attention_backward": [POINTER(BackwardArgs), error],
            "explain_backward": [POINTER(BackwardArgs), c_int32, text, error],
            "attention_double_backward": [POINTER(DoubleBackwardArgs), error],
            "explain_double_backward": [POINTER(DoubleBackwardArgs), c_int32, text, error],
            "attention_jvp": [POINTER(JvpArgs), error],
            "explain_jvp": [POINTER(JvpArgs), c_int32, text, error],
            "merge_states": [POINTER(MergeStatesArgs), error],
            "attention_probabilities": [POINTER(ProbabilitiesArgs), error],
            "attention_decode": [POINTER(DecodeArgs), error],
            "append_to_cache": [POINTER(DecodeArgs), error],
            "decode_workspace_bytes": [POINTER(DecodeArgs), c_int64, POINTER(c_size_t), error],
            "runtime_create": [c_int32, POINTER(c_void_p), error],
            "plan_create": [args, options, POINTER(c_void_p), error],
            "plan_run": [c_void_p, args, error],
            "plan_explain": [c_void_p, c_int32, text, error],
            "explain": [args, options, c_int32, text, error],
            "describe": [text, error],
            "mask_tiles": [POINTER(BlockMapArgs), POINTER(c_uint8), c_size_t, POINTER(c_int64), error],
        }
        for name, types in declared.items():
            if hasattr(c, "fovea_" + name):  # an older library, which benchmarks compare with, has fewer
                getattr(c, "fovea_" + name).argtypes = types

    def call(self, function, *args):
        error = c_void_p()
        kind = function(*args, ctypes.byref(error))
        if kind == 0:
            return
        message = self.c.fovea_error_message(error).decode()
        self.c.fovea_error_free(error)
        raised = {1: InvalidArgument, 2: Unsupported}.get(kind, FoveaError)(message)
        raised.kind = kind
        raise raised

    def version(self):
        return self.c.fovea_version().decode()

    def attention_forward(self, args):
        self.call(self.c.fovea_attention_forward, ctypes.byref(args))

    def attention_backward(self, args):
        self.call(self.c.fovea_attention_backward, ctypes.byref(args))

    def attention_probabilities(self, args):
        self.call(self.c.fovea_attention_probabilities, ctypes.byref(args))

    def attention_decode(self, args):
        self.call(self.c.fovea_attention_decode, ctypes.byref(args))

    def append_to_cache(self, args):
        self.call(self.c.fovea_append_to_cache, ctypes.byref(args))

    def explain(self, args, options=None, is_json=False):
        text = c_void_p()
        self.call(self.c.fovea_explain, ctypes.byref(args), options and ctypes.byref(options), int(is_json),
                  ctypes.byref(text))
        return self._take(text)

    def describe(self):
        text = c_void_p()
        self.call(self.c.fovea_describe, ctypes.byref(text))
        return self._take(text)

    def runtime(self, num_threads):
        """A thread pool's handle; lives until the process ends."""
        handle = c_void_p()
        self.call(self.c.fovea_runtime_create, num_threads, ctypes.byref(handle))
        return handle

    def plan(self, args, options=None):
        return Plan(self, args, options)

    def _take(self, text):
        result = ctypes.string_at(text).decode()
        self.c.fovea_string_free(text)
        return result


class Plan:
    """A plan and the workspace for its runs (so one thread at a time)."""

    def __init__(self, library, args, options):
        self.library, self.handle = library, c_void_p()
        library.call(library.c.fovea_plan_create, ctypes.byref(args), options and ctypes.byref(options),
                     ctypes.byref(self.handle))
        self.workspace_bytes = library.c.fovea_plan_workspace_bytes(self.handle)
        self.workspace = ctypes.create_string_buffer(max(self.workspace_bytes, 1))

    def run(self, args):
        args.workspace, args.workspace_bytes = ctypes.addressof(self.workspace), self.workspace_bytes
        self.library.call(self.library.c.fovea_plan_run, self.handle, ctypes.byref(args))

    def explain(self, is_json=False):
        text = c_void_p()
        self.library.call(self.library.c.fovea_plan_explain, self.handle, int(is_json), ctypes.byref(text))
        return self.library._take(text)

    def __del__(self):
        self.library.c.fovea_plan_destroy(self.handle)
