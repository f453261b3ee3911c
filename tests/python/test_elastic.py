# SPDX-License-Identifier: Apache-2.0
"""Processes that are lost and that end early: tests/programs/elastic.py, and the documentation."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from hosts import two_hosts

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "processes.md"
RECOVERABLE = {"JAX_ENABLE_RECOVERABILITY": "1"}
TCP = {"JAX_DFCCL_TRANSPORT": "tcp"}
SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]


def _run(case, processes, devices, folder, *arguments, lost=(), **variables):
    """Runs a case; those in `lost` are killed, the others must be right."""
    variables = RECOVERABLE | variables
    ended = jobs.run("elastic", case, processes, devices, str(folder), *arguments, **variables)
    for process, (status, output) in enumerate(ended):
        if process in lost:
            assert status == -signal.SIGKILL, output[-3000:]
    jobs.all_right([each for process, each in enumerate(ended) if process not in lost])


@pytest.mark.parametrize(
    ("processes", "devices", "variables"),
    [(3, 1, {}), (2, 2, TCP), pytest.param(3, 2, {}, marks=SOAK)],
    ids=["3x1", "2x2 over tcp", "3x2"],
)
def test_a_process_is_killed(processes, devices, variables, tmp_path):
    _run("killed", processes, devices, tmp_path, lost={processes - 1}, **variables)


def test_calls_are_in_step_again_after_shrink(tmp_path):
    _run("nobody_lost", 4, 1, tmp_path)


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), pytest.param(3, 2, marks=SOAK)])
def test_process_0_is_killed(processes, devices, tmp_path):
    _run("coordinator", processes, devices, tmp_path, lost={0})


def test_one_after_the_other_is_killed(tmp_path):
    _run("one_after_the_other", 4, 1, tmp_path, lost={0, 1, 2})


@pytest.mark.parametrize(
    ("after_s", "calls_after_s"),
    [
        ("0.0", "0.5"),
        ("0.005", "0"),
        *(pytest.param(f"{t / 100}", "0", marks=SOAK) for t in (1, 3)),
    ],
)
def test_another_is_killed_during_the_agreement(after_s, calls_after_s, tmp_path):
    _run("during", 4, 1, tmp_path, after_s, calls_after_s, lost={2, 3})


def _until(condition, jobs_, what) -> None:
    deadline = time.monotonic() + jobs.LIMIT_S
    while not condition():
        assert time.monotonic() < deadline and any(each.poll() is None for each in jobs_), what
        time.sleep(0.05)


@pytest.mark.parametrize("variables", [{}, pytest.param(TCP, marks=SOAK)], ids=["memory", "tcp"])
def test_a_stopped_process_is_left_out_and_wakes(variables, tmp_path):
    variables = RECOVERABLE | variables
    with jobs.started("elastic", "stopped", 3, 1, str(tmp_path), **variables) as job:
        shrunk = [tmp_path / f"shrunk{rank}" for rank in range(2)]
        _until(lambda: all(path.exists() for path in shrunk), job[:2], "they do not go on")
        job[2].send_signal(signal.SIGCONT)
        assert job[2].wait(jobs.LIMIT_S) == 0, job[2].stdout.read()
        (tmp_path / "ended").touch()
        jobs.all_right(jobs.ends(job))


def test_a_half_without_the_first_does_not_go_on(tmp_path):
    with jobs.started("elastic", "minority", 2, 1, str(tmp_path), **RECOVERABLE) as job:
        output = job[1].communicate(timeout=jobs.LIMIT_S)[0]
        assert output.rstrip().endswith("right"), output


def test_hosts_that_are_cut_apart_never_both_go_on(tmp_path):
    with two_hosts() as hosts:
        port = 20_000 + time.monotonic_ns() // 1000 % 10_000
        options = {
            "address": f"{hosts.links[0].addresses[0]}:{port}",
            "prefixes": [hosts.prefix(rank // 2) for rank in range(4)],
            "JAX_DFCCL_PEER_TIMEOUT": "3",
        }
        with jobs.started("elastic", "cut", 4, 1, str(tmp_path), **RECOVERABLE, **options) as job:
            _until(lambda: len(list(tmp_path.glob("ready*"))) == 4, job, "they do not begin")
            hosts.disturb(cut=True)
            for each in job:
                output = each.communicate(timeout=jobs.LIMIT_S)[0]
                assert output.rstrip().endswith("right"), output[-3000:]


@pytest.mark.parametrize(
    ("case", "processes", "devices"),
    [
        ("join", 2, 1),
        ("join", 2, 2),
        pytest.param("join", 4, 1, marks=SOAK),
        ("join_refuses", 3, 1),
        ("join_training", 4, 1),
    ],
)
def test_processes_that_have_no_more_data(case, processes, devices, tmp_path):
    _run(case, processes, devices, tmp_path)


def test_a_process_is_killed_while_others_wait_in_join(tmp_path):
    _run("join_lost", 3, 1, tmp_path, lost={2})


def test_training_goes_on_without_a_process(tmp_path):
    _run("training", 4, 1, tmp_path, lost={3})


@pytest.mark.parametrize(
    ("title", "shown"),
    [("Going on without lost processes", "[0, 1]"), ("Processes with less data", "last: 2")],
)
def test_documented_example(title, shown, tmp_path):
    section = DOCUMENTATION.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [sys.executable, "-m", "jax_dfccl", "launch", "-n", "3", "--keep-going", str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=jobs.LIMIT_S, check=False
    )
    assert ended.stdout.count(shown) >= 2, ended.stdout + ended.stderr
