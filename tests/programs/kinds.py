# SPDX-License-Identifier: Apache-2.0
"""Every operation in whole programs: members that disagree about the order, exports, caches."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import N, case_arguments, check, in_threads, main, mesh, ranked, spmd
from jax import export, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from collectives import Case, composed, expected, folders, movers, shape_for

CASES = [*movers(), *folders("sum"), *folders("max")[:3], *composed()]


def operand(case: Case, count: int, seed: int, group: int = N) -> np.ndarray:
    """What all members have, for a collective over groups of `group`."""
    shape = shape_for(case, (count,), N, group)
    return ranked(int(np.prod(shape[1:])), np.float32, seed).reshape(shape)


def _deep(x, depth: int):
    """A value `depth` operations deep that equals x; every step is a thunk of its own."""
    flat = x.reshape(1, -1)
    for _ in range(depth):
        flat = jnp.sort(jnp.concatenate([flat, flat]), axis=0)[:1]
    return flat.reshape(x.shape)


def run(f, operands) -> list[np.ndarray]:
    def on_each(*rows):
        return tuple(y[None] for y in f(*(row[0] for row in rows)))

    return [np.asarray(y) for y in spmd(on_each)(*operands)]


TWO_CALLS = ("max_with_index",)  # one needs the result of the other


def order() -> None:
    """Each operation twice, under names, in opposite order, in both of XLA's executors."""
    for case in CASES:
        for count, thunks in ((1, 0), (16, 12), (1024, 0), (16384, 0)):
            x, y = operand(case, count, 1), operand(case, count, 2)

            def f(x, y, case=case, thunks=thunks):
                def even(x, y):
                    a = case.call(x, "i", name="a")
                    return a, case.call(y, "i", name="b"), _deep(x, thunks)

                def odd(x, y):
                    b = case.call(y, "i", name="b")
                    x_later = x
                    # Two calls, one after the other, are in no order that the even
                    # devices must share (docs/sharp_bits.md, on cycles by schedule).
                    if case.name not in TWO_CALLS:
                        x_later = x + (0 * b.ravel()[:1]).astype(x.dtype)  # a comes after b here
                    return case.call(x_later, "i", name="a"), b, _deep(x, thunks)

                return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x, y)

            a, b, _ = run(f, (x, y))
            check(f"{case} a of {count}", a, expected(case, x, None))
            check(f"{case} b of {count}", b, expected(case, y, None))


def different_kinds() -> None:
    """Each operation with the next in the list, of another size and type, in opposite order."""
    for first, second in zip(CASES, CASES[1:] + CASES[:1], strict=True):
        x, y = operand(first, 33, 1), operand(second, 700, 2).astype(np.int16)

        def f(x, y, first=first, second=second):
            def even(x, y):
                return first.call(x, "i", name="a"), second.call(y, "i", name="b")

            def odd(x, y):
                b = second.call(y, "i", name="b")
                return first.call(x, "i", name="a"), b

            return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x, y)

        a, b = run(f, (x, y))
        check(f"{first} beside {second}", a, expected(first, x, None))
        check(f"{second} beside {first}", b, expected(second, y, None))


def depth() -> None:
    """Two operations at unequal depth: A first and shallow here, last and deep there."""
    for first, second in zip(CASES, CASES[3:] + CASES[:3], strict=True):
        x, y = operand(first, 8, 3), operand(second, 8, 4)

        def f(x, y, first=first, second=second):
            def even(x, y):
                return first.call(x, "i", name="a"), second.call(_deep(y, 12), "i", name="b")

            def odd(x, y):
                b = second.call(y, "i", name="b")
                return first.call(_deep(x, 12), "i", name="a"), b

            return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x, y)

        a, b = run(f, (x, y))
        check(f"{first} at unequal depth", a, expected(first, x, None))
        check(f"{second} at unequal depth", b, expected(second, y, None))


def loops() -> None:
    """Scan bodies inside the branches, with the operations in another order in each."""
    for case in CASES:
        xs = np.stack([operand(case, 5, k) for k in range(4)], axis=1)

        def f(xs, case=case):
            def even(xs):
                def step(_, x):
                    a = case.call(x, "i", name="a")
                    return None, (a, case.call(x + 1, "i", name="b"))

                return lax.scan(step, None, xs)[1]

            def odd(xs):
                def step(_, x):
                    b = case.call(x + 1, "i", name="b")
                    return None, (case.call(x, "i", name="a"), b)

                return lax.scan(step, None, xs)[1]

            return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, xs)

        a, b = run(f, (xs,))
        for k in range(4):
            check(f"{case} a in step {k}", a[:, k], expected(case, xs[:, k], None))
            check(f"{case} b in step {k}", b[:, k], expected(case, xs[:, k] + 1, None))


