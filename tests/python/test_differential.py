# SPDX-License-Identifier: Apache-2.0
"""Any collective in any groups, shape and type, in any body, under any transform: the reference's.

The members lie along a mesh axis, along a vmapped axis, or along one of each.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import Case, composed, expected, folders, movers, neutral, shape_for
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.scipy.sparse.linalg import bicgstab, cg
from members import data, make_mesh, spmd
from test_collectives_transforms import (
    BODIES,
    in_cond,
    in_custom_vjp,
    in_inner_jit_called_twice,
    in_while_loop,
)

import jax_dfccl


def plain(call, x):
    return call(x)


OPS = ("sum", "mean", "prod", "min", "max")
# What these are called with here names two members.
AT_LEAST_TWO = ("ppermute", "broadcast", "scatter", "reduce(")
INTEGER_BODIES = [plain, in_cond, in_inner_jit_called_twice, in_while_loop]


def cases(dtype) -> list[Case]:
    kind = np.dtype(dtype).kind
    ops = {"i": ("sum", "prod", "max"), "c": ("sum", "mean")}.get(kind, OPS)
    folds = [case for op in ops for case in folders(op, neutral(op, dtype))]
    # The neutral value of a maximum is infinite, which bodies make undefined.
    folds = [c for c in folds if not c.name.startswith(("exclusive_scan(m", "all_reduce(mean"))]
    made = [case for case in composed() if kind != "c" or case.linear]
    return [*movers(), *folds, *made]


@st.composite
def examples(draw):
    dtype = draw(st.sampled_from(["float32", "float64", "float32", "complex64", "int32"]))
    case = draw(st.sampled_from(cases(dtype)))
    least = 2 if case.name.startswith(AT_LEAST_TWO) else 1
    groups = None
    if case.grouped and draw(st.integers(0, 3)):
        groups = draw(partitions(even=case.even, least=least))
    inner = draw(st.sampled_from([(), (0,), (1,), (7,), (2, 3), (3, 0)]))
    integers = np.dtype(dtype).kind == "i"
    body = draw(st.sampled_from(INTEGER_BODIES if integers else [plain, in_while_loop, *BODIES]))
    transforms = ["value", "vmap"]
    if not integers:
        if body is not in_custom_vjp:
            transforms += ["jvp"]
        if body is not in_while_loop:
            transforms += ["vjp", "vmap of vjp"]
        if body not in (in_while_loop, in_custom_vjp):
            transforms += ["hvp"]
        if body is plain and case.linear and case.name != "barrier":
            transforms += ["transpose"]
    transform = draw(st.sampled_from(transforms))
    layouts = ["mesh", "mesh", "vmap", "both"]
    if body is in_custom_vjp:  # JAX runs the rule where the vmapped axis has no name
        layouts = ["mesh"]
    layout = draw(st.sampled_from(layouts))
    return case, dtype, groups, inner, body, transform, layout, draw(st.booleans())


@st.composite
def partitions(draw, even, least):
    """Groups that cover eight members, in any order."""
    order = draw(st.permutations(range(8)))
    if even:
        size = draw(st.sampled_from([size for size in (1, 2, 4, 8) if size >= least]))
        cuts = list(range(size, 8, size))
    else:
        cuts = sorted(draw(st.sets(st.integers(1, 7))))
        cuts = [c for a, c in itertools.pairwise([0, *cuts]) if c - a >= least and 8 - c >= least]
    groups = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 8])]
    return groups if min(map(len, groups)) >= least else [list(order)]


def ours(case, groups, body, layout, check_vma):
    """From what all members have to what all get."""

    def on(axes):
        options = {} if groups is None else {"axis_index_groups": groups}
        return lambda x: body(lambda x: case.call(x, axes, **options), x)

    if layout == "vmap":
        return jax.vmap(on("b"), axis_name="b")
    if layout == "mesh":
        return spmd(lambda x: on("i")(x[0])[None], check_vma=check_vma)
    both = spmd(
        lambda x: jax.vmap(on(("i", "b")), axis_name="b")(x[0])[None],
        make_mesh((4,)),
        check_vma=check_vma,
    )

    def f(x):
        y = both(x.reshape(4, 2, *x.shape[1:]))
        return y.reshape(8, *y.shape[2:])

    return f


def theirs(case, groups, body):
    return lambda x: body(lambda x: expected(case, x, groups, xp=jnp), x)


def transformed(f, transform, x, tangent, weights):
    if transform == "value":
        return f(x)
    if transform == "vmap":
        return jax.vmap(f)(jnp.stack([x, tangent, x + tangent]))
    if transform == "jvp":
        return jax.jvp(f, (x,), (tangent,))
    if transform == "transpose":
        return jax.linear_transpose(f, x)(weights)
    if transform == "hvp":
        gradient = jax.grad(lambda x: (jnp.abs(f(x)) ** 2).sum())
        return jax.jvp(gradient, (x,), (tangent,))[1]
    y, pull = jax.vjp(f, x)
    if transform == "vjp":
        return y, pull(weights)
    return jax.vmap(pull)(jnp.stack([weights, 2 * weights]))


def check(example):
    case, dtype, groups, inner, body, transform, layout, check_vma = example
    with jax.enable_x64(dtype == "float64"):  # the bodies have floats of their own
        group = len(groups[0]) if groups and case.even else 8
        shape = shape_for(case, inner, group=group)
        x, tangent = (jnp.asarray(data(shape, dtype, seed=k, small=True)) for k in (0, 1))
        right = theirs(case, groups, body)
        result = jax.eval_shape(right, x)
        weights = jnp.asarray(data(result.shape, result.dtype, seed=2, small=True))
        if transform not in ("value", "vmap"):
            assert result.dtype == x.dtype
        got, wanted = (
            jax.jit(lambda *a, f=f: transformed(f, transform, *a))(x, tangent, weights)
            for f in (ours(case, groups, body, layout, check_vma), right)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            scale = max(1.0, float(jnp.max(jnp.abs(b), initial=0)))
            tight = a.dtype == np.float64
            np.testing.assert_allclose(
                a, b, rtol=1e-9 if tight else 2e-4, atol=scale * (1e-11 if tight else 2e-5)
            )


@given(examples())
def test_any_collective_under_any_transform(example):
    check(example)


@pytest.mark.parametrize("layout", ["mesh", "vmap", "both"])
@pytest.mark.parametrize("inner", [(0,), (3, 0)], ids=str)
def test_empty_arrays(inner, layout):
    for case in [*movers()[:2], *folders("sum")[:2], *composed()[1:3]]:
        check((case, "float32", None, inner, plain, "vjp", layout, True))


@pytest.mark.soak
@settings(max_examples=1500)
@given(examples())
def test_many_collectives_under_many_transforms(example):
    check(example)


# Permutations -------------------------------------------------------------------------------------


@st.composite
def chains(draw):
    """A few permutations, whole or partial, with self pairs or without, of 2, 4 or 8 members."""
    size = draw(st.sampled_from([2, 4, 8]))
    perms = []
    for _ in range(draw(st.integers(2, 6))):
        targets = draw(st.permutations(range(size)))
        senders = draw(st.sets(st.integers(0, size - 1)))
        perms.append([(source, targets[source]) for source in sorted(senders)])
    return size, perms


@given(chains(), st.sampled_from([0, 1, 7, 4099]))
def test_any_chain_of_permutations(chain, count):
    """Who receives nothing has zeros, which it passes on."""
    size, perms = chain
    x = data((size, count), np.int32)

    def f(x):
        for perm in perms:
            x = jax_dfccl.ppermute(x, "i", perm)
        return x

    right = x
    for perm in perms:
        sent, right = right, np.zeros_like(x)
        for source, target in perm:
            right[target] = sent[source]
    np.testing.assert_array_equal(spmd(f, make_mesh((size,)))(x), right)


# Overlapping groups -------------------------------------------------------------------------------


def test_every_pair_of_overlapping_subsets():
    """Of four devices: two calls over groups that share a member, in opposite order on it."""
    subsets = [s for size in (2, 3, 4) for s in itertools.combinations(range(4), size)]
    pairs = [p for p in itertools.product(subsets, subsets) if set(p[0]) & set(p[1])]
    some = [*movers(), *folders("sum"), *composed()]
    some = [case for case in some if case.grouped and not case.even]
    mesh = make_mesh((4,))
    for start in range(0, len(pairs), 16):
        calls = []
        for k, pair in enumerate(pairs[start : start + 16], start):
            rest = [[[m] for m in range(4) if m not in subset] for subset in pair]
            # Groups of the others must have the members that the call names.
            groups = [[list(s)[::-1], *others] for s, others in zip(pair, rest, strict=True)]
            case = some[k % len(some)]
            if case.name.startswith(AT_LEAST_TWO) and any(rest):
                case = some[-1]
            calls.append((k, case, groups))
        x = data((4, 5), np.int32)

        def f(x, calls=calls):
            def run(first):
                def branch(x):
                    out = {}
                    for k, case, groups in calls if first else calls[::-1]:
                        for place in (0, 1) if first else (1, 0):
                            y = case.call(
                                x + place, "i", axis_index_groups=groups[place], name=f"{k} {place}"
                            )
                            out[k, place] = y
                    return [out[k, place] for k, _, _ in calls for place in (0, 1)]

                return branch

            return lax.cond(lax.axis_index("i") % 2 == 0, run(True), run(False), x)

        results = spmd(lambda x: [y[None] for y in f(x[0])], mesh)(x)
        wanted = [
            expected(c, x + place, groups[place]) for _, c, groups in calls for place in (0, 1)
        ]
        for got, right in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(got, right)


# Linear solvers -----------------------------------------------------------------------------------


def test_solvers_of_jax_around_a_distributed_matrix():
    """Conjugate gradients, and a solver that transposes the product, with their derivatives."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        general = rng.normal(size=(16, 16)) + 16 * np.eye(16)
        symmetric = general @ general.T / 16
        b, weights = rng.normal(size=(2, 16))

        def product(matrix):
            f = spmd(lambda rows, v: rows @ jax_dfccl.all_gather(v, "i", tiled=True))
            return lambda v: f(matrix, v)

        for solve, matrix in ((cg, symmetric), (bicgstab, general)):

            def loss(b, matrix, solve=solve):
                x = solve(product(matrix), b, tol=1e-12, maxiter=200)[0]
                return weights @ x, x

            (_, x), back = jax.jit(jax.value_and_grad(loss, has_aux=True))(b, matrix)
            np.testing.assert_allclose(x, np.linalg.solve(matrix, b), rtol=1e-7, atol=1e-9)
            right = np.linalg.solve(matrix.T, weights)
            np.testing.assert_allclose(back, right, rtol=1e-7, atol=1e-9)
            for_matrix = jax.jit(jax.grad(lambda m: loss(b, m)[0]))(matrix)
            np.testing.assert_allclose(for_matrix, -np.outer(right, x), rtol=1e-6, atol=1e-8)
