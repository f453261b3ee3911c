# SPDX-License-Identifier: Apache-2.0
"""Values and types of the collectives: against NumPy everywhere, against lax where lax is right."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import (
    GROUPS,
    UNEVEN_GROUPS,
    Case,
    expected,
    folders,
    movers,
    neutral,
    shape_for,
)
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from members import assert_same_bits, data, make_mesh, per_member, spmd

import jax_dfccl

both_check_vma = pytest.mark.parametrize("check_vma", [False, True])
SUMS = [*movers(), *folders("sum")]
FOLDS = {
    op: folders(op, neutral(op, np.int32))
    for op in ("sum", "prod", "min", "max", "and", "or", "xor")
}
every_case = pytest.mark.parametrize("case", SUMS, ids=str)


def run(case, x, groups=None, **options):
    return per_member(lambda x: case.call(x, "i", axis_index_groups=groups), x, **options)


# Values -------------------------------------------------------------------------------------------


@both_check_vma
@every_case
def test_values(case, check_vma):
    x = data(shape_for(case, (3, 5)), np.int32)
    assert_same_bits(run(case, x, check_vma=check_vma), expected(case, x, None))


@both_check_vma
@every_case
def test_values_in_groups(case, check_vma):
    x = data(shape_for(case, (7,), group=4), np.int32)
    assert_same_bits(run(case, x, GROUPS, check_vma=check_vma), expected(case, x, GROUPS))


@pytest.mark.parametrize("case", [c for c in SUMS if not c.even], ids=str)
def test_values_in_groups_of_different_sizes(case):
    x = data(shape_for(case, (7,)), np.int32)
    assert_same_bits(run(case, x, UNEVEN_GROUPS), expected(case, x, UNEVEN_GROUPS))


@pytest.mark.parametrize("op", FOLDS)
def test_every_reduction(op):
    """All collectives that fold, in one program: integers and, where it has a meaning, floats."""
    for dtype in (np.int32, np.float32) if op not in ("and", "or", "xor") else (np.uint8,):
        cases = folders(op, neutral(op, dtype))
        xs = [data(shape_for(case, (11,)), dtype, small=True) for case in cases]

        def f(*xs, cases=cases):
            return [case.call(x[0], "i")[None] for case, x in zip(cases, xs, strict=True)]

        for case, x, got in zip(cases, xs, spmd(f)(*xs), strict=True):
            np.testing.assert_allclose(got, expected(case, x, None), rtol=1e-5, err_msg=case.name)


def test_means():
    for case in folders("mean"):
        x = data(shape_for(case, (9,)))
        np.testing.assert_allclose(run(case, x), expected(case, x, None), rtol=1e-5, atol=1e-6)
        x = data(shape_for(case, (9,)), np.int16, small=True)
        got = run(case, x)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected(case, x, None), rtol=1e-6)


@pytest.mark.parametrize("op", ["logical_and", "logical_or", "logical_xor"])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool])
def test_logical_reductions(op, dtype):
    x = data((8, 40), np.int8, small=True).astype(dtype)
    x[:, :8] = np.eye(8)
    x[:, 8:12] = 1
    truth = {
        "logical_and": (x != 0).all(0),
        "logical_or": (x != 0).any(0),
        "logical_xor": (x != 0).sum(0) % 2 == 1,
    }[op]
    got = per_member(lambda x: jax_dfccl.all_reduce(x, "i", op=op), x)
    assert_same_bits(got, np.tile(truth, (8, 1)))
    parts = per_member(
        lambda x: jax_dfccl.reduce_scatter(x, "i", op=op, tiled=True), np.ascontiguousarray(x)
    )
    assert_same_bits(parts.ravel(), truth)


def test_exclusive_scans_begin_with_the_neutral_value():
    x = data((8, 3), bool)
    for op, first in {"and": True, "min": True, "or": False, "logical_and": True}.items():
        got = per_member(lambda x, op=op: jax_dfccl.exclusive_scan(x, "i", op=op), x)
        assert got.dtype == np.bool_ and (np.asarray(got)[0] == first).all()
    got = per_member(lambda x: jax_dfccl.exclusive_scan(x, "i", op="prod"), x)
    assert got.dtype == np.int32 and (np.asarray(got)[0] == 1).all()
    for dtype in (np.float16, jnp.bfloat16, np.float32):
        x = data((8, 2), dtype)
        for op in ("min", "max"):
            got = per_member(lambda x, op=op: jax_dfccl.exclusive_scan(x, "i", op=op), x)
            assert (np.asarray(got)[0] == neutral(op, np.float32)).all()


@both_check_vma
def test_scaled_sums(check_vma):
    x, factors = data((8, 6)), data((8,), seed=1)
    cases = {
        "all_reduce": lambda x, s: jax_dfccl.all_reduce(x, "i", scale=s),
        "mean": lambda x, s: jax_dfccl.all_reduce(x, "i", op="mean", scale=s),
        "reduce": lambda x, s: jax_dfccl.reduce(x, "i", 0, scale=s),
    }
    total = (x * factors[:, None]).sum(0)
    for name, f in cases.items():
        got = np.asarray(per_member(f, x, factors, check_vma=check_vma))
        right = total / 8 if name == "mean" else total
        np.testing.assert_allclose(got[0], right, rtol=1e-5, atol=1e-6)
    got = per_member(lambda x: jax_dfccl.all_reduce(x, "i", scale=2.5), x)
    np.testing.assert_allclose(got[3], 2.5 * x.sum(0), rtol=1e-5, atol=1e-5)


@both_check_vma
@pytest.mark.parametrize("groups", [None, UNEVEN_GROUPS], ids=["whole axis", "groups"])
def test_minimum_and_maximum_with_index(groups, check_vma):
    x = data((8, 50), np.int8, small=True).astype(np.float32)  # many ties
    x[[2, 5], 0] = np.nan

    def f(g):
        return per_member(lambda x: g(x, "i", axis_index_groups=groups), x, check_vma=check_vma)

    for g, argument in (
        (jax_dfccl.min_with_index, np.argmin),
        (jax_dfccl.max_with_index, np.argmax),
    ):
        values, indices = map(np.asarray, f(g))
        assert indices.dtype == np.int32
        for group in groups or [list(range(8))]:
            right = argument(x[group], axis=0)
            for member in group:
                np.testing.assert_array_equal(indices[member], right)
                best = np.take_along_axis(x[group], right[None], 0)[0]
                np.testing.assert_array_equal(values[member], best)
    tree = {"a": x, "b": (x[:, :3], None)}
    got = spmd(lambda x: jax_dfccl.max_with_index(x, "i"))(tree)
    assert got[1]["b"][0].shape == (8, 3) and got[0]["b"][1] is None


@st.composite
def partitions(draw, even):
    order = draw(st.permutations(range(8)))
    if even:
        size = draw(st.sampled_from([1, 2, 4, 8]))
        return [list(order[k : k + size]) for k in range(0, 8, size)]
    cuts = sorted(draw(st.sets(st.integers(1, 7))))
    return [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 8])]


@given(
    choice=st.data(),
    case=st.sampled_from([case for case in SUMS if case.name not in ("ppermute", "scatter")]),
    dtype=st.sampled_from(["int8", "uint16", "int32", "bool", "float32"]),
    inner=st.sampled_from([(), (0,), (1,), (7,), (13, 3), (2, 0), (257,)]),
    check_vma=st.booleans(),
)
def test_groups_dtypes_and_shapes(choice, case, dtype, inner, check_vma):
    if case.name.startswith(("broadcast", "reduce(")):
        groups = [[3, 1, 0], [7, 2, 6], [5, 4]]
    else:
        groups = choice.draw(partitions(case.even))
    if dtype == "bool" and "sum" in case.name:
        dtype = "int16"
    x = data(shape_for(case, inner, group=len(groups[0])), np.dtype(dtype), small=True)
    got, right = run(case, x, groups, check_vma=check_vma), expected(case, x, groups)
    if dtype == "float32" and "sum" in case.name:
        assert got.shape == right.shape
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    else:
        assert_same_bits(got, right)


@pytest.mark.parametrize("count", [1, 1009, 100_003])
def test_sizes(count):
    """All collectives at one size, in one program."""
    xs = [data(shape_for(case, (count,)), np.int16) for case in SUMS]

    def f(*xs):
        return [case.call(x[0], "i")[None] for case, x in zip(SUMS, xs, strict=True)]

    for case, x, got in zip(SUMS, xs, spmd(f)(*xs), strict=True):
        assert_same_bits(got, expected(case, x, None))


DTYPES = [
    "bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "int64", "uint64", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_movers_keep_every_bit_of_every_dtype(name):
    with jax.enable_x64(True):
        dtype = np.dtype(bool if name == "bool" else getattr(jnp, name).dtype)
        cases = movers()
        xs = []
        for case in cases:
            shape = shape_for(case, (37,))
            if dtype.kind in "f" and dtype.itemsize > 1:  # also NaN, infinities, signed zeros
                bits = np.random.default_rng(len(xs)).integers(0, 256, (*shape, dtype.itemsize))
                xs.append(np.ascontiguousarray(bits.astype(np.uint8)).view(dtype)[..., 0])
            else:
                xs.append(data(shape, dtype))

        def f(*xs):
            return [case.call(x[0], "i")[None] for case, x in zip(cases, xs, strict=True)]

        for case, x, got in zip(cases, xs, spmd(f)(*xs), strict=True):
            assert_same_bits(got, np.ascontiguousarray(expected(case, x, None)))


@pytest.mark.parametrize("name", ["int4", "float4_e2m1fn", "float8_e4m3fn", "bfloat16"])
def test_reductions_of_narrow_types(name):
    dtype = np.dtype(getattr(jnp, name).dtype)
    for case in folders("sum"):
        x = data(shape_for(case, (19,)), dtype, small=True)
        got = np.asarray(run(case, x))
        assert got.dtype == dtype
        wide = expected(case, x.astype(np.float32), None)
        if name == "int4":
            wide = (wide.astype(np.int32) + 8) % 16 - 8
        np.testing.assert_array_equal(got, wide.astype(dtype))


# Shapes and dimensions ----------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [False, True])
def test_dimensions_of_all_gather_and_gather(tiled):
    x = data((8, 2, 3, 4))
    for axis in range(-3 if tiled else -4, 3 if tiled else 4):
        ours, root, theirs = per_member(
            lambda x, axis=axis: (
                jax_dfccl.all_gather(x, "i", axis=axis, tiled=tiled),
                jax_dfccl.gather(x, "i", 2, axis=axis, tiled=tiled),
                lax.all_gather(x, "i", axis=axis, tiled=tiled),
            ),
            x,
        )
        assert_same_bits(ours, theirs)
        assert_same_bits(root[2], theirs[2])
        assert not np.delete(root, 2, 0).any()


@pytest.mark.parametrize("tiled", [False, True])
def test_dimensions_of_reduce_scatter_and_scatter(tiled):
    x = data((8, *((16, 24, 8) if tiled else (8, 8, 8))), np.int32)
    for dimension in range(-3, 3):
        ours, dealt, theirs = per_member(
            lambda x, d=dimension: (
                jax_dfccl.reduce_scatter(x, "i", scatter_dimension=d, tiled=tiled),
                jax_dfccl.scatter(x, "i", 3, axis=d, tiled=tiled),
                lax.psum_scatter(x, "i", scatter_dimension=d % 3, tiled=tiled),
            ),
            x,
        )
        assert_same_bits(ours, theirs)
        parts = np.split(x[3], 8, axis=dimension)
        right = np.stack(parts if tiled else [p.squeeze(dimension) for p in parts])
        assert_same_bits(dealt, right)


@pytest.mark.parametrize("tiled", [False, True])
def test_dimensions_of_all_to_all(tiled):
    x = data((8, *((16, 24, 8) if tiled else (8, 8, 8))), np.int32)

    def f(x):
        pairs = list(itertools.product(range(3), range(3)))
        ours = [jax_dfccl.all_to_all(x, "i", a, b, tiled=tiled) for a, b in pairs]
        counted = [jax_dfccl.all_to_all(x, "i", a - 3, b - 3, tiled=tiled) for a, b in pairs]
        return ours, counted, [lax.all_to_all(x, "i", a, b, tiled=tiled) for a, b in pairs]

    for ours, counted, theirs in zip(*per_member(f, x), strict=True):
        assert_same_bits(ours, theirs)
        assert_same_bits(counted, theirs)


AXES = ["i", "j", ("i", "k"), ("k", "i"), ("k", "j", "i"), ["j"]]


@both_check_vma
@pytest.mark.parametrize("axes", AXES)
def test_axes_of_a_mesh_agree_with_lax(axes, check_vma):
    mesh = make_mesh((2, 2, 2), ("i", "j", "k"))
    names = tuple([axes] if isinstance(axes, str) else axes)
    size = 2 ** len(names)
    x = data((8, size, 3), np.int32)
    perm = [(k, (k + 1) % size) for k in range(size)][:-1]

    def f(module, scatter, x):
        # Newer lax refuses what older lax sorts, as we do.
        permuted = names if module is jax_dfccl else tuple(sorted(names))
        return (
            module.all_gather(x, names, axis=1, tiled=True),
            scatter(x, names, scatter_dimension=0, tiled=True),
            module.all_to_all(x, names, 0, 0, tiled=True),
            module.ppermute(x, permuted, perm),
        )

    ours = per_member(
        lambda x: f(jax_dfccl, jax_dfccl.reduce_scatter, x), x, mesh=mesh, check_vma=check_vma
    )
    theirs = per_member(lambda x: f(lax, lax.psum_scatter, x), x, mesh=mesh, check_vma=check_vma)
    for got, right in zip(ours, theirs, strict=True):
        assert_same_bits(got, right)


def test_groups_agree_with_lax():
    x = data((8, 4, 3), np.int32)

    def f(module, scatter, x):
        return (
            module.all_gather(x, "i", axis_index_groups=GROUPS),
            scatter(x, "i", axis_index_groups=GROUPS),
            module.all_to_all(x, "i", 0, 1, axis_index_groups=GROUPS),
        )

    ours = per_member(lambda x: f(jax_dfccl, jax_dfccl.reduce_scatter, x), x)
    theirs = per_member(lambda x: f(lax, lax.psum_scatter, x), x)
    for got, right in zip(ours, theirs, strict=True):
        assert_same_bits(got, right)


def test_pytrees_and_constants():
    x = {"a": data((8, 3)), "b": [data((8,), np.int32), None]}
    for case in SUMS:
        if case.parts:
            continue

        def f(x, case=case):
            own = jax.tree.map(lambda leaf: leaf[0], x)
            return jax.tree.map(lambda leaf: leaf[None], case.call(own, "i"))

        got = spmd(f)(x)
        assert got["b"][1] is None
        for leaf, right in ((got["a"], x["a"]), (got["b"][0], x["b"][0])):
            np.testing.assert_allclose(leaf, expected(case, right, None), rtol=1e-5, atol=1e-6)
    got = per_member(
        lambda _: (jax_dfccl.all_gather(2, "i"), jax_dfccl.broadcast(2.5, "i", 0)), x["a"]
    )
    np.testing.assert_array_equal(got[0], np.full((8, 8), 2))
    np.testing.assert_array_equal(got[1], np.full(8, 2.5))


@every_case
def test_no_axes_is_the_identity(case):
    x = data((8, 1, 3) if case.parts else (8, 3))
    if "exclusive" in case.name:
        return
    call = case.call
    if case.name in ("broadcast", "scatter", "reduce(sum)"):
        function = getattr(jax_dfccl, case.name.removesuffix("(sum)"))
        call = lambda x, i: function(x, i, 0)  # noqa: E731
    elif case.name == "ppermute":
        call = lambda x, i: jax_dfccl.ppermute(x, i, [(0, 0)])  # noqa: E731
    assert_same_bits(per_member(lambda x: call(x, ()), x), x)


@both_check_vma
def test_groups_of_one_member(check_vma):
    """Nothing is sent."""
    mesh = make_mesh((8, 1), ("i", "j"))
    x = data((8, 1, 3))

    def f(x):
        j = jax_dfccl
        return {
            "same": [
                j.all_reduce(x, "j"), j.all_to_all(x, "j", 0, 0), j.broadcast(x, "j", 0),
                j.reduce(x, "j", 0), j.inclusive_scan(x, "j"), j.ppermute(x, "j", [(0, 0)]),
                j.barrier(x, "j"), j.all_gather(x[0], "j"), j.gather(x[0], "j", 0),
            ],
            "smaller": [j.reduce_scatter(x, "j"), j.scatter(x, "j", 0)],
            "zero": [j.ppermute(x, "j", []), j.exclusive_scan(x, "j")],
        }  # fmt: skip

    g = spmd(
        lambda x: jax.tree.map(lambda y: y[None], f(x[0])), mesh,
        in_specs=P("i"), out_specs=P("i", "j") if check_vma else P("i"), check_vma=check_vma,
    )  # fmt: skip
    got = g(x)
    assert "dfccl" not in g.lower(x).as_text()
    for y in got["same"]:
        assert_same_bits(y, x)
    for y in got["smaller"]:
        assert_same_bits(y, x[:, 0])
    for y in got["zero"]:
        assert_same_bits(y, np.zeros_like(x))


# Types under check_vma ----------------------------------------------------------------------------


@every_case
def test_results_vary_under_check_vma(case):
    mesh = make_mesh((4, 2), ("i", "j"))

    def f(x, same):
        vma = jax.typeof(case.call(x, "i")).manual_axis_type.varying
        assert vma == ({"j"} if case.name.startswith("all_reduce") else {"i", "j"})
        # An operand that varies over nothing is cast.
        vma = jax.typeof(case.call(same, "i")).manual_axis_type.varying
        assert vma == (frozenset() if case.name.startswith("all_reduce") else {"i"})
        return x

    x = data((8, 4, 2))
    spmd(lambda x, y: f(x[0], y)[None], mesh, in_specs=(P(("i", "j")), P()), check_vma=True)(
        x, x[0]
    )


@both_check_vma
@every_case
def test_meshes_with_explicit_sharding(case, check_vma):
    x = data(shape_for(case, (5,)), np.int32)
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.device_put(x, jax.NamedSharding(mesh, P("i")))
    assert_same_bits(run(case, split, mesh=mesh, check_vma=check_vma), expected(case, x, None))


@every_case
def test_eager(case):
    x = data(shape_for(case, (5,)), np.int32)
    assert_same_bits(run(case, x, jit=False), expected(case, x, None))


# Permutations -------------------------------------------------------------------------------------


@given(
    perm=st.permutations(range(8)).flatmap(
        lambda targets: st.sets(st.integers(0, 7)).map(
            lambda sources: [(source, targets[source]) for source in sources]
        )
    )
)
def test_any_permutation_agrees_with_lax(perm):
    x = data((8, 3), np.int32)
    ours, theirs = per_member(
        lambda x: (jax_dfccl.ppermute(x, "i", perm), lax.ppermute(x, "i", perm)), x
    )
    assert_same_bits(ours, theirs)


def test_pipelines_of_permutations():
    """Forwards, backwards, with holes, with self pairs; each needs the one before."""
    x = data((8, 6), np.int32)
    perms = [
        [(k, k + 1) for k in range(7)],
        [(k + 1, k) for k in range(7)],
        [(0, 0), (1, 2), (2, 1), (7, 7)],
        [(k, (k + 3) % 8) for k in range(8)],
        [(0, 4), (4, 0), (3, 3)],
        [],
    ]

    def chain(function, x):
        seen = []
        for perm in perms:
            x = function(x, "i", perm) + 1
            seen.append(x)
        return seen

    ours, theirs = per_member(lambda x: (chain(jax_dfccl.ppermute, x), chain(lax.ppermute, x)), x)
    for got, right in zip(ours, theirs, strict=True):
        assert_same_bits(got, right)


def test_send_recv():
    x = data((8, 6), np.int32)
    got = np.asarray(per_member(lambda x: jax_dfccl.send_recv(x, "i", 2, -1), x))
    assert_same_bits(got[7], x[2])
    assert not got[:7].any()


@both_check_vma
def test_send_recv_from_branches_of_the_two_ends_only(check_vma):
    x = data((8, 6), np.int32)

    def f(x):
        def send(x):
            return jax_dfccl.send_recv(x, "i", 3, 5, name="message")

        def receive(x):
            return jax_dfccl.send_recv(jnp.zeros_like(x), "i", 3, 5, name="message")

        def neither(x):
            return jnp.zeros_like(x)

        rank = lax.axis_index("i")
        which = jnp.where(rank == 3, 0, jnp.where(rank == 5, 1, 2))
        return lax.switch(which, [send, receive, neither], x)

    got = np.asarray(per_member(f, x, check_vma=check_vma))
    assert_same_bits(got[5], x[3])
    assert not np.delete(got, 5, 0).any()


# Matching -----------------------------------------------------------------------------------------


@every_case
def test_named_calls_in_opposite_order_in_two_branches(case):
    x = data(shape_for(case, (6,)), np.int32)

    def f(x):
        def even(x):
            a = case.call(x, "i", name="a")
            return a, case.call(2 * x, "i", name="b")

        def odd(x):
            b = case.call(2 * x, "i", name="b")
            return case.call(x, "i", name="a"), b

        return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)

    a, b = per_member(f, x)
    assert_same_bits(a, expected(case, x, None))
    assert_same_bits(b, expected(case, 2 * x, None))


@every_case
def test_keys_and_options(case):
    x = data(shape_for(case, (4,)), np.int32)

    def f(x):
        def step(_, k):
            got = case.call(x, "i", name="n", key=k, priority=3, timeout=60)
            return None, got

        return lax.scan(step, None, jnp.arange(2))[1]

    got = per_member(f, x)
    for k in range(2):
        assert_same_bits(got[:, k], expected(case, x, None))


def test_the_kind_is_part_of_the_signature():
    """Two ends of one name that are different collectives get an error that names both."""
    x = data((8, 8, 2))

    def f(x):
        return lax.cond(
            lax.axis_index("i") == 0,
            lambda x: jax_dfccl.all_to_all(x, "i", 0, 0, name="n"),
            lambda x: jax_dfccl.broadcast(x, "i", 0, name="n"),
            x,
        )

    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"(?s)all_to_all.*broadcast|broadcast.*all_to_all"
    ):
        jax.block_until_ready(per_member(f, x))


def test_roots_are_part_of_the_signature():
    def f(x):
        return lax.cond(
            lax.axis_index("i") == 0,
            lambda x: jax_dfccl.broadcast(x, "i", 1, name="n"),
            lambda x: jax_dfccl.broadcast(x, "i", 2, name="n"),
            x,
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match="root"):
        jax.block_until_ready(per_member(f, data((8, 2))))


def test_report_names_the_operation():
    x = data((8, 8, 2))
    for case in SUMS:
        jax.block_until_ready(run(case, data(shape_for(case, (2,)))))
    jax.block_until_ready(per_member(lambda x: jax_dfccl.all_to_all(x, "i", 0, 0), x))
    operations = {entry["operation"] for entry in jax_dfccl.report(format="dict")["recent"]}
    assert {
        "all_gather", "all_to_all", "permute", "broadcast", "gather", "scatter", "barrier",
        "reduce_scatter(sum)", "reduce(sum)", "scan(sum)", "exscan(sum)",
    } <= operations  # fmt: skip


def test_cases_name_every_function():
    """So no collective is left out of the tests that go over all."""
    named = {case.name.split("(")[0] for case in SUMS}
    assert {
        "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "exclusive_scan",
        "gather", "inclusive_scan", "ppermute", "reduce", "reduce_scatter", "scatter",
    } == named  # fmt: skip
    assert all(isinstance(case, Case) for case in SUMS)
