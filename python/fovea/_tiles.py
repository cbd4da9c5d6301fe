"""Tiles of the score matrix that are visible or hidden whole: a table from lists, and one from mean-pooled scores."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, NamedTuple

from . import _abi
from ._arrays import Array, framework_of, root_module
from ._calls import Builder, Template, offset
from ._library import address_of
from ._programs import Align, _count, _position
from .errors import InvalidArgument

_TILE_TABLE = address_of("fovea_tile_table")


def _make_template() -> Template:
    builder = Builder("tile_table")
    at = builder.add(_abi.sized(_abi.TileListsArgs))
    for name in ("indptr", "indices", "table"):
        builder.tensor(at + offset(_abi.TileListsArgs, name), name)
    return builder.done()


_template = _make_template()


def tile_table(indptr: Array, indices: Array, shape: tuple[int, ...]) -> Any:
    """The table of lists of visible tiles (BSR), for `tile_mask`: row r sees tiles ``indices[indptr[r] : indptr[r + 1]]``.

    Lists are checked, once, here, and on the host: PyTorch's tensors on a GPU are copied there. A selection that a GPU makes
    anew at every step is better a table from the start (`top_k_tiles`).

    Parameters
    ----------
    indptr : array, [rows + 1] i32 or i64
        From 0, never falling, up to the number of indices. Rows are those of the table in its order: the tiles of queries of a
        head, then those of the next.
    indices : array, [number of visible tiles] i32 or i64
        Tiles of keys, rising in each row.
    shape : tuple of int
        Of the table: (q_tiles, kv_tiles), (heads, q_tiles, kv_tiles) or (batch, heads, q_tiles, kv_tiles).

    Returns
    -------
    array
        `shape`, bool, of indptr's library, on its device.

    Raises
    ------
    InvalidArgument
        Lists of another rank or dtype, of another number of rows than `shape` has, out of order, out of range or with a tile twice.

    Examples
    --------
    >>> table = fovea.tile_table(indptr, indices, (heads, q_tiles, kv_tiles))
    >>> out = fovea.attention(q, k, v, mask=fovea.tile_mask(table, 64, 64))
    """
    device = None
    if root_module(indptr) == "torch":
        device = indptr.device
        indptr = indptr.cpu()
        if root_module(indices) == "torch":
            indices = indices.cpu()
    framework = framework_of(indptr, "tile_table", "indptr")
    table = framework.empty(indptr, tuple(shape), "bool")
    _template.invoke((indptr, indices, table), (), _TILE_TABLE)
    return framework.finish(table) if device is None else table.to(device)


def _check(q: Array, k: Array, layout: str) -> None:
    if layout not in ("bshd", "bhsd"):
        raise InvalidArgument(f"top_k_tiles: layout is {layout!r}; expected one of 'bshd', 'bhsd'")
    head = 2 if layout == "bshd" else 1
    shape_q, shape_k = tuple(q.shape), tuple(k.shape)
    if len(shape_q) != 4 or len(shape_k) != 4 or (shape_q[0], shape_q[3]) != (shape_k[0], shape_k[3]):
        raise InvalidArgument(
            f"top_k_tiles: q is {list(shape_q)} and k {list(shape_k)}; expected four dimensions, of one batch and one head_dim"
        )
    if shape_k[head] == 0 or shape_q[head] % shape_k[head] != 0:
        raise InvalidArgument(f"top_k_tiles: q has {shape_q[head]} heads and k {shape_k[head]}; expected a multiple of those of k")
    if 0 in shape_q or 0 in shape_k:
        raise InvalidArgument(f"top_k_tiles: q is {list(shape_q)} and k {list(shape_k)}; expected extents of at least 1")


def _num_tiles(length: int, tile: int) -> int:
    return -(-length // tile)


class _Library(NamedTuple):
    """What differs between PyTorch and NumPy."""

    module: Any
    device: dict[str, Any]  # of new arrays
    array: Callable[[Any], Any]  # without gradients
    means: Callable[[Any, Any, int], Any]  # (module, [batch, heads, length, head_dim], tile): of each tile, f32
    greatest: Callable[[Any, Any, int], Any]  # (module, scores, count): bool, so many of the last axis


def _means_of_torch(torch: Any, x: Any, tile: int) -> Any:
    length, tiles = x.shape[2], _num_tiles(x.shape[2], tile)
    whole = torch.nn.functional.pad(x.float(), (0, 0, 0, tiles * tile - length))
    counts = (length - torch.arange(0, length, tile, device=x.device)).clamp(max=tile)
    return whole.unflatten(2, (tiles, tile)).sum(3) / counts[:, None]


def _greatest_of_torch(torch: Any, scores: Any, count: int) -> Any:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, True)


def _means_of_numpy(numpy: Any, x: Any, tile: int) -> Any:
    begins = numpy.arange(0, x.shape[2], tile)
    sums = numpy.add.reduceat(x.astype(numpy.float32), begins, axis=2)
    return sums / numpy.diff([*begins, x.shape[2]])[:, None].astype(numpy.float32)


def _greatest_of_numpy(numpy: Any, scores: Any, count: int) -> Any:
    table = numpy.zeros(scores.shape, numpy.bool_)
    first = scores.shape[-1] - count
    numpy.put_along_axis(table, numpy.argpartition(scores, first, axis=-1)[..., first:], True, axis=-1)
    return table


def _library_of(q: Array) -> _Library:
    if root_module(q) == "torch":
        torch = sys.modules["torch"]
        return _Library(torch, {"device": q.device}, torch.Tensor.detach, _means_of_torch, _greatest_of_torch)
    import numpy

    return _Library(numpy, {}, numpy.asarray, _means_of_numpy, _greatest_of_numpy)


def _diagonal(library: _Library, lengths: tuple[int, int], tiles: tuple[int, int], align: Align) -> tuple[Any, Any]:
    """Under a causal mask, [q_tiles, kv_tiles]: tiles that hold a position of their row, and tiles behind all of them."""
    xp = library.module
    q_begin = xp.arange(0, lengths[0], tiles[0], **library.device)[:, None]
    kv_begin = xp.arange(0, lengths[1], tiles[1], **library.device)[None]
    shift = 0 if align == "top_left" else lengths[1] - lengths[0]
    last = (q_begin + tiles[0]).clip(max=lengths[0]) - 1 + shift
    return (kv_begin <= last) & (kv_begin + tiles[1] > q_begin + shift), kv_begin > last


def top_k_tiles(
    q: Array,
    k: Array,
    top_k: int,
    tile_q: int = 64,
    tile_kv: int = 64,
    *,
    causal: bool = False,
    align: Align = "bottom_right",
    layout: str = "bshd",
) -> Any:
    """Of each row of tiles the `top_k` tiles of keys whose mean key has the greatest product with its mean query, for `tile_mask`.

    In float32, by the arrays' own library and on their device: PyTorch's, else NumPy's. Nothing waits for a GPU, and no gradient
    is recorded.

    Parameters
    ----------
    q : array, [batch, seqlen_q, num_heads_q, head_dim]
    k : array, [batch, seqlen_kv, num_heads_kv, head_dim]
    top_k : int
        At least 1; all tiles where there are fewer.
    tile_q, tile_kv : int
        Queries and keys of a tile. With a tile_q of 1 each query chooses for itself.
    causal : bool
        No tile that every query of the row lies before, and always those on the diagonal, which count. The mask is still to be
        joined with `causal()`.
    align : {"bottom_right", "top_left"}
        Of the diagonal.
    layout : {"bshd", "bhsd"}
        Order of the dimensions of q and k.

    Returns
    -------
    array
        [batch, num_heads_q, q_tiles, kv_tiles] bool, of q's library, or NumPy's.

    Raises
    ------
    InvalidArgument
        A shape or number is wrong.

    Examples
    --------
    >>> table = fovea.top_k_tiles(q, k, 32, causal=True)
    >>> out = fovea.attention(q, k, v, mask=fovea.tile_mask(table, 64, 64) & fovea.causal())
    """
    top_k, tile_q, tile_kv = (
        _count(value, name, "top_k_tiles", 1) for value, name in ((top_k, "top_k"), (tile_q, "tile_q"), (tile_kv, "tile_kv"))
    )
    _position(align, "top_k_tiles")
    _check(q, k, layout)
    library = _library_of(q)
    xp = library.module
    q, k = library.array(q), library.array(k)
    if layout == "bshd":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    batch, heads, length_q, head_dim = q.shape
    heads_kv, length_kv = k.shape[1:3]
    q_means, k_means = library.means(xp, q, tile_q), library.means(xp, k, tile_kv)
    rows, columns = q_means.shape[2], k_means.shape[2]
    q_means = q_means.reshape(batch, heads_kv, heads // heads_kv * rows, head_dim)
    scores = (q_means @ k_means.swapaxes(-1, -2)).reshape(batch, heads, rows, columns)
    count = min(top_k, columns)
    if not causal:
        return library.greatest(xp, scores, count)
    always, never = _diagonal(library, (length_q, length_kv), (tile_q, tile_kv), align)
    scores = xp.where(never, -math.inf, xp.where(always, math.inf, scores))
    return library.greatest(xp, scores, count) & ~never
