# SPDX-License-Identifier: Apache-2.0
"""The collectives of `jax.lax`, with its signatures and meanings, on the daemon.

    from jax_dfccl import lax as dlax  # dlax.psum(x, "i")

What `jax.lax` computes, these compute, with the same types; where it refuses a call or lets the
compiler stumble over it, these give the value or say what is wrong. docs/lax.md lists the
differences. To give calls names, keys, priorities or time limits, use the functions of `jax_dfccl`,
whose documentation also says who waits for whom, what is raised, and how each is differentiated.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_dfccl import _exchange, _gather, _permute, _root, _scatter
from jax_dfccl._all_reduce import all_reduce as _all_reduce

__all__ = [
    "all_gather",
    "all_to_all",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
]

AxisName = Hashable | Sequence[Hashable]
AxisIndexGroups = Sequence[Sequence[int]] | None


def psum(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The sum over a mapped axis, as `jax.lax.psum`.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.psum(x, "i"), axis_name="i")
    >>> f(np.arange(3)).tolist()
    [3, 3, 3]

    Args:
        x: an array, a scalar, or a pytree of them; bool is summed as int32. If nothing in it is
            traced, it is multiplied by the number of members, so that `psum(1, axis_name)` is that
            number.
        axis_name: an axis, or a tuple of axes (possibly empty). An int among them is a dimension
            of the array itself.
        axis_index_groups: splits the axis into groups, which sum for themselves; sizes may differ.

    Returns:
        Like `x`, without the dimensions that `axis_name` names.
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

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.pmean(x, "i"), axis_name="i")
    >>> f(np.arange(3)).tolist()
    [1.0, 1.0, 1.0]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        axis_index_groups: as for `psum`.

    Returns:
        Like `x`; of integers, floats.
    """
    axes = _axes(axis_name)
    if any(isinstance(axis, int) for axis in axes):
        raise ValueError(f"pmean: axis_name {axis_name!r} has an int; it must name axes")
    size = psum(1, axes, axis_index_groups=axis_index_groups)
    total = psum(x, axes, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda leaf: leaf / size, total)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The maximum over a mapped axis, as `jax.lax.pmax`. It can be differentiated.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.pmax(x, "i"), axis_name="i")
    >>> f(np.arange(3)).tolist()
    [2, 2, 2]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: as for `psum`.
        axis_index_groups: as for `psum`.

    Returns:
        Like `x`, without the dimensions that `axis_name` names.
    """
    return _reduce(x, _axes(axis_name), "max", axis_index_groups)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The minimum over a mapped axis, as `jax.lax.pmin`. It can be differentiated.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.pmin(x, "i"), axis_name="i")
    >>> f(np.arange(3)).tolist()
    [0, 0, 0]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: as for `psum`.
        axis_index_groups: as for `psum`.

    Returns:
        Like `x`, without the dimensions that `axis_name` names.
    """
    return _reduce(x, _axes(axis_name), "min", axis_index_groups)


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:
    """The arrays of all members along a dimension, as `jax.lax.all_gather`.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.all_gather(x, "i"), axis_name="i")
    >>> f(np.arange(2)).tolist()
    [[0, 1], [0, 1]]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        axis_index_groups: groups of one size, which gather for themselves.
        axis: the dimension of the result.
        tiled: whether that dimension is one of `x`.
        to: "varying"; the other types of result are there under `override_lax` only.

    Returns:
        Like `x`, with a dimension of all members, or with `axis` that many times as large.
    """
    if to != "varying":
        raise ValueError(
            f"all_gather: to is {to!r}; it must be 'varying' (for 'invarying' and 'reduced' use "
            "jax.lax.all_gather under jax_dfccl.override_lax)"
        )
    return _gather.all_gather(
        x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled
    )


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Any:
    """This member's part of the sum over a mapped axis, as `jax.lax.psum_scatter`.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.psum_scatter(x, "i"), axis_name="i")
    >>> f(np.arange(4).reshape(2, 2)).tolist()
    [2, 4]

    Args:
        x: an array or a pytree of them; bool is summed as int32.
        axis_name: an axis, or a tuple of axes.
        scatter_dimension: the dimension that holds the parts.
        axis_index_groups: groups of one size, which sum for themselves.
        tiled: whether the dimension stays, with its size divided by the number of members.

    Returns:
        Like `x`, with this member's part of `scatter_dimension`.
    """
    return _scatter.reduce_scatter(
        x,
        axis_name,
        scatter_dimension=scatter_dimension,
        axis_index_groups=axis_index_groups,
        tiled=tiled,
    )


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Any:
    """Maps a dimension and puts the mapped axis into another, as `jax.lax.all_to_all`.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.all_to_all(x, "i", 0, 0), axis_name="i")
    >>> f(np.arange(4).reshape(2, 2)).tolist()
    [[0, 2], [1, 3]]

    Args:
        x: an array or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        split_axis: the dimension of `x` that is dealt out to the members.
        concat_axis: the dimension of the result along which theirs are put.
        axis_index_groups: groups of one size, which exchange for themselves.
        tiled: whether no dimension is added or removed.

    Returns:
        Like `x`, with `split_axis` divided by and `concat_axis` multiplied by the number of
        members.
    """
    if not _axes(axis_name):
        return x if tiled else jax.tree.map(lambda y: _moved_one(y, split_axis, concat_axis), x)
    return _exchange.all_to_all(
        x, axis_name, split_axis, concat_axis, axis_index_groups=axis_index_groups, tiled=tiled
    )


