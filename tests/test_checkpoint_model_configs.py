import dataclasses
import json
from pathlib import Path

import pytest

from jmx.checkpoint import gpt_oss
from jmx.checkpoint.model_configs.gpt_oss import entries
from jmx.checkpoint.shards import CheckpointError

# As published with gpt-oss-20b, in the two forms.
HF = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
ORIGINAL = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}
NEWER = {key: value for key, value in HF.items() if key not in ("rope_scaling", "rope_theta", "experts_per_token")} | {
    "rope_parameters": {**HF["rope_scaling"], "rope_theta": 150000.0}
}
MODEL_20B = gpt_oss.Config(
    num_hidden_layers=24,
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    top_k=4,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=201088,
    attention_bias=True,
    rms_norm_eps=1e-5,
    sliding_window=128,
    layer_types=("sliding_attention", "full_attention") * 12,
    rope_theta=150000.0,
    rope_factor=32.0,
    rope_beta_fast=32.0,
    rope_beta_slow=1.0,
    rope_truncate=False,
    rope_original_length=4096,
    swiglu_alpha=1.702,
    swiglu_beta=1.0,
    swiglu_limit=7.0,
    eos_token_ids=(200002,),
    pad_token_id=199999,
)


def write(directory: Path, contents: object, generation: object = None) -> Path:
    (directory / "config.json").write_text(contents if isinstance(contents, str) else json.dumps(contents))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize("contents", [HF, NEWER], ids=["older", "newer"])
def test_both_hugging_face_spellings_say_the_same(tmp_path, contents):
    assert gpt_oss.read_config(write(tmp_path, contents)) == MODEL_20B


def test_the_original_spelling_says_the_same_but_for_special_ids(tmp_path):
    expected = dataclasses.replace(MODEL_20B, eos_token_ids=(), pad_token_id=None)
    assert gpt_oss.read_config(write(tmp_path, ORIGINAL)) == expected


def test_fields_have_the_types_that_they_declare(tmp_path):
    config = gpt_oss.read_config(write(tmp_path, HF))
    assert type(config.rope_theta) is float
    assert type(config.sliding_window) is int
    assert type(config.rope_truncate) is bool


def test_generation_config_adds_eos_ids_and_names_others(tmp_path):
    more = {"eos_token_id": [200002, 199999, 200012], "bos_token_id": 199998, "pad_token_id": 5}
    config = gpt_oss.read_config(write(tmp_path, HF, more))
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert config.bos_token_id == 199998
    assert config.pad_token_id == 199999


def test_eos_ids_may_be_a_list_or_none(tmp_path):
    assert gpt_oss.read_config(write(tmp_path, HF | {"eos_token_id": [1, 2]})).eos_token_ids == (1, 2)
    assert gpt_oss.read_config(write(tmp_path, HF | {"eos_token_id": None})).eos_token_ids == ()


def test_what_a_file_gives_wins_over_defaults(tmp_path):
    given = {
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "sliding_window": 64,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 5.0,
        "layer_types": ["full_attention"] * 24,
    }
    config = gpt_oss.read_config(write(tmp_path, HF | given))
    assert {name: getattr(config, name) for name in given} == given | {"layer_types": ("full_attention",) * 24}


def test_layers_slide_in_turn_where_nothing_is_said(tmp_path):
    contents = {key: value for key, value in HF.items() if key != "layer_types"} | {"num_hidden_layers": 3}
    assert gpt_oss.read_config(write(tmp_path, contents)).layer_types == (
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    )


