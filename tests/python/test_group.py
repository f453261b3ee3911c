# SPDX-License-Identifier: Apache-2.0
"""Explicit groups: programs of one device, or of some, that meet in their calls."""

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from collectives import Case, composed, expected, folders, movers, shape_for
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from members import data
from test_programs import run

import jax_dfccl

MEMBERS = [6, 0, 3, 1, 7]  # neither contiguous nor in order


def group_of(members, name="group"):
    return jax_dfccl.Group([jax.devices()[member] for member in members], name=name)


def on_each(group, f, x):
    """What a program of its own on every member makes of the member's row."""
    rows = [jax.device_put(row, device) for row, device in zip(x, group.devices, strict=True)]
    return [np.asarray(y) for y in [jax.jit(f)(row) for row in rows]]


CASES = [*movers(), *folders("sum"), *folders("max", np.iinfo(np.int32).min), *composed()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_collective(case: Case):
    group = group_of(MEMBERS, case.name)
    x = data(shape_for(case, (3,), len(MEMBERS)), np.int32)
    right = expected(case, x, None)
    got = on_each(group, lambda x: case.call(x, group, name="n", key=np.int32(7)), x)
    np.testing.assert_array_equal(got, right)


def test_axis_index_groups_divide_a_group():
    group = group_of(MEMBERS)
    parts = [[4, 0], [2, 1, 3]]
    x = data((5, 3), np.int32)
    got = on_each(group, lambda x: jax_dfccl.all_reduce(x, group, axis_index_groups=parts), x)
    for part in parts:
        for member in part:
            np.testing.assert_array_equal(got[member], x[part].sum(0, dtype=np.int32))


def test_programs_over_several_devices_meet_programs_of_one():
    group = group_of(range(8))
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))

    def weighted(x):
        return jax_dfccl.all_reduce(x * (group.rank() + 1), group)

    x = data((8, 3))
    right = sum(np.float32(k + 1) * row for k, row in enumerate(x))
    for check_vma in (False, True):
        mapped = jax.shard_map(
            weighted, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
        )
        first = jax.jit(mapped)(x[:4])
        others = [
            jax.jit(weighted)(jax.device_put(row, device))
            for row, device in zip(x[4:], jax.devices()[4:], strict=True)
        ]
        for got in (*first, *others):
            np.testing.assert_allclose(got, right, rtol=1e-6)


def test_different_programs_meet_by_name_and_key():
    group = group_of([2, 5])
    x, y = (jax.device_put(np.float32(v), d) for v, d in zip((3, 5), group.devices, strict=True))

    def add(x, step):
        first = jax_dfccl.all_reduce(x, group, name="p", key=step)
        return first - jax_dfccl.all_reduce(x, group, name="q")

    def multiply(y, step):
        other = jax_dfccl.all_reduce(y * 7, group, name="q")
        return other * jax_dfccl.all_reduce(y, group, name="p", key=step)

    for step in range(3):
        a, b = jax.jit(add)(x, step), jax.jit(multiply)(y, step)
        assert (float(a), float(b)) == (8 - 38, 38 * 8)


def test_eager_calls():
    group = group_of([4, 1])
    rows = [jax.device_put(np.float32(k), d) for k, d in enumerate(group.devices, 1)]
    got = [jax_dfccl.all_reduce(row, group, key=9) for row in rows]
    assert list(map(float, got)) == [3, 3]


def test_gradients():
    group = group_of([3, 4])

    def loss(x):
        return jnp.sum(jax_dfccl.all_reduce(x * x, group) ** 2)

    x = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32)
    right = 2 * 2 * np.sum(x * x, 0) * 2 * x  # every member has a loss
    np.testing.assert_allclose(on_each(group, jax.grad(loss), x), right)


def test_equal_groups_are_the_same():
    assert group_of([1, 2]) == group_of([1, 2])
    assert hash(group_of([1, 2])) == hash(group_of([1, 2]))
    different = [group_of([1, 2]), group_of([2, 1]), group_of([1, 2], "other")]
    assert len(set(different)) == 3
    assert group_of([5, 2]).size == 2 and [d.id for d in group_of([5, 2]).devices] == [5, 2]


def test_calls_that_could_be_mixed_up_are_refused():
    group = group_of([0, 1])
    x = jax.device_put(np.float32(1), jax.devices()[0])

    def twice(x, **options):
        a = jax_dfccl.all_reduce(x, group, **options)
        return a + jax_dfccl.all_reduce(2 * x, group, **options)

    for options in ({}, {"key": 4}, {"name": "n"}):
        with pytest.raises(ValueError, match=r"may run in either order(.|\n)*name= or key="):
            jax.jit(lambda x, options=options: twice(x, **options)).lower(x).compile()

    def one_after_the_other(x):
        return jax_dfccl.all_reduce(jax_dfccl.all_reduce(x, group), group)

    np.testing.assert_array_equal(on_each(group, one_after_the_other, np.ones(2, np.float32)), 4)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: group_of([1, 1]), ValueError, "device 1 is listed twice"),
        (lambda: group_of([]), TypeError, "at least one"),
        (lambda: jax_dfccl.Group([0, 1], name="g"), TypeError, "jax.Device"),
        (lambda: group_of([0], ""), ValueError, "not empty"),
        (
            lambda: jax_dfccl.all_reduce(1.0, (group_of([0, 1]), "i")),
            TypeError,
            "give it alone",
        ),
    ],
)
def test_wrong_groups(build, error, match):
    with pytest.raises(error, match=match):
        build()


def test_who_is_no_member_is_told():
    group = group_of([0, 1])
    x = jax.device_put(np.float32(1), jax.devices()[5])
    with pytest.raises(jax.errors.JaxRuntimeError, match="device 5 runs a collective but is in"):
        jax.jit(lambda x: jax_dfccl.all_reduce(x, group))(x).block_until_ready()
    with pytest.raises(ValueError, match="device 5 asks for its rank"):
        jax.jit(lambda x: x + group.rank())(x)


def test_no_group_over_a_program_that_the_compiler_divides():
    group = group_of(range(8))
    sharding = jax.sharding.NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P("i"))
    x = jax.device_put(np.arange(8.0), sharding)
    with pytest.raises(NotImplementedError, match=r"jax.shard_map or on one device"):
        jax.jit(lambda x: jax_dfccl.all_reduce(x, group))(x)


@pytest.mark.parametrize("case", ["one_thread", "opposite", "missing"])
def test_whole_programs(case):
    run("groups", case)


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2), (4, 2)])
def test_between_processes(processes, devices):
    jobs.all_right(jobs.run("across_groups", "programs", processes, devices))
