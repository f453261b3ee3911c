# SPDX-License-Identifier: Apache-2.0
"""Failure reports from the field, re-told for one process: order, threads, missing, raise.

The stock library gives silently wrong numbers, hangs or aborts on each of them.
"""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import N, check, in_threads, main, mesh, ranked, spmd
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl
from jax_dfccl import all_reduce


def order() -> None:
    """Even devices reduce x then 2x, odd devices 2x then x, and u needs v there."""

    def f(x):
        def even(x):
            u = all_reduce(x, "i", name="u")
            return u, all_reduce(2 * x, "i", name="v")[::-1]

        def odd(x):
            v = all_reduce(2 * x, "i", name="v")
            u = all_reduce(x + 0 * v, "i", name="u")
            return u, v[::-1]

        u, v = lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)
        return u + v

    program = spmd(f)
    for repeat in range(200):
        x = ranked(4, np.float64, repeat)
        s = x.sum(0)
        check("order", program(x.ravel()), np.tile(s + 2 * s[::-1], N))


def threads() -> None:
    """Several Python threads dispatch collective programs and do not wait."""
    programs = {
        "sum": (spmd(lambda x: all_reduce(x, "i")), lambda x: x.sum(0)),
        "max": (spmd(lambda x: all_reduce(x, "i", op="max")), lambda x: x.max(0)),
    }

    def work(name, seed):
        program, reference = programs[name]
        x = ranked(1024, np.float64, seed)
        results = [program(x.ravel()) for _ in range(300)]
        for result in results:
            check(f"threads {name}", result, np.tile(reference(x), N))

    in_threads([(work, name, seed) for seed, name in enumerate(["sum", "max", "sum", "max"])])


def _works_again() -> None:
    x = ranked(4, np.float64, 7)
    check("after", spmd(lambda x: all_reduce(x, "i"))(x.ravel()), np.tile(x.sum(0), N))


def _error(call) -> str:
    started = time.perf_counter()
    try:
        jax.block_until_ready(call())
    except Exception as error:
        check("in time", time.perf_counter() - started < 20, True)
        return str(error)
    check("an error was raised", False, True)
    return ""


def missing() -> None:
    """Only device 0 reaches the collective: a named error at the limit; the next one works."""

    def f(x):
        return lax.cond(
            lax.axis_index("i") == 0,
            lambda x: all_reduce(x, "i", name="lonely", timeout=2.0),
            lambda x: x,
            x,
        )

    text = _error(lambda: spmd(f)(ranked(4, np.float64).ravel()))
    for part in ("all_reduce(sum)", "lonely", "one_process.py", "DEADLINE_EXCEEDED"):
        check(f"{part!r} in {text!r}", part in text, True)
    for device in range(1, N):
        check(f"absent {device} named in {text!r}", str(device) in text, True)
    _works_again()


def missing_then_named() -> None:
    """After a named call failed for want of a member, the name works again, in any program."""

    def call(x):
        return all_reduce(x, "i", name="shared", timeout=1.5)

    good = spmd(call)
    other = spmd(lambda x: call(x) + 1)
    lonely = spmd(lambda x: lax.cond(lax.axis_index("i") != 3, call, lambda x: x, x))
    for repeat in range(3):
        x = ranked(4, np.float64, repeat)
        check(f"before {repeat}", good(x.ravel()), np.tile(x.sum(0), N))
        text = _error(lambda: lonely(x.ravel()))
        check(f"named in {text!r}", "shared" in text and "[3]" in text, True)
        check(f"after {repeat}", other(x.ravel()), np.tile(x.sum(0) + 1, N))
        check(f"again {repeat}", good(x.ravel()), np.tile(x.sum(0), N))


def bystanders() -> None:
    """Members that wait for one whose launch has failed fail at once, not at the time limit."""

    def order_of(*names):
        def run(x):
            total = 0.0 * x
            for name in names:
                total = all_reduce(x + 0 * total, "i", name=name, timeout=60)
            return total

        return run

    def f(x):
        branches = [order_of("A", "B"), order_of("B", "A"), order_of("C", "A", "B")]
        return lax.switch(jnp.minimum(lax.axis_index("i"), 2), branches, x)

    text = _error(lambda: spmd(f)(ranked(4, np.float64).ravel()))
    check(f"cycle in {text!r}", "wait for each other" in text, True)
    _works_again()


def raises() -> None:
    """A host callback raises on device 3 while the others sit in the all-reduce."""

    def callback(i, x):
        if int(i) == 3:
            raise ValueError("device 3 failed")
        return np.asarray(x)

    def f(x):
        y = jax.pure_callback(
            callback, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("i"), x
        )
        return all_reduce(y, "i", timeout=2.0)

    text = _error(lambda: spmd(f)(jnp.asarray(ranked(4, np.float64).ravel())))
    check(f"cause in {text!r}", "device 3" in text or "[3]" in text or "failed" in text, True)
    _works_again()


