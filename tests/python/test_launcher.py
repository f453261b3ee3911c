# SPDX-License-Identifier: Apache-2.0
"""The launcher: whole programs with plain collectives, in any order."""

import concurrent.futures
import gc
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from cluster import wait_until
from collectives import Case, composed, expected, folders, movers, shape_for
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from members import data, make_mesh
from test_programs import run

import jax_dfccl
from jax_dfccl import _core, _launcher

N = 8
LIMIT_S = 60
CASES = [*movers(), *folders("sum"), *folders("max", np.iinfo(np.int32).min), *composed()]


SPLIT = P("i")


def mapped(f, mesh=None, in_specs=SPLIT, out_specs=SPLIT, **options):
    return jax.shard_map(
        f,
        mesh=mesh or make_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
        **{"check_vma": False, **options},
    )


def dispatched(f, **options):
    """Cut at all collectives, also at those that need no other program."""
    return jax_dfccl.dispatch(f, cut_local=True, **options)


def run_all(f, *arguments, **options):
    return dispatched(f, **options)(*arguments).result(LIMIT_S)


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = _core.report()["open_tickets"]
    yield
    assert not jax_dfccl.launcher()._tags
    for _ in range(1000):
        if _core.report()["open_tickets"] == before:
            break
        jax.block_until_ready(jnp.zeros(3) + 1)
    assert _core.report()["open_tickets"] == before


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_collective(case: Case):
    x = data(shape_for(case, (3,), N), np.int32)
    got = run_all(mapped(lambda x: case.call(x[0], "i")[None]), x)
    np.testing.assert_array_equal(got, expected(case, x, None))


@pytest.mark.parametrize("jitted", [False, True])
def test_a_program_is_the_same_as_without(jitted):
    """Chains, diamonds, unused results, nested functions, arrays outside of shard_map."""

    @jax.jit
    def inner(x):
        return jax_dfccl.all_reduce(x * 2, "i", op="mean")

    @jax.checkpoint
    def step(x, scale):
        a = inner(x)
        b = jax_dfccl.all_reduce(jnp.sin(x) * scale, "i")
        c = inner(a + b)
        jax_dfccl.all_reduce(x, "i", op="max")
        return {"c": c - lax.axis_index("i"), "b": b, "x": x + 1, "two": 2.0 * jnp.ones(())}

    def program(x, scale):
        scale = scale + 1
        specs = {"c": P("i"), "b": P(), "x": P("i"), "two": P()}
        first = mapped(step, in_specs=(P("i"), P()), out_specs=specs)(x, scale)
        y = first["c"].reshape(N, -1).sum(1, keepdims=True) + first["b"].sum()
        second = mapped(lambda y: jax_dfccl.all_gather(y, "i", tiled=True), out_specs=P())(y)
        return first, second, x.mean(), scale

    program = jax.jit(program) if jitted else program
    x = np.random.default_rng(1).standard_normal((N, 5)).astype(np.float32)
    got = run_all(program, x, 3.0)
    right = jax.jit(program)(x, 3.0)
    assert jax.tree.structure(got) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), got, right)


def test_gradients():
    def loss(w, x):
        y = jax_dfccl.all_reduce(jnp.tanh(x * w), "i", op="mean")
        return jnp.sum(y * y)

    x = data((N, 4), np.float32) % 2
    w = data((N, 4), np.float32, seed=1) % 2
    f = mapped(jax.grad(loss), in_specs=(P("i"), P("i")))
    np.testing.assert_allclose(run_all(f, w, x), jax.jit(f)(w, x), rtol=1e-5)