def random_orders() -> None:
    """All operations in one program, in 8 random orders, chosen anew in every launch."""
    rng = np.random.default_rng(7)
    orders = [rng.permutation(len(CASES)) for _ in range(8)]

    def f(seed, *xs):
        def branch(order):
            def run(xs):
                out = {k: CASES[k].call(xs[k], "i", name=str(CASES[k])) for k in order}
                return tuple(out[k] for k in range(len(CASES)))

            return run

        which = (lax.axis_index("i") * 5 + seed) % 8
        return lax.switch(which, [branch(order) for order in orders], xs)

    def on_each(*rows):
        return tuple(y[None] for y in f(*(row[0] for row in rows)))

    program = spmd(on_each)
    for launch in range(40):
        xs = [operand(case, 33, launch) for case in CASES]
        for case, x, got in zip(CASES, xs, program(np.full(N, launch, np.int32), *xs), strict=True):
            check(f"{case} in launch {launch}", got, expected(case, x, None))


def threads() -> None:
    """Four Python threads run all operations, each in its own order, and do not wait for any."""
    programs = [spmd(lambda x, c=case: c.call(x[0], "i")[None]) for case in CASES]

    def work(seed):
        rng = np.random.default_rng(seed)
        launches = []
        for _ in range(10):
            for k in rng.permutation(len(CASES)):
                x = operand(CASES[k], 65, int(rng.integers(99)))
                launches.append((CASES[k], x, programs[k](x)))
        for case, x, got in launches:
            check(f"{case} in threads", got, expected(case, x, None))

    in_threads([(work, seed) for seed in range(4)])


def neighbours() -> None:
    """Stages that exchange with both neighbours, odd ones in the opposite order.

    First numbers of rows, then the rows, then a message each way.
    """
    right = [(k, (k + 1) % N) for k in range(N)]
    left = [(k, (k - 1) % N) for k in range(N)]
    rows = [1 + k % 3 for k in range(N)]

    def exchange(x, perm, name):
        to = jnp.asarray([target for _, target in perm])[lax.axis_index("i")]
        sizes = jnp.zeros(N, int).at[to].set(jnp.asarray(rows)[lax.axis_index("i")])
        got, _ = jax_dfccl.all_to_all_v(x, "i", sizes, rows=3, name=f"{name} rows")
        return got, jax_dfccl.ppermute(x[0], "i", perm, name=name)

    def f(x):
        def even(x):
            return exchange(x, right, "right"), exchange(-x, left, "left")

        def odd(x):
            back = exchange(-x, left, "left")
            return exchange(x + 0 * back[1], right, "right"), back

        return jax.tree.leaves(lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x))

    program = spmd(lambda x: [y[None] for y in f(x[0])])
    for seed in range(20):
        x = ranked(3 * 5, np.float32, seed).reshape(N, 3, 5)
        sent = np.where(np.arange(3)[:, None] < np.asarray(rows)[:, None, None], x, 0)
        rows_right, first_right, rows_left, first_left = program(x)
        check("rows to the right", rows_right, np.roll(sent, 1, 0))
        check("to the right", first_right, np.roll(x[:, 0], 1, 0))
        check("rows to the left", rows_left, -np.roll(sent, -1, 0))
        check("to the left", first_left, -np.roll(x[:, 0], -1, 0))


def pipelines() -> None:
    """Chains of partial permutations, whose members wait only for their neighbours."""
    ppermute = jax_dfccl.ppermute

    def f(x):
        forwards = backwards = x
        for _ in range(N):
            forwards = ppermute(forwards, "i", [(k, k + 1) for k in range(N - 1)]) + 1
            backwards = ppermute(backwards, "i", [(k + 1, k) for k in range(N - 1)]) + 1
        around = x
        for _ in range(2 * N):
            around = ppermute(around, "i", [(k, (k + 1) % N) for k in range(N)])
        return forwards, backwards, around

    x = ranked(257, np.float32, 3)
    forwards, backwards, around = run(f, (x,))
    steps = np.arange(1, N + 1)[:, None] + 0 * x
    check("forwards", forwards, steps)
    check("backwards", backwards, steps[::-1])
    check("around", around, x)


