# SPDX-License-Identifier: Apache-2.0
"""Differentiation of the collectives.

Movers, sums and means are linear: their tangents move as they do, and the transpose of each is a
collective too. For a product, minimum or maximum of the kinds that fold, the members' operands
(the factors) and tangents are gathered where the results are, and differentiated there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jax_dfccl import _local
from jax_dfccl._groups import Ends
from jax_dfccl._primitive import (
    KINDS,
    LINEAR_OPS,
    PRIMITIVES,
    RAGGED,
    START,
    WAIT,
    accumulation_dtype,
    bind,
    explicit,
    group_size,
    of_call,
    rank,
)


def derived(params: dict[str, Any], role: str, **changes: Any) -> dict[str, Any]:
    """Parameters of a call that differentiation adds beside (or instead of) a call.

    Members may run a call and its derivatives in different orders, so a named call's derivatives
    need names of their own, the same wherever that call is differentiated the same way. `level`
    keeps the derivatives of higher orders apart.
    """
    if params["name"]:
        changes["name"] = f"{params['name']}/{role}{params['level']}"
        changes["level"] = params["level"] + 1
    return {**params, **changes}


def _once_differentiated(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "level": params["level"] + 1 if params["name"] else 0}


def _common(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that every kind has."""
    own = ("op", "root", "pairs", "reverse")
    return {name: value for name, value in params.items() if name not in own}


def _refuse_message(axes: tuple[Any, ...]) -> None:
    """Of what is sent nobody here knows the derivative."""
    if isinstance(explicit(axes), Ends):
        raise NotImplementedError(
            "send: what is sent is differentiated, but its derivative is in another program; send "
            "jax.lax.stop_gradient of it and the slopes back by a message of their own "
            "(jax.custom_vjp), or use send_recv in one program"
        )


# Tangents -----------------------------------------------------------------------------------------


def _jvp(kind: str, primals: Any, tangents: Any, **params: Any) -> Any:
    _refuse_message(params["axes"])
    y = bind(kind, *primals, **_once_differentiated(params))
    return y, _tangent(kind, primals, tangents, y, params)


def _tangent(kind: str, primals: Any, tangents: Any, y: Any, params: dict[str, Any]) -> Any:
    """The tangent of a call that has given `y`."""
    if all(type(tangent) is ad.Zero for tangent in tangents[: 2 if kind == RAGGED else 1]):
        return ad.Zero(jax.typeof(y).to_tangent_aval())
    if kind == RAGGED:
        arrays = [ad.instantiate_zeros(tangent) for tangent in tangents[:2]]
        return bind(RAGGED, *arrays, *primals[2:], **derived(params, "tangent"))
    (x, *key), tangent = primals, tangents[0]
    if params.get("op", "sum") in LINEAR_OPS:
        return bind(kind, tangent, *key, **derived(params, "tangent"))
    if kind == "all_reduce":
        return _all_reduce_tangent(x, y, tangent, key, params)
    return _fold_tangent(kind, x, tangent, key, params)


def _start_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """A ticket has no tangent: that of the result is made at the wait."""
    del tangents
    _refuse_message(params["axes"])
    ticket = START.bind(*primals, **_once_differentiated(params))
    return ticket, ad.Zero(jax.typeof(ticket).to_tangent_aval())


def _wait_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    if params["origin"] == "mark":
        raise NotImplementedError(
            f"wait: the handle of {KINDS[params['kind']].shown} was started in another program (or "
            "branch or loop), so its derivative is not known here; start it and wait for it in one"
        )
    y = WAIT.bind(*primals, **_once_differentiated(params))
    return y, _tangent(params["kind"], primals[1:], tangents[1:], y, of_call(params))


def _all_reduce_tangent(x: Any, y: Any, tangent: Any, key: Any, params: dict[str, Any]) -> Any:
    add = derived(params, "tangent", op="sum")
    if params["op"] == "prod":
        return bind("all_reduce", tangent * _product_of_others(x, key, params), *key, **add)
    # Members that are tied share the derivative. NaN ties with NaN.
    tied = _equal(x, y)
    ties = derived(params, "ties", op="sum")
    count = bind("all_reduce", tied.astype(np.int32), *key, **ties).astype(tangent.dtype)
    return bind("all_reduce", jnp.where(tied, tangent, 0), *key, **add) / count


