"""The Linen module: the same layer as the NNX one, its collections and partitioning, and linen's transformations."""

import re
from functools import partial
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

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

H, I, E, K = 64, 96, 8, 2  # noqa: E741
GPT_OSS = jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def make(**options):
    return MoE(H, I, E, K, **({"activation": GPT_OSS, "bias": True} | options))


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(3, 5, H)), jnp.float32)


def apply(layer, *arguments, **options) -> Any:
    return layer.apply(*arguments, **options)


def init(layer, x, seed=0, *arguments) -> Any:
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
    assert routing.expert_ids.shape == routing.weights.shape == (3, 5, K)
    np.testing.assert_array_equal(apply(here, variables, x, routing), there(x, mask=mask))
    np.testing.assert_array_equal(routing.expert_ids, there.route(x, mask).expert_ids)
    assert int(jmx.token_counts(routing, E).sum()) == K * int(mask.sum())
    assert here.problem(x) == there.problem(x)


def test_quantized_weights_are_a_collection_of_their_own(x):
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


@pytest.mark.parametrize("layout", ["mosaic_sm90", "mosaic_sm90_fp8", "cutlass_sm90"])
def test_weights_in_layouts_of_kernels_are_those_of_others(layout, x):
    """Arrays of these layouts have more axes than weights."""
    layer, packed = make(layout=layout), make(layout="packed")
    close(apply(layer, init(layer, x), x), apply(packed, init(packed, x), x))


def test_grad_of_params_passes_quantized_weights_by(x):
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
    [("canonical", "`gate_up.values` (float4_e2m1fn): quantized weights have none"), ("packed", "but got uint8")],
)
def test_a_gradient_of_quantized_weights_is_an_error(layout, message, x):
    layer = make(layout=layout)
    variables = init(layer, x)
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.grad(lambda v: (apply(layer, v, x) ** 2).sum())(variables)


def test_partitioning_of_every_weight(x):
    layer = make(axes={"expert": "x", "hidden": "z"}, layout="packed")
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert nn.get_partition_spec(variables) == {
        "params": {
            "gate_up_bias": P("x", None),
            "down_bias": P("x", "z"),
            "router_dense": {"kernel": P(None, None), "bias": P(None)},
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
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(layer.init, jax.random.key(0), x), mesh)
        variables = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x)
        values = variables["quantized"]["gate_up_values"].value
        assert values.addressable_shards[0].data.shape[0] == E // 4
        y = jax.jit(layer.apply)(variables, x)
    close(y, apply(make(), jax.device_put(nn.meta.unbox(variables), jax.devices()[0]), x))


class Block(nn.Module):
    """A layer as in a whole model: its output is small beside the residual, and it is scanned over."""

    options: Any
    wrap: Any = lambda module: module

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.wrap(MoE)(H, I, E, K, activation=GPT_OSS, bias=True, name="moe", **self.options)(x) / 16, None


def stacked(lift, layers, axes):
    metadata = {"metadata_params": {nn.PARTITION_NAME: "layers"}} if axes else {}
    return partial(lift, variable_axes={"params": 0, "quantized": 0}, split_rngs={"params": True}, **layers, **metadata)


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
@pytest.mark.parametrize("axes", [None, {"expert": "x"}], ids=["plain", "axes"])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.remat, nn.jit], ids=["itself", "remat", "jit"])
def test_layers_that_are_scanned_over_are_stacked(wrap, axes, given, x, rng):
    options = {"axes": axes, "experts": experts_like(rng) if given else None}
    stack = stacked(nn.scan, {"length": 3}, axes)(Block)(options, wrap)
    variables = jax.eval_shape(stack.init, jax.random.key(0), x, None)
    spec = nn.get_partition_spec(variables)["quantized"]["moe"]["gate_up_values"]
    assert spec == (P("layers", "x", None, None) if axes else P())
    variables = nn.meta.unbox(variables)
    assert variables["quantized"]["moe"]["gate_up_values"].shape[:2] == (3, E)
    assert jax.eval_shape(stack.apply, variables, x, None)[0].shape == x.shape


@pytest.mark.parametrize(("axes", "given"), [(None, True), ({"expert": "x"}, False)])
def test_scan_over_layers(axes, given, x, rng):
    options = {"axes": axes, "experts": experts_like(rng) if given else None}
    stack = stacked(nn.scan, {"length": 3}, axes)(Block)(options)
    variables = nn.meta.unbox(init(stack, x, int(rng.integers(2**31)), None))
    y, _ = jax.jit(stack.apply)(variables, x, None)
    unrolled = x
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i], {k: v["moe"] for k, v in variables.items()})
        unrolled = unrolled + apply(make(), one, unrolled) / 16
    close(y, unrolled)


@pytest.mark.parametrize(("axes", "given"), [(None, False), ({"expert": "x"}, True)])
def test_vmap_over_layers_and_over_inputs(axes, given, x, rng):
    options = {"activation": GPT_OSS, "bias": True, "axes": axes, "experts": experts_like(rng) if given else None}
    stack = stacked(nn.vmap, {"in_axes": 0}, axes)(MoE)(H, I, E, K, **options)
    variables = nn.meta.unbox(init(stack, x))
    for i, y in enumerate(apply(stack, variables, x)):
        close(y, apply(make(), jax.tree.map(lambda a, i=i: a[i], variables), x[i]))
    shared = nn.vmap(MoE, variable_axes={"params": None, "quantized": None}, split_rngs={"params": False})
    one = init(make(**options), x)
    close(apply(shared(H, I, E, K, **options), one, x), apply(make(**options), one, x))


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit], ids=["remat", "jit"])
@pytest.mark.parametrize("axes", [None, {"expert": "x"}], ids=["plain", "axes"])
def test_remat_and_jit_give_the_same_layer(axes, wrap, x, rng):
    options = {"activation": GPT_OSS, "bias": True, "axes": axes, "experts": experts_like(rng)}
    wrapped, plain = wrap(MoE)(H, I, E, K, **options), make(**options)
    variables: Any = wrapped.init(jax.random.key(0), x)
    assert jax.tree.structure(variables) == jax.tree.structure(plain.init(jax.random.key(0), x))
    close(apply(wrapped, variables, x), apply(plain, variables, x))


