# SPDX-License-Identifier: Apache-2.0
"""Trains layers of experts on the digits images, on 8 devices: data x experts.

Every device has images of its own, and some of the experts of each layer. A layer sends each image
to the device that has its expert, and fetches the result (`all_to_all` along "experts"). On the way
back, a layer's exchanges are under way together with the sums of the gradients of the experts, over
the devices that have the same ones (`all_reduce` along "data"). Both are started where they become
known, in the same order everywhere, or, shuffled, in an order of each device's own. Losses are
compared with those of one device that asks all experts, and ordered with shuffled runs.

    jax-dfccl launch -n 4 --devices-per-process 2 examples/experts.py --distributed

does the same in four processes.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import meshes
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import say
from sklearn.datasets import load_digits

import jax_dfccl

WIDTH = 64  # pixels of an image
HIDDEN = 96
CLASSES = 10
EXPERTS = 8  # of a layer
ROWS = 16  # images of a device in a step
RATE = 0.5
AXES = ("data", "experts")

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--distributed", action="store_true", help="in a job of several processes")
options = parser.parse_args()
meshes.begin(options.distributed)
mesh = meshes.make_mesh(data=2, experts=4)
layers = range(options.layers)
# Of each layer: what chooses, which all have, and the experts.
specs = [{"router": P(), "experts": P("experts")}] * options.layers


def initial():
    random = np.random.default_rng(0)

    def normal(*shape):
        return (random.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)

    experts = [(normal(EXPERTS, WIDTH, HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)) for _ in layers]
    return [{"router": normal(WIDTH, EXPERTS), "experts": pair} for pair in experts]


# --- the pieces of a layer, between its exchanges ------------------------------------------------


def choose(router, x):
    """Each row's expert and its weight."""
    scores = jax.nn.softmax(x @ router)
    chosen = jnp.argmax(scores, -1)
    return chosen, jnp.take_along_axis(scores, chosen[:, None], -1)


def pack(router, x):
    """Rows in boxes, one for each expert; where each row is; weights of the results."""
    chosen, weight = choose(router, x)
    ones = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(ones, 0) * ones).sum(-1) - 1
    boxes = jnp.zeros((EXPERTS, *x.shape)).at[chosen, place].set(x)
    return (boxes, weight), (chosen, place)


def ask(experts, boxes):
    inner, outer = experts
    return jnp.einsum("erh,ehw->erw", jnp.tanh(jnp.einsum("erw,ewh->erh", boxes, inner)), outer)


def unpack(where, x, weight, boxes):
    return x + weight * boxes[where]


def loss_of(x, labels):
    """The sum over some of all images, divided by the number of all."""
    found = jax.nn.log_softmax(x[:, :CLASSES])
    return -jnp.take_along_axis(found, labels[:, None], 1).sum() / (ROWS * mesh.size)


# --- a step, by hand, so that everything is started where it is known ----------------------------


def there(boxes, name):
    """Starts to send each expert's box to the device that has it, which gets one from everyone."""
    return exchange(boxes, 0, 1, name)


def back(boxes, name):
    """Starts the other way."""
    return exchange(boxes, 1, 0, name)


def exchange(boxes, split, concat, name):
    return jax_dfccl.start(
        jax_dfccl.all_to_all, boxes, "experts", split, concat, tiled=True, name=name, priority=1
    )


def add_up(slopes, axes, name):
    return jax_dfccl.start(jax_dfccl.all_reduce, slopes, axes, name=name)


def both(other_first, one, other):
    """Starts two collectives that do not need each other, in either order."""
    return lax.cond(other_first, lambda: (one(), other()), lambda: (other(), one())[::-1])


