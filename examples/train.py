"""Trains a small gpt-oss on a text, its experts rounded to MXFP4 in each step, and exports it: needs jmx-moe[bench,hf].

    python examples/train.py bible.txt demo
    jmx generate demo/checkpoint "And God said"

`demo/steps` has the latest checkpoints of the training, from which a run that was stopped goes on; `demo/loss.png` is
the curve. The last twentieth of the text is not trained on: at the end, its bits per byte are printed.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jmx
from jmx import training
from jmx.checkpoint.model_configs.gpt_oss import FULL, PUBLISHED, SLIDING
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models import GptOss, MoERecord, load
from jmx.util.atomic_files import new_path, write_json

LAYERS, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, VOCABULARY = 4, 192, 16, 2, 96, 2048
REPORT_EVERY = 20  # steps
SPECIAL = ["<|startoftext|>", "<|pad|>", "<|return|>"]
CONFIG = dataclasses.replace(
    PUBLISHED["gpt-oss-20b"],  # whose constants are kept
    num_hidden_layers=LAYERS,
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    num_experts=EXPERTS,
    top_k=TOP_K,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCABULARY,
    layer_types=(SLIDING, FULL) * (LAYERS // 2),
    bos_token_id=VOCABULARY - 3,
    pad_token_id=VOCABULARY - 2,
    eos_token_ids=(VOCABULARY - 1,),
)


def tokenizer_of(text: str) -> Tokenizer:
    """A byte-level BPE of the text, whose last ids are those of `SPECIAL`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    if (size := tokenizer.get_vocab_size()) != VOCABULARY:
        sys.exit(f"the text must be longer: it gives a vocabulary of {size} tokens, and the model has {VOCABULARY}")
    return tokenizer


def read_text(path: pathlib.Path) -> tuple[str, str]:
    """The text to train on, and the last twentieth, from a line's beginning on."""
    data = path.read_bytes()
    split = data.rfind(b"\n", 0, len(data) * 19 // 20) + 1
    if split == 0:
        sys.exit(f"{path} must have lines")
    return data[:split].decode(), data[split:].decode()


def losses(model: GptOss, windows: jax.Array, records: list[MoERecord] | None = None) -> jax.Array:
    """Cross-entropy in nats of the tokens of windows (B, T + 1), except the first ones: (B, T)."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    x, _ = model(tokens, None, model.empty_cache(*tokens.shape).layers, records=records)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(x), targets)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: GptOss, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """Updates the model; its mean loss before."""

    def total(model: GptOss) -> tuple[jax.Array, jax.Array]:
        records: list[MoERecord] = []
        loss, extra = losses(model, windows, records).mean(), 0.0
        for record in records:
            logits = jmx.Logits(record.logits.reshape(-1, EXPERTS), jmx.TopKSoftmax(TOP_K))
            extra += 1e-2 * training.load_balancing_loss(logits) + 1e-4 * training.router_z_loss(logits)
        return loss + extra / LAYERS, loss

    (_, loss), gradients = nnx.value_and_grad(total, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss


def windows(tokens: np.ndarray, step: int, arguments: argparse.Namespace) -> jax.Array:
    """Those of a step, (batch, length + 1): the same in a run that goes on."""
    starts = np.random.default_rng([0, step]).integers(len(tokens) - arguments.length, size=arguments.batch)
    return jnp.asarray(tokens[starts[:, None] + np.arange(arguments.length + 1)])


def in_bfloat16(model: GptOss) -> GptOss:
    """The model with bfloat16 activations and dense weights, as checkpoints of gpt-oss have them."""
    rounded = GptOss(CONFIG, format="mxfp4", qat=training.QAT(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nnx.update(rounded, jax.tree.map(lambda new, old: old.astype(new.dtype), nnx.state(rounded), nnx.state(model)))
    return rounded


def with_float_experts(model: GptOss) -> GptOss:
    """A model that shares this one's variables, but computes with its master weights as they are."""
    floats, copy = GptOss(CONFIG, dtype=model.dtype, rngs=nnx.Rngs(0)), nnx.merge(*nnx.split(model))
    for block in copy.layers:
        masters = block.moe.held
        gate_up, bias = (
            jnp.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1) for rows in (masters.gate_up, masters.gate_up_bias)
        )
        block.moe = floats.make_moe(FloatExperts(gate_up, masters.down, bias, masters.down_bias), nnx.Rngs(0))
    return copy


def bits_per_byte(model: GptOss, tokens: np.ndarray, num_bytes: int, length: int) -> float:
    """Of a text of so many bytes. Each token has at least half a window before it, except those of the first window."""
    evaluate = nnx.jit(losses)
    nats, stride = 0.0, length // 2
    for first in range(0, len(tokens) - 1, stride):
        window = np.pad(tokens[first : first + length + 1], (0, length + 1))[: length + 1]
        found = np.asarray(evaluate(model, jnp.asarray(window[None])))[0, : len(tokens) - 1 - first]
        nats += found[stride if first else 0 :].sum()
    return nats / np.log(2) / num_bytes


