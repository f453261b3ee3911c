# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes: tests/programs/across*.py, one process for each rank."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jobs
import pytest
from hosts import two_hosts

CASES = [
    ("kinds", 2, 1),
    ("kinds", 2, 2),
    ("kinds", 3, 1),
    ("kinds", 4, 2),
    ("bits", 3, 1),
    ("bits", 2, 2),
    ("order", 2, 2),
    ("order", 4, 2),
    ("ragged", 2, 1),
    ("ragged", 2, 2),
    ("ragged", 4, 2),
    ("ragged_orders", 2, 2),
    ("ragged_errors", 2, 1),
    ("ragged_errors", 3, 2),
    ("swap", 2, 1),
    ("swap", 4, 1),
    ("grid", 4, 1),
    ("unawaited", 2, 1),
    ("unawaited", 2, 2),
    ("late", 2, 2),
    ("shape", 2, 1),
    ("shape", 2, 2),
    ("absent", 2, 1),
    ("absent", 3, 2),
    ("circle", 2, 1),
    ("circle", 2, 2),
    ("circle", 4, 1),
    ("ring", 3, 1),
    ("ring", 4, 1),
    ("bystander", 2, 2),
    ("no_circle", 2, 1),
]
TCP_CASES = [
    ("ragged", 2, 2),
    ("kinds", 2, 2),
    ("order", 4, 2),
    ("unawaited", 2, 2),
    ("absent", 3, 2),
]
LONG = [pytest.mark.soak, pytest.mark.timeout(1200)]
# JAX then lets the survivors of a failure go on.
RECOVERABLE = {"JAX_ENABLE_RECOVERABILITY": "1"}
TCP = {"JAX_DFCCL_TRANSPORT": "tcp"}
MIB_OF_FLOATS = 1 << 18


@pytest.mark.parametrize(("case", "processes", "devices"), CASES)
def test_values_and_errors(case, processes, devices):
    jobs.all_right(jobs.run("across", case, processes, devices))


def test_a_circle_that_is_found_before_its_first_process_has_come():
    jobs.all_right(jobs.run("across", "circle", 4, 1, "late"))


# Those that another transport may make different, and in the soak all.
@pytest.mark.parametrize(
    ("case", "processes", "devices"),
    [pytest.param(*case, marks=() if case in TCP_CASES else pytest.mark.soak) for case in CASES],
)
def test_values_and_errors_over_tcp(case, processes, devices):
    jobs.all_right(jobs.run("across", case, processes, devices, **TCP))


# Order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launches",
    [
        "30",  # of some 60 instances each
        pytest.param("1700", marks=LONG),
    ],
)
@pytest.mark.parametrize("transport", [{}, pytest.param(TCP, marks=LONG)], ids=["memory", "tcp"])
def test_random_order_over_random_groups(launches, transport):
    with jobs.started("across_disorder", "random_groups", 4, 2, launches, **transport) as job:
        jobs.all_right(jobs.ends(job, limit_s=jobs.LIMIT_S * (8 if len(launches) > 2 else 1)))


def test_threads_that_launch_un_awaited_in_different_orders():
    jobs.all_right(jobs.run("across_disorder", "threads", 4, 1, "30"))


@pytest.mark.parametrize(
    ("processes", "devices", "launches"),
    [
        (2, 2, "400"),
        pytest.param(4, 2, "10000", marks=LONG),
    ],
)
def test_many_groups_and_launches_leave_nothing_behind(processes, devices, launches):
    with jobs.started("across_disorder", "flat", processes, devices, launches) as job:
        jobs.all_right(jobs.ends(job, limit_s=1100))


# Identity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["places", "opposite", "compiled_in_other_order"])
def test_calls_are_never_crossed(case):
    jobs.all_right(jobs.run("across_identity", case, 3, 1))


def test_an_executable_from_the_persistent_cache_meets_one_that_was_compiled(tmp_path):
    for expected in ("miss", "hit"):
        jobs.all_right(jobs.run("across_identity", "cache", 2, 1, str(tmp_path), expected))


