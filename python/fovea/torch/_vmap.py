"""Batching for torch.func.vmap: one call over a larger batch where that says the same, else a call for each place."""

from __future__ import annotations

import re
from typing import Any, Sequence

import torch

from ._derivatives import Call

_BATCH = re.compile(r"(?<![\w.])batch\b")


def _check_randomness(call: Call, randomness: str) -> None:
    if call.kind.key.dropout_p and randomness == "error":
        raise RuntimeError("vmap: attention with dropout under randomness='error'; expected randomness='same' or 'different'")


def loop(function: Any, info: Any, in_dims: Sequence[Any], call: Call, words: tuple[Any, ...], tensors: Sequence[Any]) -> Any:
    """`function` of (call, *words, *tensors) at each place, stacked; `in_dims` are those of the tensors."""
    _check_randomness(call, info.randomness)
    differs = call.kind.key.dropout_p and info.randomness == "different"
    results = []
    for place in range(info.batch_size):
        parts = (x if dim is None else x.select(dim, place) for x, dim in zip(tensors, in_dims))
        results.append(function.apply(call.with_seed_of(place) if differs else call, *words, *parts))
    stacked = tuple(torch.stack(column) for column in zip(*results))
    return stacked, (0,) * len(stacked)


def can_fold(call: Call, in_dims: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether the places of a vmap may be sequences of a batch: nothing that they share varies, and no formula asks which is which."""
    if call.kind.key.dropout_p or inputs[0].dim() - (in_dims[0] is not None) != 4:
        return False
    names = call.kind.names
    if any(program is not None and _BATCH.search(program.text) for program in call.programs):
        return False
    varies = {name for name, dim in zip(names, in_dims) if dim is not None}
    return all(name not in ("sinks", "dropout_seed", "dropout_offset") and ":" not in name for name in varies)


_RANKS = {"q": 4, "k": 4, "v": 4, "bias": 4, "mask": 4, "alibi": 2, "segments_q": 2, "segments_kv": 2}


def fold(call: Call, in_dims: Sequence[Any], inputs: Sequence[Any], num_places: int) -> list[Any]:
    """The inputs of the larger batch, place by place."""
    q_dim = in_dims[0]
    batch = inputs[0].shape[0] if q_dim is None else inputs[0].movedim(q_dim, 0).shape[1]
    return [_fold_one(name, x, dim, num_places, batch) for name, x, dim in zip(call.kind.names, inputs, in_dims)]


def _fold_one(name: str, x: Any, dim: int | None, num_places: int, batch: int) -> Any:
    rank = _RANKS.get(name)
    if rank is None:  # what a formula reads, sinks: the same for all
        return x
    if dim is None:
        if x.dim() < rank or (x.shape[0] == 1 and name in ("bias", "mask")):
            return x  # broadcasts over the batch
        x = x.unsqueeze(0)
    else:
        x = x.movedim(dim, 0)
        x = x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:])
    return x.expand(num_places, batch, *x.shape[2:]).reshape(num_places * batch, *x.shape[2:])


def unfold(x: Any, num_places: int) -> Any:
    return x.reshape(num_places, x.shape[0] // num_places, *x.shape[1:])
