# SPDX-License-Identifier: Apache-2.0
"""A process of a job that gets connected with the others: `cluster.py CASE`.

Prints what it saw as JSON. The processes speak over their connections, so none ends too early.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import cluster
import jax
from jax.experimental import multihost_utils

from jax_dfccl import _address, _cluster, _compat

CASE = sys.argv[1]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)


def tell(**seen) -> None:
    print(json.dumps(seen))


def connect() -> None:
    """Connects with all others and speaks with them."""
    everyone = range(jax.process_count())
    before = cluster.listening()  # gloo
    runtime = cluster.Runtime()
    _cluster.require(everyone, runtime)
    _cluster.require(everyone)
    cluster.wait_until(lambda: len(runtime.links) == len(everyone) - 1)
    cluster.send(jax.process_index(), runtime.links)
    cluster.receive(jax.process_index(), runtime.links)
    tell(
        joined=runtime.joined,
        linked=runtime.linked(),
        families=sorted({link[1].family.name for link in runtime.links}),
        memory=sorted({os.fstat(link[2]).st_size for link in runtime.links if link[2] >= 0}),
        down=runtime.down,
        listening=[place.partition(":")[0] for place in cluster.listening() - before],
    )


def late() -> None:
    """Process 0 connects long after the others, and tells nobody before."""
    if jax.process_index() == 0:
        time.sleep(3)
    connect()


def absent() -> None:
    """Shuts JAX's client down and ends while it waits for a process that never asks."""
    if jax.process_index() == 0:
        runtime = cluster.Runtime()
        _cluster.require([1], runtime)
        time.sleep(0.5)
        tell(linked=runtime.linked(), down=runtime.down)
    multihost_utils.sync_global_devices("end")
    jax.distributed.shutdown()
    time.sleep(1.5)  # it looks for the process once more


def killed() -> None:
    """Process 1 dies when it has published its address, before process 0 wants it."""
    runtime = cluster.Runtime()
    if jax.process_index() == 1:
        _cluster.require([0], runtime)
        os.kill(os.getpid(), signal.SIGKILL)
    store, _ = _compat.key_value_store() or sys.exit("no store")
    cluster.wait_until(lambda: store.get("jax_dfccl/process/1"))
    address = _address.Address.parse(store.get("jax_dfccl/process/1") or "")
    cluster.wait_until(lambda: _address.has_ended(address.life))
    _cluster.require([1], runtime)
    cluster.wait_until(lambda: runtime.down)
    tell(down=runtime.down)


def fork() -> None:
    """A child of a connected process can end, and is told that it is not connected."""
    runtime = cluster.Runtime()
    _cluster.require(range(jax.process_count()), runtime)
    child = os.fork()
    if child == 0:
        try:
            _cluster.require(range(jax.process_count()), runtime)
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 1)  # as multiprocessing's children do
    _, status = os.waitpid(child, 0)
    cluster.wait_until(lambda: len(runtime.links) == jax.process_count() - 1)
    cluster.send(jax.process_index(), runtime.links)
    cluster.receive(jax.process_index(), runtime.links)
    tell(status=os.waitstatus_to_exitcode(status))


if CASE == "alone":
    try:
        _cluster.require([0, 1], cluster.Runtime())
    except RuntimeError as error:
        tell(error=str(error))
else:
    jax.distributed.initialize()
    globals()[CASE]()
