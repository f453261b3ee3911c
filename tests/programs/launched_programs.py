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
    """Threads that dispatch programs over all devices, un-awaited, some of them cut."""

    def program(k):
        def f(x):
            y = jax_dfccl.all_reduce(x + k, "i")
            return y + jax_dfccl.all_gather(jnp.tanh(0 * y) + x, "i").sum(0)

        return jax_dfccl.dispatch(
            jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False),
            cut_local=k < 2,
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


def mixed() -> None:
    """Programs that are not cut, on all devices, among programs on halves of them that meet."""
    group = jax_dfccl.Group(jax.devices(), name="all")

    def program(f, devices):
        on = jax.sharding.Mesh(np.array(devices), ("i",))
        return jax_dfccl.dispatch(
            jax.shard_map(f, mesh=on, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        )

    def inside(x):
        return x + jax_dfccl.all_reduce(2 * jax_dfccl.all_reduce(x, "i"), "i")

    def outside(x):
        return jax_dfccl.all_reduce(x, group, name="meet") + jax_dfccl.all_reduce(x, "i")

    def job(f, devices, right):
        x = ranked(200)[devices]
        run = program(f, np.array(jax.devices())[devices])
        for future in [run(x) for _ in range(60)]:
            check(f.__name__, future.result(60), right(x))

    total = ranked(200).sum(0)
    half = N // 2
    in_threads(
        [
            (job, inside, slice(N), lambda x: x + 2 * N * total),
            (job, inside, slice(N), lambda x: x + 2 * N * total),
            (job, outside, slice(half), lambda x: np.stack([total + x.sum(0)] * half)),
            (job, outside, slice(half, N), lambda x: np.stack([total + x.sum(0)] * half)),
        ]
    )


main({"mixed": mixed, "permutations": permutations, "random": random, "threads": threads})
