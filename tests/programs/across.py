# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes: every kind, orders, late and absent members."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from between import (
    PROCESSES,
    PROMPT_S,
    RANK,
    N,
    case_arguments,
    check,
    error_of,
    in_threads,
    main,
    mesh,
    put,
    ranked,
    spec,
    spmd,
    total,
)
from collectives import Case, expected, folders, movers, shape_for
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl


def groups():
    """None, and groups of which some lie in one process and some do not."""
    yield None
    order = np.random.default_rng(5).permutation(N)
    if N >= 4:
        yield [order[: N // 2].tolist(), order[N // 2 :].tolist()]
        yield np.arange(N).reshape(N // 2, 2).tolist()


def kinds():
    """Every operation, small (sent with the arrival) and large, over several kinds of groups."""
    cases: list[Case] = [*movers(), *folders("sum"), *folders("max")[:3]]
    for count in (0, 3, 40_000):
        for division in groups():
            size = len(division[0]) if division else N
            for case in cases:
                x = ranked(shape_for(case, (count,), N, size), seed=count + size)
                options = {"axis_index_groups": division} if division else {}
                f = spmd(lambda x, case=case, options=options: case.call(x, "i", **options))
                check((case.name, count, division), f(put(x)), expected(case, x, division))


def bits():
    """Sums of values that round: the bits are those of one process, that is of rank order."""
    for count in (5, 100_000):
        for dtype in (np.float32, jnp.bfloat16, np.complex64):
            x = np.random.default_rng(count).standard_normal((N, count)).astype(dtype)
            wide = np.float32 if dtype == jnp.bfloat16 else dtype
            right = x[0].astype(wide)
            for row in x[1:]:
                right = right + row.astype(wide)
            f = spmd(lambda x: jax_dfccl.all_reduce(x, "i"))
            check((dtype, count), f(put(x)), np.broadcast_to(right.astype(dtype), x.shape))


def by_hosts():
    """The same bits where the fold goes from host to host."""
    bits()
    assert "host_by_host" in str(jax_dfccl.report().as_dict())


def order():
    """Branches that disagree about the order, between devices of other processes too."""
    for count in (1, 1024, 300_000):
        x = ranked((N, count), seed=count)

        def f(x):
            def even(x):
                a = jax_dfccl.all_reduce(x, "i", name="a")
                return a, jax_dfccl.all_reduce(2 * x, "i", name="b")

            def odd(x):
                b = jax_dfccl.all_reduce(2 * x, "i", name="b")
                return jax_dfccl.all_reduce(x, "i", name="a"), b

            return lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)

        for _ in range(5):
            a, b = spmd(f)(put(x))
            check(("a", count), a, total(x))
            check(("b", count), b, 2 * total(x))


def swap():
    """Two programs from two threads, in another order in every other process. One device each."""
    x = ranked((N, 1000))
    a = spmd(lambda x: jax_dfccl.all_reduce(x, "i"))
    b = spmd(lambda x: jax_dfccl.all_reduce(10 * x, "i"))

    def job(name, f, right):
        return lambda: check(name, f(put(x)), right)

    jobs = [job("a", a, total(x)), job("b", b, 10 * total(x))]
    for _ in range(10):
        in_threads(jobs if RANK % 2 == 0 else jobs[::-1], gap=0.05)


def grid():
    """Rows and columns in a circular wait, two threads each. One device each, four processes."""
    both = P(("r", "c"))
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("r", "c"))
    x = ranked((4, 8))
    table = x.reshape(2, 2, 8)
    over_r = np.broadcast_to(table.sum(0)[None], table.shape).reshape(4, 8)
    over_c = np.broadcast_to(table.sum(1)[:, None], table.shape).reshape(4, 8)
    y = put(x, square, both)
    jobs = []
    for axis, right in (("r", over_r), ("c", over_c)):
        f = spmd(lambda x, axis=axis: jax_dfccl.all_reduce(x, axis), square, both)
        jobs.append(lambda f=f, axis=axis, right=right: check(axis, f(y), right))
    for _ in range(5):
        in_threads(jobs if RANK in (0, 3) else jobs[::-1], gap=0.1)


def exchange_of(x, output, sizes, groups):
    """The index arrays by which member r sends sizes[r, p] rows to p, packed, and what all get."""
    begins = np.cumsum(sizes, 1) - sizes + 1
    places, received = np.zeros_like(sizes), np.zeros_like(sizes)
    right = output.copy()
    for group in groups:
        places[group] = np.cumsum(sizes[group], 0) - sizes[group] + 2
        for k, member in enumerate(group):
            received[member] = sizes[group, k]
            for sender in group:
                begin, place, rows = begins[sender, k], places[sender, k], sizes[sender, k]
                right[member, place : place + rows] = x[sender, begin : begin + rows]
    return [begins, sizes, places, received], right


def ragged():
    """Uneven exchanges: small, large and empty, in groups, packed, and by jax.lax."""
    for count, division in ((count, d) for count in (1, 3000) for d in groups()):
        size = len(division[0]) if division else N
        sizes = np.random.default_rng(count).integers(0, 40, (N, size))
        rows = 40 * size + 3
        x, output = ranked((N, rows, count)), ranked((N, rows, count), seed=1)
        indices, right = exchange_of(x, output, sizes, division or [list(range(N))])
        options = {"axis_name": "i"} | ({"axis_index_groups": division} if division else {})
        f = spmd(lambda *a, options=options: jax_dfccl.ragged_all_to_all(*a, **options))
        for dtype in (np.float32, jnp.bfloat16, np.int8):
            operands = [put(a.astype(dtype)) for a in (x, output)]
            got = f(*operands, *map(put, indices))
            check((count, division, dtype), got, right.astype(dtype))
        with jax_dfccl.override_lax():
            g = spmd(lambda *a, options=options: lax.ragged_all_to_all(*a, **options))
            check(("lax", count, division), g(*map(put, (x, output, *indices))), right)

    sizes = np.random.default_rng(7).integers(0, 4, (N, N))
    x = ranked((N, 4 * N, 3))
    f = spmd(lambda x, sizes: jax_dfccl.all_to_all_v(x, "i", sizes, rows=4 * N))
    rows, received = f(put(x), put(sizes))
    _, right = exchange_of(
        np.roll(x, 1, 1), np.zeros((N, 4 * N + 2, 3), np.float32), sizes, [range(N)]
    )
    check("packed", rows, right[:, 2:])
    check("received", received, sizes.T)
    check("nothing", f(put(x), put(0 * sizes))[0], np.zeros_like(x))


def ragged_orders():
    """Exchanges in branches that disagree about their order, between devices of other processes."""
    sizes = np.random.default_rng(4).integers(0, 9, (N, N))
    x, output = ranked((N, 9 * N, 100)), ranked((N, 9 * N + 2, 100), seed=1)
    indices, right = exchange_of(x, output, sizes, [list(range(N))])
    _, doubled = exchange_of(2 * x, output, sizes, [list(range(N))])

    def f(x, *rest):
        def a(x):
            return jax_dfccl.ragged_all_to_all(x, *rest, axis_name="i", name="a")

        def b(x):
            return jax_dfccl.ragged_all_to_all(2 * x, *rest, axis_name="i", name="b")

        even = lax.axis_index("i") % 2 == 0
        return lax.cond(even, lambda x: (a(x), b(x)), lambda x: (b(x), a(x))[::-1], x)

    for _ in range(5):
        got = spmd(f)(*map(put, (x, output, *indices)))
        check("a", got[0], right)
        check("b", got[1], doubled)


def ragged_errors():
    """Index arrays that do not fit: the same kind of error everywhere; then it works again."""
    sizes = np.full((N, N), 2)
    x, output = ranked((N, 2 * N + 1, 5)), ranked((N, 2 * N + 2, 5), seed=1)
    indices, right = exchange_of(x, output, sizes, [list(range(N))])
    f = spmd(lambda *a: jax_dfccl.ragged_all_to_all(*a, axis_name="i"))
    first, last = 0, N - 1
    device = [d.id for d in jax.devices()]
    for array, value, match in (
        (0, 1000, "from row 1000 of its operand"),
        (1, -1, f"device {device[first]} sends -1 rows to device {device[last]}"),
        (2, 1000, "to row 1000 of its output"),
        (
            3,
            7,
            f"device {device[last]} sends 2 rows to device {device[first]}, whose recv_sizes has 7",
        ),
    ):
        wrong = [a.copy() for a in indices]
        wrong[array][first, last] = value
        text, seconds = error_of(lambda wrong=wrong: f(*map(put, (x, output, *wrong))))
        assert match in text and "across.py" in text and seconds < PROMPT_S, (text, seconds)
        check("after", f(*map(put, (x, output, *indices))), right)


def unawaited():
    """Many steps in flight; the values of all."""
    f = spmd(lambda x, k: (jax_dfccl.all_reduce(x * k, "i"), jax_dfccl.all_gather(x + k, "i")))
    x = ranked((N, 2000))
    found = [f(put(x), put(np.full((N,), k, np.float32))) for k in range(200)]
    for k, (sums, rows) in enumerate(found):
        check(("sum", k), sums, total(x * k))
        check(("rows", k), rows, np.broadcast_to(x + k, (N, *x.shape)))


def late():
    """The last process comes late: no error, and the others get the value."""
    f = spmd(lambda x: jax_dfccl.all_reduce(x, "i"))
    x = ranked((N, 100))
    right = total(x)
    check("first", f(put(x)), right)
    if RANK == PROCESSES - 1:
        time.sleep(4)
    check("second", f(put(x)), right)


def shape():
    """Sizes differ: an error on every member that names both, and then the next call works."""
    rows = 8 if RANK == 0 else 6
    here = [jax.device_put(np.zeros((1, rows), np.float32), d) for d in jax.local_devices()]
    f = spmd(lambda x: jax_dfccl.all_reduce(x, "i", name="sum"))
    x = jax.make_array_from_single_device_arrays((N, rows), NamedSharding(mesh, spec), here)
    text, _ = error_of(lambda: f(x))
    assert "8 x float32" in text and "6 x float32" in text and "across.py" in text, text
    y = ranked((N, 10))
    check("next", f(put(y)), total(y))


def absent():
    """A process that never calls: an error that names its device, at the limit."""
    f = spmd(lambda x: jax_dfccl.all_reduce(x, "i", name="sum", timeout=2.0))
    x = ranked((N, 10))
    right = total(x)
    check("first", f(put(x)), right)
    if RANK < PROCESSES - 1:
        text, seconds = error_of(lambda: f(put(x)))
        assert "have not come" in text and 1.5 < seconds < PROMPT_S, (text, seconds)
    else:
        time.sleep(3.5)
        # It comes late to the launch that the others have given up.
        text, _ = error_of(lambda: f(put(x)))
        assert "have not come" in text, text
    check("after", f(put(x)), right)


def circle():
    """Programs in opposite order, one thread (or several devices) each: one of the calls ends.

    Promptly, and with the same error everywhere; the other one gets its value. With `late`, process
    0 comes so late that the others may find a circle without it.
    """
    x = ranked((N, 10))
    programs = {
        name: spmd(lambda x, factor=factor: jax_dfccl.all_reduce(factor * x, "i"))
        for name, factor in (("a", 1), ("b", 10))
    }
    rights = {"a": total(x), "b": 10 * total(x)}
    for name, f in programs.items():
        check("before", f(put(x)), rights[name])
    if case_arguments == ["late"] and RANK == 0:
        time.sleep(6)
    ended = []
    for name in "ab" if RANK % 2 == 0 else "ba":
        begin = time.monotonic()
        try:
            check(name, programs[name](put(x)), rights[name])
        except Exception as error:
            ended.append(name)
            text = str(error)
            assert "processes wait for each other" in text and text.count("across.py") >= 2, text
            assert time.monotonic() - begin < PROMPT_S, text
    # Which one depends on who is seen to wait first, but it is one, and the same for all.
    assert len(ended) == 1, ended
    is_a = np.full((N, 1), ended == ["a"], np.float32)
    check("which", programs["a"](put(is_a)), N * is_a)


def urgent():
    """Small calls of another thread pass a large one that is under way; it ends among them."""
    x, large = ranked((N, 10)), ranked((N, 6 << 20))
    bulk = spmd(lambda x: jax_dfccl.all_reduce(x, "i"))
    small = spmd(lambda x: jax_dfccl.all_reduce(x, "i", priority=5))
    last = spmd(lambda x: jax_dfccl.all_reduce(x, "i", op="min", priority=5))
    check("before", small(put(x)), total(x))
    here, rows = put(x), put(large)
    bulk_ended = threading.Event()
    past = 0

    def send_much():
        got = bulk(rows)
        got.block_until_ready()
        bulk_ended.set()
        check("bulk", got, total(large))

    def send_small():
        nonlocal past
        deadline = time.monotonic() + PROMPT_S
        while not any(
            call["bytes"] == large[0].nbytes and not call["absent"]
            for call in jax_dfccl.report().as_dict()["in_flight"]
        ):
            assert time.monotonic() < deadline and not bulk_ended.is_set()
            time.sleep(0.001)
        # All go on until the large one has ended everywhere.
        everywhere = False
        while not everywhere:
            ended = bulk_ended.is_set()
            check("small", small(here), total(x))
            past += not ended and not bulk_ended.is_set()
            flag = last(put(np.full((N, 1), ended, np.int32)))
            everywhere = bool(np.asarray(flag.addressable_shards[0].data)[0, 0])

    in_threads([send_much, send_small])
    # With equal priority one or two end before it.
    assert past > 2, past


def ring():
    """A circle of processes of which each has groups with its two neighbours only."""
    x = ranked((N, 10))
    before = (RANK - 1) % N

    def with_next(first):
        second = (first + 1) % N
        members = sorted([first, second])
        devices = Mesh(np.array([jax.devices()[member] for member in members]), ("i",))
        f = spmd(lambda x: jax_dfccl.all_reduce(x, "i"), on=devices)
        here = x[members]
        return lambda: check(("ring", first), f(put(here, on=devices)), total(here))

    calls = {first: with_next(first) for first in (RANK, before)}
    for first in sorted(calls):
        calls[first]()
    # Process 0 waits for 1, 1 for 2, ... and the last for 0: the call of 0 and 1 ends.
    for first in (RANK, before):
        if first != 0:
            calls[first]()
            continue
        text, seconds = error_of(calls[first])
        assert "processes wait for each other" in text and text.count("across.py") >= N, text
        assert all(f"of process {process}" in text for process in range(N)), text
        assert seconds < PROMPT_S, seconds


def bystander():
    """A call that waits beside a circle, and is not in it, gets its value. Two devices each."""
    x = ranked((2, 10))

    def over(*members, factor):
        devices = Mesh(np.array([jax.devices()[member] for member in members]), ("i",))
        f = spmd(lambda x: jax_dfccl.all_reduce(factor * x, "i"), on=devices)
        return lambda: check(factor, f(put(x, on=devices)), factor * total(x))

    a, b, innocent = over(0, 2, factor=1), over(0, 2, factor=10), over(1, 3, factor=100)
    for call in (a, b, innocent):
        call()
    ended = threading.Event()

    def circle():
        for call in (a, b) if RANK == 0 else (b, a):
            if call is b:
                b()
                continue
            text, _ = error_of(a)
            assert "processes wait for each other" in text, text
        ended.set()

    def beside():
        if RANK == 1:
            assert ended.wait(PROMPT_S)
        innocent()

    in_threads([beside, circle], gap=0.5)


def no_circle():
    """The same from two threads of which the second comes late: right values, no error."""
    x = ranked((N, 10))
    jobs = []
    for name, factor in (("a", 1), ("b", 10)):
        f = spmd(lambda x, factor=factor: jax_dfccl.all_reduce(factor * x, "i"))
        right = factor * total(x)
        jobs.append(lambda f=f, name=name, right=right: check(name, f(put(x)), right))
    in_threads(jobs if RANK % 2 == 0 else jobs[::-1], gap=6)


main(
    [
        *(
            kinds,
            bits,
            by_hosts,
            order,
            ragged,
            ragged_orders,
            ragged_errors,
            swap,
            grid,
            unawaited,
        ),
        *(late, shape, absent, circle, urgent, ring, bystander, no_circle),
    ]
)
