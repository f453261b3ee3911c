# SPDX-License-Identifier: Apache-2.0
"""The collectives of `jax.lax`, with its signatures and meanings, on the daemon.

    from jax_dfccl import lax as dlax  # dlax.psum(x, "i")

What `jax.lax` computes, these compute, with the same types; where it refuses a call or lets the
compiler stumble over it, these give the value or say what is wrong. docs/lax.md lists the
differences. To give calls names, keys, priorities or time limits, use the functions of `jax_dfccl`.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_dfccl._all_reduce import all_reduce as _all_reduce

__all__ = ["pmax", "pmean", "pmin", "psum"]

AxisName = Hashable | Sequence[Hashable]
AxisIndexGroups = Sequence[Sequence[int]] | None


def psum(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The sum over a mapped axis, as `jax.lax.psum`.

    Args:
        x: an array, a scalar, or a pytree of them; bool is summed as int32. If nothing in it is
            traced, it is multiplied by the number of members, so that `psum(1, axis_name)` is that
            number.
        axis_name: an axis, or a tuple of axes (possibly empty). An int among them is a dimension
            of the array itself.
        axis_index_groups: splits the axis into groups, which sum for themselves; sizes may differ.
    """
    axes = _axes(axis_name)
    if not axes:
        return x
    x = jax.tree.map(_bool_as_int32, x)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
        return _reduce(x, axes, "sum", axis_index_groups)
    _check_positional(axes, axis_index_groups)
    named, dimensions = _partition(axes)
    size = _all_reduce(1, named, axis_index_groups=axis_index_groups)

    def multiplied(leaf: Any) -> Any:
        if dimensions:
            leaf = _reduce_dimensions(leaf, dimensions, "sum")
        if isinstance(leaf, (np.ndarray, np.generic, jax.Array)):  # whose dtype it keeps
            like_it: Any = (np if isinstance(size, int) else jnp).asarray(size, leaf.dtype)
            return leaf * like_it
        return leaf * size

    return jax.tree.map(multiplied, x)


def pmean(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The mean over a mapped axis, as `jax.lax.pmean`: the sum divided by the number of members.

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        axis_index_groups: as for `psum`.
    """
    axes = _axes(axis_name)
    if any(isinstance(axis, int) for axis in axes):
        raise ValueError(f"pmean: axis_name {axis_name!r} has an int; it must name axes")
    size = psum(1, axes, axis_index_groups=axis_index_groups)
    total = psum(x, axes, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda leaf: leaf / size, total)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The maximum over a mapped axis, as `jax.lax.pmax`. It can be differentiated.

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: as for `psum`.
        axis_index_groups: as for `psum`.
    """
    return _reduce(x, _axes(axis_name), "max", axis_index_groups)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The minimum over a mapped axis, as `jax.lax.pmin`. It can be differentiated.

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: as for `psum`.
        axis_index_groups: as for `psum`.
    """
    return _reduce(x, _axes(axis_name), "min", axis_index_groups)


def _axes(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _check_positional(axes: tuple[Any, ...], groups: Any) -> None:
    if groups is not None and any(isinstance(axis, int) for axis in axes):
        raise ValueError("axis_index_groups only supported for reductions over just named axes")


def _reduce(x: Any, axes: tuple[Any, ...], op: str, groups: Any) -> Any:
    _check_positional(axes, groups)
    named, dimensions = _partition(axes)

    def of_leaf(leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        if dimensions:
            array = _reduce_dimensions(array, dimensions, op)
        return _all_reduce(array, named, op=op, axis_index_groups=groups)

    return jax.tree.map(of_leaf, x)


def _reduce_dimensions(x: Any, dimensions: tuple[int, ...], op: str) -> Any:
    array = jnp.asarray(x)
    return getattr(jnp, op)(array, axis=dimensions).astype(array.dtype)


def _partition(axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Named axes, and dimensions of the array itself."""
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    return named, tuple(axis for axis in axes if isinstance(axis, int))


def _bool_as_int32(leaf: Any) -> Any:
    if jnp.result_type(leaf) != np.bool_:
        return leaf
    return (jnp if isinstance(leaf, jax.Array) else np).asarray(leaf, np.int32)
