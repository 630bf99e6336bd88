"""The mixture-of-experts layer as a function: checks, routing, selection of a backend, its call."""

import dataclasses
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jmx import activations, autodiff, meshes
from jmx.activations import Activation
from jmx.backends import registered_backends
from jmx.engines import by_products
from jmx.engines.gradients import Gradients, Primals, SavesGateUp, Wanted, has_gradients
from jmx.engines.grouped import Terms, Unsummed
from jmx.experts import Experts, ShardedExperts, padding
from jmx.guard import check_not_divided
from jmx.lora import Adapters
from jmx.lora.products import AddedBy
from jmx.pallas.routing import call as routing_kernel
from jmx.parallel import over_mesh
from jmx.parallel.experts_form import KINDS, AnyExperts, one_device
from jmx.parallel.placed_experts import PlacedExperts
from jmx.parallel.split import Split
from jmx.parallel.summed import terms_of
from jmx.qat import MasterExperts
from jmx.qat.call import Rounded
from jmx.routing import NOWHERE, Logits, Routing, route
from jmx.routing.leading import Tokens, check_routing, flat_logits, flat_routing, slots_of
from jmx.routing.logits import check as check_logits
from jmx.selection.backend import ProductBackend, SkipsPadding
from jmx.selection.environment import Environment
from jmx.selection.problem import (
    Problem,
    Some,
    check_arguments,
    check_by_token,
    check_x,
    resolve_input_format,
    with_tokens,
)
from jmx.selection.select import check_backend, select
from jmx.util.checks import check_array, check_bool, check_instance, check_values, is_array
from jmx.util.typing import AnyArray, Array, Bool, Float, Integer
from jmx.xla import backend as xla


def moe(
    x: Float[AnyArray, "*tokens H"],
    routing: Routing | Logits,
    experts: AnyExperts,
    *,
    activation: Activation | str,
    weights_on: str = "output",
    input_format: str | None = None,
    mask: Bool[AnyArray, "*tokens"] | None = None,
    backend: str | None = None,
    split: Split | None = None,
    adapters: Adapters | None = None,
    save_gate_up: bool = False,
) -> Float[Array, "*tokens H"]:
    """`y[t] = sum over slots s of weights[t, s] * expert[ids[t, s]](x[t])`, the backend chosen while tracing.

    An expert computes down(activation(gate_up(x) + gate_up_bias)) + down_bias. Expert ids outside 0..E-1 contribute
    nothing. Differentiable (reverse mode) with respect to x, the routing weights or logits, the biases, and master
    weights.

    With a `split`, mesh axes divide experts and tokens between devices, see docs/many_gpus.md; of Explicit axes it is
    read off the types of the arrays. If they split the tokens of x, routing or mask alone, each device computes its own
    tokens, and y is split likewise. Inside `jax.shard_map` without a `split`, ids count from the first of the experts
    that are passed.

    Args:
        x: (..., H) bfloat16, float16 or float32.
        routing: `Routing` of (..., k), or router `Logits` of (..., E), with x's leading axes.
        experts: the weights; or shards of them, whose results are added; or weights in the slots of a placement, in
            which ids of the routing are still those of experts; or master weights, which are rounded first.
        activation: gated if and only if the experts are; or its name in `jmx.ACTIVATIONS`.
        weights_on: "output": routing weights multiply an expert's output; "input": its input.
        input_format: the format that both products' inputs are rounded to: a key of `input_formats.INPUT_FORMATS`, or a
            family of them; None: the one that the experts declare, if any. The rounding has a straight-through
            gradient.
        mask: (...) bool or None; False is a padding token, which routes nowhere and gets y = 0.
        backend: name of the backend that must run; None: that of the `use_backend` context, else the first that can.
        split: how mesh axes divide experts and tokens. Inside `jax.shard_map` over these axes, arrays are those of one
            device; elsewhere they are whole arrays, which may be on devices so already.
        adapters: of these experts, added to their products; differentiable. With a split they are divided as experts
            are, along mesh axes of `expert` and `tokens` alone.
        save_gate_up: whether the forward pass keeps the outputs of the experts' first product for the backward pass,
            float32 (T k, 2I) or a little more, which so need not be computed again. Only `mosaic` does, without
            adapters and gradients of master weights; other calls leave it out. docs/training.md has times and bytes.

    Returns:
        (..., H) of x's dtype.

    Raises:
        ValueError, TypeError: arguments that do not fit each other, or arrays of `experts` that do not fit their sizes;
            and arrays that Explicit mesh axes split along axes other than those of tokens.
        NoBackendError: the requested backend cannot run, or none can; the message has the reasons and remedies.
    """
    activation = activations.get(activation)
    check_instance("split", split, Split | None, "a jmx.Split, or None")
    check_instance("adapters", adapters, Adapters | None, "a jmx.lora.Adapters, or None")
    check_bool("save_gate_up", save_gate_up)
    settings = _Settings(activation, weights_on, input_format, backend, save_gate_up)
    tokens = Tokens(x, routing, mask)
    check_values({**tokens.arrays(), "experts": experts, "adapters": adapters})
    if split is None and isinstance(experts, Experts | MasterExperts) and is_array(x):
        split = over_mesh.split_of_types(x.ndim - 1, tokens.arrays(), experts.arrays())
    if split is not None or isinstance(experts, ShardedExperts | PlacedExperts):
        return _divided(tokens, (experts, adapters), settings, split or Split())
    return _undivided(tokens, (experts, adapters), settings)


