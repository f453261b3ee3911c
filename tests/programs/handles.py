# SPDX-License-Identifier: Apache-2.0
"""Handles by hand, dispatched by one thread in every order."""

import sys
from pathlib import Path

import jax
from common import check, main

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import orders


def permutations() -> None:
    for what, got, right in orders.through_handles(jax.devices()[2:6]):
        check(what, got, right)


main({"permutations": permutations})
