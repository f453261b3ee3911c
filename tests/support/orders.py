# SPDX-License-Identifier: Apache-2.0
"""Three collectives over three overlapping groups, in every order on every member."""

import itertools
from collections.abc import Iterable, Iterator

import jax
import numpy as np

import jax_dfccl

NAMES = ("a", "b", "c")
# Places in a list of four devices. Each group has a member that another lacks.
MEMBERS = {"a": (0, 1, 2), "b": (3, 1, 2), "c": (2, 0, 3)}


def groups(devices: list[jax.Device]) -> dict[str, jax_dfccl.Group]:
    """The groups over four devices."""
    return {
        name: jax_dfccl.Group([devices[place] for place in MEMBERS[name]], name=name)
        for name in NAMES
    }


def orders() -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every combination of orders of the collectives that each of the four devices is in."""
    own = [[name for name in NAMES if place in MEMBERS[name]] for place in range(4)]
    yield from itertools.product(*(itertools.permutations(names) for names in own))


def random_orders(count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """So many of them, the same in every process."""
    rng, every = np.random.default_rng(3), list(orders())
    for index in rng.integers(len(every), size=count):
        yield every[index]


def value(name: str, place: int, launch: int) -> float:
    """What a member gives to a collective."""
    return float(100 * NAMES.index(name) + 10 * place + launch % 7)


def total(name: str, launch: int) -> float:
    """The sum of that over all members."""
    return sum(value(name, place, launch) for place in MEMBERS[name])


def spread(devices: list[jax.Device]) -> list[jax.Device]:
    """Four of them: the first of each process, or of few processes more."""
    each = max(1, 4 // jax.process_count())
    processes = sorted({device.process_index for device in devices})
    of_each = [[d for d in devices if d.process_index == process] for process in processes]
    return [device for of_one in of_each for device in of_one[:each]][:4]


def through_handles(
    devices: list[jax.Device], every: Iterable[tuple[tuple[str, ...], ...]]
) -> Iterator[tuple[object, jax.Array, float]]:
    """Each device starts its collectives in an order of its own and waits in the opposite one.

    Yields what it is, what came and what is right, for the devices of this process.
    """
    begin = {
        name: jax.jit(
            lambda x, key, group=group: jax_dfccl.start(jax_dfccl.all_reduce, x, group, key=key)
        )
        for name, group in groups(devices).items()
    }
    wait = jax.jit(jax_dfccl.wait)
    for launch, order in enumerate(every):
        handles = {}
        for step in range(3):
            for place, names in enumerate(order):
                if devices[place] in jax.local_devices() and step < len(names):
                    name = names[step]
                    x = jax.device_put(value(name, place, launch), devices[place])
                    handles[name, place] = begin[name](x, launch)
        got = {key: wait(handles[key]) for key in reversed(handles)}
        for (name, place), y in got.items():
            yield (launch, name, place), y, total(name, launch)
