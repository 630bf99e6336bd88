"""Gradients of the layer on Hopper, out of the same quantized weights.

h, the outputs of `gate_up`, is computed again, or taken from a forward pass that kept it (`forward`). Without it a
training step keeps a layer's inputs only, and the backward pass takes 5/3 of the products of the forward pass:
`gate_up` as it is, and both weights transposed (`transposed`). With it the backward pass takes as many products as the
forward pass, which writes h between two kernels, where `MosaicSm90.apply` is one.

    h      gate_up @ x + bias, float32, gates and ups in the order of the weight's tiles
    da     down transposed @ dy, float32
    dh     the activation's derivative at h times da, bfloat16: one pass over both (`jmx.pallas.activation`)
    dx     gate_up transposed @ dh, float32, each token's rows added in the order of its slots

Rows are those of the sorted forward pass, at any number of tokens. Scales of whole rows multiply dy and dh, because
products with the transposed weights sum over its rows. The rounding of inputs to a format has a straight-through
gradient, as in the reference.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx import grouping
from jmx.engines import grouped
from jmx.engines.gradients import Gradients, Primals, Wanted
from jmx.experts import Experts
from jmx.grouping import Work
from jmx.numerics.formats import BlockScaled
from jmx.numerics.gate_up import join_gate_up, split_gate_up
from jmx.numerics.input_formats import INPUT_FORMATS, dequantize, quantize
from jmx.pallas.activation import gradient
from jmx.pallas.activation.columns import join
from jmx.pallas.mosaic_sm90 import act_order, alone, kernel, weight_gradients
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.grouped_gemm import Product
from jmx.pallas.mosaic_sm90.rounded_inputs import RoundedRows
from jmx.pallas.mosaic_sm90.rows import (
    expert_of_eight,
    gate_and_up,
    padded,
    rounded,
    sorted_rows,
    tile_order,
)
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.tiles import ROW_ALIGNMENT, TILE, weights_alike
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Bool, Float, Float32, Int32, Shaped

# In bfloat16 some of h would round to a limit at which the activation clamps, and have another derivative.
H_DTYPE = jnp.float32


def forward(
    problem: Problem, primals: Primals, config: Config, num_cores: int
) -> tuple[Float[Array, "T H"], Float32[Array, "R tile_rows"]]:
    """The layer's result, and h for `backward` with the same config. See `SavesGateUp.apply_saving`."""
    x, routing, experts, _ = primals
    pass_ = _Pass.of(problem, routing, experts, config, num_cores)
    with jax.named_scope("products"):
        h = pass_.gate_up_outputs(x)
    with jax.named_scope("activation"):
        dtype = jnp.float32 if problem.input_format is not None and x.dtype != jnp.bfloat16 else jnp.bfloat16
        a = rounded(problem, experts, "down", problem.activation(*gate_and_up(h, experts)).astype(dtype))
    with jax.named_scope("products"):
        out = pass_.down_outputs(a)
    with jax.named_scope("combine"):
        weights = None if problem.on_input else routing.weights
        return grouping.combine(out[None], pass_.work, weights).astype(x.dtype), h