def test_rope_entries_that_leave_truncate_out_mean_what_transformers_takes_them_for(tmp_path):
    rope = {key: value for key, value in HF["rope_scaling"].items() if key != "truncate"}
    assert gpt_oss.read_config(write(tmp_path, HF | {"rope_scaling": rope})).rope_truncate


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "the file must be JSON"),
        ("[]", "must be a JSON object, not list"),
        ('{"vocab_size": ' + "1" * 5000 + "}", "the file must be JSON: Exceeds the limit"),
        (HF | {"rope_theta": 10**400}, "must be a positive number"),
        (HF | {"rope_theta": 1}, "`rope_theta` (=1.0) must be above 1 for YaRN"),
        (HF | {"num_local_experts": None}, "`num_local_experts` or `num_experts` is missing"),
        ({k: v for k, v in HF.items() if k != "vocab_size"}, "`vocab_size` is missing"),
        ({k: v for k, v in HF.items() if k != "rope_scaling"}, "`rope.factor` or `rope_scaling_factor` is missing"),
        (HF | {"hidden_size": "2880"}, "`hidden_size` (='2880') must be a whole number"),
        (HF | {"hidden_size": 2880.5}, "`hidden_size` (=2880.5) must be a whole number"),
        (HF | {"hidden_size": True}, "`hidden_size` (=True) must be a whole number"),
        (HF | {"hidden_size": 2870}, "`hidden_size` (=2870) must be a multiple of 32 for MXFP4"),
        (HF | {"intermediate_size": 100}, "`intermediate_size` (=100) must be a multiple of 32 for MXFP4"),
        (HF | {"num_hidden_layers": 0, "layer_types": []}, "`num_hidden_layers` (=0) must be at least 1"),
        (
            HF | {"num_hidden_layers": 10**12, "layer_types": None},
            "`num_hidden_layers` (=1000000000000) must be at most",
        ),
        (HF | {"rms_norm_eps": -1.0}, "`rms_norm_eps` (=-1.0) must be a positive number"),
        (HF | {"rms_norm_eps": float("nan")}, "`rms_norm_eps` (=nan) must be a positive number"),
        (HF | {"attention_bias": 1}, "`attention_bias` (=1) must be true or false"),
        (HF | {"experts_per_token": 8}, "`experts_per_token` (=8) must be 4, as in `num_experts_per_tok`"),
        (HF | {"experts_per_token": 33, "num_experts_per_tok": 33}, "experts per token (=33) must be at most 32"),
        (
            HF | {"num_key_value_heads": 7},
            "`num_attention_heads` (=64) must be a multiple of `num_key_value_heads` (=7)",
        ),
        (HF | {"head_dim": 63}, "`head_dim` (=63) must be even"),
        (HF | {"layer_types": ["full_attention"]}, "must be 24 of 'sliding_attention' and 'full_attention'"),
        (HF | {"layer_types": ["chunked"] * 24}, "must be 24 of 'sliding_attention' and 'full_attention'"),
        (HF | {"eos_token_id": "end"}, "`eos_token_id` (='end') must be a whole number"),
        (HF | {"tie_word_embeddings": True}, "`tie_word_embeddings` (=True) must be False"),
        (HF | {"model_type": "llama"}, "`model_type` (='llama') must be 'gpt_oss'"),
        (HF | {"hidden_act": "gelu"}, "`hidden_act` (='gelu') must be 'silu'"),
        (HF | {"rope_scaling": "yarn"}, "`rope_scaling` (='yarn') must be an object"),
        (HF | {"rope_scaling": HF["rope_scaling"] | {"rope_type": "linear"}}, "`rope.rope_type` (='linear') must be"),
        (HF | {"rope_scaling": HF["rope_scaling"] | {"mscale": 0.7}}, "`rope.mscale` (=0.7) must be None"),
        (HF | {"rope_parameters": {"factor": 16.0}}, "`factor` differs between `rope_scaling` and `rope_parameters`"),
        (
            HF | {"quantization_config": {"quant_method": "fp8"}},
            "`quantization_config.quant_method` (='fp8') must be 'mxfp4'",
        ),
        (HF | {"quantization_config": {"bits": 4}}, "`quantization_config.quant_method` is missing"),
    ],
)
def test_wrong_configs_are_refused_by_file_and_key(tmp_path, contents, message):
    with pytest.raises(CheckpointError) as error:
        gpt_oss.read_config(write(tmp_path, contents))
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert message in str(error.value)


def test_a_wrong_generation_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: `eos_token_id` \(=-1\)"):
        gpt_oss.read_config(write(tmp_path, HF, {"eos_token_id": -1}))


def test_a_missing_config_is_named_and_the_original_one_pointed_at(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing$"):
        gpt_oss.read_config(tmp_path)
    (tmp_path / "original").mkdir()
    write(tmp_path / "original", ORIGINAL)
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing; the original form is in .*original"):
        gpt_oss.read_config(tmp_path)


def test_written_entries_are_read_back(tmp_path):
    config = dataclasses.replace(
        MODEL_20B,
        swiglu_alpha=1.5,
        rope_truncate=True,
        attention_bias=False,
        bos_token_id=3,
        eos_token_ids=(7, 9),
        layer_types=("full_attention",) * 24,
    )
    assert gpt_oss.read_config(write(tmp_path, entries(config, "hf"))) == config
    assert entries(MODEL_20B, "original") == ORIGINAL
