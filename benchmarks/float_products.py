#!/usr/bin/env python3
"""Times grouped products of bfloat16 weights of published models, and their gradients: jmx's kernels and their peers.

    python benchmarks/float_products.py --json FILE
    python benchmarks/float_products.py --systems jmx,tokamax --models gpt-oss-20b --tokens 64,8192

A case is one product of a layer, forward or one of its two gradients, on the rows that random routing gives each
expert. Each system runs in a process of its own, which is killed if it takes too long. It checks its results against
float32 and prints the best of its configurations. The rate of a dense product is measured in the same run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx.perf.shapes import MODELS
from jmx.util import atomic_files

ROLES, PASSES = ("gate_up", "down"), ("forward", "dx", "dw")
SECONDS = 120.0  # of a system's process
TOLERANCE = 1e-2  # relative error, of results in bfloat16
CHECKED = 3  # experts whose gradients are checked


class Case(NamedTuple):
    """A product: E experts' weights (N, K), `tokens` with `top_k` rows each."""

    model: str
    role: str
    which: str
    tokens: int
    top_k: int
    E: int
    N: int
    K: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.N * self.K


def all_cases(models: Sequence[str], roles: Sequence[str], passes: Sequence[str], tokens: Sequence[int]) -> list[Case]:
    """All of these, by model and role, so that weights are made once."""
    found = []
    for model in models:
        shape = MODELS[model]
        hidden, inner, number = shape.hidden_size, shape.intermediate_size, shape.num_experts
        for role in roles:
            sizes = (2 * inner, hidden) if role == "gate_up" else (hidden, inner)
            found += [
                Case(model, role, which, count, shape.method.top_k, number, *sizes)
                for count in tokens
                for which in passes
            ]
    return found


Variants = Iterator[tuple[str, Callable[..., Any]]]  # of a pass, by name: (left, right, sizes) -> result


def jmx_variants(case: Case) -> Variants:
    import jax
    import jax.numpy as jnp

    from jmx.pallas.float_sm90.config import deepest, heuristic
    from jmx.pallas.float_sm90.outer import outer
    from jmx.pallas.float_sm90.product import product

    columns = case.N if case.which == "forward" else case.K
    options = {"num_cores": jax.devices()[0].core_count}
    configs = {"": heuristic(columns)}
    if os.environ.get("VARIANTS"):
        configs |= {"256x2": deepest(256, 2), "192x2": deepest(192, 2), "192x3": deepest(192, 3)}
        configs |= {"s4": deepest(heuristic(columns).block_n, 2, 4), "s32": deepest(heuristic(columns).block_n, 2, 32)}
    for name, config in configs.items():
        if case.which == "dw":
            yield name, partial(outer, dtype=jnp.bfloat16, config=config, **options)
        else:
            transposed = case.which == "dx"
            run = partial(product, dtype=jnp.bfloat16, transposed=transposed, config=config, **options)
            yield name, run


def ragged_dot_variants(case: Case) -> Variants:
    import jax.numpy as jnp
    from jax import lax

    if case.which == "forward":
        yield "", lambda rows, weights, sizes: lax.ragged_dot(rows, weights.mT, sizes)
    elif case.which == "dx":
        yield "", lambda d, weights, sizes: lax.ragged_dot(d, weights, sizes)
    else:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        general = lax.ragged_dot_general
        yield "", lambda d, rows, sizes: general(d, rows, sizes, numbers, preferred_element_type=jnp.bfloat16)


