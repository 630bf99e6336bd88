"""What a profile calls the attention kernels for Hopper GPUs, and their stages."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jmx.pallas.attention.decode import flash_decode
from jmx.pallas.attention.latent_decode import flash_decode_latent
from jmx.pallas.attention.prefill import flash_prefill, flash_prefill_pages
from jmx.pallas.attention.write_pages import write_blocks, write_rows


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SINKS, POSITIONS, TABLES = array(16, dtype=jnp.float32), array(2, dtype=jnp.int32), array(2, 8, dtype=jnp.int32)
STEP, CACHE, PAGES = array(2, 16, 64), array(2, 2, 2, 1024, 64), array(2, 17, 2, 128, 64)
PROMPT, KEYS, BLOCKS = array(2, 256, 16, 64), array(2, 256, 2, 64), array(2, 128, 16, 64)
OF_STEP = {"prologue", "wait", "scores", "softmax", "weigh_values", "epilogue"}


def scopes(jaxpr: Any) -> set[str]:
    """The names of all equations, those within kernels included."""
    found = set()
    for equation in jaxpr.eqns:
        found.update(str(equation.source_info.name_stack).split("/"))
        for value in jax.tree.leaves([*equation.params.values()]):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= scopes(inner)
    return found


def pages_of_rows(query: Any, pages: Any, sinks: Any, positions: Any, tables: Any) -> jax.Array:
    return flash_decode(query, pages, sinks, positions, None, tables)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "arrays", "name", "stages"),
    [
        (
            partial(flash_decode, window=300),
            (STEP, CACHE, SINKS, POSITIONS),
            "flash_decode_group8_dim64_splits3_window300",
            {*OF_STEP, "load"},
        ),
        (
            pages_of_rows,
            (STEP, PAGES, SINKS, POSITIONS, TABLES),
            "flash_decode_group8_dim64_splits8_pages",
            {*OF_STEP, "load"},
        ),
        (
            partial(flash_decode_latent, rank=512, scale=0.1, core_count=132),
            (array(2, 16, 576), array(2, 1024, 576), POSITIONS),
            "flash_decode_latent_heads16_width576_rank512_splits16",
            {*OF_STEP, "producer", "acquire", "consumer"},
        ),
        (
            partial(flash_prefill, window=100, core_count=8),
            (PROMPT, KEYS, KEYS, SINKS),
            "flash_prefill_group8_dim64_value_dim64_stages4_window100_persistent",
            {*OF_STEP, "producer", "acquire", "consumer", "take_turns"},
        ),
        (
            partial(flash_prefill_pages, window=None),
            (BLOCKS, PAGES, TABLES, POSITIONS, SINKS),
            "flash_prefill_group8_dim64_value_dim64_stages4_pages",
            {*OF_STEP, "producer", "acquire", "consumer", "take_turns"},
        ),
        (write_rows, (PAGES, array(2, 2, 2, 64), POSITIONS, POSITIONS), "write_rows_heads2_dim64", {"load", "store"}),
        (write_blocks, (PAGES, array(2, 2, 128, 2, 64), POSITIONS), "write_blocks_page128_dim64", {"load", "store"}),
    ],
)
def test_a_profile_names_each_kernel_with_its_configuration_and_its_stages(call, arrays, name, stages) -> None:
    found = scopes(jax.make_jaxpr(call)(*arrays).jaxpr)
    assert {name, *stages} <= found, found