def test_a_script_may_lie_in_another_folder_in_each_process(tmp_path):
    folders = [tmp_path / str(rank) / "programs" for rank in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
        for program in ("between.py", "across_identity.py"):
            shutil.copy(jobs.PROGRAMS / program, folder)
    jobs.all_right(jobs.run("across_identity", "opposite", 2, 1, folders=folders))


# Failure ------------------------------------------------------------------------------------------


def _survivors_are_right(ended, exit_status=None) -> None:
    *survivors, (status, output) = ended
    assert exit_status is None or status == exit_status, output[-3000:]
    for survivor in survivors:
        assert survivor[0] == 0 and survivor[1].rstrip().endswith("right"), survivor[1][-3000:]


@pytest.mark.parametrize(
    ("case", "exit_status", "options"),
    [
        ("killed", -signal.SIGKILL, TCP),
        ("exits", 3, {}),
        ("raises", 1, {}),
        ("returns", 0, {}),
        ("bystanders", -signal.SIGKILL, {}),
    ],
)
def test_a_process_that_ends_is_named_by_the_others(case, exit_status, options, tmp_path):
    options = {**RECOVERABLE, **options}
    ended = jobs.run("across_failing", case, 3, 1, str(tmp_path), **options)
    _survivors_are_right(ended, exit_status)


@pytest.mark.parametrize("options", [{}, pytest.param(TCP, marks=LONG)], ids=["memory", "tcp"])
@pytest.mark.parametrize("after_s", ["0.01", pytest.param("0.05", marks=LONG)])
def test_a_process_is_killed_while_much_data_moves(options, after_s, tmp_path):
    options = {**RECOVERABLE, **options}
    ended = jobs.run("across_failing", "killed_inside", 3, 1, str(tmp_path), after_s, **options)
    _survivors_are_right(ended, -signal.SIGKILL)


def test_a_process_that_is_started_again_is_refused(tmp_path):
    with jobs.started("across_failing", "restarted", 3, 1, str(tmp_path), **RECOVERABLE) as job:
        assert job[-1].wait(jobs.LIMIT_S) == -signal.SIGKILL
        again = subprocess.run(
            job[-1].args,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "XLA_FLAGS": "", **RECOVERABLE},
        )
        (tmp_path / "again").touch()
        assert again.returncode == 0 and again.stdout.endswith("right\n"), again
        jobs.all_right(jobs.ends(job[:-1]))


def _until_it_has_stopped(job) -> None:
    deadline = time.monotonic() + jobs.LIMIT_S
    while Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_stands_still_for_a_while_is_only_late(tmp_path):
    with jobs.started(
        "across_failing", "stopped_and_continued", 3, 1, str(tmp_path), **RECOVERABLE
    ) as job:
        _until_it_has_stopped(job[-1])
        time.sleep(3)
        job[-1].send_signal(signal.SIGCONT)
        jobs.all_right(jobs.ends(job))


@pytest.mark.parametrize("count", [10, 4 * MIB_OF_FLOATS])
def test_a_process_that_stands_still_ends_calls_at_their_limit(count, tmp_path):
    with jobs.started(
        "across_failing", "stopped_for_good", 3, 1, str(tmp_path), str(count), **RECOVERABLE
    ) as job:
        jobs.all_right(jobs.ends(job[:-1]))
        job[-1].kill()


# Hosts --------------------------------------------------------------------------------------------

# 1 % loss, 50 ms there and back, and packets that overtake each other.
POOR = {"delay_s": 0.02, "jitter_s": 0.01, "loss": 0.01}


