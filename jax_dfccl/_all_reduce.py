# SPDX-License-Identifier: Apache-2.0
"""The public functions `all_reduce`, `min_with_index` and `max_with_index`."""

from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_dfccl._arguments import AxisName, Call, Options, check
from jax_dfccl._reductions import LOGICAL, check_op, reduced


def all_reduce(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    *,
    op: str = "sum",
    scale: Any = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
    key: Any = None,
    priority: int = 0,
    timeout: float | None = None,
) -> Any:
    """Reduces arrays over the members of a mesh axis; every member gets the result.

    Computes what `jax.lax.psum`, `pmean`, `pmax` and `pmin` compute, in code under
    `jax.shard_map` (with `check_vma` on or off, jitted or not), but independent calls may be
    reached in any order on any device.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def center(x):
    ...     return x - jax_dfccl.all_reduce(x, "i", op="mean")
    >>> x = np.arange(jax.device_count(), dtype=np.float32)
    >>> y = jax.jit(jax.shard_map(center, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x - x.mean())

    **Order and names.** A call is matched with the same call on the other members: the same place
    in the same program, in the same launch. Calls in different branches of `lax.cond` or
    `lax.switch`, and calls in different programs, are different places: if they are to meet, give
    them the same `name`. Calls that share a name and a key on one member are matched in the order
    in which that member runs them, so give different names or keys to calls of one member that
    may run in either order. Members that disagree about op, dtype, size or group get an error
    that names both sides, and so does a call that a member never makes, after `timeout`.

    **Order of summation.** Elements are combined left to right by rank in the group (row-major
    over `axis_name`, or as `axis_index_groups` lists them); 16- and 8-bit floats accumulate in
    float32 and are rounded once. The result is bit-identical on all members and from run to run.
    Axes of `jax.vmap` are reduced first, locally, in XLA's order.

    **Differentiation.** As `jax.lax.psum` where that is defined. Members that are tied for a
    minimum or maximum share its derivative equally. A product's derivative is exact beside zeros
    too and can be taken again; it gathers the members' operands. The calls that differentiation
    adds to a named call get names derived from its name. Sums that JAX itself adds stay
    `lax.psum`, whose order matters: for casts to varying under `check_vma`, and for arguments of
    the shard_map that are not split.

    Args:
        x: an array, a scalar, or a pytree of them, of any shape (also empty), the same on all
            members. Its dtype: bool; integers of 2 to 64 bits; floats of 4 to 64 bits; complex. A
            Python int without `name` is reduced while tracing, to a Python number, so
            `all_reduce(1, axis_name)` is the number of members.
        axis_name: the mesh axis or `jax.vmap` axis to reduce over, or a tuple of them. An empty
            tuple returns `x`.
        op: "sum", "mean", "prod", "min", "max"; for integers and bool "and", "or", "xor" (bit by
            bit); or "logical_and", "logical_or", "logical_xor" (of `x != 0`; the result is bool).
            As `lax.psum` does, bool is summed (averaged, multiplied) as int32, and the mean of
            integers is a float. Minimum and maximum are not defined for complex numbers; NaN wins.
        scale: for sums and means, a scalar that this member's `x` is multiplied by first. It may
            differ between members.
        axis_index_groups: splits the axis: a list of lists that hold every index along `axis_name`
            once. Sizes may differ. The result then varies along the axis under `check_vma`.
        name: identifies the call in any program. Leaves of a pytree with several leaves get their
            path appended.
        key: an integer (Python int or scalar array of at most 64 bits) that is part of a named
            call's identity at run time, such as a step or an expert's number. Equal on all
            members of one call.
        priority: calls with a larger one go first.
        timeout: seconds a member waits for the others; JAX_DFCCL_TIMEOUT (default 600) if None.

    Returns:
        Like `x`. Under `check_vma` it does not vary over `axis_name` (see `axis_index_groups`).

    Raises:
        NameError: the axis is not bound: the call is not under `jax.shard_map` or `jax.vmap`.
        TypeError, ValueError: an argument is wrong; the message says what is accepted.
        NotImplementedError: the enclosing `jax.shard_map` leaves mesh axes to the compiler, or the
            devices are not CPU devices.
        jax.errors.JaxRuntimeError: at run time, on every member: mismatch, absent member, cycle.
    """
    check_op("all_reduce", op, scale)
    call = check(
        "all_reduce",
        axis_name,
        axis_index_groups=axis_index_groups,
        name=name,
        key=key,
        priority=priority,
        timeout=timeout,
    )
    if not call.axes and scale is None:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        return reduced(call, "all_reduce", leaf, where, op, scale)

    def of_int(value: int) -> int | float:
        return _reduce_equal_ints(value, op, call.smallest_group)

    return call.map(x, of_leaf, of_int=of_int if call.is_uniform and scale is None else None)


