# SPDX-License-Identifier: Apache-2.0
"""What is done to a lowered module that holds our calls, before XLA sees it.

`rewrite` runs once per module, on JAX's StableHLO, in five steps:

1. *Inline* every function that holds calls, so that one custom call is one place in the program.
2. *Read* the result into a light graph and find out, on that graph only: which blocks are
   branching (their calls may meet others in a different order on another device), the phase of
   every call in them, and which calls a call needs the results of.
3. *Split* the calls of branching blocks into start and done, and make each done wait for the
   tickets of all starts that can come before it. The start and the wait of a handle are calls, too,
   that lack the other half.
4. Let unsplit calls *overwrite* their operands where nothing else needs them.
5. *Name* the calls: a number in the module, and a hash of the module that depends neither on
   source lines nor on what else was traced before.

What must know the devices of a program (`_settle`) is done when it is about to be compiled.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_dfccl import _compat
from jax_dfccl._compat import ir

CALL = "dfccl_collective"
START = "dfccl_collective_start"
DONE = "dfccl_collective_done"
HANDLE_START = "dfccl_handle_start"
HANDLE_WAIT = "dfccl_handle_wait"
TARGETS = (CALL, START, DONE, HANDLE_START, HANDLE_WAIT)
RANK = "dfccl_rank"  # in a Group; replaced when the program's devices are known
_RANKS_IN = "dfccl_ranks_in"  # marks the table that it is replaced by

# Custom calls that only annotate, or that XLA replaces by operations that cannot fail.
_HARMLESS_TARGETS = frozenset(
    {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", RANK}
)
_HARMLESS_PREFIXES = ("xla.sdy.", "mhlo.", "chlo.", "stablehlo.")

# Operations that wait for peers or the host, and whose results differ between devices; `composite`
# stands for what it may hold.
_COMMUNICATION = frozenset(
    "stablehlo." + name
    for name in (
        *("collective_permute", "collective_broadcast", "all_to_all", "reduce_scatter"),
        *("async_start", "async_done", "send", "recv", "infeed", "outfeed", "composite"),
    )
)

# Operations whose results may differ between devices although their operands do not. Others of
# these dialects compute equal results from equal operands.
_DETERMINISTIC_DIALECTS = ("stablehlo", "chlo")
_VARYING_OPERATIONS = _COMMUNICATION | {
    "stablehlo." + name for name in ("partition_id", "replica_id", "rng", "create_token")
}

# Kinds of calls whose members all get the same.
_AGREEING_KINDS = ("all_reduce", "all_gather", "broadcast")

# Operations that keep the thread they run on until their peers come.
_WAITING_OPERATIONS = _COMMUNICATION | {"stablehlo.all_reduce", "stablehlo.all_gather"}

# With more tickets than this, a done takes them joined to one array, so that the operands of a
# block grow linearly and not quadratically with its calls.
_MAX_TICKET_OPERANDS = 16


@dataclasses.dataclass(frozen=True)
class Site:
    """What is known of a call, for messages."""

    program: int
    site: int
    operation: str
    name: str
    source: str
    program_name: str
    after: tuple[int, ...]  # sites whose results this one's operands or its being reached need


# --- the graph -----------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class _Value:
    """An operation's result, or an argument of a block."""

    owner: "_Op | _Block"
    index: int
    block: "_Block"
    after: int = 0  # bit set: sites whose results this value depends on
    phase: int = 0  # largest phase of a done of the same block it depends on


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    parent: "_Op"
    depth: int
    arguments: list[_Value] = dataclasses.field(default_factory=list)
    ops: list["_Op"] = dataclasses.field(default_factory=list)
    branching: bool = False

    @property
    def yields(self) -> list[_Value]:
        return self.ops[-1].operands


@dataclasses.dataclass(slots=True, eq=False)
class _Op:
    op: Any  # ir.Operation
    name: str
    block: _Block | None
    operands: list[_Value]
    results: list[_Value] = dataclasses.field(default_factory=list)
    regions: list[_Block] = dataclasses.field(default_factory=list)
    captured: list[_Value] = dataclasses.field(default_factory=list)  # by its regions
    call: "_Call | None" = None
    holds_calls: bool = False  # in its regions
    phase: int = 0

    @property
    def uses(self) -> list[_Value]:
        return self.operands + self.captured if self.captured else self.operands

    @property
    def is_branch(self) -> bool:
        return self.name in ("stablehlo.case", "stablehlo.if")


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """One of our calls."""

    node: _Op
    site: int
    config: dict[str, Any]  # attribute name -> ir.Attribute
    source: int  # index in the lowering's table of calls
    target: str  # CALL, HANDLE_START or HANDLE_WAIT
    emitted: list[Any] = dataclasses.field(default_factory=list)  # the one call, or start and done
    after: int = 0

    @property
    def starts(self) -> bool:
        return self.target != HANDLE_WAIT

    @property
    def waits(self) -> bool:
        return self.target != HANDLE_START

    @property
    def name(self) -> str:
        return self.config["name"].value

    @property
    def kind(self) -> str:
        return self.config["kind"].value

    @property
    def operation(self) -> str:
        """What messages call it: all_reduce(sum), broadcast."""
        if "shown" in self.config:
            return self.config["shown"].value
        op = self.config["op"].value
        return f"{self.kind}({op})" if op else self.kind

    @property
    def group_sizes(self) -> list[int]:
        return _integers(self.config["group_sizes"])

    @property
    def of_explicit_group(self) -> bool:
        return len(_integers(self.config["members"])) > 0


