# SPDX-License-Identifier: Apache-2.0
"""Programs that run as the two processes of a job."""

import subprocess
import sys

from jobs import free_address

LIMIT_S = 100
PRELUDE = """
import sys
import jax, jax_dfccl, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
"""


def outputs_of_two(program: str) -> list[tuple[str, str]]:
    """What two processes that run `program` print on stdout and stderr, by rank.

    Each has two devices; what `PRELUDE` defines is there.
    """
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PRELUDE + program, address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
