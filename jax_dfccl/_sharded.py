# SPDX-License-Identifier: Apache-2.0
"""The public function `sharded`: collectives in programs that are partitioned automatically."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def sharded(
    f: Callable[..., Any] | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any,
    mesh: Any = None,
    check_vma: bool = True,
) -> Any:
    """Makes `f`, which calls collectives, a function of whole sharded arrays.

    >>> import jax, jax.numpy as jnp, numpy as np, jax_dfccl
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("i",))
    >>> @jax_dfccl.sharded(mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ... def center(x):
    ...     return x - jax_dfccl.all_reduce(x.sum(), "i") / (x.size * jax.device_count())
    >>> @jax.jit
    ... def program(x):  # no shard_map here
    ...     return 2 * center(jnp.sin(x))
    >>> x = jax.device_put(np.arange(4.0 * jax.device_count()), NamedSharding(mesh, P("i")))
    >>> y = np.sin(np.asarray(x))
    >>> np.testing.assert_allclose(program(x), 2 * (y - y.mean()), atol=1e-5)

    In a program without `jax.shard_map` values are whole arrays, and how they lie on devices is
    up to the compiler (axes of type Auto) or part of their types (Explicit). A collective is
    between devices, so its code has to be entered for each device. That is `jax.shard_map` over
    all axes of the mesh, and so is this function, with two differences. It enters from everywhere:
    from plain code, from a jitted function, and from a shard_map over some of the axes, whose
    others it takes over. And it never gathers unasked: an operand that is known to be split along
    a dimension that its spec leaves whole is refused; reshard it first where that is meant.

    **Order.** The calls in `f` are matched as everywhere.

    **Differentiation.** As `jax.shard_map`.

    Args:
        f: a function of shards, of any shapes and dtypes; without it a decorator is returned.
        in_specs: as for `jax.shard_map`, naming every axis that an argument is split over. None:
            as the arguments are split, which is known of arrays outside `jax.jit` and of Explicit
            axes; under `jax.jit` Auto axes must be named.
        out_specs: as for `jax.shard_map`.
        mesh: the mesh; the current one (`jax.set_mesh`) or else the arguments' by default.
        check_vma: as for `jax.shard_map`.

    Returns:
        A function of arrays with the arguments of `f`.

    Raises:
        What `f` raises; ValueError, when it is called, where there is no mesh, a sharding is not
        known, or an argument would be gathered.
    """
    if f is None:
        return functools.partial(
            sharded, in_specs=in_specs, out_specs=out_specs, mesh=mesh, check_vma=check_vma
        )

    @functools.wraps(f)
    def of_whole_arrays(*arguments: Any) -> Any:
        current = jax.sharding.get_abstract_mesh()
        entered = set(current.manual_axes) if not current.empty else set()
        over = current if entered else _mesh(mesh, current, arguments)
        axes = set(over.axis_names) - entered
        if not axes:
            raise ValueError(
                "sharded: the enclosing jax.shard_map is over all axes of the mesh already; call "
                "the function without jax_dfccl.sharded"
            )
        specs = in_specs
        if specs is None:
            specs = tuple(jax.tree.map(lambda x: _spec(x, over, entered), a) for a in arguments)
        elif not isinstance(specs, tuple) or isinstance(specs, P):
            specs = (specs,) * len(arguments)
        for argument, spec in zip(arguments, specs, strict=True):
            _check_not_gathered(argument, spec, over)
        mapped = jax.shard_map(
            f,
            mesh=None if entered else over,
            in_specs=specs,
            out_specs=out_specs,
            axis_names=axes,
            check_vma=check_vma,
        )
        return mapped(*arguments)

    return of_whole_arrays


def _mesh(given: Any, current: Any, arguments: Any) -> Any:
    if given is not None:
        return given
    if not current.empty:
        return current
    for leaf in jax.tree.leaves(arguments):
        sharding = _known_sharding(leaf)
        if sharding is not None:
            return sharding.mesh
    raise ValueError(
        "sharded: there is no mesh: no mesh= is given, none is set (jax.set_mesh), and no argument "
        "is known to lie on one"
    )


def _known_sharding(x: Any) -> NamedSharding | None:
    """The sharding of an array outside jit, or the Explicit part of a traced one's."""
    sharding = getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _spec(x: Any, mesh: Any, entered: set[Any]) -> P:
    sharding = _known_sharding(x)
    if isinstance(x, Tracer):
        unknown = [
            axis
            for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto and axis not in entered and mesh.shape[axis] > 1
        ]
        if unknown:
            raise ValueError(
                f"sharded: how the arguments are split over {unknown} is not known while tracing "
                "(these axes are of type Auto); name it: in_specs="
            )
    return P() if sharding is None else sharding.spec


def _check_not_gathered(argument: Any, spec: Any, mesh: Any) -> None:
    """Refuses operands that shard_map would have gathered before it enters the function."""
    for leaf, wanted in zip(*_matched(argument, spec), strict=True):
        sharding = _known_sharding(leaf)
        if sharding is None or sharding.mesh.shape_tuple != mesh.shape_tuple:
            continue
        for dimension, axes in enumerate(sharding.spec):
            kept = _names(wanted[dimension]) if dimension < len(wanted) else ()
            lost = [axis for axis in _names(axes) if axis not in kept and mesh.shape[axis] > 1]
            if lost:
                raise ValueError(
                    f"sharded: an argument is split over {lost} along dimension {dimension}, and "
                    f"its spec in in_specs is {wanted}: it would be gathered. Name the axes in the "
                    "spec, or gather it on purpose (jax.device_put or jax.reshard) before the call"
                )


def _matched(argument: Any, spec: Any) -> tuple[list[Any], list[P]]:
    """The argument's leaves and the spec of each; a spec is for all that is below it."""

    def is_spec(x: Any) -> bool:
        return isinstance(x, P)

    leaves: list[Any] = []
    specs: list[P] = []

    def visit(wanted: P, part: Any) -> None:
        below = jax.tree.leaves(part)
        leaves.extend(below)
        specs.extend([wanted] * len(below))

    jax.tree.map(visit, spec, argument, is_leaf=is_spec)
    return leaves, specs


def _names(entry: Any) -> tuple[Any, ...]:
    """The axes that a dimension is split over."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