class _Graph:
    """The functions of a module, each read when it is first asked for."""

    def __init__(self, functions: dict[str, Any], partitions: int):
        self._functions = functions
        self._read: dict[str, _Op] = {}
        self.partitions = partitions
        self.calls: list[_Call] = []

    def function(self, name: str) -> _Op:
        if name not in self._read:
            op = self._functions[name]
            node = self._read[name] = _Op(op, "func.func", None, [])
            node.regions = [self._block(block, node, 0, {}) for block in op.regions[0].blocks]
        return self._read[name]

    def _block(self, block: Any, parent: _Op, depth: int, values: dict[Any, _Value]) -> _Block:
        result = _Block(parent, depth)
        for index, argument in enumerate(block.arguments):
            value = values[argument] = _Value(result, index, result)
            result.arguments.append(value)
        for view in block.operations:
            op = view.operation
            node = _Op(op, op.name, result, [values[v] for v in op.operands])
            result.ops.append(node)
            for region in op.regions:
                for inner in region.blocks:
                    node.regions.append(self._block(inner, node, depth + 1, values))
            if node.regions:
                node.captured = _captured(node)
                node.holds_calls = any(
                    inner.call or inner.holds_calls for b in node.regions for inner in b.ops
                )
            for index, output in enumerate(op.results):
                value = values[output] = _Value(node, index, result)
                node.results.append(value)
            if node.name == "stablehlo.custom_call":
                config = _config_of(op)
                if config is not None:
                    source = config.pop("call").value
                    node.call = _Call(node, len(self.calls), config, source, _target(op))
                    self.calls.append(node.call)
        return result


def _captured(node: _Op) -> list[_Value]:
    seen: dict[_Value, None] = {}
    for block in node.regions:
        for op in block.ops:
            for value in op.uses:
                if value.block.depth < block.depth:
                    seen[value] = None
    return list(seen)


def _walk(block: _Block) -> Iterator[_Op]:
    for op in block.ops:
        yield op
        for region in op.regions:
            yield from _walk(region)


def _target(op: Any) -> str:
    return op.attributes["call_target_name"].value


def _callee(op: Any) -> str:
    return op.attributes["callee"].value


def _config_of(op: Any) -> dict[str, Any] | None:
    """The attributes of a call of ours that has not been named yet."""
    if _target(op) not in (CALL, HANDLE_START, HANDLE_WAIT):
        return None
    config = {entry.name: entry.attr for entry in op.attributes["mhlo.backend_config"]}
    return config if "call" in config else None


def _integers(attribute: Any) -> list[int]:
    return [int(value) for value in attribute]


# --- step 1: inlining ----------------------------------------------------------------------------


@dataclasses.dataclass
class _Survey:
    """What one walk over the module finds."""

    functions: dict[str, Any] = dataclasses.field(default_factory=dict)
    holders: set[str] = dataclasses.field(default_factory=set)  # functions that hold calls
    calls: dict[str, list[tuple[str, Any]]] = dataclasses.field(default_factory=dict)
    may_fail: bool = False  # a custom call of others can end the program between start and done
    may_wait: bool = False  # something of others can keep its thread until a peer comes


def _survey(module: Any) -> _Survey:
    survey = _Survey()
    for view in module.body.operations:
        if view.operation.name != "func.func":
            continue
        function = view.operation
        name = function.attributes["sym_name"].value
        survey.functions[name] = function
        calls = survey.calls[name] = []

        def visit(op: Any, name: str = name, calls: list[tuple[str, Any]] = calls) -> Any:
            if op.name == "func.call":
                calls.append((_callee(op), op))
            elif op.name == "stablehlo.custom_call":
                target = _target(op)
                if target in TARGETS:
                    if _config_of(op) is not None:
                        survey.holders.add(name)
                elif target not in _HARMLESS_TARGETS and not target.startswith(_HARMLESS_PREFIXES):
                    survey.may_fail = survey.may_wait = True
            elif op.name in _WAITING_OPERATIONS:
                survey.may_wait = True
            return ir.WalkResult.ADVANCE

        function.walk(visit)
    grew = True
    while grew:
        reached = {
            f for f, calls in survey.calls.items() if any(c in survey.holders for c, _ in calls)
        }
        grew = not reached <= survey.holders
        survey.holders |= reached
    return survey


def _inline(survey: _Survey) -> None:
    """Replaces each call of a function that holds our calls by the function's body."""
    expanded: set[str] = set()

    def expand(name: str) -> None:
        if name in expanded:
            return
        expanded.add(name)
        for callee, call in survey.calls[name]:
            if callee in survey.holders:
                expand(callee)
                _inline_call(survey.functions[callee], call)
        survey.calls[name] = []

    for name in survey.holders:
        expand(name)
    for name in sorted(survey.holders):
        function = survey.functions[name]
        attributes = function.attributes
        if "sym_visibility" in attributes and attributes["sym_visibility"].value == "private":
            survey.holders.discard(name)
            survey.functions.pop(name).erase()


def _inline_call(function: Any, call: Any) -> None:
    copy = function.clone(False)
    body = copy.regions[0].blocks[0]
    argument_attributes = _value_attributes(function, "arg_attrs", len(body.arguments))
    for argument, operand, attributes in zip(
        body.arguments, call.operands, argument_attributes, strict=True
    ):
        argument.replace_all_uses_with(_constrained(operand, attributes, call))
    *operations, terminator = [view.operation for view in body.operations]
    for op in operations:
        op.move_before(call)
    results = list(terminator.operands)
    result_attributes = _value_attributes(function, "res_attrs", len(results))
    for result, value, attributes in zip(call.results, results, result_attributes, strict=True):
        result.replace_all_uses_with(_constrained(value, attributes, call))
    terminator.erase()
    call.erase()
    copy.erase()


