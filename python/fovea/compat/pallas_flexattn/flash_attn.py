"""Attention of [batch, heads, seqlen, head_dim], masks and scores as callables."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import InvalidArgument
from ...jax import attention
from .block_mask import BlockMask
from .mask_mod import MaskMod

_SIZES = ("block_r", "block_c", "num_warps", "num_stages", "interpret")


class _Call(NamedTuple):
    """What `attention` takes of a call."""

    causal: bool
    window: tuple[int | None, int | None] | None
    mask_mod: Callable[..., Any] | None


def _window(size: Any) -> tuple[int | None, int | None] | None:
    """-1 leaves a side open."""
    if size is None:
        return None
    left, right = (size, size) if isinstance(size, int) else size
    return (None if left < 0 else left), (None if right < 0 else right)


def _of_places(mask_mod: MaskMod) -> Callable[..., Any]:
    """A mask of (q_idx, kv_idx), or of (batch, head, q_idx, kv_idx), as the latter."""
    if len(inspect.signature(mask_mod).parameters) == 4:
        return mask_mod
    return lambda b, h, q_idx, kv_idx: mask_mod(q_idx, kv_idx)


def _seen(mask_mod: MaskMod | None, block_mask: BlockMask | None) -> Callable[..., Any] | None:
    """Both masks as one."""
    of_places = None if mask_mod is None else _of_places(mask_mod)
    if block_mask is None:
        return of_places
    blocks, size = block_mask.is_visible(), block_mask.block_size

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_listed = blocks[q_idx // size, kv_idx // size]
        return is_listed if of_places is None else is_listed & of_places(b, h, q_idx, kv_idx)

    return mask


def _read(function: str, mask_mod: Any, sizes: tuple[Any, ...], named: dict[str, Any]) -> _Call:
    """The newer call, whose fourth argument is a mask, or the first one's: causal and a window."""
    causal, window = named.pop("causal", None), named.pop("window_size", named.pop("sliding_window", None))
    block_mask = named.pop("block_mask", None)
    if isinstance(mask_mod, bool):
        causal, mask_mod = mask_mod, None
        if sizes:
            window, *rest = sizes
            sizes = tuple(rest)
    unknown = [name for name in named if name not in _SIZES]
    if unknown or len(sizes) > len(_SIZES):
        got = unknown[0] if unknown else f"{len(sizes)} sizes"
        raise InvalidArgument(f"{function}: got {got}; expected some of {', '.join(_SIZES)}")
    # Beside causal the window is not looked at, as there.
    return _Call(bool(causal), None if causal else _window(window), _seen(mask_mod, block_mask))


def _attend(call: _Call, q: Any, k: Any, v: Any, score_mod: Any) -> tuple[Any, Any]:
    return attention(  # type: ignore[no-any-return]
        q, k, v, layout="bhsd", return_lse=True, causal=call.causal, window=call.window, mask_mod=call.mask_mod, score_mod=score_mod
    )


def flash_attention(q: Any, k: Any, v: Any, mask_mod: Any = None, *sizes: Any, score_mod: Any = None, **named: Any) -> Any:
    """Attention; every derivative that `fovea.jax.attention` has.

    Parameters
    ----------
    q, k, v : array, [batch, num_heads, seqlen, head_dim]
        k and v may have fewer heads and another length.
    mask_mod : callable of (q_idx, kv_idx) or of (batch, head, q_idx, kv_idx), optional
        A bool in its place is `causal`, behind which stands `window_size`: the package's first signature.
    *sizes
        block_r, block_c, num_warps, num_stages, interpret: taken, since plans choose their own.
    score_mod : callable of (score, batch, head, q_idx, kv_idx), optional
    **named
        `causal`, `window_size` or `sliding_window`, (left, right) with -1 for an open side, `block_mask`, and sizes.

    Returns
    -------
    array, as q; 0 where a row sees no key
    """
    return _attend(_read("flash_attention", mask_mod, sizes, named), q, k, v, score_mod)[0]


def flash_attention_fwd(q: Any, k: Any, v: Any, mask_mod: Any = None, *sizes: Any, score_mod: Any = None, **named: Any) -> tuple[Any, Any]:
    """As `flash_attention`, and lse: [batch, num_heads, seqlen], of q's dtype."""
    out, lse = _attend(_read("flash_attention_fwd", mask_mod, sizes, named), q, k, v, score_mod)
    return out, lse.astype(q.dtype)


def flash_attention_bwd(
    q: Any, k: Any, v: Any, o: Any, logsumexp: Any, do: Any, mask_mod: Any = None, *sizes: Any, score_mod: Any = None, **named: Any
) -> Any:
    """(dq, dk, dv). `o` and `logsumexp` are made anew, since logsumexp may have been rounded to q's dtype."""
    call = _read("flash_attention_bwd", mask_mod, sizes, named)
    _, pull = jax.vjp(lambda q, k, v: _attend(call, q, k, v, score_mod)[0], q, k, v)
    return pull(do)


@functools.partial(jax.jit, static_argnames="mask_mod")
def mha_reference(q: Any, k: Any, v: Any, mask_mod: MaskMod | None = None) -> Any:
    """The plain formula, for comparisons."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask_mod is not None:
        b, h, q_idx, kv_idx = jnp.ix_(*(jnp.arange(extent) for extent in scores.shape))
        scores = jnp.where(_of_places(mask_mod)(b, h, q_idx, kv_idx), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1, keepdims=True)
    return jnp.einsum("bhqk,bhkd->bhqd", jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)), v)
