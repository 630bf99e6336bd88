"""One system of `benchmarks/float_products.py` in a process of its own: compiles all cases, waits, then times them.

    python benchmarks/float_products_worker.py SYSTEM CASES

Prints a line of JSON when everything is compiled, then, once a line came on stdin, one for each case. The system
"limits" measures the machine.
"""

import json
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the systems' processes share the card
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")  # since XLA keeps what it used to choose products
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.float_products_cases import BF16, SYSTEMS, Case
from benchmarks.system_process import begin, described
from jmx.perf.machine import seconds

REPEATS, LEAST = 3, 0.04  # samples of a time, and seconds of each
PAUSE = 0.1  # seconds before each, since a card that was busy lowers its clock
TOLERANCE = 1e-2  # relative error of results in bfloat16
POOL = 1 << 28  # random numbers that all rows are slices of
CHECKED = 8  # outputs of each checked row, and rows of each checked gradient


def shapes_of(case: Case) -> tuple[Any, Any, Any]:
    """Of both operands, and of the groups' sizes."""
    rows = {"x": (case.rows, case.inputs), "d": (case.rows, case.outputs)}
    weights = case.num_experts, case.outputs, case.inputs
    pair = {"forward": (rows["x"], weights), "dx": (rows["d"], weights), "dw": (rows["d"], rows["x"])}[case.which]
    left, right = (jax.ShapeDtypeStruct(shape, BF16) for shape in pair)
    return left, right, jax.ShapeDtypeStruct((case.num_experts,), jnp.int32)


def sizes_of(case: Case) -> np.ndarray[Any, Any]:
    """Rows of each expert by random routing."""
    drawn = np.random.default_rng(case.tokens).random((case.tokens, case.num_experts))
    chosen = np.argpartition(drawn, case.top_k, axis=1)[:, : case.top_k]
    return np.bincount(chosen.reshape(-1), minlength=case.num_experts).astype(np.int32)


def error_of(case: Case, got: Any, left: Any, right: Any, sizes: Any) -> jax.Array:
    """The relative error, against float32, of some results of the first and last row of each group; or, of dw, of some
    rows of each group's gradient. Sums without products of matrices, which XLA would tune first."""
    ends = jnp.cumsum(sizes)
    exact = jnp.float32

    def of_group(group: Any) -> tuple[Any, Any]:
        start, end = ends[group] - sizes[group], ends[group]
        if case.which == "dw":
            inside = (jnp.arange(case.rows) >= start) & (jnp.arange(case.rows) < end)
            d = jnp.where(inside[:, None], left[:, :CHECKED], 0).astype(exact)
            want = (d[:, :, None] * right[:, None, :].astype(exact)).sum(0)
            off = got[group, :CHECKED].astype(exact) - want
        else:
            at = jnp.clip(jnp.stack([start, end - 1]), 0, case.rows - 1)
            rows, weights = left[at].astype(exact), right[group].astype(exact)
            axis = 1 if case.which == "forward" else 0
            summed = rows[:, None, :] if axis else rows[:, :, None]
            want = (summed * weights[None]).sum(axis + 1)
            off = jnp.where(sizes[group] > 0, got[at].astype(exact) - want, 0)
        return jnp.square(off).sum(), jnp.square(want).sum()

    groups = jnp.arange(case.num_experts)[:: case.num_experts // 4 if case.which == "dw" else 1]
    off, all_ = jax.lax.map(of_group, groups)
    return jnp.sqrt(off.sum() / all_.sum())


def compile_case(system: str, case: Case) -> tuple[dict[str, Any], Any]:
    """The compiled configurations, or why there is none; and the check."""
    shapes = shapes_of(case)
    try:
        configurations = SYSTEMS[system](case)
    except Exception as error:  # whatever a library raises for what it does not support
        return {"": described(error)}, None
    programs: dict[str, Any] = {}
    for name, run in configurations.items():
        try:
            programs[name] = jax.jit(run).lower(*shapes).compile()
        except Exception as error:
            programs[name] = described(error)
    columns = case.outputs if case.which == "forward" else case.inputs
    shape = (case.num_experts, case.outputs, case.inputs) if case.which == "dw" else (case.rows, columns)
    got = jax.ShapeDtypeStruct(shape, BF16)
    return programs, jax.jit(lambda *arrays: error_of(case, *arrays)).lower(got, *shapes).compile()


def measure(operands: tuple[Any, ...], programs: dict[str, Any], check: Any) -> dict[str, Any]:
    """Checks each configuration's results, and times it."""
    times, failures, errors = {}, {}, {}
    for name, program in programs.items():
        if isinstance(program, str):
            failures[name] = program
            continue
        try:
            errors[name] = float(check(program(*operands), *operands))
            if not errors[name] < TOLERANCE:
                failures[name] = f"the result is wrong by {errors[name]:.2g}"
                continue
            time.sleep(PAUSE)
            times[name] = 1e6 * seconds(lambda program=program: program(*operands), REPEATS, LEAST)[0]
        except Exception as error:  # one of them out of memory leaves the others
            failures[name] = described(error)
    if not times:
        return {"error": "; ".join(failures.values())[:200]}
    best = min(times, key=lambda name: times[name])
    found = {"us": times[best], "best": best, "rel_err": errors[best], "all_us": times}
    return found | ({"failures": failures} if failures else {})


def main(system: str, wanted: str) -> None:
    cases = [Case(*fields) for fields in json.loads(wanted)]
    with ThreadPoolExecutor(8) as threads:
        programs = [*threads.map(lambda case: compile_case(system, case), cases)]
    if not begin(system, len(programs)):
        return
    pool = jax.random.normal(jax.random.key(0), (POOL,), BF16)
    held: tuple[Any, Any] = None, None
    for case, (compiled, check) in zip(cases, programs, strict=True):
        left, right, _ = shapes_of(case)
        weights = case.num_experts, case.outputs, case.inputs
        if case.which != "dw" and held[0] != weights:
            held = None, None
            held = weights, jnp.resize(pool, weights)
        operands = [
            held[1] if shape.ndim == 3 else pool[offset : offset + shape.size].reshape(shape.shape)
            for shape, offset in ((left, 0), (right, 7919 * 16))
        ]
        row = measure((*operands, jnp.asarray(sizes_of(case))), compiled, check)
        print(json.dumps({"case": case, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
