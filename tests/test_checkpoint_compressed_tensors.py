import contextlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from properties import examples

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, shards
from jmx.checkpoint.compressed_tensors import packing
from jmx.checkpoint.compressed_tensors.module import Module
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.numerics.formats import WHOLE_ROW

GOLDEN = Path(__file__).parent / "data" / "compressed_tensors"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
LAYER = "model.layers.0.mlp.experts"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

Tensors = dict[str, np.ndarray]


def read(file: Path) -> Tensors:
    return {name: np.array(tensor.view()) for name, tensor in shards.read_header(file).items()}


def write(directory: Path, arrays: Mapping[str, np.ndarray], config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    spelt = {dtype: name for name, dtype in shards.DTYPES.items()}
    outputs = [shards.Output(name, spelt[a.dtype], a.shape, lambda a=a: [a]) for name, a in arrays.items()]
    shards.write(directory, outputs, 1 << 30)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def golden(name: str) -> tuple[Tensors, dict[str, Any]]:
    return read(GOLDEN / name / "model.safetensors"), json.loads((GOLDEN / name / "config.json").read_text())


def same(a: np.ndarray | jax.Array, b: np.ndarray | jax.Array) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def wholes(layer: compressed_tensors.Layer) -> Tensors:
    return {name: array.whole() for name, array in layer.arrays().items()}


def reader(name: str) -> compressed_tensors.Reader:
    return reader_at(GOLDEN / name, name)


def reader_at(path: Path, name: str) -> compressed_tensors.Reader:
    """Of a golden file, or of what became of it."""
    return compressed_tensors.Reader(path, gate_up_order="interleaved" if "gpt_oss" in name else None)


def floats(layer: compressed_tensors.Layer, role: str) -> np.ndarray:
    """float64 (E, N, K): what the arrays of a role mean, from the formats' definitions alone."""
    arrays = {name.removeprefix(f"{role}_"): a for name, a in wholes(layer).items() if name.startswith(role)}
    values, scales = arrays["values"], arrays["scales"]
    kind, block = layer.format.name.split("_")[0], layer.format.block_size
    if kind in ("nvfp4", "mxfp4", "int4"):
        codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
        magnitudes = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
        elements = np.where(codes < 8, codes, codes - 16.0) if kind == "int4" else magnitudes
    else:
        elements = values.view(np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float64)
    if kind in ("mxfp4", "mxfp8"):
        factors = np.exp2(scales.astype(np.float64) - 127)
    else:
        factors = (scales.view(ml_dtypes.float8_e4m3fn) if kind == "nvfp4" else scales).astype(np.float64)
    block = elements.shape[-1] if block == WHOLE_ROW else block

    def widen(array: np.ndarray) -> np.ndarray:
        return np.repeat(array, block, axis=-1)[..., : elements.shape[-1]]

    if "zero_points" in arrays:
        elements = elements - widen(arrays["zero_points"])
    found = elements * widen(factors)
    if "global_scales" in arrays:
        found = found * arrays["global_scales"][..., None].astype(np.float64)
    if "order" in arrays:
        inputs = np.empty_like(found)
        for expert, order in enumerate(arrays["order"]):
            inputs[expert][:, order] = found[expert]
        found = inputs
    return found


# Reading


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_package_makes(name):
    layer = reader(name).layers[LAYER]
    answers = {key: array for key, array in read(GOLDEN / f"{name}.safetensors").items() if key.endswith(".weight")}
    gate_up, down = floats(layer, "gate_up"), floats(layer, "down")
    assert gate_up.shape == (layer.num_experts, 2 * layer.intermediate_size, layer.hidden_size)
    assert down.shape == (layer.num_experts, layer.hidden_size, layer.intermediate_size)
    assert layer.gate_up_order == ("interleaved" if "gpt_oss" in name else "concatenated")
    middle = layer.intermediate_size
    places = {"gate": gate_up[:, :middle], "up": gate_up[:, middle:], "gate_up": gate_up, "down": down}
    for key, answer in answers.items():
        expert, projection = re.fullmatch(rf"{LAYER}\.(\d+)\.(\w+)_proj\.weight", key).groups()  # type: ignore[union-attr]
        ours = places[projection][int(expert)]
        # Both round one exact product; but for NVFP4's of three factors, of which the package divides by one.
        if layer.format == jmx.NVFP4:
            np.testing.assert_allclose(ours, answer, rtol=3e-7, atol=0)
        else:
            np.testing.assert_array_equal(ours.astype(np.float32), answer)
    assert {key.rsplit(".", 2)[1] for key in answers} & {"up_proj", "gate_up_proj"}


@pytest.mark.parametrize("name", NAMES)
def test_arrays_have_the_shapes_that_the_format_declares(name):
    layer = reader(name).layers[LAYER]
    for key, array in layer.arrays().items():
        whole = array.whole()
        assert (whole.shape, whole.dtype, whole.nbytes) == (array.shape, array.dtype, array.nbytes), key
    arrays = [*layer.format.arrays, *["bias"] * ("gpt_oss" in name)]
    names = [f"{role}_{array}" for role in ("gate_up", "down") for array in arrays]
    assert [*layer.arrays()] == names


def test_experts_that_differ_stay_apart_and_gate_rows_come_before_up_rows():
    arrays, _ = golden("mxfp4")
    found = wholes(reader("mxfp4").layers[LAYER])
    for expert in range(3):
        parts = [arrays[f"{LAYER}.{expert}.{p}_proj.weight_packed"] for p in ("gate", "up")]
        assert same(found["gate_up_values"][expert], np.concatenate(parts))
        assert same(found["down_scales"][expert], arrays[f"{LAYER}.{expert}.down_proj.weight_scale"])


def test_global_scales_multiply_and_gate_and_up_keep_their_own():
    arrays, _ = golden("nvfp4")
    layer = reader("nvfp4").layers[LAYER]
    scales = wholes(layer)["gate_up_global_scales"]
    for expert in range(3):
        gate, up = (arrays[f"{LAYER}.{expert}.{p}_proj.weight_global_scale"][0] for p in ("gate", "up"))
        assert gate != up
        assert (scales[expert, :64] == np.float32(1) / gate).all()
        assert (scales[expert, 64:] == np.float32(1) / up).all()


def test_static_scales_mean_what_the_inputs_format_says_whatever_the_weights_are(tmp_path):
    arrays, config = golden("nvfp4")
    fp8, fp8_config = golden("fp8_tensor_static")
    theirs, ours = ("input_global_scale", "input_scale")
    group, fp8_group = (c["quantization_config"]["config_groups"]["group_0"] for c in (config, fp8_config))
    group["input_activations"], fp8_group["input_activations"] = (
        fp8_group["input_activations"],
        group["input_activations"],
    )
    swapped = {name.replace(theirs, ours): array for name, array in arrays.items()}
    layer = compressed_tensors.Reader(write(tmp_path / "a", swapped, config)).layers[LAYER]
    scales = layer.static_scales("down")
    assert scales is not None
    assert scales[1, 0] == arrays[f"{LAYER}.1.down_proj.{theirs}"][0]
    swapped = {name.replace(ours, theirs): array for name, array in fp8.items()}
    swapped |= {name: array.astype(np.float32) for name, array in swapped.items() if name.endswith(theirs)}
    layer = compressed_tensors.Reader(write(tmp_path / "b", swapped, fp8_config)).layers[LAYER]
    scales = layer.static_scales("down")
    assert scales is not None
    assert scales[1, 0] == np.float32(1) / fp8[f"{LAYER}.1.down_proj.{ours}"][0].astype(np.float32)


def test_modelopts_scales_multiply_as_they_are():
    arrays, _ = golden("modelopt_nvfp4")
    layer = reader("modelopt_nvfp4").layers[LAYER]
    scales, inputs = wholes(layer)["down_global_scales"], layer.static_scales("down")
    assert inputs is not None
    for expert in range(3):
        assert (scales[expert] == arrays[f"{LAYER}.{expert}.down_proj.weight_scale_2"]).all()
        assert inputs[expert, 0] == arrays[f"{LAYER}.{expert}.down_proj.input_scale"]
    assert (scales < 1).all()


def test_quarks_rows_alternate_and_have_biases():
    arrays, _ = golden("quark_gpt_oss")
    layer = reader("quark_gpt_oss").layers[LAYER]
    assert (layer.hidden_size, layer.intermediate_size, layer.scheme.inputs) == (96, 64, "fp8_static")
    assert same(wholes(layer)["gate_up_bias"][2], arrays[f"{LAYER}.2.gate_up_proj.bias"])
    with pytest.raises(ValueError, match=r"`gate_up_order` \(=None\) must be"):
        compressed_tensors.Reader(GOLDEN / "quark_gpt_oss")


def test_a_block_of_128_rows_begins_anew_with_up():
    arrays, _ = golden("fp8_block_dynamic")
    scales = wholes(reader("fp8_block_dynamic").layers[LAYER])["gate_up_scales"]
    assert scales.shape == (2, 2 * 136, 2)
    gate, up = (arrays[f"{LAYER}.1.{p}_proj.weight_scale"] for p in ("gate", "up"))
    for rows, expected in (((0, 128), gate[0]), ((128, 136), gate[1]), ((136, 264), up[0]), ((264, 272), up[1])):
        assert (scales[1, slice(*rows)] == expected).all()


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor_static", "fp8_channel_static", "fp8_block_static"])
def test_static_scales_of_gate_and_up_stay_apart(name):
    arrays, _ = golden(name)
    layer = reader(name).layers[LAYER]
    last = "input_global_scale" if name == "nvfp4" else "input_scale"
    as_factor = np.reciprocal if name == "nvfp4" else np.positive
    for role, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        expected = [[arrays[f"{LAYER}.{e}.{p}_proj.{last}"][0] for p in parts] for e in range(layer.num_experts)]
        found = layer.static_scales(role)
        assert found is not None
        assert same(found, as_factor(np.array(expected, np.float32)))
    assert reader("fp8_tensor_dynamic").layers[LAYER].static_scales("down") is None


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_nvfp4"])
def test_a_scale_of_zero_makes_a_block_of_zeros_in_nvfp4(name, tmp_path):
    """ModelOpt's rounding gives a block that is small enough beside its tensor's largest one."""
    arrays, config = golden(name)
    put("weight_scale", (3, 2), 0.0)(arrays)
    ours = compressed_tensors.Reader(write(tmp_path / name, arrays, config))
    module = next(m for m in ours.layers[LAYER].quantized if m.name == at("").removesuffix("."))
    weight = np.asarray(jmx.dequantize(jax.tree.map(jnp.asarray, module.weight()), jnp.float32, module.format))
    assert not weight[3, 32:48].any()
    assert weight[3, :32].any()
    assert same(
        module_tensors(module.scheme, module.weight(), module.kept())["weight_scale"], arrays[at("weight_scale")]
    )


@hypothesis.given(st.sampled_from(["nvfp4", "w4a16_g32_asym", "w4a16_g32_order", "fp8_block_dynamic"]), st.data())
@examples(60)
def test_parts_are_slices_of_the_whole(name, data):
    arrays = reader(name).layers[LAYER].arrays()
    array = arrays[data.draw(st.sampled_from(sorted(arrays)))]
    index = tuple(slice(*sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in array.shape)
    assert same(array[index], array.whole()[index])


def test_only_the_experts_that_are_needed_are_read(monkeypatch):
    asked = []
    array = Module.array
    monkeypatch.setattr(Module, "array", lambda self, name: asked.append((self.name, name)) or array(self, name))
    found = reader("w4a16_g32").layers[LAYER].arrays()["gate_up_values"]
    part = found[slice(1, 2), slice(None), slice(None)]
    assert part.shape == (1, 128, 48)
    assert asked == [(f"{LAYER}.1.{p}_proj", "values") for p in ("gate", "up")]


@pytest.mark.parametrize("name", ["w4a16_g32_asym", "nvfp4", "w8a16_g32_order"])
@pytest.mark.devices(3)
def test_arrays_go_to_their_devices(name):
    by_expert = NamedSharding(Mesh(np.array(jax.devices()[:3]), ("expert",)), PartitionSpec("expert"))
    ours = reader(name)
    expected = wholes(ours.layers[LAYER])
    for sharding in (None, by_expert):
        found = ours.arrays(LAYER, sharding)
        assert found.keys() == expected.keys()
        assert all(same(array, expected[key]) for key, array in found.items())
        assert sharding is None or all(array.sharding == sharding for array in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_what_the_arrays_mean(name):
    ours = reader(name)
    layer = ours.layers[LAYER]
    for layout in ("packed", "canonical"):
        experts = ours.experts(LAYER, layout, inputs=False)
        assert (experts.layout, experts.format, experts.gate_up_order) == (layout, layer.format, layer.gate_up_order)
        for role, weight in zip(("gate_up", "down"), experts.dequantize(np.float32), strict=True):
            np.testing.assert_allclose(weight, floats(layer, role), rtol=3e-7, atol=0)
    with pytest.raises(ValueError, match="`layout`"):
        ours.experts(LAYER, "striped")


@pytest.mark.parametrize(
    "name", ["nvfp4a16", "modelopt_nvfp4", "w4a16_g64_asym_order", "w8a16_channel", "fp8_block_dynamic"]
)
def test_a_layer_runs_on_what_was_read(name, rng):
    ours = reader(name)
    layer = ours.layers[LAYER]
    x = rng.standard_normal((5, layer.hidden_size)).astype(np.float32)
    ids = np.array([[0, 1], [1, 0], [1, 1], [0, 0], [1, 0]], np.int32)
    weights = rng.random((5, 2)).astype(np.float32)
    found = jmx.moe(x, jmx.Routing(ids, weights), ours.experts(LAYER, inputs=False), activation=jmx.SiLUAndMul())
    gate_up, down = floats(layer, "gate_up"), floats(layer, "down")
    expected = np.zeros(x.shape)
    for token, slot in np.ndindex(5, 2):
        gate, up = np.split(gate_up[ids[token, slot]] @ x[token], 2)
        expected[token] += weights[token, slot] * (down[ids[token, slot]] @ (gate / (1 + np.exp(-gate)) * up))
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)  # of products in TF32, where they are so


@pytest.mark.parametrize("name", NAMES)
def test_experts_declare_the_inputs_of_their_scheme(name):
    ours = reader(name)
    layer = ours.layers[LAYER]
    wanted = layer.scheme.inputs
    differ = [s for s in map(layer.static_scales, ("gate_up", "down")) if s is not None and np.ptp(s) > 0]
    with pytest.warns(UserWarning, match="static input scales differ") if differ else contextlib.nullcontext():
        experts = ours.experts(LAYER)
    assert experts.input_format == wanted
    assert ours.experts(LAYER, inputs=False).input_format is None
    for role in ("gate_up", "down"):
        scales, scale = layer.static_scales(role), experts.input_scale(role)
        assert (scale is None) == (scales is None)
        assert scales is None or scale == scales.max()
    if wanted is None:
        return  # to run without is another test's
    x = jnp.ones((2, layer.hidden_size))
    y = jmx.moe(x, jmx.Routing(np.array([[0], [1]]), np.ones((2, 1), np.float32)), experts, activation=jmx.SiLUAndMul())
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", ["nvfp4a16", "w4a16_g32_order", "fp8_block_dynamic"])
@pytest.mark.devices(2)
def test_experts_take_a_sharding(name):
    ours = reader(name)
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))

    def sharding(key: str) -> NamedSharding | None:
        whole = PartitionSpec() if key.endswith(("order", "block")) else PartitionSpec(None, "rows")
        return NamedSharding(mesh, whole)

    experts = ours.experts(LAYER, "packed", sharding, inputs=False)
    expected = ours.experts(LAYER, "packed", inputs=False).arrays()
    assert all(same(array, expected[key]) for key, array in experts.arrays().items())
    assert all(array.sharding == sharding(key) for key, array in experts.arrays().items())


