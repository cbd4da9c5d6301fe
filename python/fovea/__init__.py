"""Fovea: exact attention, with any score and any mask, on CPUs and NVIDIA GPUs, for arrays of every DLPack library.

    import fovea

    out = fovea.attention(q, k, v, causal=True, window=(1024, 0))
    out, lse = fovea.attention(q, k, v, mask=fovea.causal() & fovea.documents(ids), return_lse=True)
    print(fovea.explain(q, k, v, causal=True))

Arrays are [batch, seqlen, num_heads, head_dim] unless ``layout="bhsd"`` says otherwise. `fovea.torch` has what only PyTorch needs,
`fovea.parallel` plans for several ranks.
"""

from . import parallel as parallel
from ._arrays import TensorSpec
from ._attention import Gradients, Plan, attention, attention_backward, describe_library as describe, explain, plan
from ._backward_plan import BackwardPlan, plan_backward
from ._block_map import BlockMap, block_map
from ._cache import (
    AppendPlan,
    DecodePlan,
    KvCache,
    Rotary,
    append_to_cache,
    decode,
    kv_cache,
    merge_states,
    plan_append,
    plan_decode,
)
from ._forward import Dropout
from ._library import version as _version
from ._programs import (
    Program,
    alibi,
    bias,
    causal,
    chunked,
    dense_mask,
    dilated,
    documents,
    mask_mod,
    prefix_lm,
    relative_bias,
    score_mod,
    softcap,
    streaming,
    tile_mask,
    tree,
    window,
)
from ._probabilities import attention_probabilities
from ._recipes import Recipe, load_recipe
from ._rotary import rotary
from ._tiles import tile_table, top_k_tiles
from .errors import (
    CompileError,
    DeviceError,
    FoveaError,
    InternalError,
    InvalidArgument,
    ProgramError,
    TraceError,
    Unsupported,
)

__version__ = _version()

__all__ = [
    "AppendPlan",
    "BackwardPlan",
    "BlockMap",
    "CompileError",
    "DecodePlan",
    "DeviceError",
    "Dropout",
    "FoveaError",
    "Gradients",
    "InternalError",
    "InvalidArgument",
    "KvCache",
    "Plan",
    "Program",
    "ProgramError",
    "Recipe",
    "Rotary",
    "TensorSpec",
    "TraceError",
    "Unsupported",
    "alibi",
    "append_to_cache",
    "attention",
    "attention_backward",
    "attention_probabilities",
    "bias",
    "block_map",
    "causal",
    "chunked",
    "decode",
    "dense_mask",
    "describe",
    "dilated",
    "documents",
    "explain",
    "kv_cache",
    "load_recipe",
    "mask_mod",
    "merge_states",
    "plan",
    "plan_append",
    "plan_backward",
    "plan_decode",
    "prefix_lm",
    "relative_bias",
    "rotary",
    "score_mod",
    "softcap",
    "streaming",
    "tile_mask",
    "tile_table",
    "top_k_tiles",
    "tree",
    "window",
]
