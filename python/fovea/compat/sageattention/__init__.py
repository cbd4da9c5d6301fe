"""SageAttention's functions by Fovea's recipes of eight bits (guide: quantization.md), with masks, windows and programs, too.

`fovea.compat.install("sageattention")` puts it where ``import sageattention`` finds it; ``python -m fovea.compat list
sageattention`` says what each argument does.
"""

from .core import (
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

#: The version whose functions these are.
__version__ = "2.2.0"

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_varlen",
]
