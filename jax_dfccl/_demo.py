# SPDX-License-Identifier: Apache-2.0
"""The demo: data-parallel training whose gradient buckets go out in a different order everywhere.

A small classifier learns scikit-learn's handwritten digits on 8 virtual CPU devices. Each step,
every device all-reduces its gradient buckets in an order of its own (`lax.switch` over
permutations, chosen by device and step); device 0 also waits for each before the next. On
jax_dfccl that trains exactly like one device; the same program on `lax.psum` is then run in a
child process to show what happens there.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from jax_dfccl import _config

LAYERS = (64, 96, 48, 10)
BATCH = 256
ORDERS = 16
ONE_BY_ONE = 4  # of the orders: the next bucket goes out when the one before is back
LEARNING_RATE = 0.15
MOMENTUM = 0.9
STOCK_LIMIT_S = 120
STOCK_ATTEMPTS = 4
TOLERANCE = 2e-4
# XLA gives up on a stuck collective after 60 s; the demo does not want to wait that long.
STOCK_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=5 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=10"
)


def main(args: argparse.Namespace) -> int:
    """Runs the demo; returns the process's exit status."""
    # Must be set before JAX starts its CPU backend.
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    if BATCH % args.devices:
        print(f"--devices must divide the batch of {BATCH}", file=sys.stderr)
        return 2
    try:
        import rich  # noqa: F401  (used by the functions below)
        import sklearn.datasets  # noqa: F401
    except ImportError as error:
        print(
            f"The demo needs {error.name}: install it with  pip install 'jax-dfccl[demo]'",
            file=sys.stderr,
        )
        return 2
    if args.collective == "lax":
        return _stock_child(args)
    return _demo(args)


def _load_digits() -> tuple[Any, Any, Any, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16.0).astype(np.float32), labels[order].astype(np.int32)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def _initial_parameters() -> list[Any]:
    import numpy as np

    rng = np.random.default_rng(1)
    parameters = []
    for rows, columns in itertools.pairwise(LAYERS):
        scale = (2.0 / rows) ** 0.5
        parameters.append((rng.standard_normal((rows, columns)) * scale).astype(np.float32))
        parameters.append(np.zeros(columns, np.float32))
    return parameters


def _logits(parameters: list[Any], images: Any) -> Any:
    import jax

    x = images
    for layer in range(0, len(parameters), 2):
        x = x @ parameters[layer] + parameters[layer + 1]
        if layer < len(parameters) - 2:
            x = jax.nn.relu(x)
    return x


