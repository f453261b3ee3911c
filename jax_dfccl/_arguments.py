# SPDX-License-Identifier: Apache-2.0
"""What every public function checks, and how it goes over pytrees; messages name the function."""

import contextlib
import dataclasses
import math
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dfccl import _batching as _batching  # registers rules, as the next but one does
from jax_dfccl import _compat, _primitive
from jax_dfccl import _derivatives as _derivatives
from jax_dfccl._groups import Group, Groups, check_axis_index_groups
from jax_dfccl._lowering import check_all_axes_manual

# JAX names the innermost frame that is not its own as an operation's source; these are not the
# user's either.
for _module in Path(__file__).parent.glob("*.py"):
    if _module.name != "_demo.py":
        _compat.hide_from_source_lines(str(_module))

_INT32 = np.iinfo(np.int32)

AxisName = Hashable | Sequence[Hashable] | Group


class Options(TypedDict, total=False):
    """What every collective takes besides its own arguments; `all_reduce` explains each."""

    axis_index_groups: Sequence[Sequence[int]] | None
    name: str | None
    key: Any
    priority: int
    timeout: float | None


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments that every function has, checked."""

    function: str
    axes: tuple[Any, ...]
    size: int  # of all axes together
    groups: Groups | None
    name: str  # "": unnamed
    key: tuple[Any, ...]  # none or one
    priority: int
    timeout_us: int

    def bind(self, kind: str, *arrays: Any, **params: Any) -> Any:
        """Binds a primitive with these arguments and those of its kind."""
        return _primitive.bind(
            kind,
            *arrays,
            *self.key,
            axes=self.axes,
            groups=self.groups,
            name=self.name,
            level=0,
            priority=self.priority,
            timeout_us=self.timeout_us,
            **params,
        )

    def derived(self, role: str) -> "Call":
        """For a second call inside one function."""
        return dataclasses.replace(self, name=f"{self.name}/{role}") if self.name else self

    @property
    def rank(self) -> Any:
        """This member's index in its group."""
        return _primitive.rank(self.axes, self.groups) if self.axes else np.int32(0)

    @property
    def is_uniform(self) -> bool:
        """Whether all groups have the same number of members."""
        return self.groups is None or len(set(map(len, self.groups))) == 1

    @property
    def members(self) -> Any:
        """How many there are in this member's group: an array if groups differ in size."""
        return _primitive.group_size(self.axes, self.groups) if self.axes else 1

    @property
    def smallest_group(self) -> int:
        """The least number of members of a group."""
        return self.size if self.groups is None else min(map(len, self.groups))

    @property
    def group_size(self) -> int:
        """The number of members, where the shape of the result depends on it."""
        if not self.is_uniform:
            raise ValueError(
                f"{self.function}: axis_index_groups has groups of different sizes; they must be "
                "of one size, for the shape of an array depends on it"
            )
        return self.smallest_group

    def map(
        self,
        x: Any,
        f: Callable[["Call", Any, str], Any],
        *,
        what: str = "x",
        of_int: Callable[[int], Any] | None = None,
    ) -> Any:
        """`f(call, array, path)` for the leaves of a pytree, whose calls get names of their own.

        Python ints of unnamed calls are given to `of_int` instead.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(x)
        results = []
        for path, leaf in leaves:
            if of_int is not None and type(leaf) is int and not self.name:
                results.append(of_int(leaf))
                continue
            where = jax.tree_util.keystr(path)
            call = self
            if self.name and len(leaves) > 1:
                call = dataclasses.replace(self, name=self.name + where)
            results.append(f(call, as_array(self.function, leaf, what + where), what + where))
        return jax.tree_util.tree_unflatten(tree, results)


class _Defaults(threading.local):
    """What calls of this thread take for options that they are not given (see `options_for`)."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.named = 0  # how many calls have taken the name
        self.key: Any = None
        self.priority = 0
        self.timeout: float | None = None


_defaults = _Defaults()


@contextlib.contextmanager
def options_for(*, name: str | None, key: Any, priority: int, timeout: float | None) -> Any:
    """Gives options to the calls in a `with` block that have none of their own.

    The first unnamed call takes the name, further ones the name with a number.
    """
    outer = dict(vars(_defaults))
    vars(_defaults).update(name=name, named=0, key=key, priority=priority, timeout=timeout)
    try:
        yield
    finally:
        vars(_defaults).update(outer)


def _with_defaults(name: Any, key: Any, priority: Any, timeout: Any) -> tuple[Any, ...]:
    if name is None and _defaults.name is not None:
        name, key = _defaults.name, _defaults.key if key is None else key
        if _defaults.named:
            name = f"{name}/{_defaults.named}"
        _defaults.named += 1
    if timeout is None:
        timeout = _defaults.timeout
    if type(priority) is int and priority == 0:
        priority = _defaults.priority
    return name, key, priority, timeout


def check(
    function: str,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    name: Any = None,
    key: Any = None,
    priority: Any = 0,
    timeout: Any = None,
) -> Call:
    """Checks what all functions have in common. An empty tuple of axes makes a call of size 1."""
    axes = _check_axes(function, axis_name)
    name, key, priority, timeout = _with_defaults(name, key, priority, timeout)
    checked = {
        "priority": _check_priority(function, priority),
        "timeout_us": _check_timeout(function, timeout),
        "name": _check_name(function, name),
    }
    group = _primitive.explicit(axes)
    if group is not None:
        checked["name"] = f"{group.name}/{checked['name']}" if checked["name"] else group.name
    if key is not None and not checked["name"]:
        raise ValueError(
            f"{function}: key is given without name; a key tells calls of one name apart, so give "
            "both or neither"
        )
    checked["key"] = () if key is None else (_check_key(function, key),)
    size, groups = 1, None
    if axes:
        size = _axis_size(function, axes)
        if axis_index_groups is not None:
            groups = check_axis_index_groups(function, axis_index_groups, size)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes and (group is not None or set(axes) & set(mesh.manual_axes)):
            check_all_axes_manual(function, mesh, mesh.manual_axes)
    return Call(function, axes, size, groups, **checked)