def test_a_table_of_a_model_lists_its_weights(x):
    # Its methods are intercepted, before the layer is part of the model, too.
    table = Block({}).tabulate(jax.random.key(0), x, console_kwargs={"width": 200})
    assert all(name in table for name in ("gate_up_values", "down_bias", "router_dense"))


def test_variables_are_boxed_where_axes_are_given_alone(x):
    for axes, boxed in ((None, False), ({"expert": "x"}, True), ({}, True)):
        variables = jax.eval_shape(make(axes=axes).init, jax.random.key(0), x)
        leaves = jax.tree.leaves(variables, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
        assert {isinstance(leaf, nn.Partitioned) for leaf in leaves} == {boxed}


# Given experts


def experts_like(rng, **options: Any):
    key = jax.random.key(int(rng.integers(2**31)))
    return jmx.Experts.random(key, E, H, I, **{"gate_up_order": "concatenated", **options})


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
@pytest.mark.parametrize("layout", ["packed", "canonical"])
def test_given_experts_are_the_weights_at_the_start(order, layout, x, rng):
    experts = experts_like(rng, gate_up_order=order)
    here = make(experts=experts, layout=layout)
    there = jmx.nnx.MoE(
        H, I, E, K, activation=GPT_OSS, bias=True, experts=experts, layout=layout, rngs=nnx.Rngs(params=0)
    )
    variables: Any = here.init(jax.random.key(0), x)
    for name, array in experts.prepare(layout).arrays().items():
        found = variables["params" if name.endswith("bias") else "quantized"][name]
        np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(apply(here, variables_of(there), x), there(x))
    assert here.problem(x) == there.problem(x)
    assert here.problem(x).gate_up_order == order


def test_apply_reads_the_variables_and_not_the_experts_given(x, rng):
    a, b = (make(experts=experts_like(rng)) for _ in range(2))
    variables: Any = a.init(jax.random.key(0), x)
    np.testing.assert_array_equal(apply(b, variables, x), apply(a, variables, x))
    consts = jax.make_jaxpr(a.apply)(variables, x).consts
    assert sum(np.size(array) for array in consts) < 100


def test_modules_with_given_experts_have_a_hash(x, rng):
    experts = experts_like(rng)
    layer, same = make(experts=experts), make(experts=experts)
    assert hash(layer) == hash(layer.clone())
    assert layer == layer.clone()
    assert layer != same
    assert "Experts(8 of mxfp4, 64 x 96)" in repr(layer)
    kind = {"activation": GPT_OSS, "bias": True, "layout": experts.layout}
    jitted = nn.jit(MoE)(H, I, E, K, **kind, experts=experts)
    other = nn.jit(MoE)(H, I, E, K, **kind, experts=experts_like(rng))
    first, second = (init(layer, x)["quantized"]["down_values"] for layer in (jitted, other))
    np.testing.assert_array_equal(first, experts.down.values)
    assert not np.array_equal(first, second)


def test_modules_with_integers_of_jax_and_numpy_have_a_hash(x):
    sizes: Any = (jnp.int32(H), np.int64(I), np.array(E), jnp.uint8(K))
    layer = MoE(*sizes, activation=GPT_OSS, bias=True)
    assert (hash(layer), layer) == (hash(make()), make())
    jax.eval_shape(nn.jit(MoE)(*sizes, activation=GPT_OSS, bias=True).init, jax.random.key(0), x)


def test_given_experts_may_be_traced(x, rng):
    experts = experts_like(rng)
    kind = {"layout": experts.layout}
    variables = jax.jit(lambda experts, x: make(experts=experts, **kind).init(jax.random.key(0), x))(experts, x)
    np.testing.assert_array_equal(variables["quantized"]["gate_up_values"], experts.gate_up.values)


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
        ({"axes": {"experts": "x"}}, "must name logical axes among ('expert', 'intermediate', 'hidden', 'token')"),
        ({"layout": "fast"}, "`layout` (='fast') must be one of"),
        ({"experts": (4, H, I)}, "`num_experts` (=8) must be 4, as `experts` have it"),
        ({"experts": (E, 32, I)}, "`hidden_size` (=64) must be 32, as `experts` have it"),
        ({"experts": (E, H, I), "bias": False}, "`bias` (=False) must be True: `experts` have a `gate_up_bias`"),
        ({"experts": (E, H, I), "format": jmx.NVFP4}, "`format` (='nvfp4'"),
        ({"experts": (E, H, I), "activation": jmx.ReLU()}, "`gate_up_order` (='concatenated') must be None for `activ"),
    ],
)
def test_arguments_that_contradict_are_named(options, message, x):
    if isinstance(options.get("experts"), tuple):
        given = jmx.Experts.random(jax.random.key(0), *options["experts"], gate_up_order="concatenated")
        options = options | {"experts": given}
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
