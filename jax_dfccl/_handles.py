# SPDX-License-Identifier: Apache-2.0
"""Handles: collectives that are started here and waited for there, also in another program."""

import dataclasses
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_dfccl import _core
from jax_dfccl._config import Config
from jax_dfccl._segments import Environment, Flat, Value, flatten

_log = logging.getLogger("jax_dfccl")


@dataclasses.dataclass(frozen=True, eq=False)
class _Rest:
    """What is left to do when the collectives have finished; equal if it does the same."""

    flat: Flat
    tree: Any  # of the result
    kept: tuple[Value, ...]  # what it needs of what was there at the start
    text: str
    function: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rest) and (self.text, self.tree) == (other.text, other.tree)

    def __hash__(self) -> int:
        return hash(self.text)


@jax.tree_util.register_pytree_node_class
class Handle:
    """A collective that has been started: a pytree of arrays, which may leave a jitted program.

    Under `jax.shard_map` it is split over all axes of the mesh: its spec in out_specs and in_specs
    is `P(axis names)`.
    """

    _tickets: tuple[Any, ...]
    _marks: tuple[tuple[Any, ...], ...]  # of each ticket, see `_mark`
    _kept: tuple[Any, ...]
    _rest: _Rest
    # Where it was started, what of; it does not leave the program.
    _operands: tuple[tuple[Any, ...], ...] | None = None

    def __init__(
        self, tickets: Sequence[Any], marks: Sequence[Any], kept: Sequence[Any], rest: _Rest
    ) -> None:
        self._tickets = tuple(tickets)
        self._marks = tuple(marks)
        self._kept = tuple(kept)
        self._rest = rest
        for ticket in self._tickets:
            _drop_with(ticket, rest.function)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self._tickets, self._marks, self._kept), self._rest

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> "Handle":
        tickets, marks, kept = children
        return cls(tickets, marks, kept, rest)

    def __repr__(self) -> str:
        return f"Handle({self._rest.function})"


def start(function: Callable[..., Any], x: Any, *arguments: Any, **options: Any) -> Handle:
    """Starts a collective and returns at once; `wait` gives its value.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def begin(x):
    ...     return jax_dfccl.start(jax_dfccl.all_reduce, x, "i")
    >>> first = jax.jit(jax.shard_map(begin, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    >>> last = jax.jit(jax.shard_map(jax_dfccl.wait, mesh=mesh, in_specs=P("i"), out_specs=P()))
    >>> handle = first(np.arange(jax.device_count()))
    >>> print(last(handle) == np.arange(jax.device_count()).sum())
    [ True]

    The operand is copied at the start, so it may be donated or overwritten. In a program, all
    starts are issued before the first wait that does not need to come before them, wherever they
    stand.

    **Order.** Handles may be waited for in any order, in the same program or in later ones on the
    same devices. The calls are matched as without a handle.

    **Differentiation.** As the function's, if the same program starts and waits. Calls that
    derivatives add are made at the wait. What is waited for elsewhere has none: to take one is an
    error.

    Args:
        function: a collective of this module. It may make several calls, but none that needs
            the result of another (`max_with_index` does).
        x: its operand, of any shape and dtype that it takes; for `recv`, the shape and dtype.
        *arguments: its other arguments.
        **options: its options.

    Returns:
        A `Handle`. One that nobody holds and nobody has waited for is dropped after the time limit
        (JAX_DFCCL_TIMEOUT), with a warning; the other members get this one's data nevertheless.

    Raises:
        As the function does, and ValueError if its calls need each other.
    """
    name = getattr(function, "__name__", str(function))
    leaves, tree = jax.tree.flatten(x)
    places = [k for k, leaf in enumerate(leaves) if not isinstance(leaf, jax.ShapeDtypeStruct)]
    operands = [jnp.asarray(leaves[place]) for place in places]

    def call(*operands: Any) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, operands, strict=True))
        return function(tree.unflatten(given.values()), *arguments, **options)

    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*operands)
    flat = flatten(f"start({name})", closed)
    if any(node.needs for node in flat.collectives):
        raise ValueError(
            f"start: {name} makes a call that needs the result of another; start them one by one"
        )
    environment = Environment(zip(flat.inputs, operands, strict=True))
    environment.update(flat.constants)
    known = {value for value, array in flat.constants if not isinstance(array, jax.core.Tracer)}
    tickets: list[Any] = []
    started: list[tuple[Any, ...]] = []  # of each, the operands
    for node in flat.nodes:
        if node.is_collective:
            started.append(tuple(environment.read(value) for value in node.operands))
            tickets.append(environment.start(node))
        elif not node.needs:
            environment.run(node)
    used = [value for node in flat.nodes if node.needs for value in node.operands] + flat.results
    kept = tuple(
        dict.fromkeys(v for v in used if isinstance(v, Value) and not v.needs and v not in known)
    )
    constants = [(value, array) for value, array in flat.constants if value in known]
    text = f"{name} {closed} {[np.asarray(array).tolist() for _, array in constants]}"
    flat = dataclasses.replace(flat, constants=constants)
    rest = _Rest(flat, jax.tree.structure(shapes), kept, text, name)
    # Under shard_map only what has dimensions can be split.
    kept_arrays = [jnp.asarray(environment[value])[None] for value in kept]
    handle = Handle(tickets, list(map(_mark, started)), kept_arrays, rest)
    if not all(map(_is_concrete, itertools.chain(*started))):
        handle._operands = tuple(started)
    return handle