def _loss(parameters: list[Any], images: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    log_probabilities = jax.nn.log_softmax(_logits(parameters, images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def _update(parameters: list[Any], velocities: list[Any], gradients: list[Any]) -> Any:
    velocities = [MOMENTUM * v + g for v, g in zip(velocities, gradients, strict=True)]
    parameters = [p - LEARNING_RATE * v for p, v in zip(parameters, velocities, strict=True)]
    return parameters, velocities


def _bucket_orders(buckets: int) -> list[Any]:
    import numpy as np

    rng = np.random.default_rng(2)
    return [rng.permutation(buckets) for _ in range(ORDERS + ONE_BY_ONE)]


def _parallel_step(devices: int, all_reduce: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """A jitted training step; `all_reduce(gradient, name)` averages over the devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    orders = _bucket_orders(2 * (len(LAYERS) - 1))

    def in_order(order: Any, one_by_one: bool) -> Callable[..., Any]:
        def branch(gradients: list[Any]) -> list[Any]:
            reduced = list(gradients)
            before = jnp.float32(0)
            for bucket in order:
                reduced[bucket] = all_reduce(gradients[bucket] + before, f"bucket {bucket}")
                if one_by_one:
                    before = 0 * reduced[bucket].ravel()[0]
            return reduced

        return branch

    def step(parameters: Any, velocities: Any, index: Any, images: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(parameters, images, labels)
        # 5 and 16 share no factor: in every step each of up to 16 devices has its own order.
        device = lax.axis_index("data")
        which = jnp.where(
            device == 0, ORDERS + index % ONE_BY_ONE, (device * 5 + index * 3) % ORDERS
        )
        branches = [in_order(order, k >= ORDERS) for k, order in enumerate(orders)]
        gradients = lax.switch(which, branches, gradients)
        parameters, velocities = _update(parameters, velocities, gradients)
        return parameters, velocities, loss[None]

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P(), P("data"), P("data")),
            out_specs=(P(), P(), P("data")),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )


def _train(step: Callable[..., Any], steps: int, tick: Callable[[int, Any], None]) -> Any:
    import numpy as np

    images, labels, _, _ = _load_digits()
    parameters = _initial_parameters()
    velocities = [np.zeros_like(p) for p in parameters]
    rng = np.random.default_rng(3)
    for index in range(steps):
        batch = rng.choice(len(images), BATCH, replace=False)
        parameters, velocities, loss = step(
            parameters, velocities, np.int32(index), images[batch], labels[batch]
        )
        tick(index, loss)
    return [np.asarray(p) for p in parameters]


def _train_single(steps: int) -> Any:
    import jax

    @jax.jit
    def step(parameters: Any, velocities: Any, index: Any, images: Any, labels: Any) -> Any:
        del index
        loss, gradients = jax.value_and_grad(_loss)(parameters, images, labels)
        return *_update(parameters, velocities, gradients), loss

    return _train(step, steps, lambda index, loss: None)


def _accuracy(parameters: Any) -> float:
    import numpy as np

    _, _, images, labels = _load_digits()
    return float(np.mean(np.argmax(np.asarray(_logits(parameters, images)), axis=1) == labels))


def _difference(parameters: Any, reference: Any) -> float:
    """Largest difference, relative to the largest parameter; infinite if not finite."""
    import numpy as np

    if not all(np.isfinite(p).all() for p in parameters):
        return float("inf")
    largest = max(float(np.abs(r).max()) for r in reference)
    return (
        max(float(np.abs(p - r).max()) for p, r in zip(parameters, reference, strict=True))
        / largest
    )


def _demo(args: argparse.Namespace) -> int:
    import jax
    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    import jax_dfccl

    console = Console()
    buckets = 2 * (len(LAYERS) - 1)
    console.print(
        f"Training on {args.devices} virtual CPU devices; {buckets} gradient buckets a step, "
        "in an order that differs on every device and changes every step."
    )
    step = _parallel_step(
        args.devices, lambda g, name: jax_dfccl.all_reduce(g, "data", op="mean", name=name)
    )
    started: list[float] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console
    ) as progress:
        bar = progress.add_task("loss", total=args.steps)

        def tick(index: int, loss: Any) -> None:
            if index == 0:  # the first step compiles
                jax.block_until_ready(loss)
                started.append(time.perf_counter())
            if index % 20 == 0 or index == args.steps - 1:
                text = f"loss {float(np.mean(loss)):.4f}"
                progress.update(bar, description=text, completed=index + 1)

        parameters = _train(step, args.steps, tick)
        seconds = time.perf_counter() - started[0]
    reference = _train_single(args.steps)
    accuracy, difference = _accuracy(parameters), _difference(parameters, reference)

    counters = jax_dfccl.report().as_dict()["devices"]
    table = Table(title="jax_dfccl")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("test accuracy", f"{accuracy * 100:.1f} %")
    table.add_row("difference from a single-device run", f"{difference:.1e} (relative)")
    table.add_row("steps per second", f"{(args.steps - 1) / seconds:.0f}")
    table.add_row("collectives", f"{sum(c['completed'] for c in counters) // args.devices}")
    table.add_row("preemptions", f"{sum(c['preemptions'] for c in counters)}")
    table.add_row("context saves", f"{sum(c['context_saves'] for c in counters)}")
    table.add_row("largest wait", f"{max(c['largest_wait_s'] for c in counters) * 1e3:.1f} ms")
    console.print(table)
    good = accuracy >= 0.95 and difference <= TOLERANCE
    console.print(
        "Trained as one device would have."
        if good
        else "[red]Not as it should be: accuracy below 95 % or parameters differ.[/red]"
    )
    if not args.skip_stock:
        console.print("\nThe same program with lax.psum, in a child process:")
        for attempt in range(STOCK_ATTEMPTS):
            right, what = _run_stock(args, reference)
            console.print(f"  {what}")
            if not right:
                break
            if attempt + 1 < STOCK_ATTEMPTS:
                console.print("  (order and luck decide; once more)")
    return 0 if good else 1


def _run_stock(args: argparse.Namespace, reference: Any) -> tuple[bool, str]:
    """Whether the program came out right on lax.psum, and what it did in one sentence."""
    import numpy as np

    command = [sys.executable, "-m", "jax_dfccl", "demo", "--collective", "lax"]
    command += ["--devices", str(args.devices), "--steps", str(args.steps)]
    environment = _config.environment_with_xla_flags(STOCK_FLAGS)
    started = time.perf_counter()
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=STOCK_LIMIT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return False, f"it hung; killed after {STOCK_LIMIT_S} s."
    seconds = time.perf_counter() - started
    if child.returncode != 0:
        how = (
            f"killed by signal {-child.returncode}"
            if child.returncode < 0
            else f"exit status {child.returncode}"
        )
        lines = child.stderr.strip().splitlines() or ["no message"]
        # XLA's fatal log lines begin with F and the date.
        cause = next((line for line in lines if re.match(r"F\d{4} ", line)), lines[-1])
        cause = re.sub(r"^F\d{4} [^\]]*\] ", "", cause)
        return False, f"it was aborted after {seconds:.0f} s ({how}): {cause[:200]}"
    parameters = [np.array(p, np.float32) for p in json.loads(child.stdout.splitlines()[-1])]
    accuracy, difference = _accuracy(parameters), _difference(parameters, reference)
    if difference <= TOLERANCE:
        return True, "it came out right this time."
    return False, (
        f"it finished with exit status 0 and wrong parameters: relative difference "
        f"{difference:.1e} from a single-device run, test accuracy {accuracy * 100:.1f} %."
    )


def _stock_child(args: argparse.Namespace) -> int:
    from jax import lax

    step = _parallel_step(args.devices, lambda g, name: lax.pmean(g, "data"))
    parameters = _train(step, args.steps, lambda index, loss: None)
    print(json.dumps([p.tolist() for p in parameters]), flush=True)
    os._exit(0)  # a corrupted heap must not decide the exit status after the result is out
