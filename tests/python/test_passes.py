# SPDX-License-Identifier: Apache-2.0
"""The module passes, on modules as JAX lowers them; no extension and no device work is needed."""

import functools
import operator
import re
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dfccl import _passes
from jax_dfccl._compat import ir
from jax_dfccl._passes import CALL, DONE, START

DEVICES = 8
SPLIT = P("i")
X = jnp.ones((DEVICES, 4), jnp.float32)


def call(x, name="", groups=None, key=None):
    """The custom call that the lowering of all_reduce emits, without its primitive."""
    groups = groups or [list(range(DEVICES))]
    result = jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=jax.typeof(x).sharding,
        manual_axis_type=jax.typeof(x).manual_axis_type,
    )
    return jax.ffi.ffi_call(CALL, result, vmap_method="sequential")(
        x,
        *([] if key is None else [key]),
        kind="all_reduce",
        op="sum",
        root=np.int64(0),
        pairs=np.array([], np.int64),
        groups=np.array(functools.reduce(operator.iadd, groups, []), np.int64),
        group_sizes=np.array([len(group) for group in groups], np.int64),
        devices=np.arange(DEVICES),
        members=np.array([], np.int64),
        name=name,
        has_key=np.int64(key is not None),
        priority=np.int64(0),
        timeout_us=np.int64(0),
        call=np.int64(7),
        program=np.int64(0),
        site=np.int64(-1),
    )


def shard_map(body, in_specs=SPLIT):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P("i"), check_vma=False)
    )


def index_is_even():
    return lax.axis_index("i") % 2 == 0


class Rewritten:
    """A lowered function after the passes."""

    def __init__(self, body, *arguments, in_specs=SPLIT):
        self.lowered = shard_map(body, in_specs).lower(*(arguments or (X,)))
        self.module = self.lowered.compiler_ir("stablehlo")
        self.sites = []
        self.program = _passes.rewrite(self.module, lambda i: f"line {i}", self.sites.append)
        self.calls = []
        self.functions = []
        with self.module.context:
            assert self.module.operation.verify()
            self.module.operation.walk(self._visit)

    def _visit(self, op):
        if op.name == "func.func":
            self.functions.append(op.attributes["sym_name"].value)
        elif op.name == "stablehlo.custom_call":
            target = op.attributes["call_target_name"].value
            if target in (CALL, START, DONE):
                self.calls.append(Call(op, target))
        return ir.WalkResult.ADVANCE

    def of(self, target):
        return [c for c in self.calls if c.target == target]

    @property
    def forms(self):
        return {c.target for c in self.calls}


class Call:
    def __init__(self, op, target):
        self.op = op
        self.target = target
        config = {entry.name: entry.attr for entry in op.attributes["mhlo.backend_config"]}
        self.attributes = set(config)
        self.site = config["site"].value
        self.program = config["program"].value % (1 << 64)
        self.name = config["name"].value
        self.stage = config["stage"].value if "stage" in config else None
        self.closed = config["closed"].value
        self.in_place = "output_operand_alias<" in str(op)

    @property
    def result(self):
        return self.op.results[0]

    def needs(self, other):
        """Whether this call's operands depend on `other`'s result, through any number of ops."""
        return other.result in upstream(self.op)


def upstream(op, seen=None):
    """All values that `op` depends on by data, region ops by all that their regions use."""
    seen = set() if seen is None else seen

    def visit(inner):
        for operand in inner.operands:
            if operand not in seen:
                seen.add(operand)
                if not isinstance(operand.owner, ir.Block):
                    upstream(operand.owner, seen)
        return ir.WalkResult.ADVANCE

    op.walk(visit)
    return seen


def deepened(x, depth):
    for _ in range(depth):
        x = jnp.sin(x)
    return x


# One place in the program, one custom call --------------------------------------------------------


def test_straight_line_code_keeps_the_single_call():
    module = Rewritten(lambda x: call(call(x) + 1))
    assert [c.target for c in module.calls] == [CALL, CALL]
    assert [c.site for c in module.calls] == [0, 1]
    assert all(c.program == module.program for c in module.calls)
    assert all("call" not in c.attributes and "stage" not in c.attributes for c in module.calls)


