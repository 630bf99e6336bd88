"""config.json of every family of decoders: what null means, key by key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jmx.checkpoint import CheckpointError
from jmx.checkpoint.model_configs import deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe

DATA = Path(__file__).parent / "data"
TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"

# By `model_type`: a checkpoint, its family's reader, and the defaults of keys.
READERS: dict[str, tuple[Path, Callable[[Path], Any], dict[str, Any]]] = {
    "deepseek_v2": (DATA / "deepseek_v2/lite", deepseek_v3.read_config, deepseek_v3.DEFAULTS["deepseek_v2"]),
    "deepseek_v3": (DATA / "deepseek_v3/published", deepseek_v3.read_config, deepseek_v3.DEFAULTS["deepseek_v3"]),
    "kimi_k2": (DATA / "deepseek_v3/published", deepseek_v3.read_config, deepseek_v3.DEFAULTS["kimi_k2"]),
    "glm4_moe": (DATA / "families/glm4_moe", glm4_moe.read_config, glm4_moe.DEFAULTS),
    "gpt_oss": (TINY, gpt_oss.read_config, gpt_oss.DEFAULTS),
    "mixtral": (DATA / "families/mixtral", mixtral.read_config, mixtral.DEFAULTS),
    "olmoe": (DATA / "families/olmoe", olmoe.read_config, olmoe.DEFAULTS),
    "qwen2_moe": (DATA / "families/qwen2_moe", qwen2_moe.read_config, qwen2_moe.DEFAULTS),
    "qwen3_moe": (DATA / "qwen3_moe/other", qwen3_moe.read_config, qwen3_moe.DEFAULTS),
}
MORE = (
    *("architectures", "bos_token_id", "clip_qkv", "eos_token_id", "head_dim", "hidden_act", "layer_types", "mlp_bias"),
    *("num_key_value_heads", "pad_token_id", "quantization_config", "qk_head_dim", "sliding_window"),
)  # optional, and in no table of defaults

# Transformers 5.23 rejects null for most flags, and reads it so for these, as DeepSeek's code does.
FALSE = {(name, key) for name in ("deepseek_v3", "kimi_k2") for key in ("norm_topk_prob", "rope_interleave")}

REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


def written(folder: Path, name: str, **changes: Any) -> Path:
    """A config.json of a family; an entry of `...` is left out."""
    folder.mkdir(exist_ok=True)
    contents = json.loads((READERS[name][0] / "config.json").read_text()) | {"model_type": name} | changes
    contents = {key: value for key, value in contents.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


@pytest.mark.parametrize("name", READERS)
def test_null_means_the_default(name: str, tmp_path: Path) -> None:
    """Of every optional key."""
    _, read, defaults = READERS[name]
    needed = {"gpt_oss": {"head_dim", "num_key_value_heads"}}.get(name, set())
    for key in sorted({*defaults, *MORE} - {"latent_norm_eps"} - needed):
        missing = {} if (name, key) not in FALSE else {key: False}
        expected = read(written(tmp_path, name, **{key: ...} | missing))
        assert read(written(tmp_path, name, **{key: None})) == expected, key


@pytest.mark.parametrize("name", READERS)
def test_a_flag_that_is_neither_true_false_nor_null_is_refused(name: str, tmp_path: Path) -> None:
    _, read, defaults = READERS[name]
    flags = [key for key, value in defaults.items() if isinstance(value, bool) and not key.startswith("rope_")]
    for key in flags:
        for wrong in (0, 1, "true", [], {}):
            with pytest.raises(CheckpointError, match=rf"{key}` \(={wrong!r}\)".replace("[]", r"\[\]")):
                read(written(tmp_path, name, **{key: wrong}))


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("name", READERS)
def test_null_for_a_key_without_a_default_is_refused(name: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        READERS[name][1](written(tmp_path, name, **{key: None}))


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe"])
def test_two_spellings_of_the_number_of_experts_must_agree(name: str, tmp_path: Path) -> None:
    spellings = ("n_routed_experts", "num_experts", "num_local_experts")
    contents = json.loads((READERS[name][0] / "config.json").read_text())
    number = next(contents[key] for key in spellings if key in contents)
    read = READERS[name][1]
    assert read(written(tmp_path, name, **dict.fromkeys(spellings, number))).num_experts == number
    with pytest.raises(CheckpointError, match=rf"num_local_experts` \(=7\) must be `n_routed_experts` \(={number}\)"):
        read(written(tmp_path, name, n_routed_experts=number, num_local_experts=7))


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", READERS)
def test_null_in_rotary_positions_means_the_default(name: str, place: str, tmp_path: Path) -> None:
    """Transformers reads a null `truncate` as false; the others are not in doubt."""
    contents = json.loads((READERS[name][0] / "config.json").read_text())
    read = READERS[name][1]
    found = contents.get("rope_parameters") or contents["rope_scaling"]
    others = {"rope_parameters": ..., "rope_scaling": ...}
    for key in ("attention_factor", "beta_fast", "beta_slow", "rope_theta", "partial_rotary_factor", "truncate"):
        rope = {its: value for its, value in found.items() if its != key}
        theta = {"rope_theta": 5e3} if key == "rope_theta" else {"rope_theta": ...}
        missing = rope | ({"truncate": False} if key == "truncate" else {})
        expected = read(written(tmp_path, name, **others | theta | {place: missing}))
        assert read(written(tmp_path, name, **others | theta | {place: rope | {key: None}})) == expected, key
