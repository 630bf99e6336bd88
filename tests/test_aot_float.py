"""The kernels for float weights compiled for an H200 that is not here: what they cost, by their compiler's report."""

import re
from functools import partial

import aot
import jax
import jax.numpy as jnp
import pytest
from registers import assert_registers, assert_stages_are_released_late
from sass import hazards, is_wgmma, parse

import jmx
from jmx.pallas.float_sm90.blocks import Groups
from jmx.pallas.float_sm90.config import Config, FittedConfig, Launch
from jmx.pallas.float_sm90.outer import outer
from jmx.pallas.float_sm90.product import product
from jmx.pallas.sm90.config import SHARED_MEMORY
from jmx.training import MasterExperts

SIZES = [  # experts, outputs and inputs of a product
    pytest.param(32, 5760, 2880, id="gpt-oss-20b"),
    pytest.param(128, 1536, 2048, id="qwen3-30b-a3b", marks=pytest.mark.slow),
    pytest.param(4, 64, 128, id="small", marks=pytest.mark.slow),
]

MIXED = (("float32", jnp.bfloat16), ("float16", jnp.bfloat16), ("float16", jnp.float16))


def assert_sound(kernel: aot.Kernel, config: Config | FittedConfig, products: int) -> None:
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", kernel.report) == [("0", "0")], kernel.report
    assert "wgmma" not in kernel.report, kernel.report  # C7510 and similar: products that were serialized
    assert config.num_stages * config.stage_bytes <= kernel.shared_memory <= SHARED_MEMORY
    program = parse(kernel.sass)
    assert sum(map(is_wgmma, program)) == products
    assert hazards(program) == []
    assert_registers(kernel, config)
    assert_stages_are_released_late(kernel, config)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num_experts", "outputs", "inputs"), SIZES)
def test_a_product_and_its_gradients_compile_into_sound_kernels(num_experts, outputs, inputs, dtype, capfd):
    rows, d = (jax.ShapeDtypeStruct((1000, size), dtype) for size in (inputs, outputs))
    of_rows = partial(Launch.of_rows, 1000, num_experts, dtype=jnp.float32, num_cores=132)
    launches = {
        "float": of_rows(outputs),
        "float_transposed": of_rows(inputs),
        "float_outer": Launch.of_groups(num_experts, outputs, inputs, jnp.float32, 132),
    }
    weights = jax.ShapeDtypeStruct((num_experts, outputs, inputs), dtype)
    sizes = jax.ShapeDtypeStruct((num_experts,), jnp.int32)

    calls = {
        "float": (partial(product, transposed=False), (rows, weights)),
        "float_transposed": (partial(product, transposed=True), (d, weights)),
        "float_outer": (outer, (d, rows)),
    }
    for name, (call, operands) in calls.items():  # one at a time: reports of several kernels have an order of their own

        def run(operands, sizes, call=call, name=name):
            return call(*operands, Groups.of(sizes), launches[name])

        _, (kernel,) = aot.kernels_for_h200(capfd, run, operands, sizes)
        assert re.findall(r"function '(float\w*?)_block_n", kernel.report)[0] == name
        assert_sound(kernel, launches[name].config, 4)


@pytest.mark.costly
@pytest.mark.aot
def test_a_training_step_of_master_weights_multiplies_by_kernels():
    """Both products in one, then `gate_up` again, `down` transposed, and the gradients of both weights."""

    def loss(masters: MasterExperts, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        y = jmx.moe(x, jmx.Routing(ids, weights), masters, activation="swiglu")
        return jnp.square(y.astype(jnp.float32)).sum()

    key = jax.eval_shape(lambda: jax.random.key(0))
    masters = jax.eval_shape(lambda key: MasterExperts.random(key, 8, 128, 192, gate_up_order="interleaved"), key)
    x = jax.ShapeDtypeStruct((300, 128), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((300, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    compiled = aot.compile_for_h200(jax.value_and_grad(loss), masters, x, ids, weights)
    text = compiled.as_text()
    assert text is not None
    assert re.findall(r'custom_call_target="(\w+)"', text) == ["mosaic_gpu_v2"] * 5


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("bfloat16", jnp.bfloat16), *(pytest.param(f, d, marks=pytest.mark.slow) for f, d in MIXED)],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_training_step_of_float_experts_multiplies_by_kernels(format, dtype, stacked):
    """Both products, `down` transposed, and the gradients of both weights."""

    def loss(experts, x, ids, weights):
        experts = experts.layer(1) if stacked else experts
        y = jmx.moe(x, jmx.Routing(ids, weights), experts, activation="swiglu")
        return jnp.square(y.astype(jnp.float32)).sum()

    def experts():
        one = jmx.Experts.random(jax.random.key(0), 8, 128, 192, gate_up_order="interleaved", format=format)
        return jmx.Experts.stack([one, one]) if stacked else one

    x = jax.ShapeDtypeStruct((300, 128), dtype)
    ids, weights = (jax.ShapeDtypeStruct((300, 2), dtype) for dtype in (jnp.int32, jnp.float32))
    compiled = aot.compile_for_h200(jax.value_and_grad(loss), jax.eval_shape(experts), x, ids, weights)
    text = compiled.as_text()
    assert text is not None
    assert re.findall(r'custom_call_target="(\w+)"', text) == ["mosaic_gpu_v2"] * 5


@pytest.mark.costly
@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block_n", [192, pytest.param(144, marks=pytest.mark.slow)])
def test_products_in_fitted_blocks_compile_into_sound_kernels(block_n, transposed, dtype, capfd):
    config, (num_experts, outputs, inputs) = FittedConfig(block_n), (8, 320, 192)
    rows = jax.ShapeDtypeStruct((1000, outputs if transposed else inputs), dtype)
    weights = jax.ShapeDtypeStruct((num_experts, outputs, inputs), dtype)

    def run(rows, weights, sizes):
        return product(rows, weights, Groups.of(sizes), Launch(dtype, config, 132), transposed=transposed)

    sizes = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
    _, (kernel,) = aot.kernels_for_h200(capfd, run, rows, weights, sizes)
    assert_sound(kernel, config, 2 * 4 * len(config.widths))  # two halves of a warpgroup's weights, four a stage


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("outputs", "inputs"), [(5760, 2880), pytest.param(1536, 2048, marks=pytest.mark.slow)])
def test_gradients_of_weights_in_16_bits_compile_into_sound_kernels(outputs, inputs, dtype, capfd):
    launch = Launch.of_groups(8, outputs, inputs, dtype, 132)
    assert isinstance(launch.config, Config)
    assert launch.config.staged
    d, rows = (jax.ShapeDtypeStruct((1000, size), dtype) for size in (outputs, inputs))
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)

    def run(d, rows, sizes):
        return outer(d, rows, Groups.of(sizes), launch)

    _, (kernel,) = aot.kernels_for_h200(capfd, run, d, rows, sizes)
    assert_sound(kernel, launch.config, 4)
