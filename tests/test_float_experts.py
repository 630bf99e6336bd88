"""Experts that are not quantized: with all that other experts can have, and trained."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
import jmx.linen
import jmx.nnx
from jmx import lora, training
from jmx.checkpoint import orbax
from jmx.numerics import input_formats
from jmx.numerics.formats import FLOATS
from jmx.parallel import PlacedExperts, Placement
from jmx.qat import GRADIENTS

NAMES = [format.name for format in FLOATS]
E, H, INTERMEDIATE, T, K = 8, 32, 48, 24, 2


def experts_of(rng, format="float32", order: str | None = "interleaved", bias=True, sizes=(H, INTERMEDIATE)):
    key = jax.random.key(int(rng.integers(2**31)))
    options: dict[str, Any] = {"gate_up_order": order, "format": format, "bias": bias, "bias_dtype": jnp.float32}
    return jmx.Experts.random(key, E, *sizes, **options)


def inputs(rng, dtype="float32"):
    x, logits = (jnp.asarray(rng.standard_normal((T, columns)), dtype) for columns in (H, E))
    return x, logits.astype(jnp.float32)


def run(x, logits, experts, **options):
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    call: dict[str, Any] = {"activation": "swiglu"} | options
    return jmx.moe(x, routing, experts, **call)


def loss(experts, x, logits, **options):
    y = run(x, logits, experts, **options).astype(jnp.float32)
    return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()


def assert_close(got, wanted, bound=1e-5):
    got, wanted = got.arrays(), wanted.arrays()
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert got[name].dtype == wanted[name].dtype, name
        assert relative_error(got[name], wanted[name]) <= bound, name


# What experts can do


@pytest.mark.parametrize("order", ["interleaved", "concatenated", None])
@pytest.mark.parametrize("format", NAMES)
def test_quantizing_rounds_and_dequantizing_casts(format, order, rng):
    rows = INTERMEDIATE * (1 if order is None else 2)
    floats = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((E, rows, H), (E, H, INTERMEDIATE))]
    experts = jmx.Experts.quantize(*floats, gate_up_order=order, format=format)
    assert [*experts.arrays()] == ["gate_up_values", "down_values"]
    assert experts.layout == "packed"
    for weight, q, back in zip(floats, (experts.gate_up, experts.down), experts.dequantize(jnp.float32), strict=True):
        np.testing.assert_array_equal(q.values, weight.astype(format))
        np.testing.assert_array_equal(back, weight.astype(format).astype(jnp.float32))
    assert jmx.quantize(floats[0], format).scales is None


@pytest.mark.parametrize("change", ["pad", "shards", "canonical", "stack", "update", "pytree"])
@pytest.mark.parametrize("format", NAMES)
def test_every_form_has_the_same_results(format, change, rng):
    experts, (x, logits) = experts_of(rng, format), inputs(rng)
    y = run(x, logits, experts)
    if change == "pad":
        its = experts.pad(64, 64)
        assert its.array_sizes == (64, 64)
        assert jax.tree.all(jax.tree.map(np.array_equal, its.unpad(), experts))
    elif change == "shards":
        its = jmx.ShardedExperts.of(experts, 3)
        assert jax.tree.all(jax.tree.map(np.array_equal, its.whole(), experts))
    elif change == "canonical":
        its = experts.canonical()
        assert its.layout == "canonical"
    elif change == "stack":
        its = jmx.Experts.stack([experts_of(rng, format), experts]).layer(1)
    elif change == "update":
        its = experts_of(rng, format).update(experts)
    else:
        leaves, structure = jax.tree.flatten(experts)
        its = jax.tree.unflatten(structure, leaves)
    assert relative_error(run(x, logits, its), y) <= 1e-6


@pytest.mark.parametrize("layout", ["mosaic_sm90", "mosaic_sm90_fp8"])
def test_layouts_of_quantized_weights_do_not_hold_floats(layout, rng):
    with pytest.raises(ValueError, match=f"`layout` \\(='{layout}'\\) must hold 'bfloat16'"):
        experts_of(rng, "bfloat16").prepare(layout)


def test_backends_of_quantized_weights_give_the_reason(rng, on_cpu):
    x, logits = inputs(rng)
    with pytest.raises(jmx.NoBackendError, match="cpu: weight format: weights are 'bfloat16'"):
        run(x, logits, experts_of(rng, "bfloat16"), backend="cpu")
    explained = jmx.explain(x, jmx.Logits(logits, jmx.TopKSoftmax(K)), experts_of(rng), activation="swiglu")
    assert explained.chosen == "xla"
    assert explained.bytes


# Gradients


@pytest.mark.parametrize("order", ["interleaved", "concatenated_up_first", None])
@pytest.mark.parametrize("input_format", [None, "fp8_token"])
def test_gradients_of_weights_are_those_of_a_dense_layer(order, input_format, rng):
    experts, (x, logits) = experts_of(rng, order=order), inputs(rng)
    activation = jmx.SiLU() if order is None else jmx.SwiGLU()

    def dense(experts, x, logits):
        ids, weights = jmx.route(jmx.Logits(logits, jmx.TopKSoftmax(K)))
        rounded = partial(_rounded, input_format)
        h = jnp.einsum("th,enh->etn", rounded(x), experts.gate_up.values, precision="highest")
        h += experts.gate_up_bias[:, None]
        a = jmx.activations.apply(activation, h, order)
        y = jnp.einsum("eti,ehi->eth", rounded(a), experts.down.values, precision="highest")
        y += experts.down_bias[:, None]
        share = (jax.nn.one_hot(ids, E) * weights[..., None]).sum(1)
        y = jnp.einsum("te,eth->th", share, y, precision="highest")
        return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()

    wanted = jax.grad(dense, (0, 1, 2))(experts, x, logits)
    of = partial(loss, activation=activation, input_format=input_format)
    got = jax.jit(jax.grad(of, (0, 1, 2)))(experts, x, logits)
    bound = 1e-5 if input_format is None else 2e-2  # a sum of float32 may be rounded to another step
    assert_close(got[0], wanted[0], bound)
    assert relative_error(got[1], wanted[1]) <= bound
    assert relative_error(got[2], wanted[2]) <= bound


def _rounded(name, a):
    """Rounded inputs, with a straight-through gradient."""
    if name is None:
        return a
    format = input_formats.INPUT_FORMATS[name]
    q = input_formats.quantize(jax.lax.stop_gradient(a), format)
    return a + jax.lax.stop_gradient(input_formats.dequantize(q, format) - a)


@pytest.mark.parametrize("change", ["remat", "vmap", "scan", "batched"])
def test_transformations_of_gradients(change, rng):
    experts, (x, logits) = experts_of(rng), inputs(rng)
    wanted = jax.grad(loss)(experts, x, logits)
    if change == "remat":
        got = jax.grad(jax.checkpoint(loss))(experts, x, logits)
    elif change == "vmap":
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(experts, jnp.stack([x, 2 * x]), jnp.stack([logits, logits]))
        got = jax.tree.map(lambda array: array[0], each)
    elif change == "scan":
        stack = jmx.Experts.stack([experts, experts])

        def both(stack):
            each = lambda total, index: (total + loss(stack.layer(index), x, logits), None)  # noqa: E731
            return jax.lax.scan(each, 0.0, jnp.arange(2))[0]

        got = jax.tree.map(lambda array: array[1], jax.jit(jax.grad(both))(stack))
    else:
        counts = jnp.full(E, 3)
        rows = jnp.asarray(rng.standard_normal((E, 3, H)), jnp.float32)
        summed = jax.grad(lambda its: jmx.batched_moe(rows, counts, its, activation="swiglu").sum())(experts)
        np.testing.assert_allclose(summed.down_bias, jnp.full((E, H), 3.0), rtol=1e-6)
        return
    assert_close(got, wanted)


@dataclasses.dataclass(frozen=True)
class Shifted(jmx.Activation):
    """One whose value at 0 is not 0."""

    gated = False

    def __call__(self, x):
        return jnp.tanh(x) + 1


def test_padding_is_not_trained(rng):
    experts, (x, logits) = experts_of(rng, order=None), inputs(rng)
    of = partial(loss, activation=Shifted())
    found, wanted = jax.grad(of)(experts.pad(64, 64), x, logits), jax.grad(of)(experts, x, logits)
    assert_close(found.unpad(), wanted)
    assert_close(found.unpad().pad(64, 64), found)


def test_adapters_of_float_experts(rng):
    """Added, and merged into the weights."""
    experts, (x, logits) = experts_of(rng), inputs(rng)
    adapters = lora.LoRA(4).random(jax.random.key(1), experts)
    adapters = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape) / 8, jnp.float32), adapters)
    y = run(x, logits, experts, adapters=adapters)
    merged = jmx.Experts.quantize(
        *lora.merge(experts, adapters, dtype=jnp.float32), experts.gate_up_bias, experts.down_bias,
        gate_up_order="interleaved", format="float32",
    )  # fmt: skip
    assert relative_error(y, run(x, logits, merged)) <= 1e-5
    assert relative_error(y, run(x, logits, experts)) > 0.01
    again = lora.requantize(experts, adapters)
    assert max(float(np.max(error)) for error in again.errors.values()) <= 1e-6
    found = jax.grad(lambda its: jnp.square(run(x, logits, experts, adapters=its)).sum())(adapters)
    assert all(jnp.abs(a).max() > 0 for a in jax.tree.leaves(found))


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_master_weights_may_be_rounded_to_bfloat16_in_each_call(gradients, rng):
    experts, (x, logits) = experts_of(rng), inputs(rng)
    masters = training.MasterExperts.of(
        experts.gate_up.values, experts.down.values, experts.gate_up_bias, experts.down_bias,
        gate_up_order="interleaved", format="bfloat16", gradients=gradients,
    )  # fmt: skip
    rounded = masters.quantize()
    assert rounded.format.name == "bfloat16"
    np.testing.assert_array_equal(run(x, logits, masters), run(x, logits, rounded))
    found = jax.grad(loss)(masters, x, logits)
    wide = dataclasses.replace(
        experts, gate_up=jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), experts.gate_up),
        down=jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), experts.down),
    )  # fmt: skip
    wanted = jax.grad(loss)(wide, x, logits)
    assert relative_error(found.gate_up, wanted.gate_up.values) <= 1e-5
    assert relative_error(found.down, wanted.down.values) <= 1e-5


# Over a mesh


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "split",
    [
        jmx.Split(expert="ep", tokens=("dp", "ep")),
        jmx.Split(expert="ep", tokens="dp", exchange="gather"),
        jmx.Split(expert="ep", tokens=("dp", "ep"), intermediate="tp"),
        jmx.Split(expert="ep", tokens=("dp", "ep"), hidden="dp"),
    ],
    ids=["experts", "gather", "intermediate", "hidden"],
)
def test_a_mesh_divides_experts_and_their_gradients(split, kind, rng):
    experts, (x, logits) = experts_of(rng), inputs(rng)
    y, wanted = run(x, logits, experts), jax.grad(loss)(experts, x, logits)
    types = (getattr(jax.sharding.AxisType, kind),) * 3
    mesh = jax.make_mesh((2, 2, 2), ("dp", "ep", "tp"), axis_types=types)
    its = jmx.ShardedExperts.of(experts, 2) if split.intermediate else experts
    if kind == "Explicit" and split.intermediate:
        pytest.skip("shards of weights that no axis divides in memory: the same as of Auto axes")
    with jax.set_mesh(mesh):
        if not split.intermediate:
            its = jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, P("ep"))), its)
        got = jax.jit(partial(run, split=split))(x, logits, its)
        found = jax.jit(jax.grad(partial(loss, split=split)))(its, x, logits)
    assert relative_error(got, y) <= 1e-5
    assert_close(found.whole() if split.intermediate else found, wanted)


@pytest.mark.devices(8)
def test_weights_that_xla_would_gather_are_an_error(rng):
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    x, logits = inputs(rng)
    experts = jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, P("ep"))), experts_of(rng))
    with jax.set_mesh(mesh), pytest.raises(Exception, match="XLA would gather the weights"):
        jax.jit(run)(x, logits, experts)


def test_slots_of_a_placement_compute_what_experts_do(rng):
    experts, (x, logits) = experts_of(rng, "bfloat16"), inputs(rng)
    placement = Placement.of(np.array([0, 1, 2, 3, 7, 4, 5, 6, 7, 3]), num_experts=E, num_ranks=2)
    placed = PlacedExperts.of(experts, placement)
    assert relative_error(run(x, logits, placed), run(x, logits, experts)) <= 1e-5


# Modules


@pytest.mark.parametrize("format", NAMES)
def test_an_nnx_module_trains_and_is_served_in_four_bits(format, rng):
    layer = jmx.nnx.MoE(H, 64, E, K, format=format, bias=True, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert {*nnx.to_pure_dict(nnx.state(layer, nnx.Param))} == {
        "gate_up_values", "down_values", "gate_up_bias", "down_bias", "router",
    }  # fmt: skip
    optimizer = nnx.Optimizer(layer, training.refuse_frozen(optax.adam(1e-2, eps=1e-3)), wrt=nnx.Param)
    x = jnp.asarray(rng.standard_normal((64, H)), jnp.float32)  # 1e-8, Adam's epsilon by default, is 0 in float16
    target = jnp.sin(3 * x)

    @nnx.jit
    def step(layer, optimizer):
        found, gradients = nnx.value_and_grad(lambda layer: jnp.square(layer(x) - target).mean())(layer)
        optimizer.update(layer, gradients)
        return found

    losses = [float(step(layer, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.6 * losses[0]
    trained = layer.experts
    options = {"gate_up_order": trained.gate_up_order, "format": "mxfp4"}
    served = jmx.Experts.quantize(*trained.dequantize(jnp.float32), trained.gate_up_bias, trained.down_bias, **options)
    other = jmx.nnx.MoE(H, 64, E, K, bias=True, param_dtype=jnp.float32, experts=served, rngs=nnx.Rngs(0))
    other.router = layer.router
    assert relative_error(other(x), layer(x)) < 0.3


def test_a_linen_module_trains(rng):
    layer = jmx.linen.MoE(H, 64, E, K, format="float32", bias=True, param_dtype=jnp.float32)
    x = jnp.asarray(rng.standard_normal((64, H)), jnp.float32)
    variables: Any = layer.init(jax.random.key(0), x)
    assert {*variables} == {"params"}

    def loss(its: Any) -> jax.Array:
        y: Any = layer.apply(its, x)
        return jnp.square(y - jnp.sin(x)).mean()

    of_params: Any = jax.jit(jax.value_and_grad(loss))
    first, gradients = of_params(variables)
    assert all(jnp.abs(a).max() > 0 for a in jax.tree.leaves(gradients))
    step: Any = jax.tree.map(lambda p, g: p - 0.1 * g, variables, gradients)
    after, _ = of_params(step)
    assert after < first
    new = experts_of(rng, "float32", "concatenated", sizes=(H, 64))
    held = layer.experts_of(layer.update(variables, new))
    assert jax.tree.all(jax.tree.map(np.array_equal, held, new))


def test_a_module_with_an_own_place_for_copies_refuses_floats():
    with pytest.raises(ValueError, match=r"`spare_experts` \(=2\) must be 0 for experts in 'bfloat16'"):
        jmx.nnx.MoE(H, 64, E, K, format="bfloat16", spare_experts=2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("format", NAMES)
def test_orbax_keeps_a_module(format, tmp_path, rng):
    def made(seed):
        return jmx.nnx.MoE(H, 64, E, K, format=format, bias=True, rngs=nnx.Rngs(seed))

    layer = made(0)
    orbax.save(tmp_path / "saved", layer)
    restored = orbax.restore(tmp_path / "saved", made(1))
    for got, wanted in zip(*(jax.tree.leaves(nnx.state(its)) for its in (restored, layer)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_an_exported_program_has_them_as_arguments(rng):
    experts, (x, logits) = experts_of(rng, "bfloat16"), inputs(rng)
    exported = jax.export.export(jax.jit(run))(x, logits, experts)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(x, logits, experts), run(x, logits, experts), rtol=1e-6)
