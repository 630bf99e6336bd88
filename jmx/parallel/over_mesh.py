"""The layer over a mesh: each device routes its own tokens, and computes what its own experts add to those of all."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx import meshes
from jmx.engines.grouped import Unsummed
from jmx.experts import Experts, ShardedExperts, has_expert_axis
from jmx.lora import Adapters
from jmx.parallel import needed
from jmx.parallel.exchange import Call, Here
from jmx.parallel.exchanges import choose
from jmx.parallel.experts_form import AnyExperts, form_names
from jmx.parallel.hidden_axis import gather_hidden
from jmx.parallel.peer import all_sum
from jmx.parallel.placed_experts import PlacedExperts
from jmx.parallel.split import AnyMesh, Split, exchange_call
from jmx.qat import MasterExperts
from jmx.routing import Logits, Routing
from jmx.routing.leading import slots_of
from jmx.util.checks import is_array
from jmx.util.typing import Array, Float, Int32

# The layer on one device: x (T, H), routing (T, k) or logits (T, E) of all experts, experts, the first one of these for
# logits, adapters, None -> (T, H); or, instead of None, a `grouped.Unsummed` -> what that states.
OneDevice = Callable[..., Any]

# Experts, and their adapters, if they have some.
Weights = tuple[AnyExperts, Adapters | None]


class Static(NamedTuple):
    """Static arguments of a call over a mesh.

    Args:
        split: how arrays are divided.
        mesh: over which.
        leading: mesh axes that divide each leading axis of x, routing and mask.
    """

    split: Split
    mesh: AnyMesh
    leading: tuple[tuple[str, ...], ...]


def over_mesh(
    static: Static, body: Callable[[Any, Any, Weights], Any], by_token: Any, whole: Any, weights: Weights
) -> Any:
    """`body` (by_token, whole, weights) on each device, with its tokens and its experts; the result is by token.

    To be called while tracing.

    Args:
        by_token: a pytree of arrays with the leading axes of tokens.
        whole: a pytree of arrays that every device needs whole.
    """
    mesh = static.mesh
    tokens = P(*(entry or None for entry in static.leading))
    specs = expert_specs(static.split, weights[0], mesh.shape), adapter_specs(static.split, weights[1])
    if static.split.names("hidden"):  # else whole weights would stay from the forward pass to the backward pass
        body = jax.checkpoint(body)

    def place(tree: Any, specs: Any) -> Any:
        """Explicit axes have to be in types already; Auto ones follow what is asked for here."""
        if AxisType.Explicit not in mesh.axis_types:
            return tree
        return jax.tree.map(lambda array, spec: meshes.placed(array, NamedSharding(mesh, spec)), tree, specs)

    by_token, whole = (
        place(tree, jax.tree.map(lambda _, spec=spec: spec, tree)) for tree, spec in ((by_token, tokens), (whole, P()))
    )
    run = jax.shard_map(body, mesh=mesh, in_specs=(tokens, P(), specs), out_specs=tokens)
    return run(by_token, whole, place(weights, specs))


def split_of_types(num_leading: int, by_token: meshes.NamedArrays, experts: meshes.NamedArrays) -> Split | None:
    """The split that Explicit mesh axes make of experts, by their types; None if they do not split experts.

    Raises:
        ValueError: arrays of experts that are split differently from each other, or along another axis.
    """
    found = {name: meshes.entries(array) for name, array in experts.items() if is_array(array)}
    axes = {name: entry[0] for name, entry in found.items() if entry and entry[0] and has_expert_axis(name)}
    if not axes:
        return None
    first, expert = next(iter(axes.items()))
    for name, entry in found.items():
        wanted = expert if has_expert_axis(name) else ()
        if (entry[0] if entry else ()) != wanted:
            raise ValueError(
                f"`experts.{name}` ({jax.typeof(experts[name])}) must be split along its first axis over {wanted}, as "
                f"`experts.{first}` is: give all arrays of the experts one sharding, with jax.reshard"
            )
        meshes.check_whole({f"experts.{name}": experts[name]}, 1)
    tokens = meshes.leading_split(num_leading, by_token, {})
    names = () if tokens is None else tuple(name for entry in tokens.leading for name in entry)
    return Split(expert=expert, tokens=names)


def static_of(split: Split, num_leading: int, by_token: meshes.NamedArrays, experts: AnyExperts) -> Static:
    """The mesh of a call, and how its axes divide the tokens.

    Raises:
        ValueError: no mesh, or not the one in scope, sizes that it does not divide, or Explicit axes that split tokens
            otherwise.
    """
    arrays = [*by_token.values(), *jax.tree.leaves(experts)]
    mesh, scope = split.mesh_of(arrays), jax.sharding.get_abstract_mesh()
    if isinstance(mesh, AbstractMesh) and scope.empty and not any(map(_may_be_divided, arrays)):
        raise ValueError(
            f"`split.mesh` (={mesh}) must be a jax.sharding.Mesh where no array is on one: this one has no devices"
        )
    if not scope.empty and [*mesh.shape.items()] != [*scope.shape.items()]:
        raise ValueError(f"`split.mesh` (={dict(mesh.shape)}) must be the mesh in scope, {dict(scope.shape)}, or None")
    check_experts(split, mesh, experts)
    leading = (split.names("tokens"), *((),) * (num_leading - 1))[:num_leading]
    typed = meshes.leading_split(num_leading, by_token, {})
    if typed is not None and any(typed.leading):
        explicit = meshes.explicit_names(mesh)
        if {name for entry in typed.leading for name in entry} != {*split.names("tokens")} & explicit:
            raise ValueError(
                f"`split.tokens` (={split.tokens!r}) must be the Explicit mesh axes that split the arrays of tokens, "
                f"{typed.leading}"
            )
        if {*split.names("tokens")} <= explicit:
            leading = typed.leading
        elif leading != typed.leading and any(typed.leading[1:]):
            raise ValueError(
                f"`split.tokens` (={split.tokens!r}) must not name Auto mesh axes where Explicit ones split other axes "
                f"of the tokens than the first, as {typed.leading}"
            )
    for axis, entry in enumerate(leading):
        size = next(iter(by_token.values())).shape[axis]
        devices = prod(mesh.shape[name] for name in entry)
        if size % devices:
            raise ValueError(
                f"`tokens` (={entry!r}) must divide axis {axis} of x, of size {size}, evenly over {devices} devices: "
                "add padding tokens, with a mask"
            )
    return Static(split, mesh, leading)


def _may_be_divided(array: Any) -> bool:
    """Whether an array is on a mesh, or traced, so that it may be."""
    return isinstance(array, Tracer) or isinstance(getattr(array, "sharding", None), NamedSharding)


def check_tokens(x: Float[Any, "*tokens H"]) -> None:
    """Raises ValueError if the number of tokens is symbolic, as `jax.export` can have it."""
    if not all(isinstance(size, int) for size in x.shape):
        raise ValueError(f"`x` (shape {x.shape}) must not have a symbolic number of tokens in a call with a split")


def total_experts(split: Split, experts: AnyExperts) -> int:
    """The number of experts of all devices, without copies."""
    if isinstance(experts, PlacedExperts):
        return experts.placement.num_experts
    return num_routed(split, experts) if split.is_manual() else num_experts(experts)


def num_routed(split: Split, experts: AnyExperts) -> int:
    """Experts, or slots, of all devices, inside `jax.shard_map`, where `experts` are those of one."""
    return num_experts(experts) * prod(lax.axis_size(name) for name in split.names("expert"))


def expert_specs(split: Split, experts: AnyExperts, sizes: Mapping[str, int] | None = None) -> Any:
    """How the mesh axes of a split divide the arrays of experts: a pytree like these. `sizes`: of the mesh's axes."""
    axes = {name: split.names(name) or None for name in ("expert", "intermediate", "hidden")}
    names = form_names(experts, axes, sizes)
    specs = experts.with_arrays({name: P(*entry) for name, entry in names.items()})
    # The index of a layer in a stack is no array of it.
    return jax.tree.map(lambda its: its if isinstance(its, P) else P(), specs, is_leaf=lambda its: isinstance(its, P))


