# SPDX-License-Identifier: Apache-2.0
"""One device is seconds late: no error, the right values, and no core burnt meanwhile.

Nor afterwards.
"""

import os
import pathlib
import time

import jax
import numpy as np
from common import N, check, main, mesh, ranked, spmd
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl
from jax_dfccl import all_reduce

LATE_S = 5.0


def _late_program(callback):
    def f(x):
        x = jax.pure_callback(
            callback, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("i"), x
        )
        return all_reduce(x, "i")

    return spmd(f)


def idle() -> None:
    """Processor time of the whole process while device 3 sleeps: under 2 % of one core."""
    used = []

    def callback(i, x):
        if int(i) == 3:
            time.sleep(0.5)  # let the others arrive first
            before = time.process_time()
            time.sleep(LATE_S)
            used.append(time.process_time() - before)
        return np.asarray(x)

    program = _late_program(callback)
    x = ranked(64, np.float32)
    got = program(x.ravel())
    check("late", got, np.tile(x.sum(0), N))
    share = used[-1] / LATE_S
    print(f"{share * 100:.2f} % of a core")
    check("idle share below 2 %", share < 0.02, True)


def quits() -> None:
    """A lone stuck collective lets its daemons quit; the late submission restarts them."""
    seen = {}

    def callback(i, x):
        if int(i) == 3:
            time.sleep(1.0)
            devices = jax_dfccl.report().as_dict()["devices"]
            seen["quits"] = sum(d["quits"] for d in devices)
            seen["restarts"] = sum(d["restarts"] for d in devices)
        return np.asarray(x)

    program = _late_program(callback)
    x = ranked(64, np.float32)
    check("late", program(x.ravel()), np.tile(x.sum(0), N))
    check("daemons quit while stuck", seen["quits"] > 0, True)
    devices = jax_dfccl.report().as_dict()["devices"]
    check("restarted", sum(d["restarts"] for d in devices) > seen["restarts"], True)


def rest() -> None:
    """After much work the process rests, and its threads may use every core that it may."""
    cores = os.sched_getaffinity(0)
    program = spmd(lambda x: all_reduce(x + 1, "i") - all_reduce(x, "i"))
    x = ranked(1 << 20, np.float32)
    placed = jax.device_put(x.ravel(), NamedSharding(mesh, P("i")))
    for _ in range(50):
        check("much work", program(placed), np.full(x.size, N, np.float32))
    time.sleep(1)
    before = time.process_time()
    time.sleep(3)
    share = (time.process_time() - before) / 3
    print(f"{share * 100:.2f} % of a core")
    check("idle share below 2 %", share < 0.02, True)
    for task in pathlib.Path("/proc/self/task").iterdir():
        check(f"cores of thread {task.name}", os.sched_getaffinity(int(task.name)) == cores, True)


if __name__ == "__main__":
    main({f.__name__: f for f in (idle, quits, rest)})
