# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes in random order, over random overlapping groups."""

import gc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from between import (
    RANK,
    N,
    case_arguments,
    check,
    in_threads,
    main,
    put,
    ranked,
    spmd,
)
from jax import lax

import jax_dfccl


def _divisions(rng, how_many: int) -> list[list[list[int]]]:
    """Ways to divide all devices into groups of random sizes and member order."""
    divisions = []
    for _ in range(how_many):
        order, groups = rng.permutation(N).tolist(), []
        while order:
            take = int(rng.integers(1, len(order) + 1))
            groups.append(order[:take])
            order = order[take:]
        divisions.append(groups)
    return divisions


def _sums(x, divisions):
    """What all_reduce gives for x[:, k] in the groups of division k % len(divisions)."""
    right = np.empty_like(x)
    for k in range(x.shape[1]):
        for group in divisions[k % len(divisions)]:
            right[group, k] = x[group, k].sum(0)
    return right


def random_groups() -> None:
    """Every device runs 16 calls over 6 divisions in an order of its own, new in each launch.

    The first argument says how many launches; of a launch's 16 calls about 60 are instances.
    """
    rng = np.random.default_rng(5)
    divisions = _divisions(rng, 6)
    counts = [(1, 33, 1000)[k % 3] for k in range(16)]
    orders = [rng.permutation(16) for _ in range(32)]

    def f(x, seed):
        def branch(order):
            def run(x):
                out = [x[k] for k in range(16)]
                for k in order:
                    part = jax_dfccl.all_reduce(
                        x[k, : counts[k]],
                        "i",
                        name=f"c{k}" if k % 2 else "shared",
                        key=k,
                        axis_index_groups=divisions[k % 6],
                    )
                    out[k] = x[k].at[: counts[k]].set(part)
                return jnp.stack(out)

            return run

        which = (lax.axis_index("i") * 5 + seed * 7) % 32
        return lax.switch(which, [branch(order) for order in orders], x)

    program = spmd(f)
    waiting = []
    for launch in range(int(case_arguments[0])):
        x = ranked((N, 16, 1000), seed=launch)
        right = x.copy()
        for k, count in enumerate(counts):
            for group in divisions[k % 6]:
                right[group, k, :count] = x[group, k, :count].sum(0)
        waiting.append((launch, program(put(x), put(np.full(N, launch, np.int32))), right))
        if len(waiting) == 8:
            for each in waiting:
                check(*each)
            waiting.clear()
    for each in waiting:
        check(*each)


def threads() -> None:
    """Threads with programs of their own, launched un-awaited in an order that differs by rank.

    One device for each process. The first argument says how many launches each thread makes.
    """
    launches, programs = int(case_arguments[0]), 6
    divisions = _divisions(np.random.default_rng(7), programs)

    def program(k):
        def f(x):
            y = jax_dfccl.all_reduce(x + k, "i", axis_index_groups=divisions[k])
            return y, jax_dfccl.all_gather(x * (k + 1), "i")

        return spmd(f)

    def job(k):
        f = program(k)

        def run():
            found = []
            for launch in range(launches):
                x = ranked((N, 300), seed=100 * k + launch)
                found.append((x, f(put(x))))
            for x, (sums, rows) in found:
                check(k, sums, _sums((x + k)[:, None], [divisions[k]])[:, 0])
                check(k, rows, np.broadcast_to(x * (k + 1), (N, *x.shape)))

        return run

    order = np.random.default_rng(RANK).permutation(programs)
    in_threads([job(int(k)) for k in order], gap=0.02)


def _used() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    field = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "KiB": int(field["VmRSS"].split()[0]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(field["Threads"]),
    }


def flat() -> None:
    """256 groups, all in one program; its launches leave nothing behind.

    The first argument says how many launches.
    """
    rng = np.random.default_rng(3)
    divisions = [rng.permutation(N).reshape(-1, 2).tolist() for _ in range(2 * 256 // N)]

    def f(x):
        groups = enumerate(divisions)
        return jnp.stack([jax_dfccl.all_reduce(x[k], "i", axis_index_groups=g) for k, g in groups])

    program = spmd(f)
    x = ranked((N, len(divisions), 50))
    right, y = _sums(x, divisions), put(x)
    launches = int(case_arguments[0])
    before = {}
    for launch in range(launches):
        found = program(y)
        if launch % 50 == 0:
            check(launch, found, right)
        if launch == launches // 4:
            before = _used()
    check("last", found, right)
    after = _used()
    print(before, after)
    assert after["KiB"] < before["KiB"] + 20_000, (before, after)
    assert after["descriptors"] <= before["descriptors"], (before, after)
    assert after["threads"] <= before["threads"] + 2, (before, after)


main([random_groups, threads, flat])
