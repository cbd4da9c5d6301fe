"""PyTorch's scaled_dot_product_attention: the same signature, and the place where PyTorch's own looks for a kernel."""

from __future__ import annotations

from typing import Any

import torch

from .._arrays import causal_features
from .._attention import attention, attention_backward
from .._forward import Dropout
from ..errors import InvalidArgument, Unsupported

_NAME = "Fovea"


def random_dropout(p: float, like: Any) -> Dropout | None:
    """Of PyTorch's generator on the device of `like`, so that torch.manual_seed repeats it; it stays there, so that a captured graph draws anew."""
    if not p:
        return None
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=like.device)
    return Dropout(p, seed, torch.zeros_like(seed))


def _broadcast_batch(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any, tuple[int, ...]]:
    """[..., heads, seqlen, dim] as [batch, heads, seqlen, dim], and the leading dimensions."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise InvalidArgument(f"scaled_dot_product_attention: {name} has rank {tensor.dim()}; expected at least 2")
    num_leading = max(tensor.dim() for tensor in (query, key, value)) - 2
    tensors = [tensor.reshape((1,) * (num_leading + 2 - tensor.dim()) + tuple(tensor.shape)) for tensor in (query, key, value)]
    if num_leading == 0:
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    # Heads are shared by groups, not broadcast; everything before them is broadcast.
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    leading = (*batch, tensors[0].shape[-3])
    q, k, v = (tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:]) for tensor in tensors)
    return q, k, v, leading if num_leading else ()


def _extents(attn_mask: Any) -> tuple[int, ...]:
    """Of the scores that a mask is for: the shape of a CausalBias has its kind in front."""
    if causal_features(attn_mask) is None:
        return tuple(attn_mask.shape)
    return attn_mask.seq_len_q, attn_mask.seq_len_kv


def check_mask(function: str, attn_mask: Any, scores: tuple[int, ...]) -> None:
    """Longer extents, which Fovea's own calls take for capacity, are a mistake there."""
    if not isinstance(attn_mask, torch.Tensor):
        raise InvalidArgument(f"{function}: attn_mask is a {type(attn_mask).__name__}; expected a tensor, or None")
    extents = _extents(attn_mask)
    fits = all(extent in (1, score) for extent, score in zip(reversed(extents), reversed(scores)))
    if not 1 <= len(extents) <= len(scores) or not fits:
        raise InvalidArgument(f"{function}: attn_mask has shape {extents}; expected one that broadcasts to the scores', {scores}")


