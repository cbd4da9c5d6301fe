"""All that a call says of masks, or of scores, as one program: what engines of context parallelism read at places of the whole sequence."""

from __future__ import annotations

import functools
import operator
from typing import Any

from . import _programs
from ._arrays import Array
from ._forward import Dropout, ScoreMod, dropout_of, resolve_mask
from ._programs import Program
from .errors import InvalidArgument


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


def dropout_of_ranks(function: str, dropout: Any, *, keeps_fours: bool, is_packed: bool = False) -> Dropout | None:
    """Dropout over the ranks of a plan; None where nothing is dropped."""
    of_call = dropout_of(dropout, function)
    if of_call.p == 0:
        return None
    if of_call.places is not None:
        raise InvalidArgument(f"{function}: dropout.places are given; expected none: a rank's places are those of the plan")
    if is_packed:
        raise InvalidArgument(f"{function}: dropout is given and the plan is of cu_seqlens, whose calls draw by sequence; expected a plan of segment_ids")
    if not keeps_fours:
        raise InvalidArgument(
            f"{function}: dropout is given and keys of a rank do not begin and end at multiples of 4, whose keys are drawn for at once; "
            "expected a plan with such a chunk, and tile_kv"
        )
    return of_call


def places_in_whole(
    q_places: Array | None, kv_places: Array | None, seqlen: int, firsts: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """What variables are in the whole problem where a call has some rows, keys or heads of it, and what that reads: for `Program.placed`.

    `q_places` and `kv_places` are positions of rows and keys, None where they are indices; `firsts` has the first head or sequence by
    variable, None where that is 0.
    """
    places: dict[str, str] = {}
    captures: dict[str, Any] = {}
    for variable, there in (("q", q_places), ("kv", kv_places)):
        if there is not None:
            places[f"{variable}_idx"] = f"{variable}_places[{variable}_idx]"
            captures[f"{variable}_places"] = there
    if places:
        places["seqlen_q"] = places["seqlen_kv"] = "whole_seqlen"
        captures["whole_seqlen"] = seqlen
    for variable, first in firsts.items():
        if first is not None:
            places[variable] = f"({variable} + first_{variable})"
            captures[f"first_{variable}"] = first
    return places, captures
