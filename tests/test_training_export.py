"""Models with master weights: reading, training, and the checkpoints that `jmx.training.export` writes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmx
import jmx.models
from jmx import training
from jmx.checkpoint import shards
from jmx.models import GptOss, load
from jmx.training import QAT
from tests.float_checkpoints import float_gpt_oss
from tests.test_models_families import GOLDEN, NEW, assert_same

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"


def config_of(**changes: Any) -> Any:
    config = jmx.models.FAMILIES["gpt_oss"].read_config(TINY)
    return dataclasses.replace(
        config, num_hidden_layers=1, layer_types=config.layer_types[:1], vocab_size=96, **changes
    )


def model_of(rng: np.random.Generator, format: str | None = "mxfp4", qat: QAT | None = QAT(), **options: Any) -> GptOss:  # noqa: B008
    model = GptOss(config_of(), format=format, qat=qat, **options, rngs=nnx.Rngs(int(rng.integers(2**31))))
    for _, variable in nnx.iter_graph(model):  # biases and norms, too, are random
        if isinstance(variable, nnx.Param) and variable.get_value().ndim < 3:
            its = variable.get_value()
            variable.set_value(its + jnp.asarray(0.1 * rng.normal(size=its.shape), its.dtype))
    return model


def logits_of(model: Any, tokens: jax.Array) -> jax.Array:
    x, _ = model(tokens, None, model.empty_cache(*tokens.shape).layers)
    return model.logits(x)


@pytest.mark.costly
@pytest.mark.parametrize("gradients", ["straight_through", "clipped"])
def test_a_trained_model_is_served_with_the_outputs_of_training(gradients, rng, tmp_path):
    model = model_of(rng, qat=QAT(gradients))
    tokens = jnp.asarray(rng.integers(0, 96, (2, 9)), jnp.int32)
    trained = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, trained):
        def loss_of(model):
            chances = jax.nn.log_softmax(logits_of(model, tokens)[:, :-1])
            return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()

        loss, found = nnx.value_and_grad(loss_of)(model)
        trained.update(model, found)
        return loss

    losses = [float(step(model, trained)) for _ in range(3)]
    assert losses[-1] < losses[0]
    training.check_finite([losses, nnx.state(model, nnx.Param)], step=3)
    training.export(tmp_path / "out", model)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    served = load(tmp_path / "out")
    np.testing.assert_array_equal(logits_of(served, tokens), logits_of(model, tokens))
    again = load(tmp_path / "out", qat=QAT())  # trains from the values in the files
    assert again.format == jmx.MXFP4
    np.testing.assert_array_equal(
        again.layers[0].moe.experts.dequantize()[0], served.layers[0].moe.experts.dequantize()[0]
    )


@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "int8_channel_asym", "fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("name", NEW)
def test_exported_masters_are_the_experts_that_reading_quantizes(name, format, tmp_path):
    model = load(GOLDEN / name, format=format, qat=QAT())
    training.export(tmp_path / "out", model, like=GOLDEN / name)
    assert_same(load(tmp_path / "out"), load(GOLDEN / name, format=format))


@pytest.mark.costly
def test_scale_rules_and_other_forms_of_gpt_oss(rng, tmp_path):
    model = model_of(rng, qat=QAT(scale_rule="round_up"))
    training.export(tmp_path / "blocks", model)
    read = load(tmp_path / "blocks")
    training.export(tmp_path / "again", read)  # experts that are quantized already
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "blocks" / name).read_bytes()
    found = read.layers[0].moe.experts
    jax.tree.map(np.testing.assert_array_equal, found.prepare("packed"), model.layers[0].moe.experts)
    other = model_of(rng, "int8_channel")
    (tmp_path / "blocks" / "LICENSE").write_text("free")
    training.export(tmp_path / "apart", other, like=tmp_path / "blocks")
    assert (tmp_path / "apart" / "LICENSE").read_text() == "free"
    read = load(tmp_path / "apart").layers[0].moe.experts
    assert read.format.name == "int8_channel"
    for its, wanted in zip(read.dequantize(), other.layers[0].moe.experts.dequantize(), strict=True):
        assert sorted(np.ravel(its).tolist()) == sorted(np.ravel(wanted).tolist())  # rows may be in another order


@pytest.mark.costly
@pytest.mark.parametrize(
    ("format", "qat", "dtype"),
    [
        (None, None, "bfloat16"),
        ("float32", None, "bfloat16"),  # each call rounds them, and so does reading
        ("float16", None, "float32"),
        ("bfloat16", QAT(), "bfloat16"),
    ],
)
def test_float_experts_are_read_again_with_the_same_outputs(format, qat, dtype, rng, tmp_path):
    model = model_of(rng, format, qat, dtype=jnp.dtype(dtype))
    training.export(tmp_path / "out", model)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = load(tmp_path / "out", dtype=dtype)
    tokens = jnp.asarray(rng.integers(0, 96, (2, 9)), jnp.int32)
    np.testing.assert_array_equal(logits_of(found, tokens), logits_of(model, tokens))
    training.export(tmp_path / "again", found)
    assert_same(load(tmp_path / "again", dtype=dtype), found)


@pytest.mark.costly
@pytest.mark.parametrize("name", NEW)
def test_exported_floats_are_the_tensors_that_were_read(name, tmp_path):
    model = load(GOLDEN / name, dtype="float32")
    training.export(tmp_path / "out", model, like=GOLDEN / name)
    wanted, found = (shards.read_headers(path) for path in (GOLDEN / name, tmp_path / "out"))
    assert {*found} == {*wanted}
    for tensor in wanted:
        np.testing.assert_array_equal(found[tensor].view().astype(np.float32), wanted[tensor].view().astype(np.float32))


@pytest.mark.costly
def test_exported_floats_of_gpt_oss_have_the_form_before_quantization(tmp_path):
    path, wanted = float_gpt_oss(tmp_path / "floats", num_layers=1)
    training.export(tmp_path / "out", load(path), like=path)
    found = shards.read_headers(tmp_path / "out")
    assert {*found} == {*wanted}
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name].view().astype(np.float32), array.astype(np.float32))


def test_models_keep_master_weights_in_orbax(rng, tmp_path):
    model = model_of(rng, qat=QAT("clipped", dtype=jnp.bfloat16))
    jmx.models.save(tmp_path / "saved", model)
    found = jmx.models.restore(tmp_path / "saved", model.config, format="mxfp4", qat=model.qat)
    assert_same(found, model)


@pytest.mark.costly
def test_what_no_file_can_hold_is_refused_before_anything_is_written(rng, tmp_path):
    model, new = model_of(rng), tmp_path / "new"

    def refused(error: Any, message: str, model: Any = model, path: Any = new, **options: Any) -> None:
        with pytest.raises(error, match=message):
            training.export(path, model, **options)
        assert [*tmp_path.iterdir()] == before

    (tmp_path / "there").mkdir()
    before = [*tmp_path.iterdir()]
    refused(FileExistsError, "there", path=tmp_path / "there")
    refused(FileNotFoundError, "no", path=tmp_path / "no" / "out")
    floats = GptOss(config_of(), rngs=nnx.Rngs(0))
    bias = floats.layers[0].moe.gate_up_bias
    bias.set_value(bias.get_value().astype(jnp.float32))
    refused(ValueError, r"experts.gate_up_bias` \(float32\) must have the model's dtype, bfloat16", floats)
    refused(ValueError, "`like`", like=TINY)  # has more layers
    refused(ValueError, "must be BF16", model_of(rng, dtype=jnp.float32))
    down = model.layers[0].moe.down
    good = down.get_value()
    down.set_value(good.at[1, 2, 3].set(jnp.inf))
    refused(ValueError, r"`model.layers\[0\].moe.down` must be finite")
    down.set_value(good)
    norm = model.final_norm.scale
    norm.set_value(norm.get_value().at[0].set(jnp.nan))
    refused(ValueError, "`final_norm` must be finite")


def test_an_interrupted_export_leaves_nothing(rng, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jmx.checkpoint.shards.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        training.export(tmp_path / "out", model_of(rng))
    assert not [*tmp_path.iterdir()]


def test_models_without_a_format_have_no_master_weights():
    with pytest.raises(ValueError, match=r"`format` \(=None\) must be given for a model with `qat`"):
        GptOss(config_of(), qat=QAT(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"`format` \(=None\) must be given with `qat`"):
        load(GOLDEN / "mixtral", qat=QAT())
    with pytest.raises(ValueError, match=r"`format` \(='int8_channel'\) must be that of the experts in the files"):
        load(TINY, format="int8_channel", qat=QAT())
