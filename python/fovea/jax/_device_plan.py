"""A plan of context parallelism as a pytree: what differs from plan to plan are arrays, so that programs need not be compiled anew."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._joined import mask_program
from .._programs import Program, mask_mod
from ..errors import InvalidArgument
from ..parallel import PackedPlaces, Range, ShardPlan
from ._attention import _with_arrays

Array = Any


class MaskText(NamedTuple):
    """A mask without its arrays."""

    formula: str
    tensor_names: tuple[str, ...]
    scalars: tuple[tuple[str, int | float], ...]


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """A `ShardPlan` for programs of JAX, made by `device_plan`: a pytree, whose structure is what is compiled.

    Attributes
    ----------
    table : array, [world_size, seqlen // world_size] i32
        The tokens of each rank.
    inverse : array, [seqlen] i32
        Where each token is when ranks' tokens stand one behind the other.
    mask_tensors : tuple of array
        What the mask reads beside ids of documents.
    segment_ids : tuple of array, or None
        [batch, seqlen] i32 of queries, and of keys. They are taken by place, for kernels know masks of documents by their form.
    sent : tuple of array, [world_size, count] i32
        "needed_only": for each of `distances` which of its tokens a rank sends to the one that is so far behind it.
    order, kv_places : array, [world_size, kept] i32
        "needed_only": which of the keys that arrive a rank attends to, in the order of the sequence, and their positions; `seqlen` for
        what fills up.
    packed : PackedPlaces or None
        Of a plan of cu_seqlens: what programs of sequences read of each of all tokens.
    scheme : str
    seqlen, num_heads_q, num_heads_kv, head_ranks, head_parts : int
        As `ShardPlan`'s.
    q_heads, kv_heads : tuple of int
        Heads of the ranks that share rows, one rank's behind the other's.
    is_in_order : bool
        Whether ranks' tokens, one rank's behind the other's, are the sequence.
    keeps_fours : bool
        As `ShardPlan`'s.
    distances : tuple of int
    mask : MaskText or None
    """

    table: Array
    inverse: Array
    mask_tensors: tuple[Array, ...]
    segment_ids: tuple[Array, Array] | None
    sent: tuple[Array, ...]
    order: Array
    kv_places: Array
    packed: PackedPlaces | None
    scheme: str
    seqlen: int
    num_heads_q: int
    num_heads_kv: int
    head_ranks: int
    head_parts: int
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    is_in_order: bool
    keeps_fours: bool
    distances: tuple[int, ...]
    mask: MaskText | None

    @property
    def world_size(self) -> int:
        """Ranks, which the devices along an axis are."""
        return int(self.table.shape[0])

    def mask_program(self) -> Program | None:
        """The mask over its arrays, but for documents."""
        if self.mask is None:
            return None
        return mask_mod(self.mask.formula, **dict(zip(self.mask.tensor_names, self.mask_tensors)), **dict(self.mask.scalars))

    def _taken(self, x: Array, order: Array, dim: int) -> Array:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.seqlen:
            raise InvalidArgument(f"DevicePlan: x has shape {x.shape}; expected {self.seqlen} tokens in dimension {dim}")
        return x if self.is_in_order else jnp.take(x, order, axis=dim, unique_indices=True, mode="clip")

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
        return self._taken(x, self.table.reshape(-1), dim)

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
        return self._taken(x, self.inverse, dim)


_DATA = ("table", "inverse", "mask_tensors", "segment_ids", "sent", "order", "kv_places", "packed")
jax.tree_util.register_dataclass(
    DevicePlan, data_fields=_DATA, meta_fields=tuple(field.name for field in dataclasses.fields(DevicePlan) if field.name not in _DATA)
)


def _tokens(ranges: list[Range]) -> Any:
    return np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in ranges] or [np.empty(0, np.int32)])


def _exchanges(shards: ShardPlan, table: Any) -> dict[str, Any]:
    """Of "needed_only".

    Ranks need different numbers of keys from one another, but messages of one exchange have one size: there is an exchange for each
    distance between ranks, as large as its largest message, and none where nobody needs anything.
    """
    size, length = table.shape
    owner_of, local_of = (np.empty(shards.seqlen, np.int64) for _ in range(2))
    owner_of[table.reshape(-1)], local_of[table.reshape(-1)] = divmod(np.arange(shards.seqlen), length)
    needed = [_tokens(shards.needed_kv(rank)) for rank in range(size)]
    sent_by_distance: dict[int, Any] = {}
    arrived: list[list[Any]] = [[] for _ in range(size)]
    for distance in range(size):
        of_rank = [tokens[owner_of[tokens] == (rank - distance) % size] for rank, tokens in enumerate(needed)]
        largest = max(map(len, of_rank))
        if distance == 0:
            largest = max(largest, 1)  # a call has a key, if one that nobody sees
        if largest == 0:
            continue
        sent = sent_by_distance[distance] = np.zeros((size, largest), np.int32)
        for rank, tokens in enumerate(of_rank):
            sent[(rank - distance) % size, : len(tokens)] = local_of[tokens]
            arrived[rank].append(np.pad(tokens, (0, largest - len(tokens)), constant_values=shards.seqlen))
    every = np.array([np.concatenate(parts) for parts in arrived])
    # What fills up comes last.
    order = np.argsort(every, axis=1, kind="stable")[:, : max(1, *map(len, needed))].astype(np.int32)
    kv_places = np.take_along_axis(every, order, 1).astype(np.int32)
    return {"sent": tuple(sent_by_distance.values()), "distances": tuple(sent_by_distance), "order": order, "kv_places": kv_places}


def device_plan(shards: ShardPlan) -> DevicePlan:
    """A plan as a pytree, for programs that are compiled once for many plans.

    Plans of one scheme, of equal lengths, heads and masks but for the contents of their arrays, such as segment ids, have one structure:
    ``jax.jit`` compiles once for all of them. With "needed_only" the sizes of messages belong to it, too.

    Parameters
    ----------
    shards : ShardPlan

    Returns
    -------
    DevicePlan

    Raises
    ------
    InvalidArgument
        `shards` is no plan.

    Examples
    --------
    >>> shards = fovea.jax.device_plan(fovea.parallel.context_parallel_plan(spec, spec, world_size=8, causal=True, segment_ids=ids))
    >>> loss = jax.jit(train_step)(weights, tokens, shards)
    """
    if not isinstance(shards, ShardPlan):
        raise InvalidArgument(f"device_plan: shards is a {type(shards).__name__}; expected a ShardPlan")
    packed = None if shards.packed is None else PackedPlaces(*(np.asarray(x, np.int32) for x in shards.packed))
    table = np.asarray(shards.permutation(), np.int32).reshape(shards.world_size, -1)
    none = np.zeros((shards.world_size, 0), np.int32)
    exchanges: dict[str, Any] = {"sent": (), "distances": (), "order": none, "kv_places": none}
    if shards.scheme == "needed_only":
        exchanges = _exchanges(shards, table)
    program = _with_arrays(mask_program({**shards.mask_words, "segment_ids": None}))
    segment_ids = shards.mask_words["segment_ids"]
    if segment_ids is not None:
        of_q, of_kv = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        segment_ids = (np.asarray(of_q, np.int32), np.asarray(of_kv, np.int32))
    mask, tensors = None, ()
    if program is not None:
        scalars = tuple((name, program.captures[name]) for name in program.scalar_names)
        mask, tensors = MaskText(program.text, program.tensor_names, scalars), program.tensors
    partners = range(shards.head_ranks)
    q_heads, kv_heads = (tuple(head for rank in partners for head in range(*of(rank))) for of in (shards.q_heads, shards.kv_heads))
    return DevicePlan(
        table=table, inverse=np.argsort(table.reshape(-1)).astype(np.int32), mask_tensors=tensors, segment_ids=segment_ids, scheme=shards.scheme, seqlen=shards.seqlen, num_heads_q=shards.num_heads_q,
        num_heads_kv=shards.num_heads_kv, head_ranks=shards.head_ranks, head_parts=shards.head_parts, q_heads=q_heads, kv_heads=kv_heads,
        is_in_order=bool((table.reshape(-1) == np.arange(shards.seqlen)).all()), keeps_fours=shards.keeps_fours, mask=mask, packed=packed, **exchanges,
    )  # fmt: skip
