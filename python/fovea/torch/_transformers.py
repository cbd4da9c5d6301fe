"""The models of transformers on Fovea: an attention function and a mask function under one name."""

from __future__ import annotations

from typing import Any

from .._attention import attention
from ..errors import Unsupported
from ._sdpa import random_dropout

_NAME = "fovea"


def _bias_and_mask(attention_mask: Any, position_bias: Any) -> tuple[Any, Any]:
    """A bool mask as it is; one of floats is a bias, beside which T5's joins."""
    if attention_mask is None:
        return position_bias, None
    if attention_mask.dtype.is_floating_point:
        return (attention_mask if position_bias is None else attention_mask + position_bias), None
    return position_bias, attention_mask


def _forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, dropout: float = 0.0,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: Any = None, position_bias: Any = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """[batch, heads, seqlen, dim] in, [batch, seqlen, heads, dim] out; heads of keys are not repeated."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    bias, mask = _bias_and_mask(attention_mask, position_bias)
    # A single query sees all keys; several before an empty static cache see those of their own places, from the left.
    sees_left = bool(is_causal and attention_mask is None and query.shape[2] > 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(
        q, k, v, causal=sees_left, align="top_left", scale=scaling, softcap=softcap, bias=bias, mask=mask,
        sinks=None if s_aux is None else s_aux.float(), dropout=random_dropout(dropout, query),
    )  # fmt: skip
    return out, None


def install_transformers(name: str = _NAME) -> None:
    """Registers Fovea's attention and the masks that go with it in transformers, for ``attn_implementation="fovea"``.

    Both belong together: under a name without a mask function transformers gives no mask, and padding would silently be seen.
    Softcaps, sinks, windows, position biases, grouped heads and caches are those of the models.

    Parameters
    ----------
    name : str
        What ``attn_implementation`` and ``model.set_attn_implementation`` take.

    Raises
    ------
    Unsupported
        There is no transformers here, or one without both registers: they came with version 4.53.

    Examples
    --------
    >>> fovea.torch.install_transformers()
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fovea")
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise Unsupported(
            f"install_transformers: {error}; expected transformers 4.53 or newer, with AttentionInterface and AttentionMaskInterface"
        ) from None
    AttentionInterface.register(name, _forward)
    AttentionMaskInterface.register(name, sdpa_mask)
