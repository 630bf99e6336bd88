"""Layers whose experts are in several formats: read in one in which all weights are the same, or requantized."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_checkpoint_compressed_tensors import LAYER, floats, write

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, quantizing
from jmx.checkpoint.compressed_tensors import Scheme, config_writer
from jmx.checkpoint.compressed_tensors.common_format import common_format
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.quantizing.output_forms import storage_of
from jmx.numerics.formats import FORMATS

SIZES = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
PARTS = tuple(SIZES)
ORDERED = "int4_g32_asym_order"  # which nothing quantizes to: its columns are drawn
INTEGERS = ("int4_g32", "int4_g64_asym", "int4_channel", "int8_g16", "int8_channel_asym", ORDERED)
FP8 = ("fp8_tensor", "fp8_channel", "fp8_block", "fp8_block_64x32")
MX = ("mxfp4", "mxfp8")


def pairs() -> Iterator[tuple[str, str]]:
    for family in (INTEGERS, FP8, MX):
        yield from itertools.permutations(family, 2)


def tensors(weight: np.ndarray, name: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A module's tensors: random weights quantized to a format."""
    format = FORMATS[name]
    plain = jmx.pack(jmx.quantize(weight, format=FORMATS[name.removesuffix("_order")]))
    plain = plain._replace(**{key: np.asarray(a) for key, a in plain._asdict().items() if a is not None})
    if "order" in format.arrays:
        order = rng.permutation(weight.shape[1]).reshape(-1, format.block_size)  # in a group they keep theirs
        plain = plain._replace(order=np.sort(order, axis=1).reshape(-1).astype(np.int32))
    return module_tensors(scheme(name), plain, {})


def scheme(name: str, inputs: str | None = None) -> Scheme:
    storage = "pack-quantized" if name.startswith("int") else storage_of(FORMATS[name])
    assert storage is not None
    return Scheme(name, inputs, storage)


def checkpoint(
    folder: Path, formats: Mapping[str, str | None], rng: np.random.Generator, inputs: str | None = None
) -> tuple[Path, dict[str, np.ndarray]]:
    """Two experts, whose modules have the format of the first pattern that matches; None: floats."""
    arrays, weights, targets, ignore = {}, {}, {}, ["lm_head"]
    orders: dict[str, np.random.Generator] = {}
    for expert, part in itertools.product(range(2), PARTS):
        module = f"{LAYER}.{expert}.{part}"
        name = next(its for pattern, its in formats.items() if re.search(pattern, module))
        weights[module] = rng.standard_normal(SIZES[part], np.float32)
        if name is None:
            ignore.append(module)
            weights[module] = weights[module].astype(ml_dtypes.bfloat16)
            arrays[f"{module}.weight"] = weights[module]
            continue
        its_inputs = inputs if part == "down_proj" else None
        targets.setdefault((name, its_inputs), []).append(module)
        seed = f"{expert} {'down' if part == 'down_proj' else 'gate_up'}"  # gate and up have one order
        order = orders.setdefault(seed, rng.spawn(1)[0])
        state = order.bit_generator.state
        arrays |= {f"{module}.{last}": a for last, a in tensors(weights[module], name, order).items()}
        order.bit_generator.state = state
    groups = {f"group_{i}": (its, scheme(*key)) for i, (key, its) in enumerate(targets.items())}
    config = {"model_type": "qwen3_moe", "quantization_config": config_writer.entries(groups, ignore)}
    return write(folder, arrays, config), weights


def dequantized(reader: compressed_tensors.Reader, module: str) -> np.ndarray:
    """float64 (N, K) of a module in its own format, from the module alone."""
    expert, part = module.removeprefix(f"{LAYER}.").split(".")
    role = "down" if part == "down_proj" else "gate_up"
    (its,) = (m for m in reader.layers[LAYER].modules[role][int(expert)] if m.name == module)
    assert its.scheme is not None, "not in floats"
    alone = compressed_tensors.Layer(LAYER, {role: [(its,)] for role in ("gate_up", "down")}, None, its.scheme)
    return floats(alone, "down")[0]


def check_same_numbers(reader: compressed_tensors.Reader) -> None:
    layer = reader.layers[LAYER]
    for role, parts in (("gate_up", PARTS[:2]), ("down", PARTS[2:])):
        found = floats(layer, role)
        for expert in range(2):
            expected = [dequantized(reader, f"{LAYER}.{expert}.{part}") for part in parts]
            np.testing.assert_array_equal(found[expert], np.concatenate(expected))


