"""The mesh of a call, and its axis of context parallelism."""

from __future__ import annotations

from typing import Any, Callable, Optional

import jax
from jax._src.mesh import thread_resources

from .specs import Axes, get_attention_specs
from .typing import Specs


def mesh_or_global(mesh: Any) -> Any:
    """`mesh`, or that of the enclosing ``jax.set_mesh(mesh)`` or ``with mesh:``.

    Raises
    ------
    ValueError
        There is none.
    """
    if mesh is not None:
        return mesh
    found = jax.sharding.get_abstract_mesh()
    if found.empty:
        found = thread_resources.env.physical_mesh  # of `with mesh:`; JAX has no public name for it
    if found.empty:
        raise ValueError("mesh is None and no mesh is set; pass mesh=, or call within `with jax.set_mesh(mesh):`.")
    return found


def shard_map(f: Callable[..., Any], in_specs: Specs, out_specs: Specs, mesh: Any = None) -> Any:
    """`jax.shard_map` over `mesh`, or the one that is set."""
    return jax.shard_map(f, mesh=mesh_or_global(mesh), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def size_of(mesh: Any, axis: Optional[str]) -> int:
    """Devices along an axis.

    Raises
    ------
    ValueError
        The mesh has no such axis.
    """
    shape = dict(mesh_or_global(mesh).shape)
    if axis not in shape:
        raise ValueError(f"Mesh axis {axis} is not present in the device mesh shape.")
    return int(shape[axis])


def get_query_context_mesh_axis_name(mesh: Any = None) -> Any:
    """The axis that the specs which hold split queries' sequences over, or None."""
    return get_attention_specs().query_specs[Axes.query_sequence]


def get_query_context_mesh_axis_size(mesh: Any = None) -> int:
    """Devices along that axis.

    Raises
    ------
    ValueError
        The specs name none, or one that the mesh has not.
    """
    return size_of(mesh, get_query_context_mesh_axis_name(mesh))
