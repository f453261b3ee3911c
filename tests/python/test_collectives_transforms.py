# SPDX-License-Identifier: Apache-2.0
"""The collectives under differentiation, vmap, remat and control flow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import GROUPS, UNEVEN_GROUPS, expected, folders, movers, neutral, shape_for
from jax import lax
from members import data, make_mesh, per_member, spmd

import jax_dfccl

SUMS = [*movers(), *folders("sum")]
LINEAR = [case for case in [*SUMS, *folders("mean")] if not case.name.startswith("all_reduce")]
NONLINEAR = [
    case
    for case in [*folders("prod", 1), *folders("max")]
    if not case.name.startswith(("all_reduce", "exclusive_scan(max"))
]
both_check_vma = pytest.mark.parametrize("check_vma", [False, True])
linear = pytest.mark.parametrize("case", LINEAR, ids=str)
nonlinear = pytest.mark.parametrize("case", NONLINEAR, ids=str)
some_cases = pytest.mark.parametrize("case", [*LINEAR, *NONLINEAR[::4]], ids=str)
every_case = pytest.mark.parametrize("case", [*LINEAR, *NONLINEAR], ids=str)


def groups_of(case):
    return [None, GROUPS] if case.even else [None, UNEVEN_GROUPS]


def operand(case, inner=(2,), groups=None, seed=0, dtype=np.float32):
    group = len(groups[0]) if groups and case.even else 8
    return data(shape_for(case, inner, group=group), dtype, seed=seed)


def program(case, groups=None, *, name=None, **options):
    """What all members have -> what all get."""
    return spmd(
        lambda x: case.call(x[0], "i", axis_index_groups=groups, name=name)[None], **options
    )


def reference(case, groups=None):
    return jax.jit(lambda x: expected(case, x, groups, xp=jnp))


# Differentiation ----------------------------------------------------------------------------------


@every_case
def test_derivatives(case):
    """Forward and reverse mode against those of the reference."""
    for groups in groups_of(case):
        x, tangent = operand(case, groups=groups), operand(case, groups=groups, seed=1)
        g = reference(case, groups)
        weights = data(g(x).shape, seed=2)

        def all_of(f, weights=weights):
            def derivatives(x, tangent):
                y, y_tangent = jax.jvp(f, (x,), (tangent,))
                return y, y_tangent, jax.vjp(f, x)[1](weights)[0]

            return jax.jit(derivatives)

        right = all_of(g)(x, tangent)
        for check_vma in (False, True):
            f = program(case, groups, check_vma=check_vma)
            for got, wanted in zip(all_of(f)(x, tangent), right, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@linear
def test_transposes(case):
    """<w, f(x)> = <f^T(w), x>, also for what is transposed twice."""
    if case.name == "barrier":
        return  # passes its operand on by a choice that only differentiation sees through
    x = operand(case)
    for check_vma in (False, True):
        f = program(case, check_vma=check_vma)
        transposed = jax.linear_transpose(f, x)
        y = f(x)
        weights = jnp.asarray(data(y.shape, seed=1))
        (back,) = transposed(weights)
        np.testing.assert_allclose(np.vdot(weights, y), np.vdot(back, x), rtol=1e-4, atol=1e-4)
        (again,) = jax.linear_transpose(lambda w, t=transposed: t(w)[0], weights)(x)
        np.testing.assert_allclose(again, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in NONLINEAR if "prod" in c.name], ids=str)
def test_second_derivatives_of_products(case):
    with jax.enable_x64(True):
        x = operand(case, (1,), dtype=np.float64)
        x[2] = 0
        weights = data(reference(case)(x).shape, np.float64, seed=1)

        def hessian_times(f, v):
            return jax.jit(
                jax.grad(lambda x: (jax.grad(lambda x: (weights * f(x)).sum())(x) * v).sum())
            )

        v = operand(case, (1,), dtype=np.float64, seed=1)
        got, right = hessian_times(program(case), v)(x), hessian_times(reference(case), v)(x)
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-12)


@nonlinear
def test_derivatives_beside_zeros_and_ties(case):
    x, tangent = operand(case), operand(case, seed=1)
    x[1], x[4] = 0, 0
    if "prod" not in case.name:
        x[...] = np.sign(x)  # many ties
        f = program(case)
        got = np.asarray(jax.jvp(f, (x,), (tangent,))[1])
        assert np.isfinite(got).all()
        # Equal tangents are passed on unchanged, however many members share them.
        ones = np.asarray(jax.jvp(f, (x,), (np.ones_like(x),))[1])
        y = np.asarray(f(x))
        np.testing.assert_allclose(ones[y != 0], 1, rtol=1e-6)
        return
    got = jax.jvp(program(case), (x,), (tangent,))[1]
    right = jax.jvp(reference(case), (jnp.asarray(x),), (jnp.asarray(tangent),))[1]
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def call_names(jaxpr):
    return re.findall(r"dfccl_\w+\[\s.*?name=(\S+)\s.*?\]", str(jaxpr), re.DOTALL)


@every_case
def test_derivatives_of_named_calls_have_names_of_their_own(case):
    if case.name == "barrier":
        return  # has no derivative
    x = operand(case)
    f = program(case, name="n")

    def loss(x):
        return (f(x) ** 2).sum()

    for transformed in (jax.grad(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        names = call_names(jax.make_jaxpr(transformed)(x))
        assert "n" in names and len(names) > 1
        assert len(names) == len(set(names)), names


@some_cases
def test_named_and_keyed_calls_are_differentiated_in_opposite_order(case):
    """Branches that differ in order, and so do their derivatives."""
    x = operand(case)

    def f(x):
        def even(x):
            a = case.call(x, "i", name="a", key=3)
            return a, case.call(2 * x, "i", name="b")

        def odd(x):
            b = case.call(2 * x, "i", name="b")
            return case.call(x, "i", name="a", key=3), b

        return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)

    def both(x):
        a, b = spmd(lambda x: tuple(y[None] for y in f(x[0])))(x)
        return a * 2 + b

    def right(x):
        return reference(case)(x) * 2 + reference(case)(2 * x)

    got, wanted = (jax.jit(jax.grad(lambda x, g=g: (g(x) ** 2).sum()))(x) for g in (both, right))
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@linear
def test_integers_have_no_derivative(case):
    x = operand(case)

    def f(x):
        moved = case.call((10 * x[0]).astype(np.int32), "i")
        return (moved.astype(np.float32) * x.sum())[None]

    gradient = jax.grad(lambda x: spmd(f)(x).sum())(x)
    right = expected(case, (10 * x).astype(np.int32), None).astype(np.float32)
    totals = right.reshape(8, -1).sum(1).reshape((8,) + (1,) * (x.ndim - 1))
    np.testing.assert_allclose(gradient, np.broadcast_to(totals, x.shape), rtol=1e-5)


# vmap ---------------------------------------------------------------------------------------------


@every_case
def test_vmap_over_another_axis(case):
    """Every place of the vmapped dimension."""
    axes = range(3 if case.parts else 2)
    xs = [np.stack([operand(case, seed=k) for k in range(3)], axis=1 + axis) for axis in axes]

    def f(*xs):
        return [jax.vmap(lambda x: case.call(x, "i"), a)(x) for a, x in zip(axes, xs, strict=True)]

    for check_vma in (False, True):
        for axis, x, got in zip(axes, xs, per_member(f, *xs, check_vma=check_vma), strict=True):
            for k in range(3):
                right = expected(case, np.take(x, k, 1 + axis), None)
                np.testing.assert_allclose(got[:, k], right, rtol=1e-5, atol=1e-6)


@every_case
def test_vmap_over_the_axis_itself_is_local(case):
    for groups in groups_of(case):
        x = operand(case, groups=groups)
        f = jax.jit(
            jax.vmap(
                lambda x, g=groups: case.call(x, "b", axis_index_groups=g, name="n"), axis_name="b"
            )
        )
        np.testing.assert_allclose(f(x), expected(case, x, groups), rtol=1e-5, atol=1e-6)
        assert "dfccl" not in f.lower(x).as_text()
    same = jax.vmap(lambda _: case.call(x[0], "b", axis_index_groups=groups), axis_name="b")
    right = expected(case, np.stack([x[0]] * 8), groups)
    np.testing.assert_allclose(same(np.zeros(8)), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("axes", "check_vma"), [("ib", False), ("bi", True), ("ibj", True)], ids=str
)
@pytest.mark.parametrize("case", [*SUMS, *NONLINEAR[-1:]], ids=str)
def test_vmap_over_the_axis_together_with_mesh_axes(case, axes, check_vma):
    sizes = {"i": 2, "j": 2 if "j" in axes else 1, "b": 3}
    mesh = make_mesh((sizes["i"], sizes["j"]), ("i", "j"))
    members = int(np.prod([sizes[axis] for axis in axes]))
    x = data(shape_for(case, (4,), members))  # by rank
    # From ranks to [i, j, b] and back.
    order = [*axes, *(axis for axis in "ijb" if axis not in axes)]
    ranked = x.reshape(*(sizes[axis] for axis in order), *x.shape[1:])
    place = [order.index(axis) for axis in "ijb"]
    stacked = ranked.transpose(*place, *range(3, ranked.ndim))
    stacked = np.ascontiguousarray(stacked).reshape(-1, *stacked.shape[2:])
    f = jax.vmap(lambda x: case.call(x, tuple(axes)), axis_name="b")
    got = np.asarray(per_member(f, stacked, mesh=mesh, check_vma=check_vma))
    got = got.reshape(sizes["i"], sizes["j"], sizes["b"], *got.shape[2:])
    back = [list("ijb").index(axis) for axis in order]
    got = got.transpose(*back, *range(3, got.ndim)).reshape(members, *got.shape[3:])
    np.testing.assert_allclose(got, expected(case, x, None), rtol=1e-5, atol=1e-6)


@linear
def test_vmapped_keys_are_one_call_each(case):
    x = np.stack([operand(case, seed=k) for k in range(3)], axis=1)
    f = jax.vmap(lambda x, k: case.call(x, "i", name="n", key=k))
    got = per_member(lambda x: f(x, jnp.array([5, 3, 9])), x)
    for k in range(3):
        np.testing.assert_allclose(got[:, k], expected(case, x[:, k], None), rtol=1e-5, atol=1e-6)


@linear
def test_vmap_of_gradients(case):
    x = np.stack([operand(case, seed=k) for k in range(2)], axis=1)

    def each(call):
        return lambda x: jax.vmap(jax.grad(lambda x: (call(x) ** 2).sum()))(x)

    got = per_member(each(lambda x: case.call(x, "i")), x)
    for k in range(2):
        one = per_member(jax.grad(lambda x: (case.call(x, "i") ** 2).sum()), x[:, k])
        np.testing.assert_allclose(got[:, k], one, rtol=1e-5, atol=1e-6)


# Control flow and function transformations --------------------------------------------------------


def in_scan(call, x):
    return lax.scan(lambda c, t: (c + call(x * t), None), call(x), jnp.arange(1.0, 4.0))[0]


def in_while_loop(call, x):
    def step(state):
        return state[0] + 1, state[1] + call(x * state[0])

    return lax.while_loop(lambda state: state[0] < 3, step, (0, call(x)))[1]


def in_cond(call, x):
    return lax.cond(jnp.asarray(x.size) > 0, call, lambda x: 2 * call(x), x)


def in_remat(call, x):
    return jax.checkpoint(lambda x: jnp.sin(call(jnp.sin(x))))(x)


def in_inner_jit_called_twice(call, x):
    inner = jax.jit(call)
    return inner(x) + inner(2 * x)


def in_custom_vjp(call, x):
    @jax.custom_vjp
    def f(x):
        return 2 * call(x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: jax.vjp(lambda x: 2 * call(x), x)[1](ct))
    return f(x)


BODIES = [in_scan, in_cond, in_remat, in_inner_jit_called_twice, in_custom_vjp]


@some_cases
def test_control_flow(case):
    """Values and gradients of all bodies, in one program each."""
    x = operand(case)
    weights = data(reference(case)(x).shape, seed=1)

    def ours(body):
        return spmd(lambda x: body(lambda x: case.call(x, "i"), x[0])[None])

    def theirs(body):
        return lambda x: body(reference(case), x)

    def run(f):
        def of_all(x):
            loss = [lambda x, b=b: (weights * f(b)(x)).sum() for b in BODIES]
            return [f(b)(x) for b in [*BODIES, in_while_loop]], [jax.grad(g)(x) for g in loss]

        return jax.jit(of_all)(x)

    for got, right in zip(jax.tree.leaves(run(ours)), jax.tree.leaves(run(theirs)), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4)


def test_conjugate_gradients_of_a_distributed_system():
    """A linear solver around a matrix whose rows are split, with its derivative."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(16, 16)).astype(np.float32)
    matrix = matrix @ matrix.T + 16 * np.eye(16, dtype=np.float32)
    right_side = rng.normal(size=16).astype(np.float32)

    def solve(rows, b):
        def multiply(v):
            return rows @ jax_dfccl.all_gather(v, "i", tiled=True)

        def dot(a, b):
            return jax_dfccl.all_reduce(jnp.vdot(a, b), "i")

        def step(_, state):
            x, r, p = state
            q = multiply(p)
            alpha = dot(r, r) / dot(p, q)
            x, new = x + alpha * p, r - alpha * q
            return x, new, new + dot(new, new) / dot(r, r) * p

        return lax.fori_loop(0, 12, step, (jnp.zeros_like(b), b, b))[0]

    f = spmd(solve, check_vma=True)
    right = np.linalg.solve(matrix, right_side)
    np.testing.assert_allclose(f(matrix, right_side), right, rtol=1e-3, atol=1e-4)
    got = jax.grad(lambda b: f(matrix, b).sum())(right_side)
    np.testing.assert_allclose(got, np.linalg.solve(matrix.T, np.ones(16)), rtol=1e-2, atol=1e-3)


@every_case
def test_unused_calls_are_dropped(case):
    def f(x):
        case.call(x[0], "i", name="n")
        return x

    assert "dfccl" not in spmd(f).lower(operand(case)).as_text()


def test_neutral_values_match_the_package():
    from jax_dfccl import _local

    for op in ("sum", "prod", "min", "max", "and", "or", "xor"):
        for dtype in (np.int8, np.uint16, np.int64):
            assert _local.identity(op, np.dtype(dtype)) == neutral(op, dtype)
