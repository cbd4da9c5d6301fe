"""Context parallelism: who of several ranks holds and computes which tokens of a sequence, and what is sent.

    shards = fovea.parallel.context_parallel_plan(q, k, v, world_size=8, causal=True)
    q_here = shards.shard(q, rank, dim=1)              # a rank's part of the whole sequence
    print(shards)                                      # balance, bytes, tokens of each rank

A plan is a pure function of its arguments: every rank makes the same one by itself. `fovea.torch.context_parallel_attention` runs it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from typing import Any, NamedTuple, Union

from . import _abi
from ._arrays import Array, TensorSpec, root_module
from ._calls import Bound, Builder, offset
from ._forward import MaskMod, add_forward, gather, resolve_mask
from ._library import OfThisProcess, check, library, take_text
from ._programs import Program
from .errors import InvalidArgument, Unsupported

#: Schemes by name: docs/guides/context_parallel.md says when to take which.
SCHEMES = ("all_gather", "head_group_all_gather", "ring", "ulysses", "hybrid", "needed_only")
_TENSORS = ("q", "kv", "out")

Range = tuple[int, int]
Spec = Union[Array, TensorSpec]


class Transfer(NamedTuple):
    """One tensor's part that a rank receives in a forward pass.

    Attributes
    ----------
    step : int
        Transfers of one step go at once, those of the next follow.
    source : int
        The rank that sends it.
    tensor : str
        "q", "kv" (keys and values travel together) or "out".
    tokens, heads : (int, int)
        Half-open; kv heads for "kv", query heads else.
    """

    step: int
    source: int
    tensor: str
    tokens: Range
    heads: Range


class RankLoad(NamedTuple):
    """What one rank computes, receives and holds.

    Attributes
    ----------
    full, partial, empty : int
        Tiles of all sequences and heads that it computes.
    work : float
        Full tiles, and 1.1 for each partial one.
    forward_bytes, backward_bytes : int
        Received in each pass.
    kv_bytes : int
        Keys and values in memory at once.
    """

    full: int
    partial: int
    empty: int
    work: float
    forward_bytes: int
    backward_bytes: int
    kv_bytes: int


def _take(x: Array, places: Any, dim: int) -> Array:
    """Elements at `places` along `dim`, of x's own library."""
    module = root_module(x)
    if module == "torch":
        torch = sys.modules["torch"]
        return x.index_select(dim, torch.as_tensor(places, device=x.device))
    if module in ("jax", "jaxlib"):
        return sys.modules["jax"].numpy.take(x, sys.modules["jax"].numpy.asarray(places), axis=dim)
    if hasattr(x, "take"):
        return x.take(places, axis=dim)
    raise InvalidArgument(f"ShardPlan: x is a {type(x).__name__}; expected an array of NumPy, PyTorch, CuPy or JAX")


class PackedPlaces(NamedTuple):
    """Of packed tokens, [total] i32 each: what programs, which speak of one sequence, read of it.

    Attributes
    ----------
    sequences : array
        Whose token it is; -1 behind the last sequence.
    positions, lengths : array
        Its place in that sequence, and how long that is.
    """

    sequences: Array
    positions: Array
    lengths: Array

    def placed(self, program: Program) -> Program:
        """The program of sequences, for all packed tokens as one: rows see keys of their own sequence alone."""
        places = {
            "batch": "sequences[q_idx]", "q_idx": "positions[q_idx]", "kv_idx": "positions[kv_idx]", "seqlen_q": "lengths[q_idx]",
            "seqlen_kv": "lengths[q_idx]",
        }  # fmt: skip
        return program.placed(places, self._asdict())


def _packed_places(cu_seqlens: Array, total: int) -> PackedPlaces:
    """On the host, of the library of cu_seqlens or of NumPy."""
    offsets = [int(x) for x in cu_seqlens]
    ends = zip(offsets, offsets[1:])
    if not offsets or offsets[0] != 0 or any(end < begin for begin, end in ends) or offsets[-1] > total:
        raise InvalidArgument(
            f"context_parallel_plan: cu_seqlens is {offsets}; expected offsets that start at 0, never decrease and end at most at {total}"
        )
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    for sequence, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        columns[0].extend([sequence] * (end - begin))
        columns[1].extend(range(end - begin))
        columns[2].extend([end - begin] * (end - begin))
    rest = total - offsets[-1]
    if root_module(cu_seqlens) == "torch":
        torch = sys.modules["torch"]
        arrays = [torch.tensor(x + [fill] * rest, dtype=torch.int32) for x, fill in zip(columns, (-1, 0, 0))]
    else:
        import numpy

        arrays = [numpy.array(x + [fill] * rest, dtype=numpy.int32) for x, fill in zip(columns, (-1, 0, 0))]
    return PackedPlaces(*arrays)


