# SPDX-License-Identifier: Apache-2.0
"""How the processes of a `jax.distributed` job find each other and get connected.

`require` says which processes a program needs. The first call publishes this process's address in
the job's key-value store and starts two threads: one looks up the addresses of others, which may
come at any time, and one listens, connects and shakes hands. Each pair of processes ends up with
one connection, begun by whoever needed the other first, and the runtime takes it over.

If both begin, the connection of the process with the smaller index counts. That process decides:
it offers its own connection only if it has not accepted the other's, and does not accept the
other's once it has offered its own.
"""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import enum
import logging
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol

import jax

from jax_dfccl import _address, _compat, _handshake, _membership
from jax_dfccl._address import Address, AddressError
from jax_dfccl._config import ClusterConfig
from jax_dfccl._handshake import Greeting, HandshakeError, Hello, Identity, Transport, Verdict
from jax_dfccl._membership import Membership

_HANDSHAKE_S = 5.0
_HALF_OPEN = 128  # connections that are not proven yet; beyond that the oldest is dropped
_BACKLOG = 1024
_FIRST_DELAY_S, _LAST_DELAY_S = 0.01, 1.0
_LOOKUP_S = 0.02  # not more than one look-up in so many seconds, once a first round is done
_CLOSE_S = 1.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

_log = logging.getLogger("jax_dfccl")


class Store(Protocol):
    """The key-value store of a job. Any of it may raise RuntimeError if the service is away."""

    def get(self, key: str) -> str | None:
        """The value, None if there is none yet."""
        ...

    def add(self, key: str, value: str) -> bool:
        """Sets a value unless there is one; whether it did."""
        ...

    def replace(self, key: str, value: str) -> None:
        """Sets a value."""
        ...

    def below(self, folder: str) -> dict[str, str]:
        """All that begin with `folder` and a slash, by what comes after it."""
        ...


class Runtime(_membership.Runtime, Protocol):
    """What gets the connections: `_core`."""

    def cluster_join(
        self, process: int, process_of: dict[int, int], host_of: list[int], peer_timeout_s: float
    ) -> None:
        """This process's index, each device's process, each process's host, the time limit."""
        ...

    def cluster_link(self, process: int, sockets: list[int], memory: int) -> None:
        """Connections to a process; takes over all descriptors. memory -1: none."""
        ...

    def cluster_down(self, process: int, reason: str) -> None:
        """That process will never come."""
        ...

    def leave_out(self, process: int, reason: str) -> None:
        """Breaks with a process, which hears why if it can."""
        ...

    def threads_question(self) -> int:
        """A descriptor that is readable when `threads_answer` is wanted."""
        ...

    def threads_answer(self, threads: int) -> None:
        """How many threads of the user there are."""
        ...


class _Phase(enum.Enum):
    APART = enum.auto()
    OFFERED = enum.auto()  # has sent a proof on a connection of its own
    LINKED = enum.auto()  # one connection was accepted, by whichever end
    DOWN = enum.auto()


@dataclasses.dataclass
class _Peer:
    """What is known of another process. Only the thread that connects touches it."""

    process: int
    wanted: bool = False
    phase: _Phase = _Phase.APART
    address: Address | None = None
    known: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # address is there
    connecting: asyncio.Task | None = None
    # The connections beyond the first that it makes, by number, and the last of them.
    more: dict[int, socket.socket] = dataclasses.field(default_factory=dict)
    complete: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    sockets: int = 1  # as many as there are to be

    def __str__(self) -> str:
        host = self.address.host if self.address else "an unknown host"
        return f"process {self.process} on {host}"


@dataclasses.dataclass(frozen=True)
class _Route:
    transport: Transport
    family: socket.AddressFamily
    target: str | tuple[str, int]

    def __str__(self) -> str:
        if self.transport is Transport.UNIX:
            return "AF_UNIX"
        host, port = self.target
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _key(process: int) -> str:
    return f"jax_dfccl/process/{process}"


_SECRET_KEY = "jax_dfccl/secret"
_HOSTS_KEY = "jax_dfccl/host"


def publish_host() -> None:
    """Says which host this process is on, before JAX's CPU client exists.

    JAX makes that client in all processes together. So whoever has one finds the same hosts as all
    others do, at once, and chooses the same plans: those of all processes that have said it.
    """
    found, machine = _compat.key_value_store(), _address.machine()
    if found is not None and machine:
        with contextlib.suppress(RuntimeError):
            found[0].add(f"{_HOSTS_KEY}/{_compat.process_id()}", machine)


