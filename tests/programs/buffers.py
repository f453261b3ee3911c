# SPDX-License-Identifier: Apache-2.0
"""Start/done across loop-carried and in-place-updated operands, and donation."""

import jax
import jax.numpy as jnp
import numpy as np
from common import N, check, main, mesh, ranked, spmd
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dfccl import all_reduce


def _in_branches(x, function):
    """Runs `function` in both branches of a device-varying cond: start/done form."""
    return lax.cond(lax.axis_index("i") % 2 == 0, function, function, x)


def in_place_update() -> None:
    """The operand is updated in place right after the call uses it."""
    for count in (4, 5000):

        def f(x):
            def run(x):
                y = all_reduce(x, "i", name="y")
                x = x.at[0].add(1000)
                z = all_reduce(x, "i", name="z")
                return y, z, x.at[1].add(5)

            return _in_branches(x, run)

        x = ranked(count, np.float32, count)
        y, z, w = spmd(f, donate_argnums=0)(jax.device_put(x.ravel(), NamedSharding(mesh, P("i"))))
        bumped = x.copy()
        bumped[:, 0] += 1000
        check("y", y, np.tile(x.sum(0), N))
        check("z", z, np.tile(bumped.sum(0), N))
        bumped[:, 1] += 5
        check("w", w, bumped.ravel())


def loop_carried() -> None:
    """The operand is the loop carry and is overwritten in the same iteration."""
    for count in (4, 5000):

        def f(x):
            def body(k, carry):
                x, total = carry

                def run(x):
                    return all_reduce(x, "i", name="carry")

                y = _in_branches(x, run)
                x = x.at[k % 4].set(y[0])
                return x, total + y

            return lax.fori_loop(0, 9, body, (x, jnp.zeros_like(x)))

        x0 = ranked(count, np.float64, count)
        x, total = spmd(f, donate_argnums=0)(
            jax.device_put(x0.ravel(), NamedSharding(mesh, P("i")))
        )
        state, sum_ = x0.copy(), np.zeros(count)
        for k in range(9):
            y = state.sum(0)
            state[:, k % 4] = y[0]
            sum_ += y
        check("carry", x, state.ravel())
        check("total", total, np.tile(sum_, N))


def while_branches() -> None:
    """A while_loop inside the branches, whose body reduces and updates its carry in place."""

    def f(x):
        def run(x):
            def body(carry):
                k, x = carry
                y = all_reduce(x, "i", name="w")
                return k + 1, x.at[k].set(y[k] * 0.5)

            return lax.while_loop(lambda c: c[0] < 4, body, (0, x))[1]

        return _in_branches(x, run)

    x0 = ranked(6, np.float64, 1)
    state = x0.copy()
    for k in range(4):
        state[:, k] = state.sum(0)[k] * 0.5
    check("while", spmd(f)(x0.ravel()), state.ravel())


def beside_callback() -> None:
    """A host callback between start and done: the source is staged, values stay right."""

    def f(x):
        def run(x):
            y = all_reduce(x, "i", name="y")
            z = jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return y + z

        return _in_branches(x, run)

    x = ranked(100, np.float32, 2)
    check("callback", spmd(f)(x.ravel()), (x.sum(0)[None] + 2 * x).ravel())


def in_place() -> None:
    """Results that take their operands' places, and operands that are wanted afterwards."""
    for count in (4, 5000, 300_000):

        def f(x):
            y = all_reduce(all_reduce(x * 2, "i") - x, "i")
            # XLA merges these two products into one value.
            z = all_reduce(x * 3, "i")
            return y, z + x * 3, all_reduce(x[::-1] * 0.5, "i")

        x = ranked(count, np.float64, count)
        total = 2 * x.sum(0)
        y, z, w = spmd(f)(x.ravel())
        check("y", y, np.tile((total - x).sum(0), N))
        check("z", z, (3 * x.sum(0) + 3 * x).ravel())
        check("w", w, np.tile(x.sum(0)[::-1] * 0.5, N))


if __name__ == "__main__":
    main(
        {
            f.__name__: f
            for f in (in_place_update, loop_carried, while_branches, beside_callback, in_place)
        }
    )
