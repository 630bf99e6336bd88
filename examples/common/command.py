"""The command line of a whole model: generate text, or token ids, and time it."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

import jmx
import jmx.nnx
from examples.common.config import Config
from examples.common.model import Model
from examples.common.runner import Runner, check_prompts
from examples.common.sampling import Sampler
from examples.common.text import IdStream, TextStream, read_tokenizer
from jmx.backends import registered_backends
from jmx.checkpoint import CheckpointError
from jmx.util import atomic_files

RANDOM_PROMPT_LENGTH = 1024


class UsageError(Exception):
    """Invalid options; the message is one line."""


@dataclass(frozen=True)
class Family:
    """What the command line needs of a family of models.

    Args:
        description: the first line of --help.
        configs: of published models, for --random.
        read_config: of a checkpoint's directory.
        load: makes a model of a checkpoint's directory, `format`, `declared_inputs`, `dtype`, `backend` and `progress`.
        random: makes a model of a config, a seed, `format`, `dtype` and `backend`.
        default: the checkpoint if none is named; None: one must be named.
        prompt: for `default`.
    """

    description: str
    configs: Mapping[str, Config]
    read_config: Callable[[Path], Config]
    load: Callable[..., Model]
    random: Callable[..., Model]
    default: Path | None = None
    prompt: str | None = None

    def checkpoint(self, options: argparse.Namespace) -> Path:
        """The directory that the options name, or the default."""
        found = options.checkpoint or self.default
        if found is None:
            raise UsageError("give --checkpoint, or --random")
        return found


def parse_arguments(family: Family, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description=f"{family.description} Times are those of a second run, after one that compiles.",
    )
    source = parser.add_mutually_exclusive_group()
    beside = "" if family.default is None else "; default: the tiny one beside"
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help=f"a directory of safetensors files{beside}")
    source.add_argument("--random", choices=family.configs, help="random weights of a published model's shape")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help=f"raw text for the checkpoint's tokenizer.json{f'; default: {family.prompt!r}' if family.prompt else ''}",
    )
    prompt.add_argument(
        "--prompt-ids",
        type=_ids,
        metavar="1,2,3",
        help=f"token ids; new ids are then shown as ids. Default with --random: {RANDOM_PROMPT_LENGTH} random ones",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, which is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest that sum to P")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and of random weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all but the experts")
    parser.add_argument(
        "--format",
        choices=jmx.FORMATS,
        metavar="NAME",
        help="weight format of random experts (default: mxfp4), or what float experts of a checkpoint are quantized to",
    )
    parser.add_argument(
        "--inputs",
        choices=("declared", "float"),
        default="declared",
        help="whether experts quantize their inputs as the checkpoint declares (the default), or not at all",
    )
    parser.add_argument(
        "--backend", choices=[b.name for b in registered_backends()], metavar="NAME", help="the backend that must run"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence id")
    parser.add_argument(
        "--logits",
        type=Path,
        metavar="FILE.npy",
        help="write the prompt's logits to a new file, float32 (length, vocab)",
    )
    parser.add_argument("--json", action="store_true", help="results on the last line of stdout, all else on stderr")
    return parser.parse_args(arguments)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between") from None


def make_sampler(options: argparse.Namespace) -> Sampler:
    """The sampler of the options. Checks all options that need no file."""
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens (={options.max_new_tokens}) must be at least 1")
    if options.random and options.prompt is not None:
        raise UsageError("--prompt needs a tokenizer, and --random has none: give --prompt-ids")
    try:
        if options.logits:
            atomic_files.check_new(options.logits)
    except OSError as error:
        raise UsageError(f"--logits: {error}") from error
    try:
        return Sampler(options.temperature, options.top_p, options.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_prompt(family: Family, options: argparse.Namespace, config: Config) -> tuple[list[int], TextStream | IdStream]:
    """The prompt's ids, checked, and the stream that shows new ones."""
    stream: TextStream | IdStream = IdStream()
    if options.prompt_ids is not None:
        ids = options.prompt_ids
    elif options.random:
        ids = np.random.default_rng(options.seed).integers(config.vocab_size, size=RANDOM_PROMPT_LENGTH).tolist()
    else:
        try:
            stream = TextStream(read_tokenizer(family.checkpoint(options)))
        except (FileNotFoundError, ImportError) as error:
            raise UsageError(f"{error}; or give --prompt-ids") from error
        text = family.prompt if options.prompt is None else options.prompt
        if text is None:
            raise UsageError("give --prompt, or --prompt-ids")
        ids = stream.tokenizer.encode(text, add_special_tokens=False).ids
    try:
        check_prompts(config, [ids])
    except ValueError as error:
        raise UsageError(str(error)) from error
    return ids, stream


def make_model(family: Family, options: argparse.Namespace) -> Model:
    format = None if options.format is None else jmx.FORMATS[options.format]
    made = {"dtype": jnp.dtype(options.dtype), "backend": options.backend, "format": format}
    if options.random:
        return family.random(family.configs[options.random], options.seed, **made)
    return family.load(family.checkpoint(options), progress=True, declared_inputs=options.inputs == "declared", **made)


