"""The layer as a Flax Linen module, which calls `jmx.moe`."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx import meshes
from jmx.activations import Activation, SwiGLU
from jmx.experts import Axes, Experts
from jmx.experts.conversion import place_like
from jmx.lora import Adapters, LoRA
from jmx.lora.adapters import Skeleton
from jmx.module_arguments import SIZES, Arguments, is_trained
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
from jmx.parallel.experts_form import AnyExperts, Form, check_alike, form_names, inner, updated, whole_experts
from jmx.parallel.module_axes import local_shape, mesh_of, split_of, weight_axes
from jmx.parallel.placed_experts import PLACEMENT_ARRAYS
from jmx.parallel.split import Split
from jmx.qat import QAT, MasterExperts
from jmx.routing import Logits, Method, Routing, route
from jmx.selection.problem import Problem, check_x
from jmx.util.checks import check_instance
from jmx.util.typing import AnyArray, Array, Bool, Float, Int32, Shaped

_numbers = itertools.count()


class _InitialExperts:
    """The argument `experts` as an attribute of a module; equal to nothing but itself.

    Flax hashes a module's attributes (`nn.jit`), and those of dataclasses in them, but arrays have no hash. The hash is
    a running number, not `id`: another object may get the same `id` later, and `nn.jit` would then use old weights.
    """

    def __init__(self, experts: Experts | MasterExperts):
        self.experts = experts
        self._number = next(_numbers)

    def __hash__(self) -> int:
        return hash((_InitialExperts, self._number))

    def __repr__(self) -> str:
        e = self.experts
        return f"Experts({e.num_experts} of {e.format.name}, {e.hidden_size} x {e.intermediate_size})"


class MoE(nn.Module):
    """A mixture-of-experts layer whose expert weights stay quantized.

    Quantized weights are in the collection "quantized", the bias for selection in "correction", the placement of spare
    experts in "placement", adapters in "lora": gradients with respect to "params" leave these out. Biases, the router
    and weights that are floats are in "params". Arguments are those of `jmx.nnx.MoE`. Other weights can be put into the
    variables under the names of `Experts.arrays`, or with `update`.

    `axes`: if given, variables are boxed with their partitioning (`nn.Partitioned`), as by `nn.with_partitioning`:
    `nn.scan` and `nn.vmap` then need `metadata_params={nn.PARTITION_NAME: ...}`.
    `experts`: initial weights for `init`. `apply` reads the variables only. In a jitted `init` they are constants of
    the program, unless they are an argument of the jitted function that makes the module.

    Raises:
        ValueError, TypeError: when the module is made: arguments that are wrong, or do not fit each other.
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
    save_gate_up: bool = False
    layout: str = "auto"
    param_dtype: Any = jnp.bfloat16
    axes: Axes | None = None
    spare_experts: int = 0
    experts: Experts | MasterExperts | None = None
    lora: LoRA | None = None
    qat: QAT | None = None

    def __post_init__(self) -> None:
        if isinstance(self.experts, Experts | MasterExperts):
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
        starting = self.is_initializing()
        stored = {} if starting else _arrays_of(self.variables, given.format)
        abstract, form = _abstract(given, stored)
        self.num_shards = form.num_shards

        def boxed(init: Any, names: tuple[Any, ...]) -> Any:
            return init if given.axes is None else _with_partitioning(init, names)

        names = form_names(abstract, weight_axes(given.axes), jax.sharding.get_abstract_mesh().shape)
        drawn = given.initial_weights(lambda: self.make_rng("params"))[0].arrays() if starting else {}
        arrays: dict[str, Array] = {}
        for name, whole in abstract.arrays().items():
            like = jax.ShapeDtypeStruct(local_shape(whole.shape, names[name]), whole.dtype)
            # Flax evaluates `init` again when the layer is called, for its shape only.
            value = drawn[name] if drawn else jnp.empty(like.shape, like.dtype)
            init = boxed(lambda *_, value=value: value, names[name])
            kind = _collection(name, given.format)
            array = nn.meta.unbox(self.param(name, init) if kind == "params" else self.variable(kind, name, init).value)
            of_placement = kind == "placement"  # its shapes depend on the number of ranks
            arrays[name] = array if of_placement else _checked(name, array, like, inner(abstract).layout, given.axes)
        self.weights = abstract.with_arrays(arrays)
        self.adapters = self._adapters(given, abstract, boxed)
        if given.router:
            self.router_dense = nn.Dense(
                given.num_experts,
                **router_options(given),
                kernel_init=boxed(nn.initializers.lecun_normal(), (None, None)),
                bias_init=boxed(nn.initializers.zeros_init(), (None,)),  # each device routes its own tokens
            )
        if given.correction_bias:
            self.correction = self.variable("correction", "bias", jnp.zeros, (given.num_experts,), jnp.float32)

    def _adapters(self, given: Arguments, experts: AnyExperts, boxed: Any) -> Adapters | None:
        key = jax.random.key(0)  # for shapes
        like = jax.eval_shape(lambda: given.initial_adapters(lambda: key, experts))
        if like is None:
            return None
        starting = self.is_initializing()
        made = given.initial_adapters(lambda: self.make_rng("params"), experts) if starting else None
        drawn = {} if made is None else made.arrays()
        arrays = {}
        for name, matrix in like.arrays().items():
            names = ((given.axes or {}).get("expert"), None, None)[3 - matrix.ndim :]
            shape = local_shape(matrix.shape, names)
            value = drawn[name] if drawn else jnp.empty(shape, matrix.dtype)
            init = boxed(lambda *_, value=value: value, names)
            array = nn.meta.unbox(self.variable("lora", name, init).value)
            arrays[name] = _checked(name, array, jax.ShapeDtypeStruct(shape, matrix.dtype), "lora", given.axes)
        return Skeleton.of(like).with_arrays(arrays)

    def __call__(
        self,
        x: Float[AnyArray, "*tokens H"],
        routing: Routing | Logits | Float[AnyArray, "*tokens E"] | None = None,
        *,
        mask: Bool[AnyArray, "*tokens"] | None = None,
    ) -> Float[Array, "*tokens H"]:
        """x (..., H) -> y (..., H); `routing` and `mask` as for `jmx.nnx.MoE`.

        With a mutable collection "intermediates" the call also records `token_counts` there, int32 (E,): the tokens of
        each expert, added up over calls.
        """
        check_x(x, self.resolved.hidden_size)
        if self.router and self.is_initializing():
            self.router_dense(x)  # makes the router's weights even if a routing is given
        if not isinstance(routing, Routing | Logits):
            routing = self._logits(x, routing)
        split = split_of(self.axes, x, self.weights.arrays(), self.num_shards)
        y = call(self.resolved, x, routing, self.weights, mask, split, self.adapters)
        if self.is_mutable_collection("intermediates"):
            counts = call_counts(routing, mask, self.resolved.num_experts, self.axes)
            self.sow("intermediates", "token_counts", counts, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros_like(counts))
        return y

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
        return problem_of(given, x, _abstract(given, {}, Form())[0], given.lora is not None)

    def split_of(self, x: Float[Any, "*tokens H"]) -> Split | None:
        """How mesh axes divide the call on x (an array or `jax.ShapeDtypeStruct`) now; None: on one device.

        Unlike a call, it does not see the weights: the mesh is the one in scope, else that of x.
        """
        check_x(x, self.hidden_size, abstract=True)
        mesh = mesh_of(x, {})
        return split_of(self.axes, x, {}, 1 if mesh is None else Form.of(self.axes, 0, mesh).num_shards)

    def token_counts(self, routing: Routing) -> Int32[Array, " E"]:
        """How many tokens of all devices go to each expert, (E,) int32; as of `jmx.nnx.MoE`, by `layer.apply`."""
        return summed_counts(routing, self.resolved.num_experts, self.axes)

    @nn.nowrap
    def held(self, variables: Mapping[str, Any]) -> AnyExperts:
        """The weights in the variables of this layer, as it holds them: experts, shards of them, or either in slots.

        Raises:
            TypeError, ValueError: no variables of a layer with these arguments.
        """
        given = self._arguments()
        named = _arrays_of(variables, given.format)
        abstract, _ = _abstract(given, named)
        if missing := sorted({*abstract.arrays()} - {*named}):
            raise ValueError(f"`variables` (with {sorted(named)}) must have {missing[0]!r}, as those of this layer do")
        return abstract.with_arrays(named)

    @nn.nowrap
    def hold(self, variables: Mapping[str, Any], held: AnyExperts) -> dict[str, Any]:
        """The variables of this layer with other weights, of the same form, sizes and layout.

        Raises:
            TypeError, ValueError: variables of another layer, or arrays that differ in a name, shape or dtype.
        """
        check_alike("held", held, old_held := self.held(variables))
        held = jax.tree.map(place_like, old_held, held)
        new = {name: dict(collection) for name, collection in variables.items()}
        for name, array in held.arrays().items():
            kind = _collection(name, inner(held).format)
            old = new[kind][name]
            new[kind][name] = old.replace_boxed(array) if isinstance(old, nn.meta.AxisMetadata) else array
        return new

    @nn.nowrap
    def experts_of(self, variables: Mapping[str, Any]) -> Experts:
        """The weights of the E experts in the variables of this layer, whatever axes and mesh it had.

        Raises:
            TypeError, ValueError: as `held`.
        """
        return whole_experts(self.held(variables))

    @nn.nowrap
    def adapters_of(self, variables: Mapping[str, Any]) -> Adapters:
        """The adapters in the variables of this layer, which has `lora`.

        Raises:
            TypeError, ValueError: no variables of a layer with these adapters.
        """
        check_instance("variables", variables, Mapping, "a mapping of the layer's collections")
        lora = self._arguments().lora
        if lora is None:
            raise ValueError("`lora` (=None) must be given to a layer with adapters")
        experts = self.experts_of(variables)
        skeleton = Skeleton.of(jax.eval_shape(lambda: lora.random(jax.random.key(0), experts)))
        found = {name: nn.meta.unbox(array) for name, array in variables.get("lora", {}).items()}
        if missing := sorted({*skeleton.names} - {*found}):
            raise ValueError(f"`variables` (with {sorted(found)} in 'lora') must have {missing[0]!r} there")
        return skeleton.with_arrays(found)

    @nn.nowrap
    def adapt(self, variables: Mapping[str, Any], adapters: Adapters) -> dict[str, Any]:
        """The variables of this layer, which has `lora`, with other adapters of the same form.

        Raises:
            TypeError, ValueError: as `adapters_of`, and adapters that differ in a name, a shape, a dtype or the scale.
        """
        check_instance("adapters", adapters, Adapters, "a jmx.lora.Adapters")
        old, new = (jax.eval_shape(lambda each=each: each) for each in (self.adapters_of(variables), adapters))
        if old != new:
            raise ValueError(f"`adapters` (={new}) must be as those of the layer, {old}")
        its = variables["lora"]
        boxed = {
            name: its[name].replace_boxed(array) if isinstance(its[name], nn.meta.AxisMetadata) else array
            for name, array in adapters.arrays().items()
        }
        return {**variables, "lora": boxed}

    @nn.nowrap
    def update(self, variables: Mapping[str, Any], new: Experts) -> dict[str, Any]:
        """The variables with other experts, in this layer's form and layout and on its devices; see `Experts.update`.

        Raises:
            TypeError, ValueError: as `held`, and as `Experts.update`.
        """
        given = self._arguments()
        form = _abstract(given, _arrays_of(variables, given.format))[1]
        return self.hold(variables, updated(self.held(variables), new, form))


