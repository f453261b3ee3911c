# SPDX-License-Identifier: Apache-2.0
"""The launcher: runs programs with plain collectives so that no device queue waits for one.

A traced program is cut at its collectives into *segments*: a segment is all that needs the same
collectives (`_segments`). It is a program of its own, which starts the collectives whose operands
it computes, with a tag, and takes the results of those that have finished. The runtime announces
the ends of tagged collectives; a segment is dispatched when all that it needs is there.

A collective all of whose members are devices of one process that run the same program needs no
other program, and is not cut at unless that is asked for.
"""

import atexit
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dfccl import _compat, _core, _handles
from jax_dfccl._groups import replica_groups
from jax_dfccl._primitive import explicit
from jax_dfccl._segments import Environment, Flat, Flattening, Node, Value, flatten

# Launches of one program are numbered modulo this, so that names and keys stay few.
_KEYS = 4096
_MOST_IN_FLIGHT = 1024  # far fewer than keys

# Collectives that would keep a device queue waiting.
_NATIVE = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter "
    "unreduced_psum all_to_all ppermute pbroadcast ragged_all_to_all".split()
)


@dataclasses.dataclass(eq=False)
class _Manual:
    """A `jax.shard_map` that holds collectives."""

    mesh: Any
    entered: dict[Value, tuple[Value, Any]] = dataclasses.field(default_factory=dict)

    @property
    def split(self) -> Any:
        """The spec of what is every device's own."""
        return P(self.mesh.axis_names)

    @property
    def local_devices(self) -> int:
        own = jax.process_index()
        return sum(device.process_index == own for device in self.mesh.devices.flat)


@dataclasses.dataclass(eq=False)
class _Segment:
    """What runs in one dispatch.

    Arrays between segments have keys. A value: one array of all devices; (value,): each device's
    own; a node: tickets.
    """

    number: int
    needs: int
    where: _Manual | None
    hop: int
    nodes: list[Node] = dataclasses.field(default_factory=list)
    waits: list[Node] = dataclasses.field(default_factory=list)
    inputs: dict[Hashable, Any] = dataclasses.field(default_factory=dict)  # key -> spec
    outputs: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    run: Any = None  # jitted: (tag, launch, *inputs) -> outputs
    dispatches: int = 0
    seconds: float = 0.0

    @property
    def starts(self) -> list[Node]:
        return [node for node in self.nodes if node.is_collective]


@dataclasses.dataclass(frozen=True)
class _Options:
    """Of `dispatch`."""

    priority: int = 0
    cut_local: bool = False


