# SPDX-License-Identifier: Apache-2.0
"""Who talks to whom: from axis names and `axis_index_groups` to lists of mesh positions."""

import dataclasses
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, init=False)
class Group:
    """Devices that communicate from programs of their own.

    It stands where a collective takes an axis name. Each member runs a program of its own (a jitted
    function on one device, or a `jax.shard_map` over some), and these programs meet in their calls.

    >>> import jax, jax_dfccl
    >>> ends = jax_dfccl.Group([jax.devices()[0], jax.devices()[-1]], name="ends")
    >>> add = jax.jit(lambda x: jax_dfccl.all_reduce(x + 1, ends))
    >>> double = jax.jit(lambda x: jax_dfccl.all_reduce(2 * x, ends))
    >>> x, y = (jax.device_put(k, device) for k, device in zip((3.0, 4.0), ends.devices))
    >>> a, b = add(x), double(y)  # neither waits for the other
    >>> float(a), float(b)
    (12.0, 12.0)

    Calls meet by the name of the group, the `name=` of the call if it has one, and its `key=`:
    the n-th of these on one member is the n-th on every other. Groups are made locally, without
    communication, and are equal if their names and their devices, in order, are.

    Args:
        devices: the members, by rank; of any process.
        name: tells groups of the same devices apart.
    """

    name: str
    members: tuple[int, ...]  # global device ids
    _platform: str = dataclasses.field(compare=False, repr=False)

    def __init__(self, devices: Iterable[Any], *, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"Group: name is {name!r}; it must be a str that is not empty")
        listed = tuple(devices)
        if not listed or not all(isinstance(device, jax.Device) for device in listed):
            raise TypeError(f"Group: devices are {listed!r}; give at least one jax.Device")
        members = tuple(device.id for device in listed)
        if repeated := [member for member in members if members.count(member) > 1]:
            raise ValueError(f"Group: device {repeated[0]} is listed twice")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "_platform", listed[0].platform)

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.members)

    def rank(self) -> Any:
        """The rank of the device that runs the program in which this is called."""
        from jax_dfccl import _primitive  # which needs this module

        return _primitive.axis_index((self,))

    @property
    def devices(self) -> list[Any]:
        """The members, by rank."""
        by_id = {device.id: device for device in jax.devices(self._platform)}
        return [by_id[member] for member in self.members]


@dataclasses.dataclass(frozen=True, init=False)
class Ends(Group):
    """The two members of a message, of which only one is known: the other makes the call."""

    peer: int  # the rank in the group of the one that is known
    sends: bool  # whether the other one does

    def __init__(self, group: Group, peer: int, *, sends: bool) -> None:
        for name, value in (*vars(group).items(), ("peer", peer), ("sends", sends)):
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """The source, which is member 0, and the target."""
        return 2


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
