# SPDX-License-Identifier: Apache-2.0
"""`override_lax`: programs written with `jax.lax`'s collectives run on the daemon, unchanged.

The primitives of `jax.lax` stay; what changes is how they are lowered on CPU, to the custom calls
of `_lowering.py`. So this covers the collectives that autodiff and batching make, too. The lowering
rules are put in place once, and each asks at every use whether the override is on.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from jax_dfccl import _compat, _config
from jax_dfccl._groups import Groups, replica_groups
from jax_dfccl._lowering import PLATFORMS, emit
from jax_dfccl._parts import joined, split
from jax_dfccl._primitive import KINDS, RAGGED
from jax_dfccl._reductions import reducible, storable

# Part of the key of every cache of JAX's between a function and its executable.
_enabled = jax.make_user_context(_config.overrides_lax())

_lock = threading.Lock()
_replaced: collections.Counter[str] = collections.Counter()
_kept: collections.Counter[str] = collections.Counter()


class _Active(threading.local):
    """The `override_lax` blocks that this thread is in."""

    def __init__(self) -> None:
        self.blocks: list[override_lax] = []


class override_lax:
    """Lets collectives of `jax.lax` run on the daemon inside a `with` block.

    >>> import jax, jax_dfccl
    >>> with jax_dfccl.override_lax() as override:
    ...     y = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jax.numpy.arange(8.0))
    >>> override.counts
    {'psum': 1}

    Programs that are lowered by the block's thread inside the block are changed, without any
    change to their source: a jitted function that was called before is lowered again, and is
    itself again after the block. A program that was lowered ahead of time (`.lower()`) stays what
    it is. `JAX_DFCCL_OVERRIDE_LAX=1` in the environment does it for the process.

    Calls have no name: see the documentation (docs/lax.md) about branches, and about what is
    covered. What is not is left as it was, and counted in `kept`.

    Args:
        enabled: False leaves JAX's own collectives in place inside the block.
    """

    def __init__(self, enabled: bool = True):
        if not isinstance(enabled, bool):
            raise TypeError(f"override_lax: enabled is {enabled!r}; it must be True or False")
        self._enabled = enabled
        self._contexts: list[Any] = []  # a block may be entered again inside itself
        self._replaced: collections.Counter[str] = collections.Counter()
        self._kept: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> "override_lax":
        if self._enabled:
            with _lock:
                _install()
        self._contexts.append(_enabled(self._enabled))
        self._contexts[-1].__enter__()
        _active.blocks.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.blocks.pop()
        self._contexts.pop().__exit__(*exception)

    @property
    def counts(self) -> dict[str, int]:
        """Operations that were replaced, by the name of their primitive, in programs lowered here.

        A program that JAX finds in its caches is not lowered, and so not counted again.
        """
        with _lock:
            return dict(self._replaced)

    @property
    def kept(self) -> dict[str, int]:
        """Operations that were not replaced: "primitive: reason" -> how many."""
        with _lock:
            return dict(self._kept)


_active = _Active()


def totals() -> dict[str, dict[str, int]]:
    """What was replaced and kept so far in this process, in all programs with the override on."""
    with _lock:
        return {"replaced": dict(_replaced), "kept": dict(_kept)}


def _count_replaced(primitive: str) -> None:
    with _lock:
        for counter in (_replaced, *(block._replaced for block in set(_active.blocks))):
            counter[primitive] += 1


def _count_kept(primitive: str, reason: object) -> None:
    with _lock:
        for counter in (_kept, *(block._kept for block in set(_active.blocks))):
            counter[f"{primitive}: {reason}"] += 1


# How each primitive becomes a collective ---------------------------------------------------------


class _Keep(Exception):
    """Why an operation stays with its own lowering rule."""


def _same(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class _Collective:
    """A collective of the core, and the local operations before and after it.

    In between, parts of members are along a leading dimension.
    """

    kind: str
    members: Groups
    op: str = ""
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    before: Callable[[Any], Any] = _same
    after: Callable[[Any], Any] = _same

    def received(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result in between."""
        kind = KINDS[self.kind]
        one = sent[1:] if kind.takes_parts else sent
        return (len(self.members[0]), *one) if kind.gives_parts else one


def _all_reduce(
    op: str, mesh: Any, aval: Any, *, axes: Any, axis_index_groups: Any = None
) -> _Collective:
    if op != "sum" and jnp.issubdtype(aval.dtype, np.complexfloating):
        raise _Keep("minimum and maximum of complex numbers")
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    members = _members(mesh, named, axis_index_groups)
    dimensions = tuple(axis for axis in axes if isinstance(axis, int))
    if not dimensions:
        return _Collective("all_reduce", members, op)
    reduce = getattr(jax.lax, f"reduce_{op}")
    return _Collective("all_reduce", members, op, before=lambda x: reduce(x, dimensions))


