"""FlexAttention's functions with FlexAttention's signatures; a block mask here is a formula, and takes no memory until it is looked at."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch

from .._arrays import TensorSpec
from .._attention import attention
from .._block_map import BlockMap, block_map
from .._programs import Program, mask_mod as make_mask_mod
from ..errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class _Part:
    """The formula of a part of a block mask, whose batch entries, heads and queries count from 0."""

    mask_mod: Callable[..., Any]
    firsts: tuple[int, int, int]
    is_alone: tuple[bool, bool]  # of batch entries and heads: the one that is there serves all, as in other block masks

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        b, h = (x * 0 if alone else x for x, alone in zip((b, h), self.is_alone))
        return self.mask_mod(b + self.firsts[0], h + self.firsts[1], q_idx + self.firsts[2], kv_idx)


def _range_of(index: Any, size: int, name: str) -> range:
    """What an index takes of so many; one number takes one."""
    if isinstance(index, slice) and index.step in (None, 1):
        return range(*index.indices(size))
    if not isinstance(index, int):
        raise InvalidArgument(f"BlockMask: the index of {name} is {index!r}; expected a whole number, or a slice without a step")
    if not -size <= index < size:
        raise IndexError(f"BlockMask: the index of {name} is {index}; expected one of {size}")
    first = index % size
    return range(first, first + 1)


class BlockMask:
    """A mask and the lengths that it is for; made by `create_block_mask`.

    ``block_mask[b, h, q_block]`` is that of a part: of batch entries, of heads, and of blocks of BLOCK_SIZE[0] queries.

    Attributes
    ----------
    mask_mod : callable
        What it was made of; of a part the same, counting from the part's beginning. Another one may be assigned.
    shape : tuple of int
        (B, H, Q_LEN, KV_LEN).
    BLOCK_SIZE : tuple of int
        Queries and keys of a block, for `to_dense`, `sparsity` and the picture; kernels choose their own tiles.
    """

    def __init__(self, mask_mod: Callable[..., Any], shape: tuple[int, int, int, int], block_size: tuple[int, int]) -> None:
        self.mask_mod = mask_mod
        self.shape = shape
        self.BLOCK_SIZE = block_size

    @property
    def mask_mod(self) -> Callable[..., Any]:
        """The formula; one that is assigned takes its place."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: Callable[..., Any]) -> None:
        self.program: Program = make_mask_mod(mask_mod)
        self._mask_mod = mask_mod
        self._map: BlockMap | None = None

    def __getitem__(self, index: Any) -> BlockMask:
        given = index if isinstance(index, tuple) else (index,)
        if len(given) > 3:
            raise IndexError(f"BlockMask: {len(given)} indices; expected those of batch, heads and blocks of queries")
        batch, heads, q_len, kv_len = self.shape
        rows = self.BLOCK_SIZE[0]
        sizes = {"batch": batch, "heads": heads, "blocks of queries": -(-q_len // rows)}
        parts = [_range_of(at, size, name) for at, (name, size) in zip((*given, *[slice(None)] * 3), sizes.items())]
        first, end = rows * parts[2].start, min(rows * parts[2].stop, q_len)
        shape = (len(parts[0]), len(parts[1]), max(end - first, 0), kv_len)
        is_alone = (batch > 1 and shape[0] == 1, heads > 1 and shape[1] == 1)
        part = _Part(self.mask_mod, (parts[0].start, parts[1].start, first), is_alone)
        return BlockMask(part, shape, self.BLOCK_SIZE)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # which is of this process, and is made anew where it is looked at

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN)."""
        return self.shape[2], self.shape[3]

    def block_map(self) -> BlockMap:
        """Which blocks are empty, partial and full: proven from the formula, so a full or empty one may count as partial."""
        if self._map is None:
            batch, heads, q_len, kv_len = self.shape
            self._map = block_map(
                TensorSpec((batch, q_len, heads, 1)), TensorSpec((batch, kv_len, heads, 1)),
                mask=self.program, tile_q=self.BLOCK_SIZE[0], tile_kv=self.BLOCK_SIZE[1],
            )  # fmt: skip
        return self._map

    def to(self, device: Any) -> BlockMask:
        """Itself: nothing lies on a device but what the formula reads, which stays where it is, as PyTorch's does."""
        return self

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The same formula for other lengths, as PyTorch calls it."""
        return BlockMask(self.mask_mod, (*self.shape[:2], new_q_len, new_kv_len), self.BLOCK_SIZE)

    def numel(self) -> int:
        """How many elements the dense mask would have."""
        batch, heads, q_len, kv_len = self.shape
        return batch * heads * q_len * kv_len

    def sparsity(self) -> float:
        """Percent of the blocks that are empty."""
        return 100 * self.block_map().sparsity

    def to_dense(self) -> Any:
        """[B, H, blocks of queries, blocks of keys] int32: 1 where a block is partial or full."""
        return (torch.frombuffer(bytearray(self.block_map().kinds), dtype=torch.uint8).reshape(self.block_map().shape) > 0).int()

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, {self.program!r})"

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.block_map().print()}\n)"


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,  # noqa: N803
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """FlexAttention's `create_block_mask`, without the dense mask: the callable is traced.

    Parameters
    ----------
    mask_mod : callable
        Of ``(batch, head, q_idx, kv_idx)``.
    B, H : int, optional
        None: 1, of a mask that does not depend on it.
    Q_LEN, KV_LEN : int
    device, _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order
        Taken and not needed.
    BLOCK_SIZE : int or (int, int)

    Returns
    -------
    BlockMask

    Raises
    ------
    TraceError
        With the line that a formula cannot say.
    """
    sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    if len(sizes) != 2 or min(sizes) < 1:
        raise InvalidArgument(f"create_block_mask: BLOCK_SIZE is {BLOCK_SIZE!r}; expected a number above 0, or two")
    return BlockMask(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), sizes)


def _table_of(num_blocks: Any, indices: Any) -> Any:
    """[B, H, rows, columns] bool: the blocks that PyTorch's lists name."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    columns = torch.where(place < num_blocks[..., None], indices.long(), indices.shape[-1])
    table = torch.zeros((*indices.shape[:-1], indices.shape[-1] + 1), dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, columns, True)[..., :-1].contiguous()


def _program_of(mask: Any) -> Any:
    """PyTorch's BlockMask: a pair is visible in a full block, and in a partial one where its mask_mod says so."""
    rows, columns = mask.BLOCK_SIZE
    partial = _table_of(mask.kv_num_blocks, mask.kv_indices)
    full = None if mask.full_kv_num_blocks is None else _table_of(mask.full_kv_num_blocks, mask.full_kv_indices)
    has_batch, has_heads = partial.shape[0] > 1, partial.shape[1] > 1

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (b if has_batch else 0, h if has_heads else 0, q_idx // rows, kv_idx // columns)
        seen = partial[place] & mask.mask_mod(b, h, q_idx, kv_idx)
        return seen if full is None else full[place] | seen

    return visible if torch.compiler.is_compiling() else make_mask_mod(visible)


def _mask_of(block_mask: Any, q_len: int, kv_len: int) -> Any:
    if block_mask is None:
        return None
    if not hasattr(block_mask, "seq_lengths"):
        raise InvalidArgument(
            f"flex_attention: block_mask is a {type(block_mask).__name__}; expected what create_block_mask makes of a callable"
        )
    expected = tuple(int(length) for length in block_mask.seq_lengths)
    if expected != (q_len, kv_len):
        raise InvalidArgument(
            f"flex_attention: block_mask is for lengths {expected}, query and key have {(q_len, kv_len)}; expected equal lengths"
        )
    return block_mask.program if isinstance(block_mask, BlockMask) else _program_of(block_mask)


def _max_scores(query: Any, key: Any, value: Any, features: dict[str, Any]) -> Any:
    """[B, num_heads_q, Q_LEN] f32, without gradients, by a call of its own: one that records none may write them."""
    row_max = query.new_empty(query.shape[:3], dtype=torch.float32)
    with torch.no_grad():
        attention(query, key, value, row_max=row_max, **features)
    return row_max


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """FlexAttention's `flex_attention`, by Fovea.

    Parameters
    ----------
    query : Tensor, [B, num_heads_q, Q_LEN, head_dim_qk], f32, f16 or bf16
    key : Tensor, [B or 1, num_heads_kv, KV_LEN, head_dim_qk]
    value : Tensor, [B or 1, num_heads_kv, KV_LEN, head_dim_v]
    score_mod : callable, optional
        Of ``(score, batch, head, q_idx, kv_idx)``; float tensors that it reads may learn.
    block_mask : BlockMask, optional
        Of `create_block_mask`, here or PyTorch's.
    scale : float, optional
        ``1 / sqrt(head_dim_qk)`` unless given.
    enable_gqa : bool
        Whether num_heads_kv may be smaller than num_heads_q, and divide it.
    return_lse : bool
    kernel_options
        Taken and not needed.
    return_aux : AuxRequest, optional
        Of PyTorch, in place of `return_lse`. `max_scores` take a second forward call, and are refused in compiled graphs.

    Returns
    -------
    Tensor, [B, num_heads_q, Q_LEN, head_dim_v], or with `return_lse` also [B, num_heads_q, Q_LEN] f32
        0 and -inf where a query sees no key. With `return_aux` also PyTorch's AuxOutput, of such tensors or None.

    Raises
    ------
    InvalidArgument, TraceError, Unsupported
        As `fovea.attention`; float64 is not supported.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InvalidArgument(f"flex_attention: {name} has rank {tensor.dim()}; expected [batch, heads, seqlen, head_dim]")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InvalidArgument(
            f"flex_attention: query has {query.shape[1]} heads and key {key.shape[1]}; expected equal, or enable_gqa=True"
        )
    batch = query.shape[0]
    key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (key, value))
    if return_aux is not None and return_lse:
        raise InvalidArgument("flex_attention: return_lse beside return_aux; expected one of them, return_aux=AuxRequest(lse=True)")
    mask = _mask_of(block_mask, query.shape[2], key.shape[2])
    features = {"score_mod": score_mod, "mask": mask, "scale": scale, "layout": "bhsd"}
    if return_aux is None:
        return attention(query, key, value, return_lse=return_lse, **features)
    from torch.nn.attention.flex_attention import AuxOutput

    out, lse = attention(query, key, value, return_lse=True, **features)
    max_scores = _max_scores(query, key, value, features) if return_aux.max_scores else None
    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