def _mark(operands: Sequence[Any]) -> tuple[Any, ...]:
    """An empty array that has a tangent or is vmapped if the operand is: none of integers."""
    x = operands[0]
    return (x.reshape(-1)[:0],) if jnp.issubdtype(x.dtype, np.inexact) else ()


def wait(handle: Handle) -> Any:
    """The value of a collective that was started.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def two(x):
    ...     a, b = (jax_dfccl.start(jax_dfccl.all_reduce, k * x, "i") for k in (1, 2))
    ...     return jax_dfccl.wait(b) - jax_dfccl.wait(a)
    >>> x = np.arange(jax.device_count())
    >>> y = jax.jit(jax.shard_map(two, mesh=mesh, in_specs=P("i"), out_specs=P()))(x)
    >>> np.testing.assert_array_equal(y, [x.sum()])

    **Order.** See `start`.

    **Differentiation.** See `start`.

    Args:
        handle: from `start`, in this program or an earlier one. It can be waited for once.

    Returns:
        What the function that was started returns.

    Raises:
        jax.errors.JaxRuntimeError: at run time, as the function raises it, and if the handle has
            been waited for or dropped, or is not of this device.
    """
    _check_handle("wait", handle)
    rest = handle._rest
    environment = Environment(zip(rest.kept, (array[0] for array in handle._kept), strict=True))
    environment.update(rest.flat.constants)
    what = "mark" if handle._operands is None else "operands"
    origins = handle._marks if handle._operands is None else handle._operands
    for node, ticket, origin in zip(rest.flat.collectives, handle._tickets, origins, strict=True):
        environment.wait(node, ticket, *origin, what=what if origin else "nothing")
    for node in rest.flat.nodes:
        if node.needs and not node.is_collective:
            environment.run(node)
    return rest.tree.unflatten([environment.read(value) for value in rest.flat.results])


def wait_all(handles: Sequence[Handle]) -> list[Any]:
    """The values of several handles, which may finish in any order.

    >>> import jax, jax_dfccl
    >>> group = jax_dfccl.Group(jax.devices()[:1], name="alone")
    >>> handles = [jax_dfccl.start(jax_dfccl.all_reduce, k, group, key=k) for k in (1, 2)]
    >>> values = jax_dfccl.wait_all(handles)
    >>> list(map(int, values))
    [1, 2]

    **Order.** See `start`.

    **Differentiation.** See `start`.

    Args:
        handles: from `start`.

    Returns:
        A list of what `wait` gives for each.

    Raises:
        As `wait` does.
    """
    return [wait(handle) for handle in handles]


def test(handle: Handle) -> bool:
    """Whether a handle can be waited for without waiting, as far as this process knows.

    >>> import jax, jax_dfccl
    >>> group = jax_dfccl.Group(jax.devices()[:1], name="alone")
    >>> handle = jax_dfccl.start(jax_dfccl.all_reduce, 3, group)
    >>> _ = jax_dfccl.wait_any([handle])
    >>> jax_dfccl.test(handle)
    True

    Args:
        handle: from `start`, outside of jitted code.

    Returns:
        Whether its collectives have finished, also with an error, on all devices of this process.

    Raises:
        ValueError: the handle has been waited for, dropped or cancelled.
    """
    ready = True
    for ticket in _concrete("test", handle):
        if not ticket.is_ready():
            return False
        gpu = _is_on_gpus(ticket)
        states = [_core.handle_state(number, gpu) for number in numbers_of(ticket)]
        if "gone" in states:
            raise ValueError("test: the handle has been waited for or dropped")
        ready = ready and "pending" not in states
    return ready


