#!/usr/bin/env python3
"""Times two checkouts of jmx in turn on one device: cards and hours differ by more than most changes do.

    git worktree add /tmp/before COMMIT
    python benchmarks/before_after.py /tmp/before . --cases layer:gpt-oss-120b:64,decode:gpt-oss-20b:1 --json FILE

A case is `layer:MODEL:TOKENS`, a chain of layers in one program; `decode:MODEL:ROWS`, 16 steps of a whole model after
prompts of 64 tokens; or `prefill:MODEL:TOKENS`, its first token. A whole model is a checkpoint's directory, or a
published one with random weights.

Each checkout has a process of its own, which holds its weights and programs; rounds take turns, in the other order
every second time. Printed is the median of the second checkout's time over the first's, with the quartiles: times of
the same round are compared, so drift cancels.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("layer", "decode", "prefill")
PROMPT = 64  # tokens before decoded ones
STEPS = 16  # tokens of a timed decode
LEAST_S = 0.02  # what a sample of layers lasts


class Case(NamedTuple):
    kind: str
    model: str
    size: int  # tokens of a layer's call or a prompt; rows of decoding

    @classmethod
    def parse(cls, text: str) -> "Case":
        kind, _, rest = text.partition(":")
        model, _, size = rest.rpartition(":")
        if kind not in KINDS or not model or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"case (={text!r}) must be KIND:MODEL:N, KIND one of {KINDS}, N at least 1"
            )
        return cls(kind, model, int(size))

    def __str__(self) -> str:
        return ":".join(map(str, self))


# In the process of one checkout


def layer_sample(case: Case, num_layers: int) -> Callable[[], float]:
    """Seconds of a chain of `num_layers` different layers, compiled."""
    import jax

    import jmx
    from jmx.backends import resolve_layout
    from jmx.numerics.formats import FORMATS
    from jmx.perf.shapes import MODELS, draw_logits
    from jmx.selection.environment import Environment

    if case.model not in MODELS:
        raise ValueError(f"model (={case.model!r}) must be one of {[*MODELS]}")
    shape = MODELS[case.model]
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    layout = resolve_layout("auto", Environment.probe(), FORMATS[shape.format], shape.input_format)
    layers = [shape.experts(key).prepare(layout, donate=True) for key in keys[1:]]
    x = jax.random.normal(keys[0], (case.size, shape.hidden_size), "bfloat16")
    logits = draw_logits(keys[0], (num_layers, case.size, shape.num_experts), "uniform")

    @jax.jit
    def run(x: Any, logits: Any, layers: Any) -> Any:
        for its_logits, experts in zip(logits, layers, strict=True):
            x += jmx.moe(x, jmx.Logits(its_logits, shape.method), experts, activation=shape.activation)
        return x

    def calls(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([run(x, logits, layers) for _ in range(count)][-1])
        return (time.perf_counter() - start) / count

    calls(1)
    count = 1 + int(LEAST_S / calls(3))
    return lambda: calls(count)


def model_sample(case: Case) -> Callable[[], float]:
    """Seconds of `STEPS` steps for `case.size` rows, or of a prefill of `case.size` tokens."""
    import numpy as np

    from jmx.models import FAMILIES, Runner, Sampler, from_source, load, random_source

    published: dict[str, Any] = {name: its for family in FAMILIES.values() for name, its in family.published.items()}
    if case.model in published:
        model = from_source(random_source(published[case.model]))
    elif Path(case.model).is_dir():
        model = load(case.model)
    else:
        raise ValueError(f"model (={case.model!r}) must be a checkpoint's directory, or one of {[*published]}")
    runner = Runner(model)
    rows, tokens = (case.size, PROMPT) if case.kind == "decode" else (1, case.size)
    prompts = np.random.default_rng(0).integers(model.config.vocab_size, size=(rows, tokens)).tolist()

    def decode() -> float:
        generation = runner.generate(prompts, Sampler(), 1 + 2 * STEPS)
        for _ in range(1 + STEPS):
            next(generation)
        start = time.perf_counter()
        for _ in range(STEPS):
            next(generation)
        return time.perf_counter() - start

    def prefill() -> float:
        start = time.perf_counter()
        next(runner.generate(prompts, Sampler(), 1))
        return time.perf_counter() - start

    sample = decode if case.kind == "decode" else prefill
    sample()
    return sample


def serve(tree: Path, case: Case, num_layers: int) -> None:
    """Builds the case with the jmx of `tree`, then answers each line of standard input with a sample's seconds."""
    sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(tree))
    import jmx

    found = Path(jmx.__file__).resolve()
    if not found.is_relative_to(tree.resolve()):
        raise RuntimeError(f"jmx of {tree} was asked for, and {found} was imported")
    sample = layer_sample(case, num_layers) if case.kind == "layer" else model_sample(case)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(sample(), flush=True)


# In the process that compares them


class Worker:
    """A process with the jmx of one checkout."""

    def __init__(self, tree: Path, case: Case, num_layers: int) -> None:
        command = [sys.executable, __file__, "--serve", str(tree), "--cases", str(case), "--layers", str(num_layers)]
        self.tree = tree
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the process of {self.tree} ended (exit code {self.process.wait()})")
        return line

    def sample(self) -> float:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return float(self.line())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def compare(trees: Sequence[Path], case: Case, num_layers: int, rounds: int) -> list[list[float]]:
    """Seconds of each round: of both checkouts. Programs of both are compiled at the same time."""
    workers: list[Worker] = []
    try:
        workers += [Worker(tree, case, num_layers) for tree in trees]
        for worker in workers:
            worker.line()
        times: list[list[float]] = []
        for i in range(rounds):
            turns = workers if i % 2 == 0 else workers[::-1]
            found = {worker: worker.sample() for worker in turns}
            times.append([found[worker] for worker in workers])
        return times
    finally:
        for worker in workers:
            worker.end()


def main() -> int:
    """Prints a line for each case, and writes all times to --json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="checkouts: of before, of after")
    parser.add_argument("--cases", required=True, type=lambda text: [Case.parse(part) for part in text.split(",")])
    parser.add_argument("--layers", type=int, default=8, help="of a layer's chain")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="a new file for the results")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.cases[0], arguments.layers)
        return 0
    if len(arguments.trees) != 2:
        parser.error(f"TREE (={[*map(str, arguments.trees)]}) must be two checkouts")
    if absent := [str(tree) for tree in arguments.trees if not (tree / "jmx" / "__init__.py").is_file()]:
        parser.error(f"TREE (={absent}) must be a checkout of jmx: it has no jmx/__init__.py")
    for name, least in {"layers": 1, "rounds": 2}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name} (={getattr(arguments, name)}) must be at least {least}")
    if arguments.json and arguments.json.exists():
        parser.error(f"--json (={arguments.json}) must not exist")
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        times = compare(arguments.trees, case, arguments.layers, arguments.rounds)
        low, middle, high = statistics.quantiles((after / before for before, after in times), n=4)
        before, after = (1e6 * statistics.median(its) for its in zip(*times, strict=True))
        print(f"{case}: {before:.1f} -> {after:.1f} us, {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
        rows.append({"case": str(case), "before_us": before, "after_us": after, "ratio": middle, "seconds": times})
    if arguments.json:
        arguments.json.write_text(json.dumps({"layers": arguments.layers, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
