# SPDX-License-Identifier: Apache-2.0
"""Messages: one member of a group sends, another receives, each in a program of its own.

A message is a broadcast over a group of the two, which the module pass makes when it is known on
which device the program runs. If it is buffered the sender only starts it, and nobody waits there.
"""

import contextlib
import dataclasses
from typing import Any, TypedDict, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_dfccl._arguments import Call, as_array, check, check_member
from jax_dfccl._groups import Ends, Group
from jax_dfccl._reductions import storable

# The sender of an array of at most so many bytes does not wait for the receiver.
EAGER_BYTES = 1 << 16

# What `send_any` says of an array: "float32 3 4", and zeros.
_HEADER = jax.ShapeDtypeStruct((128,), np.uint8)


class MessageOptions(TypedDict, total=False):
    """Those of the options of `all_reduce` that messages take."""

    name: str | None
    key: Any
    priority: int
    timeout: float | None


def send(
    x: Any,
    group: Group,
    to: int,
    *,
    buffered: bool | None = None,
    **options: Unpack[MessageOptions],
) -> None:
    """Sends an array to another member of a group, which receives it by `recv`.

    >>> import jax, jax.numpy as jnp, jax_dfccl
    >>> pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
    >>> first = jax.jit(lambda x, m: jax_dfccl.send(x + 1, pair, 1, key=m))
    >>> last = jax.jit(
    ...     lambda m: 10 * jax_dfccl.recv(jax.ShapeDtypeStruct((3,), jnp.float32), pair, 0, key=m)
    ... )
    >>> first(jax.device_put(jnp.arange(3.0), pair.devices[0]), 7)
    >>> print(last(jax.device_put(7, pair.devices[1])))
    [10. 20. 30.]

    Only the sender calls it, in a program on one device or under `jax.shard_map`. The call stays in
    the program though it gives nothing.

    **Order.** The n-th message with one group, sender, receiver, name and key is received as the
    n-th of these. An array of at most 64 KiB is copied, and the sender goes on; with a larger one
    its program waits for the receiver, unless it is `buffered`, started (`start`), or run by the
    launcher.

    **Differentiation.** None: what is sent must not be differentiated, and what is received is a
    constant to derivatives.

    Args:
        x: an array, a scalar or a pytree of them, of any shape and dtype.
        group: a `Group` with both in it.
        to: the receiver's rank in it (negative: from the end).
        buffered: whether the array is copied; by default if it is small.
        **options: name, key, priority and timeout, as for `all_reduce`.

    Returns:
        Nothing. A copied message that does not arrive is reported on stderr.

    Raises:
        TypeError: group is no `Group`, or an argument has the wrong type.
        ValueError: the group has no such rank, or the sender is that rank or not in the group.
        jax.errors.JaxRuntimeError: at run time, in the program that waits: the other end does not
            come in time, or has another shape or type; the message names both lines.
    """
    call = _check("send", group, to, sends=True, **options)

    def of_leaf(call: Call, leaf: Any, where: str) -> None:
        del where
        leaf = leaf.astype(storable(leaf.dtype))
        small = leaf.size * leaf.dtype.itemsize <= EAGER_BYTES
        copied = small if buffered is None else buffered
        call.bind("broadcast", leaf, root=0, detached=copied)

    call.map(x, of_leaf)


def recv(shape_dtype: Any, group: Group, from_: int, **options: Unpack[MessageOptions]) -> Any:
    """Receives an array that another member of a group sends by `send`.

    >>> import jax, jax_dfccl
    >>> pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
    >>> two = {"a": jax.ShapeDtypeStruct((), "int32"), "b": jax.ShapeDtypeStruct((2,), "float32")}
    >>> with jax.default_device(pair.devices[1]):  # there, programs without operands run
    ...     received = jax.jit(lambda: jax_dfccl.recv(two, pair, 0, key=8))()
    >>> x = {"a": 5, "b": jax.numpy.arange(2.0)}
    >>> jax.jit(lambda x: jax_dfccl.send(x, pair, 1, key=8))(jax.device_put(x, pair.devices[0]))
    >>> int(received["a"]), received["b"].tolist()
    (5, [0.0, 1.0])

    Only the receiver calls it. The call stays in the program though nothing uses its result.

    **Order.** Matched as `send` says. The receiver waits for the sender, nobody else for anyone.

    **Differentiation.** The result is a constant.

    Args:
        shape_dtype: what is received: a `jax.ShapeDtypeStruct`, an array like it, or a pytree of
            them.
        group: as for `send`.
        from_: the sender's rank in it (negative: from the end).
        **options: as for `send`.

    Returns:
        Arrays with these shapes and dtypes.

    Raises:
        As `send` does.
    """
    call = _check("recv", group, from_, sends=False, **options)

    def of_leaf(call: Call, leaf: Any, where: str) -> Any:
        del where
        result = call.bind("broadcast", leaf.astype(storable(leaf.dtype)), root=0)
        return result.astype(leaf.dtype)

    return call.map(jax.tree.map(_space, shape_dtype), of_leaf, what="shape_dtype")


