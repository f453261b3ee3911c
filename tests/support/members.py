# SPDX-License-Identifier: Apache-2.0
"""Meshes, data that differs by member and position, and the NumPy reference of all_reduce."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor")


def make_mesh(shape: Sequence[int] = (8,), names: Sequence[str] = ("i",)) -> Mesh:
    """A mesh over the first devices."""
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), tuple(names))


def spmd(
    f: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    check_vma: bool = False,
    jit: bool = True,
) -> Any:
    """`f` under shard_map; by default arguments and results are split over all axes."""
    mesh = mesh or make_mesh()
    everywhere = P(mesh.axis_names)
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=everywhere if in_specs is None else in_specs,
        out_specs=everywhere if out_specs is None else out_specs,
        check_vma=check_vma,
    )
    return jax.jit(mapped) if jit else mapped


def per_member(f: Callable[..., Any], *arguments: Any, **options: Any) -> np.ndarray:
    """Runs `f` on every member's own row of the arguments; stacks what the members got."""
    g = spmd(lambda *rows: jax.tree.map(lambda y: y[None], f(*(x[0] for x in rows))), **options)
    return g(*arguments)


def data(
    shape: Sequence[int], dtype: Any = np.float32, *, seed: int = 0, small: bool = False
) -> np.ndarray:
    """Random data, different by member (leading dimension) and position, of any dtype.

    With `small` products of eight elements stay in range.
    """
    dtype = np.dtype(dtype)
    rng = np.random.default_rng([seed, *shape])
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    info = jax.numpy.iinfo(dtype) if is_integer(dtype) else None
    if info is not None:
        low, high = (int(info.min), int(info.max)) if not small else (max(-3, int(info.min)), 3)
        values = rng.integers(low, high, shape, dtype=wide_integer(dtype), endpoint=True)
        return values.astype(dtype)
    if dtype.name == "float8_e8m0fnu":  # powers of two, nothing else
        return np.exp2(rng.integers(-2, 3, shape)).astype(dtype)
    values = rng.uniform(0.5, 1.5, shape) * rng.choice([-1.0, 1.0], shape)
    if is_complex(dtype):
        return (values + 1j * rng.uniform(-1, 1, shape)).astype(dtype)
    return values.astype(np.float32).astype(dtype) if dtype.itemsize < 8 else values


def reference(
    x: np.ndarray, op: str = "sum", groups: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """What each member gets: a fold left to right by rank, narrow floats in float32."""
    result = np.empty_like(x)
    for group in groups if groups is not None else [range(len(x))]:
        total = fold([x[member] for member in group], op)
        for member in group:
            result[member] = total
    return result


def fold(parts: Sequence[np.ndarray], op: str) -> np.ndarray:
    dtype = parts[0].dtype
    combine: dict[str, Any] = {
        "sum": np.add,
        "mean": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    wide = accumulation(dtype)
    with np.errstate(all="ignore"):
        total = parts[0].astype(wide)
        for part in parts[1:]:
            total = combine[op](total, part.astype(wide))
        if op == "mean" and is_complex(wide):  # NumPy would divide by a complex number
            total = (total.view(f"f{wide.itemsize // 2}") / len(parts)).view(wide)
        elif op == "mean":
            total = total / wide.type(len(parts))
        return wrap(total, dtype)


def accumulation(dtype: np.dtype) -> np.dtype:
    """The type the reference folds in."""
    if is_integer(dtype):
        return np.dtype(wide_integer(dtype))
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype


def wide_integer(dtype: Any) -> Any:
    return np.uint64 if jax.numpy.issubdtype(dtype, np.unsignedinteger) else np.int64


def wrap(total: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Integers of any width keep their low bits."""
    if not is_integer(dtype):
        return total.astype(dtype)
    info = jax.numpy.iinfo(dtype)
    if info.bits == 64:
        return total
    modulus = 2**info.bits
    low = np.asarray(total).astype(np.int64) % modulus
    return np.where(low > int(info.max), low - modulus, low).astype(dtype)


def is_integer(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.integer))


def is_float(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.floating))


def is_complex(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.complexfloating))


def assert_same_bits(got: Any, right: Any) -> None:
    """Equal in every bit, except that any NaN equals any NaN."""
    got, right = np.asarray(got), np.asarray(right)
    assert got.dtype == right.dtype and got.shape == right.shape
    if not (is_float(got.dtype) or is_complex(got.dtype)):
        np.testing.assert_array_equal(got, right)
        return
    nan = np.isnan(got.astype(np.complex128)) & np.isnan(right.astype(np.complex128))
    size = got.dtype.itemsize
    got_bits = np.ascontiguousarray(got).view(np.uint8).reshape(*got.shape, size)
    right_bits = np.ascontiguousarray(right).view(np.uint8).reshape(*right.shape, size)
    different = (got_bits != right_bits).any(axis=-1) & ~nan
    assert not different.any(), (
        f"{different.sum()} of {different.size} differ, first: got {got[different][:4]}, "
        f"right {right[different][:4]}"
    )