def adapter_specs(split: Split, adapters: Adapters | None) -> Any:
    """As `expert_specs`, of adapters: those that experts share are whole on every device."""
    expert = split.names("expert") or None
    return jax.tree.map(lambda matrix: P(expert) if matrix.ndim == 3 else P(), adapters)


def check_experts(split: Split, mesh: AnyMesh, experts: AnyExperts) -> None:
    """Raises ValueError unless the mesh divides the experts, and their shards, evenly."""
    sizes = {"slots" if isinstance(experts, PlacedExperts) else "experts": num_experts(experts)}
    if isinstance(experts, PlacedExperts):
        experts = experts.experts
    if isinstance(experts, ShardedExperts):
        sizes["shards"] = experts.num_shards
    elif split.names("intermediate"):
        raise ValueError(
            f"`intermediate` (={split.intermediate!r}) must be None for jmx.Experts: gate and up have to be divided "
            "each by itself, as in jmx.ShardedExperts.of(experts, num_shards)"
        )
    split.check_sizes(mesh, sizes)


def num_experts(experts: AnyExperts) -> int:
    """The number of experts, or of slots, that these arrays hold."""
    return experts.experts.num_experts if isinstance(experts, PlacedExperts) else experts.num_experts


class OwnExperts(NamedTuple):
    """The experts of one device, inside `jax.shard_map`.

    Args:
        num_experts: how many they are.
        compute: what they compute of `arrays`, tokens, their routing, whose ids count from this device's first expert,
            and None; or, instead of the last two, of logits of all experts, and this device's first one. The fifth
            argument is the fourth one of `Local`.
        arrays: a pytree, of which gradients may be asked for.
        input_format: what `compute` rounds tokens to before anything else; None: nothing.
    """

    num_experts: int
    compute: Callable[..., Any]
    arrays: Any
    input_format: str | None = None


