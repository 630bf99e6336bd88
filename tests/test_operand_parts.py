"""Kernels of Mosaic over parts of larger arrays, which XLA hands them where they lie: at addresses less aligned."""

import re
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.backends import resolve_layout
from jmx.pallas.attention.prefill import flash_prefill_pages
from jmx.pallas.sm90.launch import ALIGNMENT

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 11, 192, 96, 5  # a row of x has 384 bytes, no multiple of ALIGNMENT


def parts_in_place(program: str | None) -> int:
    """How many operands of custom calls are parts of other arrays, in the text of a compiled program."""
    return sum("custom-call" in body for body in re.findall(r"%dynamic-slice-fusion.*?\n}", program or "", re.DOTALL))


@pytest.mark.aot
def test_tables_of_some_rows_are_copied() -> None:
    """Rows of 16 pages have 64 bytes."""

    def attend(query: Any, pages: Any, tables: Any, starts: Any, sinks: Any) -> jax.Array:
        return flash_prefill_pages(query, pages, tables[1:], starts[1:], sinks, None)

    def given(rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
        shapes = [((rows, 128, 4, 64), "bfloat16"), ((2, 40, 2, 128, 64), "bfloat16")]
        shapes += [((rows + 1, width), "int32"), ((rows + 1,), "int32"), ((4,), "float32")]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]

    assert parts_in_place(aot.compile_for_h200(attend, *given(8, 16)).as_text()) == 0
    assert parts_in_place(aot.compile_for_h200(attend, *given(8, ALIGNMENT // 4)).as_text()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp4", "int4_g32", "fp8_channel"])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_parts_give_what_their_copies_give(format: str, first: int, rng: np.random.Generator) -> None:
    """Of tokens, of routes, and of a stack of layers, by whichever backend is chosen."""

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    x = weights(first + TOKENS, HIDDEN)
    logits = jnp.asarray(rng.standard_normal((first + TOKENS, EXPERTS)), jnp.float32)
    layers = [
        jmx.Experts.quantize(
            weights(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            weights(EXPERTS, HIDDEN, INTERMEDIATE),
            weights(EXPERTS, 2 * INTERMEDIATE),
            weights(EXPERTS, HIDDEN),
            gate_up_order="concatenated",
            format=format,
        )
        for _ in range(2)
    ]

    def layer(x: jax.Array, logits: jax.Array, experts: jmx.Experts) -> jax.Array:
        routing = jmx.route(jmx.Logits(logits, jmx.TopKSoftmax(2)))
        return jmx.moe(x, routing, experts, activation="silu_and_mul")

    layout = resolve_layout("auto", jmx.Environment.probe(), jmx.FORMATS[format])
    stack = jmx.Experts.stack([its.prepare(layout) for its in layers])
    parts = jax.jit(lambda x, logits, stack: layer(x[first:], logits[first:], stack.layer(1)))(x, logits, stack)
    copies = jax.jit(layer)(jnp.array(x[first:]), jnp.array(logits[first:]), stack.layer(1))
    assert bool(jnp.isfinite(copies).all())
    np.testing.assert_array_equal(parts.astype(jnp.float32), copies.astype(jnp.float32))