def aliased(body):
    """By site: whether the result is to be the memory of the operand."""
    return [call.in_place for call in Rewritten(body).calls]


def test_results_take_the_place_of_operands_that_nothing_else_needs():
    assert aliased(lambda x: call(x * 2)) == [True]
    assert aliased(lambda x: call(call(x))) == [False, True]
    assert aliased(lambda x: call((x * 2).reshape(4, -1).T)) == [True]
    # A parameter, a constant, and values that something else reads as well.
    assert aliased(call) == [False]
    assert aliased(lambda x: call(x.reshape(4, -1))) == [False]
    assert aliased(lambda x: x + call(jnp.array([[1.0, 2, 3, 4]]))) == [False]
    assert aliased(lambda x: [call(y := x * 2), y]) == [False]
    assert aliased(lambda x: [call((y := x * 2).T), y]) == [False]
    # What a loop carries may be needed outside of it.
    scan = lambda x: lax.scan(lambda y, _: (call(y), None), x, None, length=3)[0]  # noqa: E731
    assert aliased(scan) == [False]
    # Split calls have their results elsewhere until done.
    assert not any(aliased(lambda x: call(x * 2, name="a")))


def test_modules_without_calls_are_left_alone():
    lowered = shard_map(lambda x: jax.jit(jnp.sin)(x) + lax.psum(x, "i")).lower(X)
    module = lowered.compiler_ir("stablehlo")
    before = str(module)
    assert _passes.rewrite(module, str, lambda site: None) is None
    assert str(module) == before
    assert not _passes.holds_calls(module)


def test_an_inner_jit_used_twice_is_two_sites():
    inner = jax.jit(lambda x: jax.jit(lambda y: call(y) * 2)(x) + 1)
    module = Rewritten(lambda x: inner(inner(x)))
    assert [c.site for c in module.calls] == [0, 1]
    assert module.calls[1].needs(module.calls[0])
    assert module.functions == ["main"]
    assert _passes.holds_calls(module.module)


def test_functions_without_calls_stay():
    module = Rewritten(
        lambda x: jax.jit(lambda y: call(y))(x) + jax.jit(lambda z: z @ z.T)(x)[0, 0]
    )
    assert len(module.calls) == 1
    assert len(module.functions) == 2


def test_loop_bodies_are_one_site_each():
    def body(x):
        x, _ = lax.scan(lambda c, _: (call(c), None), x, None, length=3)
        return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, call(c[1])), (0, x))[1]

    module = Rewritten(body)
    assert [(c.target, c.site) for c in module.calls] == [(CALL, 0), (CALL, 1)]


def test_locations_survive():
    module = Rewritten(lambda x: jax.jit(lambda y: call(y))(x))
    assert Path(__file__).name in str(module.calls[0].op.location)


# Where the order can differ -----------------------------------------------------------------------


def steps(predicate):
    def body(x, n):
        def step(i, c):
            return lax.cond(predicate(i, n, c), lambda c: call(c), lambda c: c * 2, c)

        return lax.fori_loop(0, n, step, x)

    return Rewritten(body, X, 3, in_specs=(P("i"), P()))


EVEN_ODD = [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    "predicate",
    [
        lambda i, n, c: i % 2 == 0,
        lambda i, n, c: n > 2,
        lambda i, n, c: call(c).sum() > 0,
        lambda i, n, c: lax.psum(c.sum(), "i") > 0,
    ],
    ids=["step counter", "replicated argument", "our result", "psum"],
)
def test_branches_that_all_devices_take_together_keep_the_single_call(predicate):
    assert steps(predicate).forms == {CALL}


@pytest.mark.parametrize(
    "predicate",
    [
        lambda i, n, c: index_is_even(),
        lambda i, n, c: (i + lax.axis_index("i")) % 2 == 0,
        lambda i, n, c: c.sum() > 0,
        lambda i, n, c: call(c, groups=EVEN_ODD).sum() > 0,
        lambda i, n, c: lax.psum(c.sum(), "i", axis_index_groups=EVEN_ODD) > 0,
        lambda i, n, c: lax.ppermute(n, "i", [(0, 1)]) > 0,
    ],
    ids=["index", "index and step", "sharded carry", "group result", "group psum", "ppermute"],
)
def test_branches_that_may_differ_are_split(predicate):
    module = steps(predicate)
    assert {START, DONE} <= module.forms


