# SPDX-License-Identifier: Apache-2.0
"""Processes that go on without those that are lost, and with those that have no more data.

The first argument is a folder for what they tell each other beside the collectives.
JAX_ENABLE_RECOVERABILITY=1 is set.
"""

import os
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
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
    main,
    put,
    ranked,
    spmd,
    total,
)
from jax.sharding import Mesh

import jax_dfccl

FOLDER = Path(case_arguments[0])
LAST = PROCESSES - 1


def _die(how=signal.SIGKILL) -> None:
    os.kill(os.getpid(), how)


def _sum(on, **options):
    return spmd(lambda x: jax_dfccl.all_reduce(x, "i", name="sum", **options), on)


def _mesh(devices) -> Mesh:
    return Mesh(np.array(devices), ("i",))


ALL = _mesh(jax.devices())


def _check_sum(on, count=1000, seed=0, f=None) -> None:
    x = ranked((on.size, count), seed=seed)
    check(("sum", on.size, seed), (f or _sum(on))(put(x, on)), total(x))


def _goes_on(survivors, right, era, lost) -> Mesh:
    """Sees who goes on, and that they can: old programs and new ones, named and not, all sizes."""
    assert survivors.processes == tuple(right), survivors
    assert survivors.lost == tuple(lost) and survivors.era == era, survivors
    mesh = _mesh(survivors.devices)
    assert mesh.size == EACH * len(right)
    for seed in range(5):
        _check_sum(mesh, seed=seed)
        _check_sum(mesh, seed=seed, f=spmd(lambda x: jax_dfccl.all_reduce(x, "i"), mesh))
    _check_sum(mesh, count=300_000)
    x = ranked((mesh.size, 7))
    rows = spmd(lambda x: jax_dfccl.all_gather(x, "i"), mesh)(put(x, mesh))
    check("rows", rows, np.broadcast_to(x, (mesh.size, *x.shape)))
    return mesh


def _leave(processes) -> None:
    """Process 0 ends last, because JAX aborts the others with it."""
    (FOLDER / f"end{RANK}").touch()
    deadline = time.monotonic() + PROMPT_S
    if RANK == 0:
        while not all((FOLDER / f"end{p}").exists() for p in processes):
            assert time.monotonic() < deadline, "the others do not end"
            time.sleep(0.02)
        time.sleep(0.3)


def _lose(process, f, x, on, how=signal.SIGKILL) -> None:
    """A process ends; the others get an error that names it."""
    if process == RANK:
        _die(how)
    text, seconds = error_of(lambda: f(put(x, on)))
    assert f"process {process}" in text or "jax_dfccl.shrink()" in text, text
    assert seconds < PROMPT_S, seconds


def killed() -> None:
    x, f = ranked((N, 100)), _sum(ALL)
    check("first", f(put(x)), total(x))
    _lose(LAST, f, x, ALL)
    begin = time.monotonic()
    survivors = jax_dfccl.shrink()
    assert time.monotonic() - begin < 15, "waited for a process that has ended"
    _goes_on(survivors, range(LAST), 1, [LAST])
    _leave(survivors.processes)