@pytest.mark.parametrize(("gate_up", "down"), [*pairs()])
def test_down_in_another_format_has_the_same_weights(gate_up, down, tmp_path, rng):
    path, _ = checkpoint(tmp_path / "mixed", {"down_proj": down, "": gate_up}, rng)
    reader = compressed_tensors.Reader(path)
    check_same_numbers(reader)
    format = reader.layers[LAYER].format
    message = f"experts {LAYER!r} are {min(gate_up, down)} and {max(gate_up, down)} in the files"
    with pytest.warns(UserWarning, match=re.escape(f"{message}: all are held in {format.name}, as the same numbers")):
        experts = reader.experts(LAYER)
    assert experts.format == format
    expected = floats(reader.layers[LAYER], "down")
    np.testing.assert_allclose(np.asarray(experts.dequantize(np.float32)[1]), expected, rtol=1e-6)
    compressed_tensors.convert(reader, tmp_path / "again")  # each module in its own scheme
    again = compressed_tensors.Reader(tmp_path / "again")
    assert all(np.array_equal(again.view(name), reader.view(name)) for name in reader.tensors)


@pytest.mark.parametrize("formats", [INTEGERS[:3], FP8[:3], MX])
def test_experts_and_projections_in_formats_of_their_own(formats, tmp_path, rng):
    names: dict[str, str | None] = dict(
        zip((r"0\.gate_proj", r"1\.down_proj", ""), itertools.cycle(formats), strict=False)
    )
    check_same_numbers(compressed_tensors.Reader(checkpoint(tmp_path / "mixed", names, rng)[0]))


def test_the_common_format():
    for names, expected in (
        (("int4_g32", "int4_g48"), "int4_g16"),
        (("int4_channel", "int8_channel"), "int8_channel"),
        (("int4_channel_asym", "int8_g128"), "int8_g128_asym"),
        (("int4_g32", "int4_g128_order"), "int4_g32_order"),
        (("fp8_tensor", "fp8_channel"), "fp8_channel"),
        (("fp8_tensor", "fp8_block"), "fp8_block"),
        (("fp8_block_64x48", "fp8_block"), "fp8_block_128x16"),
        (("mxfp4", "mxfp8"), "mxfp8"),
        (("nvfp4", "nvfp4"), "nvfp4"),
        (("nvfp4", "fp8_tensor"), None),
        (("mxfp8", "fp8_channel"), None),
        (("int8_g32", "fp8_channel"), None),
        (("mxfp4", "mxfp8", "int8_g32"), None),
    ):
        found = common_format(FORMATS[name] for name in names)
        assert (None if found is None else found.name) == expected, names


def test_inputs_that_differ_are_refused_unless_they_stay_as_they_are(tmp_path, rng):
    path, _ = checkpoint(tmp_path / "mixed", {"": "int8_channel"}, rng, inputs="int8_token")
    reader = compressed_tensors.Reader(path)
    with pytest.raises(
        CheckpointError, match=rf"inputs of experts '{LAYER}' are of '0.gate_proj' .* and '0.down_proj'"
    ):
        reader.experts(LAYER)
    assert reader.experts(LAYER, inputs=False).format.name == "int8_channel"


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"down_proj": "fp8_channel", "": "nvfp4"}, "must be in one format, or in several that have one in common"),
        ({r"0\.up_proj": None, "down_proj": "mxfp8", "": "int4_g32"}, "but are of '0.gate_proj' .* and '0.down_proj'"),
    ],
    ids=["NVFP4 and FP8", "floats, too"],
)
def test_what_has_no_common_format_is_refused_and_can_be_requantized(formats, message, tmp_path, rng):
    path, weights = checkpoint(tmp_path / "mixed", formats, rng)
    with pytest.raises(CheckpointError, match=rf"{message}.*jmx convert IN OUT --quantize FORMAT"):
        compressed_tensors.Reader(path)
    report = quantizing.convert(path, tmp_path / "one", "fp8_channel")
    assert report.total()["down"].relative_error < 0.03
    found = compressed_tensors.Reader(tmp_path / "one")
    assert found.layers[LAYER].format.name == "fp8_channel"
    for module, weight in weights.items():
        weight = weight.astype(np.float64)
        error = np.linalg.norm(dequantized(found, module) - weight) / np.linalg.norm(weight)
        assert error < 0.15, module  # of four bits, where it had them
    assert json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


IN_FLOATS = {"an expert": r"experts\.1\.", "a projection": r"0\.up_proj", "all down": "down_proj"}


