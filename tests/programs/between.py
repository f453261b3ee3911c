# SPDX-License-Identifier: Apache-2.0
"""What programs of several processes share: `python PROGRAM.py CASE ADDRESS PROCESSES RANK EACH`.

tests/support/jobs.py starts one for each process. Each must print `right` last and end with 0.
DFCCL_TEST_PLATFORM says on which devices; CPU devices if it is not set.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Set
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl  # noqa: F401  (before the backend starts)

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
CASE, ADDRESS = sys.argv[1:3]
PROCESSES, RANK, EACH = map(int, sys.argv[3:6])
case_arguments = sys.argv[6:]

jax.config.update("jax_platforms", os.environ.get("DFCCL_TEST_PLATFORM", "cpu"))
jax.config.update("jax_num_cpu_devices", EACH)
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(ADDRESS, PROCESSES, RANK)
N = PROCESSES * EACH
# Far below any time limit, and far above what a busy machine needs.
PROMPT_S = 30
mesh = Mesh(np.array(jax.devices()), ("i",))
spec = P("i")


def put(data, on=mesh, sharding=spec):
    """What every process knows, each device's row on that device."""
    data = np.asarray(data)
    return jax.make_array_from_callback(
        data.shape, NamedSharding(on, sharding), lambda index: data[index]
    )


def spmd(f, on=mesh, sharding=spec, **options):
    def on_each(*rows):
        return jax.tree.map(lambda y: y[None], f(*(row[0] for row in rows)))

    mapped = jax.shard_map(on_each, mesh=on, in_specs=sharding, out_specs=sharding, check_vma=False)
    return jax.jit(mapped, **options)


def check(what, got, right):
    """Compares the rows that are here."""
    right = np.asarray(right)
    for shard in got.addressable_shards:
        row, here = np.asarray(shard.data), right[shard.index]
        same = np.array_equal(row, here, equal_nan=row.dtype.kind in "fc")
        if row.shape != here.shape or row.dtype != here.dtype or not same:
            at = np.argwhere(row != here)[:4].tolist() if row.shape == here.shape else "shape"
            print(f"WRONG {what}: {row.ravel()[:6]} right {here.ravel()[:6]} at {at}", flush=True)
            os._exit(1)


def ranked(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def total(x):
    """What an all_reduce of `x` over all devices gives."""
    return np.broadcast_to(x.sum(0), x.shape)


def in_threads(jobs, gap=0.0):
    failures = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
        time.sleep(gap)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def error_of(function) -> tuple[str, float]:
    """The error that it ends with, and after how many seconds."""
    begin = time.monotonic()
    try:
        jax.block_until_ready(function())
    except Exception as error:
        return str(error), time.monotonic() - begin
    print("WRONG: no error", flush=True)
    os._exit(1)


def leave(folder: Path, gone: Callable[[], Set[int]]) -> None:
    """Ends in order, process 0 after all others that are not `gone`; each leaves a file."""
    (folder / str(RANK)).touch()
    deadline = time.monotonic() + 30
    others = set(range(1, PROCESSES))
    while RANK == 0 and not all((folder / str(rank)).exists() for rank in others - gone()):
        assert time.monotonic() < deadline, "the others do not end"
        time.sleep(0.02)
    time.sleep(0.3 if RANK == 0 else 0)
    print("ends at", time.time(), flush=True)


def main(cases: list[Callable[[], None]]) -> None:
    {case.__name__: case for case in cases}[CASE]()
    print("right", flush=True)