def wait_any(handles: Sequence[Handle], timeout: float | None = None) -> int:
    """Returns when one of several handles can be waited for without waiting.

    >>> import jax, jax_dfccl
    >>> a, b = jax.devices()[:2]
    >>> pair = jax_dfccl.Group([a, b], name="pair")
    >>> def begin(device, key):
    ...     x = jax.device_put(1, device)
    ...     return jax_dfccl.start(jax_dfccl.all_reduce, x, pair, key=key)
    >>> handles = [begin(a, 1), begin(a, 2)]
    >>> other = begin(b, 2)
    >>> jax_dfccl.wait_any(handles)
    1
    >>> _ = begin(b, 1)  # so that nobody waits for ever

    Args:
        handles: from `start`, outside of jitted code.
        timeout: seconds; without a limit if None.

    Returns:
        The index of the first that has finished.

    Raises:
        ValueError: there is none, or one has been waited for or dropped.
        TimeoutError: none has finished in time.
    """
    if not handles:
        raise ValueError("wait_any: there is no handle")
    deadline = None if timeout is None else time.monotonic() + timeout
    for pause in itertools.chain((0.0, 5e-5, 2e-4), itertools.repeat(1e-3)):
        for index, handle in enumerate(handles):
            if test(handle):
                return index
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"wait_any: none of {len(handles)} handles has finished")
        time.sleep(pause)
    raise AssertionError("unreachable")


def cancel(handle: Handle) -> bool:
    """Ends what a handle stands for, with an error on all members; it need not be waited for.

    >>> import jax, jax_dfccl
    >>> pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
    >>> x = jax.device_put(3, pair.devices[0])
    >>> handle = jax_dfccl.start(jax_dfccl.all_reduce, x, pair, key=99)
    >>> jax_dfccl.cancel(handle)
    True

    Args:
        handle: from `start`, outside of jitted code. Waits until it has been started.

    Returns:
        Whether this has ended it: not if it had finished, or a program waits for it already.
        `wait` then raises; otherwise it gives the value.

    Raises:
        TypeError: it is no Handle, or the code is being traced.
    """
    cancelled = False
    for ticket in _concrete("cancel", handle):
        gpu = _is_on_gpus(ticket)
        for number in numbers_of(ticket):
            cancelled |= _core.handle_cancel(number, gpu)
    return cancelled


def _check_handle(function: str, handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"{function}: {handle!r} is no Handle; jax_dfccl.start makes them")


def _concrete(function: str, handle: Any) -> tuple[Any, ...]:
    _check_handle(function, handle)
    if not all(_is_concrete(ticket) for ticket in handle._tickets):
        raise TypeError(f"{function}: the handle is traced; call this outside of jitted code")
    return handle._tickets


def _is_concrete(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def numbers_of(ticket: Any) -> list[int]:
    """The tickets of this process's devices."""
    return [
        number
        for shard in ticket.addressable_shards
        for number in np.asarray(shard.data).view(np.uint64).tolist()
    ]


def _is_on_gpus(ticket: Any) -> bool:
    """Whether the numbers are those of GPUs, which have their own."""
    return any(device.platform != "cpu" for device in ticket.devices())


# --- handles that nobody holds any more ----------------------------------------------------------

# A program that waits may have been dispatched with a ticket that nobody holds any more, so tickets
# are dropped only when such a program would have ended with an error.
_forgotten: queue.SimpleQueue[tuple[float, Any, str]] = queue.SimpleQueue()
_watched: set[int] = set()  # ids of arrays
_dropper = threading.Lock()  # held for ever by the one thread that drops


def _drop_with(ticket: Any, function: str) -> None:
    """Has a ticket dropped some time after its array is gone, unless it is waited for by then."""
    if not _is_concrete(ticket) or id(ticket) in _watched:
        return
    _watched.add(id(ticket))
    shards = [shard.data for shard in ticket.addressable_shards]
    # Another array with the same memory, which the finalizer may keep.
    again = jax.make_array_from_single_device_arrays(ticket.shape, ticket.sharding, shards)
    weakref.finalize(ticket, _forget, id(ticket), again, function).atexit = False


def _forget(identity: int, ticket: Any, function: str) -> None:
    _watched.discard(identity)
    _forgotten.put((time.monotonic(), ticket, function))
    if _dropper.acquire(blocking=False):
        threading.Thread(target=_drop_all, name="jax_dfccl-handles", daemon=True).start()


def _drop_all() -> None:
    limit = Config.from_environment().timeout_s
    while True:
        since, ticket, function = _forgotten.get()
        time.sleep(max(0.0, since + limit - time.monotonic()))
        try:
            numbers, gpu = numbers_of(ticket), _is_on_gpus(ticket)
        except jax.errors.JaxRuntimeError:  # of the program that was to start it
            continue
        if sum(_core.handle_drop(number, gpu) for number in numbers):
            _log.warning("a handle of %s was dropped without having been waited for", function)
