"""Calls of libfovea as operations of XLA: what a call says beside its arrays, as a text that the library reads once."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from .. import _abi
from .._arrays import TensorSpec, are_codes
from .._attention import forward_template, lse_shape
from .._forward import FIELDS, Arguments, Key
from .._library import library
from .._prepared import PreparedPlan
from ..errors import InvalidArgument

_TARGET = "fovea_{}"
_OPERATIONS = ("forward", "backward", "jvp", "double_backward", "decode")
_PLAIN = ("q", "k", "v", "sinks")  # inputs whose derivatives have fields of their own; the others' are named
_SHORT = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "bool", "uint8": "u8", "int8": "i8", "int32": "i32", "int64": "i64",
    "float8_e4m3fn": "e4m3",
}  # fmt: skip


def _register() -> None:
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for platform, device in (("cpu", _abi.CPU), ("CUDA", _abi.CUDA), ("ROCM", _abi.ROCM)):
        handler = capsule(library.fovea_xla_handler(device), None, None)
        for operation in _OPERATIONS:
            jax.ffi.register_ffi_target(_TARGET.format(operation), handler, platform=platform)


_register()


class Kind(NamedTuple):
    """All of a forward call but its arrays; hashable, and the same in another process.

    `names` are those of the inputs: fields of the C struct, and "score:NAME" or "mask:NAME" of what programs read.
    """

    names: tuple[str, ...]
    score: str
    mask: str
    seed: int
    offset: int
    key: Key

    def has_derivative(self, name: str) -> bool:
        """Whether there are derivatives by an input of this name."""
        return name in (*_PLAIN, "bias", "alibi") or name.startswith("score:")


def kind_of(arguments: Arguments) -> Kind:
    """The call of these arguments, which have no outputs."""
    key, (score, mask) = arguments.key, arguments.kept
    names = [name for index, name in enumerate(FIELDS) if key.present >> index & 1]
    for word, program in (("score", score), ("mask", mask)):
        names += [f"{word}:{name}" for name in program.tensor_names] if program is not None else []
    clash = {"bias", "alibi"} & set(names) & {name[6:] for name in names if name.startswith("score:")}
    if clash:
        name = clash.pop()
        raise InvalidArgument(f"attention: {name} and an array of that name in score_mod; rename that of the program")
    seed, offset = (word % 2**64 for word in arguments.words[:2])
    # Programs are their texts: addresses mean nothing in another process.
    static = key._replace(score=0, mask=0)
    score_text, mask_text = ("" if program is None else program.text_with_numbers.replace("\n", " ") for program in (score, mask))
    return Kind(tuple(names), score_text, mask_text, seed, offset, static)


def out_shapes(kind: Kind, inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Shape and dtype of out and lse."""
    q, v = inputs[0], inputs[2]
    dtype = jnp.bfloat16 if are_codes(q) else q.dtype  # codes have no room for it
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), dtype)
    return out, jax.ShapeDtypeStruct(lse_shape(tuple(q.shape), kind.key.layout), jnp.float32)


def argument_names(kind: Kind, params: dict[str, Any], count: int) -> list[str]:
    """What each argument of a primitive is like: seeds are like out and lse, tangents like their inputs."""
    names = list(kind.names)
    if count > len(names):
        names += ["out", "lse"]
    if "has_dlse" in params:
        names += ["out", "lse"] if params["has_dlse"] else ["out"]
    given = params.get("given", ())
    return names + [name for name, is_given in zip(kind.names, given) if is_given]


def result_names(kind: Kind, params: dict[str, Any]) -> list[str]:
    """What each result of a primitive is like: gradients are like their inputs, tangents like out and lse."""
    wanted = params.get("wanted")
    return ["out", "lse"] if wanted is None else [name for name, is_wanted in zip(kind.names, wanted) if is_wanted]


# ---- Refusals, before anything runs ----


def spec_of(name: str, array: Any, function: str) -> TensorSpec:
    """An array without its contents, as one of the host."""
    if name in ("dropout_seed", "dropout_offset"):
        return TensorSpec((1,), "i64")
    dtype = _SHORT.get(str(array.dtype))
    if dtype is None:
        words = "f32, f16 or bf16" if name in _PLAIN else ", ".join(_SHORT.values())
        raise InvalidArgument(f"{function}: {name} has dtype {array.dtype}; expected {words}")
    return TensorSpec(tuple(array.shape), dtype)


