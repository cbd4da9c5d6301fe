"""Attention over packed sequences, with the signature of torch.nn.attention.varlen."""

from __future__ import annotations

from typing import Any

import torch

from .._attention import attention
from .._cache import KvCache, decode
from ..errors import InvalidArgument


def _window(sizes: tuple[int, int]) -> tuple[int | None, int | None] | None:
    if len(sizes) != 2:
        raise InvalidArgument(f"varlen_attn: window_size has {len(sizes)} numbers; expected (left, right), -1 for an open side")
    left, right = (None if size < 0 else size for size in sizes)
    return None if left is None and right is None else (left, right)


def _one_row_pages(key: Any, value: Any, cu_seq_k: Any, seqused_k: Any, max_k: int) -> KvCache:
    """Packed keys of which the first few of each sequence count: pages of one key each."""
    rows = cu_seq_k[:-1, None] + torch.arange(max_k, dtype=cu_seq_k.dtype, device=cu_seq_k.device)
    table = rows.clamp(max=max(key.shape[0] - 1, 0))
    return KvCache(key.unsqueeze(1), value.unsqueeze(1), seqused_k, page_table=table)


def varlen_attn(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn`, by Fovea, on every device and in f32, too.

    Parameters
    ----------
    query : Tensor, [total_q, num_heads_q, head_dim_qk], f32, f16 or bf16
    key : Tensor, [total_k, num_heads_kv, head_dim_qk]
        With `block_table`: [num_pages, page_size, num_heads_kv, head_dim_qk].
    value : Tensor, as key with head_dim_v
    cu_seq_q, cu_seq_k : Tensor, [num_sequences + 1] i32 or i64
        Where each sequence begins; cu_seq_k is not looked at beside a `block_table`.
    max_q, max_k : int
        Lengths of the longest sequences.
    return_aux : object with a bool `lse`, optional
        Such as PyTorch's AuxRequest.
    scale : float, optional
        ``1 / sqrt(head_dim_qk)`` unless given.
    window_size : (int, int)
        Keys to the left and to the right, the last query at the last key; -1 leaves a side open: (-1, 0) is causal.
    enable_gqa : bool
        Whether num_heads_kv may be smaller than num_heads_q, and divide it.
    seqused_k : Tensor, [num_sequences] i32 or i64, optional
        Keys of each sequence that count; without gradients.
    block_table : Tensor, [num_sequences, max_pages] i32 or i64, optional
        Pages of each sequence; with seqused_k.
    num_splits
        Taken and not needed.

    Returns
    -------
    Tensor, [total_q, num_heads_q, head_dim_v]; where `return_aux` asks for it also lse, [num_heads_q, total_q] f32

    Raises
    ------
    InvalidArgument, Unsupported
        As `fovea.attention`; of gradients through seqused_k or block_table.
    """
    num_heads_kv = key.shape[-2]
    if query.shape[1] != num_heads_kv and not enable_gqa:
        raise InvalidArgument(f"varlen_attn: query has {query.shape[1]} heads and key {num_heads_kv}; expected equal, or enable_gqa=True")
    features: dict[str, Any] = {"scale": scale, "window": _window(window_size), "return_lse": bool(return_aux is not None and return_aux.lse)}
    if seqused_k is None:
        if block_table is not None:
            raise InvalidArgument("varlen_attn: block_table without seqused_k; expected both")
        return attention(query, key, value, cu_seqlens=(cu_seq_q, cu_seq_k), **features)
    cache = (
        KvCache(key, value, seqused_k, page_table=block_table)
        if block_table is not None
        else _one_row_pages(key, value, cu_seq_k, seqused_k, max_k)
    )
    return decode(query, cache, cu_seqlens=cu_seq_q, max_seqlen_q=max_q, sees_all_keys=True, **features)
