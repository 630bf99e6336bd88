"""Adapters of a model whose experts stay in 4 bits, trained on a text: `python examples/fine_tune.py [TEXT [FOLDER]]`.

jmx generate examples/gpt_oss_demo "And the Licensee" --adapter FOLDER
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from jmx import lora, training
from jmx.checkpoint import peft
from jmx.models import Model, load

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "gpt_oss_demo"
STEPS, BATCH, LENGTH = 60, 4, 64


def read_tokens(text: Path) -> np.ndarray:
    """The text's tokens, without its line breaks."""
    words = " ".join(text.read_text().split())
    return np.asarray(Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(words).ids, np.int32)


def random_adapters(model: Model) -> dict[int, lora.Adapters]:
    """Of each layer's experts, by the number of the layer. They change nothing yet."""
    made = lora.LoRA(rank=8, alpha=16)
    return {n: made.random(jax.random.key(n), layer.moe.experts) for n, layer in enumerate(model.layers)}


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """Updates the adapters; the mean loss in nats a token before."""

    def loss_of(model):
        return training.next_token_losses(model, windows).mean()

    loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, gradients)
    return loss


def fine_tune(model: Model, adapters: dict[int, lora.Adapters], tokens: np.ndarray, steps: int = STEPS) -> list[float]:
    """Adds the adapters to the model and trains them, and them alone; the loss of each step, in nats a token."""
    for number, its in adapters.items():
        model.layers[number].moe.adapt(its)
    optimizer = nnx.Optimizer(model, training.refuse_frozen(optax.adam(2e-3)), wrt=nnx.LoRAParam)
    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        starts = rng.integers(len(tokens) - LENGTH, size=BATCH)
        losses.append(float(step(model, optimizer, jnp.asarray(tokens[starts[:, None] + np.arange(LENGTH + 1)]))))
    training.check_finite(losses, step=steps)
    return losses


if __name__ == "__main__":
    model = load(DEMO, dtype=jnp.float32)
    text = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "LICENSE"
    losses = fine_tune(model, random_adapters(model), read_tokens(text))
    print(f"loss {np.mean(losses[:5]):.2f} in the first five steps, {np.mean(losses[-5:]):.2f} in the last five")
    if len(sys.argv) > 2:
        numbered = dict(enumerate(layer.moe for layer in model.layers))
        adapters = {number: moe.adapters for number, moe in numbered.items()}
        peft.save(
            sys.argv[2], adapters, {number: moe.experts for number, moe in numbered.items()}, base_model=str(DEMO)
        )
