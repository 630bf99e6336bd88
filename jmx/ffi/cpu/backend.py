"""Backend `cpu`: the whole layer over 4-bit weights on CPUs, its two products in C++ (`src/product.cc`).

Rows are sorted by expert and divided into blocks. Each product reads the weights of a block's expert in place, as the
bytes of the checkpoint, and adds the bias; routing, the activation and the combination of each token's rows are plain
jnp. bfloat16 activations are multiplied as bfloat16, float32 and float16 ones as float32, and sums are float32. Between
the products the activation is rounded to x's dtype; float16 stays float32, whose range it may need.

With inputs in `int8_token` both products first round their rows to int8, to the bits of `input_formats.quantize`, and
multiply integers: sums of 32 to 128 products are exact, then multiplied by the weights' scales in float32. Where
weights have an order of columns, rows are permuted to it before each product.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx import activations
from jmx.engines import grouped
from jmx.engines.grouped import Tiling
from jmx.experts import Experts
from jmx.ffi.cpu import library as ffi
from jmx.ffi.library import REINSTALL
from jmx.grouping import Blocks, Work
from jmx.numerics import formats, input_formats
from jmx.routing import Routing
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits, indivisible
from jmx.util.typing import Array, Float, Float32, Int32, Num, Shaped

BEST = "best"

# Weights of 4 bits, those that `src/handler.cc` knows. Weights of 8 bits have twice the bytes and would need other
# kernels; `xla` runs them.
FORMATS = (formats.MXFP4.name, formats.NVFP4.name, *formats.with_float_scales(jnp.int4))

_TILE_COLUMNS = 4  # `kTileColumns` of product.h

# Rows of a block. Weights are decoded once for all of them, at a cost that is small beside the products.
_BLOCK_M = 256
# Mean rows per expert up to which a call is bound by reading the weights; other kernels then decode them.
_FEW = 4


def _integers(format: str) -> bool:
    return formats.FORMATS[format].element_dtype == jnp.int4


def _integer_inputs(problem: Problem) -> Rejection | None:
    if problem.input_format is None or _integers(problem.format):
        return None
    detail = f"inputs are {problem.input_format!r} and weights {problem.format!r}, whose elements are not integers"
    return Rejection(Reason.INPUT_FORMAT, detail, "use xla, or leave inputs as they are")


def _sizes(problem: Problem) -> Rejection | None:
    halves = 1 if problem.gate_up_order is None else 2
    rows = {"hidden_size": problem.hidden_size, "rows of gate_up": halves * problem.intermediate_size}
    return indivisible(rows, _TILE_COLUMNS, "rows of a weight that are read together")


@dataclass(frozen=True)
class Cpu(LimitedBackend):
    """The backend for CPUs.

    Args:
        instructions: the instruction set, one of `ffi.library().kernels`; or "best": the last of them.
    """

    instructions: str = BEST

    name = "cpu"
    summary = "C++ kernels: 4-bit weights decoded in vector registers"
    limits = Limits(
        platform="cpu",
        formats=FORMATS,
        input_formats=(None, input_formats.INT8_TOKEN.name),
        layout="packed",
        checks=(_integer_inputs, _sizes),
    )

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        return self.limits.rejection(problem, environment, self._library)

    def _library(self, problem: Problem) -> Rejection | None:
        del problem
        found = ffi.library()
        if found.fault is not None:
            return Rejection(Reason.NOT_BUILT, found.fault, REINSTALL)
        if self.instructions in (BEST, *found.kernels):
            return None
        detail = f"`instructions` (={self.instructions!r}) are not among this machine's {found.kernels}"
        return Rejection(Reason.LIBRARY, detail, f"use {BEST!r}")

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        del environment
        ffi.library()  # registers the kernels, which XLA calls by name
        between = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
        rounded = problem.input_format is not None

        def rows_and_blocks(work: Work) -> "tuple[_Rows, Blocks]":
            if work.token_of_row is None:  # one token
                blocks = work.blocks
                if isinstance(blocks.num_blocks, int):  # of slots: those out of range have no rows, and read no weights
                    blocks = blocks._replace(counts=(work.row_of[0] >= 0).astype(jnp.int32))
                return _rows(x.astype(between), rounded), blocks.as_arrays()
            if problem.on_input:
                rows = grouped.gather(problem, x, routing, work, grouped.take)
                rows = _rows(rows.astype(between), rounded)
            else:  # each token is rounded once, not each of its rows
                take = partial(grouped.take, rows=work.token_of_row)
                rows = jax.tree.map(take, _rows(x.astype(between), rounded))
            return rows, work.blocks.as_arrays()

        def products(work: Work) -> Float32[Array, "1 R H"]:
            rows, blocks = rows_and_blocks(work)
            h = self._product("gate_up", rows, experts, blocks, work.num_rows)
            a = activations.apply(problem.activation, h, experts.gate_up_order).astype(between)
            blocks = blocks._replace(x_rows=blocks.out_rows)
            return self._product("down", _rows(a, rounded), experts, blocks, work.num_rows)[None]

        return grouped.run(problem, x, routing, Tiling(_BLOCK_M, few_tokens=1), products)

    def _product(
        self, role: str, rows: "_Rows", experts: Experts, blocks: Blocks, num_rows: int
    ) -> Float32[Array, "R N"]:
        """Rows of each block times its expert's weight, plus the bias; `num_rows` is R."""
        weight, format = getattr(experts.merged(), role), experts.format
        bias = experts.take_bias(role, blocks.experts)
        blocks = blocks._replace(experts=blocks.experts + experts.first_expert)
        if weight.order is not None:
            rows, blocks = _ordered(rows, weight.order, blocks, num_rows)
        result = jax.ShapeDtypeStruct((num_rows, weight.values.shape[1]), jnp.float32)
        return jax.ffi.ffi_call(ffi.GROUPED_PRODUCT, result)(
            *(rows.values, _or_empty(rows.scales, jnp.float32)),
            *(weight.values, weight.scales),
            *(_or_empty(weight.zero_points, jnp.int8), _or_empty(weight.global_scales, jnp.float32)),
            jnp.zeros((0, 0), jnp.float32) if bias is None else bias.astype(jnp.float32),
            *(blocks.experts, blocks.x_rows, blocks.out_rows, blocks.counts),
            instructions=self.instructions,
            format="int4" if _integers(format.name) else format.name,
            group=np.int64(format.block_size),
            few=num_rows <= _FEW * experts.num_experts,
        )


