"""Operations of attention."""

from __future__ import annotations


def get_multi_head_attention_tflops(
    batch_size: int,
    query_seq_len: int,
    kv_seq_len: int,
    num_heads: int,
    qk_head_dim: int,
    value_head_dim: int,
    causal: bool,
    num_gpus: int = 1,
    forward_pass: bool = True,
    backward_pass: bool = False,
) -> float:
    """10^12 operations of one device: two products forward, five backward, half of each under a causal mask."""
    forward = 2.0 * (qk_head_dim + value_head_dim) * query_seq_len * kv_seq_len * batch_size * num_heads
    passes = (1.0 if forward_pass else 0.0) + (2.5 if backward_pass else 0.0)
    return forward * passes * (0.5 if causal else 1.0) / num_gpus / 1e12
