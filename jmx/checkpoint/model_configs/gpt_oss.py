"""Configuration of gpt-oss: config.json in every spelling, defaults of missing keys, published models."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.checkpoint.model_configs.common_keys import check_heads
from jmx.checkpoint.model_configs.yarn import Yarn
from jmx.checkpoint.shards import CheckpointError, read_json
from jmx.numerics.formats import MXFP4
from jmx.util.checks import check_instance, check_path, check_str, is_finite_number

FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# Far beyond any model. A larger number is corrupt, and a table of its layers would exhaust memory.
MOST_LAYERS = 1 << 20
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Config:
    """A gpt-oss model, whatever the spelling of its config.json.

    Args:
        num_hidden_layers, hidden_size, intermediate_size, num_experts, vocab_size: sizes.
        top_k: experts per token.
        num_attention_heads, num_key_value_heads, head_dim: attention's sizes.
        attention_bias: whether the q, k, v and o projections have biases.
        rms_norm_eps: added to the mean square in RMSNorm.
        sliding_window: tokens that a sliding layer attends to, including its own.
        layer_types: "sliding_attention" or "full_attention" for each layer.
        rope_theta: base of the rotary frequencies.
        rope_factor: YaRN's s (arXiv:2309.00071); cos and sin are also multiplied by 0.1 ln(s) + 1.
        rope_beta_fast, rope_beta_slow: rotations at `rope_original_length` that bound YaRN's ramp.
        rope_truncate: whether the ramp's ends are rounded to whole dimensions.
        rope_original_length: tokens of the context before it was extended.
        swiglu_alpha, swiglu_beta, swiglu_limit: of `jmx.SwiGLU`.
        eos_token_ids: ids that end a generation, from config.json and generation_config.json; may be empty.
        bos_token_id, pad_token_id: special ids, or None.
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    attention_bias: bool
    rms_norm_eps: float
    sliding_window: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_truncate: bool
    rope_original_length: int
    swiglu_alpha: float
    swiglu_beta: float
    swiglu_limit: float
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def moe_intermediate_size(self) -> int:
        """Of each expert."""
        return self.intermediate_size

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the layers without experts: none."""
        return ()

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the embedding is also the unembedding: never."""
        return False

    @property
    def yarn(self) -> Yarn:
        """How rotary positions are stretched."""
        betas = self.rope_beta_fast, self.rope_beta_slow
        return Yarn(self.rope_factor, self.rope_original_length, *betas, self.rope_truncate)


def _published(num_hidden_layers: int, num_experts: int) -> Config:
    return Config(
        num_hidden_layers=num_hidden_layers,
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=num_experts,
        top_k=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        attention_bias=True,
        rms_norm_eps=1e-5,
        sliding_window=128,
        layer_types=(SLIDING, FULL) * (num_hidden_layers // 2),
        rope_theta=150000.0,
        rope_factor=32.0,
        rope_beta_fast=32.0,
        rope_beta_slow=1.0,
        rope_truncate=False,
        rope_original_length=4096,
        swiglu_alpha=1.702,
        swiglu_beta=1.0,
        swiglu_limit=7.0,
        eos_token_ids=(200002, 199999, 200012),
        bos_token_id=199998,
        pad_token_id=199999,
    )


# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {"gpt-oss-20b": _published(24, 32), "gpt-oss-120b": _published(36, 128)}


# Keys of each field: those of the Hugging Face form first, then those of the original form. "rope." is an entry of the
# rope object, `rope_scaling` in older configs and `rope_parameters` in newer ones.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_experts": ("num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token"),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "attention_bias": ("attention_bias",),
    "rms_norm_eps": ("rms_norm_eps",),
    "sliding_window": ("sliding_window",),
    "rope_theta": ("rope.rope_theta", "rope_theta"),
    "rope_factor": ("rope.factor", "rope_scaling_factor"),
    "rope_beta_fast": ("rope.beta_fast", "rope_ntk_beta"),
    "rope_beta_slow": ("rope.beta_slow", "rope_ntk_alpha"),
    "rope_truncate": ("rope.truncate",),
    "rope_original_length": ("rope.original_max_position_embeddings", "initial_context_length"),
    "swiglu_alpha": ("swiglu_alpha",),
    "swiglu_beta": (),
    "swiglu_limit": ("swiglu_limit",),
    "bos_token_id": ("bos_token_id",),
    "pad_token_id": ("pad_token_id",),
}

# Keys of the original form.
ORIGINAL_KEYS = (
    "num_hidden_layers",
    "num_experts",
    "experts_per_token",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "swiglu_limit",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "sliding_window",
    "initial_context_length",
    "rope_theta",
    "rope_scaling_factor",
    "rope_ntk_alpha",
    "rope_ntk_beta",
)