class _Program:
    """A function, traced for some types of arguments and cut."""

    def __init__(self, function: Callable[..., Any], arguments: Any, options: _Options) -> None:
        self.name = getattr(function, "__name__", "function")
        self.options = options
        self._left: dict[Value, tuple[Any, Any, _Manual]] = {}
        closed, self.shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        self.flat: Flat = flatten(f"dispatch({self.name})", closed, self._enter, self._keep)
        self.donated = _donated(closed)
        self._refuse_native(closed.jaxpr)
        self.identity = self._identify(closed)
        self.segments: list[_Segment] = []
        self._homes: dict[Value, _Segment] = {}
        self._cut()
        for segment in self.segments:
            self._make(segment)

    def _enter(self, equation: Any, operands: list[Any], flattening: Flattening) -> Any:
        if equation.primitive.name != "shard_map":
            return None
        params = equation.params
        manual = _Manual(params["mesh"])
        jaxpr = params["jaxpr"]
        inner = []
        for variable, operand, spec in zip(jaxpr.invars, operands, params["in_specs"], strict=True):
            outer = operand
            if not isinstance(outer, Value):
                outer = flattening.constant(operand.aval, operand.val)
            inner.append(Value(variable.aval, outer.needs))
            manual.entered[inner[-1]] = (outer, spec)
        flattening.where = manual
        results = flattening.run(jaxpr, (), inner)
        flattening.where = None
        outside = []
        for variable, result, spec in zip(
            equation.outvars, results, params["out_specs"], strict=True
        ):
            needs = result.needs if isinstance(result, Value) else 0
            outside.append(Value(variable.aval, needs))
            self._left[outside[-1]] = (result, spec, manual)
        return outside

    def _keep(self, equation: Any, mesh: Any) -> bool:
        """Whether a collective needs no other program, wherever this one runs."""
        axes, groups = equation.params["axes"], equation.params["groups"]
        if self.options.cut_local or mesh is None or explicit(axes):
            return False
        devices = mesh.devices.flat
        return all(
            len({devices[position].process_index for position in group}) == 1
            for group in replica_groups(mesh.shape, axes, groups)
        )

    def _refuse_native(self, jaxpr: Any) -> None:
        for equation in _compat.equations_below(jaxpr):
            if equation.primitive.name in _NATIVE:
                where = _compat.user_source(equation.source_info.traceback)
                raise NotImplementedError(
                    f"dispatch({self.name}): {where} calls {equation.primitive.name} of jax.lax, "
                    "which would keep other programs from the devices; use that of jax_dfccl (if "
                    "autodiff put it there, give jax.shard_map check_vma=False)"
                )

    def _identify(self, closed: Any) -> str:
        """Equal in all processes that run this program, and different for others."""
        text = [self.name, re.sub(r" at 0x[0-9a-f]+", "", str(closed)), str(self.options)]
        for manual in {node.where: None for node in self.flat.nodes if node.where is not None}:
            text.append(str([device.id for device in manual.mesh.devices.flat]))
        return hashlib.blake2b("\n".join(text).encode(), digest_size=12).hexdigest()

    # Cutting ------------------------------------------------------------------------------------

    def _segment(self, needs: int, where: _Manual | None, hop: int) -> _Segment:
        for segment in self.segments:
            if (segment.needs, segment.where, segment.hop) == (needs, where, hop):
                return segment
        segment = _Segment(len(self.segments), needs, where, hop)
        self.segments.append(segment)
        return segment

    def _home(self, value: Value) -> _Segment | None:
        """The segment that computes a value; None if it is there from the start."""
        if value in self._left:
            inner, _, manual = self._left[value]
            home = self._home(inner) if isinstance(inner, Value) else None
            if home is None or home.where is not manual:  # it goes through
                hop = 0 if home is None else home.hop + 1
                return self._segment(value.needs, manual, hop)
            return home
        if value in self._homes:
            return self._homes[value]
        outer = self._outer(value)
        return None if outer is None else self._home(outer)

    def _outer(self, value: Value) -> Value | None:
        for manual in self._manuals:
            if value in manual.entered:
                return manual.entered[value][0]
        return None

    def _leave_out_unused(self) -> None:
        """As JAX does; all members leave out the same."""
        used: set[Value] = set()

        def use(value: Any) -> None:
            while isinstance(value, Value) and value not in used:
                used.add(value)
                value = self._left[value][0] if value in self._left else self._outer(value)

        for value in self.flat.results:
            use(value)
        kept = []
        for node in reversed(self.flat.nodes):
            if node.equation.effects - _axis_effects(node) or not used.isdisjoint(node.results):
                kept.append(node)
                for value in node.operands:
                    use(value)
        self.flat.nodes = kept[::-1]

    def _cut(self) -> None:
        found = [node.where for node in self.flat.nodes] + [m for _, _, m in self._left.values()]
        self._manuals = list(dict.fromkeys(manual for manual in found if manual is not None))
        self._leave_out_unused()
        for node in self.flat.nodes:
            hop = 0
            for value in node.operands:
                home = self._home(value) if isinstance(value, Value) else None
                if home is not None:
                    hop = max(hop, home.hop + (home.where is not node.where))
            segment = self._segment(node.needs, node.where, hop)
            segment.nodes.append(node)
            if node.is_collective:
                segment.outputs[node] = None
                segment = self._segment(node.needs | 1 << node.number, node.where, hop)
                segment.waits.append(node)
                segment.inputs[node] = None
            for value in node.results:
                self._homes[value] = segment
        for segment in list(self.segments):
            for node in segment.nodes:
                for value in node.operands:
                    if isinstance(value, Value):
                        self._bring(value, segment)
        for value in self.flat.results:
            if isinstance(value, Value):
                self._offer(value)

    def _bring(self, value: Value, segment: _Segment) -> None:
        """Makes a value that a segment uses one of its inputs, unless it computes it."""
        manual = segment.where
        if manual is not None and value in manual.entered:
            outer, spec = manual.entered[value]
            segment.inputs[outer] = spec
            self._offer(outer)
            return
        home = self._home(value)
        if home is segment:
            return
        if manual is None:
            segment.inputs[value] = None
            self._offer(value)
        else:
            assert home is not None
            segment.inputs[(value,)] = home.outputs[(value,)] = manual.split

    def _offer(self, value: Value) -> None:
        """Makes a value an output of the segment that computes it."""
        home = self._home(value)
        if home is None:
            return
        if value not in home.outputs and value in self._left:
            inner, spec, _ = self._left[value]
            home.outputs[value] = spec
            if isinstance(inner, Value):
                self._bring(inner, home)
        else:
            home.outputs.setdefault(value, None)

    def _make(self, segment: _Segment) -> None:
        manual = segment.where
        inputs, outputs = list(segment.inputs), list(segment.outputs)

        def read(environment: Environment, tickets: dict[Node, Any], key: Hashable) -> Any:
            if isinstance(key, Node):
                return tickets[key]
            if isinstance(key, tuple):
                return jnp.asarray(environment.read(key[0]))[None]
            inner = self._left[key][0] if manual is not None else key  # type: ignore[index]
            return environment.read(inner)

        def body(tag: Any, launch: Any, *arrays: Any) -> Any:
            environment = Environment()
            tickets: dict[Node, Any] = {}
            entered: dict[Any, list[Any]] = {}
            for value, (outer, _) in manual.entered.items() if manual is not None else ():
                entered.setdefault(outer, []).append(value)
            for key, array in zip(inputs, arrays, strict=True):
                if isinstance(key, Node):
                    environment.wait(key, array)
                elif isinstance(key, tuple):
                    environment[key[0]] = array[0]
                else:
                    for value in entered.get(key, [key]):
                        environment[value] = array
            for node in segment.nodes:
                if node.is_collective:
                    changed = self._changed(node, launch)
                    tickets[node] = environment.start(node, tag + np.int32(node.number), **changed)
                else:
                    environment.run(node)
            return tuple(read(environment, tickets, key) for key in outputs)

        body.__name__ = f"{self.name}_{segment.number}"
        run = body
        if manual is not None:

            def spec_of(key: Hashable, spec: Any) -> Any:
                return manual.split if isinstance(key, Node) else spec

            run = jax.shard_map(
                body,
                mesh=manual.mesh,
                in_specs=(P(), P(), *itertools.starmap(spec_of, segment.inputs.items())),
                out_specs=tuple(itertools.starmap(spec_of, segment.outputs.items())),
                check_vma=False,
            )
        segment.run = jax.jit(functools.wraps(body)(run) if manual is not None else run)

    def _changed(self, node: Node, launch: Any) -> dict[str, Any]:
        """Parameters that the launcher sets: who is who between launches, and who goes first."""
        params = node.equation.params
        changed: dict[str, Any] = {}
        if not params["name"]:
            changed.update(name=f"launch {self.identity}/{node.number}", key=launch)
        if self.options.priority:
            changed["priority"] = self.options.priority
        return changed


