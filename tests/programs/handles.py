# SPDX-License-Identifier: Apache-2.0
"""Handles by hand, dispatched by one thread in every order and in random ones."""

import sys
from pathlib import Path

import jax
from common import case_arguments, check, main

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def permutations() -> None:
    for what, got, right in orders.through_handles(jax.devices()[2:6], orders.orders()):
        check(what, got, right)


def random() -> None:
    every = orders.random_orders(int(case_arguments[0]))
    for what, got, right in orders.through_handles(jax.devices()[2:6], every):
        check(what, got, right)


main({"permutations": permutations, "random": random})
