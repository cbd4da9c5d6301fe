"""What only PyTorch needs: gradients are recorded by `fovea.attention` itself, this adds the places where models look for attention.

    import fovea.torch

    fovea.torch.install_sdpa()       # F.scaled_dot_product_attention of CPU tensors runs on Fovea: models stay as they are
    out = fovea.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
"""

import torch as _torch

from .. import _attention, _cache, _rotary as _rows
from . import _decode, _ops, _rotary
from ._context_parallel import context_parallel_attention
from ._context_parallel_decode import ContextParallelDecode
from ._diffusers import install_diffusers
from ._flex import BlockMask, create_block_mask, flex_attention
from ._module import MultiheadAttention
from ._sdpa import install_sdpa, scaled_dot_product_attention, uninstall_sdpa
from ._transformers import install_transformers
from ._varlen import varlen_attn


def _is_watched() -> bool:
    """Whether a graph is compiled, or a mode sees operators: fake tensors, tracers."""
    return bool(_torch.compiler.is_compiling() or _torch._C._len_torch_dispatch_stack() > 0)


class _Compiled:
    is_compiling, is_watched = staticmethod(_torch.compiler.is_compiling), staticmethod(_is_watched)
    attention = staticmethod(_ops.attention)
    decode = staticmethod(_decode.decode)
    append_to_cache = staticmethod(_decode.append_to_cache)


_attention.compiled = _cache.compiled = _Compiled
_rows.recorded, _rows.is_compiling = _rotary.rotary, _torch.compiler.is_compiling

__all__ = [
    "ContextParallelDecode",
    "BlockMask",
    "MultiheadAttention",
    "context_parallel_attention",
    "create_block_mask",
    "flex_attention",
    "install_diffusers",
    "install_sdpa",
    "install_transformers",
    "scaled_dot_product_attention",
    "uninstall_sdpa",
    "varlen_attn",
]
