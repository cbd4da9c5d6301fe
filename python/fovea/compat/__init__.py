"""Code that was written for other attention packages, unchanged.

    fovea.compat.install("flash_attn")            # in a program, before the host is imported
    from flash_attn import flash_attn_func

    python -m fovea.compat run --drop-in flash_attn train.py --lr 1e-4
    python -m fovea.compat list flash_attn        # what each argument does, what is refused and why

The modules are `fovea.compat.flash_attn`, `fovea.compat.flash_attn_3`, `fovea.compat.pallas_flexattn`, `fovea.compat.sageattention` (its
`blackwell` is sageattn3) and
`fovea.compat.kvax`, for who would rather import them by that name.
"""

from ._install import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
