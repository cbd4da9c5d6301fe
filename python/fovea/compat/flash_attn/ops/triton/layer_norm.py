"""flash_attn.ops.triton.layer_norm by PyTorch's operators: dropout, sum with the residual and norm in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _dropped(x: Any, dropout_p: float) -> tuple[Any, Any]:
    """x with elements dropped, and what was kept."""
    kept = torch.rand_like(x, dtype=torch.float32) >= dropout_p
    return x * kept / (1 - dropout_p), kept


def _normalized(x: Any, weight: Any, bias: Any, eps: float, is_rms_norm: bool, zero_centered_weight: bool) -> Any:
    """In f32."""
    x = x.float()
    centered = x if is_rms_norm else x - x.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    y = y * (weight.float() + 1 if zero_centered_weight else weight.float())
    return y if bias is None else y + bias.float()


def _into(out: Any, made: Any) -> Any:
    return made if out is None else out.copy_(made)


def layer_norm_fn(
    x: Any, weight: Any, bias: Any, residual: Any = None, x1: Any = None, weight1: Any = None, bias1: Any = None, eps: float = 1e-6,
    dropout_p: float = 0.0, rowscale: Any = None, prenorm: bool = False, residual_in_fp32: bool = False,
    zero_centered_weight: bool = False, is_rms_norm: bool = False, return_dropout_mask: bool = False, out_dtype: Any = None,
    out: Any = None, residual_out: Any = None,
) -> Any:  # fmt: skip
    """Norm of r = dropout(x * rowscale) + dropout(x1) + residual.

    Parameters
    ----------
    x, x1, residual : Tensor, [..., n]
    weight, bias, weight1, bias1 : Tensor, [n]
        weight1 asks for a second result of the same r.
    rowscale : Tensor, [...], optional
    prenorm : bool
        Returns r, too.
    residual_in_fp32 : bool
        The dtype of r where no residual is given; else it is residual's.
    return_dropout_mask : bool
        Returns what dropout kept of x and of x1, None where nothing is dropped.

    Returns
    -------
    y, or (y, y1 with weight1, r with prenorm, both masks with return_dropout_mask)
    """
    summed, kept = (x if rowscale is None else x * rowscale[..., None]), [None, None]
    if dropout_p:
        summed, kept[0] = _dropped(summed, dropout_p)
    if x1 is not None:
        other, kept[1] = _dropped(x1, dropout_p) if dropout_p else (x1, None)
        summed = summed + other
    if residual is not None:
        summed = summed.float() + residual
    residual_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    options: dict[str, Any] = {"eps": eps, "is_rms_norm": is_rms_norm, "zero_centered_weight": zero_centered_weight}
    dtype = x.dtype if out_dtype is None else out_dtype
    results = [_into(out, _normalized(summed, weight, bias, **options).to(dtype))]
    if weight1 is not None:
        results.append(_normalized(summed, weight1, bias1, **options).to(dtype))
    if prenorm:
        results.append(_into(residual_out, summed.to(residual_dtype)))
    if return_dropout_mask:
        results += kept
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Any, weight: Any, bias: Any, residual: Any = None, x1: Any = None, weight1: Any = None, bias1: Any = None, eps: float = 1e-6,
    dropout_p: float = 0.0, rowscale: Any = None, prenorm: bool = False, residual_in_fp32: bool = False,
    zero_centered_weight: bool = False, return_dropout_mask: bool = False, out_dtype: Any = None, out: Any = None,
    residual_out: Any = None,
) -> Any:  # fmt: skip
    """`layer_norm_fn` by the root of the mean square alone."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32, zero_centered_weight, True,
        return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


class RMSNorm(nn.Module):  # type: ignore[misc, unused-ignore]
    """x / sqrt(mean(x²) + eps) * weight, behind dropout and the sum with a residual."""

    bias: None

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, zero_centered_weight: bool = False, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = nn.Dropout(dropout_p) if dropout_p else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A norm and nothing else."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(self, x: Any, residual: Any = None, prenorm: bool = False, residual_in_fp32: bool = False) -> Any:
        """As `rms_norm_fn`."""
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(
            x, self.weight, None, residual=residual, eps=self.eps, dropout_p=dropout_p, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip
