# SPDX-License-Identifier: Apache-2.0
"""What the test programs share: devices, shard_map shorthand, value checks.

Each program in this folder is run in a child process with a time limit
(tests/python/test_programs.py): `python PROGRAM.py CASE [--devices N]`. It must print `right` last
and exit 0; a wrong value, a hang or an abort is a failure.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("case")
parser.add_argument("--devices", type=int, default=8)
arguments, case_arguments = parser.parse_known_args()
N = arguments.devices
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={N}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_dfccl  # noqa: E402, F401  (before the backend starts)

jax.config.update("jax_enable_x64", True)
mesh = Mesh(np.array(jax.devices()), ("i",))


def spmd(f: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """`f` on every device's shard of its arguments, jitted."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return jax.jit(mapped, **jit_options)


def ranked(count: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """[N, count] data that differs by rank and position and sums exactly in `dtype`."""
    rng = np.random.default_rng(seed)
    small = rng.integers(-8, 9, (N, count))
    return small.astype(dtype)


def check(what: str, got: Any, right: Any) -> None:
    got, right = np.asarray(got), np.asarray(right)
    if got.shape != right.shape or not np.array_equal(got, right):
        different = np.argwhere(got != right)[:4].tolist() if got.shape == right.shape else "shape"
        print(f"WRONG {what}: got {got.ravel()[:8]} right {right.ravel()[:8]} at {different}")
        os._exit(1)


def in_threads(jobs: list[tuple[Any, ...]]) -> None:
    """Runs (function, *arguments) jobs in threads; an exception in any of them is a failure."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(*job) for job in jobs]:
            future.result()


def main(cases: dict[str, Callable[[], None]]) -> None:
    started = time.perf_counter()
    cases[arguments.case]()
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    print("right", flush=True)
