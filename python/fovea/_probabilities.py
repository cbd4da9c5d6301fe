"""Probabilities of attention as an array: what `attention` never writes out."""

from __future__ import annotations

from typing import Any

from . import _abi
from ._arrays import Array, check_writable, framework_of
from ._attention import keep_template
from ._block_map import scores_shape
from ._calls import Builder, Template, offset
from ._forward import Arguments, add_forward, gather, resolved
from ._library import address_of

_PROBABILITIES = address_of("fovea_attention_probabilities")
_templates: dict[Any, Template] = {}


def _template(arguments: Arguments, function: str) -> Template:
    found = _templates.get(arguments.key)
    if found is not None:
        return found
    builder = Builder(function)
    struct = _abi.ProbabilitiesArgs
    at = builder.add(_abi.sized(struct))
    builder.point(at + offset(struct, "forward"), add_forward(builder, arguments, function))
    builder.tensor(at + offset(struct, "probabilities"), "out")
    return keep_template(_templates, arguments.key, builder.done())


def attention_probabilities(q: Array, k: Array, *, out: Array | None = None, **features: Any) -> Any:
    """``exp(score - lse)`` of each query and key: to look at, and to test with.

    A key that dropout drops has its sign bit set: ``numpy.signbit`` of the result is the dropout mask, and ``abs`` of it
    the probabilities. Only on the CPU; its memory grows with seqlen_q * seqlen_kv.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim_qk], f32, f16 or bf16
        As `attention`'s.
    k : array, [batch, seqlen_kv, num_heads_kv, head_dim_qk], dtype of q
    out : array, [batch, num_heads_q, seqlen_q, seqlen_kv], f32, f16 or bf16, optional
        Written, and returned.
    **features
        Others of `attention`'s: causal, window, scale, softcap, score_mod, mask_mod, sinks, dropout, cu_seqlens, layout, ...

    Returns
    -------
    array, [batch, num_heads_q, seqlen_q, seqlen_kv]
        Dtype of q, of q's library. Hidden keys have exactly 0, and so has a row that sees none. With `cu_seqlens`:
        [num_sequences, num_heads_q, longest seqlen_q, longest seqlen_kv], 0 behind a sequence's end.

    Raises
    ------
    InvalidArgument
        As `attention`.
    Unsupported
        An array lives on a GPU, or gradients are recorded.

    Examples
    --------
    >>> p = fovea.attention_probabilities(q, k, causal=True)
    >>> p.sum(-1)  # 1 where a row sees a key
    """
    function = "attention_probabilities"
    framework = framework_of(q, function, "q")
    arguments = resolved(framework, gather(function, q, k, None, None, **features), function)
    if out is None:
        shape = scores_shape(q, k, features.get("cu_seqlens"), features.get("layout", "bshd"), function)
        out = framework.empty(q, shape, None)
    else:
        check_writable(out, "out", function)
    _template(arguments, function).invoke((*arguments.tensors, out), arguments.words, _PROBABILITIES)
    return framework.finish(out)
