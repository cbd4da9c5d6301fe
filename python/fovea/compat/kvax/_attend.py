"""The attention behind both of kvax's APIs: rows and keys of a device, split over a mesh, and their gradients."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ..._programs import mask_mod
from ...jax import _rows
from .ops.mask_creator import num_query_shards
from .utils.common import FlashAttentionParamsConfig, get_default_flash_attention_params
from .utils.permutation import apply_permutation
from .utils.specs import AttentionSpecs
from .utils.typing import AttentionMask

_FUNCTION = "flash_attention"
#: Of out and lse, for policies of jax.checkpoint.
OUTPUTS_NAME = "attention_outputs"


class Call(NamedTuple):
    """What a call says beside arrays. `of_q` and `of_kv` are how rows are split over the mesh: not at all where there is none."""

    mesh: Any
    of_q: PartitionSpec
    of_kv: PartitionSpec
    scale: float
    is_sequential: bool
    is_permuted: bool


def _axes(entry: Any) -> tuple[str, ...]:
    """Axes that one dimension is split over."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


# ---- A device's part ----


def _places_of_rows(call: Call, num_rows: int) -> Any:
    """Positions in the whole sequence of this device's queries, where they are not their indices."""
    axes = _axes(call.of_q[1])
    if not axes:
        return None
    rank, size = jax.lax.axis_index(axes), math.prod(call.mesh.shape[axis] for axis in axes)
    index = jnp.arange(num_rows, dtype=jnp.int32)
    if not call.is_permuted:
        return rank * num_rows + index
    half = num_rows // 2
    return jnp.where(index < half, rank * half + index, (2 * size - 2 - rank) * half + index)


