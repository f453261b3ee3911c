# SPDX-License-Identifier: Apache-2.0
"""Handles: collectives that are started here and waited for there."""

import concurrent.futures
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from collectives import Case, composed, expected, folders, movers, shape_for
from jax import lax
from jax.sharding import PartitionSpec as P
from members import data, make_mesh, per_member, spmd
from test_docs import COLLECTIVES
from test_programs import run

import jax_dfccl
from jax_dfccl import _core

N = 8
# One call that needs another's result, so several handles.
CASES = [
    case
    for case in [*movers(), *folders("sum"), *folders("max", np.iinfo(np.int32).min), *composed()]
    if case.name not in ("max_with_index", "ragged_all_to_all", "all_to_all_v", "grouped")
]


def begin(case: Case, x, axis, **options):
    return jax_dfccl.start(case.call, x, axis, **options)


@pytest.fixture(autouse=True)
def _all_are_waited_for():
    before = _core.report()["open_tickets"]
    yield
    assert _core.report()["open_tickets"] <= before  # what others left may be gone


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_collective(case: Case):
    x = data(shape_for(case, (3,), N), np.int32)
    right = expected(case, x, None)
    got = per_member(lambda x: jax_dfccl.wait(begin(case, x, "i")), x)
    np.testing.assert_array_equal(got, right)

    first = spmd(lambda x: begin(case, x[0], "i"), check_vma=True)
    last = spmd(lambda handle: jax_dfccl.wait(handle)[None], check_vma=True)
    np.testing.assert_array_equal(last(first(x)), right)


def test_each_has_a_start_of_its_name():
    whole = {"grouped", "max_with_index", "min_with_index", "recv_any", "send", "send_any"}
    others = {"sharded", "start", "wait", "wait_all"}
    for name in set(COLLECTIVES) - whole - others:
        start = getattr(jax_dfccl, f"{name}_start")
        assert start.func is jax_dfccl.start and start.args == (getattr(jax_dfccl, name),)

    def sum_of(x):
        return jax_dfccl.wait(jax_dfccl.all_reduce_start(x, "i", op="max"))

    x = data((N, 3), np.int32)
    np.testing.assert_array_equal(per_member(sum_of, x), np.broadcast_to(x.max(0), x.shape))


