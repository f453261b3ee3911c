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
from processes import outputs_of_two
from test_programs import run

import jax_dfccl
from jax_dfccl import override_lax

GROUPS = [[6, 0, 3, 5], [1, 2, 4, 7]]
UNEVEN = [[6, 0, 3], [1, 2], [4, 5, 7]]
PERM = [(0, 3), (3, 2), (5, 5), (6, 0), (7, 6)]  # a chain, a self pair, some left out
both_check_vma = pytest.mark.parametrize("check_vma", [False, True])


# name -> (a collective of a member's [8, 16] array, its primitive without and with check_vma)
def gathered_invariant(x):
    return lax.all_gather(x, "i", axis=1, to="invarying")


def primitive_without_types():
    """Newer versions of JAX make that a plain gather where types do not vary."""
    traced = jax.make_jaxpr(lambda x: per_member(gathered_invariant, x, check_vma=False))
    invariant = "all_gather_invariant"
    return invariant if invariant in str(traced(data((8, 8, 16)))) else "all_gather"


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), "psum", "psum_invariant"),
    "pmean": (lambda x: lax.pmean(x, "i"), "psum", "psum_invariant"),
    "pmax": (lambda x: lax.pmax(x, "i"), "pmax", "pmax"),
    "pmin": (lambda x: lax.pmin(x, "i"), "pmin", "pmin"),
    "gather": (lambda x: lax.all_gather(x, "i"), "all_gather", "all_gather"),
    "gather last": (lambda x: lax.all_gather(x, "i", axis=-1), "all_gather", "all_gather"),
    "gather tiled": (
        lambda x: lax.all_gather(x, "i", axis=1, tiled=True), "all_gather", "all_gather",
    ),
    "gather invariant": (
        gathered_invariant, primitive_without_types(), "all_gather_invariant",
    ),
    "scatter": (lambda x: lax.psum_scatter(x, "i"), "reduce_scatter", "reduce_scatter"),
    "scatter tiled": (
        lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
        "reduce_scatter", "reduce_scatter",
    ),
    "exchange": (lambda x: lax.all_to_all(x, "i", 0, 1), "all_to_all", "all_to_all"),
    "exchange tiled": (
        lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), "all_to_all", "all_to_all",
    ),
    "swap": (lambda x: lax.pswapaxes(x, "i", 0), "all_to_all", "all_to_all"),
    "permute": (lambda x: lax.ppermute(x, "i", PERM), "ppermute", "ppermute"),
    "shuffle": (lambda x: lax.pshuffle(x, "i", [3, 1, 7, 0, 2, 6, 5, 4]), "ppermute", "ppermute"),
}  # fmt: skip
GROUPED = {
    "psum": (lambda x: lax.psum(x, "i", axis_index_groups=UNEVEN), "psum"),
    "pmax": (lambda x: lax.pmax(x, "i", axis_index_groups=UNEVEN), "pmax"),
    "gather": (lambda x: lax.all_gather(x, "i", axis_index_groups=GROUPS), "all_gather"),
    "scatter": (
        lambda x: lax.psum_scatter(x, "i", tiled=True, axis_index_groups=GROUPS), "reduce_scatter",
    ),
    "exchange": (
        lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True, axis_index_groups=GROUPS), "all_to_all",
    ),
}  # fmt: skip
DTYPES = [np.float32, np.int32, np.int8, jnp.bfloat16, np.complex64, bool]
# What lax does not define.
UNDEFINED = [
    *((name, np.complex64) for name in ("pmax", "pmin")),
    *((name, bool) for name in ("scatter", "scatter tiled")),
]
VALUES = [
    (name, dtype, check_vma)
    for name in COLLECTIVES
    for dtype in DTYPES
    for check_vma in ((False, True) if dtype == np.float32 else (False,))
    if (name, dtype) not in UNDEFINED
]


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


@pytest.mark.parametrize("name, dtype, check_vma", VALUES)
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
        gathered = lax.all_gather(x, axes, axis=1, tiled=True)
        exchanged = lax.all_to_all(gathered, axes, 1, 0, tiled=True)
        scattered = lax.psum_scatter(gathered, axes, scatter_dimension=1, tiled=True)
        permuted = lax.ppermute(x, axes, [(0, 1)]) if axes != ("y", "x") else x
        return lax.psum(x, axes), gathered, exchanged, scattered, permuted

    stock, ours, counts = both(lambda x: per_member(f, x, mesh=mesh), data((8, 5, 2)))
    assert {name: n for name, n in counts.items() if name != "ppermute"} == {
        "psum": 1,
        "all_gather": 1,
        "all_to_all": 1,
        "reduce_scatter": 1,
    }
    for got, right in zip(ours, stock, strict=True):
        assert_same_bits(got, right)