def _axis_effects(node: Node) -> set[Any]:
    return {e for e in node.equation.effects if isinstance(e, _compat.NamedAxisEffect)}


def _donated(closed: Any) -> list[bool]:
    equations = closed.jaxpr.eqns
    if len(equations) == 1 and "donated_invars" in equations[0].params:
        donated = zip(equations[0].invars, equations[0].params["donated_invars"], strict=True)
        variables = {id(variable) for variable, given in donated if given}
        return [id(variable) in variables for variable in closed.jaxpr.invars]
    return [False] * len(closed.jaxpr.invars)


class Future(concurrent.futures.Future[Any]):
    """The result of a dispatched program; it may be an argument of the next."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.shapes = shapes  # of the result
        self._launch: Any = None

    def cancel(self) -> bool:
        """Ends the program, and with an error its collectives on all members."""
        launch = self._launch
        return launch is not None and launch.fail(concurrent.futures.CancelledError(), cancel=True)


class _Launch:
    """One run of a program."""

    def __init__(self, owner: "Launcher", program: _Program, number: int, future: Future) -> None:
        self.program = program
        self.number = number
        self.future = future
        self._owner = owner
        self._lock = threading.Lock()
        self._arrays: dict[Hashable, Any] = {}
        self._missing: dict[_Segment, set[Any]] = {}
        self._awaiting: dict[Any, list[_Segment]] = {}
        self._uses: dict[Hashable, int] = {}
        self._donated: list[Any] = []
        self._left = len(program.segments)
        self._ended = False
        self._device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]  # of a program of one device
        self.tag = 0
        self.has_room = True  # it counts among those that are under way

    def begin(self, leaves: list[Any]) -> None:
        """Its arguments are there."""
        program = self.program
        flat = program.flat
        self._arrays.update(zip(flat.inputs, leaves, strict=True))
        self._arrays.update(flat.constants)
        placed = [x.devices() for x in leaves if _is_committed(x)]
        if placed and len(placed[0]) == 1:
            (self._device,) = placed[0]
        self._donated = [x for x, given in zip(leaves, program.donated, strict=True) if given]
        for key in (key for segment in program.segments for key in segment.inputs):
            self._uses[key] = self._uses.get(key, 0) + 1
        for value in flat.results:
            if isinstance(value, Value):
                self._uses[value] = self._uses.get(value, 0) + 1
        ready = []
        for segment in program.segments:
            missing = {key for key in segment.inputs if key not in self._arrays}
            missing |= {(node, "end") for node in segment.waits}
            self._missing[segment] = missing
            for token in missing:
                self._awaiting.setdefault(token, []).append(segment)
            if not missing:
                ready.append(segment)
        self._owner.ready(self, ready)
        if not program.segments:
            self._finish()

    def arrived(self, tokens: Iterable[Any]) -> None:
        """What segments waited for is there."""
        ready = []
        with self._lock:
            for token in tokens:
                for segment in self._awaiting.pop(token, ()):
                    self._missing[segment].discard(token)
                    if not self._missing[segment]:
                        ready.append(segment)
        self._owner.ready(self, ready)

    def dispatch(self, segment: _Segment) -> None:
        """Runs a segment; called by one thread at a time."""
        with self._lock:
            if self._ended:
                return
            arrays = [self._arrays[key] for key in segment.inputs]
        begin = time.perf_counter()
        try:
            tag: Any = np.int32(self.tag)
            if segment.where is None and self._device and not any(map(_is_committed, arrays)):
                tag = jax.device_put(tag, self._device)  # so there the segment runs
            results = segment.run(tag, np.int32(self.number % _KEYS), *arrays)
        except Exception as error:
            self.fail(error)
            return
        if segment.dispatches:  # the first one compiles
            segment.seconds += time.perf_counter() - begin
        segment.dispatches += 1
        with self._lock:
            ended = self._ended
            self._arrays.update(zip(segment.outputs, results, strict=True))
            for key in segment.inputs if not ended else ():
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._arrays[key]
            self._left -= 1
            last = self._left == 0
        if ended:
            self._drop()
        elif last:
            self._finish()
        else:
            self.arrived(segment.outputs)

    def _finish(self) -> None:
        results = [
            self._arrays[value] if isinstance(value, Value) else value.val
            for value in self.program.flat.results
        ]
        with self._lock:
            if self._ended:
                return
            self._ended = True
        kept = {id(result) for result in results}
        for array in self._donated:
            if isinstance(array, jax.Array) and id(array) not in kept:
                array.delete()
        self._arrays.clear()
        self._donated.clear()
        self.future._launch = None  # so that the last holder's end is the arrays' end
        tree = jax.tree.structure(self.program.shapes)
        self._owner.ended(self)
        self.future.set_result(tree.unflatten(results))

    def fail(self, error: BaseException, *, cancel: bool = False) -> bool:
        """Ends the launch; False: it has ended already."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
        self._owner.ended(self)
        self._drop(cancel=cancel)
        if cancel:
            super(Future, self.future).cancel()
        if not self.future.done():
            self.future.set_exception(error)
        return True

    def _drop(self, *, cancel: bool = False) -> None:
        """Gives back what was started and has not been waited for."""
        with self._lock:
            tickets = [a for key, a in self._arrays.items() if isinstance(key, Node)]
            self._arrays.clear()

        def drop() -> None:
            for ticket in tickets:
                for number in _handles.numbers_of(ticket):
                    if cancel:
                        _core.handle_cancel(number)
                    _core.handle_drop(number)

        threading.Thread(target=drop, name="jax_dfccl-drop", daemon=True).start()


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """What the dispatches of one segment have cost the launcher."""

    program: str
    segment: int
    dispatches: int
    seconds: float  # of all but the first dispatch, which compiles