def test_the_same_helper_serves_uniform_and_varying_predicates():
    even = jax.jit(lambda i: i % 2 == 0)

    def body(x, n):
        x = lax.cond(even(n), lambda c: call(c), lambda c: c, x)
        return lax.cond(even(lax.axis_index("i")), lambda c: call(c), lambda c: c, x)

    module = Rewritten(body, X, 3, in_specs=(P("i"), P()))
    assert [(c.target, c.site) for c in module.calls] == [(CALL, 0), (START, 1), (DONE, 1)]


def test_loops_of_varying_length_are_split():
    def body(x):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: call(c, groups=EVEN_ODD), x)

    assert Rewritten(body).forms == {START, DONE}


def test_named_calls_are_split_with_all_calls_of_their_block():
    module = Rewritten(lambda x: call(x, name="a") + call(deepened(x, 5)))
    assert len(module.of(START)) == len(module.of(DONE)) == 2
    for done in module.of(DONE):
        assert all(done.needs(start) for start in module.of(START))


def test_without_shardy():
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        uniform = steps(lambda i, n, c: n > 2)
        varying = steps(lambda i, n, c: c.sum() > 0)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert uniform.forms == {CALL}
    assert varying.forms == {START, DONE}


# Start and done -----------------------------------------------------------------------------------


def test_a_split_call():
    def body(x):
        return lax.cond(index_is_even(), lambda c: call(c, name="a", key=3), lambda c: c, x)

    module = Rewritten(body)
    start, done = module.calls
    assert (start.target, done.target) == (START, DONE)
    assert start.site == done.site == 0
    assert start.name == done.name == "a"
    assert start.attributes - done.attributes == {"stage"}
    assert str(start.result.type) == "tensor<1xui64>"
    assert [str(v.type) for v in start.op.operands] == ["tensor<1x4xf32>", "tensor<i32>"]
    assert done.op.operands[0] == start.result
    assert done.op.operands[1] == start.op.operands[0]
    assert done.result.type == start.op.operands[0].type
    assert all(c.op.attributes["has_side_effect"].value for c in module.calls)
    assert len(done.op.attributes["operand_layouts"]) == len(done.op.operands)


@pytest.mark.parametrize("deep", [1, 5, 20])
@pytest.mark.parametrize("names", [("a", "b"), ("", "")])
def test_unequal_depth(deep, names):
    def branch(first, second):
        return lambda x: call(x, name=first) + call(deepened(x, deep) + 1, name=second)

    module = Rewritten(
        lambda x: lax.cond(index_is_even(), branch(*names), branch(*reversed(names)), x)
    )
    assert len(module.of(DONE)) == 4
    for done in module.of(DONE):
        others = [s for s in module.of(START) if s.op.parent == done.op.parent]
        same = [s for s in others if s.op.block == done.op.block]
        assert len(same) == 2
        assert all(done.needs(start) for start in same)


def test_phases_follow_the_data():
    def branch(x):
        a = call(x, name="a")
        b = call(a + 1, name="b")  # phase 2
        c = call(deepened(x, 9), name="c")
        return b + c

    module = Rewritten(lambda x: lax.cond(index_is_even(), branch, lambda x: x, x))
    start = {c.name: c for c in module.of(START)}
    done = {c.name: c for c in module.of(DONE)}
    needed = {n: {m for m in start if done[n].needs(start[m])} for n in done}
    assert needed == {"a": {"a", "c"}, "b": {"a", "b", "c"}, "c": {"a", "c"}}
    assert start["b"].needs(done["a"])
    assert not start["c"].needs(done["a"])


