"""Programs that take jmx's classes are written by `jax.export`, and do the same when they are read again."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType

import jmx
from jmx.lora import LoRA
from jmx.models.quantized_weights import QuantizedWeights
from jmx.numerics import quantization
from jmx.parallel import PlacedExperts, Placement
from jmx.util import pytrees

E, H, T = 4, 64, 5
FORMATS = ("mxfp4", "nvfp4", "int4_g32_order", "int4_g16_asym", "int8_channel", "fp8_block", "fp8_block_16x32")
METHODS = (
    jmx.TopKSoftmax(2),
    jmx.SoftmaxTopK(2, True),
    jmx.SigmoidTopK(1, False, 0.3),
    jmx.SqrtSoftplusTopK(2, True),
    jmx.GroupedTopK(2, 2, 1, "sigmoid", True, 1 / 3),
)


def reread(exported: export.Exported) -> export.Exported:
    return export.deserialize(exported.serialize())


def structure_again(tree: Any) -> Any:
    """The structure of a tree of arrays or shapes, written with a program that takes the tree, and read."""
    return reread(export.export(jax.jit(lambda its: jnp.zeros(())))(tree)).in_tree


def experts(format: str = "mxfp4") -> jmx.Experts:
    return jmx.Experts.random(jax.random.key(0), E, H, 64, gate_up_order="interleaved", format=format)


@pytest.mark.every_case
@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_every_format_are_read_as_they_were_written(format: str) -> None:
    its = jax.eval_shape(partial(experts, format))
    assert structure_again(its) == jax.tree.structure(((its,), {}))


@pytest.mark.every_case
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_logits_of_every_method_are_read_as_they_were_written(method: Any, rng: np.random.Generator) -> None:
    logits = jmx.Logits(jnp.asarray(rng.standard_normal((T, E)), jnp.float32), method)
    found = structure_again(logits)
    assert found == jax.tree.structure(((logits,), {}))
    again = jax.tree.unflatten(found, [logits.values])[0][0]
    assert again.method == method


def others() -> dict[str, Any]:
    whole = experts()
    placement = Placement.identity(E, 2, 2)
    slots = PlacedExperts.of(whole, placement)
    assert isinstance(slots.experts, jmx.Experts)
    matrix = quantization.random(jax.random.key(1), (32, 64), jmx.FORMATS["int8_g32"])
    return {
        "padded": whole.pad(128, 96),
        "inputs": whole.with_inputs("nvfp4", jnp.float32(0.5), jnp.float32(0.25)),
        "a layer of a stack": jmx.Experts.stack([whole, whole]).layer(1),
        "shards": jmx.ShardedExperts.of(whole, 2),
        "slots": slots,
        "slots of shards": PlacedExperts(jmx.ShardedExperts.of(slots.experts, 2), placement),
        "adapters": LoRA(rank=3, targets=("gate", "down")).random(jax.random.key(1), whole),
        "routing": jmx.Routing(jnp.zeros((T, 2), jnp.int32), jnp.ones((T, 2))),
        "a matrix": QuantizedWeights(matrix, jmx.FORMATS["int8_g32"]),
    }


def test_other_classes_are_read_as_they_were_written() -> None:
    trees = jax.eval_shape(others)
    assert structure_again(trees) == jax.tree.structure(((trees,), {}))


def test_a_layer_is_exported_with_its_experts_and_has_the_same_bits_again(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((T, H)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
    layer = jax.jit(partial(jmx.moe, activation="swiglu", backend="xla"))
    arguments = x, jmx.Logits(logits, jmx.TopKSoftmax(2)), experts()
    program = reread(export.export(layer)(*arguments))
    assert np.array_equal(program.call(*arguments), layer(*arguments))


def test_results_are_jmx_classes_again() -> None:
    shapes = jax.eval_shape(experts)
    program = reread(export.export(jax.jit(lambda its: its.pad(128, 96)))(shapes))
    assert program.out_tree == jax.tree.structure(jax.eval_shape(lambda its: its.pad(128, 96), shapes))


def test_a_method_of_a_user_is_an_error_that_says_what_to_do() -> None:
    logits = jmx.Logits(jnp.ones((T, E)), jmx.Custom(2, lambda its: (jnp.zeros((T, 2), jnp.int32), its[:, :2])))
    with pytest.raises(ValueError, match=r"`method` \(.*Custom.* must be one of .*TopKSoftmax.* to be serialized"):
        structure_again(logits)


def test_a_format_of_a_user_is_an_error() -> None:
    format = dataclasses.replace(jmx.FORMATS["mxfp4"], name="mine")
    its = dataclasses.replace(jax.eval_shape(experts), format=format)
    with pytest.raises(ValueError, match=r"`format` \(.*mine.*\) must be one of jmx.FORMATS"):
        structure_again(its)


def test_other_fields_are_an_error_that_names_them() -> None:
    @pytrees.register(data=["array"], static=["size"])
    @dataclasses.dataclass(frozen=True)
    class Changing:
        array: Any
        size: int

    written = export.export(jax.jit(lambda its: its.array))(Changing(jnp.ones(3), 2)).serialize()
    assert export.deserialize(written).in_tree == jax.tree.structure(((Changing(0, 2),), {}))
    other = bytes(written).replace(b'"size"', b'"kind"')
    with pytest.raises(ValueError, match=r"Changing has the fields \['kind'\], must be .* \['size'\]"):
        export.deserialize(bytearray(other))


def test_an_exported_program_for_a_gpu_takes_experts() -> None:
    h200 = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=h200)
    x = jax.ShapeDtypeStruct((T, H), jnp.bfloat16)
    logits = jmx.Logits(jax.ShapeDtypeStruct((T, E), jnp.float32), jmx.TopKSoftmax(2))
    shapes = jax.eval_shape(lambda: experts().prepare("mosaic_sm90"))
    with jax.sharding.use_abstract_mesh(mesh):
        layer = jax.jit(partial(jmx.moe, activation="swiglu"))
        program = reread(export.export(layer, platforms=["cuda"])(x, logits, shapes))
    assert "@mosaic_gpu_v2" in program.mlir_module()
    assert program.in_tree == jax.tree.structure(((x, logits, shapes), {}))
