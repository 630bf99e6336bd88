"""One system of `benchmarks/float_products.py` in a process of its own: compiles all cases, waits, then times them.

    python benchmarks/float_products_worker.py SYSTEM CASES

Prints a line of JSON when everything is compiled, then, once a line came on stdin, one for each case. The system
"limits" measures the machine.
"""

import json
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the systems' processes share the card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")  # since XLA keeps what it used to choose products
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.float_products_cases import ALIGN, BF16, SYSTEMS, Case
from benchmarks.system_process import begin, described
from jmx.perf.machine import seconds

ROUNDS, LEAST = 5, 0.03  # of all configurations and the dense product in turn, and seconds of a sample
TOLERANCE = 1e-2  # relative error of results in bfloat16
POOL = 1 << 28  # random numbers that all rows are slices of
DENSE = "dense"  # the name of a dense product among configurations
CHECKED = 8  # outputs of each checked row, and rows of each checked gradient


class Shapes(NamedTuple):
    """Of both operands, and of the groups' starts and sizes."""

    left: jax.ShapeDtypeStruct
    right: jax.ShapeDtypeStruct
    starts: jax.ShapeDtypeStruct
    sizes: jax.ShapeDtypeStruct


def shapes_of(case: Case, align: int = 1) -> Shapes:
    """`align`: groups begin at a multiple of it, with rows of no group between them."""
    number = num_rows(case, align)
    rows = {"x": (number, case.inputs), "d": (number, case.outputs)}
    weights = case.num_experts, case.outputs, case.inputs
    pair = {"forward": (rows["x"], weights), "dx": (rows["d"], weights), "dw": (rows["d"], rows["x"])}[case.which]
    left, right = (jax.ShapeDtypeStruct(shape, BF16) for shape in pair)
    ints = jax.ShapeDtypeStruct((case.num_experts,), jnp.int32)
    return Shapes(left, right, ints, ints)


