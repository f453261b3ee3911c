# SPDX-License-Identifier: Apache-2.0
"""A traced program, cut where it waits for its collectives.

`flatten` makes one list of equations out of a jaxpr: what holds collectives is inlined, and those
stand in it by themselves. Each equation knows what it needs: a set of collectives, as bits.
Equations that need the same can run together, as soon as these have finished.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

from jax_dfccl import _compat
from jax_dfccl._primitive import PRIMITIVES, START, WAIT

_KIND_OF = {primitive: kind for kind, primitive in PRIMITIVES.items()}

# Equations that hold one jaxpr, whose operands and results are theirs: its parameter.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """What an equation or the caller gives."""

    aval: Any
    needs: int = 0  # bits: collectives that must have finished before it can be computed


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """An equation, with values in the place of variables."""

    equation: Any
    operands: list[Any]  # values and literals
    results: list[Value]
    where: Any  # what it runs in: `Flattening.where`
    number: int = -1  # of the collective that it is
    needs: int = 0

    @property
    def kind(self) -> str:
        return _KIND_OF[self.equation.primitive]

    @property
    def is_collective(self) -> bool:
        return self.number >= 0


@dataclasses.dataclass
class Flat:
    """A jaxpr without nested ones that hold collectives."""

    inputs: list[Value]
    constants: list[tuple[Value, Any]]
    nodes: list[Node]
    results: list[Any]  # values and literals

    @property
    def collectives(self) -> list[Node]:
        return [node for node in self.nodes if node.is_collective]


class Flattening:
    """Turns jaxprs into one list of nodes.

    Args:
        function: what messages name.
        enter: is given an equation that holds collectives and cannot be inlined, its operands, and
            this; returns the equation's results, or None to have it refused.
        keep: whether the equation of a collective, under a mesh or None, is one like any other.
    """

    def __init__(
        self,
        function: str,
        enter: Callable[..., list[Any] | None] | None = None,
        keep: Callable[[Any, Any], bool] = lambda equation, mesh: False,
    ) -> None:
        self._function = function
        self._enter = enter
        self._keep = keep
        self.nodes: list[Node] = []
        self.constants: list[tuple[Value, Any]] = []
        self.where: Any = None
        self._count = 0

    def run(self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Adds the equations of a jaxpr; returns its results."""
        values: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            values[variable] = self.constant(variable.aval, constant)

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self._add(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, aval: Any, constant: Any) -> Any:
        """A value that is known."""
        if isinstance(constant, (Value, core.Literal)):
            return constant
        value = Value(aval)
        self.constants.append((value, constant))
        return value

    def _add(self, equation: Any, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        mesh = None if self.where is None else self.where.mesh
        if self._is_collective(equation, mesh):
            node = self._append(equation, operands)
            node.number = self._count
            self._count += 1
            node.results[0].needs |= 1 << node.number
            return list(node.results)
        if not self._holds_collectives(equation, mesh):
            return list(self._append(equation, operands).results)
        if name in _INLINED:
            jaxpr, constants = _opened(equation.params[_INLINED[name]])
            return self.run(jaxpr, constants, operands)
        results = None if self._enter is None else self._enter(equation, operands, self)
        if results is None:
            raise NotImplementedError(
                f"{self._function}: {_compat.user_source(equation.source_info.traceback)} has "
                f"collectives inside of {name}; they must stand in straight code (unroll the loop "
                "in Python, or call them before or after it)"
            )
        return results

    def _is_collective(self, equation: Any, mesh: Any) -> bool:
        return equation.primitive in _KIND_OF and not self._keep(equation, mesh)

    def _holds_collectives(self, equation: Any, mesh: Any) -> bool:
        if equation.primitive.name == "shard_map":
            mesh = equation.params["mesh"]
        return any(
            self._is_collective(inner, mesh) or self._holds_collectives(inner, mesh)
            for jaxpr in _compat.jaxprs_inside(equation)
            for inner in jaxpr.eqns
        )

    def _append(self, equation: Any, operands: list[Any]) -> Node:
        needs = union(operands)
        results = [Value(variable.aval, needs) for variable in equation.outvars]
        node = Node(equation, operands, results, self.where, needs=needs)
        self.nodes.append(node)
        return node


def flatten(function: str, closed: Any, *options: Any) -> Flat:
    """Flattens a closed jaxpr (see `Flattening`)."""
    flattening = Flattening(function, *options)
    inputs = [Value(variable.aval) for variable in closed.jaxpr.invars]
    results = flattening.run(closed.jaxpr, closed.consts, inputs)
    return Flat(inputs, flattening.constants, flattening.nodes, results)


def union(values: Iterable[Any]) -> int:
    """What several values need."""
    needs = 0
    for value in values:
        if isinstance(value, Value):
            needs |= value.needs
    return needs


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    if isinstance(jaxpr, core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


class Environment(dict[Value, Any]):
    """Arrays by value, while equations run."""

    def read(self, value: Any) -> Any:
        return value.val if isinstance(value, core.Literal) else self[value]

    def run(self, node: Node) -> None:
        """Runs an equation that is not a collective."""
        operands = [self.read(value) for value in node.operands]
        results = _compat.run_equation(node.equation, operands)
        self.update(zip(node.results, results, strict=True))

    def start(self, node: Node, tag: Any = None, **changed: Any) -> Any:
        """Starts a collective, with some of its parameters changed; returns the ticket."""
        operands = [self.read(value) for value in node.operands]
        key = changed.pop("key", None)
        if key is not None:
            operands.append(key)
        if tag is not None:
            operands.append(tag)
        params = {**node.equation.params, **changed}
        has_tag = tag is not None
        with _compat.source_of(node.equation):
            return START.bind(*operands, kind=node.kind, has_tag=has_tag, detached=False, **params)

    def wait(
        self, node: Node, ticket: Any, *origin: Any, what: str = "nothing", **changed: Any
    ) -> None:
        """Puts the result of a collective in its place; `what` its origin is, see `_primitive`."""
        params = {**node.equation.params, **changed}
        (result,) = node.results
        with _compat.source_of(node.equation):
            self[result] = WAIT.bind(
                ticket,
                *origin,
                kind=node.kind,
                shape=result.aval.shape,
                dtype=result.aval.dtype,
                origin=what,
                **params,
            )