def _value_attributes(function: Any, key: str, count: int) -> Sequence[Any]:
    if key not in function.attributes:
        return [None] * count
    return list(function.attributes[key])


def _constrained(value: Any, attributes: Any, before: Any) -> Any:
    """`value` with the sharding that a function's argument or result asked for."""
    if attributes is None:
        return value
    point = ir.InsertionPoint(before)
    if "sdy.sharding" in attributes:
        return ir.Operation.create(
            "sdy.sharding_constraint",
            [value.type],
            [value],
            {"sharding": attributes["sdy.sharding"]},
            loc=before.location,
            ip=point,
        ).results[0]
    if "mhlo.sharding" in attributes:
        return ir.Operation.create(
            "stablehlo.custom_call",
            [value.type],
            [value],
            {
                "call_target_name": ir.StringAttr.get("Sharding"),
                "mhlo.sharding": attributes["mhlo.sharding"],
            },
            loc=before.location,
            ip=point,
        ).results[0]
    return value


# --- step 2: whose collectives there are ---------------------------------------------------------


def _compiler_may_communicate(function: _Op, module: Any) -> bool:
    """Whether XLA may put collectives of its own between a program's manual computations.

    It does so where a value has another sharding than its user wants, and to compute with sharded
    values. Known to need none are operations on scalars, and manual computations whose operands
    and results have the right shardings from the start.
    """
    arguments = _shardings(function.op, "arg_attrs", len(function.regions[0].arguments))
    known = dict(zip(function.regions[0].arguments, arguments, strict=True))
    wanted: list[tuple[_Value, Any]] = []
    for op in function.regions[0].ops:
        if op.name == "sdy.manual_computation":
            if not _compat.is_manual_over_all(op.op, module):
                return True
            for index, value in enumerate(op.operands):
                wanted.append((value, _compat.operand_sharding(op.op, index)))
            for index, value in enumerate(op.results):
                known[value] = _compat.result_sharding(op.op, index)
        elif op.name == "func.return":
            results = _shardings(function.op, "res_attrs", len(op.operands))
            wanted += zip(op.operands, results, strict=True)
        elif any(ir.RankedTensorType(value.type).rank > 0 for value in op.op.operands):
            return True
    for value, sharding in wanted:
        # A value without a sharding gets that of its first user.
        have = known.get(value)
        if have is None:
            known[value] = sharding
        elif _compat.resharding_moves_data(have, sharding):
            return True
    return False


def _shardings(function: Any, key: str, count: int) -> list[Any]:
    attributes = _value_attributes(function, key, count)
    return [
        a["sdy.sharding"] if a is not None and "sdy.sharding" in a else None for a in attributes
    ]


# --- step 2: what differs between devices --------------------------------------------------------


class _Uniformity:
    """Tells whether a value can differ between the devices that run the program.

    It can if a source of difference is reached from it backwards along the data. The arguments of
    the program are none: outside manual computations values are global and all devices agree.
    """

    def __init__(self, graph: _Graph):
        self._graph = graph
        self._uniform: set[_Value] = set()
        self._summaries: dict[tuple[str, int], frozenset[int] | None] = {}

    def varies(self, value: _Value) -> bool:
        """For a value of a public function."""
        seen = self._trace(value, self._uniform)
        if seen is None:
            return True
        self._uniform |= seen
        return False

    def _trace(self, value: _Value, stop: set[_Value]) -> set[_Value] | None:
        """All values that `value` is computed from in its function; None if it may differ."""
        seen = {value}
        pending = [value]
        while pending:
            current = pending.pop()
            if current in stop:
                continue
            needs = self._needs(current)
            if needs is None:
                return None
            for needed in needs:
                if needed not in seen:
                    seen.add(needed)
                    pending.append(needed)
        return seen

    def _summary(self, callee: str, index: int) -> frozenset[int] | None:
        """The arguments that a function's result is computed from; None if it may differ."""
        key = (callee, index)
        if key not in self._summaries:
            block = self._graph.function(callee).regions[0]
            seen = self._trace(block.yields[index], set())
            self._summaries[key] = (
                None
                if seen is None
                else frozenset(argument.index for argument in block.arguments if argument in seen)
            )
        return self._summaries[key]

    def _needs(self, value: _Value) -> Iterable[_Value] | None:
        """The values that `value` is computed from; None if it may differ whatever they are."""
        if isinstance(value.owner, _Block):
            return self._argument_needs(value.owner, value.index)
        return self._result_needs(value.owner, value.index)

    def _argument_needs(self, block: _Block, index: int) -> Iterable[_Value] | None:
        parent = block.parent
        if parent.name == "func.func":
            return []
        if parent.name == "sdy.manual_computation":
            split = _compat.is_split_by_manual_axes(parent.op, index)
            return None if split else [parent.operands[index]]
        if parent.name == "stablehlo.while":
            return [parent.operands[index], parent.regions[1].yields[index]]
        return None

    def _result_needs(self, op: _Op, index: int) -> Iterable[_Value] | None:
        if op.is_branch:
            return [op.operands[0], *(region.yields[index] for region in op.regions)]
        if op.name == "stablehlo.while":
            condition, body = op.regions
            return [op.operands[index], body.yields[index], condition.yields[0]]
        if op.name == "func.call":
            arguments = self._summary(_callee(op.op), index)
            return None if arguments is None else [op.operands[i] for i in arguments]
        if op.name == "sdy.manual_computation":
            # Values are one device's own in a manual computation, and global outside.
            return [op.regions[0].yields[index]] if _manual_computations(op) else []
        if op.name == "sdy.sharding_constraint":
            return op.operands
        if op.name == "stablehlo.custom_call":
            return self._custom_call_needs(op)
        if op.name in ("stablehlo.all_reduce", "stablehlo.all_gather"):
            around = [manual.op for manual in _manual_computations(op)]
            return [] if _compat.spans_all_devices(op.op, around) else None
        if op.name in _VARYING_OPERATIONS or op.name.split(".")[0] not in _DETERMINISTIC_DIALECTS:
            return None
        return op.uses

    def _custom_call_needs(self, op: _Op) -> Iterable[_Value] | None:
        if op.call is not None:
            agrees = op.call.kind in _AGREEING_KINDS
            everyone = op.call.group_sizes == [self._graph.partitions]
            known = agrees and everyone and not op.call.of_explicit_group and op.call.waits
            return [] if known else None
        target = _target(op.op)
        if target == "Sharding":
            return op.operands
        if target == "SPMDFullToShardShape":  # manual code without Shardy begins here
            source = op.operands[0].owner
            replicated = (
                isinstance(source, _Op)
                and "mhlo.sharding" in source.op.attributes
                and source.op.attributes["mhlo.sharding"].value == "{replicated}"
            )
            return op.operands if replicated else None
        return [] if target == "SPMDShardToFullShape" else None


