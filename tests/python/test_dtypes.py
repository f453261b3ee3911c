# SPDX-License-Identifier: Apache-2.0
"""Every dtype of XLA:CPU with every op that has a meaning for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from members import (
    OPS,
    assert_same_bits,
    data,
    is_complex,
    is_float,
    is_integer,
    per_member,
    reference,
    spmd,
)

from jax_dfccl import all_reduce

INTEGERS = ["int2", "int4", "int8", "int16", "int32", "int64"]
INTEGERS += [f"u{name}" for name in INTEGERS]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
FLOATS8 = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
FLOATS4 = ["float4_e2m1fn"]
COMPLEX = ["complex64", "complex128"]
BITWISE = ("and", "or", "xor")
GROUPS = [[5, 1, 2], [0, 7], [3, 4, 6]]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def as_dtype(name):
    return np.dtype(getattr(jnp, name).dtype) if name != "bool" else np.dtype(bool)


def ops_for(name):
    dtype = as_dtype(name)
    if is_integer(dtype):
        return [op for op in OPS if op != "mean"]
    if is_complex(dtype):
        return ["sum", "mean", "prod"]
    return [op for op in OPS if op not in BITWISE]


def reduced(x, op, groups=None):
    return np.array(per_member(lambda x: all_reduce(x, "i", op=op, axis_index_groups=groups), x))


@pytest.mark.parametrize("name", INTEGERS + FLOATS + FLOATS8 + FLOATS4 + COMPLEX)
def test_every_op(name):
    """All ops of a dtype in one program: whole axis and uneven groups."""
    dtype, ops = as_dtype(name), ops_for(name)
    x = data((8, 37), dtype, small=not is_integer(dtype))

    def f(x):
        return [
            all_reduce(x, "i", op=op, axis_index_groups=groups)
            for op in ops
            for groups in (None, GROUPS)
        ]

    results = iter(spmd(f)(x))
    for op in ops:
        for groups in (None, GROUPS):
            got, right = np.asarray(next(results)), reference(x, op, groups)
            assert got.dtype == dtype
            if is_complex(dtype) and op == "prod":
                np.testing.assert_allclose(got, right, rtol=1e-5 if dtype.itemsize == 8 else 1e-12)
            else:
                assert_same_bits(got, right)


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4"])
def test_mean_of_integers_below_a_byte_does_not_wrap(name):
    x = data((8, 16), as_dtype(name))
    got = reduced(x, "mean")
    assert is_float(got.dtype)
    right = np.asarray(x).astype(np.float64).reshape(8, -1).mean(0)
    np.testing.assert_allclose(np.asarray(got).reshape(8, -1)[0], right, rtol=1e-6)


@pytest.mark.parametrize("name", ["uint8", "int64"])
def test_mean_of_integers_is_the_wrapped_sum_over_the_size(name):
    x = data((8, 16), as_dtype(name))
    got = reduced(x, "mean")
    assert is_float(got.dtype)
    np.testing.assert_allclose(got, reference(x, "sum").astype(np.float64) / 8, rtol=1e-6)


@pytest.mark.parametrize("name", ["float16", "bfloat16", *FLOATS8[:-1]])
def test_narrow_floats_round_once(name):
    """Small addends that would each be lost beside a large partial sum of the narrow type."""
    dtype = as_dtype(name)
    x = np.zeros((8, 4), np.float32)
    x[0] = 1
    # Half of the spacing above 1, minus a little: each is rounded away if added on its own.
    x[1:] = float(jnp.finfo(dtype).eps) * 0.4375
    x = x.astype(dtype)
    got = reduced(x, "sum")
    assert (got.astype(np.float32) > 1).all()
    assert_same_bits(got, reference(x, "sum"))


@pytest.mark.parametrize("name", [*FLOATS, *FLOATS8])
def test_special_values(name):
    """Infinities, NaN, signed zeros, overflow and the smallest numbers, as the type has them."""
    dtype, ops = as_dtype(name), ops_for(name)
    info = jnp.finfo(dtype)
    with np.errstate(all="ignore"):
        special = np.array(
            [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, float(info.max), float(info.min),
             float(info.smallest_normal), float(info.smallest_subnormal)]
        ).astype(dtype)  # fmt: skip
    rng = np.random.default_rng(7)
    x = special[rng.integers(0, len(special), (8, 256))]
    x[:, :3] = special[[4, 7, 1]]
    results = spmd(lambda x: [all_reduce(x, "i", op=op) for op in ops])(x)
    for op, result in zip(ops, results, strict=True):
        got, right = np.array(result), reference(x, op)
        if op in ("min", "max"):  # which zero it is, is not promised
            zeros = (got == 0) & (right == 0)
            got[zeros] = right[zeros]
        assert_same_bits(got, right)


def test_order_of_summation_is_by_rank():
    """One order only gives these bits: the others lose the small addends."""
    x = np.array([[1e8], [3], [-1e8], [5e-4], [1e8], [7], [-1e8], [1e-3]], np.float32)
    assert_same_bits(reduced(x, "sum"), reference(x, "sum"))
    backwards = [list(range(8))[::-1]]
    right = reference(x, "sum", backwards)
    assert (right != reference(x, "sum")).all()
    assert_same_bits(reduced(x, "sum", backwards), right)


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float8_e4m3fn", "float64", "float4_e2m1fn"]
)
def test_gradients_keep_the_dtype(name):
    x = data((8, 4), as_dtype(name), small=True)
    for op in ("sum", "max", "prod"):
        f = spmd(lambda x, op=op: all_reduce(x, "i", op=op).astype(jnp.float32).sum()[None])
        gradient = jax.grad(lambda x, f=f: f(x).sum())(x)
        assert gradient.dtype == x.dtype
        if op == "sum":
            right = np.float32(8).astype(x.dtype)
            np.testing.assert_array_equal(np.asarray(gradient), np.full_like(x, right))
