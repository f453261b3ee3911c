# SPDX-License-Identifier: Apache-2.0
"""Random collectives in two threads while the test stops, delays, cuts off and kills processes.

The arguments: a folder, the seed, how many launches each thread makes. Whoever is to be killed
(never process 0) has a file `dead-RANK` in the folder before it is.
"""

from pathlib import Path

import jax
import numpy as np
from between import (
    PROCESSES,
    RANK,
    case_arguments,
    check,
    in_threads,
    leave,
    main,
    put,
    ranked,
    spmd,
)
from jax.sharding import Mesh

import jax_dfccl

FOLDER, SEED, LAUNCHES = Path(case_arguments[0]), int(case_arguments[1]), int(case_arguments[2])
SIZES = (10, 3000, 100_000)
PENDING = 4


def _dead() -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in FOLDER.glob("dead-*")}


def _operations(size: int):
    return {
        "sum": (
            lambda x: jax_dfccl.all_reduce(x, "i"),
            lambda x: np.broadcast_to(x.sum(0), x.shape),
        ),
        "rows": (
            lambda x: jax_dfccl.all_gather(x, "i"),
            lambda x: np.broadcast_to(x, (size, *x.shape)),
        ),
        "next": (
            lambda x: jax_dfccl.ppermute(x, "i", [(i, (i + 1) % size) for i in range(size)]),
            lambda x: np.roll(x, 1, 0),
        ),
    }


def _run(thread: int) -> None:
    """The launches of a thread; its programs are no other thread's."""
    random = np.random.default_rng((SEED, thread))
    devices = np.array(jax.devices())
    programs = {}
    pending = []
    lost = 0

    def settle() -> int:
        what, members, got, right = pending.pop(0)
        try:
            if isinstance(got, Exception):
                raise got
            jax.block_until_ready(got)
        except Exception as error:
            gone = _dead() & set(members)
            assert any(f"process {rank}" in str(error) for rank in gone), (
                what,
                members,
                str(error),
            )
            return 1
        check(what, got, right)
        return 0

    for launch in range(LAUNCHES):
        count = int(random.integers(2, PROCESSES + 1))
        members = sorted(random.choice(PROCESSES, count, replace=False).tolist())
        name = ("sum", "rows", "next")[int(random.integers(3))]
        size = SIZES[int(random.integers(3))]
        if RANK not in members:
            continue
        on = Mesh(devices[members], ("i",))
        call, right = _operations(count)[name]
        x = ranked((count, size), seed=launch)
        key = (tuple(members), name)
        if key not in programs:
            programs[key] = spmd(lambda x, call=call: call((thread + 2) * x), on)
        try:
            got = programs[key](put(x, on))
        except Exception as error:  # a small program ends before its launch returns
            got = error
        pending.append(((thread, launch, *key, size), members, got, right((thread + 2) * x)))
        while len(pending) > PENDING:
            lost += settle()
    while pending:
        lost += settle()
    print(f"thread {thread}: {lost} calls lost", flush=True)


def chaos() -> None:
    (FOLDER / f"ready-{RANK}").touch()
    in_threads([lambda thread=thread: _run(thread) for thread in range(2)])
    leave(FOLDER, _dead)


main([chaos])
