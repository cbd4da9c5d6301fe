"""flash_attn.layers.rotary by `fovea.rotary`: on every device, with gradients, in place where the name says so."""

from __future__ import annotations

from typing import Any

import torch

from ...._rotary import rotary
from ..._flash import InvalidCall


def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0, cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:  # fmt: skip
    """Rows turned by the angles of their positions, which begin at `seqlen_offsets` in each sequence.

    Parameters
    ----------
    x : Tensor, [batch, seqlen, heads, dim], with cu_seqlens packed: [total, heads, dim]
    cos, sin : Tensor, [max_positions, rotary_dim / 2]
    interleaved : bool
        Pairs (2j, 2j + 1) instead of (j, j + rotary_dim / 2).
    inplace : bool
        Writes to x, and returns it.
    seqlen_offsets : int, or Tensor, [batch]
    cu_seqlens : Tensor, [batch + 1], optional
    max_seqlen : int, optional
        Taken and not needed.

    Returns
    -------
    Tensor, shape of x
    """
    offsets = None
    if isinstance(seqlen_offsets, torch.Tensor):
        offsets = seqlen_offsets
    elif seqlen_offsets:
        cos, sin = cos[seqlen_offsets:], sin[seqlen_offsets:]
    return rotary(x, cos, sin, offsets=offsets, cu_seqlens=cu_seqlens, is_interleaved=interleaved, out=x if inplace else None)


def apply_rotary_emb_torch(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    """The same by PyTorch's operators, of rows that begin at position 0: to compare with."""
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos[: x.shape[-3], None], sin[: x.shape[-3], None]
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined, kept], -1)


def apply_rotary_emb_qkv_(
    qkv: Any, cos: Any, sin: Any, cos_k: Any = None, sin_k: Any = None, interleaved: bool = False, seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:  # fmt: skip
    """Turns queries and keys of qkv in place, keys by `cos_k` and `sin_k` where given; returns qkv.

    qkv is [batch, seqlen, 3, heads, dim], or [batch, seqlen, num_heads_q + 2 * heads_k, dim] beside `num_heads_q`.
    """
    if qkv.dim() == 5:
        q, k = qkv.select(2, 0), qkv.select(2, 1)
    elif num_heads_q is None:
        raise InvalidCall("apply_rotary_emb_qkv_: qkv has rank 4 without num_heads_q; expected [batch, seqlen, 3, heads, dim] or num_heads_q")
    else:
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv.narrow(2, 0, num_heads_q), qkv.narrow(2, num_heads_q, num_heads_k)
    for rows, angles in ((q, (cos, sin)), (k, (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k))):
        apply_rotary_emb(rows, *angles, interleaved=interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(kv: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """Turns the keys of kv [batch, seqlen, 2, heads, dim] in place; returns kv."""
    apply_rotary_emb(kv.select(2, 0), cos, sin, interleaved=interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return kv
