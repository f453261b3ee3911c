# SPDX-License-Identifier: Apache-2.0
"""The public function `all_reduce`: its documentation, and everything that is checked in it."""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dfccl import _compat
from jax_dfccl._groups import Groups, check_axis_index_groups
from jax_dfccl._lowering import check_all_axes_manual
from jax_dfccl._primitive import OPS, bind, group_size

# JAX names the innermost frame that is not its own as an operation's source; these are not the
# user's either.
for _module in ("_all_reduce.py", "_primitive.py"):
    _compat.hide_from_source_lines(__file__.replace("_all_reduce.py", _module))

_INT32 = np.iinfo(np.int32)


def all_reduce(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    *,
    op: str = "sum",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    name: str | None = None,
    key: Any = None,
    priority: int = 0,
    timeout: float | None = None,
) -> Any:
    """Reduces arrays over the members of a mesh axis; every member gets the result.

    Computes what `jax.lax.psum`, `pmean`, `pmax` and `pmin` compute, in code under
    `jax.shard_map` (with `check_vma` on or off, jitted or not), but independent calls may be
    reached in any order on any device.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def center(x):
    ...     return x - jax_dfccl.all_reduce(x, "i", op="mean")
    >>> x = np.arange(jax.device_count(), dtype=np.float32)
    >>> y = jax.jit(jax.shard_map(center, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(x)
    >>> np.testing.assert_array_equal(y, x - x.mean())

    **Order and names.** A call is matched with the same call on the other members: the same place
    in the same program, in the same launch. Calls in different branches of `lax.cond` or
    `lax.switch`, and calls in different programs, are different places: if they are to meet, give
    them the same `name`. Calls that share a name and a key on one member are matched in the order
    in which that member runs them, so give different names or keys to calls of one member that
    may run in either order. Members that disagree about op, dtype, size or group get an error
    that names both sides, and so does a call that a member never makes, after `timeout`.

    **Order of summation.** Elements are combined left to right by rank in the group (row-major
    over `axis_name`, or as `axis_index_groups` lists them); 16- and 8-bit floats accumulate in
    float32 and are rounded once. The result is bit-identical on all members and from run to run.
    Axes of `jax.vmap` are reduced first, locally, in XLA's order.

    **Differentiation.** As `jax.lax.psum` where that is defined. Members that are tied for a
    minimum or maximum share its derivative equally. A product's derivative is exact beside zeros
    too and can be taken again; it gathers the members' operands. The calls that differentiation
    adds to a named call get names derived from its name. Sums that JAX itself adds stay
    `lax.psum`, whose order matters: for casts to varying under `check_vma`, and for arguments of
    the shard_map that are not split.

    Args:
        x: an array, a scalar, or a pytree of them, of any shape (also empty), the same on all
            members. bool; integers of 2 to 64 bits; floats of 4 to 64 bits; complex. A Python int
            without `name` is reduced while tracing, to a Python number, so
            `all_reduce(1, axis_name)` is the number of members.
        axis_name: the mesh axis or `jax.vmap` axis to reduce over, or a tuple of them. An empty
            tuple returns `x`.
        op: "sum", "mean", "prod", "min", "max", or (integers and bool) "and", "or", "xor".
            As `lax.psum` does, bool is summed (averaged, multiplied) as int32, and the mean of
            integers is a float. Minimum and maximum are not defined for complex numbers; NaN wins.
        axis_index_groups: splits the axis: a list of lists that hold every index along `axis_name`
            once. Sizes may differ. The result then varies along the axis under `check_vma`.
        name: identifies the call in any program. Leaves of a pytree with several leaves get their
            path appended.
        key: an integer (Python int or scalar array of at most 64 bits) that is part of a named
            call's identity at run time, such as a step or an expert's number. Equal on all
            members of one call.
        priority: calls with a larger one go first.
        timeout: seconds a member waits for the others; JAX_DFCCL_TIMEOUT (default 600) if None.

    Returns:
        Like `x`. Under `check_vma` it does not vary over `axis_name` (see `axis_index_groups`).

    Raises:
        NameError: the axis is not bound: the call is not under `jax.shard_map` or `jax.vmap`.
        TypeError, ValueError: an argument is wrong; the message says what is accepted.
        NotImplementedError: the enclosing `jax.shard_map` leaves mesh axes to the compiler, or the
            devices are not CPU devices.
        jax.errors.JaxRuntimeError: at run time, on every member: mismatch, absent member, cycle.
    """
    if op not in OPS:
        raise ValueError(f"all_reduce: op is {op!r}; it must be one of {', '.join(OPS)}")
    axes = _check_axes(axis_name)
    params = {
        "op": op,
        "axes": axes,
        "level": 0,
        "priority": _check_priority(priority),
        "timeout_us": _check_timeout(timeout),
    }
    name = _check_name(name)
    if key is not None and not name:
        raise ValueError(
            "all_reduce: key is given without name; a key tells calls of one name apart, so give "
            "both or neither"
        )
    operands = () if key is None else (_check_key(key),)
    if not axes:
        return x
    size = _axis_size(axes)
    groups = None
    if axis_index_groups is not None:
        groups = check_axis_index_groups(axis_index_groups, size)
    mesh = jax.sharding.get_abstract_mesh()
    if set(axes) & set(mesh.manual_axes):
        check_all_axes_manual(mesh, mesh.manual_axes)

    leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    results = []
    for path, leaf in leaves:
        where = jax.tree_util.keystr(path)
        if type(leaf) is int and not name and _equal_sizes(groups):
            results.append(_reduce_equal_ints(leaf, op, len(groups[0]) if groups else size))
            continue
        leaf_name = name + where if name and len(leaves) > 1 else name
        array = _as_array(leaf, where)
        _check_dtype(array.dtype, op, where)
        results.append(_reduce(array, operands, groups=groups, name=leaf_name, **params))
    return jax.tree_util.tree_unflatten(tree, results)