def num_rows(case: Case, align: int) -> int:
    """Rows that hold any groups."""
    return -(-(case.rows + (align - 1) * min(case.num_experts, case.rows)) // align) * align


def dense_of(case: Case) -> tuple[Any, tuple[Any, Any]]:
    """The dense product of the same FLOPs, and the shapes of its operands: all rows times one weight."""
    x, d = (jax.ShapeDtypeStruct((case.rows, size), BF16) for size in (case.inputs, case.outputs))
    weight = jax.ShapeDtypeStruct((case.outputs, case.inputs), BF16)
    if case.which == "dw":
        return (lambda d, x: d.T @ x), (d, x)
    return (lambda x, w: x @ w.T, (x, weight)) if case.which == "forward" else (lambda d, w: d @ w, (d, weight))


def sizes_of(case: Case) -> np.ndarray[Any, Any]:
    """Rows of each expert by random routing."""
    drawn = np.random.default_rng(case.tokens).random((case.tokens, case.num_experts))
    chosen = np.argpartition(drawn, case.top_k, axis=1)[:, : case.top_k]
    return np.bincount(chosen.reshape(-1), minlength=case.num_experts).astype(np.int32)


def starts_of(sizes: np.ndarray[Any, Any], align: int) -> np.ndarray[Any, Any]:
    """Where groups of these sizes begin."""
    taken = -(-sizes // align) * align
    return (np.cumsum(taken) - taken).astype(np.int32)


def error_of(case: Case, got: Any, left: Any, right: Any, starts: Any, sizes: Any) -> jax.Array:
    """The relative error, against float32, of some results of the first and last row of each group; or, of dw, of some
    rows of each group's gradient. Sums without products of matrices, which XLA would tune first."""
    exact = jnp.float32

    def of_group(group: Any) -> tuple[Any, Any]:
        start, end = starts[group], starts[group] + sizes[group]
        if case.which == "dw":
            row = jnp.arange(len(left))
            inside = (row >= start) & (row < end)
            d = jnp.where(inside[:, None], left[:, :CHECKED], 0).astype(exact)
            rows = jnp.where(inside[:, None], right, 0).astype(exact)
            want = (d[:, :, None] * rows[:, None, :]).sum(0)
            off = got[group, :CHECKED].astype(exact) - want
        else:
            at = jnp.clip(jnp.stack([start, end - 1]), 0, len(left) - 1)
            rows, weights = left[at].astype(exact), right[group].astype(exact)
            axis = 1 if case.which == "forward" else 0
            summed = rows[:, None, :] if axis else rows[:, :, None]
            want = (summed * weights[None]).sum(axis + 1)
            off = jnp.where(sizes[group] > 0, got[at].astype(exact) - want, 0)
        return jnp.square(off).sum(), jnp.square(want).sum()

    groups = jnp.arange(case.num_experts)[:: case.num_experts // 4 if case.which == "dw" else 1]
    off, all_ = jax.lax.map(of_group, groups)
    return jnp.sqrt(off.sum() / all_.sum())


class Compiled(NamedTuple):
    """A case's programs, or why there is one not, by the names of configurations; the check; the dense product."""

    programs: dict[str, Any]
    check: Any = None
    dense: Any = None


def compile_case(system: str, case: Case) -> Compiled:
    shapes = shapes_of(case, ALIGN.get(system, 1))
    try:
        configurations = SYSTEMS[system](case)
    except Exception as error:  # whatever a library raises for what it does not support
        return Compiled({"": described(error)})
    programs: dict[str, Any] = {}
    for name, run in configurations.items():
        try:
            programs[name] = jax.jit(run).lower(*shapes).compile()
        except Exception as error:
            programs[name] = described(error)
    columns = case.outputs if case.which == "forward" else case.inputs
    shape = (case.num_experts, case.outputs, case.inputs) if case.which == "dw" else (shapes.left.shape[0], columns)
    check = jax.jit(lambda *arrays: error_of(case, *arrays)).lower(jax.ShapeDtypeStruct(shape, BF16), *shapes)
    dense, operands = dense_of(case)
    return Compiled(programs, check.compile(), jax.jit(dense).lower(*operands).compile())


def measure(operands: tuple[Any, ...], dense_operands: tuple[Any, ...], compiled: Compiled) -> dict[str, Any]:
    """Checks each configuration's results, and times all and the dense product in turn: medians of rounds, the second
    one in reversed order. Without pauses, since a card at its power limit lowers its clock within milliseconds, for
    each of them alike."""
    calls, failures, errors = {}, {}, {}
    for name, program in compiled.programs.items():
        if isinstance(program, str):
            failures[name] = program
            continue
        try:
            errors[name] = float(compiled.check(program(*operands), *operands))
            if not errors[name] < TOLERANCE:
                failures[name] = f"the result is wrong by {errors[name]:.2g}"
                continue
            calls[name] = partial(program, *operands)
        except Exception as error:  # one of them out of memory leaves the others
            failures[name] = described(error)
    if not calls:
        return {"error": "; ".join(failures.values())[:200]}
    samples: dict[str, list[float]] = {name: [] for name in calls} | {DENSE: []}
    for number in range(ROUNDS):
        for name in [*samples][:: -1 if number % 2 else 1]:
            call = partial(compiled.dense, *dense_operands) if name == DENSE else calls[name]
            samples[name].append(1e6 * seconds(call, 1, LEAST)[0])
    times = {name: statistics.median(found) for name, found in samples.items()}
    dense = times.pop(DENSE)
    best = min(times, key=lambda name: times[name])
    shares = [ours / its for ours, its in zip(samples[DENSE], samples[best], strict=True)]
    found = {"us": times[best], "best": best, "rel_err": errors[best], "all_us": times, "dense_us": dense}
    found |= {"shares_of_dense": sorted(shares)}
    return found | ({"failures": failures} if failures else {})


def main(system: str, wanted: str) -> None:
    cases = [Case(*fields) for fields in json.loads(wanted)]
    with ThreadPoolExecutor(8) as threads:
        programs = [*threads.map(lambda case: compile_case(system, case), cases)]
    if not begin(system, len(programs)):
        return
    pool = jax.random.normal(jax.random.key(0), (POOL,), BF16)
    held: tuple[Any, Any] = None, None
    align = ALIGN.get(system, 1)
    for case, compiled in zip(cases, programs, strict=True):
        weights = case.num_experts, case.outputs, case.inputs
        if case.which != "dw" and held[0] != weights:
            held = None, None
            held = weights, jnp.resize(pool, weights)

        def taken(shapes: Sequence[Any], weight: Any = held[1]) -> list[Any]:
            return [
                weight if shape.ndim == 3 else pool[offset : offset + shape.size].reshape(shape.shape)
                for shape, offset in zip(shapes, (0, 7919 * 16), strict=True)
            ]

        sizes = sizes_of(case)
        groups = jnp.asarray(starts_of(sizes, align)), jnp.asarray(sizes)
        row = measure((*taken(shapes_of(case, align)[:2]), *groups), (*taken(dense_of(case)[1]),), compiled)
        print(json.dumps({"case": case, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
