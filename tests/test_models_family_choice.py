"""Which family a config.json is of, by its architectures and its model type."""

import json
from pathlib import Path
from typing import Any

import pytest

from jmx.checkpoint import CheckpointError
from jmx.checkpoint.model_configs.deepseek_v3 import DEFAULTS, read_config
from jmx.models import FAMILIES, family_of

# Every architecture with each of its model types, and the family of both.
KNOWN = [
    (name, model_type, family.name)
    for family in FAMILIES.values()
    for name, types in family.architectures.items()
    for model_type in types
]


def written(folder: Path, **entries: Any) -> Path:
    """A config.json; an entry of `...` is left out."""
    contents = {key: value for key, value in entries.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


@pytest.mark.parametrize(("architecture", "model_type", "family"), KNOWN)
def test_the_family_is_that_of_the_architectures_or_the_model_type(
    architecture: str, model_type: str, family: str, tmp_path: Path
) -> None:
    for architectures in ([architecture], ["Other", architecture], None, [], ...):
        assert family_of(written(tmp_path, architectures=architectures, model_type=model_type)) is FAMILIES[family]
    for no_type in (None, ...):
        assert family_of(written(tmp_path, architectures=[architecture], model_type=no_type)) is FAMILIES[family]


def test_the_original_form_of_gpt_oss_has_neither(tmp_path: Path) -> None:
    assert family_of(written(tmp_path, vocab_size=3)) is FAMILIES["gpt_oss"]


@pytest.mark.parametrize("model_type", [its for _, its, _ in KNOWN])
@pytest.mark.parametrize("architecture", sorted({name for name, _, _ in KNOWN}))
def test_architectures_and_a_model_type_that_are_not_of_one_model_are_refused(
    architecture: str, model_type: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, architectures=[architecture], model_type=model_type)
    if (architecture, model_type) in [known[:2] for known in KNOWN]:
        assert family_of(folder).architectures[architecture]
        return
    with pytest.raises(CheckpointError) as caught:
        family_of(folder)
    message = str(caught.value)
    assert f"`model_type` (={model_type!r}) must be " in message
    assert f"as `architectures` (=[{architecture!r}]) has" in message


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "`architectures` (=['OtherForCausalLM']) must be one of GptOssFor"),
        ({"architectures": "MixtralForCausalLM"}, "`architectures` (='MixtralForCausalLM') must be one of GptOssFor"),
        ({"architectures": [["MixtralForCausalLM"]]}, "`architectures` (=[['MixtralForCausalLM']]) must be one of"),
        (
            {"architectures": ["MixtralForCausalLM", "OlmoeForCausalLM"]},
            "`architectures` (=['MixtralForCausalLM', 'OlmoeForCausalLM']) must be of one family",
        ),
        ({"model_type": "llama"}, "`model_type` (='llama') must be one of gpt_oss, qwen3_moe"),
        ({"model_type": ["mixtral"]}, "`model_type` (=['mixtral']) must be one of"),
    ],
)
def test_others_are_refused_with_those_that_there_are(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        family_of(written(tmp_path, **entries))
    assert message in str(caught.value)
    if "must be one of" in message:
        column = 0 if "architectures" in entries else 1
        assert str(caught.value).endswith(", ".join(dict.fromkeys(known[column] for known in KNOWN)))


@pytest.mark.parametrize("model_type", DEFAULTS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 192}, "head_dim` (=192) must be `qk_rope_head_dim` (=8)"),
        ({"qk_head_dim": 25}, "qk_head_dim` (=25) must be `qk_nope_head_dim` (=16) + `qk_rope_head_dim` (=8)"),
    ],
)
def test_sizes_of_heads_that_disagree_are_refused(
    changes: dict[str, Any], message: str, model_type: str, tmp_path: Path
) -> None:
    name = "deepseek_v2/lite" if model_type == "deepseek_v2" else "deepseek_v3/published"
    contents = json.loads((Path(__file__).parent / "data" / name / "config.json").read_text())
    contents["model_type"] = model_type
    expected = read_config(written(tmp_path, **contents))
    assert read_config(written(tmp_path, **contents | dict.fromkeys(changes, ...))) == expected
    with pytest.raises(CheckpointError) as caught:
        read_config(written(tmp_path, **contents | changes))
    assert message in str(caught.value)
