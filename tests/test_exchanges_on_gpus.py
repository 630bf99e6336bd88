"""Every exchange over every mesh of the GPUs of a host: values, gradients, and the same bits however late a GPU is.

`JMX_TEST_CALLS` is the number of calls with random delays, 1000 by default.
"""

import contextlib
import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.ffi.peer import collectives
from jmx.parallel import arriving, needed, peer

E, H, T, K = 16, 384, 8, 4  # T tokens a device
AXES = "dp", "ep"


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", split=split)


def loss(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    y = layer(x, logits, experts, split).astype(jnp.float32)
    return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()


def calls_with_delays(x: Any, logits: Any, experts: Any, y: Any, delays: Any, split: jmx.Split) -> jax.Array:
    """Of one device: how many of its calls did not give the bits of y. Each is preceded by so many products."""

    def step(wrong: jax.Array, delay: jax.Array) -> tuple[jax.Array, None]:
        waste = lax.fori_loop(0, delay[lax.axis_index(AXES)], lambda _, a: jnp.tanh(a @ a), jnp.ones((256, 256)))
        got = layer(x + (waste[0, 0] * 0).astype(x.dtype), logits, experts, split)
        return wrong + jnp.any(got.view(jnp.uint16) != y.view(jnp.uint16)), None

    return lax.scan(step, jnp.zeros((), jnp.int32), delays)[0][None]


def poison(devices: Any) -> None:
    """Leaves NaN in memory that the next programs of the devices get."""
    ones = jnp.full(1 << 24, jnp.nan, jnp.float32)
    jax.block_until_ready([jax.device_put(ones, device) + 1 for device in devices for _ in range(4)])


class Battery:
    """The programs of every exchange over one mesh, which compile side by side.

    Args:
        sizes: of the mesh axes.
        exchanges: with the numbers of chunks; "peer_arrays" is `peer` from array to array, "peer_needed" likewise, but
            of rows that are needed, and of "peer_arriving" copy engines send tokens.
        num_calls: with delays.
    """

    def __init__(self, sizes: tuple[int, int], exchanges: list[tuple[str, int]], num_calls: int):
        mesh = jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 2, devices=jax.devices()[: sizes[0] * sizes[1]])
        self.mesh, rows = mesh, NamedSharding(mesh, P(AXES))
        x = jax.random.normal(jax.random.key(1), (mesh.size * T, H), jnp.bfloat16)
        logits = jax.random.normal(jax.random.key(2), (mesh.size * T, E))
        # In the layout of a backend whose rows are summed as they are sent.
        experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved").prepare("mosaic_sm90")
        self.expected = jax.jit(layer)(x, logits, experts)
        self.expected_gradients = jax.jit(jax.grad(loss, (0, 1)))(x, logits, experts)
        by_expert = jax.device_put(experts, NamedSharding(mesh, P("ep")))
        self.arguments = (*jax.device_put((x, logits), rows), by_expert)
        self.delays = jax.random.randint(jax.random.key(3), (num_calls, mesh.size), 0, 20)
        specs = P(AXES), P(AXES), P("ep"), P(AXES), P()
        y = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        self.programs: dict[str, list[Any]] = {}
        with ThreadPoolExecutor() as pool:
            for exchange, chunks in exchanges:
                name = exchange if exchange == "peer_lines" else exchange.partition("_")[0]
                split = jmx.Split(expert="ep", tokens=AXES, exchange=name, chunks=chunks, mesh=mesh)
                body = partial(calls_with_delays, split=dataclasses.replace(split, mesh=None))
                late = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(AXES), check_vma=False)
                with contextlib.ExitStack() as stack:
                    if exchange == "peer_arrays":
                        stack.enter_context(mock.patch.object(collectives, "LEAST_ARRAY_BYTES", 0))
                    if exchange == "peer_needed":
                        stack.enter_context(mock.patch.object(needed, "LEAST_BYTES", 0))
                        stack.enter_context(mock.patch.object(needed, "MOST_SHARE", 1.0))
                    if exchange == "peer_arriving":
                        stack.enter_context(mock.patch.object(arriving, "LEAST_BYTES", 0))
                        stack.enter_context(mock.patch.object(arriving, "MOST_RANKS", peer.MOST_RANKS))
                    jax.clear_caches()
                    lowered = [
                        jax.jit(partial(layer, split=split)).lower(*self.arguments),
                        jax.jit(jax.grad(partial(loss, split=split), (0, 1))).lower(*self.arguments),
                        jax.jit(late).lower(*self.arguments, y, self.delays),
                    ]
                texts = [its.as_text() for its in (lowered[0], lowered[2])]
                if exchange == "peer_needed" and sizes[1] > 1:
                    assert all("jmx_peer_gather_needed" in text for text in texts)
                if exchange == "peer_arriving" and sizes[1] > 1:
                    assert all(f"jmx_peer_{its}" in text for text in texts for its in ("start", "finish"))
                if name == "peer" and chunks == 1 and sizes[1] > 1:
                    assert all("jmx_peer_scatter_terms" in text for text in texts)
                self.programs[f"{exchange} in {chunks}"] = [pool.submit(its.compile) for its in lowered]

    def check(self) -> None:
        """Runs all of them."""
        for name, futures in self.programs.items():
            call, gradients, late = (its.result() for its in futures)
            poison(self.mesh.devices.flat)
            y = call(*self.arguments)
            assert relative_error(y, self.expected) <= 2e-2, name
            for got, wanted in zip(gradients(*self.arguments), self.expected_gradients, strict=True):
                assert relative_error(got, wanted) <= 4e-2, name
            poison(self.mesh.devices.flat)
            y = jax.device_put(y, self.arguments[0].sharding)
            np.testing.assert_array_equal(late(*self.arguments, y, self.delays), 0, err_msg=name)


def battery(shape: str) -> Battery | None:
    """Over all devices; None if they have no such mesh."""
    count = jax.device_count()
    if shape == "2xN/2" and (count % 2 or count < 4):
        return None
    sizes = {"1xN": (1, count), "2xN/2": (2, count // 2), "Nx1": (count, 1)}[shape]
    exchanges = [("gather", 1), ("rows", 1)]
    if not peer.fault(2):
        exchanges += [("peer", 1), ("peer_lines", 1), ("peer_arrays", 1)]
        exchanges += [("peer", 3), ("peer_needed", 1), ("peer_needed", 3), ("peer_arriving", 1)]
    return Battery(sizes, exchanges, int(os.environ.get("JMX_TEST_CALLS", "1000")))


@pytest.mark.gpu
@pytest.mark.devices(2)
@pytest.mark.parametrize("shape", ["1xN", "2xN/2", "Nx1"])
def test_every_exchange(shape: str) -> None:
    its = battery(shape)
    if its is None:
        pytest.skip("needs an even number of devices, of 4 and more")
    its.check()