def test_other_tensors_stay_within_reach():
    ours = reader("w8a8_channel")
    assert same(
        ours.view("model.layers.0.mlp.gate.weight"), golden("w8a8_channel")[0]["model.layers.0.mlp.gate.weight"]
    )
    with pytest.raises(CheckpointError, match=r"tensor 'model.norm' is missing"):
        ours.view("model.norm")
    with pytest.raises(ValueError, match=re.escape(f"`layer` (='experts') must be one of ['{LAYER}']")):
        ours.experts("experts")


# Names


def renamed(arrays: Tensors, spelling: Mapping[str, str]) -> Tensors:
    def rename(name: str) -> str:
        for theirs, ours in spelling.items():
            name = name.replace(f".{theirs}.", f".{ours}.")
        return name

    return {rename(name): array for name, array in arrays.items()}


def together(arrays: Tensors, gate_up_order: str) -> Tensors:
    """The tensors of all experts in one, gate and up too."""
    found, experts = {}, 1 + max(int(name.split(".")[5]) for name in arrays if ".experts." in name)
    lasts = {name.rsplit(".", 1)[1] for name in arrays if ".experts." in name}
    for last in lasts:

        def stacked(projection: str, last: str = last) -> np.ndarray:
            return np.stack([arrays[f"{LAYER}.{e}.{projection}.{last}"] for e in range(experts)])

        gate, up, down = (stacked(p) for p in ("gate_proj", "up_proj", "down_proj"))
        if last == "weight_shape":
            found[f"{LAYER}.gate_up_proj.{last}"] = np.array([experts, 2 * gate[0, 0], gate[0, 1]])
            found[f"{LAYER}.down_proj.{last}"] = np.array([experts, *down[0]])
            continue
        pairs = np.concatenate([gate, up], axis=1)
        if last == "weight_g_idx" or gate[0].size == 1:
            pairs = gate
        elif gate_up_order == "interleaved":
            pairs = np.stack([gate, up], axis=2).reshape(pairs.shape)
        found |= {f"{LAYER}.gate_up_proj.{last}": pairs, f"{LAYER}.down_proj.{last}": down}
    return found | {name: array for name, array in arrays.items() if ".experts." not in name}


