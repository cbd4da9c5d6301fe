"""A plan of context parallelism, run by the ranks of a process group: exchanges, calls on what a rank has, and their gradients.

Every exchange is an all-gather, a swap of messages between pairs of ranks or one of all with all. What ranks add up is added in f32 in one
order, that of ranks or a rank's own before others', so that no bits depend on who was first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import operator
from typing import Any, Iterator, NamedTuple, Sequence, Union
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._arrays import framework_of
from .._attention import attention, backward_template
from .._cache import merge_states
from .._forward import Dropout, ScoreMod, gather, resolved
from .._joined import dropout_of_ranks, mask_program, places_in_whole, score_program
from .._library import address_of
from .._programs import Program, documents
from ..errors import DeviceError, InvalidArgument
from ..parallel import PackedPlaces, Range, ShardPlan

_FUNCTION = "context_parallel_attention"
_BACKWARD = address_of("fovea_attention_backward")

_Heads = tuple[Range, Range]  # query heads, kv heads


# ---- Ranks ----


@contextlib.contextmanager
def _exchange(function: str) -> Iterator[None]:
    """What fails in an exchange, by the backend or by the group's timeout, as an error of the call."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"{function}: an exchange with other ranks failed; has one of them ended or raised an error? {reason}") from error


class _Ranks:
    """A process group. Tensors have tokens first, so that those of several ranks stand one after the other."""

    def __init__(self, group: Any, function: str = _FUNCTION) -> None:
        self.group, self.function = group, function
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, x: Tensor) -> _Pending:
        """[n, ...] of every rank as [size * n, ...], once it is waited for."""
        x = x.contiguous()
        whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with _exchange(self.function):
            works = [dist.all_gather_into_tensor(whole, x, group=self.group, async_op=True)]
        return _Pending(works, whole, [x], self.function)

    def swap(self, outgoing: Sequence[dict[int, Tensor]], incoming: Sequence[dict[int, Tensor]]) -> _Pending:
        """Of several tensors at once: sends one to each rank and fills one from each; what is a rank's own is handed over."""
        sent = [{peer: x.contiguous() for peer, x in of_tensor.items()} for of_tensor in outgoing]
        works = [
            dist.P2POp(operation, x, group=self.group, group_peer=peer)
            for operation, messages in ((dist.isend, sent), (dist.irecv, incoming))
            for of_tensor in messages
            for peer, x in of_tensor.items()
            if peer != self.rank and x.numel()
        ]
        received = [{**there, self.rank: own[self.rank]} if self.rank in own else there for own, there in zip(sent, incoming)]
        with _exchange(self.function):
            begun = dist.batch_isend_irecv(works) if works else []
        return _Pending(begun, received, sent, self.function)

    def exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> _Pending:
        """Of one tensor as many elements to each rank, one rank's behind the other's, and from each: every rank calls it."""
        received = sent.new_empty(sum(received_sizes))
        with _exchange(self.function):
            work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group, async_op=True)
        return _Pending([work], received, sent, self.function)


class _Pending:
    """What an exchange will have brought when it is waited for."""

    def __init__(self, works: list[Any], result: Any, sent: Any, function: str) -> None:
        self._works, self._result, self._function = works, result, function
        self._sent: Any = sent  # alive until they are read

    def wait(self) -> Any:
        with _exchange(self._function):
            for work in self._works:
                work.wait()
        self._sent = None
        return self._result


def _group_of(group: Any) -> Any:
    """The process group of a DeviceMesh of one dimension, or the group itself."""
    if not hasattr(group, "get_group"):
        return group
    if group.ndim != 1:
        raise InvalidArgument(f"{_FUNCTION}: group is a mesh of {group.ndim} dimensions; expected one, mesh[\"name of it\"]")
    return group.get_group()


# ---- What a call says ----


class _Keys(NamedTuple):
    """Of some tokens: [n, batch, heads, head_dim]."""

    k: Tensor
    v: Tensor


class _Gradients(NamedTuple):
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    captured: dict[str, Tensor]


class _Features(NamedTuple):
    """What a call says beside tokens and the plan."""

    score: Program | None
    scale: float | None
    softcap: float | None
    dropout: Dropout | None
    batch: int

    def differentiable(self) -> dict[str, Tensor]:
        """Float tensors that scores read, by name."""
        if self.score is None:
            return {}
        return {
            name: x
            for name, x in zip(self.score.tensor_names, self.score.tensors)
            if isinstance(x, Tensor) and x.is_floating_point()
        }


def _on_device(program: Program, device: torch.device) -> Program:
    moved = {name: x.to(device) for name, x in zip(program.tensor_names, program.tensors) if isinstance(x, Tensor)}
    others = [name for name in program.tensor_names if name not in moved]
    moved |= {name: torch.as_tensor(program.captures[name]).to(device) for name in others}
    return program.with_captures(**moved) if moved else program


def _mask_program(mask_words: dict[str, Any], device: torch.device) -> Program | None:
    """A plan's mask; what it captures lies on the device."""
    program = mask_program(mask_words)
    return None if program is None else _on_device(program, device)


