# SPDX-License-Identifier: Apache-2.0
"""A small decoder of text, for devices that share out the batch, the layers and each layer.

The weights are a dict of buckets, whose gradients are added up together: "tokens", which all
devices have, and "block 0", ...: each stage of the pipeline has one of each, split over the devices
of the axis "model". A device's loss is its share: the sum over all devices is the mean over the
batch. So the gradient of a weight is the sum of the gradients of its copies.
"""

from functools import partial
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import jax_dfccl

AXES = ("data", "stage", "model")
SYMBOLS = 128
RATE = 3e-3
# Others wait for what goes from stage to stage and from layer to layer.
URGENT = 1

Weights = dict[str, dict[str, Any]]


class Sizes(NamedTuple):
    """What a model and a step are made of."""

    width: int = 32
    heads: int = 4
    hidden: int = 64
    blocks: int = 2  # of a stage
    length: int = 32
    rows: int = 2  # of a microbatch, on each device along "data"
    microbatches: int = 2


def add_sizes(parser):
    """An option for each size."""
    for name, default in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=default)


def sizes_of(options):
    return Sizes(*(getattr(options, name) for name in Sizes._fields))


# --- text -----------------------------------------------------------------------------------------


def text() -> np.ndarray:
    """Python's own help topics, as ASCII."""
    return np.frombuffer("\n\n".join(topics.values()).encode("ascii", "replace"), np.uint8)


def batch(sizes: Sizes, data: int, number: int) -> np.ndarray:
    """Random pieces of the text: microbatches, rows of all devices, symbols and the one after."""
    symbols = text()
    shape = (sizes.microbatches, data * sizes.rows, 1)
    random = np.random.default_rng([5, number])
    begins = random.integers(len(symbols) - sizes.length, size=shape)
    return symbols[begins + np.arange(sizes.length + 1)].astype(np.int32)


# --- the model ------------------------------------------------------------------------------------


def initial(sizes: Sizes, stages: int) -> Weights:
    """Weights of all stages, equal in every process."""
    random = np.random.default_rng(1)
    part = sizes.width // sizes.heads

    def normal(*shape, fan_in=sizes.width):
        return (random.standard_normal(shape) / fan_in**0.5).astype(np.float32)

    weights = {
        f"block {number}": {
            "attend": normal(stages, sizes.width, 3, sizes.heads, part),
            "merge": normal(stages, sizes.heads, part, sizes.width),
            "widen": normal(stages, sizes.width, sizes.hidden),
            "narrow": normal(stages, sizes.hidden, sizes.width, fan_in=sizes.hidden),
        }
        for number in range(sizes.blocks)
    }
    tokens = {
        "symbols": normal(SYMBOLS, sizes.width),
        "places": 0.1 * normal(sizes.length, sizes.width),
    }
    return {"tokens": tokens, **weights}


BLOCK_SPECS = {
    "attend": P("stage", None, None, "model"),
    "merge": P("stage", "model"),
    "widen": P("stage", None, "model"),
    "narrow": P("stage", "model"),
}


def specs(weights: Weights) -> dict[str, Any]:
    """How each bucket is split over the devices."""
    return {name: P() if name == "tokens" else BLOCK_SPECS for name in weights}


def copies(name: str) -> tuple[str, ...]:
    """The axes along which devices have copies of a bucket."""
    return AXES if name == "tokens" else ("data",)


def normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(w, x, total):
    """`total` adds up over the devices that have some of the heads and of the hidden units each."""
    query, key, value = jnp.einsum("btw,wchp->cbhtp", normed(x), w["attend"])
    length = x.shape[1]
    scores = jnp.einsum("bhtp,bhsp->bhts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    seen = jnp.einsum("bhts,bhsp->bhtp", jax.nn.softmax(scores), value)
    x = x + total(jnp.einsum("bhtp,hpw->btw", seen, w["merge"]))
    return x + total(jax.nn.gelu(normed(x) @ w["widen"]) @ w["narrow"])


def embedded(tokens, symbols):
    return tokens["symbols"][symbols] + tokens["places"]


def cross_entropy(tokens, x, symbols):
    """The mean over rows and places."""
    scores = jax.nn.log_softmax(normed(x) @ tokens["symbols"].T)
    return -jnp.take_along_axis(scores, symbols[..., None], -1).mean()


def stage_of(weights: Weights, number: int) -> list[dict[str, Any]]:
    """The blocks of one stage."""
    blocks = [bucket for name, bucket in weights.items() if name != "tokens"]
    return [jax.tree.map(lambda w: w[number], bucket) for bucket in blocks]


def loss_of(weights: Weights, symbols):
    """The loss on one device that has everything."""
    total = jnp.float32(0)
    stages = weights["block 0"]["merge"].shape[0]
    for rows in symbols:
        x = embedded(weights["tokens"], rows[:, :-1])
        for stage in range(stages):
            for w in stage_of(weights, stage):
                x = block(w, x, lambda y: y)
        total += cross_entropy(weights["tokens"], x, rows[:, 1:])
    return total / len(symbols)


def loss_here(weights: Weights, symbols):
    """A device's share of the loss, in the manual code of a mesh with `AXES`.

    In each round every stage takes what the one before has sent; the first and the last rounds have
    nothing for some of them, which then compute what nobody uses.
    """
    data, stages, model = map(lax.axis_size, AXES)
    stage, last = lax.axis_index("stage"), stages - 1
    total = partial(jax_dfccl.all_reduce, axis_name="model", priority=URGENT)
    onwards = [(s, s + 1) for s in range(last)]
    blocks, tokens = stage_of(weights, 0), weights["tokens"]
    loss, received = jnp.float32(0), None
    rounds = len(symbols) + last
    for number in range(rounds):
        x = embedded(tokens, symbols[min(number, len(symbols) - 1), :, :-1])
        if received is not None:
            x = jnp.where(stage == 0, x, received)
        for w in blocks:
            x = block(w, x, total)
        if number >= last:
            loss += cross_entropy(tokens, x, symbols[number - last, :, 1:])
        if last > 0 and number < rounds - 1:
            received = jax_dfccl.ppermute(x, "stage", onwards, priority=URGENT)
    return jnp.where(stage == last, loss, 0) / (len(symbols) * data * model)


# --- one step -------------------------------------------------------------------------------------


def gradients(weights: Weights, symbols):
    """The share of the loss and each bucket's gradients, those of the last blocks first."""
    loss, slopes = jax.value_and_grad(loss_here)(weights, symbols)
    return loss, {name: slopes[name] for name in reversed(weights)}


def summed(name: str, slopes):
    """A bucket's gradients, summed over the copies in one piece."""
    vector, unravel = ravel_pytree(slopes)
    return unravel(jax_dfccl.all_reduce(vector, copies(name), name=f"gradients of {name}"))


def adam(weights, moments, slopes, number):
    """One bucket's weights and moments after step `number`."""
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, slopes)
    a, b = 1 - 0.9 ** (number + 1.0), 1 - 0.99 ** (number + 1.0)

    def moved(w, m, s):
        return w - RATE * (m / a) / (jnp.sqrt(s / b) + 1e-8)

    return jax.tree.map(moved, weights, first, second), (first, second)


def no_moments(weights: Weights) -> dict[str, Any]:
    return {name: (jax.tree.map(np.zeros_like, w),) * 2 for name, w in weights.items()}


def updated(weights: Weights, moments, slopes, number):
    pairs = [adam(weights[name], moments[name], slopes[name], number) for name in weights]
    return tuple(dict(zip(weights, parts, strict=True)) for parts in zip(*pairs, strict=True))


def step(weights: Weights, moments, symbols, number):
    """One step of all devices, in the manual code of the mesh."""
    loss, slopes = gradients(weights, symbols)
    slopes = {name: summed(name, slope) for name, slope in slopes.items()}
    return *updated(weights, moments, slopes, number), jax_dfccl.all_reduce(loss, AXES)


def step_of_one_device(weights: Weights, moments, symbols, number):
    loss, slopes = jax.value_and_grad(loss_of)(weights, symbols)
    return *updated(weights, moments, slopes, number), loss
