# SPDX-License-Identifier: Apache-2.0
"""Independent collectives at unequal depth in two branches.

With plain start/done XLA runs done(A) before start(B) in one branch and done(B) before start(A)
in the other, and both wait for ever; the ordering pass must prevent that.
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import N, check, main, ranked, spmd
from jax import lax

from jax_dfccl import all_reduce


def _deep(x, depth):
    """A value `depth` operations deep that equals x exactly; every step is a thunk of its own."""
    swap = jnp.eye(8, dtype=x.dtype)[::-1]
    block = x[:8].reshape(1, 8) if x.shape[0] >= 8 else None
    for _ in range(depth):
        if block is None:
            x = jnp.sort(jnp.concatenate([x, x]))[: x.shape[0]] * 0 + x
        else:
            block = (block @ swap) @ swap
    return x if block is None else x.at[:8].set(block[0])


def _branches(depths, names):
    """Two branches: in the first, collective k is depths[k] deep; in the second, reversed."""

    def even(x):
        return [
            all_reduce(_deep(x + k, d), "i", name=n)
            for k, (d, n) in enumerate(zip(depths, names, strict=True))
        ]

    def odd(x):
        out = {}
        for k in reversed(range(len(names))):
            out[k] = all_reduce(_deep(x + k, depths[-1 - k]), "i", name=names[k])
        return [out[k] for k in range(len(names))]

    return even, odd


def _right(x, k):
    return np.tile((x + k).sum(0), N)


def cond() -> None:
    for count in (1, 8, 64, 256):
        for depth in (1, 5, 20):
            even, odd = _branches([0, depth], ["a", "b"])
            program = spmd(lambda x: lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x))
            x = ranked(count, np.float32, count + depth)
            for k, got in enumerate(program(x.ravel())):
                check(f"count {count} depth {depth} collective {k}", got, _right(x, k))


def large() -> None:
    for count in (262_144, 4_194_304):
        even, odd = _branches([0, 20], ["a", "b"])
        program = spmd(lambda x: lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x))
        x = ranked(count, np.float32, count)
        for k, got in enumerate(program(x.ravel())):
            check(f"count {count} collective {k}", got, _right(x, k))


def many() -> None:
    """Two to six collectives with rising depths, in a switch over three kinds of branch."""
    for number in (2, 3, 4, 6):
        names = [f"n{k}" for k in range(number)]
        even, odd = _branches([3 * k for k in range(number)], names)

        def mixed(x, names=names):
            order = [k for k in range(len(names)) if k % 2] + list(range(0, len(names), 2))
            out = {k: all_reduce(_deep(x + k, 4 * k % 7), "i", name=names[k]) for k in order}
            return [out[k] for k in range(len(names))]

        program = spmd(
            lambda x, e=even, o=odd, m=mixed: lax.switch(lax.axis_index("i") % 3, [e, o, m], x)
        )
        x = ranked(64, np.float32, number)
        for k, got in enumerate(program(x.ravel())):
            check(f"{number} collectives, {k}", got, _right(x, k))


def nested() -> None:
    """A cond inside the branches holds one of the collectives, at another depth in each."""

    def inner(name):
        def run(x):
            return lax.cond(
                x[0] > -100,  # true everywhere, but XLA cannot know
                lambda x: all_reduce(_deep(x, 3), "i", name=name),
                lambda x: all_reduce(x, "i", name=name),
                x,
            )

        return run

    def even(x):
        a = all_reduce(x, "i", name="a")
        return a, inner("b")(_deep(x + 1, 10))

    def odd(x):
        b = inner("b")(x + 1)
        return all_reduce(_deep(x, 10), "i", name="a"), b

    program = spmd(lambda x: lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x))
    for count in (8, 300):
        x = ranked(count, np.float32, count)
        a, b = program(x.ravel())
        check("a", a, _right(x, 0))
        check("b", b, _right(x, 1))


def scans() -> None:
    """Scan bodies inside the branches; every iteration swaps its collectives."""

    def body(names, depths):
        def step(carry, _):
            out = [
                all_reduce(_deep(carry + k, d), "i", name=n)
                for k, (n, d) in enumerate(zip(names, depths, strict=True))
            ]
            # Both values must be used: JAX removes a call whose value nobody needs.
            return jnp.sign(out[0]), out[0] + 0 * out[1]

        return step

    def even(x):
        return lax.scan(body(["a", "b"], [0, 6]), x, None, length=5)

    def odd(x):
        def step(carry, _):
            b = all_reduce(carry + 1, "i", name="b")
            a = all_reduce(_deep(carry, 6) + 0 * b, "i", name="a")
            return jnp.sign(a), a

        return lax.scan(step, x, None, length=5)

    def f(x):
        carry, steps = lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)
        return carry, steps[None]

    program = spmd(f)
    x = ranked(16, np.float32, 1)
    carry, steps = program(x.ravel())
    state = x
    for k in range(5):
        total = np.broadcast_to(state.sum(0), (N, 16))
        check(f"scan step {k}", np.asarray(steps)[:, k], total)
        state = np.sign(total)
    check("scan carry", np.asarray(carry).reshape(N, 16), state)


def inner_jits() -> None:
    """The collectives sit in inner jitted functions, used in both branches."""

    @jax.jit
    def reduce_a(x):
        return all_reduce(x, "i", name="a")

    @jax.jit
    def reduce_b(x):
        return all_reduce(_deep(x, 4), "i", name="b")

    def even(x):
        return reduce_a(x), reduce_b(_deep(x + 1, 9))

    def odd(x):
        b = reduce_b(x + 1)
        return reduce_a(_deep(x, 9)), b

    program = spmd(lambda x: lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x))
    for count in (8, 500):
        x = ranked(count, np.float32, count)
        a, b = program(x.ravel())
        check("a", a, _right(x, 0))
        check("b", b, _right(x, 1))


def unservable() -> None:
    """Nested branches that cross: no static order serves them. Reported promptly, as such."""

    def in_cond(x, name):
        return lax.cond(x[0] > -100, lambda x: all_reduce(x, "i", name=name), lambda x: x, x)

    def even(x):
        a = in_cond(x, "a")
        return a, in_cond(jnp.sort(x + 0 * a), "b")

    def odd(x):
        b = in_cond(jnp.sort(x), "b")
        return in_cond(x + 0 * b, "a"), b

    program = spmd(lambda x: lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x))
    x = ranked(8, np.float32, 1)
    try:
        jax.block_until_ready(program(x.ravel()))
    except Exception as error:
        for part in ("cycl", "'a'", "'b'"):
            check(f"{part!r} in {error}", part in str(error), True)
    else:
        check("a cycle was reported", False, True)


if __name__ == "__main__":
    main({f.__name__: f for f in (cond, large, many, nested, scans, inner_jits, unservable)})
