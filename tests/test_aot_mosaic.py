"""The Hopper engine compiled for an H200 that is not here: what its kernels cost, by the report of their compiler."""

import json
import pathlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import aot
import jax
import jax.numpy as jnp
import pytest
from memory import abstract_step, temporary_bytes
from registers import assert_registers, assert_stages_are_released_late
from sass import hazards, parse

import jmx
from jmx import Environment, Experts, Routing, lora
from jmx.numerics.formats import FORMATS, MXFP4
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.config import Config, backward_config
from jmx.pallas.mosaic_sm90.layout import LAYOUT, Tile
from jmx.pallas.sm90.config import SHARED_MEMORY
from jmx.perf.shapes import MODELS, Shape
from jmx.selection import tuning

ENGINE, H200 = MosaicSm90(), Environment.named("h200")
TABLES = sorted((pathlib.Path(jmx.__file__).parent / "selection" / "tuned").glob(f"{ENGINE.name}-*.json"))
SHAPES = ("gpt-oss-20b", "gpt-oss-120b", "deepseek-v3")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 32768)
ALWAYS = (  # few that differ most; the others take minutes: see the marker `slow`
    ("gpt-oss-120b", 1),
    ("gpt-oss-120b", 16),
    ("gpt-oss-120b", 1024),
    ("gpt-oss-120b", 8192),
    ("gpt-oss-20b", 256),
    ("deepseek-v3", 64),
)


class Call(NamedTuple):
    """A model's layer, tokens, a configuration with which such a call may run, and where that comes from."""

    model: str
    tokens: int
    config: Config
    source: str


def calls() -> Iterator[Call]:
    """All configurations of the shipped tables and of the heuristics."""
    names = {tuning.shape_class(shape.problem(1, LAYOUT.name)): name for name, shape in MODELS.items()}
    for table in TABLES:
        device = json.loads(table.read_text())["device"]
        for key, entry in tuning.load(table, ENGINE, device).items():
            yield Call(names[key.shape], key.tokens, entry.config, table.stem)
    for model in SHAPES:
        for tokens in TOKENS:
            config = ENGINE.heuristic(MODELS[model].problem(tokens, LAYOUT.name), H200)
            yield Call(model, tokens, config, "heuristic")


def parameters() -> Iterator[Any]:
    always, different = {*ALWAYS}, {}
    for call in calls():
        different.setdefault(call[:3], call)  # where table and heuristic agree, the table's
    for call in different.values():
        marks = [] if call[:2] in always else [pytest.mark.slow]
        yield pytest.param(call, id=f"{call.model}-{call.tokens}-{call.source}", marks=marks)
        always.discard(call[:2])


