"""Float experts of a layer in one tensor a role, as transformers 5 writes them without `save_original_format`."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jmx
from jmx.checkpoint import CheckpointError, quantizing
from jmx.checkpoint.quantizing.float_experts import FUSED
from jmx.models import FAMILIES, Model, load

pytestmark = pytest.mark.costly

DATA = Path(__file__).parent / "data"
WRITTEN: dict[str, dict[str, tuple[str, list[int], str]]] = json.loads((DATA / "fused.json").read_text())
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of a layer's experts together, and Mixtral's module under its newer name."""
    layers: dict[str, dict[int, dict[int, np.ndarray]]] = {}
    found = {}
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name] = tensor
        else:
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[_PARTS[match[3]]] = tensor
    for name, experts in layers.items():
        parts = [[experts[expert][part] for expert in range(len(experts))] for part in range(3)]
        gate, up, down = map(np.stack, parts)
        found |= {f"{name}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{name}.down_proj": down}
    return found


def written(folder: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any] = lambda t: None) -> Path:
    """A golden checkpoint with fused experts and then other tensors."""
    folder.mkdir()
    tensors = fused(load_file(DATA / name / "model.safetensors"))
    change(tensors)
    save_file({its: np.ascontiguousarray(array) for its, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((DATA / name / "config.json").read_bytes())
    return folder


def assert_same(one: Model, other: Model) -> None:
    """Same variables, bit by bit."""
    first, second = (nnx.to_flat_state(nnx.state(model)) for model in (one, other))
    for (path, variable), (its_path, its) in zip(first, second, strict=True):
        assert path == its_path
        assert np.array_equal(variable.get_value(), its.get_value()), path


@pytest.mark.parametrize("name", WRITTEN)
def test_the_layout_is_that_of_transformers(name: str) -> None:
    before = load_file(DATA / name / "model.safetensors")
    after = fused(before)
    assert {*WRITTEN[name]} == after.keys() - before.keys()
    for its, (dtype, shape, digest) in WRITTEN[name].items():
        assert (str(after[its].dtype), [*after[its].shape]) == (dtype, shape)
        assert hashlib.sha256(np.ascontiguousarray(after[its]).tobytes()).hexdigest() == digest


def test_every_family_and_model_type_has_a_layout() -> None:
    """Kimi-K2 has none: transformers runs it as code of its own. Of other types only experts are read."""
    types = {its for family in FAMILIES.values() for types in family.architectures.values() for its in types}
    assert FUSED.keys() >= types - {"kimi_k2"}
    in_files = {json.loads((DATA / name / "config.json").read_text())["model_type"] for name in WRITTEN}
    assert in_files == types - {"kimi_k2", "gpt_oss"}


@pytest.mark.parametrize("format", [None, "int8_channel"])
@pytest.mark.parametrize("name", WRITTEN)
def test_fused_experts_are_the_same_model(name: str, format: str | None, tmp_path: Path) -> None:
    """As their golden checkpoint, whose logits are those of transformers, as floats and rounded on reading."""
    options: dict[str, Any] = {"format": None if format is None else jmx.FORMATS[format], "dtype": jnp.float32}
    assert_same(load(written(tmp_path / "it", name), **options), load(DATA / name, **options))


@pytest.mark.parametrize("name", ["families/mixtral", "families/glm4_moe"])
def test_fused_experts_are_converted(name: str, tmp_path: Path) -> None:
    quantizing.convert(written(tmp_path / "in", name), tmp_path / "out", "fp8_channel")
    quantizing.convert(DATA / name, tmp_path / "apart", "fp8_channel")
    assert_same(load(tmp_path / "out"), load(tmp_path / "apart"))


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj"), f"tensor '{EXPERTS}.down_proj' is missing"),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj": t[f"{EXPERTS}.gate_up_proj"][:, :-1]}),
            "(shape (6, 63, 32)) must be (E, out, in), with gate and up rows",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"][0]}),
            "(shape (32, 32)) must be (E, out, in)",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"][:-1]}),
            "must be of one number of experts, not [5, 6]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"][:, :, :-1]}),
            "must be gate and up (I, H) and down (H, I), but are (32, 32), (32, 32) and (32, 31)",
        ),
        (
            lambda t: t.update({n: a[:-1] for n, a in t.items() if n.startswith(EXPERTS)}),
            f"`num_experts` (=6) must be 5, the experts that '{EXPERTS}' has",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj_bias": np.ones((6, 64), np.float32)}),
            f"tensor '{EXPERTS}.gate_up_proj_bias' is not one of float experts",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"].view(np.int16)}),
            "is I16, but must be BF16 or F16 or F32",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.0.up_proj.weight": np.ones((32, 32), np.float32)}),
            f"experts of '{EXPERTS}' must be in separate tensors or in one, but are both",
        ),
    ],
)
def test_broken_files_are_refused(change: Callable[[dict[str, np.ndarray]], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(written(tmp_path / "it", "families/qwen2_moe", change))
    assert message in str(caught.value)


def test_an_order_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "it", "deepseek_v3/published")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"in an order that files do not record; .* and not for 'kimi_k2'"):
        load(folder)