@pytest.mark.parametrize("cut_local", [False, True])
def test_no_program_stands_in_the_way_of_another(cut_local):
    """Programs over halves of the devices that meet: XLA runs one at a time, so without cutting
    the first would wait for ever."""
    group = jax_dfccl.Group(jax.devices(), name="all")
    halves = [jax.sharding.Mesh(np.array(jax.devices()[k : k + 4]), ("i",)) for k in (0, 4)]

    def program(name, mesh):
        def f(x):
            y = jax_dfccl.all_reduce(x, group, name=name)
            return y + jax_dfccl.all_reduce(y, "i")

        return jax_dfccl.dispatch(mapped(f, mesh), cut_local=cut_local)

    x = data((N, 3), np.int32)
    # In opposite order.
    order = [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    futures = [program(name, halves[k])(x[4 * k : 4 * k + 4]) for name, k in order]
    total = x.sum(0, dtype=np.int32)
    for future in futures:
        np.testing.assert_array_equal(future.result(LIMIT_S), np.stack([5 * total] * 4))


def test_futures_are_arguments():
    add = dispatched(mapped(lambda x: x + jax_dfccl.all_reduce(x, "i")))
    x = data((N, 3), np.int32)
    future = add(add(add(x)))
    for _ in range(3):
        x = x + x.sum(0, dtype=np.int32)
    np.testing.assert_array_equal(future.result(LIMIT_S), x)


def test_donated_arguments_are_gone():
    f = jax.jit(mapped(lambda x: x + jax_dfccl.all_reduce(x, "i")), donate_argnums=0)
    x = data((N, 3), np.int32)
    given = jax.device_put(x, NamedSharding(make_mesh(), P("i")))
    right = x + x.sum(0, dtype=np.int32)
    np.testing.assert_array_equal(run_all(f, given), right)
    assert given.is_deleted()


def test_results_that_nobody_holds_are_gone():
    gc.disable()
    try:
        future = dispatched(mapped(lambda x: x + jax_dfccl.all_reduce(x, "i")))(data((N, 3)))
        result = weakref.ref(future.result(LIMIT_S))
        del future
        wait_until(lambda: result() is None)
    finally:
        gc.enable()


def test_costs():
    def costly(x):
        return jax_dfccl.all_reduce(jax_dfccl.all_reduce(x, "i"), "i")

    for _ in range(3):
        run_all(mapped(costly), data((N, 3)))
    f = mapped(costly)
    for _ in range(3):
        run_all(f, data((N, 3)))
    costs = [cost for cost in jax_dfccl.launcher().costs() if cost.program == "costly"]
    assert [cost.dispatches for cost in costs][-3:] == [3, 3, 3]
    assert all(cost.seconds > 0 for cost in costs)


pair = jax_dfccl.Group(jax.devices()[2:4], name="launched pair")


def on_pair(place, **options):
    x = jax.device_put(np.float32(place + 1), pair.devices[place])

    def f(x):
        return 2 * jax_dfccl.all_reduce(x, pair, **options)

    return jax_dfccl.dispatch(f)(x)


def test_errors_reach_the_future():
    for future in (on_pair(0, name="e"), on_pair(1, name="e", op="max")):
        with pytest.raises(jax.errors.JaxRuntimeError, match="members disagree"):
            future.result(LIMIT_S)
    with pytest.raises(jax.errors.JaxRuntimeError, match="have not come"):
        on_pair(0, name="m", timeout=0.5).result(LIMIT_S)
    futures = [on_pair(place, name="after") for place in (0, 1)]
    assert [float(future.result(LIMIT_S)) for future in futures] == [6, 6]


def test_cancel():
    future = on_pair(0, name="c")
    assert future.cancel() and future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cancelled|have not come"):
        on_pair(1, name="c", timeout=3).result(LIMIT_S)


def test_priority():
    """While the launcher is busy, programs of a larger one pass those that came before."""
    entered, gate, ran = threading.Event(), threading.Event(), []

    def noting(name):
        def note(x):
            if name == "busy":
                entered.set()
                gate.wait(LIMIT_S)
            ran.append(name)
            return x

        return lambda x: jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), x)

    x = np.float32(1)
    futures = [jax_dfccl.dispatch(noting("busy"))(x)]
    entered.wait(LIMIT_S)
    for name, priority in (("low", 0), ("later", 0), ("high", 2), ("higher", 3)):
        futures.append(jax_dfccl.dispatch(noting(name), priority=priority)(x))
    gate.set()
    concurrent.futures.wait(futures, LIMIT_S)
    assert ran == ["busy", "higher", "high", "low", "later"]

    options = _launcher._Options(priority=5)
    program = _launcher._Program(lambda x: jax_dfccl.all_reduce(x, pair), (x,), options)
    assert "priority=5" in str(jax.make_jaxpr(program.segments[0].run)(0, 0, x))


def test_back_pressure():
    """One program more than may be under way waits in the call until one has ended."""
    x, y = (jax.device_put(np.float32(k), device) for k, device in enumerate(pair.devices, 1))

    def add(x, k):
        return jax_dfccl.all_reduce(x, pair, name="bound", key=k)

    launched, plain = jax_dfccl.dispatch(add), jax.jit(add)
    most = _launcher._MOST_IN_FLIGHT
    futures = [launched(x, np.int32(k)) for k in range(most)]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        further = thread.submit(launched, x, np.int32(most))
        assert concurrent.futures.wait([further], 0.3).not_done
        others = [plain(y, np.int32(0))]
        futures.append(further.result(LIMIT_S))
    others += [plain(y, np.int32(k)) for k in range(1, most + 1)]
    assert {float(future.result(LIMIT_S)) for future in futures} == {3}
    assert {float(other) for other in others} == {3}


def test_an_error_passes_on():
    def fail(*_):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        jax_dfccl.dispatch(fail)(1)
    lost = on_pair(0, name="p", timeout=0.5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="have not come"):
        jax_dfccl.dispatch(lambda x: x + 1)(lost).result(LIMIT_S)


