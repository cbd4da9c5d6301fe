"""A plan of context parallelism, run by the devices along an axis of a mesh: exchanges, calls on what a device has, and their gradients.

All devices run one program, so that what differs between them is looked up by the device's index. What devices add up is added in the
order of ranks, in f32, so that no bits depend on who was first.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .. import _abi
from .._forward import Dropout, ScoreMod, _number
from .._joined import dropout_of_ranks, places_in_whole, score_program
from .._programs import Program, documents, mask_mod
from ..errors import InvalidArgument
from ..parallel import ShardPlan
from . import _rows
from ._attention import _traced, _with_arrays, _with_seeds, array_of
from ._device_plan import DevicePlan, device_plan
from ._primitives import LSE_NAME, OUT_NAME
from ._rows import Gradients, Rows
from ._sharding import alike

Array = Any
_FUNCTION = "context_parallel_attention"


# ---- Ranks ----


class _Ranks:
    """The devices along an axis. Tokens are the second dimension."""

    def __init__(self, axis_name: str, size: int) -> None:
        self.axis_name, self.size = axis_name, size
        self.rank = jax.lax.axis_index(axis_name)

    def own(self, table: Any) -> Array:
        """This device's row of a table that has one for each."""
        return jnp.asarray(table)[self.rank]

    def gather(self, x: Array) -> Array:
        """[batch, n, ...] of every rank as [batch, size * n, ...]."""
        return jax.lax.all_gather(x, self.axis_name, axis=1, tiled=True)

    def sum_of_parts(self, x: Array) -> Array:
        """[batch, size * n, ...], the r-th part for rank r, as the sum [batch, n, ...] of what all ranks have for this one."""
        parts = x.reshape(x.shape[0], self.size, -1, *x.shape[2:])
        return _sum(jnp.unstack(jax.lax.all_to_all(parts, self.axis_name, 1, 1, tiled=True), axis=1))

    def pass_on(self, x: Array, distance: int) -> Array:
        """To the rank that is `distance` further, from the one that is as far before."""
        return jax.lax.ppermute(x, self.axis_name, [(rank, (rank + distance) % self.size) for rank in range(self.size)])


def _sum(parts: Sequence[Array]) -> Array:
    """In the order given."""
    return functools.reduce(operator.add, parts)


# ---- What a call says ----


class _Features(NamedTuple):
    """What a call says beside tokens and the plan; programs over this device's arrays."""

    score: Program | None
    mask: Program | None
    scale: float | None
    softcap: float | None
    dropout: Dropout | None
    batch_axis: str | None
    deterministic: bool

    def differentiable(self) -> tuple[str, ...]:
        """Names of float arrays that scores read."""
        if self.score is None:
            return ()
        return tuple(name for name, x in zip(self.score.tensor_names, self.score.tensors) if jnp.issubdtype(x.dtype, jnp.floating))


