"""What a user does with layers in the layouts of a Hopper GPU, whose arrays have other axes than weights, anywhere.

`hopper_layouts` makes them those of "auto". `make test ARGS="-p tests.hopper_layouts FILE"` runs other tests so.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hopper_layouts import hopper_layouts

import jmx
import jmx.linen
import jmx.nnx
from jmx import training
from jmx.checkpoint import orbax
from jmx.lora import LoRA, merge
from jmx.qat import QAT

__all__ = ["hopper_layouts"]  # a fixture

E, H, I, K, T = 4, 64, 128, 2, 6  # noqa: E741
FORMATS = [
    pytest.param("int4_g32_asym", None, "mosaic_sm90", id="int4"),
    pytest.param("mxfp4", "fp8_token", "mosaic_sm90_fp8", id="fp8-inputs"),
]
pytestmark = [pytest.mark.costly, pytest.mark.usefixtures("hopper_layouts")]


def made(seed: int = 0, **options: Any) -> jmx.nnx.MoE:
    return jmx.nnx.MoE(H, I, E, K, bias=True, **options, rngs=nnx.Rngs(seed))


def of_linen(layer: jmx.linen.MoE, x: jax.Array, *given: Any) -> tuple[Any, jmx.Experts]:
    """The result of a new layer, and its experts."""
    variables: Any = layer.init(jax.random.key(0), x, *given)
    return layer.apply(variables, x, *given), layer.experts_of(variables)


def tokens(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.normal(size=(T, H)), jnp.float32)


def assert_same_weights(experts: jmx.Experts, others: jmx.Experts) -> None:
    jax.tree.map(np.testing.assert_array_equal, experts.dequantize(jnp.float32), others.dequantize(jnp.float32))


@pytest.mark.parametrize(("format", "inputs", "layout"), FORMATS)
def test_an_nnx_layer(format, inputs, layout, rng):
    x, kind = tokens(rng), {"format": format, "input_format": inputs}
    layer = made(**kind)
    assert layer.experts.layout == layout
    packed = made(layout="packed", **kind)
    assert_same_weights(layer.experts, packed.experts)
    expected = packed(x)
    np.testing.assert_allclose(nnx.merge(*nnx.split(layer))(x), expected, rtol=1e-5, atol=1e-5)
    layer.update(packed.experts.prepare(layout))
    layer.prepare("packed")
    assert_same_weights(layer.experts, packed.experts)


@pytest.mark.parametrize(("format", "inputs", "layout"), FORMATS)
def test_a_linen_layer(format, inputs, layout, rng):
    x, kind = tokens(rng), {"format": format, "input_format": inputs, "bias": True}
    y, experts = of_linen(jmx.linen.MoE(H, I, E, K, **kind), x)
    assert experts.layout == layout
    expected, packed = of_linen(jmx.linen.MoE(H, I, E, K, layout="packed", **kind), x)
    assert_same_weights(experts, packed)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("format", "inputs", "layout"), FORMATS)
def test_experts_that_were_saved(format, inputs, layout, tmp_path):
    """In the layout "packed" and read in that of the GPU, and the other way."""
    kind = {"format": format, "input_format": inputs}
    for source, target in (("packed", "auto"), ("auto", "packed")):
        saved = made(layout=source, **kind)
        orbax.save(tmp_path / source, saved)
        restored = orbax.restore(tmp_path / source, nnx.eval_shape(lambda its=target: made(1, layout=its, **kind)))
        assert {saved.experts.layout, restored.experts.layout} == {"packed", layout}
        assert_same_weights(restored.experts, saved.experts)


def test_adapters_are_trained_and_merged(rng):
    x, layer = tokens(rng), made(lora=LoRA(2, 4))
    assert layer.experts.layout == "mosaic_sm90"
    optimizer = nnx.Optimizer(layer, training.refuse_frozen(optax.adam(1e-2)), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(layer, optimizer):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, gradients = nnx.value_and_grad(lambda layer: jnp.square(layer(x)).mean(), argnums=wrt)(layer)
        optimizer.update(layer, gradients)
        return loss

    losses = [step(layer, optimizer) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert layer.adapters is not None
    merged = merge(layer.experts, layer.adapters, dtype=jnp.float32)
    of_packed = merge(layer.experts.prepare("packed"), layer.adapters, dtype=jnp.float32)
    alone = layer.experts.dequantize(jnp.float32)
    for ours, packed, unmerged in zip(merged, of_packed, alone, strict=True):
        np.testing.assert_array_equal(ours, packed)
        assert not np.array_equal(ours, unmerged)


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_master_weights_are_rounded_into_it(module, rng):
    x, kind = tokens(rng), {"bias": True, "qat": QAT(), "format": "int8_channel", "router": False}
    routing = jmx.Routing(jnp.zeros((T, 1), jnp.int32), jnp.ones((T, 1), jnp.float32))
    if module == "nnx":
        layer = jmx.nnx.MoE(H, I, E, K, **kind, rngs=nnx.Rngs(0))
        y, experts = layer(x, routing), layer.experts
    else:
        y, experts = of_linen(jmx.linen.MoE(H, I, E, K, **kind), x, routing)
    expected = jmx.moe(x, routing, experts.prepare("packed"), activation="swiglu")
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