class _Rows(NamedTuple):
    """Inputs of a product.

    Args:
        values: the rows: float32, bfloat16 or int8.
        scales: of int8 rows, what one unit of each is worth; else None.
    """

    values: Num[Array, "R K"]
    scales: Float32[Array, "R 1"] | None


def _rows(x: Float[Array, "R K"], rounded: bool) -> _Rows:
    """x as it is, or `rounded` to int8."""
    if not rounded:
        return _Rows(x, None)
    results = jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
    return _Rows(*jax.ffi.ffi_call(ffi.ROUND_ROWS, results)(x))


def _ordered(rows: _Rows, order: Int32[Array, "E K"], blocks: Blocks, num_rows: int) -> tuple[_Rows, Blocks]:
    """`num_rows` rows with the columns of each block in its expert's order; blocks that share a row get copies."""
    call = jax.ffi.ffi_call(ffi.ORDER_COLUMNS, jax.ShapeDtypeStruct((num_rows, order.shape[-1]), rows.values.dtype))
    values = call(rows.values, order, blocks.experts, blocks.x_rows, blocks.out_rows, blocks.counts)
    scales = rows.scales
    if scales is not None and scales.shape[0] != num_rows:  # one token, shared by all blocks
        scales = jnp.broadcast_to(scales, (num_rows, 1))
    return _Rows(values, scales), blocks._replace(x_rows=blocks.out_rows)


def _or_empty(array: Shaped[Array, "..."] | None, dtype: jax.typing.DTypeLike) -> Shaped[Array, "..."]:
    """An optional argument of a kernel: an empty array where there is none."""
    return jnp.zeros(0, dtype) if array is None else array
