# SPDX-License-Identifier: Apache-2.0
"""override_lax: lax's programs give lax's results on the daemon; the counts are exact."""

import doctest
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from members import assert_same_bits, data, make_mesh, per_member, spmd
from test_programs import run

import jax_dfccl
from jax_dfccl import override_lax

GROUPS = [[6, 0, 3, 5], [1, 2, 4, 7]]
UNEVEN = [[6, 0, 3], [1, 2], [4, 5, 7]]
both_check_vma = pytest.mark.parametrize("check_vma", [False, True])

# name -> (a collective of a member's [8, 16] array, its primitive without and with check_vma)
COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), "psum", "psum_invariant"),
    "pmean": (lambda x: lax.pmean(x, "i"), "psum", "psum_invariant"),
    "pmax": (lambda x: lax.pmax(x, "i"), "pmax", "pmax"),
    "pmin": (lambda x: lax.pmin(x, "i"), "pmin", "pmin"),
}  # fmt: skip
GROUPED = {
    "psum": (lambda x: lax.psum(x, "i", axis_index_groups=UNEVEN), "psum"),
    "pmax": (lambda x: lax.pmax(x, "i", axis_index_groups=UNEVEN), "pmax"),
}  # fmt: skip
DTYPES = [np.float32, np.int32, np.int8, jnp.bfloat16, np.complex64, bool]
NOT_COMPLEX = ("pmax", "pmin")  # lax does not define these
VALUES = [(n, d) for n in COLLECTIVES for d in DTYPES if d != np.complex64 or n not in NOT_COMPLEX]


def both(f, *arguments):
    """The results of a program stock and under the override, and the override's counts."""
    stock = f(*arguments)
    with override_lax() as override:
        ours = f(*arguments)
    assert not override.kept
    for got, right in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        assert got.dtype == right.dtype and got.weak_type == right.weak_type
        assert got.sharding == right.sharding
    return stock, ours, override.counts


def holds_calls(f, *arguments):
    return "dfccl_" in jax.jit(f).lower(*arguments).as_text()


@both_check_vma
@pytest.mark.parametrize("name, dtype", VALUES)
def test_values_agree_with_lax(name, dtype, check_vma):
    f, *primitives = COLLECTIVES[name]
    x = data((8, 8, 16), dtype)
    stock, ours, counts = both(lambda x: per_member(f, x, check_vma=check_vma), x)
    assert counts == {primitives[check_vma]: 1}
    if name == "pmean" or np.dtype(dtype).kind == "c":
        np.testing.assert_allclose(ours, stock, rtol=1e-6)
    else:
        assert_same_bits(ours, stock)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_agree_with_lax(name):
    f, primitive = GROUPED[name]
    stock, ours, counts = both(lambda x: per_member(f, x), data((8, 8, 16)))
    assert counts == {primitive: 1}
    assert_same_bits(ours, stock)


@pytest.mark.parametrize("axes", ["x", "y", ("x", "y"), ("y", "x")], ids=str)
def test_axes_of_a_mesh(axes):
    mesh = make_mesh((2, 4), ("x", "y"))

    def f(x):
        return per_member(lambda x: lax.psum(x, axes), x, mesh=mesh)

    stock, ours, counts = both(f, data((8, 5)))
    assert counts == {"psum": 1}
    assert_same_bits(ours, stock)


def test_dimensions_of_the_array_itself():
    x = data((8, 4, 3), np.int32)
    stock, ours, counts = both(
        lambda x: per_member(lambda x: (lax.psum(x, ("i", 1)), lax.pmax(x, (0, "i"))), x), x
    )
    assert counts == {"psum": 1, "pmax": 1}
    for got, right in zip(ours, stock, strict=True):
        assert_same_bits(got, right)


def test_empty_arrays_and_scalars():
    f = spmd(lambda x: (lax.psum(x[:, :0], "i"), lax.pmax(x.sum(), "i")[None]))
    stock, ours, counts = both(f, data((8, 3)))
    assert counts == {"psum": 1, "pmax": 1}
    for got, right in zip(ours, stock, strict=True):
        assert_same_bits(got, right)


@both_check_vma
@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_what_autodiff_adds_is_replaced(name, check_vma):
    """A replicated loss of replicated parameters: the gradient's sum is JAX's own."""
    f = COLLECTIVES[name][0]

    def loss(w, x):
        return f(jnp.tanh(x @ w).sum()) / 8

    mapped = spmd(loss, in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma)
    grad = jax.jit(jax.grad(mapped))
    w, x = data((3,)), data((8, 3), seed=1)
    stock, ours, counts = both(grad, w, x)
    np.testing.assert_allclose(ours, stock, rtol=1e-6)
    native = grad.lower(w, x).as_text()
    with override_lax():
        text = grad.lower(w, x).as_text()
    assert sum(counts.values()) == native.count("stablehlo.all_reduce") == 1 + (not check_vma)
    assert "stablehlo.all_reduce" not in text


def test_inside_transforms():
    def body(x):
        def step(carry, row):
            total = lax.psum(row * carry, "i")
            return carry + total.mean(), total

        carry, rows = lax.scan(jax.checkpoint(step), x.sum(), x)
        total = jax.vmap(lambda r: lax.pmax(r, "i"))(rows)
        return lax.cond(carry > 0, lambda: lax.psum(total, "i"), lambda: total)

    x = data((64, 3))
    stock, ours, counts = both(spmd(body), x)
    np.testing.assert_allclose(ours, stock, rtol=1e-5)
    assert counts == {"psum": 2, "pmax": 1}


