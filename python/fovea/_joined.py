"""All that a call says of masks, or of scores, as one program: what engines of context parallelism read at places of the whole sequence."""

from __future__ import annotations

import functools
import operator
from typing import Any

from . import _programs
from ._arrays import Array
from ._forward import ScoreMod, resolve_mask
from ._programs import Program


def mask_program(words: dict[str, Any]) -> Program | None:
    """`words` are causal, align, window, mask, mask_mod and segment_ids, as `attention`'s."""
    align = words["align"]
    array, program = resolve_mask(words["mask"], words["mask_mod"])
    parts = [] if program is None else [program]
    if words["causal"]:
        parts.append(_programs.causal(align))
    if words["window"] is not None:
        left, right = words["window"]
        parts.append(_programs.window(left, right, align))
    if words["segment_ids"] is not None:
        ids = words["segment_ids"]
        parts.append(_programs.documents(*(ids if isinstance(ids, tuple) else (ids,))))
    if array is not None:
        parts.append(_programs.dense_mask(array))
    return functools.reduce(operator.and_, parts) if parts else None


def score_program(bias: Array | None, alibi: Array | None, score_mod: ScoreMod | None) -> Program | None:
    """In the order in which they act."""
    parts = [] if bias is None else [_programs.bias(bias)]
    if alibi is not None:
        parts.append(_programs.alibi(alibi))
    if score_mod is not None:
        parts.append(_programs.score_mod(score_mod))
    return functools.reduce(operator.or_, parts) if parts else None
