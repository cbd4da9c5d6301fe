"""What the generations of FlashAttention have in common, as calls of Fovea."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch

from .._cache import KvCache, Rotary, decode
from ..errors import InvalidArgument, Unsupported
from ..torch import _decode

_INFINITY = float("inf")


class InvalidCall(InvalidArgument, RuntimeError):
    """A wrong argument of a peer's function: what there is a RuntimeError."""


def window_of(window_size: Any, causal: bool, open_from: float = _INFINITY) -> tuple[int | None, int | None] | None:
    """(left, right) of two whole numbers, tensors among them; a negative one leaves its side open, as does a right one
    from `open_from` on.
    """
    if not hasattr(window_size, "__len__"):
        raise InvalidCall(f"window_size is {window_size!r}; expected (left, right), -1 for an open side")
    if len(window_size) != 2:
        raise InvalidCall(f"window_size has {len(window_size)} numbers; expected (left, right), -1 for an open side")
    if any(size is None for size in window_size):
        raise InvalidCall(f"window_size is {window_size!r}; expected whole numbers, -1 for an open side")
    left, right = (None if size < 0 else size for size in map(int, window_size))
    right = None if causal or right is None or right >= open_from else right
    return None if left is None and right is None else (left, right)


def softcap_of(softcap: float) -> float | None:
    """0 is none there."""
    return softcap if softcap > 0 else None


def parts_of(name: str, packed: Any, count: int) -> Any:
    """q, k and v, or k and v, of one tensor."""
    if packed.dim() < 3 or packed.shape[-3] != count:
        raise InvalidCall(f"{name} has shape {tuple(packed.shape)}; expected {count} parts, [..., {count}, heads, head_dim]")
    return packed.unbind(-3)


def lengths_of(cu_seqlens: Any) -> Any:
    """[batch] of offsets [batch + 1]."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def empty_rows_are(lse: Any, value: float) -> Any:
    """`lse` with another number where a row sees no key."""
    return lse.masked_fill(lse == -_INFINITY, value)


class _ForwardOnly(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(refusal, call, *tensors) -> what the call gives."""

    @staticmethod
    def forward(ctx: Any, refusal: str, call: Callable[[], Any], *tensors: Any) -> Any:
        ctx.refusal = refusal
        return call()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(ctx.refusal)


def without_gradient(refusal: str, call: Callable[[], Any], *tensors: Any) -> Any:
    """What the call gives, of tensors that may want gradients: the call is no error, asking for a gradient is, by `refusal`."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors if tensor is not None):
        return _ForwardOnly.apply(refusal, call, *tensors)
    return call()


# ---- Caches ----


class Rows(NamedTuple):
    """Tokens of a call: `num_rows` of each sequence, or packed in all."""

    num_rows: int
    cu_seqlens: Any = None

    def positions(self, starts: Any, step: int) -> Any:
        """Of the first row of a sequence, and of the next ones `step` further: [batch, num_rows], packed [num_rows]."""
        dtype = torch.int32 if self.cu_seqlens is None else self.cu_seqlens.dtype
        places = torch.arange(self.num_rows, dtype=dtype, device=starts.device)
        if self.cu_seqlens is None:
            return starts[:, None] + step * places
        ends = self.cu_seqlens[1:].contiguous()
        # Rows behind the last sequence have no position; any will do.
        sequence = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
        return starts[sequence] + step * (places - self.cu_seqlens[sequence])


class Turning(NamedTuple):
    """Rotary arguments of FlashAttention's functions over caches."""

    cos: Any
    sin: Any
    is_interleaved: bool
    starts: Any  # [batch] i32: of the first row of q and of the new keys
    is_default: bool  # whether the new keys are those of the queries, and their positions rows without left padding

    def rotary(self, queries: Rows, keys: Rows, is_masked: bool) -> Rotary:
        """Where neither causal nor a window places queries, all of a sequence stand at its first position."""
        is_one = queries.num_rows == keys.num_rows and queries.cu_seqlens is keys.cu_seqlens
        if self.is_default and is_masked and is_one:
            return Rotary(self.cos, self.sin, is_interleaved=self.is_interleaved)
        at_keys = keys.positions(self.starts, 1).int()
        at_queries = queries.positions(self.starts, 1 if is_masked else 0).int()
        return Rotary(self.cos, self.sin, at_keys, self.is_interleaved, at_queries)


