"""Backend `cpu`: the whole layer over 4-bit weights on CPUs, its two products in C++ (`src/product.cc`).

Rows are sorted by expert and cut into blocks. Each product reads every block's weights from their bytes, where they
lie, and adds the bias; routing, the activation and each token's sum are plain jnp around it. bfloat16 activations are
multiplied as such, float32 and float16 ones in float32; sums are float32. Between the two products the activation is
rounded to x's dtype (float16 stays float32, which its range would not hold).

With inputs in `int8_token` both products round their rows to int8 first, to the bits of `inputs.quantize`, and multiply
integers: sums of 32 to 128 products are exact, and meet the scales of weights in float32. Where weights have an order,
rows are permuted to it before each product.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx import activations, grouping
from jmx.experts import Experts
from jmx.ffi.cpu import library as ffi
from jmx.grouping import Blocks
from jmx.numerics import formats, input_formats
from jmx.routing import Routing
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Computation, Problem

DTYPES = ("bfloat16", "float16", "float32")
BEST = "best"

# Weights of 4 bits. Those of 8 would be read at half the speed, by kernels of their own, and `xla` runs them.
FORMATS = tuple(
    format.name
    for format in formats.FORMATS.values()
    if format in (formats.MXFP4, formats.NVFP4) or format.element_dtype == jnp.int4
)

_STEP = 4  # `kStep` of product.h

# Rows of a block: its weights are decoded once for all of them, which then costs nothing beside the products.
_BLOCK_M = 256
# Mean rows an expert up to which reading the weights is what takes the time, and they are decoded accordingly.
_FEW = 4


@dataclass(frozen=True)
class Cpu:
    """The engine for CPUs.

    Args:
        instructions: the instruction set, one of `ffi.library().kernels`, or "best", which this machine chooses.
    """

    instructions: str = BEST

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def summary(self) -> str:
        return "C++ kernels: 4-bit weights decoded in vector registers"

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        if environment.platform != "cpu":
            return Rejection(Reason.PLATFORM, f"platform is {environment.platform!r}, not 'cpu'", "run on a CPU")
        if problem.num_tokens is None:
            return Rejection(
                Reason.SYMBOLIC_TOKENS,
                "the token count is symbolic, and blocks are counted by its value",
                "trace with a concrete number of tokens, one trace a bucket",
            )
        if problem.format not in FORMATS:
            return Rejection(
                Reason.FORMAT,
                f"weights are {problem.format!r}, of {_bits(problem.format)} bits, not of 4",
                f"use xla, or quantise to one of {', '.join(FORMATS)}",
            )
        if problem.input_format not in (None, input_formats.INT8_TOKEN.name):
            return Rejection(
                Reason.INPUT_FORMAT,
                f"inputs in {problem.input_format!r}, which no CPU multiplies faster than x's dtype",
                f"use xla, leave inputs in x's dtype, or take {input_formats.INT8_TOKEN.name}",
            )
        if problem.input_format is not None and not _integers(problem.format):
            return Rejection(
                Reason.INPUT_FORMAT,
                f"inputs in {problem.input_format!r} and weights in {problem.format!r}, whose elements are no integers",
                "use xla, or leave inputs in x's dtype",
            )
        halves = 1 if problem.gate_up_order is None else 2
        for what, rows in (
            ("hidden_size", problem.hidden_size),
            ("rows of gate_up", halves * problem.intermediate_size),
        ):
            if rows % _STEP:
                detail = f"{what} (={rows}) must be a multiple of {_STEP}, rows of a weight that are read together"
                return Rejection(Reason.SHAPE, detail, "use xla")
        if problem.dtype not in DTYPES:
            return Rejection(Reason.DTYPE, f"x is {problem.dtype}", f"cast x to one of {', '.join(DTYPES)}")
        if problem.layout != "packed":
            return Rejection(
                Reason.LAYOUT,
                f"weights lie in {problem.layout!r}, not in 'packed'",
                "call experts.prepare('packed'), or make the layer with layout='packed'",
            )
        found = ffi.library()
        if found.fault is not None:
            return Rejection(Reason.NOT_BUILT, found.fault, ffi.BUILD)
        if self.instructions not in (BEST, *found.kernels):
            return Rejection(
                Reason.LIBRARY,
                f"`instructions` (={self.instructions!r}) are not among this machine's {found.kernels}",
                f"leave them {BEST!r}",
            )
        return None

    def apply(
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> jax.Array:
        del environment
        ffi.library()  # XLA finds the kernels by name
        num_tokens, top_k = routing.expert_ids.shape
        if num_tokens * top_k == 0:
            return jnp.zeros_like(x)
        on_input = computation.weights_on == "input"
        between = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
        rounded = computation.input_format is not None
        if num_tokens == 1 and not on_input:
            work = grouping.single(routing.expert_ids, experts.num_experts)
            named = (work.row_of[0] >= 0).astype(jnp.int32)  # no weights are read for an id that is no expert's
            work = work._replace(blocks=work.blocks._replace(counts=named))
            rows, num_rows = _rows(x.astype(between), rounded), top_k
        else:
            work = grouping.many(routing.expert_ids, experts.num_experts, _BLOCK_M)
            token_of_row = work.token_of_row
            assert token_of_row is not None
            num_rows = token_of_row.shape[0]
            if on_input:
                rows = grouping.weigh(_take(x, token_of_row), work, routing.weights)
                rows = _rows(rows.astype(between), rounded)
            else:  # a token is rounded once
                rows = jax.tree.map(lambda array: _take(array, token_of_row), _rows(x.astype(between), rounded))
        blocks = work.blocks.as_arrays()
        h = self._product("gate_up", rows, experts, blocks, num_rows)
        a = activations.apply(computation.activation, h, experts.gate_up_order).astype(between)
        out = self._product("down", _rows(a, rounded), experts, blocks._replace(x_rows=blocks.out_rows), num_rows)
        return grouping.combine(out[None], work, None if on_input else routing.weights).astype(x.dtype)

    def _product(self, role: str, rows: "_Rows", experts: Experts, blocks: Blocks, num_rows: int) -> jax.Array:
        """Rows of each block times its expert's weight, plus its bias -> float32 (num_rows, N)."""
        weight, format = getattr(experts.merged(), role), experts.format
        bias = experts.take_bias(role, blocks.experts)
        bias = jnp.zeros((0, 0), jnp.float32) if bias is None else bias.astype(jnp.float32)
        blocks = blocks._replace(experts=blocks.experts + experts.first_expert)
        if weight.order is not None:
            rows, blocks = _ordered(rows, weight.order, blocks, num_rows)
        call = jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct((num_rows, weight.values.shape[1]), jnp.float32))
        return call(
            *(rows.values, _given(rows.scales, jnp.float32)),
            *(weight.values, weight.scales),
            *(_given(weight.zero_points, jnp.int8), _given(weight.global_scales, jnp.float32)),
            *(bias, blocks.experts, blocks.x_rows, blocks.out_rows, blocks.counts),
            instructions=self.instructions,
            format="int4" if _integers(format.name) else format.name,
            group=np.int64(format.block_size),
            few=num_rows <= _FEW * experts.num_experts,
        )


