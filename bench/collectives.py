# SPDX-License-Identifier: Apache-2.0
"""Times jax_dfccl collectives beside other implementations, in one interleaved run.

    python bench/collectives.py --op all_reduce --devices 8 --sizes 4:64M --against lax --check

Every sample runs one jitted program that holds a chain of dependent calls (10 by default); the
time of one call is the time of the program divided by the length of the chain. Implementations
take turns sample by sample, so that whatever else the machine does hits them alike, and ratios
of medians are what counts. Results are verified before anything is timed.

Columns follow nccl-tests: `size` is the bytes of one device's larger buffer (of the result of an
all_gather, of the operand of a reduce_scatter), `algbw` = size / time, and `busbw` = algbw times
2 (n - 1) / n for all_reduce, 1 for ppermute, (n - 1) / n for the others. Where a call changes the
shape, a slice or a tiling leads back to it; all implementations pay for it. For all_reduce, `roof`
is the part of the memory roofline reached: the time of a plain loop with n reads and n writes of
the buffer (the better of normal and non-temporal stores, two threads), measured in the same run,
divided by ours. `--op all` is all operations, one after the other; ragged_all_to_all is not in XLA
for CPUs, so nothing is compared there.

    python bench/collectives.py --processes 2 --against gloo,mpi4jax --check

Several processes with one CPU device each: gloo is what `jax.lax` uses between them. mpi4jax is
left out where it is not installed (`pip install mpich mpi4py`, then mpi4jax, whose source
distribution needs that `mpicc`: with --no-build-isolation). The same processes run all
implementations, started by `mpiexec` if mpi4jax is one of them. Times are those of process 0. At
each turn an implementation runs for about 0.1 s (at least twice), of which only the second half
counts: before, processes wait for those that the implementation before has let go later, and the
system's scheduler gives more time to those that had less.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHAIN = 10
TURN_SECONDS = 0.1  # of an implementation, between processes
# `--check`: at least so many times as fast as lax, up to a size in bytes; after the last one, the
# last of them.
Bars = list[tuple[int, float]]
BARS: dict[str, Bars] = {
    "all_reduce": [(4096, 4.0), (64 << 20, 3.0)],
    "all_gather": [(64 << 10, 3.0), (64 << 20, 1.0)],
    "reduce_scatter": [(64 << 10, 3.0), (64 << 20, 1.0)],
    "all_to_all": [(64 << 10, 3.0), (64 << 20, 1.0)],
    "ppermute": [(64 << 20, 1.0)],
    "ragged_all_to_all": [],
}
# The same for all_reduce between processes, by peer.
GLOO_BARS: Bars = [(1023, 3.0), (256 << 10, 20.0), (64 << 20, 3.0)]
MPI_BARS: dict[int, Bars] = {2: [(16 << 20, 1.0)], 4: [(16 << 20, 2.0)]}
BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
    "ragged_all_to_all": lambda n: (n - 1) / n,
}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 64K or 16M")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_sizes(text: str) -> list[int]:
    """`4:64M` (factors of 4, the end included), or a comma-separated list."""
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    first, last = (parse_size(part) for part in text.split(":"))
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 4
    return [*sizes, last]


def size_text(size: int) -> str:
    for unit in ("G", "M", "K"):
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--op", default="all_reduce", choices=["all", *BARS])
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument("--processes", type=int, default=1, help="with one device each, if > 1")
    parser.add_argument("--sizes", type=parse_sizes, help="default 4:64M, between processes 4:16M")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--against", help="comma-separated: lax; between processes gloo, mpi4jax; or none"
    )
    parser.add_argument("--chain", type=int, default=CHAIN, help="dependent calls per program")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to spend on each size")
    parser.add_argument("--json", metavar="FILE", help="also write one JSON line per row")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--worker", choices=["launch", "mpiexec"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    across = args.processes > 1
    if across:
        args.devices = args.processes
    args.sizes = args.sizes or parse_sizes("4:16M" if across else "4:64M")
    known = ["gloo", "mpi4jax"] if across else ["lax"]
    args.peers = [p for p in (args.against or known[0]).split(",") if p and p != "none"]
    if unknown := [peer for peer in args.peers if peer not in known]:
        parser.error(f"--against {','.join(unknown)}: not known here; known: {', '.join(known)}")
    if "mpi4jax" in args.peers and importlib.util.find_spec("mpi4jax") is None:
        args.peers.remove("mpi4jax")
        if args.worker is None:
            print("# mpi4jax is not installed: nothing is compared with it", flush=True)
    return args


def _start(args: argparse.Namespace) -> int:
    """Runs this program in several processes."""
    if "mpi4jax" in args.peers:
        # Of the same installation, if it is in the environment of this Python.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mpiexec = shutil.which("mpiexec", path=path)
        if mpiexec is None:
            print("mpi4jax needs mpiexec", file=sys.stderr)
            return 2
        start = [mpiexec, "-n", str(args.processes), sys.executable, __file__, "--worker=mpiexec"]
    else:
        start = [sys.executable, "-m", "jax_dfccl", "launch", "-n", str(args.processes)]
        start += ["--no-prefix", __file__, "--worker=launch"]
    return subprocess.run([*start, *sys.argv[1:]], check=False).returncode


def _bars(op: str, peer: str, processes: int) -> Bars:
    if peer == "lax":
        return BARS[op]
    if op != "all_reduce":
        return []
    return GLOO_BARS if peer == "gloo" else MPI_BARS.get(processes, [])


def _mpi_calls(op: str, n: int):
    """The same as _calls."""
    import mpi4jax  # pyright: ignore[reportMissingImports]
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    rank = MPI.COMM_WORLD.Get_rank()
    if op == "all_reduce":
        return lambda x: mpi4jax.allreduce(x, op=MPI.SUM)
    if op == "all_gather":
        return lambda x: mpi4jax.allgather(x).reshape(n, -1)[1 % n]
    if op == "all_to_all":
        return lambda x: mpi4jax.alltoall(x.reshape(n, -1)).reshape(-1)
    if op == "ppermute":
        return lambda x: mpi4jax.sendrecv(x, x, source=(rank - 1) % n, dest=(rank + 1) % n)
    return None


def _calls(op: str, n: int, *, ours: bool):
    """One link of a chain: a function of a member's operand that returns the next operand.

    None: there is none.
    """
    import jax
    import jax.numpy as jnp

    import jax_dfccl

    ring = [(i, (i + 1) % n) for i in range(n)]

    def ragged(x):
        sizes = jnp.full(n, len(x) // n)
        places = jnp.full(n, jax.lax.axis_index("i") * (len(x) // n))
        return jax_dfccl.ragged_all_to_all(
            x, x, jnp.arange(n) * sizes, sizes, places, sizes, axis_name="i"
        )

    if op == "all_reduce":
        call = jax_dfccl.all_reduce if ours else jax.lax.psum
        return lambda x: call(x, "i")
    if op == "all_gather":
        gather = jax_dfccl.all_gather if ours else jax.lax.all_gather
        # Member 1 is another for most.
        return lambda x: gather(x, "i").reshape(n, -1)[1 % n]
    if op == "reduce_scatter":
        reduce = jax_dfccl.reduce_scatter if ours else jax.lax.psum_scatter
        return lambda x: jnp.tile(reduce(x, "i", tiled=True) * 0.125, n)
    if op == "all_to_all":
        exchange = jax_dfccl.all_to_all if ours else jax.lax.all_to_all
        return lambda x: exchange(x, "i", 0, 0, tiled=True)
    if op == "ragged_all_to_all":
        return ragged if ours else None
    permute = jax_dfccl.ppermute if ours else jax.lax.ppermute
    return lambda x: permute(x, "i", ring)


def _reference(op: str, x):
    """The operands of all members, [n, count], after one link."""
    import numpy as np

    n = len(x)
    if op == "all_reduce":
        return np.tile(x.sum(0), (n, 1))
    if op == "all_gather":
        return np.tile(x[1 % n], (n, 1))
    if op == "reduce_scatter":
        return np.tile(x.sum(0).reshape(n, -1) * 0.125, (1, n))
    if op in ("all_to_all", "ragged_all_to_all"):
        return x.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)
    return np.roll(x, 1, axis=0)


def main() -> int:
    args = parse_arguments()
    if args.processes > 1 and args.worker is None:
        return _start(args)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if args.worker is None:
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "")
            + f" --xla_force_host_platform_device_count={args.devices}"
        )
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jax_dfccl

    jax.config.update("jax_enable_x64", args.dtype.endswith("64"))
    if args.worker is not None:
        by_mpi = args.worker == "mpiexec"
        jax.distributed.initialize(cluster_detection_method="mpi4py" if by_mpi else None)
        if jax.process_index() > 0:
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    where = (
        f"{args.processes} processes" if args.worker else f"{args.devices} devices in one process"
    )
    print(
        f"# jax_dfccl {jax_dfccl.__version__}, jax {jax.__version__}, {platform.processor()}, "
        f"{os.cpu_count()} cores, {where}, {args.dtype}, "
        f"chains of {args.chain} dependent calls, median of interleaved samples"
    )
    mesh = Mesh(np.array(jax.devices()[: args.devices]), ("i",))
    rows: list[dict] = []
    missed: list[str] = []
    for op in BARS if args.op == "all" else [args.op]:
        if not _measure(op, args, mesh, rows, missed):
            return 1
    if jax.process_index() > 0:
        return 0
    if args.json:
        Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.check:
        for text in missed:
            print("bar missed:", text)
        print("all bars held" if not missed else f"{len(missed)} bars missed")
        return 1 if missed else 0
    return 0


def _agree(numbers: list[int], args) -> list[int]:
    """What process 0 says: all must measure equally often."""
    from jax.experimental import multihost_utils

    return (
        [int(number) for number in multihost_utils.broadcast_one_to_all(numbers)]
        if args.worker
        else numbers
    )


def _measure(op: str, args, mesh, rows: list[dict], missed: list[str]) -> bool:
    """Prints a table for one operation, and adds to `rows` and `missed`. False: wrong values."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_dfccl
    from jax_dfccl import _core

    n, dtype = args.devices, np.dtype(args.dtype)
    calls = {"dfccl": _calls(op, n, ours=True)}
    for peer in args.peers:
        if call := _mpi_calls(op, n) if peer == "mpi4jax" else _calls(op, n, ours=False):
            calls[peer] = call

    def program(name, call):
        def chain(x):
            for _ in range(args.chain):
                x = call(x)
            return x

        if name == "mpi4jax":
            return jax.jit(chain)
        return jax.jit(
            jax.shard_map(chain, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        )

    print(f"# {op}")
    header = f"{'size':>6} {'count':>9}"
    for name in calls:
        header += f" |{name + ' us':>11} {'p10':>9} {'p90':>9} {'algbw':>7} {'busbw':>7}"
    header += " |" + "".join(f"{'x ' + p:>8}" for p in calls if p != "dfccl") + f" {'roof':>6}"
    header += f"  {'plan':<15}"
    print(header + f" {'samples':>8}\n#" + " " * 15 + "  (algbw, busbw in GB/s)")

    programs = {name: program(name, call) for name, call in calls.items()}
    for size in args.sizes:
        # Operands of the chain: for an all_gather, a part of its result.
        blocks = 1 if op in ("all_reduce", "ppermute") else n
        count = max(1, size // dtype.itemsize // blocks) * (1 if op == "all_gather" else blocks)
        data = (np.arange(n * count) % 7 + np.repeat(np.arange(n), count) % 5).astype(dtype)
        x = jax.make_array_from_callback(
            data.shape, NamedSharding(mesh, P("i")), lambda index, data=data: data[index]
        )
        # MPI knows processes only.
        own = x.addressable_shards[0]
        operands = {name: own.data if name == "mpi4jax" else x for name in programs}
        right = data.reshape(n, count)
        for _ in range(args.chain):
            right = _reference(op, right)
        right = right.reshape(-1)
        for name, run in programs.items():
            got = run(operands[name])
            shards = [(s.data, s.index) for s in got.addressable_shards]
            if name == "mpi4jax":
                shards = [(got, own.index)]
            if not all(np.allclose(got, right[index], rtol=1e-5) for got, index in shards):
                print(f"{name} gave wrong values at {size_text(size)}", file=sys.stderr)
                return False
        programs["dfccl"](x).block_until_ready()
        plan = jax_dfccl.report(format="dict")["recent"][0]["plan"]
        samples: dict[str, list[float]] = {name: [] for name in programs}
        roof: dict[str, list[float]] = {"streaming": [], "cached": []}
        roofline = None
        if op == "all_reduce" and size >= 1 << 16 and args.worker is None:
            roofline = _core.Roofline(n, count * dtype.itemsize, 2)

        def measure(rounds, runs, samples=samples, roof=roof, roofline=roofline, operands=operands):
            for _ in range(rounds):
                for name, run in programs.items():
                    for i in range(runs[name]):
                        begin = time.perf_counter()
                        run(operands[name]).block_until_ready()
                        if i >= runs[name] // 2:
                            samples[name].append((time.perf_counter() - begin) / args.chain)
                if roofline:
                    roof["streaming"].append(roofline.streaming_seconds(1))
                    roof["cached"].append(roofline.cached_seconds(1))

        measure(3, dict.fromkeys(programs, 1))
        turns = dict.fromkeys(programs, 1)
        if args.worker is not None:
            seconds = [min(values) * args.chain for values in samples.values()]
            counts = _agree([min(max(2, int(TURN_SECONDS / s)), 200) for s in seconds], args)
            turns = dict(zip(programs, counts, strict=True))
        begin = time.perf_counter()
        measure(1, turns)
        rounds = int(args.seconds / (time.perf_counter() - begin))
        least = 7 if args.worker is None else 2
        [rounds] = _agree([max(least, rounds)], args)
        for values in [*samples.values(), *roof.values()]:
            values.clear()
        measure(rounds, turns)
        row = {
            "op": op,
            "plan": plan,
            "devices": n,
            "dtype": args.dtype,
            "size": count * dtype.itemsize * (n if op == "all_gather" else 1),
            "chain": args.chain,
            "samples": len(samples["dfccl"]),
            "results": {},
        }
        line = f"{size_text(size):>6} {count:>9}"
        for name, values in samples.items():
            p10, p50, p90, p99 = np.percentile(values, [10, 50, 90, 99])
            algbw = row["size"] / p50 / 1e9
            busbw = algbw * BUS_FACTORS[op](n)
            row["results"][name] = {
                "p10_us": p10 * 1e6,
                "p50_us": p50 * 1e6,
                "p90_us": p90 * 1e6,
                "p99_us": p99 * 1e6,
                "algbw_GBps": algbw,
                "busbw_GBps": busbw,
            }
            line += (
                f" |{p50 * 1e6:11.1f} {p10 * 1e6:9.1f} {p90 * 1e6:9.1f} {algbw:7.2f} {busbw:7.2f}"
            )
        ours = row["results"]["dfccl"]["p50_us"]
        line += " |"
        for peer in samples:
            if peer == "dfccl":
                continue
            ratio = row["results"][peer]["p50_us"] / ours
            row[f"ratio_{peer}"] = ratio
            line += f"{ratio:7.1f}x"
            bars = _bars(op, peer, args.processes)
            if not bars:
                continue
            bar = next((bar for most, bar in bars if size <= most), bars[-1][1])
            if ratio < bar:
                missed.append(f"{op} {size_text(size)}: {ratio:.2f}x {peer}, bar {bar:.0f}x")
        if roofline:
            row["roofline_us"] = min(float(np.median(times)) for times in roof.values()) * 1e6
            row["roofline_part"] = row["roofline_us"] / ours
            line += f" {row['roofline_part'] * 100:5.0f}%"
            if size >= 1 << 20 and row["roofline_part"] < 0.7:
                missed.append(
                    f"{op} {size_text(size)}: {row['roofline_part'] * 100:.0f} % of the "
                    "memory roofline, bar 70 %"
                )
        else:
            line += f" {'':>6}"
        print(line + f"  {plan:<15} {row['samples']:8d}", flush=True)
        rows.append(row)
    return True


if __name__ == "__main__":
    sys.exit(main())
