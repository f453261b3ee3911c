# SPDX-License-Identifier: Apache-2.0
"""Values and types of all_reduce: against NumPy everywhere, against lax where lax is right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from members import OPS, assert_same_bits, data, make_mesh, per_member, reference, spmd

import jax_dfccl
from jax_dfccl import all_reduce

LAX = {"sum": lax.psum, "mean": lax.pmean, "min": lax.pmin, "max": lax.pmax}
both_check_vma = pytest.mark.parametrize("check_vma", [False, True])


def dtype_of(op):
    return np.int32 if op in ("and", "or", "xor") else np.float32


@both_check_vma
@pytest.mark.parametrize("op", OPS)
def test_values_are_a_fold_by_rank(op, check_vma):
    x = data((8, 3, 5), dtype_of(op))
    got = per_member(lambda x: all_reduce(x, "i", op=op), x, check_vma=check_vma)
    assert_same_bits(got, reference(x, op))


@both_check_vma
@pytest.mark.parametrize("op", LAX)
def test_agrees_with_lax(op, check_vma):
    x = data((8, 37), np.int32, small=True)

    def f(reduce):
        return per_member(reduce, x, check_vma=check_vma)

    ours, theirs = f(lambda x: all_reduce(x, "i", op=op)), f(lambda x: LAX[op](x, "i"))
    np.testing.assert_array_equal(ours, theirs)


def test_result_is_invariant_under_check_vma():
    x = data((8, 4))
    f = spmd(lambda x: all_reduce(x, "i"), out_specs=P(), check_vma=True)
    assert_same_bits(f(x.reshape(32)), reference(x)[0])

    def types(x):
        y = all_reduce(x, ("j",))
        assert jax.typeof(y).manual_axis_type.varying == {"i"}
        z = all_reduce(y, "i")
        assert jax.typeof(z).manual_axis_type.varying == frozenset()
        return z

    f = spmd(types, make_mesh((4, 2), ("i", "j")), out_specs=P(), check_vma=True)
    np.testing.assert_allclose(f(x.reshape(32)), x.sum(0), rtol=1e-6)


@both_check_vma
def test_unvarying_operands_count_once_per_member(check_vma):
    x = data((8, 4))[0]
    f = spmd(lambda x: all_reduce(x, "i"), in_specs=P(), out_specs=P(), check_vma=check_vma)
    assert_same_bits(f(x), reference(np.stack([x] * 8))[0])


@both_check_vma
def test_constants(check_vma):
    array = data((3,))

    def f(x):
        return (
            all_reduce(array, "i"),
            all_reduce(jnp.asarray(array), "i", op="prod"),
            all_reduce(2.5, "i"),
            all_reduce(True, "i"),
            all_reduce(np.int32(3), "i", op="xor"),
            all_reduce(x, "i"),
        )

    got = spmd(f, out_specs=P(), check_vma=check_vma)(np.zeros(8, np.float32))
    same = np.stack([array] * 8)
    assert_same_bits(got[0], reference(same)[0])
    assert_same_bits(got[1], reference(same, "prod")[0])
    assert (got[2], got[3], got[4]) == (20, 8, 0)
    assert got[3].dtype == np.int32


@pytest.mark.parametrize(
    ("op", "right"),
    [("sum", 24), ("mean", 3.0), ("prod", 3**8), ("max", 3), ("and", 3), ("xor", 0)],
)
def test_python_ints_are_reduced_while_tracing(op, right):
    def f(x):
        got = all_reduce(3, "i", op=op)
        assert type(got) is type(right) and got == right
        assert all_reduce(1, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]) == 4
        return x

    spmd(f)(np.zeros(8))


def test_named_python_ints_are_sent():
    text = spmd(lambda x: x + all_reduce(1, "i", name="count")).lower(np.zeros(8)).as_text()
    assert "dfccl_collective" in text


def test_no_axes_is_the_identity():
    x = data((8, 2), bool)
    assert_same_bits(per_member(lambda x: all_reduce(x, ()), x), x)


@both_check_vma
def test_axis_of_size_one(check_vma):
    x = data((8, 2))
    mesh = make_mesh((8, 1), ("i", "j"))
    f = spmd(lambda x: all_reduce(x, "j"), mesh, out_specs=P("i"), check_vma=check_vma)
    assert_same_bits(f(x), x)
    assert "dfccl" not in f.lower(x).as_text()


@both_check_vma
@pytest.mark.parametrize("axes", ["i", "j", "k", ("i", "k"), ("k", "i"), ("k", "j", "i"), ["j"]])
def test_axes_of_a_mesh(axes, check_vma):
    x = data((8, 3))
    mesh = make_mesh((2, 2, 2), ("i", "j", "k"))
    got = per_member(lambda x: all_reduce(x, axes), x, mesh=mesh, check_vma=check_vma)
    names = [axes] if isinstance(axes, str) else list(axes)
    front = ["ijk".index(name) for name in names]
    members = np.moveaxis(np.arange(8).reshape(2, 2, 2), front, range(len(front)))
    assert_same_bits(got, reference(x, groups=members.reshape(2 ** len(front), -1).T.tolist()))


@both_check_vma
def test_meshes_with_explicit_sharding(check_vma):
    x = data((8, 5))
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.device_put(x, jax.NamedSharding(mesh, P("i")))
    f = spmd(lambda x: all_reduce(x, "i"), mesh, check_vma=check_vma)
    assert_same_bits(f(split), reference(x))


def test_ranks_follow_the_mesh_not_the_device_numbers():
    x = data((8, 64))
    shuffled = np.array(jax.devices())[[3, 6, 0, 7, 1, 5, 2, 4]]
    got = per_member(lambda x: all_reduce(x, "i"), x, mesh=Mesh(shuffled, ("i",)))
    assert_same_bits(got, reference(x))


@pytest.mark.parametrize("members", [2, 3, 5, 7])
def test_meshes_of_some_devices(members):
    x = data((members, 11))
    got = per_member(lambda x: all_reduce(x, "i"), x, mesh=make_mesh((members,)))
    assert_same_bits(got, reference(x))


@st.composite
def partitions(draw):
    order = draw(st.permutations(range(8)))
    cuts = sorted(draw(st.sets(st.integers(1, 7))))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]


@given(groups=partitions(), op=st.sampled_from(OPS), check_vma=st.booleans())
def test_axis_index_groups(groups, op, check_vma):
    x = data((8, 6), dtype_of(op))
    got = per_member(
        lambda x: all_reduce(x, "i", op=op, axis_index_groups=groups), x, check_vma=check_vma
    )
    assert_same_bits(got, reference(x, op, groups))


def test_axis_index_groups_over_two_axes():
    x = data((8, 4))
    groups = [[3, 0], [1], [2]]
    mesh = make_mesh((2, 2, 2), ("i", "j", "k"))
    got = per_member(lambda x: all_reduce(x, ("k", "i"), axis_index_groups=groups), x, mesh=mesh)
    positions = np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1).reshape(4, 2)
    members = [[int(positions[i, j]) for i in group] for j in range(2) for group in groups]
    assert_same_bits(got, reference(x, groups=members))


def test_grouped_results_vary_under_check_vma():
    f = spmd(
        lambda x: all_reduce(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
        out_specs=P(),
        check_vma=True,
    )
    with pytest.raises(ValueError, match="out_specs"):
        f(data((8, 4)))


def test_mean_of_integers_is_like_pmean():
    x = data((8, 9), np.int32)
    ours, theirs = (
        per_member(lambda x, f=f: f(x, "i"), x)
        for f in (lambda x, i: all_reduce(x, i, op="mean"), lax.pmean)
    )
    assert_same_bits(ours, theirs)


def test_mean_of_integers_over_groups_of_different_sizes():
    x = data((8, 3), np.int32, small=True)
    groups = [[0, 5, 7], [1, 2], [3, 4, 6]]
    got = per_member(lambda x: all_reduce(x, "i", op="mean", axis_index_groups=groups), x)
    for group in groups:
        right = np.broadcast_to(x[group].mean(0), (len(group), 3))
        np.testing.assert_allclose(got[np.array(group)], right, rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_bool(op):
    x = data((8, 40), bool)
    x[:, :2] = [True, False]
    got = np.asarray(per_member(lambda x: all_reduce(x, "i", op=op), x))
    if op in ("sum", "mean", "prod"):
        count = x.sum(0)
        right = {"sum": count, "mean": count / 8, "prod": count == 8}[op]
        assert got.dtype == (np.float32 if op == "mean" else np.int32)
    else:
        right = {
            "min": x.all(0), "max": x.any(0), "and": x.all(0), "or": x.any(0),
            "xor": x.sum(0) % 2 == 1,
        }[op]  # fmt: skip
        assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, np.broadcast_to(right, got.shape))


def test_scalars_and_empty_arrays():
    x = data((8,))
    assert_same_bits(per_member(lambda x: all_reduce(x, "i"), x), reference(x))
    for shape in [(8, 0), (8, 3, 0), (8, 0, 5)]:
        got = per_member(lambda x: all_reduce(x, "i", op="max"), np.zeros(shape, np.float32))
        assert got.shape == shape


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 63, 1000, 4097, 300_001])
def test_sizes(count):
    x = data((8, count))
    assert_same_bits(per_member(lambda x: all_reduce(x, "i"), x), reference(x))


def test_operands_that_are_not_contiguous():
    x = data((8, 6, 10, 4))

    def f(x):
        return (
            all_reduce(x.T, "i"),
            all_reduce(x[1::2, ::-3], "i"),
            all_reduce(jnp.broadcast_to(x[:, :1], x.shape), "i"),
            all_reduce(x.transpose(1, 2, 0), "i").sum(1),
        )

    got = per_member(f, x)
    assert_same_bits(got[0], reference(x.transpose(0, 3, 2, 1)))
    assert_same_bits(got[1], reference(x[:, 1::2, ::-3]))
    assert_same_bits(got[2], reference(np.broadcast_to(x[:, :, :1], x.shape)))
    np.testing.assert_allclose(
        got[3], reference(x.transpose(0, 2, 3, 1)).sum(2), rtol=1e-5, atol=1e-5
    )


def test_pytrees():
    x = {"a": data((8, 3)), "b": [data((8,), np.int32, small=True), None]}
    got = spmd(lambda x: all_reduce(x, "i"))(x)
    assert_same_bits(got["a"], reference(x["a"]))
    assert_same_bits(got["b"][0], reference(x["b"][0]))
    assert got["b"][1] is None
    assert all_reduce((), ()) == ()


@both_check_vma
def test_eager(check_vma):
    x = data((8, 5))
    for op in ("sum", "max"):
        got = per_member(
            lambda x, op=op: all_reduce(x, "i", op=op), x, jit=False, check_vma=check_vma
        )
        assert_same_bits(got, reference(x, op))


def test_abstract_mesh():
    x = data((8, 5))
    mesh = make_mesh((4, 2), ("i", "j"))
    f = jax.jit(
        jax.shard_map(
            lambda x: all_reduce(x, "j"),
            mesh=mesh.abstract_mesh, in_specs=P(("i", "j")), out_specs=P(("i", "j")),
            check_vma=False,
        )
    )  # fmt: skip
    split = jax.device_put(x, jax.NamedSharding(mesh, P(("i", "j"))))
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert_same_bits(f(split), reference(x, groups=pairs))


def test_nested_shard_map_that_ends_up_manual_everywhere():
    x = data((8, 6))
    mesh = make_mesh((4, 2), ("i", "j"))

    def outer(x):
        inner = jax.shard_map(
            lambda x: all_reduce(x, ("i", "j")),
            in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_vma=False,
        )  # fmt: skip
        return inner(x)

    f = jax.shard_map(
        outer, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=False
    )
    assert_same_bits(jax.jit(f)(x), reference(x))


def test_bits_are_equal_on_all_members_and_from_run_to_run():
    x = data((8, 5000), seed=3)
    f = spmd(lambda x: all_reduce(x, "i"))
    first = np.asarray(f(x))
    assert (first == first[0]).all()
    for _ in range(5):
        assert_same_bits(f(x), first)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["sum", "max", "min", "prod"]), st.integers(0, 40)),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_several_calls_in_a_program(calls):
    inputs = [data((8, count), seed=index) for index, (_, count) in enumerate(calls)]
    f = spmd(lambda *xs: [all_reduce(x, "i", op=op) for x, (op, _) in zip(xs, calls, strict=True)])
    for got, x, (op, _) in zip(f(*inputs), inputs, calls, strict=True):
        assert_same_bits(got, reference(x, op))


# Identity -----------------------------------------------------------------------------------------


def test_named_calls_in_opposite_order_in_two_branches():
    x = data((8, 16))

    def f(x):
        def even(x):
            a = all_reduce(x, "i", name="a")
            return a, all_reduce(2 * x + 0 * a, "i", name="b")

        def odd(x):
            b = all_reduce(2 * x, "i", name="b")
            return all_reduce(x, "i", name="a"), b

        return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)

    a, b = per_member(f, x)
    assert_same_bits(a, reference(x))
    assert_same_bits(b, reference(2 * x))


@both_check_vma
def test_keys_known_at_run_time_only(check_vma):
    x = data((8, 3, 4))

    def f(x):
        def step(carry, t):
            y = all_reduce(x[2 - t], "i", name="step", key=7 * t - 5)
            return carry.at[2 - t].set(y), None

        return lax.scan(step, x, jnp.arange(3))[0]

    assert_same_bits(per_member(f, x, check_vma=check_vma), reference(x))


@pytest.mark.parametrize(
    "key", [0, -1, 2**31 - 1, np.int8(-3), np.uint16(65535), np.array(4, np.int32)]
)
def test_key_types(key):
    x = data((8, 2))
    got = per_member(lambda x: all_reduce(x, "i", name="k", key=key), x)
    assert_same_bits(got, reference(x))


def test_wide_keys():
    with jax.enable_x64(True):
        x = data((8, 2))
        for key in (2**40, -(2**63), np.int64(5), np.uint32(2**32 - 1)):
            got = per_member(lambda x, key=key: all_reduce(x, "i", name="k", key=key), x)
            assert_same_bits(got, reference(x))


# What is lowered ----------------------------------------------------------------------------------


def attributes(text):
    """The attributes of our custom calls, as text."""
    return re.findall(r"dfccl_collective\w*\(.*?mhlo\.backend_config = \{(.*?)\}", text)


def test_arguments_reach_the_custom_call():
    def f(x):
        return all_reduce(x, "i", op="max", name="n", key=2, priority=-4, timeout=1.5)

    calls = attributes(spmd(f).lower(data((8, 2))).as_text())
    assert calls
    for found in calls:
        for expected in (
            'op = "max"', 'name = "n"', "has_key = 1 : i64", "priority = -4 : i64",
            "timeout_us = 1500000 : i64",
        ):  # fmt: skip
            assert expected in found


def test_leaves_of_named_pytrees_have_names_of_their_own():
    x = {"w": data((8, 2)), "b": (data((8, 3)), data((8, 1)))}
    text = spmd(lambda x: all_reduce(x, "i", name="grads")).lower(x).as_text()
    names = set(re.findall(r'name = "([^"]*)"', " ".join(attributes(text))))
    assert names == {"grads['w']", "grads['b'][0]", "grads['b'][1]"}
    text = spmd(lambda x: all_reduce([x], "i", name="alone")).lower(x["w"]).as_text()
    assert 'name = "alone"' in text


def test_attributes_hold_no_path_and_do_not_depend_on_the_line():
    def f(x):
        return all_reduce(x, "i")

    def g(x):
        return all_reduce(x, "i")

    g.__name__ = "f"
    x = data((8, 2))
    texts = [spmd(h).lower(x).as_text() for h in (f, g)]
    assert texts[0] == texts[1]
    assert "test_all_reduce" not in texts[0]


# Report -------------------------------------------------------------------------------------------


def test_report_names_the_source_line():
    x = data((8, 4))
    jax.block_until_ready(per_member(lambda x: all_reduce(x, "i", name="reported"), x))
    report = jax_dfccl.report(format="dict")
    entries = [entry for entry in report["recent"] if entry["name"] == "reported"]
    assert {entry["device"] for entry in entries} == set(range(8))
    for entry in entries:
        assert entry["operation"] == "all_reduce(sum)"
        assert entry["source"].startswith("test_all_reduce.py:")
        assert (entry["dtype"], entry["count"], entry["group"]) == ("float32", 4, list(range(8)))
    assert "'reported' of 4 x float32 over devices 0-7" in str(jax_dfccl.report())
    assert {device["device"] for device in report["devices"]} >= set(range(8))