class _Rows(NamedTuple):
    """What a product takes: (R, K), and where these are int8 what a one of each row is worth, float32 (R, 1)."""

    values: jax.Array
    scales: jax.Array | None


def _rows(x: jax.Array, rounded: bool) -> _Rows:
    if not rounded:
        return _Rows(x, None)
    results = jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
    return _Rows(*jax.ffi.ffi_call(ffi.ROUND_ROWS, results)(x))


def _ordered(rows: _Rows, order: jax.Array, blocks: Blocks, num_rows: int) -> tuple[_Rows, Blocks]:
    """Rows with the columns of each block in its expert's order; one that blocks share becomes one a block."""
    call = jax.ffi.ffi_call(ffi.ORDER_COLUMNS, jax.ShapeDtypeStruct((num_rows, order.shape[-1]), rows.values.dtype))
    values = call(rows.values, order, blocks.experts, blocks.x_rows, blocks.out_rows, blocks.counts)
    scales = rows.scales
    if scales is not None and scales.shape[0] != num_rows:  # of one token
        scales = jnp.broadcast_to(scales, (num_rows, 1))
    return _Rows(values, scales), blocks._replace(x_rows=blocks.out_rows)


def _take(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[rows].get(mode="promise_in_bounds")


def _given(array: jax.Array | None, dtype: Any) -> jax.Array:
    """An argument of the kernels that may be lacking."""
    return jnp.zeros(0, dtype) if array is None else array


def _bits(format: str) -> int:
    return formats.FORMATS[format].element_bits if format in formats.FORMATS else 0


def _integers(format: str) -> bool:
    return formats.FORMATS[format].element_dtype == jnp.int4
