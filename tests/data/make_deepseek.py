"""How deepseek_v3/ and deepseek_v2/ were made: by torch 2.13 and transformers 5.23, on a CPU.

    python tests/data/make_deepseek.py tests/data

Folders and files are as `make_models.py` describes them. `deepseek_v3/fp8` is `deepseek_v3/published` quantized as
DeepSeek publishes its models: every linear layer except routers and `lm_head` in e4m3, with a scale for each block of
128 x 128. Its answers are those of the weights times their scales. Transformers ignores `moe_layer_freq`, and so its
decoder layer is replaced by one that has an MLP where DeepSeek's published code has one.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from make_models import LIMIT, make_model, save_answers
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3

BLOCK = 128
LARGEST = 448.0  # of e4m3

SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 144,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
V3 = DeepseekV3Config, DeepseekV3ForCausalLM
V2 = DeepseekV2Config, DeepseekV2ForCausalLM
SMALLER = {"intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}


class DecoderLayer(modeling_deepseek_v3.DeepseekV3DecoderLayer):
    """A layer with experts only if `moe_layer_freq` divides its number, as `DeepseekV3DecoderLayer` of DeepSeek."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        if layer_idx % getattr(config, "moe_layer_freq", 1):
            self.mlp = modeling_deepseek_v3.DeepseekV3MLP(config)


modeling_deepseek_v3.DeepseekV3DecoderLayer = DecoderLayer


def yarn(mscale: float, mscale_all_dim: float, beta_fast: float = 32, factor: float = 40) -> dict[str, Any]:
    return {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": factor,
            "original_max_position_embeddings": 4096,
            "beta_fast": beta_fast,
            "beta_slow": 1,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
        },
    }


# By folder: the classes, and the config. A family's second model has what its first one lacks.
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v3/published": (
        *V3,
        SIZES | yarn(1, 1) | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v3/other": (
        *V3,
        SIZES
        | {"attention_bias": True, "rope_interleave": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "num_experts_per_tok": 2, "n_routed_experts": 5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "eos_token_id": [63, 62]},
    ),
    "deepseek_v2/lite": (
        *V2,
        SIZES | yarn(0.707, 0.707) | {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
    ),
    "deepseek_v2/other": (
        *V2,
        SIZES
        | yarn(1, 0.5, beta_fast=1, factor=32)
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}
        | {"n_shared_experts": 1},
    ),
    "deepseek_v3/sparse": (
        *V3,
        SIZES
        | SMALLER
        | {"moe_layer_freq": 2, "first_k_dense_replace": 1, "num_hidden_layers": 5, "q_lora_rank": None}
        | {"n_group": 2, "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "deepseek_v2/plain": (
        *V2,
        SIZES
        | SMALLER
        | {"topk_method": "greedy", "n_shared_experts": 1, "routed_scaling_factor": 1.0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}


def quantize(source: Path, folder: Path) -> None:
    """The checkpoint in `source` as DeepSeek publishes its models."""
    tensors: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}  # to be read by transformers
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name], dense[name] = tensor, tensor.float()
        is_linear = name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
        if is_linear:
            padded = torch.zeros(*(-(-size // BLOCK) * BLOCK for size in tensor.shape))
            padded[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
            blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
            whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            whole = whole[: tensor.shape[0], : tensor.shape[1]]
            tensors[name] = (tensor.float() / whole).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            dense[name] = tensors[name].float() * whole
    config = json.loads((source / "config.json").read_text())
    quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    quantization["weight_block_size"] = [BLOCK, BLOCK]
    for directory, its, entries in (
        (folder, tensors, config | {"quantization_config": quantization}),
        (folder / "dense", dense, config | {"dtype": "float32"}),
    ):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(its, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
    torch.manual_seed(20)
    save_answers(folder / "dense", folder.with_suffix(".safetensors"))
    shutil.rmtree(folder / "dense")


def main(path: str) -> None:
    data = Path(path)
    for seed, (name, made) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        make_model(*made).save_pretrained(data / name)
        (data / name / "generation_config.json").unlink(missing_ok=True)
        save_answers(data / name, data / f"{name}.safetensors")
    quantize(data / "deepseek_v3/published", data / "deepseek_v3/fp8")
    for folder in {name.partition("/")[0] for name in MODELS}:
        for file in sorted((data / folder).rglob("*.*")):
            print(file.relative_to(data), file.stat().st_size)
            assert file.stat().st_size < LIMIT


if __name__ == "__main__":
    main(*sys.argv[1:])