def _all(*rows):
    """Every operation, in two orders."""
    xs = [row[0] for row in rows]

    def one(xs):
        return tuple(c.call(x, "i", name=str(c)) for c, x in zip(CASES, xs, strict=True))

    def other(xs):
        pairs = list(zip(CASES, xs, strict=True))[::-1]
        return tuple(c.call(x, "i", name=str(c)) for c, x in pairs)[::-1]

    named = lax.cond(lax.axis_index("i") % 2 == 0, one, other, xs)
    unnamed = tuple(c.call(x, "i") for c, x in zip(CASES, xs, strict=True))
    return tuple(y[None] for y in (*named, *unnamed))


def _check_all(what: str, program, on=mesh) -> None:
    for launch in range(3):
        xs = [operand(case, 21, launch) for case in CASES]
        placed = [jax.device_put(x, NamedSharding(on, P("i"))) for x in xs]
        results = program(*placed)
        for case, x, got in zip(CASES + CASES, xs + xs, results, strict=True):
            check(f"{case} {what}", got, expected(case, x, None))


SHUFFLED = Mesh(np.random.default_rng(5).permutation(jax.devices()), ("i",))
_CUSTOM_CALLS = ("dfccl_collective", "dfccl_collective_start", "dfccl_collective_done")


def _running_sums(x):
    """For half of the devices: numbers of its own for each, under a name."""
    return jax_dfccl.inclusive_scan(x, "i", name="running")


def exported() -> None:
    """Writes programs, for all devices and for half of them, to files with `jax.export`."""
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
    half = Mesh(jax.devices()[: N // 2], ("i",))
    sums = jax.jit(jax.shard_map(_running_sums, mesh=half, in_specs=P("i"), out_specs=P("i")))
    operands = [operand(case, 21, 0) for case in CASES]
    for name, program, xs in (("all", spmd(_all), operands), ("half", sums, [np.zeros(N // 2)])):
        file = Path(case_arguments[0]) / name
        file.write_bytes(export.export(program, disabled_checks=allowed)(*xs).serialize())


def _reloaded(name: str):
    file = Path(case_arguments[0]) / name
    return jax.jit(export.deserialize(bytearray(file.read_bytes())).call)


def reloaded() -> None:
    """Runs the files' programs, which are not traced here, also on devices in another order."""
    program = _reloaded("all")
    for _ in range(2):
        _check_all("reloaded", program)
        _check_all("reloaded on other devices", program, SHUFFLED)

    total = jax.shard_map(
        lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False
    )

    @jax.jit
    def beside_native(*xs):  # whose members wait for each other where ours do not expect it
        return [total(y) for y in program(*(total(x) for x in xs))]

    for launch in range(20):
        xs = [operand(case, 21, launch) for case in CASES]
        placed = [jax.device_put(x, NamedSharding(mesh, P("i"))) for x in xs]
        for case, x, got in zip(CASES + CASES, xs + xs, beside_native(*placed), strict=True):
            own = np.broadcast_to(x.sum(0), x.shape)
            right = expected(case, own, None)
            check(f"{case} beside psum", got, np.broadcast_to(right.sum(0), right.shape))


def reloaded_twice() -> None:
    """One program, and one name in it, on two halves of the devices at the same time."""
    program = _reloaded("half")
    halves = [Mesh(SHUFFLED.devices[k : k + N // 2], ("i",)) for k in (0, N // 2)]

    def work(k: int) -> None:
        launches = []
        for launch in range(200):
            x = np.arange(N // 2) * 1.0 + launch + 1000 * k
            launches.append((x, program(jax.device_put(x, NamedSharding(halves[k], P("i"))))))
        for x, got in launches:
            check(f"running sums of half {k}", got, np.cumsum(x))

    in_threads([(work, 0), (work, 1)])


def cached() -> None:
    """From the persistent compilation cache on the second run, beside a program compiled now."""
    folder, expect = case_arguments
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    program = spmd(_all)
    _check_all("cached", program)
    hit = "/jax/compilation_cache/cache_hits" in events
    check(f"cache hit is {hit}", hit, expect == "hit")
    if hit:
        elsewhere = jax.shard_map(
            _all, mesh=SHUFFLED, in_specs=P("i"), out_specs=P("i"), check_vma=False
        )
        _check_all("on other devices", jax.jit(elsewhere), SHUFFLED)
        jax.config.update("jax_enable_compilation_cache", False)
        _check_all("compiled now", spmd(lambda *rows: _all(*rows)))
        _check_all("cached again", program)


if __name__ == "__main__":
    main(
        {
            f.__name__: f
            for f in (
                order, different_kinds, depth, loops, random_orders, threads, neighbours, pipelines,
                exported, reloaded, reloaded_twice, cached,
            )
        }
    )  # fmt: skip
