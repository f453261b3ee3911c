# SPDX-License-Identifier: Apache-2.0
"""Handles in several processes of several devices, in every order."""

import sys
from pathlib import Path

import jax
from between import check, main

import jax_dfccl

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def permutations() -> None:
    """As in handles.py, over the first device of each process, or of two processes all devices."""
    each = max(1, 4 // jax.process_count())
    devices = [d for d in jax.devices() if d.id % 2048 < each][:4]
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
                if devices[place] in jax.local_devices() and step < len(names):
                    name = names[step]
                    x = jax.device_put(orders.value(name, place, launch), devices[place])
                    handles[name, place] = begin[name](x, launch)
        got = {key: wait(handles[key]) for key in reversed(handles)}
        for (name, place), y in got.items():
            check((launch, name, place), y, orders.total(name, launch))


main([permutations])