class Launcher:
    """Dispatches segments; there is one in a process (see `launcher`)."""

    def __init__(self) -> None:
        self._programs: weakref.WeakKeyDictionary[Any, dict[Any, _Program]]
        self._programs = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_MOST_IN_FLIGHT)
        self._launches: dict[str, int] = {}  # of each program
        self._tags: dict[int, tuple[_Launch, Node, int]] = {}  # and how many ends are to come
        self._next_tag = 0
        self._queue: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self._order = itertools.count()
        self._stopped = False
        self._threads = [
            threading.Thread(target=run, name=f"jax_dfccl-{run.__name__}", daemon=True)
            for run in (self._dispatch_all, self._take_ends)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._stop)

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        priority: int = 0,
        cut_local: bool = False,
    ) -> Future:
        """Dispatches `function(*arguments)`; never waits for a collective. See `dispatch`."""
        options = _Options(priority, cut_local)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_future)
        shapes = [leaf.shapes if _is_future(leaf) else _shape_of(leaf) for leaf in leaves]
        typed = tree.unflatten(shapes)
        flat, flat_tree = jax.tree.flatten(typed)
        key = (flat_tree, tuple((s.shape, s.dtype, s.weak_type) for s in flat), options)
        with self._lock:
            known = self._programs.setdefault(function, {})
            program = known.get(key)
        if program is None:
            made = _Program(function, typed, options)
            with self._lock:
                program = known.setdefault(key, made)
        # In a callback this must not wait.
        has_room = self._room.acquire(blocking=threading.current_thread() not in self._threads)
        future = Future(program.shapes)
        with self._lock:
            number = self._launches.get(program.identity, 0)
            self._launches[program.identity] = number + 1
            launch = future._launch = _Launch(self, program, number, future)
            launch.has_room = has_room
            self._give_tags(launch)
        self._begin_when_ready(launch, leaves)
        return future

    def costs(self) -> list[SegmentCost]:
        """What the segments of all programs have cost so far."""
        with self._lock:
            programs = [p for known in self._programs.values() for p in known.values()]
        return [
            SegmentCost(program.name, segment.number, segment.dispatches, segment.seconds)
            for program in programs
            for segment in program.segments
        ]

    def _give_tags(self, launch: _Launch) -> None:
        collectives = launch.program.flat.collectives
        tags = 1 + max((node.number for node in collectives), default=-1)
        if self._next_tag + tags >= 1 << 31:
            self._next_tag = 0
        launch.tag = self._next_tag
        self._next_tag += tags
        for node in collectives:
            count = 1 if node.where is None else node.where.local_devices
            self._tags[launch.tag + node.number] = (launch, node, count)

    def _begin_when_ready(self, launch: _Launch, leaves: list[Any]) -> None:
        futures = [leaf for leaf in leaves if _is_future(leaf)]
        remaining = itertools.count(len(futures) - 1, -1)

        def begin() -> None:
            try:
                found = [leaf.result() if _is_future(leaf) else leaf for leaf in leaves]
                arrays = jax.tree.leaves(found)
                if futures or all(map(_is_ready, arrays)):
                    launch.begin(arrays)
                    return
            except BaseException as error:
                launch.fail(error)
                return
            threading.Thread(target=begin_later, args=(arrays,), daemon=True).start()

        def begin_later(arrays: list[Any]) -> None:
            try:
                jax.block_until_ready(arrays)
                launch.begin(arrays)
            except BaseException as error:
                launch.fail(error)

        if not futures:
            begin()
        for future in futures:
            future.add_done_callback(lambda _: None if next(remaining) else begin())

    def ready(self, launch: _Launch, segments: Iterable[_Segment]) -> None:
        """Queues segments that have all they need."""
        for segment in segments:
            order = (-launch.program.options.priority, next(self._order))
            self._queue.put((*order, launch, segment))

    def ended(self, launch: _Launch) -> None:
        """A launch has ended."""
        with self._lock:
            for node in launch.program.flat.collectives:
                self._tags.pop(launch.tag + node.number, None)
        if launch.has_room:
            self._room.release()

    def _dispatch_all(self) -> None:
        while True:
            *_, launch, segment = self._queue.get()
            if launch is None:
                return
            launch.dispatch(segment)
            del launch, segment  # while the next is waited for, nothing holds the arrays

    def _take_ends(self) -> None:
        while not self._stopped:
            for tag, error in _core.take_ends(0.1):
                self._end(tag, error)

    def _end(self, tag: int, error: str) -> None:
        with self._lock:
            found = self._tags.get(tag)
            if found is None:
                return
            launch, node, count = found
            if count == 1 or error:
                del self._tags[tag]
            else:
                self._tags[tag] = (launch, node, count - 1)
        if error:
            launch.fail(jax.errors.JaxRuntimeError(error))
        elif count == 1:
            launch.arrived([(node, "end")])

    def _stop(self) -> None:
        self._stopped = True
        self._queue.put((-(1 << 40), 0, None, None))
        for thread in self._threads:
            thread.join(timeout=2)


