# SPDX-License-Identifier: Apache-2.0
"""Calls of several processes meet by what they are, however each process came to them."""

import threading

import jax
from between import RANK, N, case_arguments, check, in_threads, main, put, ranked, spmd
from between import total as right_total

import jax_dfccl


@jax.jit
def total(x):
    """The one call site that the programs below share."""
    return jax_dfccl.all_reduce(x, "i")


ONE = spmd(lambda x: total(x) + 1)
TWO = spmd(lambda x: total(10 * x) + 2)


def _check(name, f, seed):
    x = ranked((N, 500), seed=seed)
    right = right_total(x) + 1 if f is ONE else right_total(10 * x) + 2
    check((name, seed), f(put(x)), right)


def places() -> None:
    """First called from another line, function or thread in each process."""
    x = ranked((N, 500))
    if RANK == 0:
        check("line", ONE(put(x)), right_total(x) + 1)
    elif RANK == 1:
        found = []
        thread = threading.Thread(target=lambda: found.append(ONE(put(x))))
        thread.start()
        thread.join()
        check("thread", found[0], right_total(x) + 1)
    else:
        ONE.lower(put(x)).compile()  # and it calls what jit compiles itself
        (lambda y: check("function", ONE(y), right_total(x) + 1))(put(x))
    for seed in range(5):
        _check("after", ONE, seed)


def opposite() -> None:
    """Two programs that look alike, from threads, in opposite orders. One device each."""
    jobs = [
        lambda: [_check("one", ONE, seed) for seed in range(20)],
        lambda: [_check("two", TWO, seed) for seed in range(20)],
    ]
    in_threads(jobs if RANK % 2 == 0 else jobs[::-1], gap=0.3)


def compiled_in_other_order() -> None:
    """Compiled in opposite orders, then launched in the same one."""
    x = put(ranked((N, 500)))
    for f in (ONE, TWO) if RANK % 2 == 0 else (TWO, ONE):
        f.lower(x).compile()
    for seed in range(5):
        _check("one", ONE, seed)
        _check("two", TWO, seed)


def cache() -> None:
    """Process 0 has the executable from its own persistent cache, the others compile."""
    folder, expected = case_arguments
    events = []
    if RANK == 0:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    x = put(ranked((N, 500)))
    lowered = ONE.lower(x)
    events.clear()
    compiled = lowered.compile()
    hit = "/jax/compilation_cache/cache_hits" in events
    assert RANK > 0 or hit == (expected == "hit"), events
    for seed in range(5):
        y = ranked((N, 500), seed=seed)
        check("cached", compiled(put(y)), right_total(y) + 1)


main([places, opposite, compiled_in_other_order, cache])
