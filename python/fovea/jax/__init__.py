"""Attention as operations of JAX: under jit, grad, jvp, vmap, checkpoint, shard_map and shardings over batch and heads.

    import fovea.jax

    out = fovea.jax.attention(q, k, v, causal=True)             # fovea.attention, differentiable and compiled
    out = fovea.jax.dot_product_attention(q, k, v)              # the signature of jax.nn.dot_product_attention
    out, cache = fovea.jax.decode(q, cache, append_k=k, append_v=v)
"""

import jax as _jax

if _jax.__version_info__ < (0, 6, 2):
    raise ImportError(f"fovea.jax: jax is {_jax.__version__}; expected 0.6.2 or newer")

from ._attention import attention
from ._context_parallel import context_parallel_attention
from ._context_parallel_decode import context_parallel_decode
from ._decode import decode
from ._device_plan import DevicePlan, device_plan
from ._sdpa import dot_product_attention

__all__ = [
    "DevicePlan", "attention", "context_parallel_attention", "context_parallel_decode", "decode", "device_plan", "dot_product_attention",
]  # fmt: skip