def moe_of_some(
    x: Float[Array, "T H"],
    routing: Routing | Logits,
    experts: Experts | MasterExperts,
    some: Some,
    *,
    adapters: Adapters | None = None,
    unsummed: Unsummed | None = None,
    **settings: Any,
) -> Float[Array, "T H"] | Terms | None:
    """`moe` of some of the experts among which tokens are routed; what others would add to a token is left out.

    Kernels get the sizes of blocks that suit the rows of an expert, which are those of a call with all experts. With
    `unsummed` it returns `Terms`, or None: see there.
    """
    return _undivided(Tokens(x, routing, None), (experts, adapters), _Settings(**settings), some, unsummed)


def _undivided(
    tokens: Tokens, weights: over_mesh.Weights, settings: "_Settings", some: Some | None = None, unsummed: Any = None
) -> Any:
    """`moe` of experts that no mesh divides, or its `Terms`, see `moe_of_some`. `some`: which experts; None: all."""
    (x, routing, mask), (experts, adapters) = tokens, weights
    activation, weights_on, input_format, backend, save_gate_up = settings
    beside: Beside = adapters
    if isinstance(experts, MasterExperts):
        if adapters is not None:
            raise ValueError(f"`adapters` (of {[*adapters.by_target()]}) must be None for MasterExperts")
        experts, beside, prepared = Rounded.of(experts, input_format, Environment.probe(x, routing, experts))
    else:
        experts = prepared = check_instance("experts", experts, Experts, "jmx.Experts")
    num_routed = None if some is None or some.num_routed == experts.num_experts else some.num_routed
    check_arguments(x, routing, prepared, activation, weights_on, num_routed)
    if adapters is not None:
        adapters.check(experts)
    check_backend(backend, registered_backends())
    check_routing(routing, x.shape[:-1], mask)
    environment = Environment.probe(x, routing, experts)
    adapted = adapters is not None
    problem = Problem.of(x, slots_of(routing), prepared, activation, weights_on, input_format, adapted, num_routed)
    static = _Static(problem, environment, backend, save_gate_up)
    of_tokens = _token_split(tokens, experts)
    if of_tokens is None:
        return _on_one_device(tokens, (experts, beside), static, None if num_routed is None else some, unsummed)
    return _on_devices(tokens.for_jit(), (experts, beside), static, of_tokens) if unsummed is None else None


