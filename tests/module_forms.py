"""Modules over meshes of CPU devices, in every form in which they hold their experts, for tests."""

import dataclasses
import functools
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
import jmx.linen
import jmx.nnx

T, H, INTERMEDIATE, E, K = 16, 64, 96, 8, 2
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
MODULES = ("nnx", "linen")
NAMES = ("dp", "ep")
X = np.asarray(jax.random.normal(jax.random.key(1), (T, H), jnp.float32))
MASK = np.arange(T) % 3 > 0


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of a module's weights and calls."""

    format: str = "mxfp4"
    order: str | None = "concatenated"
    size: int = INTERMEDIATE
    layout: str = "packed"
    inputs: str | None = None
    bias: bool = True

    def experts(self) -> jmx.Experts:
        return _experts(self)

    @property
    def options(self) -> dict[str, Any]:
        activation = jmx.SwiGLU() if self.order else jmx.SiLU()
        options = {"backend": "xla", "layout": self.layout, "input_format": self.inputs, "bias": self.bias}
        return options | {"activation": activation, "format": self.format, "param_dtype": jnp.float32}

    def module(self, module: str, axes: Any = None, spare: int = 0) -> Any:
        """An NNX module with weights, or a Linen one."""
        sizes, given = (H, self.size, E, K), {"axes": axes, "spare_experts": spare, "experts": self.experts()}
        if module == "linen":
            return jmx.linen.MoE(*sizes, **given, **self.options)
        return jmx.nnx.MoE(*sizes, **given, **self.options, rngs=nnx.Rngs(0))


@functools.cache
def _experts(kind: Kind) -> jmx.Experts:
    """Made once: before a mesh is in scope, of which they would be then."""
    key, sizes = jax.random.key(0), (E, H, kind.size)
    rest: dict[str, Any] = {"format": kind.format, "bias": kind.bias, "bias_dtype": jnp.float32}
    return jmx.Experts.random(key, *sizes, gate_up_order=kind.order, **rest).prepare(kind.layout)


def mesh_of(kind: str = "auto", shape: tuple[int, ...] = (2, 4), names: tuple[str, ...] = NAMES) -> Any:
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))


def made(kind: Kind, module: str, axes: Any = None, mesh: Any = None, spare: int = 0) -> tuple[Any, Any]:
    """A function (weights, x, mask) -> y of a module, and its weights, on a mesh as the module places them."""
    kind.experts()
    router = _router_of(kind) if module == "linen" and mesh is not None else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        layer = kind.module(module, axes, spare)
        if module == "nnx":
            graph, state = nnx.split(layer)
            return lambda state, x, mask=None: nnx.merge(graph, state)(x, mask=mask), state
        if mesh is None:
            return partial(_called, layer), layer.init(jax.random.key(0), X)
        shardings = nn.get_sharding(jax.eval_shape(layer.init, jax.random.key(0), X), mesh)
        variables = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), X)
        return partial(_called, layer), _with_router(variables, router, mesh)


def _called(layer: jmx.linen.MoE, variables: Any, x: Any, mask: Any = None) -> Any:
    return layer.apply(variables, x, mask=mask)


@functools.cache
def _router_of(kind: Kind) -> Any:
    variables = kind.module("linen").init(jax.random.key(0), X)
    return jax.tree.map(np.asarray, variables["params"]["router_dense"])


def _with_router(variables: Any, router: Any, mesh: Any) -> Any:
    """That of one device: under a mesh jax draws other numbers."""
    everywhere = NamedSharding(mesh, P())
    boxed = {
        name: old.replace_boxed(jax.device_put(router[name], everywhere))
        for name, old in variables["params"]["router_dense"].items()
    }
    return {**variables, "params": {**variables["params"], "router_dense": boxed}}


def loss(function: Any) -> Any:
    return lambda x, weights: (function(weights, x, MASK) ** 2).sum()


@functools.cache
def whole(kind: Kind, module: str) -> tuple[Any, Any]:
    """On one device: y, and the gradient of x. Called before any mesh is in scope."""
    function, weights = made(kind, module)
    return jax.jit(function)(weights, X, MASK), jax.jit(jax.grad(loss(function)))(X, weights)
