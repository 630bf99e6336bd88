"""How compressed_tensors/modelopt_* were made: by nvidia-modelopt 0.47.0, with torch 2.15 and transformers 5.14.

    python tests/data/make_modelopt.py tests/data/compressed_tensors

A folder holds a whole small random Qwen3-MoE, whose second layer has no experts, as the package exports it on a CPU:
config.json, hf_quant_config.json and model.safetensors. The file beside it, of the same name, holds the weights that
the package makes of the last expert's in float32, and `logits` of `input_ids` by transformers, in float32 on weights
so made and inputs as they are.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CASES = {"modelopt_nvfp4": mtq.NVFP4_DEFAULT_CFG, "modelopt_fp8": mtq.FP8_DEFAULT_CFG}
BLOCK = 16  # of NVFP4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "mlp_only_layers": [1],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@torch.no_grad()
def model() -> Qwen3MoeForCausalLM:
    """Random weights whose rows differ in size, and norms that are not all one."""
    config = Qwen3MoeConfig(**SIZES, architectures=["Qwen3MoeForCausalLM"])
    found = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    for name, parameter in found.named_parameters():
        values = torch.randn_like(parameter, dtype=torch.float32)
        if name.endswith("norm.weight"):
            values = 1 + values / 5
        else:
            values *= torch.exp2(torch.rand(*parameter.shape[:-1], 1) * 2 - 1) * parameter.shape[-1] ** -0.5
        parameter.copy_(values)
    return found


def calibrate(whole: Qwen3MoeForCausalLM) -> None:
    with torch.no_grad():
        for _ in range(4):
            whole(torch.randint(SIZES["vocab_size"], (2, 64)))


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint in float32."""
    found = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last != "weight":
            continue
        if tensor.dtype == torch.uint8:
            shape = torch.Size([tensor.shape[0], 2 * tensor.shape[1]])
            scale, double_scale = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"]
            packed = NVFP4QTensor(shape, torch.float32, tensor)
            tensor = packed.dequantize(scale=scale, double_scale=double_scale, block_sizes={-1: BLOCK})
        elif tensor.dtype == torch.float8_e4m3fn:
            packed = FP8QTensor(tensor.shape, torch.float32, tensor)
            tensor = packed.dequantize(scale=tensors[f"{module}.weight_scale"])
        found[name] = tensor.float().contiguous()
    return found


@torch.no_grad()
def logits(folder: Path, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as dense:
        save_file(weights, Path(dense) / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (Path(dense) / "config.json").write_text(json.dumps(config))
        whole = Qwen3MoeForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    return whole.eval()(ids).logits


def make(folder: Path, config: dict[str, Any]) -> None:
    whole = mtq.quantize(model(), config, calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(whole, export_dir=folder)
    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors").chmod(0o644)
    weights = dequantised(load_file(folder / "model.safetensors"))
    ids = torch.randint(SIZES["vocab_size"], (2, 24))
    answers = {name: tensor for name, tensor in weights.items() if f".experts.{SIZES['num_experts'] - 1}." in name}
    answers |= {"input_ids": ids.to(torch.int32), "logits": logits(folder, weights, ids).contiguous()}
    save_file(answers, folder.with_suffix(".safetensors"))


def main(path: str) -> None:
    for seed, (name, config) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        make(Path(path) / name, config)


if __name__ == "__main__":
    main(*sys.argv[1:])
