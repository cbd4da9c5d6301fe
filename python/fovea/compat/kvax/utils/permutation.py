"""The order of tokens in which devices have even work under a causal mask: each has one part from the front and one from the back."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .sharding import get_query_context_mesh_axis_size


def generate_shard_indices(num_shards: int, reverse: bool = False) -> Any:
    """0, n - 1, 1, n - 2, ... for n shards, two for each device; with `reverse` the order that undoes it.

    Parameters
    ----------
    num_shards : int
        Even.
    """
    if num_shards % 2:
        raise ValueError(f"num_shards is {num_shards}; expected an even number, two for each device.")
    order = np.empty(num_shards, np.int32)
    order[::2] = np.arange(num_shards // 2)
    order[1::2] = np.arange(num_shards - 1, num_shards // 2 - 1, -1)
    return jnp.asarray(np.argsort(order).astype(np.int32) if reverse else order)


def apply_permutation(inputs: tuple[Any, ...], num_shards: int, reverse_permutation: bool) -> tuple[Any, ...]:
    """Arrays [batch, seqlen, ...] with their `num_shards` equal parts of the sequence in that order."""
    order = generate_shard_indices(num_shards, reverse_permutation)

    def permuted(x: Any) -> Any:
        if x.shape[1] % num_shards:
            raise ValueError(f"The sequence has length {x.shape[1]}; expected a multiple of {num_shards}, two shards for each device.")
        parts = x.reshape(x.shape[0], num_shards, -1, *x.shape[2:])
        return jnp.take(parts, order, axis=1, unique_indices=True, mode="clip").reshape(x.shape)

    return tuple(map(permuted, inputs))


def _applied(inputs: Any, mesh: Any, reverse: bool) -> Any:
    num_shards = 2 * get_query_context_mesh_axis_size(mesh)
    if isinstance(inputs, (tuple, list)):
        return list(apply_permutation(tuple(inputs), num_shards, reverse))
    return apply_permutation((inputs,), num_shards, reverse)[0]


def permute_tokens_context_parallelism(inputs: Any, mesh: Any = None) -> Any:
    """Tokens in the order of devices.

    Parameters
    ----------
    inputs : array, or tuple of arrays, [batch, seqlen, ...]
        seqlen is a multiple of twice the devices of the axis that queries are split over.

    Returns
    -------
    array, or list of arrays
    """
    return _applied(inputs, mesh, reverse=False)


def unpermute_tokens_context_parallelism(inputs: Any, mesh: Any = None) -> Any:
    """Tokens in their own order again: undoes `permute_tokens_context_parallelism`."""
    return _applied(inputs, mesh, reverse=True)
