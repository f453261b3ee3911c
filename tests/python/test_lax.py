# SPDX-License-Identifier: Apache-2.0
"""jax_dfccl.lax against jax.lax: values, types, errors, transforms; and where lax gives none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from members import assert_same_bits, data, make_mesh, per_member, reference, spmd

from jax_dfccl import lax as dlax

GROUPS = [[6, 0, 3, 5], [1, 2, 4, 7]]
UNEVEN = [[6, 0, 3], [1, 2], [4, 5, 7]]
REDUCTIONS = ("psum", "pmean", "pmax", "pmin")
both_check_vma = pytest.mark.parametrize("check_vma", [False, True])
reductions = pytest.mark.parametrize("name", REDUCTIONS)
DTYPES = (np.float32, np.int32, np.uint8, jnp.bfloat16, np.complex64, bool)


def compare(f, *arguments, exact=True, **options):
    """`f(module)` on every member: ours must give what lax gives, values and types."""
    types = {}

    def program(module):
        def g(*rows):
            result = f(module)(*rows)
            types[module] = jax.tree.map(jax.typeof, result)
            return jax.tree.map(jnp.asarray, result)

        return per_member(g, *arguments, **options)

    stock, ours = program(lax), program(dlax)
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    for got, right in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        if exact:
            assert_same_bits(got, right)
        else:
            np.testing.assert_allclose(got, right, rtol=1e-6)
    for got, right in zip(*map(jax.tree.leaves, (types[dlax], types[lax])), strict=True):
        assert (got.shape, got.dtype, got.manual_axis_type) == (
            right.shape,
            right.dtype,
            right.manual_axis_type,
        )


def error_of(f, *arguments, **options):
    with pytest.raises(Exception) as raised:
        per_member(f, *arguments, **options)
    return raised.value


@both_check_vma
@pytest.mark.parametrize("dtype", DTYPES)
@reductions
def test_reductions(name, dtype, check_vma):
    x = data((8, 4, 3), dtype)
    if dtype == np.complex64 and name in ("pmax", "pmin"):
        error = error_of(lambda x: getattr(dlax, name)(x, "i"), x)
        assert isinstance(error, TypeError) and "complex" in str(error)
        return
    exact = name != "pmean" and dtype != np.complex64
    compare(lambda m: lambda x: getattr(m, name)(x, "i"), x, exact=exact, check_vma=check_vma)


@pytest.mark.parametrize("groups", [GROUPS, UNEVEN], ids=["even", "uneven"])
@reductions
def test_groups(name, groups):
    x = data((8, 5))
    op = name[1:]
    got = per_member(lambda x: getattr(dlax, name)(x, "i", axis_index_groups=groups), x)
    np.testing.assert_allclose(got, reference(x, op, groups), rtol=1e-6)
    if name == "pmean" and groups is UNEVEN:
        return  # lax divides by the size of the first group
    compare(lambda m: lambda x: getattr(m, name)(x, "i", axis_index_groups=groups), x, exact=False)


@reductions
def test_groups_under_check_vma(name):
    """lax refuses them for sums, and calls the result of others the same on all members."""
    x = data((8, 5))
    got = per_member(
        lambda x: getattr(dlax, name)(x, "i", axis_index_groups=GROUPS), x, check_vma=True
    )
    np.testing.assert_allclose(got, reference(x, name[1:], GROUPS), rtol=1e-6)


@pytest.mark.parametrize("axes", ["x", ("y",), ("x", "y"), ("y", "x"), ()], ids=str)
@reductions
def test_axes(name, axes):
    mesh = make_mesh((2, 4), ("x", "y"))
    compare(lambda m: lambda x: getattr(m, name)(x, axes), data((8, 5)), exact=False, mesh=mesh)


@pytest.mark.parametrize("axes", [("i", 0), (1, "i"), (0, 1)], ids=str)
@pytest.mark.parametrize("name", ["psum", "pmax", "pmin"])
def test_dimensions_of_the_array_itself(name, axes):
    compare(lambda m: lambda x: getattr(m, name)(x, axes), data((8, 4, 3), np.int32))


def test_axes_that_lax_stumbles_over():
    """A list for a maximum; a negative dimension; dimensions under check_vma."""
    x = data((8, 4, 3), np.int32)
    right = np.broadcast_to(x.max((0, 2)), (8, 4))
    np.testing.assert_array_equal(per_member(lambda x: dlax.pmax(x, ["i", 1]), x), right)
    for check_vma in (False, True):
        got = per_member(lambda x: dlax.psum(x, ("i", -1)), x, check_vma=check_vma)
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum((0, 2), np.int32), (8, 4)))


@both_check_vma
def test_pytrees(check_vma):
    x = {"a": data((8, 3)), "b": [data((8,), np.int32), data((8, 2), bool)], "c": ()}
    for name in REDUCTIONS:

        def f(module, name=name):
            return lambda a, b, c: getattr(module, name)({"a": a, "b": [b, c], "c": ()}, "i")

        compare(f, x["a"], *x["b"], exact=False, check_vma=check_vma)


@both_check_vma
@pytest.mark.parametrize(
    "value",
    [1, 2.5, True, np.float32(2), np.arange(3), {"n": 3, "x": np.ones(2, np.float32)}],
    ids=str,
)
def test_constants(value, check_vma):
    """Are multiplied while tracing: psum(1) is the number of members."""
    for name in ("psum", "pmean"):
        results = {}

        def f(module, name=name, results=results):
            def g(x):
                results[module] = getattr(module, name)(value, "i")
                return results[module]

            return g

        compare(f, data((8, 1)), check_vma=check_vma)
        for got, right in zip(*map(jax.tree.leaves, (results[dlax], results[lax])), strict=True):
            assert not isinstance(got, jax.core.Tracer)
            assert jnp.result_type(got) == jnp.result_type(right)
            assert type(got) is type(right) or value is True  # which lax traces


def test_constants_beside_traced_leaves():
    compare(lambda m: lambda x: m.psum({"x": x, "one": 1, "half": 0.5}, "i"), data((8, 2)))
    compare(lambda m: lambda x: m.pmax([x, 3], "i"), data((8, 2)))


def test_the_size_of_groups():
    sizes = per_member(
        lambda x: x[0] + dlax.psum(1, "i", axis_index_groups=UNEVEN), np.zeros((8, 1), np.int32)
    )
    np.testing.assert_array_equal(sizes, [3, 2, 2, 3, 3, 3, 3, 3])


@pytest.mark.parametrize("name", ["psum", "pmean"])
@both_check_vma
def test_derivatives(name, check_vma):
    x, w = data((8, 4)), data((8, 4), seed=1)

    def gradient(module):
        def loss(x, w):
            return (w * getattr(module, name)(x * x, "i")).sum()[None]

        f = spmd(loss, check_vma=check_vma)
        return jax.grad(lambda x: f(x, w).sum())(x)

    np.testing.assert_allclose(gradient(dlax), gradient(lax), rtol=1e-6)


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_derivatives_that_lax_lacks(name):
    x = data((8, 4))
    f = spmd(lambda x: getattr(dlax, name)(x, "i"))
    got = jax.grad(lambda x: f(x).sum())(x)
    chosen = x == (x.max(0) if name == "pmax" else x.min(0))
    np.testing.assert_array_equal(got, 8 * chosen)


def test_under_vmap_scan_and_cond():
    def f(module):
        def g(x):
            total = jax.vmap(lambda r: module.psum(r, "i"))(x)
            over_rows = jax.vmap(lambda r: module.pmax(r, ("r", "i")), axis_name="r")(x)
            _, steps = lax.scan(lambda c, r: (c + 1, module.pmin(r * c, "i")), 1.0, x)
            again = lax.cond(total[0, 0] > 0, lambda: module.pmean(x, "i"), lambda: x)
            return total, over_rows, steps, again

        return g

    compare(f, data((8, 4, 3)), exact=False)


@both_check_vma
@pytest.mark.parametrize("name", REDUCTIONS)
def test_replicated_operands(name, check_vma):
    """A value that is the same on all members is cast to varying first, as lax does."""
    mesh = make_mesh()

    def program(module):
        f = jax.shard_map(
            lambda x: getattr(module, name)(x, "i"),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(f)(data((3,)))

    np.testing.assert_allclose(program(dlax), program(lax), rtol=1e-6)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda m, x: m.psum(x, "absent"), NameError, "absent"),
        (lambda m, x: m.psum(x, ("i", 0), axis_index_groups=GROUPS), ValueError, "named axes"),
        (lambda m, x: m.pmax(x, ("i", 0), axis_index_groups=GROUPS), ValueError, "named axes"),
        (lambda m, x: m.psum(x, "i", axis_index_groups=[[0, 1], [2, 4]]), ValueError, "axis_index"),
        (lambda m, x: m.pmean(x, ("i", 0)), Exception, ""),
    ],
    ids=[
        "unbound",
        "dimensions and groups",
        "the same of pmax",
        "bad groups",
        "mean of dimensions",
    ],
)
def test_errors_of_lax_are_errors(call, kind, message):
    x = data((8, 4))
    assert isinstance(error_of(lambda x: call(lax, x), x), kind)
    error = error_of(lambda x: call(dlax, x), x)
    assert isinstance(error, kind) and message in str(error)


def test_groups_of_constants_are_checked():
    error = error_of(lambda x: x + dlax.psum(1, "i", axis_index_groups=[[0], [1]]), data((8, 1)))
    assert isinstance(error, ValueError) and "leaves out indices 2, 3" in str(error)


def test_messages_name_the_user_s_line():
    """A call through jax_dfccl.lax comes from this file."""
    f = spmd(lambda x: dlax.psum(x, "i"))
    f(data((8, 3))).block_until_ready()
    import jax_dfccl

    assert jax_dfccl.report("dict")["recent"][0]["source"].startswith("test_lax.py:")


# Data movers --------------------------------------------------------------------------------------

PERM = [(0, 3), (3, 2), (5, 5), (6, 0), (7, 6)]  # a chain, a self pair, some left out
# What a member does with its [8, 16] array.
MOVERS = {
    "all_gather": lambda m, x: m.all_gather(x, "i"),
    "all_gather, last dimension": lambda m, x: m.all_gather(x, "i", axis=-1),
    "all_gather, tiled": lambda m, x: m.all_gather(x, "i", axis=1, tiled=True),
    "all_gather, tiled, last dimension": lambda m, x: m.all_gather(x, "i", axis=-2, tiled=True),
    "psum_scatter": lambda m, x: m.psum_scatter(x, "i"),
    "psum_scatter, tiled": lambda m, x: m.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
    "all_to_all": lambda m, x: m.all_to_all(x, "i", 0, 0),
    "all_to_all, later": lambda m, x: m.all_to_all(x, "i", 0, 1),
    "all_to_all, earlier": lambda m, x: m.all_to_all(x.T, "i", 1, 0),
    "all_to_all, tiled": lambda m, x: m.all_to_all(x, "i", 1, 0, tiled=True),
    "pswapaxes": lambda m, x: m.pswapaxes(x, "i", 0),
    "ppermute": lambda m, x: m.ppermute(x, "i", PERM),
    "ppermute, tuple": lambda m, x: m.ppermute(x, "i", ((0, 4), (1, 5), (2, 6), (3, 7))),
    "ppermute, negative": lambda m, x: m.ppermute(x, "i", [(-1, 0), (2, -2)]),
    "ppermute, nothing": lambda m, x: m.ppermute(x, "i", []),
    "pshuffle": lambda m, x: m.pshuffle(x, "i", [3, 1, 7, 0, 2, 6, 5, 4]),
}
GROUPED = {
    "all_gather": lambda m, x: m.all_gather(x, "i", axis_index_groups=GROUPS),
    "psum_scatter": lambda m, x: m.psum_scatter(x, "i", tiled=True, axis_index_groups=GROUPS),
    "all_to_all": lambda m, x: m.all_to_all(x, "i", 1, 0, tiled=True, axis_index_groups=GROUPS),
    "pswapaxes": lambda m, x: m.pswapaxes(x[:4], "i", 0, axis_index_groups=GROUPS),
}
movers = pytest.mark.parametrize("name", MOVERS)


@pytest.mark.parametrize(
    "dtype, check_vma",
    [(np.float32, False), (np.float32, True), (jnp.bfloat16, False), (bool, False)],
)
@movers
def test_movers(name, dtype, check_vma):
    f = MOVERS[name]
    if dtype is bool and "psum" in name:
        dtype = np.int8  # lax refuses bool
    compare(lambda m: lambda x: f(m, x), data((8, 8, 16), dtype), check_vma=check_vma)


@both_check_vma
@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_movers(name, check_vma):
    f = GROUPED[name]
    compare(lambda m: lambda x: f(m, x), data((8, 8, 16)), check_vma=check_vma)


@pytest.mark.parametrize("axes", ["x", ("y",), ("x", "y"), ("y", "x")], ids=str)
def test_axes_of_movers(axes):
    mesh = make_mesh((2, 4), ("x", "y"))

    def f(m, x):
        gathered = m.all_gather(x, axes, axis=1, tiled=True)
        exchanged = m.all_to_all(gathered, axes, 1, 0, tiled=True)
        return gathered, exchanged, m.psum_scatter(gathered, axes, scatter_dimension=1, tiled=True)

    compare(lambda m: lambda x: f(m, x), data((8, 5, 2)), mesh=mesh)


def test_no_axes():
    def f(m, x):
        return (
            m.all_gather(x, ()),
            m.psum_scatter(x, ()),
            m.all_to_all(x, (), 0, 1, tiled=True),
            m.all_to_all(x[None], (), 0, 2),
        )

    compare(lambda m: lambda x: f(m, x), data((8, 4, 3)))
    x = data((8, 4))
    assert_same_bits(per_member(lambda x: dlax.ppermute(x, (), [(0, 0)]), x), x)
    assert_same_bits(per_member(lambda x: dlax.ppermute(x, (), []), x), np.zeros_like(x))


@both_check_vma
@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all", "ppermute"])
def test_derivatives_of_movers(name, check_vma):
    f = MOVERS[name]

    def gradient(module):
        loss = spmd(lambda x: (f(module, x) ** 3).sum()[None], check_vma=check_vma)
        return jax.grad(lambda x: loss(x).sum())(data((64, 16)))

    np.testing.assert_allclose(gradient(dlax), gradient(lax), rtol=1e-5)


@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all", "ppermute"])
def test_movers_under_vmap(name):
    # Under vmap lax puts the batch of an untiled psum_scatter into a dimension that is not there.
    f = MOVERS["psum_scatter, tiled" if name == "psum_scatter" else name]

    def program(m):
        return lambda x: jax.vmap(lambda row: f(m, row), in_axes=1, out_axes=1)(x)

    compare(program, data((8, 8, 3, 16)))
    # Over the axis itself: a program without devices.
    x = data((8, 8, 16))
    f = MOVERS[name]
    if name == "ppermute":  # under vmap lax takes complete permutations only
        f = MOVERS["pshuffle"]
    ours, stock = (jax.vmap(lambda x: f(m, x), axis_name="i")(x) for m in (dlax, lax))
    np.testing.assert_allclose(ours, stock, rtol=1e-6)


def test_what_lax_has_not_on_cpu():
    x = data((8, 5))
    got = per_member(lambda x: dlax.pbroadcast(x, "i", 3), x)
    assert_same_bits(got, np.broadcast_to(x[3], x.shape))

    # Member r sends row r of its two rows to its right neighbour's row 1, and nothing to others.
    ring = (np.arange(8) + 1) % 8
    sizes = np.eye(8, dtype=np.int32)[ring]
    indices = [np.zeros((8, 8), np.int32), sizes, sizes, sizes.T]
    source, output = data((8, 2, 5), seed=1), data((8, 3, 5), seed=2)
    got = per_member(
        lambda *arrays: dlax.ragged_all_to_all(*arrays, axis_name="i"), source, output, *indices
    )
    right = output.copy()
    right[ring, 1] = source[:, 0]
    assert_same_bits(got, right)


def test_bool_is_scattered_as_int32():
    """As it is summed; lax refuses it."""
    x = data((8, 8, 2), bool)
    got = per_member(lambda x: dlax.psum_scatter(x, "i"), x)
    assert_same_bits(got, x.sum(0, dtype=np.int32))


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda m, x: m.psum_scatter(x, "i"), ValueError, "number of members, 8"),
        (lambda m, x: m.psum_scatter(x, "i", tiled=True), ValueError, "a multiple of"),
        (lambda m, x: m.all_to_all(x, "i", 0, 1), ValueError, "number of members, 8"),
        (lambda m, x: m.all_to_all(x, "i", 0, 1, tiled=True), ValueError, "a multiple of"),
        (lambda m, x: m.all_gather(x, "i", axis=5), ValueError, "axis is 5"),
        (lambda m, x: m.all_gather(x, "i", to="here"), ValueError, "to is 'here'"),
        (lambda m, x: m.all_gather(x, "absent"), NameError, "absent"),
        (lambda m, x: m.ppermute(x, "i", [(0, 1), (0, 2)]), ValueError, "twice"),
        (lambda m, x: m.pshuffle(x, "i", [0, 0, 1]), ValueError, "not represent a permutation"),
    ],
)
def test_errors_of_movers_are_errors(call, kind, message):
    x = data((8, 3, 5))
    assert isinstance(error_of(lambda x: call(lax, x), x), kind)
    error = error_of(lambda x: call(dlax, x), x)
    assert isinstance(error, kind) and message in str(error)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda m, x: m.ppermute(x, "i", [(0, 9)]), ValueError, "is 9"),
        (lambda m, x: m.psum_scatter(x, "i", scatter_dimension=7), ValueError, "is 7"),
        (lambda m, x: m.all_to_all(x, "i", 7, 0, tiled=True), ValueError, "is 7"),
        (
            lambda m, x: m.all_gather(x, "i", axis_index_groups=UNEVEN),
            ValueError,
            "groups of different sizes",
        ),
        (lambda m, x: m.pbroadcast(x, "i", 8), ValueError, "is 8"),
    ],
)
def test_raw_errors_of_lax_have_names(call, kind, message):
    """Index errors, verifier errors and failed assertions of lax."""
    x = data((8, 8, 8))
    assert error_of(lambda x: call(lax, x), x)
    error = error_of(lambda x: call(dlax, x), x)
    assert isinstance(error, kind) and message in str(error)


def test_dimensions_that_lax_stumbles_over():
    """Negative ones."""
    x = data((8, 4, 16))
    got = per_member(lambda x: dlax.psum_scatter(x, "i", scatter_dimension=-1, tiled=True), x)
    np.testing.assert_allclose(got, x.sum(0).reshape(4, 8, 2).swapaxes(0, 1), rtol=1e-5)
    got = per_member(lambda x: dlax.all_to_all(x, "i", -1, -2, tiled=True), x)
    right = per_member(lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), x)
    assert_same_bits(got, right)
