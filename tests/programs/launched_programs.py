# SPDX-License-Identifier: Apache-2.0
"""Programs through the launcher, in every order and in random ones."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import N, P, case_arguments, check, in_threads, main, mesh, ranked

import jax_dfccl

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders

devices = jax.devices()[2:6]


def _programs():
    return {
        name: jax_dfccl.dispatch(
            lambda x, key, group=group: jax_dfccl.all_reduce(x, group, key=key) + 1
        )
        for name, group in orders.groups(devices).items()
    }


def _run(programs, launch, order):
    """Every device's programs in its order, all devices in turn."""
    futures = {}
    for step in range(3):
        for place, names in enumerate(order):
            if step < len(names):
                name = names[step]
                x = jax.device_put(np.float32(orders.value(name, place, launch)), devices[place])
                futures[name, place] = programs[name](x, np.int32(launch))
    return launch, futures


def _check(launch, futures):
    for (name, place), future in futures.items():
        check((launch, name, place), future.result(60), np.float32(orders.total(name, launch) + 1))


def permutations() -> None:
    programs = _programs()
    for launch, order in enumerate(orders.orders()):
        _check(*_run(programs, launch, order))


def random() -> None:
    """Several launches under way, each in an order of its own; how many is the first argument."""
    programs, rng = _programs(), np.random.default_rng(3)
    every, waiting = list(orders.orders()), []
    for launch in range(int(case_arguments[0]) if case_arguments else 300):
        waiting.append(_run(programs, launch, every[rng.integers(len(every))]))
        if len(waiting) == 8:
            for each in waiting:
                _check(*each)
            waiting.clear()
    for each in waiting:
        _check(*each)


def threads() -> None:
    """Threads that dispatch programs over all devices, un-awaited."""

    def program(k):
        def f(x):
            y = jax_dfccl.all_reduce(x + k, "i")
            return y + jax_dfccl.all_gather(jnp.tanh(0 * y) + x, "i").sum(0)

        return jax_dfccl.dispatch(
            jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False),
            cut_local=True,
        )

    def job(k):
        f = program(k)
        found = []
        for launch in range(40):
            x = ranked(20, seed=100 * k + launch)
            found.append((x, f(x)))
        for x, future in found:
            total = x.sum(0)
            check(k, future.result(60), np.stack([2 * total + N * k] * N))

    in_threads([(job, k) for k in range(4)])


main({"permutations": permutations, "random": random, "threads": threads})
