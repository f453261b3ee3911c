# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose microbatches differ in length, which only the sender of each knows.

`variable_length.py --schedule 1f1b`: each stage has a thread that goes through its tasks in the
order of a schedule (schedules.py). Before an activation or slope goes its shape, as in
Megatron-LM with `variable_seq_lengths`. It compares losses and
weights with those of one device. `--rendezvous` and `--forget` show what goes wrong otherwise.
"""

import argparse
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait

import jax
import jax.numpy as jnp
import numpy as np
from schedules import SCHEDULES, Task

import jax_dfccl

WIDTH = 16
RATE = 0.1

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--schedule", choices=["gpipe", "1f1b", "interleaved"], default="1f1b")
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--rendezvous", action="store_true", help="senders wait, in the last step")
parser.add_argument("--forget", metavar="KIND:PART:MICROBATCH", help="not sent in the last step")
parser.add_argument("--timeout", type=float, default=60, help="seconds of the last step's messages")
options = parser.parse_args()

jax.config.update("jax_num_cpu_devices", options.stages)
stages = jax_dfccl.Group(jax.devices()[: options.stages], name="stages")
schedule = SCHEDULES[options.schedule](options.stages, options.microbatches)
parts = 1 + max(task.part for tasks in schedule for task in tasks)
forgotten_kind, *numbers = (options.forget or "none").split(":")
forgotten = (forgotten_kind, *map(int, numbers))


def device_of(part):
    return stages.devices[part % options.stages]


def block(weights, x):
    """Mixes the sequence, so that its length matters."""
    inner, outer = weights
    return x + jnp.tanh((x - x.mean(0)) @ inner) @ outer


def loss_of(y, target):
    return jnp.mean((y.mean(0) - target) ** 2) / options.microbatches


forward = jax.jit(block)
loss_and_slope = jax.jit(jax.value_and_grad(loss_of))


@jax.jit
def backward(weights, x, slope, total):
    by_weights, by_x = jax.vjp(block, weights, x)[1](slope)
    return jax.tree.map(jnp.add, total, by_weights), by_x


@jax.jit
def update(weights, total):
    return jax.tree.map(lambda w, slope: w - RATE * slope, weights, total)


def is_last(number):
    return number == options.steps - 1


def ends(kind, source, target, microbatch, number):
    """The two ends of a message from one part to its neighbour, and what both must say of it."""
    key = np.int32(number * options.microbatches + microbatch)
    timeout = options.timeout if is_last(number) else None  # the first step compiles
    name = {"name": f"{kind} of {source}", "key": key, "timeout": timeout}
    return source % options.stages, target % options.stages, name


def send(x, kind, source, target, microbatch, number):
    if (kind, source, microbatch) == forgotten and is_last(number):
        return
    _, to, name = ends(kind, source, target, microbatch, number)
    buffered = not (options.rendezvous and is_last(number))
    jax_dfccl.send_any(x, stages, to, buffered=buffered, **name)


def receive(kind, source, target, microbatch, number):
    from_, _, name = ends(kind, source, target, microbatch, number)
    return jax_dfccl.recv_any(stages, from_, device=device_of(target), **name)


def step(weights, sequences, targets, number):
    """One step of all stages: weights, sequences and targets are on the devices of their parts."""
    totals = [jax.tree.map(jnp.zeros_like, w) for w in weights]
    kept, losses = {}, {}

    def run(task: Task):
        kind, microbatch, part = task
        if kind == "forward":
            x = sequences[microbatch]
            if part > 0:
                x = receive(kind, part - 1, part, microbatch, number)
            y = forward(weights[part], x)
            kept[microbatch, part] = x, y
            if part < parts - 1:
                send(y, kind, part, part + 1, microbatch, number)
            return
        x, y = kept.pop((microbatch, part))
        if part < parts - 1:
            slope = receive(kind, part + 1, part, microbatch, number)
        else:
            losses[microbatch], slope = loss_and_slope(y, targets[microbatch])
        totals[part], by_x = backward(weights[part], x, slope, totals[part])
        if part > 0:
            send(by_x, kind, part, part - 1, microbatch, number)

    with ThreadPoolExecutor(options.stages) as threads:
        going = [threads.submit(lambda tasks: list(map(run, tasks)), tasks) for tasks in schedule]
        patience = options.timeout / 2 if is_last(number) else None
        if wait(going, patience, FIRST_EXCEPTION).not_done:
            print(jax_dfccl.report())
        for stage in as_completed(going):
            stage.result()
    return list(map(update, weights, totals)), float(sum(losses.values()))


@jax.jit
def reference_step(weights, sequences, targets):
    """The same on one device."""

    def loss(weights):
        total = jnp.float32(0)
        for x, target in zip(sequences, targets, strict=True):
            for w in weights:
                x = block(w, x)
            total += loss_of(x, target)
        return total

    value, slopes = jax.value_and_grad(loss)(weights)
    return update(weights, slopes), value


def main():
    random = np.random.default_rng(0)
    shape = (parts, 2, WIDTH, WIDTH)
    first = [tuple(w) for w in (0.2 * random.standard_normal(shape)).astype(np.float32)]
    lengths = np.resize([5, 12, 3, 9], options.microbatches)
    sequences = [random.standard_normal((n, WIDTH)).astype(np.float32) for n in lengths]
    targets = list(random.standard_normal((options.microbatches, WIDTH)).astype(np.float32))

    weights = [jax.device_put(w, device_of(part)) for part, w in enumerate(first)]
    here = jax.device_put(sequences, device_of(0)), jax.device_put(targets, device_of(parts - 1))
    right = first
    for number in range(options.steps):
        weights, loss = step(weights, *here, number)
        right, expected = reference_step(right, sequences, targets)
        print(f"step {number}: loss {loss:.6f}, of one device {expected:.6f}", flush=True)
        assert abs(loss - expected) < 1e-5, "the losses differ"
    for got, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    print(f"weights are those of one device, lengths {lengths.tolist()}")


main()