def gradients(weights, x, labels, other_first):
    """This device's share of the loss, and handles of the sums of all gradients."""
    ways = []
    for number, layer in enumerate(weights):
        (boxes, weight), pack_back, where = jax.vjp(pack, layer["router"], x, has_aux=True)
        asked = jax_dfccl.wait(there(boxes, f"rows {number}"))
        results, ask_back = jax.vjp(ask, layer["experts"], asked)
        results = jax_dfccl.wait(back(results, f"results {number}"))
        x, unpack_back = jax.vjp(partial(unpack, where), x, weight, results)
        ways.append((pack_back, ask_back, unpack_back))

    loss, slope = jax.value_and_grad(loss_of)(x, labels)
    sums = [{} for _ in weights]
    for number in reversed(layers):
        pack_back, ask_back, unpack_back = ways[number]
        slope, by_weight, by_results = unpack_back(slope)
        by_results = jax_dfccl.wait(there(by_results, f"slopes of results {number}"))
        by_experts, by_boxes = ask_back(by_results)
        sums[number]["experts"], handle = both(
            other_first[number],
            partial(add_up, by_experts, "data", f"experts {number}"),
            partial(back, by_boxes, f"slopes of rows {number}"),
        )
        by_router, more = pack_back((jax_dfccl.wait(handle), by_weight))
        slope = slope + more
        sums[number]["router"] = add_up(by_router, AXES, f"router {number}")
    return loss, sums


def step(weights, x, labels, other_first):
    loss, sums = gradients(weights, x, labels, other_first[0])
    slopes = jax.tree.map(
        jax_dfccl.wait, sums, is_leaf=lambda handle: isinstance(handle, jax_dfccl.Handle)
    )
    weights = jax.tree.map(lambda w, slope: w - RATE * slope, weights, slopes)
    return weights, jax_dfccl.all_reduce(loss, AXES)


def step_of_one_device(weights, x, labels):
    """Asks all experts for all rows."""

    def loss(weights, x):
        for layer in weights:
            chosen, weight = choose(layer["router"], x)
            inner, outer = layer["experts"]
            hidden = jnp.tanh(jnp.einsum("rw,ewh->reh", x, inner))
            results = jnp.einsum("reh,ehw->rew", hidden, outer)
            x = x + weight * jnp.take_along_axis(results, chosen[:, None, None], 1)[:, 0]
        return loss_of(x, labels)

    value, slopes = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, slope: w - RATE * slope, weights, slopes), value


# --- training ------------------------------------------------------------------------------------


def trained(step, where):
    """The losses, and the weights in the end."""
    data = load_digits()
    weights = where(initial(), specs)
    losses = []
    for number in range(options.steps):
        chosen = (np.arange(ROWS * mesh.size) + number * ROWS * mesh.size) % len(data.data)
        x = where((data.data[chosen] / 16).astype(np.float32), P(AXES))
        labels = where(data.target[chosen].astype(np.int32), P(AXES))
        weights, loss = step(weights, x, labels, number)
        losses.append(np.asarray(loss.addressable_data(0)))
    return np.array(losses), weights


def on_mesh(tree, spec):
    return meshes.put(mesh, tree, spec)


def on_one_device(tree, _):
    return jax.device_put(tree, jax.local_devices()[0])


def main():
    say(f"{options.layers} layers of {EXPERTS} experts, {jax.process_count()} processes")
    alone = jax.jit(step_of_one_device)
    right, _ = trained(lambda weights, x, labels, _: alone(weights, x, labels), on_one_device)
    say("one device:", *(f"{loss:.5f}" for loss in right))
    assert right[-1] < right[0]

    spread = P(AXES)
    whole = jax.jit(meshes.mapped(step, mesh, (specs, spread, spread, spread), (specs, P())))
    bits = []
    for shuffled in (False, True):

        def ordered(weights, x, labels, number, shuffled=shuffled):
            random = np.random.default_rng(number)
            other_first = shuffled & (random.random((mesh.size, options.layers)) < 0.5)
            return whole(weights, x, labels, on_mesh(other_first, spread))

        losses, weights = trained(ordered, on_mesh)
        say("  shuffled:" if shuffled else "   ordered:", *(f"{loss:.5f}" for loss in losses))
        np.testing.assert_allclose(losses, right, rtol=1e-4)
        bits.append(meshes.bits_of(weights))
    assert bits[0] == bits[1], "the order makes a difference"
    say("losses are those of one device, and no bit depends on the order")


main()
