# SPDX-License-Identifier: Apache-2.0
"""Whole programs with disorder, late members and failures, each in a child with a time limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"


def run(program: str, case: str, *options: str, limit_s: int = 120, one_core: bool = False) -> None:
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), case, *options]
    cores = os.sched_getaffinity(0)
    if one_core:
        os.sched_setaffinity(0, {max(cores)})  # the child inherits it
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        pytest.fail(f"{program} {case} hung: killed after {limit_s} s\n{output[-4000:]}")
    finally:
        os.sched_setaffinity(0, cores)
    lines = child.stdout.splitlines()
    if child.returncode != 0 or not lines or lines[-1] != "right":
        pytest.fail(
            f"{program} {case}: exit status {child.returncode}\n{child.stdout[-4000:]}\n"
            f"{child.stderr[-4000:]}"
        )


@pytest.mark.parametrize(
    "case",
    [
        "order",
        "threads",
        "missing",
        "missing_then_named",
        "bystanders",
        "raises",
        "mismatch",
        "cycle",
        "report_while_stuck",
        "donated_training",
        "partitioned",
    ],
)
def test_one_process(case):
    run("one_process", case)


@pytest.mark.parametrize(
    "case", ["sizes", "two_sizes", "two_dtypes", "hundred_groups", "random_groups"]
)
def test_disorder(case):
    run("disorder", case, limit_s=240)


@pytest.mark.parametrize("devices", [64, 256])
def test_disorder_on_many_devices(devices):
    run("disorder", "many_devices", "--devices", str(devices), limit_s=240)


@pytest.mark.soak
def test_a_million_in_random_order():
    # 8 named collectives over 4 partitions of 8 devices: about 16 instances a call.
    run("disorder", "random_groups", "--repeats", "65000", limit_s=3600)


@pytest.mark.parametrize(
    "case", ["cond", "large", "many", "nested", "scans", "inner_jits", "unservable"]
)
def test_unequal_depth(case):
    run("depth", case, limit_s=240)


@pytest.mark.parametrize(
    "case",
    ["inner_jit", "unequal_work", "scan_unroll", "short_loops", "remat", "vmapped", "keys"],
)
def test_instances(case):
    run("instances", case)


@pytest.mark.parametrize(
    "case", ["in_place_update", "loop_carried", "while_branches", "beside_callback"]
)
def test_buffers(case):
    run("buffers", case)


@pytest.mark.parametrize(
    "case",
    [
        "order",
        "different_kinds",
        "depth",
        "loops",
        "random_orders",
        "threads",
        "neighbours",
        "pipelines",
    ],
)
def test_kinds(case):
    run("kinds", case, limit_s=240)


@pytest.mark.parametrize("case", ["different_kinds", "neighbours", "pipelines"])
def test_kinds_between_two_devices(case):
    """Where the next stage is the one before, too."""
    run("kinds", case, "--devices", "2")


@pytest.mark.parametrize("case", ["random_sequences", "disjoint"])
def test_overlapping(case):
    run("overlapping", case)


@pytest.mark.soak
def test_many_random_sequences():
    run("overlapping", "random_sequences", "--repeats", "4000", limit_s=3600)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "inclusive_scan"],
)
def test_more_than_two_gigabytes(case):
    run("huge", case, "--devices", "2", limit_s=1200)


@pytest.mark.parametrize("case", ["missing", "raises", "late"])
def test_failing(case):
    run("failing", case)


@pytest.mark.soak
def test_very_late():
    """Longer than XLA lets its own collectives wait."""
    run("failing", "late", "45", limit_s=300)


def test_kinds_exported_and_reloaded(tmp_path):
    run("kinds", "exported", str(tmp_path))
    run("kinds", "reloaded", str(tmp_path))
    run("kinds", "reloaded_twice", str(tmp_path))


def test_kinds_from_the_persistent_cache(tmp_path):
    run("kinds", "cached", str(tmp_path), "miss")
    run("kinds", "cached", str(tmp_path), "hit")


@pytest.mark.parametrize("case", ["idle", "quits"])
def test_late_member(case):
    run("late", case)


@pytest.mark.parametrize("one_core", [False, True])
def test_rest_after_much_work(one_core):
    run("late", "rest", one_core=one_core)


@pytest.mark.parametrize("case", ["unawaited", "stuck"])
def test_leaving(case):
    run("leaving", case, limit_s=60)
