"""Steps of training adapters of a whole model of random weights, in a process of `benchmarks/training.py`.

    python benchmarks/training_model.py '{"model": "gpt-oss-20b", "rank": 16, "dtype": "float32", "length": 4096}'

Prints a line of JSON when the step is compiled, then, once a line came on stdin, one of its time and memory. A step is
what a user of `jmx.models` writes: one jitted function of the adapters, the state of Adam, the frozen model and the
tokens. Layers are computed again in the backward pass (`remat`), and so are logits, of 1024 tokens at a time.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes may share the card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from jmx.lora import LoRA
from jmx.models import Model, from_source, random_source
from jmx.models.families import published

CHUNK = 1024  # tokens whose logits are in memory at a time
STEPS = 3  # timed, after one that is not


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained: adapters of `rank` and `dtype` on all experts of `model`, by `batch` rows of `length` tokens.

    `sizes`: values that replace those of the model's config.
    """

    model: str
    rank: int = 16
    dtype: str = "float32"
    batch: int = 1
    length: int = 4096
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)


def adapted_model(settings: Settings) -> Model:
    """The model with its adapters, in the layout of this machine."""
    whole: Any = published()[settings.model]  # a dataclass, in every family
    config = dataclasses.replace(whole, **settings.sizes)
    model = from_source(random_source(config))
    lora = LoRA(settings.rank, 2 * settings.rank, dtype=jnp.dtype(settings.dtype))
    for number, layer in enumerate(model.layers):
        layer.moe.adapt(lora.random(jax.random.key(number), layer.moe.experts))
    return model


def mean_loss(model: Model, windows: jax.Array) -> jax.Array:
    """Cross-entropy in nats of each token of windows (B, T + 1) after the first, the mean."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    x, _ = model(inputs, None, model.empty_cache(*inputs.shape).layers, remat=True)

    @jax.checkpoint
    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = chunk
        return optax.softmax_cross_entropy_with_integer_labels(model.logits(x), targets).sum()

    chunks = jax.tree.map(lambda a: a.reshape(-1, min(CHUNK, targets.size), *a.shape[2:]), (x, targets))
    return lax.map(of_chunk, chunks).sum() / targets.size


def step(
    graphdef: Any, optimizer: optax.GradientTransformation, adapters: Any, state: Any, frozen: Any, windows: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """New adapters, the optimizer's new state, and the loss before."""
    loss, gradients = jax.value_and_grad(lambda its: mean_loss(nnx.merge(graphdef, its, frozen), windows))(adapters)
    updates, state = optimizer.update(gradients, state, adapters)
    return optax.apply_updates(adapters, updates), state, loss


def compile_step(settings: Settings) -> tuple[Any, Any]:
    """The compiled step, and a function of no arguments that makes those of its first call."""
    optimizer = optax.adam(1e-4)

    def parts() -> tuple[Any, Any, Any, Any]:
        graphdef, adapters, frozen = nnx.split(adapted_model(settings), nnx.LoRAParam, ...)
        return graphdef, adapters, optimizer.init(adapters), frozen

    shape = (settings.batch, settings.length + 1)
    kept: list[Any] = []

    def abstract() -> tuple[Any, ...]:
        graphdef, *arrays = parts()
        kept.append(graphdef)
        return (*arrays, jnp.zeros(shape, jnp.int32))

    arguments = jax.eval_shape(abstract)
    lowered = jax.jit(partial(step, kept[0], optimizer), donate_argnums=(0, 1)).lower(*arguments)

    def made() -> tuple[Any, ...]:
        _, adapters, state, frozen = parts()
        vocabulary = published()[settings.model].vocab_size
        vocabulary = settings.sizes.get("vocab_size", vocabulary)
        return adapters, state, frozen, jax.random.randint(jax.random.key(7), shape, 0, vocabulary, jnp.int32)

    return lowered.compile(), made


def measure(compiled: Any, made: Any, settings: Settings) -> dict[str, Any]:
    """Tokens a second, bytes of the process' peak and of its arguments, and the losses."""
    adapters, state, frozen, windows = made()
    jax.block_until_ready(frozen)
    sizes = compiled.memory_analysis()
    losses, seconds = [], []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        adapters, state, loss = compiled(adapters, state, frozen, windows)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    of_adapters = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    best = sorted(seconds[1:])[STEPS // 2]
    return {
        "seconds": best,
        "tokens_per_s": settings.batch * settings.length / best,
        "trained_parameters": of_adapters,
        "argument_bytes": sizes.argument_size_in_bytes,
        "temporary_bytes": sizes.temp_size_in_bytes,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "losses": losses,
    }


def main(text: str) -> None:
    settings = Settings(**json.loads(text))
    start = time.perf_counter()
    compiled, made = compile_step(settings)
    compiling = time.perf_counter() - start
    print(json.dumps({"compiled": 1}), flush=True)
    if sys.stdin.readline():
        print(json.dumps({"compile_seconds": compiling, **measure(compiled, made, settings)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
