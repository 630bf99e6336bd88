"""How qwen3_moe/ was made: by compressed-tensors 0.20.0, torch 2.13 and transformers 5.23, on a CPU.

    python tests/data/make_qwen3_moe.py tests/data/qwen3_moe

A folder holds a small random Qwen3-MoE: config.json and model.safetensors as those packages leave them. The file beside
it, of the same name, holds `input_ids`, and of transformers' run in float32 on the weights as the folder has them,
dequantized where they are quantized: `logits`, the experts of each layer's tokens (`experts0` ..., best first) with
their weights (`weights0` ...), and the `greedy` continuation, in which every token leads by `make_models.MARGIN`.

`grouped_routing.safetensors` is DeepSeek-V3's router and experts, a layer alone: see `grouped_routing`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from make_compressed_tensors import BLOCK, NVFP4, answer, calibrate, integers
from make_models import randomize, save_answers
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter

LIMIT = 1_500_000  # bytes, of all files together
LENGTH, NEW = 24, 16  # tokens of a prompt, and of its continuation

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "moe_intermediate_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": None,
    "eos_token_id": 95,
}
# All that a config can say otherwise.
OTHER: dict[str, Any] = SIZES | {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 9,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    "eos_token_id": [95, 94],
}

NOT_LINEAR = ["lm_head", "re:.*mlp.gate$"]
ATTENTION = "re:.*self_attn.*"

# By folder: how weights are quantized, and what is not.
QUANTIZED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nvfp4": (NVFP4, NOT_LINEAR),
    "fp8_block": (BLOCK, NOT_LINEAR),
    "w4a16": (integers(4, 32), [*NOT_LINEAR, ATTENTION]),
}


def make_model(sizes: dict[str, Any]) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(**sizes, dtype=torch.bfloat16, attn_implementation="eager")
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    randomize(model)
    return model


def linears(folder: Path) -> torch.nn.Module:
    """The modules of a checkpoint by name, each expert's apart, as files have them; there is no need to run them."""
    whole = torch.nn.Module()
    for name, tensor in load_file(folder / "model.safetensors").items():
        at, (*path, last) = whole, name.split(".")
        for part in path[:-1]:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        if not hasattr(at, path[-1]):
            is_linear = tensor.ndim == 2 and path[-1] != "embed_tokens"
            at.add_module(path[-1], torch.nn.Linear(1, 1, bias=False) if is_linear else torch.nn.Module())
        getattr(at, path[-1]).register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    for module in whole.modules():
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    return whole


def quantize(source: Path, folder: Path, weights: dict[str, Any], ignore: list[str]) -> None:
    """The checkpoint in `source`, quantized; its answers are those of the weights that come out."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = linears(source)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    apply_quantization_config(whole, QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore))
    modules = {name: m for name, m in whole.named_modules() if hasattr(m, "quantization_scheme")}
    for module in modules.values():
        calibrate(module, torch.empty(0))
    (folder / "config.json").write_text((source / "config.json").read_text())
    compressor = ModelCompressor.from_pretrained_model(whole)
    compressor.compress_model(whole)
    compressor.update_config(folder)
    state = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    answers = {f"{name}.weight": answer(module).contiguous() for name, module in modules.items()}
    dense = folder / "dense"  # to be read by transformers
    dense.mkdir()
    kept = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(kept | answers, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (dense / "config.json").write_text(json.dumps(config))
    save_answers(dense, folder.with_suffix(".safetensors"), LENGTH, NEW)
    for file in dense.iterdir():
        file.unlink()
    dense.rmdir()


def grouped_routing(file: Path) -> None:
    """DeepSeek-V3's router and experts, without the shared ones, in float32 for several configs.

    `hidden` (T, H), `router` (E, H), `bias` (E,); expert weights as e4m3 bytes `gate_up` (E, 2I, H) and `down`
    (E, H, I), each times `scale`. For each config: `ids`, `weights` (T, k) in transformers' order, and `out` (T, H).
    The configs stand in the metadata.
    """
    experts, hidden, intermediate = 16, 32, 16
    configs = {
        "renormalised": {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        "plain": {"num_experts_per_tok": 3, "n_group": 8, "topk_group": 3, "norm_topk_prob": False},
        "one_group": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    }
    x, router = torch.randn(24, hidden), torch.randn(experts, hidden) / 4
    bias = torch.randn(experts) / 4
    codes = {
        "gate_up": torch.randn(experts, 2 * intermediate, hidden).to(torch.float8_e4m3fn),
        "down": torch.randn(experts, hidden, intermediate).to(torch.float8_e4m3fn),
    }
    scale = 0.25
    found = {"hidden": x, "router": router, "bias": bias, "scale": torch.tensor(scale)}
    found |= {name: tensor.view(torch.uint8) for name, tensor in codes.items()}
    for name, entries in configs.items():
        entries["routed_scaling_factor"] = 2.5
        sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "n_routed_experts": experts}
        config = DeepseekV3Config(**sizes, **entries)
        config._experts_implementation = "eager"
        gate, layer = DeepseekV3TopkRouter(config), DeepseekV3Experts(config)
        with torch.no_grad():
            gate.weight.copy_(router)
            gate.e_score_correction_bias.copy_(bias)
            layer.gate_up_proj.copy_(codes["gate_up"].float() * scale)
            layer.down_proj.copy_(codes["down"].float() * scale)
            _, weights, ids = gate(x)
            found |= {
                f"{name}.ids": ids.to(torch.int32),
                f"{name}.weights": weights,
                f"{name}.out": layer(x, ids, weights),
            }
    save_file({name: t.contiguous() for name, t in found.items()}, file, {"configs": json.dumps(configs)})


def main(path: str) -> None:
    folder = Path(path)
    for seed, (name, sizes) in enumerate({"bf16": SIZES, "other": OTHER}.items()):
        torch.manual_seed(seed)
        model = make_model(sizes)
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        save_answers(folder / name, folder / f"{name}.safetensors", LENGTH, NEW)
    for seed, (name, (weights, ignore)) in enumerate(QUANTIZED.items()):
        torch.manual_seed(10 + seed)
        quantize(folder / "bf16", folder / name, weights, ignore)
    torch.manual_seed(20)
    grouped_routing(folder / "grouped_routing.safetensors")
    sizes = {file: file.stat().st_size for file in sorted(folder.rglob("*.*")) if file.is_file()}
    for file, size in sizes.items():
        print(file.relative_to(folder), size)
    assert sum(sizes.values()) < LIMIT


if __name__ == "__main__":
    main(*sys.argv[1:])