# Defaults of keys that configs may lack, from the reference model that OpenAI published with the weights
# (gpt_oss/torch) and, for keys of the Hugging Face form, from transformers' GptOssConfig.
DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": False,
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
    "swiglu_limit": 7.0,
    "bos_token_id": None,
    "pad_token_id": None,
}

# Defaults of the Hugging Face form's rope object: unlike the reference model, transformers rounds.
ROPE_DEFAULTS: dict[str, Any] = {"rope.truncate": True}

# Keys of the Hugging Face form that would change the model, with the values that are supported. Null is the
# default.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt_oss",),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "rope.rope_type": ("yarn",),
    "rope.type": ("yarn",),
    "rope.attention_factor": (None,),
    "rope.mscale": (None,),
    "rope.mscale_all_dim": (None,),
}

# `quantization_config` of the Hugging Face form.
QUANTIZATION: dict[str, Any] = {
    "quant_method": MXFP4.name,
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def read_config(path: str | os.PathLike[str], *, quant_methods: Sequence[str] | None = (MXFP4.name,)) -> Config:
    """The config of the checkpoint in the directory `path`, in the Hugging Face or the original form.

    EOS ids are those of config.json and of generation_config.json, if there is one, which may name the other special
    ids too. Without `layer_types` layers alternate, the first one sliding.

    Args:
        path: the directory.
        quant_methods: names of the quantization methods that are allowed; None: any.

    Raises:
        CheckpointError: a file is missing or is not JSON; a key is missing, has a value of another type or out of
            range, or disagrees with another one; another `quant_method`.
    """
    directory = check_path("path", path)
    if quant_methods is not None:
        for i, method in enumerate(check_instance("quant_methods", quant_methods, list | tuple)):
            check_str(f"quant_methods[{i}]", method)
    file = directory / FILE
    if not os.path.lexists(file) and os.path.exists(directory / "original" / FILE):
        raise CheckpointError(file, f"the file is missing; the original form is in {directory / 'original'}")
    found = _flat(file, read_json(file))
    generation = directory / GENERATION_FILE
    more = _flat(generation, read_json(generation)) if os.path.lexists(generation) else {}
    eos_token_ids = (*_token_ids(file, found), *_token_ids(generation, more))
    found = {key: more[key] for key in ("bos_token_id", "pad_token_id") if key in more} | found
    return parse_config(file, found, eos_token_ids, quant_methods)


def _flat(file: Path, contents: Any) -> dict[str, Any]:
    """Entries by key; those of the rope and quantization objects as "rope.key" and "quantization_config.key"."""
    if not isinstance(contents, dict):
        raise CheckpointError(file, f"must be a JSON object, not {type(contents).__name__}")
    flat = {}
    for key, value in contents.items():
        prefix = {"rope_scaling": "rope", "rope_parameters": "rope"}.get(key, key)
        if prefix not in ("rope", "quantization_config") or value is None:
            flat[key] = value
            continue
        if not isinstance(value, dict):
            raise CheckpointError(file, f"`{key}` (={value!r}) must be an object")
        for inner, its_value in value.items():
            name = f"{prefix}.{inner}"
            if flat.get(name) is None:
                flat[name] = its_value
            elif its_value is not None and its_value != flat[name]:
                raise CheckpointError(file, f"`{inner}` differs between `rope_scaling` and `rope_parameters`")
    return flat


def _token_ids(file: Path, entries: Mapping[str, Any]) -> list[int]:
    value = entries.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        _check_kind(file, "eos_token_id", "int", item)
    return ids


def parse_config(
    file: Path,
    entries: Mapping[str, Any],
    eos_token_ids: tuple[int, ...] = (),
    quant_methods: Sequence[str] | None = (MXFP4.name,),
) -> Config:
    """The config of entries that `_flat` returned; see `read_config`."""
    is_quantized = any(key.startswith("quantization_config.") for key in entries)
    if is_quantized and entries.get("quantization_config.quant_method") is None:
        raise CheckpointError(file, "`quantization_config.quant_method` is missing")
    required = REQUIRED_VALUES
    if quant_methods is not None:
        required = required | {"quantization_config.quant_method": tuple(quant_methods)}
    for key, values in required.items():
        if entries.get(key) is not None and entries[key] not in values:
            raise CheckpointError(file, f"`{key}` (={entries[key]!r}) must be {values[0]!r}")
    if any(key.startswith("rope.") for key in entries):
        entries = {**ROPE_DEFAULTS, **entries}
    fields = {name: _field(file, name, entries) for name in SPELLINGS}
    if fields["num_hidden_layers"] > MOST_LAYERS:
        raise CheckpointError(
            file, f"`num_hidden_layers` (={fields['num_hidden_layers']}) must be at most {MOST_LAYERS}"
        )
    fields["layer_types"] = _layer_types(file, entries.get("layer_types"), fields["num_hidden_layers"])
    fields["eos_token_ids"] = tuple(dict.fromkeys(eos_token_ids))
    config = Config(**fields)
    _check_sizes(file, config)
    if quant_methods is not None:  # otherwise experts may be floats, of any sizes
        _check_blocks(file, config)
    return config


def _field(file: Path, name: str, entries: Mapping[str, Any]) -> Any:
    given = {key: entries[key] for key in SPELLINGS[name] if entries.get(key) is not None}
    if not given:
        if name in DEFAULTS:
            return DEFAULTS[name]
        raise CheckpointError(file, f"`{'` or `'.join(SPELLINGS[name])}` is missing")
    (key, value), *others = given.items()
    for other, its_value in others:
        if its_value != value:
            raise CheckpointError(file, f"`{other}` (={its_value!r}) must be {value!r}, as in `{key}`")
    kind = next(field.type for field in dataclasses.fields(Config) if field.name == name)
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return _check_kind(file, key, kind, value)


def _check_kind(file: Path, key: str, kind: str, value: Any) -> Any:
    """`value` in the type that the dataclass declares: a whole number for an int, and never a bool for a number."""
    if kind == "bool":
        fits = isinstance(value, bool)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        fits = False
    elif kind == "float":
        fits = is_finite_number(value) and value > 0
        value = float(value) if fits else value
    else:
        fits = isinstance(value, int) and value >= 0
    if not fits:
        wanted = {"bool": "true or false", "float": "a positive number"}.get(kind, "a whole number, not negative")
        raise CheckpointError(file, f"`{key}` (={value!r}) must be {wanted}")
    return value


def _layer_types(file: Path, given: Any, num_layers: int) -> tuple[str, ...]:
    if given is None:
        return tuple((SLIDING, FULL)[i % 2] for i in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers or any(item not in (SLIDING, FULL) for item in given):
        raise CheckpointError(file, f"`layer_types` (={given!r}) must be {num_layers} of {SLIDING!r} and {FULL!r}")
    return tuple(given)


def entries(config: Config, spelling: str) -> dict[str, Any]:
    """The contents of config.json for `config`, in the "hf" or the "original" spelling.

    The original spelling has fewer keys: where they do not suffice, reading it back gives another config.
    """
    values = dataclasses.asdict(config)
    if spelling == "original":  # the fields of the reference model's ModelConfig, which accepts no others
        return {key: values[name] for name, keys in SPELLINGS.items() for key in keys[-1:] if key in ORIGINAL_KEYS}
    keys = {name: keys[0] for name, keys in SPELLINGS.items() if keys and values[name] is not None}
    rope = {key.removeprefix("rope."): values[name] for name, key in keys.items() if key.startswith("rope.")}
    theta = rope.pop("rope_theta")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{key: values[name] for name, key in keys.items() if not key.startswith("rope.")},
        "layer_types": list(config.layer_types),
        "rope_theta": theta,
        "rope_scaling": {"rope_type": "yarn", **rope},
        "max_position_embeddings": int(config.rope_original_length * config.rope_factor),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": QUANTIZATION,
    } | token_entries(config)


def token_entries(config: Config) -> dict[str, Any]:
    """The special ids of `config`, by the keys of config.json and generation_config.json."""
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    ids |= {"eos_token_id": list(config.eos_token_ids) or None}
    return {key: value for key, value in ids.items() if value is not None}


def _check_sizes(file: Path, config: Config) -> None:
    for name, value in dataclasses.asdict(config).items():
        if type(value) is int and value < 1 and not name.endswith("token_id"):
            raise CheckpointError(file, f"`{name}` (={value}) must be at least 1")
    if config.rope_theta <= 1:
        raise CheckpointError(file, f"`rope_theta` (={config.rope_theta}) must be above 1 for YaRN")
    if config.top_k > config.num_experts:
        raise CheckpointError(file, f"experts per token (={config.top_k}) must be at most {config.num_experts}, all")
    check_heads(file, config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def _check_blocks(file: Path, config: Config) -> None:
    for name in ("hidden_size", "intermediate_size"):
        try:
            MXFP4.check_size(name, getattr(config, name))
        except ValueError as error:
            raise CheckpointError(file, str(error)) from error