def _ids_on(segment_ids: Any, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """[batch, seqlen] of queries, and of keys."""
    if segment_ids is None:
        return None
    ids_q, ids_kv = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    return torch.as_tensor(ids_q).to(device), torch.as_tensor(ids_kv).to(device)


def _at(ids: Tensor, places: Tensor | None) -> Tensor:
    return ids if places is None else ids.index_select(1, places)


# ---- Calls on what a rank has ----


def _attend(q: Tensor, keys: _Keys, words: dict[str, Any], out: Tensor) -> Tensor:
    """Writes out [n, batch, heads, head_dim_v]; lse [batch, heads, n]."""
    views = [x.transpose(0, 1) for x in (q, keys.k, keys.v)]
    _, lse = attention(views[0], views[1], views[2], out=out.transpose(0, 1), return_lse=True, **words)
    return lse


def _empty_out(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


class _Saved(NamedTuple):
    """Rows of a forward call with what a loss says of them; tokens first, but for lse and dlse [batch, heads, n]."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def _gradient(x: Tensor, *, is_complete: bool) -> Tensor:
    """Memory of a gradient by x; of f32 where it is a part, which others are added to."""
    dtype = x.dtype if is_complete else torch.float32
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _gradients(q: Tensor, keys: _Keys, *, by_rows: bool, by_keys: bool) -> dict[str, Tensor]:
    """Memory of them; whether each row's and each key's are complete."""
    return {"dq": _gradient(q, is_complete=by_rows), "dk": _gradient(keys.k, is_complete=by_keys),
            "dv": _gradient(keys.v, is_complete=by_keys)}  # fmt: skip


def _differentiate(
    rows: _Saved, keys: _Keys, words: dict[str, Any], made: dict[str, Tensor], captured: tuple[str, ...] = (), *, by_sinks: bool = True
) -> _Gradients:
    """Writes gradients by q, k and v that `made` has memory of, as "dq", "dk" and "dv", and makes those by sinks and by what scores
    capture, from these rows and keys alone: out and lse are those of all keys."""
    q, k, v, out, dout = (x.transpose(0, 1) for x in (rows.q, keys.k, keys.v, rows.out, rows.dout))
    framework = framework_of(q, _FUNCTION, "q")
    arguments = resolved(framework, gather(_FUNCTION, q, k, v, out, rows.lse, framework.stream(q), **words))
    views = {name: x.transpose(0, 1) for name, x in made.items()}
    dsinks = torch.empty_like(words["sinks"]) if by_sinks and words["sinks"] is not None else None
    if dsinks is not None:
        views["dsinks"] = dsinks
    program: Program | None = words["score_mod"]
    by_name = {} if program is None else dict(zip(program.tensor_names, program.tensors))
    of_captured = {name: torch.empty_like(by_name[name]) for name in captured}
    template = backward_template(arguments, tuple(views), captured, rows.dlse is not None)
    seeds = (dout,) if rows.dlse is None else (dout, rows.dlse)
    template.invoke((*arguments.tensors, *seeds, *views.values(), *of_captured.values()), (*arguments.words, 0, 0), _BACKWARD)
    return _Gradients(made.get("dq"), made.get("dk"), made.get("dv"), dsinks, of_captured)


# ---- Engines ----


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _size(ranges: list[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _intersection(a: list[Range], b: list[Range]) -> list[Range]:
    return sorted((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b if max(x[0], y[0]) < min(x[1], y[1]))


class _Engine:
    """One scheme over one group, for tensors of one device. Tokens come first everywhere."""

    def __init__(self, shards: ShardPlan, ranks: _Ranks, device: torch.device, is_deterministic: bool) -> None:
        self.shards, self.ranks, self.device = shards, ranks, device
        self.is_deterministic = is_deterministic
        self.rank = ranks.rank
        self.own_places = self.places(shards.tokens(self.rank))
        self.head_ranges = shards.q_heads(self.rank), shards.kv_heads(self.rank)
        self.agreed: set[tuple[tuple[str, str], ...]] = set()  # facts that all ranks have said
        self.known: set[tuple[Any, ...]] = set()  # calls without programs whose facts are among them
        # Ids are taken by place once, the rest of the mask reads places: kernels know masks of documents by their form.
        self._mask = _mask_program({**shards.mask_words, "segment_ids": None}, device)
        self._ids = _ids_on(shards.mask_words["segment_ids"], device)
        self._placed_masks: dict[Any, Program | None] = {}
        self._dropout_places: dict[Any, Tensor] = {}

    @property
    def exchanges_rows(self) -> bool:
        """Whether backward exchanges what losses say of rows: they must be the same tensors on all ranks."""
        return False

    def places(self, ranges: list[Range]) -> Tensor:
        """Positions of these tokens, as programs read them."""
        parts = [torch.arange(begin, end, dtype=torch.int32) for begin, end in ranges]
        return torch.cat(parts or [torch.empty(0, dtype=torch.int32)]).to(self.device)

    def words(
        self, features: _Features, q_places: Tensor | None, kv_places: Tensor | None, heads: _Heads, sinks: Tensor | None
    ) -> dict[str, Any]:
        """Keywords of a call on these rows, keys and heads, of which programs see the index in the whole problem."""
        firsts = {variable: first or None for variable, (first, _) in zip(("q_head", "kv_head"), heads)}
        places, captures = places_in_whole(q_places, kv_places, self.shards.seqlen, firsts)
        key = (id(q_places), id(kv_places), heads)  # places live as long as the engine
        if key not in self._placed_masks:
            parts = [] if self._mask is None else [self._mask.placed(places, captures) if places else self._mask]
            if self._ids is not None:
                parts.append(documents(*(_at(ids, there) for ids, there in zip(self._ids, (q_places, kv_places)))))
            self._placed_masks[key] = functools.reduce(operator.and_, parts) if parts else None
        mask, score = self._placed_masks[key], features.score
        if places and score is not None:
            score = score.placed(places, captures)
        dropout = features.dropout
        if dropout is not None:
            dropout = dropout._replace(places=self._places_of_dropout(features.batch, heads[0], q_places, kv_places))
        return {"scale": features.scale, "softcap": features.softcap, "mask_mod": mask, "score_mod": score, "sinks": sinks,
                "dropout": dropout, "deterministic": self.is_deterministic}  # fmt: skip

    def _places_of_dropout(self, batch: int, q_heads: Range, q_places: Tensor | None, kv_places: Tensor | None) -> Tensor:
        """Where a call's batch entries, query heads, queries and keys stand, one list behind the other."""
        key = (batch, q_heads, id(q_places), id(kv_places))
        found = self._dropout_places.get(key)
        if found is None:
            whole = self.places([(0, self.shards.seqlen)])
            tokens = (whole if x is None else x for x in (q_places, kv_places))
            found = torch.cat([self.places([(0, batch), q_heads]), *tokens])
            self._dropout_places[key] = found
        return found

    def forward(self, features: _Features, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def backward(
        self, features: _Features, rows: _Saved, k: Tensor, v: Tensor, sinks: Tensor | None, captured: tuple[str, ...]
    ) -> _Gradients:
        raise NotImplementedError


class _Gathering(_Engine):
    """all_gather and head_group_all_gather: whole keys, in parts of the heads, each attended to while the next one arrives."""

    def __init__(self, shards: ShardPlan, ranks: _Ranks, device: torch.device, is_deterministic: bool) -> None:
        super().__init__(shards, ranks, device, is_deterministic)
        order = torch.as_tensor(shards.permutation()).to(device)
        self._permutation = order
        self._inverse = torch.empty_like(order)
        self._inverse[order] = torch.arange(len(order), device=device)

    @property
    def exchanges_rows(self) -> bool:
        return self.is_deterministic

    def _whole(self, pending: _Pending) -> Tensor:
        """The sequence in its own order: no bits then depend on who had which token."""
        return pending.wait().index_select(0, self._inverse)

    def _parts(self) -> list[_Heads]:
        """Query and kv heads of each part."""
        num_q, num_kv, count = self.shards.num_heads_q, self.shards.num_heads_kv, self.shards.head_parts
        return [
            ((i * num_q // count, (i + 1) * num_q // count), (i * num_kv // count, (i + 1) * num_kv // count))
            for i in range(count)
        ]

    def _keys(self, k: Tensor, v: Tensor) -> Iterator[tuple[_Heads, _Keys]]:
        """Each part's keys; the next part is on its way while the caller has one."""
        parts = self._parts()

        def begin(heads: _Heads) -> tuple[_Pending, _Pending]:
            return self.ranks.gather(k[:, :, slice(*heads[1])]), self.ranks.gather(v[:, :, slice(*heads[1])])

        arriving = begin(parts[0])
        for index, heads in enumerate(parts):
            keys = _Keys(self._whole(arriving[0]), self._whole(arriving[1]))
            if index + 1 < len(parts):
                arriving = begin(parts[index + 1])
            yield heads, keys

    def forward(self, features: _Features, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lses = _empty_out(q, v, q.dtype), []
        for heads, keys in self._keys(k, v):
            part = slice(*heads[0])
            words = self.words(features, self.own_places, None, heads, None if sinks is None else sinks[part])
            lses.append(_attend(q[:, :, part], keys, words, out[:, :, part]))
        return out, _joined(lses, 1)

    def backward(
        self, features: _Features, rows: _Saved, k: Tensor, v: Tensor, sinks: Tensor | None, captured: tuple[str, ...]
    ) -> _Gradients:
        dq = _gradient(rows.q, is_complete=True)
        made: list[_Gradients] = []
        returning = []
        for heads, keys in self._keys(k, v):
            part = slice(*heads[0])
            words = self.words(features, self.own_places, None, heads, None if sinks is None else sinks[part])
            into = {"dq": dq[:, :, part]}
            if not self.is_deterministic:
                into |= {name: _gradient(x, is_complete=False) for name, x in (("dk", keys.k), ("dv", keys.v))}
            made.append(_differentiate(_of_heads(rows, part), keys, words, into, captured))
            # On their way while the next part is computed.
            if not self.is_deterministic:
                returning.append(self._begin_return(into["dk"], into["dv"]))
        dsinks = None if sinks is None else torch.cat([x.dsinks for x in made if x.dsinks is not None])
        by_name = {name: _sum([x.captured[name] for x in made]) for name in captured}
        if self.is_deterministic:
            dk, dv = self._by_all_rows(features, rows, k, v, sinks)
        else:
            dk, dv = (_joined(list(parts), 2) for parts in zip(*map(self._returned, returning)))
        return _Gradients(dq, dk, dv, dsinks, by_name)

    def _by_all_rows(self, features: _Features, rows: _Saved, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients by this rank's own keys, of the rows of all ranks in their own order: each sum is one call's."""
        last = (2, 0, 1)  # lse with tokens first
        parts = [rows.q, rows.out, rows.lse.permute(last), rows.dout]
        if rows.dlse is not None:
            parts.append(rows.dlse.permute(last))
        whole = [self._whole(pending) for pending in [self.ranks.gather(x) for x in parts]]
        lse, dlse = whole[2].permute(1, 2, 0), None if rows.dlse is None else whole[4].permute(1, 2, 0)
        everything = _Saved(whole[0], whole[1], lse.contiguous(), whole[3], None if dlse is None else dlse.contiguous())
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        words = self.words(features, None, self.own_places, self.head_ranges, sinks)
        _differentiate(everything, _Keys(k, v), words, {"dk": dk, "dv": dv}, by_sinks=False)
        return dk, dv

    def _begin_return(self, *sums: Tensor) -> _Pending:
        """Sends every rank what this one has for its tokens."""
        parts = [x.index_select(0, self._permutation).chunk(self.ranks.size) for x in sums]
        incoming = [{peer: torch.empty_like(of_ranks[0]) for peer in range(self.ranks.size)} for of_ranks in parts]
        return self.ranks.swap([dict(enumerate(of_ranks)) for of_ranks in parts], incoming)

    def _returned(self, pending: _Pending) -> list[Tensor]:
        """The sums of what every rank has for this rank's tokens."""
        return [_sum([received[peer] for peer in range(self.ranks.size)]) for received in pending.wait()]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _sum(parts: list[Tensor]) -> Tensor:
    """In the order given."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _of_heads(rows: _Saved, part: slice) -> _Saved:
    dlse = None if rows.dlse is None else rows.dlse[:, part]
    return _Saved(rows.q[:, :, part], rows.out[:, :, part], rows.lse[:, part], rows.dout[:, :, part], dlse)


#: Tokens of a tensor: neighbours, which need not be copied, or those at places.
_Part = Union[slice, Tensor]


def _taken(x: Tensor, part: _Part) -> Tensor:
    return x[part] if isinstance(part, slice) else x.index_select(0, part)


def _take(x: Tensor, part: _Part, to: Tensor) -> None:
    if isinstance(part, slice):
        to.copy_(x[part])
    else:
        torch.index_select(x, 0, part, out=to)


def _put(to: Tensor, part: _Part, x: Tensor) -> None:
    if isinstance(part, slice):
        to[part] = x
    else:
        to.index_copy_(0, part, x)


def _add(to: Tensor, part: _Part, x: Tensor) -> None:
    if isinstance(part, slice):
        to[part] += x
    else:
        to.index_add_(0, part, x)


class _Tokens(NamedTuple):
    """Some of a rank's tokens that travel, for each peer."""

    size: int  # ranks
    counts: dict[int, int]
    parts: dict[int, _Part]

    def sizes(self, width: int) -> list[int]:
        """Elements for each rank, of so many a token."""
        return [self.counts.get(rank, 0) * width for rank in range(self.size)]

    def views(self, joint: Tensor, like: Sequence[Tensor]) -> list[tuple[_Part, list[Tensor]]]:
        """Each peer's tokens of several tensors in one, of which a peer's stand together."""
        views, at = [], 0
        for peer, count in self.counts.items():
            of_peer = []
            for x in like:
                shape = (count, *x.shape[1:])
                of_peer.append(joint[at : at + math.prod(shape)].view(shape))
                at += of_peer[-1].numel()
            views.append((self.parts[peer], of_peer))
        return views


class _NeededOnly(_Engine):
    """Tiles of keys that this rank's rows see; sums of their gradients go back to those who have them.

    Keys and values, or their gradients, are one exchange of all ranks with all, of which most send nothing to most.
    """

    def __init__(self, shards: ShardPlan, ranks: _Ranks, device: torch.device, is_deterministic: bool) -> None:
        super().__init__(shards, ranks, device, is_deterministic)
        own, needs = shards.tokens(self.rank), shards.needed_kv(self.rank)
        peers = [peer for peer in range(ranks.size) if peer != self.rank]
        # What arrives, among the keys that are needed, and what is sent, among this rank's own.
        self._wanted = self._tokens(needs, {peer: _intersection(needs, shards.tokens(peer)) for peer in peers})
        self._asked = self._tokens(own, {peer: _intersection(shards.needed_kv(peer), own) for peer in peers})
        kept = _intersection(needs, own)
        self._kept, self._kept_of_own = self._part(needs, kept), self._part(own, kept)
        self._num_needed, self._num_kept = _size(needs), _size(kept)
        self._has_all = kept == needs == own
        everybody = range(ranks.size)
        self._travels = any(_intersection(shards.needed_kv(rank), shards.tokens(rank)) != shards.needed_kv(rank) for rank in everybody)
        self._kv_places = self.places(needs)

    def _tokens(self, within: list[Range], by_peer: dict[int, list[Range]]) -> _Tokens:
        there = {peer: ranges for peer, ranges in by_peer.items() if ranges}
        counts = {peer: _size(ranges) for peer, ranges in there.items()}
        return _Tokens(self.ranks.size, counts, {peer: self._part(within, ranges) for peer, ranges in there.items()})

    def _part(self, within: list[Range], ranges: list[Range]) -> _Part:
        """Where these ranges of the sequence stand in a list of ranges that holds them."""
        found, at = [], 0
        for begin, end in within:
            found += [(at + x - begin, at + y - begin) for x, y in _intersection([(begin, end)], ranges)]
            at += end - begin
        if not found:
            return slice(0, 0)
        if _size(found) == found[-1][1] - found[0][0]:
            return slice(found[0][0], found[-1][1])
        return self.places(found).long()

    def _exchange(self, tensors: Sequence[Tensor], leaving: _Tokens, arriving: _Tokens) -> _Pending:
        """These tokens of several tensors of one dtype, to those who asked for them, and what others send."""
        width = sum(x[:1].numel() for x in tensors)
        sizes = leaving.sizes(width)
        joint = tensors[0].new_empty(sum(sizes))
        for part, views in leaving.views(joint, tensors):
            for x, to in zip(tensors, views):
                _take(x, part, to)
        return self.ranks.exchange(joint, sizes, arriving.sizes(width))

    def _keys(self, k: Tensor, v: Tensor) -> _Keys:
        """In the order of the sequence."""
        pending = self._exchange((k, v), self._asked, self._wanted) if self._travels else None
        if self._has_all:
            whole = [k, v]
        else:
            whole = [x.new_empty((self._num_needed, *x.shape[1:])) for x in (k, v)]
            for x, needed in zip((k, v), whole):
                _put(needed, self._kept, _taken(x, self._kept_of_own))
        if pending is not None:
            for part, views in self._wanted.views(pending.wait(), (k, v)):
                for needed, x in zip(whole, views):
                    _put(needed, part, x)
        return _Keys(whole[0], whole[1])

    def _returned(self, sums: list[Tensor], num_own: int) -> list[Tensor]:
        """What all ranks have for this rank's tokens: its own first, then that of others, in their order."""
        pending = self._exchange(sums, self._wanted, self._asked) if self._travels else None
        totals = []
        for x in sums:
            total = _taken(x, self._kept)
            if self._num_kept < num_own:
                of_kept, total = total, x.new_zeros((num_own, *x.shape[1:]))
                _put(total, self._kept_of_own, of_kept)
            totals.append(total)
        if pending is not None:
            for part, views in self._asked.views(pending.wait(), sums):
                for total, x in zip(totals, views):
                    _add(total, part, x)
        return totals

    def forward(self, features: _Features, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        keys, out = self._keys(k, v), _empty_out(q, v, q.dtype)
        words = self.words(features, self.own_places, self._kv_places, self.head_ranges, sinks)
        return out, _attend(q, keys, words, out)

    def backward(
        self, features: _Features, rows: _Saved, k: Tensor, v: Tensor, sinks: Tensor | None, captured: tuple[str, ...]
    ) -> _Gradients:
        keys = self._keys(k, v)
        words = self.words(features, self.own_places, self._kv_places, self.head_ranges, sinks)
        is_complete = not self._travels
        made = _differentiate(rows, keys, words, _gradients(rows.q, keys, by_rows=True, by_keys=is_complete), captured)
        assert made.dk is not None and made.dv is not None
        dk, dv = self._returned([made.dk, made.dv], len(k))
        return made._replace(dk=dk, dv=dv)


class _HeadsAndRing(_Engine):
    """ulysses, ring and hybrid: ranks of a group exchange tokens for heads, keys travel from group to group.

    A ring has groups of one rank, ulysses one group. Keys of a group are those of its tokens, of this rank's heads.
    """

    def __init__(self, shards: ShardPlan, ranks: _Ranks, device: torch.device, is_deterministic: bool) -> None:
        super().__init__(shards, ranks, device, is_deterministic)
        self._head_ranks = shards.head_ranks
        self._num_groups = ranks.size // shards.head_ranks
        self._group, self._part = divmod(self.rank, shards.head_ranks)
        first = self._group * self._head_ranks
        self._partners = range(first, first + self._head_ranks)
        first_kv, end_kv = self.head_ranges[1]
        self._shares_keys = self._head_ranks * (end_kv - first_kv) > shards.num_heads_kv
        self._row_places = [self.places(shards.rows(group * self._head_ranks)) for group in range(self._num_groups)]
        self._next, self._before = (
            (self._group + step) % self._num_groups * self._head_ranks + self._part for step in (1, -1)
        )

    @property
    def exchanges_rows(self) -> bool:
        return self._head_ranks > 1

    # Tokens for heads, and back.

    def _to_heads(self, *tensors: tuple[Tensor, str]) -> list[Tensor]:
        """[own tokens, batch, all heads, ...] to [tokens of the group, batch, this rank's heads, ...], of "q_heads" or "kv_heads"."""
        if self._head_ranks == 1:
            return [x for x, _ in tensors]
        outgoing, incoming = [], []
        for x, heads in tensors:
            ranges = getattr(self.shards, heads)
            begin, end = ranges(self.rank)
            shape = (x.shape[0], x.shape[1], end - begin, *x.shape[3:])
            outgoing.append({peer: x[:, :, slice(*ranges(peer))] for peer in self._partners})
            incoming.append({peer: x.new_empty(shape) for peer in self._partners})
        return [torch.cat([received[peer] for peer in self._partners]) for received in self.ranks.swap(outgoing, incoming).wait()]

    def _to_tokens(self, *tensors: tuple[Tensor, str]) -> list[Tensor]:
        """The way back; a kv head that several ranks computed with is summed, in their order."""
        if self._head_ranks == 1:
            return [x for x, _ in tensors]
        outgoing, incoming = [], []
        for x, heads in tensors:
            ranges = getattr(self.shards, heads)
            parts = x.chunk(self._head_ranks)
            sizes = {peer: ranges(peer)[1] - ranges(peer)[0] for peer in self._partners}
            tokens, batch, _, *rest = parts[0].shape
            outgoing.append(dict(zip(self._partners, parts)))
            incoming.append({peer: x.new_empty((tokens, batch, sizes[peer], *rest)) for peer in self._partners})
        arrived = self.ranks.swap(outgoing, incoming).wait()
        return [self._of_all_heads(received, getattr(self.shards, heads)) for received, (_, heads) in zip(arrived, tensors)]

    def _of_all_heads(self, by_partner: dict[int, Tensor], ranges: Any) -> Tensor:
        tokens, batch, _, *rest = by_partner[self._partners[0]].shape
        whole = by_partner[self._partners[0]].new_zeros((tokens, batch, ranges(self._partners[-1])[1], *rest))
        for peer in self._partners:
            whole[:, :, slice(*ranges(peer))] += by_partner[peer]
        return whole

    # The ring.

    def _pass_on(self, tensors: list[Tensor]) -> _Pending:
        """To the next group, from the one before."""
        return self.ranks.swap([{self._next: x} for x in tensors], [{self._before: torch.empty_like(x, memory_format=torch.contiguous_format)} for x in tensors])

    def _received(self, pending: _Pending) -> list[Tensor]:
        return [of_tensor[self._before] for of_tensor in pending.wait()]

    def _words(self, features: _Features, origin: int, sinks: Tensor | None) -> dict[str, Any]:
        is_whole = self._num_groups == 1
        q_places = None if is_whole else self._row_places[self._group]
        return self.words(features, q_places, None if is_whole else self._row_places[origin], self.head_ranges, sinks)

    def _origins(self) -> list[int]:
        return [(self._group - step) % self._num_groups for step in range(self._num_groups)]

    def forward(self, features: _Features, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self._to_heads((q, "q_heads"), (k, "kv_heads"), (v, "kv_heads"))
        sinks = None if sinks is None else sinks[slice(*self.head_ranges[0])]
        dtype = q.dtype if self._num_groups == 1 else torch.float32  # partial results are rounded once, at the end
        out = lse = None
        origins = self._origins()
        for step, origin in enumerate(origins):
            pending = self._pass_on([k, v]) if step + 1 < len(origins) else None
            # A sink joins one partial result, and with it the whole.
            words = self._words(features, origin, sinks if step == 0 else None)
            made = _empty_out(q, v, dtype)
            made_lse = _attend(q, _Keys(k, v), words, made)
            if out is None or lse is None:
                out, lse = made, made_lse
            else:
                views = [x.transpose(0, 1) for x in (out, made)]
                merged, lse = merge_states(views, [lse, made_lse])
                out = merged.transpose(0, 1)
            if pending is not None:
                k, v = self._received(pending)
        assert out is not None and lse is not None
        out, lse = self._to_tokens((out.to(q.dtype), "q_heads"), (lse.permute(2, 0, 1), "q_heads"))
        return out, lse.permute(1, 2, 0)

    def backward(
        self, features: _Features, rows: _Saved, k: Tensor, v: Tensor, sinks: Tensor | None, captured: tuple[str, ...]
    ) -> _Gradients:
        statistics = [x.permute(2, 0, 1) for x in (rows.lse, rows.dlse) if x is not None]
        of_queries = [(x, "q_heads") for x in (rows.q, rows.out, rows.dout, *statistics)]
        k, v, q, out, dout, *statistics = self._to_heads((k, "kv_heads"), (v, "kv_heads"), *of_queries)
        lse, *dlse = (x.permute(1, 2, 0).contiguous() for x in statistics)
        here = _Saved(q, out, lse, dout, dlse[0] if dlse else None)
        own_sinks = None if sinks is None else sinks[slice(*self.head_ranges[0])]
        dq: Tensor | None = None
        sums: list[Tensor] = []
        dsinks = None
        by_name: dict[str, Tensor] = {}
        origins = self._origins()
        for step, origin in enumerate(origins):
            arriving = self._pass_on([k, v]) if step + 1 < len(origins) else None
            words = self._words(features, origin, own_sinks if step == 0 else None)
            keys = _Keys(k, v)
            into = _gradients(q, keys, by_rows=len(origins) == 1, by_keys=len(origins) == 1 and not self._shares_keys)
            made = _differentiate(here, keys, words, into, captured)
            assert made.dq is not None and made.dk is not None and made.dv is not None
            dq = made.dq if dq is None else dq + made.dq
            dsinks = made.dsinks if step == 0 else dsinks
            by_name = {name: made.captured[name] + by_name[name] if by_name else made.captured[name] for name in captured}
            # Sums travel with their keys and one step more, home.
            sums = [made.dk, made.dv] if not sums else [sums[0] + made.dk, sums[1] + made.dv]
            if len(origins) > 1:
                sums = self._received(self._pass_on(sums))
            if arriving is not None:
                k, v = self._received(arriving)
        assert dq is not None
        if sinks is not None and dsinks is not None:
            whole = torch.zeros_like(sinks)
            whole[slice(*self.head_ranges[0])] = dsinks
            dsinks = whole
        dq, dk, dv = self._to_tokens((dq, "q_heads"), *((x, "kv_heads") for x in sums))
        return _Gradients(dq, dk, dv, dsinks, by_name)


def _engine_of(shards: ShardPlan, ranks: _Ranks, device: torch.device, deterministic: bool) -> _Engine:
    if shards.scheme in ("all_gather", "head_group_all_gather"):
        return _Gathering(shards, ranks, device, deterministic)
    if shards.scheme == "needed_only":
        return _NeededOnly(shards, ranks, device, deterministic)
    return _HeadsAndRing(shards, ranks, device, deterministic)


# ---- The graph ----


class _Node(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """(engine, features, q, k, v, sinks or None, *what scores read) -> (out, lse); tokens second."""

    @staticmethod
    def forward(
        ctx: Any, engine: _Engine, features: _Features, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *captured: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = engine.forward(features, _tokens_first(q), _tokens_first(k), _tokens_first(v), sinks)
        out = _tokens_first(out).contiguous()
        lse = lse.contiguous()
        ctx.engine, ctx.features = engine, features
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *captured)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, *captured = ctx.saved_tensors
        needs = ctx.needs_input_grad
        names = tuple(name for name, is_needed in zip(ctx.features.differentiable(), needs[6:]) if is_needed)
        dout = torch.zeros_like(out) if dout is None else dout
        if dlse is None and ctx.engine.exchanges_rows:  # other ranks' losses may read it
            dlse = torch.zeros_like(lse)
        rows = _Saved(_tokens_first(q), _tokens_first(out), lse, _tokens_first(dout), dlse)
        made = ctx.engine.backward(ctx.features, rows, _tokens_first(k), _tokens_first(v), sinks, names)
        plain = [_tokens_first(x).to(like.dtype) for x, like in ((made.dq, q), (made.dk, k), (made.dv, v))]
        of_captured = [made.captured.get(name) for name in ctx.features.differentiable()]
        return None, None, *plain, made.dsinks, *of_captured


# ---- Agreement ----


def _check_shapes(shards: ShardPlan, ranks: _Ranks, q: Tensor, k: Tensor, v: Tensor) -> None:
    if ranks.size != shards.world_size:
        raise InvalidArgument(f"{_FUNCTION}: the group has {ranks.size} ranks; expected {shards.world_size}, those of the plan")
    num_tokens = shards.seqlen // shards.world_size
    leading = "[batch, " if shards.packed is None else "["
    rank = 4 if shards.packed is None else 3
    for name, x, num_heads in (("q", q, shards.num_heads_q), ("k", k, shards.num_heads_kv), ("v", v, shards.num_heads_kv)):
        if not isinstance(x, Tensor) or x.dim() != rank or tuple(x.shape[-3:-1]) != (num_tokens, num_heads):
            got = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise InvalidArgument(
                f"{_FUNCTION}: {name} {got}; expected {leading}{num_tokens}, {num_heads}, head_dim], this rank's tokens"
            )


_packed_of_plans: WeakKeyDictionary[ShardPlan, dict[torch.device, PackedPlaces]] = WeakKeyDictionary()


def _score_program(
    shards: ShardPlan, device: torch.device, bias: Tensor | None, alibi: Tensor | None, score_mod: ScoreMod | None
) -> Program | None:
    """Scores of all tokens as one sequence."""
    score = score_program(bias, alibi, score_mod)
    if score is None or shards.packed is None:
        return score
    if bias is not None:
        raise InvalidArgument("bias is dense and sequences are packed; expected a score_mod of their positions")
    on_devices = _packed_of_plans.setdefault(shards, {})
    if device not in on_devices:
        on_devices[device] = PackedPlaces(*(torch.as_tensor(x).to(device) for x in shards.packed))
    return on_devices[device].placed(score)


_facts_of_plans: WeakKeyDictionary[ShardPlan, dict[str, str]] = WeakKeyDictionary()


def _plan_facts(shards: ShardPlan) -> dict[str, str]:
    found = _facts_of_plans.get(shards)
    if found is None:
        mask = _mask_program(shards.mask_words, torch.device("cpu"))
        found = _facts_of_plans[shards] = {
            "scheme": shards.scheme,
            "world_size": str(shards.world_size),
            "seqlen": str(shards.seqlen),
            "mask": "none" if mask is None else mask.text_with_numbers,
            "plan": hashlib.sha256(shards.text.encode()).hexdigest()[:16],
        }
    return found


def _facts(shards: ShardPlan, tensors: tuple[Any, ...], words: dict[str, Any]) -> dict[str, str]:
    """All that ranks must agree on, in words."""
    facts = dict(_plan_facts(shards))
    for name, x in zip("qkv", tensors):
        facts[name] = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    return {**facts, **{name: str(value) for name, value in words.items()}}


def _agree(ranks: _Ranks, facts: dict[str, str], problem: str) -> None:
    """The same error on every rank where one of them has another problem, or none that can run."""
    told: list[Any] = [None] * ranks.size
    with _exchange(ranks.function):
        dist.all_gather_object(told, (facts, problem), group=ranks.group)
    for rank, (_, found) in enumerate(told):
        if found:
            raise InvalidArgument(f"{ranks.function}: rank {rank}: {found}")
    first = told[0][0]
    for rank, (found, _) in enumerate(told):
        for name, value in found.items():
            if first[name] != value:
                raise InvalidArgument(
                    f"{ranks.function}: {name} is {value} on rank {rank} but {first[name]} on rank 0; expected one problem on all ranks"
                )


def _agreed_engine(
    engine: _Engine | None,
    group: Any,
    tensors: tuple[Any, Any, Any],
    shards: ShardPlan,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    alibi: Tensor | None,
    score_mod: ScoreMod | None,
    sinks: Tensor | None,
    dropout: Dropout | tuple[float, int] | None,
    deterministic: bool,
) -> tuple[_Engine, Program | None, Dropout | None]:
    """The plan's engine for a call that all ranks make, its scores and what it drops; the same error on all ranks where one cannot."""
    q, k, v = tensors
    ranks = _Ranks(group)
    words: dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    problem, score, drop = "", None, None
    try:
        _check_shapes(shards, ranks, q, k, v)
        score = _score_program(shards, q.device, bias, alibi, score_mod)
        words["score_mod"] = None if score is None else score.text
        words["sinks"] = None if sinks is None else tuple(sinks.shape)
        drop = dropout_of_ranks(_FUNCTION, dropout, keeps_fours=shards.keeps_fours, is_packed=shards.packed is not None)
        words["dropout"] = None if drop is None else tuple(x if isinstance(x, (int, float)) else "a tensor" for x in drop[:3])
    except (TypeError, ValueError) as error:
        problem = str(error).removeprefix(f"{_FUNCTION}: ")
    facts = _facts(shards, tensors, words)
    said = tuple(facts.items())
    if problem or engine is None or said not in engine.agreed:
        _agree(ranks, facts, problem)
        if engine is None:
            engine = _engine_of(shards, ranks, q.device, deterministic)
        engine.agreed.add(said)
    return engine, score, drop


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: ShardPlan,
    *,
    group: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | tuple[float, int] | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> Any:
    """Attention of a sequence whose tokens lie on several ranks, by a plan; every rank of the group calls it.

    The mask is the plan's. Positions and heads in masks and scores are those of the whole sequence. Gradients by q, k and v are of all
    ranks' losses; those by bias, alibi, sinks and what score_mod reads are what this rank's rows (and heads) contribute, as those of
    any weight are: their sum over ranks is the whole.

    Parameters
    ----------
    q : Tensor, [batch, seqlen // world_size, num_heads_q, head_dim_qk], f32, f16 or bf16
        This rank's tokens, in the order of the plan: ``shards.shard(whole, rank)``. Of packed sequences, where the plan was made with
        cu_seqlens: [total // world_size, num_heads_q, head_dim_qk], and so k, v, out and lse.
    k : Tensor, [batch, seqlen // world_size, num_heads_kv, head_dim_qk]
    v : Tensor, [batch, seqlen // world_size, num_heads_kv, head_dim_v]
    shards : ShardPlan
        Of `fovea.parallel.context_parallel_plan`: scheme, ranks and mask.
    group : ProcessGroup or DeviceMesh, optional
        A mesh has one dimension, ``mesh["context"]``; the default group unless given.
    scale, softcap, bias, alibi, score_mod, sinks
        As `fovea.attention`'s; positions are those of the whole sequence.
    dropout : Dropout, optional
        As `fovea.attention`'s, with one seed on all ranks: every scheme drops what one rank does. Ranges of keys of the plan begin and
        end at multiples of 4.
    return_lse : bool
        Whether `lse` is returned, too.
    deterministic : bool
        With "all_gather", "head_group_all_gather" and "ulysses", bits do not depend on the number of ranks (but for parts of a few
        rows): gradients by k and v are computed from all rows by who has them. False: partial sums are exchanged in f32, which is
        less work and, with few kv heads, fewer bytes. Other schemes are alike in both: the same bits in every run, rounded elsewhere
        with other ranks.

    Returns
    -------
    out : Tensor, [batch, seqlen // world_size, num_heads_q, head_dim_v]
        Of this rank's tokens.
    lse : Tensor, [batch, num_heads_q, seqlen // world_size] f32
        With `return_lse`.

    Raises
    ------
    InvalidArgument
        On every rank, where ranks do not have one problem (plan, shapes, dtypes, programs, keywords) or one of them has none that can
        run: the message names the rank. Ranks agree at the first call of each problem with a plan; later calls exchange no words.
    DeviceError
        An exchange failed, as where a rank has ended: by the group's timeout, or sooner if its backend notices.

    Examples
    --------
    >>> shards = fovea.parallel.context_parallel_plan(spec, spec, world_size=8, causal=True)
    >>> out = fovea.torch.context_parallel_attention(q, k, v, shards, group=mesh["context"])
    """
    group = _group_of(group)
    key = (group, getattr(q, "device", None), deterministic)
    engine = shards.engines.get(key)
    score: Program | None = None
    drop: Dropout | None = None
    call: tuple[Any, ...] | None = None
    if score_mod is None and bias is None and alibi is None and sinks is None and dropout is None:
        call = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in (q, k, v)) + (scale, softcap)
    if engine is None or call is None or call not in engine.known:
        engine, score, drop = _agreed_engine(engine, group, (q, k, v), shards, scale, softcap, bias, alibi, score_mod, sinks, dropout, deterministic)
        shards.engines[key] = engine
        if call is not None:
            engine.known.add(call)
    is_packed = shards.packed is not None
    if is_packed:
        q, k, v = (x[None] for x in (q, k, v))
    features = _Features(score, scale, softcap, drop, len(q))
    out, lse = _Node.apply(engine, features, q, k, v, sinks, *features.differentiable().values())
    if is_packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
