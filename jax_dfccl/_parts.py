# SPDX-License-Identifier: Apache-2.0
"""Between a dimension of the user's array and the members' parts along a leading dimension."""

from typing import Any

import jax.numpy as jnp

from jax_dfccl._arguments import Call, check_dimension


def joined(parts: Any, dimension: int, *, tiled: bool) -> Any:
    """Puts the parts along another dimension: a new one, or one that grows."""
    moved = jnp.moveaxis(parts, 0, dimension)
    if not tiled:
        return moved
    shape = list(parts.shape[1:])
    shape[dimension] *= parts.shape[0]
    return moved.reshape(shape)


def divided(call: Call, x: Any, what: str, dimension: int, where: str, *, tiled: bool) -> Any:
    """Makes a dimension's parts, one for each member, the leading dimension.

    Args:
        call: whose group the parts are for.
        x: the array.
        what: the argument that says which dimension.
        dimension: that argument.
        where: which leaf `x` is.
        tiled: whether the parts are pieces of the dimension and not its single elements.
    """
    at = check_dimension(call.function, what, dimension, x.ndim)
    size, members = x.shape[at], call.group_size
    if size % members if tiled else size != members:
        needed = "a multiple of the" if tiled else "the"
        raise ValueError(
            f"{call.function}: dimension {at} of {where} has size {size}; with tiled={tiled} it "
            f"must be {needed} number of members, {members}"
        )
    return split(x, at, members, tiled=tiled)


def split(x: Any, dimension: int, members: int, *, tiled: bool) -> Any:
    """`divided`, of a dimension that is known to fit."""
    if tiled:
        shape = list(x.shape)
        shape[dimension : dimension + 1] = [members, shape[dimension] // members]
        x = x.reshape(shape)
    return jnp.moveaxis(x, dimension, 0)
