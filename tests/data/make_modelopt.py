"""How compressed_tensors/modelopt_* were made: by nvidia-modelopt 0.47.0, with torch 2.15 and transformers 5.14.

    python tests/data/make_modelopt.py tests/data/compressed_tensors

A folder holds a whole small random model as the package exports it on a CPU: Qwen3-MoE, whose second layer has no
experts, or gpt-oss, whose experts are parameters with rows as their last axis. There are config.json,
hf_quant_config.json and model.safetensors. The file beside it, of the same name, holds the weights that the package
makes of the last expert's in float32, rows first, and `logits` of `input_ids` by transformers, in float32 on weights so
made and inputs as they are.
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
from tool_models import GPT_OSS, NUM_EXPERTS, SIZES, VOCABULARY, fill, make_all, save_answers
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

BLOCK = 16  # of NVFP4
QWEN3_MOE = SIZES | {
    "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": 64,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
CONFIGS = {Qwen3MoeForCausalLM: (Qwen3MoeConfig, QWEN3_MOE), GptOssForCausalLM: (GptOssConfig, GPT_OSS)}
CASES = {
    "modelopt_nvfp4": (Qwen3MoeForCausalLM, mtq.NVFP4_DEFAULT_CFG),
    "modelopt_fp8": (Qwen3MoeForCausalLM, mtq.FP8_DEFAULT_CFG),
    "modelopt_gpt_oss": (GptOssForCausalLM, mtq.NVFP4_DEFAULT_CFG),
}


def model(kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Weights differ in size along all axes but the last."""
    config, entries = CONFIGS[kind]
    found = kind(config(**entries, architectures=[kind.__name__])).to(torch.bfloat16).eval()
    fill(found, lambda _, p: torch.exp2(torch.rand(*p.shape[:-1], 1) * 2 - 1) * p.shape[-1] ** -0.5)
    return found


def calibrate(whole: PreTrainedModel) -> None:
    with torch.no_grad():
        for _ in range(4):
            whole(torch.randint(VOCABULARY, (2, 64)))


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint in float32, shaped as they are there."""
    found = {}
    for name, tensor in tensors.items():
        if "_scale" in name:
            continue
        # Of modules, or of experts that are parameters, whose columns are not the last axis.
        front = name.removesuffix("weight") if name.endswith("weight") else f"{name}_"
        axis = -1 if name.endswith("weight") else -2
        if tensor.dtype == torch.uint8:
            scale, double_scale = tensors[f"{front}weight_scale"].transpose(axis, -1), tensors[f"{front}weight_scale_2"]
            codes = tensor.transpose(axis, -1).contiguous()
            packed = NVFP4QTensor(torch.Size([*codes.shape[:-1], 2 * codes.shape[-1]]), torch.float32, codes)
            tensor = packed.dequantize(scale=scale.contiguous(), double_scale=double_scale, block_sizes={-1: BLOCK})
            tensor = tensor.transpose(axis, -1)
        elif tensor.dtype == torch.float8_e4m3fn:
            packed = FP8QTensor(tensor.shape, torch.float32, tensor)
            tensor = packed.dequantize(scale=tensors[f"{front}weight_scale"])
        found[name] = tensor.float().contiguous()
    return found


def last_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its weights in the first layer, rows first."""
    front, found = "model.layers.0.mlp.experts.", {}
    for name, tensor in weights.items():
        if name.startswith(f"{front}{NUM_EXPERTS - 1}."):
            found[name] = tensor
        elif name.startswith(front) and name.endswith("_proj"):
            found[f"{front}{NUM_EXPERTS - 1}.{name.removeprefix(front)}.weight"] = tensor[-1].T.contiguous()
    return found


@torch.no_grad()
def logits(
    kind: type[PreTrainedModel], folder: Path, weights: dict[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as dense:
        save_file(weights, Path(dense) / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (Path(dense) / "config.json").write_text(json.dumps(config))
        whole = kind.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    return whole.eval()(ids).logits


def make(folder: Path, kind: type[PreTrainedModel], config: dict[str, Any]) -> None:
    whole = mtq.quantize(model(kind), config, calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(whole, export_dir=folder)
    (folder / "model.safetensors").chmod(0o644)
    weights = dequantized(load_file(folder / "model.safetensors"))
    ids = torch.randint(VOCABULARY, (2, 24))
    save_answers(folder, last_expert(weights), ids, logits(kind, folder, weights, ids))


if __name__ == "__main__":
    make_all(sys.argv[1], CASES, make)
