"""The Linen module: the same layer as the NNX one, its collections and partitioning, and linen's transformations."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmx
import jmx.linen
import jmx.nnx
from jmx.linen import MoE

H, I, E, K = 64, 96, 8, 2  # noqa: E741
GPT_OSS = jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def make(**options):
    return MoE(H, I, E, K, **({"activation": GPT_OSS, "bias": True} | options))


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(3, 5, H)), jnp.float32)


def apply(layer, *arguments, **options) -> Any:
    return layer.apply(*arguments, **options)


def init(layer, x, seed=0, *arguments):
    return jax.jit(layer.init)(jax.random.key(seed), x, *arguments)


def close(a, b, bound=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def variables_of(layer):
    """Linen's variables with the arrays of an nnx layer."""
    arrays = layer.experts.arrays()
    params = {name: a for name, a in arrays.items() if name.endswith("bias")}
    router = {name: getattr(layer.router, name).get_value() for name in ("kernel", "bias")}
    found = {"params": params | {"router_dense": router}}
    found["quantized"] = {name: a for name, a in arrays.items() if name not in params}
    if layer.correction_bias is not None:
        found["correction"] = {"bias": layer.correction_bias.get_value()}
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "canonical", "gate_up_order": "interleaved"},
        {"weights_on": "input", "routing": jmx.SoftmaxTopK(K, renormalize=False)},
        {"routing": jmx.GroupedTopK(K, 4, 2, "sigmoid", True, 2.5), "correction_bias": True},
    ],
    ids=["plain", "canonical", "input", "grouped"],
)
def test_the_same_arrays_give_the_same_bits_as_in_nnx(options, x, rng):
    there = jmx.nnx.MoE(H, I, E, K, activation=GPT_OSS, bias=True, rngs=nnx.Rngs(int(rng.integers(2**31))), **options)
    if there.correction_bias is not None:
        there.correction_bias.set_value(jnp.asarray(rng.normal(size=E), jnp.float32))
    here, variables = make(**options), variables_of(there)
    mask = jnp.asarray(rng.random((3, 5)) < 0.7)
    np.testing.assert_array_equal(apply(here, variables, x), there(x))
    np.testing.assert_array_equal(apply(here, variables, x, mask=mask), there(x, mask=mask))
    logits = jnp.asarray(rng.normal(size=(3, 5, E)), jnp.float32)
    np.testing.assert_array_equal(apply(here, variables, x, logits), there(x, logits))
    routing = apply(here, variables, x, mask, method="route")
    np.testing.assert_array_equal(routing.expert_ids, there.route(x, mask).expert_ids)
    assert int(jmx.token_counts(routing, E).sum()) == K * int(mask.sum())
    assert here.problem(x) == there.problem(x)


def test_quantised_weights_are_a_collection_of_their_own(x):
    layer = make()
    variables = init(layer, x)
    assert set(variables) == {"params", "quantized"}
    assert set(variables["quantized"]) == {"gate_up_values", "gate_up_scales", "down_values", "down_scales"}
    assert set(variables["params"]) == {"gate_up_bias", "down_bias", "router_dense"}
    again = init(layer, x, seed=1)
    a, b = (nn.meta.unbox(v)["quantized"]["gate_up_values"] for v in (variables, again))
    assert not np.array_equal(a, b)
    assert not np.array_equal(a[0], a[1])
    balanced = make(routing=jmx.SigmoidTopK(K, renormalize=True), correction_bias=True)
    shapes = jax.eval_shape(balanced.init, jax.random.key(0), x)
    assert set(shapes) == {"params", "quantized", "correction"}
    assert shapes["correction"]["bias"].shape == (E,)


def test_grad_of_params_passes_quantised_weights_by(x):
    layer = make()
    variables = nn.meta.unbox(init(layer, x))

    @jax.jit
    @jax.grad
    def grad(params):
        return (apply(layer, variables | {"params": params}, x) ** 2).sum()

    grads = grad(variables["params"])
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, variables["params"])
    assert all(float(jnp.abs(g.astype(jnp.float32)).max()) > 0 for g in jax.tree.leaves(grads))
    remat = nn.remat(MoE)(H, I, E, K, activation=GPT_OSS, bias=True)
    again = jax.jit(jax.grad(lambda p: (apply(remat, variables | {"params": p}, x) ** 2).sum()))(variables["params"])
    jax.tree.map(lambda a, b: close(a, b, 1e-2), again, grads)  # rounded to bfloat16, as the parameters are
    close(jax.vmap(lambda x: apply(layer, variables, x))(x), apply(layer, variables, x))


