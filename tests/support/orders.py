# SPDX-License-Identifier: Apache-2.0
"""Three collectives over three overlapping groups, in every order on every member."""

import itertools
from collections.abc import Iterator

import jax

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


def value(name: str, place: int, launch: int) -> float:
    """What a member gives to a collective."""
    return float(100 * NAMES.index(name) + 10 * place + launch % 7)


def total(name: str, launch: int) -> float:
    """The sum of that over all members."""
    return sum(value(name, place, launch) for place in MEMBERS[name])
