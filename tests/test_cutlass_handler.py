"""The arrays that the handler `jmx_cutlass_moe` takes: its checks, compiled for a CPU without the kernels."""

import ctypes
import shutil
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ffi_calls import Call, assert_every_element_type, assert_every_size, assert_right, run

from jmx import Experts
from jmx.ffi.cutlass import build as cutlass_build
from jmx.ffi.cutlass import library as cutlass_library
from jmx.ffi.cutlass import source
from jmx.ffi.cutlass.layout import LAYOUT

pytestmark = [
    pytest.mark.usefixtures("on_cpu", "checks"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """The checks behind a handler for CPUs, by the name that errors have."""
    library = tmp_path_factory.mktemp("checks") / "check_cutlass.so"
    folders = [f"-I{folder}" for folder in (source.FOLDER, source.SHARED)]
    command = ["g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *folders]
    checked = f"{__file__[: __file__.rindex('/')]}/check_cutlass.cc"
    # The headers of `jmx build cutlass`: with the oldest jax, `make test-oldest` shows that it takes their API version.
    subprocess.run([*command, "-isystem", cutlass_build._find_jax_headers(), "-o", library, checked], check=True)
    handler = ctypes.CDLL(str(library)).check_cutlass
    jax.ffi.register_ffi_target(cutlass_library.TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def made(gated, stacked, bias):
    """A call on 5 tokens of H = 96 and I = 160, which are padded to 128 and 256."""
    lead, halves = (2, 3) if stacked else (3,), 2 if gated else 1
    arrays = {
        "x": np.ones((5, 96), ml_dtypes.bfloat16),
        "expert_ids": np.ones((5, 2), np.int32),
        "weights": np.ones((5, 2), np.float32),
        "gate_up": np.ones((*lead, halves * 256, 64), np.uint8),
        "gate_up_scales": np.ones((*lead, halves * 4, 1, 16, 16), np.uint8),
        "gate_up_bias": np.ones((*lead, halves * 160) if bias else 0, np.float32),
        "down": np.ones((*lead, 128, 128), np.uint8),
        "down_scales": np.ones((*lead, 2, 2, 16, 16), np.uint8),
        "down_bias": np.ones((*lead, 96) if bias else 0, np.float32),
        "layer": np.ones(1 if stacked else 0, np.int32),
    }
    results = {"y": jax.ShapeDtypeStruct((5, 96), jnp.bfloat16), "workspace": jax.ShapeDtypeStruct((64,), jnp.uint8)}
    attributes = {"intermediate_size": np.int64(160), "gated": gated}
    nothing = [np.zeros((0, 96)), np.zeros(0)]  # is compared of results
    takes = {"x": [np.float16], "y": [np.float16, np.float32]}
    free = {("workspace", 0)}
    return Call(
        cutlass_library.TARGET, arrays, results, attributes, nothing, takes, free, {"gate_up_bias": "down_bias"}
    )


CALLS = {
    "gated": made(gated=True, stacked=False, bias=True),
    "stacked": made(gated=False, stacked=True, bias=False),
}
PLACES = [(call, name) for call, made in CALLS.items() for name in (*made.arrays, *made.results)]

PLACES_OF_KNOWN_SIZE = [place for place in PLACES if "workspace" not in place]  # whose size FlashInfer's runner settles


@pytest.mark.parametrize("call", CALLS)
def test_weights_have_the_shapes_of_the_layout(call):
    def prepared():
        order = "concatenated" if call == "gated" else None
        layers = [Experts.random(jax.random.key(0), 3, 96, 160, gate_up_order=order) for _ in range(2)]
        return (layers[0] if call == "gated" else Experts.stack(layers)).prepare(LAYOUT.name)

    experts, arrays = jax.eval_shape(prepared), CALLS[call].arrays
    for role in ("gate_up", "down"):
        held = getattr(experts, role)
        assert (held.values.shape, held.scales.shape) == (arrays[role].shape, arrays[f"{role}_scales"].shape)


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_right(call):
    assert_right(CALLS[call], run(CALLS[call]))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_every_element_type_in_every_place(call, name):
    assert_every_element_type(CALLS[call], name)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("call", "name"), PLACES_OF_KNOWN_SIZE)
def test_every_place_with_wrong_sizes(call, name):
    assert_every_size(CALLS[call], name)


@pytest.mark.parametrize("bias_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_biases_of_one_type(bias_dtype):
    call = CALLS["gated"]
    biases = {name: call.arrays[name].astype(bias_dtype) for name in ("gate_up_bias", "down_bias")}
    run(call._replace(arrays=call.arrays | biases))


@pytest.mark.parametrize("size", [-8, 0, 4, 168, 264])
def test_a_wrong_intermediate_size(size):
    """Of padded weights of 256; 168 fits these, and not the biases."""
    call = CALLS["gated"]
    call = call._replace(attributes=call.attributes | {"intermediate_size": np.int64(size)})
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="gate_up_bias" if size == 168 else rf"`intermediate_size` \(={size}\)"
    ):
        run(call)
