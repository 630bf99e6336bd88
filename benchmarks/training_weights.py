"""One system of `benchmarks/training.py`, in a process of its own: a layer whose experts' weights are trained.

    python benchmarks/training_weights.py SYSTEM '{"model": "gpt-oss-20b", "tokens": [1024, 8192]}'

Lines are those of training_layer.py. Times are of the forward pass ("forward"), of it with gradients of x and router
logits ("rows"), and of it with those of all weights, too ("both"). Systems: `qat`, master weights in float32 that each
call rounds to MXFP4 and multiplies on `mosaic`; `qat-bfloat16`, the same in bfloat16; `mosaic_float` (or another
backend), bfloat16 weights that are not rounded; `ragged_dot` and `tokamax`, the layer by grouped products of others on
the same weights in bfloat16. Results of some tokens are checked against the reference in float32, and the gradients of
one expert's weights against a dense layer.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes may share the card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import jmx
from benchmarks.system_process import described, report
from benchmarks.training_layer import (
    CHECKED,
    TOLERANCE,
    Case,
    Outcome,
    Settings,
    draw,
    errors,
    expected,
    reference,
    times,
)
from jmx import activations, training
from jmx.numerics.formats import BlockScaled
from jmx.perf import bench
from jmx.perf.shapes import MODELS, Shape
from jmx.selection.environment import Environment

EXPERT = 0  # whose weights' gradients are checked

# Gradients of the weights -> those of one expert, gate_up (N, H) and down (H, I).
OfExpert = Callable[[Any], tuple[jax.Array, jax.Array]]


class Trained(NamedTuple):
    """A system.

    Args:
        prepare: experts in MXFP4 -> its own weights of the same values.
        layer: x (T, H), logits (T, E), its own weights -> y (T, H).
        of_expert: see `OfExpert`.
    """

    prepare: Callable[[jmx.Experts], Any]
    layer: Callable[[jax.Array, jax.Array, Any], jax.Array]
    of_expert: OfExpert


def system_of(name: str, shape: Shape) -> Trained:
    """A system by its name."""

    def layer(backend: str, x: jax.Array, logits: jax.Array, weights: Any) -> jax.Array:
        return jmx.moe(x, jmx.Logits(logits, shape.method), weights, activation=shape.activation, backend=backend)

    if name in ("ragged_dot", "tokamax"):
        its = bench.System.of(bench.RAGGED_DOT, shape, 1, Environment.probe())
        product = jax.lax.ragged_dot if name == "ragged_dot" else tokamax_dot()
        peer = partial(bench.ragged_dot_layer, shape, ragged_dot=product)
        return Trained(its.prepare, peer, lambda d: (d.gate_up[EXPERT].T, d.down[EXPERT].T))
    if name.startswith("qat"):
        qat = training.QAT(dtype=name.partition("-")[2] or "float32")
        return Trained(qat.masters, partial(layer, "mosaic"), lambda d: (d.gate_up[EXPERT], d.down[EXPERT]))
    return Trained(in_bfloat16, partial(layer, name), lambda d: (d.gate_up.values[EXPERT], d.down.values[EXPERT]))


def in_bfloat16(experts: jmx.Experts) -> jmx.Experts:
    """Experts that are not quantized, of the same values."""
    gate_up, down = map(BlockScaled, experts.dequantize(jnp.bfloat16))
    biases = experts.gate_up_bias, experts.down_bias
    return jmx.Experts.of(gate_up, down, *biases, gate_up_order=experts.gate_up_order, format="bfloat16")


def tokamax_dot() -> Callable[..., jax.Array]:
    """tokamax's grouped product, with its gradients, by its Mosaic kernels."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return lambda rows, weights, sizes: tokamax.ragged_dot(rows, weights, sizes, implementation="mosaic_gpu")


def functions(system: Trained) -> dict[str, Callable[..., Any]]:
    """A layer as a residual block: with gradients of x, logits (1, T, E) and weights, without the last, forward alone.

    The first one takes longest to lower, so that it compiles while the others are lowered.
    """

    def forward(x: jax.Array, logits: jax.Array, weights: Any) -> jax.Array:
        return x + system.layer(x, logits[0], weights)

    def both(x: jax.Array, logits: jax.Array, weights: Any, dy: jax.Array) -> tuple[Outcome, Any]:
        y, vjp = jax.vjp(forward, x, logits, weights)
        dx, dlogits, dweights = vjp(dy)
        return Outcome(y, dx, dlogits), dweights

    def rows(x: jax.Array, logits: jax.Array, weights: Any, dy: jax.Array) -> Outcome:
        y, vjp = jax.vjp(lambda x, logits: forward(x, logits, weights), x, logits)
        return Outcome(y, *vjp(dy))

    return {"both": both, "rows": rows, "forward": forward}