def _collection(name: str, format: Format) -> str:
    if name in PLACEMENT_ARRAYS:
        return "placement"
    return "params" if is_trained(name, format) else "quantized"


def _arrays_of(variables: Any, format: Format) -> dict[str, Any]:
    """The arrays of experts and of their placement in a layer's variables, by name."""
    check_instance("variables", variables, Mapping, "a mapping of the layer's collections")
    found = {}
    for kind in ("params", "quantized", "placement"):
        for name, array in variables.get(kind, {}).items():
            if not isinstance(array, Mapping) and _collection(name, format) == kind:
                found[name] = nn.meta.unbox(array)
    return found


def _abstract(given: Arguments, stored: Mapping[str, Any], form: Form | None = None) -> tuple[AnyExperts, Form]:
    """The weights of a layer without values, and their form.

    `form`: None: that of the mesh in scope, else of the mesh of the `stored` arrays by name, else by their shapes.
    """
    values = stored.get("gate_up_values")
    if form is None and values is not None and jax.sharding.get_abstract_mesh().empty:
        mesh = jax.typeof(values).sharding.mesh
        form = Form.of(given.axes, given.spare_experts, mesh)
        if mesh.empty:
            rank = _abstract(given, {}, Form())[0].arrays()["gate_up_values"].ndim
            form = dataclasses.replace(form, num_shards=values.shape[0] if values.ndim > rank else 1)
    return jax.eval_shape(lambda key: given.initial_weights(lambda: key, form), jax.random.key(0))


