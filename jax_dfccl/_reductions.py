# SPDX-License-Identifier: Apache-2.0
"""What is common to the functions that reduce: the ops, and the type that is reduced in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dfccl._arguments import Call
from jax_dfccl._primitive import LINEAR_OPS, OPS, group_size

# The bitwise op that a logical op is on bool.
LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}
REDUCTIONS = (*OPS, *LOGICAL)
SCANS = tuple(op for op in REDUCTIONS if op != "mean")


def check_op(function: str, op: Any, scale: Any, ops: tuple[str, ...] = REDUCTIONS) -> None:
    """Checks what does not depend on the operand."""
    if op not in ops:
        raise ValueError(f"{function}: op is {op!r}; it must be one of {', '.join(ops)}")
    if scale is not None and op not in LINEAR_OPS:
        raise ValueError(f"{function}: scale is for sum and mean, not for {op!r}")


def reduced(
    call: Call, kind: str, x: Any, where: str, op: str, scale: Any = None, **params: Any
) -> Any:
    """Binds a kind that folds: chooses the type that is reduced in, and comes back from it."""
    if not call.axes:
        return x if scale is None else _scaled(call.function, x, scale, where)
    if op in LOGICAL:
        x, op = x != 0, LOGICAL[op]
    _check_dtype(call.function, x.dtype, op, where)
    if x.dtype == np.bool_ and op in ("sum", "mean", "prod"):
        x = x.astype(np.int32)
    if scale is not None:
        x = _scaled(call.function, x, scale, where)
    dtype = x.dtype
    integer_mean = op == "mean" and jnp.issubdtype(dtype, np.integer)
    if integer_mean and jax.dtypes.itemsize_bits(dtype) < 8:
        # The sum would wrap around already for two members.
        x, dtype = x.astype(np.int32), np.dtype(np.int32)
    if integer_mean:
        op = "sum"
    result = call.bind(kind, x.astype(reducible(dtype)), op=op, **params).astype(dtype)
    return result / group_size(call.axes, call.groups) if integer_mean else result


def moved(call: Call, kind: str, x: Any, **params: Any) -> Any:
    """Binds a kind that moves data; types below 8 bits go as larger ones that hold their values."""
    dtype = x.dtype
    return call.bind(kind, x.astype(storable(dtype)), **params).astype(dtype)


def storable(dtype: Any) -> Any:
    """A type of at least 8 bits that holds all values of another."""
    if jax.dtypes.itemsize_bits(dtype) >= 8 or dtype == np.bool_:
        return dtype
    if jnp.issubdtype(dtype, np.floating):
        return np.dtype(jnp.float8_e4m3fn)
    return np.dtype(np.uint8 if jnp.issubdtype(dtype, np.unsignedinteger) else np.int8)


def reducible(dtype: Any) -> Any:
    """Integers below 8 bits are exact modulo their range in 8; floats below are reduced in 32."""
    narrow = jax.dtypes.itemsize_bits(dtype) < 8 and dtype != np.bool_
    return (
        np.dtype(np.float32) if narrow and jnp.issubdtype(dtype, np.floating) else storable(dtype)
    )


def _scaled(function: str, x: Any, scale: Any, where: str) -> Any:
    factor = jnp.asarray(scale)
    if factor.ndim:
        raise TypeError(f"{function}: scale has shape {factor.shape}; it must be a scalar")
    if not jnp.can_cast(factor.dtype, x.dtype, "same_kind"):
        raise TypeError(
            f"{function}: scale has dtype {factor.dtype}, with which {where} of dtype {x.dtype} "
            "cannot be multiplied without changing its type; cast one of them"
        )
    return x * factor.astype(x.dtype)


def _check_dtype(function: str, dtype: Any, op: str, where: str) -> None:
    is_a = jnp.issubdtype
    if op in ("min", "max") and is_a(dtype, np.complexfloating):
        raise TypeError(
            f"{function}: op {op!r} is not defined for complex numbers ({where} has dtype "
            f"{dtype}); reduce abs(), or real and imaginary parts"
        )
    if op in ("and", "or", "xor") and not (dtype == np.bool_ or is_a(dtype, np.integer)):
        raise TypeError(
            f"{function}: op {op!r} is for bool and integers ({where} has dtype {dtype})"
        )
