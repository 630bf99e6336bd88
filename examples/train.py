"""Trains a small gpt-oss on a text, its experts rounded to MXFP4 in each step, and exports it: needs jmx-moe[bench,hf].

python examples/train.py bible.txt run && jmx generate run/checkpoint "And God said"
"""

import argparse
import lzma
import sys
from pathlib import Path

import jax
import optax
from flax import nnx

from jmx import Logits, TopKSoftmax, plot, training
from jmx.checkpoint.gpt_oss import read_config
from jmx.models import GptOss, MoERecord, load
from jmx.util.atomic_files import new_path

CONFIG = read_config(Path(__file__).parent / "gpt_oss_demo")  # has the sizes of the model


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: GptOss, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """Updates the model; its mean loss before, in nats a token."""

    def total(model: GptOss) -> tuple[jax.Array, jax.Array]:
        records: list[MoERecord] = []
        loss = training.next_token_losses(model, windows, records=records).mean()
        logits = [Logits(its.logits.reshape(-1, CONFIG.num_experts), TopKSoftmax(CONFIG.top_k)) for its in records]
        extra = sum(1e-2 * training.load_balancing_loss(its) + 1e-4 * training.router_z_loss(its) for its in logits)
        return loss + extra / len(logits), loss

    (_, loss), gradients = nnx.value_and_grad(total, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder: Path, text: Path, steps: int, batch: int, length: int, rate: float, dtype: str, save_every: int):
    """Trains from the latest step in the folder on, or from random weights, and exports."""
    if (folder / "checkpoint").exists():
        raise FileExistsError(f"{folder / 'checkpoint'} exists: nothing is overwritten")
    if not 0 < rate < float("inf"):
        raise ValueError(f"`rate` (={rate}) must be finite and above 0")
    data = training.Text(text, CONFIG.vocab_size, ["<|startoftext|>", "<|pad|>", "<|return|>"])
    windows = data.windows(batch, length)
    given = {"text": data.sha256, "steps": steps, "batch": batch, "length": length, "rate": rate, "dtype": dtype}
    run = training.Run(folder, {name: str(value) for name, value in given.items()}, steps=steps, save_every=save_every)
    model = GptOss(CONFIG, format="mxfp4", qat=training.QAT(), dtype=dtype, rngs=nnx.Rngs(0))
    model.embedding.set_value(0.1 * model.embedding[...])
    rates = optax.warmup_cosine_decay_schedule(0.0, rate, min(100, steps // 10), steps, rate / 50)
    adam = optax.adamw(rates, b2=0.95, weight_decay=0.1, mask=lambda its: jax.tree.map(lambda p: p.ndim > 1, its))
    both = model, nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adam), wrt=nnx.Param)
    curve = run.train(both, lambda number: train_step(*both, windows(number)), tokens_per_step=batch * length)
    plot.training_loss(curve, bytes_per_token=data.num_bytes / len(data.tokens)).savefig(folder / "loss.png")
    with new_path(folder / "checkpoint") as place:
        training.export(place, training.in_dtype(model, "bfloat16"))
        data.tokenizer.save(str(place / "tokenizer.json"))
    print(f"bits per byte of the last {data.held_out_bytes} bytes, which it was not trained on:")
    for name, its in ("checkpoint", load(folder / "checkpoint")), ("master weights", training.unrounded(model)):
        print(f"{training.bits_per_byte(its, data.held_out, data.held_out_bytes, length):.3f} of the {name}")
    for name, its in ("these bytes", text.read_bytes()[-data.held_out_bytes :]), ("the whole text", text.read_bytes()):
        print(f"{8 * len(lzma.compress(its, preset=9)) / len(its):.3f} of `xz -9` of {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--steps", type=int, default=2600, help="of the whole training")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of activations")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints, a multiple of 20")
    try:
        train(**vars(parser.parse_args()))
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
