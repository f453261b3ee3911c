# SPDX-License-Identifier: Apache-2.0
"""The public functions by which every member sends something else to every other."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_dfccl import _local
from jax_dfccl._arguments import AxisName, Call, Options, as_array, check, check_dimension
from jax_dfccl._parts import divided, joined
from jax_dfccl._primitive import RAGGED
from jax_dfccl._reductions import moved, storable


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Sends a part of every member's array to every other, as `jax.lax.all_to_all` does.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def rows_to_columns(x):
    ...     return jax_dfccl.all_to_all(x, "i", 1, 0, tiled=True)
    >>> n = jax.device_count()
    >>> x = np.arange(2 * n * n).reshape(2 * n, n)
    >>> f = jax.shard_map(rows_to_columns, mesh=mesh, in_specs=P("i"), out_specs=P(None, "i"))
    >>> np.testing.assert_array_equal(jax.jit(f)(x), x)

    **Order.** Matched as `all_reduce` is. Every member waits for all.

    **Differentiation.** Linear; the transpose sends everything back the way it came.

    Args:
        x: an array or a pytree of them, the same shapes on all members, of any dtype.
        axis_name: as for `all_reduce`. An empty tuple returns `x`.
        split_axis: the dimension of `x` that holds what goes to each member, by rank.
        concat_axis: the dimension of the result along which what came from each member is put, by
            rank.
        tiled: whether the parts are pieces of `split_axis`, which keeps the dimensions, and not
            its single elements: then `split_axis` goes, and `concat_axis` is new.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        Like `x`, with `split_axis` divided by and `concat_axis` multiplied by the number of
        members.

    Raises:
        As `all_reduce` does, and ValueError for a dimension that does not divide into the members'
        parts.
    """
    call = check("all_to_all", axis_name, **options)
    if not call.axes:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        at = check_dimension(call.function, "concat_axis", concat_axis, leaf.ndim)
        parts = divided(call, leaf, "split_axis", split_axis, where, tiled=tiled)
        return joined(moved(call, "all_to_all", parts), at, tiled=tiled)

    return call.map(x, of_leaf)


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    **options: Unpack[Options],
) -> Any:
    """Sends rows to every member, as many as it says, as `jax.lax.ragged_all_to_all` does.

    >>> import jax, jax.numpy as jnp, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> n = jax.device_count()
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def to_the_last(rows):  # each member sends its row, once
    ...     me, last = jax.lax.axis_index("i"), jnp.arange(n) == n - 1
    ...     sizes = last.astype(int)
    ...     received = jnp.where(me == n - 1, 1, 0) * jnp.ones(n, int)
    ...     return jax_dfccl.ragged_all_to_all(
    ...         rows, jnp.zeros((n, 2)), 0 * sizes, sizes, me * sizes, received, axis_name="i")
    >>> x = np.arange(2.0 * n).reshape(n, 2)
    >>> y = jax.jit(jax.shard_map(to_the_last, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y.reshape(n, n, 2)[-1], x)

    With n members and k slices for each (k is mostly 1), slice s goes to the member of rank s // k.
    The four arrays of offsets and sizes are read at run time; ranges outside the arrays, and sizes
    that sender and receiver do not agree on, are an error on every member.

    **Order.** Matched as `all_reduce` is. Every member waits for all.

    **Differentiation.** Linear in `operand` and `output`. The transpose sends rows back and adds up
    those that went to several members, for which it takes a copy of `operand` for each member.

    Args:
        operand: an array of any dtype; the rows along its leading dimension are sent.
        output: what the result is where nothing is received: an array with rows of the same shape.
        input_offsets: integers [n * k]: where each slice begins in `operand`.
        send_sizes: integers [n * k]: its number of rows.
        output_offsets: integers [n * k]: where it begins in the *receiver's* result.
        recv_sizes: integers [n * k]: the number of rows that come from each member.
        axis_name: as for `all_reduce`.
        **options: as for `all_reduce`. The groups of axis_index_groups must be of one size.

    Returns:
        `output` with the received rows. Numbers of rows may differ between members' calls.

    Raises:
        As `all_reduce` does, and ValueError for arrays whose shapes or types do not fit.
    """
    function = "ragged_all_to_all"
    call = check(function, axis_name, **options)
    source, target = as_array(function, operand, "operand"), as_array(function, output, "output")
    if source.ndim == 0 or source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"{function}: operand is {source.dtype}{list(source.shape)} and output "
            f"{target.dtype}{list(target.shape)}; both must be arrays of rows of one type"
        )
    places = _check_places(
        call,
        input_offsets=input_offsets,
        send_sizes=send_sizes,
        output_offsets=output_offsets,
        recv_sizes=recv_sizes,
    )
    return exchanged(call, source, target, *places)


