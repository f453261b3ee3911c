# SPDX-License-Identifier: Apache-2.0
"""Trains the decoder (decoder.py) while a second thread evaluates it and writes checkpoints.

Both threads dispatch programs with collectives on the same 8 devices through the launcher, and
neither waits for the other: the steps are dispatched one after the other, each with the future of
the one before. With plain calls processes that disagree about the order would wait for ever. The
losses are compared with those of a run without the second thread, each file with the weights that
it was written from, and a run that begins at a file with the one that wrote it.

    jax-dfccl launch -n 4 --devices-per-process 2 examples/background.py --distributed

does the same in four processes.
"""

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import decoder
import jax
import meshes
import numpy as np
from decoder import AXES
from jax.sharding import PartitionSpec as P
from meshes import say

import jax_dfccl

BATCH = P(None, "data")
HELD_OUT = 10**6  # no step has this batch

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--every", type=int, default=3, help="steps from checkpoint to checkpoint")
parser.add_argument("--distributed", action="store_true", help="in a job of several processes")
decoder.add_sizes(parser)
options = parser.parse_args()
meshes.begin(options.distributed)
sizes = decoder.sizes_of(options)
mesh = meshes.make_mesh(data=2, stage=2, model=2)
first = decoder.initial(sizes, mesh.shape["stage"])
specs = decoder.specs(first)
# What a step changes, and its loss.
state_specs = (specs, {name: (spec, spec) for name, spec in specs.items()}, P())


def batch(number):
    return meshes.put(mesh, decoder.batch(sizes, mesh.shape["data"], number), BATCH)


def on_mesh(state):
    return meshes.put(mesh, state, state_specs)


@jax.jit
def step(state, symbols, number):
    inner = meshes.mapped(decoder.step, mesh, (*state_specs[:2], BATCH, P()), state_specs)
    return inner(*state[:2], symbols, number)


@jax.jit
def evaluate(state, symbols):
    def loss(weights, symbols):
        return jax_dfccl.all_reduce(decoder.loss_here(weights, symbols), AXES)

    return meshes.mapped(loss, mesh, (specs, BATCH), P())(state[0], symbols)


@jax.jit
def gather(state):
    """The state with every array whole on every device."""

    def whole(x, spec):
        for dimension, axis in enumerate(spec):
            if axis is not None:
                x = jax_dfccl.all_gather(x, axis, axis=dimension, tiled=True)
        return x

    def all_whole(state):
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda x: whole(x, spec), part),
            state_specs,
            state,
            is_leaf=lambda spec: isinstance(spec, P),
        )

    return meshes.mapped(all_whole, mesh, (state_specs,), P())(state)


def train(state, steps, look=lambda number, state: None):
    """Dispatches all steps; gives the last state and all losses."""
    dispatch = jax_dfccl.dispatch(step, priority=1)
    states = []
    for number in steps:
        state = dispatch(state, batch(number), np.float32(number))
        states.append(state)
        look(number, state)
    losses = [np.asarray(state.result()[2].addressable_data(0)) for state in states]
    return state.result(), np.array(losses)


evaluate_anytime, gather_anytime = map(jax_dfccl.dispatch, (evaluate, gather))


def whole_of(state):
    return [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state)]


def check(number, state, folder):
    """The second thread's work: the loss on other text, and a file."""
    loss = evaluate_anytime(state, batch(HELD_OUT))
    arrays = whole_of(gather_anytime(state).result())
    path = folder / f"after_{number}.npz"
    if jax.process_index() == 0:
        np.savez(path, *arrays)
        with np.load(path) as file:
            for name, array in zip(file.files, arrays, strict=True):
                np.testing.assert_array_equal(file[name], array)
    return float(loss.result().addressable_data(0)), arrays


def main():
    start = on_mesh((first, decoder.no_moments(first), np.float32(0)))
    alone, right = train(start, range(options.steps))
    say("alone:      ", *(f"{loss:.5f}" for loss in right))
    assert right[-1] < right[0]

    checks = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:

        def look(number, state):
            if (number + 1) % options.every == 0 and number + 1 < options.steps:
                checks[number] = thread.submit(check, number, state, Path(folder))

        state, losses = train(start, range(options.steps), look)
        found = {number: task.result() for number, task in checks.items()}
        say("with checks:", *(f"{loss:.5f}" for loss in losses))
        assert losses.tobytes() == right.tobytes()
        assert meshes.bits_of(state) == meshes.bits_of(alone)

    weights_and_moments = jax.tree.structure(start)
    for number, (loss, arrays) in found.items():
        say(f"after step {number}: {loss:.5f} on other text")
        again = on_mesh(jax.tree.unflatten(weights_and_moments, arrays))
        final, _ = train(again, range(number + 1, options.steps))
        assert meshes.bits_of(final[:2]) == meshes.bits_of(state[:2])
    say("the second thread changed nothing, and runs from its files end with the same weights")


main()