@pytest.mark.parametrize(
    ("layout", "message"),
    [("canonical", "`gate_up.values` (float4_e2m1fn): quantised weights have none"), ("packed", "but got uint8")],
)
def test_a_gradient_of_quantised_weights_is_an_error(layout, message, x):
    layer = make(layout=layout)
    variables = init(layer, x)
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.grad(lambda v: (apply(layer, v, x) ** 2).sum())(variables)


def test_partitioning_of_every_weight(x):
    variables = jax.eval_shape(make(axes={"expert": "x", "hidden": "z"}).init, jax.random.key(0), x)
    assert nn.get_partition_spec(variables) == {
        "params": {
            "gate_up_bias": P("x", None),
            "down_bias": P("x", "z"),
            "router_dense": {"kernel": P("z", "x"), "bias": P("x")},
        },
        "quantized": {
            "gate_up_values": P("x", None, "z"),
            "gate_up_scales": P("x", None, "z"),
            "down_values": P("x", "z", None),
            "down_scales": P("x", "z", None),
        },
    }


@pytest.mark.devices(4)
def test_on_a_mesh_weights_are_placed_split(x):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    layer = make(axes={"expert": "x"})
    plain = apply(make(), init(make(), x), x)
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(layer.init, jax.random.key(0), x), mesh)
        variables = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x)
        values = variables["quantized"]["gate_up_values"].value
        assert values.addressable_shards[0].data.shape[0] == E // 4
        close(jax.jit(layer.apply)(variables, x), plain)


def test_scan_over_layers(x):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + make(axes={"expert": "x"}, name="moe")(x), None

    stack = nn.scan(
        Block,
        variable_axes={"params": 0, "quantized": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    variables = init(stack, x, 0, None)
    assert nn.get_partition_spec(variables)["quantized"]["moe"]["gate_up_values"] == P("layers", "x", None, None)
    variables = nn.meta.unbox(variables)
    y, _ = jax.jit(stack.apply)(variables, x, None)
    unrolled = x
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i], {k: v["moe"] for k, v in variables.items()})
        unrolled = unrolled + apply(make(), one, unrolled)
    close(y, unrolled)


def test_a_120b_sized_module_in_eval_shape_allocates_nothing():
    key = jax.random.key(0)
    before = {id(a) for a in jax.live_arrays()}
    layer = MoE(2880, 2880, 128, 4, activation=GPT_OSS, bias=True, layout="packed")
    shapes = jax.eval_shape(layer.init, key, jax.ShapeDtypeStruct((7, 2880), jnp.bfloat16))
    assert nn.meta.unbox(shapes)["quantized"]["gate_up_scales"].shape == (128, 5760, 90)
    assert {id(a) for a in jax.live_arrays()} <= before


def test_a_layer_without_router(x):
    layer, logits = make(router=False), jnp.ones((3, 5, E))
    variables = init(layer, x, 0, logits)
    assert "router_dense" not in variables["params"]
    assert apply(layer, variables, x, logits).shape == x.shape
    with pytest.raises(ValueError, match=re.escape("`routing` must be given: this layer was made with router=False")):
        apply(layer, variables, x)


def test_a_router_is_made_though_logits_are_given(x):
    layer = make()
    variables = init(layer, x, 0, jnp.ones((3, 5, E)))
    assert apply(layer, variables, x).shape == x.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_up_order": None}, "`gate_up_order` (=None) must be given for `activation` (=SwiGLU("),
        ({"routing": jmx.TopKSoftmax(3)}, "`top_k` (=2) must be that of `routing` (=TopKSoftmax(top_k=3))"),
        ({"correction_bias": True}, "`correction_bias` (=True) must be False for `routing`"),
        ({"weights_on": "both"}, "`weights_on` (='both') must be one of ('output', 'input')"),
        ({"axes": {"experts": "x"}}, "must name logical axes among ('expert', 'intermediate', 'hidden')"),
        ({"layout": "fast"}, "`layout` (='fast') must be one of"),
    ],
)
def test_arguments_that_contradict_are_named(options, message, x):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options).init(jax.random.key(0), x)


def test_arrays_of_another_layout_or_size_are_named(x):
    packed, canonical = make(layout="packed"), make(layout="canonical")
    variables = nn.meta.unbox(init(packed, x))
    message = "`gate_up_values` (uint8[8, 192, 32]) must be float4_e2m1fn[8, 192, 64] in layout 'canonical'"
    with pytest.raises(ValueError, match=re.escape(message)):
        apply(canonical, variables, x)
    cut = jax.tree.map(lambda a: a[:4], variables["quantized"])
    with pytest.raises(ValueError, match=re.escape("`gate_up_values` (uint8[4, 192, 32]) must be uint8[8, 192, 32]")):
        apply(packed, variables | {"quantized": cut}, x)
