"""`gather` of two devices by collective-permutes: the same bits as by all-gather and reduce-scatter."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error
from test_summed import E, H, K, T, layer, loss, terms_of

import jmx
from jmx.parallel import pairs
from jmx.perf.shapes import MODELS
from jmx.xla.backend import Xla

pytestmark = pytest.mark.costly
NEVER = 1 << 60


@pytest.fixture(params=["sums", "terms"])
def of_results(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whether the reference gives its terms, which are summed for one device at a time."""
    if request.param == "terms":
        monkeypatch.setattr(Xla, "terms", terms_of, raising=False)
    yield request.param
    jax.clear_caches()


def compiled(monkeypatch: pytest.MonkeyPatch, least: int, function: Any, *arguments: Any) -> tuple[Any, str]:
    """Results of a function, and its program, with permutes from so many bytes on."""
    monkeypatch.setattr(pairs, "LEAST_BYTES", least)
    jax.clear_caches()  # the constant is no argument of what was compiled
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), program.as_text() or ""


def permutes(text: str) -> int:
    return len(re.findall(r" collective-permute(?:-start)?\(", text))


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.devices(4)
@pytest.mark.parametrize("names", ["ep", "dp"], ids=["experts", "shards"])
def test_the_same_bits_as_by_other_collectives(
    names: str, of_results: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Of two of four devices, where the others have tokens, too. Terms here are not summed as the reference does it."""
    dtype = jnp.bfloat16 if of_results == "sums" else jnp.float32
    x, logits = (jnp.asarray(rng.normal(size=(4 * T, width)), dtype) for width in (H, E))
    experts: Any = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias=True)
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    axes: Any = {"expert": "ep"} if names == "ep" else {"intermediate": "dp"}
    experts = experts if names == "ep" else jmx.ShardedExperts.of(experts, 2)
    split = jmx.Split(**axes, tokens=("dp", "ep"), exchange="gather", mesh=mesh)

    def every(x: Any, logits: Any) -> Any:
        masked = logits.at[::3].set(jnp.nan)  # such tokens get nothing from any expert
        mapped = jax.vmap(partial(layer, experts=experts, split=split))(jnp.stack([x, -x]), jnp.stack([logits, masked]))
        return layer(x, logits, experts, split), mapped, jax.grad(loss, (0, 1))(x, logits, experts, split)

    got, text = compiled(monkeypatch, 0, every, x, logits)
    expected, other = compiled(monkeypatch, NEVER, every, x, logits)
    assert permutes(text) >= 2 > permutes(other) == 0
    if of_results == "sums":
        assert_same(got, expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) <= 2e-6


@pytest.mark.devices(2)
def test_tokens_are_sent_as_codes(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr("jmx.parallel.wire.LEAST_SAVED", 0)
    x, logits = (jnp.asarray(rng.normal(size=(2 * T, width)), jnp.bfloat16) for width in (128, E))
    experts = jmx.Experts.random(jax.random.key(0), E, 128, 128, gate_up_order="interleaved", format="fp8_block")
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = jmx.Split(expert="ep", tokens="ep", exchange="gather", mesh=mesh)
    routing = jmx.TopKSoftmax(K)

    def call(x: Any, logits: Any) -> Any:
        its = jmx.Logits(logits, routing)
        return jmx.moe(x, its, experts, activation="swiglu", backend="xla", input_format="fp8_token", split=split)

    got, text = compiled(monkeypatch, 0, call, x, logits)
    assert re.search(rf"u16\[{T},\d+\][^\n]* collective-permute", text)
    assert_same(got, compiled(monkeypatch, NEVER, call, x, logits)[0])


@pytest.mark.devices(4)
@pytest.mark.parametrize(("devices", "chunks"), [(4, 1), (2, 2)], ids=["of four devices", "in chunks"])
def test_others_are_gathered(devices: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, logits = jnp.ones((4 * T, H)), jnp.ones((4 * T, E))
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved")
    mesh = jax.make_mesh((devices,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:devices])
    split = jmx.Split(expert="ep", tokens="ep", exchange="gather", chunks=chunks, mesh=mesh)
    assert permutes(compiled(monkeypatch, 0, partial(layer, experts=experts, split=split), x, logits)[1]) == 0


@pytest.mark.aot
def test_own_tokens_are_copied_and_summed_while_others_are_sent() -> None:
    """In the order in which XLA launches for two GPUs, of tokens that just reach the limit."""
    shape, mesh = MODELS["small"], aot.mesh_of("h200", 2)
    (axis,) = mesh.axis_names
    split = jmx.Split(expert=axis, tokens=axis, exchange="gather", mesh=mesh)
    tokens = -(-pairs.LEAST_BYTES // (2 * shape.hidden_size))

    def call(x: Any, logits: Any, experts: Any) -> jax.Array:
        return jmx.moe(x, jmx.Logits(logits, shape.method), experts, activation=shape.activation, split=split)

    experts = jax.eval_shape(lambda key: shape.experts(key).prepare("mosaic_sm90"), jax.random.key(0))
    sharding = NamedSharding(mesh, P(axis))
    x, logits = (
        jax.ShapeDtypeStruct((2 * tokens, width), dtype, sharding=sharding)
        for width, dtype in ((shape.hidden_size, jnp.bfloat16), (shape.num_experts, jnp.float32))
    )
    text = aot.program_over(mesh, call, x, logits, experts)
    entry = text[text.index("ENTRY ") :]
    sent = re.findall(rf"%([\w.-]+) = \(\(bf16\[{tokens},{shape.hidden_size}\][^\n]* collective-permute-start\(", entry)
    assert len(sent) == 2
    for start, work in zip(sent, (r"_pad_fusion", r"custom-call\("), strict=True):
        span = entry[entry.index(f"%{start} = ") : entry.index(f" collective-permute-done(%{start})")]
        assert re.search(work, span), span
