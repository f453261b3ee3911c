# SPDX-License-Identifier: Apache-2.0
"""Jitted programs on one device with several members each: `python gpu.py [cuda | cpu]`.

Every member has starts and dones of its own in the program (`as_device`), so that one device is
enough for every kind of collective in any order. Where there are several devices, a program under
`jax.shard_map` is run over them, too.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dfccl
from jax_dfccl import _core

N = 4
ROOT = 2
PAIRS = ((0, 1), (1, 2), (3, 0))
_sites = itertools.count(1000)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of collective: what every member gets from x[member], and whether x has parts."""

    name: str
    reference: Callable[[np.ndarray], list[np.ndarray]]
    op: str = ""
    takes_parts: bool = False
    root: int = 0
    pairs: Sequence[tuple[int, int]] = ()


def at_root(value: np.ndarray) -> list[np.ndarray]:
    return [value if i == ROOT else np.zeros_like(value) for i in range(N)]


def permuted(x: np.ndarray) -> list[np.ndarray]:
    source_of = {target: source for source, target in PAIRS}
    return [x[source_of[i]] if i in source_of else np.zeros_like(x[i]) for i in range(N)]


KINDS = (
    Kind("all_reduce", lambda x: N * [x.sum(0)], "sum"),
    Kind("all_reduce", lambda x: N * [x.max(0)], "max"),
    Kind("all_gather", lambda x: N * [x]),
    Kind("reduce_scatter", lambda x: list(x.sum(0)), "sum", takes_parts=True),
    Kind("all_to_all", lambda x: list(x.swapaxes(0, 1)), takes_parts=True),
    Kind("permute", permuted, pairs=PAIRS),
    Kind("broadcast", lambda x: N * [x[ROOT]], root=ROOT),
    Kind("reduce", lambda x: at_root(x.sum(0)), "sum", root=ROOT),
    Kind("gather", at_root, root=ROOT),
    Kind("scatter", lambda x: list(x[ROOT]), takes_parts=True, root=ROOT),
    Kind("scan", lambda x: list(x.cumsum(0)), "sum"),
    Kind("exscan", lambda x: [x[:i].sum(0) for i in range(N)], "sum"),
    Kind("barrier", list),
)


class Call:
    """One member's part of a named collective: a start and a done of one call site."""

    def __init__(self, kind: Kind, member: int, name: str, has_key: bool = False) -> None:
        values: dict[str, Any] = {
            "kind": kind.name,
            "op": kind.op,
            "root": kind.root,
            "pairs": [index for pair in kind.pairs for index in pair],
            "groups": list(range(N)),
            "group_sizes": [N],
            "members": list(range(N)),
            "devices": [],
            "name": name,
            "has_key": int(has_key),
            "closed": 0,
            "priority": member % 2,
            "timeout_us": 60_000_000,
            "program": 99,
            "site": next(_sites),
            "as_device": member,
            "acts": -1,
            "shape": 0,
        }
        self._config = {
            name: value
            if isinstance(value, str)
            else np.array(value, np.int64)
            if isinstance(value, list)
            else np.int64(value)
            for name, value in values.items()
        }

    def start(self, x: Any, *key: Any) -> Any:
        ticket = jax.ShapeDtypeStruct((1,), np.uint64)
        call = jax.ffi.ffi_call("dfccl_collective_start", ticket, has_side_effect=True)
        return call(x, *key, **self._config, stage=np.int64(0))

    def done(self, tickets: Sequence[Any], x: Any, shape: Sequence[int]) -> Any:
        """`tickets`: its own first."""
        result = jax.ShapeDtypeStruct(shape, x.dtype)
        call = jax.ffi.ffi_call("dfccl_collective_done", result, has_side_effect=True)
        return call(tickets[0], x, *tickets[1:], **self._config)


def data(kind: Kind, count: int, seed: int) -> np.ndarray:
    shape = (N, N, count) if kind.takes_parts else (N, count)
    return np.random.default_rng(seed).integers(-50, 50, shape).astype(np.float32)


def check(kind: Kind, got: Sequence[Any], x: np.ndarray) -> None:
    for member, (mine, right) in enumerate(zip(got, kind.reference(x), strict=True)):
        np.testing.assert_array_equal(mine, right, f"{kind.name}, member {member}")


def in_opposite_orders(kinds: Sequence[Kind], counts: Sequence[int], name: str) -> Any:
    """A program in which every member starts and awaits the collectives in an order of its own."""
    calls = [[Call(kind, m, f"{name}.{i}") for m in range(N)] for i, kind in enumerate(kinds)]
    shapes = [
        [right.shape for right in kind.reference(data(kind, count, 0))]
        for kind, count in zip(kinds, counts, strict=True)
    ]
    orders = [np.random.default_rng(m).permutation(len(kinds)) for m in range(N)]

    def program(*xs: Any) -> Any:
        parts = {(i, m): xs[i][m] + 0 for m in range(N) for i in range(len(kinds))}
        tickets = {(i, m): calls[i][m].start(parts[i, m]) for m in range(N) for i in orders[m]}
        results: dict[tuple[int, int], Any] = {}
        for m in range(N):
            for i in orders[m][::-1]:
                others = [ticket for key, ticket in tickets.items() if key != (i, m)]
                own = [tickets[i, m], *others]
                results[i, m] = calls[i][m].done(own, parts[i, m], shapes[i][m])
        return [[results[i, m] for m in range(N)] for i in range(len(kinds))]

    return jax.jit(program)


