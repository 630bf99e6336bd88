"""The wire format of tokens: received tokens round to the codes and scales that were sent, bit for bit."""

import re
from functools import partial
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jmx
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS, quantize
from jmx.parallel import wire
from jmx.parallel.division import Division
from jmx.parallel.exchange import Call
from jmx.parallel.wire import Wire

E, T, K = 8, 32, 3


def bits_of(array: Any) -> np.ndarray:
    return np.asarray(lax.bitcast_convert_type(array, jnp.uint16 if array.dtype.itemsize == 2 else jnp.uint8))


def rows_of(rng: np.random.Generator, num_rows: int, size: int, dtype: Any) -> jax.Array:
    """Rows of any bits, of magnitudes near each other anywhere, of subnormals, of one value, zeros, NaN, infinity."""
    near = 900 if dtype == jnp.bfloat16 else 9000
    shape = num_rows, size
    spread = np.concatenate([np.full(num_rows // 4, width) for width in (near, near // 4, 40, 1)])[:, None]
    most = rng.integers(0, 1 << 15, (num_rows, 1))
    most[::3] = rng.integers(0, 1200, most[::3].shape)
    magnitudes = np.clip(most - rng.integers(0, spread, shape), 0, 0x7FFF)
    bits = magnitudes | rng.integers(0, 2, shape) << 15
    bits[: num_rows // 8] = rng.integers(0, 1 << 16, bits[: num_rows // 8].shape)
    bits[-4:] = np.array([0, 1 << 15, 1, (1 << 15) + 1])[:, None]
    return lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint16), dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("format", "size"),
    [*((name, 288) for name in wire.FORMATS), ("fp8_token", 33), ("fp8_block", 129), ("fp8_block_ue8m0", 31)],
)
def test_received_tokens_round_to_the_codes_that_were_sent(
    format: str, size: int, dtype: str, rng: np.random.Generator
) -> None:
    its = Wire(INPUT_FORMATS[format], size)
    x = rows_of(rng, 400, size, jnp.dtype(dtype))
    buffer = jax.jit(its.encode)(x)
    assert buffer.nbytes == 400 * its.token_bytes
    received = jax.jit(partial(its.decode, dtype=x.dtype))(buffer)
    assert received.dtype == x.dtype
    for sent, got in zip(quantize(x, its.format)[:2], quantize(received, its.format)[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(sent).view(np.uint8))
    assert (bits_of(received) != bits_of(x)).any()
    again = its.decode(its.encode(received), x.dtype)
    np.testing.assert_array_equal(bits_of(again), bits_of(received))


def test_which_tokens_are_coded() -> None:
    """Of 16 bits, of formats whose scales the tokens have, and enough of them."""
    least = -(-wire.LEAST_SAVED // (2880 - 2))
    its = Wire.of(least, 2880, 2, "fp8_token")
    assert its is not None
    assert its.token_bytes == 2880 + 2
    assert Wire.of(least - 1, 2880, 2, "fp8_token") is None
    blocks = Wire.of(8192, 2880, 2, "mxfp8")
    assert blocks is not None
    assert blocks.token_bytes == 2880 + 2 * 90
    for format, itemsize in [(None, 2), ("fp8_static", 2), ("int8_token", 2), ("nvfp4", 2), ("fp8_token", 4)]:
        assert Wire.of(8192, 2880, itemsize, format) is None


def test_bytes_and_what_explain_states() -> None:
    def division(num_tokens: int, weights_on: str = "output") -> Division:
        shape = (num_tokens, 2880, 2880, 128, 4, "bfloat16", "fp8_block", jmx.SiLUAndMul(), "concatenated", False)
        problem = jmx.Problem(*shape, "packed", weights_on=weights_on, input_format="fp8_token")
        return Division.of(problem, jmx.Split(expert="ep", tokens="ep", exchange="gather"), {"ep": 2})

    its = division(2 * 8192)
    assert (its.bytes_before, its.bytes_after) == (8192 * (2882 + 32), 8192 * 5760)
    assert its.as_dict()["wire"] == "fp8_token"
    assert "x goes as fp8_token, 2882 of 5760 bytes a token" in map(str, its.lines())
    for plain in (division(2 * 64), division(2 * 8192, "input")):
        assert plain.as_dict()["wire"] == "bfloat16"
        assert "x goes in bfloat16" in map(str, plain.lines())
        assert plain.bytes_before == plain.num_tokens * (5760 + 32)


def layer(x: Any, logits: Any, experts: Any, format: str, split: jmx.Split | None) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", input_format=format, split=split)


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("peer_by_collectives")
@pytest.mark.parametrize(("exchange", "chunks"), [*((name, 1) for name in jmx.parallel.EXCHANGES), ("peer", 3)])
@pytest.mark.parametrize("format", wire.FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_and_gradients_have_the_bits_of_tokens_sent_as_they_are(
    dtype: str, format: str, exchange: str, chunks: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    experts = jmx.Experts.random(jax.random.key(0), E, 128, 128, gate_up_order="interleaved", bias=True)
    x = jnp.asarray(rng.normal(size=(T, 128)) * np.exp(rng.normal(size=(T, 1))), dtype).at[3].set(0)
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32)
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange, chunks=chunks, mesh=mesh)

    def run(least: int) -> tuple[Any, str]:
        monkeypatch.setattr(wire, "LEAST_SAVED", least)
        jax.clear_caches()  # the constant is no argument of what was compiled

        def loss(x: Any, logits: Any) -> tuple[jax.Array, jax.Array]:
            y = layer(x, logits, experts, format, split)
            return (y * jnp.sin(jnp.arange(y.size)).reshape(y.shape)).sum(dtype=jnp.float32), y

        compiled = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(x, logits).compile()
        return compiled(x, logits), compiled.as_text() or ""

    (coded, program), (plain, plain_program) = run(1), run(1 << 40)
    for got, expected in zip(jax.tree.leaves(coded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(*(np.atleast_1d(its).view(np.uint8) for its in (got, expected)))
    columns = Wire(INPUT_FORMATS[format], 128).token_bytes // 2
    columns += 0 if exchange.startswith("peer") else 4 * K  # ids and weights, which the others pack with a token
    moved = rf"u16\[(?:\d+,)*{columns}(?:,\d+)*\][^\n]* (?:all-gather|all-to-all)"
    if jax.default_backend() == "cpu":  # on GPUs `peer` has kernels of its own
        assert re.search(moved, program)
    assert not re.search(moved, plain_program)


def test_calls_know_their_wire() -> None:
    call = Call(("ep",), 2, 8192, 4, 2880, 2, True, 128, 64, input_format="mxfp8")
    assert call.wire == Wire(INPUT_FORMATS["mxfp8"], 2880)
    assert call.token_bytes == 2880 + 180 + 32
    assert call.result_bytes == 5760


@pytest.mark.aot
@pytest.mark.parametrize("exchange", ["gather", "rows"])
@pytest.mark.parametrize(
    ("format", "input_format"), [("fp8_channel", "fp8_token"), ("fp8_block", "fp8_block"), ("mxfp4", "fp8_token")]
)
def test_codes_go_over_the_links_when_compiled_for_two_gpus(
    format: str, input_format: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels for FP8: codes, magnitudes, and logits or routing, in one collective, and no other."""
    monkeypatch.setattr(wire, "LEAST_SAVED", 1)
    jax.clear_caches()
    mesh = aot.mesh_of("h200", 2)
    (axis,) = mesh.axis_names
    split = jmx.Split(expert=axis, tokens=axis, exchange=exchange, mesh=mesh)

    def make(key: jax.Array) -> jmx.Experts:
        experts = jmx.Experts.random(key, E, 512, 256, gate_up_order="interleaved", format=FORMATS[format])
        return experts.with_inputs(input_format).prepare("mosaic_sm90_fp8")

    def call(x: Any, logits: Any, experts: Any) -> jax.Array:
        routing = jmx.Logits(logits, jmx.TopKSoftmax(2))
        return jmx.moe(x, routing, experts, activation="swiglu", backend="mosaic_fp8", split=split)

    experts = jax.eval_shape(make, jax.random.key(0))
    text = aot.program_over(mesh, call, jnp.zeros((128, 512), jnp.bfloat16), jnp.zeros((128, E)), experts)
    kinds = r"all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute"
    operand = r"\(\(\w+\[[\d,]*\]\S*\), "  # in front of the result of what XLA starts
    found = re.findall(rf"= (?:{operand})?(\w+\[[\d,]*\])\S* ({kinds})(?:-start)?\(", text)
    routed = 4 * E if exchange == "gather" else 2 * 8  # bytes of a token's logits, or of its ids and weights
    there = Wire(INPUT_FORMATS[input_format], 512).token_bytes + routed
    kind, rows, back = ("all-gather", 128, 64) if exchange == "gather" else ("all-to-all", 128, 128)
    assert [*found] == [
        (f"u16[{rows},{there // 2}]", kind),
        (f"bf16[{back},512]", "reduce-scatter" if exchange == "gather" else kind),
    ]
    jax.clear_caches()
