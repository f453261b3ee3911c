# SPDX-License-Identifier: Apache-2.0
"""What processes can do when some of them are lost or end early: `shrink`, `join`, `detach`."""

import concurrent.futures
import dataclasses
import time
from typing import Any

import jax

from jax_dfccl import _cluster, _compat, _lowering
from jax_dfccl._config import Config

_STAND_IN_S = 0.05


@dataclasses.dataclass(frozen=True)
class Survivors:
    """Who goes on, as `shrink` returns it; the same in all of them.

    Attributes:
        processes: the indices of the processes, in order.
        lost: those that were in it before and are not any more.
        era: how many times the job has changed in this way.
    """

    processes: tuple[int, ...]
    lost: tuple[int, ...]
    era: int

    @property
    def devices(self) -> list[Any]:
        """The devices of these processes, in the order of `jax.devices()`."""
        return [device for device in jax.devices() if device.process_index in self.processes]


def _joined() -> _cluster.Cluster:
    _lowering.register()  # with this process's settings
    return _cluster.joined()


def shrink(*, timeout: float = 30.0) -> Survivors:
    """Agrees with the other processes that are left on who goes on, without those that are lost.

    >>> import jax, numpy as np, jax_dfccl
    >>> survivors = jax_dfccl.shrink()
    >>> mesh = jax.sharding.Mesh(np.array(survivors.devices), ("i",))
    >>> (survivors.processes, mesh.size) == ((0,), jax.device_count())  # there is one process here
    True

    For use where a collective has failed because a process is gone, or does not move. All processes
    that are left call it; whoever still waits in a call that needs one of the callers gets an error
    there. What was launched before is given up. Programs over the devices of the survivors work
    from then on, in the same process.

    All that return have the same result, or an error. So that never two parts of a job go on, each
    without the other, those who go on must be more than half of the processes, or half of them with
    the first; those that have certainly ended (on the same host, or in order) do not count as long
    as nobody else is missing. Who is not among them, but alive, gets an error in its next
    collective and from `shrink`.

    Args:
        timeout: how many seconds to wait for processes that are not known to be lost.

    Returns:
        The processes that go on: `processes`, `lost`, `devices`, and `era`, how often this has
        happened.

    Raises:
        RuntimeError: the processes that are left are too few, this one was left out, or
            jax.distributed is not initialized.
    """
    if not timeout >= 0:
        raise ValueError(f"shrink: timeout is {timeout}; it must be a number of seconds")
    if jax.process_count() == 1:
        return Survivors((0,), (), 0)
    membership = _joined().membership
    era, members, lost = membership.shrink(timeout)
    return Survivors(tuple(sorted(members)), tuple(sorted(lost)), era)


def join(*, timeout: float | None = None) -> int:
    """Waits, out of data, until all processes are, and takes part in the others' sums meanwhile.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def total(x):
    ...     return jax_dfccl.all_reduce(x, "i")
    >>> step = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("i"), out_specs=P()))
    >>> for batch in range(3):  # or more, or less, in other processes
    ...     y = step(np.ones(jax.device_count()))
    >>> jax_dfccl.join()  # there is one process here
    0

    A process that has fewer steps than others calls this after its last one. Until all have, what
    the others all_reduce with "sum", "mean", "or" or "xor" goes on, with zeros in the place of its
    devices. Means divide by the number of all members: all_reduce the number of examples as well
    where you want the mean over those who have some. Other collectives between processes end with
    an error that names the process.

    Call it when the values of all earlier steps are there; it waits for those of all arrays that
    are alive.

    Args:
        timeout: how many seconds without a call by anybody to wait; the default is that of
            collectives (JAX_DFCCL_TIMEOUT).

    Returns:
        The index of the process that came last, the same in all of them.

    Raises:
        RuntimeError: a process was lost, or has called `shrink`, or nothing happened for so long.
    """
    limit_s = Config.from_environment().timeout_s if timeout is None else timeout
    for array in jax.live_arrays():
        array.block_until_ready()
    if jax.process_count() == 1:
        return 0
    from jax_dfccl import _core

    membership = _joined().membership
    all_out = membership.meet("join")
    heard = time.monotonic()
    while not all_out.done():
        if _core.stand_in(timeout_s=_STAND_IN_S) > 0:
            heard = time.monotonic()
        elif time.monotonic() - heard > limit_s:
            raise RuntimeError(
                f"join: for {limit_s:g} s no process has called a collective or join; if one "
                "stands still, call jax_dfccl.shrink()"
            )
    try:
        last = all_out.result()
        # From here on nobody stands in, so the next call is for everyone again.
        membership.meet("joined").result(limit_s)
    except (RuntimeError, concurrent.futures.TimeoutError) as error:
        raise RuntimeError(f"join: {error or 'not all come'}") from None
    membership.advance()
    return last


def detach(*, timeout: float = 60.0) -> None:
    """Makes all processes independent of JAX's coordination service, which process 0 hosts.

    >>> import jax, jax_dfccl
    >>> jax_dfccl.detach()  # there is one process here
    >>> jax.process_count()
    1

    JAX aborts every process that is connected with the service when process 0 is killed. So where
    the job is to go on without process 0, too, all processes call this once, after
    `jax.distributed.initialize()` and the first use of `jax.devices()`. It connects every process
    with every other, which otherwise happens where a program needs it, and ends with
    `jax.distributed.shutdown()`. What needs the service does not work after that: JAX's own
    collectives between CPU processes, its barriers, and checkpoints that use them.

    Args:
        timeout: how many seconds to wait for the others.

    Raises:
        RuntimeError: some process did not come.
    """
    if jax.process_count() == 1:
        return
    cluster = _joined()
    membership = cluster.membership
    others = membership.members - {jax.process_index()}
    cluster.want(others)
    deadline = time.monotonic() + timeout
    while missing := [process for process in sorted(others) if not cluster.is_linked(process)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"detach: not connected with processes {missing} in {timeout:g} s")
        time.sleep(_STAND_IN_S)
    hosts_service = jax.process_index() == 0
    # With recoverability nobody waits in the shutdown, so the service must end last.
    waits = _compat.is_recoverable() and hosts_service
    try:
        membership.meet("linked").result(timeout)
        if not waits:
            jax.distributed.shutdown()
        membership.meet("detached").result(timeout)
    except (RuntimeError, concurrent.futures.TimeoutError) as error:
        raise RuntimeError(f"detach: {error or 'not all have come'}") from None
    if waits:
        jax.distributed.shutdown()
