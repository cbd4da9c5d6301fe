"""Padded batches to packed rows and back, as flash_attn.bert_padding does it; all of it has gradients."""

from __future__ import annotations

from typing import Any

import torch


def index_first_axis(x: Any, indices: Any) -> Any:
    """Rows of ``x`` [n, ...]."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """[first_axis_dim, ...] that is ``values`` at rows ``indices`` and 0 elsewhere; no row twice."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Any, indices: Any) -> tuple[Any, Any]:
    """Rows of ``x``, and ``x`` itself without its history."""
    return index_first_axis(x, indices), x.detach()


def _offsets(lengths: Any) -> Any:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """Packed rows of a padded batch.

    Parameters
    ----------
    hidden_states : Tensor, [batch, seqlen, ...]
    attention_mask : Tensor, [batch, seqlen], bool or of 0 and 1
    unused_mask : Tensor, the same, optional
        Rows that are packed, too, but do not count.

    Returns
    -------
    rows, indices, cu_seqlens, max_seqlen, seqused : [total, ...], [total] i64, [batch + 1] i32, int, [batch] i32
        `seqused` counts the rows of ``attention_mask``.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    max_seqlen = int(lengths.max()) if len(lengths) else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _offsets(lengths), max_seqlen, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Any, attention_mask_in_length: Any) -> tuple[Any, Any, Any, int]:
    """Packed rows of a batch whose rows hold several documents each.

    Parameters
    ----------
    hidden_states : Tensor, [batch, seqlen, ...]
    attention_mask_in_length : Tensor, [batch, seqlen] of whole numbers
        A row holds the lengths of its documents, and 0 behind them.

    Returns
    -------
    rows, indices, cu_seqlens, max_seqlen
        Offsets are those of the documents.
    """
    seqlen = attention_mask_in_length.shape[-1]
    places = torch.arange(seqlen, device=attention_mask_in_length.device)
    indices = (places < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    max_seqlen = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _offsets(lengths), max_seqlen


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """[batch, seqlen, ...] of packed rows [total, ...]; 0 where there is none."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
