"""What the small matrices of experts add to the layer's products.

Two ways, by what a GPU takes for each. One is a batched product, one block of rows at a time: a block reads a copy of
its expert's matrix, so time does not depend on the number of experts, and rows are not padded to those of the busiest
one. (Where a device has a fast `jax.lax.ragged_dot` that does the same; XLA's for GPUs without one multiplies every row
by every expert's matrix.) The other is one product of all tokens with the matrices of all experts side by side, E r
columns, of which each row takes r: it reads tokens, not their rows, and copies no matrix.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jmx.engines.block_products import Factors, block_product, dot
from jmx.engines.by_products import Inputs
from jmx.engines.expert_rows import Rows, collect, combine, take
from jmx.lora.adapters import Adapter, Adapters
from jmx.util.typing import Array, Float, Float32

# Columns of all experts together, for each slot of a token, up to which one product with all of them is used. By count
# an H200 multiplies a token by 256 columns in the time in which it reads and writes one of its rows.
TOGETHER = 256


@dataclass(frozen=True)
class AddedBy:
    """What adapters add: see `jmx.engines.by_products.Added`. Inputs and adapters are rounded to the dtype of products,
    in which the sums, float32, are multiplied again."""

    adapters: Adapters

    def to_outputs(self, target: str, inputs: Inputs, dtype: Any) -> Factors | None:
        adapter: Adapter | None = getattr(self.adapters, target)
        if adapter is None:
            return None
        rows, a = inputs.rows, adapter.a.astype(dtype)
        if inputs.tokens is not None and _together(a, adapter.rank, rows):
            every = a.reshape(-1, a.shape[-1])
            inner = dot("tk,nk->tn", inputs.tokens.astype(dtype), every, jnp.float32)
            inner = take(inner.reshape(len(inner), -1, adapter.rank), rows)
        else:
            inner = block_product(rows.blocked(inputs.of_rows).astype(dtype), a, rows.expert_of_block, jnp.float32)
            inner = inner.reshape(-1, adapter.rank)
        return Factors(_scaled(inner, adapter, dtype), adapter.b.astype(dtype))

    def to_result(
        self, a: Float[Array, "n M I"], rows: Rows, weights: Float32[Array, "R 1"] | None, dtype: Any
    ) -> Float32[Array, "T H"] | None:
        adapter = self.adapters.down
        if adapter is None:
            return None
        b = adapter.b.astype(dtype)
        inner = block_product(a.astype(dtype), adapter.a.astype(dtype), rows.expert_of_block, jnp.float32)
        if not _together(b, adapter.rank, rows):
            out = block_product(_scaled(inner, adapter, dtype), b, rows.expert_of_block, dtype).astype(jnp.float32)
            flat = out.reshape(-1, out.shape[-1])
            return combine(flat if weights is None else flat * weights, rows)
        flat = inner.reshape(-1, adapter.rank)
        flat = flat if weights is None else flat * weights
        of_tokens = _scaled(collect(flat, rows, b.shape[0] if b.ndim == 3 else 1), adapter, dtype)
        return dot("ter,enr->tn", of_tokens, b if b.ndim == 3 else b[None], jnp.float32)


def _scaled(inner: Float32[Array, "*lead r"], adapter: Adapter, dtype: Any) -> Float[Array, "*lead r"]:
    """Where it is smallest, in float32."""
    return (inner * adapter.scale).astype(dtype)


def _together(matrix: Float[Array, "..."], rank: int, rows: Rows) -> bool:
    """Whether all tokens are multiplied by the matrices of all experts, (E, ...), or by the one that they share."""
    every = rank * (matrix.shape[0] if matrix.ndim == 3 else 1)
    return every <= TOGETHER * rows.expert_ids.shape[1]