def test_permutation_over_axes_in_another_order():
    """Members are counted in the order that this version of JAX counts them in, or refused."""
    mesh = make_mesh((2, 4), ("x", "y"))

    def f(x):
        return per_member(lambda x: lax.ppermute(x, ("y", "x"), [(1, 6), (2, 0)]), x, mesh=mesh)

    x = data((8, 3))
    try:
        stock = f(x)
    except RuntimeError as error:
        with override_lax() as override, pytest.raises(RuntimeError, match=str(error)[:40]):
            f(x)
        assert override.kept == {"ppermute: refused": 1}
        return
    with override_lax() as override:
        assert_same_bits(f(x), stock)
    assert override.counts == {"ppermute": 1}


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
@pytest.mark.parametrize("name", COLLECTIVES)
def test_groups_of_one_member(name, check_vma):
    """Ours, too, though there is nothing to do."""
    f, *primitives = COLLECTIVES[name]
    mesh = make_mesh((8, 1), ("j", "i"))
    if name == "shuffle":
        f = lambda x: lax.pshuffle(x, "i", [0])  # noqa: E731
    elif name == "permute":
        f = lambda x: (lax.ppermute(x, "i", [(0, 0)]), lax.ppermute(x, "i", []))  # noqa: E731
    x = data((8, 1, 1), np.int32)
    program = spmd(
        lambda x: f(x[0]), mesh, in_specs=P("j"), out_specs=P(("j", "i")), check_vma=check_vma
    )
    stock, ours, counts = both(program, x)
    assert counts == {primitives[check_vma]: 2 if name == "permute" else 1}
    for got, right in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
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


@pytest.mark.parametrize("name", ["gather tiled", "scatter", "exchange tiled", "permute"])
def test_derivatives_of_data_movers(name):
    f = COLLECTIVES[name][0]
    loss = spmd(lambda x: (f(x) ** 2).sum()[None])
    grad = jax.jit(jax.grad(lambda x: loss(x).sum()))
    x = data((64, 16))
    stock, ours, counts = both(grad, x)
    np.testing.assert_allclose(ours, stock, rtol=1e-5)
    native = grad.lower(x).as_text()
    with override_lax():
        text = grad.lower(x).as_text()
    operations = ("all_gather", "reduce_scatter", "all_to_all", "collective_permute")
    assert sum(counts.values()) == sum(native.count(f'"stablehlo.{op}"') for op in operations) == 2
    assert not any(f"stablehlo.{op}" in text for op in operations)


def test_what_lax_has_not_on_cpu():
    """pbroadcast, and ragged_all_to_all with one slice and with two for every member."""
    x = data((8, 5))
    with override_lax() as override:
        got = per_member(lambda x: lax.pbroadcast(x, "i", 3), x)
    assert override.counts == {"pbroadcast": 1}
    assert_same_bits(got, np.broadcast_to(x[3], x.shape))
    with pytest.raises(NotImplementedError, match="'pbroadcast' not found for platform cpu"):
        per_member(lambda x: lax.pbroadcast(x, "i", 3), x)

    for slices in (1, 2):
        # Member r sends to p, in each slice, r + p + slice rows (modulo 3).
        r, p, s = np.ogrid[:8, :8, :slices]
        sizes = (r + p + s) % 3
        rows = sizes.reshape(8, -1)
        starts = np.cumsum(rows, 1) - rows
        received = sizes.transpose(1, 0, 2).reshape(8, -1)
        places = np.cumsum(received, 1) - received  # where p puts what r sends
        targets = places.reshape(8, 8, slices).transpose(1, 0, 2).reshape(8, -1)
        source = data((8, 20 * slices, 2), seed=1)
        output = data((8, 20 * slices, 2), seed=2)
        right = output.copy()
        for member in range(8):
            for index in range(8 * slices):
                to, count = index // slices, rows[member, index]
                at, start = targets[member, index], starts[member, index]
                right[to, at : at + count] = source[member, start : start + count]

        def f(*arrays):
            return lax.ragged_all_to_all(*arrays, axis_name="i")

        indices = [array.astype(np.int32) for array in (starts, rows, targets, received)]
        with override_lax() as override:
            got = per_member(f, source, output, *indices)
        assert override.counts == {"ragged_all_to_all": 1}
        assert_same_bits(got, right)


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
    assert f", {after['pmax']} pmax, " in str(jax_dfccl.report()).rpartition("replaced: ")[2]


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
    with override_lax() as override:
        partly.lower(x)
    assert override.counts == {}
    assert override.kept == {"psum_invariant: mesh axes left to the compiler": 1}


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


TWO_PROCESSES = """
from jax import lax
everywhere = P("process", "device")
x = jax.make_array_from_callback(
    (2, 2), NamedSharding(mesh, everywhere), lambda i: np.array([[1.0, 2.0], [4.0, 8.0]])[i]
)
f = lambda x: 100 * lax.psum(x, "process") + lax.psum(x, "device")
with jax_dfccl.override_lax() as override:
    y = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=everywhere, out_specs=everywhere,
                              check_vma=False))(x)
    right = {0: [503.0, 1003.0], 1: [512.0, 1012.0]}[jax.process_index()]
    assert [shard.data.item() for shard in y.addressable_shards] == right
assert override.counts == {"psum": 2}, override.counts
assert override.kept == {}, override.kept
print("right")
"""


def test_groups_across_processes():
    for out, err in outputs_of_two(TWO_PROCESSES):
        assert out.splitlines()[-1:] == ["right"], err


# Whole programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["environment", "bad_environment", "threads", "branches"])
def test_programs(case):
    run("override", case)
