"""One backend in one format, for `benchmarks/layer_turns.py`: compiles for all token counts, waits, then times them.

    python benchmarks/layer_turns_worker.py SYSTEM SETTINGS

SETTINGS, JSON: model, pair (WEIGHTS or WEIGHTS:INPUTS; null: the model's own), tokens, routing, layers, repeats, seed.
Prints a line of JSON when everything is compiled, then, once a line came on stdin, one for each token count. The system
"limits" measures the machine.
"""

import json
import os
import pathlib
import statistics
import sys
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the card
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks.system_process import begin, described, report
from benchmarks.worker import LIMITS
from jmx.perf import bench
from jmx.perf.shapes import Shape, routed_shape
from jmx.selection.costs import times_bfloat16
from jmx.selection.environment import Environment


class Program(NamedTuple):
    """What is compiled for one token count."""

    system: bench.System
    case: bench.Case
    compiled: Any


class Turn:
    """The cases of a backend in one format: drawn and compiled side by side, timed one after the other."""

    def __init__(self, name: str, settings: dict[str, Any]):
        shape = routed_shape(settings["model"], settings["routing"])
        self.name, self.settings = name, settings
        self.shape: Shape = shape if settings["pair"] is None else shape.in_formats(settings["pair"])
        self.environment = Environment.probe()
        # The keys of `bench.run`, so that both draw the same weights and tokens.
        weights_key, self.data_key = jax.random.split(jax.random.key(settings["seed"]))
        self.layer_keys = jax.random.split(weights_key, bench.layers_of_call(1, settings["layers"]))
        self.first: Any = self.shape.experts(self.layer_keys[0])  # until all is compiled
        self.built: dict[str, list[Any]] = {}

    def compiled(self, tokens: int) -> Program | str:
        """The program of a token count, or why there is none."""
        layers = bench.layers_of_call(tokens, self.settings["layers"])
        try:
            system = bench.System.of(self.name, self.shape, tokens, self.environment)
            key = jax.random.fold_in(self.data_key, tokens)
            case = bench.Case.draw(self.shape, tokens, self.settings["routing"], layers, key, self.first)
            return Program(system, case, bench.compile_layers(system, self.shape, case, self.layer_keys[:layers]))
        except Exception as error:  # of one token count, or one format
            return described(error, 300)

    def measured(self, tokens: int, program: Program) -> dict[str, Any]:
        """Fields of a `Row`, and `times_bfloat16`: the rate of the problem's products over that of bfloat16."""
        self.first = None  # its memory is the layers'
        system, case, compiled = program
        keys = self.layer_keys[: len(case.logits)]
        fields = bench.measure_layers(compiled, system, self.shape, case, self.built, keys, self.settings["repeats"])
        times = times_bfloat16(self.shape.problem(tokens, "packed"), self.environment)
        fields |= {"weights": system.weights, "layers": len(keys), "active": statistics.fmean(case.active)}
        return fields | {"times_bfloat16": times}


def main(name: str, settings: dict[str, Any]) -> None:
    if name == LIMITS:
        begin(name, 0)
        return
    turn = Turn(name, settings)
    report(name, settings["tokens"], turn.compiled, turn.measured)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
