"""The Triton engine compiled for an A100, an L4 and an H200 that are not here: what its kernels take, by the reports of
their compilers."""

import itertools
import re
from functools import partial

import aot
import jax
import jax.numpy as jnp
import pytest
from backend_cases import ACTIVATIONS
from jax import export
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from memory import abstract_step, temporary_bytes

import jmx
from jmx import Environment, Experts, Routing
from jmx.numerics.formats import FORMATS
from jmx.pallas.triton.backend import Triton
from jmx.pallas.triton.config import FEW_TOKENS
from jmx.pallas.triton.ptx import num_factors
from jmx.perf.shapes import MODELS
from jmx.selection import tuning

pytestmark = pytest.mark.aot

ENGINE = Triton()
DEVICES = ("a100", "l4", "h200")
SHAPES = ("gpt-oss-20b", "gpt-oss-120b")
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 16384)
# Formats, and dtypes of their scales, each of which is decoded by other code.
FORMS = [
    ("nvfp4", None),
    ("mxint4", None),
    ("int4_g32", "float32"),
    ("int4_g32_asym", "float32"),
    ("int4_g64_asym_order", "bfloat16"),
    ("int4_g128", "float16"),
    ("int4_g128_asym", "bfloat16"),
    ("int4_channel", "float32"),
    ("int4_channel_asym", "float32"),
]
SPILLED = 64  # bytes a thread; what ptxas stores once, before the loop, is no matter


def calls():
    """Every configuration that the heuristic gives, once a device."""
    for device in DEVICES:
        seen = set()
        for model in SHAPES:
            for tokens in TOKENS:
                config = ENGINE.heuristic(MODELS[model].problem(tokens, "packed"), Environment.named(device))
                if config not in seen:
                    yield pytest.param(device, model, tokens, config, id=f"{device}-{model}-{tokens}")
                seen.add(config)


def layer(activation, x, ids, weights, experts):
    return jmx.moe(x, Routing(ids, weights), experts, activation=activation, backend=ENGINE.name)


def of_formats():
    """Every form by every configuration of the heuristic, of which each form's own part always runs."""
    places = [*itertools.product(DEVICES, (1, 4, 128, 256, 1024))]
    for i, form in enumerate(FORMS):
        for j, place in enumerate(places):
            always = j == 4 * i % len(places)
            yield pytest.param(*place, *form, marks=() if always else pytest.mark.slow)


def abstract_arguments(
    tokens,
    hidden,
    intermediate,
    num_experts,
    top_k,
    order: str | None = "interleaved",
    format="mxfp4",
    scale_dtype: str | None = None,
):
    def experts(key):
        sizes = num_experts, hidden, intermediate
        held = Experts.random(key, *sizes, gate_up_order=order, bias=True, format=FORMATS[format])
        if scale_dtype is None:
            return held
        arrays = {name: a.astype(scale_dtype) if name.endswith("_scales") else a for name, a in held.arrays().items()}
        return held.with_arrays(arrays)

    return (
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
        jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
        jax.eval_shape(experts, jax.ShapeDtypeStruct((2,), jnp.uint32)),
    )


def of_model(name, tokens):
    shape = MODELS[name]
    sizes = shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.method.top_k
    return partial(layer, shape.activation), abstract_arguments(tokens, *sizes)


def compile_config(device, model, tokens, config, directory):
    """Compiled into sound kernels."""
    function, arguments = of_model(model, tokens)
    return compile_soundly(device, config, directory, function, *arguments)


def compile_soundly(device, config, directory, function, *arguments):
    format, scales = arguments[-1].format, arguments[-1].gate_up.scales
    with tuning.override(ENGINE.name, config):
        compiled, kernels = aot.triton_kernels(device, directory, "jmx_grouped_product", function, *arguments)
    assert len(kernels) == 2 * len(config.tiles)
    for kernel in kernels:
        (tile,) = (each for each in config.tiles if f"_{each.block_m}x" in kernel.binary.name)
        assert kernel.shared_memory <= tile.shared_memory, (tile, kernel[:3])
        assert kernel.spilled <= SPILLED, (tile, kernel[:3])
        assert_decoded_where_multiplied(tile, kernel.ptx, format, scales.dtype)
    return compiled


def assert_decoded_where_multiplied(config, ptx, format, scale_dtype):
    """Each weight once in a step of the loop, by a thread that holds it for a product: none passes shared memory."""
    label, loop = max(loops(ptx), key=lambda found: ("cp.async" in found[1], len(found[1])))
    multiplications = loop.count("fma.rn.bf16x2")
    # Of two weights each. Scales in e4m3 take another, but are few; of those that come as words half is in the scale.
    by_words = format.name == "mxfp4" and config.block_k in (128, 256)
    factors = 1 if by_words else 2 if format.element_dtype != jnp.int4 else 1 + num_factors(format, scale_dtype)
    expected = config.weights // 2 * factors
    few = expected // 8 if format.name == "nvfp4" else 0
    assert expected <= multiplications <= expected + few, (config, label)
    codes = config.weights // 32 * (1 if format.name == "mxfp4" else 2)  # weights would take as many times four
    assert len(re.findall(r"st\.shared", loop)) <= codes, (config, label)
    assert len(re.findall(r"bar\.sync", loop)) <= 6, (config, label)


def loops(ptx):
    """Labels that are jumped back to, each with the text from there to the jump."""
    for jump in re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx):
        start = ptx.find(f"\n{jump[1]}:")
        if 0 <= start < jump.start():
            yield jump[1], ptx[start : jump.start()]


