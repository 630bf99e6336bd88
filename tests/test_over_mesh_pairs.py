"""Divided layers where several options meet: a format, a mesh, an exchange and a transformation, beside one device.

Each option by itself is in test_over_mesh.py. Every run draws other combinations.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.parallel import EXCHANGES, PlacedExperts, Placement

pytestmark = [
    pytest.mark.costly,
    pytest.mark.devices(8),
    pytest.mark.usefixtures("peer_by_collectives"),
]

E, H, INTERMEDIATE, T, K = 16, 128, 128, 64, 3
C = np.cos(np.arange(T * H, dtype=np.float32)).reshape(T, H)
MESHES = (1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2)  # of dp, ep, and tp, which divides shards of experts
Layer = Callable[[Any, Any], Any]  # x and logits of all tokens -> y


def gradient(layer: Layer, x: Any, logits: Any) -> Any:
    """Of x and logits."""
    return jax.grad(lambda x, logits: (layer(x, logits).astype(jnp.float32) * C).sum(), (0, 1))(x, logits)


def by_parts(run: Callable[[Layer, Any, Any], Any]) -> Callable[[Layer, Any, Any], Any]:
    """`run` (layer, x, logits) of tokens in four parts of a leading axis."""

    def parts(layer: Layer, x: Any, logits: Any) -> Any:
        y = run(layer, x.reshape(4, T // 4, H), logits.reshape(4, T // 4, E))
        return y.reshape(T, H)

    return parts


def exported(layer: Layer, x: Any, logits: Any) -> Any:
    return jax.jit(export.export(jax.jit(layer))(x, logits).call)(x, logits)


TRANSFORMATIONS: dict[str, Callable[[Layer, Any, Any], Any]] = {
    "jit": lambda layer, x, logits: jax.jit(layer)(x, logits),
    "grad": lambda layer, x, logits: jax.jit(partial(gradient, layer))(x, logits),
    "grad of remat": lambda layer, x, logits: jax.jit(partial(gradient, jax.checkpoint(layer)))(x, logits),
    "vmap": by_parts(lambda layer, x, logits: jax.jit(jax.vmap(layer))(x, logits)),
    "scan": by_parts(lambda layer, x, logits: jax.lax.scan(lambda _, its: (None, layer(*its)), None, (x, logits))[1]),
    "export": exported,
}


def layer_of(experts: Any, input_format: str | None, split: jmx.Split | None) -> Layer:
    def layer(x: Any, logits: Any) -> Any:
        call: dict[str, Any] = {"activation": "swiglu", "input_format": input_format, "backend": "xla"}
        return jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(K)), experts, split=split, **call)

    return layer


def held_as(form: str, experts: jmx.Experts, mesh: Any, ranks: int) -> Any:
    """The experts as a device mesh holds them: as they are, in shards, or in slots with copies."""
    if form == "shards":
        return jmx.ShardedExperts.of(experts, 2)
    if form == "slots":
        return PlacedExperts.of(experts, Placement.identity(E, ranks, ranks)).split(mesh, "ep")
    return jax.device_put(experts, NamedSharding(mesh, P("ep")))


@pytest.mark.parametrize("nth", range(8))
def test_options_that_meet(nth: int, rng: np.random.Generator) -> None:
    """Each case draws one of each option; `nth` makes that another draw."""
    shape, form = MESHES[rng.integers(len(MESHES))], "shards"
    if shape[2] == 1:
        form = str(rng.choice(["experts", "slots"]))
    format, exchange, transformation = (str(rng.choice([*its])) for its in (jmx.FORMATS, EXCHANGES, TRANSFORMATIONS))
    input_format = [None, "fp8_token"][rng.integers(2)]
    print(shape, form, format, input_format, transformation, exchange)
    experts = jmx.Experts.random(jax.random.key(0), E, H, INTERMEDIATE, gate_up_order="interleaved", format=format)
    x = jax.random.normal(jax.random.key(1), (T, H), jnp.float32)
    logits = jax.random.normal(jax.random.key(2), (T, E), jnp.float32)
    run = TRANSFORMATIONS[transformation]
    try:
        expected = run(layer_of(experts, input_format, None), x, logits)
    except (jmx.NoBackendError, ValueError) as e:  # inputs that do not go with these weights
        pytest.skip(str(e).splitlines()[0])
    mesh = jax.make_mesh(shape, ("dp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange, mesh=mesh)
    if form == "shards":
        split = dataclasses.replace(split, intermediate="tp")
    layer = layer_of(held_as(form, experts, mesh, shape[1]), input_format, split)
    placed = jax.device_put((x, logits), NamedSharding(mesh, P(("dp", "ep"))))
    got = run(layer, *placed)
    # An order of sums changes which way a number of `down`'s inputs is rounded.
    tolerance = 2e-6 if input_format is None else 0.05
    for its, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(its, wanted) <= tolerance
    text = jax.jit(layer).lower(*placed).compile().as_text() or ""
    weights = experts.gate_up.values.size // (E * 8)  # elements of an expert, in bytes or words
    for line in re.findall(r".* all-gather(?:-start)?\(.*", text):
        gathered = max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\[([\d,]+)\]", line))
        assert gathered <= max(weights, T * (2 * H + 4 * K)), line
