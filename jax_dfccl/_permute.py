# SPDX-License-Identifier: Apache-2.0
"""The public functions from single members to single members: `ppermute` and `send_recv`."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_dfccl._arguments import AxisName, Call, Options, check, check_member
from jax_dfccl._reductions import moved


def ppermute(
    x: Any, axis_name: AxisName, perm: Iterable[tuple[int, int]], **options: Unpack[Options]
) -> Any:
    """Sends arrays from members to members, as `jax.lax.ppermute` does.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> n = jax.device_count()
    >>> def from_left(x):
    ...     return jax_dfccl.ppermute(x, "i", [(k, k + 1) for k in range(n - 1)])
    >>> x = np.arange(1, 1 + n)
    >>> y = jax.jit(jax.shard_map(from_left, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, np.arange(n))

    **Order.** Matched as `all_reduce` is. A member waits for its source and for its target only.

    **Differentiation.** Linear; the transpose sends everything back.

    Args:
        x: an array, a scalar or a pytree of them, the same shapes on all members, of any dtype.
        axis_name: as for `all_reduce`. As in JAX, members along several mesh axes are counted in
            the order in which the mesh has them, whatever the order here.
        perm: pairs (source, target) of ranks in the group (negative: from the end). Every source
            and every target at most once; a member may be its own source.
        **options: as for `all_reduce`. With axis_index_groups every group does the same.

    Returns:
        Like `x`: what the source paired with this member has; zeros without one.

    Raises:
        As `all_reduce` does, and ValueError for pairs that repeat a source or a target, or name no
        member.
    """
    call = check("ppermute", _in_mesh_order(axis_name), **options)
    pairs = _check_perm(call, perm)
    if not call.axes:
        return x

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        del where
        return moved(call, "permute", leaf, pairs=pairs)

    return call.map(x, of_leaf)


def send_recv(
    x: Any, axis_name: AxisName, source: int, target: int, **options: Unpack[Options]
) -> Any:
    """Sends an array from one member to another, which need no other member for it.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def first_to_last(x):
    ...     return jax_dfccl.send_recv(x, "i", 0, -1)
    >>> x = np.arange(5, 5 + jax.device_count())
    >>> y = jax.jit(jax.shard_map(first_to_last, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, [0] * (len(x) - 1) + [5])

    Both ends call it with the same arguments: in straight code, where it costs the others nothing,
    or with one `name` from branches of their own, which the others need not take. Use the result
    on both sides, or JAX removes the call.

    **Order.** Matched as `all_reduce` is. The two wait for each other, nobody else for anyone.

    **Differentiation.** Linear; the transpose sends from the target to the source.

    Args:
        x: an array, a scalar or a pytree of them, the same shapes on both members, of any dtype.
            Only the source's values count.
        axis_name: as for `all_reduce`.
        source: the index along the axis (negative: from the end) of the member that sends.
        target: that of the member that receives; another one.
        **options: as for `all_reduce`, but no axis_index_groups.

    Returns:
        At the target what the source has; zeros on all others.

    Raises:
        As `all_reduce` does, and ValueError for a source and a target that are the same.
    """
    if options.get("axis_index_groups") is not None:
        raise TypeError("send_recv: axis_index_groups is given; source and target are the group")
    call = check("send_recv", axis_name, **options)
    source = check_member("send_recv", "source", source, call.size)
    target = check_member("send_recv", "target", target, call.size)
    if source == target:
        raise ValueError(f"send_recv: source and target are both {source}; they must differ")
    others = tuple((member,) for member in range(call.size) if member not in (source, target))
    received = call.rank == target
    call = dataclasses.replace(call, groups=((source, target), *others))

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        del where
        # A group of the two, of which the first has the value; all others are alone.
        value = moved(call, "broadcast", leaf, root=0)
        return jnp.where(received, value, jnp.zeros_like(value))

    return call.map(x, of_leaf)


def _check_perm(call: Call, perm: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [(source, target) for source, target in perm]
    except (TypeError, ValueError):
        raise TypeError(
            f"ppermute: perm is {perm!r}; it must be a sequence of pairs (source, target)"
        ) from None
    size = call.smallest_group
    sources = [check_member("ppermute", "a source in perm", pair[0], size) for pair in pairs]
    targets = [check_member("ppermute", "a target in perm", pair[1], size) for pair in pairs]
    for what, members in (("source", sources), ("target", targets)):
        if repeated := [m for m in members if members.count(m) > 1]:
            raise ValueError(
                f"ppermute: perm has {repeated[0]} twice as a {what}; each may be there once"
            )
    return tuple(sorted(zip(sources, targets, strict=True), key=lambda pair: pair[1]))


def _in_mesh_order(axis_name: Any) -> Any:
    if not isinstance(axis_name, (tuple, list)):
        return axis_name
    order = {name: place for place, name in enumerate(jax.sharding.get_abstract_mesh().axis_names)}
    if all(axis in order for axis in axis_name):
        return tuple(sorted(axis_name, key=lambda axis: order[axis]))
    return axis_name