def pswapaxes(
    x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: AxisIndexGroups = None
) -> Any:
    """Swaps the mapped axis with a dimension of the same size, as `jax.lax.pswapaxes`.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.pswapaxes(x, "i", 0), axis_name="i")
    >>> f(np.arange(4).reshape(2, 2)).tolist()
    [[0, 2], [1, 3]]

    Args:
        x: an array or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        axis: the dimension.
        axis_index_groups: groups of one size, which exchange for themselves.

    Returns:
        Like `x`.
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def ppermute(x: Any, axis_name: AxisName, perm: Iterable[tuple[int, int]]) -> Any:
    """Sends arrays from member to member, as `jax.lax.ppermute`; zeros where none comes.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.ppermute(x, "i", [(0, 1), (1, 2)]), axis_name="i")
    >>> f(np.arange(1, 4)).tolist()
    [0, 1, 2]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        perm: pairs (source, destination).

    Returns:
        Like `x`.
    """
    perm = list(perm)  # which may be an iterator
    y = _permute.ppermute(x, axis_name, perm)
    # Along no axis there is one member, which may or may not be its own source.
    return y if _axes(axis_name) or perm else jax.tree.map(jnp.zeros_like, y)


def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:
    """Sends arrays from member to member, as `jax.lax.pshuffle`.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.pshuffle(x, "i", [2, 0, 1]), axis_name="i")
    >>> f(np.arange(3)).tolist()
    [2, 0, 1]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        perm: the source of each member's result; every member once.

    Returns:
        Like `x`.
    """
    if sorted(perm) != list(range(len(perm))):
        raise ValueError(f"`perm` does not represent a permutation: {perm}")
    return ppermute(x, axis_name, list(zip(perm, range(len(perm)), strict=True)))


def pbroadcast(x: Any, axis_name: AxisName, source: int) -> Any:
    """What one member has, as `jax.lax.pbroadcast`, which is not there on CPU.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> f = jax.vmap(lambda x: dlax.pbroadcast(x, "i", 2), axis_name="i")
    >>> f(np.arange(3)).tolist()
    [2, 2, 2]

    Args:
        x: an array, a scalar, or a pytree of them.
        axis_name: an axis, or a tuple of axes.
        source: the member's index.

    Returns:
        Like `x`.
    """
    return _root.broadcast(x, axis_name, source)


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
) -> Any:
    """Sends rows to every member, as `jax.lax.ragged_all_to_all`, which is not there on CPU.

    >>> import jax, numpy as np
    >>> from jax_dfccl import lax as dlax
    >>> def to_the_right(row):  # of two members, the first sends its row to the second
    ...     me = jax.lax.axis_index("i")
    ...     send, place = np.array([0, 1]) * (me == 0), np.zeros(2, int)
    ...     receive = np.array([1, 0]) * (me == 1)
    ...     return dlax.ragged_all_to_all(
    ...         row, 0 * row, place, send, place, receive, axis_name="i")
    >>> jax.vmap(to_the_right, axis_name="i")(np.array([[7], [8]])).tolist()
    [[0], [7]]

    Args:
        operand: the array whose rows are sent.
        output: what the result is where nothing is received.
        input_offsets: where each slice begins in `operand`.
        send_sizes: its number of rows.
        output_offsets: where it begins in the receiver's result.
        recv_sizes: the number of rows that come from each member.
        axis_name: an axis, or a tuple of axes.
        axis_index_groups: groups of one size, which exchange for themselves.

    Returns:
        `output` with the received rows.
    """
    return _exchange.ragged_all_to_all(
        operand,
        output,
        input_offsets,
        send_sizes,
        output_offsets,
        recv_sizes,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
    )


def _moved_one(x: Any, split_axis: int, concat_axis: int) -> Any:
    if x.shape[split_axis] != 1:
        raise ValueError(
            f"all_to_all: dimension {split_axis} has size {x.shape[split_axis]}, but along no axis "
            "there is one member"
        )
    return jnp.moveaxis(x, split_axis, concat_axis)


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
