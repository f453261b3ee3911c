# SPDX-License-Identifier: Apache-2.0
"""One Python call site that is several instances in one program must never be crossed."""

import jax
import jax.numpy as jnp
import numpy as np
from common import N, check, main, ranked, spmd
from jax import lax

from jax_dfccl import all_reduce


def inner_jit() -> None:
    """An inner jit called several times on independent values, in many-thunk programs."""

    @jax.jit
    def total(x):
        return all_reduce(x, "i")

    def f(x):
        outs = [total(jnp.sort(x * (k + 1))) for k in range(12)]
        return jnp.stack(outs)[None]

    program = spmd(f)
    for seed in range(50):
        x = ranked(300, np.float32, seed)
        right = np.stack([np.sort(x * (k + 1), axis=1).sum(0) for k in range(12)])
        check("inner jit", program(x.ravel()), np.broadcast_to(right, (N, 12, 300)))


def unequal_work() -> None:
    """Independent instances behind work whose amount differs per device.

    In the dataflow executor that makes the instances start in a different order on each device.
    """

    @jax.jit
    def total(x):
        return all_reduce(x, "i")

    def work(x, rounds):
        return lax.fori_loop(0, rounds, lambda _, v: jnp.sort(v)[::-1], x)

    def f(x):
        rank = lax.axis_index("i")
        outs = []
        for k in range(6):
            rounds = ((rank * 3 + k * 5) % 7) * 20
            outs.append(total(work(x + k, rounds + 1)))
        return jnp.stack(outs)[None]

    program = spmd(f)
    for seed in range(30):
        x = ranked(257, np.float32, seed)
        right = np.stack([np.sort(x + k, axis=1)[:, ::-1].sum(0) for k in range(6)])
        check("unequal work", program(x.ravel()), np.broadcast_to(right, (N, 6, 257)))


def scan_unroll() -> None:
    for unroll in (1, 2, 3, 6, True):

        def f(x, unroll=unroll):
            def body(carry, k):
                y = all_reduce(carry + k, "i")
                return jnp.sign(y), y

            return lax.scan(body, x, jnp.arange(6.0, dtype=x.dtype), unroll=unroll)[1][None]

        x = ranked(40, np.float32, 2)
        state, right = x, []
        for k in range(6):
            y = np.broadcast_to((state + k).sum(0), state.shape)
            right.append(y)
            state = np.sign(y)
        check(f"unroll {unroll}", spmd(f)(x.ravel()), np.stack(right, 1))


def short_loops() -> None:
    """Loops of one and two iterations, which XLA may unroll or inline by itself."""
    for length in (1, 2, 3):

        def f(x, length=length):
            def body(_, v):
                return all_reduce(v, "i") * 0.125 + lax.axis_index("i")

            return lax.fori_loop(0, length, body, x)

        x = ranked(16, np.float32, length)
        state = x
        for _ in range(length):
            state = state.sum(0)[None] * np.float32(0.125) + np.arange(N, dtype=np.float32)[:, None]
        check(f"length {length}", spmd(f)(x.ravel()), state.ravel())


def remat() -> None:
    """Rematerialised collectives in the backward pass."""

    def f(x):
        @jax.checkpoint
        def layer(v):
            return jnp.sin(all_reduce(v, "i") * 0.1)

        def loss(v):
            return (layer(layer(v)) * v).sum()

        return jax.grad(loss)(x)

    def reference(x):
        def layer(v):
            return jnp.sin(lax.psum(v, "i") * 0.1)

        return jax.grad(lambda v: (layer(layer(v)) * v).sum())(x)

    x = ranked(64, np.float64, 5).ravel() * 0.25
    got, right = np.asarray(spmd(f)(x)), np.asarray(spmd(reference)(x))
    check("remat", np.allclose(got, right, rtol=1e-12, atol=1e-12), True)


def vmapped() -> None:
    """vmap over a batch axis, nested in scan and jit."""

    def f(x):
        rows = x.reshape(4, -1)
        a = jax.vmap(lambda r: all_reduce(r, "i"))(rows)
        b = jax.vmap(lambda r: all_reduce(r[::-1], "i", op="max"), in_axes=1, out_axes=1)(rows)
        return (a + 1000 * b).ravel()

    x = ranked(4 * 10, np.float64, 8)
    rows = x.reshape(N, 4, 10)
    right = rows.sum(0) + 1000 * rows[:, ::-1].max(0)
    check("vmap", spmd(f)(x.ravel()), np.tile(right.ravel(), N))


def keys() -> None:
    """A run-time key tells messages apart: each device sends its keys in another order."""

    def f(x):
        rank = lax.axis_index("i")

        def step(carry, k):
            key = (rank + k) % 4  # device r begins with key r
            out = all_reduce(x * (key + 1).astype(x.dtype), "i", name="keyed", key=key)
            return carry.at[key].set(out), None

        carry, _ = lax.scan(step, jnp.zeros((4, *x.shape), x.dtype), jnp.arange(4), unroll=True)
        return carry[None]

    x = ranked(16, np.float32, 3)
    right = np.stack([(x * (k + 1)).sum(0) for k in range(4)])
    check("keys", spmd(f)(x.ravel()), np.broadcast_to(right, (N, 4, 16)))


if __name__ == "__main__":
    main(
        {
            f.__name__: f
            for f in (inner_jit, unequal_work, scan_unroll, short_loops, remat, vmapped, keys)
        }
    )