@pytest.mark.parametrize("name", ["int4_g32", "int8_channel_asym", ORDERED, *FP8, *MX, "nvfp4"])
@pytest.mark.parametrize("place", IN_FLOATS)
def test_modules_in_floats_are_rounded_as_quantize_does(name, place, tmp_path, rng):
    path, weights = checkpoint(tmp_path / "mixed", {IN_FLOATS[place]: None, "": name}, rng)
    reader, plain = compressed_tensors.Reader(path), FORMATS[name.removesuffix("_order")]
    layer = reader.layers[LAYER]
    left = [module for module in weights if re.search(IN_FLOATS[place], module)]
    errors = {}
    with pytest.warns(UserWarning, match=f"experts {LAYER!r}: .* are floats in the files, and were rounded to {name} "):
        experts = reader.experts(LAYER, layout="canonical")
    assert experts.format.name == name
    found = [np.asarray(a, np.float64) for a in experts.dequantize(np.float32)]
    for module, weight in weights.items():
        expert, part = module.removeprefix(f"{LAYER}.").split(".")
        rows = {"gate_proj": slice(0, 64), "up_proj": slice(64, 128)}.get(part, slice(None))
        its = found[part == "down_proj"][int(expert), rows]
        if module not in left:
            np.testing.assert_allclose(its, dequantized(reader, module), rtol=1e-6)
            continue
        order = np.arange(weight.shape[1])
        if "order" in experts.format.arrays and place == "a projection":  # as gate has it
            order = np.asarray(experts.arrays()["gate_up_order"])[int(expert)]
        expected = np.empty(weight.shape)
        quantized = jmx.quantize(weight[:, order], format=plain)
        expected[:, order] = np.asarray(jmx.dequantize(quantized, np.float32, format=plain), np.float64)
        np.testing.assert_allclose(its, expected, rtol=1e-6)
        exact = weight.astype(np.float64)
        errors[f"{expert}.{part}"] = np.linalg.norm(expected - exact) / np.linalg.norm(exact)
    worst = max(errors, key=lambda each: errors[each])
    message = f"with a relative error of {errors[worst]:.2g} at most ({worst!r})"
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        reader.arrays(LAYER)
    assert {Path(warning.filename).parent for warning in caught} == {Path(__file__).parent}, "where it is called"
    assert all(module.error is None for module in layer.rounded), "what was read is freed"
    compressed_tensors.convert(reader, tmp_path / "again")  # floats as they are
    again = compressed_tensors.Reader(tmp_path / "again")
    assert all(np.array_equal(again.view(name), reader.view(name)) for name in reader.tensors)


def test_floats_beside_weights_in_order_where_others_have_another(tmp_path, rng):
    """Their format has an order, which those with the same inputs in the files do not."""
    formats = {r"0\.gate_proj": None, "down_proj": ORDERED, "": "int8_g32_asym"}
    path, weights = checkpoint(tmp_path / "mixed", formats, rng)
    reader = compressed_tensors.Reader(path)
    with pytest.warns(UserWarning, match="'0.gate_proj' are floats in the files|are held in int8_g32_asym_order"):
        experts = reader.experts(LAYER, layout="canonical")
    assert "order" in experts.format.arrays
    gate = np.asarray(experts.dequantize(np.float32)[0])[0, : SIZES["gate_proj"][0]]
    exact = weights[f"{LAYER}.0.gate_proj"].astype(np.float32)
    assert np.linalg.norm(gate - exact) < 0.01 * np.linalg.norm(exact)


def test_inputs_of_modules_in_floats(tmp_path, rng):
    path, _ = checkpoint(tmp_path / "dynamic", {r"1\.down_proj": None, "": "int8_channel"}, rng)
    config = json.loads((path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    inputs = config_writer.entries({"group_0": (["x"], scheme("int8_channel", "int8_token"))}, [])
    inputs = inputs["config_groups"]["group_0"]["input_activations"]
    groups["group_0"]["input_activations"] = inputs
    (path / "config.json").write_text(json.dumps(config))
    reader = compressed_tensors.Reader(path)
    with pytest.warns(UserWarning, match="'1.down_proj' are floats .*; with `inputs`, theirs are int8_token as the"):
        assert reader.experts(LAYER).input_format == "int8_token"


def test_static_inputs_of_modules_in_floats_have_no_scale(tmp_path, rng):
    folder, weights = checkpoint(tmp_path / "static", {r"1\.down_proj": None, "": "fp8_channel"}, rng)
    config = json.loads((folder / "config.json").read_text())
    groups = {"group_0": (["re:.*"], scheme("fp8_channel", "fp8_static"))}
    config["quantization_config"] = config_writer.entries(groups, ["lm_head", f"{LAYER}.1.down_proj"])
    arrays = {name: compressed_tensors.Reader(folder).view(name) for name in compressed_tensors.Reader(folder).tensors}
    scale = np.ones(1, np.float32)
    scales = {f"{module}.input_scale": scale for module in weights if not module.endswith("1.down_proj")}
    reader = compressed_tensors.Reader(write(tmp_path / "scaled", arrays | scales, config))
    message = rf"'{LAYER}.1.down_proj.weight' is in floats: it has no static scale .*; `inputs=False` loads"
    with pytest.raises(CheckpointError, match=message):
        reader.experts(LAYER)
    with pytest.warns(UserWarning, match="rounded to fp8_channel"):
        assert reader.experts(LAYER, inputs=False).input_format is None


def test_weights_in_floats_are_finite_and_divided_by_the_format(tmp_path, rng):
    path, _ = checkpoint(tmp_path / "nan", {r"1\.down_proj": None, "": "int4_g32"}, rng)
    reader = compressed_tensors.Reader(path)
    arrays = {name: reader.view(name).copy() for name in reader.tensors}
    name = f"{LAYER}.1.down_proj.weight"
    arrays[name][0, 3] = np.nan
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"{name}' must hold finite numbers"):
        compressed_tensors.Reader(write(tmp_path / "again", arrays, config)).arrays(LAYER)
