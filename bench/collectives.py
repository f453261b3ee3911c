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
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from pathlib import Path

CHAIN = 10
# `--check`: at least so many times as fast as lax, up to a size in bytes; after the last one, the
# last of them.
BARS = {
    "all_reduce": [(4096, 4.0), (64 << 20, 3.0)],
    "all_gather": [(64 << 10, 3.0), (64 << 20, 1.0)],
    "reduce_scatter": [(64 << 10, 3.0), (64 << 20, 1.0)],
    "all_to_all": [(64 << 10, 3.0), (64 << 20, 1.0)],
    "ppermute": [(64 << 20, 1.0)],
    "ragged_all_to_all": [],
}
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
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("4:64M"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--against", default="lax", help="comma-separated: lax, or none")
    parser.add_argument("--chain", type=int, default=CHAIN, help="dependent calls per program")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to spend on each size")
    parser.add_argument("--json", metavar="FILE", help="also write one JSON line per row")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    return parser.parse_args()


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
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={args.devices}"
    )
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jax_dfccl

    jax.config.update("jax_enable_x64", args.dtype.endswith("64"))
    peers = [peer for peer in args.against.split(",") if peer and peer != "none"]
    if unknown := [peer for peer in peers if peer != "lax"]:
        print(f"--against {','.join(unknown)}: not known here; known: lax", file=sys.stderr)
        return 2
    print(
        f"# jax_dfccl {jax_dfccl.__version__}, jax {jax.__version__}, {platform.processor()}, "
        f"{os.cpu_count()} cores, {args.devices} devices in one process, {args.dtype}, "
        f"chains of {args.chain} dependent calls, median of interleaved samples"
    )
    mesh = Mesh(np.array(jax.devices()[: args.devices]), ("i",))
    rows: list[dict] = []
    missed: list[str] = []
    for op in BARS if args.op == "all" else [args.op]:
        if not _measure(op, args, mesh, peers, rows, missed):
            return 1
    if args.json:
        Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.check:
        for text in missed:
            print("bar missed:", text)
        print("all bars held" if not missed else f"{len(missed)} bars missed")
        return 1 if missed else 0
    return 0


def _measure(op: str, args, mesh, peers: list[str], rows: list[dict], missed: list[str]) -> bool:
    """Prints a table for one operation, and adds to `rows` and `missed`. False: wrong values."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_dfccl
    from jax_dfccl import _core

    n, dtype = args.devices, np.dtype(args.dtype)
    calls = {"dfccl": _calls(op, n, ours=True)}
    for peer in peers:
        if call := _calls(op, n, ours=False):
            calls[peer] = call

    def program(call):
        def chain(x):
            for _ in range(args.chain):
                x = call(x)
            return x

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

    programs = {name: program(call) for name, call in calls.items()}
    for size in args.sizes:
        # Operands of the chain: for an all_gather, a part of its result.
        blocks = 1 if op in ("all_reduce", "ppermute") else n
        count = max(1, size // dtype.itemsize // blocks) * (1 if op == "all_gather" else blocks)
        data = (np.arange(n * count) % 7 + np.repeat(np.arange(n), count) % 5).astype(dtype)
        x = jax.device_put(data, NamedSharding(mesh, P("i")))
        right = data.reshape(n, count)
        for _ in range(args.chain):
            right = _reference(op, right)
        for name, run in programs.items():
            got = np.asarray(run(x)).reshape(n, count)
            if not np.allclose(got, right, rtol=1e-5):
                print(f"{name} gave wrong values at {size_text(size)}", file=sys.stderr)
                return False
        programs["dfccl"](x).block_until_ready()
        plan = jax_dfccl.report(format="dict")["recent"][0]["plan"]
        for _ in range(3):
            for run in programs.values():
                run(x).block_until_ready()
        samples: dict[str, list[float]] = {name: [] for name in programs}
        roof: dict[str, list[float]] = {"streaming": [], "cached": []}
        roofline = None
        if op == "all_reduce" and size >= 1 << 16:
            roofline = _core.Roofline(n, count * dtype.itemsize, 2)
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end or len(samples["dfccl"]) < 7:
            for name, run in programs.items():
                begin = time.perf_counter()
                run(x).block_until_ready()
                samples[name].append((time.perf_counter() - begin) / args.chain)
            if roofline:
                roof["streaming"].append(roofline.streaming_seconds(1))
                roof["cached"].append(roofline.cached_seconds(1))
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
            bar = next((bar for most, bar in BARS[op] if size <= most), BARS[op][-1][1])
            if peer == "lax" and ratio < bar:
                missed.append(f"{op} {size_text(size)}: {ratio:.2f}x lax, bar {bar:.0f}x")
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
