"""The layer as a Flax Linen module, thin over `jmx.moe`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jmx.activations import Activation, SwiGLU
from jmx.backends import resolve_layout
from jmx.experts import Experts, partition_names
from jmx.formats import MXFP4, Format
from jmx.layer import flat_routing, moe
from jmx.modules import check_arguments, check_auto_axes, check_router_split, resolve_method, resolve_order
from jmx.routing import Logits, Method, Routing
from jmx.selection import Environment, Problem, resolve_input_format

Array = Any


class MoE(nn.Module):
    """A mixture-of-experts layer whose expert weights stay quantised.

    Quantised weights live in the collection "quantized" (and the bias for selection in "correction"), which gradients
    with respect to "params" pass by; biases and the router live in "params". Arguments are those of `jmx.nnx.MoE`.
    Weights from elsewhere are put into the variables under the names of `Experts.arrays`.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    format: Format = MXFP4
    activation: Activation = SwiGLU()
    bias: bool = False
    gate_up_order: str | None = "auto"
    routing: Method | None = None
    router: bool = True
    router_bias: bool | None = None
    correction_bias: bool = False
    weights_on: str = "output"
    input_format: str | None = None
    backend: str | None = None
    layout: str = "auto"
    param_dtype: Any = jnp.bfloat16
    axes: Mapping[str, str | None] | None = None

    def setup(self) -> None:
        check_arguments(self.weights_on, self.axes)
        self._method()
        axes = self.axes or {}
        check_auto_axes(axes)
        abstract = jax.eval_shape(self._random, jax.random.key(0))
        names = partition_names(abstract, axes)
        drawn = self._random(self.make_rng("params")).arrays() if self.is_initializing() else {}
        arrays: dict[str, Array] = {}
        for name, like in abstract.arrays().items():
            # Flax asks again when the layer is called, for shapes alone.
            value = drawn[name] if drawn else jnp.empty(like.shape, like.dtype)
            init = nn.with_partitioning(lambda *_, value=value: value, names[name])
            is_param = name.endswith("bias")
            array = self.param(name, init) if is_param else self.variable("quantized", name, init).value
            arrays[name] = _checked(name, nn.meta.unbox(array), like, abstract.layout)
        self.experts = abstract.with_arrays(arrays)
        if self.router:
            self.router_dense = nn.Dense(
                self.num_experts,
                use_bias=self.bias if self.router_bias is None else self.router_bias,
                dtype=jnp.float32,
                param_dtype=self.param_dtype,
                precision=jax.lax.Precision.HIGHEST,
                kernel_init=nn.with_partitioning(
                    nn.initializers.lecun_normal(), (axes.get("hidden"), axes.get("expert"))
                ),
                bias_init=nn.with_partitioning(nn.initializers.zeros_init(), (axes.get("expert"),)),
            )
        if self.correction_bias:
            self.correction = self.variable("correction", "bias", jnp.zeros, (self.num_experts,), jnp.float32)

    def __call__(
        self, x: Array, routing: Routing | Logits | Array | None = None, *, mask: Array | None = None
    ) -> Array:
        """x (..., H) -> y (..., H); `routing` and `mask` as for `jmx.nnx.MoE`."""
        if self.router and self.is_initializing():
            self.router_dense(x)  # makes its weights, though routing be given
        if not isinstance(routing, Routing | Logits):
            routing = self._logits(x, routing)
        return moe(
            x,
            routing,
            self.experts,
            activation=self.activation,
            weights_on=self.weights_on,
            input_format=self.input_format,
            mask=mask,
            backend=self.backend,
        )

    def route(self, x: Array, mask: Array | None = None) -> Routing:
        """Routing (T, k) of x (..., H) by the layer's own router, T all tokens: `layer.apply(..., method="route")`."""
        return flat_routing(self._logits(x), x.shape[:-1], mask)

    def _logits(self, x: Array, values: Array | None = None) -> Logits:
        if values is None:
            if not self.router:
                raise ValueError("`routing` must be given: this layer was made with router=False")
            check_router_split(x, nn.meta.unbox(self.router_dense.variables.get("params", {})))
            values = self.router_dense(x)
        return Logits(values, self._method(), self.correction.value if self.correction_bias else None)

    def problem(self, x: Array) -> Problem:
        """The problem of calling this layer on x (an array or `jax.ShapeDtypeStruct`), for `jmx.explain`."""
        experts = jax.eval_shape(self._random, jax.random.key(0))
        return Problem.of(x, self.top_k, experts, self.activation, self.weights_on, self.input_format)

    def _method(self) -> Method:
        return resolve_method(self.routing, self.top_k, self.num_experts, correction_bias=self.correction_bias)

    def _random(self, key: Array) -> Experts:
        experts = Experts.random(
            key,
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            gate_up_order=resolve_order(self.gate_up_order, self.activation),
            format=self.format,
            bias=self.bias,
            bias_dtype=self.param_dtype,
        )
        inputs = resolve_input_format(experts, self.input_format)
        return experts.prepare(resolve_layout(self.layout, Environment.probe(), self.format, inputs))


def _checked(name: str, array: Array, like: jax.ShapeDtypeStruct, layout: str) -> Array:
    # Flax checks the shapes of params alone.
    if (array.dtype, array.shape) != (like.dtype, like.shape):
        raise ValueError(
            f"`{name}` ({array.dtype}{list(array.shape)}) must be {like.dtype}{list(like.shape)} in layout {layout!r}"
        )
    return array
