"""Attention forward and its gradients, one call at a time or planned, and what would run."""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any, Callable, Literal, NamedTuple, Sequence, Union, overload

from . import _abi, _quick
from ._arrays import Array, Framework, TensorSpec, are_codes, check_writable, framework_of
from ._calls import Bound, Builder, Template, offset
from ._forward import Arguments, Dropout, MaskMod, ScoreMod, add_forward, check_choice, gather, resolved
from ._library import address_of, check, take_text
from ._prepared import PreparedPlan, is_on_host, kept_features, rendered, spec_beside
from ._recipes import Recipe
from .errors import InvalidArgument, Unsupported

_ATTENTION = address_of("fovea_attention_forward")
_BACKWARD = address_of("fovea_attention_backward")
_PLAN_RUN = address_of("fovea_plan_run")
_PLAN_RUN_BACKWARD = address_of("fovea_plan_run_backward")
_MAX_TEMPLATES = 512

Window = tuple[int | None, int | None]
Quant = Union[str, Recipe, "os.PathLike[str]"]


_forward_templates: dict[Any, Template] = {}
_backward_templates: dict[Any, Template] = {}


def keep_template(cache: dict[Any, Template], key: Any, template: Template) -> Template:
    """Caches a template; a cache that is full starts again, which costs each kind of call its 50 microseconds once."""
    if len(cache) >= _MAX_TEMPLATES:
        cache.clear()
    cache[key] = template
    return template


def forward_template(arguments: Arguments, function: str) -> Template:
    """The template of a forward call."""
    try:
        found = _forward_templates.get(arguments.key)
    except TypeError:  # a value that cannot be hashed: refused by name below
        found = None
    if found is not None:
        return found
    builder = Builder(function)
    add_forward(builder, arguments, function)
    return keep_template(_forward_templates, arguments.key, builder.done())


#: What stands in for `attention` where PyTorch compiles a graph: set by fovea.torch.
compiled: Any = None
#: What runs calls that PyTorch watches: (arguments, return_lse) -> what `attention` returns; fovea.torch is imported by the first.
recorded: Any = None


def _recorder() -> Any:
    global recorded
    from .torch import _autograd

    recorded = _autograd.attention
    return recorded


def _shape(array: Array, name: str, function: str) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None:
        raise InvalidArgument(
            f"{function}: {name} is a {type(array).__name__}; expected an array of NumPy, PyTorch, CuPy, JAX, or of another "
            "library that speaks DLPack"
        )
    return tuple(shape)