def _all_gather(
    mesh: Any,
    aval: Any,
    *,
    all_gather_dimension: int,
    axis_name: Any,
    tiled: bool,
    axis_index_groups: Any = None,
    **_: Any,
) -> _Collective:
    members = _members(mesh, axis_name, axis_index_groups, of_one_size=True)
    at = all_gather_dimension % (aval.ndim + (not tiled))
    return _Collective(
        "all_gather", members, after=functools.partial(joined, dimension=at, tiled=tiled)
    )


def _reduce_scatter(
    mesh: Any,
    aval: Any,
    *,
    scatter_dimension: int,
    axis_name: Any,
    tiled: bool,
    axis_index_groups: Any = None,
    **_: Any,
) -> _Collective:
    members = _members(mesh, axis_name, axis_index_groups, of_one_size=True)
    at = scatter_dimension % aval.ndim
    if aval.dtype == np.bool_:
        raise _Keep("refused")  # by the rule of lax
    before = functools.partial(split, dimension=at, members=len(members[0]), tiled=tiled)
    return _Collective("reduce_scatter", members, "sum", before=before)


def _all_to_all(
    mesh: Any,
    aval: Any,
    *,
    split_axis: int,
    concat_axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    tiled: bool,
) -> _Collective:
    del tiled  # the dimensions are there already
    members = _members(mesh, axis_name, axis_index_groups, of_one_size=True)
    at, to = split_axis % aval.ndim, concat_axis % aval.ndim
    return _Collective(
        "all_to_all",
        members,
        before=functools.partial(split, dimension=at, members=len(members[0]), tiled=True),
        after=functools.partial(joined, dimension=to, tiled=True),
    )


def _ppermute(mesh: Any, aval: Any, *, axis_name: Any, perm: Any) -> _Collective:
    del aval
    groups = [_compat.ppermute_order(group) for group in _members(mesh, axis_name, None)]
    members = tuple(group for group in groups if group is not None)
    size = len(members[0]) if len(members) == len(groups) else 0
    pairs = tuple((source % size, target % size) for source, target in perm) if size else ()
    unique = all(len(set(ends)) == len(perm) for ends in zip(*pairs, strict=True))
    if not unique or not all(-size <= member < size for pair in perm for member in pair):
        raise _Keep("refused")  # by the rule of lax
    return _Collective("permute", members, pairs=pairs)


def _pbroadcast(mesh: Any, aval: Any, *, axis_name: Any, source: int) -> _Collective:
    del aval
    members = _members(mesh, axis_name, None)
    if not 0 <= source < len(members[0]):
        raise ValueError(
            f"pbroadcast: source is {source}, but axis {axis_name!r} has {len(members[0])} members"
        )
    return _Collective("broadcast", members, root=source)


def _ragged_all_to_all(
    mesh: Any, *avals: Any, axis_name: Any, axis_index_groups: Any
) -> _Collective:
    members = _members(mesh, axis_name, axis_index_groups, of_one_size=True)
    if any(aval.shape != avals[2].shape for aval in avals[2:]) or avals[2].size % len(members[0]):
        raise ValueError(
            "ragged_all_to_all: offsets and sizes have shapes "
            f"{[aval.shape for aval in avals[2:]]}; they must be of one size, a multiple of the "
            f"number of members, {len(members[0])}"
        )
    return _Collective(RAGGED, members)


def _members(mesh: Any, axes: Any, axis_index_groups: Any, of_one_size: bool = False) -> Groups:
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    members = replica_groups(mesh.shape, axes, axis_index_groups)
    if of_one_size and len(set(map(len, members))) > 1:
        raise _Keep("refused")  # by the rule of lax
    return members


def _asynchronous(*_: Any, **__: Any) -> _Collective:
    raise _Keep("asynchronous")


_TRANSLATIONS: dict[str, Callable[..., _Collective]] = {
    "psum": functools.partial(_all_reduce, "sum"),
    "psum_invariant": functools.partial(_all_reduce, "sum"),
    "unreduced_psum": functools.partial(_all_reduce, "sum"),
    "pmax": functools.partial(_all_reduce, "max"),
    "unreduced_pmax": functools.partial(_all_reduce, "max"),
    "pmin": functools.partial(_all_reduce, "min"),
    "unreduced_pmin": functools.partial(_all_reduce, "min"),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_gather_reduced": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "unreduced_reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
    "ragged_all_to_all": _ragged_all_to_all,
    "psum_start": _asynchronous,
    "psum_invariant_start": _asynchronous,
    "unreduced_psum_start": _asynchronous,
    "all_gather_start": _asynchronous,
    "all_gather_reduced_start": _asynchronous,
    "reduce_scatter_start": _asynchronous,
    "unreduced_reduce_scatter_start": _asynchronous,
    "all_to_all_start": _asynchronous,
    "ppermute_start": _asynchronous,
}