def _on_two_hosts(hosts, program, case, *arguments, address="", **variables):
    """Four processes, two on each host."""
    port = 20_000 + time.monotonic_ns() // 1000 % 10_000
    options = {
        "address": f"{address or hosts.links[0].addresses[0]}:{port}",
        "prefixes": [hosts.prefix(rank // 2) for rank in range(4)],
        **variables,
    }
    return jobs.started(program, case, 4, 1, *arguments, **options)


@pytest.mark.parametrize(
    "case",
    ["by_hosts", "order", *(pytest.param(c, marks=LONG) for c in ("kinds", "grid", "unawaited"))],
)
def test_two_hosts(case):
    with two_hosts() as hosts, _on_two_hosts(hosts, "across", case) as job:
        jobs.all_right(jobs.ends(job))


@pytest.mark.parametrize(
    "case", ["unawaited", *(pytest.param(c, marks=LONG) for c in ("order", "kinds", "by_hosts"))]
)
def test_two_hosts_with_delay_loss_and_reordering(case):
    with two_hosts() as hosts:
        hosts.disturb(**POOR)
        with _on_two_hosts(hosts, "across", case) as job:
            jobs.all_right(jobs.ends(job))


def test_urgent_calls_go_past_a_large_one_over_a_poor_link():
    with two_hosts() as hosts:
        hosts.disturb(**POOR)
        with _on_two_hosts(hosts, "across", "urgent") as job:
            jobs.all_right(jobs.ends(job))


def test_training_over_a_poor_link_has_the_weights_of_one_process():
    steps = "40"
    jobs.all_right(alone := jobs.run("across_training", "train", 1, 4, steps))
    with two_hosts() as hosts:
        hosts.disturb(**POOR)
        with _on_two_hosts(hosts, "across_training", "train", steps) as job:
            jobs.all_right(ended := jobs.ends(job))
    said = {line for _, text in (*alone, *ended) for line in text.splitlines() if "weights" in line}
    assert len(said) == 1, said


def test_processes_that_a_link_keeps_apart_for_a_while_are_only_late(tmp_path):
    progress, steps = tmp_path / "progress", 500

    def done() -> int:
        return int((progress.read_text() if progress.exists() else "") or 0)

    with two_hosts() as hosts:
        hosts.disturb(delay_s=0.01)
        arguments = (str(steps), str(progress))
        with _on_two_hosts(hosts, "across_training", "train", *arguments) as job:
            for host in (0, 1):
                before, deadline = done(), time.monotonic() + jobs.LIMIT_S
                while done() < before + 20:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                hosts.links[0].disturb(host, cut=True)
                time.sleep(0.5)
                before = done()
                time.sleep(1.5)
                assert done() == before < steps
                hosts.disturb(delay_s=0.01)
            jobs.all_right(jobs.ends(job))


@pytest.mark.parametrize("sockets", ["1", "4"])
def test_two_hosts_by_ipv6(sockets):
    with two_hosts() as hosts:
        address = f"[{hosts.links[0].addresses_6[0]}]"
        options = {"address": address, "JAX_DFCCL_SOCKETS": sockets}
        with _on_two_hosts(hosts, "across", "order", **options) as job:
            jobs.all_right(jobs.ends(job))


CUTS = {"both": (0, 1), "from the first": (0,), "from the second": (1,)}


@pytest.mark.parametrize(
    ("way", "variables"),
    [
        ("both", {}),
        ("both", {"JAX_DFCCL_INTERFACE": "wire1"}),
        ("both", {"JAX_DFCCL_SOCKETS": "3"}),
        ("from the first", {}),
        pytest.param("from the second", {}, marks=LONG),
    ],
    ids=["both", "interface", "sockets", "first", "second"],
)
def test_a_link_between_hosts_is_cut(way, variables, tmp_path):
    """The link that is chosen: what goes over the other, as to the coordinator, passes."""
    options = {**variables, **RECOVERABLE, "JAX_DFCCL_PEER_TIMEOUT": "3"}
    with (
        two_hosts(links=2) as hosts,
        _on_two_hosts(hosts, "across_failing", "cut", str(tmp_path), **options) as job,
    ):
        deadline = time.monotonic() + jobs.LIMIT_S
        while len(list(tmp_path.iterdir())) < 4:
            assert time.monotonic() < deadline and all(each.poll() is None for each in job)
            time.sleep(0.05)
        chosen = hosts.links["JAX_DFCCL_INTERFACE" in variables]
        for host in CUTS[way]:
            chosen.disturb(host, cut=True)
        jobs.all_right(jobs.ends(job))