def _reduce(x: Any, key: tuple[Any, ...], **params: Any) -> Any:
    """One leaf: chooses the type that is reduced in, and comes back from it."""
    op, dtype = params["op"], x.dtype
    if dtype == np.bool_ and op in ("sum", "mean", "prod"):
        x, dtype = x.astype(np.int32), np.dtype(np.int32)
    integer_mean = op == "mean" and jnp.issubdtype(dtype, np.integer)
    if integer_mean and jax.dtypes.itemsize_bits(dtype) < 8:
        # The sum would wrap around already for two members.
        x, dtype = x.astype(np.int32), np.dtype(np.int32)
    if integer_mean:
        params["op"] = "sum"
    result = bind(x.astype(_stored_dtype(dtype)), *key, **params).astype(dtype)
    if integer_mean:
        result = result / group_size(params["axes"], params["groups"])
    return result


def _stored_dtype(dtype: Any) -> Any:
    """Types below 8 bits go as 8-bit integers (exact modulo their range) or float32."""
    if jax.dtypes.itemsize_bits(dtype) >= 8 or dtype == np.bool_:
        return dtype
    if jnp.issubdtype(dtype, np.floating):
        return np.dtype(np.float32)
    return np.dtype(np.uint8 if jnp.issubdtype(dtype, np.unsignedinteger) else np.int8)


def _reduce_equal_ints(value: int, op: str, size: int) -> int | float:
    if op == "sum":
        return value * size
    if op == "mean":
        return value / 1
    if op == "prod":
        return value**size
    if op == "xor":
        return value if size % 2 else 0
    return value


def _equal_sizes(groups: Groups | None) -> bool:
    return groups is None or len({len(group) for group in groups}) == 1


def _as_array(leaf: Any, where: str) -> Any:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"all_reduce: x{where} is a {type(leaf).__name__}; arrays, scalars and pytrees of them "
            "can be reduced"
        ) from error