def _as_one_sequence(x: Any, name: str) -> Any:
    """[total, heads, head_dim] as [1, total, heads, head_dim]."""
    if x is None:
        return None
    if len(x.shape) != 3:
        raise InvalidArgument(
            f"context_parallel_plan: {name} has shape {tuple(x.shape)}; expected [total, heads, head_dim], packed as cu_seqlens says"
        )
    return TensorSpec((1, *x.shape), x.dtype) if isinstance(x, TensorSpec) else x[None]


def _packed_words(words: dict[str, Any], packed: PackedPlaces) -> dict[str, Any]:
    """The mask of all packed tokens as one sequence. Distances are the same there, so causal masks and windows are what they were."""
    array, program = resolve_mask(words["mask"], words["mask_mod"])
    if array is not None or words["segment_ids"] is not None:
        raise InvalidArgument("context_parallel_plan: cu_seqlens beside a dense mask or segment_ids; expected a program of sequences' positions")
    placed = None if program is None else packed.placed(program)
    return {**words, "mask": placed, "mask_mod": None, "segment_ids": packed.sequences[None]}


class ShardPlan(OfThisProcess):
    """A plan of `context_parallel_plan`. Immutable; it is not sent from rank to rank, each makes its own.

    Attributes
    ----------
    scheme : str
    world_size, seqlen, num_heads_q, num_heads_kv : int
    dealing : str
        How tokens were dealt: "contiguous", "zigzag", "balanced", or "evened out", neighbours but for some exchanged chunks.
    balance : float
        Work of the busiest rank over the mean.
    head_ranks : int
        Ranks that compute the same rows, each a part of the heads: 1 but for "ulysses" and "hybrid".
    head_parts : int
        In which keys are gathered: 1 but for "head_group_all_gather".
    text : str
        All that it says, as JSON.
    mask_words : dict
        causal, window, mask, segment_ids and so on, as the plan was made with: what runs it, masks by them.
    packed : PackedPlaces, optional
        Of packed sequences.
    engines : dict
        What runs it, by process group: made by the first call.
    """

    _made_by = "context_parallel_plan"

    def __init__(self, bound: Bound, mask_words: dict[str, Any], packed: PackedPlaces | None = None) -> None:
        self.mask_words, self.packed = mask_words, packed
        address = ctypes.c_void_p()
        check("fovea_shard_plan_create", bound.address, ctypes.byref(address))
        self._address = address.value or 0
        self._destroy = library.fovea_shard_plan_destroy
        self.engines: dict[Any, Any] = {}
        self.text = take_text("fovea_shard_plan_explain", self._address, _abi.JSON)
        page = json.loads(self.text)
        self._ranks: list[dict[str, Any]] = page["ranks"]
        self.scheme: str = page["scheme"]
        self.world_size: int = page["world_size"]
        self.seqlen: int = page["seqlen"]
        self.num_heads_q: int = page["num_heads_q"]
        self.num_heads_kv: int = page["num_heads_kv"]
        self.dealing: str = page["dealing"]
        self.balance: float = page["balance"]
        self.head_ranks: int = page["head_ranks"]
        self.head_parts: int = page["head_parts"]

    @functools.cached_property
    def keeps_fours(self) -> bool:
        """Whether keys of ranks stand in fours as they do in the sequence, as dropout asks: ranges begin and end at multiples of 4."""
        kind = "needed_kv" if self.scheme == "needed_only" else "rows"
        for rank in range(self.world_size):
            at = 0
            for begin, end in self._ranges(rank, kind):
                if at % 4 or begin % 4:
                    return False
                at += end - begin
        return True

    def __del__(self) -> None:
        address, self._address = getattr(self, "_address", 0), 0
        if address:
            self._destroy(address)

    def _rank(self, rank: int) -> dict[str, Any]:
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"ShardPlan: rank is {rank}; expected 0 to {self.world_size - 1}")
        return self._ranks[rank]

    def _ranges(self, rank: int, kind: str) -> list[Range]:
        return [(begin, end) for begin, end in self._rank(rank)[kind]]

    def tokens(self, rank: int) -> list[Range]:
        """Half-open ranges of tokens whose q, k, v and out the rank holds, ascending; equally many on every rank.

        Parameters
        ----------
        rank : int

        Returns
        -------
        list of (int, int)

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        return self._ranges(rank, "tokens")

    def rows(self, rank: int) -> list[Range]:
        """Tokens whose outputs it computes: its own but for "ulysses" and "hybrid".

        Parameters
        ----------
        rank : int

        Returns
        -------
        list of (int, int)

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        return self._ranges(rank, "rows")

    def needed_kv(self, rank: int) -> list[Range]:
        """Keys that some of its rows see, in whole tiles.

        Parameters
        ----------
        rank : int

        Returns
        -------
        list of (int, int)

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        return self._ranges(rank, "needed_kv")

    def q_heads(self, rank: int) -> Range:
        """Query heads that it computes.

        Parameters
        ----------
        rank : int

        Returns
        -------
        (int, int)

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        begin, end = self._rank(rank)["q_heads"]
        return begin, end

    def kv_heads(self, rank: int) -> Range:
        """Key heads that these use.

        Parameters
        ----------
        rank : int

        Returns
        -------
        (int, int)

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        begin, end = self._rank(rank)["kv_heads"]
        return begin, end

    def load(self, rank: int) -> RankLoad:
        """What it computes, receives and holds.

        Parameters
        ----------
        rank : int

        Returns
        -------
        RankLoad

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        page = self._rank(rank)
        numbers = {name: page[name] for name in ("work", "forward_bytes", "backward_bytes", "kv_bytes")}
        return RankLoad(**page["tiles"], **numbers)

    def transfers(self, rank: int) -> list[Transfer]:
        """What the rank receives in a forward pass, by step.

        Parameters
        ----------
        rank : int

        Returns
        -------
        list of Transfer

        Raises
        ------
        InvalidArgument
            There is no such rank.
        """
        self._rank(rank)
        count = ctypes.c_size_t()
        check("fovea_shard_plan_transfers", self._address, rank, None, 0, ctypes.byref(count))
        made = (_abi.Transfer * count.value)()
        if count.value:
            check("fovea_shard_plan_transfers", self._address, rank, made, count.value, ctypes.byref(count))
        return [
            Transfer(x.step, getattr(x, "from"), _TENSORS[x.tensor], (x.token_begin, x.token_end), (x.head_begin, x.head_end)) for x in made
        ]

    def permutation(self) -> Any:
        """The token at each place when ranks' tokens stand one after the other; rank r's are the r-th of equal parts.

        Returns
        -------
        array, [seqlen] i64
            Of NumPy where it is imported, else a memoryview.
        """
        places = (ctypes.c_int64 * max(self.seqlen, 1))()
        check("fovea_shard_plan_permutation", self._address, places, self.seqlen)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            return numpy.frombuffer(places, numpy.int64)[: self.seqlen]
        return memoryview(places).cast("B").cast("q")[: self.seqlen]

    def permute(self, x: Array, dim: int = 1) -> Array:
        """The whole sequence in the order of ranks.

        Parameters
        ----------
        x : array
            `seqlen` long along `dim`, tokens in their own order.
        dim : int

        Returns
        -------
        array

        Raises
        ------
        InvalidArgument
            The length is another.
        """
        self._check_length(x, dim, self.seqlen)
        return _take(x, self.permutation(), dim)

    def restore(self, x: Array, dim: int = 1) -> Array:
        """The tokens of all ranks, one rank's after the other's, in their own order again: undoes `permute`.

        Parameters
        ----------
        x : array
            `seqlen` long along `dim`.
        dim : int

        Returns
        -------
        array

        Raises
        ------
        InvalidArgument
            The length is another.
        """
        self._check_length(x, dim, self.seqlen)
        permutation = self.permutation()
        places = [0] * self.seqlen
        for place, token in enumerate(permutation):
            places[token] = place
        numpy = sys.modules.get("numpy")
        return _take(x, places if numpy is None else numpy.asarray(places, numpy.int64), dim)

    def shard(self, x: Array, rank: int, dim: int = 1) -> Array:
        """One rank's part of the whole sequence; a view where its tokens lie together.

        Parameters
        ----------
        x : array
            `seqlen` long along `dim`, tokens in their own order.
        rank : int
        dim : int

        Returns
        -------
        array
            ``seqlen // world_size`` long along `dim`.

        Raises
        ------
        InvalidArgument
            The length is another, or there is no such rank.
        """
        self._check_length(x, dim, self.seqlen)
        ranges = self.tokens(rank)
        if len(ranges) == 1:
            index = [slice(None)] * len(x.shape)
            index[dim] = slice(*ranges[0])
            return x[tuple(index)]
        size = self.seqlen // self.world_size
        return _take(x, self.permutation()[rank * size : (rank + 1) * size], dim)

    def _check_length(self, x: Array, dim: int, length: int) -> None:
        shape = tuple(x.shape)
        if not -len(shape) <= dim < len(shape) or shape[dim] != length:
            raise InvalidArgument(f"ShardPlan: x has shape {shape}; expected {length} tokens in dimension {dim}")

    def print_ranks(self, sequence: int = 0, q_head: int = 0, max_width: int = 0, max_height: int = 0) -> str:
        """Who computes what: queries down, keys across, the rank as a character.

        Parameters
        ----------
        sequence, q_head : int
            Whose scores.
        max_width, max_height : int
            In characters; 0: 96 x 48.

        Returns
        -------
        str

        Raises
        ------
        InvalidArgument
            There is no such sequence or head.
        """
        return take_text("fovea_shard_plan_print_ranks", self._address, sequence, q_head, max_width, max_height)

    def __repr__(self) -> str:
        return (
            f"ShardPlan({self.scheme} over {self.world_size} ranks, {self.seqlen} tokens {self.dealing}, "
            f"balance {self.balance:.3f})"
        )

    def __str__(self) -> str:
        return take_text("fovea_shard_plan_explain", self._address, _abi.TEXT)


