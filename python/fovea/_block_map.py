"""What a mask leaves: tiles that are empty, partial or full, the mask itself, and pictures of both."""

from __future__ import annotations

import base64
import ctypes
import os
import struct
import sys
import zlib
from typing import Any, NamedTuple

from . import _abi
from ._arrays import Array
from ._calls import Builder, Template, offset
from ._forward import Arguments, MaskMod, add_forward, gather
from ._library import OfThisProcess, check, take_text
from .errors import InvalidArgument

EMPTY, PARTIAL, FULL = 0, 1, 2
_COLOURS = ("#e8e8e8", "#f49d41", "#2b5ea7")  # of legends; pictures have an empty tile white


class Counts(NamedTuple):
    """How many tiles are of each kind."""

    empty: int
    partial: int
    full: int


def png_of(rgb: bytes, height: int, width: int) -> bytes:
    """A PNG of 8-bit RGB pixels, row-major."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + rgb[3 * width * row : 3 * width * (row + 1)] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class BlockMap(OfThisProcess):
    """Which tiles of the score matrix a mask leaves, as kernels see them; made by `block_map`. A notebook shows its picture.

    Attributes
    ----------
    shape : tuple of int
        (sequences, heads, q_tiles, kv_tiles); of packed sequences the longest's.
    tile_q, tile_kv : int
        Queries and keys of a tile.
    """

    _made_by = "block_map"

    def __init__(
        self, template: Template, arguments: Arguments, tiles: tuple[int, int], lengths: tuple[int, int]
    ) -> None:
        self._bound = template.bind(arguments.tensors, arguments.words)
        self._kept = template  # and with it the programs
        self._lengths = lengths
        self.tile_q, self.tile_kv = tiles
        shape = (ctypes.c_int64 * 4)()
        check("fovea_mask_tiles", self._bound.address, None, 0, shape)
        self.shape: tuple[int, int, int, int] = tuple(shape)
        count = shape[0] * shape[1] * shape[2] * shape[3]
        self._kinds = bytearray(count)
        if count:
            buffer = (ctypes.c_uint8 * count).from_buffer(self._kinds)
            check("fovea_mask_tiles", self._bound.address, buffer, count, shape)

    @property
    def kinds(self) -> Any:
        """[sequences, heads, q_tiles, kv_tiles] u8: 0 empty, 1 partial, 2 full; of NumPy where it is imported, else a memoryview."""
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            return numpy.frombuffer(self._kinds, numpy.uint8).reshape(self.shape)
        return memoryview(self._kinds).cast("B", self.shape) if self._kinds else memoryview(self._kinds)

    @property
    def counts(self) -> Counts:
        """How many tiles are empty, partial and full."""
        return Counts(*(self._kinds.count(kind) for kind in (EMPTY, PARTIAL, FULL)))

    @property
    def sparsity(self) -> float:
        """The share of tiles that no kernel visits, from 0 to 1."""
        return self.counts.empty / len(self._kinds) if self._kinds else 0.0

    def print(self, max_width: int = 0, max_height: int = 0) -> str:
        """A picture in text of the first sequence and head, of at most so many characters (0: 96 x 48)."""
        return take_text("fovea_mask_print", self._bound.address, max_width, max_height)

    def png(self, path: str | os.PathLike[str] | None = None, max_size: int = 0) -> bytes:
        """The picture as PNG, at most `max_size` pixels wide and high (0: 1024); written to `path` where one is given."""
        size = (ctypes.c_int32 * 2)()
        check("fovea_mask_draw", self._bound.address, max_size, None, 0, size)
        count = 3 * size[0] * size[1]
        pixels = (ctypes.c_uint8 * max(count, 1))()
        if count:
            check("fovea_mask_draw", self._bound.address, max_size, pixels, count, size)
        picture = png_of(bytes(pixels)[:count], size[0], size[1])
        if path is not None:
            with open(path, "wb") as file:
                file.write(picture)
        return picture

    def dense(self) -> Any:
        """The mask element by element: [sequences, heads, seqlen_q, seqlen_kv] bool of NumPy; behind a sequence's end False.

        Raises
        ------
        ImportError
            There is no NumPy.
        """
        import numpy

        visible = numpy.empty((self.shape[0], self.shape[1], *self._lengths), numpy.bool_)
        extents = (ctypes.c_int64 * 4)(*visible.shape)
        kind = _abi.DataType(*_abi.DTYPES["bool"], 1)
        tensor = _abi.Tensor(visible.ctypes.data, _abi.Device(_abi.CPU, 0), 4, kind, extents, None, 0)
        check("fovea_mask_elements", self._bound.address, 0, 0, ctypes.byref(tensor))
        return visible

    def __repr__(self) -> str:
        counts = self.counts
        return (
            f"BlockMap(shape={self.shape}, tiles of {self.tile_q} x {self.tile_kv}: {counts.empty} empty, "
            f"{counts.partial} partial, {counts.full} full)"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{self.print()}"

    def _repr_html_(self) -> str:
        picture = base64.b64encode(self.png(max_size=512)).decode()
        total = max(len(self._kinds), 1)
        legend = " ".join(
            f'<span style="color: {colour}">&#9632;</span> {name} {count} ({count / total:.1%})'
            for name, colour, count in zip(("empty", "partial", "full"), _COLOURS, self.counts)
        )
        sequences, heads, rows, columns = self.shape
        shown = "" if sequences * heads <= 1 else f"; the first of {sequences} sequences and {heads} heads is shown"
        return (
            f'<div><img src="data:image/png;base64,{picture}" '
            'style="image-rendering: pixelated; border: 1px solid #bbb; min-width: 256px" alt="tiles of the score matrix">'
            f"<p>{legend}<br>{rows} x {columns} tiles of {self.tile_q} queries (down) x {self.tile_kv} keys (across){shown}</p></div>"
        )


def _longest(offsets: Any) -> int:
    values = [int(value) for value in offsets]
    return max((end - begin for begin, end in zip(values, values[1:])), default=0)


def scores_shape(q: Array, k: Array, cu_seqlens: Any, layout: str, function: str) -> tuple[int, int, int, int]:
    """(sequences, query heads, seqlen_q, seqlen_kv) of a call; of packed sequences the longest's."""
    rank = 4 if cu_seqlens is None else 3
    for name, array in (("q", q), ("k", k)):
        shape = getattr(array, "shape", None)
        if shape is None or len(shape) != rank:
            got = f"a {type(array).__name__}" if shape is None else f"of shape {tuple(shape)}"
            expected = "batch, seqlen, num_heads, head_dim" if rank == 4 else "total, num_heads, head_dim"
            raise InvalidArgument(f"{function}: {name} is {got}; expected an array [{expected}]")
    if cu_seqlens is not None:
        offsets_q, offsets_kv = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        return len(offsets_q) - 1, int(q.shape[1]), _longest(offsets_q), _longest(offsets_kv)
    length, head = (2, 1) if layout == "bhsd" else (1, 2)
    return int(q.shape[0]), int(q.shape[head]), int(q.shape[length]), int(k.shape[length])