def test_other_names_of_the_same(tmp_path):
    arrays, config = golden("w4a16_g64_asym_order")
    expected = wholes(reader("w4a16_g64_asym_order").layers[LAYER])
    mixtral = renamed(arrays, {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "block_sparse_moe"})
    path = write(tmp_path / "mixtral", mixtral, config)
    layer = compressed_tensors.Reader(path).layers["model.layers.0.block_sparse_moe.experts"]
    assert all(same(array, expected[key]) for key, array in wholes(layer).items())


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("w4a16_g32", "concatenated"),
        ("w4a16_g32", "interleaved"),
        ("w4a16_g64_asym_order", "concatenated"),  # zero points are packed along rows, which cannot be shuffled here
        ("fp8_channel_dynamic", "interleaved"),
        ("mxfp4", "interleaved"),
        ("nvfp4", "concatenated"),
    ],
)
def test_experts_in_one_tensor(tmp_path, name, order):
    arrays, config = golden(name)
    expected = wholes(reader(name).layers[LAYER])
    if name.startswith("nvfp4"):  # one global scale for both, there
        arrays |= {n.replace("gate", "up"): a for n, a in arrays.items() if n.endswith("gate_proj.weight_global_scale")}
        expected["gate_up_global_scales"][:, 64:] = expected["gate_up_global_scales"][:, :1]
    path = write(tmp_path / "one", together(arrays, order), config)
    with pytest.raises(ValueError, match=r"`gate_up_order` \(=None\) must be one of .'interleaved', 'concatenated'"):
        compressed_tensors.Reader(path)
    ours = compressed_tensors.Reader(path, order)
    layer = ours.layers[LAYER]
    assert (layer.gate_up_order, layer.intermediate_size) == (order, reader(name).layers[LAYER].intermediate_size)
    for key, array in wholes(layer).items():
        rows = expected[key]
        if key.startswith("gate_up") and order == "interleaved" and not key.endswith("order"):
            gate, up = np.split(rows, 2, axis=1)
            rows = np.stack([gate, up], axis=2).reshape(rows.shape)
        assert same(array, rows), key
    compressed_tensors.convert(ours, tmp_path / "again")
    assert all(
        same(array, together(arrays, order)[key]) for key, array in read(tmp_path / "again" / shards.SINGLE).items()
    )


