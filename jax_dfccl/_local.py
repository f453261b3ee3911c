# SPDX-License-Identifier: Apache-2.0
"""The collectives as functions of all members' operands: under `jax.vmap` these are one array."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dfccl._groups import Groups
from jax_dfccl._primitive import RAGGED, accumulation_dtype

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def evaluate(kind: str, operands: tuple[Any, ...], groups: Groups | None, **params: Any) -> Any:
    """What the members get, stacked along a leading dimension like their operands."""
    size = operands[0].shape[0]
    if groups is None:
        return _of_group(kind, operands, **params)
    parts = [_of_group(kind, tuple(x[np.array(g)] for x in operands), **params) for g in groups]
    place = np.empty(size, np.int32)
    place[np.concatenate(groups)] = np.arange(size)
    return jnp.concatenate(parts)[place]


def fold(x: Any, op: str) -> Any:
    """Reduces the leading dimension as the collective would have reduced over members."""
    if x.dtype == np.bool_:
        op = {"min": "and", "max": "or"}.get(op, op)
    wide = x.astype(accumulation_dtype(x.dtype))
    if op == "mean":
        result = lax.reduce_sum(wide, (0,)) / x.shape[0]
    else:
        result = getattr(lax, f"reduce_{op}")(wide, (0,))
    return result.astype(x.dtype)


def identity(op: str, dtype: Any) -> Any:
    """The value that changes nothing when it is combined with another."""
    if dtype == np.bool_:
        return np.bool_(op in ("prod", "min", "and"))
    if op in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if op == "prod":
        return np.ones((), dtype)
    if op == "and":
        return np.invert(np.zeros((), dtype))
    if jnp.issubdtype(dtype, np.integer):
        limits = jnp.iinfo(dtype)
        return np.array(limits.max if op == "min" else limits.min, dtype)
    return np.array(np.inf if op == "min" else -np.inf).astype(dtype)


def _of_group(
    kind: str,
    operands: tuple[Any, ...],
    *,
    op: str = "",
    root: int = 0,
    pairs: tuple[tuple[int, int], ...] = (),
    reverse: bool = False,
) -> Any:
    if kind == RAGGED:
        return _exchange_ragged(*operands)
    x = operands[0]
    if kind == "all_reduce":
        return _to_all(fold(x, op), x.shape[0])
    if kind == "all_gather":
        return _to_all(x, x.shape[0])
    if kind == "broadcast":
        return _to_all(x[root], x.shape[0])
    if kind == "reduce_scatter":
        return fold(x, op)
    if kind == "all_to_all":
        return x.swapaxes(0, 1)
    if kind == "permute":
        sources, targets = np.array(pairs, np.int32).reshape(-1, 2).T
        return jnp.zeros_like(x).at[targets].set(x[sources])
    if kind == "reduce":
        return jnp.zeros_like(x).at[root].set(fold(x, op))
    if kind == "gather":
        return jnp.zeros((x.shape[0], *x.shape), x.dtype).at[root].set(x)
    if kind == "scatter":
        return x[root]
    if kind == "barrier":
        return x
    return _scan(x, op, reverse=reverse, inclusive=kind == "scan")


def _to_all(x: Any, members: int) -> Any:
    return jnp.broadcast_to(x, (members, *x.shape))


def _scan(x: Any, op: str, *, reverse: bool, inclusive: bool) -> Any:
    wide = x.astype(accumulation_dtype(x.dtype))
    result = lax.associative_scan(_COMBINE[op], wide, reverse=reverse).astype(x.dtype)
    if inclusive:
        return result
    zeros = jnp.zeros_like(result[:1])
    parts = [result[1:], zeros] if reverse else [zeros, result[:-1]]
    return jnp.concatenate(parts)


def _exchange_ragged(
    source: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any, *_: Any
) -> Any:
    """Row m of member r's result is row m - offset + start of the member that sends it there."""
    members, rows = output.shape[0], jnp.arange(output.shape[1])
    result = output
    for p in range(members):
        place = rows - output_offsets[p][:, None]  # [r, m]: which row of what p sends to r
        sent = (place >= 0) & (place < send_sizes[p][:, None])
        if source.shape[1]:
            moved = source[p][jnp.where(sent, input_offsets[p][:, None] + place, 0)]
            result = jnp.where(sent.reshape(sent.shape + (1,) * (output.ndim - 2)), moved, result)
    return result
