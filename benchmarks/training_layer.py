"""One system of `benchmarks/training.py`, in a process of its own: forward, and forward + gradients, of a layer.

    python benchmarks/training_layer.py SYSTEM '{"model": "gpt-oss-120b", "tokens": [64, 1024, 8192]}'

Prints a line of JSON when everything is compiled, then, once a line came on stdin, one for each token count. Systems
are backends of jmx on quantized weights, "mosaic" or, with `save_gate_up`, "mosaic+h", and grouped products of others
on the same weights in bfloat16. Gradients are those of x and of router logits, which every token has of its own: so
some tokens alone are checked against the reference in float32.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes may share the card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import jmx
from benchmarks.system_process import begin, described, report
from jmx.perf import bench
from jmx.perf.bench import System
from jmx.perf.machine import seconds
from jmx.perf.shapes import MODELS, Shape
from jmx.selection.environment import Environment

CHECKED = 32  # tokens of which results are checked
TOLERANCE = 5e-2  # relative error of results, as of `jmx bench`

# Columns of a tile, of which both widths of gpt-oss are multiples, and stages of jax's kernel. Its rows are 64, or 128
# where experts have more rows than that on average.
MGPU_COLUMNS, MGPU_STAGES = 192, 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed: `layers` different layers of `model` in one call, `repeats` samples of each time."""

    model: str
    tokens: tuple[int, ...]
    layers: int = 2
    repeats: int = 5


class Case(NamedTuple):
    """Inputs at one token count: x (T, H), logits (L, T, E), the cotangent (T, H), and the tokens that are checked."""

    x: jax.Array
    logits: jax.Array
    dy: jax.Array
    checked: Any


class Outcome(NamedTuple):
    """y (T, H), and gradients of x and logits."""

    y: jax.Array
    dx: jax.Array
    dlogits: jax.Array


class Program(NamedTuple):
    """A system's compiled functions at one token count, of x, logits and weights, and `both` also of dy."""

    system: System
    forward: Any
    both: Any
    note: str


def draw(shape: Shape, settings: Settings, num_tokens: int) -> Case:
    """Random inputs, the same in every process."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), num_tokens), 3)
    sizes = num_tokens, shape.hidden_size
    logits = jax.random.normal(keys[1], (settings.layers, num_tokens, shape.num_experts), jnp.float32)
    checked = np.random.default_rng(0).permutation(num_tokens)[:CHECKED]
    x, dy = (jax.random.normal(key, sizes, jnp.bfloat16) for key in (keys[0], keys[2]))
    return Case(x, logits, dy, checked)


def system_of(name: str, shape: Shape, num_tokens: int) -> tuple[System, str]:
    """A system by its name, and a note on it."""
    environment, note = Environment.probe(), ""
    if name == "ragged_dot_mgpu":
        rows = 128 if num_tokens * shape.method.top_k > 64 * shape.num_experts else 64
        product = mgpu_dot(rows, MGPU_COLUMNS, MGPU_STAGES)
        note = f"tiles of {rows} by {MGPU_COLUMNS}, {MGPU_STAGES} stages"
    elif name == "tokamax":
        product = tokamax_dot()
    else:
        backend, _, saved = name.partition("+")
        system = System.of(backend, shape, num_tokens, environment)
        if saved not in ("", "h"):
            raise ValueError(f"`system` (={name!r}) must be a backend of jmx, or one and '+h'")
        return (system._replace(layer=partial(saving_layer, shape, backend)) if saved else system), note
    floats = System.of(bench.RAGGED_DOT, shape, num_tokens, environment)
    return floats._replace(layer=partial(bench.ragged_dot_layer, shape, ragged_dot=product)), note


def saving_layer(shape: Shape, backend: str, x: jax.Array, logits: jax.Array, experts: Any) -> jax.Array:
    """A layer of jmx that saves the outputs of its first product."""
    options: dict[str, Any] = {"activation": shape.activation, "backend": backend, "save_gate_up": True}
    return jmx.moe(x, jmx.Logits(logits, shape.method), experts, **options)


Dot = Callable[..., jax.Array]  # rows (M, K), weights (E, K, N), sizes (E,) -> (M, N)


def mgpu_dot(block_m: int, block_n: int, stages: int) -> Dot:
    """jax's Mosaic kernel of a grouped product."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tiles: dict[str, Any] = {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": 64,
        "max_concurrent_steps": stages,
        "grid_block_n": 1,
    }

    def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
        return ragged_dot(rows, weights, group_sizes=sizes, transpose_rhs=transposed, **tiles)

    return of_rows(product)


def tokamax_dot() -> Dot:
    """tokamax's Mosaic kernel of a grouped product, configured by its own tables and heuristics."""
    import tokamax  # pyright: ignore[reportMissingImports]

    def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
        summed = (([1], [2 if transposed else 1]), ([], []))
        dimensions = jax.lax.RaggedDotDimensionNumbers(summed, [0], [0])
        return tokamax.ragged_dot_general(rows, weights, sizes, dimensions, implementation="mosaic_gpu")

    return of_rows(product)


