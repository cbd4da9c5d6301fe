"""`fovea.jax.attention`."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from .. import _abi
from .._attention import Quant, Window
from .._forward import Arguments, Dropout, MaskMod, ScoreMod, _number, _window, check_key, gather
from .._programs import Program
from ..errors import InvalidArgument
from . import _calls
from ._primitives import attention_p
from ._sharding import alike
from ._trace import trace

Array = Any


def array_of(value: Any, name: str, function: str) -> Any:
    """As JAX has it; a list is refused, since JAX would."""
    if isinstance(value, (list, tuple)) or not hasattr(value, "shape"):
        raise InvalidArgument(f"{function}: {name} is a {type(value).__name__}; expected an array of JAX or NumPy")
    return jnp.asarray(value)


def _traced(source: Any, kind: int) -> Any:
    """A callable as a program; all else as it is."""
    is_formula = source is None or isinstance(source, (str, Program)) or hasattr(source, "shape")
    return trace(kind, source) if not is_formula and callable(source) else source


def _halves(value: Any, function: str) -> Any:
    """64 bits as JAX has them without 64-bit integers: two of 32, the low ones first."""
    array = jnp.asarray(value)
    if array.dtype == jnp.uint32 and array.shape == (2,):  # such halves, or a key of the old kind
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array).reshape(-1)[-2:].astype(jnp.uint32)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.size != 1:
        raise InvalidArgument(f"{function}: dropout.seed has dtype {array.dtype} and shape {array.shape}; expected one integer, or a key")
    one = array.reshape(())
    if one.dtype.itemsize == 8:
        low, high = one & 0xFFFFFFFF, one >> 32
    else:
        low, high = one, jnp.where(one < 0, -1, 0)
    return jnp.stack([low.astype(jnp.uint32), high.astype(jnp.uint32)])


def _with_seeds(dropout: Any, function: str) -> Any:
    """Numbers stay numbers; where one of seed and offset is an array both are."""
    if not isinstance(dropout, tuple) or len(dropout) < 2:
        return dropout
    p, seed, offset, places = Dropout(_number(dropout[0], "dropout.p", function), *dropout[1:])
    places = places if places is None else array_of(places, "dropout.places", function)
    if not hasattr(seed, "dtype") and not hasattr(offset, "dtype"):
        return Dropout(p, seed, offset, places)
    return Dropout(p, _halves(seed, function), _halves(offset, function), places)


def _with_arrays(program: Program | None) -> Program | None:
    """The program over arrays of JAX."""
    return program and program._rebound(tuple(map(jnp.asarray, program.tensors)))


def _prepared(features: dict[str, Any], function: str) -> dict[str, Any]:
    """The features with arrays of JAX, numbers of Python's, and callables as programs."""
    made = {**features, "dropout": _with_seeds(features["dropout"], function), "window": _window(features["window"], function)}
    for name in ("scale", "softcap"):
        made[name] = None if made[name] is None else _number(made[name], name, function)
    for name in ("bias", "alibi", "sinks", "segment_ids", "cu_seqlens", "q_scale", "k_scale", "v_scale"):
        value = made[name]
        if isinstance(value, tuple):
            made[name] = tuple(x if x is None else array_of(x, name, function) for x in value)
        elif value is not None:
            made[name] = array_of(value, name, function)
    if made["sinks"] is not None:
        made["sinks"] = made["sinks"].astype(jnp.float32)
    if hasattr(made["mask"], "shape"):
        made["mask"] = jnp.asarray(made["mask"])
    for name, kind in (("score_mod", _abi.SCORE_MOD), ("mask", _abi.MASK_MOD), ("mask_mod", _abi.MASK_MOD)):
        made[name] = _traced(made[name], kind)
    return made


