# SPDX-License-Identifier: Apache-2.0
"""vmap over the collectives: over another axis one call of whole arrays, over their own none."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jax_dfccl import _local
from jax_dfccl._primitive import (
    KINDS,
    PRIMITIVES,
    RAGGED,
    START,
    WAIT,
    Kind,
    array_count,
    bind,
    of_call,
)

# What the kinds are called with besides what all are called with.
_SPECIFIC = ("op", "root", "pairs", "reverse")


def _batch(kind: Kind, axis_data: Any, values: Any, dims: Any, **params: Any) -> Any:
    count = array_count(kind.name)
    arrays, array_dims = values[:count], dims[:count]
    over_members = axis_data.name in params["axes"]
    if dims[count:] and dims[count] is not None:
        if over_members:
            raise ValueError(
                f"{kind.shown}: the key differs along the vmapped axis {axis_data.name!r}, over "
                "which the call communicates; the members of a call must have the same key"
            )
        return _one_call_each(kind, values, dims, **params), 0
    if over_members:
        return _batch_members(kind, axis_data, values, array_dims, **params)
    if all(dim is None for dim in array_dims):
        return bind(kind.name, *values, **params), None
    if not _is_whole(kind, axis_data, dims, params):
        if kind.name == RAGGED:
            return _one_call_each(kind, values, dims, **params), 0
        (x,), (dim,) = arrays, array_dims
        total = x.sum(dim)
        arrived = bind("barrier", total, *values[count:], **params)
        return x + jnp.expand_dims(arrived - total, dim), dim  # zero, which XLA cannot know
    whole, dim = _whole(kind, axis_data.size, values, dims)
    return bind(kind.name, *whole, **params), dim


def _is_whole(kind: Kind, axis_data: Any, dims: Any, params: dict[str, Any]) -> bool:
    """Whether one call of whole arrays does what is vmapped."""
    along = [dim is not None for dim in dims]
    if axis_data.name in params["axes"] or kind.name == "barrier":
        return False
    return not any(along[2:] if kind.name == RAGGED else along[1:])


def _whole(kind: Kind, size: int, values: Any, dims: Any) -> tuple[list[Any], int]:
    """The operands of that call, and the vmapped dimension of its result."""
    if kind.name == RAGGED:  # as wider rows
        wide = [_stacked(x, dim, size, at=1) for x, dim in zip(values[:2], dims[:2], strict=True)]
        return [*wide, *values[2:]], 1
    (x, *key), (dim, *_) = values, dims
    if kind.takes_parts and dim == 0:
        x, dim = jnp.moveaxis(x, 0, 1), 1
    return [x, *key], dim + kind.gives_parts - kind.takes_parts


def _batch_start(axis_data: Any, values: Any, dims: Any, **params: Any) -> Any:
    """What is no one call of whole arrays is called at the wait."""
    kind, detached = KINDS[params["kind"]], params["detached"]
    if _is_whole(kind, axis_data, dims, params):
        values, _ = _whole(kind, axis_data.size, values, dims)
        return START.bind(*values, **params), None
    if detached:
        return _one_call_each(kind, values, dims, detached=True, **of_call(params)), 0
    return jnp.zeros(2, np.uint32), None


def _batch_wait(axis_data: Any, values: Any, dims: Any, **params: Any) -> Any:
    (ticket, *origin), (ticket_dim, *dims) = values, dims
    kind = KINDS[params["kind"]]
    if ticket_dim is not None or params["origin"] != "operands":
        raise NotImplementedError(
            f"wait: the handle of {kind.shown} was started outside of the function that is "
            "vmapped; start it and wait for it in one"
        )
    if not _is_whole(kind, axis_data, dims, params):
        return _batch(kind, axis_data, origin, dims, **of_call(params))
    whole, dim = _whole(kind, axis_data.size, origin, dims)
    shape = (*params["shape"][:dim], axis_data.size, *params["shape"][dim:])
    return WAIT.bind(ticket, *whole, **{**params, "shape": shape}), dim


def _one_call_each(kind: Kind, values: Any, dims: Any, **params: Any) -> Any:
    """A call for each index along the vmapped axis, in a loop."""
    mapped = [
        jnp.moveaxis(x, dim, 0) for x, dim in zip(values, dims, strict=True) if dim is not None
    ]

    def call(slices: list[Any]) -> Any:
        rest = iter(slices)
        operands = [x if dim is None else next(rest) for x, dim in zip(values, dims, strict=True)]
        return bind(kind.name, *operands, **params)

    return lax.map(call, mapped)


def _stacked(x: Any, dim: int | None, size: int, at: int = 0) -> Any:
    """`x` with its vmapped dimension, which it is given if it has none, at a place."""
    if dim is None:
        return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))
    return jnp.moveaxis(x, dim, at)


def _batch_members(kind: Kind, axis_data: Any, values: Any, dims: Any, **params: Any) -> Any:
    """The members along a vmapped axis are on one device: the call becomes a local operation.

    Over mesh axes as well, all operands are gathered first (but for sums and their like).
    """
    arrays, key = values[: len(dims)], values[len(dims) :]
    axes, groups = params["axes"], params["groups"]
    specific = {name: params.pop(name) for name in _SPECIFIC if name in params}
    stacked = tuple(_stacked(x, d, axis_data.size) for x, d in zip(arrays, dims, strict=True))
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if not rest:
        result = _local.evaluate(kind.name, stacked, groups, **specific)
        return (result[0], None) if kind.agrees and groups is None else (result, 0)
    if kind.name == "all_reduce" and groups is None:
        folded = _local.fold(stacked[0], specific["op"])
        return bind(kind.name, folded, *key, **specific, **{**params, "axes": rest}), None

    place = axes.index(axis_data.name)
    major, minor = axes[:place], axes[place + 1 :]
    sizes = tuple(math.prod(map(lax.axis_size, part)) for part in (major, minor))
    gather = {**params, "axes": rest, "groups": None}
    everyone = []
    for number, x in enumerate(stacked):
        if number and gather["name"]:
            gather["name"] = f"{params['name']}/operand{number}"
        parts = bind("all_gather", x, *key, **gather)
        parts = parts.reshape(*sizes, *x.shape).swapaxes(1, 2)
        everyone.append(parts.reshape(math.prod(sizes) * axis_data.size, *x.shape[1:]))
    result = _local.evaluate(kind.name, tuple(everyone), groups, **specific)
    result = result.reshape(sizes[0], axis_data.size, sizes[1], *result.shape[1:])
    own = [lax.axis_index(part) if part else np.int32(0) for part in (major, minor)]
    return result[own[0], :, own[1]], 0


for _name, _primitive in PRIMITIVES.items():
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, KINDS[_name])
batching.fancy_primitive_batchers[START] = _batch_start
batching.fancy_primitive_batchers[WAIT] = _batch_wait
