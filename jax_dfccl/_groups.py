# SPDX-License-Identifier: Apache-2.0
"""Who talks to whom: from axis names and `axis_index_groups` to lists of mesh positions."""

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def check_axis_index_groups(function: str, groups: Any, size: int) -> Groups:
    """Returns `groups` as tuples, or says what is wrong with them.

    Args:
        function: the public function that messages name.
        groups: lists of indices along the (flattened) axis; their sizes may differ.
        size: the number of indices; each must be in exactly one group.
    """
    expected = f"it must be a list of lists that hold each index from 0 to {size - 1} exactly once"
    try:
        checked = tuple(tuple(operator.index(i) for i in group) for group in groups)
    except TypeError:
        raise TypeError(f"{function}: axis_index_groups is {groups!r}; {expected}") from None
    seen: set[int] = set()
    for group in checked:
        if not group:
            raise ValueError(f"{function}: axis_index_groups has an empty group; {expected}")
        for index in group:
            if not 0 <= index < size:
                raise ValueError(
                    f"{function}: axis_index_groups names index {index}, but the axis has "
                    f"{size} indices; {expected}"
                )
            if index in seen:
                raise ValueError(
                    f"{function}: axis_index_groups names index {index} twice; {expected}"
                )
            seen.add(index)
    if missing := sorted(set(range(size)) - seen):
        raise ValueError(
            f"{function}: axis_index_groups leaves out {_enumerate(missing)}; {expected}"
        )
    return checked


def replica_groups(
    mesh_shape: Mapping[Any, int], axes: Sequence[Hashable], axis_index_groups: Groups | None
) -> Groups:
    """All groups of a collective over `axes`, as positions in the mesh's flat device order.

    The members of a group are in rank order: row-major over `axes` as given, or as
    `axis_index_groups` lists them.
    """
    names = list(mesh_shape)
    positions = np.arange(int(np.prod(list(mesh_shape.values())))).reshape(
        tuple(mesh_shape.values())
    )
    front = [names.index(axis) for axis in axes]
    size = int(np.prod([mesh_shape[axis] for axis in axes]))
    rows = np.moveaxis(positions, front, range(len(front))).reshape(size, -1).T.tolist()
    if axis_index_groups is None:
        return tuple(map(tuple, rows))
    return tuple(tuple(row[i] for i in group) for row in rows for group in axis_index_groups)


def positions_in_groups(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """Per index of the axis: its rank in its group, and the size of that group."""
    total = sum(map(len, groups))
    rank, size = np.zeros(total, np.int32), np.zeros(total, np.int32)
    for group in groups:
        rank[list(group)] = np.arange(len(group))
        size[list(group)] = len(group)
    return rank, size


def _enumerate(indices: list[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, indices[:limit]))
    noun = "index" if len(indices) == 1 else "indices"
    return f"{noun} {shown}" + (", ..." if len(indices) > limit else "")