def _is_future(leaf: Any) -> bool:
    return isinstance(leaf, Future)


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed  # type: ignore[attr-defined]


def _is_ready(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_ready()  # type: ignore[attr-defined]


def _shape_of(leaf: Any) -> Any:
    typed = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(typed.shape, typed.dtype, weak_type=typed.weak_type)


_launcher: Launcher | None = None
_making = threading.Lock()


def launcher() -> Launcher:
    """The launcher of this process.

    >>> import jax, jax_dfccl
    >>> double = jax.jit(lambda x: 2 * x)
    >>> future = jax_dfccl.launcher().submit(double, 3)
    >>> int(future.result())
    6
    >>> jax_dfccl.launcher().costs()[-1].dispatches >= 1
    True
    """
    global _launcher
    with _making:
        if _launcher is None:
            _launcher = Launcher()
        return _launcher


def dispatch(
    function: Callable[..., Any], *, priority: int = 0, cut_local: bool = False
) -> Callable[..., Future]:
    """Makes a function's calls run by the launcher, which lets nothing wait on a device.

    >>> import jax, numpy as np, jax_dfccl
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    >>> def center(x):
    ...     return x - jax_dfccl.all_reduce(x, "i", op="mean")
    >>> step = jax_dfccl.dispatch(
    ...     jax.shard_map(center, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    ... )
    >>> x = np.arange(jax.device_count(), dtype=np.float32)
    >>> np.testing.assert_array_equal(step(x).result(), x - x.mean())

    Programs may be dispatched from any thread, in any order on any process: one that waits for
    another device's program is no obstacle to those behind it.

    Args:
        function: takes and returns pytrees of arrays, jitted or not: with plain collectives under
            `jax.shard_map` over all axes of its mesh, or on one device over a `Group`. None
            that it is cut at may stand in a loop or a branch, and none may be of `jax.lax`.
        priority: segments and collectives of functions with a larger one go first.
        cut_local: whether to cut also at collectives over axes whose members are all in one
            process. These wait for no other program; cut, they let others run meanwhile.

    Returns:
        A function of the same arguments, each of which may also be a `Future` of another
        dispatch, that returns a `concurrent.futures.Future`. It waits for nobody, unless 1024
        programs are under way.

    Raises:
        NotImplementedError: a collective stands where it cannot be served; the message names
            its line.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Future:
        return launcher().submit(function, *arguments, priority=priority, cut_local=cut_local)

    return call