def on_this_device(
    split: Split,
    x: Float[Array, "T H"],
    routing: Routing | Logits,
    weights: Weights,
    moe: OneDevice,
    input_format: str | None = None,
) -> Float[Array, "T H"]:
    """The results of this device's tokens, inside `jax.shard_map` over the axes of `split`.

    Args:
        x, routing: this device's tokens, and their experts among those of all devices; or logits, if the split has
            `sends_logits`, the device has its experts as they are, and each one routes the tokens of all.
        weights: this device's experts and adapters.
        moe: the layer on one device.
        input_format: what it rounds x to before anything else; None: nothing.
    """
    experts, adapters = weights
    if isinstance(experts, PlacedExperts):  # each device chooses other copies for its tokens
        assert isinstance(routing, Routing)
        first_token = x.shape[0] * _index(split.names("tokens"))
        ids = experts.placement.slot_ids(routing.expert_ids, first_token)
        routing, experts = routing._replace(expert_ids=ids), experts.experts
    parts = _parts(split, experts)

    def local(
        arrays: Any, x: Float[Array, "T H"], routing: Routing | Logits, first: Any, unsummed: Unsummed | None
    ) -> Any:
        parts, adapters = arrays
        if len(parts) == 1:
            return moe(x, routing, parts[0], first, adapters, unsummed)
        if unsummed is not None:
            return None
        results = [moe(x, routing, part, first, adapters, None) for part in parts]
        return jnp.sum(jnp.stack(results), axis=0, dtype=jnp.float32).astype(x.dtype)

    return exchanged(split, x, routing, OwnExperts(num_experts(experts), local, (parts, adapters), input_format))


def gathered(split: Split, experts: AnyExperts) -> AnyExperts:
    """This device's experts, inside `jax.shard_map`, whole along the axes of `split.hidden`."""
    axes, varying = split.names("hidden"), split.names("tokens")
    if not axes:
        return experts
    assert not isinstance(experts, MasterExperts), "no split has them divided along `hidden`"
    if isinstance(experts, PlacedExperts):
        return PlacedExperts(gather_hidden(experts.experts, axes, varying), experts.placement)
    return gather_hidden(experts, axes, varying)


def exchanged(split: Split, x: Float[Array, "T H"], routing: Routing | Logits, own: OwnExperts) -> Float[Array, "T H"]:
    """The results of this device's tokens, as `on_this_device`, for experts of any kind."""

    def local(
        arrays: tuple[Any, Any],
        x: Float[Array, "T H"],
        routing: Routing | Logits,
        unsummed: Unsummed | None = None,
    ) -> Any:
        first, of_experts = arrays
        if isinstance(routing, Logits):
            return own.compute(of_experts, x, routing, first, unsummed)
        return own.compute(of_experts, x, routing._replace(expert_ids=routing.expert_ids - first), None, unsummed)

    mine = jnp.asarray(own.num_experts * _index(split.names("expert")), jnp.int32), own.arrays
    ranks = prod(lax.axis_size(name) for name in split.exchanged)
    if (ranks > 1 or split.chunks > 1) and x.shape[0] > 0:  # collectives take no empty arrays
        here = Here(local, mine, _first_experts(split, own.num_experts))
        call = _call(split, x, routing, own)
        y = choose(call, split.exchange).exchange.apply(call, x, routing, here)
    else:
        y = local(mine, x, routing)
    return all_sum(y, split.summed) if split.summed else y


def _call(split: Split, x: Float[Array, "T H"], routing: Routing | Logits, own: OwnExperts) -> Call:
    logits = routing.values if isinstance(routing, Logits) else None
    return exchange_call(
        split,
        {name: lax.axis_size(name) for name in split.all_names},
        num_tokens=x.shape[0],
        top_k=slots_of(routing),
        hidden_size=x.shape[1],
        itemsize=x.dtype.itemsize,
        experts_per_rank=own.num_experts,
        input_format=own.input_format,
        logit_bytes=0 if logits is None else logits.shape[1] * logits.dtype.itemsize,
        ranks_known=needed.names_ranks(routing),
    )


def _first_experts(split: Split, each: int) -> Int32[Array, " R"]:
    """The first expert of each device along the exchanged axes, of `each` experts a device.

    Along other axes of the experts they are devices with this one's index.
    """
    sizes = [lax.axis_size(axis) for axis in split.exchanged]
    of_rank = dict(zip(split.exchanged, np.unravel_index(np.arange(prod(sizes)), sizes), strict=True))
    index: Any = np.zeros(prod(sizes), np.int32)
    for axis in split.names("expert"):
        index = index * lax.axis_size(axis) + (of_rank[axis] if axis in of_rank else lax.axis_index(axis))
    return jnp.asarray(index * each, jnp.int32)


def _parts(split: Split, experts: Experts | ShardedExperts | MasterExperts) -> list[Experts | MasterExperts]:
    """This device's experts, or shards of them, whose results are added."""
    if not isinstance(experts, ShardedExperts):
        return [experts]
    first = experts.num_shards * _index(split.names("intermediate"))
    return [experts.part(index, first + index) for index in range(experts.num_shards)]


def _index(axes: tuple[str, ...]) -> Any:
    """This device's number along mesh axes, the first one the major."""
    return lax.axis_index(axes) if axes else 0