def lse_shape(q_shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """[batch, num_heads_q, seqlen_q]; packed: [num_heads_q, total_q]."""
    if len(q_shape) == 3:
        return q_shape[1], q_shape[0]
    if len(q_shape) == 4:
        return q_shape[:3] if layout == "bhsd" else (q_shape[0], q_shape[2], q_shape[1])
    return q_shape[:-1]


def _out_dtype(q: Array) -> str | None:
    """Of `out` where nobody gives one: bf16 beside codes, which have no room for it, else None, that of q."""
    return "bf16" if are_codes(q) else None


def out_spec(q: Array, v: Array, name_of_v: str, function: str) -> TensorSpec:
    """`out` of a call as it would be made: row-major, on the device of q."""
    return spec_beside(q, "q", _shape(q, "q", function)[:-1] + _shape(v, name_of_v, function)[-1:], _out_dtype(q), function)


def make_outputs(
    function: str, framework: Framework, q: Array, v: Array, out: Array, lse: Array, return_lse: bool, layout: str
) -> tuple[Array, Array]:
    """`out`, and `lse` where it is wanted: the caller's, or new ones of q's library and device."""
    for name, given in (("out", out), ("lse", lse)):
        if given is not None:
            check_writable(given, name, function)
    if out is not None and (lse is not None or not return_lse):
        return out, lse
    q_shape, v_shape = _shape(q, "q", function), _shape(v, "v", function)
    if not q_shape or not v_shape:
        raise InvalidArgument(f"{function}: q or v has rank 0; expected [batch, seqlen, num_heads, head_dim]")
    if out is None:
        out = framework.empty(q, q_shape[:-1] + v_shape[-1:], _out_dtype(q))
    if lse is None and return_lse:
        lse = framework.empty(q, lse_shape(q_shape, layout), "f32")
    return out, lse


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
    dropout: Dropout | tuple[float, int] | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    row_max: Array | None = None,
    layout: str = "bshd",
    compute_dtype: str = "auto",
    cpu_target: str = "auto",
    deterministic: bool = True,
    sm_margin: int = 0,
    quant: Quant | None = None,
    accuracy: float | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Any:
    """Exact attention: ``out = softmax(mask(score(scale * q k^T))) v``.

    Arrays of any library that speaks DLPack, on the arrays' device and, on a GPU, their library's current stream; nothing is
    copied. PyTorch records gradients by q, k, v, bias, alibi, sinks and what score_mod captures. Score features act in the order scale, softcap, bias, alibi, score_mod; a
    key is visible where mask, window, causal, segments and mask_mod all say so.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim_qk], f32, f16 or bf16; float8_e4m3fn with `q_scale`
        ``layout="bhsd"``: [batch, num_heads_q, seqlen_q, head_dim_qk]. With `cu_seqlens` packed: [total_q, num_heads_q,
        head_dim_qk]. Any strides; a contiguous last dimension is fast.
    k : array, [batch, seqlen_kv, num_heads_kv, head_dim_qk], dtype of q
        num_heads_q is a multiple of num_heads_kv: query head h uses key head ``h // (num_heads_q // num_heads_kv)``.
    v : array, [batch, seqlen_kv, num_heads_kv, head_dim_v], dtype of q
    causal : bool
        A query sees the keys up to its own position.
    align : {"bottom_right", "top_left"}
        Of causal, window and alibi where seqlen_q != seqlen_kv: the last query meets the last key, or the first the first.
    window : (left, right), optional
        Keys in ``[pos - left, pos + right]``, both inclusive; None leaves a side open.
    scale : float, optional
        ``1 / sqrt(head_dim_qk)`` unless given; `softmax_scale` of the other languages.
    softcap : float, optional
        ``softcap * tanh(score / softcap)``.
    bias : array, [q, kv], [heads, q, kv] or [batch, heads, q, kv], f32, f16 or bf16, optional
        Added to the scores; extents of 1 broadcast, and rows and keys may be more than there are.
    alibi : array, [num_heads_q] or [batch, num_heads_q], optional
        Slopes: adds ``-slope * abs(pos - kv_idx)``.
    score_mod : str, callable or Program, optional
        See `score_mod`: a text, or a callable of ``(score, batch, head, q_idx, kv_idx)``.
    mask : array or Program, optional
        Of an array, bool or u8, true: visible; shapes as bias. Of programs, ``fovea.causal() & fovea.documents(ids)``.
    mask_mod : str, callable or Program, optional
        See `mask_mod`: a text, or a callable of ``(batch, head, q_idx, kv_idx)``.
    segment_ids : array or (q, kv) of arrays, [batch, seqlen] i32 or i64, optional
        A query sees keys of its own id; -1 is padding, which sees nothing and is seen by nobody. Packed: [total].
    cu_seqlens : array or (q, kv) of arrays, [num_sequences + 1] i32 or i64, optional
        Where each packed sequence begins.
    sinks : array, [num_heads_q] f32, optional
        A logit that joins each row's denominator.
    dropout : Dropout, optional
        ``Dropout(p, seed)``: the same keys are dropped wherever the call runs.
    return_lse : bool
        Whether `lse` is returned, too.
    out : array, [batch, seqlen_q, num_heads_q, head_dim_v], f32, f16 or bf16, optional
        Written, and returned; must not overlap an input.
    lse : array, [batch, num_heads_q, seqlen_q] f32, optional
        Written.
    row_max : array, shape of lse, f32, optional
        Written: each row's largest score.
    layout : {"bshd", "bhsd"}
        Order of the dimensions of q, k, v and out.
    compute_dtype : {"auto", "f32", "bf16"}
        What products are made of.
    cpu_target : {"auto", "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "avx512_vnni", "avx_vnni"}
        Instruction set of the CPU kernels; the last two are for ``quant`` alone.
    deterministic : bool
        False allows a faster kernel whose bits may differ from run to run.
    sm_margin : int
        On a GPU, multiprocessors that stay free for what runs beside the call.
    quant : str, Recipe or path, optional
        A recipe of attention in eight bits, "accurate", "fast", "int8", "sage1", "sage2" or "fp8_static", or in four, "nvfp4" or
        "mxfp4", and fields behind a name: ``"accurate,hadamard=yes"``; or what ``fovea calibrate`` chose: a .json file, better
        read once by `load_recipe`. On the CPU all; on GPUs "accurate", "sage1" of f16, and "fast", "sage2" and "fp8_static"
        from compute capability 8.9 on. Gradients pass straight through the rounding.
    accuracy : float, optional
        In place of `quant`: the relative error that out may have. The plan takes the fastest recipe whose stated error is within
        it, if one is faster here than none, and `explain` says which and why; where gradients are recorded or graphs compiled it
        takes none.
    q_scale, k_scale, v_scale : array, [batch, num_heads_kv] f32, optional
        Where `quant` has scales=given, as "fp8_static" has: what q, k and v are divided by before they are rounded, of each
        sequence and kv head; any strides. q, k and v may be codes already, in float8_e4m3fn, of numbers that these are
        multiplied by. Others call them descales.

    Returns
    -------
    out : array
        Shape as above, dtype of q (bf16 where that is float8_e4m3fn), of q's library; 0 where a row sees no key.
    lse : array
        With `return_lse`: [batch, num_heads_q, seqlen_q] f32 (packed: [num_heads_q, total_q]), the natural logarithm of the sum
        of exponentials; -inf where a row sees no key.

    Raises
    ------
    InvalidArgument
        A shape, dtype or value is wrong; nothing was written. Of formulas its subclasses ProgramError and TraceError.
    Unsupported
        Nothing here can run the problem: every kernel's reason.

    Examples
    --------
    >>> out = fovea.attention(q, k, v, causal=True, window=(1024, 0))
    >>> out = fovea.attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * abs(q_idx - kv_idx))
    """
    if compiled is not None and compiled.is_compiling():
        if quant is not None:
            raise Unsupported(f"attention: quant is {quant!r} in a compiled graph; expected none")
        if not (q_scale is None and k_scale is None and v_scale is None):
            raise Unsupported("attention: q_scale, k_scale or v_scale in a compiled graph; expected none of them")
        if out is not None or lse is not None or row_max is not None or compute_dtype != "auto" or cpu_target != "auto" or sm_margin:
            raise Unsupported("attention: out, lse, row_max, compute_dtype, cpu_target or sm_margin in a compiled graph; expected none of them")
        return compiled.attention(
            q, k, v, causal=causal, align=align, window=window, scale=scale, softcap=softcap, bias=bias, alibi=alibi,
            score_mod=score_mod, mask=mask, mask_mod=mask_mod, segment_ids=segment_ids, cu_seqlens=cu_seqlens, sinks=sinks,
            dropout=dropout, return_lse=return_lse, layout=layout, deterministic=deterministic,
        )  # fmt: skip
    has_scales = not (q_scale is None and k_scale is None and v_scale is None)
    if _quick.attend is not None and quant is None and accuracy is None and not has_scales:
        result = _quick.attend(
            0, 0, 0, return_lse, out, lse, row_max, q, k, v, causal, align, window, scale, softcap, bias, alibi, score_mod, mask,
            mask_mod, segment_ids, cu_seqlens, sinks, dropout, layout, compute_dtype, cpu_target, deterministic, sm_margin,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    framework = framework_of(q, "attention", "q")
    if not deterministic and framework.must_be_deterministic is not None:
        deterministic = framework.must_be_deterministic()
    given = (out is None, lse is None, row_max is None)
    if row_max is not None:
        check_writable(row_max, "row_max", "attention")
    out, lse = make_outputs("attention", framework, q, v, out, lse, return_lse, layout)
    arguments = gather(
        "attention", q, k, v, out, lse, framework.stream(q), causal=causal, align=align, window=window, scale=scale, softcap=softcap, bias=bias,
        alibi=alibi, score_mod=score_mod, mask=mask, mask_mod=mask_mod, segment_ids=segment_ids, cu_seqlens=cu_seqlens,
        sinks=sinks, dropout=dropout, row_max=row_max, layout=layout, compute_dtype=compute_dtype, cpu_target=cpu_target,
        deterministic=deterministic, sm_margin=sm_margin, quant=quant, accuracy=accuracy, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    if framework.prepare is not None:
        arguments, is_recorded = framework.prepare(arguments)
        if is_recorded and are_codes(q):
            raise InvalidArgument(f"attention: q is {q.dtype} where gradients are recorded; expected f32, f16 or bf16: codes have no gradients")
        if is_recorded or (framework.is_observed is not None and framework.is_observed()):
            if quant is not None and not is_recorded:
                raise Unsupported(f"attention: quant is {quant!r} where calls are transformed or cast; expected None")
            if accuracy is not None:
                arguments = arguments._replace(key=arguments.key._replace(quant=None))
            if all(given):
                return (recorded or _recorder())(arguments, return_lse)
            if is_recorded:
                raise Unsupported("attention: out, lse or row_max where gradients are recorded; expected none of them")
    forward_template(arguments, "attention").invoke(arguments.tensors, arguments.words, _ATTENTION)
    finish = framework.finish
    return (finish(out), finish(lse)) if return_lse else finish(out)


# ---- Gradients ----


class Gradients(NamedTuple):
    """What `attention_backward` computed; None where it was not asked for.

    Attributes
    ----------
    q, k, v : array
        Shapes and dtypes of q, k and v.
    sinks : array, [num_heads_q] f32
    captured : dict
        "bias", "alibi" or a name of the score program to an array of its shape, f32 where the captured one is.
    """

    q: Array | None
    k: Array | None
    v: Array | None
    sinks: Array | None
    captured: dict[str, Array]


_CAPTURED_FIELDS = ("bias", "alibi")


def _captured_inputs(arguments: Arguments, inputs: dict[str, Array]) -> dict[str, Array]:
    """Every array that a gradient may be asked for by name."""
    found = {name: inputs[name] for name in _CAPTURED_FIELDS if inputs.get(name) is not None}
    program = arguments.kept[0]
    if program is not None:
        found |= dict(zip(program.tensor_names, program.tensors))
    return found


def backward_template(arguments: Arguments, wanted: tuple[str, ...], captured: tuple[str, ...], has_dlse: bool) -> Template:
    """The template of a backward call: behind forward's tensors dout, dlse, `wanted`, `captured`, behind its numbers the workspace's."""
    key = (arguments.key, wanted, captured, has_dlse)
    found = _backward_templates.get(key)
    if found is not None:
        return found
    function = "attention_backward"
    builder = Builder(function)
    struct = _abi.BackwardArgs
    at = builder.add(_abi.sized(struct, num_dcaptured=len(captured)))  # first: a call is given the address of its start
    builder.point(at + offset(struct, "forward"), add_forward(builder, arguments, function))
    is_swapped = arguments.key.layout == "bhsd"
    builder.tensor(at + offset(struct, "dout"), "dout", is_swapped)
    if has_dlse:
        builder.tensor(at + offset(struct, "dlse"), "dlse")
    for name in wanted:
        builder.tensor(at + offset(struct, name), name, is_swapped and name != "dsinks")
    size = ctypes.sizeof(_abi.NamedTensor)
    pairs = builder.add(size * len(captured))
    builder.point(at + offset(struct, "dcaptured"), pairs)
    for index, name in enumerate(captured):
        text = name.encode() + b"\0"
        place = builder.add(len(text))
        builder.memory[place : place + len(text)] = text
        builder.point(pairs + index * size, place)
        builder.tensor(pairs + index * size + offset(_abi.NamedTensor, "tensor"), f"d{name}")
    builder.word(at + offset(struct, "workspace"))
    builder.word(at + offset(struct, "workspace_bytes"))
    return keep_template(_backward_templates, key, builder.done())


class WantedGradients(NamedTuple):
    """Arrays to write, or their specs: "dq", "dk", "dv" and "dsinks"; and of captured arrays by name."""

    plain: dict[str, Array]
    captured: dict[str, Array]

    def finished(self, finish: Callable[[Array], Array]) -> Gradients:
        """What the caller gets."""
        plain = {name: finish(array) for name, array in self.plain.items()}
        captured = {name: finish(array) for name, array in self.captured.items()}
        return Gradients(plain["dq"], plain["dk"], plain["dv"], plain.get("dsinks"), captured)


def wanted_gradients(
    function: str, arguments: Arguments, features: dict[str, Any], captured: Sequence[str], beside: Callable[[Array], Array]
) -> WantedGradients:
    """What `attention_backward` computes; `beside` makes an array like an input."""
    sources = _captured_inputs(arguments, features)
    unknown = [name for name in captured if name not in sources]
    if unknown:
        raise InvalidArgument(
            f"{function}: captured names {unknown[0]!r}, which this call does not capture; expected some of "
            f"{', '.join(sources) or 'none'}"
        )
    plain = {f"d{name}": beside(array) for name, array in zip("qkv", arguments.tensors)}
    if features.get("sinks") is not None:
        plain["dsinks"] = beside(features["sinks"])
    return WantedGradients(plain, {name: beside(sources[name]) for name in captured})


def differentiate(
    function: str, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array | None, captured: Sequence[str],
    features: dict[str, Any], plan: PreparedPlan | None = None,
) -> Gradients:  # fmt: skip
    """Gradients, by a plan or without."""
    framework = framework_of(q, function, "q")
    arguments = resolved(framework, gather(function, q, k, v, out, lse, framework.stream(q), **features))

    def beside(array: Array) -> Array:
        return framework.empty(array, _shape(array, "an input", function), None)

    wanted = wanted_gradients(function, arguments, features, captured, beside)
    template = backward_template(arguments, tuple(wanted.plain), tuple(wanted.captured), dlse is not None)
    seeds = (dout,) if dlse is None else (dout, dlse)
    tensors = (*arguments.tensors, *seeds, *wanted.plain.values(), *wanted.captured.values())
    if plan is None:
        template.invoke(tensors, (*arguments.words, 0, 0), _BACKWARD)
    else:
        plan._invoke(template, tensors, arguments.words, _PLAN_RUN_BACKWARD, framework, q)
    return wanted.finished(framework.finish)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    captured: tuple[str, ...] | list[str] = (),
    **features: Any,
) -> Gradients:
    """Gradients of an attention call.

    Parameters
    ----------
    dout : array, shape of out
        The gradient of a loss by out; f32, f16 or bf16.
    q, k, v : array
        As the forward call had them.
    out, lse : array
        As the forward call wrote them.
    dlse : array, shape of lse, f32, optional
        The gradient by lse.
    captured : sequence of str
        Gradients wanted beyond q, k, v and sinks: "bias", "alibi", or names of arrays that the score program captures.
    **features
        As the forward call had them: causal, window, score_mod, sinks, ...

    Returns
    -------
    Gradients

    Raises
    ------
    InvalidArgument, Unsupported
        As `attention`; of a name in `captured` that is not captured.
    """
    return differentiate("attention_backward", dout, q, k, v, out, lse, dlse, captured, features)


# ---- What would run ----


def _bind(function: str, q: Array, k: Array, v: Array, features: dict[str, Any]) -> tuple[Arguments, Bound]:
    """A forward call's struct where no output need be there: its shape and dtype are known."""
    layout = features.get("layout", "bshd")
    return_lse = bool(features.pop("return_lse", False))
    if features.get("out") is None:
        features["out"] = out_spec(q, v, "v", function)
    if return_lse and features.get("lse") is None:
        features["lse"] = spec_beside(q, "q", lse_shape(_shape(q, "q", function), layout), "f32", function)
    arguments = gather(function, q, k, v, features.pop("out"), features.pop("lse", None), **features)
    return arguments, forward_template(arguments, function).bind(arguments.tensors, arguments.words)


def _options(function: str, max_seqlen_q: int, max_seqlen_kv: int, num_threads: int, compile_mode: str) -> Any:
    check_choice(compile_mode, "compile", _abi.COMPILE_MODE, function)
    return ctypes.byref(
        _abi.sized(
            _abi.PlanOptions, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, num_threads=num_threads,
            compile_mode=_abi.COMPILE_MODE[compile_mode],
        )
    )


@overload
def explain(
    q: Array, k: Array, v: Array, *, max_seqlen_q: int = ..., max_seqlen_kv: int = ..., compile: str = ..., as_json: Literal[False] = ..., **features: Any
) -> str: ...
@overload
def explain(
    q: Array, k: Array, v: Array, *, max_seqlen_q: int = ..., max_seqlen_kv: int = ..., compile: str = ..., as_json: Literal[True], **features: Any
) -> dict[str, Any]: ...
def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    compile: str = "auto",
    as_json: bool = False,
    **features: Any,
) -> str | dict[str, Any]:
    """What a call of `attention` would run, and why: kernel, tiles, work, memory, and each refused kernel's reason.

    Parameters
    ----------
    q, k, v : array or TensorSpec
        As `attention`'s; data is needed only where a mask reads arrays, to count tiles.
    max_seqlen_q, max_seqlen_kv, compile
        As `plan`'s.
    as_json : bool
        Whether the answer is a dict.
    **features
        As `attention`'s.

    Returns
    -------
    str or dict
        A page to read; a problem that nothing can run is explained, too.

    Raises
    ------
    InvalidArgument
        As `attention`.
    """
    _, bound = _bind("explain", q, k, v, features)
    text = take_text(
        "fovea_explain", bound.address, _options("explain", max_seqlen_q, max_seqlen_kv, 0, compile), _abi.JSON if as_json else _abi.TEXT
    )
    return rendered(text, as_json)


class Plan(PreparedPlan):
    """A problem that was validated, with its kernel and its exact workspace; made by `plan`. Threads may share it.

    Attributes
    ----------
    workspace_bytes : int
        Bytes of workspace that a run takes.
    """

    _made_by = "plan"

    def __init__(
        self, features: dict[str, Any], bound: Bound, options: Any, *, returns_lse: bool, is_on_host: bool
    ) -> None:
        super().__init__("fovea_plan_create", bound.address, options, is_on_host=is_on_host)
        self._features = features
        defaults = {**attention.__kwdefaults__, **features}  # type: ignore[dict-item]
        self._positional = tuple(defaults[name] for name in _quick.FEATURES)
        self._returns_lse = returns_lse
        self._has_scales = any(features.get(name) is not None for name in ("q_scale", "k_scale", "v_scale"))

    @property
    def is_final(self) -> bool:
        """Whether every run from now on uses the same kernels; False while a plan of ``compile="staged"`` awaits its own.

        Raises
        ------
        CompileError, DeviceError
            They cannot be had; `run` raises it, too.
        """
        answer = ctypes.c_int32()
        check("fovea_plan_is_final", self._handle, ctypes.byref(answer))
        return bool(answer.value)

    def wait(self) -> None:
        """Returns when the plan is final: before times are taken, bits compared or runs captured by a graph."""
        check("fovea_plan_wait", self._handle)

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        return_lse: bool | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        **changed: Any,
    ) -> Any:
        """Attention of tensors like those of the plan: same dtypes, heads and programs, lengths within its bounds.

        Parameters
        ----------
        q, k, v, out, lse, return_lse
            As `attention`'s.
        **changed
            Features whose arrays or numbers are others than those of the plan: ``bias=``, ``score_mod=program.with_captures(...)``.
            All else is as it was planned.

        Returns
        -------
        As `attention`.

        Raises
        ------
        InvalidArgument
            The call does not fit the plan; nothing was written.
        """
        if return_lse is None:
            return_lse = self._returns_lse
        framework = framework_of(q, "Plan.run", "q")
        # Alive until the call returns: from then on a GPU library may lend it to later work of the same stream.
        workspace, address = self._workspace(framework, q)
        if _quick.attend is not None and not self._has_scales and not changed:
            result = _quick.attend(
                self._handle, address, self.workspace_bytes, return_lse, out, lse, None, q, k, v, *self._positional
            )
            if result is not NotImplemented:
                return result
        features = {**self._features, **changed} if changed else self._features
        out, lse = make_outputs("Plan.run", framework, q, v, out, lse, return_lse, features.get("layout", "bshd"))
        arguments = gather("Plan.run", q, k, v, out, lse, framework.stream(q), **features)
        arguments = resolved(framework, arguments, "Plan.run")
        template = _plan_template(arguments)
        template.invoke(arguments.tensors, (*arguments.words, address, self.workspace_bytes), _PLAN_RUN, self._handle)
        del workspace
        finish = framework.finish
        return (finish(out), finish(lse)) if return_lse else finish(out)


