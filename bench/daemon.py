# SPDX-License-Identifier: Apache-2.0
"""What the daemon costs beside moving data: preemption, idle waiting, memory.

    python bench/daemon.py --check

Everything runs on virtual CPU devices of this process. Times are ratios of medians from one
interleaved run; memory is the growth of the process's resident set after a warm-up.
"""

import argparse
import os
import sys
import time
from itertools import combinations
from pathlib import Path

DEVICES = 8


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--operations", type=int, default=100_000)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jax_dfccl import _core, all_reduce

    mesh = Mesh(np.array(jax.devices()), ("i",))
    missed = []

    def spmd(f):
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        )

    def verdict(what: str, value: str, holds: bool) -> None:
        print(f"{what:<58} {value:>16}  {'' if holds else 'MISSED'}", flush=True)
        if not holds:
            missed.append(what)

    def chain(x):
        for _ in range(10):
            x = all_reduce(x, "i")
        return x

    # Preemption, where the order agrees and it is not needed.
    program = spmd(chain)
    for count in (1024, 262_144):
        x = jax.device_put(np.ones(DEVICES * count, np.float32), NamedSharding(mesh, P("i")))
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(15):
            for preemption in (True, False):
                _core.shutdown()
                _core.configure(preemption=preemption)
                for _ in range(5):
                    program(x).block_until_ready()
                for _ in range(400 if count == 1024 else 30):
                    begin = time.perf_counter()
                    program(x).block_until_ready()
                    times[preemption].append(time.perf_counter() - begin)
        ratio = float(np.median(times[True]) / np.median(times[False]))
        verdict(f"preemption on / off, {count * 4} B, order agrees", f"{ratio:.3f}", ratio <= 1.05)
    _core.shutdown()
    _core.configure()

    # A device that is late: the others must not burn a core.
    seconds = 4.0
    used = []

    def late(index, x):
        if int(index) == 3:
            time.sleep(0.5)
            before = time.process_time()
            time.sleep(seconds)
            used.append(time.process_time() - before)
        return np.asarray(x)

    def with_late_device(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return all_reduce(jax.pure_callback(late, shape, lax.axis_index("i"), x), "i")

    x = np.ones(DEVICES * 64, np.float32)
    spmd(with_late_device)(x).block_until_ready()
    share = used[-1] / seconds
    verdict("share of a core while one device is late", f"{share * 100:.2f} %", share < 0.02)

    # Memory: many operations, many groups, many identities.
    loop = spmd(lambda x: lax.fori_loop(0, 100, lambda _, v: chain(v) * 1e-9, x))
    loop(x).block_until_ready()
    before = resident_bytes()
    for _ in range(args.operations // 1000):
        loop(x).block_until_ready()
    grown = resident_bytes() - before
    verdict(f"growth over {args.operations} operations", f"{grown / 1e6:.2f} MB", grown < 2e6)

    subsets = [
        list(subset)
        for size in range(1, DEVICES + 1)
        for subset in combinations(range(DEVICES), size)
    ]

    def over_subsets(part):
        def f(x):
            total = jnp.zeros_like(x)
            for subset in part:
                rest = [[device] for device in range(DEVICES) if device not in subset]
                total += all_reduce(x, "i", axis_index_groups=[subset, *rest])
            return total

        return spmd(f)

    programs = [over_subsets(subsets[k : k + 51]) for k in range(0, len(subsets), 51)]
    for _ in range(3):
        for program in programs:
            program(x).block_until_ready()
    before = resident_bytes()
    for _ in range(100):
        for program in programs:
            program(x).block_until_ready()
    grown = resident_bytes() - before
    verdict(
        f"growth over {len(subsets)} groups, 100 times each", f"{grown / 1e6:.2f} MB", grown < 2e6
    )

    def keyed(x, first):
        def step(carry, key):
            return carry + all_reduce(x, "i", name="identities", key=key), None

        return lax.scan(step, x, first[0] + jnp.arange(1000))[0]

    program = spmd(keyed)
    program(x, np.full(DEVICES, -1000, np.int32)).block_until_ready()
    before = resident_bytes()
    for first in range(0, 10_000, 1000):
        program(x, np.full(DEVICES, first, np.int32)).block_until_ready()
    grown = resident_bytes() - before
    verdict("memory of 10,000 identities on 8 devices", f"{grown / 1e6:.2f} MB", grown < 10e6)

    if args.check:
        print("all bars held" if not missed else f"{len(missed)} bars missed")
        return 1 if missed else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
