"""The layer as a Flax NNX module, which calls `jmx.moe`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jmx.activations import Activation, SwiGLU
from jmx.experts import OTHER_ARRAYS, ROLES, Axes, Experts
from jmx.experts.conversion import place_like
from jmx.lora import Adapters, LoRA
from jmx.lora.adapters import Skeleton
from jmx.meshes import MeshAxes
from jmx.module_arguments import Arguments, check_undivided, is_trained
from jmx.module_call import (
    call,
    call_counts,
    check_router_split,
    problem_of,
    router_logits,
    router_options,
    summed_counts,
)
from jmx.numerics.formats import MXFP4, Format
from jmx.parallel.experts_form import (
    AnyExperts,
    check_alike,
    check_held,
    form_names,
    inner,
    prepared,
    updated,
    whole_experts,
)
from jmx.parallel.module_axes import split_of, weight_axes
from jmx.parallel.placed_experts import PLACEMENT_ARRAYS, PlacedExperts
from jmx.parallel.placement import Placement
from jmx.parallel.split import Split
from jmx.qat import QAT, MasterExperts
from jmx.qat.masters import MASTER_ARRAYS
from jmx.routing import Logits, Method, Routing, route
from jmx.selection.problem import Problem, check_x
from jmx.util.checks import check_instance
from jmx.util.typing import AnyArray, Array, Bool, Float, Int32, Shaped


class Quantized(nnx.Variable):
    """Quantized weights. Not an `nnx.Param`, so that optimizers and `nnx.grad` leave them out.

    Their gradient is a TypeError: for float4 arrays jmx raises it and names the weight; for packed ones jax raises it
    before the layer is called, as `grad` does not accept uint8.
    """


class PlacementArray(nnx.Variable):
    """An array of the placement of a layer with spare experts, see `jmx.parallel.Placement`; replaced by balancing."""


class CorrectionBias(nnx.Variable):
    """A bias of the choice of experts, updated by load balancing, not by gradients."""


def variable_of(name: str, format: Format) -> type[nnx.Variable]:
    """The type of the variable of an array of experts of that format, or of their placement, by its name."""
    if name in PLACEMENT_ARRAYS:
        return PlacementArray
    return nnx.Param if is_trained(name, format) else Quantized


def _metadata(*names: MeshAxes) -> dict[str, Any]:
    """Partitioning metadata. Flax places such variables when they are made, if a mesh is in scope.

    Not on a mesh with axes of several types, which is an error of Flax.
    """
    one_type = len({*jax.sharding.get_abstract_mesh().axis_types}) == 1
    return {"out_sharding": names, "eager_sharding": one_type and _eager_sharding()}


def _eager_sharding() -> bool:
    return not jax.sharding.get_abstract_mesh().empty and nnx.using_eager_sharding()


def _placed(array: Shaped[Array, "..."], names: tuple[MeshAxes, ...]) -> Shaped[Array, "..."]:
    """The array on the mesh in scope, if there is one: Flax places only arrays that are on the mesh already."""
    stays = isinstance(array, Tracer) or not isinstance(array, jax.Array) or not _eager_sharding()
    return array if stays else jax.device_put(array, jax.sharding.PartitionSpec(*names))


class MoE(nnx.Module):
    """A mixture-of-experts layer whose expert weights stay quantized.

    Args:
        hidden_size, intermediate_size, num_experts, top_k: sizes.
        format: format of the expert weights, or its name in `jmx.FORMATS`. Those of floats, such as "bfloat16", are not
            quantized, and are trained: variables of the type `nnx.Param`.
        activation: gated if and only if `gate_up_order` is not None; or its name in `jmx.ACTIVATIONS`.
        bias: whether experts have biases.
        gate_up_order: as `jmx.Experts` has it, None for un-gated experts; "auto" is that of
            `experts`, else "concatenated" for gated activations and None for others.
        routing: routing method, or its name in `jmx.ROUTING_METHODS`; default `TopKSoftmax(top_k)`.
        router: whether the layer has a router; else each call must be given logits or a routing.
        router_bias: whether the router has a bias; default as `bias`.
        correction_bias: whether there is a bias (E,) for selection only (see `routing`).
        weights_on: whether routing weights multiply experts' "output" or "input".
        input_format: the format that both products' inputs are rounded to, see `jmx.moe`; None: what `experts` declare.
        backend: name of the backend that must run, or None.
        save_gate_up: whether the forward pass keeps the outputs of the experts' first product for the backward pass,
            see `jmx.moe`.
        layout: layout of the weights; "auto" is the one for this machine.
        param_dtype: dtype of biases and router. The router computes in float32.
        axes: mesh axis, or a tuple of them, for the logical axes "expert", "hidden", "intermediate" of weights, and
            "token" of x, routing and mask; axes that are left out are not split. A mesh also divides calls: the one in
            scope (`jax.set_mesh`), else that of x or of the weights; without any, a call is on one device. Along mesh
            axes that "token" does not name, tokens are whole on every device, and results are added. Inside
            `jax.shard_map` over these axes, arrays are those of one device. For "intermediate" the module holds a shard
            of the experts for each device of the mesh that is in scope when it is made. Weights that "hidden" divides
            are gathered at each call, as they are in memory.
        spare_experts: slots for copies of experts beside those E, rounded up so that each device along "expert" has as
            many. The layer then holds a placement, which `jmx.parallel.rebalance` changes; routing does not see it.
        experts: initial weights instead of random ones. Their arrays are shared if they are in `layout` already.
        lora: adapters to add to the experts' products, in variables of the type `nnx.LoRAParam`; None: none. See
            docs/training.md, and `adapt`.
        qat: makes the weights master weights, which each call rounds to `format`: variables `gate_up` and `down` of the
            type `nnx.Param`, in place of quantized ones. See docs/training.md. `axes` may then divide "expert" and
            "token" alone, and `experts` may also be `jmx.training.MasterExperts`.
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
        save_gate_up: bool = False,
        layout: str = "auto",
        param_dtype: Any = jnp.bfloat16,
        axes: Axes | None = None,
        spare_experts: int = 0,
        experts: Experts | MasterExperts | None = None,
        lora: LoRA | None = None,
        qat: QAT | None = None,
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
            save_gate_up=save_gate_up,
            layout=layout,
            param_dtype=param_dtype,
            axes=axes,
            spare_experts=spare_experts,
            experts=experts,
            lora=lora,
            qat=qat,
        )
        if not hasattr(check_instance("rngs", rngs, nnx.Rngs, "a flax.nnx.Rngs"), "params"):
            raise ValueError(f"`rngs` (of {[*rngs]}) must have a stream `params`, or a default one")
        held, form = given.initial_weights(rngs.params)
        self.routing = given.routing
        self.activation = given.activation
        self.weights_on = given.weights_on
        self.input_format = given.input_format
        self.backend = given.backend
        self.save_gate_up = given.save_gate_up
        self.top_k = given.top_k
        self.num_experts = given.num_experts
        self.spare_experts = given.spare_experts
        self.axes = nnx.static(None if given.axes is None else tuple(given.axes.items()))  # a tuple has a hash
        self.form = nnx.static(form)
        names = form_names(held, weight_axes(given.axes), jax.sharding.get_abstract_mesh().shape)
        for name, array in held.arrays().items():
            setattr(self, name, variable_of(name, given.format)(_placed(array, names[name]), **_metadata(*names[name])))
        self.skeleton = nnx.static(held.with_arrays({}))  # all but the arrays
        self.adapter_skeleton = nnx.static(None)
        self.adapt(given.initial_adapters(rngs.params, held))
        self.router = nnx.data(None)
        if given.router:
            self.router = nnx.Linear(
                given.hidden_size,
                given.num_experts,
                **router_options(given),
                kernel_metadata=_metadata(None, None),  # each device routes its own tokens
                bias_metadata=_metadata(None),
                rngs=rngs,
            )
        self.correction_bias = nnx.data(
            CorrectionBias(jnp.zeros(given.num_experts, jnp.float32)) if given.correction_bias else None
        )

    @property
    def experts(self) -> Experts:
        """The weights of the E experts as a pytree, in the layer's layout.

        Of a layer that holds shards or slots they are computed: each expert from its first slot, and its shards joined.
        Master weights are rounded, which gives experts in the layout "packed", without gradients of their weights.
        """
        return whole_experts(self.held)

    @property
    def held(self) -> AnyExperts:
        """The weights as the layer holds them: experts, shards of them, or either in the slots of a placement; or
        master weights."""
        return self.skeleton.with_arrays({name: getattr(self, name).get_value() for name in self._names()})

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of the experts, or None if there are none."""
        skeleton = self.adapter_skeleton
        if skeleton is None:
            return None
        return skeleton.with_arrays({name: getattr(self, f"lora_{name}").get_value() for name in skeleton.names})

    def adapt(self, adapters: Adapters | None) -> None:
        """Replaces the adapters of the experts, in variables such as `lora_gate_up_a`; None: removes them.

        Raises:
            ValueError, TypeError: adapters that do not fit the experts, or experts that can have none: with
                `spare_experts`, or divided along other axes than "expert".
        """
        check_instance("adapters", adapters, Adapters | None, "a jmx.lora.Adapters, or None")
        if adapters is not None:
            check_undivided(self._axes, self.spare_experts, "experts with adapters")
            if isinstance(self.skeleton, MasterExperts):
                raise ValueError("`adapters` must be None for a layer with `qat`")
            adapters.check(self.experts)
        if self.adapter_skeleton is not None:
            for name in self.adapter_skeleton.names:
                delattr(self, f"lora_{name}")
        self.adapter_skeleton = nnx.static(None if adapters is None else Skeleton.of(adapters))
        for name, matrix in {} if adapters is None else adapters.arrays().items():
            names = ((self._axes or {}).get("expert"), None, None)[3 - matrix.ndim :]
            setattr(self, f"lora_{name}", nnx.LoRAParam(_placed(matrix, names), **_metadata(*names)))

    def placement(self) -> Placement:
        """Which slots hold each expert.

        Raises:
            ValueError: a layer without spare experts, which has no placement.
        """
        held = self.held
        if not isinstance(held, PlacedExperts):
            raise ValueError(f"`spare_experts` (={self.spare_experts}) must be positive for a layer with a placement")
        return held.placement

    def hold(self, held: AnyExperts) -> None:
        """Replaces the weights by others of the same form, sizes and layout, and a placement by another, all or none.

        Raises:
            TypeError, ValueError: arrays of another form, or that differ in a name, shape or dtype.
        """
        check_alike("held", held, self.held)
        self._set(jax.tree.map(place_like, self.held, held))  # equal shardings, so that nothing is compiled for them

    def update(self, new: Experts) -> None:
        """Replaces the weights, in the layer's form and layout and on its devices; see `Experts.update`."""
        self._set(updated(self.held, new, self.form))

    def prepare(self, layout: str) -> None:
        """Converts the weights to another layout and deletes the old arrays, which must not be in use elsewhere."""
        self._set(prepared(self.held, layout, weight_axes(self._axes)))

    def _names(self) -> list[str]:
        if isinstance(self.skeleton, MasterExperts):
            return [name for name in MASTER_ARRAYS if hasattr(self, name)]
        named = [f"{role}_{name}" for role in ROLES for name in (*inner(self.skeleton).format.arrays, *OTHER_ARRAYS)]
        return [name for name in (*named, *PLACEMENT_ARRAYS) if hasattr(self, name)]

    def _set(self, held: AnyExperts) -> None:
        new = held.arrays()
        old, skeleton = {name: getattr(self, name).get_value() for name in new}, self.skeleton
        try:
            self.skeleton = nnx.static(held.with_arrays({}))
            for name, array in new.items():
                getattr(self, name).set_value(array)
        except BaseException:  # an interrupt, too: weights and their placement belong together
            self.skeleton = nnx.static(skeleton)
            for name, array in old.items():
                getattr(self, name).set_value(array)
            raise

    def route(self, x: Float[AnyArray, "*tokens H"], mask: Bool[AnyArray, "*tokens"] | None = None) -> Routing:
        """Routing (..., k) of x (..., H) by the layer's router, for `layer(x, routing)` and `jmx.token_counts`.

        `mask` (...) bool: False marks padding tokens, which route nowhere.
        """
        return route(self._logits(x), mask)

    def _logits(self, x: Float[AnyArray, "*tokens H"], values: Any = None) -> Logits:
        router = None if self.router is None else self._call_router
        bias = None if self.correction_bias is None else self.correction_bias[...]
        sizes = {"hidden_size": inner(self.skeleton).hidden_size, "num_experts": self.num_experts}
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

        Inside `nnx.capture(..., nnx.Intermediate)` the call also records `token_counts`, int32 (E,): the tokens of each
        expert, added up over calls.
        """
        if not isinstance(routing, Routing | Logits):
            routing = self._logits(x, routing)
        y = call(self, x, routing, self.held, mask, self.split_of(x), self.adapters)
        if any(type(captured) is nnx.Intermediate for captured in getattr(self, "__captures__", ())):
            counts = call_counts(routing, mask, self.num_experts, self._axes)
            self.sow(
                nnx.Intermediate, "token_counts", counts, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros_like(counts)
            )
        return y

    def split_of(self, x: Float[Any, "*tokens H"]) -> Split | None:
        """How mesh axes divide the call on x (an array or `jax.ShapeDtypeStruct`) now; None: on one device.

        Raises:
            ValueError, TypeError: an x that the call rejects, or a mesh that does not fit the layer's `axes`.
        """
        check_x(x, inner(self.skeleton).hidden_size, abstract=True)
        return split_of(self._axes, x, self.held.arrays(), self.form.num_shards)

    @property
    def _axes(self) -> Axes | None:
        return None if self.axes is None else dict(self.axes)

    def token_counts(self, routing: Routing) -> Int32[Array, " E"]:
        """How many tokens of all devices a routing sends to each expert: (E,) int32, for `jmx.parallel.rebalance`.

        Inside `jax.shard_map` counts are added along the mesh axes of "token".

        Raises:
            TypeError, ValueError: as `jmx.token_counts`.
        """
        return summed_counts(routing, self.num_experts, self._axes)

    def problem(self, x: Float[Any, "*tokens H"]) -> Problem:
        """The problem of calling this layer on x (an array or `jax.ShapeDtypeStruct`), for `jmx.explain`.

        Raises:
            ValueError, TypeError: an x, or weights, that the call rejects.
        """
        check_held(self.held)
        return problem_of(self, x, self.held, self.adapter_skeleton is not None)