def test_messages_of_two_stages():
    """Each sends to the other, which is the one before and the one behind; the stages go through
    the microbatches in opposite order."""
    stages = jax_dfccl.Group(jax.devices()[5:7], name="stages")

    def first(w, x, m):
        y = jnp.tanh(w * x)
        sent = jax_dfccl.send_recv(y, stages, 0, 1, name="forward", key=m)
        back = jax_dfccl.send_recv(jnp.zeros_like(y), stages, 1, 0, name="backward", key=m)
        return jnp.sum(back * (1 - y * y) * x) + 0 * sent.sum()

    def last(v, space, m):
        y = jax_dfccl.send_recv(space, stages, 0, 1, name="forward", key=m)
        g = jax.grad(lambda y: jnp.sum((v * y) ** 2))(y)
        return g + jax_dfccl.send_recv(g, stages, 1, 0, name="backward", key=m)

    x = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    w, v, space = np.float32(0.5), np.float32(2), np.zeros(5, np.float32)
    begin, end = jax_dfccl.dispatch(first), jax_dfccl.dispatch(last)
    a, b = stages.devices
    steps = range(len(x))
    gradients = [begin(*jax.device_put((w, x[m], np.int32(m)), a)) for m in steps]
    others = [end(*jax.device_put((v, space, np.int32(m)), b)) for m in reversed(steps)]
    for m in steps:
        right = jax.grad(lambda w, m=m: jnp.sum((v * jnp.tanh(w * x[m])) ** 2))(w)
        np.testing.assert_allclose(gradients[m].result(LIMIT_S), right, rtol=1e-5)
    concurrent.futures.wait(others, LIMIT_S)


LEAVING = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax_dfccl
pair = jax_dfccl.Group(jax.devices(), name="pair")
f = jax_dfccl.dispatch(lambda x: jax_dfccl.all_reduce(x, pair))
future = f(jax.device_put(1, pair.devices[0]))
"""


def test_a_process_may_leave_what_is_under_way():
    command = [sys.executable, "-c", LEAVING]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize(
    ("f", "match"),
    [
        (
            lambda x: lax.scan(lambda c, _: (jax_dfccl.all_reduce(c, "i"), None), x, None, 3)[0],
            r"test_launcher.py:\d+ \(.*has collectives inside of scan",
        ),
        (
            lambda x: lax.cond(x[0, 0] > 0, lambda x: jax_dfccl.all_reduce(x, "i"), lambda x: x, x),
            "inside of cond",
        ),
        (lambda x: jax_dfccl.all_reduce(x, "i") + lax.psum(x, "i"), r"calls psum\w* of jax.lax"),
    ],
)
def test_what_is_refused(f, match):
    with pytest.raises(NotImplementedError, match=match):
        dispatched(mapped(f))(data((N, 3)))


def cut(f, **options):
    """The program that the launcher makes."""
    x = jax.ShapeDtypeStruct((N, 3), np.float32)
    return _launcher._Program(f, (x,), _launcher._Options(**options))


def test_each_segment_needs_only_what_it_needs():
    def f(x):
        a = jax_dfccl.all_reduce(x, "i")
        b = jax_dfccl.all_reduce(2 * x, "i")
        return jnp.sin(a), jax_dfccl.all_reduce(jnp.cos(b), "i")

    program = cut(mapped(f), cut_local=True)
    assert sorted(segment.needs for segment in program.segments) == [0b0, 0b1, 0b10, 0b110]


def test_collectives_that_need_no_other_program_stay_inside():
    """Those over axes, in one process, also in loops and branches; those over a Group do not."""
    group = jax_dfccl.Group(jax.devices(), name="all here")

    @jax.jit
    def f(x):
        def add(x, _):
            return x + jax_dfccl.all_reduce(x, "i", op="mean"), None

        x, _ = lax.scan(add, x, None, 2)
        y = jax_dfccl.all_reduce(x, group)
        sums = [lambda y, k=k: jax_dfccl.all_reduce(k * y, "i", name="either") for k in (2, 3)]
        return y + lax.cond(lax.axis_index("i") % 2 == 0, *sums, y)

    program = cut(mapped(f))
    assert sorted(segment.needs for segment in program.segments) == [0b0, 0b1]
    assert [node.kind for node in program.flat.collectives] == ["all_reduce"]
    x = data((N, 3), np.float32)
    got = jax_dfccl.dispatch(mapped(f))(x).result(LIMIT_S)
    for _ in range(2):
        x = x + x.mean(0)
    total = x.sum(0)
    np.testing.assert_allclose(got, np.stack([total + 20 * total] * N), rtol=1e-6)


@pytest.mark.parametrize("case", ["permutations", "threads", "mixed", "random"])
def test_whole_programs(case):
    run("launched_programs", case, limit_s=240)


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_ten_thousand_random_orders():
    run("launched_programs", "random", "10000", limit_s=900)


@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_ten_thousand_random_orders_between_processes():
    with jobs.started("across_launched", "random", 4, 2, "10000") as job:
        jobs.all_right(jobs.ends(job, limit_s=1800))


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("case", ["opposite", "permutations"])
def test_between_processes(case, processes, devices):
    jobs.all_right(jobs.run("across_launched", case, processes, devices))