# Lowering ----------------------------------------------------------------------------------------


def _lower(name: str, native: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    if not _enabled.value:
        return native(ctx, *operands, **params)
    try:
        collective = _TRANSLATIONS[name](_mesh(ctx), *ctx.avals_in, **params)
    except _Keep as reason:
        _count_kept(name, reason)
        return native(ctx, *operands, **params)
    _count_replaced(name)
    emit_one = _emit_ragged if collective.kind == RAGGED else _emit
    return emit_one(ctx, collective, *operands)


def _mesh(ctx: Any) -> Any:
    """The mesh of the manual code that is lowered."""
    if len(ctx.module_context.platforms) > 1:
        raise _Keep("several platforms")
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext) or not context.manual_axes:
        raise _Keep("not in manual code")
    if any(context.mesh.shape[a] > 1 for a in set(context.mesh.axis_names) - context.manual_axes):
        raise _Keep("mesh axes left to the compiler")
    for aval in ctx.avals_in:
        if not isinstance(aval, ShapedArray) or not all(isinstance(d, int) for d in aval.shape):
            raise _Keep("symbolic shape")
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            raise _Keep("extended dtype")
    return context.mesh


def _emit(ctx: Any, collective: _Collective, x: Any) -> Any:
    source, result = _plain(ctx.avals_in[0]), _plain(ctx.avals_out[0])
    stored = (reducible if collective.op else storable)(source.dtype)
    sent, x = _locally(ctx, lambda x: collective.before(x).astype(stored), source, x)
    received = ShapedArray(collective.received(sent.shape), stored)
    (y,) = emit(
        ctx.replace(avals_in=[sent], avals_out=[received]),
        x,
        kind=collective.kind,
        op=collective.op,
        root=collective.root,
        pairs=collective.pairs,
        members=collective.members,
    )
    got, y = _locally(ctx, lambda y: collective.after(y).astype(source.dtype), received, y)
    assert (got.shape, got.dtype) == (result.shape, result.dtype)
    return [y]


def _emit_ragged(ctx: Any, collective: _Collective, source: Any, result: Any, *indices: Any) -> Any:
    """With k slices for every member this is k collectives, one after the other."""
    dtype, size = ctx.avals_in[0].dtype, len(collective.members[0])
    stored = storable(dtype)
    types = [_plain(aval) for aval in ctx.avals_in]
    types[0], source = _locally(ctx, lambda x: x.astype(stored), types[0], source)
    types[1], result = _locally(ctx, lambda x: x.astype(stored), types[1], result)
    for slice_ in range(types[2].shape[0] // size):

        def of_slice(x: Any, slice_: int = slice_) -> Any:
            index = np.int64 if x.dtype.itemsize == 8 else np.int32
            return x.reshape(size, -1)[:, slice_].astype(index)

        chosen = [
            _locally(ctx, of_slice, aval, x) for aval, x in zip(types[2:], indices, strict=True)
        ]
        (result,) = emit(
            ctx.replace(avals_in=[*types[:2], *(c[0] for c in chosen)], avals_out=[types[1]]),
            source,
            result,
            *(c[1] for c in chosen),
            kind=RAGGED,
            members=collective.members,
        )
    return [_locally(ctx, lambda x: x.astype(dtype), types[1], result)[1]]


def _plain(aval: Any) -> ShapedArray:
    """Without what the type says of other devices."""
    return ShapedArray(aval.shape, aval.dtype)


def _locally(ctx: Any, f: Callable[[Any], Any], aval: ShapedArray, x: Any) -> tuple[Any, Any]:
    """Lowers local operations; returns the type and the value of their result."""
    result = jax.eval_shape(f, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    lowered = mlir.lower_fun(f, multiple_results=False)
    (y,) = lowered(ctx.replace(avals_in=[aval], avals_out=[result], primitive=None), x)
    return _plain(result), y


@functools.cache
def _install() -> None:
    """Puts the lowering rules in place, once."""
    for name in _TRANSLATIONS:
        primitive = _compat.lax_collective(name)
        for platform in PLATFORMS if primitive is not None else ():
            _compat.wrap_lowering(
                primitive,
                platform,
                lambda native, name=name: functools.partial(_lower, name, native),
                lambda: _enabled.value,
            )


if _enabled.value:
    _install()
