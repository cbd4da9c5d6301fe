"""Decoding over caches whose pages are dealt over the ranks of a process group: queries travel, partial results are merged.

Lengths stay on the device: no rank waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._cache import KvCache, Rotary, append_to_cache, decode, merge_states
from .._joined import mask_program, score_program
from .._programs import Program
from ..errors import InvalidArgument
from ._context_parallel import _agree, _group_of, _Ranks

_FUNCTION = "context_parallel_decode"


class _Pages:
    """A rank's pages of whole sequences: page n lies on rank n % size."""

    def __init__(self, ranks: _Ranks, page_size: int) -> None:
        self.rank, self.size, self.page_size = ranks.rank, ranks.size, page_size

    def are_own(self, kv_idx: Tensor) -> Tensor:
        return kv_idx // self.page_size % self.size == self.rank

    def own(self, seqlens: Tensor) -> Tensor:
        """Keys of this rank."""
        full = seqlens // self.page_size
        rest = torch.where(full % self.size == self.rank, seqlens % self.page_size, 0)
        return (full + (self.size - 1 - self.rank)) // self.size * self.page_size + rest

    def placed(self, program: Program, seqlens: Tensor) -> Program:
        places = {
            "kv_idx": "((kv_idx // page_size * num_ranks + page_rank) * page_size + kv_idx % page_size)",
            "seqlen_kv": "whole_seqlens[batch]",
        }
        captures = {"page_size": self.page_size, "num_ranks": self.size, "page_rank": self.rank, "whole_seqlens": seqlens}
        return program.placed(places, captures)


def _check(ranks: _Ranks, q: Any, cache: KvCache, append_k: Any, append_v: Any) -> None:
    others = (cache.batch_idx, cache.left_padding, cache.page_indptr, cache.page_indices)
    if cache.page_table is None or any(x is not None for x in others):
        raise InvalidArgument("cache has no page_table, or slots, left padding or pages by offsets; expected page_table and seqlens alone")
    if cache.k_scale is not None or cache.v_scale is not None:
        raise InvalidArgument("cache has scales; expected keys and values of f32, f16 or bf16 on every rank")
    for name, x in (("q", q), ("cache.k", cache.k), ("append_k", append_k), ("append_v", append_v)):
        if x is not None and (not isinstance(x, Tensor) or x.dim() != 4):
            got = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise InvalidArgument(f"{name} {got}; expected a tensor of four dimensions")
    batch, own = len(cache.seqlens), len(q)
    if own != batch and own * ranks.size != batch:
        raise InvalidArgument(f"q has {own} sequences; expected {batch}, all of cache.seqlens, or a {ranks.size}th of them")
    if append_k is not None and (append_v is None or len(append_k) != own or append_v.shape[:2] != append_k.shape[:2]):
        raise InvalidArgument(f"append_k and append_v; expected as many tokens in both, of {own} sequences as q")


