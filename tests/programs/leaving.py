# SPDX-License-Identifier: Apache-2.0
"""The process ends while collectives are pending: it leaves in time, with exit status 0."""

import time

import numpy as np
from common import main, ranked, spmd
from jax import lax

import jax_dfccl
from jax_dfccl import all_reduce


def unawaited() -> None:
    """Many calls are dispatched and nobody asks for their values."""
    program = spmd(lambda x: all_reduce(x * 2, "i") + all_reduce(x, "i", op="max"))
    for seed in range(100):
        program(ranked(100_000, np.float32, seed).ravel())


def stuck() -> None:
    """One device never comes; the time limit is far away."""

    def f(x):
        return lax.cond(
            lax.axis_index("i") == 3,
            lambda x: x,
            lambda x: all_reduce(x, "i", name="lonely", timeout=3600),
            x,
        )

    spmd(f)(ranked(4, np.float32).ravel())
    while not jax_dfccl.report().as_dict()["in_flight"]:
        time.sleep(0.01)


if __name__ == "__main__":
    main({f.__name__: f for f in (unawaited, stuck)})
