"""How families/ was made: by torch 2.13 and transformers 5.23 (`*_yarn`: 2.14 and 5.24), on a CPU.

    python tests/data/make_models.py tests/data/families

A folder holds a small random model: config.json and model.safetensors as transformers leaves them. The file beside it,
of the same name, holds `input_ids`, and of transformers' run in float32 `logits`, the experts of each layer's tokens
(`experts0` ..., in no order) with their weights (`weights0` ...), and the `greedy` continuation, in which every token
leads by `MARGIN`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

LIMIT = 200_000  # bytes of a file
PROMPTS, LENGTH, NEW = 2, 20, 12
MARGIN = 0.002  # by which each token that is taken must lead

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 63,
}
MIXTRAL = {"num_local_experts": 4, "intermediate_size": 32}
QWEN2 = {"num_experts": 6, "intermediate_size": 48, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}
OLMOE = {"num_experts": 6, "intermediate_size": 32}
GLM = {"n_routed_experts": 8, "intermediate_size": 48, "moe_intermediate_size": 32, "head_dim": 16}


def rope(theta: float, rope_type: str = "default", **others: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **others}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5}


# By folder: the classes, and the config. A family's second model has what its first one lacks.
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, MIXTRAL | rope(1e6)),
    "mixtral_other": (
        MixtralConfig,
        MixtralForCausalLM,
        MIXTRAL | rope(1e4) | {"sliding_window": 7, "tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-3},
    ),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, QWEN2 | rope(1e6)),
    "qwen2_moe_other": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        QWEN2
        | rope(1e4)
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
        | {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
        | {"tie_word_embeddings": True, "num_experts": 4},
    ),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, OLMOE | rope(1e4)),
    "olmoe_other": (
        OlmoeConfig,
        OlmoeForCausalLM,
        OLMOE
        | rope(1e6)
        | {"attention_bias": True, "clip_qkv": 0.7, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        GLM
        | rope(1e6, partial_rotary_factor=0.5)
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5, "num_hidden_layers": 3},
    ),
    "glm4_moe_other": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        GLM
        | rope(1e4, partial_rotary_factor=0.25)
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 0}
        | {"num_experts_per_tok": 3, "tie_word_embeddings": True, "moe_intermediate_size": 24},
    ),
    "mixtral_yarn": (MixtralConfig, MixtralForCausalLM, MIXTRAL | rope(1e4, "yarn", **YARN) | {"head_dim": 16}),
    "glm4_moe_yarn": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        GLM | rope(1e4, "yarn", partial_rotary_factor=0.5, mscale=1.0, mscale_all_dim=0.5, **YARN),
    ),
}


def make_model(config_class: type, model_class: type, sizes: dict[str, Any]) -> Any:
    config = config_class(**SIZES | sizes, dtype=torch.bfloat16, attn_implementation="eager")
    config._experts_implementation = "eager"
    model = model_class(config).to(torch.bfloat16).eval().requires_grad_(False)
    randomize(model)
    return model


def randomize(model: Any) -> None:
    """Random weights whose rows differ in size, norms that are not all one, and routers that decide."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        if name.endswith("norm.weight"):
            values = 1 + torch.randn_like(tensor, dtype=torch.float32) / 5
        elif name.endswith("bias"):
            values = torch.randn_like(tensor, dtype=torch.float32) / 10
        else:
            rows = torch.exp2(torch.rand(*tensor.shape[:-1], 1) * 2 - 1)
            values = torch.randn_like(tensor, dtype=torch.float32) * rows * tensor.shape[-1] ** -0.5
            values *= 2 if name.endswith("mlp.gate.weight") else 1
        tensor.data = values if name.endswith("correction_bias") else values.to(torch.bfloat16)


@torch.no_grad()
def save_answers(folder: Path, file: Path, length: int = LENGTH, new: int = NEW) -> None:
    """Runs the model in a folder on prompts of `length` tokens, and continues them by `new` tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def keep(module: Any, inputs: Any, outputs: Any, index: int = index) -> None:
                _, found[f"weights{index}"], experts = outputs
                found[f"experts{index}"] = experts.to(torch.int32)

            layer.mlp.gate.register_forward_hook(keep)
    ids = tokens = torch.empty(0)
    margin = 0.0
    while margin < MARGIN:
        ids = tokens = torch.randint(model.config.vocab_size, (PROMPTS, length))
        margins = []
        for _ in range(new):
            best = model(tokens).logits[:, -1].topk(2, dim=-1)
            margins.append(best.values[:, 0] - best.values[:, 1])
            tokens = torch.cat([tokens, best.indices[:, :1]], dim=1)
        margin = float(torch.stack(margins).min())
    logits = model(ids).logits
    found |= {"logits": logits, "input_ids": ids.to(torch.int32), "greedy": tokens[:, length:].to(torch.int32)}
    save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}, file)


def main(path: str) -> None:
    folder = Path(path)
    for seed, (name, made) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        make_model(*made).save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        save_answers(folder / name, folder / f"{name}.safetensors")
    sizes = {file: file.stat().st_size for file in sorted(folder.rglob("*.*")) if file.is_file()}
    for file, size in sizes.items():
        print(file.relative_to(folder), size)
    assert max(sizes.values()) < LIMIT


if __name__ == "__main__":
    main(*sys.argv[1:])
