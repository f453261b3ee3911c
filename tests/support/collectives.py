# SPDX-License-Identifier: Apache-2.0
"""Every collective with its reference: what a group's members get, from what they have.

References use NumPy's functions by default and those of `jax.numpy` where they are differentiated.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_dfccl

GROUPS = [[6, 0, 3, 1], [2, 5, 7, 4]]  # of one size, neither contiguous nor in order
UNEVEN_GROUPS = [[6, 0, 3], [1, 2], [4, 5, 7]]
COMBINE = {
    "sum": "add",
    "prod": "multiply",
    "min": "minimum",
    "max": "maximum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A collective with its own arguments."""

    name: str
    call: Callable[..., Any]  # (x, axis_name, **options) -> y
    reference: Callable[..., Any]  # (what a group's members have, xp) -> what they get
    parts: bool = False  # what a member has is one part per member
    even: bool = False  # needs groups of one size
    linear: bool = True
    vital: int = 0  # a member that some of the others need, and that needs some
    grouped: bool = True  # takes axis_index_groups

    def __str__(self) -> str:
        return self.name


def fold(xs: Any, op: str, xp: Any = np) -> Any:
    """Left to right."""
    if op == "mean":
        return fold(xs, "sum", xp) / len(xs)
    return functools.reduce(getattr(xp, COMBINE[op]), list(xs))


def running(xs: Any, op: str, xp: Any = np, *, reverse: bool = False) -> Any:
    """The folds up to and with each."""
    rows = list(xs)[::-1] if reverse else list(xs)
    folds = list(itertools.accumulate(rows, getattr(xp, COMBINE[op])))
    return xp.stack(folds[::-1] if reverse else folds)


def before(xs: Any, op: str, neutral: Any, xp: Any = np, *, reverse: bool = False) -> Any:
    """The folds up to each, without it."""
    folds = running(xs, op, xp, reverse=reverse)
    first = xp.full_like(xs[:1], neutral)
    return xp.concatenate([folds[1:], first] if reverse else [first, folds[:-1]])


def at(root: int, value: Any, xs: Any, xp: Any) -> Any:
    """`value` at one member, zeros at the others."""
    own = np.arange(len(xs)).reshape((-1,) + (1,) * value.ndim) == root % len(xs)
    return xp.where(own, value[None], xp.zeros_like(value)[None])


def moved_by(perm: Sequence[tuple[int, int]], xs: Any, xp: Any) -> Any:
    rows = [xp.zeros_like(xs[0])] * len(xs)
    for source, target in perm:
        rows[target] = xs[source]
    return xp.stack(rows)


SOME = [(0, 1), (1, 0)]  # for groups of two or more


def movers() -> list[Case]:
    """Collectives that move data only."""
    j = jax_dfccl
    return [
        Case(
            "all_gather",
            j.all_gather,
            lambda xs, xp=np: xp.broadcast_to(xs, (len(xs), *xs.shape)),
            even=True,
        ),
        Case(
            "all_to_all",
            lambda x, i, **o: j.all_to_all(x, i, 0, 0, **o),
            lambda xs, xp=np: xp.swapaxes(xs, 0, 1),
            parts=True,
            even=True,
        ),
        Case(
            "ppermute",
            lambda x, i, **o: j.ppermute(x, i, SOME, **o),
            lambda xs, xp=np: moved_by(SOME, xs, xp),
        ),
        Case(
            "broadcast",
            lambda x, i, **o: j.broadcast(x, i, 1, **o),
            lambda xs, xp=np: xp.broadcast_to(xs[1], xs.shape),
            vital=1,
        ),
        Case(
            "gather",
            lambda x, i, **o: j.gather(x, i, -1, **o),
            lambda xs, xp=np: at(-1, xs, xs, xp),
            even=True,
            vital=-1,
        ),
        Case(
            "scatter",
            lambda x, i, **o: j.scatter(x, i, 1, **o),
            lambda xs, xp=np: xs[1],
            parts=True,
            even=True,
            vital=1,
        ),
        Case("barrier", j.barrier, lambda xs, xp=np: xs),
    ]


def folders(op: str, neutral: Any = 0) -> list[Case]:
    """Collectives that fold."""
    j, linear = jax_dfccl, op in ("sum", "mean")
    cases = [
        Case(
            f"all_reduce({op})",
            lambda x, i, **o: j.all_reduce(x, i, op=op, **o),
            lambda xs, xp=np: xp.broadcast_to(fold(xs, op, xp), xs.shape),
            linear=linear,
        ),
        Case(
            f"reduce_scatter({op})",
            lambda x, i, **o: j.reduce_scatter(x, i, op=op, **o),
            lambda xs, xp=np: fold(xs, op, xp),
            parts=True,
            even=True,
            linear=linear,
        ),
        Case(
            f"reduce({op})",
            lambda x, i, **o: j.reduce(x, i, 1, op=op, **o),
            lambda xs, xp=np: at(1, fold(xs, op, xp), xs, xp),
            linear=linear,
        ),
    ]
    if op == "mean":
        return cases
    for reverse in (False, True):
        suffix = f"({op}{', reverse' if reverse else ''})"
        cases += [
            Case(
                f"inclusive_scan{suffix}",
                lambda x, i, r=reverse, **o: j.inclusive_scan(x, i, op=op, reverse=r, **o),
                lambda xs, xp=np, r=reverse: running(xs, op, xp, reverse=r),
                linear=linear,
            ),
            Case(
                f"exclusive_scan{suffix}",
                lambda x, i, r=reverse, **o: j.exclusive_scan(x, i, op=op, reverse=r, **o),
                lambda xs, xp=np, r=reverse: before(xs, op, neutral, xp, reverse=r),
                linear=linear,
            ),
        ]
    return cases


