# SPDX-License-Identifier: Apache-2.0
"""all_reduce under differentiation, vmap, remat, control flow, custom_vjp and inner jits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from members import OPS, assert_same_bits, data, make_mesh, per_member, reference, spmd

from jax_dfccl import all_reduce

LAX = {"sum": lax.psum, "mean": lax.pmean}
GROUPS = [[6, 0, 3], [1, 2], [4, 5, 7]]
both_check_vma = pytest.mark.parametrize("check_vma", [False, True])
differentiable = pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])


def weighted_loss(reduce, check_vma=False, **options):
    """(x, weights) -> sum over members of weights times what the member got."""
    f = spmd(lambda x, w: (w * reduce(x)).sum()[None], check_vma=check_vma, **options)
    return lambda x, w: f(x, w).sum()


def reference_gradient(x, weights, op, groups=None):
    """The derivative of `weighted_loss`, by NumPy."""
    gradient = np.zeros_like(x)
    for group in groups or [list(range(len(x)))]:
        total = weights[group].sum(0)
        for member in group:
            if op == "sum":
                share = 1
            elif op == "mean":
                share = 1 / len(group)
            elif op == "prod":
                share = np.prod([x[other] for other in group if other != member], axis=0)
            else:
                best = x[group].max(0) if op == "max" else x[group].min(0)
                share = (x[member] == best) / (x[group] == best).sum(0)
            gradient[member] = total * share
    return gradient


# Differentiation ----------------------------------------------------------------------------------


@both_check_vma
@differentiable
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["whole axis", "groups"])
def test_gradients(op, groups, check_vma):
    x, weights = data((8, 6)), data((8, 6), seed=1)
    x[:, 0] = [0, 1, 0, 2, 0, 3, 0, 0]  # zeros, ties
    x[:, 1] = [1, 2, 3, 0, 4, 5, 6, 7]  # one zero
    x[:, 2] = 5  # all tied

    def reduce(x):
        return all_reduce(x, "i", op=op, axis_index_groups=groups)

    got = jax.grad(weighted_loss(reduce, check_vma))(x, weights)
    np.testing.assert_allclose(
        got, reference_gradient(x, weights, op, groups), rtol=1e-5, atol=1e-6
    )


@both_check_vma
@pytest.mark.parametrize("op", LAX)
def test_gradients_agree_with_lax(op, check_vma):
    x, weights = data((8, 6)), data((8, 6), seed=1)
    ours = jax.grad(weighted_loss(lambda x: all_reduce(x, "i", op=op), check_vma), (0, 1))
    theirs = jax.grad(weighted_loss(lambda x: LAX[op](x, "i"), check_vma), (0, 1))
    for got, right in zip(ours(x, weights), theirs(x, weights), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


@both_check_vma
@pytest.mark.parametrize("op", LAX)
def test_gradients_of_a_replicated_result_agree_with_lax(op, check_vma):
    """The usual case: a replicated loss of replicated parameters and split examples."""
    x, parameters = data((8, 4, 3)), data((3,))

    def grad(reduce):
        def loss(parameters, x):
            return reduce(jnp.tanh(x @ parameters).sum(), "i")

        f = spmd(loss, in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma)
        return jax.grad(f)(parameters, x.reshape(32, 3))

    got = grad(lambda x, i: all_reduce(x, i, op=op))
    np.testing.assert_allclose(got, grad(LAX[op]), rtol=1e-5)


@both_check_vma
@differentiable
def test_derivatives_agree_with_finite_differences(op, check_vma):
    with jax.enable_x64(True):
        x, weights = data((8, 2), np.float64), data((8, 2), np.float64, seed=1)
        if op == "prod":
            x[2, 0] = 0  # exact beside one zero and beside two, in both orders
            x[[1, 5], 1] = 0
        loss = weighted_loss(lambda x: all_reduce(x, "i", op=op), check_vma)
        # Minimum and maximum have no second derivative to speak of.
        order = 1 if op in ("min", "max") else 2
        check_grads(lambda x: loss(x**3 if op != "prod" else x, weights), (x,), order=order)


@both_check_vma
def test_second_derivative_of_a_product_beside_zeros(check_vma):
    x = data((8, 1))
    x[3] = 0
    loss = weighted_loss(lambda x: all_reduce(x, "i", op="prod"), check_vma)
    hessian = jax.hessian(lambda x: loss(x, jnp.ones_like(x)))(x).reshape(8, 8)
    right = np.zeros((8, 8))
    for a in range(8):
        for b in range(8):
            if a != b:
                right[a, b] = 8 * np.prod([x[c] for c in range(8) if c not in (a, b)])
    np.testing.assert_allclose(hessian, right, rtol=1e-5, atol=1e-6)


@both_check_vma
@differentiable
def test_forward_mode_and_linearize_agree_with_reverse_mode(op, check_vma):
    x, tangent, weights = data((8, 4)), data((8, 4), seed=1), data((8, 4), seed=2)
    loss = weighted_loss(lambda x: all_reduce(x, "i", op=op), check_vma)

    def f(x):
        return loss(x, weights)

    forward = jax.jvp(f, (x,), (tangent,))[1]
    linear = jax.linearize(f, x)[1](tangent)
    backward = jax.vjp(f, x)[1](jnp.float32(1))[0]
    np.testing.assert_allclose(forward, linear, rtol=1e-5)
    np.testing.assert_allclose(
        forward, (np.asarray(backward) * tangent).sum(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_takes_the_gradient_of_a_minimum_or_maximum(op):
    x = data((8, 2))
    x[[2, 5], 0] = np.nan
    gradient = jax.grad(weighted_loss(lambda x: all_reduce(x, "i", op=op)))(x, np.ones_like(x))
    np.testing.assert_array_equal(gradient[:, 0], [0, 0, 4, 0, 0, 4, 0, 0])
    finite = x[:, 1:]
    right = reference_gradient(finite, np.ones_like(finite), op)
    np.testing.assert_allclose(gradient[:, 1:], right)


def test_complex_sum_is_linear():
    x, weights = data((8, 3), np.complex64), data((8, 3), np.complex64, seed=1)
    ours, theirs = (
        jax.grad(lambda x, f=f: weighted_loss(f)(x, weights).real)(x)
        for f in (lambda x: all_reduce(x, "i"), lambda x: lax.psum(x, "i"))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@both_check_vma
def test_integers_and_flags_have_no_derivative(check_vma):
    x = data((8, 3))

    def f(x):
        count = all_reduce((x > 0).astype(np.int32), "i")
        flag = all_reduce(x > 0, "i", op="xor")
        top = all_reduce((10 * x).astype(np.int32), "i", op="max")
        return (x * count * jnp.where(flag, 2, 1) * top).sum()[None]

    gradient = jax.grad(lambda x: spmd(f, check_vma=check_vma)(x).sum())(x)
    count, flag = (x > 0).sum(0), (x > 0).sum(0) % 2
    top = (10 * x).astype(np.int32).max(0)
    np.testing.assert_allclose(
        gradient, np.broadcast_to(count * (1 + flag) * top, (8, 3)), rtol=1e-6
    )


@both_check_vma
def test_stop_gradient_and_zero_cotangents(check_vma):
    x = data((8, 3))
    loss = weighted_loss(lambda x: lax.stop_gradient(all_reduce(x, "i")) * x, check_vma)
    right = reference(x)
    np.testing.assert_allclose(jax.grad(loss)(x, np.ones_like(x)), right, rtol=1e-5)

    def unused(x):
        all_reduce(x, "i", op="max")
        return x

    got = jax.grad(weighted_loss(unused, check_vma))(x, np.ones_like(x))
    np.testing.assert_array_equal(got, np.ones_like(x))


def call_names(jaxpr):
    return re.findall(r"dfccl_all_reduce\[\s.*?name=(\S+)\s.*?\]", str(jaxpr), re.DOTALL)


@differentiable
def test_derivatives_of_named_calls_have_names_of_their_own(op):
    x = data((8, 2))
    loss = weighted_loss(lambda x: all_reduce(x, "i", op=op, name="n") ** 2)

    def f(x):
        return loss(x, x)

    for transformed in (jax.grad(f), jax.grad(lambda x: jax.grad(f)(x).sum())):
        names = call_names(jax.make_jaxpr(transformed)(x))
        assert "n" in names and len(names) > 1
        assert len(names) == len(set(names)), names

    def twice(x):
        return jax.jvp(lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (x,))[1]

    names = call_names(jax.make_jaxpr(twice)(x))
    assert len(names) == len(set(names)) >= 4, names


@both_check_vma
def test_named_and_keyed_calls_are_differentiated(check_vma):
    x, weights = data((8, 3)), data((8, 3), seed=1)

    def reduce(x):
        def step(carry, t):
            return carry + all_reduce(jnp.sin(x) * t, "i", op="prod", name="n", key=t), None

        start = all_reduce(x, "i", name="start")
        return lax.scan(step, start, jnp.arange(1, 4))[0]

    def direct(x):
        def factor(t):
            return (jnp.sin(x) * t).prod(0)

        return (weights * (x.sum(0) + factor(1) + factor(2) + factor(3))).sum()

    got = jax.grad(weighted_loss(reduce, check_vma))(x, weights)
    np.testing.assert_allclose(got, jax.grad(direct)(x), rtol=1e-3, atol=1e-4)


# vmap ---------------------------------------------------------------------------------------------


@both_check_vma
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_over_another_axis(op, axis, check_vma):
    x = data((8, 3, 4, 5), np.int32 if op in ("and", "or", "xor") else np.float32)
    f = jax.vmap(lambda x: all_reduce(x, "i", op=op), axis, axis)
    assert_same_bits(per_member(f, x, check_vma=check_vma), reference(x, op))


@pytest.mark.parametrize("op", OPS)
def test_vmap_over_the_axis_itself_is_local(op):
    x = data((6, 5), np.int32 if op in ("and", "or", "xor") else np.float32)
    f = jax.jit(jax.vmap(lambda x: all_reduce(x, "b", op=op), axis_name="b"))
    np.testing.assert_allclose(f(x), reference(x, op), rtol=1e-5)
    assert "dfccl" not in f.lower(x).as_text()
    flags = data((6, 5), bool)
    if op not in ("sum", "mean", "prod"):
        np.testing.assert_array_equal(f(flags), reference(flags, op))
    constant = jax.vmap(lambda _: all_reduce(x[0], "b", op=op), axis_name="b")(np.zeros(6))
    np.testing.assert_allclose(constant, reference(np.stack([x[0]] * 6), op), rtol=1e-5)


def test_vmap_over_the_axis_itself_with_groups():
    x = data((8, 3))
    for op in OPS[:5]:

        def f(x, op=op):
            return all_reduce(x, "b", op=op, axis_index_groups=GROUPS)

        got = jax.vmap(f, axis_name="b")(x)
        np.testing.assert_allclose(got, reference(x, op, GROUPS), rtol=1e-6)
    got = jax.vmap(lambda _: all_reduce(x[0], "b", axis_index_groups=GROUPS), axis_name="b")(x)
    np.testing.assert_allclose(got, reference(np.stack([x[0]] * 8), "sum", GROUPS), rtol=1e-6)


@pytest.mark.parametrize("axes", [("i", "b"), ("b", "i")])
@both_check_vma
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max"])
def test_vmap_axis_together_with_a_mesh_axis(axes, op, check_vma):
    x = data((8, 3, 4))
    f = jax.vmap(lambda x: all_reduce(x, axes, op=op), axis_name="b")
    got = per_member(f, x, check_vma=check_vma)
    right = np.broadcast_to(reference(x.reshape(24, 4), op)[0], (8, 3, 4))
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


@both_check_vma
def test_vmap_of_gradients(check_vma):
    x = data((8, 3, 4))

    def f(x):
        def square(x):
            return (all_reduce(x, "i") ** 2).sum()

        return jax.vmap(jax.grad(square))(x)

    right = 2 * reference(x) * (1 if check_vma else 8)
    theirs = per_member(
        lambda x: jax.vmap(jax.grad(lambda x: (lax.psum(x, "i") ** 2).sum()))(x),
        x, check_vma=check_vma,
    )  # fmt: skip
    got = per_member(f, x, check_vma=check_vma)
    np.testing.assert_allclose(got, theirs, rtol=1e-5)
    np.testing.assert_allclose(got, right, rtol=1e-5)


def test_gradient_inside_vmap_over_the_axis_itself_agrees_with_lax():
    x = data((6, 4))
    for op, theirs in LAX.items():

        def grad(reduce):
            return jax.vmap(
                    jax.grad(lambda x: (reduce(x) ** 2).sum()), axis_name="b"
                )(x)  # fmt: skip

        got = grad(lambda x, op=op: all_reduce(x, "b", op=op))
        np.testing.assert_allclose(got, grad(lambda x, f=theirs: f(x, "b")), rtol=1e-5)


@both_check_vma
def test_vmapped_keys_are_one_call_each(check_vma):
    x = data((8, 3, 4))
    keys = np.array([5, 3, 9], np.int32)
    for in_axis, right in [(0, x), (None, x[:, 0])]:
        f = jax.vmap(lambda x, k: all_reduce(x, "i", name="n", key=k), (in_axis, 0))
        got = per_member(lambda x, f=f: f(x, keys), right, check_vma=check_vma)
        expected = reference(right)
        if in_axis is None:
            expected = np.broadcast_to(expected[:, None], (8, 3, 4))
        assert_same_bits(got, np.ascontiguousarray(expected))


# Control flow and function transformations --------------------------------------------------------


def reduce(x, op="sum"):
    """A result that can be a loop's carry or a branch's output under check_vma too."""
    return lax.pcast(all_reduce(x, "i", op=op), "i", to="varying")


def in_scan(x):
    return lax.scan(lambda c, t: (reduce(c * t, "mean"), None), x, jnp.arange(1.0, 4.0))[0]


def in_unrolled_scan(x):
    def step(c, t):
        return (reduce(c * t, "mean"), None)

    return lax.scan(step, x, jnp.arange(1.0, 4.0), unroll=2)[0]


def in_while_loop(x):
    def step(state):
        return (state[0] + 1, reduce(state[1] * 0.5))

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


def in_loop_with_a_condition_that_reduces(x):
    def going_on(c):
        return all_reduce(c, "i", op="max").max() < 20

    return lax.while_loop(going_on, lambda c: reduce(c, "max") + 1.5, x)


def in_fori_loop(x):
    return lax.fori_loop(0, 3, lambda t, x: reduce(x, "mean") * (t + 1), x)


def in_cond(x):
    return lax.cond(jnp.asarray(x.size) > 3, reduce, lambda x: x, x)


def in_switch(x):
    branches = [lambda x, k=k: reduce(k * x, "max") for k in range(1, 4)]
    return lax.switch(jnp.asarray(1), branches, x)


def in_remat(x):
    return jax.checkpoint(lambda x: jnp.sin(reduce(jnp.sin(x))))(x)


def in_remat_that_saves_nothing(x):
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(lambda x: jnp.sin(reduce(jnp.sin(x))), policy=policy)(x)


def in_inner_jit_called_twice(x):
    inner = jax.jit(reduce)
    return inner(x) + inner(2 * x)


@jax.custom_vjp
def twice(x):
    return 2 * reduce(x, "mean")


twice.defvjp(lambda x: (twice(x), None), lambda _, ct: (2 * reduce(ct, "mean"),))


def in_custom_vjp(x):
    return twice(x)


@jax.custom_jvp
def thrice(x):
    return 3 * reduce(x, "mean")


thrice.defjvp(lambda x, t: (thrice(x[0]), 3 * reduce(t[0], "mean")))


def in_custom_jvp(x):
    return thrice(x)


# What the members get; as a function of all members' operands.
DIRECT = {
    in_scan: lambda x: 6 * x.mean(0),
    in_unrolled_scan: lambda x: 6 * x.mean(0),
    in_while_loop: lambda x: x.sum(0) * 8,
    in_loop_with_a_condition_that_reduces: None,
    in_fori_loop: lambda x: 6 * x.mean(0),
    in_cond: lambda x: x.sum(0),
    in_switch: lambda x: 2 * x.max(0),
    in_remat: lambda x: jnp.sin(jnp.sin(x).sum(0)),
    in_remat_that_saves_nothing: lambda x: jnp.sin(jnp.sin(x).sum(0)),
    in_inner_jit_called_twice: lambda x: 3 * x.sum(0),
    in_custom_vjp: lambda x: 2 * x.mean(0),
    in_custom_jvp: lambda x: 3 * x.mean(0),
}


@both_check_vma
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("body", DIRECT, ids=lambda body: body.__name__)
def test_values_under(body, jit, check_vma):
    x = data((8, 5))
    direct = DIRECT[body] or (lambda x: x.max(0) + 1.5 * np.ceil((20 - x.max()) / 1.5))
    got = per_member(body, x, jit=jit, check_vma=check_vma)
    np.testing.assert_allclose(got, np.broadcast_to(direct(x), (8, 5)), rtol=1e-4, atol=1e-5)


@both_check_vma
@pytest.mark.parametrize(
    "body",
    [body for body in DIRECT if "while" not in body.__name__ and DIRECT[body]],
    ids=lambda body: body.__name__,
)
def test_gradients_under(body, check_vma):
    x, weights = data((8, 5)), data((8, 5), seed=1)
    got = jax.grad(weighted_loss(body, check_vma))(x, weights)
    right = jax.grad(lambda x: (weights * DIRECT[body](x)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_unused_calls_are_dropped():
    def f(x):
        all_reduce(x, "i")
        return x

    assert "dfccl" not in spmd(f).lower(data((8, 2))).as_text()


@both_check_vma
def test_vmap_of_scan_of_gradients_over_two_axes(check_vma):
    """Everything at once, against the same program on lax."""
    x = data((8, 3, 4))
    mesh = make_mesh((4, 2), ("i", "j"))

    def program(mean, add):
        def f(x):
            def step(c, t):
                def loss(c):
                    return add(jnp.sin(c) * t, "i").sum() + mean(c**2, ("i", "j")).sum()

                return c - 0.1 * jax.grad(loss)(c), None

            return lax.scan(jax.checkpoint(step), x, jnp.arange(3.0))[0]

        return per_member(jax.vmap(f), x, mesh=mesh, check_vma=check_vma)

    ours = program(lambda x, a: all_reduce(x, a, op="mean"), all_reduce)
    np.testing.assert_allclose(ours, program(lax.pmean, lax.psum), rtol=1e-5)