class Steps:
    """Checkpoints of a training, by Orbax: the latest two, each complete or not there."""

    def __init__(self, folder: pathlib.Path):
        # Not while the next step runs, which writes over the arrays.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int:
        return self.manager.latest_step() or 0

    def restore(self, model: GptOss, optimizer: nnx.Optimizer) -> tuple[int, list[list[float]]]:
        """Fills both from the latest checkpoint. Its step and the losses before it; without one, 0 and none."""
        if not (step := self.latest):
            return 0, []
        leaves, structure = jax.tree.flatten(nnx.state((model, optimizer)))
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(leaves), curve=ocp.args.JsonRestore())
        found = self.manager.restore(step, args=wanted)
        nnx.update((model, optimizer), jax.tree.unflatten(structure, found["state"]))
        return step, found["curve"]["losses"]

    def save(self, step: int, model: GptOss, optimizer: nnx.Optimizer, curve: list[list[float]]) -> None:
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        parts = ocp.args.Composite(state=ocp.args.StandardSave(leaves), curve=ocp.args.JsonSave({"losses": curve}))
        self.manager.save(step, args=parts)

    def close(self) -> None:
        self.manager.close()


def check_same_run(file: pathlib.Path, arguments: dict[str, str], text: str) -> None:
    """Ends the program if the folder has a training with other arguments, or of another text."""
    run = arguments | {"text": hashlib.sha256(text.encode()).hexdigest()}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, run)
    for name, value in json.loads(file.read_text()).items():
        if run.get(name) != value:
            sys.exit(f"`{name}` (={run.get(name)}) must be {value}, as when the training in {file.parent} began")


def draw(file: pathlib.Path, curve: list[list[float]], bytes_per_token: float) -> None:
    """The losses in bits per byte, by step."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    steps, nats = np.transpose(curve)
    axes.plot(steps, nats / np.log(2) / bytes_per_token)
    axes.set(xlabel="step", ylabel="bits per byte", title="training loss")
    figure.savefig(file)


def train(arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    """Trains from the latest step in the folder on, or from random weights, and exports."""
    if (folder / "checkpoint").exists():
        sys.exit(f"{folder / 'checkpoint'} exists: nothing is overwritten")
    text, held_out = read_text(arguments.text)
    tokenizer = tokenizer_of(text)
    tokens, unseen = (np.asarray(tokenizer.encode(part).ids, np.int32) for part in (text, held_out))
    if arguments.length >= len(tokens):
        sys.exit(f"--length (={arguments.length}) must be less than the {len(tokens)} tokens of the text")
    run = {name: str(value) for name, value in vars(arguments).items() if name not in ("folder", "save_every")}
    check_same_run(folder / "run.json", run, text)

    model = GptOss(CONFIG, format="mxfp4", qat=training.QAT(), dtype=arguments.dtype, rngs=nnx.Rngs(0))
    model.embedding.set_value(0.1 * model.embedding[...])
    rate = optax.warmup_cosine_decay_schedule(
        0.0, arguments.rate, min(100, arguments.steps // 10), arguments.steps, arguments.rate / 50
    )
    adam = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adam), wrt=nnx.Param)

    steps = Steps(folder / "steps")
    step, curve = steps.restore(model, optimizer)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=arguments.steps, completed=step)
        while step < arguments.steps:
            since = time.perf_counter()
            numbers = range(step + 1, min(step - step % REPORT_EVERY + REPORT_EVERY, arguments.steps) + 1)
            found = [train_step(model, optimizer, windows(tokens, number, arguments)) for number in numbers]
            step, loss = numbers[-1], float(np.mean(found))
            if not np.isfinite(loss):
                sys.exit(f"the loss of steps {numbers[0]} to {step} is {loss}; step {steps.latest} was saved last")
            curve.append([step, loss])
            if step % arguments.save_every == 0 or step == arguments.steps:
                steps.save(step, model, optimizer, curve)
            speed = len(numbers) * arguments.batch * arguments.length / (time.perf_counter() - since)
            progress.update(task, completed=step, description=f"loss {loss:.3f}, {speed:.0f} tokens/s")
            if not progress.console.is_terminal:
                print(f"step {step}: loss {loss:.3f}, {speed:.0f} tokens/s", flush=True)
    steps.close()

    draw(folder / "loss.png", curve, len(text.encode()) / len(tokens))
    with new_path(folder / "checkpoint") as place:
        training.export(place, in_bfloat16(model))
        tokenizer.save(str(place / "tokenizer.json"))
    print(f"bits per byte of the last {len(held_out.encode())} bytes, which it was not trained on:")
    models = {"the checkpoint": load(folder / "checkpoint"), "the master weights": with_float_experts(model)}
    for name, its in models.items():
        print(f"{bits_per_byte(its, unseen, len(held_out.encode()), arguments.length):.3f} of {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path, help="a text file")
    parser.add_argument("folder", type=pathlib.Path, help="where everything is written")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of activations")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints of the training")
    arguments = parser.parse_args()
    if arguments.save_every % REPORT_EVERY or arguments.save_every < 1:
        parser.error(f"--save-every (={arguments.save_every}) must be a multiple of {REPORT_EVERY}")
    for name in ("steps", "batch", "length"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name} (={value}) must be at least 1")
    if not 0 < arguments.rate < np.inf:
        parser.error(f"--rate (={arguments.rate}) must be finite and above 0")
    train(arguments, arguments.folder)


if __name__ == "__main__":
    main()