def send_any(
    x: Any, group: Group, to: int, *, buffered: bool = True, **options: Unpack[MessageOptions]
) -> None:
    """Sends an array whose shape and dtype the receiver does not know; it calls `recv_any`.

    >>> import jax, jax.numpy as jnp, jax_dfccl
    >>> pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
    >>> for n in (2, 3):
    ...     jax_dfccl.send_any(jax.device_put(jnp.arange(n), pair.devices[0]), pair, 1)
    >>> jax_dfccl.recv_any(pair, 0, device=pair.devices[1]).shape
    (2,)
    >>> jax_dfccl.recv_any(pair, 0, device=pair.devices[1]).shape
    (3,)

    The shape goes first. Both are copied, so two members that send to each other do not stand in
    each other's way.

    **Order.** As that of `send`.

    **Differentiation.** None, as for `send`.

    Args:
        x: an array of any shape and dtype: in a program, or on one device outside.
        group: as for `send`.
        to: as for `send`.
        buffered: whether the array is copied, whatever its size. If not, the sender's program
            waits for the receiver.
        **options: as for `send`.

    Returns:
        Nothing.

    Raises:
        As `send` does.
    """
    x = as_array("send_any", x, "x")
    text = " ".join([x.dtype.name, *map(str, x.shape)]).encode()
    if len(text) > _HEADER.size:
        raise ValueError(f"send_any: {len(x.shape)} dimensions are too many")
    header = np.frombuffer(text.ljust(_HEADER.size, b"\0"), np.uint8)
    where = contextlib.nullcontext()
    if not isinstance(x, jax.core.Tracer):
        (device,) = x.devices()
        where = jax.default_device(device)
    with where:
        send(header, group, to, **_with_name(options, "shape"))
        send(x, group, to, buffered=buffered, **options)


def recv_any(
    group: Group, from_: int, *, device: Any = None, **options: Unpack[MessageOptions]
) -> Any:
    """Receives an array of a shape and dtype that only the sender knows, who calls `send_any`.

    >>> import jax, jax.numpy as jnp, jax_dfccl
    >>> pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
    >>> a, b = pair.devices
    >>> jax_dfccl.send_any(jax.device_put(jnp.ones((2, 5)), a), pair, 1, key=3)
    >>> jax_dfccl.send_any(jax.device_put(jnp.ones(4, int), b), pair, 0, key=3)
    >>> x = jax_dfccl.recv_any(pair, 0, device=b, key=3)
    >>> y = jax_dfccl.recv_any(pair, 1, device=a, key=3)
    >>> x.shape, y.shape
    ((2, 5), (4,))

    Called outside of jitted code: it waits for the shape, and then receives by a program for it.

    **Order.** As that of `send`.

    **Differentiation.** None: the result is a constant.

    Args:
        group: as for `send`.
        from_: as for `recv`.
        device: who receives; needed if several members are devices of this process.
        **options: as for `send`.

    Returns:
        The array, on that device.

    Raises:
        As `send` does, and ValueError if there is no device to choose.
    """
    if device is None:
        device = _only_receiver(group, from_)
    with jax.default_device(device):
        header = recv(_HEADER, group, from_, **_with_name(options, "shape"))
        dtype, *shape = np.asarray(header).tobytes().rstrip(b"\0").decode().split()
        received = recv(
            jax.ShapeDtypeStruct(tuple(map(int, shape)), jnp.dtype(dtype)), group, from_, **options
        )
    return jax.device_put(received, device)


def _check(function: str, group: Any, peer: Any, *, sends: bool, **options: Any) -> Call:
    if not isinstance(group, Group):
        raise TypeError(
            f"{function}: group is {group!r}; messages need a jax_dfccl.Group (members along an "
            "axis of one program have send_recv and ppermute)"
        )
    call = check(function, group, **_with_name(options))
    peer = check_member(function, "to" if sends else "from_", peer, group.size)
    return dataclasses.replace(call, axes=(Ends(group, peer, sends=sends),), size=2)


def _with_name(options: Any, *more: str) -> Any:
    """Messages have a name, so that they are no collective of the group."""
    name = options.get("name")
    return {**options, "name": "/".join(["message" if name is None else name, *more])}


def _space(like: Any) -> Any:
    """An array in whose place the message comes."""
    if isinstance(like, jax.Array):
        return jax.lax.stop_gradient(like)  # where it is, the program runs
    if not hasattr(like, "shape") or not hasattr(like, "dtype"):
        raise TypeError(f"recv: shape_dtype has {like!r}; it must have a shape and a dtype")
    return jnp.zeros(like.shape, like.dtype)


def _only_receiver(group: Group, from_: int) -> Any:
    source = group.members[check_member("recv_any", "from_", from_, group.size)]
    own = [d for d in group.devices if d.process_index == jax.process_index() and d.id != source]
    if len(own) != 1:
        raise ValueError(f"recv_any: give device=; members of this process are {own}")
    return own[0]