def _manual_computations(op: _Op) -> list[_Op]:
    """The manual computations that `op` stands in."""
    found: list[_Op] = []
    block = op.block
    while block is not None:
        if block.parent.name == "sdy.manual_computation":
            found.append(block.parent)
        block = block.parent.block
    return found


def _mark_branching(block: _Block, branching: bool, uniformity: _Uniformity) -> None:
    block.branching = branching or any(
        op.call is not None and (op.call.name or op.call.target != CALL) for op in block.ops
    )
    for op in block.ops:
        if not op.holds_calls:
            continue
        inside = block.branching
        if not inside and op.is_branch:
            inside = uniformity.varies(op.operands[0])
        elif not inside and op.name == "stablehlo.while":
            inside = uniformity.varies(op.regions[0].yields[0])
        for region in op.regions:
            _mark_branching(region, inside, uniformity)


# --- step 2: who needs whom ----------------------------------------------------------------------


def _union(values: Iterable[_Value]) -> int:
    bits = 0
    for value in values:
        bits |= value.after
    return bits


def _find_needed(block: _Block, control: int) -> None:
    """Sets `after` of the values and calls of `block`, which is reached if `control` is done."""
    for op in block.ops:
        if op.call is not None:
            op.call.after |= control | _union(op.operands)
            op.results[0].after = op.call.after | 1 << op.call.site
        elif op.is_branch and op.holds_calls:
            chosen = control | op.operands[0].after
            for region in op.regions:
                _find_needed(region, chosen)
            for index, result in enumerate(op.results):
                yields = _union(region.yields[index] for region in op.regions)
                result.after = op.operands[0].after | yields
        elif op.name == "stablehlo.while" and op.holds_calls:
            _find_needed_in_loop(op, control)
        elif op.holds_calls:
            region = op.regions[0]
            for argument, operand in zip(region.arguments, op.operands, strict=True):
                argument.after = operand.after
            _find_needed(region, control)
            for result, value in zip(op.results, region.yields, strict=True):
                result.after = value.after
        elif bits := _union(op.uses):
            for result in op.results:
                result.after = bits
            for region in op.regions:  # an argument of a call-free loop or branch
                for argument in region.arguments:
                    argument.after = bits


def _find_needed_in_loop(op: _Op, control: int) -> None:
    condition, body = op.regions
    carried = [operand.after for operand in op.operands]
    again = 0
    while True:
        for region in op.regions:
            for argument, bits in zip(region.arguments, carried, strict=True):
                argument.after = bits
        _find_needed(condition, control | again)
        again = condition.yields[0].after
        _find_needed(body, control | again)
        grown = [bits | v.after for bits, v in zip(carried, body.yields, strict=True)]
        if grown == carried:
            break
        carried = grown
    for result, bits in zip(op.results, carried, strict=True):
        result.after = bits | again


def _set_phases(block: _Block) -> None:
    """A call comes one phase after the last call it depends on; so does an op that holds calls."""
    for op in block.ops:
        reached = max((value.phase for value in op.uses if value.block is block), default=0)
        op.phase = reached + 1 if op.call is not None or op.holds_calls else reached
        waits = op.call is None or op.call.waits
        for result in op.results:
            result.phase = op.phase if waits else reached  # a handle's ticket is there at once


# --- step 3: start and done ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Issue:
    """The start of a call in the order of a block, where the call itself stands for its done."""

    call: _Call


def _order(block: _Block) -> list["_Op | _Issue"]:
    """The ops of a branching block, moved only where a wait has to come after a start."""
    issues = {
        op.call: _Issue(op.call) for op in block.ops if op.call is not None and op.call.starts
    }
    by_phase: dict[int, list[_Issue]] = {}
    for call, issue in issues.items():
        by_phase.setdefault(call.node.phase, []).append(issue)

    def needs(entry: "_Op | _Issue") -> list["_Op | _Issue"]:
        op = entry.call.node if isinstance(entry, _Issue) else entry
        first: list[_Op | _Issue] = []
        if entry is op and op.call is not None and not op.call.waits:
            return [issues[op.call]]
        if entry is op and (op.call is not None or op.holds_calls):
            first = [i for phase, batch in by_phase.items() if phase <= op.phase for i in batch]
        if entry is op and op.call is not None and op.call.starts:
            return first
        defined = [v.owner for v in op.uses if v.block is block and isinstance(v.owner, _Op)]
        return [*first, *defined]

    order: dict[_Op | _Issue, None] = {}
    for op in block.ops:
        stack: list[tuple[_Op | _Issue, bool]] = [(op, False)]
        while stack:
            entry, ready = stack.pop()
            if entry in order:
                continue
            if ready:
                order[entry] = None
                continue
            stack.append((entry, True))
            stack.extend((need, False) for need in reversed(needs(entry)) if need not in order)
    return list(order)