def block_map(
    q: Array,
    k: Array,
    *,
    tile_q: int = 64,
    tile_kv: int = 64,
    sequence: int | None = None,
    q_head: int | None = None,
    causal: bool = False,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    mask_mod: MaskMod | None = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bshd",
) -> BlockMap:
    """Which tiles of the score matrix a mask leaves: proven from its formula, without the matrix.

    Parameters
    ----------
    q : array or TensorSpec, [batch, seqlen_q, num_heads_q, head_dim_qk]
        Its shape alone is read.
    k : array or TensorSpec, [batch, seqlen_kv, num_heads_kv, head_dim_qk]
        The same.
    tile_q, tile_kv : int
        Queries and keys of a tile.
    sequence, q_head : int, optional
        Of this sequence or query head alone.
    causal, align, window, mask, mask_mod, segment_ids, cu_seqlens, layout
        As `attention`'s; arrays are on the host.

    Returns
    -------
    BlockMap

    Raises
    ------
    InvalidArgument
        As `attention`.

    Examples
    --------
    >>> print(fovea.block_map(fovea.TensorSpec((1, 1024, 1, 64)), fovea.TensorSpec((1, 1024, 1, 64)), causal=True))
    """
    function = "block_map"
    arguments = gather(
        function, q, k, None, None, causal=causal, align=align, window=window, mask=mask, mask_mod=mask_mod,
        segment_ids=segment_ids, cu_seqlens=cu_seqlens, layout=layout,
    )  # fmt: skip
    builder = Builder(function)
    struct_type = _abi.BlockMapArgs
    args = _abi.sized(
        struct_type,
        tile_q=tile_q,
        tile_kv=tile_kv,
        has_sequence=int(sequence is not None),
        has_q_head=int(q_head is not None),
        sequence=sequence or 0,
        q_head=q_head or 0,
    )
    at = builder.add(args)
    builder.point(at + offset(struct_type, "forward"), add_forward(builder, arguments, function))
    lengths = scores_shape(q, k, cu_seqlens, layout, function)[2:]
    return BlockMap(builder.done(), arguments, (tile_q, tile_kv), lengths)
