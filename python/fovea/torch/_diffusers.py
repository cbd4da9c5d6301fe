"""The models of diffusers on Fovea: an attention backend of that name in its registry, which is closed to others but by private names."""

from __future__ import annotations

from typing import Any

from ..errors import Unsupported
from ._sdpa import scaled_dot_product_attention

_NAME = "fovea"


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, _parallel_config: Any = None,
) -> Any:  # fmt: skip
    """[batch, seqlen, heads, dim] in and out; a mask of rank 3 is one for each sequence."""
    if _parallel_config is not None:
        raise Unsupported("diffusers: a parallel configuration; expected none: sequences are not cut among ranks here")
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unsqueeze(1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)


def _new_member(names: Any) -> Any:
    """A member more of an enumeration of strings."""
    member = str.__new__(names, _NAME)
    member._name_, member._value_ = _NAME.upper(), _NAME
    type.__setattr__(names, member._name_, member)  # Python 3.12 finds members as attributes alone
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[_NAME] = member
    return member


def install_diffusers(is_default: bool = False) -> None:
    """Registers Fovea's attention in diffusers, for ``model.set_attention_backend("fovea")``, on every device.

    Masks of bools and of floats, grouped heads, dropout and gradients are those of PyTorch's scaled_dot_product_attention. The name is put
    into diffusers by ways that are its own; where they are not what they were, this says so.

    Parameters
    ----------
    is_default : bool
        Whether models whose backend nobody has set take it, too.

    Raises
    ------
    Unsupported
        There is no diffusers here, or its registry is another than that of versions 0.35 to 0.42.

    Examples
    --------
    >>> fovea.torch.install_diffusers()
    >>> pipeline.transformer.set_attention_backend("fovea")
    """
    try:
        from diffusers.models import attention_dispatch

        names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
        known, register = names._value2member_map_, registry.register
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"install_diffusers: {error}; expected diffusers 0.35 to 0.42, with its registry of attention backends") from None
    member = known.get(_NAME) or _new_member(names)
    register(member)(_attend)
    if is_default:
        registry._active_backend = member