def _hosts(store: Store, processes: Iterable[int]) -> list[int]:
    """A number for each process's host; empty if one has not said it."""
    said = store.below(_HOSTS_KEY)
    try:
        machines = [said[str(process)] for process in sorted(processes)]
    except KeyError:
        return []
    return [machines.index(machine) for machine in machines]


class Cluster:
    """This process as a member of a job.

    Attributes:
        dropped: How many connections were dropped, by reason.
        membership: Who goes on together.
    """

    def __init__(
        self,
        process: int,
        process_of: dict[int, int],
        store: Store,
        runtime: Runtime,
        config: ClusterConfig,
        coordinator: str,
        machine: str,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._config = config
        self._coordinator = coordinator
        self._indices = frozenset(process_of.values())
        self._pid = os.getpid()
        self.dropped: collections.Counter[str] = collections.Counter()

        self._peers: dict[int, _Peer] = {}
        self._half_open: dict[asyncio.Task, None] = {}  # oldest first
        self._tasks: set[asyncio.Task] = set()
        self._listeners: list[socket.socket] = []

        # What the two threads tell each other.
        self._wake = threading.Event()
        self._closing = False
        self._lookups: frozenset[int] = frozenset()
        self._tcp_needed = self._tcp_published = self._tcp_failed = False

        self._me = Identity(
            process,
            secrets.token_bytes(_handshake.INCARNATION_BYTES),
            self._job_secret(),
            config.ring_bytes,
            config.sockets,
        )
        uses_unix = config.transport != "tcp" and bool(machine)
        self._address = Address(
            incarnation=self._me.incarnation,
            host=socket.gethostname(),
            machine=machine,
            life=_address.life(),
            unix=f"jax_dfccl-{secrets.token_hex(16)}" if uses_unix else "",
        )
        self._loop = asyncio.new_event_loop()
        try:
            if config.interface:
                _address.listening_addresses(config.interface, coordinator)  # an error comes now
            if uses_unix:
                self._listeners.append(_listen(socket.AF_UNIX, "\0" + self._address.unix))
            else:
                self._listen_with_tcp()
                self._tcp_published = True
            self._first = store.add(_key(process), self._address.text())
            if not self._first:
                _log.error(
                    "this process is a second process %d of its job. The others refuse to "
                    "connect to a process that was restarted: start the job anew",
                    process,
                )
            hosts = _hosts(store, self._indices)
            runtime.cluster_join(process, process_of, hosts, config.peer_timeout_s)
        except BaseException:
            for listener in self._listeners:
                listener.close()
            self._loop.close()
            raise
        self._threads = [
            threading.Thread(target=target, name=f"jax_dfccl_{name}", daemon=True)
            for name, target in (("connect", self._run), ("lookup", self._look_up))
        ]
        self.membership = Membership(process, self._indices, self, runtime)
        for thread in self._threads:
            thread.start()

    def want(self, processes: Iterable[int]) -> None:
        """Asks for connections to some processes; returns at once."""
        self.call(self._want, frozenset(processes))

    def answer(self, question: int, reply: Callable[[], None]) -> None:
        """Calls `reply` whenever the descriptor `question` is readable."""
        self.call(self._loop.add_reader, question, reply)

    def call(self, function: Callable[..., Any], *arguments: object, after_s: float = 0) -> None:
        """Calls a function soon, on the thread that connects."""
        if after_s > 0:
            self.call(lambda: self._loop.call_later(after_s, function, *arguments))
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Stops listening and connecting; what the runtime has is its own."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._wake.set()
        self.call(self._stop)
        for thread in self._threads:
            thread.join(_CLOSE_S / len(self._threads))

    def close_descriptors(self) -> None:
        """For a forked child, which has the descriptors but not the threads."""
        for listener in self._listeners:
            listener.close()

    def _job_secret(self) -> bytes:
        if self._config.job_secret:
            return self._config.job_secret.encode()
        self._store.add(_SECRET_KEY, secrets.token_hex(32))
        secret = self._store.get(_SECRET_KEY)
        assert secret is not None
        return secret.encode()

    def _listen_with_tcp(self) -> None:
        listeners: list[socket.socket] = []
        published: list[tuple[str, int]] = []
        try:
            for bound, shown in _address.listening_addresses(
                self._config.interface, self._coordinator
            ):
                family = socket.AF_INET6 if ":" in bound else socket.AF_INET
                listeners.append(_listen(family, (bound, 0)))
                published.append((shown, listeners[-1].getsockname()[1]))
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._listeners += listeners
        self._address = dataclasses.replace(self._address, tcp=tuple(published))

    # The thread that looks up.

    def _look_up(self) -> None:
        delay = _FIRST_DELAY_S
        asked: frozenset[int] = frozenset()
        while True:
            if not asked >= self._lookups:
                delay = _FIRST_DELAY_S
            asked = self._lookups
            for process in sorted(asked):
                if self._closing:
                    return
                try:
                    text = self._store.get(_key(process))
                except RuntimeError as error:
                    _log.debug("cannot look up process %d: %s", process, error)
                    break
                if text is not None:
                    self.call(self._learn, process, text)
            if self._tcp_needed and not self._tcp_published:
                self._publish_tcp()
            self._wake.wait(max(delay, _LOOKUP_S * len(asked)) if asked else None)
            if self._closing:
                return
            self._wake.clear()
            delay = min(2 * delay, _LAST_DELAY_S)

    def _publish_tcp(self) -> None:
        """Listens with TCP, too, and says so; tried again later if it fails."""
        try:
            if not self._address.tcp:
                before = len(self._listeners)
                self._listen_with_tcp()
                self.call(self._serve, self._listeners[before:])
            if self._first:
                self._store.replace(_key(self._me.process), self._address.text())
            self._tcp_published = True
        except (OSError, RuntimeError) as error:
            if not self._tcp_failed:
                _log.warning("cannot listen for processes on other hosts yet: %s", error)
            self._tcp_failed = True

    def _ask(self, process: int, wanted: bool) -> None:
        lookups = self._lookups | {process} if wanted else self._lookups - {process}
        if lookups != self._lookups:
            self._lookups = lookups
            if wanted:
                self._wake.set()

    def _need_tcp(self) -> None:
        if not self._tcp_needed:
            self._tcp_needed = True
            self._wake.set()

    # The thread that connects: everything from here on.

    def is_linked(self, process: int) -> bool:
        """Whether there is, or was, a connection to a process."""
        peer = self._peers.get(process)
        return peer is not None and peer.phase is _Phase.LINKED

    def has_ended(self, process: int) -> bool:
        """Whether it is certain that a process has ended: one of this host."""
        address = self._peer(process).address
        if address is None or not address.machine or address.machine != self._address.machine:
            return False
        return _address.has_ended(address.life)

    def leave_out(self, process: int, reason: str) -> None:
        """Breaks with a process for good, which hears why if it can."""
        peer = self._peer(process)
        peer.phase = _Phase.DOWN
        self._ask(process, False)
        self._runtime.leave_out(process, reason)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._serve(self._listeners)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()
        for listener in self._listeners:
            listener.close()

    def _stop(self) -> None:
        self._loop.stop()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._half_open.pop(task, None)
        if not task.cancelled() and (error := task.exception()):
            _log.error("connecting processes failed", exc_info=error)

    def _serve(self, listeners: list[socket.socket]) -> None:
        for listener in list(listeners):
            self._start(self._accept_all(listener))

    def _peer(self, process: int) -> _Peer:
        return self._peers.setdefault(process, _Peer(process))

    def _want(self, processes: frozenset[int]) -> None:
        for process in processes:
            peer = self._peer(process)
            if not peer.wanted:
                peer.wanted = True
                if peer.phase is _Phase.APART:
                    self._ask(process, True)

    def _learn(self, process: int, text: str) -> None:
        peer = self._peer(process)
        if peer.phase in (_Phase.LINKED, _Phase.DOWN):
            self._ask(process, False)
            return
        try:
            address = Address.parse(text)
        except AddressError as error:
            self._down(peer, f"process {process}: {error}")
            return
        peer.address = address
        peer.known.set()
        if not peer.wanted:
            self._ask(process, False)
        elif not list(self._routes(address)):
            self._need_tcp()  # so that it learns that it needs an address for TCP too
        elif peer.connecting is None:
            self._ask(process, False)
            peer.connecting = self._start(self._connect(peer))

    def _routes(self, address: Address) -> Iterator[_Route]:
        if address.unix and self._address.unix and address.machine == self._address.machine:
            yield _Route(Transport.UNIX, socket.AF_UNIX, "\0" + address.unix)
        for host, port in address.tcp:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            yield _Route(Transport.TCP, family, (host, port))

    async def _connect(self, peer: _Peer) -> None:
        """Tries to connect to a peer until there is a connection, begun by either, or no hope."""
        start, delay = time.monotonic(), _FIRST_DELAY_S
        while True:
            assert peer.address is not None
            problems: list[str] = []
            for route in self._routes(peer.address):
                try:
                    await self._attempt(peer, route)
                except (OSError, TimeoutError, HandshakeError) as error:
                    problems.append(f"{route}: {_said(error)}")
                    _log.debug("%s cannot be connected by %s", peer, problems[-1])
                    if route.transport is Transport.UNIX and _address.has_ended(peer.address.life):
                        self._down(peer, f"{peer} has ended")
                if peer.phase in (_Phase.LINKED, _Phase.DOWN):
                    return
            if problems:
                self._need_tcp()
                self._ask(peer.process, True)  # its address for TCP may come yet
            limit = self._config.connect_timeout_s
            if time.monotonic() - start > limit:
                self._down(
                    peer,
                    f"{peer} could not be connected for {limit:g} s ({'; '.join(problems)}). "
                    "Check that it is alive, that no firewall is between the hosts, that "
                    "JAX_DFCCL_INTERFACE names an interface that the other hosts reach, and that "
                    "JAX_DFCCL_JOB_SECRET is the same in all processes",
                )
                return
            await asyncio.sleep(delay * random.uniform(1, 2))
            delay = min(2 * delay, _LAST_DELAY_S)

    async def _greet(
        self, peer: _Peer, route: _Route, connection: socket.socket, number: int = 0
    ) -> Greeting:
        """Connects, and hears who is there."""
        assert peer.address is not None
        connection.setblocking(False)
        async with asyncio.timeout(_HANDSHAKE_S):
            if route.transport is Transport.UNIX:
                connection.connect(route.target)  # at once, or never
                _check_user(connection)
            else:
                await self._loop.sock_connect(connection, route.target)
                _tune(connection)
            return await _handshake.greet_acceptor(
                *(connection, self._me, route.transport),
                *(peer.process, peer.address.incarnation, number),
            )

    async def _attempt(self, peer: _Peer, route: _Route) -> None:
        with socket.socket(route.family, socket.SOCK_STREAM) as connection:
            greeting = await self._greet(peer, route, connection)
            if peer.phase is not _Phase.APART:
                return
            peer.phase = _Phase.OFFERED
            try:
                # Its promise to accept is final, so it cannot be given up for another attempt.
                async with asyncio.timeout(self._config.connect_timeout_s):
                    verdict = await _handshake.offer(connection, self._me, greeting)
            except TimeoutError:
                if peer.phase is _Phase.OFFERED:
                    self._down(peer, f"{peer} does not answer ({route})")
                return
            finally:
                offered = peer.phase is _Phase.OFFERED  # it has not connected from its end since
                if offered:
                    peer.phase = _Phase.APART
            if not offered or verdict is Verdict.CROSSED:
                return
            if verdict is Verdict.ACCEPTED:
                peer.phase = _Phase.LINKED
                more = self._make_more(peer, route, greeting.terms().sockets)
                await self._link(peer, connection, route.transport, greeting, more)
            else:
                self._down(peer, f"{peer} {_REFUSALS[verdict]}")

    async def _accept_all(self, listener: socket.socket) -> None:
        transport = Transport.UNIX if listener.family == socket.AF_UNIX else Transport.TCP
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or it has gone already
                _log.debug("cannot accept a connection: %s", error)
                await asyncio.sleep(_FIRST_DELAY_S)
                continue
            if len(self._half_open) >= _HALF_OPEN:
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.cancel()
            task = self._start(self._welcome(connection, transport))
            self._half_open[task] = None
            await asyncio.sleep(0)  # it must have begun before it is cancelled

    async def _welcome(self, connection: socket.socket, transport: Transport) -> None:
        """Finds out who has connected, and takes the connection or not."""
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    if transport is Transport.UNIX:
                        _check_user(connection)
                    else:
                        _tune(connection)
                    hello, greeting = await _handshake.greet_initiator(
                        connection, self._me, transport
                    )
                    if hello.process not in self._indices:
                        raise HandshakeError("there is no process of its index")
                    peer = self._peer(hello.process)
                    if peer.address is None:
                        self._ask(hello.process, True)
                        await peer.known.wait()
            except (OSError, TimeoutError, HandshakeError) as error:
                self._drop(transport, _said(error))
                return
            except asyncio.CancelledError:
                if not self._closing:
                    self._drop(transport, "too many at a time")
                raise
            self._half_open.pop(asyncio.current_task(self._loop), None)  # type: ignore[arg-type]
            if hello.number > 0:
                await self._take_one_more(peer, connection, hello, greeting)
                return
            verdict = self._judge(peer, hello.incarnation)
            if verdict is Verdict.ACCEPTED:
                peer.phase = _Phase.LINKED
                peer.sockets = greeting.terms().sockets if transport is Transport.TCP else 1
            try:
                await _handshake.answer(connection, self._me, greeting, verdict)
            except OSError as error:
                if verdict is Verdict.ACCEPTED:
                    self._down(peer, f"{peer} closed its connection ({_said(error)})")
                return
            if verdict is Verdict.ACCEPTED:
                await self._link(peer, connection, transport, greeting, self._await_more(peer))

    async def _take_one_more(
        self, peer: _Peer, connection: socket.socket, hello: Hello, greeting: Greeting
    ) -> None:
        """A connection beyond the first."""
        assert peer.address is not None
        if (
            peer.phase is not _Phase.LINKED
            or peer.address.incarnation != hello.incarnation
            or peer.complete.is_set()
            or hello.number in peer.more
            or hello.number >= peer.sockets
        ):
            self._drop(Transport.TCP, "nobody waits for a further connection of its number")
            return
        peer.more[hello.number] = connection.dup()
        try:
            await _handshake.answer(connection, self._me, greeting, Verdict.ACCEPTED)
        except OSError as error:
            self._down(peer, f"{peer} closed its connection ({_said(error)})")
        if len(peer.more) == peer.sockets - 1:
            peer.complete.set()

    async def _await_more(self, peer: _Peer) -> list[socket.socket]:
        """The connections beyond the first that the initiator makes."""
        try:
            if peer.sockets > 1:
                await peer.complete.wait()
        except BaseException:
            for connection in peer.more.values():
                connection.close()
            raise
        finally:
            peer.complete.set()
        return [peer.more[number] for number in range(1, peer.sockets)]

    async def _make_more(self, peer: _Peer, route: _Route, count: int) -> list[socket.socket]:
        """Makes the connections beyond the first."""
        more: list[socket.socket] = []
        try:
            for number in range(1, count):
                more.append(socket.socket(route.family, socket.SOCK_STREAM))
                greeting = await self._greet(peer, route, more[-1], number)
                if await _handshake.offer(more[-1], self._me, greeting) is not Verdict.ACCEPTED:
                    raise HandshakeError("it refuses a further connection")
        except BaseException:
            for connection in more:
                connection.close()
            raise
        return more

    def _judge(self, peer: _Peer, incarnation: bytes) -> Verdict:
        assert peer.address is not None
        if peer.address.incarnation != incarnation:
            _log.warning(
                "refused process %d: it is a second process of that index. A process that was "
                "restarted cannot join the job again: start the job anew",
                peer.process,
            )
            return Verdict.RESTARTED
        if peer.phase is _Phase.DOWN:
            return Verdict.GIVEN_UP
        if peer.phase is _Phase.LINKED:
            return Verdict.LINKED
        if peer.phase is _Phase.OFFERED and self._me.process < peer.process:
            return Verdict.CROSSED
        return Verdict.ACCEPTED

    async def _link(
        self,
        peer: _Peer,
        connection: socket.socket,
        transport: Transport,
        greeting: Greeting,
        more: Coroutine[Any, Any, list[socket.socket]],
    ) -> None:
        """Gives a connection that both ends have agreed on to the runtime.

        `more` gets those that TCP has beyond the first.
        """
        self._ask(peer.process, False)
        memory, sockets = -1, [connection]
        with contextlib.closing(more):
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    if transport is Transport.UNIX:
                        memory = await _handshake.share_memory(
                            connection,
                            greeting.terms().ring_bytes,
                            gives=self._me.process < peer.process,
                        )
                    else:
                        sockets += await more
            except (OSError, TimeoutError, HandshakeError) as error:
                what = "share memory" if transport is Transport.UNIX else "make all connections"
                self._down(peer, f"{peer} and this process could not {what}: {_said(error)}")
                return
        self._runtime.cluster_link(peer.process, [each.detach() for each in sockets], memory)

    def _down(self, peer: _Peer, reason: str) -> None:
        peer.phase = _Phase.DOWN
        self._ask(peer.process, False)
        _log.warning("%s", reason)
        self._runtime.cluster_down(peer.process, reason)

    def _drop(self, transport: Transport, reason: str) -> None:
        self.dropped[reason] += 1
        _log.debug("dropped a %s connection: %s", transport.name, reason)


_REFUSALS = {
    Verdict.LINKED: "takes itself for connected with this process, by a connection that is lost",
    Verdict.RESTARTED: (
        "refuses this process, because another process has had its index. A process that was "
        "restarted cannot join the job again: start the job anew"
    ),
    Verdict.GIVEN_UP: "has given up this process, which could not be connected before",
}


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))