def batched_moe(
    x: Float[AnyArray, "E M H"],
    counts: Integer[AnyArray, " E"],
    experts: Experts,
    *,
    activation: Activation | str,
    weights: Float[AnyArray, "E M"] | None = None,
    weights_on: str = "output",
    input_format: str | None = None,
    backend: str | None = None,
) -> Float[Array, "E M H"]:
    """`y[e, i] = weights[e, i] * expert[e](x[e, i])` for i < counts[e], and 0 for the rows after those.

    For tokens that were sent to the device of their expert already, in a buffer of fixed size for each of its experts,
    as DeepEP's low-latency dispatch and vLLM's `BatchedExperts` have them. It is `moe` with one slot a row, on the same
    backends, and differentiable as that is. Rows past the counts may hold anything, also NaN. With mesh axes, call it
    inside `jax.shard_map`, with the experts of one device.

    Args:
        x: (E, M, H) bfloat16, float16 or float32; the rows of expert e are the first counts[e] of x[e].
        counts: integer (E,), each 0 to M. Traced ones are not checked; above M they count as M, below 0 as 0.
        experts: the weights of these E experts.
        activation, weights_on, input_format, backend: as of `moe`.
        weights: floating (E, M), routing weights of the rows; None: 1.

    Returns:
        (E, M, H) of x's dtype.

    Raises:
        ValueError, TypeError, NoBackendError: as `moe`, and for shapes, dtypes or counts that are not as above.
    """
    check_instance("experts", experts, Experts, "jmx.Experts")
    check_x(x, experts.hidden_size)
    if len(x.shape) != 3 or x.shape[0] != experts.num_experts:
        raise ValueError(f"`x` (shape {x.shape}) must be (E, M, H) with E = {experts.num_experts} experts")
    num_experts, rows, hidden = x.shape
    check_array("counts", counts, jnp.integer)
    if tuple(counts.shape) != (num_experts,):
        raise ValueError(f"`counts` (shape {counts.shape}) must be {(num_experts,)}, one an expert")
    if not isinstance(counts, Tracer) and not ((np.asarray(counts) >= 0) & (np.asarray(counts) <= rows)).all():
        raise ValueError(f"`counts` (={np.asarray(counts)}) must be 0 to {rows}, the rows of an expert in `x`")
    if weights is not None:
        check_array("weights", weights, jnp.floating)
        if tuple(weights.shape) != (num_experts, rows):
            raise ValueError(f"`weights` (shape {weights.shape}) must be {(num_experts, rows)}, one a row")
    filled = jnp.arange(rows)[None] < jnp.asarray(counts)[:, None]
    ids = jnp.where(filled, jnp.arange(num_experts, dtype=jnp.int32)[:, None], NOWHERE)
    weights = jnp.ones(filled.shape, jnp.float32) if weights is None else weights
    y = moe(
        x.reshape(-1, hidden),
        Routing(ids.reshape(-1, 1), weights.reshape(-1, 1)),
        experts,
        activation=activation,
        weights_on=weights_on,
        input_format=input_format,
        backend=backend,
    )
    return y.reshape(x.shape)


# What a call has beside its experts: adapters, or what weights were rounded from.
Beside = Adapters | autodiff.Sources | None


class _Settings(NamedTuple):
    """Static arguments of `moe`, by their names there."""

    activation: Activation
    weights_on: str = "output"
    input_format: str | None = None
    backend: str | None = None
    save_gate_up: bool = False