def exchanged(call: Call, source: Any, target: Any, *places: Any) -> Any:
    """Sends rows; several slices for each member go one after the other."""
    dtype = target.dtype
    source, target = (x.astype(storable(dtype)) for x in (source, target))
    members = call.group_size
    if not call.axes:  # a group of one
        return _local.evaluate(RAGGED, tuple(x[None] for x in (source, target, *places)), None)[0]
    slices = len(places[0]) // members
    for k in range(slices):
        own = call if k == 0 else call.derived(f"slice{k}")
        target = own.bind(RAGGED, source, target, *(x[k::slices] for x in places))
    return target.astype(dtype)


def all_to_all_v(
    x: Any, axis_name: AxisName, send_sizes: Any, *, rows: int, **options: Unpack[Options]
) -> tuple[Any, Any]:
    """Sends rows to every member, packed: how many may differ, and be known at run time only.

    >>> import jax, jax.numpy as jnp, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> n = jax.device_count()
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def spread(x):  # everybody sends one row to the first member, and two to the last
    ...     sizes = jnp.zeros(n, int).at[jnp.array([0, -1])].add(jnp.array([1, 2]))
    ...     return jax_dfccl.all_to_all_v(x, "i", sizes, rows=3 * n)
    >>> x = np.arange(3 * n)
    >>> f = jax.jit(jax.shard_map(spread, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    >>> y, received = f(x)
    >>> np.testing.assert_array_equal(y[:n], x[::3])
    >>> int(received[-1])
    2

    Two small collectives tell everyone what comes; `ragged_all_to_all` does without where that is
    known.

    **Order.** Matched as `all_reduce` is. Every member waits for all. A named call is several
    calls; the names of the others begin with its own.

    **Differentiation.** Linear in `x`, as `ragged_all_to_all` is in its operand.

    Args:
        x: an array or a pytree of them, the same shapes on all members, of any dtype. Its rows are
            sent: first those for the first member, then those for the second, and so on. Further
            rows stay.
        axis_name: as for `all_reduce`.
        send_sizes: integers [n]: how many rows go to each member.
        rows: how many rows the result has; more than that must not come.
        **options: as for `all_reduce`.

    Returns:
        What came from the first member, then from the second, and so on, then zeros; and integers
        [n]: how many rows came from each.

    Raises:
        As `all_reduce` does, and ValueError for sizes that are not one integer for each member.
    """
    function = "all_to_all_v"
    call = check(function, axis_name, **options)
    (sent,) = _check_places(call, send_sizes=send_sizes)
    if len(sent) != call.group_size:
        raise ValueError(
            f"{function}: send_sizes has {len(sent)} entries for {call.group_size} members"
        )
    received, placed = sent, sent * 0
    if call.axes:
        received = call.derived("sizes").bind("all_to_all", sent)
        placed = call.derived("offsets").bind("exscan", sent, op="sum", reverse=False)

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        if leaf.ndim == 0:
            raise ValueError(f"{function}: {where} is a scalar; it must have rows")
        output = jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        begins = jnp.cumsum(sent) - sent
        return exchanged(call, leaf, output, begins, sent, placed, received)

    return call.map(x, of_leaf), received


def _check_places(call: Call, **arrays: Any) -> list[Any]:
    """Offsets and sizes, as arrays of one integer type."""
    checked = []
    for name, value in arrays.items():
        array = jnp.asarray(value)
        if not jnp.issubdtype(array.dtype, np.integer):
            raise TypeError(f"{call.function}: {name} has dtype {array.dtype}; it must be integers")
        if array.ndim != 1 or array.size == 0 or array.size % call.group_size:
            raise ValueError(
                f"{call.function}: {name} has shape {array.shape}; it must have one dimension, "
                f"with the same number of entries for each of the {call.group_size} members"
            )
        checked.append(array)
    if len({array.size for array in checked}) > 1:
        sizes = ", ".join(
            f"{name} {array.size}" for name, array in zip(arrays, checked, strict=True)
        )
        raise ValueError(f"{call.function}: the numbers of entries differ: {sizes}")
    wide = any(jax.dtypes.itemsize_bits(a.dtype) == 64 for a in checked)
    return [array.astype(np.int64 if wide else np.int32) for array in checked]
