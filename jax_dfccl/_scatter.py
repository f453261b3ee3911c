# SPDX-License-Identifier: Apache-2.0
"""The public functions that give each member its part: `reduce_scatter` and `scatter`."""

from typing import Any, Unpack

from jax_dfccl._arguments import AxisName, Call, Options, check, check_member
from jax_dfccl._parts import divided
from jax_dfccl._reductions import check_op, moved, reduced


def reduce_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    op: str = "sum",
    scale: Any = None,
    scatter_dimension: int = 0,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Reduces over the members and gives each a part, as `jax.lax.psum_scatter` does.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def sums(rows):
    ...     return jax_dfccl.reduce_scatter(rows[0], "i", tiled=True)
    >>> n = jax.device_count()
    >>> x = np.arange(2 * n * n).reshape(n, 2 * n)
    >>> y = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x.sum(0))

    **Order.** Matched, and folded in the same order, as `all_reduce` is. Every member waits for
    all.

    **Differentiation.** For sums and means linear, with `all_gather` as transpose; other folds as
    for `all_reduce`.

    Args:
        x: an array or a pytree of them, the same shapes on all members, of the dtypes that
            `all_reduce` takes.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        op: as for `all_reduce`.
        scale: as for `all_reduce`.
        scatter_dimension: the dimension that holds the members' parts, by rank.
        tiled: whether the members' parts are pieces of that dimension and keep it, and not its
            single elements, which lose it.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        Like `x`, with this member's part of `scatter_dimension`.

    Raises:
        As `all_reduce` does, and ValueError for a dimension that does not divide into the members'
        parts.
    """
    check_op("reduce_scatter", op, scale)
    call = check("reduce_scatter", axis_name, **options)
    if not call.axes:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        parts = divided(call, leaf, "scatter_dimension", scatter_dimension, where, tiled=tiled)
        return reduced(call, "reduce_scatter", parts, where, op, scale)

    return call.map(x, of_leaf)


def scatter(
    x: Any,
    axis_name: AxisName,
    root: int,
    *,
    axis: int = 0,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Gives each member its part of what one member has.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def from_first(rows):
    ...     return jax_dfccl.scatter(rows[0], "i", 0, tiled=True)
    >>> n = jax.device_count()
    >>> x = np.arange(2 * n * n).reshape(n, 2 * n)
    >>> y = jax.jit(jax.shard_map(from_first, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x[0])

    **Order.** Matched as `all_reduce` is. The root waits until all have their parts, the others for
    the root only.

    **Differentiation.** Linear; the transpose is `gather` with the same root.

    Args:
        x: an array or a pytree of them, the same shapes on all members, of any dtype. Only the
            root's values count.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        root: the rank in the group (negative: from the end) of the member whose array is dealt out.
        axis: the dimension that holds the members' parts, by rank.
        tiled: as for `reduce_scatter`.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        Like `x`, with this member's part of `axis`.

    Raises:
        As `all_reduce` does, and ValueError for a dimension that does not divide into the members'
        parts.
    """
    call = check("scatter", axis_name, **options)
    root = check_member("scatter", "root", root, call.group_size)
    if not call.axes:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        parts = divided(call, leaf, "axis", axis, where, tiled=tiled)
        return moved(call, "scatter", parts, root=root)

    return call.map(x, of_leaf)