def _mask_features(function: str, attn_mask: Any, scores: tuple[int, ...]) -> dict[str, Any]:
    """What `attention` calls a mask over scores [..., num_heads_q, seqlen_q, seqlen_kv]."""
    check_mask(function, attn_mask, scores)
    causal = causal_features(attn_mask)
    if causal is not None:
        return causal
    shaped = attn_mask if attn_mask.dim() > 1 else attn_mask.expand(1, -1)
    if shaped.dim() > 3 and len(scores) > 4:  # several batch dimensions are one
        batch = torch.Size(scores[:-3])
        shaped = shaped.expand(*batch, *shaped.shape[-3:]).reshape(batch.numel(), *shaped.shape[-3:])
    return {"mask" if shaped.dtype == torch.bool else "bias": shaped}


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, by Fovea.

    Parameters
    ----------
    query : Tensor, [..., num_heads_q, seqlen_q, head_dim_qk], f32, f16 or bf16
    key : Tensor, [..., num_heads_kv, seqlen_kv, head_dim_qk]
    value : Tensor, [..., num_heads_kv, seqlen_kv, head_dim_v]
    attn_mask : Tensor, broadcasts to [..., num_heads_q, seqlen_q, seqlen_kv], optional
        bool: True sees; of a float dtype: added to the scores, and differentiable. Or a CausalBias of torch.nn.attention.bias.
    dropout_p : float
        Drawn from PyTorch's generator.
    is_causal : bool
        Aligned top left, as PyTorch's; not beside attn_mask.
    scale : float, optional
        ``1 / sqrt(head_dim_qk)`` unless given.
    enable_gqa : bool
        Whether num_heads_kv may be smaller than num_heads_q, and divide it.

    Returns
    -------
    Tensor, [..., num_heads_q, seqlen_q, head_dim_v]
        0 where a query sees no key.

    Raises
    ------
    InvalidArgument, Unsupported
        As `fovea.attention`.
    """
    function = "scaled_dot_product_attention"
    if is_causal and attn_mask is not None:
        raise InvalidArgument(f"{function}: attn_mask beside is_causal; expected one of them")
    q, k, v, leading = _broadcast_batch(query, key, value)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise InvalidArgument(f"{function}: query has {q.shape[1]} heads and key {k.shape[1]}; expected equal, or enable_gqa=True")
    features: dict[str, Any] = {"causal": is_causal, "align": "top_left"}
    if attn_mask is not None:
        scores = (*leading, q.shape[2], k.shape[2])
        features |= _mask_features(function, attn_mask, scores)
    out = attention(q, k, v, scale=scale, dropout=random_dropout(dropout_p, q), layout="bhsd", **features)
    return out.reshape(*leading, *out.shape[-2:]) if leading else out.reshape(out.shape[-2:])


# ---- The place where PyTorch's own looks for a kernel ----


def _features(is_causal: bool, attn_mask: Any, scale: float | None, dropout_p: float) -> dict[str, Any]:
    if dropout_p:
        raise Unsupported("scaled_dot_product_attention: dropout on the cpu; PyTorch's own kernel there has none either")
    features: dict[str, Any] = {"causal": is_causal, "align": "top_left", "scale": scale, "layout": "bhsd"}
    if attn_mask is not None:
        features["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return features


def _is_ours(query: Any) -> bool:
    """Whether Fovea computes it: PyTorch hands its kernel float64 and any head_dim, too."""
    return query.dtype in (torch.float32, torch.float16, torch.bfloat16) and query.shape[-1] <= 512


def _plain_scores(query: Any, key: Any, is_causal: bool, attn_mask: Any, scale: float | None) -> tuple[Any, float]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores, factor


def _plain_forward(query: Any, key: Any, value: Any, is_causal: bool, attn_mask: Any, scale: float | None) -> tuple[Any, Any]:
    scores, _ = _plain_scores(query, key, is_causal, attn_mask, scale)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]) @ value, lse


def _plain_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, is_causal: bool, attn_mask: Any, scale: float | None
) -> tuple[Any, Any, Any]:
    scores, factor = _plain_scores(query, key, is_causal, attn_mask, scale)
    p = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    ds = p * (grad_out @ value.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)) * factor
    return ds @ key, ds.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad_out


def _forward(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: float | None = None
) -> tuple[Any, Any]:
    # Strides are those that PyTorch's shape functions promise to compiled graphs.
    out = torch.empty_like(query)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=dtype).transpose(1, 2)
    if not _is_ours(query):
        plain_out, plain_lse = _plain_forward(query, key, value, is_causal, attn_mask, scale)
        return out.copy_(plain_out), lse.copy_(plain_lse)
    with torch.no_grad():
        attention(query, key, value, out=out, lse=lse, **_features(is_causal, attn_mask, scale, dropout_p))
    return out, lse


def _backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool, *,
    attn_mask: Any = None, scale: float | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    features = _features(is_causal, attn_mask, scale, dropout_p)
    if not _is_ours(query):
        plain = _plain_backward(grad_out, query, key, value, out, logsumexp, is_causal, attn_mask, scale)
        return tuple(map(_laid_out, plain))
    got = attention_backward(grad_out, query, key, value, out, logsumexp, **features)
    return tuple(_laid_out(gradient) for gradient in (got.q, got.k, got.v))


def _laid_out(gradient: Any) -> Any:
    made = torch.empty_permuted(gradient.shape, (0, 2, 1, 3), dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)


class _Handle:
    """Keeps the kernels registered; `remove` gives PyTorch its own back."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL", "CPU")
        name = "_scaled_dot_product_flash_attention_for_cpu"
        self.library.impl(name, _forward, "CPU", allow_override=True)
        self.library.impl(f"{name}_backward", _backward, "CPU", allow_override=True)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None


def install_sdpa() -> None:
    """Lets `torch.nn.functional.scaled_dot_product_attention` of CPU tensors run on Fovea, in eager mode and in compiled graphs.

    What PyTorch gives to its flash kernel on the cpu: equal head dims, no dropout; f32, f16 and bf16 of head dims up to 512 run on Fovea,
    float64 and larger ones by the plain formula. All else is PyTorch's as before.
    `uninstall_sdpa` undoes it.

    Raises
    ------
    Unsupported
        This PyTorch has no such place: it came with version 2.10.
    """
    try:
        from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
    except ImportError:
        raise Unsupported(
            f"install_sdpa: PyTorch {torch.__version__} has no place for other kernels; expected 2.10 or newer"
        ) from None
    register_flash_attention_impl(_NAME, register_fn=_Handle)
    activate_flash_attention_impl(_NAME)


def uninstall_sdpa() -> None:
    """Gives PyTorch its own kernels back."""
    from torch.nn.attention import restore_flash_attention_impl

    restore_flash_attention_impl()
