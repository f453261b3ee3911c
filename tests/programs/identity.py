# SPDX-License-Identifier: Apache-2.0
"""Calls keep their identity over executables, caches, threads and programs that look alike."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import N, case_arguments, check, in_threads, main, mesh, ranked, spmd
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dfccl
from jax_dfccl import all_reduce


@jax.jit
def total(x):
    """The one call site that the programs below hold several times."""
    return all_reduce(x, "i")


def many_instances(x):
    """Clones of one call, single and in a loop: every instance sums another value."""
    outs = [total(jnp.sort(x * (k + 1))) for k in range(5)]
    _, scanned = lax.scan(lambda c, k: (c, total(c * k)), x, jnp.arange(6, dtype=x.dtype), unroll=2)
    return jnp.stack([*outs, *scanned])[None]


def many_right(x):
    outs = [np.sort(x * (k + 1), axis=1).sum(0) for k in range(5)]
    outs += [(x * k).sum(0) for k in range(6)]
    return np.broadcast_to(np.stack(outs), (N, 11, x.shape[1]))


def two_executables() -> None:
    """Executables of one program repeat each other's RunIds; their launches stay apart."""
    program = spmd(many_instances)
    x = ranked(100)
    lowered = program.lower(x.ravel())
    compiled = [lowered.compile() for _ in range(3)]
    pending = []
    for launch in range(60):
        x = ranked(100, seed=launch)
        pending.append((x, compiled[launch % 3](x.ravel())))
    for x, y in pending:
        check("two executables", y, many_right(x))


def recompiled() -> None:
    """A program that is forgotten and compiled again goes on."""
    for seed in range(4):
        program = spmd(many_instances)
        for launch in range(3):
            x = ranked(100, seed=10 * seed + launch)
            check("recompiled", program(x.ravel()), many_right(x))
        del program
        jax.clear_caches()


def from_cache() -> None:
    """The executable comes from the persistent cache, if an earlier process filled it."""
    folder, expected = case_arguments
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    program = spmd(many_instances)
    lowered = program.lower(ranked(100).ravel())
    events.clear()
    compiled = lowered.compile()
    seen = "hit" if "/jax/compilation_cache/cache_hits" in events else "miss"
    if seen != expected:
        raise SystemExit(f"expected a cache {expected}, got {events}")
    for launch in range(5):
        x = ranked(100, seed=launch)
        check("from cache", compiled(x.ravel()), many_right(x))


_CUSTOM_CALLS = ("dfccl_collective", "dfccl_collective_start", "dfccl_collective_done")


def exported() -> None:
    """Writes the program to a file with `jax.export`."""
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
    program = export.export(spmd(many_instances), disabled_checks=allowed)(ranked(100).ravel())
    Path(case_arguments[0]).write_bytes(program.serialize())


def reloaded() -> None:
    """Runs the file's program, alone and as a part of another, without tracing a call of ours."""
    program = export.deserialize(bytearray(Path(case_arguments[0]).read_bytes())).call
    sharding = NamedSharding(mesh, P("i"))
    for launch in range(5):
        x = ranked(100, seed=launch)
        placed = jax.device_put(x.ravel(), sharding)
        check("reloaded", jax.jit(program)(placed), many_right(x))
        check(
            "within another", jax.jit(lambda x: program(x + x) - 1)(placed), many_right(2 * x) - 1
        )
        check("argument", placed, x.ravel())


def threads() -> None:
    """Threads trace, compile and launch the same and other programs at the same time."""
    same = spmd(many_instances)
    barrier = threading.Barrier(4)

    def run(thread):
        other = spmd(lambda x: many_instances(x) + thread)
        barrier.wait()
        for launch in range(6):
            x = ranked(64, seed=10 * launch + thread)
            check("same program", same(x.ravel()), many_right(x))
            check("own program", other(x.ravel()), many_right(x) + thread)

    in_threads([(run, thread) for thread in range(4)])


def launches() -> None:
    """Programs that differ only around the call they share count their own launches."""
    one = spmd(lambda x: total(x) + 1)
    two = spmd(lambda x: total(x) + 2)
    x = ranked(8)
    right = np.broadcast_to(x.sum(0), (N, 8)).ravel()
    for launch in range(3):
        check("one", one(x.ravel()), right + 1)
        if launch != 1:
            check("two", two(x.ravel()), right + 2)
    counts = {}
    for entry in jax_dfccl.report("dict")["recent"]:
        counts.setdefault(entry["device"], []).append(entry["launch"])
    expected = sorted([0, 1, 2, 0, 1])
    if len(counts) != N or any(sorted(found) != expected for found in counts.values()):
        raise SystemExit(f"launches by device: {counts}")


def named_occurrences() -> None:
    """The n-th use of a name meets the n-th use elsewhere, however each gets there."""

    def calls(x):
        a = all_reduce(x, "i", name="shared")
        b = all_reduce(x * 10 + 0 * a, "i", name="shared")
        c = all_reduce(x * 100 + 0 * b, "i", name="shared")
        return jnp.stack([a, b, c])

    def loop(x):
        def body(previous, factor):
            y = all_reduce(x * factor + 0 * previous, "i", name="shared")
            return y, y

        return lax.scan(body, x, jnp.array([1, 10, 100], x.dtype))[1]

    program = spmd(lambda x: lax.cond(lax.axis_index("i") % 2 == 0, calls, loop, x)[None])
    for launch in range(20):
        x = ranked(30, seed=launch)
        sums = np.stack([x.sum(0), 10 * x.sum(0), 100 * x.sum(0)])
        check("named", program(x.ravel()), np.broadcast_to(sums, (N, 3, 30)))


main(
    {
        "two_executables": two_executables,
        "recompiled": recompiled,
        "from_cache": from_cache,
        "exported": exported,
        "reloaded": reloaded,
        "threads": threads,
        "launches": launches,
        "named_occurrences": named_occurrences,
    }
)