def _split(block: _Block, outer: Sequence[Any], stage: int) -> None:
    """Rewrites the calls of `block` and of its regions; `outer` are tickets of enclosing blocks."""
    if not block.branching:
        for op in block.ops:
            if op.call is not None:
                op.call.emitted = [op.op]
            for region in op.regions if op.holds_calls else ():
                _split(region, (), stage)
        return

    order = _order(block)
    calls = [op.call for op in block.ops if op.call is not None]
    starting = [call for call in calls if call.starts]
    for call in starting:
        if not call.waits:  # a start that XLA merged with another would be done only once
            call.node.op.attributes["has_side_effect"] = ir.BoolAttr.get(True)
        call.emitted.append(_emit_start(call, stage) if call.waits else call.node.op)
    tickets = _Tickets(block, starting)
    placed: list[Any] = []
    for entry in order:
        if isinstance(entry, _Issue):
            placed.append(entry.call.emitted[0])
            continue
        if entry.call is not None:
            if not entry.call.waits:
                continue  # issued
            others = tickets.up_to(entry.phase, placed, besides=entry.call)
            emit = _emit_done if entry.call.starts else _emit_wait
            entry.call.emitted.append(emit(entry.call, [*others, *outer]))
            placed.append(entry.call.emitted[-1])
        elif entry.holds_calls:
            # Sharded regions cannot see values of enclosing blocks.
            isolated = entry.name == "sdy.manual_computation"
            inner = () if isolated else [*tickets.up_to(entry.phase, placed), *outer]
            for region in entry.regions:
                _split(region, inner, stage)
            placed.append(entry.op)
        else:
            placed.append(entry.op)
    for op in placed[:-1]:
        op.move_before(placed[-1])  # the terminator
    for call in calls:
        if call.waits:
            call.node.op.erase()


class _Tickets:
    """The tickets of a block's starts, by phase."""

    def __init__(self, block: _Block, calls: Sequence[_Call]):
        self._block = block
        self._calls = sorted(calls, key=lambda call: (call.node.phase, call.site))
        self._joined: dict[int, Any] = {}

    def up_to(self, phase: int, placed: list[Any], besides: _Call | None = None) -> list[Any]:
        """Values that are there once all starts of at most `phase` (but `besides`) have run."""
        starts = [call for call in self._calls if call.node.phase <= phase]
        if len(starts) <= _MAX_TICKET_OPERANDS:
            return [call.emitted[0].results[0] for call in starts if call is not besides]
        tickets = [call.emitted[0].results[0] for call in starts]
        key = len(tickets)
        if key not in self._joined:
            last = self._block.ops[-1].op
            join = self._joined[key] = ir.Operation.create(
                "stablehlo.concatenate",
                [ir.RankedTensorType.get([key], tickets[0].type.element_type)],
                tickets,
                {"dimension": _i64(0)},
                loc=last.location,
                ip=ir.InsertionPoint(last),
            )
            placed.append(join)
        return [self._joined[key].results[0]]


def _i64(value: int) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _layout(rank: int) -> Any:
    order = ", ".join(str(axis) for axis in reversed(range(rank)))
    text = f"dense<[{order}]>" if rank else "dense<>"
    return ir.Attribute.parse(f"{text} : tensor<{rank}xindex>")


def _attributes(call: _Call, target: str) -> dict[str, Any]:
    attributes = dict(call.node.op.attributes.items())
    attributes["call_target_name"] = ir.StringAttr.get(target)
    # A start that XLA moved out of a loop would be done more than once.
    attributes["has_side_effect"] = ir.BoolAttr.get(True)
    return attributes


def _emit_start(call: _Call, stage: int) -> Any:
    op = call.node.op
    attributes = _attributes(call, START)
    attributes["mhlo.backend_config"] = ir.DictAttr.get({**call.config, "stage": _i64(stage)})
    if "result_layouts" in attributes:
        attributes["result_layouts"] = ir.ArrayAttr.get([_layout(1)])
    ticket = ir.RankedTensorType.get([1], ir.IntegerType.get_unsigned(64))
    return ir.Operation.create(
        op.name, [ticket], list(op.operands), attributes, loc=op.location, ip=ir.InsertionPoint(op)
    )