_plan_templates: dict[Any, Template] = {}


def _plan_template(arguments: Arguments) -> Template:
    found = _plan_templates.get(arguments.key)
    if found is not None:
        return found
    builder = Builder("Plan.run")
    at = add_forward(builder, arguments, "Plan.run")
    builder.word(at + offset(_abi.ForwardArgs, "workspace"))
    builder.word(at + offset(_abi.ForwardArgs, "workspace_bytes"))
    return keep_template(_plan_templates, arguments.key, builder.done())


def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    num_threads: int = 0,
    compile: str = "auto",
    **features: Any,
) -> Plan:
    """Validates a problem and chooses its kernel once; `Plan.run` then decides nothing and takes no memory but its workspace.

    Parameters
    ----------
    q, k, v : array or TensorSpec
        As `attention`'s; no data is needed.
    max_seqlen_q, max_seqlen_kv : int
        0: exactly the lengths given; n: the plan serves every length up to n.
    num_threads : int
        Workers that the workspace is for; 0: those of the process.
    compile : str
        ``"complete"``: the plan is ready when its GPU kernels are, which takes seconds where nobody has compiled them.
        ``"staged"``: it is ready as soon as a kernel is that compiles in half a second and runs two to five times slower;
        the others are compiled meanwhile and run the calls that begin afterwards, rounded differently: `Plan.is_final`,
        `Plan.wait`. ``"auto"``: the variable ``FOVEA_COMPILE``, else complete.
    **features
        As `attention`'s.

    Returns
    -------
    Plan

    Raises
    ------
    InvalidArgument, Unsupported, CompileError
        As `attention`; a GPU kernel is compiled here, if need be.
    """
    kept = kept_features(features)
    returns_lse = bool(features.get("return_lse", False))
    _, bound = _bind("plan", q, k, v, {**features, **kept})
    options = _options("plan", max_seqlen_q, max_seqlen_kv, num_threads, compile)
    return Plan(kept, bound, options, returns_lse=returns_lse, is_on_host=is_on_host(q))


def describe_library() -> dict[str, Any]:
    """This machine and this library: instruction sets, GPUs, where kernels come from, what each operation takes, limits.

    Returns
    -------
    dict
        What `fovea doctor --json` prints: "fovea", "targets", "threads", "cuda", "operations", "limits" and more.
    """
    answer: dict[str, Any] = json.loads(take_text("fovea_describe"))
    return answer
