# SPDX-License-Identifier: Apache-2.0
"""Collectives on whole sharded arrays: Auto and Explicit axes, plain, in jit, in shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from members import assert_same_bits, data

from jax_dfccl import all_gather, all_reduce, sharded


def mesh_of(kind, shape=(4, 2), names=("i", "j")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def total(x):
    return x * all_reduce(x.sum(0, keepdims=True), "i")


X = data((8, 6), np.int32, small=True)
RIGHT = (X * X.sum(0)).astype(np.int32)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_values(kind, jit):
    mesh = mesh_of(kind)
    spec = P("i", "j")
    f = sharded(total, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh):
        got = (jax.jit(f) if jit else f)(put(X, mesh, spec))
    assert_same_bits(got, RIGHT)
    assert got.sharding.spec == spec
    f = sharded(total, in_specs=spec, out_specs=spec, mesh=mesh)
    assert_same_bits((jax.jit(f) if jit else f)(put(X, mesh, spec)), RIGHT)


def test_specs_and_mesh_are_found_where_they_are_known():
    f = sharded(total, out_specs=P("i"))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        assert_same_bits(f(put(X, mesh, P("i"))), RIGHT)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert_same_bits(jax.jit(f)(put(X, mesh, P("i"))), RIGHT)


def test_unknown_specs_are_refused_and_not_gathered():
    mesh = mesh_of(AxisType.Auto)
    f = jax.jit(sharded(total, out_specs=P("i")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"\['i', 'j'\] is not known.*in_specs="),
    ):
        f(put(X, mesh, P("i")))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_operands_that_would_be_gathered_are_refused(kind):
    mesh = mesh_of(kind)
    f = sharded(total, in_specs=P("i"), out_specs=P("i"), mesh=mesh)
    with pytest.raises(ValueError, match=r"split over \['j'\] along dimension 1.*gathered"):
        f({"x": put(X, mesh, P("i", "j"))}["x"])
    if kind == AxisType.Auto:  # whole operands may be split: that moves nothing
        assert_same_bits(f(put(X, mesh, P())), RIGHT)


def test_explicit_operands_under_jit_that_would_be_gathered_are_refused():
    mesh = mesh_of(AxisType.Explicit)
    f = jax.jit(sharded(total, in_specs=P("i"), out_specs=P("i")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="would be gathered"):
        f(put(X, mesh, P(("i", "j"))))


def test_no_gather_in_the_compiled_program():
    mesh = mesh_of(AxisType.Auto)
    spec = P("i", "j")

    @jax.jit
    def program(x):
        return 2 * sharded(total, in_specs=spec, out_specs=spec, mesh=mesh)(3 * x)

    compiled = program.lower(put(X, mesh, spec)).compile().as_text()
    assert "dfccl_collective" in compiled and "all-gather" not in compiled
    assert_same_bits(program(put(X, mesh, spec)), 18 * RIGHT)


def test_inside_a_shard_map_over_some_axes():
    mesh = mesh_of(AxisType.Auto)

    def inner(x):
        assert jax.typeof(x).shape == (2, 3)
        return x * all_reduce(x.sum(0, keepdims=True), "i")

    def outer(x):
        return sharded(inner, in_specs=P("i"), out_specs=P("i"))(x)

    f = jax.shard_map(
        outer, mesh=mesh, in_specs=P(None, "j"), out_specs=P(None, "j"), axis_names={"j"}
    )
    assert_same_bits(jax.jit(f)(X), RIGHT)


def test_pytrees_and_several_arguments():
    mesh = mesh_of(AxisType.Auto, (8,), ("i",))

    def f(parameters, x):
        whole = all_gather(x, "i", tiled=True)
        return {"y": (parameters["w"] * whole).sum(0, keepdims=True)}

    g = jax.jit(sharded(f, in_specs=({"w": P()}, P("i")), out_specs=P("i"), mesh=mesh))
    w = data((8, 6), seed=1)
    got = g({"w": w}, X)["y"]
    np.testing.assert_allclose(got, np.tile((w * X).sum(0), (8, 1)), rtol=1e-5, atol=1e-5)


def test_gradients():
    mesh = mesh_of(AxisType.Auto, (8,), ("i",))
    x, w = data((8, 3)), data((8, 3), seed=1)
    f = sharded(
        lambda x: all_gather(x, "i", tiled=True), in_specs=P("i"), out_specs=P("i"), mesh=mesh
    )
    gradient = jax.grad(lambda x: (jnp.tile(w, (8, 1)) * f(x)).sum())(x)
    np.testing.assert_allclose(gradient, 8 * w, rtol=1e-5)


def test_errors():
    with pytest.raises(ValueError, match="there is no mesh"):
        sharded(total, in_specs=P("i"), out_specs=P("i"))(X)
    mesh = mesh_of(AxisType.Auto, (8,), ("i",))
    f = sharded(total, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ValueError, match="over all axes of the mesh already"):
        jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(X)