def min_with_index(x: Any, axis_name: AxisName, **options: Unpack[Options]) -> tuple[Any, Any]:
    """The minimum over the members, and who has it.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def best(loss):
    ...     return jax_dfccl.min_with_index(loss[0], "i")
    >>> loss = 3 - np.arange(jax.device_count()) % 4
    >>> least, who = jax.jit(jax.shard_map(best, mesh=mesh, in_specs=P("i"), out_specs=P()))(loss)
    >>> bool(least == loss.min()) and bool(who == loss.argmin())
    True

    Element by element. Of members that are tied, the one with the lowest rank is named; NaN is
    less than all numbers.

    **Order.** Two calls of `all_reduce`, matched as those are; of a named call the second is named
    "NAME/index".

    **Differentiation.** The minimum as that of `all_reduce`; ranks have no derivative.

    Args:
        x: as for `all_reduce`, but not complex.
        axis_name: as for `all_reduce`.
        **options: as for `all_reduce`.

    Returns:
        The minimum and the ranks (int32): two of what `x` is.

    Raises:
        As `all_reduce` does.
    """
    return _with_index("min_with_index", x, axis_name, "min", **options)


def max_with_index(x: Any, axis_name: AxisName, **options: Unpack[Options]) -> tuple[Any, Any]:
    """The maximum over the members, and who has it.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def best(score):
    ...     return jax_dfccl.max_with_index(score[0], "i")
    >>> score = np.arange(jax.device_count()) % 4
    >>> most, who = jax.jit(jax.shard_map(best, mesh=mesh, in_specs=P("i"), out_specs=P()))(score)
    >>> bool(most == score.max()) and bool(who == score.argmax())
    True

    As `min_with_index`, but for the maximum; NaN is greater than all numbers.

    **Order.** Two calls of `all_reduce`, matched as those are; of a named call the second is named
    "NAME/index".

    **Differentiation.** The maximum as that of `all_reduce`; ranks have no derivative.

    Args:
        x: as for `all_reduce`, but not complex.
        axis_name: as for `all_reduce`.
        **options: as for `all_reduce`.

    Returns:
        The maximum and the ranks (int32): two of what `x` is.

    Raises:
        As `all_reduce` does.
    """
    return _with_index("max_with_index", x, axis_name, "max", **options)


def _with_index(function: str, x: Any, axis_name: Any, op: str, **options: Any) -> Any:
    call = check(function, axis_name, **options)

    def of_leaf(call: Call, leaf: Any, where: str) -> tuple[Any, Any]:
        best = reduced(call, "all_reduce", leaf, where, op)
        owns = (leaf == best) | ((leaf != leaf) & (best != best))
        ranks = jnp.where(owns, call.rank, call.size).astype(jnp.int32)
        return best, reduced(call.derived("index"), "all_reduce", ranks, where, "min")

    pairs = call.map(x, of_leaf)
    return jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), pairs)


def _reduce_equal_ints(value: int, op: str, size: int) -> int | float:
    if op in LOGICAL:
        value, op = value != 0, LOGICAL[op]
    if op == "sum":
        return value * size
    if op == "mean":
        return value / 1
    if op == "prod":
        return value**size
    if op == "xor":
        return value if size % 2 else type(value)(0)
    return value