def _product_of_others(x: Any, key: Any, params: dict[str, Any]) -> Any:
    """The product of the other members' elements: the derivative of a product.

    Multiplies without division, so it is right beside zeros and can be differentiated again.
    """
    factors, absent = _everyones(x, key, params, "factors")
    factors = factors.astype(accumulation_dtype(x.dtype))
    own = _along(0, x.ndim, len(factors)) == rank(params["axes"], params["groups"])
    return jnp.where(own | absent, 1, factors).prod(axis=0).astype(x.dtype)


def _fold_tangent(kind: str, x: Any, tangent: Any, key: Any, params: dict[str, Any]) -> Any:
    """The tangent of a fold that is not linear and whose results may differ between members."""
    axes, groups = params["axes"], params["groups"]
    number = rank(axes, groups)
    if kind == "reduce_scatter":
        move = {**_common(params)}
        factors = bind("all_to_all", x, *key, **derived(move, "factors"))
        tangents = bind("all_to_all", tangent, *key, **derived(move, "tangent"))
        return _tangent_of_fold(params["op"], factors, tangents, absent=False)
    factors, absent = _everyones(x, key, params, "factors")
    tangents, _ = _everyones(tangent, key, params, "tangent")
    if kind == "reduce":
        result = _tangent_of_fold(params["op"], factors, tangents, absent)
        return jnp.where(number == params["root"], result, 0)
    distance = _along(0, x.ndim, len(factors)) - number
    if params["reverse"]:
        distance = -distance
    later = distance >= 0 if kind == "exscan" else distance > 0
    return _tangent_of_fold(params["op"], factors, tangents, absent | later)


def _tangent_of_fold(op: str, factors: Any, tangents: Any, absent: Any) -> Any:
    """The derivative of a product, minimum or maximum over the leading dimension."""
    present = ~jnp.asarray(absent)
    tangents = jnp.where(present, tangents, 0)
    factors = jnp.where(present, factors, _local.identity(op, factors.dtype))
    if op == "prod":
        wide = accumulation_dtype(factors.dtype)
        primals, duals = (factors.astype(wide),), (tangents.astype(wide),)
        return jax.jvp(lambda x: x.prod(axis=0), primals, duals)[1].astype(factors.dtype)
    tied = _equal(factors, _local.fold(factors, op)) & present
    count = jnp.maximum(tied.sum(0), 1).astype(tangents.dtype)
    return jnp.where(tied, tangents, 0).sum(0) / count


def _equal(x: Any, y: Any) -> Any:
    return (x == y) | ((x != x) & (y != y))


def _along(axis: int, others: int, size: int) -> Any:
    """0, 1, ... along an axis that stands before `others` dimensions."""
    return jnp.arange(size).reshape((size,) + (1,) * (others - axis))


def _everyones(x: Any, key: Any, params: dict[str, Any], role: str) -> tuple[Any, Any]:
    """The group's operands, by rank, and where there are none because the group is smaller."""
    axes, groups = params["axes"], params["groups"]
    size = group_size(axes, groups)
    call = derived(_common(params), role)
    if isinstance(size, int):
        return bind("all_gather", x, *key, **call), False
    # Sizes differ, shapes may not: a sum of arrays that are zero but for one member's slot.
    slots = _along(0, x.ndim, max(map(len, groups)))
    spread = jnp.where(slots == rank(axes, groups), x, 0)
    return bind("all_reduce", spread, *key, **call, op="sum"), slots >= size


# Transposes ---------------------------------------------------------------------------------------


def _transpose_all_reduce(ct: Any, x: Any, *key: Any, **params: Any) -> Any:
    # Over axes where the operand varies and the result does not, each member's operand reaches
    # the one result once. Over the others every member's result has the operand in it.
    axes = params["axes"]
    varying = x.aval.manual_axis_type.varying if params["groups"] is None else ()
    cast = tuple(axis for axis in axes if axis in varying)
    rest = tuple(axis for axis in axes if axis not in varying)
    if rest:
        ct = bind("all_reduce", ct, *key, **derived(params, "transpose", axes=rest))
    if cast:
        ct = lax.pcast(ct, cast, to="varying")
        if params["op"] == "mean":
            ct = ct / lax.axis_size(cast)
    return ct