def mismatch() -> None:
    """The two ends of one named collective disagree: an error on every member."""

    def f(x):
        return lax.cond(
            lax.axis_index("i") % 2 == 0,
            lambda x: all_reduce(x, "i", name="both").sum(),
            lambda x: all_reduce(x[:2], "i", name="both").sum(),
            x,
        )[None]

    text = _error(lambda: spmd(f)(ranked(4, np.float64).ravel()))
    for part in ("both", "one_process.py"):
        check(f"{part!r} in {text!r}", part in text, True)
    check(f"both counts in {text!r}", "4" in text and "2" in text, True)
    _works_again()


def cycle() -> None:
    """A true cycle of data dependences: found and named promptly, long before any timeout."""

    def f(x):
        def even(x):
            u = all_reduce(x, "i", name="u")
            return u, all_reduce(x + 0 * u, "i", name="v")

        def odd(x):
            v = all_reduce(x, "i", name="v")
            return all_reduce(x + 0 * v, "i", name="u"), v

        u, v = lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)
        return u + v

    text = _error(lambda: spmd(f)(ranked(4, np.float64).ravel()))
    for part in ("cycl", "'u'", "'v'", "one_process.py", "data"):
        check(f"{part!r} in {text!r}", part in text, True)
    _works_again()


def report_while_stuck() -> None:
    """report() answers from another thread while a job is stuck, and names who is awaited."""

    def f(x):
        return lax.cond(
            lax.axis_index("i") == 0,
            lambda x: all_reduce(x, "i", name="stuck", timeout=6.0),
            lambda x: x,
            x,
        )

    def stuck():
        _error(lambda: spmd(f)(ranked(4, np.float64).ravel()))

    in_threads([(stuck,), (_look_at_stuck,)])


def _look_at_stuck() -> None:
    deadline = time.perf_counter() + 5
    entries = []
    while not entries and time.perf_counter() < deadline:
        time.sleep(0.05)
        entries = jax_dfccl.report().as_dict()["in_flight"]
    check("one in flight", len(entries), 1)
    check("name", entries[0]["name"], "stuck")
    check("absent", sorted(entries[0]["absent"]), list(range(1, N)))
    check("line", "one_process.py" in entries[0]["source"], True)
    check("text", "stuck" in str(jax_dfccl.report()), True)


def partitioned() -> None:
    """XLA adds up, with collectives of its own, what comes out of the manual code."""
    square = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("row", "column"))
    rows = NamedSharding(square, P("column", None))
    whole = jax.shard_map(
        lambda y: all_reduce(y, "column"),
        mesh=square,
        in_specs=P("column", None),
        out_specs=P(None, None),
        check_vma=False,
    )
    program = jax.jit(lambda x, y: (x @ whole(y)).sum())
    for repeat in range(50):
        x, y = ranked(2, np.float64, repeat)[:4], ranked(6, np.float64, repeat)[:4]
        right = (x @ (y[:2] + y[2:])).sum()
        check("partitioned", program(jax.device_put(x, rows), jax.device_put(y, rows)), right)


def donated_training() -> None:
    """400 un-awaited calls of a donated training step beside an evaluation thread."""
    sharding = NamedSharding(mesh, P("i"))

    def step(w, x):
        return w + all_reduce(x * 0.5, "i") - lax.axis_index("i")

    train = spmd(step, donate_argnums=0)
    evaluate = spmd(lambda w, x: all_reduce(w, "i", op="max") + 0 * x)
    x = ranked(512, np.float64, 3) * 2
    fixed = ranked(512, np.float64, 4)
    stop = threading.Event()

    def evaluation():
        right = np.tile(fixed.max(0), N)
        while not stop.is_set():
            check("evaluation", evaluate(fixed.ravel(), fixed.ravel()), right)

    def training():
        xs = jax.device_put(x.ravel(), sharding)
        w = jax.device_put(np.zeros(N * 512), sharding)
        for _ in range(400):
            w = train(w, xs)
        got = np.asarray(w).reshape(N, 512)
        stop.set()
        check("training", got, 400 * (x.sum(0)[None] * 0.5 - np.arange(N)[:, None]))

    in_threads([(evaluation,), (training,)])


if __name__ == "__main__":
    main(
        {
            f.__name__: f
            for f in (
                order,
                threads,
                missing,
                missing_then_named,
                bystanders,
                raises,
                mismatch,
                cycle,
                report_while_stuck,
                donated_training,
                partitioned,
            )
        }
    )
