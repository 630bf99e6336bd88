"""Padding of experts: the same bits at the true sizes, which are all that a caller sees; and short last blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import TOLERANCE
from dequantized import dequantized, with_odd_scales
from flax import nnx

import jmx
import jmx.nnx
from jmx import Experts
from jmx.experts import ShardedExperts
from jmx.explain import explain_problem
from jmx.numerics.formats import FORMATS, unpack
from jmx.numerics.quantization import random
from jmx.numerics.resizing import pad, unpad
from jmx.perf import shapes
from jmx.selection.backend import Reason
from jmx.selection.environment import Environment

H, I = 160, 96  # noqa: E741 (the field's name)
# Of each kind of arrays one, with the sizes that it is padded to.
PADDED = {
    "mxfp4": (256, 128),
    "nvfp4": (192, 112),
    "int4_g32_asym_order": (192, 128),
    "int8_channel_asym": (256, 100),
    "fp8_block": (256, 128),
}
SHORT = ["int4_g64", "int4_g128_asym", "int8_g64_asym_order", "int4_g48_order"]


@pytest.fixture
def key(rng):
    return jax.random.key(rng.integers(2**31))


def call(rng, experts, backend=None, hidden=H):
    gated = experts.gate_up_order is not None
    x = rng.normal(size=(3, hidden)).astype(np.float32)
    routing = jmx.Routing(rng.integers(0, 4, (3, 2)).astype(np.int32), rng.uniform(0.1, 1, (3, 2)).astype(np.float32))
    activation = jmx.SwiGLU() if gated else jmx.ReLU2()

    def run(its):
        return np.asarray(jmx.moe(x, routing, its, activation=activation, backend=backend))

    return x, routing, run


@pytest.mark.parametrize("order", ["interleaved", "concatenated", None])
@pytest.mark.parametrize("name", PADDED)
def test_results_have_the_same_bits(name, order, key, rng):
    experts = Experts.random(key, 4, H, I, gate_up_order=order, format=name)
    padded = experts.pad(*PADDED[name])
    assert (padded.hidden_size, padded.intermediate_size) == (H, I)
    assert padded.array_sizes == padded.padded_to == PADDED[name]
    _, _, run = call(rng, experts, "xla")
    got = run(padded)
    assert got.shape == (3, H)
    np.testing.assert_array_equal(got, run(experts))
    for ours, theirs in zip(padded.dequantize(jnp.float32), experts.dequantize(jnp.float32), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    back = padded.unpad()
    assert back.padded_to is None
    jax.tree.map(np.testing.assert_array_equal, back.arrays(), experts.arrays())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="`cpu` runs on CPUs")
def test_results_of_the_cpu_kernels_have_the_same_bits(key, rng):
    experts = Experts.random(key, 4, H, I, gate_up_order="interleaved", format="mxfp4")
    _, _, run = call(rng, experts, "cpu")
    np.testing.assert_array_equal(run(experts.pad(256, 128)), run(experts))


def test_sizes_left_out_become_whole_blocks(key):
    experts = Experts.random(key, 2, H, I, gate_up_order=None, format="fp8_block", bias=False)
    assert experts.pad().array_sizes == (256, 128)
    assert experts.pad(intermediate_size=I).array_sizes == (256, I)
    assert experts.pad(hidden_size=H).array_sizes == (H, 128)
    assert experts.pad(H, I).padded_to is None
    declared = Experts.random(key, 2, 48, 48, gate_up_order=None, format="int8_channel", bias=False)
    assert dataclasses.replace(declared, input_format="mxfp8").pad().array_sizes == (64, 64)


def test_floats_that_blocks_do_not_divide_are_padded_on_request(key, rng):
    gate_up, down = rng.normal(size=(4, 2 * 24, 50)), rng.normal(size=(4, 50, 24))
    biases = rng.normal(size=(4, 48)).astype(np.float32), rng.normal(size=(4, 50)).astype(np.float32)
    floats = gate_up.astype(np.float32), down.astype(np.float32)
    with pytest.raises(ValueError, match=r"`gate_up.shape\[-1\]` \(=50\) must be a multiple of 32 for MXFP4"):
        Experts.quantize(*floats, gate_up_order="concatenated")
    experts = Experts.quantize(*floats, *biases, gate_up_order="concatenated", pad=True)
    assert (experts.hidden_size, experts.intermediate_size, experts.padded_to) == (50, 24, (64, 32))
    got = [np.asarray(array, np.float64) for array in experts.dequantize(jnp.float32)]
    for ours, theirs in zip(got, floats, strict=True):
        assert np.linalg.norm(ours - theirs) < 0.2 * np.linalg.norm(theirs)
    x, routing, run = call(rng, experts, "xla", hidden=50)
    want = np.zeros((3, 50))
    for t, s in np.ndindex(routing.expert_ids.shape):
        e = routing.expert_ids[t, s]
        gate, up = np.split(got[0][e] @ x[t] + biases[0][e], 2)
        h = gate / (1 + np.exp(-1.0 * gate)) * (up + 0.0)
        del h
        alpha, beta = jmx.SwiGLU().alpha, jmx.SwiGLU().beta
        h = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
        want[t] += routing.weights[t, s] * (got[1][e] @ h + biases[1][e])
    assert np.linalg.norm(run(experts) - want) < TOLERANCE["float32"] * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("gate_up", "down", "message"),
    [
        ((2, 10, 20), (2, 20, 4), r"`gate_up` \(logical shape \(2, 10, 20\)\) must have 8 rows"),
        ((2, 9, 20), (2, 20, 4), r"`gate_up` \(logical shape \(2, 9, 20\)\) must have 8 rows"),
        ((2, 8, 20), (2, 24, 4), r"`down` \(logical shape \(2, 24, 4\)\) must be \(E, H, I\) with E, H = \(2, 20\)"),
        ((2, 8, 20), (3, 20, 4), r"`down` \(logical shape \(3, 20, 4\)\) must be"),
        ((2, 8, 0), (2, 0, 4), "must have no axis of size 0"),
    ],
)
@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
def test_padding_hides_no_weights_that_do_not_fit_each_other(gate_up, down, order, message, rng):
    floats = [rng.standard_normal(shape).astype(np.float32) for shape in (gate_up, down)]
    with pytest.raises(ValueError, match=message):
        Experts.quantize(*floats, gate_up_order=order, format="mxfp4", pad=True)


def test_a_module_and_its_router_see_the_true_sizes(key, rng):
    experts = Experts.random(key, 4, H, I, gate_up_order="interleaved", format="mxfp4", bias=False)
    sizes = {"format": "mxfp4", "gate_up_order": "interleaved", "rngs": nnx.Rngs(0)}
    plain, padded = (
        jmx.nnx.MoE(H, I, 4, 2, experts=its, backend="xla", layout="packed", **sizes)
        for its in (experts, experts.pad(256))
    )
    padded.router.kernel.set_value(plain.router.kernel[...])
    assert padded.router.kernel.shape == (H, 4)
    x = rng.normal(size=(2, 3, H)).astype(np.float32)
    atol = 0 if jax.default_backend() == "cpu" else 2e-6  # GPU libraries choose their products by size
    np.testing.assert_allclose(padded(x), plain(x), rtol=0, atol=atol)

    def loss(x, layer):
        return (layer(x) ** 2).sum()

    gradients = [nnx.grad(loss, argnums=0)(jnp.asarray(x), layer) for layer in (padded, plain)]
    np.testing.assert_allclose(*gradients, rtol=0, atol=10 * atol)
    text = str(jmx.explain(padded, jnp.asarray(x)))
    assert f"H={H} (padded to 256), I={I}, mxfp4" in text.replace("\n", " ")
    assert "padded" not in str(jmx.explain(plain, jnp.asarray(x)))
    with pytest.raises(ValueError, match=rf"`x` \(of shape \(2, 256\)\) must be \(\.\.\., {H}\)"):
        padded(jnp.zeros((2, 256)))
    with pytest.raises(ValueError, match=r"`new.padded_to` \(=None\) must be \(256, 96\)"):
        padded.update(experts)


def test_stacks_and_shards_of_padded_experts(key, rng):
    layers = [Experts.random(k, 4, H, I, gate_up_order="interleaved", format="mxfp4") for k in jax.random.split(key)]
    _, _, run = call(rng, layers[0], "xla")
    stack = Experts.stack([its.pad(256, 128) for its in layers])
    np.testing.assert_array_equal(run(stack.layer(1)), run(layers[1]))
    whole = ShardedExperts.of(layers[0].pad(192, 128), 2).whole()
    jax.tree.map(np.testing.assert_array_equal, whole.arrays(), layers[0].arrays())


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((159, None), ValueError, r"`hidden_size` \(=159\) must be at least 160"),
        ((None, 95), ValueError, r"`intermediate_size` \(=95\) must be at least 96"),
        ((170, None), ValueError, r"`hidden_size` \(=170\) must be a multiple of 32 for MXFP4"),
        ((1.5, None), TypeError, r"`hidden_size` \(=1.5, a float\) must be an integer"),
    ],
)
def test_sizes_that_cannot_be_are_named(sizes, error, message, key):
    experts = Experts.random(key, 2, H, I, gate_up_order=None, format="mxfp4", bias=False)
    with pytest.raises(error, match=message):
        experts.pad(*sizes)


def test_padding_that_blocks_need_cannot_be_taken_off(rng):
    floats = rng.normal(size=(2, 40, 50)).astype(np.float32), rng.normal(size=(2, 50, 40)).astype(np.float32)
    experts = Experts.quantize(*floats, gate_up_order=None, format="nvfp4", pad=True)
    with pytest.raises(ValueError, match=r"`hidden_size` \(=50\) must be a multiple of 16 for NVFP4"):
        experts.unpad()


# Short last blocks


@pytest.mark.parametrize("name", SHORT)
def test_the_last_group_of_a_row_may_be_short(name, key, rng):
    format = FORMATS[name]
    q = with_odd_scales(rng, jax.tree.map(np.asarray, random(key, (2, 8, 200), format)))
    assert q.scales.shape == (2, 8, -(-200 // format.block_size))
    want = dequantized(unpack(q, format), format)
    np.testing.assert_allclose(jmx.dequantize(q, jnp.float32, format), want, rtol=3e-7)
    for packed in (q, unpack(q, format)):
        padded = pad(packed, (9, 320), format)
        wide = np.asarray(jmx.dequantize(padded, jnp.float32, format))
        np.testing.assert_array_equal(wide[:, :8, :200], jmx.dequantize(q, jnp.float32, format))
        assert not wide[:, 8:].any()
        assert not wide[:, :, 200:].any()
        jax.tree.map(np.testing.assert_array_equal, unpad(padded, (8, 200), format), packed)


@pytest.mark.parametrize("name", ["int4_g128_asym", "int8_g64"])
def test_a_short_group_is_quantized_by_what_it_holds(name, rng):
    x = rng.normal(size=(5, 360)).astype(np.float32)
    whole, size = jmx.quantize(x, name), FORMATS[name].block_size
    rest = jmx.quantize(x[:, 360 // size * size :], FORMATS[name.replace(f"g{size}", f"g{360 % size}")])
    np.testing.assert_array_equal(whole.scales[:, -1:], rest.scales)
    np.testing.assert_array_equal(whole.values[:, 360 // size * size :], rest.values)


def test_kernels_take_short_groups_once_they_are_padded(key, rng):
    experts = Experts.random(key, 4, H, 360, gate_up_order="interleaved", format="int4_g128_asym")
    x, routing, run = call(rng, experts, "xla")
    with pytest.raises(
        jmx.NoBackendError, match=r"hidden_size \(=160\) must be a multiple of 128, the columns that share"
    ):
        jmx.moe(x, routing, experts, activation=jmx.SwiGLU(), backend="cpu")
    padded = experts.pad()
    assert padded.padded_to == (256, 384)
    want = run(experts)
    np.testing.assert_array_equal(run(padded), want)
    got = np.asarray(jmx.moe(x, routing, padded, activation=jmx.SwiGLU(), backend="cpu"))
    assert np.linalg.norm(got - want) < TOLERANCE["float32"] * np.linalg.norm(want)


@pytest.mark.parametrize("device", ["h200", "a100", "cpu"])
def test_explain_says_that_kernels_need_whole_groups(device):
    problem = shapes.MODELS["gpt-oss-20b"].problem(64, "packed")
    trail = explain_problem(dataclasses.replace(problem, format="int4_g128"), Environment.named(device)).trail
    shape = [no for _, _, no in trail if no is not None and no.reason is Reason.SHAPE]
    assert shape
    assert all("experts.pad()" in no.remedy for no in shape)