def of_rows(product: Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]) -> Dot:
    """A grouped product that is differentiated in its rows alone, by the product with transposed weights."""

    @jax.custom_vjp
    def dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return product(rows, weights, sizes, False)

    def forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
        return product(rows, weights, sizes, False), (weights, sizes)

    dot.defvjp(forward, lambda residuals, dy: (product(dy, residuals[0], residuals[1], True), None, None))
    return dot


def functions(system: System) -> tuple[Callable[..., jax.Array], Callable[..., Outcome]]:
    """The layers of a call one after the other, as residual blocks: forward, and with gradients."""

    def forward(x: jax.Array, logits: jax.Array, weights: Any) -> jax.Array:
        for its, more in zip(logits, weights, strict=True):
            x = x + system.layer(x, its, more)
        return x

    def both(x: jax.Array, logits: jax.Array, weights: Any, dy: jax.Array) -> Outcome:
        y, vjp = jax.vjp(lambda x, logits: forward(x, logits, weights), x, logits)
        return Outcome(y, *vjp(dy))

    return forward, both


def compile_case(name: str, shape: Shape, settings: Settings, num_tokens: int) -> Program | str:
    """The programs at one token count, or why there are none."""
    try:
        case = jax.eval_shape(partial(_arrays, shape, settings, num_tokens))
        system, note = system_of(name, shape, num_tokens)
        one = jax.eval_shape(lambda key: system.prepare(shape.experts(key)), jax.random.key(0))
        arguments = case.x, case.logits, [one] * settings.layers
        forward, both = functions(system)
        with ThreadPoolExecutor() as threads:  # compiling needs no lock of Python's, lowering does
            calls: Any = (forward, arguments), (both, (*arguments, case.dy))
            compiled = [threads.submit(jax.jit(its).lower(*given).compile) for its, given in calls]
            reference(shape, settings.layers, min(CHECKED, num_tokens))
        return Program(system, compiled[0].result(), compiled[1].result(), note)
    except Exception as error:  # whatever a library raises for what it does not support
        return described(error, 300)


def _arrays(shape: Shape, settings: Settings, num_tokens: int) -> Case:
    return draw(shape, settings, num_tokens)._replace(checked=np.zeros(0))


def expected(shape: Shape, case: Case, layers: list[Any]) -> Outcome:
    """The reference's results for the checked tokens, in float32. `layers`: experts in any layout."""
    x, dy = (array[case.checked].astype(jnp.float32) for array in (case.x, case.dy))
    return reference(shape, len(layers), len(x))(x, case.logits[:, case.checked], layers, dy)


@cache  # compiled once for all token counts
def reference(shape: Shape, layers: int, num_tokens: int) -> Callable[..., Outcome]:
    """The reference for so many layers and tokens, compiled."""
    x = jax.ShapeDtypeStruct((num_tokens, shape.hidden_size), jnp.float32)
    logits = jax.ShapeDtypeStruct((layers, num_tokens, shape.num_experts), jnp.float32)
    experts = jax.eval_shape(shape.experts, jax.random.key(0))
    both = functions(System.of("xla", shape, num_tokens, Environment.probe()))[1]
    return jax.jit(both).lower(x, logits, [experts] * layers, x).compile()


def errors(got: Outcome, wanted: Outcome, checked: np.ndarray) -> dict[str, float]:
    """Relative errors by name, of the checked tokens."""
    found = Outcome(got.y[checked], got.dx[checked], got.dlogits[:, checked])
    return {name: bench.relative_error(a, b) for name, a, b in zip(Outcome._fields, found, wanted, strict=True)}


def measure(shape: Shape, settings: Settings, num_tokens: int, program: Program) -> dict[str, Any]:
    """Checks the results, and times both functions, in us a layer."""
    case, system = draw(shape, settings, num_tokens), program.system
    keys = jax.random.split(jax.random.key(1), settings.layers)
    wanted = expected(shape, case, [shape.experts(key) for key in keys])
    weights = [jax.block_until_ready(system.prepare(shape.experts(key))) for key in keys]
    arguments = case.x, case.logits, weights
    found = errors(program.both(*arguments, case.dy), wanted, case.checked)
    row: dict[str, Any] = {"rel_err": found, "note": program.note, "weights": system.weights}
    row["weight_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / settings.layers
    if not max(found.values()) < TOLERANCE:
        return row | {"error": "the result is wrong"}
    calls = {"forward": (program.forward, arguments), "both": (program.both, (*arguments, case.dy))}
    return row | times(calls, settings)


def times(calls: dict[str, tuple[Any, tuple[Any, ...]]], settings: Settings) -> dict[str, Any]:
    """Those of compiled functions with their arguments, "forward", "both" and others, in us a layer, and their
    temporary memory."""
    row: dict[str, Any] = {}
    for name, (compiled, arguments) in calls.items():
        time, spread = seconds(partial(compiled, *arguments), settings.repeats)
        row |= {f"{name}_us": 1e6 * time / settings.layers, f"{name}_spread": spread}
        row[f"{name}_temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    return row | {"over_forward": row["both_us"] / row["forward_us"]}


def main(name: str, text: str) -> None:
    settings = Settings(**json.loads(text))
    shape = MODELS[settings.model]
    if name == "limits":
        begin(name, 0)
        return
    report(name, settings.tokens, partial(compile_case, name, shape, settings), partial(measure, shape, settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
