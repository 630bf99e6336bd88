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
from jmx.layer import moe
from jmx.routing import Logits, Method, Routing, TopKSoftmax
from jmx.selection import Environment

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
    backend: str | None = None
    layout: str = "auto"
    param_dtype: Any = jnp.bfloat16
    axes: Mapping[str, str | None] | None = None

    @nn.compact
    def __call__(
        self, x: Array, routing: Routing | Logits | Array | None = None, *, mask: Array | None = None
    ) -> Array:
        """x (..., H) -> y (..., H); `routing` and `mask` as for `jmx.nnx.MoE`."""
        experts = self._experts()
        if not isinstance(routing, Routing | Logits):
            routing = self._logits(x, routing)
        return moe(
            x,
            routing,
            experts,
            activation=self.activation,
            weights_on=self.weights_on,
            mask=mask,
            backend=self.backend,
        )

    def _experts(self) -> Experts:
        order = self.gate_up_order
        if order == "auto":
            order = "concatenated" if self.activation.gated else None

        def random(key: Array) -> Experts:
            experts = Experts.random(
                key,
                self.num_experts,
                self.hidden_size,
                self.intermediate_size,
                gate_up_order=order,
                format=self.format,
                bias=self.bias,
                bias_dtype=self.param_dtype,
            )
            return experts.prepare(resolve_layout(self.layout, Environment.probe()))

        abstract = jax.eval_shape(random, jax.random.key(0))
        names = partition_names(abstract, self.axes or {})
        drawn = random(self.make_rng("params")).arrays() if self.is_initializing() else {}

        def initial(name: str, like: jax.ShapeDtypeStruct) -> Array:
            # Flax asks again when the layer is called, for shapes alone.
            return drawn[name] if drawn else jnp.empty(like.shape, like.dtype)

        arrays: dict[str, Array] = {}
        for name, like in abstract.arrays().items():
            init = nn.with_partitioning(lambda *_, name=name, like=like: initial(name, like), names[name])
            is_param = name.endswith("bias")
            arrays[name] = self.param(name, init) if is_param else self.variable("quantized", name, init).value
        return abstract.with_arrays({name: nn.meta.unbox(array) for name, array in arrays.items()})

    def _logits(self, x: Array, values: Array | None) -> Logits:
        axes = self.axes or {}
        if values is None:
            if not self.router:
                raise ValueError("`routing` must be given: this layer was made with router=False")
            values = nn.Dense(
                self.num_experts,
                use_bias=self.bias if self.router_bias is None else self.router_bias,
                dtype=jnp.float32,
                param_dtype=self.param_dtype,
                precision=jax.lax.Precision.HIGHEST,
                kernel_init=nn.with_partitioning(
                    nn.initializers.lecun_normal(), (axes.get("hidden"), axes.get("expert"))
                ),
                bias_init=nn.with_partitioning(nn.initializers.zeros_init(), (axes.get("expert"),)),
                name="router_dense",
            )(x)
        bias = None
        if self.correction_bias:
            bias = self.variable("correction", "bias", jnp.zeros, (self.num_experts,), jnp.float32).value
        return Logits(values, TopKSoftmax(self.top_k) if self.routing is None else self.routing, bias)
