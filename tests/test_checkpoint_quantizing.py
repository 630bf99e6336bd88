"""Quantizing a checkpoint's float experts: every writable format against `jmx.quantize`, and what is rejected."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from float_checkpoints import TINY, float_gpt_oss, write

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, gpt_oss, quantizing
from jmx.checkpoint.quantizing import writer
from jmx.numerics import formats
from jmx.numerics.formats import FORMATS, Format

pytestmark = pytest.mark.sampled(3)

E, H, I = 2, 128, 160  # noqa: E741 (the field's name)
BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {"BF16": BF16, "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
UNEVEN = ("mxfp4", "nvfp4", "int4_g32_asym", "fp8_tensor", "fp8_block")
PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def random(rng: np.random.Generator, *shape: int, dtype: np.dtype = BF16) -> np.ndarray:
    """Rows and columns of different sizes."""
    sizes = np.exp2(rng.uniform(-3, 3, (shape[-2] if len(shape) > 1 else 1, 1)))
    return (rng.standard_normal(shape) * sizes).reshape(shape).astype(dtype)


def qwen(path: Path, rng: np.random.Generator, dtype: np.dtype = BF16, spelling: dict[str, str] = PARTS, size: int = I):
    """Two layers of experts and the tensors around them. Returns the path and the tensors."""
    tensors = {"model.embed_tokens.weight": random(rng, 7, H)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}self_attn.q_proj.weight": random(rng, 32, H), f"{at}mlp.gate.weight": random(rng, E, H)}
        for expert in range(E):
            for part, name in spelling.items():
                shape = (H, size) if part == "down" else (size, H)
                tensors[f"{at}mlp.experts.{expert}.{name}.weight"] = random(rng, *shape, dtype=dtype)
    tensors["lm_head.weight"] = random(rng, 7, H)
    return write(path, tensors, {"model_type": "qwen3_moe", "hidden_size": H}), tensors


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def expected_errors(weights: list[np.ndarray], format: Format) -> tuple[float, float]:
    """Relative error and clipped share, in float64 from the definition, element by element."""
    error = total = clipped = count = 0
    elements = format.elements()
    for weight in weights:
        q = jmx.quantize(jnp.asarray(weight), format)
        blocks = np.arange(weight.shape[1]) // (10**9 if format.block_size < 0 else format.block_size)
        scale = np.asarray(q.scales).astype(np.float64)[:, blocks]
        if q.global_scales is not None:
            scale *= np.asarray(q.global_scales, np.float64)[:, None]
        zero = 0 if q.zero_points is None else np.asarray(q.zero_points, np.float64)[:, blocks]
        wide = weight.astype(np.float64)
        error += np.sum((np.asarray(jmx.dequantize(q, jnp.float32, format), np.float64) - wide) ** 2)
        total += np.sum(wide**2)
        quotients = wide / scale + zero
        clipped += np.sum((quotients > np.nanmax(elements)) | (quotients < np.nanmin(elements)))
        count += wide.size
    return float(np.sqrt(error / total)), clipped / count


@pytest.mark.parametrize("name", quantizing.WRITABLE)
def test_experts_are_what_quantize_makes_of_them(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    format = FORMATS[name]
    size = I if name in UNEVEN else H  # one shape is compiled in half the time
    dtype = NAMES[str(rng.choice(list(NAMES)))]
    source, tensors = qwen(tmp_path / "in", rng, dtype, size=size)
    report = quantizing.convert(source, tmp_path / "out", format, max_shard_bytes=int(rng.integers(1, 300_000)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    reader = compressed_tensors.Reader(tmp_path / "out")
    assert [*reader.layers] == [*report.layers] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    for layer in reader.layers:
        assert reader.layers[layer].scheme.inputs is None
        experts = reader.experts(layer, "packed")
        for expert in range(E):
            its = [tensors[f"{layer}.{expert}.{part}.weight"] for part in PARTS.values()]
            made = [formats.pack(jmx.quantize(jnp.asarray(weight), format)) for weight in its]
            for role, parts in (("gate_up", made[:2]), ("down", made[2:])):
                for array in format.arrays:
                    want = np.concatenate([np.asarray(getattr(q, array)) for q in parts])
                    got = np.asarray(getattr(getattr(experts, role), array))[expert]
                    if array == "global_scales":  # which files hold as a reciprocal
                        np.testing.assert_allclose(got, want, rtol=3e-7)
                    else:
                        assert equal(got, want)
    for layer in range(2):
        for part, projection in PARTS.items():
            at = f"model.layers.{layer}.mlp.experts"
            relative, clipped = expected_errors([tensors[f"{at}.{e}.{projection}.weight"] for e in range(E)], format)
            assert report.layers[at][part].relative_error == pytest.approx(relative, rel=1e-5)
            assert report.layers[at][part].clipped_share == pytest.approx(
                clipped, abs=2 / tensors[at + ".0.up_proj.weight"].size
            )
            assert 0 < relative < 0.3
    for tensor, array in tensors.items():
        if ".experts." not in tensor:
            assert equal(reader.view(tensor), array)
            assert reader.quantization.scheme(tensor.removesuffix(".weight")) is None
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())


def test_mixtrals_names_stay(tmp_path: Path, rng: np.random.Generator) -> None:
    source, tensors = qwen(tmp_path / "in", rng, spelling={"gate": "w1", "up": "w3", "down": "w2"})
    quantizing.convert(source, tmp_path / "out", jmx.MXFP4)
    experts = compressed_tensors.Reader(tmp_path / "out").experts("model.layers.1.mlp.experts", "packed")
    want = formats.pack(jmx.quantize(jnp.asarray(tensors["model.layers.1.mlp.experts.1.w2.weight"]), jmx.MXFP4))
    assert equal(np.asarray(experts.down.values)[1], np.asarray(want.values))


def test_gpt_oss_in_mxfp4_comes_back_to_the_bit_as_its_own_form(tmp_path: Path) -> None:
    source, _ = float_gpt_oss(tmp_path / "in")
    report = quantizing.convert(source, tmp_path / "out", jmx.MXFP4)
    assert report.form == "gpt-oss"
    ours, theirs = gpt_oss.Reader(tmp_path / "out"), gpt_oss.Reader(TINY)
    for layer in range(4):
        weights = [jmx.dequantize(r.experts(layer, "packed").gate_up, jnp.float32) for r in (ours, theirs)]
        assert equal(*map(np.asarray, weights))  # a block whose largest element is small has a smaller scale now
        assert equal(*(np.asarray(r.experts(layer, "packed").down_bias) for r in (ours, theirs)))
    assert all(errors.relative_error == 0 for errors in report.total().values())


@pytest.mark.parametrize("name", ["nvfp4", "int4_g32_asym", "fp8_block"])
def test_gpt_oss_in_other_formats_is_compressed_tensors(name: str, tmp_path: Path) -> None:
    source, tensors = float_gpt_oss(tmp_path / "in")
    report = quantizing.convert(source, tmp_path / "out", FORMATS[name])
    assert report.form == "compressed-tensors"
    reader = compressed_tensors.Reader(tmp_path / "out")
    experts = reader.experts("model.layers.2.mlp.experts", "packed")
    at = "model.layers.2.mlp.experts."
    fused, bias = tensors[f"{at}gate_up_proj"], tensors[f"{at}gate_up_proj_bias"]
    for expert in range(experts.num_experts):
        halves = [jnp.asarray(np.ascontiguousarray(fused[expert].T[i::2])) for i in (0, 1)]
        want = np.concatenate([np.asarray(formats.pack(jmx.quantize(half, FORMATS[name])).values) for half in halves])
        assert equal(np.asarray(experts.gate_up.values)[expert], want)
        assert equal(np.asarray(experts.gate_up_bias)[expert], np.concatenate([bias[expert][i::2] for i in (0, 1)]))
        assert equal(np.asarray(experts.down_bias)[expert], tensors[f"{at}down_proj_bias"][expert])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - quantizing.WRITABLE.keys()))
def test_formats_that_no_file_holds_are_refused_with_what_can(name: str, tmp_path: Path) -> None:
    why = "not quantized" if FORMATS[name].is_float else "calibration" if name.endswith("_order") else "no file form"
    with pytest.raises(
        ValueError, match=rf"`format` \(='{name}'\) cannot be written: .*{why}.*; what can: mxfp4, nvfp4"
    ):
        quantizing.convert(TINY, tmp_path / "out", FORMATS[name])


def edit_config(path: Path, **entries: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))


CASES: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "none": (lambda t: [t.pop(n) for n in [*t] if ".experts." in n], "must hold tensors of experts"),
    "lacking": (
        lambda t: t.pop("model.layers.1.mlp.experts.0.up_proj.weight"),
        r"1.mlp.experts.0.up_proj.weight' is missing",
    ),
    "gap": (
        lambda t: [t.pop(f"model.layers.0.mlp.experts.0.{p}.weight") for p in PARTS.values()],
        r"0.mlp.experts.0.gate_proj.weight' is missing, where experts are 1",
    ),
    "last": (
        lambda t: [t.pop(f"model.layers.0.mlp.experts.1.{p}.weight") for p in PARTS.values()],
        r"config.json: `num_experts` \(=2\) must be 1, the experts that 'model.layers.0.mlp.experts' has",
    ),
    "more": (
        lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight_scale": t["lm_head.weight"]}),
        "weight_scale' is not one of float experts",
    ),
    "dtype": (
        lambda t: t.update({n: t[n].view(np.int16) for n in t if n.endswith("0.mlp.experts.1.up_proj.weight")}),
        "is I16, but must be BF16 or F16 or F32",
    ),
    "shape": (
        lambda t: t.update({n: t[n][:-1] for n in t if n.endswith("0.mlp.experts.1.up_proj.weight")}),
        r"must be as that of expert 0 of 'model.layers.0.mlp.experts': \(160, 128\)",
    ),
    "bias": (
        lambda t: t.update({f"model.layers.1.mlp.experts.{e}.down_proj.bias": np.ones(H, BF16) for e in range(E)}),
        r"'model.layers.1.mlp.experts': all of .* must have a bias, or none, but \['down'\] have one",
    ),
    "name": (
        lambda t: t.update({"model.layers.0.mlp.experts.0.side_proj.weight": t["lm_head.weight"]}),
        "must be of .*'gate_proj', 'up_proj', 'down_proj'.* but are of .*side_proj",
    ),
    "fused": (
        lambda t: t.update({"model.layers.2.mlp.experts.gate_up_proj": t["lm_head.weight"]}),
        r"2.mlp.experts.gate_up_proj' \(shape .*\) must be \(E, out, in\), with gate and up rows",
    ),
    "nan": (
        lambda t: t["model.layers.1.mlp.experts.1.down_proj.weight"].__setitem__((5, 3), np.nan),
        r"1.mlp.experts.1.down_proj.weight': `x` holds 1 NaN .* at \(5, 3\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_that_cannot_be_quantized_are_refused_by_name(
    case: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    change, message = CASES[case]
    _, tensors = qwen(tmp_path / "first", rng)
    change(tensors)
    source = write(tmp_path / "in", tensors, {"model_type": "qwen3_moe", "num_experts": 2})
    with pytest.raises(CheckpointError, match=message):
        quantizing.convert(source, tmp_path / "out", jmx.NVFP4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "in"]


def test_what_is_quantized_or_does_not_divide_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(CheckpointError, match="`quantization_config` must not be there"):
        quantizing.convert(TINY, tmp_path / "out", jmx.MXFP4)
    source, _ = qwen(tmp_path / "in", rng)
    with pytest.raises(CheckpointError, match=r"0.down_proj.weight': `columns` \(=160\) must be a multiple of 128"):
        quantizing.convert(source, tmp_path / "out", FORMATS["int4_g128"])
    with pytest.raises(ValueError, match="`max_shard_bytes` "):
        quantizing.convert(source, tmp_path / "out", jmx.MXFP4, max_shard_bytes=0)
    for place in (source, tmp_path):
        with pytest.raises(ValueError, match=r"`dst` .* must not be, hold or lie in `src`"):
            quantizing.convert(source, place, jmx.MXFP4, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_interrupted_leaves_what_was_there(
    error: type[BaseException], tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = qwen(tmp_path / "in", rng)
    quantizing.convert(source, tmp_path / "out", FORMATS["fp8_channel"])
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(FileExistsError, match="out must not exist yet, unless `--overwrite`"):
        quantizing.convert(source, tmp_path / "out", jmx.MXFP4)
    calls = []

    def quantize(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 8:
            raise error
        return jmx.quantize(*arguments)  # pyright: ignore

    with monkeypatch.context() as patch:
        patch.setattr(writer, "quantize", quantize)
        with pytest.raises(error):
            quantizing.convert(source, tmp_path / "out", jmx.MXFP4, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    quantizing.convert(source, tmp_path / "out", jmx.MXFP4, overwrite=True)
    reader = compressed_tensors.Reader(tmp_path / "out")
    assert {reader.layers[name].scheme.weights for name in reader.layers} == {"mxfp4"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("stored", [True, False])
def test_the_head_is_ignored_by_name_whether_files_hold_it_or_not(
    prefix: str, stored: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    _, tensors = qwen(tmp_path / "first", rng)
    tensors = {prefix + name: array for name, array in tensors.items() if stored or name != "lm_head.weight"}
    source = write(tmp_path / "in", tensors, {"model_type": "qwen3_moe", "tie_word_embeddings": not stored})
    quantizing.convert(source, tmp_path / "out", FORMATS["fp8_block"])
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert f"{prefix}lm_head" in ignore
    assert len({*ignore}) == len(ignore)
    assert f"{prefix}model.embed_tokens" in ignore


@pytest.mark.parametrize(
    ("prefix", "heads"),
    [
        ("model.", {"lm_head"}),
        ("model.language_model.", {"lm_head"}),  # as Qwen3-VL-MoE has it
        ("language_model.model.", {"lm_head", "language_model.lm_head"}),  # as Kimi has it
    ],
)
def test_a_tied_head_is_looked_for_beside_the_model_alone(
    prefix: str, heads: set[str], tmp_path: Path, rng: np.random.Generator
) -> None:
    _, tensors = qwen(tmp_path / "first", rng)
    tensors = {name.replace("model.", prefix): a for name, a in tensors.items() if name != "lm_head.weight"}
    quantizing.convert(write(tmp_path / "in", tensors, {"model_type": "x"}), tmp_path / "out", FORMATS["fp8_block"])
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {*ignore} - {name.removesuffix(".weight") for name in tensors} == heads


@pytest.mark.parametrize("how", ["same bytes", "other bytes"])
def test_weights_that_were_written_again_are_not_replaced(how: str, tmp_path: Path, rng: np.random.Generator) -> None:
    source, _ = qwen(tmp_path / "in", rng)
    quantizing.convert(source, tmp_path / "out", jmx.MXFP4)
    weights = tmp_path / "out" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= how == "other bytes"
    weights.write_bytes(content)
    with pytest.raises(FileExistsError, match=r"'model\.safetensors' is not as jmx wrote it"):
        quantizing.convert(source, tmp_path / "out", jmx.NVFP4, overwrite=True)
    assert weights.read_bytes() == content