def arguments_of(function: str, q: Any, k: Any, v: Any, features: dict[str, Any]) -> Arguments:
    """A call's key, its arrays as those of JAX, and its programs."""
    q, k, v = (array_of(x, name, function) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    arguments = gather(function, q, k, v, None, **_prepared(features, function))
    check_key(arguments.key, function)
    score, mask = map(_with_arrays, arguments.kept)
    captured = [x for program in (score, mask) if program is not None for x in program.tensors]
    own = len(arguments.tensors) - len(captured)
    return arguments._replace(tensors=(*arguments.tensors[:own], *captured), kept=(score, mask))


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    align: str = "bottom_right",
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    score_mod: ScoreMod | None = None,
    mask: Any = None,
    mask_mod: MaskMod | None = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    sinks: Array | None = None,
    dropout: Dropout | tuple[Any, ...] | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    compute_dtype: str = "auto",
    cpu_target: str = "auto",
    deterministic: bool = True,
    sm_margin: int = 0,
    quant: Quant | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Any:
    """Exact attention as an operation of JAX: ``out = softmax(mask(score(scale * q k^T))) v``.

    Under jit, grad, jvp, vmap, checkpoint, shard_map and shardings over batch and heads, on the CPU and on NVIDIA GPUs: docs/guides/jax.md.
    Meanings and defaults are those of `fovea.attention`. Derivatives in both modes are by q, k, v, bias, alibi, sinks and what score_mod
    captures; gradients of gradients run on the CPU.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim_qk], f32, f16 or bf16; float8_e4m3fn with `q_scale`
        Of JAX or NumPy. ``layout="bhsd"``: [batch, num_heads_q, seqlen_q, head_dim_qk]. With `cu_seqlens` packed: [total_q, num_heads_q,
        head_dim_qk].
    k : array, [batch, seqlen_kv, num_heads_kv, head_dim_qk], dtype of q
    v : array, [batch, seqlen_kv, num_heads_kv, head_dim_v], dtype of q
    causal, align, window, scale, softcap
        As `fovea.attention`'s; constants of the compiled program.
    bias : array, [q, kv], [heads, q, kv] or [batch, heads, q, kv], f32, f16 or bf16, optional
    alibi : array, [num_heads_q] or [batch, num_heads_q], optional
    score_mod : str, callable or Program, optional
        A callable uses jax.numpy; arrays that it encloses are captured, traced ones too.
    mask : array or Program, optional
    mask_mod : str, callable or Program, optional
    segment_ids : array or (q, kv) of arrays, [batch, seqlen] i32 or i64, optional
    cu_seqlens : array or (q, kv) of arrays, [num_sequences + 1] i32 or i64, optional
    sinks : array, [num_heads_q], optional
    dropout : Dropout or (p, seed), optional
        Seed and offset may be arrays of one integer, the seed a key of jax.random.
    return_lse : bool
        Whether `lse` is returned, too.
    layout : {"bshd", "bhsd"}
        Order of the dimensions of q, k, v and out.
    compute_dtype, cpu_target, deterministic, sm_margin, quant
        As `fovea.attention`'s. Gradients pass straight through the rounding of a recipe; forward mode and gradients of gradients refuse
        it.
    q_scale, k_scale, v_scale : array, [batch, num_heads_kv] f32, optional
        Where `quant` has scales=given, as "fp8_static" has; constants to derivatives. Codes themselves, in float8_e4m3fn, have none.

    Returns
    -------
    out : array
        Shape as q with head_dim_v, dtype of q (bf16 where that is float8_e4m3fn); 0 where a row sees no key. For policies of jax.checkpoint its name is "fovea_out".
    lse : array
        With `return_lse`: [batch, num_heads_q, seqlen_q] f32 (packed: [num_heads_q, total_q]); "fovea_lse".

    Raises
    ------
    InvalidArgument, Unsupported
        Where the call is traced, of shapes, dtypes and formulas. What is wrong with scales, and what contents alone show, is an error of
        JAX when the program runs, with the same message.

    Examples
    --------
    >>> loss = lambda q, k, v: fovea.jax.attention(q, k, v, causal=True).sum()
    >>> dq, dk, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    """
    features: dict[str, Any] = {
        "causal": causal, "align": align, "window": window, "scale": scale, "softcap": softcap, "bias": bias, "alibi": alibi,
        "score_mod": score_mod, "mask": mask, "mask_mod": mask_mod, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens, "sinks": sinks,
        "dropout": dropout, "layout": layout, "compute_dtype": compute_dtype, "cpu_target": cpu_target, "deterministic": deterministic,
        "sm_margin": sm_margin, "quant": quant, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    arguments = arguments_of("attention", q, k, v, features)
    kind = _calls.kind_of(arguments)
    _calls.check(arguments, kind)
    out, lse = attention_p.bind(*alike(arguments.tensors), kind=kind)
    return (out, lse) if return_lse else out


#: What a call says beside q, k and v, as it is unless given.
FEATURES = {
    name: parameter.default
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "return_lse"
}
