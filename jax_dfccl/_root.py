# SPDX-License-Identifier: Apache-2.0
"""The public functions from one member and to one member: `broadcast` and `reduce`."""

from typing import Any, Unpack

from jax_dfccl._arguments import AxisName, Call, Options, check, check_member
from jax_dfccl._reductions import check_op, moved, reduced


def broadcast(x: Any, axis_name: AxisName, root: int, **options: Unpack[Options]) -> Any:
    """Gives every member what one member has, as `jax.lax.pbroadcast` does.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def from_last(x):
    ...     return jax_dfccl.broadcast(x, "i", -1)
    >>> x = np.arange(jax.device_count())
    >>> y = jax.jit(jax.shard_map(from_last, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, np.full_like(x, x[-1]))

    **Order.** Matched as `all_reduce` is. The root waits until all have its array, the others for
    the root only.

    **Differentiation.** Linear; the transpose is `reduce` with the same root.

    Args:
        x: an array, a scalar or a pytree of them, the same shapes on all members, of any dtype.
            Only the root's values count.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        root: the rank in the group (negative: from the end) of the member that has the values.
        **options: as for `all_reduce`.

    Returns:
        Like `x`. Under `check_vma` it varies over `axis_name`, as in JAX.

    Raises:
        As `all_reduce` does.
    """
    call = check("broadcast", axis_name, **options)
    root = check_member("broadcast", "root", root, call.smallest_group)
    if not call.axes:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        del where
        return moved(call, "broadcast", leaf, root=root)

    return call.map(x, of_leaf)


def reduce(
    x: Any,
    axis_name: AxisName,
    root: int,
    *,
    op: str = "sum",
    scale: Any = None,
    **options: Unpack[Options],
) -> Any:
    """Reduces over the members; one member gets the result, the others zeros.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def at_first(x):
    ...     return jax_dfccl.reduce(x, "i", 0, op="max")
    >>> x = np.arange(jax.device_count())
    >>> y = jax.jit(jax.shard_map(at_first, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, np.where(x == 0, x.max(), 0))

    **Order.** Matched, and folded in the same order, as `all_reduce` is. Every member waits for
    all.

    **Differentiation.** For sums and means linear, with a broadcast from the root as transpose;
    other folds as for `all_reduce`.

    Args:
        x: as for `all_reduce`.
        axis_name: as for `all_reduce`.
        root: the rank in the group (negative: from the end) of the member that gets the result.
        op: as for `all_reduce`.
        scale: as for `all_reduce`.
        **options: as for `all_reduce`.

    Returns:
        At the root what `all_reduce` returns, elsewhere zeros.

    Raises:
        As `all_reduce` does.
    """
    check_op("reduce", op, scale)
    call = check("reduce", axis_name, **options)
    root = check_member("reduce", "root", root, call.smallest_group)
    if not call.axes and scale is None:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        return reduced(call, "reduce", leaf, where, op, scale, root=root)

    return call.map(x, of_leaf)
