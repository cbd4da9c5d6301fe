"""SageAttention3 (package sageattn3) by Fovea's recipe `nvfp4` (guide: quantization.md), with masks, windows and programs, too.

`fovea.compat.install("sageattn3")` puts it where ``import sageattn3`` finds it; ``python -m fovea.compat list sageattn3`` says
what each argument does.
"""

from __future__ import annotations

from typing import Any

from ...errors import Unsupported
from .core import _dense

#: The version whose function this is.
__version__ = "1.0.0"

__all__ = ["sageattn3_blackwell"]


def sageattn3_blackwell(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, per_block_mean: bool = True, **kwargs: Any) -> Any:
    """All products in FP4: e2m1 with a scale of e4m3 for 16 numbers, means of 128 queries and of k removed.

    q, k and v are [batch, heads, seqlen, head_dim]; k stays as it is, where upstream takes its mean from it in place.
    ``python -m fovea.compat list sageattn3`` has the arguments. Returns out; with `return_lse` (out, lse [batch, heads, seqlen_q]).
    """
    function = "sageattn3_blackwell"
    if not per_block_mean:
        raise Unsupported(f"{function}: per_block_mean is {per_block_mean}; expected True: recipes take the means of blocks of queries, not that of all")
    return_lse = bool(kwargs.pop("return_lse", False))
    return _dense(function, q, k, v, "HND", "nvfp4", is_causal, None, return_lse, {**kwargs, "attn_mask": attn_mask})
