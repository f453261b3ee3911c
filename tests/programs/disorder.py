# SPDX-License-Identifier: Apache-2.0
"""Collectives in opposite order in two branches: message sizes, thunk counts, sizes, dtypes, ops.

Programs of few and many thunks run in XLA's sequential and in its dataflow executor.
"""

import jax.numpy as jnp
import numpy as np
from common import N, case_arguments, check, main, ranked, spmd
from jax import lax

from jax_dfccl import all_reduce


def _swapped(thunks, first, second):
    """A program whose branches run two collectives in opposite order beside `thunks` sorts."""

    def f(x, y):
        def pad(x, y):  # each sort is a thunk of its own
            row = jnp.stack([x[:1].astype(jnp.float32), y[:1].astype(jnp.float32)])
            total = jnp.zeros((), jnp.float32)
            for k in range(thunks):
                total += jnp.sort(row * (k + 1), axis=0)[0, 0] * 0
            return total

        def even(x, y):
            a = all_reduce(x, "i", name="a", op=first)
            b = all_reduce(y, "i", name="b", op=second)
            return a, b, pad(x, y)

        def odd(x, y):
            b = all_reduce(y, "i", name="b", op=second)
            # a must come after b here
            a = all_reduce(x + (0 * b.ravel()[:1]).astype(x.dtype), "i", name="a", op=first)
            return a, b, pad(x, y)

        a, b, zero = lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x, y)
        return a + zero.astype(a.dtype), b

    return spmd(f)


REFERENCE = {"sum": lambda x: x.sum(0), "max": lambda x: x.max(0), "min": lambda x: x.min(0)}


def _check(program, counts, dtypes, ops, seed):
    x = ranked(counts[0], dtypes[0], seed)
    y = ranked(counts[1], dtypes[1], seed + 1)
    a, b = program(x.ravel(), y.ravel())
    check(f"a {counts} {dtypes}", np.asarray(a).reshape(N, -1)[0], REFERENCE[ops[0]](x))
    check(f"a {counts} {dtypes} all", a, np.tile(REFERENCE[ops[0]](x), N))
    check(f"b {counts} {dtypes} all", b, np.tile(REFERENCE[ops[1]](y), N))


def sizes() -> None:
    """4 B, 4 KiB, 1 MiB and 16 MiB, in programs of few and many thunks."""
    for count in (1, 1024, 262_144, 4_194_304):
        for thunks in (0, 4, 7, 38) if count <= 1024 else (0, 38):
            program = _swapped(thunks, "sum", "sum")
            for seed in range(20 if count <= 1024 else 2):
                _check(program, (count, count), (np.float32, np.float32), ("sum", "sum"), seed)


def two_sizes() -> None:
    for counts in ((1, 70_000), (70_000, 3), (1024, 1_048_576)):
        for thunks in (0, 9):
            program = _swapped(thunks, "sum", "max")
            for seed in range(5):
                _check(program, counts, (np.float32, np.float32), ("sum", "max"), seed)


def two_dtypes() -> None:
    for dtypes in ((np.float32, np.int8), (np.float64, np.float32), (np.int16, np.int64)):
        for thunks in (0, 9):
            program = _swapped(thunks, "sum", "min")
            for seed in range(5):
                _check(program, (4096, 4096), dtypes, ("sum", "min"), seed)


def many_devices() -> None:
    """As many virtual devices as `--devices` says, on the cores there are."""
    program = _swapped(0, "sum", "sum")
    for seed in range(3):
        _check(program, (64, 64), (np.float32, np.float32), ("sum", "sum"), seed)
    _check(program, (65_536, 64), (np.float32, np.float32), ("sum", "sum"), 9) if N <= 64 else None


def _groups(rng) -> list[list[int]]:
    """Groups that cover all devices, of random sizes and member order."""
    order, groups = rng.permutation(N).tolist(), []
    while order:
        take = int(rng.integers(1, len(order) + 1))
        groups.append(order[:take])
        order = order[take:]
    return groups


def hundred_groups() -> None:
    """A hundred pairs and quartets in flight at once, in a different order on every device."""
    rng = np.random.default_rng(11)
    partitions = [rng.permutation(N).reshape(-1, 2 + 2 * (k % 2)).tolist() for k in range(100)]
    orders = [rng.permutation(100) for _ in range(N)]

    def f(x):
        def branch(order):
            def run(x):
                out = [None] * 100
                for k in order:
                    groups = partitions[k]
                    out[k] = all_reduce(x[k], "i", name=f"g{k}", axis_index_groups=groups)
                return jnp.stack(out)

            return run

        branches = [branch(order) for order in orders]
        return lax.switch(lax.axis_index("i"), branches, x[0])[None]

    program = spmd(f)
    for repeat in range(20):
        x = ranked(100 * 33, np.float32, repeat).reshape(N, 100, 33)
        right = np.empty_like(x)
        for k, groups in enumerate(partitions):
            for group in groups:
                right[group, k] = x[group, k].sum(0)
        check(f"repeat {repeat}", program(x), right)


def random_groups() -> None:
    """Random order on every device, over overlapping groups; `--repeats R` sets how long.

    Each call of the program issues 8 named collectives over 4 partitions of the devices; every
    device runs them in its own order, changed by a run-time seed (32 branches).
    """
    repeats = int(case_arguments[case_arguments.index("--repeats") + 1]) if case_arguments else 160
    rng = np.random.default_rng(5)
    partitions = [_groups(rng) for _ in range(4)]
    names = [(f"c{k}", partitions[k % 4]) for k in range(8)]
    orders = [rng.permutation(8) for _ in range(32)]

    def f(x, seed):
        def branch(order):
            def run(x):
                out = [None] * 8
                for k in order:
                    name, groups = names[k]
                    out[k] = all_reduce(x[k] * (k + 1), "i", name=name, axis_index_groups=groups)
                return jnp.stack(out)

            return run

        which = (lax.axis_index("i") * 5 + seed[0] * 7) % 32
        return lax.switch(which, [branch(order) for order in orders], x[0])[None]

    program = spmd(f)
    count = 33
    for repeat in range(repeats):
        x = np.random.default_rng(repeat).integers(-9, 9, (N, 8, count)).astype(np.float32)
        right = np.empty_like(x)
        for k, (_, groups) in enumerate(names):
            for group in groups:
                right[group, k] = x[group, k].sum(0) * (k + 1)
        check(f"repeat {repeat}", program(x, np.full(N, repeat, np.int32)), right)


if __name__ == "__main__":
    main(
        {
            f.__name__: f
            for f in (sizes, two_sizes, two_dtypes, many_devices, hundred_groups, random_groups)
        }
    )
