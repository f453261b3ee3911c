# SPDX-License-Identifier: Apache-2.0
"""Exchanges whose sizes differ by member: ragged_all_to_all, all_to_all_v and all_gather_v."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import GROUPS
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from members import assert_same_bits, data, make_mesh, per_member, spmd

from jax_dfccl import all_gather_v, all_to_all_v, ragged_all_to_all

N = 8


def plan(seed, groups=None, slices=1, largest=4):
    """Sizes [sender, slice of receiver] and their offsets, packed on both sides with a gap."""
    rng = np.random.default_rng(seed)
    groups = groups or [list(range(N))]
    width = len(groups[0]) * slices
    send = rng.integers(0, largest, (N, width)).astype(np.int32)
    receive = np.zeros_like(send)
    begins = np.cumsum(send, 1) - send + 1
    places = np.zeros_like(send)
    for group in groups:
        for target, member in enumerate(group):
            offset = 2
            for source, sender in enumerate(group):
                for k in range(slices):
                    size = send[sender, target * slices + k]
                    places[sender, target * slices + k] = offset
                    receive[member, source * slices + k] = size
                    offset += size
    return begins.astype(np.int32), send, places, receive


def exchanged(x, output, begins, send, places, groups=None, slices=1):
    """What everyone gets, by NumPy."""
    result = output.copy()
    for group in groups or [list(range(N))]:
        for sender in group:
            for s, size in enumerate(send[sender]):
                receiver = group[s // slices]
                rows = x[sender, begins[sender, s] : begins[sender, s] + size]
                result[receiver, places[sender, s] : places[sender, s] + size] = rows
    return result


def run(x, output, *places, groups=None, **options):
    return per_member(
        lambda *a: ragged_all_to_all(*a, axis_name="i", axis_index_groups=groups),
        x, output, *places, **options,
    )  # fmt: skip


ROWS, OUTPUT_ROWS = N * 3 + 5, N * 3 + 9


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["whole axis", "groups"])
def test_values(groups, slices, check_vma):
    begins, send, places, receive = plan(1, groups, slices, largest=3)
    rows = 60
    x, output = data((N, rows, 5), np.int32), data((N, rows, 5), np.int32, seed=1)
    got = run(x, output, begins, send, places, receive, groups=groups, check_vma=check_vma)
    assert_same_bits(got, exchanged(x, output, begins, send, places, groups, slices))


@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(["bool", "int4", "uint8", "bfloat16", "float64", "complex64"]),
    inner=st.sampled_from([(), (1,), (3, 2), (0,)]),
)
def test_dtypes_and_rows(seed, dtype, inner):
    with jax.enable_x64(True):
        kind = np.dtype(bool if dtype == "bool" else getattr(jnp, dtype).dtype)
        begins, send, places, receive = plan(seed)
        x, output = data((N, ROWS, *inner), kind), data((N, OUTPUT_ROWS, *inner), kind, seed=1)
        if seed % 2:
            begins, send, places, receive = (
                a.astype(np.int64) for a in (begins, send, places, receive)
            )
        got = run(x, output, begins, send, places, receive)
        assert_same_bits(got, exchanged(x, output, begins, send, places))


def test_nothing_is_sent():
    begins, _, places, _ = plan(3)
    zero = np.zeros_like(begins)
    x, output = data((N, 0, 2)), data((N, 4, 2))
    assert_same_bits(run(x, output, 0 * begins, zero, 0 * places, zero), output)


def test_in_branches_of_opposite_order():
    begins, send, places, receive = plan(4)
    x, output = data((N, ROWS, 2)), data((N, OUTPUT_ROWS, 2), seed=1)

    def f(x, *rest):
        def a(x):
            return ragged_all_to_all(x, *rest, axis_name="i", name="a")

        def b(x):
            return ragged_all_to_all(2 * x, *rest, axis_name="i", name="b")

        return lax.cond(
            lax.axis_index("i") % 2 == 0,
            lambda x: (a(x), b(x)),
            lambda x: (b(x), a(x))[::-1],
            x,
        )

    got = per_member(f, x, output, begins, send, places, receive)
    for factor, y in zip((1, 2), got, strict=True):
        assert_same_bits(y, exchanged(factor * x, output, begins, send, places))


@pytest.mark.parametrize("check_vma", [False, True])
def test_derivatives(check_vma):
    begins, send, places, receive = plan(5)
    begins[3] = 0  # member 3 sends the same rows to several
    x, output = data((N, ROWS, 2)), data((N, OUTPUT_ROWS, 2), seed=1)
    weights = data((N, OUTPUT_ROWS, 2), seed=2)

    def f(x, output):
        return run(x, output, begins, send, places, receive, check_vma=check_vma)

    tangents = data(x.shape, seed=3), data(output.shape, seed=4)
    _, got = jax.jvp(f, (x, output), tangents)
    assert_same_bits(got, exchanged(*tangents, begins, send, places))
    for_x, for_output = jax.grad(lambda *a: (weights * f(*a)).sum(), (0, 1))(x, output)
    right_x, right_output = np.zeros_like(x), weights.copy()
    for p in range(N):
        for r in range(N):
            for k in range(send[p, r]):
                right_x[p, begins[p, r] + k] += weights[r, places[p, r] + k]
                right_output[r, places[p, r] + k] = 0
    np.testing.assert_allclose(for_x, right_x, rtol=1e-5, atol=1e-6)
    assert_same_bits(for_output, right_output)


def test_vmap_over_other_axes_and_over_the_axis_itself():
    begins, send, places, receive = plan(6)
    x, output = data((N, 3, ROWS, 2)), data((N, 3, OUTPUT_ROWS, 2), seed=1)
    right = np.stack(
        [exchanged(x[:, k], output[:, k], begins, send, places) for k in range(3)], axis=1
    )

    def f(x, output, *rest):
        return jax.vmap(lambda x, o: ragged_all_to_all(x, o, *rest, axis_name="i"))(x, output)

    assert_same_bits(per_member(f, x, output, begins, send, places, receive), right)

    others = [np.stack([a, b, a], 1) for a, b in zip(plan(6), plan(7), strict=True)]

    def g(x, output, *rest):
        return jax.vmap(lambda *a: ragged_all_to_all(*a, axis_name="i"))(x, output, *rest)

    got = per_member(g, x, output, *others)
    for k in range(3):
        sizes = [a[:, k] for a in others[:3]]
        assert_same_bits(np.asarray(got)[:, k], exchanged(x[:, k], output[:, k], *sizes))

    local = jax.vmap(lambda *a: ragged_all_to_all(*a, axis_name="b"), axis_name="b")
    got = local(x[:, 0], output[:, 0], begins, send, places, receive)
    assert_same_bits(got, right[:, 0])


def test_groups_of_one_member():
    x, output = data((N, 4, 2)), data((N, 5, 2), seed=1)
    one = np.ones((N, 1), np.int32)
    mesh = make_mesh((8, 1), ("i", "j"))

    def f(x, output, one):
        return ragged_all_to_all(x, output, one, 2 * one, 3 * one, 2 * one, axis_name="j")

    got = np.asarray(per_member(f, x, output, one, mesh=mesh))
    output[:, 3:5] = x[:, 1:3]
    assert_same_bits(got, output)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b, s, p, r: (b + 1000, s, p, r), "offset|range|rows"),
        (lambda b, s, p, r: (b, s, p + 1000, r), "offset|range|rows"),
        (lambda b, s, p, r: (b, s, p, r + 1), "size|rows"),
        (lambda b, s, p, r: (b, -s - 1, p, r), "size|rows|negative"),
    ],
    ids=["outside operand", "outside output", "sizes that disagree", "negative size"],
)
def test_ranges_are_checked_at_run_time(change, match):
    x, output = data((N, ROWS, 2)), data((N, OUTPUT_ROWS, 2))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ragged_all_to_all.*({match})"):
        jax.block_until_ready(run(x, output, *change(*plan(8))))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"output": np.zeros((4, 3))}, ValueError, "both must be arrays of rows of one type"),
        ({"output": np.zeros((4, 2), int)}, ValueError, "rows of one type"),
        ({"send_sizes": np.zeros(8)}, TypeError, "send_sizes has dtype float"),
        ({"recv_sizes": np.zeros(7, int)}, ValueError, r"recv_sizes has shape \(7,\)"),
        ({"recv_sizes": np.zeros(16, int)}, ValueError, "numbers of entries differ"),
        ({"input_offsets": np.zeros((8, 1), int)}, ValueError, "one dimension"),
    ],
)
def test_bad_arguments(arguments, error, match):
    zero = np.zeros(8, np.int32)
    given = {
        "operand": np.zeros((4, 2), np.float32), "output": np.zeros((4, 2), np.float32),
        "input_offsets": zero, "send_sizes": zero, "output_offsets": zero, "recv_sizes": zero,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        spmd(lambda x: ragged_all_to_all(**{**given, **arguments}, axis_name="i")[:1])(np.zeros(8))


# Packed rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [False, True])
def test_all_to_all_v(check_vma):
    send = np.random.default_rng(0).integers(0, 4, (N, N)).astype(np.int32)
    x = {"a": data((N, 32, 3)), "b": data((N, 32), np.int8)}
    rows = int(send.sum(0).max()) + 2

    def f(x, send):
        own = jax.tree.map(lambda leaf: leaf[0], x)
        y, received = all_to_all_v(own, "i", send[0], rows=rows, name="exchange")
        return jax.tree.map(lambda leaf: leaf[None], (y, received))

    y, received = spmd(f, check_vma=check_vma)(x, send)
    np.testing.assert_array_equal(received, send.T)
    begins = np.cumsum(send, 1) - send
    for name, leaf in x.items():
        for r in range(N):
            parts = [leaf[p, begins[p, r] : begins[p, r] + send[p, r]] for p in range(N)]
            right = np.zeros((rows, *leaf.shape[2:]), leaf.dtype)
            packed = np.concatenate(parts)
            right[: len(packed)] = packed
            np.testing.assert_array_equal(y[name][r], right)


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["whole axis", "groups"])
def test_all_gather_v(groups):
    members = len((groups or [range(N)])[0])
    sizes = [2, 0, 3, 1, 3, 0, 1, 2][:members]
    x = data((N, 3, 2))

    def f(x):
        return all_gather_v(x, "i", sizes, axis_index_groups=groups)

    def at_run_time(x, sizes):
        return all_gather_v(x, "i", sizes, rows=15, axis_index_groups=groups)

    got = np.asarray(per_member(f, x))
    padded = np.asarray(per_member(at_run_time, x, np.tile(np.array(sizes), (N, 1))))
    gradient = jax.grad(lambda x: (per_member(f, x) * weights).sum())
    weights = data(got.shape, seed=1)
    back = np.asarray(gradient(x))
    right_back = np.zeros_like(x)
    for group in groups or [list(range(N))]:
        right = np.concatenate([x[m, : sizes[k]] for k, m in enumerate(group)])
        begins = np.cumsum(sizes) - sizes
        for member in group:
            assert_same_bits(got[member], right)
            assert_same_bits(padded[member, : len(right)], right)
            assert not padded[member, len(right) :].any()
        for k, member in enumerate(group):
            part = weights[group, begins[k] : begins[k] + sizes[k]]
            right_back[member, : sizes[k]] = part.sum(0)
    np.testing.assert_allclose(back, right_back, rtol=1e-5, atol=1e-6)


def test_bad_arguments_of_packed_exchanges():
    x = data((N, 3))
    for f, match in [
        (lambda x: all_gather_v(x, "i", [1, 2]), "one integer for each of the 8 members"),
        (lambda x: all_gather_v(x, "i", jnp.ones(8, int)), "rows="),
        (lambda x: all_gather_v(x[0], "i", [1] * 8), "scalar"),
        (lambda x: all_to_all_v(x, "i", jnp.ones(16, int), rows=3)[0], "16 entries for 8"),
        (lambda x: all_to_all_v(x[0], "i", jnp.ones(8, int), rows=3)[0], "scalar"),
    ]:
        with pytest.raises(ValueError, match=match):
            per_member(f, x)