class _Engine:
    """One scheme, within one call."""

    def __init__(self, shards: DevicePlan, ranks: _Ranks, features: _Features) -> None:
        self.shards, self.ranks, self.features = shards, ranks, features

    def words(
        self, batch: int, num_heads: int, q_places: Array | None, kv_places: Array | None, heads: tuple[Any, Any], sinks: Array | None
    ) -> dict[str, Any]:
        """Keywords of a call on these rows, keys and so many query heads, of which programs see the index in the whole problem. `heads` are
        the first query head and the first kv head, None for those that are the first anyway."""
        firsts: dict[str, Any] = dict(zip(("q_head", "kv_head"), heads))
        if self.features.batch_axis is not None:
            firsts["batch"] = jax.lax.axis_index(self.features.batch_axis) * batch
        firsts = {variable: None if first is None else jnp.asarray(first, jnp.int32) for variable, first in firsts.items()}
        places, captures = places_in_whole(q_places, kv_places, self.shards.seqlen, firsts)

        def placed(program: Program | None) -> Program | None:
            return program if program is None or not places else program.placed(places, captures)

        features, dropout = self.features, self.features.dropout
        masks = [x for x in (placed(features.mask), self._documents(batch, q_places, kv_places)) if x is not None]
        if dropout is not None:
            firsts = {variable: 0 if first is None else first for variable, first in firsts.items()}
            whole = jnp.arange(self.shards.seqlen, dtype=jnp.int32)
            lists = (
                jnp.arange(batch, dtype=jnp.int32) + firsts.get("batch", 0), jnp.arange(num_heads, dtype=jnp.int32) + firsts["q_head"],
                *(whole if x is None else x for x in (q_places, kv_places)),
            )  # fmt: skip
            dropout = dropout._replace(places=jnp.concatenate(alike(lists)))
        return {
            "scale": features.scale, "softcap": features.softcap, "mask_mod": functools.reduce(operator.and_, masks) if masks else None,
            "score_mod": placed(features.score), "sinks": sinks, "dropout": dropout, "deterministic": features.deterministic,
        }  # fmt: skip

    def _documents(self, batch: int, q_places: Array | None, kv_places: Array | None) -> Program | None:
        """The plan's documents, by ids of these rows and keys; what has no place in the sequence is in none."""
        if self.shards.segment_ids is None:
            return None

        def at(ids: Array, places: Array | None) -> Array:
            ids = jnp.asarray(ids)
            if self.features.batch_axis is not None:
                ids = jax.lax.dynamic_slice_in_dim(ids, jax.lax.axis_index(self.features.batch_axis) * batch, batch)
            return ids if places is None else jnp.take(ids, places, axis=1, mode="fill", fill_value=-1)

        return documents(*(at(ids, places) for ids, places in zip(self.shards.segment_ids, (q_places, kv_places))))

    def differentiate(self, rows: Rows, k: Array, v: Array, words: dict[str, Any]) -> Gradients:
        return _rows.differentiate(_FUNCTION, rows, k, v, words, ("q", "k", "v", "sinks"), self.features.differentiable())

    def forward(self, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
        raise NotImplementedError

    def backward(self, rows: Rows, k: Array, v: Array, sinks: Array | None) -> Gradients:
        raise NotImplementedError


class _Gathering(_Engine):
    """all_gather and head_group_all_gather: whole keys, in parts of the heads, which XLA may gather while it attends to another."""

    def __init__(self, shards: DevicePlan, ranks: _Ranks, features: _Features, is_invariant: bool) -> None:
        super().__init__(shards, ranks, features)
        self._is_invariant = is_invariant
        self._own_places = ranks.own(shards.table)

    def _whole(self, x: Array) -> Array:
        """The sequence in its own order: no bits then depend on who had which token."""
        return self.shards.restore(self.ranks.gather(x))

    def _keys(self, k: Array, v: Array) -> Iterator[tuple[slice, tuple[Any, Any], Array, Array]]:
        """Each part of the heads: its query heads, its first heads, its keys and values."""
        num_q, num_kv, count = self.shards.num_heads_q, self.shards.num_heads_kv, self.shards.head_parts
        for part in range(count):
            (first_q, end_q), (first_kv, end_kv) = ((part * num // count, (part + 1) * num // count) for num in (num_q, num_kv))
            firsts = (first_q or None, first_kv or None)
            yield slice(first_q, end_q), firsts, self._whole(k[:, :, first_kv:end_kv]), self._whole(v[:, :, first_kv:end_kv])

    def _words(self, batch: int, firsts: tuple[Any, Any], part: slice, sinks: Array | None) -> dict[str, Any]:
        own = None if sinks is None else sinks[part]
        return self.words(batch, part.stop - part.start, self._own_places, None, firsts, own)

    def forward(self, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
        outs, lses = [], []
        for part, firsts, whole_k, whole_v in self._keys(k, v):
            out, lse = _rows.attend(_FUNCTION, q[:, :, part], whole_k, whole_v, self._words(len(q), firsts, part, sinks))
            outs.append(out)
            lses.append(lse)
        return jnp.concatenate(outs, 2), jnp.concatenate(lses, 1)

    def backward(self, rows: Rows, k: Array, v: Array, sinks: Array | None) -> Gradients:
        names = self.features.differentiable()
        wanted = ("q", "sinks") if self._is_invariant else ("q", "k", "v", "sinks")
        made = []
        for part, firsts, whole_k, whole_v in self._keys(k, v):
            words = self._words(len(k), firsts, part, sinks)
            made.append(_rows.differentiate(_FUNCTION, _of_heads(rows, part), whole_k, whole_v, words, wanted, names))
        dsinks = None if sinks is None else jnp.concatenate([x.dsinks for x in made])
        captured = {name: _sum([x.captured[name] for x in made]) for name in names}
        dq = jnp.concatenate([x.dq for x in made], 2)
        if self._is_invariant:
            dk, dv = self._by_all_rows(rows, k, v, sinks)
        else:
            dk, dv = (self._returned(jnp.concatenate(parts, 2)) for parts in ([x.dk for x in made], [x.dv for x in made]))
        return Gradients(dq, dk, dv, dsinks, captured)

    def _by_all_rows(self, rows: Rows, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
        """Gradients by this rank's own keys, of the rows of all ranks in their own order: each sum is one call's."""

        def whole_lse(x: Array) -> Array:
            return self._whole(x.transpose(0, 2, 1)).transpose(0, 2, 1)

        dlse = None if rows.dlse is None else whole_lse(rows.dlse)
        everything = Rows(self._whole(rows.q), self._whole(rows.out), whole_lse(rows.lse), self._whole(rows.dout), dlse)
        words = self.words(len(k), self.shards.num_heads_q, None, self._own_places, (None, None), sinks)
        made = _rows.differentiate(_FUNCTION, everything, k, v, words, ("k", "v"))
        return made.dk, made.dv

    def _returned(self, x: Array) -> Array:
        """The sum of what every rank has for this rank's tokens."""
        return self.ranks.sum_of_parts(self.shards.permute(x))


def _of_heads(rows: Rows, part: slice) -> Rows:
    dlse = None if rows.dlse is None else rows.dlse[:, part]
    return Rows(rows.q[:, :, part], rows.out[:, :, part], rows.lse[:, part], rows.dout[:, :, part], dlse)


class _NeededOnly(_Engine):
    """Tiles of keys that a device's rows see; sums of their gradients go back to those who have them."""

    def __init__(self, shards: DevicePlan, ranks: _Ranks, features: _Features) -> None:
        if shards.segment_ids is None:  # keys that fill up have no place in the sequence, and are in no document
            is_there = mask_mod("kv_idx < seqlen_kv")
            features = features._replace(mask=is_there if features.mask is None else features.mask & is_there)
        super().__init__(shards, ranks, features)
        self._sent = {distance: ranks.own(sent) for distance, sent in zip(shards.distances, shards.sent)}
        self._own_places, self._order, self._kv_places = map(ranks.own, (shards.table, shards.order, shards.kv_places))

    def _fetched(self, x: Array) -> Array:
        arrived = [self.ranks.pass_on(jnp.take(x, places, axis=1, mode="clip"), distance) for distance, places in self._sent.items()]
        return jnp.take(jnp.concatenate(arrived, 1), self._order, axis=1, mode="clip")

    def _returned(self, x: Array, like: Array) -> Array:
        """The sum of what others have for this rank's keys; of what filled up it is 0."""
        sizes = [places.shape[0] for places in self._sent.values()]
        arrived = jnp.zeros((x.shape[0], sum(sizes), *x.shape[2:]), x.dtype).at[:, self._order].set(x, unique_indices=True)
        ends = np.cumsum(sizes)[:-1]
        total = jnp.zeros(like.shape, x.dtype)
        for (distance, places), part in zip(self._sent.items(), jnp.split(arrived, ends, axis=1)):
            total = total.at[:, places].add(self.ranks.pass_on(part, -distance))
        return total

    def _words(self, batch: int, sinks: Array | None) -> dict[str, Any]:
        return self.words(batch, self.shards.num_heads_q, self._own_places, self._kv_places, (None, None), sinks)

    def forward(self, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
        return _rows.attend(_FUNCTION, q, self._fetched(k), self._fetched(v), self._words(len(q), sinks))

    def backward(self, rows: Rows, k: Array, v: Array, sinks: Array | None) -> Gradients:
        made = self.differentiate(rows, self._fetched(k), self._fetched(v), self._words(len(k), sinks))
        return made._replace(dk=self._returned(made.dk, k), dv=self._returned(made.dv, v))


class _HeadsAndRing(_Engine):
    """ulysses, ring and hybrid: ranks of a group exchange tokens for heads, keys travel from group to group.

    A ring has groups of one rank, ulysses one group. Keys of a group are those of its tokens, of this rank's heads.
    """

    def __init__(self, shards: DevicePlan, ranks: _Ranks, features: _Features) -> None:
        super().__init__(shards, ranks, features)
        self._head_ranks = shards.head_ranks
        self._num_groups = ranks.size // shards.head_ranks
        self._group = ranks.rank // shards.head_ranks
        self._heads = {"q": np.array(shards.q_heads), "kv": np.array(shards.kv_heads)}

    # Tokens for heads, and back.

    def _exchange(self, x: Array, split: int, joined: int) -> Array:
        groups = [list(range(first, first + self._head_ranks)) for first in range(0, self.ranks.size, self._head_ranks)]
        return jax.lax.all_to_all(
            x, self.ranks.axis_name, split, joined, axis_index_groups=groups if len(groups) > 1 else None, tiled=True
        )

    def _to_heads(self, x: Array, heads: str) -> Array:
        """[batch, own tokens, all heads, ...] to [batch, tokens of the group, this rank's heads, ...]."""
        if self._head_ranks == 1:
            return x
        return self._exchange(jnp.take(x, self._heads[heads], axis=2, mode="clip"), 2, 1)

    def _to_tokens(self, x: Array, heads: str) -> Array:
        """The way back; a kv head that several ranks computed with is summed, in their order."""
        if self._head_ranks == 1:
            return x
        num_heads = self.shards.num_heads_q if heads == "q" else self.shards.num_heads_kv
        made = self._exchange(x, 1, 2)
        parts = made.reshape(*made.shape[:2], num_heads, -1, *made.shape[3:])
        return _sum(jnp.unstack(parts, axis=3))

    def _lse_to_heads(self, lse: Array) -> Array:
        return self._to_heads(lse.transpose(0, 2, 1), "q").transpose(0, 2, 1)

    def _own_heads(self, heads: str) -> Array:
        """Indices of this rank's heads."""
        return jnp.asarray(self._heads[heads].reshape(self._head_ranks, -1))[self.ranks.rank % self._head_ranks]

    def _words(self, batch: int, step: int, sinks: Array | None) -> dict[str, Any]:
        """Of the keys that arrive in a step, those of a group so far before this one."""
        q_places = kv_places = None
        if self._num_groups > 1:
            table = jnp.asarray(self.shards.table).reshape(self._num_groups, -1)
            q_places, kv_places = table[self._group], table[(self._group - step) % self._num_groups]
        firsts = (None, None) if self._head_ranks == 1 else (self._own_heads("q")[0], self._own_heads("kv")[0])
        # A sink joins one partial result, and with it the whole.
        own = None if sinks is None or step else sinks[self._own_heads("q")]
        return self.words(batch, self.shards.num_heads_q // self._head_ranks, q_places, kv_places, firsts, own)

    def _next(self, *tensors: Array) -> list[Array]:
        """From the group before, and to the next one."""
        return [self.ranks.pass_on(x, self._head_ranks) for x in tensors]

    def forward(self, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
        batch, dtype = len(q), q.dtype
        q, k, v = self._to_heads(q, "q"), self._to_heads(k, "kv"), self._to_heads(v, "kv")
        # Partial results are rounded once, at the end.
        out, lse = _rows.attend(_FUNCTION, q, k, v, self._words(batch, 0, sinks), dtype if self._num_groups == 1 else jnp.float32)
        for step in range(1, self._num_groups):
            k, v = self._next(k, v)
            made = _rows.attend(_FUNCTION, q, k, v, self._words(batch, step, sinks), jnp.float32)
            out, lse = _merged(out, lse, *made)
        lse = self._to_tokens(lse.transpose(0, 2, 1), "q").transpose(0, 2, 1)
        return self._to_tokens(out.astype(dtype), "q"), lse

    def backward(self, rows: Rows, k: Array, v: Array, sinks: Array | None) -> Gradients:
        batch = len(k)
        q, out, dout = (self._to_heads(x, "q") for x in (rows.q, rows.out, rows.dout))
        here = Rows(q, out, self._lse_to_heads(rows.lse), dout, None if rows.dlse is None else self._lse_to_heads(rows.dlse))
        k, v = self._to_heads(k, "kv"), self._to_heads(v, "kv")
        first = self.differentiate(here, k, v, self._words(batch, 0, sinks))
        made, sums = [first], [first.dk, first.dv]
        for step in range(1, self._num_groups):
            k, v, *sums = self._next(k, v, *sums)
            made.append(self.differentiate(here, k, v, self._words(batch, step, sinks)))
            sums = [sums[0] + made[-1].dk, sums[1] + made[-1].dv]
        if self._num_groups > 1:
            sums = self._next(*sums)  # one step more, home
        dsinks = first.dsinks
        if sinks is not None and dsinks is not None:
            dsinks = jnp.zeros_like(sinks).at[self._own_heads("q")].set(dsinks, unique_indices=True)
        dk, dv = (self._to_tokens(x, "kv") for x in sums)
        captured = {name: _sum([x.captured[name] for x in made]) for name in first.captured}
        return Gradients(self._to_tokens(_sum([x.dq for x in made]), "q"), dk, dv, dsinks, captured)


def _merged(out: Array, lse: Array, other_out: Array, other_lse: Array) -> tuple[Array, Array]:
    """The states of two parts of the keys as one."""
    whole = jnp.logaddexp(lse, other_lse)

    def weighted(part: Array, of_part: Array) -> Array:
        weight = jnp.where(of_part == -jnp.inf, 0, jnp.exp(of_part - whole))
        return part * weight.transpose(0, 2, 1)[..., None]

    return weighted(out, lse) + weighted(other_out, other_lse), whole


def _engine_of(shards: DevicePlan, ranks: _Ranks, features: _Features, deterministic: bool) -> _Engine:
    if shards.scheme in ("all_gather", "head_group_all_gather"):
        return _Gathering(shards, ranks, features, deterministic)
    if shards.scheme == "needed_only":
        return _NeededOnly(shards, ranks, features)
    return _HeadsAndRing(shards, ranks, features)


# ---- The call ----


def _check_shapes(shards: DevicePlan, axis_name: str, arrays: Sequence[Array]) -> None:
    try:
        size = int(jax.lax.psum(1, axis_name))
    except NameError:
        raise InvalidArgument(f"{_FUNCTION}: no axis {axis_name!r} here; expected a call within jax.shard_map over a mesh that has it") from None
    if size != shards.world_size:
        raise InvalidArgument(f"{_FUNCTION}: axis {axis_name!r} has {size} devices; expected {shards.world_size}, those of the plan")
    num_tokens = shards.seqlen // shards.world_size
    leading, rank = ("[batch, ", 4) if shards.packed is None else ("[", 3)
    for name, x, num_heads in zip("qkv", arrays, (shards.num_heads_q, shards.num_heads_kv, shards.num_heads_kv)):
        if x.ndim != rank or x.shape[-3:-1] != (num_tokens, num_heads):
            raise InvalidArgument(
                f"{_FUNCTION}: {name} has shape {x.shape}; expected {leading}{num_tokens}, {num_heads}, head_dim], this device's tokens"
            )


def _packed_score(shards: DevicePlan, score: Program | None, bias: Array | None, batch_axis: str | None) -> Program | None:
    """Scores of sequences for all packed tokens as one."""
    if shards.packed is None:
        return score
    if bias is not None:
        raise InvalidArgument(f"{_FUNCTION}: bias is dense and sequences are packed; expected a score_mod of their positions")
    if batch_axis is not None:
        raise InvalidArgument(f"{_FUNCTION}: batch_axis is {batch_axis!r} and sequences are packed; expected none, tokens of all sequences are dealt as one's")
    return None if score is None else shards.packed.placed(score)


def context_parallel_attention(
    q: Array,
    k: Array,
    v: Array,
    shards: ShardPlan | DevicePlan,
    *,
    axis_name: str,
    batch_axis: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Array | None = None,
    dropout: Dropout | tuple[Any, ...] | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> Any:
    """Attention of a sequence whose tokens lie on the devices along an axis of a mesh, by a plan; called within `jax.shard_map`.

    The mask is the plan's. Positions and heads in masks and scores are those of the whole sequence. Differentiable once, in reverse mode,
    by q, k, v, sinks and float arrays that scores read; gradients by what devices share are summed by `jax.shard_map`.

    Parameters
    ----------
    q : array, [batch, seqlen // world_size, num_heads_q, head_dim_qk], f32, f16 or bf16
        This device's tokens, of a sequence in the order of the plan: ``shards.permute(whole)``. Of packed sequences, where the plan was
        made with cu_seqlens: [total // world_size, num_heads_q, head_dim_qk], and so k, v, out and lse.
    k : array, [batch, seqlen // world_size, num_heads_kv, head_dim_qk]
    v : array, [batch, seqlen // world_size, num_heads_kv, head_dim_v]
    shards : ShardPlan or DevicePlan
        Of `fovea.parallel.context_parallel_plan`: scheme, ranks and mask; a constant of the compiled program. `device_plan` makes an
        argument of it, so that other documents are not compiled anew.
    axis_name : str
        The axis of the mesh, of as many devices as the plan has ranks.
    batch_axis : str, optional
        The axis that the batch is split over, where masks or scores ask for the batch.
    scale, softcap, bias, alibi, score_mod, sinks
        As `fovea.jax.attention`'s; arrays are whole on every device.
    dropout : Dropout or (p, seed), optional
        As `fovea.jax.attention`'s, with one seed on all devices: every scheme drops what one device does. Ranges of keys of the plan
        begin and end at multiples of 4. `batch_axis` names the axis that the batch is split over, if any.
    return_lse : bool
        Whether `lse` is returned, too.
    deterministic : bool
        With "all_gather", "head_group_all_gather" and "ulysses", bits do not depend on the number of ranks: gradients by k and v are
        computed from all rows by who has them. False: partial sums are exchanged in f32 and GPUs sum gradients in any order, which is
        less work.

    Returns
    -------
    out : array, [batch, seqlen // world_size, num_heads_q, head_dim_v]
        Of this device's tokens. For policies of jax.checkpoint its name is "fovea_out".
    lse : array, [batch, num_heads_q, seqlen // world_size] f32
        With `return_lse`; "fovea_lse".

    Raises
    ------
    InvalidArgument, Unsupported
        Where the call is traced: shapes, axis and plan do not go together, or as `fovea.jax.attention`.

    Examples
    --------
    >>> shards = fovea.parallel.context_parallel_plan(spec, spec, world_size=8, causal=True)
    >>> attend = functools.partial(fovea.jax.context_parallel_attention, shards=shards, axis_name="context")
    >>> out = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))(q, k, v)
    """
    arrays = [array_of(x, name, _FUNCTION) for name, x in zip("qkv", (q, k, v))]
    plan = shards if isinstance(shards, DevicePlan) else device_plan(shards)
    _check_shapes(plan, axis_name, arrays)
    scale, softcap = (None if x is None else _number(x, name, _FUNCTION) for name, x in (("scale", scale), ("softcap", softcap)))
    named = (("bias", bias), ("alibi", alibi), ("sinks", sinks))
    bias, alibi, sinks = (None if x is None else array_of(x, name, _FUNCTION) for name, x in named)
    score = score_program(bias, alibi, _traced(score_mod, _abi.SCORE_MOD))
    score = _with_arrays(_packed_score(plan, score, bias, batch_axis))
    is_packed = plan.packed is not None
    drop = dropout_of_ranks(_FUNCTION, _with_seeds(dropout, _FUNCTION), keeps_fours=plan.keeps_fours, is_packed=is_packed)

    def engine_of(plan: DevicePlan, of_score: tuple[Array, ...], seeds: tuple[Array, ...]) -> _Engine:
        here = score and score._rebound(of_score)
        drops = drop and drop._replace(**dict(zip(("seed", "offset"), seeds)))
        features = _Features(here, _with_arrays(plan.mask_program()), scale, softcap, drops, batch_axis, deterministic)
        return _engine_of(plan, _Ranks(axis_name, plan.world_size), features, deterministic)

    def fwd(q: Array, k: Array, v: Array, sinks: Array, of_score: Any, seeds: Any, plan: DevicePlan) -> tuple[Any, Any]:
        out, lse = engine_of(plan, of_score, seeds).forward(q, k, v, sinks)
        out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
        return (out, lse) if return_lse else out, (q, k, v, sinks, of_score, seeds, plan, out, lse)

    def bwd(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        q, k, v, sinks, of_score, seeds, plan, out, lse = saved
        dout, dlse = cotangents if return_lse else (cotangents, None)
        made = engine_of(plan, of_score, seeds).backward(Rows(q, out, lse, dout, dlse), k, v, sinks)
        plain = [x.astype(like.dtype) for x, like in ((made.dq, q), (made.dk, k), (made.dv, v))]
        of_captured = tuple(made.captured.get(name) for name in (() if score is None else score.tensor_names))
        return (*plain, made.dsinks, of_captured, None, None)

    attend = jax.custom_vjp(lambda *args: fwd(*args)[0])
    attend.defvjp(fwd, bwd)
    of_score = () if score is None else score.tensors
    of_sinks = () if sinks is None else (sinks.astype(jnp.float32),)
    q, k, v, *rest = alike((*arrays, *of_sinks, *of_score))
    sinks = rest.pop(0) if of_sinks else None
    seeds = () if drop is None or isinstance(drop.seed, int) else (drop.seed, drop.offset)
    if is_packed:
        q, k, v = (x[None] for x in (q, k, v))
    made = attend(q, k, v, sinks, tuple(rest), seeds, plan)
    return jax.tree.map(lambda x: x[0], made) if is_packed else made