def explain(model: Model, tokens: int) -> jmx.Explanation | None:
    """Which backend runs the experts for that number of tokens, and why; None if they are not quantized."""
    moe = next((layer.moe for layer in model.layers if isinstance(getattr(layer, "moe", None), jmx.nnx.MoE)), None)
    if moe is None:
        return None
    x = jax.ShapeDtypeStruct((1, tokens, model.config.hidden_size), model.dtype)
    return jmx.explain(moe, x)


def weights_read(model: Model) -> float:
    """Bytes of weights that a step of one token reads, without the embedding table and experts that are not used."""
    experts = _nbytes([nnx.state(layer.moe) for layer in model.layers if hasattr(layer, "moe")])
    unused = 1 - model.config.top_k / model.config.num_experts
    table = 0 if model.unembedding is None else _nbytes(model.embedding[...])
    return _nbytes(nnx.state(model)) - table - unused * experts


def _nbytes(arrays: Any) -> int:
    return sum(array.on_device_size_in_bytes() for array in jax.tree.leaves(arrays))


def write_logits(runner: Runner, ids: list[int], file: Path) -> None:
    logits, _ = runner.prefill([ids], all_logits=True)
    with atomic_files.new_path(file) as new, new.open("wb") as opened:  # given a name, np.save may add a suffix
        np.save(opened, np.asarray(logits[0, : len(ids)]))


def run(family: Family, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs the command and prints to the console. Returns what --json prints."""
    sampler = make_sampler(options)
    config = family.configs[options.random] if options.random else family.read_config(family.checkpoint(options))
    ids, stream = read_prompt(family, options, config)
    model = make_model(family, options)
    runner = Runner(model)
    if options.logits:
        write_logits(runner, ids, options.logits)
    generation = {"prompts": [ids], "sampler": sampler, "max_new_tokens": options.max_new_tokens}
    cache_bytes = runner.warm_up(**generation)

    console.out(stream.prompt(ids), end="", style="dim", highlight=False)
    new: list[int] = []
    arrivals = []
    started = time.perf_counter()
    for (token,) in runner.generate(**generation):
        arrivals.append(time.perf_counter())
        new.append(int(token))
        console.out(stream.step(new[-1]), end="", highlight=False)
        if new[-1] in config.eos_token_ids and not options.ignore_eos:
            break
    console.out(stream.flush(), highlight=False)

    decode = explain(model, 1)
    rate = (len(new) - 1) / (arrivals[-1] - arrivals[0]) if len(new) > 1 else None
    result = {
        "prompt_ids": ids,
        "ids": new,
        "backend": "ragged_dot" if decode is None else decode.chosen,
        "prefill_ms": 1e3 * (arrivals[0] - started),
        "decode_tokens_per_s": rate,
        "weight_bytes_a_token": weights_read(model),
        "peak_device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    console.print()
    if decode is None:
        console.print("experts are not quantized: XLA's ragged_dot runs them")
    else:
        console.print(decode)
    prefill = explain(model, len(ids))
    if prefill is not None and decode is not None and prefill.chosen != decode.chosen:
        console.print(prefill)
    _summarize(result, _nbytes(nnx.state(model)), cache_bytes, decode, console)
    return result


def _summarize(
    result: dict[str, Any], weight_bytes: int, cache_bytes: int, decode: jmx.Explanation | None, console: Console
) -> None:
    rate, peak = result["decode_tokens_per_s"], result["peak_device_bytes"]
    read = result["weight_bytes_a_token"]
    share = ""
    if rate is not None and decode is not None and decode.floor is not None:
        bandwidth = decode.floor.peak.bandwidth
        share = f", {rate * read / bandwidth:.0%} of what {bandwidth / 1e12:.1f} TB/s (by data sheet) allow"
    part = "" if peak is None else f" ({peak / (weight_bytes + cache_bytes):.3f} of both)"
    for line in (
        f"prefill: {len(result['prompt_ids'])} tokens in {result['prefill_ms']:.1f} ms",
        f"decode: {len(result['ids'])} tokens, {'-' if rate is None else f'{rate:.1f}'} a second",
        f"weights read: {_size(read)} a token{share}",
        f"device memory: weights {_size(weight_bytes)}, cache {_size(cache_bytes)}, peak {_size(peak)}{part}",
    ):
        console.print(line, soft_wrap=True)


def _size(size: float | None) -> str:
    if size is None:
        return "not known here"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def main(family: Family, arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, 1 if the machine cannot, 2 for bad input, 130 when interrupted."""
    options = parse_arguments(family, arguments)
    console = Console(file=sys.stderr if options.json else sys.stdout)
    try:
        result = run(family, options, console)
    except (UsageError, CheckpointError, OSError, jmx.NoBackendError) as error:
        print(f"generate.py: error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:  # of the device too, such as memory that runs out
        print(f"generate.py: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(result))
    return 0
