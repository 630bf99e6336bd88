"""What scripts share that run packages which quantize: sizes of their models, weights, and how files are written."""
# pyright: reportMissingImports=false

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NUM_EXPERTS, VOCABULARY = 3, 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
GPT_OSS = SIZES | {"num_local_experts": NUM_EXPERTS, "intermediate_size": 64, "sliding_window": 8}
EXPERTS = "model.layers.0.mlp.experts"  # of `qwen3_moe_config`


def qwen3_moe_config(
    num_experts: int, hidden_size: int, intermediate_size: int, num_layers: int, quantization: dict[str, Any]
) -> dict[str, Any]:
    """config.json of a checkpoint whose modules are named as Qwen3-MoE's; it need not be a whole model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden_size,
        "moe_intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": num_layers,
        "quantization_config": quantization,
    }


def save(folder: Path, config: dict[str, Any], tensors: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    """A checkpoint, and its answers beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    save_file(dict(answers), folder.with_suffix(".safetensors"))


@torch.no_grad()
def fill(whole: Any, sizes: Callable[[str, Any], Any]) -> None:
    """Random weights, times `sizes` of a name and its parameter; norms and biases that are not all alike."""
    for name, parameter in whole.named_parameters():
        values = torch.randn_like(parameter, dtype=torch.float32)
        if name.endswith("norm.weight"):
            values = 1 + values / 5
        elif "bias" in name or name.endswith("sinks"):
            values /= 4
        else:
            values *= sizes(name, parameter)
        parameter.copy_(values)


def save_answers(folder: Path, weights: Mapping[str, Any], ids: Any, logits: Any) -> None:
    """Beside a folder, which keeps nothing of how to generate."""
    (folder / "generation_config.json").unlink()
    answers = {**weights, "input_ids": ids.to(torch.int32), "logits": logits}
    save_file({name: tensor.contiguous() for name, tensor in answers.items()}, folder.with_suffix(".safetensors"))


def make_all(path: str, cases: Mapping[str, tuple[Any, ...]], make: Callable[..., None]) -> None:
    """`make` of each folder and what its case says, from a seed of its own."""
    for seed, (name, case) in enumerate(cases.items()):
        torch.manual_seed(seed)
        make(Path(path) / name, *case)
