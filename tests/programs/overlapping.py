# SPDX-License-Identifier: Apache-2.0
"""Operations over groups that overlap, in orders that differ, and over groups that do not."""

import threading

import jax
import numpy as np
from common import N, case_arguments, check, main, spmd
from jax import lax
from kinds import CASES, expected, operand

GROUPED = [case for case in CASES if case.grouped]


def _partition(rng, size: int) -> list[list[int]]:
    """Groups of one size that cover all devices, members in any order."""
    return rng.permutation(N).reshape(-1, size).tolist()


def random_sequences() -> None:
    """Every operation over groups of 2, 4 and 8, in random sequences, repeated.

    Each program has a few calls over partitions of the devices that cut across each other; every
    device goes through them in an order of its own. Programs follow each other un-awaited.
    """
    repeats = int(case_arguments[case_arguments.index("--repeats") + 1]) if case_arguments else 6
    rng = np.random.default_rng(13)
    calls = [(case, size) for case in CASES for size in (2, 4, 8)]
    calls = [calls[k] for k in rng.permutation(len(calls))]
    programs = [_program(rng, calls[k : k + 6]) for k in range(0, len(calls), 6)]
    for repeat in range(repeats):
        launches = []
        for k in rng.permutation(len(programs)):
            program, described = programs[k]
            xs = [operand(case, 9, repeat, group=size) for case, size, _ in described]
            launches.append((described, xs, program(*xs)))
        for described, xs, results in launches:
            for (case, _, groups), x, got in zip(described, xs, results, strict=True):
                check(f"{case} over {groups}, {repeat}", got, expected(case, x, groups))


def _program(rng, calls):
    """The calls in a random order on every device, and what each of them is."""
    described = [
        (case, size, _partition(rng, size)) if case.grouped else (case, N, None)
        for case, size in calls
    ]

    def branch(order):
        def run(xs):
            results = {}
            for k in order:
                case, _, groups = described[k]
                options = {"axis_index_groups": groups} if case.grouped else {}
                results[k] = case.call(xs[k], "i", name=f"{case} {k}", **options)
            return tuple(results[k] for k in range(len(described)))

        return run

    branches = [branch(rng.permutation(len(described)).tolist()) for _ in range(N)]

    def f(*rows):
        results = lax.switch(lax.axis_index("i"), branches, tuple(row[0] for row in rows))
        return tuple(y[None] for y in results)

    return spmd(f), described


def disjoint() -> None:
    """One half of the devices goes through all operations before the other half begins."""
    halves = [[6, 0, 3, 1], [2, 5, 7, 4]]
    done, through = threading.Event(), []

    def wait(i, x):
        if int(i) in halves[0]:
            check("the other half is through", done.wait(60), True)
        return np.asarray(x)

    def tell(i, x):
        if int(i) in halves[1]:
            through.append(int(i))
            if len(through) == len(halves[1]):
                done.set()
        return np.asarray(x)

    def passed(callback, x):
        return jax.pure_callback(
            callback, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("i"), x
        )

    def f(*rows):
        come = passed(wait, rows[0].ravel()[0] * 0)
        results = [
            case.call(row[0] + come, "i", axis_index_groups=halves)
            for case, row in zip(GROUPED, rows, strict=True)
        ]
        gone = passed(tell, sum(y.ravel()[0] for y in results))
        return [y[None] for y in results], gone[None]

    xs = [operand(case, 9, 1, group=4) for case in GROUPED]
    results, _ = spmd(f)(*xs)
    for case, x, got in zip(GROUPED, xs, results, strict=True):
        check(f"{case}", got, expected(case, x, halves))


if __name__ == "__main__":
    main({f.__name__: f for f in (random_sequences, disjoint)})