NESTED = {
    "cond": lambda v: lax.cond(v.sum() > 0, lambda v: call(v, name="b"), lambda v: v, v),
    "scan": lambda v: lax.scan(lambda c, _: (call(c, name="b"), None), v, None, length=3)[0],
    "while": lambda v: lax.while_loop(lambda c: c.sum() < 1, lambda c: call(c, name="b"), v),
    "condition": lambda v: lax.while_loop(
        lambda c: call(c, name="b").sum() < 1, lambda c: c + 1, v
    ),
    "jit": lambda v: jax.jit(lambda v: lax.cond(v[0, 0] > 0, jax.jit(call), call, v))(v),
}


@pytest.mark.parametrize("inner", NESTED.values(), ids=NESTED.keys())
def test_nested_regions_come_after_the_starts_before_them(inner):
    def branch(x):
        return inner(x) + call(deepened(x, 9), name="a")

    module = Rewritten(lambda x: lax.cond(index_is_even(), branch, lambda x: x, x))
    (start,) = [s for s in module.of(START) if s.name == "a"]
    nested = [d for d in module.of(DONE) if d.name != "a"]
    assert nested
    for done in nested:
        assert start.result in list(done.op.operands)


def test_many_calls_take_linearly_many_operands():
    count = 60

    def branch(order):
        return lambda x: sum(call(deepened(x, i % 5) * i, name=f"n{i}") for i in order)

    def body(x):
        return lax.cond(index_is_even(), branch(range(count)), branch(range(count - 1, -1, -1)), x)

    module = Rewritten(body)
    assert sum(len(done.op.operands) for done in module.of(DONE)) <= 2 * count * 3
    for done in module.of(DONE):
        starts = [s for s in module.of(START) if s.op.block == done.op.block]
        assert len(starts) == count
        values = upstream(done.op)
        assert all(start.result in values for start in starts)


def test_sources_are_staged_if_something_else_can_fail():
    def with_callback(x):
        y = lax.cond(index_is_even(), call, lambda c: c, x)
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    assert [c.stage for c in Rewritten(with_callback).of(START)] == [1]
    plain = Rewritten(lambda x: lax.cond(index_is_even(), call, lambda c: c, x))
    assert [c.stage for c in plain.of(START)] == [0]


def closed(body):
    return {call.closed for call in Rewritten(body).calls}


def test_programs_that_wait_for_nothing_else_are_closed():
    assert closed(lambda x: jnp.sort(call(x)) * 2) == {1}
    assert closed(lambda x: call(x) + jax.lax.psum(x, "i")) == {0}
    assert closed(lambda x: jax.lax.ppermute(call(x), "i", [(0, 1), (1, 0)])) == {0}

    def callback(x):
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert closed(lambda x: callback(call(x))) == {0}


COLUMNS = P(None, "i")
SHARED = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P())
SQUARE = np.ones((DEVICES, DEVICES), np.float32)


@pytest.mark.parametrize(
    "is_closed, program, sharding, out_sharding",
    [
        (1, lambda rows, columns: rows, None, None),
        (1, lambda rows, columns: rows, SPLIT, SPLIT),
        (1, lambda rows, columns: rows, P(), None),  # each device cuts its part out
        (0, lambda rows, columns: rows, COLUMNS, None),
        (0, lambda rows, columns: rows, None, COLUMNS),
        (1, lambda rows, columns: lambda x: rows(rows(x)), None, None),
        (0, lambda rows, columns: lambda x: columns(rows(x)), None, None),
        (0, lambda rows, columns: lambda x: (rows(x), columns(x)), None, None),
        (0, lambda rows, columns: lambda x: rows(x).sum(), None, None),
        (0, lambda rows, columns: lambda x: rows(2 * x), None, None),
        (1, lambda rows, columns: lambda x: rows(jnp.zeros((8, 8))), None, None),
    ],
)
def test_programs_that_the_compiler_may_communicate_in_are_not_closed(
    is_closed, program, sharding, out_sharding
):
    """Between the manual computations: to reshard, or to compute with sharded values."""

    def mapped(split):
        return jax.shard_map(
            call, mesh=SHARED.mesh, in_specs=split, out_specs=split, check_vma=False
        )

    x = SQUARE
    if sharding is not None:
        x = jax.device_put(x, SHARED.update(spec=sharding))
    out = None if out_sharding is None else SHARED.update(spec=out_sharding)
    lowered = jax.jit(program(mapped(SPLIT), mapped(COLUMNS)), out_shardings=out).lower(x)
    module = lowered.compiler_ir("stablehlo")
    _passes.rewrite(module, lambda i: f"line {i}", lambda site: None)
    assert set(re.findall(r"closed = (\d)", str(module))) == {str(is_closed)}