class ContextParallelDecode:
    """Attention over caches whose pages are dealt over ranks in turn; every rank makes one, and the same calls of it.

    Queries travel, which are few, and keys stay: every rank attends to the keys that it has, and partial results are merged in the order
    of ranks. Ranks agree on what they are about to do at the first call of each problem.

    Parameters
    ----------
    group : ProcessGroup or DeviceMesh, optional
        A mesh has one dimension; the default group unless given.

    Examples
    --------
    >>> decoding = fovea.torch.ContextParallelDecode(mesh["context"])
    >>> out = decoding(q, fovea.KvCache(k_pages, v_pages, seqlens, page_table=own_pages), append_k=k, append_v=v)
    """

    def __init__(self, group: Any = None) -> None:
        self._ranks = _Ranks(_group_of(group), _FUNCTION)
        self._agreed: set[tuple[tuple[str, str], ...]] = set()

    def __call__(
        self,
        q: Tensor,
        cache: KvCache,
        *,
        append_k: Tensor | None = None,
        append_v: Tensor | None = None,
        rotary: Rotary | None = None,
        sees_all_keys: bool = False,
        causal: bool = False,
        align: str = "bottom_right",
        window: tuple[int | None, int | None] | None = None,
        mask: Any = None,
        mask_mod: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        alibi: Tensor | None = None,
        score_mod: Any = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """As `fovea.decode`, but for where keys and queries are.

        Parameters
        ----------
        q, append_k, append_v : Tensor, [batch, seqlen, heads, head_dim]
            Of all sequences, the same on every rank; or of batch / size of them, rank r those from r * batch / size on: then they travel
            to all ranks, and partial results back.
        cache : KvCache
            Page n of every sequence lies on rank n % size, in column n // size of this rank's page_table. seqlens are those of whole
            sequences, the same on all ranks. New tokens are written by the rank that has their page.
        rotary, sees_all_keys, causal, align, window, mask, mask_mod, scale, softcap, bias, alibi, score_mod, sinks
            As `fovea.decode`'s; positions and lengths are those of whole sequences.

        Returns
        -------
        out, lse
            Of the sequences of q.

        Raises
        ------
        InvalidArgument, DeviceError
            As `context_parallel_attention`.
        """
        words = {"causal": causal, "align": align, "window": window, "mask": mask, "mask_mod": mask_mod, "segment_ids": None}
        ranks, problem, seen, score = self._ranks, "", None, None
        try:
            _check(ranks, q, cache, append_k, append_v)
            is_unmasked = not causal and window is None and mask is None and mask_mod is None
            if not (is_unmasked and sees_all_keys):
                seen = mask_program({**words, "causal": causal or is_unmasked})
            score = score_program(bias, alibi, score_mod)
        except (TypeError, ValueError) as error:
            problem = str(error)
        facts = {
            "seqlens": str(tuple(getattr(cache.seqlens, "shape", ()))), "page_size": str(cache.k.shape[1:2]), "scale": str(scale),
            "mask": "none" if seen is None else seen.text_with_numbers, "score_mod": "none" if score is None else score.text,
            "softcap": str(softcap), "rotary": str(rotary is not None), "sinks": str(sinks is not None),
        }  # fmt: skip
        for name, x in (("q", q), ("append_k", append_k), ("append_v", append_v)):
            facts[name] = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        said = tuple(facts.items())
        if problem or said not in self._agreed:
            _agree(ranks, facts, problem)
            self._agreed.add(said)
        pages = _Pages(ranks, cache.k.shape[1])
        own, is_shared_out = len(q), len(q) != len(cache.seqlens)
        q, append_k, append_v = (self._of_all(x, is_shared_out) for x in (q, append_k, append_v))
        before = cache.seqlens
        after = before if append_k is None else before + append_k.shape[1]
        if append_k is not None and append_v is not None:
            given = None if rotary is None else self._of_all(rotary.positions, is_shared_out)
            self._append(pages, cache, append_k, append_v, rotary, given)
        turning = None
        if rotary is not None:
            given = rotary.positions if rotary.positions_q is None else rotary.positions_q
            positions = self._of_all(given, is_shared_out)
            if positions is None:
                positions = after[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
            turning = rotary._replace(positions=positions.to(before.dtype), positions_q=None)
        partial = q.new_empty((*q.shape[:-1], cache.v.shape[-1]), dtype=torch.float32)
        _, lse = decode(
            q, KvCache(cache.k, cache.v, pages.own(after), page_table=cache.page_table), rotary=turning, out=partial, return_lse=True,
            sees_all_keys=seen is None, mask_mod=None if seen is None else pages.placed(seen, after), scale=scale, softcap=softcap,
            score_mod=None if score is None else pages.placed(score, after),
            sinks=sinks if ranks.rank == 0 else None,  # joins one partial result, and with it the whole
        )  # fmt: skip
        outs, lses = self._states(partial, own, is_shared_out), self._states(lse, own, is_shared_out)
        out = outs[0].new_empty(outs[0].shape, dtype=q.dtype)
        made, made_lse = merge_states(outs, lses, out=out)
        return (made, made_lse) if return_lse else made

    def _of_all(self, x: Any, is_shared_out: bool) -> Any:
        return self._ranks.gather(x).wait() if x is not None and is_shared_out else x

    def _append(
        self, pages: _Pages, cache: KvCache, k: Tensor, v: Tensor, rotary: Rotary | None, positions: Tensor | None
    ) -> None:
        """New tokens whose pages are this rank's, packed; the others stand behind the last sequence, where nobody looks."""
        kv_idx = cache.seqlens[:, None] + torch.arange(k.shape[1], device=k.device)
        are_own = pages.are_own(kv_idx)
        order = (~are_own).flatten().to(torch.uint8).argsort(stable=True)
        counts = torch.nn.functional.pad(are_own.sum(1).cumsum(0), (1, 0)).to(cache.seqlens.dtype)
        turning = None
        if rotary is not None:
            places: Tensor = kv_idx if positions is None else positions
            turning = rotary._replace(positions=places.flatten()[order].to(cache.seqlens.dtype), positions_q=None)
        own = KvCache(cache.k, cache.v, pages.own(cache.seqlens), page_table=cache.page_table)
        append_to_cache(own, k.flatten(0, 1)[order], v.flatten(0, 1)[order], turning, cu_seqlens=counts)

    def _states(self, partial: Tensor, own: int, is_shared_out: bool) -> list[Tensor]:
        """What every rank has of this rank's sequences, or of all."""
        ranks = self._ranks
        outgoing = {peer: partial[peer * own : (peer + 1) * own] if is_shared_out else partial for peer in range(ranks.size)}
        (received,) = ranks.swap([outgoing], [{peer: torch.empty_like(x) for peer, x in outgoing.items()}]).wait()
        return [received[peer] for peer in range(ranks.size)]
