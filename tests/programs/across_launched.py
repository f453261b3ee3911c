# SPDX-License-Identifier: Apache-2.0
"""Programs through the launcher in several processes of several devices."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from between import RANK, N, case_arguments, check, main, mesh, put, ranked, spec

import jax_dfccl

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def opposite() -> None:
    """Programs over all devices of all processes, in another order in each process.

    With plain calls a process of several devices runs one after the other, and this hangs.
    """

    def program(k):
        def f(x):
            y = jax_dfccl.all_reduce(x + k, "i")
            return jnp.where(y > 0, y, y) + jax_dfccl.all_reduce(y * (k + 1), "i")

        return jax_dfccl.dispatch(
            jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    programs = [program(k) for k in range(5)]
    rng = np.random.default_rng(RANK)
    for launch in range(12):
        x = ranked((N, 30), seed=launch)
        y, total = put(x), x.sum(0)
        order = rng.permutation(5) if launch else np.roll(np.arange(5), RANK)
        futures = {k: programs[k](y) for k in order.tolist()}
        for k, future in futures.items():
            first = total + N * k
            right = np.stack([first + N * (k + 1) * first] * N)
            check((launch, k), future.result(100), right.astype(x.dtype))


def permutations() -> None:
    _in_orders(orders.orders())


def random() -> None:
    _in_orders(orders.random_orders(int(case_arguments[0])))


def _in_orders(every) -> None:
    """One-device programs on four devices, each in its own order."""
    devices = orders.spread(jax.devices())
    programs = {
        name: jax_dfccl.dispatch(
            lambda x, key, group=group: jax_dfccl.all_reduce(x, group, key=key) + 1
        )
        for name, group in orders.groups(devices).items()
    }
    for launch, order in enumerate(every):
        futures = {}
        for step in range(3):
            for place, names in enumerate(order):
                if devices[place] in jax.local_devices() and step < len(names):
                    name = names[step]
                    x = np.float32(orders.value(name, place, launch))
                    x = jax.device_put(x, devices[place])
                    futures[name, place] = programs[name](x, np.int32(launch))
        for (name, _), future in futures.items():
            right = np.float32(orders.total(name, launch) + 1)
            check((launch, name), future.result(100), right)


main([opposite, permutations, random])
