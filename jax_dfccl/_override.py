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
from jax_dfccl._lowering import PLATFORM, emit
from jax_dfccl._reductions import reducible as stored_dtype

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
        if self.kind == "all_gather":
            return (len(self.members[0]), *sent)
        return sent[1:] if self.kind == "reduce_scatter" else sent


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


def _members(mesh: Any, axes: Any, axis_index_groups: Any, of_one_size: bool = False) -> Groups:
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    members = replica_groups(mesh.shape, axes, axis_index_groups)
    if all(len(group) == 1 for group in members):
        raise _Keep("one member")
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
    return _emit(ctx, collective, *operands)


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
    stored = stored_dtype(source.dtype)
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
        if primitive is not None:
            _compat.wrap_lowering(
                primitive,
                PLATFORM,
                lambda native, name=name: functools.partial(_lower, name, native),
                lambda: _enabled.value,
            )


if _enabled.value:
    _install()
