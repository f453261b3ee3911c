# SPDX-License-Identifier: Apache-2.0
"""Handles in several processes of several devices, in every order."""

import sys
from pathlib import Path

import jax
from between import check, main

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def permutations() -> None:
    for what, got, right in orders.through_handles(orders.spread(jax.devices())):
        check(what, got, right)


main([permutations])
