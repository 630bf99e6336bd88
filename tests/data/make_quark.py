"""How compressed_tensors/quark_gpt_oss* were made: by amd-quark 0.13, with torch 2.15 and transformers 5.23, on a CPU.

    python tests/data/make_quark.py tests/data/compressed_tensors

A folder holds a whole small random gpt-oss as the package exports it: config.json and model.safetensors. The file
beside it, of the same name, holds the weights that the package makes of the last expert's in float32, rows of gate and
up in turn, and `logits` of `input_ids` by transformers, in float32 on weights so made and inputs as they are.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import sys
from pathlib import Path

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.utils.llm import preprocess_for_quantization
from tool_models import GPT_OSS, NUM_EXPERTS, VOCABULARY, fill, make_all, save_answers
from transformers import GptOssConfig, GptOssForCausalLM

EXPERTS = "mlp.experts"
CASES = {  # by folder: the package's name of the scheme, and the model's dtype, to which it rounds weights made of FP8
    "quark_gpt_oss": ("mxfp4_fp8", torch.bfloat16),
    "quark_gpt_oss_fp8": ("ptpc_fp8", torch.float32),
}


def model(dtype: torch.dtype) -> GptOssForCausalLM:
    config = GptOssConfig(**GPT_OSS, architectures=["GptOssForCausalLM"], attn_implementation="eager")
    return GptOssForCausalLM(config).to(dtype).eval().requires_grad_(False)


def sizes(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """One for each row."""
    axis = -2 if EXPERTS in name else -1  # that is contracted
    rows = torch.exp2(torch.rand(parameter.shape) * 2 - 1).narrow(axis, 0, 1)
    return rows * parameter.shape[axis] ** -0.5


def dense(weights: dict[str, torch.Tensor]) -> GptOssForCausalLM:
    """transformers' model of Quark's weights, whose experts are apart."""
    whole = model(torch.float32)
    for name, parameter in whole.named_parameters():
        if EXPERTS in name:
            front, last = name.rsplit(".", 1)
            role, is_bias = last.removesuffix("_bias"), last.endswith("_bias")
            kind = "bias" if is_bias else "weight"
            its = [weights[f"{front}.{expert}.{role}.{kind}"] for expert in range(NUM_EXPERTS)]
            parameter.copy_(torch.stack([one if is_bias else one.T for one in its]))
        else:
            parameter.copy_(weights[name])
    return whole


@torch.no_grad()
def make(folder: Path, scheme: str, dtype: torch.dtype) -> None:
    whole = model(dtype)
    fill(whole, sizes)
    preprocess_for_quantization(whole)
    config = LLMTemplate.get("gpt_oss").get_config(scheme=scheme)
    quantizer = ModelQuantizer(config)
    whole = quantizer.quantize_model(whole, [torch.randint(VOCABULARY, (2, 64)) for _ in range(4)])
    whole = quantizer.freeze(whole)
    weights = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    export_safetensors(whole, str(folder))
    ids = torch.randint(VOCABULARY, (2, 24))
    last = f".{NUM_EXPERTS - 1}."
    answers = {
        name: tensor.float()
        for name, tensor in weights.items()
        if f"layers.0.{EXPERTS}{last}" in name and name.endswith("_proj.weight")
    }
    save_answers(folder, answers, ids, dense(weights)(ids).logits)


if __name__ == "__main__":
    make_all(sys.argv[1], CASES, make)