def mgpu_variants(case: Case) -> Variants:
    """The kernels that jax has as examples of Pallas Mosaic GPU."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    for block_n in (128, 192):
        options = {"block_n": block_n, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1}
        if case.which == "dw":
            if case.N % 64 == case.K % block_n == 0:
                yield (
                    f"64x{block_n}",
                    lambda d, rows, sizes, o=options: transposed_ragged_dot(
                        d, rows, group_sizes=sizes, block_m=64, **o
                    ),
                )
            continue
        for block_m in (64, 128):
            yield (
                f"{block_m}x{block_n}",
                lambda rows, weights, sizes, m=block_m, o=options: ragged_dot(
                    rows, weights, group_sizes=sizes, block_m=m, transpose_rhs=case.which == "forward", **o
                ),
            )


def tokamax_variants(case: Case) -> Variants:
    """Its Mosaic kernels, as they choose their sizes, and with larger ones."""
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu as kernels  # pyright: ignore[reportMissingImports]

    numbers = {
        "forward": base.TRANS_RHS_RAGGED_DOT_DIM_NUMS,
        "dx": base.DEFAULT_RAGGED_DOT_DIM_NUMS,
        "dw": base.RAGGED_CONTRACTING_DOT_DIM_NUMS,
    }[case.which]
    minor = kernels.common.MatmulDimension.M
    shared = {"split_k": 1, "persistent": False, "grid_minor_dim": minor, "grid_tile_width": 1}
    sizes_of = {
        "": None,
        "128x64": {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 4},
        "128x128": {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 4},
    }
    for name, sizes in sizes_of.items():
        config = None if sizes is None else kernels.Config(**sizes, **shared)
        run = kernels.PallasMosaicGpuRaggedDot(config=config)
        yield (
            name,
            lambda left, right, groups, run=run: run(
                left, right, group_sizes=groups, ragged_dot_dimension_numbers=numbers
            ),
        )


SYSTEMS = {"jmx": jmx_variants, "ragged_dot": ragged_dot_variants, "mgpu": mgpu_variants, "tokamax": tokamax_variants}


def measure(system: str, cases: Sequence[Case]) -> None:
    """Prints a line of JSON for each case."""
    import jax
    import jax.numpy as jnp

    from jmx.perf.machine import describe_machine, measure_limits, seconds

    limits = measure_limits(3)
    about = {"machine": describe_machine(jax.devices()[0]), "dense": limits.dense_rate, "copy": limits.copy_rate}
    print(json.dumps(about), flush=True)
    held: tuple[Any, Any] = (None, None)
    for case in cases:
        key = case.model, case.role
        if held[0] != key:
            held = key, jax.random.normal(jax.random.key(1), (case.E, case.N, case.K), jnp.bfloat16)
        left, right, sizes = inputs(case, held[1])
        operands = left, right, sizes
        times, errors, failures = {}, {}, {}
        for name, run in SYSTEMS[system](case):
            try:
                compiled = jax.jit(run).lower(*operands).compile()
                errors[name] = error_of(case, compiled(*operands), *operands)
                times[name] = seconds(partial(compiled, *operands), 3, 0.02)[0]
            except Exception as e:  # one configuration may not fit
                failures[name] = f"{type(e).__name__}: {e}"[:200]
        best = min(times, key=lambda name: times[name]) if times else None
        row = {"system": system, "case": case._asdict(), "times": times, "errors": errors, "failures": failures}
        row |= {"best": best, "seconds": times.get(best), "error": max(errors.values(), default=None)}
        print(json.dumps(row), flush=True)


def inputs(case: Case, weights: Any) -> tuple[Any, Any, Any]:
    """Both operands, and the rows of each expert by random routing."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    keys = jax.random.split(jax.random.key(case.tokens), 2)
    drawn = np.random.default_rng(case.tokens).random((case.tokens, case.E))
    chosen = np.argpartition(drawn, case.top_k, axis=1)[:, : case.top_k]
    sizes = jnp.asarray(np.bincount(chosen.reshape(-1), minlength=case.E), jnp.int32)
    of = {
        side: jax.random.normal(key, (case.rows, size), jnp.bfloat16)
        for side, key, size in zip(("x", "d"), keys, (case.K, case.N), strict=True)
    }
    if case.which == "dw":
        return of["d"], of["x"], sizes
    return of["x" if case.which == "forward" else "d"], weights, sizes


