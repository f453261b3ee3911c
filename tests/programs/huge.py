# SPDX-License-Identifier: Apache-2.0
"""Arrays of more than 2^31 bytes and elements, on two devices: `python huge.py KIND --devices 2`.

Values are made and compared on the devices, piece by piece, so that it takes 16 GiB at most.
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import N, check, main, spmd
from jax import lax

import jax_dfccl

COUNT = (1 << 31) + 13  # elements of an int8 array
HALF = (1 << 30) + 7  # of each of two parts
PIECE = 1 << 24


def _value(seed, index):
    """Differs by member and position, also by positions whose low 32 bits agree."""
    return ((index * 7 + (index >> 31) * 5 + seed * 31) % 61).astype(np.int8)


def _filled(shape):
    """What every member has: `_value` of its index, made in pieces."""
    count = int(np.prod(shape))

    def f(seed):
        def fill(k, x):
            at = jnp.minimum(k * PIECE, count - PIECE)
            return lax.dynamic_update_slice(x, _value(seed[0], at + jnp.arange(PIECE)), (at,))

        pieces = -(-count // PIECE)
        return lax.fori_loop(0, pieces, fill, jnp.zeros(count, np.int8)).reshape(1, *shape)

    return spmd(f)(np.arange(N))


def _differences(y, right):
    """How many elements of each member's result are not `right(member, index)`."""
    count = int(np.prod(y.shape[1:]))

    def f(member, y):
        flat = y.reshape(-1)

        def compare(k, wrong):
            at = jnp.minimum(k * PIECE, count - PIECE)
            got = lax.dynamic_slice(flat, (at,), (PIECE,))
            return wrong + (got != right(member[0], at + jnp.arange(PIECE))).sum()

        return lax.fori_loop(0, -(-count // PIECE), compare, jnp.zeros((), np.int64))[None]

    return spmd(f)(np.arange(N), y)


def _run(call, shape, result_shape, right) -> None:
    y = spmd(lambda x: call(x[0])[None], donate_argnums=0)(_filled(shape))
    check("shape", y.shape, (N, *result_shape))
    check("differences", _differences(y, right), np.zeros(N))


def all_reduce() -> None:
    def right(member, index):
        del member
        return _value(0, index) + _value(1, index)

    _run(lambda x: jax_dfccl.all_reduce(x, "i"), (COUNT,), (COUNT,), right)


def all_gather() -> None:
    def right(member, index):
        del member
        return _value(index // HALF, index % HALF)

    _run(lambda x: jax_dfccl.all_gather(x, "i"), (HALF,), (N, HALF), right)


def reduce_scatter() -> None:
    def right(member, index):
        return _value(0, member * HALF + index) + _value(1, member * HALF + index)

    _run(lambda x: jax_dfccl.reduce_scatter(x, "i"), (N, HALF), (HALF,), right)


def all_to_all() -> None:
    def right(member, index):
        return _value(index // HALF, member * HALF + index % HALF)

    _run(lambda x: jax_dfccl.all_to_all(x, "i", 0, 0), (N, HALF), (N, HALF), right)


def ppermute() -> None:
    def right(member, index):
        return _value(1 - member, index)

    swap = [(0, 1), (1, 0)]
    _run(lambda x: jax_dfccl.ppermute(x, "i", swap), (COUNT,), (COUNT,), right)


def inclusive_scan() -> None:
    def right(member, index):
        return _value(0, index) + member.astype(np.int8) * _value(1, index)

    _run(lambda x: jax_dfccl.inclusive_scan(x, "i"), (COUNT,), (COUNT,), right)


if __name__ == "__main__":
    assert N == 2 and jax.device_count() == 2
    cases = (all_reduce, all_gather, reduce_scatter, all_to_all, ppermute, inclusive_scan)
    main({f.__name__: f for f in cases})
