"""What `jmx generate` reports besides text: why each row ended, log probabilities, which backend ran, and how fast."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table
from rich.text import Text

import jmx
import jmx.nnx
from jmx.cli.model_arguments import size
from jmx.cli.prompts import Prompt
from jmx.models import LogProbabilities, Model
from jmx.models.runner import CHUNK
from jmx.models.text.continuation import Continuation


class Timing(NamedTuple):
    """When a generation began, and when the tokens of each step were there; `time.perf_counter`, in seconds."""

    start: float
    steps: list[float]

    @property
    def seconds_a_step(self) -> float | None:
        """Of decoding; None without a step after the first tokens.

        The last tokens arrive with the others of their chunk, all of whose steps were computed.
        """
        further = len(self.steps) - 1
        computed = -(-further // CHUNK) * CHUNK
        return (self.steps[-1] - self.steps[0]) / computed if further else None


@dataclass(frozen=True)
class Report:
    """The findings of one run.

    Args:
        model: that ran.
        rows: all that is known of each row, as `--json` prints it.
        speed: what is known of the run, likewise.
        lengths: of the prompts, in tokens.
        cache_bytes: of the cache.
    """

    model: Model
    rows: list[dict[str, Any]]
    speed: dict[str, Any]
    lengths: list[int]
    cache_bytes: int

    @classmethod
    def of(
        cls,
        model: Model,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        rows: Sequence[Continuation],
        timing: Timing,
        logprobs: Sequence[Sequence[LogProbabilities]],
        cache_bytes: int,
    ) -> "Report":
        """The report of rows that have ended. The log probabilities of a row are those of all its tokens, or none."""
        found = []
        for prompt, row, probabilities in zip(prompts, rows, logprobs, strict=True):
            entry = {"prompt_ids": prompt.ids, "ids": row.ids, "text": None if tokenizer is None else row.text}
            entry["finish_reason"] = row.finish_reason
            if probabilities:
                entry["logprobs"] = _logprobs(row.ids, probabilities, tokenizer)
            found.append(entry)
        decode = explain(model, len(rows))
        step = timing.seconds_a_step
        a_step = sum(len(row.ids) - 1 for row in rows) / max(1, len(timing.steps) - 1)  # of rows that go on
        speed = {
            "backend": decode.chosen,
            "prefill_ms": 1e3 * (timing.steps[0] - timing.start),
            "decode_tokens_per_s": a_step / step if step else None,
            "weight_bytes_a_token": weights_read(model) if len(rows) == 1 else None,
            "peak_device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }
        return cls(model, found, speed, [len(prompt.ids) for prompt in prompts], cache_bytes)

    def print_json(self) -> None:
        """Prints an object for each row, one a line; that of the run is part of each."""
        for row in self.rows:
            print(json.dumps(row | self.speed))

    def show(self, console: Console) -> None:
        """Prints tables and lines for people."""
        for number, row in enumerate(self.rows, 1):
            if "logprobs" in row:
                console.print(_table(f"log probabilities of row {number}", row["logprobs"]))
        decode = explain(self.model, len(self.rows))
        console.print(decode)
        prefill = explain(self.model, len(self.rows) * max(self.lengths))
        if prefill.chosen != decode.chosen:
            console.print(prefill)
        for line in self._lines(decode):
            console.print(line, soft_wrap=True, highlight=False)

    def _lines(self, decode: jmx.Explanation) -> list[str]:
        speed, weights = self.speed, _nbytes(nnx.state(self.model))
        rate, read, peak = speed["decode_tokens_per_s"], speed["weight_bytes_a_token"], speed["peak_device_bytes"]
        share = ""
        if rate is not None and read is not None and decode.floor is not None:
            bandwidth = decode.floor.peak.bandwidth
            share = f", {rate * read / bandwidth:.0%} of what {bandwidth / 1e12:.1f} TB/s (by data sheet) allow"
        part = "" if peak is None else f" ({peak / (weights + self.cache_bytes):.3f} of both)"
        new = sum(len(row["ids"]) for row in self.rows)
        return [
            f"ended by: {', '.join(row['finish_reason'] for row in self.rows)}",
            f"prefill: {sum(self.lengths)} tokens in {speed['prefill_ms']:.1f} ms",
            f"decode: {new} tokens, {'-' if rate is None else f'{rate:.1f}'} a second",
            *([] if read is None else [f"weights read: {size(read)} a token{share}"]),
            f"device memory: weights {size(weights)}, cache {size(self.cache_bytes)}, peak {size(peak)}{part}",
        ]


def _logprobs(ids: Sequence[int], found: Sequence[LogProbabilities], tokenizer: Any) -> list[dict[str, Any]]:
    """For each token its id, text and log probability, and those of the likeliest."""

    def entry(id: Any, logprob: Any) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode([id], skip_special_tokens=False)
        return {"id": id, "text": text, "logprob": logprob}

    return [
        entry(id, its.chosen) | {"top": [entry(*pair) for pair in zip(its.top_ids, its.top, strict=True)]}
        for id, its in zip(ids, found, strict=True)
    ]


def _table(title: str, entries: Sequence[dict[str, Any]]) -> Table:
    def shown(entry: dict[str, Any]) -> str:
        return f"{entry['id'] if entry['text'] is None else repr(entry['text'])} {entry['logprob']:.3f}"

    table = Table("token", "likeliest", title=title)
    for entry in entries:
        table.add_row(Text(shown(entry)), Text(", ".join(map(shown, entry["top"]))))
    return table


def explain(model: Model, tokens: int) -> jmx.Explanation:
    """Which backend runs the experts for that number of tokens, and why."""
    moe = next(layer.moe for layer in model.layers if hasattr(layer, "moe"))
    x = jax.ShapeDtypeStruct((1, tokens, model.config.hidden_size), model.dtype)
    return jmx.explain(moe, x)


def weights_read(model: Model) -> float:
    """Bytes of weights that a step of one token reads on one device.

    Without the embedding table, and experts that are not used.
    """
    experts = _nbytes([nnx.state(layer.moe) for layer in model.layers if hasattr(layer, "moe")])
    unused = 1 - model.config.top_k / model.config.num_experts
    table = 0 if model.unembedding is None else _nbytes(model.embedding[...])
    return _nbytes(nnx.state(model)) - table - unused * experts


def _nbytes(arrays: Any) -> int:
    """Bytes on one device."""
    shards = (array.addressable_shards[0].data for array in jax.tree.leaves(arrays))
    return sum(shard.on_device_size_in_bytes() for shard in shards)