def _listen(family: int, address: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _check_user(connection: socket.socket) -> None:
    """Refuses the processes of other users."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(data)[1] != os.geteuid():
        raise HandshakeError("it belongs to another user")


_lock = threading.Lock()
_cluster: Cluster | None = None
_platform: str | None = None  # of the devices that the job's collectives are for
_forked = False


def require(
    processes: Iterable[int], runtime: Runtime | None = None, platform: str | None = None
) -> None:
    """Sees to it that this process gets connected with others; waits for none of them.

    Called when a program is lowered or loaded.

    Args:
      processes: Those that the groups of the program reach; this one may be among them.
      runtime: What gets the connections; `_core` if not given. The first call decides.
      platform: Of the program's devices, "cpu" or "cuda"; that of the job if not given.

    Raises:
      NotImplementedError: There was another platform before. Devices of two may have the same
        ids, by which everything here goes.
    """
    settled = _settle(platform)
    if platform not in (None, settled):
        raise NotImplementedError(
            "jax_dfccl: in a job of several processes, collectives are for devices of one "
            f"platform: {settled} in this one, so far, and not {platform}"
        )
    others = frozenset(processes) - {jax.process_index()}
    if others:
        joined(runtime).want(others)


def joined(runtime: Runtime | None = None) -> Cluster:
    """This process as a member of its job; the first call makes it one."""
    if _forked:
        raise RuntimeError(
            "jax_dfccl: this process was forked from one that is connected with others; JAX and "
            "its threads do not survive a fork. Start processes anew (multiprocessing's 'spawn')"
        )
    global _cluster
    with _lock:
        if _cluster is None:
            _cluster = _join(jax.process_index(), runtime)
        return _cluster


def _settle(platform: str | None) -> str:
    """The platform of the job's collectives; the first call decides."""
    global _platform
    if _platform is None:
        default = "cpu" if jax.default_backend() == "cpu" else "cuda"
        _platform = platform or default
    return _platform


def _join(process: int, runtime: Runtime | None) -> Cluster:
    if runtime is None:
        from jax_dfccl import _core

        runtime = _core
    found = _compat.key_value_store()
    if found is None:
        raise RuntimeError(
            "jax_dfccl: a program reaches other processes, but this process is not connected with "
            "jax.distributed; call jax.distributed.initialize() first, and do not shut it down "
            "before the last program is compiled"
        )
    store, coordinator = found
    cluster = Cluster(
        process,
        {device.id: device.process_index for device in jax.devices(_settle(None))},
        store,
        runtime,
        ClusterConfig.from_environment(),
        coordinator,
        _address.machine(),
    )
    cluster.answer(
        runtime.threads_question(), lambda: runtime.threads_answer(_threads_of_the_user())
    )
    atexit.register(cluster.close)  # before JAX takes its client away
    os.register_at_fork(after_in_child=_after_fork)
    return cluster


def _threads_of_the_user() -> int:
    return sum(not thread.name.startswith("jax_dfccl_") for thread in threading.enumerate())


def _after_fork() -> None:
    global _forked
    _forked = True
    if _cluster is not None:
        _cluster.close_descriptors()
