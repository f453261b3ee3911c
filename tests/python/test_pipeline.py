# SPDX-License-Identifier: Apache-2.0
"""examples/schedules.py against theory, and the pipelines of examples/ against one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import schedules  # noqa: E402

# By how many units a schedule is longer than the work of a stage.
BUBBLES = {
    "gpipe": lambda stages: 3 * (stages - 1),
    "1f1b": lambda stages: 3 * (stages - 1),
    "interleaved": lambda stages: 3 * (stages - 1) / 2,
    "zero_bubble": lambda stages: stages - 1,
}


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_schedule_takes_as_long_as_theory_says(name, stages, rounds):
    microbatches = rounds * stages
    schedule = schedules.SCHEDULES[name](stages, microbatches)
    units, bubble = schedules.simulate(schedule)
    assert units == 3 * microbatches + BUBBLES[name](stages)
    assert bubble == pytest.approx(BUBBLES[name](stages) / units)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_a_schedule_has_each_task_once_and_where_it_belongs(name):
    schedule = schedules.SCHEDULES[name](4, 8)
    tasks = [task for stage in schedule for task in stage]
    parts = 8 if name == "interleaved" else 4
    kinds = {"forward", "input", "weights"} if name == "zero_bubble" else {"forward", "backward"}
    assert len(tasks) == len(set(tasks)) == parts * 8 * len(kinds)
    assert {task.kind for task in tasks} == kinds
    for number, stage in enumerate(schedule):
        assert {task.part % 4 for task in stage} == {number}


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_activations_that_a_stage_keeps(name):
    last = "backward" if name == "1f1b" else "weights"
    for number, stage in enumerate(schedules.SCHEDULES[name](4, 16)):
        kept = most = 0
        for task in stage:
            kept += (task.kind == "forward") - (task.kind == last)
            most = max(most, kept)
        assert most == (4 - number if name == "1f1b" else 4)


def test_a_schedule_that_cannot_go_on_is_named():
    schedule = schedules.gpipe(2, 2)
    schedule[1].reverse()
    with pytest.raises(ValueError, match=r"stage 1 at Task\(kind='backward', microbatch=1, part=1"):
        schedules.simulate(schedule)


def test_interleaved_needs_a_multiple_of_the_stages():
    with pytest.raises(ValueError, match="6 microbatches are no multiple of 4 stages"):
        schedules.interleaved(4, 6)


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, []) for name in schedules.SCHEDULES]
    + [("1f1b", ["--stages", "2", "--microbatches", "6"]), ("zero_bubble", ["--pace", "0.001"])]
    + [("interleaved", ["--launcher"]), ("zero_bubble", ["--launcher"])],
)
def test_a_pipeline_learns_what_one_device_learns(name, more):
    """It compares losses and weights itself."""
    command = [sys.executable, EXAMPLES / "pipeline.py", "--schedule", name, "--steps", "3", *more]
    patient = {**os.environ, "JAX_DFCCL_STALL_WARNING": "120"}  # others may keep the cores busy
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=patient)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1] == "weights are those of one device", ended.stdout
    losses = [float(line.split()[3].rstrip(",")) for line in lines if line.startswith("step ")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert ended.stderr == "", ended.stderr


def variable_length(*options):
    command = [sys.executable, EXAMPLES / "variable_length.py", "--microbatches", "4", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--schedule", "interleaved", "--stages", "2"],  # the next stage is the one before
    ],
    ids=" ".join,
)
def test_a_pipeline_of_lengths_that_only_senders_know(options):
    """It compares losses and weights itself."""
    ended = variable_length("--steps", "1", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "weights are those of one device, lengths [5, 12, 3, 9]" in ended.stdout


def error_of(*options):
    ended = variable_length("--timeout", "8", *options)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stderr, ended.stdout


def test_senders_that_wait_for_receivers_stop_the_schedule():
    error, _ = error_of("--rendezvous", "--stages", "2")
    circle = next(line for line in error.splitlines() if "wait for each other" in line)
    for rank, message in ((1, "forward of 0"), (0, "backward of 1")):
        assert re.search(rf"in send of float32\S* 16\] to rank {rank} .*{message}", circle), circle


def test_a_message_that_is_never_sent_is_reported_with_who_waits_for_whom():
    # The last stage waits for it, and the one before that for its slopes: a circle.
    error, report = error_of("--forget", "forward:1:2", "--stages", "3")
    assert "devices wait for each other: device" in error
    assert (
        "recv of uint8[128] from rank 1 'stages/forward of 1/shape' key 6 at variable_len" in error
    )
    assert "from rank 2 'stages/backward of 2/shape' key 6" in error
    (first,) = re.findall(r".* 'stages/backward of 1/shape' key=6 .*waiting for members.*", report)
    assert "variable_length.py" in first and first.endswith("absent: 1")
    # Here one stage waits, and no other for it.
    error, report = error_of("--forget", "backward:1:3", "--stages", "2")
    (first,) = re.findall(r".* 'stages/backward of 1/shape' key=7 .*waiting for members.*", report)
    assert "recv of" in first and "variable_length.py" in first and first.endswith("absent: 1")
    assert "'stages/backward of 1/shape' key 7" in error and "devices [1] have not come" in error
