# SPDX-License-Identifier: Apache-2.0
"""A process of several that fails, in every way, while the others go on.

The first argument is a folder in which the survivors leave a file at their end: JAX aborts the
others when process 0 ends, so that waits for them. JAX_ENABLE_RECOVERABILITY=1 is set.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from between import (
    EACH,
    PROCESSES,
    PROMPT_S,
    RANK,
    N,
    case_arguments,
    check,
    error_of,
    in_threads,
    leave,
    main,
    mesh,
    put,
    ranked,
    spmd,
    total,
)
from jax.sharding import Mesh

import jax_dfccl

FOLDER = Path(case_arguments[0])
LAST = PROCESSES - 1  # who fails
OTHERS = Mesh(np.array(jax.devices())[: N - EACH], ("i",))


def _sum(on=mesh, **options):
    return spmd(lambda x: jax_dfccl.all_reduce(x, "i", name="sum", **options), on)


def _others_go_on() -> None:
    if PROCESSES == 2:
        return
    f = _sum(OTHERS)
    for seed in range(20):
        y = ranked((N - EACH, 1000), seed=seed)
        check("the others", f(put(y, OTHERS)), total(y))


def _leave() -> None:
    leave(FOLDER, lambda: {LAST})


def _survive(end, count=10) -> None:
    """The last process ends by `end` between two calls; errors name it and the call."""
    f, x = _sum(), ranked((N, count))
    check("first", f(put(x)), total(x))
    if RANK == LAST:
        end()
    for _ in range(2):
        text, seconds = error_of(lambda: f(put(x)))
        assert f"process {LAST}" in text and "'sum'" in text and seconds < PROMPT_S, (text, seconds)
    _others_go_on()
    _leave()


def killed() -> None:
    _survive(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits() -> None:
    _survive(lambda: os._exit(3))


def raises() -> None:
    def end():
        raise ValueError("as a program does")

    _survive(end)


def returns() -> None:
    """The last process simply ends, in order, while others still call."""
    _survive(lambda: sys.exit(0))


def killed_inside() -> None:
    """Killed while 64 MiB move; many times the ring's size, so in the middle."""
    f, x = _sum(), ranked((N, 16 << 20))
    y = put(x)
    check("first", f(y), total(x))
    if RANK == LAST:
        pending = f(y)
        time.sleep(float(case_arguments[1]))
        os.kill(os.getpid(), signal.SIGKILL)
        del pending
    begin = time.monotonic()
    try:
        while True:
            # What it had sent completely counts, so the first may still be right.
            check("before", jax.block_until_ready(f(y)), total(x))
            assert time.monotonic() - begin < 60
            begin = time.monotonic()
    except Exception as error:
        text = str(error)
    assert f"process {LAST}" in text and "'sum'" in text, text
    print("error after", time.monotonic() - begin, flush=True)
    _others_go_on()
    _leave()


def bystanders() -> None:
    """Groups without the one that dies do not notice, whatever they are doing."""
    here = [np.array(jax.devices())[: N - EACH], np.array(jax.devices())]
    f, g = _sum(Mesh(here[0], ("i",))), _sum(Mesh(here[1], ("i",)))
    x, y = ranked((N - EACH, 100_000)), ranked((N, 10))
    check("all", g(put(y)), total(y))
    if RANK == LAST:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def many():
        for _ in range(200):
            check("bystanders", f(put(x, OTHERS)), total(x))

    def one():
        text, seconds = error_of(lambda: g(put(y)))
        assert f"process {LAST}" in text and seconds < PROMPT_S, (text, seconds)

    in_threads([many, one] if EACH == 1 else [many])
    _leave()


def stopped_and_continued() -> None:
    """SIGSTOP, then SIGCONT by the test: the values are right, only late."""
    f, x = _sum(), ranked((N, 1 << 20))
    y = put(x)
    check("first", f(y), total(x))
    for launch in range(6):
        if RANK == LAST and launch == 3:
            pending = f(y)
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            check("pending", pending, total(x))
        else:
            check(launch, f(y), total(x))
    _leave()


def stopped_for_good() -> None:
    """SIGSTOP past the time limit: the others get an error in time, and go on."""
    f, x = _sum(timeout=2.0), ranked((N, int(case_arguments[1])))
    y = put(x)
    check("first", f(y), total(x))
    if RANK == LAST:
        pending = f(y)
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        text, _ = error_of(lambda: (pending, f(y)))
        print(text)
    failed = 0
    for _ in range(2 if RANK != LAST else 0):
        begin = time.monotonic()
        try:
            check("before", jax.block_until_ready(f(y)), total(x))
        except Exception as error:
            failed += 1
            text = str(error)
            assert f"process {LAST}" in text and "'sum'" in text, text
        assert time.monotonic() - begin < 6
    assert failed or RANK == LAST
    if RANK != LAST:
        _others_go_on()
        _leave()


def restarted() -> None:
    """A process that is started again under an index is refused; the others get errors."""
    f, x = _sum(timeout=20.0), ranked((N, 10))
    if RANK == LAST and (FOLDER / "dead").exists():
        text, seconds = error_of(lambda: f(put(x)))
        assert "restarted" in text and seconds < PROMPT_S, (text, seconds)
        print("ends at", time.time(), flush=True)
        return
    check("first", f(put(x)), total(x))
    if RANK == LAST:
        (FOLDER / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = error_of(lambda: f(put(x)))
    assert f"process {LAST}" in text and seconds < PROMPT_S, (text, seconds)
    while not (FOLDER / "again").exists():
        time.sleep(0.05)
    text, seconds = error_of(lambda: f(put(x)))
    assert f"process {LAST}" in text and seconds < PROMPT_S, (text, seconds)
    _others_go_on()
    _leave()


def cut() -> None:
    """The link between two hosts is cut by the test, in one direction or both.

    The first half of the processes is on one host. JAX_DFCCL_PEER_TIMEOUT=3.
    """
    half = N // 2
    first = PROCESSES // 2 > RANK
    mine = Mesh(np.array(jax.devices())[slice(0, half) if first else slice(half, N)], ("i",))
    f, g, x = _sum(), _sum(mine), ranked((N, 50_000))
    y = put(x)
    check("first", f(y), total(x))
    (FOLDER / f"ready{RANK}").touch()
    while True:
        begin = time.monotonic()
        try:
            check("before", jax.block_until_ready(f(y)), total(x))
        except Exception as error:
            text = str(error)
            break
        assert time.monotonic() - begin < 60
    seconds = time.monotonic() - begin
    others = range(PROCESSES // 2, PROCESSES) if first else range(PROCESSES // 2)
    assert any(f"process {other}" in text for other in others) and "'sum'" in text, text
    assert seconds < PROMPT_S, (seconds, text)
    z = ranked((half, 1000))
    check("within the host", g(put(z, mine)), total(z))
    print(f"after {seconds:.1f} s: {text}")
    # The other host must have seen its error before this one tells JAX's coordination service.
    time.sleep(8)
    print("right", flush=True)
    os._exit(0)  # JAX's own end waits for a coordinator that may be out of reach


main(
    [
        cut,
        killed,
        exits,
        raises,
        returns,
        killed_inside,
        bystanders,
        stopped_and_continued,
        stopped_for_good,
        restarted,
    ]
)