def capacity_of(k_cache: Any, page_table: Any) -> int:
    """Rows that a sequence has room for."""
    return int(k_cache.shape[1] if page_table is None else k_cache.shape[1] * page_table.shape[1])


def seqlens_of(cache_seqlens: Any, batch: int, k_cache: Any, page_table: Any) -> Any:
    """[batch] i32 of a tensor, of one number for all, or of None: the whole cache."""
    if cache_seqlens is None:
        cache_seqlens = capacity_of(k_cache, page_table)
    if isinstance(cache_seqlens, int):
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    return cache_seqlens


def check_append(function: str, k: Any, v: Any, cache_seqlens: Any, rotary_cos: Any, rotary_sin: Any) -> None:
    """What FlashAttention wants together."""
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise InvalidCall(f"{function}: {given} without {missing}; expected both or none")
    if k is not None and cache_seqlens is None:
        raise InvalidCall(f"{function}: k without cache_seqlens; expected the lengths of the cache before the new keys")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidCall(f"{function}: one of rotary_cos and rotary_sin; expected both or none")
    if rotary_cos is not None and k is None:
        raise InvalidCall(f"{function}: rotary_cos without k; expected new keys beside it (fovea.rotary turns queries alone)")


def check_room(function: str, table_name: str, seqlens: Any, num_new: int, k_cache: Any, page_table: Any) -> None:
    """Pages that a sequence has no entries for, on the CPU; on a GPU reading lengths would stop the stream, in a graph break it."""
    if page_table is None or seqlens.device.type != "cpu" or torch.compiler.is_compiling() or not len(seqlens):
        return
    room, needed = capacity_of(k_cache, page_table), int(seqlens.max()) + num_new
    if needed > room:
        raise InvalidCall(
            f"{function}: a sequence has {needed} keys with the new ones; expected at most the {room} that {table_name} has pages for"
        )


def attend_cache(function: str, q: Any, cache: KvCache, k: Any = None, v: Any = None, **options: Any) -> tuple[Any, Any]:
    """(out, lse) of queries over a cache, which new keys may join."""
    refusal = (
        f"{function}: a gradient through a KV cache; expected none: call it with k and v as they are, without pages, or under "
        "torch.no_grad()"
    )
    options |= {"append_k": k, "append_v": v, "sees_all_keys": True, "return_lse": True}
    results: tuple[Any, Any]
    if torch.compiler.is_compiling():
        results = _decode.decode(q, cache, refusal=refusal, **options)
        return results

    def call() -> tuple[Any, Any]:
        with torch.no_grad():
            made: tuple[Any, Any] = decode(q, cache, **options)
        return made

    results = without_gradient(refusal, call, q, cache.k, cache.v, k, v)
    return results


# ---- Sequences of which some rows count ----


class Compacted(NamedTuple):
    """Packed rows reordered: those that count first, sequence by sequence, and all others behind the last sequence."""

    places: Any  # [total]: where each row goes
    order: Any  # [total]: the row that comes to a place
    cu_seqlens: Any

    def pack(self, rows: Any) -> Any:
        """Rows [total, ...] in the new order."""
        return rows.index_select(0, self.order)

    def unpack(self, rows: Any, dim: int = 0) -> Any:
        """Rows in the old order."""
        return rows.index_select(dim, self.places)


def compact(cu_seqlens: Any, total: int, first: Any = None, end: Any = None) -> Compacted:
    """Rows `first` to `end` of each sequence count, all unless given: [batch] of numbers from the sequence's start.

    Nothing is read back, so a GPU's stream goes on: the number of rows stays what it was.
    """
    cu_seqlens = cu_seqlens.long()
    lengths = lengths_of(cu_seqlens)
    first = torch.zeros_like(lengths) if first is None else first.long()
    end = lengths if end is None else torch.minimum(end.long(), lengths)
    rows = Rows(total, cu_seqlens)
    at, sequence_end, sequence_first = (rows.positions(starts, step) for starts, step in ((0 * end, 1), (end, 0), (first, 0)))
    counts = (at >= sequence_first) & (at < sequence_end)
    row = torch.arange(total, device=cu_seqlens.device)
    counts &= row < cu_seqlens[-1]
    before = counts.cumsum(0)  # rows that count, this one with them; a sort would take several times as long
    places = torch.where(counts, before - 1, counts.sum() + row - before)
    used = torch.nn.functional.pad((end - first).clamp(min=0).cumsum(0), (1, 0))
    return Compacted(places, torch.empty_like(places).scatter(0, places, row), used.int())
