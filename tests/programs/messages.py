# SPDX-License-Identifier: Apache-2.0
"""Messages that do not find each other, in a process of its own."""

import time

import jax
import numpy as np
from common import check, main

import jax_dfccl

pair = jax_dfccl.Group(jax.devices()[:2], name="pair")
LARGE = 100_000


def at(rank, x):
    return jax.device_put(x, pair.devices[rank])


def opposite() -> None:
    """Large ones in programs of their own, sent first by both: an error names both, not a hang."""
    shape = jax.ShapeDtypeStruct((LARGE,), np.float32)
    x = np.arange(LARGE, dtype=np.float32)
    send = jax.jit(lambda x, to: jax_dfccl.send(x, pair, to), static_argnums=1)
    recv = jax.jit(lambda k, of: k * jax_dfccl.recv(shape, pair, of), static_argnums=1)
    for rank in (0, 1):
        send(at(rank, x), 1 - rank)
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        for rank in (0, 1):
            assert f"send of float32[{LARGE}] to rank {rank} 'pair/message' at messages" in text, (
                text
            )
        assert "wait for each other" in text
    else:
        raise AssertionError("no error")
    # What is buffered goes on.
    for rank in (0, 1):
        jax_dfccl.send(at(rank, x), pair, 1 - rank, buffered=True)
    for rank in (0, 1):
        check("after", recv(at(rank, np.float32(1)), 1 - rank), x)


def lost() -> None:
    """Small ones that nobody receives: reported, and forgotten in time."""
    jax_dfccl.send(at(0, np.float32(1)), pair, 1, key=5, timeout=1)
    (waiting,) = jax_dfccl.report("dict")["in_flight"]
    assert waiting["operation"] == "send of float32[] to rank 1" and waiting["absent"] == [1]
    assert not waiting["blocks_device"]
    while jax_dfccl.report("dict")["in_flight"]:
        time.sleep(0.02)
    (ended, *_) = jax_dfccl.report("dict")["recent"]
    assert "messages.py" in ended["error"] and "[1] have not come" in ended["error"]


def leaving() -> None:
    """The process may end with messages under way and after errors."""
    shape = jax.ShapeDtypeStruct((), np.float32)
    try:
        float(jax.jit(lambda k: jax_dfccl.recv(shape, pair, 0, key=k, timeout=0.5))(at(1, 1)))
    except jax.errors.JaxRuntimeError as error:
        assert "recv of float32[] from rank 0" in str(error)
    jax_dfccl.send(at(0, np.float32(1)), pair, 1, key=7, timeout=60)
    jax_dfccl.send_any(at(0, np.float32(1)), pair, 1)
    jax_dfccl.recv_any(pair, 0, device=pair.devices[1])  # nor does anybody wait for this
    jax.jit(lambda k: jax_dfccl.recv(shape, pair, 0, key=k, timeout=60))(at(1, 8))


main({"opposite": opposite, "lost": lost, "leaving": leaving})
