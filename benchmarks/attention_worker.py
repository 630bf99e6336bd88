"""One system of `benchmarks/attention.py` in a process of its own: compiles all cases, waits, then times them.

    python benchmarks/attention_worker.py SYSTEM CASES

Prints a line of JSON when everything is compiled, then, once a line came on stdin, one for each case. The system
"limits" measures the machine.
"""

import json
import os
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the systems' processes share the card
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import attention_cases
from benchmarks.attention_cases import BF16, Built, Case, Inputs
from benchmarks.system_process import begin, described
from jmx.perf.machine import seconds

REPEATS, LEAST = 3, 0.02  # samples of a time, and seconds of each
COLD = 128e6  # bytes that a call reads at least, of several layers' keys and values, more than a cache holds
LAYERS = (2, 24)
CALL = 1.5e-3  # seconds that a call lasts at least, by a floor's estimate: the host needs a tenth of that for a call
RATES = (4e12, 5e14, 4e-6)  # bytes and flops a second, and seconds that kernels take at least, for that estimate
TOLERANCE = 0.02  # relative error of results
QUERIES = 24  # of a prompt, whose results are checked
POOL = 1 << 30  # random numbers that all inputs are slices of


class Program(NamedTuple):
    """Compiled functions of a case.

    Args:
        draw: the random numbers -> arguments of each layer, and the inputs of the last layer's first row.
        run: these arguments -> each layer's result, of the last of `passes_of` passes.
        inspect: these results -> whether all are finite, and the first row's last one, float32.
    """

    built: Built
    draw: Any
    run: Any
    inspect: Any


def layers_of(case: Case) -> int:
    """How many layers, of keys and values of their own, a call runs."""
    least, most = LAYERS
    return max(least if case.bytes < 1e9 else 1, min(most, int(-(-COLD // case.bytes))))


def passes_of(case: Case) -> int:
    """How many times a call runs its layers."""
    byte_rate, flop_rate, least = RATES
    layer = max(case.bytes / byte_rate, case.flops / flop_rate, least)
    return max(1, int(CALL / (layers_of(case) * layer)))


def compile_case(system: str, case: Case) -> Program | str:
    """The program, or why there is none."""
    try:
        built, layers = attention_cases.SYSTEMS[system](case), layers_of(case)
        layer = jax.jit(built.call)

        def draw(pool: jax.Array) -> Any:
            inputs = [inputs_of(case, pool, number) for number in range(layers)]
            return [built.arrange(own) for own in inputs], first_row(case, inputs[-1])

        def one_pass(arguments: Any, before: list[jax.Array]) -> list[jax.Array]:
            found: list[jax.Array] = []
            for own in arguments:  # one after the other, as layers are
                own, _ = lax.optimization_barrier((own, (found or before)[-1]))
                found.append(layer(own))
            return found

        def run(arguments: Any) -> list[jax.Array]:
            shapes = [jax.eval_shape(layer, own) for own in arguments]
            zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
            return lax.fori_loop(0, passes_of(case), lambda _, found: one_pass(arguments, found), zeros)

        def inspect(results: list[jax.Array]) -> Any:
            return jnp.stack([jnp.isfinite(out).all() for out in results]).all(), results[-1][0].astype(jnp.float32)

        pool = jax.ShapeDtypeStruct((POOL,), BF16)
        arguments, _ = jax.eval_shape(draw, pool)
        run_lowered = jax.jit(run).lower(arguments)
        lowered = jax.jit(draw).lower(pool), run_lowered, jax.jit(inspect).lower(run_lowered.out_info)
        return Program(built, *(stage.compile() for stage in lowered))
    except Exception as error:  # whatever a library raises for what it does not support
        return described(error)


def inputs_of(case: Case, pool: jax.Array, layer: int) -> Inputs:
    """A layer's inputs, slices of `pool`. Positions are the last ones, so that not every block of a cache is whole."""
    arrays = []
    for number, shape in enumerate(case.shapes):
        size = int(np.prod(shape))
        offset = 7919 * 16 * (3 * layer + number) % (POOL - size + 1)
        arrays.append(pool[offset : offset + size].reshape(shape))
    sinks = jnp.linspace(-3, 3, case.sizes.heads, dtype=jnp.float32) if case.sizes.sinks else None
    return Inputs(tuple(arrays), sinks, case.length - 1 - jnp.arange(case.batch, dtype=jnp.int32) % 7)


def first_row(case: Case, inputs: Inputs) -> Inputs:
    """The inputs of a batch of the first row alone."""
    cache = case.kind == "step" and not case.latent
    query, *rest = inputs.arrays
    kept = [array[:, :1] if cache else array[:1] for array in rest]
    return Inputs((query[:1], *kept), inputs.sinks, inputs.positions[:1])


def measure(case: Case, program: Program, pool: jax.Array) -> dict[str, Any]:
    """Checks a program's results, and times it."""
    arguments, row = program.draw(pool)
    finite, got = jax.device_get(program.inspect(program.run(arguments)))
    if not finite:
        return {"error": "results are not finite"}
    queries = sorted({0, case.length - 1, *np.random.default_rng().integers(case.length, size=QUERIES).tolist()})
    wanted = attention_cases.expected(case, jax.device_get(row), "no sinks" not in program.built.note, queries)
    got = (got[queries] if case.kind == "prompt" else got[None])[..., : wanted.shape[-1]]
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    if not error < TOLERANCE:
        return {"rel_err": error, "error": "the result is wrong"}
    time, spread = seconds(lambda: program.run(arguments), REPEATS, LEAST)
    layers, passes = len(arguments), passes_of(case)
    return {
        "layers": layers,
        "passes": passes,
        "us": 1e6 * time / (layers * passes),
        "spread": spread,
        "rel_err": error,
        "note": program.built.note,
    }


def main(system: str, wanted: str) -> None:
    cases = [Case(*fields) for fields in json.loads(wanted)]
    with ThreadPoolExecutor(8) as threads:
        programs = [*threads.map(lambda case: compile_case(system, case), cases)]
    if not begin(system, sum(isinstance(program, Program) for program in programs)):
        return
    pool = jax.random.normal(jax.random.key(0), (POOL,), BF16)
    for case, program in zip(cases, programs, strict=True):
        if isinstance(program, str):
            row: dict[str, Any] = {"error": program}
        else:
            try:
                row = measure(case, program, pool)
            except Exception as error:  # one case out of memory, or not supported, leaves the others
                row = {"error": described(error)}
        print(json.dumps({"case": case, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
