# SPDX-License-Identifier: Apache-2.0
"""The JAX primitive behind all_reduce: its type, differentiation and batching rules.

Operands are the array and, if the call has one, the key (an integer scalar). Parameters:

    op           one of OPS
    axes         names of the axes reduced over; none is repeated
    groups       axis_index_groups as tuples, or None
    name         "" for an unnamed call
    level        how often a named call has been differentiated (see `_derived`)
    priority     larger first
    timeout_us   0: the process default

Under check_vma a result without groups is the same on all members, so it no longer varies over
`axes`; a result with groups does. Without check_vma no type varies, and the rules follow
`lax.psum`: the transpose of a sum is a sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_dfccl import _compat
from jax_dfccl._groups import positions_in_groups

OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor")
LINEAR_OPS = ("sum", "mean")

all_reduce_p = Primitive("dfccl_all_reduce")
all_reduce_p.def_impl(functools.partial(_compat.apply_primitive, all_reduce_p))


def bind(x: Any, *key: Any, **params: Any) -> Any:
    """Binds the primitive, after casting `x` to vary over the mesh axes it is reduced over."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    varying = jax.typeof(x).manual_axis_type.varying
    missing = tuple(a for a in params["axes"] if a in manual and a not in varying)
    if missing:
        x = lax.pcast(x, missing, to="varying")  # nothing happens without check_vma
    return all_reduce_p.bind(x, *key, **params)


def group_size(axes: tuple[Any, ...], groups: Any) -> Any:
    """Members of this device's group: a Python int unless the groups differ in size."""
    if groups is None:
        return lax.axis_size(axes)
    sizes = {len(group) for group in groups}
    if len(sizes) == 1:
        return sizes.pop()
    return jnp.asarray(positions_in_groups(groups)[1])[lax.axis_index(axes)]


def _abstract_eval(x: Any, *key: Any, axes: Any, groups: Any, **_: Any) -> Any:
    del key
    kind = x.manual_axis_type
    if unreduced := (kind.unreduced | kind.reduced) & set(axes):
        raise ValueError(
            f"all_reduce: the operand is unreduced or reduced over {sorted(map(str, unreduced))}; "
            'cast it to varying first (jax.lax.pcast(..., to="varying") or jax.lax.psum)'
        )
    if groups is None:
        x = x.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))
    return x, {_compat.NamedAxisEffect(axis) for axis in axes}


all_reduce_p.def_effectful_abstract_eval(_abstract_eval)


# Differentiation ----------------------------------------------------------------------------------


def _derived(params: dict[str, Any], role: str, **changes: Any) -> dict[str, Any]:
    """Parameters of a call that differentiation adds beside (or instead of) a call.

    Members may run a call and its derivatives in different orders, so a named call's derivatives
    need names of their own, the same wherever that call is differentiated the same way. `level`
    keeps the derivatives of higher orders apart.
    """
    if params["name"]:
        changes["name"] = f"{params['name']}/{role}{params['level']}"
        changes["level"] = params["level"] + 1
    return {**params, **changes}


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x, *key), tangent = primals, tangents[0]
    level = params["level"] + 1 if params["name"] else 0
    y = bind(x, *key, **{**params, "level": level})
    if type(tangent) is ad.Zero:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    op = params["op"]
    if op in LINEAR_OPS:
        return y, bind(tangent, *key, **_derived(params, "tangent"))
    add = _derived(params, "tangent", op="sum")
    if op == "prod":
        return y, bind(tangent * _product_of_others(x, key, params), *key, **add)
    # Minimum and maximum: members that are tied share the derivative. NaN ties with NaN.
    tied = (x == y) | ((x != x) & (y != y))
    count = bind(tied.astype(np.int32), *key, **_derived(params, "ties", op="sum"))
    return y, bind(jnp.where(tied, tangent, 0), *key, **add) / count.astype(tangent.dtype)