def test_layers_that_are_not_quantized_are_none_of_ours(tmp_path):
    arrays, config = golden("w4a16_g32")
    dense = {
        f"model.layers.1.mlp.experts.{e}.{p}_proj.weight": np.ones((2, 2), np.float32) for e in "01" for p in PARTS
    }
    config["quantization_config"]["ignore"] += [r"re:model\.layers\.1\.mlp\.experts.*"]
    shared = {"model.layers.0.mlp.shared_experts.gate_proj.weight": np.ones((2, 2), np.float32)}
    ours = compressed_tensors.Reader(write(tmp_path / "some", arrays | dense | shared, config))
    assert [*ours.layers] == [LAYER]


PARTS = ("gate", "up", "down")


def test_biases_are_stacked_too(tmp_path, rng):
    arrays, config = golden("mxfp4a16")
    biases = {
        f"{LAYER}.{e}.{p}_proj.bias": rng.standard_normal(96 if p == "down" else 64).astype(np.float32)
        for e in range(3)
        for p in PARTS
    }
    ours = compressed_tensors.Reader(write(tmp_path / "biased", arrays | biases, config))
    found = wholes(ours.layers[LAYER])
    assert same(found["gate_up_bias"][2], np.concatenate([biases[f"{LAYER}.2.{p}_proj.bias"] for p in ("gate", "up")]))
    assert same(found["down_bias"][1], biases[f"{LAYER}.1.down_proj.bias"])
    compressed_tensors.convert(ours, tmp_path / "again")
    assert all(same(a, (arrays | biases)[n]) for n, a in read(tmp_path / "again" / shards.SINGLE).items())