def _emit_done(call: _Call, tickets: Sequence[Any]) -> Any:
    op = call.node.op
    attributes = _attributes(call, DONE)
    attributes["mhlo.backend_config"] = ir.DictAttr.get(call.config)
    if "operand_layouts" in attributes:
        source_layout = attributes["operand_layouts"][0]
        vectors = [_layout(1)] * len(tickets)
        attributes["operand_layouts"] = ir.ArrayAttr.get([_layout(1), source_layout, *vectors])
    done = ir.Operation.create(
        op.name,
        [op.results[0].type],
        [call.emitted[0].results[0], op.operands[0], *tickets],
        attributes,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    op.results[0].replace_all_uses_with(done.results[0])
    return done


def _emit_wait(call: _Call, tickets: Sequence[Any]) -> Any:
    op = call.node.op
    attributes = _attributes(call, HANDLE_WAIT)
    if "operand_layouts" in attributes:
        attributes["operand_layouts"] = ir.ArrayAttr.get([_layout(1)] * (1 + len(tickets)))
    wait = ir.Operation.create(
        op.name,
        [op.results[0].type],
        [op.operands[0], *tickets],
        attributes,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    op.results[0].replace_all_uses_with(wait.results[0])
    return wait


# --- step 4: results in place --------------------------------------------------------------------

# Operations whose result can be the very memory of their operand.
_VIEWS = frozenset(
    "stablehlo." + name
    for name in ("reshape", "transpose", "bitcast_convert", "optimization_barrier")
) | {"sdy.sharding_constraint"}


def _may_overwrite_operand(call: _Call) -> bool:
    """Whether XLA can give a call's result the memory of its operand without copying it first.

    So if nothing else uses what the program has computed there. Half the memory is touched then.
    It is a guess about XLA's later choices: where it is wrong, XLA puts a copy in front.
    Kinds other than all_reduce read operands when they have begun to write results.
    """
    if call.kind != "all_reduce" or call.target != CALL:
        return False
    value, block = call.node.operands[0], call.node.block
    while True:
        owner = value.owner
        if not isinstance(owner, _Op) or owner.block is not block:
            return False
        uses = owner.op.results[value.index].uses
        if next(uses, None) is None or next(uses, None) is not None:
            return False
        if owner.name in ("stablehlo.constant", "stablehlo.iota"):
            return False
        if owner.name not in _VIEWS:
            return True
        value = owner.operands[value.index if len(owner.results) > 1 else 0]


# --- programs of one device ----------------------------------------------------------------------

# XLA runs a program of one device that it expects to take fewer operations than this in the
# thread that dispatches it, which would then wait for the other members.
_LEAST_OPERATIONS = 1000


def _keep_out_of_dispatch(wait: Any) -> None:
    """Makes XLA expect a program to take long, by a branch that is never taken.

    The ticket that is waited for goes through a conditional that computes something if the ticket
    is 0, as no ticket is.
    """
    ticket = wait.operands[0]
    point = ir.InsertionPoint(wait)

    def make(name: str, types: Any, operands: Any, at: Any = point, **attributes: Any) -> Any:
        return ir.Operation.create(name, types, operands, attributes, loc=wait.location, ip=at)

    element = ticket.type.element_type
    flag = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
    one = ir.RankedTensorType.get([1], ir.IntegerType.get_signless(1))
    zero = ir.DenseElementsAttr.get_splat(ticket.type, ir.IntegerAttr.get(element, 0))
    nothing = make("stablehlo.constant", [ticket.type], [], value=zero).results[0]
    direction = ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
    is_zero = make(
        "stablehlo.compare", [one], [ticket, nothing], comparison_direction=direction
    ).results[0]
    is_zero = make("stablehlo.reshape", [flag], [is_zero]).results[0]
    choice = ir.Operation.create(
        "stablehlo.if", [ticket.type], [is_zero], regions=2, loc=wait.location, ip=point
    )
    taken, usual = (region.blocks.append() for region in choice.regions)
    with ir.Location.unknown():
        wide = ir.RankedTensorType.get([2 * _LEAST_OPERATIONS], element)
        inside = ir.InsertionPoint(taken)
        numbers = make("stablehlo.iota", [wide], [], inside, iota_dimension=_i64(0)).results[0]
        dimensions = ir.DenseI64ArrayAttr.get([0])
        spread = make(
            "stablehlo.broadcast_in_dim",
            [wide],
            [ticket],
            inside,
            broadcast_dimensions=dimensions,
        ).results[0]
        product = make("stablehlo.multiply", [wide], [numbers, spread], inside).results[0]
        cut = {
            name: ir.DenseI64ArrayAttr.get([value])
            for name, value in (("start_indices", 7), ("limit_indices", 8), ("strides", 1))
        }
        part = make("stablehlo.slice", [ticket.type], [product], inside, **cut).results[0]
        make("stablehlo.return", [], [part], inside)
        make("stablehlo.return", [], [ticket], ir.InsertionPoint(usual))
    wait.operands[0] = choice.results[0]


# --- what no static order can serve --------------------------------------------------------------


def _find_conflicts(block: _Block) -> list[str]:
    """Pairs of names that two branches must wait for in opposite order without needing to.

    A name is waited for before another is issued where the order of the block says so; if the data
    says so in both branches, it is a cycle of the user's, which shows itself at run time.
    """
    conflicts: list[str] = []
    for op in _walk(block):
        if not (op.is_branch and op.holds_calls and op.regions[0].branching):
            continue
        waits = [_waits(region) for region in op.regions]
        for i, first in enumerate(waits):
            for j in range(i + 1, len(waits)):
                for (a, b), by_data in sorted(first.items()):
                    opposite = waits[j].get((b, a))
                    if opposite is not None and not (by_data and opposite):
                        conflicts.append(
                            f"branch {i} waits for '{a}' before it can start '{b}', branch {j} of "
                            "the same conditional the other way round"
                        )
    return list(dict.fromkeys(conflicts))


def _waits(block: _Block) -> dict[tuple[str, str], bool]:
    """(a, b) -> whether the data says so, for all b that are started only after a is waited for."""
    pairs: dict[tuple[str, str], bool] = {}
    waited: list[_Call] = []

    def issue(calls: Iterable[_Call]) -> None:
        for call in calls:
            for earlier in waited:
                if earlier.name != call.name:
                    pair = (earlier.name, call.name)
                    by_data = bool(call.after >> earlier.site & 1)
                    pairs[pair] = pairs.get(pair, True) and by_data

    for entry in _order(block):
        if isinstance(entry, _Issue):
            issue(_keyless([entry.call]))
        elif entry.call is not None:
            waited.extend(_keyless([entry.call]))
        elif entry.holds_calls:
            inner = [
                op.call for region in entry.regions for op in _walk(region) if op.call is not None
            ]
            issue(_keyless(inner))
            for region in entry.regions:
                for pair, by_data in _waits(region).items():
                    pairs[pair] = pairs.get(pair, True) and by_data
            waited.extend(_keyless(inner))
    return pairs


def _refuse_unordered(block: _Block, describe: Callable[[int], str]) -> None:
    """Raises if two calls over a Group have one identity and may run in either order.

    Members may run programs of their own, so nothing else would tell which meets which.
    """
    seen: dict[tuple[Any, ...], _Call] = {}
    for op in block.ops:
        for region in op.regions if op.holds_calls else ():
            _refuse_unordered(region, describe)
        call = op.call
        if call is None or not call.starts or not call.of_explicit_group:
            continue
        key = op.operands[-1] if call.config["has_key"].value else None
        if key is not None and isinstance(key.owner, _Op) and "value" in key.owner.op.attributes:
            key = str(key.owner.op.attributes["value"])
        ends = [str(call.config[end]) for end in ("acts", "peer") if "peer" in call.config]
        identity = (call.name, str(call.config["members"]), *ends, key)
        earlier = seen.get(identity)
        if earlier is not None and not call.after >> earlier.site & 1:
            raise ValueError(
                f"two calls '{call.name}' of this program, {describe(earlier.source)} and "
                f"{describe(call.source)}, may run in either order, and other programs could not "
                "tell which they meet; give them different name= or key=, or use the result of one "
                "for the other"
            )
        seen[identity] = call


def _keyless(calls: Iterable[_Call]) -> list[_Call]:
    """Named calls whose name alone says which collective they are."""
    return [c for c in calls if c.name and not c.config["has_key"].value]


_conflicts: dict[int, list[str]] = {}


def conflicts_of(program: int) -> list[str]:
    """Why a program's named calls may be stuck although their data has no cycle."""
    return list(_conflicts.get(program, ()))


# --- step 5: names -------------------------------------------------------------------------------


def _hash(module: Any) -> int:
    text = module.operation.get_asm(
        binary=True, enable_debug_info=False, print_generic_op_form=True, assume_verified=True
    )
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _set_names(call: _Call, program: int, survey: _Survey) -> None:
    signed = program - (1 << 64) if program >> 63 else program
    for op in call.emitted:
        config = {entry.name: entry.attr for entry in op.attributes["mhlo.backend_config"]}
        config.pop("call", None)
        config["site"] = _i64(call.site)
        config["program"] = _i64(signed)
        config["closed"] = _i64(int(not survey.may_wait))
        op.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def _bits(value: int) -> tuple[int, ...]:
    return tuple(i for i in range(value.bit_length()) if value >> i & 1)


def holds_calls(module: Any) -> bool:
    """Whether a module, rewritten or not, holds calls of ours."""
    found = False

    def visit(op: Any) -> Any:
        nonlocal found
        if _is_table(op) or (
            op.name == "stablehlo.custom_call" and _target(op) in (*TARGETS, RANK)
        ):
            found = True
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return found


def _settle(module: Any, devices: list[int]) -> set[tuple[int, ...]]:
    """Tells the calls what is known when the program is loaded.

    One module may be loaded for other devices later, or be part of a larger one (`jax.export`),
    which may not be closed.

    Returns:
      The groups of its calls, as device ids.
    """
    groups: set[tuple[int, ...]] = set()
    calls: list[Any] = []
    ranks: list[Any] = []
    tables: list[Any] = []
    with module.context, ir.Location.unknown():
        known: dict[str, Any] = {"devices": ir.DenseI64ArrayAttr.get(devices)}
        if _survey(module).may_wait:
            known["closed"] = _i64(0)

        def visit(op: Any) -> Any:
            if op.name == "stablehlo.custom_call" and _target(op) in TARGETS:
                calls.append(op)
            elif op.name == "stablehlo.custom_call" and _target(op) == RANK:
                ranks.append(op)
            elif _is_table(op):
                tables.append(op)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        for op in calls:
            config = {entry.name: entry.attr for entry in op.attributes["mhlo.backend_config"]}
            config |= known
            if "peer" in config:
                config |= _ends(config, devices)
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
            positions = _integers(config["groups"])
            ids = _integers(config["members"]) or devices
            for size in _integers(config["group_sizes"]):
                # The handlers refuse what does not fit, and say so.
                fitting = [p for p in positions[:size] if 0 <= p < len(ids)]
                groups.add(tuple(ids[p] for p in fitting))
                del positions[:size]
        tables += [_put_rank(op, len(devices)) for op in ranks]
        for table in tables:
            _fill(table, devices)
    return groups


def _ends(config: dict[str, Any], devices: list[int]) -> dict[str, Any]:
    """The groups of a message's call: its peer with each device that runs it."""
    members, peer = _integers(config["members"]), config["peer"].value
    callers = [members.index(device) for device in devices if device in members]
    if len(devices) == 1 and callers in ([], [peer]):
        fault = "is that rank itself" if callers else f"is none of the group's {members}"
        raise ValueError(f"{config['shown'].value}: device {devices[0]}, which calls it, {fault}")
    sends = config["acts"].value == 0
    pairs = [[one, peer] if sends else [peer, one] for one in callers if one != peer]
    groups = ir.DenseI64ArrayAttr.get([member for pair in pairs for member in pair])
    return {"groups": groups, "group_sizes": ir.DenseI64ArrayAttr.get([2] * len(pairs))}


def _is_table(op: Any) -> bool:
    """Whether it is a table of ranks, which is filled anew for every load."""
    return (
        op.name == "stablehlo.constant"
        and "mhlo.frontend_attributes" in op.attributes
        and _RANKS_IN in op.attributes["mhlo.frontend_attributes"]
    )


def _put_rank(op: Any, devices: int) -> Any:
    """Replaces a question for the rank in a Group by a look into a table, which it returns."""
    config = {entry.name: entry.attr for entry in op.attributes["mhlo.backend_config"]}
    members = ",".join(map(str, _integers(config["members"])))
    result = op.results[0]

    def make(name: str, shape: list[int], operands: list[Any], **attributes: Any) -> Any:
        kind = ir.RankedTensorType.get(shape, result.type.element_type)
        point = ir.InsertionPoint(op)
        return ir.Operation.create(name, [kind], operands, attributes, loc=op.location, ip=point)

    table = make("stablehlo.constant", [devices], [], value=_ranks([0] * devices))
    table.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {_RANKS_IN: ir.StringAttr.get(members)}
    )
    sizes = ir.DenseI64ArrayAttr.get([1])
    operands = [table.results[0], op.operands[0]]
    rank = make("stablehlo.dynamic_slice", [1], operands, slice_sizes=sizes).results[0]
    result.replace_all_uses_with(make("stablehlo.reshape", [], [rank]).results[0])
    op.erase()
    return table


def _ranks(values: list[int]) -> Any:
    kind = ir.IntegerType.get_signless(32)
    entries = [ir.IntegerAttr.get(kind, value) for value in values]
    return ir.DenseElementsAttr.get(entries, ir.RankedTensorType.get([len(values)], kind))


def _fill(table: Any, devices: list[int]) -> None:
    """Puts the ranks of the devices that the program is loaded for into a table."""
    config = {entry.name: entry.attr for entry in table.attributes["mhlo.frontend_attributes"]}
    members = [int(member) for member in config[_RANKS_IN].value.split(",")]
    if outside := [device for device in devices if device not in members]:
        raise ValueError(f"device {outside[0]} asks for its rank in a Group that it is not in")
    table.attributes["value"] = _ranks([members.index(device) for device in devices])


def install(
    describe: Callable[[int], str],
    register: Callable[[Site], None],
    begin_executable: Callable[[set[tuple[int, ...]], str], Any],
) -> None:
    """Hooks `rewrite` into JAX; the lowering rules of our calls must call `_compat.note_call`.

    Args:
      describe: Gives the source line of a call by its `call` attribute.
      register: Is given every site of a lowered module.
      begin_executable: Is given the groups of a module that is about to be compiled or loaded, and
        the platform.
    """

    def prepare(module: Any, devices: list[int], platform: str) -> None:
        begin_executable(_settle(module, devices), platform)

    _compat.install_hooks(
        rewrite=lambda module: rewrite(module, describe, register),
        holds_calls=holds_calls,
        begin_executable=prepare,
    )


def rewrite(
    module: Any, describe: Callable[[int], str], register: Callable[[Site], None]
) -> int | None:
    """Rewrites a lowered module in place.

    Args:
      module: The `ir.Module` that JAX lowered a program to.
      describe: Gives the source line of a call by its `call` attribute.
      register: Is given every site of the module.

    Returns:
      The program's hash, or None if the module holds no calls of ours.
    """
    with module.context, ir.Location.unknown():
        survey = _survey(module)
        if not survey.holders:
            return None
        _inline(survey)
        attributes = module.operation.attributes
        graph = _Graph(survey.functions, attributes["mhlo.num_partitions"].value)
        uniformity = _Uniformity(graph)
        public = [graph.function(name) for name in survey.functions if name in survey.holders]
        if graph.partitions > 1 and not survey.may_wait:
            survey.may_wait = any(_compiler_may_communicate(f, module) for f in public)
        blocks = [function.regions[0] for function in public]
        conflicts: list[str] = []
        for block in blocks:
            _mark_branching(block, False, uniformity)
            _find_needed(block, 0)
            for inner in [block, *(r for op in _walk(block) for r in op.regions if op.holds_calls)]:
                if inner.branching:
                    _set_phases(inner)
            conflicts += _find_conflicts(block)
        for block in blocks:
            _refuse_unordered(block, describe)
        for block in blocks:
            _split(block, (), int(survey.may_fail))
        waiting = [call.emitted[-1] for call in graph.calls if call.waits]
        if graph.partitions == 1 and waiting and _target(waiting[0]) != CALL:
            _keep_out_of_dispatch(waiting[0])
        for call in graph.calls:
            if len(call.emitted) == 1 and _may_overwrite_operand(call):
                _compat.alias_result_to_operand(call.node.op)
        for call in graph.calls:
            _set_names(call, 0, survey)
        program = _hash(module)
        program_name = attributes["sym_name"].value
        if conflicts:
            _conflicts[program] = conflicts
        for call in graph.calls:
            _set_names(call, program, survey)
            register(
                Site(
                    program=program,
                    site=call.site,
                    operation=call.operation,
                    name=call.name,
                    source=describe(call.source),
                    program_name=program_name,
                    after=_bits(call.after),
                )
            )
        return program
