"""sageattention.quant by PyTorch's operators, on every device: codes and scales in SageAttention's layouts.

For those who feed kernels of their own, or look at codes. Attention here does not need them: a recipe is a word of the call.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._flash import InvalidCall

_LOG2E = math.log2(math.e)
_INT8_MAX = 127.0
_LEAST = 1e-7  # greatest magnitude of a group of zeros
_PADDED = 64  # rows of v in columns are a multiple of it
#: Of every 16 rows of v in a column, as fragments of probabilities lie in MMA.
_ROW_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def _heads_first(function: str, x: Any, tensor_layout: str) -> Any:
    """[batch, heads, rows, head_dim] of either layout, a view."""
    if tensor_layout not in ("HND", "NHD"):
        raise InvalidCall(f"{function}: tensor_layout is {tensor_layout!r}; expected 'HND' or 'NHD'")
    if x.dim() != 4:
        raise InvalidCall(f"{function}: a tensor of shape {tuple(x.shape)}; expected rank 4, {tensor_layout} behind the batch")
    return x if tensor_layout == "HND" else x.transpose(1, 2)


def _check_sizes(function: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InvalidCall(f"{function}: {name} is {size}; expected rows, at least one")


def _centred(function: str, k: Any, km: Any, tensor_layout: str) -> Any:
    """k less its mean [batch, heads, head_dim], which may keep the axis of rows; in f32."""
    k = _heads_first(function, k, tensor_layout).float()
    if km is None:
        return k
    km = _heads_first(function, km, tensor_layout).squeeze(2) if km.dim() == 4 else km
    return k - km.float()[:, :, None]


def _int8(x: Any, num_rows: int, num_groups: int) -> tuple[Any, Any]:
    """Codes, and a scale [batch, heads, num_groups] for every `num_rows` rows of f32 x [batch, heads, rows, head_dim]."""
    group = torch.arange(x.shape[2], device=x.device) // num_rows
    greatest = x.new_full((*x.shape[:2], num_groups), _LEAST)
    greatest.scatter_reduce_(2, group.expand(*x.shape[:3]), x.abs().amax(-1), "amax")
    scales = greatest / _INT8_MAX
    return (x / scales[:, :, group, None]).round().to(torch.int8), scales


def _in_layout(codes: Any, tensor_layout: str) -> Any:
    return codes if tensor_layout == "HND" else codes.transpose(1, 2).contiguous()


def _num_blocks(x: Any, size: int) -> int:
    return -(-int(x.shape[2]) // size)


def per_block_int8(
    q: Any, k: Any, km: Any = None, BLKQ: int = 128, BLKK: int = 64, sm_scale: float | None = None, tensor_layout: str = "HND"
) -> tuple[Any, Any, Any, Any]:
    """(q_int8, q_scale, k_int8, k_scale), a scale for each `BLKQ` queries and `BLKK` keys; q times ``sm_scale * log2(e)`` first.

    `km` is taken from k. Scales are [batch, heads, blocks] f32, codes have the shapes of q and k.
    """
    function = "per_block_int8"
    _check_sizes(function, BLKQ=BLKQ, BLKK=BLKK)
    rows = _heads_first(function, q, tensor_layout).float() * ((q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * _LOG2E)
    keys = _centred(function, k, km, tensor_layout)
    q_int8, q_scale = _int8(rows, BLKQ, _num_blocks(rows, BLKQ))
    k_int8, k_scale = _int8(keys, BLKK, _num_blocks(keys, BLKK))
    return _in_layout(q_int8, tensor_layout), q_scale, _in_layout(k_int8, tensor_layout), k_scale


def per_warp_int8(
    q: Any, k: Any, km: Any = None, BLKQ: int = 128, WARPQ: int = 32, BLKK: int = 64, tensor_layout: str = "HND"
) -> tuple[Any, Any, Any, Any]:
    """(q_int8, q_scale, k_int8, k_scale), a scale for each `WARPQ` queries and `BLKK` keys; q as it is.

    Scales of q are those of whole blocks of `BLKQ`: [batch, heads, blocks * BLKQ / WARPQ].
    """
    function = "per_warp_int8"
    _check_sizes(function, BLKQ=BLKQ, WARPQ=WARPQ, BLKK=BLKK)
    if BLKQ % WARPQ:
        raise InvalidCall(f"{function}: WARPQ is {WARPQ}; expected a divisor of BLKQ, {BLKQ}")
    rows = _heads_first(function, q, tensor_layout).float()
    keys = _centred(function, k, km, tensor_layout)
    q_int8, q_scale = _int8(rows, WARPQ, _num_blocks(rows, BLKQ) * (BLKQ // WARPQ))
    k_int8, k_scale = _int8(keys, BLKK, _num_blocks(keys, BLKK))
    return _in_layout(q_int8, tensor_layout), q_scale, _in_layout(k_int8, tensor_layout), k_scale


def sub_mean(v: Any, tensor_layout: str = "HND") -> tuple[Any, Any]:
    """(v less its mean over rows, in f16; the mean [batch, heads, head_dim])."""
    vm = _heads_first("sub_mean", v, tensor_layout).mean(2)
    return (v - vm[:, :, None] if tensor_layout == "HND" else v - vm[:, None]).half(), vm


def per_channel_fp8(v: Any, tensor_layout: str = "HND", scale_max: float = 448.0, smooth_v: bool = True) -> tuple[Any, Any, Any]:
    """(v_fp8, v_scale, vm): v in e4m3, in columns, a scale for each; with `smooth_v` less its mean vm, else None.

    v_fp8 is [batch, heads, head_dim, padded] of HND and [batch, head_dim, heads, padded] of NHD; rows are padded by zeros to a
    multiple of 64, and of every 16 stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. v_scale and vm are [batch, heads,
    head_dim] f32.
    """
    function = "per_channel_fp8"
    if not 0 < scale_max <= 448:
        raise InvalidCall(f"{function}: scale_max is {scale_max}; expected above 0, at most 448, the greatest number of e4m3")
    rows = _heads_first(function, v, tensor_layout).float()
    vm = rows.mean(2) if smooth_v else None
    columns = (rows if vm is None else rows - vm[:, :, None]).transpose(2, 3)
    v_scale = columns.abs().amax(3).clamp(min=_LEAST) / scale_max
    columns = torch.nn.functional.pad(columns / v_scale[..., None], (0, -columns.shape[3] % _PADDED))
    columns = columns.unflatten(3, (-1, 16))[..., list(_ROW_ORDER)].flatten(3)
    codes = columns.clamp(-scale_max, scale_max).to(torch.float8_e4m3fn)
    return codes if tensor_layout == "HND" else codes.transpose(1, 2).contiguous(), v_scale, vm
