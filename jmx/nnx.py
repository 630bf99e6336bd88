"""The layer as a Flax NNX module, which calls `jmx.moe`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.activations import Activation, SwiGLU
from jmx.experts import OTHER_ARRAYS, ROLES, Axes, Experts, MeshAxes, partition_names
from jmx.experts.arrays import check_arrays
from jmx.module_arguments import Arguments
from jmx.module_call import call, check_router_split, router_logits, router_options
from jmx.numerics.formats import MXFP4, Format
from jmx.routing import Logits, Method, Routing, route
from jmx.selection.problem import Problem
from jmx.util.checks import check_instance
from jmx.util.typing import AnyArray, Array, Bool, Float


class Quantized(nnx.Variable):
    """Quantized weights. Not an `nnx.Param`, so that optimizers and `nnx.grad` leave them out.

    Their gradient is a TypeError: for float4 arrays jmx raises it and names the weight; for packed ones jax raises it
    before the layer is called, as `grad` does not accept uint8.
    """


class CorrectionBias(nnx.Variable):
    """A bias of the choice of experts, updated by load balancing, not by gradients."""


def _metadata(*names: MeshAxes) -> dict[str, Any]:
    """Partitioning metadata. Flax places such variables when they are made, if a mesh is in scope."""
    in_mesh = not jax.sharding.get_abstract_mesh().empty
    return {"out_sharding": names, "eager_sharding": in_mesh and nnx.using_eager_sharding()}


class MoE(nnx.Module):
    """A mixture-of-experts layer whose expert weights stay quantized.

    Args:
        hidden_size, intermediate_size, num_experts, top_k: sizes.
        format: block format of the expert weights, or its name in `jmx.FORMATS`.
        activation: gated if and only if `gate_up_order` is not None; or its name in `jmx.ACTIVATIONS`.
        bias: whether experts have biases.
        gate_up_order: "interleaved", "concatenated", or None for un-gated experts; "auto" is that of
            `experts`, else "concatenated" for gated activations and None for others.
        routing: routing method, or its name in `jmx.ROUTING_METHODS`; default `TopKSoftmax(top_k)`.
        router: whether the layer has a router; else each call must be given logits or a routing.
        router_bias: whether the router has a bias; default as `bias`.
        correction_bias: whether there is a bias (E,) for selection only (see `routing`).
        weights_on: whether routing weights multiply experts' "output" or "input".
        input_format: the format that both products' inputs are rounded to, see `jmx.moe`; None: what `experts` declare.
        backend: name of the backend that must run, or None.
        layout: layout of the weights; "auto" is the one for this machine.
        param_dtype: dtype of biases and router. The router computes in float32.
        axes: mesh axis, or a tuple of them, for the logical axes "expert", "hidden", "intermediate"; axes that
            are left out are not split.
        experts: initial weights instead of random ones. Their arrays are shared if they are in `layout` already.
        rngs: `nnx.Rngs`; the stream `params` is used.

    Raises:
        ValueError, TypeError: arguments that are wrong, do not fit each other, or that `experts` do not fit.
    """

    gate_up_values: Quantized
    gate_up_scales: Quantized
    down_values: Quantized
    down_scales: Quantized
    gate_up_bias: nnx.Param
    down_bias: nnx.Param
    router: Any  # nnx.Linear, or None
    correction_bias: Any  # CorrectionBias, or None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        format: Format | str = MXFP4,
        activation: Activation | str = SwiGLU(),  # noqa: B008 (frozen)
        bias: bool = False,
        gate_up_order: str | None = "auto",
        routing: Method | str | None = None,
        router: bool = True,
        router_bias: bool | None = None,
        correction_bias: bool = False,
        weights_on: str = "output",
        input_format: str | None = None,
        backend: str | None = None,
        layout: str = "auto",
        param_dtype: Any = jnp.bfloat16,
        axes: Axes | None = None,
        experts: Experts | None = None,
        rngs: nnx.Rngs,
    ):
        given = Arguments.of(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            format=format,
            activation=activation,
            bias=bias,
            gate_up_order=gate_up_order,
            routing=routing,
            router=router,
            router_bias=router_bias,
            correction_bias=correction_bias,
            weights_on=weights_on,
            input_format=input_format,
            backend=backend,
            layout=layout,
            param_dtype=param_dtype,
            axes=axes,
            experts=experts,
        )
        if not hasattr(check_instance("rngs", rngs, nnx.Rngs, "a flax.nnx.Rngs"), "params"):
            raise ValueError(f"`rngs` (of {[*rngs]}) must have a stream `params`, or a default one")
        experts = given.initial_weights(rngs.params)
        self.routing = given.routing
        self.activation = given.activation
        self.weights_on = given.weights_on
        self.input_format = given.input_format
        self.backend = given.backend
        self.top_k = given.top_k
        self.num_experts = given.num_experts
        axes = {} if given.axes is None else given.axes
        names = partition_names(experts, axes)
        for name, array in experts.arrays().items():
            kind = nnx.Param if name.endswith("bias") else Quantized
            setattr(self, name, kind(array, **_metadata(*names[name])))
        self.skeleton = nnx.static(experts.with_arrays({}))  # all but the arrays
        self.router = nnx.data(None)
        if given.router:
            self.router = nnx.Linear(
                given.hidden_size,
                given.num_experts,
                **router_options(given),
                kernel_metadata=_metadata(axes.get("hidden"), axes.get("expert")),
                bias_metadata=_metadata(axes.get("expert")),
                rngs=rngs,
            )
        self.correction_bias = nnx.data(
            CorrectionBias(jnp.zeros(given.num_experts, jnp.float32)) if given.correction_bias else None
        )

    @property
    def experts(self) -> Experts:
        """The weights as a pytree, in the layer's layout."""
        names = [f"{role}_{name}" for role in ROLES for name in (*self.skeleton.format.arrays, *OTHER_ARRAYS)]
        return self.skeleton.with_arrays(
            {name: getattr(self, name).get_value() for name in names if hasattr(self, name)}
        )

    def update(self, new: Experts) -> None:
        """Replaces the weights, in the layer's layout and on its devices; see `Experts.update`."""
        self._set(self.experts.update(new))

    def prepare(self, layout: str) -> None:
        """Converts the weights to another layout and deletes the old arrays, which must not be in use elsewhere."""
        self._set(self.experts.prepare(layout, donate=True))

    def _set(self, experts: Experts) -> None:
        self.skeleton = nnx.static(experts.with_arrays({}))
        for name, array in experts.arrays().items():
            getattr(self, name).set_value(array)

    def route(self, x: Float[AnyArray, "*tokens H"], mask: Bool[AnyArray, "*tokens"] | None = None) -> Routing:
        """Routing (..., k) of x (..., H) by the layer's router, for `layer(x, routing)` and `jmx.token_counts`.

        `mask` (...) bool: False marks padding tokens, which route nowhere.
        """
        return route(self._logits(x), mask)

    def _logits(self, x: Float[AnyArray, "*tokens H"], values: Any = None) -> Logits:
        router = None if self.router is None else self._call_router
        bias = None if self.correction_bias is None else self.correction_bias[...]
        sizes = {"hidden_size": self.skeleton.hidden_size, "num_experts": self.num_experts}
        return router_logits(x, values, self.routing, **sizes, router=router, correction_bias=bias)

    def _call_router(self, x: Float[AnyArray, "*tokens H"]) -> Float[Array, "*tokens E"]:
        weights = {name: getattr(self.router, name) for name in ("kernel", "bias")}
        check_router_split(x, {name: weight[...] for name, weight in weights.items() if weight is not None})
        return self.router(x)

    def __call__(
        self,
        x: Float[AnyArray, "*tokens H"],
        routing: Routing | Logits | Float[AnyArray, "*tokens E"] | None = None,
        *,
        mask: Bool[AnyArray, "*tokens"] | None = None,
    ) -> Float[Array, "*tokens H"]:
        """x (..., H) -> y (..., H).

        `routing`: None for the layer's router, router logits (..., E) for its routing method, or a `Routing` or
        `Logits`. `mask` (...) bool: False marks padding tokens, which route nowhere.
        """
        if not isinstance(routing, Routing | Logits):
            routing = self._logits(x, routing)
        return call(self, x, routing, self.experts, mask)

    def problem(self, x: Float[Any, "*tokens H"]) -> Problem:
        """The problem of calling this layer on x (an array or `jax.ShapeDtypeStruct`), for `jmx.explain`.

        Raises:
            ValueError, TypeError: an x, or weights, that the call rejects.
        """
        check_arrays(self.experts)
        return Problem.of(x, self.routing.top_k, self.experts, self.activation, self.weights_on, self.input_format)