def expert_gradients(shape: Shape, case: Case, experts: jmx.Experts) -> tuple[jax.Array, jax.Array]:
    """Those of one expert's weights in float32, by a dense layer of all tokens."""
    weights = tuple(its[EXPERT] for its in experts.dequantize(jnp.float32))
    biases = [0 if b is None else b[EXPERT].astype(jnp.float32) for b in (experts.gate_up_bias, experts.down_bias)]
    ids, shares = jmx.route(jmx.Logits(case.logits[0], shape.method))
    share = jnp.where(ids == EXPERT, shares, 0).sum(-1, keepdims=True)

    def layer(gate_up: jax.Array, down: jax.Array) -> jax.Array:
        dot = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
        h = dot(case.x.astype(jnp.float32), gate_up.T) + biases[0]
        a = activations.apply(shape.activation, h, shape.gate_up_order)
        return share * (dot(a, down.T) + biases[1])

    return jax.vjp(layer, *weights)[1](case.dy.astype(jnp.float32))


class Program(NamedTuple):
    """A system, and what is compiled for one token count.

    Args:
        functions: see `functions`.
        prepare: of the system.
        of_expert: see `expert_gradients`.
    """

    system: Trained
    functions: dict[str, Any]
    prepare: Any
    of_expert: Any


def compile_case(name: str, shape: Shape, settings: Settings, num_tokens: int) -> Program | str:
    """The programs at one token count, or why there are none."""
    try:
        case = jax.eval_shape(lambda: draw(shape, settings, num_tokens)[:3])
        system = system_of(name, shape)
        experts = jax.eval_shape(shape.experts, jax.random.key(0))
        weights = jax.eval_shape(system.prepare, experts)
        given = (*case[:2], weights), (*case[:2], weights, case[2])
        checked = Case(case[0], case[1], case[2], jax.ShapeDtypeStruct((0,), jnp.float32))
        calls: dict[str, Any] = {name: (its, given[name != "forward"]) for name, its in functions(system).items()}
        calls |= {"prepare": (system.prepare, (experts,))}
        calls |= {"of_expert": (partial(expert_gradients, shape), (checked, experts))}
        with ThreadPoolExecutor() as threads:  # compiling needs no lock of Python's, lowering does
            waiting = {
                name: threads.submit(jax.jit(its).lower(*its_own).compile) for name, (its, its_own) in calls.items()
            }
            reference(shape, 1, min(CHECKED, num_tokens))
        compiled = {name: each.result() for name, each in waiting.items()}
        return Program(
            system, {name: compiled[name] for name in functions(system)}, compiled["prepare"], compiled["of_expert"]
        )
    except Exception as error:  # whatever a library raises for what it does not support
        return described(error, 300)


def measure(shape: Shape, settings: Settings, num_tokens: int, program: Program) -> dict[str, Any]:
    """Checks the results, and times both functions, in us."""
    compiled, case = program.functions, draw(shape, settings, num_tokens)
    experts = shape.experts(jax.random.split(jax.random.key(1), settings.layers)[0])
    wanted = expected(shape, case, [experts])
    of_expert = program.of_expert(case._replace(checked=jnp.zeros(0, jnp.float32)), experts)
    weights = jax.block_until_ready(program.prepare(experts))
    del experts
    arguments = case.x, case.logits, weights
    outcome, dweights = compiled["both"](*arguments, case.dy)
    found = errors(outcome, wanted, case.checked)
    for role, got, exact in zip(("dgate_up", "ddown"), program.system.of_expert(dweights), of_expert, strict=True):
        found[role] = bench.relative_error(got, exact)
    del outcome, dweights
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    row: dict[str, Any] = {"rel_err": found, "weight_bytes": nbytes}
    if not max(found.values()) < TOLERANCE:
        return row | {"error": "the result is wrong"}
    given = arguments, (*arguments, case.dy)
    return row | times({name: (its, given[name != "forward"]) for name, its in compiled.items()}, settings)


def main(name: str, text: str) -> None:
    settings = Settings(**json.loads(text) | {"layers": 1})
    shape = MODELS[settings.model]
    report(name, settings.tokens, partial(compile_case, name, shape, settings), partial(measure, shape, settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