def every_kind(count: int) -> None:
    program = in_opposite_orders(KINDS, len(KINDS) * [count], f"kinds of {count}")
    for launch in range(5):
        xs = [data(kind, count, launch + i) for i, kind in enumerate(KINDS)]
        for kind, x, got in zip(KINDS, xs, program(*xs), strict=True):
            check(kind, got, x)


def many_launches() -> None:
    """Un-awaited launches of two programs, checked in the end."""
    kinds = KINDS[:3]
    programs = [in_opposite_orders(kinds, [100, 1, 37], f"program {i}") for i in range(2)]
    results = []
    for launch in range(100):
        xs = [data(kind, n, launch + n) for kind, n in zip(kinds, [100, 1, 37], strict=True)]
        results.append((xs, programs[launch % 2](*xs)))
    for xs, got in results:
        for kind, x, mine in zip(kinds, xs, got, strict=True):
            check(kind, mine, x)


def loop() -> None:
    """The same calls in every iteration of a loop on the device, with an early end."""
    kind = KINDS[0]
    calls = [Call(kind, m, "loop") for m in range(N)]

    def step(carry: Any) -> Any:
        i, x = carry
        parts = [x[m] + 0 for m in range(N)]
        tickets = [call.start(part) for call, part in zip(calls, parts, strict=True)]
        sums = [
            call.done([tickets[m], *tickets[:m], *tickets[m + 1 :]], part, part.shape)
            for m, (call, part) in enumerate(zip(calls, parts, strict=True))
        ]
        return i + 1, jnp.stack([total + m for m, total in enumerate(sums)])

    f = jax.jit(lambda x: lax.while_loop(lambda c: (c[0] < 9) & (c[1].max() < 1e6), step, (0, x)))
    x = right = np.arange(N * 5, dtype=np.float32).reshape(N, 5)
    steps = 0
    while steps < 9 and right.max() < 1e6:
        right = np.stack([right.sum(0) + m for m in range(N)])
        steps += 1
    count, got = f(x)
    assert int(count) == steps
    np.testing.assert_array_equal(got, right)


def keys() -> None:
    """Keys that the device computes say which messages meet."""
    kind = KINDS[0]
    calls = [[Call(kind, m, "message", has_key=True) for m in range(N)] for _ in range(2)]

    def program(x: Any, y: Any, first: Any) -> Any:
        starts = []
        for m in range(N):  # odd members have the messages the other way round
            turns = [(x[m] + 0, first * 2), (y[m] + 0, first * 2 + 1)]
            for i, (part, key) in enumerate(turns[:: -1 if m % 2 else 1]):
                starts.append((calls[i][m], part, calls[i][m].start(part, key)))
        tickets = [ticket for _, _, ticket in starts]
        results = [
            call.done([own, *(t for t in tickets if t is not own)], part, part.shape)
            for call, part, own in starts
        ]
        pairs = [results[2 * m : 2 * m + 2][:: -1 if m % 2 else 1] for m in range(N)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    x, y = data(kind, 11, 1), data(kind, 11, 2)
    got = jax.jit(program)(x, y, np.int32(21))
    check(kind, got[0], x)
    check(kind, got[1], y)


def disagreement() -> None:
    """An error for the program whose members disagree, and none for the next."""
    kind = KINDS[0]
    calls = [Call(kind, m, "disagreement") for m in range(N)]

    def program(x: Any) -> Any:
        parts = [x[m, : 4 if m == 3 else 5] + 0 for m in range(N)]
        tickets = [call.start(part) for call, part in zip(calls, parts, strict=True)]
        return [
            call.done([tickets[m], *tickets[:m], *tickets[m + 1 :]], part, part.shape)
            for m, (call, part) in enumerate(zip(calls, parts, strict=True))
        ]

    try:
        jax.block_until_ready(jax.jit(program)(data(kind, 5, 1)))
    except jax.errors.JaxRuntimeError as error:
        assert "members disagree" in str(error), error
    else:
        raise AssertionError("members that disagree went unnoticed")
    every_kind(3)


def over_devices() -> None:
    """Branches on the device index, through the public functions."""
    n = jax.device_count()
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))

    def two_sums(x: Any) -> Any:
        def first(x: Any) -> Any:
            return jax_dfccl.all_reduce(x, "i", name="over.first")

        def second(x: Any) -> Any:
            return jax_dfccl.all_reduce(2 * x, "i", name="over.second")

        even = lax.axis_index("i") % 2 == 0
        return lax.cond(
            even, lambda x: (first(x), second(x)), lambda x: (second(x), first(x))[::-1], x
        )

    f = jax.jit(jax.shard_map(two_sums, mesh=mesh, in_specs=P("i"), out_specs=P()))
    x = np.arange(n * 1000, dtype=np.float32)
    for _ in range(20):
        a, b = f(x)
        np.testing.assert_array_equal(a, x.reshape(n, -1).sum(0))
        np.testing.assert_array_equal(b, 2 * x.reshape(n, -1).sum(0))


def main() -> None:
    platform = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    jax.config.update("jax_platforms", platform)
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0]
    print(f"{jax.device_count()} devices, the first is {device.device_kind}", flush=True)
    for part in (
        *(lambda count=count: every_kind(count) for count in (1, 1000, 100_003)),
        many_launches,
        loop,
        keys,
        disagreement,
        over_devices,
    ):
        part()
    if platform == "cuda":
        counters = _core.gpu_counters()
        print(counters)
        assert counters["completed"] > 1000 and counters["launches"] > 0
    print("fine")


if __name__ == "__main__":
    main()
