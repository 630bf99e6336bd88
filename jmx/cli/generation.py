"""What `jmx generate` runs: a model, from prompts to new tokens."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jmx.checkpoint.peft import Reader
from jmx.cli import compilation_cache, model_arguments, prompts, random_model, sampling_arguments
from jmx.cli.generation_report import Report, Timing
from jmx.cli.output import EXIT_OK, check_directories
from jmx.cli.prompts import Prompt
from jmx.cli.row_output import RowOutput
from jmx.models import Generation, Model, Runner
from jmx.models.config import Config
from jmx.models.logprobs import check_count
from jmx.models.sources.protocol import Source
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.continuation import Continuation
from jmx.models.text.stream import beginning_of_texts, read_tokenizer
from jmx.models.token_rows import check_tokens
from jmx.util import atomic_files

RANDOM_PROMPT_LENGTH = 1024


class Job(NamedTuple):
    """All that is known before weights are read; the tokenizer is None if prompts are ids."""

    source: Source
    prompts: list[Prompt]
    tokenizer: Any
    adapters: Reader | None


def check_arguments(arguments: argparse.Namespace) -> None:
    """ValueError for arguments that are wrong by themselves: nothing is read for it."""
    random_model.check(arguments)
    prompts.check(arguments)
    model_arguments.check(arguments)
    if arguments.stop and (arguments.prompt_ids or arguments.random is not None):
        raise ValueError("`--stop` needs prompts of text; with --prompt-ids give --stop-id")
    sampling_arguments.check_stops(arguments.stop)
    if arguments.logprobs is not None and arguments.logprobs < 0:
        raise ValueError(f"`--logprobs` (={arguments.logprobs}) must be at least 0")
    if arguments.logits:
        try:
            atomic_files.check_new(arguments.logits)
        except OSError as error:
            raise ValueError(f"`--logits`: {error}") from error
        check_directories(str(arguments.logits))


def read_job(arguments: argparse.Namespace) -> Job:
    """The prompts and the model that parsed arguments name. All of them are checked, and no weights are read."""
    texts = prompts.read_texts(arguments)
    if arguments.random is not None:
        return _random_job(arguments)
    directory = model_arguments.find(arguments.model)
    source = model_arguments.source(arguments, directory)
    tokenizer = None
    if arguments.prompt_ids:
        asked = [Prompt(ids, None) for ids in arguments.prompt_ids]
    else:
        try:
            tokenizer = read_tokenizer(directory)
        except (FileNotFoundError, ImportError) as error:
            raise ValueError(f"{error}; or give --prompt-ids") from error
        asked = prompts.encode(texts, tokenizer, ChatTemplate.read(directory) if arguments.chat else None)
        if not arguments.chat:
            prompts.warn_of_beginning(asked, beginning_of_texts(directory, tokenizer), tokenizer)
    _check_ids(arguments, source.config, asked)
    _check_lengths(asked, arguments.max_new_tokens, model_arguments.context_length(directory))
    return Job(source, asked, tokenizer, model_arguments.adapters(arguments, source))


def _random_job(arguments: argparse.Namespace) -> Job:
    source, config = random_model.source(arguments), random_model.config(arguments)
    drawn = np.random.default_rng(arguments.seed).integers(config.vocab_size, size=RANDOM_PROMPT_LENGTH).tolist()
    asked = [Prompt(ids, None) for ids in arguments.prompt_ids or [drawn]]
    _check_ids(arguments, config, asked)
    return Job(source, asked, None, model_arguments.adapters(arguments, source))


def _check_lengths(asked: Sequence[Prompt], max_new_tokens: int, context: int | None) -> None:
    """ValueError for prompts and new tokens of more than the model's context."""
    for number, (ids, _) in enumerate(asked, 1):
        if context is None or len(ids) + max_new_tokens <= context:
            continue
        remedy = f"it leaves {context - len(ids)} new tokens, and --max-new-tokens is {max_new_tokens}"
        if len(ids) >= context:
            remedy = "it must be shorter"
        raise ValueError(f"prompt {number} has {len(ids)} tokens, and the model's context {context}: {remedy}")


def _check_ids(arguments: argparse.Namespace, config: Config, asked: Sequence[Prompt]) -> None:
    check_tokens("prompts", [prompt.ids for prompt in asked], config.vocab_size)
    for id in arguments.stop_id:
        if not 0 <= id < config.vocab_size:
            raise ValueError(f"`--stop-id` (={id}) must be in 0..{config.vocab_size - 1}")
    check_count(arguments.logprobs, config.vocab_size)
    if arguments.logits and len(asked) > 1:
        raise ValueError(f"`--logits` is of one prompt, and there are {len(asked)}")


def make_model(arguments: argparse.Namespace, job: Job) -> Model:
    """The model with its weights, if they fit."""
    lengths = [len(prompt.ids) for prompt in job.prompts]
    return model_arguments.make(arguments, job.source, job.adapters, lengths, all_logits=arguments.logits is not None)


def write_logits(runner: Runner, ids: list[int], file: Path) -> None:
    logits, _ = runner.prefill([ids], all_logits=True)
    with atomic_files.new_path(file) as new, new.open("wb") as opened:  # given a name, np.save may add a suffix
        np.save(opened, np.asarray(logits[0, : len(ids)]))


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    check_arguments(arguments)
    sampler = sampling_arguments.sampler(arguments)
    job = read_job(arguments)
    model = make_model(arguments, job)
    runner = Runner(model, store=compilation_cache.program_store())
    if arguments.logits:
        write_logits(runner, job.prompts[0].ids, arguments.logits)
    asked: dict[str, Any] = {
        "prompts": [prompt.ids for prompt in job.prompts],
        "sampler": sampler,
        "max_new_tokens": arguments.max_new_tokens,
        "logprobs": arguments.logprobs,
    }
    cache_bytes = runner.warm_up(**asked)
    rows = _rows(arguments, job)
    started = time.perf_counter()
    with RowOutput(job.prompts, sys.stderr if arguments.json else sys.stdout) as output:
        timing, logprobs = _generate(runner.generate(**asked), rows, output, started)
    report = Report.of(model, job.prompts, job.tokenizer, rows, timing, logprobs, cache_bytes)
    report.show(Console(stderr=True))
    if arguments.json:
        report.print_json()
    return EXIT_OK


def _rows(arguments: argparse.Namespace, job: Job) -> list[Continuation]:
    ends = {
        "eos_ids": () if arguments.ignore_eos else job.source.config.eos_token_ids,
        "stop_ids": arguments.stop_id,
        "stops": arguments.stop,
    }
    befores = [() if arguments.chat else prompt.ids for prompt in job.prompts]  # an answer is a text of its own
    return [Continuation(job.tokenizer, arguments.max_new_tokens, **ends, before=before) for before in befores]


def _generate(
    steps: Generation, rows: Sequence[Continuation], output: RowOutput, start: float
) -> tuple[Timing, list[list[Any]]]:
    """Fills the rows, up to the end of the last one. Returns when, and the log probabilities of each row's tokens."""
    timing, logprobs = Timing(start, []), [[] for _ in rows]
    for tokens in steps:
        timing.steps.append(time.perf_counter())
        for number, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if row.finish_reason is not None:
                continue
            if steps.logprobs is not None:
                logprobs[number].append(jax.tree.map(lambda array: array[number].tolist(), steps.logprobs))  # noqa: B023
            output.step(number, row, row.step(token))
        if all(row.finish_reason for row in rows):
            break
    return timing, logprobs
