# SPDX-License-Identifier: Apache-2.0
"""Trains a network on the digits images as a pipeline of one-device programs that differ by stage.

`pipeline.py --schedule 1f1b`: a Python thread for each stage dispatches its tasks in the order of a
schedule (schedules.py); activations and slopes go from stage to stage as messages, matched by part
and microbatch. It compares the losses with those of one device. With `--launcher` one thread hands
them to the launcher, one stage after the other; with `--pace` each task also sleeps for its time,
so that the bubble can be measured on a machine with fewer cores than stages.
"""

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from schedules import SCHEDULES, UNITS, Task, simulate
from sklearn.datasets import load_digits

import jax_dfccl

WIDTH = 64  # pixels of an image, and what goes from part to part
ROWS = 32  # images of a microbatch
RATE = 0.5

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--steps", type=int, default=10)
how = parser.add_mutually_exclusive_group()
how.add_argument("--pace", type=float, default=0.0, help="seconds of a forward task")
how.add_argument("--launcher", action="store_true", help="let the launcher run the tasks")
options = parser.parse_args()
if options.stages < 2:
    parser.error("a pipeline has at least 2 stages")

jax.config.update("jax_num_cpu_devices", options.stages)
devices = jax.devices()[: options.stages]
schedule = SCHEDULES[options.schedule](options.stages, options.microbatches)
parts = 1 + max(task.part for tasks in schedule for task in tasks)
chunks = parts // options.stages


def device_of(part):
    return devices[part % options.stages]


stages = jax_dfccl.Group(devices, name="stages")
SENT = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
sleeps, sleeps_lock = [], threading.Lock()


def send(x, kind, part, to, key):
    """Small enough to wait for nobody: the next stage may be waiting for this one to go on."""
    jax_dfccl.send(x, stages, to % options.stages, name=f"{kind} of {part}", key=key)


def receive(kind, part, key):
    return jax_dfccl.recv(SENT, stages, part % options.stages, name=f"{kind} of {part}", key=key)


def pause(kind, x):
    begin = time.monotonic()
    time.sleep(options.pace * UNITS[kind] / chunks)
    with sleeps_lock:
        sleeps.append((begin, time.monotonic()))
    return x