def _divided(
    tokens: Tokens, weights: over_mesh.Weights, settings: _Settings, split: Split
) -> Float[Array, "*tokens H"]:
    """`moe` with experts, or their shards, on several devices; or with shards on one."""
    experts, adapters = weights
    check_instance("experts", experts, AnyExperts, KINDS)
    if adapters is not None or isinstance(experts, MasterExperts):
        _check_divided(adapters, experts, split)
    x, routing, mask = tokens
    manual = split.is_manual()
    whole = jax.eval_shape(partial(over_mesh.gathered, split), experts) if manual and split.hidden else experts
    one = one_device(whole)
    if isinstance(settings.activation, Activation) and settings.activation.num_experts is not None:
        rule = "must have the same parameters for all experts where several devices run a call"
        raise ValueError(f"`activation` (={settings.activation}) {rule}")
    check_arguments(x, routing, one, settings.activation, settings.weights_on, over_mesh.total_experts(split, experts))
    check_backend(settings.backend, registered_backends())
    check_routing(routing, x.shape[:-1], mask)
    if split.all_names:
        check_by_token(one, settings.input_format)
        over_mesh.check_tokens(x)
    by_token, rest = tokens.for_jit().divided()
    if manual or not split.all_names:
        # Outside of any jit, `jax.shard_map` does not support `custom_vjp` with symbolic zeros, which exchanges use.
        run = partial(jax.jit(_of_this_device, static_argnames=("settings", "split")), settings=settings, split=split)
        return (jax.checkpoint(run) if split.hidden else run)(by_token, rest, weights)
    static = over_mesh.static_of(split, x.ndim - 1, tokens.arrays(), experts)
    return _of_all_devices(by_token, rest, weights, settings, static)


def _check_divided(adapters: Adapters | None, experts: AnyExperts, split: Split) -> None:
    """Raises ValueError unless `adapters` fit `experts`, and the split divides both, or master weights, alike."""
    what = "master weights" if adapters is None else "experts with adapters"
    if adapters is not None and not isinstance(experts, Experts):
        raise ValueError(f"`adapters` (of {[*adapters.by_target()]}) must be None for {type(experts).__name__}")
    if split.intermediate or split.hidden:
        raise ValueError(f"`split` (={split}) must name axes of `expert` and `tokens` alone for {what}")
    if adapters is not None:
        assert isinstance(experts, Experts)
        adapters.check(experts)


@partial(jax.jit, static_argnums=(3, 4))
def _of_all_devices(
    by_token: Any, rest: Any, weights: over_mesh.Weights, settings: _Settings, static: over_mesh.Static
) -> Float[Array, "*tokens H"]:
    body = partial(_of_this_device, settings=settings, split=static.split)
    return over_mesh.over_mesh(static, body, by_token, rest, weights)


def _of_this_device(
    by_token: Any, rest: Any, weights: over_mesh.Weights, *, settings: _Settings, split: Split
) -> Float[Array, "*tokens H"]:
    """The results of one device's tokens, inside `jax.shard_map`; or of all, if the split names no axis."""
    (x, routing, mask), (experts, adapters) = Tokens.of_parts(by_token, rest), weights
    experts = over_mesh.gathered(split, experts)
    num_routed = over_mesh.num_routed(split, experts)
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(routing, Logits) and _routes_all(split, flat, routing, experts):
        routing = flat_logits(routing, x.shape[:-1], mask)
    else:
        routing = flat_routing(routing, x.shape[:-1], mask)
    settings = settings._replace(input_format=resolve_input_format(one_device(experts), settings.input_format))

    def on_one(x: Any, routing: Any, experts: Any, first: Any, adapters: Any, unsummed: Unsummed | None) -> Any:
        some = Some(num_routed, first)
        return moe_of_some(x, routing, experts, some, adapters=adapters, unsummed=unsummed, **settings._asdict())

    rounded = settings.input_format if settings.weights_on == "output" else None  # else x times a weight is rounded
    return over_mesh.on_this_device(split, flat, routing, (experts, adapters), on_one, rounded).reshape(x.shape)