def _features(call: Call, tokens: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """Of a call of Fovea's: who sees whom, by the arrays of this device."""
    features: dict[str, Any] = {"scale": call.scale, "segment_ids": (tokens["q_ids"], tokens["kv_ids"])}
    parts = []
    places = _places_of_rows(call, num_rows) if call.is_sequential else None
    if not call.is_sequential:
        positions = {name: tokens[name] for name in ("q_positions", "kv_positions")}
        parts.append(mask_mod("q_positions[batch, q_idx] >= kv_positions[batch, kv_idx]", **positions))
    elif places is not None:
        parts.append(mask_mod("places[q_idx] >= kv_idx", places=places))
    else:
        features |= {"causal": True, "align": "top_left"}
    if "first_keys" in tokens:
        bounds = {name: tokens[name] for name in ("first_keys", "end_keys")}
        parts.append(mask_mod("kv_idx >= first_keys[batch, q_idx] && kv_idx < end_keys[batch, q_idx]", **bounds))
    if parts:
        features["mask_mod"] = functools.reduce(lambda one, other: one & other, parts)
    return features


def _heads_of_keys(call: Call, num_heads_q: int, num_heads_kv: int) -> Any:
    """The kv heads of this device's query heads, where it has more: whole keys beside split queries."""
    of_q, of_kv = _axes(call.of_q[2]), _axes(call.of_kv[2])
    if of_q == of_kv or num_heads_kv == 1:
        return None
    size = math.prod(call.mesh.shape[axis] for axis in of_q)
    group = num_heads_q * size // num_heads_kv
    step = math.gcd(num_heads_q, group)  # query heads that share one here
    return (jax.lax.axis_index(of_q) * num_heads_q + jnp.arange(0, num_heads_q, step)) // group


def _forward_part(call: Call, q: Any, k: Any, v: Any, tokens: dict[str, Any]) -> tuple[Any, Any]:
    heads = _heads_of_keys(call, q.shape[2], k.shape[2])
    if heads is not None:
        k, v = (jnp.take(x, heads, axis=2, mode="clip") for x in (k, v))
    return _rows.attend(_FUNCTION, q, k, v, _features(call, tokens, q.shape[1]))


def _backward_part(call: Call, q: Any, k: Any, v: Any, tokens: dict[str, Any], out: Any, lse: Any, dout: Any) -> tuple[Any, Any, Any]:
    heads = _heads_of_keys(call, q.shape[2], k.shape[2])
    own_k, own_v = (k, v) if heads is None else (jnp.take(x, heads, axis=2, mode="clip") for x in (k, v))
    made = _rows.differentiate(_FUNCTION, _rows.Rows(q, out, lse, dout), own_k, own_v, _features(call, tokens, q.shape[1]))

    def summed(x: Any, like: Any) -> Any:
        """What all devices contribute that have these keys, added up in f32."""
        if heads is not None:
            x = jnp.zeros(like.shape, x.dtype).at[:, :, heads].add(x)
        of_q, of_kv = ([axis for entry in spec for axis in _axes(entry)] for spec in (call.of_q, call.of_kv))
        axes = tuple(axis for axis in of_q if axis not in of_kv)
        return (jax.lax.psum(x, axes) if axes else x).astype(like.dtype)

    return made.dq.astype(q.dtype), summed(made.dk, k), summed(made.dv, v)


# ---- All devices ----


def _mapped(call: Call, part: Any, args: tuple[Any, ...], is_backward: bool) -> Any:
    """`part` on each device: of q, k, v, tokens and, backward, of out, lse and dout."""
    part = functools.partial(part, call)
    if call.mesh is None:
        return part(*args)
    q, kv = call.of_q, call.of_kv
    of_lse = PartitionSpec(q[0], q[2], q[1])
    of_tokens = {name: PartitionSpec(*(kv if name.startswith("kv_") else q)[:2]) for name in args[3]}
    of_rows = (q, of_lse, q) if is_backward else ()
    results = (q, kv, kv) if is_backward else (q, of_lse)
    return jax.shard_map(part, mesh=call.mesh, in_specs=(q, kv, kv, of_tokens, *of_rows), out_specs=results, check_vma=False)(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: Call, q: Any, k: Any, v: Any, tokens: dict[str, Any]) -> Any:
    return _mapped(call, _forward_part, (q, k, v, tokens), is_backward=False)[0]


def _attention_fwd(call: Call, q: Any, k: Any, v: Any, tokens: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = _mapped(call, _forward_part, (q, k, v, tokens), is_backward=False)
    out, lse = (checkpoint_name(x, OUTPUTS_NAME) for x in (out, lse))
    return out, (q, k, v, tokens, out, lse)


def _attention_bwd(call: Call, saved: Any, dout: Any) -> tuple[Any, ...]:
    return (*_mapped(call, _backward_part, (*saved, dout), is_backward=True), None)


_attention.defvjp(_attention_fwd, _attention_bwd)


# ---- The call ----


def _checked_mask(mask: Any, sizes: tuple[int, int], batch: int, num_rows: int) -> AttentionMask:
    """The mask of forward, which is what gradients are of, too."""
    if len(mask) < 1:
        raise ValueError("Length of mask_tensors should be at least equal to one")
    if len(mask) not in (1, 3):
        raise ValueError(f"The case with num_mask_tensors={len(mask)} is not supported. Expected one mask, or three with those of backward.")
    forward: AttentionMask = mask[0]
    if forward.block_sizes not in (None, sizes):
        raise ValueError(
            f"{_FUNCTION}: the mask has blocks of {forward.block_sizes} queries and keys, fwd_params of {sizes}; "
            "expected the fwd_params that create_attention_mask had."
        )
    for name, x in zip(("lower_bounds", "upper_bounds"), forward.flatten()):
        if x.shape != (batch, 1, num_rows):
            raise ValueError(f"{_FUNCTION}: mask[0].{name} has shape {x.shape}; expected {(batch, 1, num_rows)}.")
    return forward


def _keys_of_rows(mask: Any, params: FlashAttentionParamsConfig, batch: int, seqlen: int, num_shards: int) -> dict[str, Any]:
    """Of each query the first key of the blocks that its block visits, and the one behind the last; shards have whole blocks each."""
    length = seqlen // num_shards
    num_blocks = -(-length // params.query_block_size)
    forward = _checked_mask(mask, (params.query_block_size, params.kv_block_size), batch, num_shards * num_blocks)

    def of_rows(bounds: Any) -> Any:
        keys = bounds.reshape(batch, num_shards, num_blocks) * params.kv_block_size
        return jnp.repeat(keys, params.query_block_size, axis=2)[:, :, :length].reshape(batch, seqlen)

    return {"first_keys": of_rows(forward.lower_bounds), "end_keys": of_rows(forward.upper_bounds)}


def attend(
    q: Any, k: Any, v: Any, tokens: tuple[Any, Any, Any, Any], mask: Any, mesh: Any, specs: Optional[AttentionSpecs], scale: float,
    fwd_params: Optional[FlashAttentionParamsConfig], is_sequential: bool, is_permuted: bool,
) -> Any:  # fmt: skip
    """`tokens`: positions and ids of queries, then of keys, as the caller has them."""
    if jnp.ndim(q) != 4 or jnp.ndim(k) != 4:
        raise ValueError(f"{_FUNCTION}: query and key have shapes {jnp.shape(q)} and {jnp.shape(k)}; expected [batch, seqlen, heads, head_dim].")
    names = ("q_positions", "q_ids", "kv_positions", "kv_ids")
    for name, x, rows in zip(names, tokens, (q, q, k, k)):
        if jnp.shape(x) != rows.shape[:2]:
            raise ValueError(f"{_FUNCTION}: {name} have shape {jnp.shape(x)}; expected {rows.shape[:2]}.")
    read = {name: jnp.asarray(x).astype(jnp.int32) for name, x in zip(names, tokens) if not is_sequential or name.endswith("ids")}
    fwd = fwd_params or get_default_flash_attention_params(backward=False)
    num_shards = num_query_shards(specs, mesh)
    if mask is not None:
        read |= _keys_of_rows(mask, fwd, q.shape[0], q.shape[1], num_shards)
    is_permuted = is_permuted and num_shards > 1
    if is_permuted:
        k, v = apply_permutation((k, v), 2 * num_shards, reverse_permutation=True)
    whole = (None,) * 4
    of_q, of_kv = (PartitionSpec(*x) for x in ((whole, whole) if specs is None else (specs.query_specs, specs.kv_specs)))
    call = Call(mesh, of_q, of_kv, float(scale), is_sequential, is_permuted)
    return _attention(call, q, k, v, read)
