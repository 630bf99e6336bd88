"""What `jmx generate` runs: a model, from a prompt to new tokens and how long they took."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

import jmx
import jmx.nnx
from jmx.backends import registered_backends
from jmx.cli import sampling_arguments
from jmx.cli.common import EXIT_OK, check_directories, check_known, print_json
from jmx.models import FAMILIES, Model, Runner, family_of, from_source, hub, load, random_source
from jmx.models.config import Config
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.stream import IdStream, TextStream, read_tokenizer
from jmx.models.token_rows import check_tokens
from jmx.util import atomic_files

RANDOM_PROMPT_LENGTH = 1024


def check_arguments(arguments: argparse.Namespace) -> None:
    """ValueError for arguments that are wrong by themselves: nothing is read for it."""
    if (arguments.model is None) == (arguments.random is None):
        raise ValueError("give either MODEL or --random")
    if arguments.prompt is not None and arguments.prompt_ids is not None:
        raise ValueError("give either PROMPT or --prompt-ids")
    if arguments.random is not None:
        check_known("--random", arguments.random, _published())
    elif arguments.prompt is None and arguments.prompt_ids is None:
        raise ValueError("give PROMPT, or --prompt-ids")
    if arguments.chat and arguments.prompt is None:
        raise ValueError("`--chat` needs PROMPT, a user's message")
    if arguments.format is not None:
        check_known("--format", arguments.format, jmx.FORMATS)
    if arguments.backend is not None:
        check_known("--backend", arguments.backend, [backend.name for backend in registered_backends()])
    if arguments.max_new_tokens < 1:
        raise ValueError(f"`--max-new-tokens` (={arguments.max_new_tokens}) must be at least 1")
    if arguments.logits:
        try:
            atomic_files.check_new(arguments.logits)
        except OSError as error:
            raise ValueError(f"`--logits`: {error}") from error
        check_directories(str(arguments.logits))


def _published() -> dict[str, Config]:
    """The configurations of published models, by name."""
    return {name: config for family in FAMILIES.values() for name, config in family.published.items()}


def read_config(arguments: argparse.Namespace) -> Config:
    """The config of the model that is asked for."""
    if arguments.random is not None:
        return _published()[arguments.random]
    return family_of(arguments.model).read_config(arguments.model)


def read_prompt(arguments: argparse.Namespace, config: Config) -> tuple[list[int], TextStream | IdStream]:
    """The prompt's ids, checked, and the stream that shows new ones."""
    stream: TextStream | IdStream = IdStream()
    if arguments.prompt_ids is not None:
        ids = arguments.prompt_ids
    elif arguments.prompt is None:
        ids = np.random.default_rng(arguments.seed).integers(config.vocab_size, size=RANDOM_PROMPT_LENGTH).tolist()
    else:
        try:
            stream = TextStream(read_tokenizer(Path(arguments.model)))
        except (FileNotFoundError, ImportError) as error:
            raise ValueError(f"{error}; or give --prompt-ids") from error
        text = arguments.prompt
        if arguments.chat:
            text = ChatTemplate.read(Path(arguments.model)).render([{"role": "user", "content": text}])
        ids = stream.tokenizer.encode(text, add_special_tokens=False).ids
    check_tokens("prompts", [ids], config.vocab_size)
    return ids, stream


def make_model(arguments: argparse.Namespace, config: Config) -> Model:
    format = None if arguments.format is None else jmx.FORMATS[arguments.format]
    made = {"dtype": jnp.dtype(arguments.dtype), "backend": arguments.backend}
    if arguments.random is not None:
        return from_source(random_source(config, arguments.seed, format or jmx.MXFP4), **made)
    declared = arguments.inputs == "declared"
    return load(arguments.model, progress=True, declared_inputs=declared, format=format, **made)


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


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    console = Console(file=sys.stderr if arguments.json else sys.stdout)
    result = _generate(arguments, console)
    if arguments.json:
        print_json(result)
    return EXIT_OK


def _generate(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Prints to the console. Returns what --json prints."""
    check_arguments(arguments)
    if arguments.model is not None:
        arguments.model = hub.find(arguments.model)
    sampler = sampling_arguments.sampler(arguments)
    config = read_config(arguments)
    ids, stream = read_prompt(arguments, config)
    model = make_model(arguments, config)
    runner = Runner(model)
    if arguments.logits:
        write_logits(runner, ids, arguments.logits)
    generation = {"prompts": [ids], "sampler": sampler, "max_new_tokens": arguments.max_new_tokens}
    cache_bytes = runner.warm_up(**generation)

    console.out(stream.prompt(ids), end="", style="dim", highlight=False)
    new: list[int] = []
    arrivals = []
    started = time.perf_counter()
    for (token,) in runner.generate(**generation):
        arrivals.append(time.perf_counter())
        new.append(int(token))
        console.out(stream.step(new[-1]), end="", highlight=False)
        if new[-1] in config.eos_token_ids and not arguments.ignore_eos:
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