def specs_of(arguments: Arguments, kind: Kind, function: str) -> Arguments:
    """The call with specs in place of arrays, and one for out."""
    for name, array in zip("qkv", arguments.tensors):
        if array.ndim not in (3, 4):
            raise InvalidArgument(f"{function}: {name} has shape {tuple(array.shape)}; expected [batch, seqlen, num_heads, head_dim]")
    specs = [spec_of(name, array, function) for name, array in zip(kind.names, arguments.tensors)]
    specs.insert(3, spec_of("q", out_shapes(kind, arguments.tensors)[0], function))
    key = arguments.key._replace(present=arguments.key.present | 1 << FIELDS.index("out"))
    return arguments._replace(key=key, tensors=tuple(specs))


def check(arguments: Arguments, kind: Kind) -> None:
    """Refuses what the library would: shapes, dtypes, formulas. Nothing is read or written."""
    specs = specs_of(arguments, kind, "attention")
    bound = forward_template(specs, "attention").bind(specs.tensors, specs.words)
    PreparedPlan("fovea_plan_create", bound.address, None, is_on_host=True)


# ---- Texts ----


def _number_lines(kind: Kind, others: dict[str, int]) -> list[str]:
    key = kind.key
    left, right = (None, None) if key.window is None else key.window
    numbers: dict[str, Any] = {
        "has_softmax_scale": int(key.scale is not None), "softmax_scale": float(key.scale or 0.0),
        "softcap": float(key.softcap or 0.0), "causal": int(key.causal), "align": _abi.ALIGN[key.align],
        "has_window_left": int(left is not None), "window_left": left or 0,
        "has_window_right": int(right is not None), "window_right": right or 0,
        "dropout.p": float(key.dropout_p), "dropout.seed": kind.seed, "dropout.offset": kind.offset,
        "compute_dtype": _abi.COMPUTE_DTYPE[key.compute_dtype], "cpu_target": _abi.CPU_TARGET[key.cpu_target],
        "allows_nondeterminism": int(not key.deterministic), "sm_margin": key.sm_margin, **others,
    }  # fmt: skip
    return [f"{name}={value!r}" for name, value in numbers.items() if value]


def _slot_lines(kind: Kind, inputs: Sequence[Any]) -> list[str]:
    lines = []
    for name, array in zip(kind.names, inputs):
        word, colon, own = name.partition(":")
        if colon:
            code, bits, rank = _element_of(array)
            lines.append(f"{word}_slot={own} {code} {bits} {rank}")
    return lines


def _element_of(array: Any) -> tuple[int, int, int]:
    """DLPack's code and bits, and the rank."""
    code, bits = _abi.DTYPES[_SHORT[str(array.dtype)]]
    return code, bits, len(array.shape)


def _text(
    operation: str, kind: Kind, inputs: Sequence[Any], operands: Sequence[str], results: Sequence[str], numbers: dict[str, int]
) -> str:
    """What src/ffi/xla/call_site.hpp reads; `operands` and `results` are what stands in the structs, in XLA's order."""
    lines = [f"operation={operation}", f"layout={kind.key.layout}", *_number_lines(kind, numbers)]
    for word, text in (("quant", kind.key.quant), ("score", kind.score), ("mask", kind.mask)):
        lines += [f"{word}={text}"] if text else []
    lines += _slot_lines(kind, inputs)
    lines += [f"operand={name}" for name in operands] + [f"result={name}" for name in results]
    return "\n".join(lines)


def run(
    operation: str, kind: Kind, inputs: Sequence[Any], operands: dict[str, Any], results: dict[str, Any],
    numbers: dict[str, int] | None = None,
) -> list[Any]:  # fmt: skip
    """The operation of XLA; `operands` beside the inputs, by their names in the structs, and shapes of results by theirs.

    A result that has the name of an operand is written in its memory, where the program may.
    """
    names = (*kind.names, *operands)
    aliases = {names.index(name): index for index, name in enumerate(results) if name in names}
    call = jax.ffi.ffi_call(
        _TARGET.format(operation), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()], vmap_method="sequential",
        input_output_aliases=aliases,
    )  # fmt: skip
    return list(call(*inputs, *operands.values(), call=_text(operation, kind, inputs, names, tuple(results), numbers or {})))


def named(pattern: str, group: str, name: str) -> str:
    """What an input's derivative is called: `pattern` of q, k, v and sinks, else an element of the list `group`."""
    return pattern.format(name) if name in _PLAIN else f"{group}:{name.removeprefix('score:')}"
