"""Backend `cpu`: the whole layer over 4-bit weights on CPUs, its two products in C++ (`src/product.cc`).

Rows are sorted by expert and cut into blocks. Each product reads every block's weights from their bytes, where they
lie, and adds the bias; routing, the activation and each token's sum are plain jnp around it. bfloat16 activations are
multiplied as such, float32 and float16 ones in float32; sums are float32. Between the two products the activation is
rounded to x's dtype (float16 stays float32, which its range would not hold).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmx import activations, ffi, formats, grouping
from jmx.experts import Experts
from jmx.grouping import Blocks
from jmx.routing import Routing
from jmx.selection import Computation, Environment, Problem, Reason, Rejection

DTYPES = ("bfloat16", "float16", "float32")
BEST = "best"

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
        return "C++ kernels: MXFP4 weights decoded in vector registers"

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        if environment.platform != "cpu":
            return Rejection(Reason.PLATFORM, f"platform is {environment.platform!r}, not 'cpu'", "run on a CPU")
        if problem.num_tokens is None:
            return Rejection(
                Reason.SYMBOLIC_TOKENS,
                "the token count is symbolic, and blocks are counted by its value",
                "trace with a concrete number of tokens, one trace a bucket",
            )
        if problem.format != formats.MXFP4.name:
            return Rejection(
                Reason.FORMAT, f"weights are {problem.format!r}, not 'mxfp4'", f"quantise to {formats.MXFP4.name}"
            )
        if problem.input_format is not None:
            return Rejection(Reason.INPUT_FORMAT, f"inputs in {problem.input_format}", "leave inputs in x's dtype")
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
        if num_tokens == 1 and not on_input:
            work = grouping.single(routing.expert_ids, experts.num_experts)
            named = (work.row_of[0] >= 0).astype(jnp.int32)  # no weights are read for an id that is no expert's
            work = work._replace(blocks=work.blocks._replace(counts=named))
            rows, num_rows = x, top_k
        else:
            work = grouping.many(routing.expert_ids, experts.num_experts, _BLOCK_M)
            assert work.token_of_row is not None
            rows = x.at[work.token_of_row].get(mode="promise_in_bounds")
            num_rows = rows.shape[0]
            if on_input:
                rows = grouping.weigh(rows, work, routing.weights)
        between = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
        blocks = work.blocks.as_arrays()
        h = self._product("gate_up", rows.astype(between), experts, blocks, num_rows)
        a = activations.apply(computation.activation, h, experts.gate_up_order).astype(between)
        out = self._product("down", a, experts, blocks._replace(x_rows=blocks.out_rows), num_rows)
        return grouping.combine(out[None], work, None if on_input else routing.weights).astype(x.dtype)

    def _product(self, role: str, rows: jax.Array, experts: Experts, blocks: Blocks, num_rows: int) -> jax.Array:
        """Rows of each block times its expert's weight, plus its bias -> float32 (num_rows, N)."""
        weight = getattr(experts.merged(), role)
        bias = experts.take_bias(role, blocks.experts)
        bias = jnp.zeros((0, 0), jnp.float32) if bias is None else bias.astype(jnp.float32)
        out = jax.ShapeDtypeStruct((num_rows, weight.values.shape[1]), jnp.float32)
        call = jax.ffi.ffi_call(ffi.TARGET, out)
        return call(
            *(rows, weight.values, weight.scales, bias),
            *(blocks.experts + experts.first_expert, blocks.x_rows, blocks.out_rows, blocks.counts),
            instructions=self.instructions,
            few=num_rows <= _FEW * experts.num_experts,
        )