def error_of(case: Case, got: Any, left: Any, right: Any, sizes: Any) -> float:
    """The relative error against float32: of each expert's first and last row, or of some experts' gradients."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    ends = np.cumsum(np.asarray(sizes))
    used = [e for e in range(case.E) if sizes[e]]
    exact = lax.Precision.HIGHEST

    def distance(pairs: list[tuple[Any, Any]]) -> float:
        off = sum(float(jnp.square(a.astype(jnp.float32) - b).sum()) for a, b in pairs)
        return (off / sum(float(jnp.square(b).sum()) for _, b in pairs)) ** 0.5

    if case.which == "dw":
        pairs = []
        for e in {used[0], used[len(used) // 2], used[-1]}:
            mine = slice(int(ends[e] - sizes[e]), int(ends[e]))
            d, x = (array[mine].astype(jnp.float32) for array in (left, right))
            pairs.append((got[e], jnp.matmul(d.T, x, precision=exact)))
        return distance(pairs)
    rows = np.array([r for e in used for r in (ends[e] - sizes[e], ends[e] - 1)])

    def step(total: Any, pair: Any) -> Any:
        row, expert = pair
        dims = "i,ni->n" if case.which == "forward" else "n,ni->i"
        want = jnp.einsum(dims, left[row].astype(jnp.float32), right[expert].astype(jnp.float32), precision=exact)
        off = got[row].astype(jnp.float32) - want
        return (total[0] + jnp.square(off).sum(), total[1] + jnp.square(want).sum()), None

    pairs = jnp.asarray(rows), jnp.asarray([e for e in used for _ in range(2)])
    off, all_ = jax.jit(lambda p: lax.scan(step, (jnp.float32(0), jnp.float32(0)), p)[0])(pairs)
    return float(off / all_) ** 0.5


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Prints a table, and returns what `--json` writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--systems", type=names, default=[*SYSTEMS])
    parser.add_argument("--models", type=names, default=["gpt-oss-20b", "qwen3-30b-a3b"])
    parser.add_argument("--roles", type=names, default=[*ROLES])
    parser.add_argument("--passes", type=names, default=[*PASSES])
    parser.add_argument("--tokens", type=names, default=["64", "256", "1024", "4096", "8192"])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a system, after which it is killed")
    parser.add_argument("--worker", action="store_true", help="measure the one system here")
    parser.add_argument("--json", type=pathlib.Path, help="file for the numbers")
    given = parser.parse_args(arguments)
    cases = all_cases(given.models, given.roles, given.passes, [int(count) for count in given.tokens])
    if given.worker:
        measure(given.systems[0], cases)
        return {}
    report: dict[str, Any] = {"rows": []}
    for system in given.systems:
        own = sys.argv[1:] if arguments is None else [*arguments]
        command = [sys.executable, __file__, *own, "--worker", "--systems", system]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=given.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err = "killed: it took too long"
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if len(lines) < 1 + len(cases):
            print(f"{system}: {err[-400:]}")
        for line in lines[:1]:
            report[system] = line
            print(f"{system}: dense {line['dense'] / 1e12:.4g} TFLOP/s, copy {line['copy'] / 1e12:.3g} TB/s")
        for row in lines[1:]:
            report["rows"].append(row)
            show(row, lines[0])
    if given.json is not None:
        atomic_files.write(given.json, json.dumps(report, indent=1).encode())
    return report


def show(row: dict[str, Any], limits: dict[str, Any]) -> None:
    """A line of the table: microseconds, and the share of the dense rate and of the rate at which weights are read."""
    case = Case(**row["case"])
    name = f"{row['system']:10} {case.model:14} {case.role:8} {case.which:8} {case.tokens:6}"
    if row["seconds"] is None:
        print(name, row["failures"])
        return
    dense = case.flops / row["seconds"] / limits["dense"]
    read = 2 * case.E * case.N * case.K / row["seconds"] / limits["copy"]
    others = {key: round(value * 1e6, 1) for key, value in row["times"].items()}
    print(
        f"{name} {row['seconds'] * 1e6:9.1f} us {dense:6.1%} dense {read:6.1%} copy, error {row['error']:.2g}", end=" "
    )
    print(others, *(f"{k}: {v[:90]}" for k, v in row["failures"].items()), flush=True)


if __name__ == "__main__":
    main()
