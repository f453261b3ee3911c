# SPDX-License-Identifier: Apache-2.0
"""The JAX primitives: one for each kind of collective, with their types.

What is bound has its members' parts along leading dimensions only; the public functions move
dimensions where they belong. With n members, an array of shape s becomes

    all_reduce       s -> s        everyone gets the fold over all
    all_gather       s -> (n, *s)  everyone gets all
    reduce_scatter   (n, *s) -> s  member r gets the fold over everyone's part r
    all_to_all       (n, *s) -> (n, *s)  part p of the result is part r of member p
    permute          s -> s        what the source paired with this target has; zeros without one
    broadcast        s -> s        what the root has
    reduce           s -> s        the fold at the root, zeros elsewhere
    gather           s -> (n, *s)  all at the root, zeros elsewhere
    scatter          (n, *s) -> s  part r of what the root has
    scan             s -> s        the fold up to and with this member
    exscan           s -> s        the fold up to this member, without it; zeros for the first
    barrier          s -> s        its own, once all are there

and `ragged_all_to_all` has the operands of the function in `jax.lax`.

Operands are these arrays and, if the call has one, the key (an integer scalar). Parameters:

    axes         names of the axes, none repeated; or one `Group`, which counts as an axis; or the
                 `Ends` of a message, whose call only one of the two makes
    groups       axis_index_groups as tuples, or None
    name         "" for an unnamed call
    level        how often a named call has been differentiated (see `_derivatives.derived`)
    priority     larger first
    timeout_us   0: the process default
    op           one of OPS: of the kinds that fold
    root         index in the group: of broadcast, reduce, gather and scatter
    pairs        (source, target) indices in the group, by target: of permute
    reverse      whether ranks count backwards: of scan and exscan

The two halves of a collective are primitives, too. `START` has the operands and parameters of the
kind, and perhaps a tag at the end; it gives a ticket. `WAIT` has the ticket of a start, whose
collective's result it gives. Further parameters:

    kind         the kind's name
    has_tag      of START: whether its last operand is a tag (see `_lowering`)
    detached     of START: nobody waits; its ticket means nothing
    shape, dtype of WAIT: those of the result
    origin       of WAIT: what follows the ticket, for derivatives and vmap: the "operands" of the
                 start; or a "mark", an empty array made of them, which tells a handle that has left
                 the program that started it; or "nothing"

Under check_vma the result of an all_reduce without groups is the same on all members, so it no
longer varies over `axes`; all others vary. Without check_vma no type varies.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jax_dfccl import _compat
from jax_dfccl._groups import Ends, Group, Groups, positions_in_groups

OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor")
LINEAR_OPS = ("sum", "mean")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of collective."""

    name: str
    function: str = ""  # the public function, if it has another name
    takes_parts: bool = False  # the operand has a leading dimension with a part for each member
    gives_parts: bool = False  # so has the result
    folds: bool = False
    agrees: bool = False  # the members of a group get the same

    @property
    def shown(self) -> str:
        """What messages call it."""
        return self.function or self.name


KINDS = {
    kind.name: kind
    for kind in (
        Kind("all_reduce", folds=True, agrees=True),
        Kind("all_gather", gives_parts=True, agrees=True),
        Kind("reduce_scatter", takes_parts=True, folds=True),
        Kind("all_to_all", takes_parts=True, gives_parts=True),
        Kind("permute", "ppermute"),
        Kind("broadcast", agrees=True),
        Kind("reduce", folds=True),
        Kind("gather", gives_parts=True),
        Kind("scatter", takes_parts=True),
        Kind("scan", "inclusive_scan", folds=True),
        Kind("exscan", "exclusive_scan", folds=True),
        Kind("barrier"),
        Kind("ragged_all_to_all"),
    )
}
RAGGED = "ragged_all_to_all"

PRIMITIVES = {name: Primitive(f"dfccl_{name}") for name in KINDS}
START = Primitive("dfccl_start")
WAIT = Primitive("dfccl_wait")
# The rank in its parameter `group`, a Group, of the device at a position in the mesh.
RANK_IN_GROUP = Primitive("dfccl_rank")


_MESSAGE = _compat.MessageEffect()


def bind(kind: str, *operands: Any, detached: bool = False, **params: Any) -> Any:
    """Binds the kind's primitive, its arrays cast to vary over the mesh axes of the call.

    Detached, it is only started: nobody waits for it, and the result means nothing.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = set(manual if explicit(params["axes"]) else params["axes"]) & set(manual)
    arrays, key = operands[: array_count(kind)], operands[array_count(kind) :]
    if len(arrays) > 1:
        axes = axes.union(*(_varying_axes(array) for array in arrays))
    primitive = PRIMITIVES[kind]
    if detached:
        primitive, params = START, {**params, "kind": kind, "has_tag": False, "detached": True}
    return primitive.bind(*(_varying(array, axes) for array in arrays), *key, **params)


def of_call(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the call whose start or wait has these."""
    own = ("kind", "has_tag", "detached", "shape", "dtype", "origin")
    return {name: value for name, value in params.items() if name not in own}