def backward(
    problem: Problem,
    primals: Primals,
    dy: Float[Array, "T H"],
    wanted: Wanted,
    config: Config,
    num_cores: int,
) -> Gradients:
    """See `Differentiable.backward`. `num_cores`: SMs; `primals.saved`: the h of `forward`, or None."""
    x, routing, experts, h = primals
    pass_ = _Pass.of(problem, routing, experts, config, num_cores)
    work = pass_.work
    assert work.token_of_row is not None
    with jax.named_scope("products"):
        h = pass_.gate_up_outputs(x) if h is None else h
        dout = grouped.take_pairs(dy, work.token_of_row)
        da = pass_.transposed("down", dout * pass_.row_scales("down"))
    with jax.named_scope("activation"):
        dh, dweights = pass_.through_activation(h, da)
    with jax.named_scope("products"):
        drows = pass_.in_order_of_inputs(pass_.transposed("gate_up", dh * pass_.row_scales("gate_up")))
    with jax.named_scope("combine"):
        if problem.on_input:
            dweights = (drows * grouped.take_pairs(x, work.token_of_row).astype(jnp.float32)).sum(-1)
        dx = grouping.combine(drows[None], work, routing.weights if problem.on_input else None)
        rows = work.row_of
        dweights = dweights.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds") + pass_.of_down_bias(dy)
        dweights = jnp.where(rows >= 0, dweights, 0)
    gate_up_bias, down_bias = experts.gate_up_bias, experts.down_bias
    with jax.named_scope("weights"):
        weights = pass_.weights(wanted, x, h, dh, dout)
    return Gradients(
        dx.astype(x.dtype),
        dweights.astype(routing.weights.dtype),
        pass_.of_layer(pass_.gate_up_bias(dh), gate_up_bias)
        if wanted.gate_up_bias and gate_up_bias is not None
        else None,
        pass_.of_layer(pass_.down_bias(dy), down_bias) if wanted.down_bias and down_bias is not None else None,
        *weights,
    )


