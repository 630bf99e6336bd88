"""How the adapters in peft/ were made: by peft 0.21, transformers 5.24 and torch 2.14, on a CPU.

    python tests/data/make_peft.py tests/data/peft

Of models with random weights: fused ones of gpt-oss (rows interleaved) and of Qwen3-MoE (concatenated), with another
rank and alpha of one weight, and experts that are modules, with rsLoRA. Beside each, what PEFT adds to the weights of
the experts, `get_delta_weight`, as (E, outputs, inputs).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportCallIssue=false

import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

E, H, I = 3, 32, 24  # noqa: E741
SIZES = {
    "vocab_size": 8,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False)
        self.down_proj = nn.Linear(I, H, bias=False)


class Modules(nn.Module):
    """A model of one layer, with experts as transformers had them before version 5."""

    def __init__(self):
        super().__init__()
        layer = nn.Module()
        layer.mlp = nn.Module()
        layer.mlp.experts = nn.ModuleList([Expert() for _ in range(E)])
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])


def gpt_oss():
    kinds = ["full_attention"] * SIZES["num_hidden_layers"]
    config = GptOssConfig(intermediate_size=I, num_local_experts=E, layer_types=kinds, **SIZES)
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=[], target_parameters=PARAMETERS)
    return GptOssForCausalLM(config), lora


def qwen3_moe():
    config = Qwen3MoeConfig(intermediate_size=I, moe_intermediate_size=I, num_experts=E, **SIZES)
    lora = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=[],
        target_parameters=PARAMETERS[::-1],
        rank_pattern={"mlp.experts.down_proj": 1},
        alpha_pattern={"mlp.experts.gate_up_proj": 5},
    )
    return Qwen3MoeForCausalLM(config), lora


def modules():
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=["gate_proj", "up_proj", "down_proj"], use_rslora=True)
    return Modules(), lora


def deltas(model):
    """What is added to each weight, by layer and weight."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "get_delta_weight") or "default" not in module.lora_A:
            continue
        layer = name.split("layers.")[1].split(".")[0]
        delta = module.get_delta_weight("default")
        if hasattr(module, "parameter_name"):
            turned = delta if module._did_swap_in_out_features else delta.transpose(1, 2)
            found[f"{layer}.{module.parameter_name.removesuffix('_proj')}"] = turned.contiguous()
        else:
            target = name.rpartition(".")[2].removesuffix("_proj")
            found.setdefault(f"{layer}.{target}", []).append(delta)
    return {name: torch.stack(each) if isinstance(each, list) else each for name, each in found.items()}


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    for make in (gpt_oss, qwen3_moe, modules):
        torch.manual_seed(31)
        model, config = make()
        model = get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        folder = Path(path, make.__name__)
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        with torch.no_grad():
            save_file(deltas(model), folder / "deltas.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
