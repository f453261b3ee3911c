# SPDX-License-Identifier: Apache-2.0
"""Handles in several processes of several devices, in every order and in random ones."""

import sys
from pathlib import Path

import jax
from between import case_arguments, check, main

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def permutations() -> None:
    for what, got, right in orders.through_handles(orders.spread(jax.devices()), orders.orders()):
        check(what, got, right)


def random() -> None:
    every = orders.random_orders(int(case_arguments[0]))
    for what, got, right in orders.through_handles(orders.spread(jax.devices()), every):
        check(what, got, right)


main([permutations, random])