def _bound(
    function: str, q: Spec, k: Spec, v: Spec | None, numbers: dict[str, int], words: dict[str, Any]
) -> tuple[Bound, tuple[Any, ...]]:
    """fovea_shard_args of a call, and what must outlive it."""
    arguments = gather(function, q, k, v, None, **words)
    for array in arguments.tensors[2 if v is None else 3 :]:
        device = getattr(array, "device", None)
        if getattr(device, "type", None) == "cuda":
            raise Unsupported(f"{function}: a mask reads an array on {device}; expected it on the host, where plans are made")
    builder = Builder(function)
    struct_type = _abi.ShardArgs
    at = builder.add(_abi.sized(struct_type, **numbers))
    builder.point(at + offset(struct_type, "forward"), add_forward(builder, arguments, function))
    template = builder.done()
    return template.bind(arguments.tensors, arguments.words), (template, arguments)


def context_parallel_plan(
    q: Spec,
    k: Spec,
    v: Spec | None = None,
    *,
    world_size: int,
    scheme: str = "all_gather",
    tile_q: int = 128,
    tile_kv: int = 128,
    chunk: int = 0,
    head_parts: int = 0,
    head_ranks: int = 0,
    causal: bool = False,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    mask_mod: MaskMod | None = None,
    segment_ids: Any = None,
    cu_seqlens: Array | None = None,
    layout: str = "bshd",
) -> ShardPlan:
    """Deals the tokens of a sequence to ranks: equally many to each, and even work by the tiles that the mask leaves.

    Parameters
    ----------
    q : array or TensorSpec, [batch, seqlen, num_heads_q, head_dim_qk]
        Of the whole sequence; its shape and dtype alone are read. seqlen is a multiple of `world_size`.
    k : array or TensorSpec, [batch, seqlen, num_heads_kv, head_dim_qk]
        The same.
    v : array or TensorSpec, [batch, seqlen, num_heads_kv, head_dim_v], optional
        As k unless given.
    world_size : int
        Ranks.
    scheme : str
        "all_gather", "head_group_all_gather", "ring", "ulysses", "hybrid" or "needed_only".
    tile_q, tile_kv : int
        Queries and keys of a tile, in which work and needs are counted.
    chunk : int
        Tokens that stay together; 0: 16 chunks a rank.
    head_parts : int
        "head_group_all_gather": parts of the kv heads; 0: as many as divide them, up to 4.
    head_ranks : int
        "hybrid": ranks that share a group's heads; 0: as many as divide ranks and kv heads.
    causal, align, window, mask, mask_mod, segment_ids, layout
        As `attention`'s; arrays are on the host.
    cu_seqlens : array, [num_sequences + 1] i32 or i64, optional
        Makes q, k and v packed, [total, heads, head_dim], queries and keys alike; read here. total is a multiple of `world_size`; tokens
        behind the last sequence see nothing. Programs speak of positions, lengths and numbers of sequences.

    Returns
    -------
    ShardPlan

    Raises
    ------
    InvalidArgument
        Lengths differ or do not divide, or the scheme cannot divide the heads; as `attention` for the others.
    Unsupported
        A mask reads an array on a GPU.

    Examples
    --------
    >>> shards = fovea.parallel.context_parallel_plan(q, k, v, world_size=8, mask=fovea.causal() & fovea.documents(ids))
    """
    function = "context_parallel_plan"
    if scheme not in SCHEMES:
        raise InvalidArgument(f"{function}: scheme is {scheme!r}; expected one of {', '.join(map(repr, SCHEMES))}")
    numbers = {
        "world_size": world_size, "scheme": SCHEMES.index(scheme), "tile_q": tile_q, "tile_kv": tile_kv, "chunk": chunk,
        "head_parts": head_parts, "head_ranks": head_ranks,
    }  # fmt: skip
    words = {
        "causal": causal, "align": align, "window": window, "mask": mask, "mask_mod": mask_mod, "segment_ids": segment_ids,
        "layout": layout,
    }  # fmt: skip
    packed = None
    if cu_seqlens is not None:
        q, k, v = (_as_one_sequence(x, name) for name, x in (("q", q), ("k", k), ("v", v)))
        packed = _packed_places(cu_seqlens, q.shape[1])
        words = _packed_words(words, packed)
    bound, _kept = _bound(function, q, k, v, numbers, words)
    return ShardPlan(bound, words, packed)