# Writing


@pytest.mark.parametrize("name", NAMES)
def test_read_then_written_is_the_same_to_the_bit(tmp_path, name):
    compressed_tensors.convert(reader(name), tmp_path / "again", max_shard_bytes=20_000)
    found = shards.read_headers(tmp_path / "again")
    expected, _ = golden(name)
    assert len({tensor.file for tensor in found.values()}) > 1
    assert found.keys() == expected.keys()
    assert all(same(found[key].view(), array) for key, array in expected.items())
    assert (tmp_path / "again" / "config.json").read_bytes() == (GOLDEN / name / "config.json").read_bytes()
    for file in {tensor.file for tensor in found.values()}:
        safetensors.safe_open(file, "numpy").__enter__()  # the package's reader takes them


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "quark_gpt_oss"])
def test_scales_are_written_in_the_dtype_that_files_had(tmp_path, name):
    """e8m0 by its name in safetensors, where tools write bytes."""
    arrays, config = golden(name)
    arrays = {
        key: array.view(ml_dtypes.float8_e8m0fnu) if key.endswith("weight_scale") and array.dtype == np.uint8 else array
        for key, array in arrays.items()
    }
    assert any(array.dtype == ml_dtypes.float8_e8m0fnu for array in arrays.values())
    ours, expected = reader_at(write(tmp_path / name, arrays, config), name), wholes(reader(name).layers[LAYER])
    assert all(same(array, expected[key]) for key, array in wholes(ours.layers[LAYER]).items())
    compressed_tensors.convert(ours, tmp_path / "again")
    assert all(same(array, arrays[key]) for key, array in read(tmp_path / "again" / shards.SINGLE).items())


@pytest.mark.parametrize("name", NAMES)
def test_tensors_made_without_the_files_own_mean_the_same(name):
    for module in reader(name).layers[LAYER].quantized:
        kept = {n: a for n, a in module.kept().items() if n.startswith("input") or n == "bias"}
        made = module_tensors(module.scheme, module.weight(), kept)
        assert made.keys() == module.pieces.keys()
        for key, array in made.items():
            read = module.pieces[key].view()
            if key == "weight_global_scale":  # the reciprocal of a reciprocal, and one number for ()
                np.testing.assert_allclose(array, read, rtol=2e-7)
            else:  # files shape numbers of whole rows, and of a whole tensor, in several ways
                assert same(array, read.reshape(array.shape) if key == "weight_scale" else read), key


def test_arrays_that_no_file_can_hold_are_refused():
    def module(name: str) -> Module:
        return reader(name).layers[LAYER].quantized[0]

    nvfp4 = module("nvfp4")
    with pytest.raises(ValueError, match="`kept` must hold 'input_global_scale' for inputs of nvfp4"):
        module_tensors(nvfp4.scheme, nvfp4.weight(), {})
    with pytest.raises(ValueError, match=r"`weight.global_scales` \(=None\) must be there for nvfp4"):
        module_tensors(nvfp4.scheme, nvfp4.weight()._replace(global_scales=None), nvfp4.kept())
    uneven = np.arange(64, dtype=np.float32)
    with pytest.raises(ValueError, match=r"`weight.global_scales` must be the same in all rows"):
        module_tensors(nvfp4.scheme, nvfp4.weight()._replace(global_scales=uneven), {"input_global_scale": uneven[:1]})
    block = module("fp8_block_dynamic")
    scales = block.weight().scales.copy()
    scales[3] *= 2
    with pytest.raises(ValueError, match=r"`weight.scales` must be the same in all rows"):
        module_tensors(block.scheme, block.weight()._replace(scales=scales), {})


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError):
        compressed_tensors.convert(reader("mxfp4"), tmp_path / "there")
    with pytest.raises(ValueError, match=r"`max_shard_bytes` \(=0\) must be at least 1"):
        compressed_tensors.convert(reader("mxfp4"), tmp_path / "again", max_shard_bytes=0)
    shutil.copytree(GOLDEN / "w4a16_g32", tmp_path / "broken")
    arrays, config = golden("w4a16_g32")
    arrays[f"{LAYER}.2.up_proj.weight_scale"][3, 1] = np.nan
    ours = compressed_tensors.Reader(write(tmp_path / "broken", arrays, config))
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale' must hold finite scales"):
        compressed_tensors.convert(ours, tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"there", "broken"}


# What is refused


def read_all(path: Path) -> None:
    layer = compressed_tensors.Reader(path, "interleaved").layers[LAYER]
    wholes(layer)
    layer.static_scales("gate_up")


def at(tensor: str) -> str:
    return f"{LAYER}.1.gate_proj.{tensor}"


def put(tensor: str, index: Any, value: Any) -> Callable[[Tensors], None]:
    def change(arrays: Tensors) -> None:
        arrays[at(tensor)][index] = value

    return change