def run_in_order(module):
    """Two devices, one in each branch, that run their calls in program order; whether both end."""
    branches = {}
    for c in module.calls:
        branches.setdefault(c.op.block, []).append((c.target, c.name))
    pending = [list(reversed(calls)) for calls in branches.values()]
    started = [set() for _ in pending]
    moved = True
    while moved:
        moved = False
        for calls, mine in zip(pending, started, strict=True):
            while calls and (calls[-1][0] == START or all(calls[-1][1] in s for s in started)):
                target, name = calls.pop()
                if target == START:
                    mine.add(name)
                moved = True
    return not any(pending)


@st.composite
def branch_pairs(draw):
    """Two branches with the same calls in any order, any depth, and dependences without a cycle."""
    count = draw(st.integers(2, 6))
    parents = [draw(st.sampled_from([None, *range(i)])) for i in range(count)]

    def one():
        order = draw(st.permutations(range(count)))
        placed = []
        while len(placed) < count:
            ready = (i for i in order if i not in placed and parents[i] in (None, *placed))
            placed.append(next(ready))
        return placed, draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))

    return parents, one(), one()


@given(branch_pairs())
def test_any_two_branches_with_equal_dependences_meet(pair):
    parents, first, second = pair

    def branch(order, depths):
        def run(x):
            values = {}
            for i in order:
                source = x if parents[i] is None else values[parents[i]]
                values[i] = call(deepened(source, depths[i]) * (i + 1), name=f"n{i}")
            return sum(values.values())

        return run

    module = Rewritten(lambda x: lax.cond(index_is_even(), branch(*first), branch(*second), x))
    assert run_in_order(module)


# Names --------------------------------------------------------------------------------------------


def helper(x):
    return call(x) * 2


def program_of(body):
    return Rewritten(body).program


def test_the_hash_ignores_lines_threads_and_what_was_traced_before():
    def body(x):
        return helper(x) + 1

    first = program_of(body)
    results = []
    thread = threading.Thread(target=lambda: results.append(program_of(body)))
    thread.start()
    thread.join()

    def from_elsewhere():
        Rewritten(lambda x: helper(jax.jit(lambda y: y % 2)(x)))
        return shard_map(body).lower(X).compiler_ir("stablehlo")

    results.append(_passes.rewrite(from_elsewhere(), str, lambda site: None))
    assert results == [first, first]


def test_programs_that_share_a_helper_differ():
    def body(x):
        return helper(x) + 1

    first = program_of(body)

    def body(x):
        return helper(x) + 2

    assert program_of(body) != first


CHILD = """
import sys
sys.path[:0] = {paths!r}
import conftest
import test_passes as t
{blank}
if {traced_before}:
    t.Rewritten(lambda x: t.helper(x % 3))
print(t.Rewritten(t.everything).program)
"""


def everything(x):
    inner = jax.jit(lambda y: helper(y) % 2)
    x = lax.cond(index_is_even(), lambda c: call(inner(c), name="a") + call(c), inner, x)
    return lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]


def test_the_hash_is_equal_in_other_processes():
    expected = Rewritten(everything).program
    folder = Path(__file__).parent
    for lines, traced_before in ((0, False), (5, True)):
        text = CHILD.format(
            paths=[str(folder), str(folder.parents[1])],
            blank="\n" * lines,
            traced_before=traced_before,
        )
        child = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=120
        )
        assert child.returncode == 0, child.stderr
        assert int(child.stdout) == expected


