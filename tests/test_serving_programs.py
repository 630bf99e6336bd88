"""The programs of the engine's steps, compiled for an H200 that is not there."""

import dataclasses
import pathlib
import re
from typing import Any

import aot
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from memory import temporary_bytes

import jmx
from jmx.checkpoint.model_configs.gpt_oss import PUBLISHED
from jmx.models import GptOss, Model, ModelSplit
from jmx.models.forward import Weights
from jmx.serving.engine.limits import Pools
from jmx.serving.engine.step import Inputs, decode_of, pass_of

ROWS, PAGE, PAGES = 8, 128, 256


def decode(pages_of: int = PAGES) -> tuple[Any, list[Any]]:
    """Four passes of two layers of gpt-oss-20b, and abstract arguments."""
    config = _two_layers()
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        model = nnx.eval_shape(
            lambda: GptOss(config, format=jmx.MXFP4, dtype=jnp.bfloat16, backend="mosaic", rngs=nnx.Rngs(0))
        )
        pages = [model.cache_layers(pages_of, PAGE)[number] for number in range(2)]
    weights, pools = Weights.of(model), Pools.of(model)
    inputs = Inputs.padding(ROWS, 0, PAGE, [16] * len(pools.windows), ROWS)
    given = [weights.arrays, pages, jax.ShapeDtypeStruct((ROWS,), jnp.int32), inputs]
    return decode_of(weights, pools.of_layer, 4), given


def _two_layers() -> Any:
    config = PUBLISHED["gpt-oss-20b"]
    return dataclasses.replace(config, num_hidden_layers=2, layer_types=config.layer_types[:2])


@pytest.mark.costly
@pytest.mark.aot
def test_each_of_several_passes_is_one_cuda_graph(tmp_path: pathlib.Path) -> None:
    function, given = decode()
    launches = aot.launches_on_h200(tmp_path, function, *given)
    assert any("kWhile" in launch for launch in launches)
    (graph,) = [launch for launch in launches if launch.count("kCustomCall") > 2]
    assert graph.count("kCommandBuffer") == 1
    assert graph.count("kCustomCall") == 4, (
        "attention and experts of each layer; rows are written by that of the products"
    )


@pytest.mark.costly
@pytest.mark.aot
def test_several_passes_copy_no_pages() -> None:
    few, many = (
        temporary_bytes(aot.compile_for_h200(jax.jit(function, donate_argnums=(1, 2)), *given))
        for function, given in map(decode, (64, 1024))
    )
    assert many - few < 1024


def over_two_groups(blocks: int) -> tuple[Model, Weights, list[Any]]:
    """Two layers of gpt-oss-20b over two H200s, each with requests of its own; and abstract arguments of a step."""
    split = ModelSplit.of(jax.sharding.Mesh(aot.mesh_of("h200", 2).devices, ("dp",)))
    config = _two_layers()
    with jax.sharding.use_abstract_mesh(split.mesh.abstract_mesh):
        model = nnx.eval_shape(
            lambda: GptOss(config, format=jmx.MXFP4, dtype=jnp.bfloat16, split=split, rngs=nnx.Rngs(0))
        )
        pages = [model.cache_layers(2 * PAGES, PAGE)[number] for number in range(2)]
    weights = Weights.of(model)
    arrays = [jax.ShapeDtypeStruct(its.shape, its.dtype, sharding=split.sharding()) for its in weights.arrays]
    inputs = Inputs.padding(ROWS, blocks, PAGE, [16] * len(Pools.of(model).windows), 2 * ROWS, 2)
    last = jax.ShapeDtypeStruct((2 * ROWS,), jnp.int32, sharding=split.sharding())
    return model, weights, [arrays, pages, last, inputs]


@pytest.mark.costly
@pytest.mark.aot
def test_groups_of_devices_move_nothing() -> None:
    """Rows and blocks of two groups, with the kernels for Hopper on each of two H200s."""
    model, weights, given = over_two_groups(2)
    with jax.sharding.use_abstract_mesh(model.split.mesh.abstract_mesh):
        function = jax.jit(pass_of(weights, Pools.of(model).of_layer), donate_argnums=1)
        text = function.lower(*given).compile().as_text() or ""
    for kernel in ("flash_decode", "flash_prefill", "write_rows", "write_blocks", "mosaic_block"):
        assert kernel in text
    assert not re.findall(r" (?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(", text)


@pytest.mark.costly
@pytest.mark.aot
def test_groups_of_devices_move_nothing_between_several_passes(tmp_path: pathlib.Path) -> None:
    """Each pass of the loop is one CUDA graph on each device; drawn tokens are exchanged after the last one."""
    model, weights, given = over_two_groups(0)
    with jax.sharding.use_abstract_mesh(model.split.mesh.abstract_mesh):
        function = jax.jit(decode_of(weights, Pools.of(model).of_layer, 4), donate_argnums=1)
        function.lower(*given).compile(compiler_options={"xla_dump_to": str(tmp_path)})
    launches = aot.launches(tmp_path)
    exchanges = [number for number, launch in enumerate(launches) if "kAllGather" in launch]
    loops = [number for number, launch in enumerate(launches) if "kWhile" in launch]
    assert len(loops) == 1
    assert exchanges
    assert min(exchanges) > loops[0]
    (graph,) = [launch for launch in launches if launch.count("kCustomCall") > 2]
    assert graph.count("kCommandBuffer") == 1