def _check_dtype(dtype: Any, op: str, where: str) -> None:
    is_a = jnp.issubdtype
    if not (dtype == np.bool_ or (is_a(dtype, np.number) and dtype != jax.dtypes.float0)):
        raise TypeError(
            f"all_reduce: x{where} has dtype {dtype}; bool, integers, floats and complex can be "
            "reduced"
        )
    if op in ("min", "max") and is_a(dtype, np.complexfloating):
        raise TypeError(
            f"all_reduce: op {op!r} is not defined for complex numbers (x{where} has dtype "
            f"{dtype}); reduce abs(), or real and imaginary parts"
        )
    if op in ("and", "or", "xor") and not (dtype == np.bool_ or is_a(dtype, np.integer)):
        raise TypeError(
            f"all_reduce: op {op!r} is for bool and integers (x{where} has dtype {dtype})"
        )


def _check_axes(axis_name: Any) -> tuple[Any, ...]:
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        if isinstance(axis, int) or axis is None:
            raise TypeError(
                f"all_reduce: axis_name has {axis!r}; it must name mesh or vmap axes (reduce "
                "dimensions of the array itself with jax.numpy)"
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"all_reduce: axis_name {axis_name!r} repeats an axis; name each once")
    return axes


def _axis_size(axes: tuple[Any, ...]) -> int:
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise NameError(
                f"all_reduce: no axis is named {axis!r} here; the call must be in a function under "
                "jax.shard_map over a mesh with that axis (or jax.vmap with that axis_name); "
                "outside, use jax.shard_map"
            ) from None
    return lax.axis_size(axes)


def _check_name(name: Any) -> str:
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"all_reduce: name is {name!r}; it must be a str or None")
    if not name:
        raise ValueError("all_reduce: name is empty; leave it out for an unnamed call")
    return name


def _check_priority(priority: Any) -> int:
    try:
        if isinstance(priority, (bool, np.bool_)):
            raise TypeError
        checked = operator.index(priority)
    except TypeError:  # also a tracer's: it has no value yet
        raise TypeError(f"all_reduce: priority is {priority!r}; it must be a Python int") from None
    if not _INT32.min <= checked <= _INT32.max:
        raise ValueError(f"all_reduce: priority {checked} does not fit in 32 bits")
    return checked


def _check_timeout(timeout: Any) -> int:
    """Microseconds; 0 stands for the process's default."""
    if timeout is None:
        return 0
    expected = "it must be a positive, finite number of seconds, or None"
    if isinstance(timeout, (bool, str)):
        raise TypeError(f"all_reduce: timeout is {timeout!r}; {expected}")
    try:
        seconds = float(timeout)
    except TypeError:
        raise TypeError(f"all_reduce: timeout is {timeout!r}; {expected}") from None
    if not 0 < seconds <= 1e9 or math.isnan(seconds):
        raise ValueError(f"all_reduce: timeout is {timeout!r}; {expected}")
    return max(1, round(seconds * 1e6))


def _check_key(key: Any) -> Any:
    """The key as an int32 or int64 scalar."""
    expected = "it must be an integer: a Python int or a scalar integer array"
    if isinstance(key, (bool, float, complex, str)):
        raise TypeError(f"all_reduce: key is {key!r}; {expected}")
    if isinstance(key, int):
        if _INT32.min <= key <= _INT32.max:
            return jnp.int32(key)
        return _int64_key(key, -(2**63) <= key < 2**63)
    try:
        array = jnp.asarray(key)
    except TypeError:
        raise TypeError(f"all_reduce: key is {key!r}; {expected}") from None
    if not jnp.issubdtype(array.dtype, np.integer):
        raise TypeError(f"all_reduce: key has dtype {array.dtype}; {expected}")
    if array.ndim:
        raise TypeError(f"all_reduce: key has shape {array.shape}; {expected}")
    if array.dtype in (np.int32, np.int64):
        return array
    if np.iinfo(np.int32).max >= jnp.iinfo(array.dtype).max:
        return array.astype(np.int32)
    return _int64_key(array, array.dtype == np.uint32)


def _int64_key(key: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError(f"all_reduce: key {key!r} does not fit in a signed 64-bit integer")
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise ValueError(
            f"all_reduce: key {key!r} needs 64 bits; switch them on with "
            'jax.config.update("jax_enable_x64", True), or use a key that fits in int32'
        )
    return jnp.asarray(key, np.int64)