@pytest.mark.parametrize(("device", "model", "tokens", "config"), [*calls()])
def test_every_configuration_of_the_heuristic_compiles(device, model, tokens, config, tmp_path):
    compiled = compile_config(device, model, tokens, config, tmp_path)
    # Rows, what is between the products, and what is to be added up; of no expert's weights a copy.
    shape = MODELS[model]
    assignments = tokens * shape.method.top_k
    rows = min(assignments, shape.num_experts) * tokens if tokens <= FEW_TOKENS else assignments
    bytes_ = 2 * shape.hidden_size + 2 * shape.intermediate_size + 4 * config.split_k * shape.hidden_size
    assert temporary_bytes(compiled) < rows * bytes_ + 2**20


@pytest.mark.parametrize(("device", "tokens", "name", "scale_dtype"), [*of_formats()])
def test_every_format_compiles(device, tokens, name, scale_dtype, tmp_path):
    shape, size = MODELS["gpt-oss-20b"], 2816 if "128" in name else 2880
    config = ENGINE.heuristic(shape.problem(tokens, "packed"), Environment.named(device))
    sizes = size, size, shape.num_experts, shape.method.top_k
    arguments = abstract_arguments(tokens, *sizes, format=name, scale_dtype=scale_dtype)
    compile_soundly(device, config, tmp_path, partial(layer, shape.activation), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 256, 1024, 4096])
def test_every_candidate_compiles(device, tokens, tmp_path):
    problem = MODELS["gpt-oss-20b"].problem(tokens, "packed")
    for i, config in enumerate(ENGINE.candidates(problem, Environment.named(device))):
        compile_config(device, "gpt-oss-20b", tokens, config, tmp_path / str(i))


@pytest.mark.costly
def test_every_activation_compiles():
    def layers(gated, ungated):
        outs = [layer(a, *(gated if a.gated else ungated)) for a in ACTIVATIONS]
        return sum(outs[1:], outs[0])

    arguments = [abstract_arguments(1, 96, 64, 8, 2, order=order) for order in ("concatenated", None)]
    aot.compile_for("a100", layers, *arguments)


@pytest.mark.costly
@pytest.mark.parametrize("form", ["forward", "views"])
def test_memory_does_not_grow_with_experts(form):
    few, many = (abstract_step(64, num_experts, 256, "packed", form) for num_experts in (8, 128))
    few, many = (temporary_bytes(aot.compile_for("l4", step, *arguments)) for step, arguments in (few, many))
    weights = 120 * 3 * 256 * 256 * 17 // 32
    assert many - few < weights / 4


@pytest.mark.costly
def test_a_stack_beyond_32_bits_is_not_copied():
    """Between 2 and 4 GiB offsets of bytes would overflow; from 4 GiB on the kernel counts in 64 bits. Scales of the
    experts in use alone are copied, where those of all are between the two."""
    for layers in (3, 36):
        shape = MODELS["gpt-oss-120b"]
        function, (x, ids, weights, one) = of_model("gpt-oss-120b", 1)
        stack = jax.tree.map(lambda a, n=layers: jax.ShapeDtypeStruct((n, *a.shape), a.dtype), one)
        assert (stack.gate_up.values.size > 2**32) == (layers == 36)

        def view(x, ids, weights, stack, i, function=function):
            return function(x, ids, weights, stack.layer(i))

        index = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = aot.compile_for("a100", view, x, ids, weights, stack, index)
        scales = one.gate_up.scales.size * layers
        copied = scales // (layers * shape.num_experts) * shape.method.top_k if scales > 2**31 else 0
        assert (copied > 0) == (layers == 36)
        assert temporary_bytes(compiled) < 100 * shape.hidden_size * 4 + copied


def test_a_layer_is_one_cuda_graph(tmp_path):
    """The kernels are part of it, so a step costs the host one launch."""
    function, arguments = of_model("gpt-oss-20b", 1)
    aot.compile_for("a100", function, *arguments, xla_dump_to=str(tmp_path))
    (graph,) = aot.launches(tmp_path)
    assert graph[0] == "kCommandBuffer"


def test_no_warning_but_that_of_these_kernels_is_silenced():
    """Warnings are errors in tests, so all other tests of this file show that there is none."""

    def double(x):
        def kernel(x, y):
            y[...] = 2 * x[...]

        return pl.pallas_call(kernel, out_shape=x, compiler_params=plgpu.CompilerParams())(x)

    with pytest.warns(DeprecationWarning, match="The Pallas Triton backend is deprecated"):
        aot.compile_for("a100", double, jax.ShapeDtypeStruct((128,), jnp.float32))


def test_export_asks_for_the_check_that_the_docs_name():
    function, arguments = of_model("gpt-oss-20b", 1)
    leaves, structure = jax.tree.flatten(arguments)

    def flat(*leaves):
        return function(*jax.tree.unflatten(structure, leaves))

    with jax.sharding.use_abstract_mesh(aot.mesh_of("a100").abstract_mesh):
        exporter = partial(export.export, jax.jit(flat), platforms=["cuda"])
        with pytest.raises(ValueError, match=re.escape("__gpu$xla.gpu.triton")):
            exporter()(*leaves)
        check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
        exported = exporter(disabled_checks=[check])(*leaves)
    assert exported.mlir_module().count("custom_call @__gpu$xla.gpu.triton") == 2
