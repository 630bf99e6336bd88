"""The kernels for Hopper's FP8 tensor cores compiled for an H200 that is not here: what they cost, by the compiler."""

import re
from typing import Any

import aot
import jax
import jax.numpy as jnp
import pytest
from registers import assert_stages_are_released_late
from sass import hazards, parse, register_limits

import jmx
from jmx import Environment, Experts
from jmx.backends import resolve_layout
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas.mosaic_sm90_fp8.backend import MosaicSm90Fp8
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT, unit_bytes
from jmx.selection import tuning
from jmx.selection.problem import Problem

MAX_SPILLED = 96  # bytes of a thread: addresses for the most part, once an item
ENGINE, H200 = MosaicSm90Fp8(), Environment.named("h200")
ACTIVATION = jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
CASES = [  # weights, inputs, tokens, hidden and intermediate size
    pytest.param("mxfp4", "fp8_token", 1, 288, 352, id="mxfp4-few"),
    pytest.param("fp8_block", "fp8_block", 4, 7168, 2048, id="fp8_block-few", marks=pytest.mark.slow),
    pytest.param("fp8_channel", "fp8_static", 4, 2880, 2880, id="fp8_channel-few", marks=pytest.mark.slow),
    pytest.param("mxfp4", "fp8_token", 8, 2048, 2048, id="mxfp4-shared"),
    pytest.param("fp8_channel", "fp8_static", 8, 2048, 2048, id="fp8_channel-shared", marks=pytest.mark.slow),
    pytest.param("mxfp4", "fp8_token", 16, 288, 352, id="mxfp4"),
    pytest.param("mxfp4", "fp8_token", 2048, 512, 640, id="mxfp4-large", marks=pytest.mark.slow),
    pytest.param("fp8_block", "fp8_block", 2048, 512, 640, id="fp8_block-large", marks=pytest.mark.slow),
    pytest.param("fp8_channel", "fp8_block", 2048, 768, 896, id="fp8_channel-fp8_block", marks=pytest.mark.slow),
    pytest.param("fp8_channel", "fp8_static", 2048, 576, 704, id="fp8_channel-large", marks=pytest.mark.slow),
    pytest.param("int4_g128", "int8_token", 16, 256, 384, id="int4_g128-int8"),
    pytest.param("int4_channel", "int8_token", 2048, 512, 640, id="int4_channel-int8-large", marks=pytest.mark.slow),
    pytest.param("int4_g128", "int8_token", 2048, 640, 768, id="int4_g128-int8-large", marks=pytest.mark.slow),
    pytest.param("int8_channel", "int8_token", 2048, 832, 960, id="int8_channel-int8-large", marks=pytest.mark.slow),
    pytest.param("int8_g128", "int8_token", 2048, 896, 1024, id="int8_g128-int8-large", marks=pytest.mark.slow),
    pytest.param("int4_channel", "fp8_token", 1, 288, 352, id="int4_channel-fp8-few", marks=pytest.mark.slow),
    pytest.param("int4_channel", "fp8_token", 2048, 640, 768, id="int4_channel-fp8-large", marks=pytest.mark.slow),
    pytest.param("int4_g128", "fp8_token", 2048, 768, 896, id="int4_g128-fp8-large", marks=pytest.mark.slow),
    pytest.param("int8_channel", "int8_token", 8, 2048, 2048, id="int8_channel-int8-shared", marks=pytest.mark.slow),
]


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize(("format", "input_format", "tokens", "hidden", "intermediate"), CASES)
def test_every_pair_compiles_into_sound_kernels(format, input_format, tokens, hidden, intermediate, capfd):
    static = INPUT_FORMATS[input_format].static

    def make(key: jax.Array) -> Experts:
        experts = Experts.random(key, 8, hidden, intermediate, gate_up_order="interleaved", format=FORMATS[format])
        scales = (jnp.float32(0.01), jnp.float32(0.02)) if static else ()
        return experts.with_inputs(input_format, *scales).prepare(LAYOUT.name)

    def layer(x: Any, ids: Any, weights: Any, experts: Experts) -> jax.Array:
        return jmx.moe(x, jmx.Routing(ids, weights), experts, activation=ACTIVATION, backend=ENGINE.name)

    experts = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    _, kernels = aot.kernels_for_h200(capfd, layer, x, ids, weights, experts)
    config = tuning.config(ENGINE, Problem.of(x, 2, experts, ACTIVATION), H200).config
    row_units = -(-max(hidden, intermediate) // 128)
    products = [kernel for kernel in kernels if re.search("[QI]GMMA", kernel.sass)]
    assert (len(products), len(kernels)) == ((1, 1) if config.fuse_quantize else (2, 4))  # else after a rounding each
    for kernel in kernels:
        assert "(C75" not in kernel.report, kernel.report  # C7510, C7519 and similar: products that were serialized
    for kernel in kernels:
        if kernel not in products or config.fuse_quantize:
            assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel.report
    for kernel in products:
        stored = int(re.findall(r"(\d+) bytes spill stores", kernel.report)[0])
        assert stored <= MAX_SPILLED, stored
        assert kernel.shared_memory <= config.shared_memory(unit_bytes(FORMATS[format]), row_units)
        program = parse(kernel.sass)
        assert hazards(program) == []
        limits = register_limits(program)
        assert all(used <= limit for limit, used in limits), limits
        assert max(limits)[0] == config.registers
        assert_stages_are_released_late(kernel, config, resident_rows=config.resident_rows)


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize(
    ("format", "input_format", "backend"),
    [("mxfp4", "fp8_token", ENGINE.name), ("int4_g64_order", None, "mosaic")],
)
@pytest.mark.parametrize("tokens", [2, 600])
def test_kernels_compute_in_32_bits_where_jax_has_64(tokens, format, input_format, backend):
    def layer(x: Any, logits: Any, experts: Experts) -> jax.Array:
        method = jmx.TopKSoftmax(2)
        return jmx.moe(x, jmx.Logits(logits, method), experts, activation=ACTIVATION, backend=backend)

    def make(key: jax.Array) -> Experts:
        experts = Experts.random(key, 8, 256, 384, gate_up_order="interleaved", format=FORMATS[format])
        experts = experts if input_format is None else experts.with_inputs(input_format)
        return experts.prepare(resolve_layout("auto", H200, FORMATS[format], input_format))

    experts = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    x, logits = (jax.ShapeDtypeStruct((tokens, n), dtype) for n, dtype in ((256, jnp.bfloat16), (8, jnp.float32)))
    with jax.enable_x64(True):
        compiled = aot.compile_for_h200(layer, x, logits, experts)
    assert compiled.out_info.dtype == jnp.bfloat16
