"""The layer as a Flax Linen module, which calls `jmx.moe`."""

import itertools
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jmx.activations import Activation, SwiGLU
from jmx.experts import Axes, Experts, partition_names
from jmx.module_arguments import SIZES, Arguments, check_auto_axes
from jmx.module_call import call, check_router_split, router_logits, router_options
from jmx.numerics.formats import MXFP4, Format
from jmx.routing import Logits, Method, Routing, route
from jmx.selection.problem import Problem, check_x
from jmx.util.typing import AnyArray, Array, Bool, Float, Shaped

_numbers = itertools.count()


class _InitialExperts:
    """The argument `experts` as an attribute of a module; equal to nothing but itself.

    Flax hashes a module's attributes (`nn.jit`), and those of dataclasses in them, but arrays have no hash. The hash is
    a running number, not `id`: another object may get the same `id` later, and `nn.jit` would then use old weights.
    """

    def __init__(self, experts: Experts):
        self.experts = experts
        self._number = next(_numbers)

    def __hash__(self) -> int:
        return hash((_InitialExperts, self._number))

    def __repr__(self) -> str:
        e = self.experts
        return f"Experts({e.num_experts} of {e.format.name}, {e.hidden_size} x {e.intermediate_size})"


class MoE(nn.Module):
    """A mixture-of-experts layer whose expert weights stay quantized.

    Quantized weights are in the collection "quantized", the bias for selection in "correction": gradients with respect
    to "params" leave both out. Biases and the router are in "params". Arguments are those of `jmx.nnx.MoE`. Other
    weights can be put into the variables under the names of `Experts.arrays`.

    `axes`: if given, variables are boxed with their partitioning (`nn.Partitioned`), as by `nn.with_partitioning`:
    `nn.scan` and `nn.vmap` then need `metadata_params={nn.PARTITION_NAME: ...}`.
    `experts`: initial weights for `init`. `apply` reads the variables only. In a jitted `init` they are constants of
    the program, unless they are an argument of the jitted function that makes the module.

    Raises (when the module is made):
        ValueError, TypeError: arguments that are wrong, or do not fit each other.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    format: Format | str = MXFP4
    activation: Activation | str = SwiGLU()
    bias: bool = False
    gate_up_order: str | None = "auto"
    routing: Method | str | None = None
    router: bool = True
    router_bias: bool | None = None
    correction_bias: bool = False
    weights_on: str = "output"
    input_format: str | None = None
    backend: str | None = None
    layout: str = "auto"
    param_dtype: Any = jnp.bfloat16
    axes: Axes | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if isinstance(self.experts, Experts):
            object.__setattr__(self, "experts", _InitialExperts(self.experts))
        given = self._arguments()
        for name in SIZES:  # jax's integers have no hash, which Flax needs of attributes
            object.__setattr__(self, name, getattr(given, name))
        super().__post_init__()

    @nn.nowrap  # called before the module has a scope, without which `nn.tabulate` cannot intercept methods
    def _arguments(self) -> Arguments:
        given = {field.name: getattr(self, field.name) for field in fields(Arguments)}
        if isinstance(self.experts, _InitialExperts):
            given["experts"] = self.experts.experts
        return Arguments.of(**given)

    def setup(self) -> None:
        given = self._arguments()
        self.resolved = given
        axes = {} if given.axes is None else given.axes
        check_auto_axes(axes)

        def boxed(init: Any, names: tuple[Any, ...]) -> Any:
            return init if given.axes is None else nn.with_partitioning(init, names)

        abstract = jax.eval_shape(lambda key: given.initial_weights(lambda: key), jax.random.key(0))
        names = partition_names(abstract, axes)
        starting = self.is_initializing()
        drawn = given.initial_weights(lambda: self.make_rng("params")).arrays() if starting else {}
        arrays: dict[str, Array] = {}
        for name, like in abstract.arrays().items():
            # Flax evaluates `init` again when the layer is called, for its shape only.
            value = drawn[name] if drawn else jnp.empty(like.shape, like.dtype)
            init = boxed(lambda *_, value=value: value, names[name])
            is_param = name.endswith("bias")
            array = self.param(name, init) if is_param else self.variable("quantized", name, init).value
            arrays[name] = _checked(name, nn.meta.unbox(array), like, abstract.layout)
        self.weights = abstract.with_arrays(arrays)
        if given.router:
            self.router_dense = nn.Dense(
                given.num_experts,
                **router_options(given),
                kernel_init=boxed(nn.initializers.lecun_normal(), (axes.get("hidden"), axes.get("expert"))),
                bias_init=boxed(nn.initializers.zeros_init(), (axes.get("expert"),)),
            )
        if given.correction_bias:
            self.correction = self.variable("correction", "bias", jnp.zeros, (given.num_experts,), jnp.float32)

    def __call__(
        self,
        x: Float[AnyArray, "*tokens H"],
        routing: Routing | Logits | Float[AnyArray, "*tokens E"] | None = None,
        *,
        mask: Bool[AnyArray, "*tokens"] | None = None,
    ) -> Float[Array, "*tokens H"]:
        """x (..., H) -> y (..., H); `routing` and `mask` as for `jmx.nnx.MoE`."""
        check_x(x, self.resolved.hidden_size)
        if self.router and self.is_initializing():
            self.router_dense(x)  # makes the router's weights even if a routing is given
        if not isinstance(routing, Routing | Logits):
            routing = self._logits(x, routing)
        return call(self.resolved, x, routing, self.weights, mask)

    def route(self, x: Float[AnyArray, "*tokens H"], mask: Bool[AnyArray, "*tokens"] | None = None) -> Routing:
        """Routing (..., k) of x (..., H) by the layer's router: `layer.apply(variables, x, method="route")`.

        `mask` (...) bool: False marks padding tokens, which route nowhere.
        """
        return route(self._logits(x), mask)

    def _logits(self, x: Float[AnyArray, "*tokens H"], values: Any = None) -> Logits:
        router = self._call_router if self.router else None
        bias = self.correction.value if self.correction_bias else None
        sizes = {"hidden_size": self.resolved.hidden_size, "num_experts": self.resolved.num_experts}
        return router_logits(x, values, self.resolved.routing, **sizes, router=router, correction_bias=bias)

    def _call_router(self, x: Float[AnyArray, "*tokens H"]) -> Float[Array, "*tokens E"]:
        check_router_split(x, nn.meta.unbox(self.router_dense.variables.get("params", {})))
        return self.router_dense(x)

    def problem(self, x: Float[Any, "*tokens H"]) -> Problem:
        """The problem of calling this layer on x (an array or `jax.ShapeDtypeStruct`), for `jmx.explain`."""
        given = self._arguments()
        experts = jax.eval_shape(lambda key: given.initial_weights(lambda: key), jax.random.key(0))
        return Problem.of(x, given.top_k, experts, given.activation, self.weights_on, self.input_format)


def _checked(name: str, array: Shaped[Array, "..."], like: jax.ShapeDtypeStruct, layout: str) -> Shaped[Array, "..."]:
    # Flax checks the shapes of params only, and no dtypes.
    if (array.dtype, array.shape) != (like.dtype, like.shape):
        raise ValueError(
            f"`{name}` ({array.dtype}{list(array.shape)}) must be {like.dtype}{list(like.shape)} in layout {layout!r}"
        )
    return array