def _routes_all(split: Split, x: Float[Array, "T H"], logits: Logits, experts: AnyExperts) -> bool:
    """Whether each device routes the tokens of all, by the kernel that also groups them: they exchange logits then."""
    if not isinstance(experts, Experts):
        return False
    if not split.sends_logits or all(lax.axis_size(name) == 1 for name in split.names("expert")):
        return False
    num_tokens = x.shape[0] * prod(lax.axis_size(name) for name in split.exchanged)
    check_logits(logits)
    environment, biased = Environment.probe(x, logits), logits.correction_bias is not None
    num_experts = over_mesh.num_routed(split, experts)
    return routing_kernel.applies(logits.method, biased, num_tokens, num_experts, environment)


class _Static(NamedTuple):
    """Static arguments of a call; `backend`: the one that must run, or None; the last one as that of `_Settings`."""

    problem: Problem
    environment: Environment
    backend: str | None
    save_gate_up: bool


def _on_one_device(
    tokens: Tokens, weights: tuple[Experts, Beside], static: _Static, some: Some | None = None, unsummed: Any = None
) -> Any:
    """`moe` of checked arguments, none of which an Explicit mesh axis splits; or its `Terms`, see `moe_of_some`."""
    experts, beside = weights
    check_not_divided(experts.arrays())
    x, routing, mask = tokens
    flat = x.reshape(-1, x.shape[-1])
    first = None if some is None else some.first
    routing = flat_routing(routing, x.shape[:-1], mask, partial(_routed, static=static, first=first))
    if unsummed is None:
        return _run(flat, routing, experts, beside, static).reshape(x.shape)
    its, environment, backend = with_tokens(static.problem, flat.shape[0]), static.environment, static.backend
    return terms_of(its, flat, routing, experts, environment, backend, unsummed) if beside is None else None


def _routed(logits: Logits, mask: Bool[AnyArray, " T"] | None, *, static: _Static, first: Any) -> Routing:
    """`route` of flat logits; few tokens' on a GPU with their blocks, by one kernel. `first`: that of `Some`."""
    (num_tokens,) = check_logits(logits)
    problem, environment = with_tokens(static.problem, num_tokens), static.environment
    biased = logits.correction_bias is not None
    if not routing_kernel.applies(logits.method, biased, num_tokens, problem.num_choices, environment):
        routing = route(logits, mask)
        return routing if first is None else routing._replace(expert_ids=routing.expert_ids - first)
    backend = select(problem, environment, static.backend, registered_backends()).backend
    tiling = routing_kernel.tiling_of(backend, problem, environment)
    call = routing_kernel.Call(logits.method, problem, tiling, num_tokens, biased)
    return routing_kernel.route_and_group(logits, mask, call, first)


@partial(jax.jit, static_argnums=(2, 3))
def _on_devices(
    tokens: Tokens, weights: tuple[Experts, Beside], static: _Static, split: meshes.TokenSplit
) -> Float[Array, "*tokens H"]:
    """`_on_one_device` on each device of a mesh, with the tokens that it has."""

    def run(by_token: Any, whole: Any) -> Float[Array, "*tokens H"]:
        rest, weights = whole
        return _on_one_device(Tokens.of_parts(by_token, rest), weights, static)

    by_token, rest = tokens.divided()
    return meshes.over_devices(split, run, by_token, (rest, weights))


def _token_split(tokens: Tokens, experts: Experts) -> meshes.TokenSplit | None:
    """How Explicit mesh axes split the tokens; ValueError if they split anything else."""
    whole = {f"experts.{name}": array for name, array in experts.arrays().items()}
    if isinstance(tokens.routing, Logits):
        whole["correction_bias"] = tokens.routing.correction_bias
    whole = {name: array for name, array in whole.items() if array is not None}
    return meshes.leading_split(tokens.x.ndim - 1, tokens.arrays(), whole)


