# SPDX-License-Identifier: Apache-2.0
"""examples/distributed.py, started in the ways of docs/launch.md that a test can have."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from hosts import two_hosts

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "distributed.py")
LAUNCH = [sys.executable, "-m", "jax_dfccl", "launch"]


def sums(command: list[str], processes: int, **variables: str) -> None:
    """Runs a job of one device in each process and sees that all have the right sum."""
    environment = {**os.environ, "XLA_FLAGS": "", **variables}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=jobs.LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    count = processes * (processes - 1) // 2 * 4
    total = [float(count + processes * (1 + i)) for i in range(4)]
    for rank in range(processes):
        said = f"process {rank} of {processes}, {processes} devices: {total}"
        assert said in done.stdout, done.stdout


def test_launch():
    sums([*LAUNCH, "-n", "3", EXAMPLE], 3)


def test_launch_on_two_hosts():
    with two_hosts() as hosts:
        way = ["--ssh", "ip netns exec {host} sh -c", "--hosts", ",".join(hosts.names)]
        coordinator = ["--coordinator", hosts.links[0].addresses[0]]
        sums([*LAUNCH, "-n", "4", *way, *coordinator, EXAMPLE], 4)


def test_by_hand():
    address = jobs.free_address()
    each = " & ".join(f'"$@" {address} 2 {rank}' for rank in (0, 1))
    sums(["sh", "-c", f"{each} & wait", "sh", sys.executable, EXAMPLE], 2)


def test_open_mpi():
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("no Open MPI here (mpirun.openmpi)")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sums([mpirun, "--oversubscribe", "-n", "3", sys.executable, EXAMPLE], 3, **as_root)


def test_mpich():
    mpirun = shutil.which("mpirun.mpich")
    if mpirun is None:
        pytest.skip("no MPICH here (mpirun.mpich)")
    one = f'exec "$@" {jobs.free_address()} $PMI_SIZE $PMI_RANK'
    sums([mpirun, "-n", "3", "sh", "-c", one, "sh", sys.executable, EXAMPLE], 3)