def paced(kind, x):
    """x, after the time that the task takes."""
    if options.pace == 0:
        return x
    return jax.pure_callback(partial(pause, kind), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def block(weights, x):
    inner, outer = weights
    return x + jnp.tanh(x @ inner) @ outer


def loss_of(y, labels):
    """The mean over all images of the batch: of this microbatch, its share."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(y[:, :10]), labels[:, None], 1)
    return -chosen.mean() / options.microbatches


def forward(part, weights, x, key):
    """Gives the operand and the result, for the backward task."""
    if part > 0:
        x = receive("activations", part - 1, key)
    y = paced("forward", block(weights, x))
    if part < parts - 1:
        send(y, "activations", part, part + 1, key)
    return x, y


def slope_of_result(part, y, labels, key):
    if part < parts - 1:
        return receive("slopes", part + 1, key)
    return jax.grad(loss_of)(y, labels)


def backward(part, weights, total, kept, labels, key):
    x, y = kept
    slope = paced("backward", slope_of_result(part, y, labels, key))
    by_weights, by_x = jax.vjp(block, weights, x)[1](slope)
    if part > 0:
        send(by_x, "slopes", part, part - 1, key)
    return jax.tree.map(jnp.add, total, by_weights)


def for_input(part, weights, kept, labels, key):
    """The first half of `backward`; gives the slope of the result, which the second needs, too."""
    x, y = kept
    slope = paced("input", slope_of_result(part, y, labels, key))
    (by_x,) = jax.vjp(partial(block, weights), x)[1](slope)
    if part > 0:
        send(by_x, "slopes", part, part - 1, key)
    return slope


def for_weights(weights, total, kept, slope):
    x, _ = kept
    (by_weights,) = jax.vjp(lambda w: block(w, x), weights)[1](paced("weights", slope))
    return jax.tree.map(jnp.add, total, by_weights)


# What the launcher runs gives a future, which later tasks take as they take a value.
run = jax_dfccl.dispatch if options.launcher else jax.jit
programs = [
    {
        "forward": run(partial(forward, part)),
        "backward": run(partial(backward, part)),
        "input": run(partial(for_input, part)),
        "weights": run(for_weights),
    }
    for part in range(parts)
]
loss_here = run(lambda kept, labels: loss_of(kept[1], labels))


def value_of(result):
    return result.result() if options.launcher else result


@jax.jit
def update(weights, total):
    return jax.tree.map(lambda w, slope: w - RATE * slope, weights, total)


def step(weights, images, labels, number):
    """One step of all stages: weights and images are on the devices of their parts."""
    totals = [jax.tree.map(jnp.zeros_like, w) for w in weights]
    kept, slopes, losses = {}, {}, []

    def dispatch(task: Task):
        kind, microbatch, part = task
        program, place = partial(programs[part][kind], weights[part]), (microbatch, part)
        key = np.int32(number * options.microbatches + microbatch)
        given = labels[microbatch] if part == parts - 1 else None
        if kind == "forward":
            kept[place] = program(images[microbatch] if part == 0 else None, key)
            if part == parts - 1:
                losses.append(loss_here(kept[place], given))
        elif kind == "backward":
            totals[part] = program(totals[part], kept.pop(place), given, key)
        elif kind == "input":
            slopes[place] = program(kept[place], given, key)
        else:
            totals[part] = program(totals[part], kept.pop(place), slopes.pop(place))

    # XLA runs programs with callbacks inside of the dispatch: each stage has a thread, but for the
    # launcher, which has one for all.
    with ThreadPoolExecutor(1 if options.launcher else options.stages) as threads:
        list(threads.map(lambda tasks: list(map(dispatch, tasks)), schedule))
    totals = list(map(value_of, totals))
    return list(map(update, weights, totals)), float(sum(map(value_of, losses)))


def reference_step(weights, images, labels):
    """The same on one device."""

    def loss(weights):
        total = jnp.float32(0)
        for x, y in zip(images, labels, strict=True):
            for w in weights:
                x = block(w, x)
            total += loss_of(x, y)
        return total

    value, slopes = jax.value_and_grad(loss)(weights)
    return update(weights, slopes), value


def main():
    random = np.random.default_rng(0)
    shape = (parts, 2, WIDTH, WIDTH)
    first = [tuple(w) for w in (0.05 * random.standard_normal(shape)).astype(np.float32)]
    data = load_digits()
    pixels = (data.data / 16).astype(np.float32)
    rows = options.microbatches * ROWS

    units, bubble = simulate(schedule)
    print(f"{options.schedule}: {options.stages} stages, {parts} parts, on paper {units:g} units")
    weights = [jax.device_put(w, device_of(part)) for part, w in enumerate(first)]
    right = jax.device_put(first, devices[0])
    measured = []
    for number in range(options.steps):
        chosen = np.arange(number * rows, (number + 1) * rows) % len(pixels)
        images = np.split(pixels[chosen], options.microbatches)
        labels = np.split(data.target[chosen].astype(np.int32), options.microbatches)
        sleeps.clear()
        weights, loss = step(
            weights,
            jax.device_put(images, device_of(0)),
            jax.device_put(labels, device_of(parts - 1)),
            number,
        )
        jax.block_until_ready(weights)
        right, expected = jax.jit(reference_step)(right, images, labels)
        print(f"step {number}: loss {loss:.6f}, of one device {expected:.6f}", flush=True)
        assert abs(loss - expected) < 1e-4, "the losses differ"
        if sleeps and number > 0:  # in the first one programs are compiled
            wall = max(end for _, end in sleeps) - min(begin for begin, _ in sleeps)
            busy = sum(end - begin for begin, end in sleeps)
            measured.append(1 - busy / (options.stages * wall))
    for here, there in zip(jax.tree.leaves(weights), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)
    if measured:
        print(f"bubble {np.median(measured):.3f} measured, {bubble:.3f} in theory")
    print("weights are those of one device")


main()
