"""Training with JAX: a decoder of text, and a network that solves the heat equation."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_VOCABULARY = 8192
_HEADS = 12
Parameters = dict[str, Any]


def sees_gpu() -> bool:
    return jax.default_backend() == "gpu"


def peak_mb() -> float:
    figures = jax.local_devices()[0].memory_stats() or {}
    return float(figures.get("peak_bytes_in_use", 0)) / 2**20


def decoder(size: Mapping[str, int]) -> Iterator[bytes]:
    random = np.random.default_rng(size["seed"])
    parameters = _decoder_parameters(random, size["width"], size["layers"], size["tokens"])
    heads = _HEADS if size["width"] % _HEADS == 0 else 1

    def batches() -> Iterator[jax.Array]:
        while True:
            yield jnp.asarray(_text(random, size["batch"], size["tokens"] + 1))

    return _train(parameters, partial(_decoder_loss, heads=heads), batches(), size["steps"])


def _text(random: np.random.Generator, count: int, length: int) -> np.ndarray[Any, Any]:
    """Return random texts, in which a token depends on the one before it."""
    text = np.empty((count, length), dtype=np.int32)
    text[:, 0] = random.integers(0, _VOCABULARY, count)
    for place in range(1, length):
        text[:, place] = (text[:, place - 1] * 5 + random.integers(0, 7, count)) % _VOCABULARY
    return text


def _decoder_parameters(random: np.random.Generator, width: int, layers: int, tokens: int) -> Parameters:
    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(0, 0.02, shape).astype(np.float32))

    return {
        "embedding": matrix(_VOCABULARY, width),
        "places": matrix(tokens, width),
        "layers": {
            "attention": matrix(layers, width, 3 * width),
            "mixed": matrix(layers, width, width),
            "wide": matrix(layers, width, 4 * width),
            "narrow": matrix(layers, 4 * width, width),
        },
    }


def _decoder_loss(parameters: Parameters, text: jax.Array, heads: int) -> jax.Array:
    inputs, wanted = text[:, :-1], text[:, 1:]
    embedding = parameters["embedding"].astype(jnp.bfloat16)
    # A product instead of a look-up, whose gradient would be a scatter.
    hidden = jax.nn.one_hot(inputs, _VOCABULARY, dtype=jnp.bfloat16) @ embedding
    hidden = hidden + parameters["places"].astype(jnp.bfloat16)
    hidden, _ = jax.lax.scan(partial(_layer, heads=heads), hidden, parameters["layers"])
    scores = jax.nn.log_softmax((_normal(hidden) @ embedding.T).astype(jnp.float32))
    return -jnp.mean(jnp.sum(scores * jax.nn.one_hot(wanted, _VOCABULARY), axis=-1))


def _layer(hidden: jax.Array, weights: Parameters, heads: int) -> tuple[jax.Array, None]:
    weights = {name: value.astype(jnp.bfloat16) for name, value in weights.items()}
    batch, tokens, width = hidden.shape
    split = (_normal(hidden) @ weights["attention"]).reshape(batch, tokens, 3, heads, width // heads)
    query, key, value = jnp.moveaxis(split, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), dtype=bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(jnp.bfloat16), value)
    hidden = hidden + mixed.reshape(batch, tokens, width) @ weights["mixed"]
    return hidden + jax.nn.gelu(_normal(hidden) @ weights["wide"]) @ weights["narrow"], None


def _normal(hidden: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(hidden.dtype)


def heat(size: Mapping[str, int]) -> Iterator[bytes]:
    """Train a network u(x, t) so that its derivatives satisfy the heat equation."""
    random = np.random.default_rng(size["seed"])
    widths = [2, *[size["width"]] * size["layers"], 1]
    parameters = {
        str(n): {
            "weight": jnp.asarray(random.normal(0, before**-0.5, (before, after)).astype(np.float32)),
            "bias": jnp.zeros(after),
        }
        for n, (before, after) in enumerate(itertools.pairwise(widths))
    }

    def batches() -> Iterator[jax.Array]:
        while True:
            yield jnp.asarray(random.random((size["points"], 2), dtype=np.float32))

    return _train(parameters, _heat_loss, batches(), size["steps"])


def _heat(parameters: Parameters, point: jax.Array) -> jax.Array:
    hidden = point
    for n in range(len(parameters)):
        hidden = hidden @ parameters[str(n)]["weight"] + parameters[str(n)]["bias"]
        hidden = jnp.tanh(hidden) if n < len(parameters) - 1 else hidden
    return hidden[0]


def _heat_loss(parameters: Parameters, points: jax.Array) -> jax.Array:
    def error(point: jax.Array) -> jax.Array:
        slope = jax.grad(_heat, argnums=1)
        along = jnp.array([1.0, 0.0])
        _, bend = jax.jvp(lambda at: slope(parameters, at)[0], (point,), (along,))
        start = _heat(parameters, point * along) - jnp.sin(jnp.pi * point[0])
        return (slope(parameters, point)[1] - bend) ** 2 + start**2

    return jnp.mean(jax.vmap(error)(points))


def _train(
    parameters: Parameters,
    loss: Callable[[Parameters, jax.Array], jax.Array],
    batches: Iterator[jax.Array],
    steps: int,
) -> Iterator[bytes]:
    """Train with Adam."""

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(now: Parameters, mean: Parameters, square: Parameters, batch: jax.Array, number: jax.Array) -> Any:
        value, slope = jax.value_and_grad(loss)(now, batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, slope)
        rate = 1e-3 * jnp.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        now = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), now, mean, square)
        return now, mean, square, value

    mean, square = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
    for number in range(steps):
        parameters, mean, square, value = step(parameters, mean, square, next(batches), jnp.float32(number + 1))
        if number % 10 == 0:
            print(f"step {number}: loss {float(value):.4f}", flush=True)
    return (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parameters))
