# SPDX-License-Identifier: Apache-2.0
"""A link between two network namespaces that delays, loses, reorders and cuts, in user space.

`python wire.py DEVICE NAMESPACE NAMESPACE` makes a TUN device in each namespace, says `ready`, and
carries packets between the two until its stdin ends. A line of JSON on stdin, [direction, fault],
changes what happens to packets from then on (see `Fault`) and is answered with `done`. Standard
library only; needs root and /dev/net/tun.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO

TUN = "/dev/net/tun"
MTU = 9000
QUEUE = 1000  # packets under way in a direction; what comes beyond that is lost, as in a router

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


@dataclasses.dataclass
class Fault:
    """What happens to the packets of one direction.

    Attributes:
        delay_s: How long each is under way.
        jitter_s: Up to how much longer; packets overtake each other then.
        loss: How many of them are lost, from 0 to 1.
        cut: All are lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


class Direction:
    """The packets that go from one end to the other."""

    def __init__(self, out: int, seed: int) -> None:
        self.fault = Fault()
        self._out = out
        self._chance = random.Random(seed)
        self._under_way: list[tuple[float, int, bytes]] = []
        self._count = 0

    def take(self, packet: bytes, now: float) -> None:
        """A packet enters the link."""
        fault = self.fault
        lost = self._chance.random() < fault.loss
        if fault.cut or lost or len(self._under_way) >= QUEUE:
            return
        due = now + fault.delay_s + fault.jitter_s * self._chance.random()
        self._count += 1
        heapq.heappush(self._under_way, (due, self._count, packet))

    def deliver(self, now: float) -> float | None:
        """Lets those leave whose time has come; when the next one wants to."""
        while self._under_way and self._under_way[0][0] <= now:
            packet = heapq.heappop(self._under_way)[2]
            if not self.fault.cut:
                with contextlib.suppress(OSError):  # the device is not up yet, or gone
                    os.write(self._out, packet)
        return self._under_way[0][0] if self._under_way else None


def _enter(namespace: BinaryIO) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def open_device(name: str, namespace: str) -> int:
    """A TUN device in a network namespace of `ip netns`."""
    with Path("/proc/self/ns/net").open("rb") as home:
        with Path(f"/run/netns/{namespace}").open("rb") as there:
            _enter(there)
        device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        flags = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, flags)
        _enter(home)
    return device


def carry(devices: list[int]) -> None:
    """Carries packets until stdin ends."""
    ways = {devices[0]: Direction(devices[1], 1), devices[1]: Direction(devices[0], 2)}
    in_order = list(ways.values())
    poll = select.poll()
    for descriptor in (0, *devices):
        poll.register(descriptor, select.POLLIN)
    due: float | None = None
    while True:
        wait_ms = None if due is None else max(0.0, due - time.monotonic()) * 1000
        for descriptor, _ in poll.poll(wait_ms):
            if descriptor == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                direction, fault = json.loads(line)
                in_order[direction].fault = Fault(**fault)
                print("done", flush=True)
                continue
            try:
                for _ in range(64):
                    ways[descriptor].take(os.read(descriptor, MTU), time.monotonic())
            except BlockingIOError:
                pass
        now = time.monotonic()
        due = min((at for way in in_order if (at := way.deliver(now)) is not None), default=None)


def main() -> None:
    """Runs the link that the command line names."""
    device, *namespaces = sys.argv[1:]
    devices = [open_device(device, namespace) for namespace in namespaces]
    print("ready", flush=True)
    carry(devices)


if __name__ == "__main__":
    main()