def swap(tensor: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def change(arrays: Tensors) -> None:
        arrays[at(tensor)] = make(arrays[at(tensor)])

    return change


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda arrays: arrays.__delitem__(name)


def add(name: str, array: np.ndarray) -> Callable[[Tensors], None]:
    return lambda arrays: arrays.__setitem__(name, array)


def drop_expert(arrays: Tensors) -> None:
    for name in [name for name in arrays if f"{LAYER}.1." in name]:
        del arrays[name]


def other_groups(arrays: Tensors) -> None:
    groups = arrays[at("weight_g_idx")]
    groups[:] = (groups + 1) % (groups.max() + 1)


ONES = np.ones(1, np.float32)
REFUSALS: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("nvfp4", drop(at("weight_global_scale")), f"tensor '{at('weight_global_scale')}' is missing, for nvfp4"),
    ("nvfp4", drop(at("input_global_scale")), f"tensor '{at('input_global_scale')}' is missing"),
    ("nvfp4", drop(at("weight_packed")), f"tensor '{at('weight_packed')}' is missing"),
    ("nvfp4", drop(at("weight_scale")), f"tensor '{at('weight_scale')}' is missing"),
    ("nvfp4a16", add(at("input_global_scale"), ONES), "is not one of nvfp4 as 'nvfp4-pack-quantized' stores it"),
    ("nvfp4", put("weight_global_scale", 0, 0.0), "must hold finite scales above 0, but has 0.0 at (0,)"),
    ("nvfp4", put("weight_global_scale", 0, -3.0), "must hold finite scales above 0, but has -3.0"),
    ("nvfp4", put("weight_global_scale", 0, np.inf), "must hold finite scales above 0, but has inf"),
    ("nvfp4", put("weight_global_scale", 0, 3e38), "must give a factor that is a normal float32"),
    ("nvfp4", put("weight_global_scale", 0, 1e-40), "must give a factor that is a normal float32"),
    ("nvfp4", put("weight_scale", (3, 2), np.nan), "must hold finite scales of 0 or more, but has nan at (3, 2)"),
    ("nvfp4", put("weight_scale", (0, 1), -2.0), "must hold finite scales of 0 or more, but has -2.0 at (0, 1)"),
    ("modelopt_nvfp4", put("weight_scale", (0, 1), -0.0), "must hold finite scales of 0 or more, but has -0.0 at"),
    ("nvfp4", swap("weight_scale", lambda a: a.view(np.uint8)), "is U8 (64, 6), but must be F8_E4M3 (64, 6)"),
    ("nvfp4", swap("weight_packed", lambda a: a[:, :44]), "`columns` (=88) must be a multiple of 16 for NVFP4"),
    ("nvfp4", swap("weight_packed", lambda a: a[0]), "has shape (48,), but must have rows and columns"),
    ("modelopt_nvfp4", drop(at("weight_scale_2")), f"tensor '{at('weight_scale_2')}' is missing, for nvfp4"),
    ("modelopt_nvfp4", swap("weight_scale_2", np.negative), "must hold finite scales above 0, but has -"),
    ("modelopt_nvfp4", add(at("weight_global_scale"), ONES), "is not one of nvfp4 as 'modelopt' stores it"),
    (
        "modelopt_gpt_oss",
        drop(f"{LAYER}.down_proj_weight_scale"),
        f"tensor '{LAYER}.down_proj_weight_scale' is missing, for nvfp4",
    ),
    (
        "modelopt_gpt_oss",
        add(f"{LAYER}.down_proj_bias", np.ones((2, 96), np.float32)),
        "must have one number of experts, but have [2, 3]",
    ),
    (
        "modelopt_gpt_oss",
        add(f"{LAYER}.down_proj_bias", np.ones((3, 96), np.float16)),
        f"tensors of '{LAYER}.down_proj' (=",
    ),
    ("modelopt_gpt_oss", add(f"{LAYER}.down_proj_scales", ONES), "is a tensor of quantized experts, but of no"),
    ("modelopt_gpt_oss", add(f"{LAYER}.down_proj.bias", ONES), "must be of modules or of parameters, but are both"),
    ("mxfp4", put("weight_scale", (5, 2), 255), "must have no scale of 255 (NaN), but has one at (5, 2)"),
    (
        "mxfp4",
        swap("weight_scale", lambda a: a[:, :2]),
        "is U8 (64, 2), but must be U8 or F8_E8M0 (64, 3) for mxfp4 of (64, 96)",
    ),
    ("fp8_channel_dynamic", put("weight", (1, 1), np.nan), "must hold no NaN"),
    ("fp8_channel_dynamic", swap("weight_scale", lambda a: a[0]), "is BF16 (1,), but must be BF16 or F16 or F32"),
    ("fp8_tensor_static", put("input_scale", 0, np.nan), "must hold finite scales above 0, but has nan"),
    ("fp8_tensor_static", put("input_scale", 0, 1e38), "as a factor) must be between"),
    ("fp8_tensor_static", put("input_scale", 0, 1e-40), "as a factor) must be between"),
    ("fp8_tensor_static", drop(at("input_scale")), f"tensor '{at('input_scale')}' is missing"),
    ("fp8_tensor_dynamic", add(at("input_scale"), ONES), "is not one of fp8_tensor as 'float-quantized' stores it"),
    ("fp8_channel_static", swap("weight_scale", lambda a: a[1:, 0]), "is F32 (63,), but must be BF16 or F16 or F32"),
    ("fp8_block_dynamic", swap("weight_scale", lambda a: a[:1]), "must be BF16 or F16 or F32 (2, 2)"),
    ("fp8_block_dynamic", swap("weight", lambda a: a.view(np.int8)), "is I8 (136, 160), but must be F8_E4M3"),
    ("w4a16_g32", put("weight_shape", 1, 104), "(=[64, 104]) must fit"),
    ("w4a16_g32", put("weight_shape", 1, 95), "`columns` (=95) must be a multiple of 32 for INT4_G32"),
    ("w4a16_g32", put("weight_shape", 0, 65), "(=[65, 96]) must fit"),
    ("w4a16_g32", put("weight_shape", 1, -96), "(=[64, -96]) must fit"),
    ("w4a16_g32", drop(at("weight_shape")), f"tensor '{at('weight_shape')}' is missing"),
    ("w4a16_g32", swap("weight_shape", lambda a: a.astype(np.float32)), "is F32 (2,), but must be two or three I64"),
    ("w4a16_g32", put("weight_scale", (0, 0), 0.0), "must hold finite scales above 0, but has 0.0 at (0, 0)"),
    ("w4a16_g32", add(at("weight_zero_point"), np.zeros((8, 3), np.int32)), "is not one of int4_g32"),
    ("w4a16_g32", add(at("weight_g_idx"), np.zeros(96, np.int32)), "is not one of int4_g32"),
    (
        "w4a16_channel",
        put("weight_packed", (7, 11), -1),
        "must have no bit after the 92 elements of a row, but has one",
    ),
    ("w4a16_channel_asym", put("weight_zero_point", (7, 0), -1), "must have no bit after the 60 elements of a row"),
    ("w4a16_g32_asym", drop(at("weight_zero_point")), f"tensor '{at('weight_zero_point')}' is missing"),
    ("w4a16_g32_order", drop(at("weight_g_idx")), f"tensor '{at('weight_g_idx')}' is missing"),
    ("w4a16_g32_order", put("weight_g_idx", 0, 3), "must put 32 columns into each of the groups 0 to 2"),
    ("w4a16_g32_order", put("weight_g_idx", slice(None), -1), "must put 32 columns into each of the groups 0 to 2"),
    ("w4a16_g32_order", other_groups, "must group columns as 'model.layers.0.mlp.experts.1.gate_proj' does"),
    ("w4a8_g32", put("weight", (2, 3), 8), "must hold integers of 4 bits, -8 to 7"),
    ("w4a8_g32", put("weight", (2, 3), -9), "must hold integers of 4 bits, -8 to 7"),
    ("w8a8_channel", drop_expert, f"expert 1 of '{LAYER}' is missing, where there are 2"),
    ("w8a8_channel", add(f"{LAYER}.1.w1.weight", ONES), "must be of ['gate_proj', 'up_proj', 'down_proj'] or"),
    ("w8a8_channel", add(f"{LAYER}.gate_proj.weight", ONES), "must be in separate tensors or in one, but are both"),
    ("w8a8_channel", add(at("weight.more"), ONES), "is a tensor of quantized experts, but of no projection"),
    ("w8a8_channel", add(f"{LAYER}.more", ONES), "is a tensor of quantized experts, but of no projection"),
    ("w8a8_channel", add(at("bias"), np.ones(64, np.float32)), f"tensors of '{LAYER}.1.gate_proj' (="),
    ("w8a8_channel", swap("weight_scale", lambda a: a.astype(np.float32)), "as other experts of"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), REFUSALS, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(REFUSALS)]
)
def test_what_is_wrong_is_refused_by_name(tmp_path, name, change, message):
    arrays, config = golden(name)
    change(arrays)
    path = write(tmp_path / "wrong", arrays, config)
    with pytest.raises(CheckpointError) as raised:
        read_all(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{path / shards.SINGLE}: ")


def test_modelopts_parameters_hold_experts_with_rows_last():
    arrays, _ = golden("modelopt_gpt_oss")
    found = wholes(reader("modelopt_gpt_oss").layers[LAYER])
    for role in ("gate_up", "down"):
        values, scales = (arrays[f"{LAYER}.{role}_proj{last}"] for last in ("", "_weight_scale"))
        assert same(found[f"{role}_values"], np.ascontiguousarray(values.swapaxes(1, 2)))
        assert same(found[f"{role}_scales"], np.ascontiguousarray(scales.swapaxes(1, 2)).view(np.uint8))
        assert (found[f"{role}_global_scales"] == arrays[f"{LAYER}.{role}_proj_weight_scale_2"]).all()


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_nvfp4", "modelopt_fp8", "quark_gpt_oss"])
def test_the_last_experts_may_not_be_missing(tmp_path, name):
    arrays, config = golden(name)
    (key,) = {"num_experts", "num_local_experts"} & config.keys()  # as transformers 4 and 5 write it
    last = f"{LAYER}.{config[key] - 1}."
    fewer = {name: array for name, array in arrays.items() if not name.startswith(last)}
    assert len(fewer) < len(arrays)
    with pytest.raises(CheckpointError, match=rf"config.json: `{key}` \(=3\) must be 2, the experts that '{LAYER}'"):
        reader_at(write(tmp_path / "fewer", fewer, config), name)
    for wrong, named in (
        ({"num_experts": 17}, "num_experts"),
        ({"hidden_size": 17}, "hidden_size"),
        ({"text_config": {"num_local_experts": 4}}, "num_local_experts"),
    ):
        with pytest.raises(CheckpointError, match=f"config.json: `{named}` "):
            reader_at(write(tmp_path / "wrong", arrays, config | wrong), name)
    unsaid = {entry: value for entry, value in config.items() if entry not in (key, "hidden_size")}
    assert reader_at(write(tmp_path / "unsaid", fewer, unsaid), name).layers[LAYER].num_experts == 2


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_nvfp4", "quark_gpt_oss", "fp8_block_static"])
def test_a_checkpoint_must_have_experts_that_are_known(tmp_path, name):
    arrays, config = golden(name)
    others = {key.replace(".experts.", ".expert_list."): array for key, array in arrays.items()}
    without = {key: array for key, array in arrays.items() if ".experts." not in key}
    for directory, left in (("others", others), ("without", without)):
        with pytest.raises(CheckpointError, match=f"{directory}.* must hold tensors of experts"):
            reader_at(write(tmp_path / directory, left, config), name)


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ([r"re:.*experts.*"], "is of a quantized module, but no target of the config selects"),
        ([r"re:.*experts\.1\..*"], "but no target of the config selects 'model.layers.0.mlp.experts.1.down_proj'"),
    ],
)
def test_quantized_tensors_that_no_target_means_are_refused(tmp_path, ignore, message):
    arrays, config = golden("w4a16_g32")
    config["quantization_config"]["ignore"] = ignore
    with pytest.raises(CheckpointError, match=re.escape(message)):
        compressed_tensors.Reader(write(tmp_path / "wrong", arrays, config))


