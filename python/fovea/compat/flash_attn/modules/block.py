"""flash_attn.modules.block by PyTorch's layers: the same constructor arguments and names of weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from .mha import MHA
from .mlp import Mlp


class _DropPath(nn.Module):  # type: ignore[misc, unused-ignore]
    """Leaves out whole samples in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Any) -> Any:
        """x, or 0 for a sample that is left out; those kept are scaled up."""
        if not self.training or not self.p:
            return x
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * torch.bernoulli(x.new_full(shape, 1 - self.p)) / (1 - self.p)


def _add(x: Any, residual: Any) -> Any:
    return x if residual is None else x + residual


class Block(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention and an MLP with norms: before each of them (`prenorm`), where it takes and gives (hidden, residual), or behind.

    `mixer_cls` and `mlp_cls` are called with `dim`. `fused_dropout_add_ln`, `sequence_parallel` and `mark_shared_params` change nothing here.
    """

    def __init__(
        self, dim: int, mixer_cls: Any = None, mlp_cls: Any = None, norm_cls: Any = nn.LayerNorm, dropout_cls: Any = nn.Dropout,
        prenorm: bool = True, resid_dropout1: float = 0.0, resid_dropout2: float = 0.0, drop_path1: float = 0.0,
        drop_path2: float = 0.0, fused_dropout_add_ln: bool = False, return_residual: bool = False, residual_in_fp32: bool = False,
        sequence_parallel: bool = False, mark_shared_params: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.prenorm, self.return_residual, self.residual_in_fp32 = prenorm, return_residual, residual_in_fp32
        self.mixer = (partial(MHA, num_heads=dim // 64) if mixer_cls is None else mixer_cls)(dim)
        self.dropout1, self.drop_path1, self.norm1 = dropout_cls(resid_dropout1), _DropPath(drop_path1), norm_cls(dim)
        self.mlp = (partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls)(dim)
        self.has_mlp = not isinstance(self.mlp, nn.Identity)
        if self.has_mlp:
            self.dropout2, self.drop_path2, self.norm2 = dropout_cls(resid_dropout2), _DropPath(drop_path2), norm_cls(dim)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        """The attention's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(self, hidden_states: Any, residual: Any = None, mixer_subset: Any = None, mixer_kwargs: dict[str, Any] | None = None) -> Any:
        """(hidden, residual) with prenorm, else hidden."""
        kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            kwargs["mixer_subset"] = mixer_subset
        if not self.prenorm:
            return self._norms_behind(hidden_states, mixer_subset, kwargs)
        residual = _add(self.drop_path1(self.dropout1(hidden_states)), residual)
        hidden_states = self.mixer(self.norm1(residual.to(self.norm1.weight.dtype)), **kwargs)
        residual = residual.float() if self.residual_in_fp32 else residual
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if self.has_mlp:
            residual = self.drop_path2(self.dropout2(hidden_states)) + residual
            hidden_states = self.mlp(self.norm2(residual.to(self.norm2.weight.dtype)))
            residual = residual.float() if self.residual_in_fp32 else residual
        return hidden_states, residual

    def _norms_behind(self, hidden_states: Any, mixer_subset: Any, kwargs: dict[str, Any]) -> Any:
        made = self.mixer(hidden_states, **kwargs)
        made, hidden_states = made if self.return_residual else (made, hidden_states)
        if mixer_subset is not None:
            hidden_states = hidden_states[:, mixer_subset]
        hidden_states = self.norm1(self.drop_path1(self.dropout1(made)) + hidden_states)
        if self.has_mlp:
            made = self.mlp(hidden_states)
            made, hidden_states = made if self.return_residual else (made, hidden_states)
            hidden_states = self.norm2(self.drop_path2(self.dropout2(made)) + hidden_states)
        return hidden_states


class ParallelBlock(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention and an MLP side by side, behind norms of one residual: two norms, or one for both (`tied_norm`)."""

    def __init__(
        self, dim: int, mixer_cls: Any = None, mlp_cls: Any = None, norm_cls: Any = nn.LayerNorm, dropout_cls: Any = nn.Dropout,
        resid_dropout1: float = 0.0, resid_dropout2: float = 0.0, tied_norm: bool = False, fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False, sequence_parallel: bool = False, mark_shared_params: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tied_norm, self.residual_in_fp32 = tied_norm, residual_in_fp32
        self.mixer = (partial(MHA, num_heads=dim // 64) if mixer_cls is None else mixer_cls)(dim)
        self.dropout1, self.norm1 = dropout_cls(resid_dropout1), norm_cls(dim)
        self.mlp = (partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls)(dim)
        self.dropout2 = dropout_cls(resid_dropout2)
        if not tied_norm:
            self.norm2 = norm_cls(dim)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        """The attention's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self, hidden_states1: Any, hidden_states2: Any = None, residual: Any = None, mixer_kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any, Any]:
        """(of attention, of the MLP, residual): the next block adds them up."""
        summed = _add(self.dropout1(hidden_states1), residual)
        if hidden_states2 is not None:
            summed = summed + self.dropout2(hidden_states2)
        normed = self.norm1(summed.to(self.norm1.weight.dtype))
        beside = normed if self.tied_norm else self.norm2(summed.to(self.norm2.weight.dtype))
        summed = summed.float() if self.residual_in_fp32 else summed
        return self.mixer(normed, **(mixer_kwargs or {})), self.mlp(beside), summed