def test_registered_sites():
    def body(x):
        a = call(x)
        b = lax.cond(index_is_even(), lambda c: call(c, name="b"), lambda c: c, a)
        c = call(x + 1)
        d = lax.scan(lambda v, _: (call(v) + c, None), b, None, length=2)[0]
        return d

    module = Rewritten(body)
    assert [s.site for s in module.sites] == [0, 1, 2, 3]
    assert {s.program for s in module.sites} == {module.program}
    assert [s.name for s in module.sites] == ["", "b", "", ""]
    assert [s.after for s in module.sites] == [(), (0,), (), (0, 1, 2, 3)]
    assert module.sites[0].operation == "all_reduce(sum)"
    assert module.sites[0].source == "line 7"
    assert module.sites[0].program_name == "jit_body"


def test_being_reached_counts_as_a_need():
    def body(x):
        reached = call(x).sum() > 0
        return lax.cond(reached, lambda c: call(c), lambda c: c, x)

    assert [s.after for s in Rewritten(body).sites] == [(), (0,)]


# What no static order can serve -------------------------------------------------------------------


def region(x, name):
    return lax.cond(x.sum() > 0, lambda c: call(c, name=name), lambda c: call(c * 2, name=name), x)


def test_crossing_regions_are_diagnosed():
    def branch(first, second):
        return lambda x: region(x, first) + region(deepened(x, 3), second)

    module = Rewritten(lambda x: lax.cond(index_is_even(), branch("p", "q"), branch("q", "p"), x))
    (text,) = _passes.conflicts_of(module.program)
    assert "'p'" in text and "'q'" in text


def served(first, second):
    """Equal but for the depths: a start is issued before a region is waited for."""
    return (
        lambda x: call(x, name=first) + region(deepened(x, 3), second),
        lambda x: region(x, second) + call(deepened(x, 3), name=first),
    )


def data_cycle(first, second):
    def chain(a, b):
        return lambda x: call(call(x, name=a) + 1, name=b)

    return chain(first, second), chain(second, first)


@pytest.mark.parametrize("branches", [served, data_cycle])
def test_what_can_be_served_or_is_a_data_cycle_is_not_diagnosed(branches):
    first, second = branches("p", "q")
    module = Rewritten(lambda x: lax.cond(index_is_even(), first, second, x))
    assert len({s.name for s in module.sites}) == 2
    assert _passes.conflicts_of(module.program) == []


# In JAX -------------------------------------------------------------------------------------------


HOOKS = """
import sys
sys.path[:0] = {paths!r}
import conftest
import jax, jax.numpy as jnp
import test_passes as t
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax_dfccl import _compat, _passes

from jax._src import compiler
from jax._src.interpreters import mlir as private

# The package has hooked in already; here its own calls have no part.
private.lower_jaxpr_to_module = private.lower_jaxpr_to_module.__wrapped__
compiler.compile_or_get_cached = compiler.compile_or_get_cached.__wrapped__

events = []
for _ in range(2):
    _passes.install(str, lambda site: events.append(site.site),
                    lambda groups, _: events.append(sorted(groups)))

nested = jax.jit(lambda x: x + 1)
p = Primitive("p")
p.def_abstract_eval(lambda x: x)
def lower(ctx, x):
    _compat.note_call()
    nested.lower(jnp.ones(3))  # lowers another module on the way
    return mlir.lower_fun(lambda x: t.call(x), multiple_results=False)(ctx, x)
mlir.register_lowering(p, lower)

jax.jit(jnp.sin)(jnp.ones(3))
assert events == [], events
f = t.shard_map(lambda x: p.bind(x))
lowered = f.lower(t.X)
assert events == [0], events
assert "site = 0" in lowered.as_text()
jax.jit(jnp.cos)(jnp.ones(3))
assert events == [0], events
try:
    lowered.compile()
    raise AssertionError("there are no handlers in this process")
except jax.errors.JaxRuntimeError as error:
    assert "dfccl_collective" in str(error), error
assert events == [0, [tuple(range(8))]], events
exported = jax.export.export(
    f, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(t.CALL)]
)(t.X)
assert "site = 0" in exported.mlir_module()

del private.lower_jaxpr_to_module
try:
    _passes.install(str, print, print)
    raise AssertionError("the hook is missing")
except ImportError as error:
    assert jax.__version__ in str(error), error
print("fine")
"""


def test_hooks():
    folder = Path(__file__).parent
    text = HOOKS.format(paths=[str(folder), str(folder.parents[1])])
    child = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "fine"
