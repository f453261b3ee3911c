# SPDX-License-Identifier: Apache-2.0
"""What stands for the runtime and for the job's key-value store where processes get connected."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LIMIT_S = 30


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Store:
    """The key-value store of a job whose processes are threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def add(self, key: str, value: str) -> bool:
        with self._lock:
            return self.values.setdefault(key, value) is value

    def replace(self, key: str, value: str) -> None:
        self.values[key] = value

    def below(self, folder: str) -> dict[str, str]:
        start = f"{folder}/"
        return {k.removeprefix(start): x for k, x in self.values.items() if k.startswith(start)}


# A process, the first connection to it, the memory or -1, further connections.
Link = tuple[int, socket.socket, int, list[socket.socket]]


class Runtime:
    """Keeps the connections that it is given."""

    def __init__(self) -> None:
        self.joined: list[tuple[int, dict[int, int]]] = []
        self.hosts: list[int] = []
        self.links: list[Link] = []
        self.down: dict[int, str] = {}
        self._events: list[int] = []

    def cluster_join(
        self, process: int, process_of: dict[int, int], host_of: list[int], peer_timeout_s: float
    ) -> None:
        self.joined.append((process, process_of))
        self.hosts = host_of

    def cluster_link(self, process: int, sockets: list[int], memory: int) -> None:
        first, *more = map(_as_socket, sockets)
        self.links.append((process, first, memory, more))

    def threads_question(self) -> int:
        return os.eventfd(0)  # nothing is ever asked

    def threads_answer(self, threads: int) -> None:
        raise AssertionError

    def notes_ready(self) -> int:
        self._events.append(os.eventfd(0))  # nobody ever says anything
        return self._events[-1]

    def cluster_down(self, process: int, reason: str) -> None:
        assert process not in self.down
        self.down[process] = reason

    def linked(self) -> list[int]:
        return sorted(process for process, *_ in self.links)

    def close(self) -> None:
        while self._events:
            os.close(self._events.pop())
        for _, connection, memory, more in self.links:
            for each in (connection, *more):
                each.close()
            if memory >= 0:
                os.close(memory)


def send(process: int, links: Iterable[Link]) -> None:
    """Says to every peer who speaks to whom, by sockets and by memory."""
    for peer, connection, memory, more in links:
        if memory >= 0:
            os.pwrite(memory, bytes([process + 1]), process)
        for number, each in enumerate((connection, *more)):
            each.sendall(f"{process}>{peer}/{number}".encode())


def receive(process: int, links: Iterable[Link]) -> None:
    """Sees that each peer said so, and nothing before."""
    for peer, connection, memory, more in links:
        for number, each in enumerate((connection, *more)):
            message = f"{peer}>{process}/{number}".encode()
            assert each.recv(len(message), socket.MSG_WAITALL) == message
        if memory >= 0:
            assert os.pread(memory, 1, peer) == bytes([peer + 1])


def _as_socket(descriptor: int) -> socket.socket:
    assert not os.get_blocking(descriptor)  # as the runtime wants it
    connection = socket.socket(fileno=descriptor)
    connection.settimeout(LIMIT_S)
    return connection


def listening() -> set[str]:
    """Where this process listens with TCP: addresses and ports as the kernel writes them."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(link))  # noqa: PTH115 - "socket:[1]" is no path
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1])
    return found
