"""The structs and functions of `fovea/fovea.h`, through ctypes. `tests/python/package/abi_test.py` compares each with the header."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import TypeVar

ABI_VERSION = 1

CPU, CUDA, CUDA_HOST, ROCM = 1, 2, 3, 10

#: Fovea's name of a dtype, and DLPack's code and bits.
DTYPES: dict[str, tuple[int, int]] = {
    "f32": (2, 32), "f16": (2, 16), "bf16": (4, 16), "bool": (6, 8),
    "u8": (1, 8), "i8": (0, 8), "i32": (0, 32), "i64": (0, 64), "e4m3": (10, 8),
}  # fmt: skip
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}

SCORE_MOD, MASK_MOD = 0, 1
SCALAR_INT, SCALAR_FLOAT = 0, 1
ALIGN = {"bottom_right": 0, "top_left": 1}
COMPUTE_DTYPE = {"auto": 0, "f32": 1, "bf16": 2}
COMPILE_MODE = {"auto": 0, "complete": 1, "staged": 2}
CPU_TARGET = {
    "auto": 0,
    "scalar": 1,
    "avx2": 2,
    "avx512": 3,
    "avx512_bf16": 4,
    "amx_bf16": 5,
    "neon": 6,
    "avx512_vnni": 7,
    "avx_vnni": 8,
}
TEXT, JSON = 0, 1


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


#: Of fovea_allocator: (context, bytes, alignment, device, stream) gives an address; (context, address, bytes, device, stream).
ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t, Device, c_void_p)
DEALLOCATE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, Device, c_void_p)


class DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


# Pointers to tensors are plain addresses here: calls.py writes them into a copy of the struct.
_TENSOR = c_void_p


class NamedTensor(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("tensor", _TENSOR)]


class NamedScalar(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("type", c_int32), ("value", c_double)]


class TensorSlot(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("dtype", DataType), ("rank", c_int32)]


class ScalarSlot(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("type", c_int32)]


class ProgramArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", c_uint32),
        ("kind", c_int32),
        ("text", c_char_p),
        ("tensors", POINTER(TensorSlot)),
        ("num_tensors", c_size_t),
        ("scalars", POINTER(ScalarSlot)),
        ("num_scalars", c_size_t),
    ]


class Dropout(ctypes.Structure):
    _fields_ = [("p", c_float), ("seed", c_uint64), ("offset", c_uint64)]


_HEAD = [("struct_size", c_size_t), ("version", c_uint32), ("reserved_0", c_uint32)]


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("q", _TENSOR),
        ("k", _TENSOR),
        ("v", _TENSOR),
        ("out", _TENSOR),
        ("lse", _TENSOR),
        ("row_max", _TENSOR),
        ("has_softmax_scale", c_int32),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("reserved_1", c_uint32),
        ("bias", _TENSOR),
        ("alibi", _TENSOR),
        ("score_mod", c_char_p),
        ("causal", c_int32),
        ("align", c_int32),
        ("has_window_left", c_int32),
        ("has_window_right", c_int32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("mask", _TENSOR),
        ("segments_q", _TENSOR),
        ("segments_kv", _TENSOR),
        ("mask_mod", c_char_p),
        ("tensors", c_void_p),
        ("num_tensors", c_size_t),
        ("scalars", c_void_p),
        ("num_scalars", c_size_t),
        ("sinks", _TENSOR),
        ("dropout", Dropout),
        ("cu_seqlens_q", _TENSOR),
        ("cu_seqlens_kv", _TENSOR),
        ("compute_dtype", c_int32),
        ("cpu_target", c_int32),
        ("allows_nondeterminism", c_int32),
        ("reserved_2", c_uint32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("runtime", c_void_p),
        ("executor", c_void_p),
        ("stream", c_void_p),
        ("score_program", c_void_p),
        ("score_tensors", c_void_p),
        ("num_score_tensors", c_size_t),
        ("score_scalars", c_void_p),
        ("num_score_scalars", c_size_t),
        ("mask_program", c_void_p),
        ("mask_tensors", c_void_p),
        ("num_mask_tensors", c_size_t),
        ("mask_scalars", c_void_p),
        ("num_mask_scalars", c_size_t),
        ("sm_margin", c_int32),
        ("reserved_3", c_uint32),
        ("dropout_seed", _TENSOR),
        ("dropout_offset", _TENSOR),
        ("quant", c_char_p),
        ("q_scale", _TENSOR),
        ("k_scale", _TENSOR),
        ("v_scale", _TENSOR),
        ("dropout_places", _TENSOR),
    ]


class PlanOptions(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("max_seqlen_q", c_int64),
        ("max_seqlen_kv", c_int64),
        ("num_threads", c_int32),
        ("reserved_1", c_uint32),
        ("compile_mode", c_int32),
        ("reserved_2", c_uint32),
    ]


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("forward", c_void_p),
        ("dout", _TENSOR),
        ("dlse", _TENSOR),
        ("dq", _TENSOR),
        ("dk", _TENSOR),
        ("dv", _TENSOR),
        ("dsinks", _TENSOR),
        ("dcaptured", c_void_p),
        ("num_dcaptured", c_size_t),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class DoubleBackwardArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("forward", c_void_p),
        ("dout", _TENSOR),
        ("dlse", _TENSOR),
        ("ddq", _TENSOR),
        ("ddk", _TENSOR),
        ("ddv", _TENSOR),
        ("ddsinks", _TENSOR),
        ("ddcaptured", c_void_p),
        ("num_ddcaptured", c_size_t),
        ("grad_dout", _TENSOR),
        ("grad_dlse", _TENSOR),
        ("grad_q", _TENSOR),
        ("grad_k", _TENSOR),
        ("grad_v", _TENSOR),
        ("grad_sinks", _TENSOR),
        ("grad_captured", c_void_p),
        ("num_grad_captured", c_size_t),
    ]


class JvpArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("forward", c_void_p),
        ("q_tangent", _TENSOR),
        ("k_tangent", _TENSOR),
        ("v_tangent", _TENSOR),
        ("sinks_tangent", _TENSOR),
        ("captured_tangents", c_void_p),
        ("num_captured_tangents", c_size_t),
        ("out_tangent", _TENSOR),
        ("lse_tangent", _TENSOR),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class MergeStatesArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("outs", c_void_p),
        ("lses", c_void_p),
        ("num_states", c_size_t),
        ("out", _TENSOR),
        ("lse", _TENSOR),
        ("runtime", c_void_p),
        ("executor", c_void_p),
        ("stream", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class RotaryArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("x", _TENSOR),
        ("out", _TENSOR),
        ("cos", _TENSOR),
        ("sin", _TENSOR),
        ("positions", _TENSOR),
        ("offsets", _TENSOR),
        ("cu_seqlens", _TENSOR),
        ("is_interleaved", c_int32),
        ("is_conjugate", c_int32),
        ("runtime", c_void_p),
        ("executor", c_void_p),
        ("stream", c_void_p),
    ]


class DecodeArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("forward", c_void_p),
        ("seqlens", _TENSOR),
        ("page_table", _TENSOR),
        ("batch_idx", _TENSOR),
        ("left_padding", _TENSOR),
        ("append_k", _TENSOR),
        ("append_v", _TENSOR),
        ("rotary_cos", _TENSOR),
        ("rotary_sin", _TENSOR),
        ("rotary_positions", _TENSOR),
        ("is_interleaved", c_int32),
        ("sees_all_keys", c_int32),
        ("page_indptr", _TENSOR),
        ("page_indices", _TENSOR),
        ("append_cu_seqlens", _TENSOR),
        ("max_seqlen_q", c_int64),
        ("shared_prefix", c_int64),
        ("shared_cu_sequences", _TENSOR),
        ("rotary_positions_q", _TENSOR),
        ("k_scale", _TENSOR),
        ("v_scale", _TENSOR),
    ]


class ProbabilitiesArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("forward", c_void_p), ("probabilities", _TENSOR)]


class BlockMapArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("forward", c_void_p),
        ("tile_q", c_int64),
        ("tile_kv", c_int64),
        ("has_sequence", c_int32),
        ("has_q_head", c_int32),
        ("sequence", c_int64),
        ("q_head", c_int64),
    ]


class TileListsArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("indptr", c_void_p), ("indices", c_void_p), ("table", c_void_p)]


class ShardArgs(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("forward", c_void_p),
        ("world_size", c_int32),
        ("scheme", c_int32),
        ("tile_q", c_int64),
        ("tile_kv", c_int64),
        ("chunk", c_int64),
        ("head_parts", c_int64),
        ("head_ranks", c_int32),
        ("reserved_1", c_uint32),
    ]


class Transfer(ctypes.Structure):
    _fields_ = [
        ("step", c_int32),
        ("from", c_int32),
        ("tensor", c_int64),
        ("token_begin", c_int64),
        ("token_end", c_int64),
        ("head_begin", c_int64),
        ("head_end", c_int64),
    ]


class Allocator(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", c_uint32),
        ("device_type", c_int32),
        ("context", c_void_p),
        ("allocate", ALLOCATE),
        ("deallocate", DEALLOCATE),
    ]


#: C name: our struct.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "fovea_named_tensor": NamedTensor,
    "fovea_named_scalar": NamedScalar,
    "fovea_tensor_slot": TensorSlot,
    "fovea_scalar_slot": ScalarSlot,
    "fovea_program_args": ProgramArgs,
    "fovea_dropout": Dropout,
    "fovea_attention_forward_args": ForwardArgs,
    "fovea_plan_options": PlanOptions,
    "fovea_attention_backward_args": BackwardArgs,
    "fovea_attention_double_backward_args": DoubleBackwardArgs,
    "fovea_attention_jvp_args": JvpArgs,
    "fovea_merge_states_args": MergeStatesArgs,
    "fovea_rotary_args": RotaryArgs,
    "fovea_attention_decode_args": DecodeArgs,
    "fovea_attention_probabilities_args": ProbabilitiesArgs,
    "fovea_block_map_args": BlockMapArgs,
    "fovea_tile_lists_args": TileListsArgs,
    "fovea_shard_args": ShardArgs,
    "fovea_transfer": Transfer,
    "fovea_allocator": Allocator,
}

_ERROR = POINTER(c_void_p)
_TEXT = POINTER(c_void_p)

#: Functions that report errors: their arguments before `fovea_error** error`; addresses of structs are plain integers.
FALLIBLE: dict[str, list[object]] = {
    "fovea_runtime_set_allocator": [c_void_p, POINTER(Allocator)],
    "fovea_attention_forward": [c_void_p],
    "fovea_attention_backward": [c_void_p],
    "fovea_attention_double_backward": [c_void_p],
    "fovea_attention_jvp": [c_void_p],
    "fovea_attention_decode": [c_void_p],
    "fovea_append_to_cache": [c_void_p],
    "fovea_merge_states": [c_void_p],
    "fovea_rotary": [c_void_p],
    "fovea_attention_probabilities": [c_void_p],
    "fovea_program_create": [POINTER(ProgramArgs), POINTER(c_void_p)],
    "fovea_program_text": [c_void_p, _TEXT],
    "fovea_plan_create": [c_void_p, POINTER(PlanOptions), POINTER(c_void_p)],
    "fovea_plan_run": [c_void_p, c_void_p],
    "fovea_plan_create_backward": [c_void_p, POINTER(c_void_p)],
    "fovea_plan_run_backward": [c_void_p, c_void_p],
    "fovea_plan_create_decode": [c_void_p, c_int64, POINTER(c_void_p)],
    "fovea_plan_run_decode": [c_void_p, c_void_p],
    "fovea_plan_create_append": [c_void_p, POINTER(c_void_p)],
    "fovea_plan_run_append": [c_void_p, c_void_p],
    "fovea_plan_is_final": [c_void_p, POINTER(c_int32)],
    "fovea_plan_wait": [c_void_p],
    "fovea_plan_explain": [c_void_p, c_int32, _TEXT],
    "fovea_explain": [c_void_p, POINTER(PlanOptions), c_int32, _TEXT],
    "fovea_explain_backward": [c_void_p, c_int32, _TEXT],
    "fovea_describe": [_TEXT],
    "fovea_mask_tiles": [c_void_p, POINTER(c_uint8), c_size_t, POINTER(c_int64)],
    "fovea_mask_elements": [c_void_p, c_int64, c_int64, POINTER(Tensor)],
    "fovea_mask_print": [c_void_p, c_int32, c_int32, _TEXT],
    "fovea_mask_draw": [c_void_p, c_int32, POINTER(c_uint8), c_size_t, POINTER(c_int32)],
    "fovea_tile_table": [c_void_p],
    "fovea_shard_plan_create": [c_void_p, POINTER(c_void_p)],
    "fovea_shard_plan_transfers": [c_void_p, c_int32, POINTER(Transfer), c_size_t, POINTER(c_size_t)],
    "fovea_shard_plan_permutation": [c_void_p, POINTER(c_int64), c_size_t],
    "fovea_shard_plan_explain": [c_void_p, c_int32, _TEXT],
    "fovea_shard_plan_print_ranks": [c_void_p, c_int64, c_int64, c_int32, c_int32, _TEXT],
    "fovea_forecast_context_parallel": [c_void_p, c_double, c_double, c_int32, _TEXT],
}

#: The others: arguments and result.
PLAIN: dict[str, tuple[list[object], object]] = {
    "fovea_version": ([], c_char_p),
    "fovea_abi_version": ([], c_uint32),
    "fovea_error_kind": ([c_void_p], c_int32),
    "fovea_error_message": ([c_void_p], c_char_p),
    "fovea_error_column": ([c_void_p], c_size_t),
    "fovea_error_free": ([c_void_p], None),
    "fovea_string_free": ([c_void_p], None),
    "fovea_xla_handler": ([c_int32], c_void_p),
    "fovea_program_destroy": ([c_void_p], None),
    "fovea_plan_destroy": ([c_void_p], None),
    "fovea_shard_plan_destroy": ([c_void_p], None),
    "fovea_plan_workspace_bytes": ([c_void_p], c_size_t),
}


def declare(library: ctypes.CDLL) -> None:
    """Gives every function of the library its argument types."""
    for name, arguments in FALLIBLE.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [*arguments, _ERROR], c_int32
    for name, (plain_arguments, result) in PLAIN.items():
        function = getattr(library, name)
        function.argtypes, function.restype = plain_arguments, result


_Struct = TypeVar("_Struct", bound=ctypes.Structure)


def sized(struct: type[_Struct], **fields: object) -> _Struct:
    """A struct that says its size and version, with these fields set."""
    return struct(struct_size=ctypes.sizeof(struct), version=ABI_VERSION, **fields)
