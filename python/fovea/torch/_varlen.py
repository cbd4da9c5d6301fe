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


def offsets_in_use(cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any = None, seqused_k: Any = None) -> tuple[Any, Any]:
    """Offsets of sequences of which the first `seqused_q` queries and `seqused_k` keys count, [num_sequences] each; no row moves.

    What does not count becomes sequences of its own, behind those that do: queries without keys, whose rows see nothing, then keys
    without queries.
    """
    (start_q, end_q), (start_k, end_k) = ((offsets[:-1], offsets[1:]) for offsets in (cu_seqlens_q, cu_seqlens_k))

    def end_in_use(name: str, start: Any, end: Any, seqused: Any) -> Any:
        if seqused is None:
            return end
        if seqused.shape != start.shape:
            raise InvalidArgument(f"{name} has shape {tuple(seqused.shape)}; expected [num_sequences], {tuple(start.shape)}")
        return torch.minimum(start + seqused.to(start.dtype).clamp(min=0), end)

    used_q, used_k = end_in_use("seqused_q", start_q, end_q, seqused_q), end_in_use("seqused_k", start_k, end_k, seqused_k)
    starts = [(start_q, start_k)]
    if seqused_q is not None:
        starts.append((used_q, used_k))
    if seqused_k is not None:
        starts.append((end_q, used_k))
    made_q, made_k = (torch.stack(side, 1).flatten() for side in zip(*starts))
    return torch.cat([made_q, cu_seqlens_q[-1:]]), torch.cat([made_k, cu_seqlens_k[-1:]])


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
        Keys of each sequence that count: its first ones.
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
        As `fovea.attention`; of gradients through block_table.
    """
    num_heads_kv = key.shape[-2]
    if query.shape[1] != num_heads_kv and not enable_gqa:
        raise InvalidArgument(f"varlen_attn: query has {query.shape[1]} heads and key {num_heads_kv}; expected equal, or enable_gqa=True")
    features: dict[str, Any] = {"scale": scale, "window": _window(window_size), "return_lse": bool(return_aux is not None and return_aux.lse)}
    if block_table is None:
        cu_seqlens = (cu_seq_q, cu_seq_k) if seqused_k is None else offsets_in_use(cu_seq_q, cu_seq_k, seqused_k=seqused_k)
        return attention(query, key, value, cu_seqlens=cu_seqlens, **features)
    if seqused_k is None:
        raise InvalidArgument("varlen_attn: block_table without seqused_k; expected both")
    cache = KvCache(key, value, seqused_k, page_table=block_table)
    return decode(query, cache, cu_seqlens=cu_seq_q, max_seqlen_q=max_q, sees_all_keys=True, **features)
