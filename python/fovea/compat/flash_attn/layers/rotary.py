"""flash_attn.layers.rotary by `fovea.rotary`: on every device, with gradients, in place where the name says so."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch

from ...._rotary import rotary
from ..._flash import InvalidCall


class _OfLeaf(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Turns a leaf that wants a gradient where it lies, as flash_attn does; PyTorch's own operators in place refuse that."""

    @staticmethod
    def forward(ctx: Any, x: Any, turn: Callable[[Any, bool], None]) -> Any:
        turn(x.detach(), False)
        ctx.turn = turn
        return x

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple[Any, None]:
        gradient = dout.clone()
        ctx.turn(gradient, True)
        return gradient, None


def _in_place(x: Any, turn: Callable[[Any, bool], None]) -> Any:
    """x after `turn(x, False)`; `turn(gradient, True)` turns back."""
    is_leaf = (x if x._base is None else x._base).is_leaf
    if is_leaf and x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _OfLeaf.apply(x, turn)
    turn(x, False)
    return x


def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0, cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:  # fmt: skip
    """Rows turned by the angles of their positions, which begin at `seqlen_offsets` in each sequence.

    Parameters
    ----------
    x : Tensor, [batch, seqlen, heads, dim], with cu_seqlens packed: [total, heads, dim]
    cos, sin : Tensor, [max_positions, rotary_dim / 2]
    interleaved : bool
        Pairs (2j, 2j + 1) instead of (j, j + rotary_dim / 2).
    inplace : bool
        Writes to x, and returns it.
    seqlen_offsets : int, or Tensor, [batch]
    cu_seqlens : Tensor, [batch + 1], optional
    max_seqlen : int, optional
        Taken and not needed.

    Returns
    -------
    Tensor, shape of x
    """
    offsets = None
    if isinstance(seqlen_offsets, torch.Tensor):
        offsets = seqlen_offsets
    elif seqlen_offsets:
        cos, sin = cos[seqlen_offsets:], sin[seqlen_offsets:]

    def turned(rows: Any, is_conjugate: bool, out: Any) -> Any:
        return rotary(
            rows, cos, sin, offsets=offsets, cu_seqlens=cu_seqlens, is_interleaved=interleaved, is_conjugate=is_conjugate, out=out
        )

    return _in_place(x, lambda rows, back: turned(rows, back, rows)) if inplace else turned(x, False, None)


#: An older name.
apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    """The same by PyTorch's operators, to compare with: angles are those of the rows, [seqlen or more, rotary_dim / 2] or
    [batch, seqlen, rotary_dim / 2].
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = (table[..., : x.shape[-3], None, :] for table in (cos, sin))
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined, kept], -1)


def apply_rotary_emb_qkv_(
    qkv: Any, cos: Any, sin: Any, cos_k: Any = None, sin_k: Any = None, interleaved: bool = False, seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:  # fmt: skip
    """Turns queries and keys of qkv in place, keys by `cos_k` and `sin_k` where given; returns qkv.

    qkv is [batch, seqlen, 3, heads, dim], or [batch, seqlen, num_heads_q + 2 * heads_k, dim] beside `num_heads_q`.
    """
    if qkv.dim() == 4 and num_heads_q is None:
        raise InvalidCall("apply_rotary_emb_qkv_: qkv has rank 4 without num_heads_q; expected [batch, seqlen, 3, heads, dim] or num_heads_q")
    tables = (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)

    def turn(packed: Any, back: bool) -> None:
        for rows, (of_cos, of_sin) in zip(_queries_and_keys(packed, num_heads_q), tables):
            apply_rotary_emb(rows, of_cos, -of_sin if back else of_sin, interleaved, True, seqlen_offsets)

    return _in_place(qkv, turn)


def _queries_and_keys(qkv: Any, num_heads_q: int | None) -> tuple[Any, Any]:
    if num_heads_q is None or qkv.dim() == 5:
        return qkv.select(2, 0), qkv.select(2, 1)
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    return qkv.narrow(2, 0, num_heads_q), qkv.narrow(2, num_heads_q, num_heads_k)


def apply_rotary_emb_kv_(kv: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """Turns the keys of kv [batch, seqlen, 2, heads, dim] in place; returns kv."""

    def turn(packed: Any, back: bool) -> None:
        apply_rotary_emb(packed.select(2, 0), cos, -sin if back else sin, interleaved, True, seqlen_offsets)

    return _in_place(kv, turn)


class _Angles(NamedTuple):
    """Tables [positions, dim / 2] of queries and of keys."""

    cos: Any
    sin: Any
    cos_k: Any
    sin_k: Any


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Rotary embedding of queries and keys in place, with flash_attn's constructor and no weights of its own.

    Parameters
    ----------
    dim : int
        Columns that turn.
    base : float
        Pair i turns by ``base ** (-2 * i / dim)`` a position.
    interleaved : bool
        Pairs (2j, 2j + 1) instead of (j, j + dim / 2).
    scale_base : float, optional
        XPos: queries are scaled up and keys down the farther they stand behind the middle of the table.
    device : optional
        Of the frequencies.
    """

    inv_freq: Any
    scale: Any

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None, device: Any = None
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, base, interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", base ** (-even / dim), persistent=False)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._angles: _Angles | None = None

    def _make_angles(self, num_positions: int, like: Any) -> _Angles:
        """In f32 whatever autocast says: positions beyond 256 have no place in bf16."""
        places = torch.arange(num_positions, device=like.device, dtype=torch.float32)
        angles = places[:, None] * self.inv_freq.to(like.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            tables = cos, sin, cos, sin
        else:
            power = (places - num_positions // 2) / self.scale_base
            scale = self.scale.to(like.device) ** power[:, None]
            tables = cos * scale, sin * scale, cos / scale, sin / scale
        return _Angles(*(table.to(like.dtype) for table in tables))

    def _angles_of(self, num_positions: int, like: Any) -> _Angles:
        kept = self._angles
        fits = kept is not None and len(kept.cos) >= num_positions and (kept.cos.device, kept.cos.dtype) == (like.device, like.dtype)
        # Tables of inference mode cannot be saved for a gradient.
        if kept is None or not fits or (self.training and kept.cos.is_inference()):
            kept = self._angles = self._make_angles(num_positions, like)
        return kept

    def forward(
        self, qkv: Any, kv: Any = None, seqlen_offset: Any = 0, max_seqlen: int | None = None, num_heads_q: int | None = None
    ) -> Any:
        """Turns qkv, or q and kv, in place.

        Parameters
        ----------
        qkv : Tensor, [batch, seqlen, 3, heads, dim], [batch, seqlen, num_heads_q + 2 * heads_k, dim], or q beside kv
        kv : Tensor, [batch, seqlen, 2, heads, dim], optional
        seqlen_offset : int, or Tensor, [batch]
            The position of each sequence's first row; of a tensor `max_seqlen` says how long the tables must be.
        max_seqlen : int, optional
        num_heads_q : int, optional

        Returns
        -------
        qkv, or (q, kv)
        """
        if max_seqlen is None and isinstance(seqlen_offset, torch.Tensor):
            raise InvalidCall("RotaryEmbedding: seqlen_offset is a tensor without max_seqlen; expected the longest position")
        angles = self._angles_of(qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *angles, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, angles.cos, angles.sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, angles.cos_k, angles.sin_k, self.interleaved, seqlen_offset)
