"""vLLM on Fovea: an attention backend for its paged caches, by the name that vLLM keeps for others.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds it by the entry point `vllm.general_plugins` of this package; nothing changes for who does not name it.
"""

from __future__ import annotations

import logging

from ...errors import Unsupported

__all__ = ["register"]

_BACKEND = "fovea.compat.vllm.backend.FoveaAttentionBackend"


def register() -> None:
    """Makes the backend vLLM's `CUSTOM`.

    Raises
    ------
    Unsupported
        This vLLM has no such name, or another package has taken it.
    """
    try:
        from vllm.v1.attention import backend as _  # noqa: F401
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise Unsupported(f"vllm.register: {error}; expected vLLM with vllm.v1.attention.backend and its registry") from None
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _BACKEND:
        raise Unsupported(f"vllm.register: CUSTOM is {custom.get_path()} already; expected it free: custom.clear_override() frees it")
    register_backend(custom, _BACKEND)


def plugin() -> None:
    """`register` where vLLM looks for plugins: who uses another backend is not to fail by this one."""
    try:
        register()
    except Unsupported as reason:
        logging.getLogger(__name__).info("not registered: %s", reason)