def as_array(function: str, leaf: Any, where: str) -> Any:
    """A leaf as an array that can be sent."""
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"{function}: {where} is a {type(leaf).__name__}; it must be an array, a scalar, or a "
            "pytree of them"
        ) from error
    dtype = array.dtype
    number = jnp.issubdtype(dtype, np.number) and dtype != jax.dtypes.float0
    if not (dtype == np.bool_ or number):
        raise TypeError(
            f"{function}: {where} has dtype {dtype}; bool, integers, floats and complex can be sent"
        )
    return array


def check_dimension(function: str, what: str, dimension: Any, ndim: int) -> int:
    """A dimension of an array, counted from the front."""
    try:
        checked = operator.index(dimension)
    except TypeError:
        raise TypeError(f"{function}: {what} is {dimension!r}; it must be an int") from None
    if not -ndim <= checked < ndim:
        raise ValueError(
            f"{function}: {what} is {checked}, but there are {ndim} dimensions to choose from"
        )
    return checked % ndim


def check_member(function: str, what: str, index: Any, size: int) -> int:
    """A member's index in its group, counted from the front."""
    try:
        checked = operator.index(index)
    except TypeError:  # also a tracer's: it has no value yet
        raise TypeError(f"{function}: {what} is {index!r}; it must be a Python int") from None
    if not -size <= checked < size:
        raise ValueError(
            f"{function}: {what} is {checked}, but the group has only {size} members, 0 to "
            f"{size - 1}"
        )
    return checked % size


def _check_axes(function: str, axis_name: Any) -> tuple[Any, ...]:
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        if isinstance(axis, int) or axis is None:
            raise TypeError(
                f"{function}: axis_name has {axis!r}; it must name mesh or vmap axes (for "
                "dimensions of the array itself use jax.numpy)"
            )
        if isinstance(axis, Group) and len(axes) > 1:
            raise TypeError(f"{function}: axis_name has {axis!r} beside others; give it alone")
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: axis_name {axis_name!r} repeats an axis; name each once")
    return axes


def _axis_size(function: str, axes: tuple[Any, ...]) -> int:
    for axis in () if _primitive.explicit(axes) else axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise NameError(
                f"{function}: no axis is named {axis!r} here; the call must be in a function under "
                "jax.shard_map over a mesh with that axis (or jax.vmap with that axis_name); "
                "outside, use jax.shard_map"
            ) from None
    return _primitive.axis_size(axes)


def _check_name(function: str, name: Any) -> str:
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"{function}: name is {name!r}; it must be a str or None")
    if not name:
        raise ValueError(f"{function}: name is empty; leave it out for an unnamed call")
    return name


def _check_priority(function: str, priority: Any) -> int:
    try:
        if isinstance(priority, (bool, np.bool_)):
            raise TypeError
        checked = operator.index(priority)
    except TypeError:  # also a tracer's: it has no value yet
        raise TypeError(f"{function}: priority is {priority!r}; it must be a Python int") from None
    if not _INT32.min <= checked <= _INT32.max:
        raise ValueError(f"{function}: priority {checked} does not fit in 32 bits")
    return checked


def _check_timeout(function: str, timeout: Any) -> int:
    """Microseconds; 0 stands for the process's default."""
    if timeout is None:
        return 0
    expected = "it must be a positive, finite number of seconds, or None"
    if isinstance(timeout, (bool, str)):
        raise TypeError(f"{function}: timeout is {timeout!r}; {expected}")
    try:
        seconds = float(timeout)
    except TypeError:
        raise TypeError(f"{function}: timeout is {timeout!r}; {expected}") from None
    if not 0 < seconds <= 1e9 or math.isnan(seconds):
        raise ValueError(f"{function}: timeout is {timeout!r}; {expected}")
    return max(1, round(seconds * 1e6))


def _check_key(function: str, key: Any) -> Any:
    """The key as an int32 or int64 scalar."""
    expected = "it must be an integer: a Python int or a scalar integer array"
    if isinstance(key, (bool, float, complex, str)):
        raise TypeError(f"{function}: key is {key!r}; {expected}")
    if isinstance(key, int):
        if _INT32.min <= key <= _INT32.max:
            return jnp.int32(key)
        return _int64_key(function, key, -(2**63) <= key < 2**63)
    try:
        array = jnp.asarray(key)
    except TypeError:
        raise TypeError(f"{function}: key is {key!r}; {expected}") from None
    if not jnp.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{function}: key has dtype {array.dtype}; {expected}")
    if array.ndim:
        raise TypeError(f"{function}: key has shape {array.shape}; {expected}")
    if array.dtype in (np.int32, np.int64):
        return array
    if np.iinfo(np.int32).max >= jnp.iinfo(array.dtype).max:
        return array.astype(np.int32)
    return _int64_key(function, array, array.dtype == np.uint32)


def _int64_key(function: str, key: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError(f"{function}: key {key!r} does not fit in a signed 64-bit integer")
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise ValueError(
            f"{function}: key {key!r} needs 64 bits; switch them on with "
            'jax.config.update("jax_enable_x64", True), or use a key that fits in int32'
        )
    return jnp.asarray(key, np.int64)
