# SPDX-License-Identifier: Apache-2.0
"""Processes are stopped, delayed, cut off and killed at random while they compute.

DFCCL_SOAK_SECONDS says for how long (600), DFCCL_CHAOS_SEED with which episode to begin (1).
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import jobs
import pytest
from hosts import Hosts, two_hosts

SECONDS = float(os.environ.get("DFCCL_SOAK_SECONDS", "600"))
FIRST = int(os.environ.get("DFCCL_CHAOS_SEED", "1"))
PROCESSES = 4
LAUNCHES = 250
# Much longer than any of what is done to it takes.
EPISODE_S = 200


def _left_behind(hosts: Hosts) -> list[str]:
    """Processes on the hosts, what is listened on there, and files of shared memory."""
    found = [str(path) for path in Path("/dev/shm").glob("*dfccl*")]
    for host, name in enumerate(hosts.names):
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        found += [f"process {pid}" for pid in pids.stdout.split()]
        tables = ["cat", *(f"/proc/net/{table}" for table in ("tcp", "tcp6", "unix"))]
        text = subprocess.run([*hosts.prefix(host), *tables], capture_output=True, text=True)
        for line in text.stdout.splitlines():
            fields = line.split()
            if "@jax_dfccl" in line or (len(fields) > 9 and fields[3] == "0A"):
                found.append(line)
    return found


class Episode:
    """One job, and what is done to it."""

    def __init__(self, seed: int, hosts: Hosts, folder: Path) -> None:
        self.random = random.Random(seed)
        self.hosts = hosts
        self.folder = folder
        self.layout = ("one host", "one host, tcp", "two hosts")[seed % 3]
        self.victim = self.random.choice((None, *range(1, PROCESSES)))
        self.done: list[str] = []

    def run(self, seed: int) -> None:
        apart = self.layout == "two hosts"
        port = 20_000 + time.monotonic_ns() // 1000 % 10_000
        variables = {"JAX_DFCCL_TRANSPORT": "tcp"} if self.layout.endswith("tcp") else {}
        arguments = (str(self.folder), str(seed), str(LAUNCHES))
        with jobs.started(
            *("across_chaos", "chaos", PROCESSES, 1, *arguments),
            address=f"{self.hosts.links[0].addresses[0]}:{port}",
            prefixes=[self.hosts.prefix(rank // 2 if apart else 0) for rank in range(PROCESSES)],
            JAX_ENABLE_RECOVERABILITY="1",
            **variables,
        ) as job:
            deadline = time.monotonic() + jobs.LIMIT_S
            while len(list(self.folder.glob("ready-*"))) < PROCESSES:
                assert time.monotonic() < deadline, jobs.ends(job, 0)
                time.sleep(0.02)
            time.sleep(self.random.uniform(0, 1))
            actions = [self._stop, self._stop, *([self._disturb, self._cut] if apart else [])]
            for _ in range(self.random.randint(2, 6)):
                self.random.choice(actions)(job)
            if self.victim is not None:
                self.done.append(f"kill {self.victim}")
                (self.folder / f"dead-{self.victim}").touch()
                job[self.victim].kill()
            self.random.choice(actions)(job)
            self.hosts.disturb()
            ended = jobs.ends(job, EPISODE_S)
        if self.victim is not None:
            # It may have been through with everything.
            assert ended.pop(self.victim)[0] in (0, -signal.SIGKILL)
        jobs.all_right(ended)

    def _stop(self, job) -> None:
        rank, seconds = self.random.randrange(PROCESSES), self.random.uniform(0.05, 2)
        self.done.append(f"stop {rank} for {seconds:.1f} s")
        job[rank].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        job[rank].send_signal(signal.SIGCONT)

    def _disturb(self, job) -> None:
        fault = {
            "delay_s": self.random.choice((0, 0.002, 0.03)),
            "jitter_s": self.random.choice((0, 0.01)),
            "loss": self.random.choice((0, 0.01, 0.05)),
        }
        self.done.append(f"disturb {fault}")
        self.hosts.disturb(**fault)
        time.sleep(self.random.uniform(0.2, 2))

    def _cut(self, job) -> None:
        for host in self.random.choice(((0,), (1,), (0, 1))):
            self.done.append(f"cut {host}")
            self.hosts.links[0].disturb(host, cut=True)
        time.sleep(self.random.uniform(0.1, 3))
        self.hosts.disturb()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
def test_no_wrong_value_no_hang_and_nothing_left_behind(tmp_path):
    deadline = time.monotonic() + SECONDS
    with two_hosts() as hosts:
        seed = FIRST
        while time.monotonic() < deadline:
            folder = tmp_path / str(seed)
            folder.mkdir()
            episode, begin = Episode(seed, hosts, folder), time.monotonic()
            try:
                episode.run(seed)
            finally:
                took = time.monotonic() - begin
                print(f"episode {seed}, {episode.layout}, {took:.0f} s: {episode.done}", flush=True)
            assert not _left_behind(hosts)
            seed += 1
