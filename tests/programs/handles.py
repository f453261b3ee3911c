# SPDX-License-Identifier: Apache-2.0
"""Handles by hand, dispatched by one thread in every order."""

import sys
from pathlib import Path

import jax
from common import check, main

import jax_dfccl

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def permutations() -> None:
    """Every device starts its collectives in an order of its own and waits in the opposite one."""
    devices = jax.devices()[2:6]
    groups = orders.groups(devices)
    begin = {
        name: jax.jit(
            lambda x, key, group=group: jax_dfccl.start(jax_dfccl.all_reduce, x, group, key=key)
        )
        for name, group in groups.items()
    }
    wait = jax.jit(jax_dfccl.wait)
    for launch, order in enumerate(orders.orders()):
        handles = {}
        for step in range(3):
            for place, names in enumerate(order):
                if step < len(names):
                    name = names[step]
                    x = jax.device_put(orders.value(name, place, launch), devices[place])
                    handles[name, place] = begin[name](x, launch)
        got = {key: wait(handles[key]) for key in reversed(handles)}
        for (name, place), y in got.items():
            check((launch, name, place), y, orders.total(name, launch))


main({"permutations": permutations})