def nobody_lost() -> None:
    """All call it, with calls of unequal number behind them: they are in step again."""
    half = _mesh(jax.devices()[: N // 2])
    f = spmd(lambda x: jax_dfccl.all_reduce(x, "i"), ALL)
    _check_sum(ALL, f=f)
    if RANK < PROCESSES // 2:  # the others do not know of these
        _check_sum(half)
        text, _ = error_of(lambda: _sum(ALL, timeout=1.0)(put(ranked((N, 10)))))
        assert "have not come" in text or "has called jax_dfccl.shrink()" in text, text
    survivors = jax_dfccl.shrink()
    assert survivors.processes == tuple(range(PROCESSES)) and survivors.era == 1, survivors
    _check_sum(ALL, f=f)
    _goes_on(survivors, range(PROCESSES), 1, [])
    _leave(survivors.processes)


def coordinator() -> None:
    """Process 0, which hosts JAX's coordination service, is killed."""
    jax_dfccl.detach()
    x, f = ranked((N, 100)), _sum(ALL)
    check("first", f(put(x)), total(x))
    _lose(0, f, x, ALL)
    _goes_on(jax_dfccl.shrink(), range(1, PROCESSES), 1, [0])


def one_after_the_other() -> None:
    """Every process but the last is lost, from the first on; the last goes on alone."""
    jax_dfccl.detach()
    mesh = ALL
    _check_sum(mesh)
    for lost in range(PROCESSES - 1):
        _lose(lost, _sum(mesh), ranked((mesh.size, 10)), mesh)
        mesh = _goes_on(jax_dfccl.shrink(), range(lost + 1, PROCESSES), lost + 1, [lost])


def during() -> None:
    """A second process is killed while the others agree to go on without the first."""
    x, f = ranked((N, 100)), _sum(ALL)
    check("first", f(put(x)), total(x))
    _lose(LAST, f, x, ALL)
    if RANK == LAST - 1:
        threading.Timer(float(case_arguments[1]), _die).start()
        time.sleep(float(case_arguments[2]))
    while True:  # as a program would
        survivors = jax_dfccl.shrink()
        try:
            jax.block_until_ready(
                _sum(_mesh(survivors.devices))(
                    put(x[: EACH * len(survivors.processes)], _mesh(survivors.devices))
                )
            )
        except Exception as error:
            print("again, after", str(error)[:300], flush=True)
            continue
        if RANK < LAST - 1 and LAST - 1 in survivors.processes:
            time.sleep(0.05)  # it is still to be killed
            continue
        break
    assert survivors.processes == tuple(range(LAST - 1)), survivors
    _goes_on(survivors, range(LAST - 1), survivors.era, survivors.lost)
    _leave(survivors.processes)


def stopped() -> None:
    """SIGSTOP; the others go on. When it wakes, it gets errors that say so, and harms nobody."""
    x, f = ranked((N, 100)), _sum(ALL, timeout=2.0)
    check("first", f(put(x)), total(x))
    if RANK == LAST:
        _die(signal.SIGSTOP)
        # First the call that the others have given up.
        for match in ("process", "have agreed to go on without process"):
            text, seconds = error_of(lambda: f(put(x)))
            assert match in text and seconds < PROMPT_S, (text, seconds)
        try:
            raise AssertionError(jax_dfccl.shrink())
        except RuntimeError as error:
            assert "this process was left out" in str(error), error
        try:
            raise AssertionError(jax_dfccl.join())
        except RuntimeError as error:
            assert "this process was left out" in str(error), error
        return
    _lose(LAST, f, x, ALL)
    survivors = jax_dfccl.shrink(timeout=1.0)
    mesh = _goes_on(survivors, range(LAST), 1, [LAST])
    (FOLDER / f"shrunk{RANK}").touch()
    deadline = time.monotonic() + 60
    largest = spmd(lambda x: jax_dfccl.all_reduce(x, "i", op="max"), mesh)
    ended = 0
    while not ended:  # all see in the same step that it has
        assert time.monotonic() < deadline, "it does not end"
        _check_sum(mesh, seed=int(deadline))
        told = np.full(mesh.size, (FOLDER / "ended").exists(), np.int32)
        ended = int(np.asarray(largest(put(told, mesh)).addressable_data(0))[0])
    _leave(survivors.processes)


def minority() -> None:
    """Process 0 stands still, so another of two cannot know that it does not go on."""
    jax_dfccl.detach()
    x, f = ranked((N, 100)), _sum(ALL, timeout=2.0)
    check("first", f(put(x)), total(x))
    if RANK == 0:
        _die(signal.SIGSTOP)
    _lose(0, f, x, ALL, signal.SIGSTOP)
    text = ""
    try:
        jax_dfccl.shrink(timeout=1.0)
    except RuntimeError as error:
        text = str(error)
    assert "cannot agree" in text and "0 are silent" in text, text


def cut() -> None:
    """The link between two hosts is cut by the test, processes 0 and 1 on one side.

    JAX_DFCCL_PEER_TIMEOUT=3.
    """
    jax_dfccl.detach()
    x, f = ranked((N, 1000)), _sum(ALL)
    check("first", f(put(x)), total(x))
    (FOLDER / f"ready{RANK}").touch()
    try:
        while True:
            check("before", jax.block_until_ready(f(put(x))), total(x))
    except Exception as error:
        assert "process" in str(error), error
    first = PROCESSES // 2 > RANK
    try:
        survivors = jax_dfccl.shrink(timeout=1.0)
    except RuntimeError as error:
        assert not first and "cannot agree" in str(error), error
        return
    assert first
    _goes_on(survivors, range(PROCESSES // 2), 1, range(PROCESSES // 2, PROCESSES))
    _leave(survivors.processes)


def _shares(counts) -> np.ndarray:
    """What each device adds in each step, as long as its process has data."""
    steps = max(counts)
    data = ranked((steps, N, 50), seed=3)
    for step in range(steps):
        for device in range(N):
            if step >= counts[device // EACH]:
                data[step, device] = 0
    return data


def join() -> None:
    """Process p has 3 + 4 p steps, the first has most: exactly the sums that must be."""
    counts = [3 + 4 * p for p in range(PROCESSES)]
    counts[0] = counts[-1] + 2
    sums = spmd(
        lambda x: (
            jax_dfccl.all_reduce(x, "i"),
            jax_dfccl.all_reduce(x, "i", op="mean", name="mean"),
        )
    )
    data = _shares(counts)
    for round_ in range(2):  # after a join everything is as before
        for step in range(counts[RANK]):
            added, mean = sums(put(data[step]))
            right = data[step].sum(0)
            check(("sum", round_, step), added, np.broadcast_to(right, (N, 50)))
            check(("mean", round_, step), mean, np.broadcast_to(right / np.float32(N), (N, 50)))
        assert jax_dfccl.join() == 0
        _check_sum(ALL)
    # Groups of every other device, large messages.
    groups = np.arange(N).reshape(-1, 2).T.tolist()
    large = spmd(lambda x: jax_dfccl.all_reduce(x, "i", axis_index_groups=groups))
    x = ranked((N, 200_000))
    for step in range(4 if RANK == LAST else 1):
        here = x.copy()
        here[: 0 if step == 0 else N - EACH] = 0
        halves = here.reshape(N // 2, 2, -1).sum(0)
        check("halves", large(put(here)), np.tile(halves, (N // 2, 1)))
    last = jax_dfccl.join()
    told = spmd(lambda x: jax_dfccl.all_gather(x, "i"))(put(np.full(N, last)))
    check("all say the same", told, np.full((N, N), last))
    x = ranked((N, 7))
    rows = spmd(lambda x: jax_dfccl.all_gather(x, "i"))(put(x))
    check("rows", rows, np.broadcast_to(x, (N, *x.shape)))
    _leave(range(PROCESSES))


def join_refuses() -> None:
    """What zeros would change is an error on those who call it, and then sums go on."""
    gather = spmd(lambda x: jax_dfccl.all_gather(x, "i"))
    largest = spmd(lambda x: jax_dfccl.all_reduce(x, "i", op="max"))
    if RANK == 0:
        x = ranked((N, 10))
        x[EACH:] = 0
        for f, name in ((gather, "all_gather"), (largest, "all_reduce(max)")):
            text, seconds = error_of(lambda f=f: f(put(x)))
            assert "has no more data" in text and name in text and "elastic.py" in text, text
            assert seconds < PROMPT_S, seconds
            check("sum", _sum(ALL)(put(x)), total(x))
    assert jax_dfccl.join() == 0
    _check_sum(ALL)
    _leave(range(PROCESSES))


def join_lost() -> None:
    """A process dies while others wait in join: an error that names it; then they shrink."""
    _check_sum(ALL)
    if RANK == LAST:
        time.sleep(1)
        _die()
    text = ""
    try:
        jax_dfccl.join()
    except RuntimeError as error:
        text = str(error)
    assert f"process {LAST}" in text or "jax_dfccl.shrink()" in text, text
    survivors = jax_dfccl.shrink()
    _goes_on(survivors, range(LAST), 1, [LAST])
    assert jax_dfccl.join() in survivors.processes
    _check_sum(_mesh(survivors.devices))
    _leave(survivors.processes)


def _examples(step, device):
    """A batch: points, and on which side of a curve they are."""
    x = np.random.default_rng((step, device)).uniform(-1, 1, (64, 2)).astype(np.float32)
    return x, (x[:, 1] > np.sin(3 * x[:, 0])).astype(np.float32)


def _mlp(seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(0, 0.5, shape).astype(np.float32) for shape in [(2, 32), (32,), (32, 1)]]


def _loss(params, x, y):
    first, bias, second = params
    z = (jnp.tanh(x @ first + bias) @ second)[:, 0]
    return jnp.mean(jnp.logaddexp(0, z) - y * z)


def training() -> None:
    """The last of four processes is killed in the middle; the others go on and agree."""

    def step(x, y, *params):
        loss, gradients = jax.value_and_grad(_loss)(params, x, y)
        loss, gradients = jax_dfccl.all_reduce((loss, gradients), "i", op="mean")
        return loss, [p - g for p, g in zip(params, gradients, strict=True)]

    mesh, losses, history = ALL, {}, {0: _mlp()}
    train, at, lost_at = spmd(step, mesh), 0, 0
    while at < 300:
        if RANK == LAST and at == 60:
            _die()
        ids = [device.id for device in mesh.devices.flat]
        x, y = (np.stack(parts) for parts in zip(*(_examples(at, d) for d in ids), strict=True))
        params = [np.broadcast_to(p, (mesh.size, *p.shape)) for p in history[at]]
        try:
            loss, params = jax.block_until_ready(train(*(put(a, mesh) for a in (x, y, *params))))
        except Exception as error:
            assert RANK != LAST and ("process 3" in str(error) or "shrink()" in str(error)), error
            survivors = jax_dfccl.shrink()
            assert survivors.processes == (0, 1, 2), survivors
            mesh = _mesh(survivors.devices)
            train = spmd(step, mesh)
            # Some may have come one step further than others.
            least = spmd(lambda x: jax_dfccl.all_reduce(x, "i", op="min"), mesh)
            told = least(put(np.full(mesh.size, at, np.int32), mesh))
            at = lost_at = int(np.asarray(told.addressable_data(0))[0])
            continue
        at += 1
        losses[at] = float(np.asarray(loss.addressable_data(0))[0])
        history[at] = [np.asarray(p.addressable_data(0))[0] for p in params]
    assert 59 <= lost_at <= 60, lost_at
    before = np.mean([losses[k] for k in range(1, 6)])
    middle = np.mean([losses[k] for k in range(lost_at - 9, lost_at + 1)])
    after = np.mean([losses[k] for k in range(291, 301)])
    assert before > middle > after and after < 0.6 * before, (before, middle, after)
    for p in history[at]:
        rows = put(np.broadcast_to(p, (mesh.size, *p.shape)), mesh)
        gathered = spmd(lambda p: jax_dfccl.all_gather(p, "i"), mesh)(rows)
        check("parameters", gathered, np.broadcast_to(p, (mesh.size, mesh.size, *p.shape)))
    _leave(survivors.processes)


def join_training() -> None:
    """Uneven data: means over those who have some, exactly; the values of the last for all."""
    counts = [2, 7, 5, 3][:PROCESSES]

    def step(w, x, count):
        added, members = jax_dfccl.all_reduce((x, count), "i")
        return w - added // members

    train = spmd(step)
    data = 12 * ranked((max(counts), N, 20), np.int32, seed=1)  # whatever the number, it divides
    right = np.zeros(20, np.int32)
    w = put(np.zeros((N, 20), np.int32))
    for at in range(max(counts)):
        has = [device for device in range(N) if at < counts[device // EACH]]
        right = right - data[at][has].sum(0, dtype=np.int32) // np.int32(len(has))
        if at < counts[RANK]:
            w = train(w, put(data[at]), put(np.ones(N, np.int32)))
            check(("w", at), w, np.broadcast_to(right, (N, 20)))
    last = jax_dfccl.join()
    assert last == counts.index(max(counts)), last
    same = spmd(lambda w: jax_dfccl.broadcast(w, "i", root=last * EACH))
    check("all have the last one's", same(w), np.broadcast_to(right, (N, 20)))
    _leave(range(PROCESSES))


main(
    [
        *(killed, nobody_lost, coordinator, one_after_the_other, during, stopped, minority, cut),
        *(join, join_refuses, join_lost, training, join_training),
    ]
)
