# SPDX-License-Identifier: Apache-2.0
"""The XLA handlers by themselves: custom calls made by hand, right and wrong ones."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from members import data, spmd

from jax_dfccl import _core, _lowering

N = 8
CALL = "dfccl_collective"
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
SUM = np.broadcast_to(X.sum(0), X.shape)
_sites = itertools.count(1000)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    _lowering.register()


@pytest.fixture(autouse=True)
def _wide_types():
    with jax.enable_x64(True):
        yield


def attributes(**changed: Any) -> dict[str, Any]:
    """The attributes of a call over all devices; each call is another site."""
    values: dict[str, Any] = {
        "kind": "all_reduce",
        "op": "sum",
        "root": 0,
        "pairs": [],
        "groups": range(N),
        "group_sizes": [N],
        "devices": [device.id for device in jax.devices()],
        "members": [],
        "name": "",
        "has_key": 0,
        "closed": 0,
        "priority": 0,
        "timeout_us": 20_000_000,
        "program": 4711,
        "site": next(_sites),
        "as_device": -1,
        "acts": -1,
        "shape": 0,
        **changed,
    }
    return {
        name: value
        if isinstance(value, str)
        else np.array(value, np.int64)
        if np.ndim(list(value) if isinstance(value, range) else value)
        else np.int64(value)
        for name, value in values.items()
    }


def single(x: Any, *operands: Any, **changed: Any) -> Any:
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(CALL, result)(x, *operands, **attributes(**changed))


def start(x: Any, *operands: Any, stage: int = 0, **changed: Any) -> Any:
    call = jax.ffi.ffi_call(CALL + "_start", jax.ShapeDtypeStruct((1,), np.uint64))
    return call(x, *operands, **attributes(stage=stage, **changed))


def done(ticket: Any, x: Any, *tickets: Any, **changed: Any) -> Any:
    call = jax.ffi.ffi_call(CALL + "_done", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(ticket, x, *tickets, **attributes(**changed))


opened_before = 0


@pytest.fixture(autouse=True)
def _count_what_is_open() -> None:
    """Earlier tests of the process may have dropped handles, which stay for a while."""
    global opened_before
    opened_before = _core.report()["open_tickets"]


def opened() -> int:
    return _core.report()["open_tickets"] - opened_before


def fails(match: str, f: Any, x: np.ndarray = X) -> None:
    """`f` fails with a message that matches, leaves nothing open, and spoils nothing."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        spmd(f)(x).block_until_ready()
    assert opened() <= 0
    np.testing.assert_array_equal(spmd(single)(X), SUM)


def test_single_and_pair_give_the_same():
    np.testing.assert_array_equal(spmd(single)(X), SUM)
    for stage in (0, 1):
        pair = spmd(lambda x, stage=stage: done(start(x, stage=stage), x))
        for seed in range(3):
            x = data((N, 3), seed=seed)
            np.testing.assert_array_equal(pair(x), spmd(single)(x))
    assert opened() <= 0


def test_groups_are_positions_in_the_mesh():
    groups = [6, 0, 3, 1, 2, 4, 5, 7]
    got = spmd(lambda x: single(x, groups=groups, group_sizes=[3, 5]))(X)
    for group in (groups[:3], groups[3:]):
        for member in group:
            np.testing.assert_array_equal(got[member], X[group].sum(0))


def blocks(x: np.ndarray) -> np.ndarray:
    """(source member, block of its source, ...)"""
    return x.reshape(N, N, -1, *x.shape[2:])


def at(member: int, value: np.ndarray) -> np.ndarray:
    """`value` on one member, zeros on the others."""
    return np.stack([value if m == member else np.zeros_like(value) for m in range(N)])


ROWS = data((N, N * 2, 3), np.int32)  # a source of n blocks
ROW = data((N, 2, 3), np.int32)
PAIRS = [(0, 3), (3, 1), (5, 5), (6, 0)]
EXCLUSIVE = np.concatenate([np.zeros_like(ROW[:1]), ROW.cumsum(0, dtype=np.int32)[:-1]])
KINDS = {
    "all_gather": (ROW, {}, np.stack([ROW.reshape(-1, 3)] * N)),
    "reduce_scatter": (ROWS, {"op": "sum"}, blocks(ROWS).sum(0, dtype=np.int32)),
    "all_to_all": (ROWS, {}, blocks(ROWS).swapaxes(0, 1).reshape(ROWS.shape)),
    "permute": (
        ROW,
        {"pairs": [index for pair in PAIRS for index in pair]},
        sum(at(target, ROW[source]) for source, target in PAIRS),
    ),
    "broadcast": (ROW, {"root": 3}, np.stack([ROW[3]] * N)),
    "reduce": (ROW, {"op": "max", "root": 2}, at(2, ROW.max(0))),
    "gather": (ROW, {"root": 7}, at(7, ROW.reshape(-1, 3))),
    "scatter": (ROWS, {"root": 5}, blocks(ROWS)[5]),
    "scan": (ROW, {"op": "sum"}, ROW.cumsum(0, dtype=np.int32)),
    "exscan": (ROW, {"op": "sum"}, EXCLUSIVE),
    "barrier": (ROW[:, :1, :1], {}, ROW[:, :1, :1]),
}


