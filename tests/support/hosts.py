# SPDX-License-Identifier: Apache-2.0
"""Network namespaces that stand for two hosts with a link between them. Needs root."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two hosts, "a" and "b", with an address each."""

    ADDRESSES = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self._names = [f"dfccl-{os.getpid()}-{side}" for side in "ab"]

    def make(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        one, other = self._names
        peer = ("peer", "name", "wire", "netns", other)
        _ip("-n", one, "link", "add", "wire", "type", "veth", *peer)
        for name, address in zip(self._names, self.ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")

    def remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)

    def prefix(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[host]]

    def disturb(self, *netem: str) -> None:
        """Delays or loses packets in both directions; skips where the kernel cannot."""
        for name in self._names:
            command = ["tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "netem", *netem]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"tc netem does not work here: {done.stderr.strip()}")

    def cut(self) -> None:
        """Nothing passes in either direction."""
        _ip("-n", self._names[0], "link", "set", "wire", "down")

    def cut_one_way(self, host: int) -> None:
        """What `host` sends is lost on the way: it goes to a station that nobody has."""
        peer = self.ADDRESSES[1 - host]
        station = ("lladdr", "02:00:00:00:00:99", "dev", "wire", "nud", "permanent")
        _ip("-n", self._names[host], "neighbour", "replace", peer, *station)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    hosts = Hosts()
    try:
        try:
            hosts.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.remove()
