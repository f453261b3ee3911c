# SPDX-License-Identifier: Apache-2.0
"""Programs of one device each, dispatched by one thread, that meet in explicit groups."""

import jax
from common import N, check, main, ranked

import jax_dfccl

everyone = jax_dfccl.Group(jax.devices(), name="everyone")


def placed(x):
    return [jax.device_put(row, device) for row, device in zip(x, jax.devices(), strict=True)]


def one_thread() -> None:
    """Tiny and larger programs, many in flight: dispatch waits for none, or this hangs."""
    for count in (0, 1, 300):
        x = ranked(count, seed=count)
        rows = placed(x)
        programs = [
            jax.jit(lambda x, k, d=d: jax_dfccl.all_reduce(x * (d + 1), everyone, key=k))
            for d in range(N)
        ]
        found = [[f(row, step) for f, row in zip(programs, rows, strict=True)] for step in range(8)]
        right = sum((d + 1) * row for d, row in enumerate(x))
        for step in found:
            for y in step:
                check(count, y, right)


def opposite() -> None:
    """Two devices whose programs come in opposite order: an error names both, and all goes on."""
    pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
    f = jax.jit(lambda x: jax_dfccl.all_reduce(x, pair, name="f"))
    g = jax.jit(lambda x: jax_dfccl.all_reduce(x, pair, name="g"))
    a, b = placed(ranked(3))[:2]
    errors = []
    for y in (f(a), g(a), g(b), f(b)):
        try:
            y.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
    assert any("'pair/f'" in e and "'pair/g'" in e and "wait for each other" in e for e in errors)
    h = jax.jit(lambda x: jax_dfccl.all_reduce(x, pair, name="h"))
    for y in [h(a), h(b)]:
        check("after", y, a + jax.device_put(b, a.device))


def missing() -> None:
    f = jax.jit(lambda x: jax_dfccl.all_reduce(x, everyone, name="f", timeout=1))
    for y in [f(row) for row in placed(ranked(3))[:-1]]:
        try:
            y.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            assert f"devices [{N - 1}] have not come" in str(error), error
        else:
            raise AssertionError("no error")


main({"one_thread": one_thread, "opposite": opposite, "missing": missing})