def members(f: Any, *arrays: np.ndarray) -> np.ndarray:
    """f of each member's part, without the leading dimension."""
    run = spmd(lambda *parts: f(*(part[0] for part in parts))[None])
    return np.asarray(run(*arrays))


@pytest.mark.parametrize("form", ["single", "start", "staged"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, form):
    source, changed, right = KINDS[kind]

    def f(x):
        result = jax.ShapeDtypeStruct((*right.shape[1:-1], x.shape[-1]), right.dtype)
        values = {"kind": kind, "op": "", **changed}
        if form == "single":
            return jax.ffi.ffi_call(CALL, result)(x, **attributes(**values))
        ticket = start(x, stage=int(form == "staged"), **values)
        return jax.ffi.ffi_call(CALL + "_done", result)(ticket, x, **attributes(**values))

    np.testing.assert_array_equal(members(f, source), right)
    assert members(f, source[..., :0]).shape == (*right.shape[:-1], 0)


def ragged(sizes: np.ndarray, dtype: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """The operands of a ragged exchange of sizes[source, target] rows, and its result."""
    most = int(max(sizes.sum(0).max(), sizes.sum(1).max()))
    source, output = data((N, most, 2), np.float32), -data((N, most + 1, 2), np.float32, seed=1)
    inputs = np.cumsum(sizes, 1) - sizes
    outputs = np.cumsum(sizes, 0) - sizes
    right = output.copy()
    for p, r in itertools.product(range(N), range(N)):
        rows = source[p, inputs[p, r] : inputs[p, r] + sizes[p, r]]
        right[r, outputs[p, r] : outputs[p, r] + sizes[p, r]] = rows
    indices = [np.asarray(a, dtype) for a in (inputs, sizes, outputs, sizes.T)]
    return [source, output, *indices], right


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("split", [False, True])
def test_ragged_exchanges(dtype, split):
    sizes = np.random.default_rng(3).integers(0, 5, (N, N))
    operands, right = ragged(sizes, dtype)
    changed = {"kind": "ragged_all_to_all", "op": ""}

    def f(*parts):
        result = jax.ShapeDtypeStruct(parts[1].shape, parts[1].dtype)
        if not split:
            return jax.ffi.ffi_call(CALL, result)(*parts, **attributes(**changed))
        ticket = start(*parts, **changed)
        done = jax.ffi.ffi_call(CALL + "_done", result)
        return done(ticket, parts[0], **attributes(**changed))

    np.testing.assert_array_equal(members(f, *operands), right)


def test_ragged_exchanges_that_do_not_fit():
    operands, _ = ragged(np.full((N, N), 2), np.int32)
    operands[3][4, 1] = 3  # member 4 sends one row more to member 1

    def f(*parts):
        result = jax.ShapeDtypeStruct(parts[1].shape, parts[1].dtype)
        call = jax.ffi.ffi_call(CALL, result)
        return call(*parts, **attributes(kind="ragged_all_to_all", op=""))

    match = "ragged_all_to_all: device 4 sends 3 rows to device 1, whose recv_sizes has 2"
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        members(f, *operands)


def test_operands_and_results_whose_sizes_do_not_fit():
    scattered = {"kind": "reduce_scatter", "op": "sum"}
    fails("cannot be cut into 8 equal blocks", lambda x: single(x, **scattered))
    fails("does not go with the operand", lambda x: single(x, kind="all_gather", op=""))


def test_the_mean_of_a_scan():
    with pytest.raises(jax.errors.JaxRuntimeError, match="scan: a mean has no meaning"):
        spmd(lambda x: single(x, kind="scan", op="mean")).lower(X).compile()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_keys_of_four_and_eight_bytes(dtype):
    big = np.iinfo(dtype).max
    name = f"keys of {np.dtype(dtype).name}"

    def f(x):
        # The same key is on another instance's place in odd devices' order.
        swap = jax.lax.axis_index("i") % 2
        first, second = jnp.array([1, big], dtype)[swap], jnp.array([big, 1], dtype)[swap]
        a, b = jnp.where(swap, 10 * x, x), jnp.where(swap, x, 10 * x)
        tickets = start(a, first, name=name, has_key=1), start(b, second, name=name, has_key=1)
        a = done(tickets[0], a, tickets[1], name=name)
        b = done(tickets[1], b, tickets[0], name=name)
        return jnp.where(swap, b, a)

    for _ in range(10):
        np.testing.assert_array_equal(spmd(f)(X), SUM)


def test_negative_keys_of_both_widths_are_the_same_key():
    def f(x):
        return jax.lax.cond(
            jax.lax.axis_index("i") < 3,
            lambda: single(x, np.int32(-5), name="negative", has_key=1),
            lambda: single(x, np.int64(-5), name="negative", has_key=1),
        )

    np.testing.assert_array_equal(spmd(f)(X), SUM)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"site": -1}, "without jax_dfccl's module pass"),
        ({"kind": "all"}, "unknown kind 'all'"),
        ({"op": "average"}, "all_reduce: unknown op 'average'"),
        ({"kind": "broadcast"}, "broadcast: unknown op 'sum'"),
        ({"root": 1}, "all_reduce: no member can be root 1"),
        ({"kind": "broadcast", "op": "", "root": -1}, "no member can be root -1"),
        ({"kind": "reduce", "group_sizes": [3, 5], "root": 3}, "no member can be root 3"),
        ({"pairs": [0, 1]}, "all_reduce: takes no pairs"),
        ({"kind": "permute", "op": "", "pairs": [0]}, "pairs must have two entries"),
        ({"kind": "permute", "op": "", "pairs": [0, 8]}, r"pair \(0, 8\) names a member"),
        ({"kind": "permute", "op": "", "pairs": [-1, 0]}, r"pair \(-1, 0\) names a member"),
        ({"kind": "permute", "op": "", "pairs": [0, 1, 2, 1]}, r"pair \(2, 1\) has a source or"),
        ({"kind": "permute", "op": "", "pairs": [2, 1, 2, 3]}, r"pair \(2, 3\) has a source or"),
        ({"groups": [0, 1, 8], "group_sizes": [3]}, "position 8"),
        ({"group_sizes": [5]}, "group_sizes do not fit"),
        ({"group_sizes": [5, 4]}, "group_sizes do not fit"),
        ({"groups": [0, 1, 2, 1], "group_sizes": [4]}, "device 1 is in more than one place"),
        ({"has_key": 1}, "key= needs name="),
        ({"timeout_us": -1}, "timeout"),
        ({"priority": 2**40}, "priority"),
    ],
)
@pytest.mark.parametrize("call", [single, start])
def test_wrong_attributes_are_refused_at_compilation(call, changed, match):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_dfccl: .*{match}"):
        spmd(lambda x: call(x, **changed)).lower(X).compile()


