"""What `benchmarks/float_products.py` measures: products of published layers, and who computes them."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmx.perf.shapes import MODELS

ROLES, PASSES, TOKENS = ("gate_up", "down"), ("forward", "dx", "dw"), (64, 256, 1024, 4096, 8192)
BF16 = jnp.bfloat16


class Case(NamedTuple):
    """One product of a layer of `num_experts` weights (outputs, inputs), or one of its two gradients, in bfloat16."""

    model: str
    role: str
    which: str
    tokens: int
    top_k: int
    num_experts: int
    outputs: int
    inputs: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.outputs * self.inputs

    @property
    def bytes(self) -> float:
        """Of the weights or of their gradients, and of the rows read and written."""
        weights = self.num_experts * self.outputs * self.inputs
        return 2.0 * (weights + self.rows * (self.outputs + self.inputs))

    def __str__(self) -> str:
        return f"{self.model} {self.role} {self.which} {self.tokens}"


def all_cases(models: Sequence[str], roles: Sequence[str], passes: Sequence[str], tokens: Sequence[int]) -> list[Case]:
    """All of these, by model and role, whose weights are made once."""
    found = []
    for model in models:
        shape = MODELS[model]
        hidden, inner = shape.hidden_size, shape.intermediate_size
        for role in roles:
            sizes = (2 * inner if shape.gate_up_order else inner, hidden) if role == "gate_up" else (hidden, inner)
            for count in tokens:
                layer = count, shape.method.top_k, shape.num_experts
                found += [Case(model, role, which, *layer, *sizes) for which in passes]
    return found


# A pass by each configuration of a system, by its name. Operands: rows and weights; or, of dw, the
# gradients of results and rows; then where groups begin, and their sizes.
Configurations = dict[str, Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]]


def jmx(case: Case) -> Configurations:
    from jmx.pallas.float_sm90.blocks import Groups
    from jmx.pallas.float_sm90.config import Launch, deepest
    from jmx.pallas.float_sm90.outer import outer
    from jmx.pallas.float_sm90.product import product

    cores = jax.devices()[0].core_count
    if case.which == "dw":
        chosen = Launch.of_groups(case.num_experts, case.outputs, case.inputs, BF16, cores).config
    else:
        columns = case.outputs if case.which == "forward" else case.inputs
        chosen = Launch.of_rows(case.rows, case.num_experts, columns, BF16, cores).config
    configs = {"": chosen}
    if os.environ.get("CONFIGURATIONS"):  # those that the heuristic was chosen among
        configs |= {f"{n}x{m}": deepest(n, m) for n, m in ((256, 2), (192, 2), (192, 3), (128, 2))}
        configs |= {f"section {number}": deepest(chosen.block_n, 2, number) for number in (4, 16)}
        configs = {name: config for name, config in configs.items() if name == "" or config != chosen}

    def run(config: Any, left: jax.Array, right: jax.Array, starts: jax.Array, sizes: jax.Array) -> jax.Array:
        its, groups = Launch(BF16, config, cores), Groups.at(starts, sizes)
        if case.which == "dw":
            return outer(left, right, groups, its)
        return product(left, right, groups, its, transposed=case.which == "dx")

    return {name: partial(run, config) for name, config in configs.items()}


def ragged_dot(case: Case) -> Configurations:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )

    def run(left: jax.Array, right: jax.Array, starts: jax.Array, sizes: jax.Array) -> jax.Array:
        del starts
        if case.which == "dw":
            return lax.ragged_dot_general(left, right, sizes, numbers, preferred_element_type=BF16)
        return lax.ragged_dot(left, right.mT if case.which == "forward" else right, sizes)

    return {"": run}


def mgpu(case: Case) -> Configurations:
    """The kernels in jax's `pallas.ops.gpu`, by some of the sizes that their own tuners try."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as product
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot as outer

    def run(
        sizes_of_blocks: dict[str, Any], left: jax.Array, right: jax.Array, starts: jax.Array, sizes: jax.Array
    ) -> jax.Array:
        del starts
        options: dict[str, Any] = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1, **sizes_of_blocks}
        if case.which == "dw":
            return outer(left, right, group_sizes=sizes, **options)
        return product(left, right, group_sizes=sizes, transpose_rhs=case.which == "forward", **options)

    found = {}
    for m, n in ((64, 192), (128, 192), (128, 128)):  # the fastest of those tried; 192 must divide columns in dw
        if case.which != "dw" or (case.outputs % m == 0 and case.inputs % n == 0):
            found[f"{m}x{n}"] = partial(run, {"block_m": m, "block_n": n})
        if len(found) == 2:
            break
    return found


def tokamax(case: Case) -> Configurations:
    """Its Mosaic kernels with the sizes that they choose, and with larger ones; an ImportError without it."""
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu as kernels  # pyright: ignore[reportMissingImports]

    numbers = {
        "forward": base.TRANS_RHS_RAGGED_DOT_DIM_NUMS,
        "dx": base.DEFAULT_RAGGED_DOT_DIM_NUMS,
        "dw": base.RAGGED_CONTRACTING_DOT_DIM_NUMS,
    }[case.which]
    shared = {"split_k": 1, "grid_minor_dim": kernels.common.MatmulDimension.M, "grid_tile_width": 1}

    def run(config: Any, left: jax.Array, right: jax.Array, starts: jax.Array, sizes: jax.Array) -> jax.Array:
        del starts
        product = kernels.PallasMosaicGpuRaggedDot(config=config)
        return product(left, right, group_sizes=sizes, ragged_dot_dimension_numbers=numbers)

    found = {"": partial(run, None)}
    large = {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 4, "persistent": False}  # the fastest tried
    return found | {"128x128x64": partial(run, kernels.Config(**large, **shared))}


ALIGN = {"jmx": 8}  # the multiple that groups begin at, as the layer sorts rows; without gaps for the others
SYSTEMS = {"jmx": jmx, "tokamax": tokamax, "ragged_dot": ragged_dot, "mgpu": mgpu}
