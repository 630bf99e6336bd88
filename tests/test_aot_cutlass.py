"""The backend `cutlass`, compiled for an H200 that is not there: what XLA is given, and how it launches it.

The kernels themselves are compiled by `jmx build`; without that these tests are skipped.
"""

import re

import aot
import jax
import jax.numpy as jnp
import pytest
from backend_cases import GPT_OSS

import jmx
from jmx.ffi.cutlass import library as cutlass_library
from jmx.ffi.cutlass.layout import LAYOUT

FOUND = cutlass_library.library()
pytestmark = [pytest.mark.aot, pytest.mark.skipif(FOUND.fault is not None, reason=str(FOUND.fault))]


def layers(number):
    """A program of `count` layers of gpt-oss-20b in sequence, and its arguments."""

    def function(x, logits, experts):
        routing = jmx.Logits(logits, jmx.TopKSoftmax(4))
        for i in range(number):
            x = jmx.moe(x, routing, experts.layer(i), activation=GPT_OSS, backend="cutlass")
        return x

    def stack(key):
        experts = jmx.Experts.random(key, 32, 2880, 2880, gate_up_order="interleaved")
        return jmx.Experts.stack([experts.prepare(LAYOUT.name)] * number)

    experts = jax.eval_shape(stack, jax.random.key(0))
    return function, (
        jax.ShapeDtypeStruct((16, 2880), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 32), jnp.float32),
        experts,
    )


def test_a_layer_is_one_call_on_arrays_as_they_are():
    """Nothing is padded, sliced from the stack or reordered for it; the workspace is all the memory that it needs."""
    function, arguments = layers(2)
    compiled = aot.compile_for_h200(function, *arguments)
    text = compiled.as_text()
    assert text is not None
    calls = re.findall(r'custom_call_target="jmx_cutlass_moe".*?operand_layout_constraints={(.*?})}', text)
    assert len(calls) == 2
    for operands in calls:
        assert [re.sub(r"{.*?}", "", shape) for shape in re.findall(r"\w+\[[\d,]*\](?:{[\d,]*})?", operands)] == [
            *("bf16[16,2880]", "s32[16,4]", "f32[16,4]"),
            *("u8[2,32,5888,1472]", "u8[2,32,92,23,16,16]", "bf16[2,32,5760]"),
            *("u8[2,32,2944,1472]", "u8[2,32,46,23,16,16]", "bf16[2,32,2880]", "s32[1]"),
        ]
    workspace = cutlass_library.workspace_bytes(16, 4, 32, 2944, 2944, True)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert workspace <= memory.temp_size_in_bytes <= workspace + 3 * 16 * 2880 * 2 + (1 << 16)


def test_layers_are_one_cuda_graph(tmp_path):
    function, arguments = layers(6)  # XLA makes no graph of few kernels
    (graph,) = aot.launches_on_h200(tmp_path, function, *arguments)
    assert graph[0] == "kCommandBuffer"
    assert graph.count("kCustomCall") == 6
    assert len(graph) <= 1 + 6 + 6 + 2, "routing takes more kernels than that"