def test_a_missing_attribute_is_named():
    values = attributes()
    del values["op"]
    result = jax.ShapeDtypeStruct((1, 3), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="jax_dfccl: attribute op"):
        call = jax.ffi.ffi_call(CALL, result)
        spmd(lambda x: call(x, **values)).lower(X).compile()


def test_a_device_in_no_group():
    fails("in none of its groups", lambda x: single(x, groups=range(7), group_sizes=[7]))


@pytest.mark.parametrize("op", ["xor", "and"])
def test_an_operator_without_meaning(op):
    fails(f"INVALID_ARGUMENT.*{op} of float32", lambda x: single(x, op=op))


def test_a_key_that_is_no_integer():
    fails("key must be", lambda x: single(x, np.float32(1), name="float key", has_key=1))


def test_a_missing_key():
    fails("expected 2 operands", lambda x: single(x, name="no key", has_key=1))


def test_members_that_disagree():
    def f(x):
        return jax.lax.cond(
            jax.lax.axis_index("i") == 2,
            lambda: single(x.astype(np.float64), name="disagree").astype(x.dtype),
            lambda: single(x, name="disagree"),
        )

    fails("INVALID_ARGUMENT: jax_dfccl: .*float64", f)


def test_a_member_that_does_not_come():
    def f(x):
        return jax.lax.cond(
            jax.lax.axis_index("i") == 2,
            lambda: x,
            lambda: single(x, name="absent", timeout_us=200_000),
        )

    fails("DEADLINE_EXCEEDED: jax_dfccl: ", f)


def test_a_ticket_that_no_start_gave():
    fails("ticket", lambda x: done(jnp.full((1,), 12345, np.uint64), x))


def test_a_ticket_that_is_used_twice():
    def f(x):
        ticket = start(x)
        y = done(ticket, x)
        # The ticket's buffer outlives the first done.
        return done(ticket, x, y)

    fails("ticket", f)


def test_an_operand_that_moved():
    def f(x):
        x = x * 2  # in a buffer of the program
        ticket = start(x)
        moved = jnp.sort(x + ticket[0].astype(x.dtype) * 0)
        return done(ticket, moved, x)  # x is kept, so `moved` is elsewhere

    fails("INTERNAL: jax_dfccl: .*moved", f)


def test_a_staged_operand_may_move():
    def f(x):
        x = x * 2
        ticket = start(x, stage=1)
        moved = jnp.sort(x + ticket[0].astype(x.dtype) * 0)
        return done(ticket, moved, x)

    np.testing.assert_array_equal(spmd(f)(X), 2 * SUM)


def test_an_error_ends_what_else_the_launch_started():
    def f(x):
        # No member but device 0 starts this one, so only the error can end it.
        def lonely():
            ticket = start(x, name="lonely")
            return done(jnp.full((1,), 12345, np.uint64), x, ticket)

        return jax.lax.cond(jax.lax.axis_index("i") == 0, lonely, lambda: x)

    fails("jax_dfccl", f)


def test_starts_without_done_do_not_pile_up():
    f = spmd(lambda x: x + 0 * start(x, stage=1)[0].astype(x.dtype))
    for _ in range(600):
        f(X).block_until_ready()
    # Each device keeps what its last launches may still ask for, and a table's slack.
    assert 0 < opened() <= N * 300
