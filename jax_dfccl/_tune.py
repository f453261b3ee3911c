# SPDX-License-Identifier: Apache-2.0
"""`jax-dfccl tune`: measures every plan and writes down which is the fastest where.

Every sample runs one program that holds a chain of dependent calls. The plans of an operation take
turns sample by sample, so that whatever else the machine does hits them alike, and medians count.
"""

import argparse
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_dfccl import _config, _plans

CHAIN = 10
LEAST_SAMPLES = 5
MARGIN = 0.05  # by which a plan must be faster to be taken instead of the model's
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of `tune`."""
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument(
        "--ops", metavar="OP,...", help="operations (default: all that have several plans)"
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes("1K:16M"),
        help="bytes of a device's larger buffer: 1K,64K or 1K:16M in factors of 4 (the default)",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, metavar="S", help="time for each plan (default 0.2)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: where collectives look for it"
    )


def _sizes(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    if not colon:
        return sorted({_size(part) for part in text.split(",")})
    sizes, most = [_size(first)], _size(last)
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes


def _size(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 64K or 16M")
    return int(match[1]) * UNITS[match[2].upper()]


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the table; returns the process's exit status."""
    plans = {op: names for op, names in _plans.available().items() if len(names) > 1}
    ops = args.ops.split(",") if args.ops else list(plans)
    if unknown := [op for op in ops if op not in plans]:
        print(
            f"--ops {','.join(unknown)}: nothing to choose; there are {', '.join(plans)}",
            file=sys.stderr,
        )
        return 2
    if args.devices < 2:
        print("--devices must be 2 or more", file=sys.stderr)
        return 2
    # Must be set before JAX starts its CPU backend.
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    place = _plans.topology(_config.Config.from_environment().workers)
    path = args.output or _plans.default_path(place)
    print("# " + ", ".join(f"{name} {value}" for name, value in place.items()))
    print("# microseconds of one call; *: taken, from among the plans that fold in rank order")
    rules: list[_plans.Rule] = []
    measured: list[dict[str, Any]] = []
    for op in ops:
        for members in _group_sizes(args.devices):
            taken = []
            for size in args.sizes:
                row = _measure(op, members, size, list(plans[op]), args.seconds)
                taken.append((row["bytes"], _take(row["us"], row["default"], plans[op])))
                measured.append({"operation": op, "members": members, **row})
                _print_row(op, members, row, taken[-1][1])
            rules += _rules(op, members, taken)
    _plans.write(path, place, rules, measured)
    print(f"# written to {path}")
    return 0


def _group_sizes(devices: int) -> list[int]:
    """2, 4, 8, ... and all."""
    return sorted({1 << k for k in range(1, devices.bit_length())} | {devices})


def _link(op: str, n: int) -> Callable[[Any], Any]:
    """A call of `op`, and what leads back to the type of its operand."""
    import jax.numpy as jnp

    import jax_dfccl as j

    return {
        "all_reduce": lambda x: j.all_reduce(x, "i"),
        "all_gather": lambda x: j.all_gather(x, "i")[1 % n],  # member 1 is another for most
        "reduce_scatter": lambda x: jnp.tile(j.reduce_scatter(x, "i", tiled=True), n),
        "all_to_all": lambda x: j.all_to_all(x, "i", 0, 0, tiled=True),
        "reduce": lambda x: j.reduce(x, "i", 0),
        "inclusive_scan": lambda x: j.inclusive_scan(x, "i"),
        "exclusive_scan": lambda x: j.exclusive_scan(x, "i"),
    }[op]


def _measure(op: str, n: int, size: int, plans: Sequence[str], seconds: float) -> dict[str, Any]:
    """One row: the bytes really used, the model's plan, and each plan's time."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_dfccl
    from jax_dfccl import _core

    link = _link(op, n)

    def chain(x: Any) -> Any:
        for _ in range(CHAIN):
            x = link(x)
        return x

    count = max(1, size // 4 // n) * (1 if op == "all_gather" else n)
    mesh = Mesh(np.array(jax.devices()[:n]), ("i",))
    run = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    )
    x = jax.device_put(np.zeros(n * count, np.float32), NamedSharding(mesh, P("i")))

    def sample(rules: list[_plans.Rule]) -> float:
        if not _core.set_plan_rules(rules):
            raise RuntimeError("collectives are in flight")
        begin = time.perf_counter()
        run(x).block_until_ready()
        return (time.perf_counter() - begin) / CHAIN * 1e6

    run(x).block_until_ready()
    sample([])
    default = jax_dfccl.report(format="dict")["recent"][0]["plan"]
    rules = {plan: _plans.forced(f"{op}={plan}") for plan in plans}
    for plan in plans:
        sample(rules[plan])
    samples: dict[str, list[float]] = {plan: [] for plan in plans}
    end = time.perf_counter() + seconds * len(plans)
    while time.perf_counter() < end or len(samples[plans[0]]) < LEAST_SAMPLES:
        for plan in plans:
            samples[plan].append(sample(rules[plan]))
    return {
        "bytes": 4 * count * (n if op == "all_gather" else 1),
        "default": default,
        "us": {plan: round(statistics.median(times), 2) for plan, times in samples.items()},
    }


def _take(us: dict[str, float], default: str, plans: dict[str, bool]) -> str:
    """The fastest plan that may be chosen unasked, unless the model's is about as fast."""
    fastest = min((plan for plan in us if plans[plan]), key=us.__getitem__)
    return fastest if us[fastest] < us[default] * (1 - MARGIN) else default


def _rules(op: str, members: int, taken: Sequence[tuple[int, str]]) -> list[_plans.Rule]:
    """Thresholds half-way, on a logarithmic scale, between sizes with different plans."""
    rules = []
    for (size, plan), (next_size, next_plan) in itertools.pairwise(taken):
        if plan != next_plan:
            rules.append(_plans.rule(op, members, math.isqrt(size * next_size), plan))
    return [*rules, _plans.rule(op, members, None, taken[-1][1])]


def _print_row(op: str, members: int, row: dict[str, Any], taken: str) -> None:
    times = "  ".join(
        f"{plan} {us:.1f}{'*' if plan == taken else ''}" for plan, us in row["us"].items()
    )
    print(f"{op:>15} {members:>4} {row['bytes']:>9}  {times}", flush=True)
