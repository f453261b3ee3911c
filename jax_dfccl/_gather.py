# SPDX-License-Identifier: Apache-2.0
"""The public functions that put members' arrays together."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_dfccl._arguments import AxisName, Call, Options, check, check_dimension, check_member
from jax_dfccl._exchange import exchanged
from jax_dfccl._parts import joined
from jax_dfccl._reductions import moved


def all_gather(
    x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False, **options: Unpack[Options]
) -> Any:
    """Gives every member the arrays of all, as `jax.lax.all_gather` does.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def whole(x):
    ...     return jax_dfccl.all_gather(x, "i", tiled=True)
    >>> x = np.arange(2 * jax.device_count())
    >>> y = jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, np.tile(x, jax.device_count()))

    **Order.** Matched as `all_reduce` is. Every member waits for all.

    **Differentiation.** Linear; the transpose is `reduce_scatter`.

    Args:
        x: an array, a scalar or a pytree of them, the same shapes on all members, of any dtype.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        axis: the dimension of the result along which the members' arrays are put, by rank.
        tiled: whether that dimension is one of `x`, which grows, and not a new one.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        Like `x`, with members along `axis`. Under `check_vma` it varies over `axis_name`.

    Raises:
        As `all_reduce` does.
    """
    call = check("all_gather", axis_name, **options)
    return gathered(call, "all_gather", x, axis, tiled)


def gather(
    x: Any,
    axis_name: AxisName,
    root: int,
    *,
    axis: int = 0,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Gives one member the arrays of all; the others get zeros.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def at_last(x):
    ...     return jax_dfccl.gather(x, "i", -1, tiled=True)
    >>> x = np.arange(jax.device_count())
    >>> y = jax.jit(jax.shard_map(at_last, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y[-len(x):], x)
    >>> y[:-len(x)].any().item()
    False

    **Order.** Matched as `all_reduce` is. The root waits for all, the others for the root only.

    **Differentiation.** Linear; the transpose is `scatter` with the same root.

    Args:
        x: an array, a scalar or a pytree of them, the same shapes on all members, of any dtype.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        root: the rank in the group (negative: from the end) of the member that gets them.
        axis: as for `all_gather`.
        tiled: as for `all_gather`.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        At the root what `all_gather` returns, elsewhere zeros.

    Raises:
        As `all_reduce` does.
    """
    call = check("gather", axis_name, **options)
    root = check_member("gather", "root", root, call.group_size)
    return gathered(call, "gather", x, axis, tiled, root=root)


def all_gather_v(
    x: Any, axis_name: AxisName, sizes: Any, *, rows: int | None = None, **options: Unpack[Options]
) -> Any:
    """Gives every member the rows of all, of which each may have another number.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> n = jax.device_count()
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def whole(x):  # the first member has one row, the others have two
    ...     return jax_dfccl.all_gather_v(x, "i", [1] + [2] * (n - 1))
    >>> x = np.arange(2 * n)
    >>> y = jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, np.tile(np.delete(x, 1), n))

    **Order.** Matched as `all_reduce` is. Every member waits for all.

    **Differentiation.** Linear in `x`; the transpose adds up what all members' rows bring back.

    Args:
        x: an array or a pytree of them, the same shapes on all members, of any dtype: the first
            rows are given, the others are padding.
        axis_name: as for `all_reduce`.
        sizes: how many rows each member of the group gives, by rank: a list of ints, or an array
            that is known at run time only; equal on all members.
        rows: how many rows the result has; the sum of a list by default. More must not come.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        The members' rows one after the other, then zeros.

    Raises:
        As `all_reduce` does, and ValueError for sizes that are no list of one size for each member.
    """
    function = "all_gather_v"
    call = check(function, axis_name, **options)
    members = call.group_size
    if rows is None:
        if isinstance(sizes, jax.Array):
            raise ValueError(
                f"{function}: sizes is an array, whose sum is not known while tracing; say how "
                "many rows the result has: rows="
            )
        rows = int(np.sum(sizes))
    given = jnp.asarray(sizes)
    if given.shape != (members,) or not jnp.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"{function}: sizes is {given.dtype}{list(given.shape)}; it must be one integer for "
            f"each of the {members} members"
        )
    given = given.astype(np.int32)
    own = call.rank
    begins = (jnp.cumsum(given) - given)[own]
    places = [jnp.full(members, value, np.int32) for value in (0, given[own], begins)]

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        if leaf.ndim == 0:
            raise ValueError(f"{function}: {where} is a scalar; it must have rows")
        output = jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        return exchanged(call, leaf, output, *places, given)

    return call.map(x, of_leaf)


def gathered(call: Call, kind: str, x: Any, axis: int, tiled: bool, **params: Any) -> Any:
    """Binds a kind that gives parts, and puts these along a dimension of the result."""
    if not call.axes:
        return x
    _ = call.group_size  # refuses groups of different sizes

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        del where
        at = check_dimension(call.function, "axis", axis, leaf.ndim + (not tiled))
        parts = moved(call, kind, leaf, **params)
        return joined(parts, at, tiled=tiled)

    return call.map(x, of_leaf)
