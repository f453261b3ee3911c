# SPDX-License-Identifier: Apache-2.0
"""The public functions that reduce over the members up to this one."""

from typing import Any, Unpack

import jax.numpy as jnp

from jax_dfccl import _local
from jax_dfccl._arguments import AxisName, Call, Options, check
from jax_dfccl._reductions import LOGICAL, SCANS, check_op, reduced


def inclusive_scan(
    x: Any,
    axis_name: AxisName,
    *,
    op: str = "sum",
    reverse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Reduces over the members from the first up to and with this one.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def running(x):
    ...     return jax_dfccl.inclusive_scan(x, "i")
    >>> x = np.arange(jax.device_count())
    >>> y = jax.jit(jax.shard_map(running, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x.cumsum())

    Over members, not over a dimension of `x` (that is `jax.numpy.cumsum`) and not in a loop (that
    is `jax.lax.scan`).

    **Order.** Matched, and folded in the same order, as `all_reduce` is. A member waits for those
    that it folds and for the next, which reads what it has.

    **Differentiation.** For sums linear, with the scan in the other direction as transpose; for
    other folds members' operands are gathered.

    Args:
        x: as for `all_reduce`.
        axis_name: as for `all_reduce`.
        op: as for `all_reduce`, but no "mean".
        reverse: whether it is from the last member down to this one.
        **options: as for `all_reduce`.

    Returns:
        Like `x`; different on every member.

    Raises:
        As `all_reduce` does.
    """
    return _scan("inclusive_scan", "scan", x, axis_name, op, reverse, **options)


def exclusive_scan(
    x: Any,
    axis_name: AxisName,
    *,
    op: str = "sum",
    reverse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Reduces over the members before this one.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def offset(length):
    ...     return jax_dfccl.exclusive_scan(length, "i")
    >>> x = np.arange(1, 1 + jax.device_count())
    >>> y = jax.jit(jax.shard_map(offset, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x.cumsum() - x)

    **Order.** As for `inclusive_scan`.

    **Differentiation.** As for `inclusive_scan`.

    Args:
        x: as for `all_reduce`.
        axis_name: as for `all_reduce`.
        op: as for `all_reduce`, but no "mean".
        reverse: whether it is over the members after this one, from the last.
        **options: as for `all_reduce`.

    Returns:
        Like `x`; different on every member. The first gets the value that changes nothing: 0 for
        sums, 1 for products, the largest value of the type for minima, and so on.

    Raises:
        As `all_reduce` does.
    """
    return _scan("exclusive_scan", "exscan", x, axis_name, op, reverse, **options)


def _scan(
    function: str, kind: str, x: Any, axis_name: Any, op: str, reverse: bool, **options: Any
) -> Any:
    check_op(function, op, None, SCANS)
    call = check(function, axis_name, **options)

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        result = leaf
        if call.axes:
            result = reduced(call, kind, leaf, where, op, reverse=bool(reverse))
        if kind == "scan":
            return result
        first = call.rank == (call.members - 1 if reverse else 0)
        neutral = _local.identity(LOGICAL.get(op, op), result.dtype)
        return jnp.where(first, neutral, result)

    return call.map(x, of_leaf)
