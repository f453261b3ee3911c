# SPDX-License-Identifier: Apache-2.0
"""Network namespaces that stand for two hosts, joined by links of user space (wire.py)."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wire


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Link:
    """A link between two hosts, with an address on each side in IPv4 and in IPv6."""

    def __init__(self, number: int, namespaces: list[str]) -> None:
        self.device = f"wire{number}"
        self.addresses = [f"10.77.{number}.{side}" for side in (1, 2)]
        self.addresses_6 = [f"fd77:{number}::{side}" for side in (1, 2)]
        program = [sys.executable, wire.__file__, self.device, *namespaces]
        self._carrier = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._carrier.stdin and self._carrier.stdout
        self._requests, self._answers = self._carrier.stdin, self._carrier.stdout
        try:
            self._hear("ready")
            for side, name in enumerate(namespaces):
                on_device = ("dev", self.device)
                _ip("-n", name, "address", "add", f"{self.addresses[side]}/24", *on_device)
                _ip("-n", name, "address", "add", f"{self.addresses_6[side]}/64", *on_device)
                _ip("-n", name, "link", "set", self.device, "mtu", str(wire.MTU), "up")
        except BaseException:
            self.remove()
            raise

    def _hear(self, word: str) -> None:
        assert self._answers.readline().strip() == word, "the link's program has ended"

    def disturb(self, host: int, **fault: float) -> None:
        """What happens from now on to what `host` sends: see wire.Fault. Nothing: it is whole."""
        print(json.dumps([host, fault]), file=self._requests, flush=True)
        self._hear("done")

    def remove(self) -> None:
        self._requests.close()
        self._carrier.wait()
        self._answers.close()


class Hosts:
    """Two hosts and the links between them."""

    def __init__(self, links: int) -> None:
        self.names = [f"dfccl-{os.getpid()}-{side}" for side in "ab"]
        self._stack = contextlib.ExitStack()
        self.links: list[Link] = []
        try:
            for name in self.names:
                _ip("netns", "add", name)
                self._stack.callback(_ip, "netns", "delete", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for number in range(links):
                self.links.append(Link(number, self.names))
                self._stack.callback(self.links[-1].remove)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._stack.close()

    def prefix(self, host: int) -> list[str]:
        """What comes before a command that is to run there."""
        return ["ip", "netns", "exec", self.names[host]]

    def disturb(self, **fault: float) -> None:
        """What happens from now on to all packets: see wire.Fault. Nothing: the links are whole."""
        for link in self.links:
            for host in range(2):
                link.disturb(host, **fault)


@contextlib.contextmanager
def two_hosts(links: int = 1) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    if not Path(wire.TUN).exists():
        pytest.skip(f"a link between network namespaces needs {wire.TUN}")
    try:
        hosts = Hosts(links)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        yield hosts
    finally:
        hosts.remove()
