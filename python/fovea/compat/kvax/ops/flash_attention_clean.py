"""kvax's API in which a call says all by its arguments: nothing is looked up."""

from __future__ import annotations

from typing import Any, Optional

from .._attend import attend
from ..utils.common import FlashAttentionParamsConfig
from ..utils.specs import AttentionSpecs, checked
from ..utils.typing import AttentionMask, Specs
from .mask_creator import masks_of, num_query_shards


def _specs(mesh: Any, query_spec: Optional[Specs], kv_spec: Optional[Specs]) -> Optional[AttentionSpecs]:
    if mesh is None:
        return None
    if query_spec is None or kv_spec is None:
        raise ValueError("query_spec and kv_spec must be given when mesh is.")
    return checked(query_spec, kv_spec)


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    query_positions: Any,
    query_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    mask: Optional[tuple[AttentionMask, ...]] = None,
    *,
    mesh: Any = None,
    query_spec: Optional[Specs] = None,
    kv_spec: Optional[Specs] = None,
    scale: float = 1.0,
    fwd_params: Optional[FlashAttentionParamsConfig] = None,
    bwd_params: Optional[FlashAttentionParamsConfig] = None,
    assume_sequential_positions: bool = False,
    permute_tokens_for_load_balance: bool = True,
    debug: bool = False,
) -> Any:
    """As `flash_attention_triton`. Without a mesh the call is of one device and specs are not looked at; with one both are needed."""
    specs = _specs(mesh, query_spec, kv_spec)
    return attend(
        query, key, value, (query_positions, query_segment_ids, kv_positions, kv_segment_ids), mask, mesh, specs, scale, fwd_params,
        assume_sequential_positions, permute_tokens_for_load_balance,
    )  # fmt: skip


def create_attention_mask(
    query_positions: Any,
    query_segment_ids: Any,
    kv_positions: Any,
    kv_segment_ids: Any,
    *,
    mesh: Any = None,
    query_spec: Optional[Specs] = None,
    kv_spec: Optional[Specs] = None,
    fwd_params: Optional[FlashAttentionParamsConfig] = None,
    bwd_params: Optional[FlashAttentionParamsConfig] = None,
    calc_bwd_mask: bool = False,
    skip_pad_tokens: bool = True,
) -> tuple[AttentionMask, ...]:
    """As that of mask_creator, by the specs of the call."""
    num_shards = num_query_shards(_specs(mesh, query_spec, kv_spec), mesh)
    tokens = (query_positions, query_segment_ids, kv_positions, kv_segment_ids)
    return masks_of(tokens, fwd_params, bwd_params, calc_bwd_mask, skip_pad_tokens, num_shards)