@dataclass(frozen=True)
class _Pass:
    """What the steps of one pass share.

    Args:
        work: sorted.
        config: of all three products.
        num_cores: SMs.
    """

    problem: Problem
    routing: Routing
    experts: Experts
    work: Work
    config: Config
    num_cores: int

    @classmethod
    def of(cls, problem: Problem, routing: Routing, experts: Experts, config: Config, num_cores: int) -> "_Pass":
        """With the work of the routing: the same in both passes, whose rows of h are the same."""
        with jax.named_scope("grouping"):
            work = grouping.many(routing.expert_ids, problem.num_experts, grouping.Cut(config.block_n, ROW_ALIGNMENT))
        return cls(problem, routing, experts, work, config, num_cores)

    def gate_up_outputs(self, x: Float[Array, "T H"]) -> Float[Array, "R tile_rows"]:
        """The outputs of `gate_up` in the order of its tiles."""
        rows = sorted_rows(self.problem, x, self.routing, self.experts, self.work)
        every = self.experts.merged()
        product = Product(
            self._weight("gate_up"),
            self.experts.format,
            every.gate_up_bias,
            Rows(self.experts.spec("gate_up").shape[0], self.experts.gate_up_order),
            H_DTYPE,
            order=every.down.order,
            row_scales=rows.scales,
        )
        return self._product(padded(rows.values), product)

    def down_outputs(self, a: RoundedRows) -> Float32[Array, "R H"]:
        """The outputs of `down`, biases included."""
        bias, rows = self.experts.merged().down_bias, Rows(self.experts.hidden_size, None)
        product = Product(self._weight("down"), self.experts.format, bias, rows, jnp.float32, row_scales=a.scales)
        return self._product(padded(a.values), product)[:, : self.experts.hidden_size]

    def transposed(self, role: str, rows: Float[Array, "R N"]) -> Float32[Array, "R K"]:
        """rows @ the role's weight, without its scales of whole rows. Columns of rows are in the order of its tiles."""
        users = self.work.blocks.experts + self.experts.first_expert
        product = alone.transposed(role, self.experts, users)
        return self._product(padded(rows), product)[:, : self.experts.spec(role).shape[1]]

    def _product(self, rows: Float[Array, "R K"], product: Product) -> Float[Array, "R N"]:
        launched = {"config": self.config, "num_rows": self.work.num_rows, "num_cores": self.num_cores}
        blocks = self.work.blocks.of_layer(self.experts.first_expert)
        return kernel.one_product(rows, product, blocks, split_k=1, **launched)

    def _weight(self, role: str) -> BlockScaled:
        gate_up, down = weights_alike(self.experts.merged())
        return gate_up if role == "gate_up" else down

    def _row_scales(self, role: str) -> Float32[Array, "every N"] | None:
        return alone.row_scales(self._weight(role), self.experts.format)

    def row_scales(self, role: str) -> Float32[Array, "R N"] | float:
        """For each row the scales of whole rows of its expert's weight, in the order of tiles; 1 without any."""
        scales = self._row_scales(role)
        if scales is None:
            return 1.0
        scales = self._layer(scales)
        if role == "gate_up":
            parts = split_gate_up(scales, self.experts.gate_up_order) if self.experts.gated else (scales,)
            scales = self._tiled(self._placed(parts))
        return scales.at[self._expert_of_row].get(mode="promise_in_bounds")

    @property
    def _expert_of_row(self) -> Int32[Array, " R"]:
        return grouping.expert_of_row(self.work, self.routing.expert_ids, self.work.num_rows)

    @property
    def _weights(self) -> Float32[Array, " R"]:
        return grouping.by_row(self.routing.weights, self.work, self.work.num_rows)

    @property
    def _assigned(self) -> Bool[Array, " R"]:
        """Which rows are those of an assignment; results of products may be anything in others."""
        ones = jnp.ones(self.routing.weights.shape, jnp.float32)
        return grouping.by_row(ones, self.work, self.work.num_rows) > 0

    def _layer(self, array: Shaped[Array, "every ..."]) -> Shaped[Array, "E ..."]:
        """Of an array of all layers' experts those of this layer."""
        return lax.dynamic_slice_in_dim(array, self.experts.first_expert, self.problem.num_experts)

    def _tiled(self, parts: tuple[Float[Array, "*lead I"], ...]) -> Float[Array, "*lead tile_rows"]:
        """The inverse of `gate_and_up`, with zeros in the padding up to whole tiles."""
        width = len(parts) * -(-self.experts.intermediate_size // TILE) * TILE
        return join(parts, tile_order(self.experts), width)

    def _placed(self, parts: tuple[Float[Array, "E I"], ...]) -> tuple[Float[Array, "E I"], ...]:
        """Outputs in the places in which the layout has them: in the order of the columns of `down`."""
        order = self.experts.merged().down.order
        if order is None:
            return parts
        return tuple(jnp.take_along_axis(part, self._layer(order), axis=1) for part in parts)

    def _from_places(self, parts: tuple[Float[Array, "E I"], ...]) -> tuple[Float[Array, "E I"], ...]:
        """The inverse of `_placed`."""
        order = self.experts.merged().down.order
        if order is None:
            return parts
        index = np.arange(self.problem.num_experts)[:, None], self._layer(order)
        return tuple(jnp.zeros_like(part).at[index].set(part, unique_indices=True) for part in parts)

    def in_order_of_inputs(self, drows: Float32[Array, "R H"]) -> Float32[Array, "R H"]:
        """Gradients of rows whose columns are in the order of `gate_up`, in the order of x."""
        order = self.experts.merged().gate_up.order
        if order is None:
            return drows
        order = self._layer(order)
        index = np.arange(order.shape[0])[:, None], order
        inverse = jnp.zeros_like(order).at[index].set(np.arange(order.shape[1], dtype=np.int32), unique_indices=True)
        users = expert_of_eight(self.routing, self.experts, self.work) - self.experts.first_expert
        return act_order.ordered_rows(drows, np.arange(drows.shape[0], dtype=np.int32), inverse, users)

    def through_activation(
        self, h: Float[Array, "R tile_rows"], da: Float32[Array, "R I"]
    ) -> tuple[Float[Array, "R tile_rows"], Float32[Array, " R"]]:
        """The gradient of h, zero in rows of no assignment, and that of the routing weight of each row's a."""
        weights = None if self.problem.on_input else self._weights
        if self.problem.input_format is None:
            scaled = self._row_scales("gate_up") is not None
            size, order = self.experts.intermediate_size, tile_order(self.experts)
            dtype = jnp.dtype(jnp.float32 if scaled else jnp.bfloat16)  # scaled before it is rounded
            call = gradient.Call(self.problem.activation, size, order, dtype)
            factor = jnp.ones(h.shape[0], jnp.float32) if weights is None else weights
            return gradient.through_activation(h, da, factor, self._assigned, call)
        parts = tuple(part.astype(jnp.float32) for part in gate_and_up(h, self.experts))
        a, derivative = jax.vjp(self.problem.activation, *parts)
        dparts = derivative(da if weights is None else da * weights[:, None])
        dh = self._tiled(tuple(jnp.where(self._assigned[:, None], part, 0) for part in dparts))
        format = INPUT_FORMATS[self.problem.input_format]
        a = dequantize(quantize(a, format, self.experts.input_scale("down")), format)
        return dh, (da * a).sum(-1)

    def of_down_bias(self, dy: Float[Array, "T H"]) -> Float32[Array, "T k"] | float:
        """What the bias of `down` adds to the gradient of each routing weight: a product with those of all experts."""
        bias = self.experts.merged().down_bias
        if bias is None or self.problem.on_input:
            return 0.0
        bias, exact = self._layer(bias), lax.Precision.HIGHEST
        if dy.dtype == bias.dtype == jnp.bfloat16:
            exact = None
        else:
            dy, bias = dy.astype(jnp.float32), bias.astype(jnp.float32)
        shares = jnp.dot(dy, bias.T, precision=exact, preferred_element_type=jnp.float32)
        chosen = jnp.clip(self.routing.expert_ids, 0, self.problem.num_experts - 1)
        return jnp.take_along_axis(shares, chosen, axis=1, mode="promise_in_bounds")

    def weights(
        self,
        wanted: Wanted,
        x: Float[Array, "T H"],
        h: Float[Array, "R tile_rows"],
        dh: Float[Array, "R tile_rows"],
        dout: Float[Array, "R H"],
    ) -> tuple[Float32[Array, "E N K"] | None, Float32[Array, "E H I"] | None]:
        """Gradients of what the weights were rounded from, those that are wanted."""
        of_weight = partial(weight_gradients.of_weight, self.problem, self.routing)
        gate_up = down = None
        if wanted.gate_up:
            rows = sorted_rows(self.problem, x, self.routing, self.experts, self.work).values[:, : x.shape[1]]
            gate_up = of_weight(gate_and_up(dh, self.experts), rows, self.num_cores)
        if wanted.down:
            parts = (part.astype(jnp.float32) for part in gate_and_up(h, self.experts))
            dout = dout if self.problem.on_input else dout * self._weights[:, None]
            down = of_weight((dout,), self.problem.activation(*parts), self.num_cores)
        return gate_up, down

    # Biases

    def gate_up_bias(self, dh: Float[Array, "R tile_rows"]) -> Float32[Array, "E N"]:
        """Sums of each expert's rows."""
        mine = self._expert_of_row[None] == jnp.arange(self.problem.num_experts)[:, None]
        total = jnp.dot(mine.astype(jnp.bfloat16), dh.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        parts = self._from_places(gate_and_up(total, self.experts))
        if not self.experts.gated:
            return parts[0]
        gate, up = parts
        return join_gate_up(gate, up, self.experts.gate_up_order)

    def down_bias(self, dy: Float[Array, "T H"]) -> Float32[Array, "E H"]:
        """Sums of the gradients of each expert's tokens, by their routing weights unless these are on the input."""
        weights = self.routing.weights.astype(jnp.float32)
        weights = jnp.ones_like(weights) if self.problem.on_input else weights
        mine = self.routing.expert_ids[None] == jnp.arange(self.problem.num_experts)[:, None, None]
        shares = jnp.where(mine, weights[None], 0).sum(-1)
        return jnp.dot(shares, dy.astype(jnp.float32), precision=lax.Precision.HIGHEST)

    def of_layer(self, gradient: Float32[Array, "E N"], bias: Float[Array, "*lead N"]) -> Float32[Array, "*lead N"]:
        """The gradient of a bias of all layers of a stack."""
        if self.experts.index is None:
            return gradient
        return jnp.zeros(bias.shape, jnp.float32).at[self.experts.index].set(gradient)
