"""A backend in plain jnp that computes blocks of rows as kernels do."""

from dataclasses import dataclass

import jax.numpy as jnp

from jmx.engines import grouped
from jmx.engines.grouped import Tiling


@dataclass(frozen=True)
class Blockwise:
    """A backend that computes what each block of rows names, in plain jnp."""

    name: str = "blockwise"
    summary: str = "blocks of rows, in plain jnp"
    few_tokens: int = 4

    def supports(self, problem, environment):
        del problem, environment

    def tiling(self, problem, environment):
        del problem, environment
        return Tiling(8, self.few_tokens, 8)

    def apply(self, problem, x, routing, experts, environment):
        def products(work):
            blocks = work.blocks.as_arrays()
            row = jnp.arange(work.num_rows)
            holds = (blocks.out_rows <= row[:, None]) & (row[:, None] < blocks.out_rows + blocks.counts)
            expert = jnp.where(holds, blocks.experts, 0).sum(axis=1)
            tokens = row % work.blocks.out_rows if work.token_of_row is None else work.token_of_row
            rows = x[jnp.minimum(tokens, x.shape[0] - 1)].astype(jnp.float32)
            gate_up, down = experts.dequantize()
            h = jnp.maximum(jnp.einsum("rk,rnk->rn", rows, gate_up[expert]), 0)
            return jnp.einsum("rn,rmn->rm", h, down[expert])[None]

        return grouped.run(problem, x, routing, self.tiling(problem, environment), products)