def test_pmap():
    def f(x):
        return lax.psum(x, "i") + lax.pmax(x, "i", axis_index_groups=GROUPS)

    program = jax.pmap(f, axis_name="i")
    stock, ours, counts = both(program, data((8, 5)))
    assert counts == {"psum": 1, "pmax": 1}
    assert_same_bits(ours, stock)


def test_shard_map_without_jit():
    f = spmd(lambda x: lax.psum(x, "i"), jit=False)
    stock, ours, counts = both(f, data((8, 3)))
    assert counts == {"psum": 1}
    assert_same_bits(ours, stock)


# Caches -------------------------------------------------------------------------------------------


def test_no_program_leaks_from_one_mode_to_the_other():
    traces = []

    def body(x):
        traces.append(x)
        return lax.psum(x, "i")

    f = spmd(body)
    x = data((8, 3))
    for _ in range(2):
        f(x)
        assert not holds_calls(f, x)
        with override_lax() as override:
            f(x)
            assert holds_calls(f, x)
            with override_lax(False):
                assert not holds_calls(f, x)
            assert holds_calls(f, x)
        assert not holds_calls(f, x)
    assert override.counts == {}  # the second block found its programs in the caches


def test_a_lowered_program_stays_what_it_was():
    f, x = spmd(lambda x: lax.psum(x, "i")), data((8, 3))
    stock = f.lower(x)
    with override_lax():
        ours = f.lower(x)
        assert "dfccl_" not in stock.as_text()
        right = stock.compile()(x)
    assert "dfccl_" in ours.as_text()
    assert_same_bits(ours.compile()(x), right)


def test_a_trace_is_lowered_by_the_mode_of_its_lowering():
    f, x = spmd(lambda x: lax.psum(x, "i")), data((8, 3))
    traced = f.trace(x)
    with override_lax() as override:
        assert "dfccl_" in traced.lower().as_text()
    assert "dfccl_" not in traced.lower().as_text()
    assert override.counts == {"psum": 1}


def test_the_override_is_the_thread_s_own():
    f, x = spmd(lambda x: lax.psum(x, "i")), data((8, 3))
    found = []
    with override_lax() as override:
        thread = threading.Thread(target=lambda: found.append(holds_calls(f, x)))
        thread.start()
        thread.join()
        assert found == [False] and override.counts == {}
        assert holds_calls(f, x)


# Counts -------------------------------------------------------------------------------------------


def test_every_call_is_counted_once():
    def body(x):
        for _ in range(3):  # equal calls, which JAX's own rules would be lowered once for
            x = lax.psum(x, "i")
        return lax.pmax(lax.pmin(x, "i"), "i")

    before = jax_dfccl.report("dict")["override_lax"]["replaced"]
    with override_lax() as outer, override_lax() as inner, outer:
        spmd(body)(data((8, 3)))
    assert not holds_calls(spmd(body), data((8, 3)))
    assert outer.counts == inner.counts == {"psum": 3, "pmax": 1, "pmin": 1}
    after = jax_dfccl.report("dict")["override_lax"]["replaced"]
    assert {name: after[name] - before.get(name, 0) for name in outer.counts} == outer.counts
    assert f"of jax.lax, replaced: {after['pmax']} pmax" in str(jax_dfccl.report())


def test_what_is_kept_is_counted_with_its_reason():
    mesh = make_mesh((2, 4), ("x", "y"))
    x = data((8, 4), np.complex64)
    partly = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x, "x"),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P(),
            axis_names={"x"},
        )
    )
    single = spmd(lambda x: lax.psum(x, "i"), make_mesh((1,)))
    with override_lax() as override:
        for f in (partly, single):
            f.lower(x)
    assert override.counts == {}
    assert override.kept == {
        "psum_invariant: mesh axes left to the compiler": 1,
        "psum: one member": 1,
    }


def test_export():
    """For several platforms JAX's own rules are kept, and they still work."""
    f, x = spmd(lambda x: lax.psum(x, "i")), data((8, 3))
    x = jax.device_put(x, NamedSharding(make_mesh(), P("i")))
    with override_lax() as override:
        exported = jax.export.export(f, platforms=("cpu", "tpu"))(x)
    assert override.counts == {} and override.kept == {"psum: several platforms": 1}
    assert_same_bits(exported.call(x), f(x))

    targets = ("dfccl_collective", "dfccl_collective_start", "dfccl_collective_done")
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    with override_lax() as override:
        exported = jax.export.export(f, platforms=("cpu",), disabled_checks=checks)(x)
    assert override.counts == {"psum": 1} and "dfccl_" in exported.mlir_module()
    assert_same_bits(exported.call(x), f(x))


def test_asynchronous_collectives_are_kept():
    f = spmd(lambda x: parallel.all_gather_start(x, "i").done())
    with override_lax() as override:
        text = f.lower(data((8, 3))).as_text()
    assert override.counts == {} and override.kept == {"all_gather_start: asynchronous": 1}
    assert "dfccl_" not in text


def test_docstring_example():
    (example,) = doctest.DocTestFinder(recurse=False).find(
        override_lax, "override_lax", globs={"__name__": "__main__"}
    )
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0 and outcome.attempted == 3


def test_arguments():
    with pytest.raises(
        TypeError, match=r"override_lax: enabled is 'yes'; it must be True or False"
    ):
        override_lax("yes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="planted"), override_lax():
        raise RuntimeError("planted")
    assert not holds_calls(spmd(lambda x: lax.psum(x, "i")), data((8, 3)))


# Whole programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["environment", "bad_environment", "threads", "branches"])
def test_programs(case):
    run("override", case)