@partial(jax.jit, static_argnums=4)  # so that calls outside of any jit are traced and compiled once, too
def _run(
    x: Float[Array, "T H"], routing: Routing, experts: Experts, beside: Beside, static: _Static
) -> Float[Array, "T H"]:
    environment, problem = static.environment, static.problem
    if isinstance(beside, Adapters) or (experts.format.is_float and beside is None):
        return _by_products(x, routing, experts, beside, static)
    if experts.padded_to is not None and not experts.fits_without_padding:
        return _run(padding.widened(x, experts), routing, experts.as_padded(), None, static)[:, : x.shape[-1]]

    def run(x: Float[Array, "T H"], routing: Routing, experts: Experts) -> Float[Array, "T H"]:
        # Selection sees all tokens of a vmapped call, and those of one device of a split call.
        its, wide = with_tokens(problem, x.shape[0]), x.shape[-1]
        chosen = select(its, environment, static.backend, registered_backends()).backend
        if its.num_tokens == 0 or its.top_k == 0:
            return jnp.zeros_like(x)
        experts = experts.prepare(problem.layout)  # in which they are, unless they have just been rounded
        if isinstance(chosen, SkipsPadding):
            return chosen.apply(its, x, routing, experts, environment)
        return chosen.apply(its, padding.widened(x, experts), routing, experts.as_padded(), environment)[:, :wide]

    def saving(x: Float[Array, "T H"], routing: Routing, experts: Experts) -> tuple[Float[Array, "T H"], Any]:
        its = with_tokens(problem, x.shape[0])
        chosen = select(its, environment, static.backend, registered_backends()).backend
        if its.num_tokens == 0 or its.top_k == 0 or not isinstance(chosen, SavesGateUp):
            return run(x, routing, experts), None
        experts, wide = experts.prepare(problem.layout), x.shape[-1]
        y, saved = chosen.apply_saving(its, padding.widened(x, experts), routing, experts.as_padded(), environment)
        return y[:, :wide], saved

    def backward(primals: Primals, dy: Float[Array, "T H"], wanted: Wanted) -> Gradients:
        # A backend without gradients has those of the reference, which reads a few experts at a time from any layout.
        x, routing, experts, saved = primals
        its, wide = with_tokens(problem, x.shape[0]), x.shape[-1]
        chosen = select(its, environment, static.backend, registered_backends()).backend
        if its.num_tokens == 0 or its.top_k == 0 or not has_gradients(chosen, its, weights=wanted.weights):
            return xla.backward(problem.without_padding(), primals, dy, wanted)
        experts = experts.prepare(problem.layout)
        padded = Primals(padding.widened(x, experts), routing, experts.as_padded(), saved)
        gradients = chosen.backward(its, padded, environment, padding.widened(dy, experts), wanted)
        return gradients._replace(x=gradients.x[:, :wide])

    layer = autodiff.differentiable(run, backward, saving if static.save_gate_up else None)
    return layer(*meshes.varying_alike(x, routing, experts, beside))


def _by_products(
    x: Float[Array, "T H"], routing: Routing, experts: Experts, adapters: Adapters | None, static: _Static
) -> Float[Array, "T H"]:
    """The layer with adapters, or of float experts. Padding counts as weights, which are not trained."""
    x, routing, experts, adapters = meshes.varying_alike(x, routing, experts, adapters)
    problem, wide = with_tokens(static.problem, x.shape[0]), x.shape[-1]
    backend = select(problem, static.environment, static.backend, registered_backends()).backend
    if x.shape[0] == 0 or problem.top_k == 0:
        return jnp.zeros_like(x)
    assert isinstance(backend, ProductBackend)
    added = None if adapters is None else AddedBy(adapters.padded(experts))
    if experts.format.is_float and experts.padded_to is not None:
        # An activation whose value at 0 is not 0 would train them. All other padding has the gradient 0.
        down = padding.trained_columns(experts.intermediate_size, experts.down.values)
        experts = dataclasses.replace(experts, down=experts.down._replace(values=down))
    x, experts = padding.widened(x, experts), experts.prepare(problem.layout).as_padded()
    engine = by_products.engine_of(backend, problem, static.environment, xla.Xla())
    return by_products.forward(problem, x, routing, experts, engine, added=added)[:, :wide]
