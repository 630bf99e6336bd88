"""The layer around the launches: the rows of tokens, both products, and h between them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jmx.engines import grouped
from jmx.experts import Experts
from jmx.grouping import Work
from jmx.numerics import input_formats
from jmx.numerics.input_formats import INPUT_FORMATS, InputFormat
from jmx.numerics.tensor_scales import scale_of_rows
from jmx.pallas.activation.functions import in_kernel
from jmx.pallas.mosaic_sm90_fp8 import kernel, quantize
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.tiles import weights_alike
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Bool, Float, Float32


@dataclass(frozen=True)
class Layer:
    """A call of the layer.

    Args:
        x, experts: of sizes that are multiples of `sm90.tiles.VECTOR`, so of more columns than `problem` where its
            sizes are not.
        num_cores: SMs.
    """

    problem: Problem
    x: Float[Array, "T H"]
    routing: Routing
    experts: Experts
    config: Config
    num_cores: int

    def results(self, work: Work) -> Float[Array, "P R H"]:
        """The results of blocks' rows, in parts that are to be added."""
        rows, h = self._rows(work), self._h(work)
        gate_up, down = self._products()
        launch = partial(
            kernel.grouped_products,
            blocks=work.blocks.of_layer(self.experts.first_expert),
            config=self.config,
            num_rows=work.num_rows,
            num_cores=self.num_cores,
        )
        down = partial(down.times, inputs_are_results=True, split_k=self.config.split_k)
        if self.config.fuse_quantize:
            out = launch([gate_up.times(rows), down(h)])
        else:
            values = launch([gate_up.times(quantize.quantize(rows))])
            h = self._with_one_scale(replace(h, values=values), lambda: _used(work))
            out = launch([down(quantize.quantize(h))])
        return out.reshape(self.config.split_k, work.num_rows, -1)[..., : self.x.shape[-1]]

    def _products(self) -> tuple[Product, Product]:
        """Both products, without their inputs."""
        experts, every = self.experts, self.experts.merged()
        fused, skips = self.config.fuse_quantize, experts.padded_to is not None
        gate_up, down = weights_alike(every) if fused else (every.gate_up, every.down)  # stages are one launch's
        dtype = jnp.float32 if self.x.dtype == jnp.float16 else self.x.dtype  # as in the reference
        summed = jnp.float32 if self.config.split_k > 1 else dtype
        outputs = experts.intermediate_size if skips else None
        rows = Rows(experts.spec("gate_up").shape[0], experts.gate_up_order, outputs)
        first = Product(gate_up, experts.format, every.gate_up_bias, rows, dtype, in_kernel(self.problem.activation))
        rows = Rows(experts.spec("down").shape[0], None, self.x.shape[-1] if skips else None)
        return first, Product(down, experts.format, every.down_bias, rows, summed)

    def _rows(self, work: Work) -> InputRows:
        """The rows of x, not quantized yet."""
        x, on_input = self.x, self.problem.on_input
        rows = self._inputs("gate_up", x, work.row_of, x.shape[-1], work.num_rows)
        rows = rows if on_input else self._with_one_scale(rows, lambda: (work.row_of >= 0).any(axis=1))
        if work.token_of_row is None:  # few tokens, all of which every block reads
            return replace(rows, row_of=None, num_rows=x.shape[0])
        if on_input:  # then inputs differ by expert
            values = grouped.gather(self.problem, x, self.routing, work, lambda x, rows: x[rows])
            return self._with_one_scale(replace(rows, values=values, row_of=None), lambda: _used(work))
        return rows

    def _h(self, work: Work) -> InputRows:
        """The rows of h, not quantized and not computed yet."""
        return self._inputs("down", None, None, self.experts.intermediate_size, work.num_rows)

    def _inputs(self, role: str, values: Any, row_of: Any, columns: int, num_rows: int) -> InputRows:
        scale = self.experts.input_scale(role)
        return InputRows(
            values=values,
            row_of=row_of,
            static_scale=None if scale is None else scale.reshape(1),
            columns=columns,
            format=input_formats.FP8_STATIC if self._has_one_scale else self._format,  # once the scale is known
            num_rows=num_rows,
            weight_columns=self.experts.spec(role).shape[1],
        )

    def _with_one_scale(self, rows: InputRows, valid: Callable[[], Bool[Array, " R"]]) -> InputRows:
        """The rows with the one scale of those that are `valid`, if they share one."""
        if not self._has_one_scale:
            return rows
        scale: Float32[Array, ""] = scale_of_rows(rows.values[:, : rows.columns], valid())
        return replace(rows, static_scale=scale[None])

    @property
    def _format(self) -> InputFormat:
        assert self.problem.input_format is not None
        return INPUT_FORMATS[self.problem.input_format]

    @property
    def _has_one_scale(self) -> bool:
        return not self._format.by_token


def _used(work: Work) -> Bool[Array, " R"]:
    """Whether each row of the results belongs to an assignment."""
    rows = jnp.where(work.row_of < 0, work.num_rows, work.row_of).reshape(-1)
    return jnp.zeros(work.num_rows, bool).at[rows].set(True, mode="drop")