def _place(axis: Any, groups: Any) -> tuple[Any, int]:
    """This member's rank in its group, and how many that has."""
    if isinstance(axis, jax_dfccl.Group):
        return axis.rank(), axis.size
    index = lax.axis_index(axis)
    if groups is None:
        return index, lax.axis_size(axis)
    ranks = {member: rank for group in groups for rank, member in enumerate(group)}
    return jnp.asarray([ranks[member] for member in range(len(ranks))])[index], len(groups[0])


def _sent(members: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An uneven exchange: [from, to] rows, where they begin at the sender, and at the receiver."""
    rows = np.add.outer(np.arange(members), np.arange(members)) % 3
    return rows, np.cumsum(rows, 1) - rows, np.cumsum(rows, 0) - rows


def _all_gather_v(x: Any, axis: Any, **options: Any) -> Any:
    sizes = [1 + k % 2 for k in range(_place(axis, options.get("axis_index_groups"))[1])]
    return jax_dfccl.all_gather_v(jnp.stack([x, x + 1]), axis, sizes, **options)


def _all_to_all_v(x: Any, axis: Any, **options: Any) -> Any:
    rank, members = _place(axis, options.get("axis_index_groups"))
    rows = jnp.asarray(_sent(members)[0])[rank]
    return jax_dfccl.all_to_all_v(jnp.tile(x, _twice(x)), axis, rows, rows=2 * members, **options)[
        0
    ]


def _ragged_all_to_all(x: Any, axis: Any, **options: Any) -> Any:
    rank, members = _place(axis, options.get("axis_index_groups"))
    rows, begins, places = map(jnp.asarray, _sent(members))
    source = jnp.tile(x, _twice(x))
    indices = begins[rank], rows[rank], places[rank], rows[:, rank]
    return jax_dfccl.ragged_all_to_all(
        source, jnp.zeros_like(source), *indices, axis_name=axis, **options
    )


def _twice(x: Any) -> tuple[int, ...]:
    return (2, *(1,) * (x.ndim - 1))


def _exchanged(xs: Any, xp: Any) -> Any:
    members = len(xs)
    rows, begins, _ = _sent(members)
    sources = [xp.tile(x, _twice(x)) for x in xs]
    padding = xp.zeros_like(sources[0])
    results = []
    for to in range(members):
        parts = [
            source[begins[r, to] : begins[r, to] + rows[r, to]] for r, source in enumerate(sources)
        ]
        results.append(xp.concatenate([*parts, padding])[: 2 * members])
    return xp.stack(results)


def composed() -> list[Case]:
    """Collectives that are made of others, or send rows whose number differs."""
    j = jax_dfccl

    def both(x: Any, axis: Any, **options: Any) -> Any:
        groups = options.pop("axis_index_groups", None)
        calls = {
            "total": lambda: j.all_reduce(x, axis, axis_index_groups=groups),
            "first": lambda: j.broadcast(x, axis, 0, axis_index_groups=groups),
        }
        results = j.grouped(calls, **options)
        return jnp.stack([results["total"], results["first"]])

    def largest(x: Any, axis: Any, **options: Any) -> Any:
        value, index = j.max_with_index(x, axis, **options)
        return jnp.stack([value, index.astype(x.dtype)])

    def all_of(rows: Any, xs: Any, xp: Any) -> Any:
        return xp.broadcast_to(rows, (len(xs), *rows.shape))

    return [
        Case(
            "all_gather_v",
            _all_gather_v,
            lambda xs, xp=np: all_of(
                xp.concatenate([xp.stack([x, x + 1])[: 1 + k % 2] for k, x in enumerate(xs)]),
                xs,
                xp,
            ),
            even=True,
        ),
        Case(
            "all_to_all_v",
            _all_to_all_v,
            lambda xs, xp=np: _exchanged(xs, xp),
            parts=True,
            even=True,
        ),
        Case(
            "ragged_all_to_all",
            _ragged_all_to_all,
            lambda xs, xp=np: _exchanged(xs, xp),
            parts=True,
            even=True,
        ),
        Case(
            "send_recv",
            lambda x, i, axis_index_groups=None, **o: j.send_recv(x, i, 0, -1, **o),
            lambda xs, xp=np: moved_by([(0, len(xs) - 1)], xs, xp),
            grouped=False,
        ),
        Case(
            "max_with_index",
            largest,
            lambda xs, xp=np: all_of(
                xp.stack([xp.max(xs, 0), xp.argmax(xs, 0).astype(xs.dtype)]), xs, xp
            ),
            linear=False,
        ),
        Case(
            "grouped",
            both,
            lambda xs, xp=np: all_of(xp.stack([fold(xs, "sum", xp), xs[0]]), xs, xp),
        ),
    ]


def neutral(op: str, dtype: Any) -> Any:
    """What an exclusive scan gives the first member."""
    dtype = np.dtype(dtype)
    if op in ("min", "max"):
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return limits.max if op == "min" else limits.min
        return np.inf if op == "min" else -np.inf
    if op == "and":
        return np.invert(np.zeros((), dtype))
    return 1 if op == "prod" else 0


def expected(case: Case, x: Any, groups: Sequence[Sequence[int]] | None, xp: Any = np) -> Any:
    """What all members get, by the reference, from what all have."""
    results: list[Any] = [None] * len(x)
    for group in groups or [list(range(len(x)))]:
        got = case.reference(x[np.array(group)], xp=xp)
        for place, member in enumerate(group):
            results[member] = got[place]
    return xp.stack(results)


def shape_for(case: Case, inner: Sequence[int], members: int = 8, group: int | None = None) -> Any:
    """The shape of what all members have, for a collective over groups of `group`."""
    return (members, *((group or members,) if case.parts else ()), *inner)