def _product_of_others(x: Any, key: Any, params: dict[str, Any]) -> Any:
    """The product of the other members' elements: the derivative of a product.

    Gathers the factors (as a sum of arrays that are zero but for one member's slot) and multiplies
    them without division, so it is right beside zeros and can be differentiated again.
    """
    axes, groups = params["axes"], params["groups"]
    rank, size = lax.axis_index(axes), lax.axis_size(axes)
    slots = jnp.arange(size).reshape((size,) + (1,) * x.ndim)
    absent: Any = False
    if groups is not None:
        ranks, sizes = (jnp.asarray(table)[rank] for table in positions_in_groups(groups))
        slots = slots[: max(map(len, groups))]
        rank, absent = ranks, slots >= sizes
    own = slots == rank
    spread = jnp.where(own, x, 0)
    factors = bind(spread, *key, **_derived(params, "factors", op="sum"))
    factors = factors.astype(_accumulation_dtype(x.dtype))
    return jnp.where(own | absent, 1, factors).prod(axis=0).astype(x.dtype)


def _transpose(ct: Any, x: Any, *key: Any, **params: Any) -> Any:
    assert ad.is_undefined_primal(x) and params["op"] in LINEAR_OPS
    no_key_ct = [None] * len(key)
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval), *no_key_ct]
    # Over axes where the operand varies and the result does not, each member's operand reaches
    # the one result once. Over the others every member's result has the operand in it.
    axes = params["axes"]
    varying = x.aval.manual_axis_type.varying if params["groups"] is None else ()
    cast = tuple(axis for axis in axes if axis in varying)
    rest = tuple(axis for axis in axes if axis not in varying)
    if rest:
        ct = bind(ct, *key, **_derived(params, "transpose", axes=rest))
    if cast:
        ct = lax.pcast(ct, cast, to="varying")
        if params["op"] == "mean":
            ct = ct / lax.axis_size(cast)
    return [ct, *no_key_ct]


ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose


# Batching -----------------------------------------------------------------------------------------


def _batch(axis_data: Any, values: Any, dims: Any, **params: Any) -> Any:
    (x, *key), (dim, *key_dim) = values, dims
    axes, groups = params["axes"], params["groups"]
    reduced = axis_data.name in axes
    if key and key_dim[0] is not None:
        if reduced:
            raise ValueError(
                f"all_reduce: the key differs along the vmapped axis {axis_data.name!r}, over "
                "which the call reduces; the members of a call must have the same key"
            )
        return _one_call_per_key(x, dim, *key, **params), 0
    if not reduced:
        return bind(x, *key, **params), dim

    whole = (axis_data.size, *x.shape)
    x = jnp.broadcast_to(x, whole) if dim is None else jnp.moveaxis(x, dim, 0)
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if groups is None:
        x = _reduce_locally(x, params["op"])
        return (bind(x, *key, **{**params, "axes": rest}) if rest else x), None
    if rest:
        raise NotImplementedError(
            f"all_reduce: axis_index_groups over the vmapped axis {axis_data.name!r} together with "
            f"{rest}; reduce over one of them at a time, or do without groups"
        )
    group_of = np.zeros(axis_data.size, np.int32)
    for number, group in enumerate(groups):
        group_of[list(group)] = number
    results = [_reduce_locally(x[np.array(group)], params["op"]) for group in groups]
    return jnp.stack(results)[group_of], 0


def _one_call_per_key(x: Any, dim: int | None, keys: Any, **params: Any) -> Any:
    if dim is None:
        return lax.map(lambda key: bind(x, key, **params), keys)
    pairs = (jnp.moveaxis(x, dim, 0), keys)
    return lax.map(lambda pair: bind(*pair, **params), pairs)


def _reduce_locally(x: Any, op: str) -> Any:
    """Reduces the leading dimension as the collective would have reduced over members."""
    if x.dtype == np.bool_:
        op = {"min": "and", "max": "or"}.get(op, op)
    wide = x.astype(_accumulation_dtype(x.dtype))
    if op == "mean":
        result = lax.reduce_sum(wide, (0,)) / x.shape[0]
    else:
        result = getattr(lax, f"reduce_{op}")(wide, (0,))
    return result.astype(x.dtype)


batching.fancy_primitive_batchers[all_reduce_p] = _batch


def _accumulation_dtype(dtype: Any) -> Any:
    narrow = jnp.issubdtype(dtype, np.floating) and jax.dtypes.itemsize_bits(dtype) < 32
    return np.dtype(np.float32) if narrow else dtype