class _Partitioned(nn.Partitioned):
    """A box whose value is constrained along Auto mesh axes only, and where a program is traced.

    Explicit axes are in the type of the value already, and inside `jax.shard_map` it is a device's part. An array is
    where it is, perhaps on another mesh than the one in scope, to which a call moves it. So is an array that is
    differentiated outside of any jit: it is a tracer, but a new array there is not.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        only_auto = {*jax.sharding.get_abstract_mesh().axis_types} <= {AxisType.Auto}
        traced = isinstance(self.value, Tracer) and isinstance(jnp.zeros(()), Tracer)
        return super().unbox(apply_constraint and only_auto and traced)


def _with_partitioning(init: Any, names: tuple[Any, ...]) -> Any:
    """`init`, whose values are in boxes, and split along the Explicit axes of the mesh in scope."""

    def boxed(*arguments: Any) -> _Partitioned:
        value, mesh = init(*arguments), jax.sharding.get_abstract_mesh()
        if AxisType.Explicit in mesh.axis_types:
            value = meshes.placed(value, NamedSharding(mesh, P(*names)))
        return _Partitioned(value, names)

    return boxed


def _checked(
    name: str, array: Shaped[Array, "..."], like: jax.ShapeDtypeStruct, layout: str, axes: Axes | None
) -> Shaped[Array, "..."]:
    # Flax checks the shapes of params only, and no dtypes.
    if (array.dtype, array.shape) != (like.dtype, like.shape):
        over = f", with `axes` (={dict(axes)}) and the mesh in scope: make the variables with it" if axes else ""
        raise ValueError(
            f"`{name}` ({array.dtype}{list(array.shape)}) must be {like.dtype}{list(like.shape)} in layout {layout!r}"
            + over
        )
    return array