class Forecast(NamedTuple):
    """What a scheme is predicted to cost: nothing is run.

    Attributes
    ----------
    scheme : str
    refusal : str
        Why it cannot serve the problem; "" where it can.
    balance : float
    forward_bytes, backward_bytes, kv_bytes : int
        Of the rank that has most.
    forward_ms, backward_ms : float
    """

    scheme: str
    refusal: str = ""
    balance: float = 1.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    kv_bytes: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0


def forecast(
    q: Spec,
    k: Spec,
    v: Spec | None = None,
    *,
    world_size: int,
    tflops: float = 650.0,
    gigabytes_per_second: float = 250.0,
    tile_q: int = 128,
    tile_kv: int = 128,
    causal: bool = False,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    mask_mod: MaskMod | None = None,
    segment_ids: Any = None,
    layout: str = "bshd",
) -> list[Forecast]:
    """Bytes, balance and predicted time of every scheme.

    Parameters
    ----------
    q, k, v, world_size, tile_q, tile_kv, causal, align, window, mask, mask_mod, segment_ids, layout
        As `context_parallel_plan`'s.
    tflops : float
        What a rank computes: 650 is bf16 attention of long sequences on an H200.
    gigabytes_per_second : float
        What it receives: 250 is an all-gather of large tensors over NVLink.

    Returns
    -------
    list of Forecast

    Raises
    ------
    InvalidArgument
        As `context_parallel_plan`, and for speeds that are not above 0.
    Unsupported
        A mask reads an array on a GPU.
    """
    function = "forecast"
    for name, value in (("tflops", tflops), ("gigabytes_per_second", gigabytes_per_second)):
        if not value > 0:
            raise InvalidArgument(f"{function}: {name} is {value}; expected above 0")
    numbers = {"world_size": world_size, "tile_q": tile_q, "tile_kv": tile_kv}
    words = {
        "causal": causal, "align": align, "window": window, "mask": mask, "mask_mod": mask_mod, "segment_ids": segment_ids,
        "layout": layout,
    }  # fmt: skip
    bound, _kept = _bound(function, q, k, v, numbers, words)
    text = take_text(
        "fovea_forecast_context_parallel", bound.address, 1e12 * tflops, 1e9 * gigabytes_per_second, _abi.JSON
    )
    return [Forecast(**page) for page in json.loads(text)]


__all__ = ["Forecast", "RankLoad", "ShardPlan", "Transfer", "context_parallel_plan", "forecast"]
