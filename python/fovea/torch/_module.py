"""Multi-head attention as a module: projections, rotary embedding, grouped heads, a KV cache."""

from __future__ import annotations

from typing import Any

import torch

from .._attention import attention
from .._cache import KvCache, Rotary, decode, kv_cache
from .._rotary import rotary
from ..errors import InvalidArgument, Unsupported
from ._sdpa import random_dropout


class MultiheadAttention(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Projections around `fovea.attention`; batches come first.

    Parameters
    ----------
    embed_dim : int
        Of input and output.
    num_heads : int
    num_heads_kv : int, optional
        `num_heads` unless given; divides it.
    head_dim : int, optional
        ``embed_dim // num_heads`` unless given.
    bias : bool
        Of the projections.
    dropout : float
        Of probabilities, while training; drawn from PyTorch's generator.
    rotary_dim : int
        Columns of each head that the rotary embedding turns, in pairs (j, j + rotary_dim / 2); 0: none.
    rotary_base : float
    max_positions : int
        Tokens of the longest sequence that the rotary embedding serves.
    window : (left, right), optional
    softcap : float, optional
        As `fovea.attention`'s.
    sinks : bool
        Whether each head has a learned logit that joins the denominators.

    Attributes
    ----------
    in_proj : Linear, embed_dim to (num_heads + 2 * num_heads_kv) * head_dim
        q, k and v one behind the other.
    out_proj : Linear
    """

    cos: Any
    sin: Any

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        max_positions: int = 4096,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_heads_kv = num_heads, num_heads_kv or num_heads
        self.head_dim = head_dim or embed_dim // num_heads
        if num_heads % self.num_heads_kv or (head_dim is None and embed_dim % num_heads):
            raise InvalidArgument(
                f"MultiheadAttention: embed_dim {embed_dim}, num_heads {num_heads}, num_heads_kv {num_heads_kv}; expected each to divide "
                "the one before it"
            )
        if rotary_dim % 2 or not 0 <= rotary_dim <= self.head_dim:
            raise InvalidArgument(f"MultiheadAttention: rotary_dim is {rotary_dim}; expected an even number, 0 to {self.head_dim}")
        self.dropout, self.window, self.softcap = dropout, window, softcap
        place = {"device": device, "dtype": dtype}
        self._widths = [self.head_dim * heads for heads in (num_heads, self.num_heads_kv, self.num_heads_kv)]
        self.in_proj = torch.nn.Linear(embed_dim, sum(self._widths), bias, **place)
        self.out_proj = torch.nn.Linear(self.head_dim * num_heads, embed_dim, bias, **place)
        self.sinks = torch.nn.Parameter(torch.zeros(num_heads, device=device)) if sinks else None
        self._add_angles(rotary_dim, rotary_base, max_positions, device)

    def _add_angles(self, rotary_dim: int, base: float, max_positions: int, device: Any) -> None:
        cos = sin = None
        if rotary_dim:
            rates = base ** (torch.arange(0, -rotary_dim, -2, device=device) / rotary_dim)
            angles = torch.arange(max_positions, device=device)[:, None] * rates
            cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def make_cache(self, batch: int, capacity: int, *, page_size: int | None = None) -> KvCache:
        """An empty cache for this layer, on its device and in its dtype: `fovea.kv_cache`."""
        return kv_cache(self.in_proj.weight.detach(), batch, capacity, self.num_heads_kv, self.head_dim, page_size=page_size)

    def forward(
        self,
        x: Any,
        context: Any = None,
        *,
        is_causal: bool = False,
        mask: Any = None,
        score_mod: Any = None,
        segment_ids: Any = None,
        positions: Any = None,
        cache: KvCache | None = None,
    ) -> Any:
        """Attention of x to itself, to `context`, or behind the tokens of a cache.

        Parameters
        ----------
        x : Tensor, [batch, seqlen, embed_dim]
        context : Tensor, [batch, seqlen_kv, embed_dim], optional
            Where keys and values come from; x unless given. Without rotary embedding.
        is_causal : bool
            The last query meets the last key.
        mask, score_mod, segment_ids
            As `fovea.attention`'s.
        positions : Tensor, [batch, seqlen] i32 or i64, optional
            Places for the rotary embedding: 0, 1, ... unless given, behind the cached tokens where there is a cache.
        cache : KvCache, optional
            Keys and values are appended to it, and all of its tokens are seen up to each query's own place; without gradients. Its
            `seqlens` stay: add the new tokens after the last layer that shares them.

        Returns
        -------
        Tensor, [batch, seqlen, embed_dim]

        Raises
        ------
        InvalidArgument, Unsupported
            As `fovea.attention`; of a cache where gradients are recorded.
        """
        q, k, v = self._project(x, context)
        features = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks, "mask": mask, "score_mod": score_mod}
        if cache is not None:
            if context is not None or segment_ids is not None:
                raise Unsupported("MultiheadAttention: context or segment_ids beside a cache; expected neither")
            angles = None if self.cos is None else Rotary(self.cos, self.sin, positions)
            out = decode(q, cache, append_k=k, append_v=v, rotary=angles, causal=True, **features)
        else:
            if self.cos is not None:
                if context is not None:
                    raise Unsupported("MultiheadAttention: context beside a rotary embedding; expected one of them")
                q, k = (rotary(y, self.cos, self.sin, positions=positions) for y in (q, k))
            dropout = random_dropout(self.dropout, q) if self.training else None
            out = attention(q, k, v, causal=is_causal, segment_ids=segment_ids, dropout=dropout, **features)
        return self.out_proj(out.flatten(2))

    def _project(self, x: Any, context: Any) -> list[Any]:
        if context is None:
            parts = self.in_proj(x).split(self._widths, -1)
        else:
            weights = self.in_proj.weight.split(self._widths)
            biases = (None,) * 3 if self.in_proj.bias is None else self.in_proj.bias.split(self._widths)
            parts = [torch.nn.functional.linear(y, w, b) for y, w, b in zip((x, context, context), weights, biases)]
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def extra_repr(self) -> str:
        """Numbers of heads and their width, as PyTorch prints them."""
        return f"num_heads={self.num_heads}, num_heads_kv={self.num_heads_kv}, head_dim={self.head_dim}"
