# SPDX-License-Identifier: Apache-2.0
"""Jobs of several processes, each of which runs a program of tests/programs."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "programs"
LIMIT_S = 150


def free_address(host: str = "127.0.0.1") -> str:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


@contextlib.contextmanager
def started(
    program: str,
    case: str,
    processes: int,
    devices: int,
    *arguments: str,
    address: str = "",
    prefixes: Sequence[Sequence[str]] = (),
    folders: Sequence[Path] = (),
    **variables: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes, which are killed at the end.

    `prefixes`: what runs each one's command; `folders`: where each one's program is.
    """
    address = address or free_address()
    jobs = [
        subprocess.Popen(
            [
                *(prefixes[rank] if prefixes else ()),
                sys.executable,
                str((folders[rank] if folders else PROGRAMS) / f"{program}.py"),
                *(case, address),
                *map(str, (processes, rank, devices)),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XLA_FLAGS": "", "JAX_ENABLE_RECOVERABILITY": "0", **variables},
        )
        for rank in range(processes)
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.kill()
        for job in jobs:
            job.wait()


def ends(jobs: list[subprocess.Popen[str]], limit_s: float = LIMIT_S) -> list[tuple[int, str]]:
    """The exit status and the output of every process."""
    deadline = time.monotonic() + limit_s
    found = []
    for rank, job in enumerate(jobs):
        try:
            output = job.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            for each in jobs:
                each.kill()
            outputs = [each.communicate()[0][-2000:] for each in jobs[rank:]]
            hung = f"process {rank} hung: killed after {limit_s} s\n{outputs}"
            raise AssertionError(hung) from None
        found.append((job.returncode, output))
    return found


def run(
    program: str, case: str, processes: int, devices: int, *arguments: str, **options
) -> list[tuple[int, str]]:
    with started(program, case, processes, devices, *arguments, **options) as jobs:
        return ends(jobs)


def all_right(ended: list[tuple[int, str]]) -> None:
    for rank, (status, output) in enumerate(ended):
        right = status == 0 and output.rstrip().endswith("right")
        assert right, f"process {rank}, exit status {status}\n{output[-3000:]}"
