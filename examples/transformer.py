# SPDX-License-Identifier: Apache-2.0
"""Trains a small decoder (decoder.py) on text, on 8 devices: data x stages x parts of each layer.

A step has several forms:

    plain     one jitted program
    launcher  the same function, run by the launcher
    handles   a program that starts to add up the gradients, bucket by bucket as they are known, and
              one for each bucket, which waits for its sum and changes its weights
    programs  the launcher runs a program for the gradients, and one for each bucket

The last two are also run shuffled: every device starts the buckets, and every process dispatches
the programs, in an order of its own, another one in each step. All losses are compared with those
of one device.

    jax-dfccl launch -n 4 --devices-per-process 2 examples/transformer.py --distributed

does the same in four processes. With --measure it compares the times of the first two.
"""

import argparse
import time
from functools import partial

import decoder
import jax
import meshes
import numpy as np
from decoder import AXES
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from meshes import say

import jax_dfccl

ORDERS = 8
BATCH = P(None, "data")

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--forms", nargs="+", default=["plain", "launcher", "handles", "programs"])
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--cut-local", action="store_true", help="see jax_dfccl.dispatch")
parser.add_argument("--distributed", action="store_true", help="in a job of several processes")
parser.add_argument("--measure", type=int, default=0, metavar="STEPS")
decoder.add_sizes(parser)
options = parser.parse_args()

meshes.begin(options.distributed)
sizes = decoder.sizes_of(options)
mesh = meshes.make_mesh(data=2, stage=2, model=2)
first = decoder.initial(sizes, mesh.shape["stage"])
no_moments = decoder.no_moments(first)
names = list(first)
specs = decoder.specs(first)
moments_specs = {name: (spec, spec) for name, spec in specs.items()}
# Each device's own, in a bucket of its own.
EACH = P(AXES)
eachs = dict.fromkeys(names, EACH)


def mapped(function, in_specs, out_specs):
    return meshes.mapped(function, mesh, in_specs, out_specs)


def on_mesh(tree, spec):
    return meshes.put(mesh, tree, spec)


# --- the same step as one program and by the launcher --------------------------------------------

whole = mapped(decoder.step, (specs, moments_specs, BATCH, P()), (specs, moments_specs, P()))
plain = jax.jit(whole)
dispatch = partial(jax_dfccl.dispatch, cut_local=options.cut_local)
dispatched = dispatch(whole)


def launcher(*arguments):
    return dispatched(*arguments).result()


# --- as a program for the gradients, and one for each bucket -------------------------------------


def gradients(weights, symbols):
    """This device's, as a vector for each bucket, and the loss."""
    loss, slopes = decoder.gradients(weights, symbols)
    found = {name: ravel_pytree(slope)[0] for name, slope in slopes.items()}
    return found, jax_dfccl.all_reduce(loss, AXES)


def start(name, vector):
    return jax_dfccl.start(
        jax_dfccl.all_reduce, vector, decoder.copies(name), name=f"gradients of {name}"
    )


def start_all(shuffle, weights, symbols, order):
    """Starts to add up each bucket when it is known, or, shuffled, all at the end."""

    def in_order(listed):
        return lambda found: {name: start(name, found[name]) for name in listed}

    found, loss = gradients(weights, symbols)
    if not shuffle:
        return in_order(names)(found), loss
    branches = [in_order(np.random.default_rng(k).permutation(names)) for k in range(ORDERS)]
    return lax.switch(order[0], branches, found), loss


def change(name, total_of):
    """A program that changes a bucket with the sum that it gets."""

    def changed(given, weights, moments, number):
        _, unravel = ravel_pytree(weights)
        return decoder.adam(weights, moments, unravel(total_of(given)), number)

    changed.__name__ = f"change_{name.replace(' ', '_')}"
    of_bucket = specs[name], moments_specs[name]
    return mapped(changed, (EACH, *of_bucket, P()), of_bucket)


def change_all(programs, shuffle, given, weights, moments, number):
    """Calls the programs of all buckets, shuffled in an order of this process's own."""
    random = np.random.default_rng([jax.process_index(), int(number)])
    return {
        name: programs[name](given[name], weights[name], moments[name], number)
        for name in (random.permutation(names).tolist() if shuffle else names)
    }