def layer(shape: Shape, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    return jmx.moe(x, Routing(ids, weights), experts, activation=shape.activation)


def abstract_arguments(shape: Shape, tokens: int) -> tuple[Any, ...]:
    rows = (tokens, shape.method.top_k)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return (
        jax.ShapeDtypeStruct((tokens, shape.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct(rows, jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.eval_shape(lambda key: shape.experts(key).prepare(LAYOUT.name), key),
    )


@pytest.mark.aot
@pytest.mark.parametrize("call", [*parameters()])
def test_every_configuration_compiles_into_a_sound_kernel(call, capfd):
    shape = MODELS[call.model]
    with tuning.override(ENGINE.name, call.config):
        compiled, kernels = aot.kernels_for_h200(capfd, partial(layer, shape), *abstract_arguments(shape, call.tokens))
    (kernel,) = kernels
    assert_sound(kernel, call.config, Tile.of(MXFP4).bytes)
    # Rows twice, what is between the products, and what is to be added up; of no expert's weights a copy.
    assignments = call.tokens * shape.method.top_k
    rows = assignments + 16 * min(assignments, shape.num_experts)
    bytes_ = 2 * 2 * shape.hidden_size + 2 * shape.intermediate_size + 4 * call.config.split_k * shape.hidden_size
    assert temporary_bytes(compiled) < rows * bytes_


ROUNDED_STACK = 16  # bytes of a thread, of kernels with a scale for each row beside large accumulators
ROUNDED = [  # weights, inputs, tokens, hidden and intermediate size
    pytest.param("mxfp4", "mxfp8", 1, 288, 352, id="mxfp4-mxfp8-few"),
    pytest.param("nvfp4", "nvfp4", 64, 512, 640, id="nvfp4-nvfp4", marks=pytest.mark.slow),
    pytest.param("mxfp4", "mxfp4", 4096, 512, 640, id="mxfp4-mxfp4-large", marks=pytest.mark.slow),
    pytest.param("fp8_block", "fp8_block_ue8m0", 64, 512, 640, id="fp8_block-ue8m0", marks=pytest.mark.slow),
    pytest.param("int4_g128", "fp8_static", 16, 512, 640, id="int4-fp8_static", marks=pytest.mark.slow),
    pytest.param("int4_g128", "fp8_token", 4096, 512, 640, id="int4-fp8_token-large"),
    pytest.param("int8_channel", "int8_token", 1, 512, 640, id="int8-int8_token-few", marks=pytest.mark.slow),
    pytest.param("int8_channel", "int8_token", 4096, 512, 640, id="int8-int8_token-large", marks=pytest.mark.slow),
    pytest.param("int4_g64_order", "int8_token", 64, 512, 640, id="order-int8_token", marks=pytest.mark.slow),
    pytest.param("mxint4", "mxfp8", 256, 512, 640, id="mxint4-mxfp8", marks=pytest.mark.slow),
    pytest.param("mxfp8", "mxfp8", 4096, 288, 352, id="mxfp8-mxfp8-large"),
]


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize(("format", "input_format", "tokens", "hidden", "intermediate"), ROUNDED)
def test_rounded_inputs_compile_into_sound_kernels(format, input_format, tokens, hidden, intermediate, capfd):
    def make(key: jax.Array) -> Experts:
        experts = Experts.random(key, 8, hidden, intermediate, gate_up_order="interleaved", format=FORMATS[format])
        scales = (jnp.float32(0.01), jnp.float32(0.02)) if INPUT_FORMATS[input_format].static else ()
        return experts.with_inputs(input_format, *scales).prepare(LAYOUT.name)

    def call(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
        return jmx.moe(x, Routing(ids, weights), experts, activation="swiglu", backend=ENGINE.name)

    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    experts = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    _, kernels = aot.kernels_for_h200(capfd, call, x, ids, weights, experts)
    config = ENGINE.heuristic(jmx.Problem.of(x, 2, experts, "swiglu"), H200)
    products = [kernel for kernel in kernels if "HGMMA" in kernel.sass or "HMMA" in kernel.sass]
    few = tokens < 4096  # h is rounded in the launch of both products
    assert len(products) == (1 if few else 2)
    for kernel in products:
        num_products, max_stack = (2, 0) if few else (1, ROUNDED_STACK)
        assert_sound(kernel, config, Tile.of(FORMATS[format]).bytes, num_products=num_products, max_stack=max_stack)


GRADIENTS = [  # weights, tokens, gate
    pytest.param("mxfp4", 64, "interleaved", id="mxfp4-few"),
    pytest.param("mxfp4", 4096, "interleaved", id="mxfp4-large"),
    pytest.param("nvfp4", 256, None, id="nvfp4", marks=pytest.mark.slow),
    pytest.param("mxint4", 4096, "interleaved", id="mxint4-large", marks=pytest.mark.slow),
    pytest.param("int4_g32_asym", 4096, "interleaved", id="int4_g32_asym-large", marks=pytest.mark.slow),
    pytest.param("int4_g64_order", 64, "concatenated", id="int4_g64_order", marks=pytest.mark.slow),
    pytest.param("int8_g64_asym", 4096, "interleaved", id="int8_g64_asym-large", marks=pytest.mark.slow),
    pytest.param("fp8_block", 4096, "interleaved", id="fp8_block-large", marks=pytest.mark.slow),
    pytest.param("fp8_channel", 64, None, id="fp8_channel", marks=pytest.mark.slow),
    pytest.param("mxfp8", 4096, "interleaved", id="mxfp8-large", marks=pytest.mark.slow),
]


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize("save", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["again", "saved"])
@pytest.mark.parametrize(("format", "tokens", "order"), GRADIENTS)
def test_gradients_compile_into_sound_kernels(format, tokens, order, save, capfd):
    """Both weights transposed, and one as it is; with h saved both as they are, one of them in the forward pass."""

    def make(key: jax.Array) -> Experts:
        width = 704 if save else 640  # other kernels, since each has one report
        return Experts.random(key, 8, 512, width, gate_up_order=order, format=FORMATS[format]).prepare(LAYOUT.name)

    def call(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts, dy: jax.Array) -> Any:
        def layer(x: jax.Array, weights: jax.Array) -> jax.Array:
            activation = "relu2" if order is None else "swiglu"
            options = {"activation": activation, "backend": ENGINE.name, "save_gate_up": save}
            return jmx.moe(x, Routing(ids, weights), experts, **options)

        if save:
            y, vjp = jax.vjp(layer, x, weights)
            return y, vjp(dy)
        return jax.vjp(layer, x, weights)[1](dy)

    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    experts = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    _, kernels = aot.kernels_for_h200(capfd, call, x, ids, weights, experts, x)
    tile_bytes = Tile.of(FORMATS[format]).bytes
    config = backward_config(tile_bytes, 2 * tokens, 8)
    transposed = [kernel for kernel in kernels if "mosaic_transposed" in kernel.report]
    assert (len(transposed), len(kernels)) == (2, 4 if save else 3)
    for kernel in transposed:
        assert_sound(kernel, config, tile_bytes, num_products=1)
        assert "MOVM" in kernel.sass


ADAPTERS = [  # weights, tokens, gate, rank
    pytest.param("mxfp4", 4096, "interleaved", 16, id="mxfp4-large"),
    pytest.param("int8_channel", 64, None, 40, id="int8_channel-few"),
    pytest.param("mxfp4", 4, "interleaved", 3, id="mxfp4-four-tokens", marks=pytest.mark.slow),
    pytest.param("nvfp4", 4096, "concatenated", 64, id="nvfp4-large", marks=pytest.mark.slow),
]


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize(("format", "tokens", "order", "rank"), ADAPTERS)
def test_adapters_are_added_in_the_epilogue_of_a_sound_kernel(format, tokens, order, rank, capfd):
    """It has no more products than the weights' and theirs, and writes the activation of the sum alone."""

    def make(key: jax.Array) -> tuple[Experts, Any]:
        experts = Experts.random(key, 8, 512, 576, gate_up_order=order, format=FORMATS[format]).prepare(LAYOUT.name)
        return experts, lora.LoRA(rank, 2 * rank, dtype=jnp.bfloat16).random(key, experts)

    def call(x: jax.Array, ids: jax.Array, weights: jax.Array, its: tuple[Experts, Any]) -> jax.Array:
        activation = "relu2" if order is None else "swiglu"
        return jmx.moe(x, Routing(ids, weights), its[0], activation=activation, adapters=its[1], backend=ENGINE.name)

    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    its = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    _, kernels = aot.kernels_for_h200(capfd, call, x, ids, weights, its)
    config = ENGINE.heuristic(jmx.Problem.of(x, 2, its[0], "relu2" if order is None else "swiglu"), H200)
    products = []
    for kernel in kernels:
        most = 16 if rank > 32 else 0  # bytes of registers that are stored
        assert_sound(kernel, config, Tile.of(FORMATS[format]).bytes, num_products=1, max_stack=most)
        products.append(sum(each.opcode.startswith("HMMA") for each in parse(kernel.sass)))
    adds = sum(width // 8 for width in config.widths) * -(-rank // 16)
    assert products[0] - products[1] == adds or config.split_k > 1, (products, adds)


def assert_sound(
    kernel: aot.Kernel, config: Config, tile_bytes: int, num_products: int = 2, max_stack: int = 0
) -> None:
    (stack,) = re.findall(r"(\d+) bytes stack frame", kernel.report)
    assert int(stack) <= max_stack, kernel.report
    assert "wgmma" not in kernel.report, kernel.report  # C7510 and similar: products that were serialized
    assert kernel.shared_memory <= config.shared_memory(tile_bytes) <= SHARED_MEMORY
    program = parse(kernel.sass)
    assert (
        sum(instruction.opcode.startswith(("HGMMA", "HMMA")) for instruction in program)
        >= 4 * num_products * config.k_tiles
    )
    assert hazards(program) == []
    assert_stages_are_released_late(kernel, config)
    assert_registers(kernel, config)


@pytest.mark.aot
@pytest.mark.parametrize("form", ["forward", "views"])
def test_one_token_takes_memory_that_does_not_grow_with_experts(form):
    few, many = (abstract_step(1, num_experts, 256, LAYOUT.name, form) for num_experts in (8, 128))
    few, many = (temporary_bytes(aot.compile_for_h200(step, *arguments)) for step, arguments in (few, many))
    assert many - few < 1024  # bits for experts


@pytest.mark.aot
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_layers_are_launched_as_one_cuda_graph(num_tokens, tmp_path):
    """The kernels are part of it, so a step costs the host one launch."""
    shape = MODELS["gpt-oss-20b"]
    x, ids, weights, experts = abstract_arguments(shape, num_tokens)

    def layers(x, ids, weights, many):
        for experts in many:
            x += layer(shape, x, ids, weights, experts)
        return x

    (graph,) = aot.launches_on_h200(tmp_path, layers, x, ids, weights, [experts] * 2)
    assert graph[0] == "kCommandBuffer"
    assert graph.count("kCustomCall") == 2