def test_integers_that_no_target_means_are_refused_without_their_scales_too(tmp_path):
    arrays, config = golden("w8a8_channel")
    config["quantization_config"]["ignore"] += [r"re:.*experts.*"]
    bare = {name: array for name, array in arrays.items() if not name.endswith("weight_scale")}
    with pytest.raises(CheckpointError, match=re.escape("(I8) is of a module that no target of the config selects")):
        compressed_tensors.Reader(write(tmp_path / "wrong", bare, config))


def test_other_modules_may_be_quantized_too(tmp_path):
    arrays, config = golden("w4a16_g32")
    moved = {name.replace(f"{LAYER}.0.down_proj", "model.layers.0.self_attn.q_proj"): a for name, a in arrays.items()}
    ours = compressed_tensors.Reader(write(tmp_path / "more", arrays | moved, config))
    module = ours.module("model.layers.0.self_attn.q_proj")
    assert module.shape == (96, 64)
    assert same(module.weight().values, wholes(ours.layers[LAYER])["down_values"][0])
    for name in ("model.layers.0.mlp.gate", "model.layers.0.self_attn.k_proj"):
        with pytest.raises(ValueError, match=re.escape(f"`name` (={name!r}) must be the name of a quantized module")):
            ours.module(name)
    config["quantization_config"]["ignore"] += ["model.layers.0.self_attn.q_proj"]
    message = "is of a quantized module, but no target of the config selects 'model.layers.0.self_attn.q_proj'"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        compressed_tensors.Reader(write(tmp_path / "wrong", arrays | moved, config))


