# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as plain data: for each stage, the list of its tasks in their order.

A model of `stages * chunks` parts lies on `stages` devices, part p on stage p % stages. Each of the
microbatches goes forward through all parts and backward through all of them. Times are counted in
units of one part's forward task; a backward task takes two, or one where it is split in two.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

# What a backward task computes: slopes for the part before (input) and for the part's own weights.
Kind = Literal["forward", "backward", "input", "weights"]
UNITS: dict[Kind, int] = {"forward": 1, "backward": 2, "input": 1, "weights": 1}


class Task(NamedTuple):
    """One microbatch in one part."""

    kind: Kind
    microbatch: int
    part: int


Schedule = list[list[Task]]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward tasks, then all backward tasks (Huang et al., 2019)."""
    return [
        [Task("forward", m, stage) for m in range(microbatches)]
        + [Task("backward", m, stage) for m in range(microbatches)]
        for stage in range(stages)
    ]


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """As many forward tasks as fill the pipeline, then one of each (PipeDream-Flush, 2020)."""
    return interleaved(stages, microbatches, chunks=1)


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The same with several parts on a stage (Narayanan et al., 2021).

    Raises:
        ValueError: with several chunks, if the microbatches are no multiple of the stages.
    """
    if chunks > 1 and microbatches % stages != 0:
        raise ValueError(f"{microbatches} microbatches are no multiple of {stages} stages")
    total = microbatches * chunks

    def place(number: int, kind: Kind, stage: int) -> Task:
        if chunks == 1:
            return Task(kind, number, stage)
        round_, within = divmod(number, stages * chunks)
        chunk, microbatch = divmod(within, stages)
        if kind == "backward":
            chunk = chunks - 1 - chunk
        return Task(kind, round_ * stages + microbatch, chunk * stages + stage)

    schedule = []
    for stage in range(stages):
        first = (
            stages - 1 - stage if chunks == 1 else (stages - 1 - stage) * 2 + (chunks - 1) * stages
        )
        first = min(first, total)
        tasks = [place(n, "forward", stage) for n in range(first)]
        for n in range(total):
            if first + n < total:
                tasks.append(place(first + n, "forward", stage))
            tasks.append(place(n, "backward", stage))
        schedule.append(tasks)
    return schedule


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Backward tasks in two halves; those for the weights come late (ZB-H1, Qi et al., 2024).

    Later stages put more of them off, so that all stages keep the activations of as many
    microbatches as the first does with one forward, one backward.
    """
    schedule = []
    for stage in range(stages):
        first = min(stages - 1 - stage, microbatches)
        tasks = [Task("forward", m, stage) for m in range(first)]
        for m in range(microbatches + stage):
            if first + m < microbatches:
                tasks.append(Task("forward", first + m, stage))
            if m < microbatches:
                tasks.append(Task("input", m, stage))
            if m >= stage:
                tasks.append(Task("weights", m - stage, stage))
        schedule.append(tasks)
    return schedule


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def needs(task: Task, parts: int) -> Iterable[Task]:
    """The tasks whose results a task takes; of a schedule only one of each pair is there."""
    kind, microbatch, part = task
    if kind == "forward":
        return [Task("forward", microbatch, part - 1)] if part > 0 else []
    if kind == "weights":
        return [Task("input", microbatch, part)]
    after = [Task(kind, microbatch, part + 1)] if part + 1 < parts else []
    return [Task("forward", microbatch, part), *after]


def simulate(schedule: Schedule) -> tuple[int, float]:
    """Runs a schedule on paper.

    Returns:
        How many units it takes, and its bubble: the share of that in which a stage has nothing to
        do.

    Raises:
        ValueError: if the stages wait for each other for ever; it says for what.
    """
    parts = 1 + max(task.part for tasks in schedule for task in tasks)
    chunks = parts // len(schedule)
    ended: dict[Task, float] = {}
    free = [0.0] * len(schedule)
    at = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(schedule):
            while at[stage] < len(tasks):
                task = tasks[at[stage]]
                if any(need not in ended for need in needs(task, parts)):
                    break
                begin = max([free[stage], *(ended[need] for need in needs(task, parts))])
                free[stage] = ended[task] = begin + UNITS[task.kind] / chunks
                at[stage] += 1
                moved = True
    stuck = [f"stage {s} at {t[at[s]]}" for s, t in enumerate(schedule) if at[s] < len(t)]
    if stuck:
        raise ValueError("the schedule cannot go on: " + ", ".join(stuck))
    busy = sum(UNITS[task.kind] / chunks for tasks in schedule for task in tasks)
    return max(free), 1 - busy / (len(schedule) * max(free))