def plain_and_handled(case: Case):
    """A program of both forms of a collective, for functions that transform it."""

    def program(transform):
        calls = [
            lambda x: case.call(x, "i"),
            lambda x: jax_dfccl.wait(begin(case, x, "i")),
        ]
        return spmd(lambda *x: [transform(f, *(y[0] for y in x))[None] for f in calls])

    return program


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives_are_those_of_the_plain_form(case: Case):
    def derivatives(f, x, v):
        y, tangent = jax.jvp(f, (x,), (v,))
        (slopes,) = jax.vjp(f, x)[1](jnp.cos(y))
        return jnp.concatenate([y.ravel(), tangent.ravel(), slopes.ravel()])

    x, v = (data(shape_for(case, (2,), N), seed=seed) for seed in (0, 1))
    right, got = plain_and_handled(case)(derivatives)(x, v)
    np.testing.assert_allclose(got, right, rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap_is_that_of_the_plain_form(case: Case):
    def mapped(f, x):
        slopes = jax.vmap(jax.grad(lambda x: jnp.sin(f(x)).sum()), -1, -1)(x)
        return jnp.concatenate([jax.vmap(f, 0)(jnp.stack([x, 2 * x])).ravel(), slopes.ravel()])

    x = data(shape_for(case, (2,), N))
    right, got = plain_and_handled(case)(mapped)(x)
    np.testing.assert_allclose(got, right, rtol=1e-6)


@pytest.mark.parametrize("axes", ["b", ("i", "b")])
def test_vmap_over_its_own_axis(axes):
    def body(x):
        one = jax.vmap(
            lambda x: jax_dfccl.wait(jax_dfccl.start(jax_dfccl.all_reduce, x, axes)), axis_name="b"
        )
        return one(x[0])[None]

    x = data((N, 4, 3), np.int32)
    over = (1,) if axes == "b" else (0, 1)
    right = np.broadcast_to(x.sum(over, dtype=np.int32, keepdims=True), x.shape)
    np.testing.assert_array_equal(spmd(body)(x), right)


def test_vmap_over_keys():
    def one(x, k):
        return jax_dfccl.wait(jax_dfccl.start(jax_dfccl.all_reduce, x, "i", name="n", key=k))

    x = data((N, 4, 3), np.int32)
    got = spmd(lambda x: jax.vmap(one)(x[0], jnp.arange(4))[None])(x)
    np.testing.assert_array_equal(got, np.stack([x.sum(0, dtype=np.int32)] * N))


def test_derivatives_and_vmap_of_what_another_program_started():
    first = spmd(lambda x: jax_dfccl.start(jax_dfccl.all_reduce, x, "i"))
    last = spmd(jax_dfccl.wait)
    x = data((N, 3))
    for f, match in (
        (jax.grad(lambda x: last(first(x)).sum()), "was started in another program"),
        (jax.vmap(lambda x: last(first(x)), -1), "started outside of the function that is vmapped"),
        (
            lambda x: jax_dfccl.wait(
                jax.vmap(lambda x: jax_dfccl.start(jax_dfccl.all_reduce, x, pair()))(x)
            ),
            r"has come out of jax\.vmap",
        ),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=match):
            jax.make_jaxpr(f)(x)
    # What does not depend on what is differentiated is as always.
    y = data((N, 3))
    slopes = jax.grad(lambda x: (x * last(first(y))).sum())(x)
    np.testing.assert_allclose(slopes, np.stack([y.sum(0)] * N), rtol=1e-6)


def test_a_pytree_under_a_mesh_of_two_axes():
    mesh = make_mesh((2, 4), ("a", "b"))
    x = {"p": data((8, 3), np.int32), "q": data((8, 2), np.int32)}
    first = spmd(lambda x: jax_dfccl.start(jax_dfccl.all_reduce, x, "b", name="n"), mesh)
    got = spmd(jax_dfccl.wait, mesh)(first(x))
    for name, values in x.items():
        parts = values.reshape(2, 4, 1, -1).sum(1, dtype=np.int32)
        np.testing.assert_array_equal(got[name], np.repeat(parts, 4, 0).reshape(8, -1))


def test_many_are_open_for_many_launches():
    x = data((N, 5), np.int32)
    first = spmd(lambda x, k: jax_dfccl.start(jax_dfccl.all_reduce, x * k[0], "i"))
    last = spmd(jax_dfccl.wait)
    handles = [first(x, np.full(N, k, np.int32)) for k in range(300)]
    for k in np.random.default_rng(0).permutation(300):
        right = np.broadcast_to((x * np.int32(k)).sum(0, dtype=np.int32), x.shape)
        np.testing.assert_array_equal(last(handles[k]), right)


def test_starts_come_before_waits():
    """Branches that wait in opposite order, one of them far behind other work."""

    def body(x):
        def one(x):
            a = jax_dfccl.start(jax_dfccl.all_reduce, x, "i", name="a")
            y = jax_dfccl.wait(a)
            b = jax_dfccl.start(jax_dfccl.all_reduce, 2 * x, "i", name="b")
            return y, jax_dfccl.wait(b)

        def other(x):
            b = jax_dfccl.start(jax_dfccl.all_reduce, 2 * x, "i", name="b")
            y = jax_dfccl.wait(b)
            a = jax_dfccl.start(jax_dfccl.all_reduce, x, "i", name="a")
            return jax_dfccl.wait(a), y

        return jnp.stack(lax.cond(lax.axis_index("i") % 2 == 0, one, other, x))

    x = data((N, 64), np.int32)
    total = x.sum(0, dtype=np.int32)
    np.testing.assert_array_equal(per_member(body, x), np.stack([[total, 2 * total]] * N))


def test_the_operand_may_be_donated():
    x = jax.device_put(data((N, 5000), np.int32), jax.sharding.NamedSharding(make_mesh(), P("i")))
    right = np.broadcast_to(np.asarray(x).sum(0, dtype=np.int32), x.shape)
    mapped = jax.shard_map(
        lambda x: (jax_dfccl.start(jax_dfccl.all_reduce, x, "i"), x + 1),
        mesh=make_mesh(),
        in_specs=P("i"),
        out_specs=P("i"),
    )
    handle, y = jax.jit(mapped, donate_argnums=0)(x)
    np.asarray(spmd(lambda y: y * 0)(y))
    np.testing.assert_array_equal(spmd(jax_dfccl.wait)(handle), right)


def pair():
    return jax_dfccl.Group(jax.devices()[2:4], name="pair")


def started(key, value=1.0, device=2, op="sum"):
    x = jax.device_put(np.float32(value), jax.devices()[device])
    return jax_dfccl.start(jax_dfccl.all_reduce, x, pair(), key=key, op=op)


def fails(match, f, *arguments):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        jax.block_until_ready(f(*arguments))


def test_by_hand_in_any_order():
    handles = {(k, d): started(k, 10 * k + d, d) for k, d in [(1, 2), (2, 2), (2, 3), (1, 3)]}
    assert jax_dfccl.wait_any([handles[2, 2], handles[1, 2]]) == 0
    for (k, _), handle in reversed(handles.items()):
        assert float(jax_dfccl.wait(handle)) == 20 * k + 5


def test_waited_for_twice():
    a, b = started(3), started(3, device=3)
    assert [float(y) for y in jax_dfccl.wait_all([a, b])] == [2, 2]
    fails("no start gave or which another", jax_dfccl.wait, a)
    with pytest.raises(ValueError, match="waited for or dropped"):
        jax_dfccl.test(a)


def test_waited_for_on_another_device():
    a, b = started(4), started(4, device=3)
    moved = jax.device_put(a, jax.devices()[5])
    fails("a handle of device 2 is waited for on device 5", jax_dfccl.wait, moved)
    assert [float(y) for y in jax_dfccl.wait_all([a, b])] == [2, 2]


def test_cancel():
    a = started(5)
    assert not jax_dfccl.test(a)
    assert jax_dfccl.cancel(a) and not jax_dfccl.cancel(a)
    fails("cancelled", jax_dfccl.wait, a)
    b = started(5, device=3)  # has gone with the other end
    jax_dfccl.cancel(b)
    fails("cancelled", jax_dfccl.wait, b)


def test_cancel_while_a_program_begins_to_wait():
    """It either ends the call, and says so, or both members get the value."""
    wait = jax.jit(jax_dfccl.wait)
    for k in range(100, 116):
        a = started(k)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            begun = thread.submit(wait, a)
            time.sleep(k % 4 * 1e-4)
            cancelled = jax_dfccl.cancel(a)
            if cancelled:
                fails("cancelled", begun.result)
            else:
                b = started(k, device=3)
                assert [float(begun.result()), float(wait(b))] == [2, 2]


def test_disagreement():
    a, b = started(6), started(6, device=3, op="max")
    for handle in (a, b):
        fails("members disagree", jax_dfccl.wait, handle)


def test_what_is_refused():
    x = data((N, 3))
    with pytest.raises(ValueError, match="needs the result of another"):
        spmd(lambda x: jax_dfccl.start(jax_dfccl.max_with_index, x, "i"))(x)
    with pytest.raises(NotImplementedError, match=r"collectives inside of scan"):
        spmd(
            lambda x: jax_dfccl.start(
                lambda x, i: lax.scan(lambda c, _: (jax_dfccl.all_reduce(c, i), None), x, None, 3),
                x,
                "i",
            )
        )(x)
    with pytest.raises(TypeError, match="is no Handle"):
        jax_dfccl.wait(x)
    with pytest.raises(TypeError, match="is traced"):
        spmd(lambda x: jax_dfccl.test(jax_dfccl.start(jax_dfccl.all_reduce, x, "i")))(x)
    with pytest.raises(ValueError, match="no handle"):
        jax_dfccl.wait_any([])


DROPPED = """
import logging, os, time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_DFCCL_TIMEOUT"] = "1"
import jax, jax_dfccl
from jax_dfccl import _core
logging.basicConfig()
pair = jax_dfccl.Group(jax.devices(), name="pair")
handles = [
    jax_dfccl.start(jax_dfccl.all_reduce, jax.device_put(1, device), pair)
    for device in pair.devices
]
assert jax_dfccl.wait(handles.pop()) == 2
handles.clear()
while _core.report()["open_tickets"]:
    time.sleep(0.05)
"""


def test_dropped():
    child = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr
    assert "handle of all_reduce was dropped" in child.stderr


@pytest.mark.parametrize("case", [["permutations"], ["random", "300"]], ids=" ".join)
def test_whole_programs(case):
    run("handles", *case, limit_s=240)


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 2)])
def test_between_processes(processes, devices):
    jobs.all_right(jobs.run("across_handles", "permutations", processes, devices))


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("processes", [1, 4])
def test_ten_thousand_random_orders(processes):
    if processes == 1:
        run("handles", "random", "10000", limit_s=1800)
    else:
        arguments = ("across_handles", "random", processes, 2, "10000")
        with jobs.started(*arguments) as job:
            jobs.all_right(jobs.ends(job, limit_s=1800))