def test_sizes_that_do_not_fit_each_other_are_refused(tmp_path):
    arrays, config = golden("w8a8_channel")
    for expert in range(3):
        for last in ("weight", "weight_scale"):
            name = f"{LAYER}.{expert}.down_proj.{last}"
            arrays[name] = arrays[name][:80]
    with pytest.raises(CheckpointError, match=re.escape("but are (128, 96) and (80, 64)")):
        compressed_tensors.Reader(write(tmp_path / "wrong", arrays, config))


@hypothesis.given(st.sampled_from(NAMES), st.data())
@examples(150)
def test_mutated_tensors_are_refused_or_come_back_as_they_are(tmp_path_factory, name, data):
    arrays, config = golden(name)
    experts = sorted(key for key in arrays if ".experts." in key)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(experts))
        array = arrays.get(key)
        if array is None or not array.size:
            continue
        match data.draw(st.sampled_from(["drop", "bits", "shape", "dtype", "rename", "cut"])):
            case "drop":
                del arrays[key]
            case "bits":
                raw = bytearray(array.tobytes())
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
                arrays[key] = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
            case "shape":
                arrays[key] = array.reshape(data.draw(st.sampled_from([(-1,), (1, -1), (-1, 1), array.shape[::-1]])))
            case "dtype":
                same_size = [d for d in shards.DTYPES.values() if d.itemsize == array.dtype.itemsize and d.kind != "b"]
                arrays[key] = array.view(data.draw(st.sampled_from(same_size)))
            case "rename":
                arrays[key.replace(*data.draw(st.sampled_from(RENAMINGS)))] = arrays.pop(key)
            case "cut":
                arrays[key] = np.atleast_1d(array)[: data.draw(st.integers(0, array.size))]
    directory = tmp_path_factory.mktemp("mutated")
    with contextlib.suppress(CheckpointError):  # and no other error
        ours = compressed_tensors.Reader(write(directory / "mutated", arrays, config), "concatenated")
        compressed_tensors.convert(ours, directory / "again")
        assert all(same(array, arrays[key]) for key, array in read(directory / "again" / shards.SINGLE).items())


RENAMINGS = [
    ("gate_proj", "up_proj"),
    (".1.", "."),
    (".1.", ".01."),
    (".0.mlp", ".1.mlp"),
    ("weight_", ""),
    ("_", "__"),
]


# Packing


@hypothesis.given(st.sampled_from([4, 8]), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_words_are_elements_from_the_least_significant_bit_up(bits, elements, rows, seed):
    limit = 1 << bits - 1
    values = np.random.default_rng(seed).integers(-limit, limit, (rows, elements)).astype(np.int8)
    expected = []
    for row in values.tolist():
        number = sum((value + limit) << (i * bits) for i, value in enumerate(row))
        expected.append([number >> (32 * i) & 0xFFFFFFFF for i in range(-(-elements * bits // 32))])
    words = np.array(expected, np.uint32).view(np.int32)
    packed = packing.bytes_of_elements(values, bits)
    assert packed.shape == (rows, -(-elements * bits // 8))
    assert same(packing.elements_of_bytes(packed, bits, elements), values)
    assert same(packing.words_of_bytes(packed, bits, elements), words)
    assert same(packing.bytes_of_words(words, bits, elements), packed)


def test_the_even_element_is_the_low_nibble():
    assert packing.bytes_of_elements(np.array([[1, -1, 3]], np.int8), 4).tolist() == [[0xF1, 0x03]]