def _inverse(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(((target, source) for source, target in pairs), key=lambda p: p[1]))


# The kind whose matrix is the transpose of this one's, and how its parameters follow.
_TRANSPOSES: dict[str, tuple[str, Any]] = {
    "all_gather": ("reduce_scatter", lambda params: {"op": "sum"}),
    "reduce_scatter": ("all_gather", lambda params: {}),
    "all_to_all": ("all_to_all", lambda params: {}),
    "permute": ("permute", lambda params: {"pairs": _inverse(params["pairs"])}),
    "broadcast": ("reduce", lambda params: {"op": "sum", "root": params["root"]}),
    "reduce": ("broadcast", lambda params: {"root": params["root"]}),
    "gather": ("scatter", lambda params: {"root": params["root"]}),
    "scatter": ("gather", lambda params: {"root": params["root"]}),
    "scan": ("scan", lambda params: {"op": "sum", "reverse": not params["reverse"]}),
    "exscan": ("exscan", lambda params: {"op": "sum", "reverse": not params["reverse"]}),
}


def _transpose(kind: str, ct: Any, x: Any, *key: Any, **params: Any) -> Any:
    assert ad.is_undefined_primal(x) and params.get("op", "sum") in LINEAR_OPS
    no_key_ct = [None] * len(key)
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval), *no_key_ct]
    if kind == "all_reduce":
        return [_transpose_all_reduce(ct, x, *key, **params), *no_key_ct]
    other, own = _TRANSPOSES[kind]
    result = bind(other, ct, *key, **derived(_common(params), "transpose"), **own(params))
    if params.get("op") == "mean":
        result = result / jnp.asarray(group_size(params["axes"], params["groups"]), result.dtype)
    return [result, *no_key_ct]


def _ragged_transpose(ct: Any, x: Any, output: Any, *rest: Any, **params: Any) -> Any:
    """Cotangents go back the way that rows came; rows that nobody wrote keep theirs.

    Rows may have been sent to several members, so what comes back is added up: each member's share
    goes to a place of its own first.
    """
    input_offsets, send_sizes, output_offsets, recv_sizes, *key = rest
    none = [None] * len(rest)
    if type(ct) is ad.Zero:
        return [ad.Zero(p.aval) if ad.is_undefined_primal(p) else None for p in (x, output)] + none
    members, common = len(send_sizes), _common(params)

    def exchanged(sizes: Any, role: str) -> Any:
        return bind("all_to_all", sizes, *key, **derived(common, role))

    placed = exchanged(output_offsets, "placed")  # where member p wrote to this one's result
    x_ct = output_ct = None
    if ad.is_undefined_primal(x):
        rows = x.aval.shape[0]
        number = rank(params["axes"], params["groups"]).astype(input_offsets.dtype)
        targets = exchanged(input_offsets, "taken") + number * rows
        shares = jnp.zeros((members * rows, *x.aval.shape[1:]), ct.dtype)
        back = derived(params, "transpose")
        shares = bind(RAGGED, ct, shares, placed, recv_sizes, targets, send_sizes, *key, **back)
        x_ct = shares.reshape(members, rows, *x.aval.shape[1:]).sum(0)
    if ad.is_undefined_primal(output):
        row = jnp.arange(ct.shape[0])[:, None]
        written = ((row >= placed) & (row < placed + recv_sizes)).any(1)
        output_ct = jnp.where(written.reshape(-1, *(1,) * (ct.ndim - 1)), 0, ct)
    return [x_ct, output_ct, *none]


for _kind, _primitive in PRIMITIVES.items():
    if _kind != "barrier":
        _rule = _ragged_transpose if _kind == RAGGED else functools.partial(_transpose, _kind)
        ad.primitive_jvps[_primitive] = functools.partial(_jvp, _kind)
        ad.primitive_transposes[_primitive] = _rule
ad.primitive_jvps[START] = _start_jvp
ad.primitive_jvps[WAIT] = _wait_jvp
