"""The classes that vLLM asks of an attention backend: a step of chunks and single tokens is one call over the paged cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ..._attention import attention
from ..._cache import KvCache, decode
from ...errors import Unsupported

_MAX_HEAD_DIM = 576
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclasses.dataclass
class FoveaAttentionMetadata(AttentionMetadata):  # type: ignore[misc, unused-ignore]
    """What all layers of a step have in common.

    Attributes
    ----------
    num_actual_tokens, max_query_len : int
    query_start_loc : Tensor, [batch + 1] i32
    seq_lens, num_computed_tokens : Tensor, [batch] i32
        Tokens of each sequence, with those of the step and without.
    block_table : Tensor, [batch, max_blocks] i32
    causal : bool
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Any
    seq_lens: Any
    num_computed_tokens: Any
    block_table: Any
    causal: bool


class FoveaMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc, unused-ignore]
    """Takes what the calls need from vLLM's description of a step."""

    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FoveaAttentionMetadata:
        """Of a step; pages of a common prefix are read as all others."""
        step = common_attn_metadata
        if isinstance(step.causal, torch.Tensor):
            raise Unsupported("FoveaMetadataBuilder: causal is a tensor, one for each request; expected True or False for all")
        lengths = step.query_start_loc[1:] - step.query_start_loc[:-1]
        return FoveaAttentionMetadata(
            step.num_actual_tokens, step.max_query_len, step.query_start_loc, step.seq_lens, step.seq_lens - lengths,
            step.block_table_tensor, step.causal,
        )  # fmt: skip

    def update_block_table(self, metadata: FoveaAttentionMetadata, blk_table: Any, slot_mapping: Any) -> FoveaAttentionMetadata:
        """The same step over another group's cache."""
        return dataclasses.replace(metadata, block_table=blk_table)


class FoveaAttentionImpl(AttentionImpl):  # type: ignore[misc, unused-ignore]
    """A layer's attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        if attn_type == AttentionType.ENCODER_DECODER:
            raise Unsupported("FoveaAttentionImpl: attn_type is encoder_decoder; expected decoder, encoder or encoder_only")
        if kv_cache_dtype.startswith("fp8"):
            raise Unsupported(f"FoveaAttentionImpl: kv_cache_dtype is {kv_cache_dtype}; expected auto, float16 or bfloat16")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.softcap = sliding_window, logits_soft_cap or None
        self.alibi_slopes: Any = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks: Any = None if sinks is None else sinks.float()

    def _features(self, causal: bool, device: Any) -> dict[str, Any]:
        """What `fovea.attention` calls them; a window of n keys holds the query's own."""
        left = None if self.sliding_window is None else self.sliding_window - 1
        window = None if left is None else (left, 0 if causal else left)
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return {
            "causal": causal, "window": window, "scale": self.scale, "softcap": self.softcap, "alibi": self.alibi_slopes, "sinks": self.sinks,
        }  # fmt: skip

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: FoveaAttentionMetadata | None, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        """Writes new keys and values to the cache and the results to `output`.

        query, output [num_tokens, num_heads, head_size]; key, value [num_tokens, num_kv_heads, head_size]; kv_cache as `get_kv_cache_shape`
        says. Rows behind the step's tokens are padding. Without metadata, when vLLM measures its memory, results are 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("FoveaAttentionImpl: output_scale; expected none: results are not quantised")
        if attn_metadata is None:
            return output.fill_(0)
        step, count = attn_metadata, attn_metadata.num_actual_tokens
        rows: dict[str, Any] = {"cu_seqlens": step.query_start_loc, "out": output[:count]}
        if self.attn_type in _ENCODERS:
            attention(query[:count], key[:count], value[:count], **rows, **self._features(False, query.device))
            return output
        k_pages, v_pages = kv_cache.unbind(1)
        lengths = step.seq_lens
        if self.kv_sharing_target_layer_name is None:  # else that layer has written them
            lengths = step.num_computed_tokens
            rows |= {"append_k": key[:count], "append_v": value[:count]}
        cache = KvCache(k_pages, v_pages, lengths, page_table=step.block_table)
        features = self._features(step.causal, query.device)
        decode(query[:count], cache, max_seqlen_q=step.max_query_len, sees_all_keys=True, **rows, **features)
        return output


class FoveaAttentionBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
    """Pages of any size, keys and values of a page beside each other."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[list[Any]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM keeps for others' backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FoveaAttentionImpl]:
        """Of a layer."""
        return FoveaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FoveaMetadataBuilder]:
        """Of a step."""
        return FoveaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """All."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[num_blocks, keys and values, block_size, num_kv_heads, head_size]."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to 576."""
        return head_size <= _MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """A logit a head that joins the denominator."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Queries of a step that see all keys of their sequence."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All but attention from one sequence to another."""
        return attn_type in (AttentionType.DECODER, *_ENCODERS)