def unzipped(changed):
    return tuple({name: changed[name][part] for name in names} for part in (0, 1))


starting = {
    shuffle: jax.jit(mapped(partial(start_all, shuffle), (specs, BATCH, EACH), (eachs, P())))
    for shuffle in (False, True)
}
waiting = {name: jax.jit(change(name, jax_dfccl.wait)) for name in names}


def handles(weights, moments, symbols, number, *, shuffle=False):
    order = on_mesh((3 * np.arange(mesh.size) + int(number)) % ORDERS, EACH)
    started, loss = starting[shuffle](weights, symbols, order)
    return *unzipped(change_all(waiting, shuffle, started, weights, moments, number)), loss


def add_up(name):
    return lambda vector: jax_dfccl.all_reduce(vector, decoder.copies(name))


finding = dispatch(mapped(gradients, (specs, BATCH), (eachs, P())))
adding = {name: dispatch(change(name, add_up(name))) for name in names}


def programs(weights, moments, symbols, number, *, shuffle=False):
    found, loss = finding(weights, symbols).result()
    futures = change_all(adding, shuffle, found, weights, moments, number)
    return *unzipped({name: future.result() for name, future in futures.items()}), loss


FORMS = {
    "plain": plain,
    "launcher": launcher,
    "handles": handles,
    "handles, shuffled": partial(handles, shuffle=True),
    "programs": programs,
    "programs, shuffled": partial(programs, shuffle=True),
}


# --- training ------------------------------------------------------------------------------------


def trained(step, where):
    """The losses and, in bits, the weights in the end."""
    weights, moments = where(first, specs), where(no_moments, moments_specs)
    losses = []
    for number in range(options.steps):
        symbols = where(decoder.batch(sizes, mesh.shape["data"], number), BATCH)
        weights, moments, loss = step(weights, moments, symbols, np.float32(number))
        losses.append(np.asarray(loss.addressable_data(0)))
    return np.array(losses), meshes.bits_of(weights)


def on_one_device(tree, spec):
    return jax.device_put(tree, jax.local_devices()[0])


def measure(steps):
    """What a step takes, in turn plain and by the launcher, and what its dispatch costs."""
    forms = {"plain": plain, "launcher": launcher}
    arguments = (
        on_mesh(first, specs),
        on_mesh(no_moments, moments_specs),
        on_mesh(decoder.batch(sizes, mesh.shape["data"], 0), BATCH),
    )
    times = {name: [] for name in forms}
    for number in range(steps + 1):
        for name in forms if number % 2 else reversed(forms):
            begin = time.perf_counter()
            jax.block_until_ready(forms[name](*arguments, np.float32(1)))
            times[name].append(time.perf_counter() - begin)
    whole, pieces = (1e3 * np.median(times[name][1:]) for name in forms)  # the first may compile
    say(f"a step takes {whole:.1f} ms, {pieces:.1f} ms by the launcher: {pieces / whole:.3f}")
    for cost in (cost for cost in jax_dfccl.launcher().costs() if cost.dispatches > steps):
        each = 1e3 * cost.seconds / (cost.dispatches - 1)
        say(f"piece {cost.segment} of {cost.program}: {each:.2f} ms to dispatch")


def main():
    count = sum(w.size for w in jax.tree.leaves(first))
    say(f"{count} weights, {jax.process_count()} processes, {sizes}")
    right, _ = trained(jax.jit(decoder.step_of_one_device), on_one_device)
    say(f"{'one device':>18}:", *(f"{loss:.5f}" for loss in right))
    assert right[-1] < right[0]
    bits = {}
    for name, step in FORMS.items():
        if name.partition(",")[0] not in options.forms:
            continue
        losses, bits[name] = trained(step, on_mesh)
        say(f"{name:>18}:", *(f"{loss:.5f}" for loss in losses))
        np.testing.assert_allclose(losses, right, rtol=1e-4)
    for name in bits:
        ordered = name.partition(",")[0]
        assert bits[name] == bits[ordered], f"{ordered}: the order makes a difference"
    say("losses are those of one device, and no bit depends on the order")
    if options.measure:
        measure(options.measure)


main()
