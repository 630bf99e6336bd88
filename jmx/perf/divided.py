"""Times a layer divided over the devices of a mesh, beside the whole layer on one of them.

A call is a chain of layers. For each number of tokens a device, the calls that take turns are the divided layer, once
for each split; its experts alone, with the tokens that are exchanged and no exchange; the same where each layer has
every device do the work of the fullest one; one device with the tokens of one, and with all. Programs are compiled from
descriptions of their arguments, before any of these is made.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jmx import meshes
from jmx.backends import resolve_layout
from jmx.experts import Experts, ShardedExperts
from jmx.layer import moe, moe_of_some
from jmx.numerics import formats
from jmx.parallel import Split, over_mesh
from jmx.perf import shares
from jmx.perf.shapes import Shape, draw_logits
from jmx.perf.shares import Groups, Shares
from jmx.routing import Logits, route
from jmx.selection.environment import Environment
from jmx.selection.problem import Some
from jmx.util.typing import Array, Float

_COMPILERS = ThreadPoolExecutor()
_SAMPLE_S = 0.03  # what a sample lasts, where a call is shorter
# A GPU runs the same call for so long before a sample: where power limits its clock, one that was idle is faster.
_WARM_S = 0.06
_MOST_CALLS = 100  # of a sample
# What a layer adds to its tokens, a power of two of its results. With all of them a chain of random layers nearly
# doubles a difference by rounding in each, and after eight it is as large as an error.
STEP = 0.25

AnyWeights = Experts | ShardedExperts


class Weights(NamedTuple):
    """Of each layer, or descriptions of them.

    whole: on the first device.
    divided: over the mesh.
    gathered: as divided, but whole along the hidden axis; the same ones where no axis of the mesh divides that.
    """

    whole: list[Experts]
    divided: list[AnyWeights]
    gathered: list[AnyWeights]


@dataclass(frozen=True)
class Layers:
    """Random layers of a shape, whole on one device and divided over a mesh.

    Args:
        split: what divides them. Splits of the same layers differ in the exchange only.
        layout: of the weights, which is that of the devices.
        num_layers: different ones.
        seed: of their weights.
    """

    shape: Shape
    split: Split
    mesh: Mesh
    layout: str
    num_layers: int
    seed: int

    @classmethod
    def of(cls, shape: Shape, split: Split, mesh: Mesh, num_layers: int, seed: int = 0) -> "Layers":
        """`num_layers` different ones, in the layout of the devices."""
        format = formats.FORMATS[shape.format]
        layout = resolve_layout("auto", Environment.of_device(mesh.devices.flat[0]), format, shape.input_format)
        return cls(shape, split, mesh, layout, num_layers, seed)

    def described(self) -> Weights:
        """Shapes, dtypes and shardings of the weights."""
        whole, divided = jax.eval_shape(self._layer, jax.random.key(self.seed))
        first = SingleDeviceSharding(self.mesh.devices.flat[0])
        whole = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=first), whole)
        divided, gathered = (
            jax.tree.map(
                lambda a, its: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=its),
                divided,
                self._shardings(split, divided),
            )
            for split in (self.split, without_hidden(self.split))
        )
        return Weights([whole] * self.num_layers, [divided] * self.num_layers, [gathered] * self.num_layers)

    def drawn(self) -> Weights:
        """The weights."""
        weights = Weights([], [], [])
        in_parts, local = bool(self.split.names("hidden")), without_hidden(self.split)
        with jax.default_device(self.mesh.devices.flat[0]):
            for key in jax.random.split(jax.random.key(self.seed), self.num_layers):
                whole, its = self._layer(key)
                divided = jax.device_put(its, self._shardings(self.split, its))
                gathered = jax.device_put(its, self._shardings(local, its)) if in_parts else divided
                for found, new in zip(weights, (whole, divided, gathered), strict=True):
                    found.append(new)
                # One at a time: what makes a layer takes memory, too.
                jax.block_until_ready((whole, divided, gathered))
        return weights

    def _layer(self, key: Array) -> tuple[Experts, AnyWeights]:
        """A layer, and the weights that the mesh divides, both whole."""
        packed, shards = self.shape.experts(key), self.split.names("intermediate")
        whole = packed.prepare(self.layout)
        if not shards:
            return whole, whole
        count = prod(self.mesh.shape[name] for name in shards)
        return whole, ShardedExperts.of(packed, count).prepare(self.layout)

    def _shardings(self, split: Split, experts: AnyWeights) -> Any:
        specs = over_mesh.expert_specs(split, experts, self.mesh.shape)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda its: isinstance(its, P))


def without_hidden(split: Split) -> Split:
    """The split of weights that were gathered along the hidden axis."""
    return dataclasses.replace(split, hidden=None)


def run_layers(
    shape: Shape,
    split: Split | None,
    x: Float[Array, "T H"],
    logits: Sequence[Float[Array, "T E"]],
    weights: Sequence[AnyWeights],
) -> Float[Array, "T H"]:
    """The layers one after the other, as residual blocks."""
    for its, experts in zip(logits, weights, strict=True):
        routing = Logits(its, shape.method)
        y = moe(x, routing, experts, activation=shape.activation, input_format=shape.input_format, split=split)
        x = x + STEP * y
    return x


def run_experts(
    shape: Shape,
    split: Split,
    mesh: Mesh,
    x: Float[Array, "T H"],
    logits: Sequence[Float[Array, "rows E"]],
    weights: Sequence[AnyWeights],
) -> Float[Array, "devices t H"]:
    """Each device's experts with the tokens that are exchanged with it, whose results stay where they are.

    Logits are each device's own, as those of `shares.of_devices`.
    """

    def here(x: Float[Array, "t H"], logits: Sequence[Float[Array, "t E"]], weights: Sequence[AnyWeights]) -> Any:
        x, _ = meshes.varying_alike(x, weights)  # as after a layer: kernels of another type would be compiled for it
        for its, experts in zip(logits, weights, strict=True):
            parts, expert = _parts(experts), split.names("expert")
            first = parts[0].num_experts * lax.axis_index(expert) if expert else jnp.int32(0)
            call: Any = partial(moe_of_some, activation=shape.activation, input_format=shape.input_format)
            routing, some = Logits(its, shape.method), Some(over_mesh.num_routed(split, experts), first)
            if len(parts) > 1:  # as in the divided layer, they are routed once
                chosen = route(routing)
                routing, some = chosen._replace(expert_ids=chosen.expert_ids - first), some._replace(first=None)
            x = x + STEP * sum(call(x, routing, part, some) for part in parts)
        return x[None]

    specs = [over_mesh.expert_specs(split, experts) for experts in weights]
    every = P(tuple(mesh.axis_names))
    in_specs = P(shares.kept(split) or None), every, specs
    run = jax.shard_map(here, mesh=mesh, in_specs=in_specs, out_specs=every)
    return run(x, logits, weights)


def _parts(experts: AnyWeights) -> list[Experts]:
    """Experts, or shards of them, whose results are added."""
    if isinstance(experts, Experts):
        return [experts]
    return [experts.shard(index) for index in range(experts.num_shards)]


@dataclass(frozen=True)
class Times:
    """Samples of a case, in microseconds a layer, by call: the labels of splits, and those of `Case.arguments`.

    relative_error: of what the layers divided by each split add to the tokens, beside those of one device.
    temporary_bytes: of each call, on one device; None: not known.
    """

    samples: Mapping[str, Sequence[float]]
    relative_error: Mapping[str, float]
    temporary_bytes: Mapping[str, int | None]
    num_devices: int

    def median(self) -> dict[str, float]:
        """The median sample of each call."""
        return {name: statistics.median(its) for name, its in self.samples.items()}

    def efficiency(self, label: str) -> float:
        """The time of one device with all tokens over that of all devices together."""
        us = self.median()
        return us["all_on_one"] / (self.num_devices * us[label])


class Case:
    """The calls of one number of tokens a device, which compile while the next case is lowered.

    Args:
        splits: ways to divide the layers, by labels of the calls.
    """

    def __init__(
        self,
        layers: Layers,
        num_tokens: int,
        splits: Mapping[str, Split],
        routing: str = "uniform",
        seed: int | None = None,
    ):
        self.layers, self.num_tokens, self.splits, self.routing = layers, num_tokens, splits, routing
        self.seed = num_tokens if seed is None else seed
        split, shape, mesh = layers.split, layers.shape, layers.mesh
        self.all_tokens = num_tokens * prod(mesh.shape[name] for name in split.names("tokens"))
        functions = {label: partial(run_layers, shape, its) for label, its in splits.items()} | {
            "experts": partial(run_experts, shape, without_hidden(split), mesh),
            "one": partial(run_layers, shape, None),
            "all_on_one": partial(run_layers, shape, None),
        }
        described = self.arguments(layers.described(), *self.described_tokens())
        self.calls: dict[str, Future[Any]] = {
            name: _COMPILERS.submit(jax.jit(function).lower(*described[name]).compile)
            for name, function in functions.items()
        }
        self.calls["fullest"] = self.calls["experts"]

    def shares(self, logits: Float[Array, "L T E"]) -> Shares:
        """What each device does."""
        return Shares.of_logits(logits, self.layers.shape.method, self._groups)

    @property
    def _groups(self) -> Groups:
        return Groups.of(self.layers.split, self.layers.mesh.shape)

    def arguments(self, weights: Weights, x: Any, logits: Any) -> dict[str, tuple[Any, Any, Any]]:
        """The arguments of each call, of those with all tokens on the first device; or descriptions of them.

        They are those of the divided layers, by labels; of the "experts" alone, and of the "fullest" ones; of "one"
        device with the tokens of one, and of "all_on_one". Calls that have the same array share it.

        Logits of each layer are an array of their own there: XLA slices an array in front of kernels of custom calls,
        which no CUDA graph has then.
        """
        split, mesh = self.layers.split, self.layers.mesh
        of_layers = [_of_some(logits, layer) for layer in range(logits.shape[0])]

        def place(arrays: Any, names: tuple[str, ...]) -> Any:
            sharding = NamedSharding(mesh, P(names or None))
            if isinstance(x, jax.Array):
                return jax.device_put(arrays, sharding)
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)

        divided = (*place((x, of_layers), split.names("tokens")), weights.divided)
        exchanged = place(x, shares.kept(split))
        experts, fullest = self._logits_of_devices(logits)
        first = slice(self.num_tokens)
        return dict.fromkeys(self.splits, divided) | {
            "experts": (exchanged, experts, weights.gathered),
            "fullest": (exchanged, fullest, weights.gathered),
            "one": (_of_some(x, first), [_of_some(its, first) for its in of_layers], weights.whole),
            "all_on_one": (x, of_layers, weights.whole),
        }

    def _logits_of_devices(self, logits: Any) -> tuple[list[Any], list[Any]]:
        """Of each layer those of the experts alone, and those with which all devices do the work of the fullest one."""
        groups, mesh = self._groups, self.layers.mesh
        if isinstance(logits, jax.Array):
            fullest = self.shares(logits).fullest()
            return shares.of_devices(logits, groups, mesh), shares.of_devices(logits, groups, mesh, fullest)
        num_layers, num_tokens, num_experts = logits.shape
        shape = mesh.size * num_tokens // groups.num_groups, num_experts
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        its, fullest = (
            [jax.ShapeDtypeStruct(shape, logits.dtype, sharding=sharding) for _ in range(num_layers)] for _ in range(2)
        )
        return its, fullest

    def described_tokens(self) -> tuple[Any, Any]:
        """Descriptions of x and logits of all tokens, on the first device."""
        shape = self.layers.shape
        first = SingleDeviceSharding(self.layers.mesh.devices.flat[0])
        x = jax.ShapeDtypeStruct((self.all_tokens, shape.hidden_size), jnp.bfloat16, sharding=first)
        sizes = self.layers.num_layers, self.all_tokens, shape.num_experts
        return x, jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=first)

    def draw(self) -> tuple[Float[Array, "T H"], Float[Array, "L T E"]]:
        """x and logits of all tokens, on the first device."""
        x, logits = self.described_tokens()
        x_key, logits_key = jax.random.split(jax.random.key(self.seed))
        with jax.default_device(self.layers.mesh.devices.flat[0]):
            drawn = jax.random.normal(x_key, x.shape, x.dtype), draw_logits(logits_key, logits.shape, self.routing)
        return jax.device_put(drawn, x.sharding)

    def measure(self, weights: Weights, x: Any, logits: Any, repeats: int) -> Times:
        """Times, and the relative errors; arrays of this case are freed when it ends."""
        arguments = self.arguments(weights, x, logits)
        calls = {name: (call.result(), arguments[name]) for name, call in self.calls.items()}
        expected = calls["all_on_one"][0](*arguments["all_on_one"]).astype(jnp.float32)
        errors, got = {}, None
        for label in self.splits:
            got = jax.device_put(calls[label][0](*arguments[label]), expected.sharding)
            errors[label] = float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected - x))
        del expected, got
        samples: dict[str, list[float]] = {name: [] for name in calls}
        warm = _WARM_S if Environment.probe(x).platform == "gpu" else 0.0
        for _ in range(repeats):
            for name, (call, its) in calls.items():
                once = _sample(call, its, 2)
                _sample(call, its, int(warm / once))
                seconds = _sample(call, its, max(2, min(_MOST_CALLS, int(_SAMPLE_S / once))))
                samples[name].append(seconds / self.layers.num_layers * 1e6)
        temporary = {name: temporary_bytes(call) for name, (call, _) in calls.items()}
        return Times(samples, errors, temporary, self.layers.mesh.size)


def temporary_bytes(compiled: Any) -> int | None:
    """Of one device, beside arguments and results; None: not known."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _of_some(array: Any, index: slice | int) -> Any:
    """Part of an array, or a description of it."""
    if isinstance(array, jax.Array):
        return array[index]
    part = jax.eval_shape(lambda a: a[index], array)
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=array.sharding)


def _sample(call: Any, arguments: tuple[Any, ...], calls: int) -> float:
    """Seconds of a call, one after the other."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        del result  # the next one gets the same memory: a CUDA graph need not be updated
        result = call(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / max(calls, 1)
