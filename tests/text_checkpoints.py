"""Small checkpoints of every family that are complete: weights, configuration, tokenizer, chat template, EOS ids.

The weights are those of the families' golden checkpoints, with more rows in the embeddings, for a tokenizer of bytes.
`tests/wheel.py` runs them with an installed wheel.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 (with it numpy has bfloat16)
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DATA = Path(__file__).parent / "data"
GPT_OSS = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"
TEMPLATES = DATA / "chat_templates"


class Checkpoint(NamedTuple):
    """A golden checkpoint, the name of its chat template, and the special tokens, BOS and EOS first."""

    folder: Path
    template: str
    special: tuple[str, ...]


_DEEPSEEK = ("<s>", "</s>", "<｜User｜>", "<｜Assistant｜>")  # noqa: RUF001 (as they are published)
_CHAT = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHECKPOINTS = {
    "gpt_oss": Checkpoint(
        GPT_OSS,
        "gpt_oss_like",
        (
            "<s>",
            "</s>",
            "<|start|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
        ),
    ),
    "qwen3_moe": Checkpoint(DATA / "qwen3_moe" / "other", "qwen3_like", _CHAT),
    "mixtral": Checkpoint(DATA / "families" / "mixtral", "mixtral_like", ("<s>", "</s>")),
    "qwen2_moe": Checkpoint(DATA / "families" / "qwen2_moe", "qwen2_like", _CHAT),
    "olmoe": Checkpoint(DATA / "families" / "olmoe", "olmoe_like", ("<s>", "</s>")),
    "glm4_moe": Checkpoint(
        DATA / "families" / "glm4_moe",
        "glm4_like",
        ("<s>", "</s>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "deepseek_v3": Checkpoint(DATA / "deepseek_v3" / "published", "deepseek_like", _DEEPSEEK),
    "deepseek_v2": Checkpoint(DATA / "deepseek_v2" / "lite", "deepseek_like", _DEEPSEEK),
    "kimi_k2": Checkpoint(
        DATA / "deepseek_v3" / "published",
        "kimi_like",
        ("<s>", "</s>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    ),
}


def make_tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """A tokenizer of bytes, and special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    return tokenizer


def write(folder: Path, name: str, *, layers: int | None = None) -> Path:
    """Writes a checkpoint of `CHECKPOINTS` into a folder, which does not exist yet, and returns it.

    Args:
        folder: where to.
        name: of the checkpoint.
        layers: how many of its first layers are kept, of gpt-oss; None: all.
    """
    checkpoint = CHECKPOINTS[name]
    shutil.copytree(checkpoint.folder, folder, ignore=shutil.ignore_patterns("*.py", "*.md", "tokenizer.json"))
    tokenizer = make_tokenizer(checkpoint.special)
    tokenizer.save(str(folder / "tokenizer.json"))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(checkpoint.special[1])
    _enlarge(folder, size)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": size, "eos_token_id": end, "max_position_embeddings": 1024}
    if layers is not None:
        config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
        _shorten(folder, layers)
    if name == "kimi_k2":
        config |= {"model_type": "kimi_k2"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [end, size - 1]})
    template = (TEMPLATES / f"{checkpoint.template}.jinja").read_text(encoding="utf-8")
    settings: dict[str, Any] = {"bos_token": checkpoint.special[0], "eos_token": {"content": checkpoint.special[1]}}
    if name == "gpt_oss":  # as it is published
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)
    return folder


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def _shorten(folder: Path, layers: int) -> None:
    """Removes a checkpoint's layers from `layers` on; all others are in one file."""
    kept = {}
    for file in folder.glob("*.safetensors"):
        kept |= {name: tensor for name, tensor in load_file(file).items() if _layer(name) < layers}
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(kept, folder / "model.safetensors")


def _layer(name: str) -> int:
    """The number of a tensor's layer, -1 outside layers."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _enlarge(folder: Path, rows: int) -> None:
    """Gives each embedding of a checkpoint that many rows. New ones are sums of two that there are."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                old, at = tensors[name], np.arange(rows)
                near, far = old[at % len(old)], old[(7 * at + at // len(old)) % len(old)]
                tensors[name] = (near.astype(np.float32) + 0.5 * far.astype(np.float32)).astype(old.dtype)
        save_file(tensors, file)