def array_count(kind: str) -> int:
    """How many operands come before the key."""
    return 6 if kind == RAGGED else 1


def _varying_axes(x: Any) -> frozenset[Any]:
    return jax.typeof(x).manual_axis_type.varying


def _varying(x: Any, axes: set[Any]) -> Any:
    missing = tuple(sorted(axes - _varying_axes(x), key=str))
    # Nothing happens without check_vma.
    return lax.pcast(x, missing, to="varying") if missing else x


def explicit(axes: tuple[Any, ...]) -> Group | None:
    """The Group that stands in the place of axes."""
    return axes[0] if axes and isinstance(axes[0], Group) else None


def axis_size(axes: tuple[Any, ...]) -> int:
    """How many members there are along the axes."""
    group = explicit(axes)
    return lax.axis_size(axes) if group is None else group.size


def axis_index(axes: tuple[Any, ...]) -> Any:
    """This member's index along the axes."""
    group = explicit(axes)
    if group is None:
        return lax.axis_index(axes)
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(axis for axis in mesh.axis_names if axis in mesh.manual_axes)
    return RANK_IN_GROUP.bind(lax.axis_index(manual) if manual else jnp.int32(0), group=group)


def group_size(axes: tuple[Any, ...], groups: Groups | None) -> Any:
    """Members of this device's group: a Python int unless the groups differ in size."""
    if groups is None:
        return axis_size(axes)
    sizes = {len(group) for group in groups}
    if len(sizes) == 1:
        return sizes.pop()
    return jnp.asarray(positions_in_groups(groups)[1])[axis_index(axes)]


def rank(axes: tuple[Any, ...], groups: Groups | None) -> Any:
    """This member's index in its group."""
    index = axis_index(axes)
    return index if groups is None else jnp.asarray(positions_in_groups(groups)[0])[index]


def _effects(axes: tuple[Any, ...]) -> set[Any]:
    if isinstance(explicit(axes), Ends):
        return {_MESSAGE}
    return {_compat.NamedAxisEffect(axis) for axis in axes if not isinstance(axis, Group)}


def _type(kind: Kind, x: Any, *rest: Any, axes: Any, groups: Any, **_: Any) -> Any:
    effects = _effects(axes)
    for array in (x, *rest[: array_count(kind.name) - 1]):
        _check_reduced(kind, array, axes)
    if kind.name == RAGGED:
        return rest[0].update(weak_type=False), effects
    if kind.name == "all_reduce" and groups is None:
        vma = x.manual_axis_type
        x = x.update(manual_axis_type=vma.update(varying=vma.varying - set(axes)))
    shape = x.shape[1:] if kind.takes_parts else x.shape
    if kind.gives_parts:
        shape = (group_size(axes, groups), *shape)
    return (x if shape == x.shape else x.update(shape=shape)), effects


def _start_type(x: Any, *rest: Any, kind: str, has_tag: bool, detached: bool, **params: Any) -> Any:
    del detached
    own = rest[: len(rest) - has_tag]
    _, effects = _type(KINDS[kind], x, *own, **params)
    return x.update(shape=(2,), dtype=np.dtype(np.uint32), weak_type=False), effects


def _wait_type(
    ticket: Any, *origin: Any, kind: str, shape: Any, dtype: Any, axes: Any, **params: Any
) -> Any:
    del origin
    if ticket.shape != (2,):
        raise ValueError("wait: the handle has come out of jax.vmap; wait for it inside")
    if kind == "all_reduce" and params["groups"] is None:
        vma = ticket.manual_axis_type
        ticket = ticket.update(manual_axis_type=vma.update(varying=vma.varying - set(axes)))
    return ticket.update(shape=shape, dtype=dtype), _effects(axes)


def _check_reduced(kind: Kind, x: Any, axes: Any) -> None:
    vma = x.manual_axis_type
    if unreduced := (vma.unreduced | vma.reduced) & set(axes):
        raise ValueError(
            f"{kind.shown}: the operand is unreduced or reduced over "
            f"{sorted(map(str, unreduced))}; cast it to varying first "
            '(jax.lax.pcast(..., to="varying") or jax.lax.psum)'
        )


for _name, _primitive in PRIMITIVES.items():
    _primitive.def_impl(functools.partial(_compat.apply_primitive, _primitive))
    _primitive.def_effectful_abstract_eval(functools.partial(_type, KINDS[_name]))


for _primitive, _typed in ((START, _start_type), (WAIT, _wait_type)):
    _primitive.def_impl(functools.partial(_compat.apply_primitive, _primitive))
    _primitive.def_effectful_abstract_eval(_typed)
RANK_IN_GROUP.def_impl(functools.partial(_compat.apply_primitive, RANK_IN_GROUP))
RANK_IN_GROUP.def_abstract_eval(lambda position, *, group: position)


def accumulation_dtype(dtype: Any) -> Any:
    """The type that narrow floats are folded in."""
    narrow = jnp.issubdtype(dtype, np.floating) and jax.dtypes.itemsize_bits(dtype) < 32
    return np.dtype(np.float32) if narrow else dtype
