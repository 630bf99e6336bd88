"""How compressed_tensors/ was made: by that package's 0.20.0, with torch 2.13 or 2.15 and transformers 5.23, on a CPU.

    python tests/data/make_compressed_tensors.py tests/data/compressed_tensors

Act-order with groups (`actorder: group`) left the package after 0.18.0; under that version the script makes those
schemes and no other. What ModelOpt and Quark write is made by `make_modelopt.py` and `make_quark.py`.

A folder holds a model of two layers, of which the first is a mixture of experts, named as Qwen3-MoE names its modules:
config.json and model.safetensors as the package leaves them. The file beside it, of the same name, holds the weights
that the package makes of the last expert's in float32: all three, or those that fit into 300 kB.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

LIMIT = 300_000
ORDERED = compressed_tensors.__version__ == "0.18.0"

TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
FP8_TOKEN = TOKEN | {"type": "float"}
FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FP8_GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
E4M3, UINT8 = "torch.float8_e4m3fn", "torch.uint8"
FP4 = {"num_bits": 4, "type": "float"}
NVFP4 = FP4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3, "zp_dtype": E4M3}
MXFP4 = FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": UINT8, "zp_dtype": UINT8}
FP8 = {"num_bits": 8, "type": "float"}
MXFP8 = FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": UINT8, "zp_dtype": UINT8}
BLOCK = FP8 | {"strategy": "block", "block_structure": [128, 128]}


def integers(bits: int, group: int | None, **more: Any) -> dict[str, Any]:
    blocks = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return {"num_bits": bits, "type": "int", **blocks, **more}


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint: how weights and inputs are quantized, and its sizes."""

    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None
    num_experts: int = 3
    hidden: int = 96
    intermediate: int = 64
    dtype: torch.dtype = torch.bfloat16


WIDE: dict[str, Any] = {"num_experts": 2, "hidden": 256, "intermediate": 128}
ODD: dict[str, Any] = {"hidden": 92, "intermediate": 60}  # rows and columns that fill no whole word

CASES = {
    "nvfp4": Case(NVFP4, NVFP4 | {"dynamic": "local"}),
    "nvfp4a16": Case(NVFP4, dtype=torch.float32),
    "mxfp4": Case(MXFP4, MXFP4 | {"dynamic": True}),
    "mxfp4a16": Case(MXFP4),
    "fp8_tensor_static": Case(FP8 | {"strategy": "tensor"}, FP8_STATIC),
    "fp8_tensor_dynamic": Case(FP8 | {"strategy": "tensor"}, FP8_TOKEN),
    "fp8_channel_static": Case(FP8 | {"strategy": "channel"}, FP8_STATIC, dtype=torch.float32),
    "fp8_channel_dynamic": Case(FP8 | {"strategy": "channel"}, FP8_TOKEN),
    "fp8_block_static": Case(BLOCK, FP8_STATIC, num_experts=2, hidden=136, intermediate=128, dtype=torch.float32),
    "fp8_block_dynamic": Case(BLOCK, FP8_GROUP, num_experts=2, hidden=160, intermediate=136),
    "w4a16_g32": Case(integers(4, 32)),
    "w4a16_g64": Case(integers(4, 64), num_experts=2, hidden=128),
    "w4a16_g128": Case(integers(4, 128), **WIDE),
    "w4a16_channel": Case(integers(4, None), **ODD),
    "w4a16_g32_asym": Case(integers(4, 32, symmetric=False)),
    "w4a16_channel_asym": Case(integers(4, None, symmetric=False), **ODD),
    "w8a16_g32": Case(integers(8, 32), dtype=torch.float16),
    "w8a16_g128": Case(integers(8, 128), **WIDE),
    "w8a16_channel": Case(integers(8, None), dtype=torch.float32, **ODD),
    "w8a16_g32_asym": Case(integers(8, 32, symmetric=False)),
    "w4a8_channel": Case(integers(4, None), TOKEN, dtype=torch.float32),
    "w4a8_g32": Case(integers(4, 32), TOKEN),
    "w4afp8_g32": Case(integers(4, 32), FP8_TOKEN),
    "w8a8_channel": Case(integers(8, None), TOKEN),
    "fp8_block_groups": Case(BLOCK, FP8_GROUP, **WIDE),  # of inputs, which divide the sizes
    "mxfp8": Case(MXFP8, MXFP8 | {"dynamic": True}),
}
ORDERED_CASES = {
    "w4a16_g32_order": Case(integers(4, 32, actorder="group")),
    "w4a16_g64_asym_order": Case(integers(4, 64, actorder="group", symmetric=False), num_experts=2, hidden=128),
    "w4a16_g128_order": Case(integers(4, 128, actorder="group"), **WIDE),
    "w8a16_g32_order": Case(integers(8, 32, actorder="group")),
}


def model(case: Case) -> torch.nn.Module:
    """Modules by name; there is no need to run them. Rows, columns and experts differ in size, and in their mean."""

    def linear(rows: int, columns: int) -> torch.nn.Linear:
        layer = torch.nn.Linear(columns, rows, bias=False, dtype=case.dtype)
        sizes = torch.exp2(torch.rand(rows, 1) * 4 - 6) * torch.exp2(torch.rand(1, columns) * 2)
        layer.weight.data = ((torch.randn(rows, columns) + torch.randn(rows, 1) / 2) * sizes).to(case.dtype)
        return layer.requires_grad_(False)

    def mlp(intermediate: int) -> torch.nn.Module:
        found = torch.nn.Module()
        found.gate_proj, found.up_proj = linear(intermediate, case.hidden), linear(intermediate, case.hidden)
        found.down_proj = linear(case.hidden, intermediate)
        return found

    sparse, top = torch.nn.Module(), torch.nn.Module()
    sparse.gate = linear(case.num_experts, case.hidden)
    sparse.experts = torch.nn.ModuleList(mlp(case.intermediate) for _ in range(case.num_experts))
    layers = []
    for block in (sparse, torch.nn.Module()):
        layer = torch.nn.Module()
        layer.mlp = block
        layer.input_layernorm = torch.nn.RMSNorm(case.hidden, dtype=case.dtype)
        layers.append(layer)
    top.layers = torch.nn.ModuleList(layers)
    whole = torch.nn.Module()
    whole.model = top
    return whole


def calibrate(module: torch.nn.Module, order: torch.Tensor) -> None:
    """Scales from the largest values. `order`: the columns as their importance would put them, for act-order."""
    args, inputs = module.quantization_scheme.weights, module.quantization_scheme.input_activations
    weight = module.weight.data
    rows, columns = weight.shape
    if args.actorder == "group":
        group = torch.empty(columns, dtype=torch.int32)
        group[order] = torch.arange(columns, dtype=torch.int32) // args.group_size
        module.weight_g_idx.data = group
        weight = weight[:, order]
    if args.strategy == "tensor":
        blocks, axes = weight, None
    elif args.strategy == "channel":
        blocks, axes = weight[:, None], -1
    elif args.strategy == "block":
        height, width = args.block_structure
        padding = (0, -columns % width, 0, -rows % height)
        blocks = torch.nn.functional.pad(weight, padding).unflatten(-1, (-1, width)).unflatten(0, (-1, height))
        axes = (1, 3)
    else:
        blocks, axes = weight.unflatten(-1, (-1, args.group_size)), -1
    low, high = torch.aminmax(blocks) if axes is None else (blocks.amin(axes), blocks.amax(axes))
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(low.amin(), high.amax())
        module.weight_global_scale.data = global_scale
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if not args.symmetric:
        module.weight_zero_point.data = zero_point.to(torch.int8)
    if inputs is not None and inputs.dynamic is not True:
        largest = torch.rand(1) * 10 + 1
        if inputs.dynamic == "local":
            module.input_global_scale.data = generate_gparam(-largest, largest)
        else:
            scale, _ = calculate_qparams(-largest, largest, inputs)
            module.input_scale.data = scale.to(module.input_scale.dtype)


def answer(module: torch.nn.Module) -> torch.Tensor:
    """The weight that the package makes of a compressed module, its scales widened so that nothing rounds."""
    scheme = module.quantization_scheme
    state = {name: tensor.data for name, tensor in module.named_parameters()}
    if scheme.weights.strategy == "tensor_group":
        rows, half = state["weight_packed"].shape
        values = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32)
        scales = state["weight_scale"].to(torch.float32)
        return dequantize(
            values, scales, args=scheme.weights, dtype=torch.float32, global_scale=state["weight_global_scale"]
        )
    if scheme.weights.type == "int" or scheme.weights.num_bits == 8:
        state["weight_scale"] = state["weight_scale"].to(torch.float32)
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    return compressor.decompress(state, scheme)["weight"].to(torch.float32)


def make(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = model(case)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**case.weights),
        input_activations=None if case.inputs is None else QuantizationArgs(**case.inputs),
    )
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["re:.*mlp.gate$"])
    apply_quantization_config(whole, config)
    modules = {name: module for name, module in whole.named_modules() if hasattr(module, "quantization_scheme")}
    assert len(modules) == 3 * case.num_experts
    order = torch.empty(0)
    for name, module in modules.items():
        if not name.endswith("up_proj"):  # which has gate's inputs, and so its order
            order = torch.randperm(module.weight.shape[1])
        calibrate(module, order)
    (folder / "config.json").write_text(json.dumps(model_config(case)))
    compressor = ModelCompressor.from_pretrained_model(whole)
    compressor.compress_model(whole)
    compressor.update_config(folder)
    save(folder, whole.state_dict())
    save_answers(folder, {f"{name}.weight": answer(module) for name, module in modules.items()})


def model_config(case: Case) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": case.hidden,
        "moe_intermediate_size": case.intermediate,
        "num_experts": case.num_experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def answers_of(folder: Path) -> Path:
    return folder.with_suffix(".safetensors")


def save_answers(folder: Path, answers: dict[str, torch.Tensor]) -> None:
    last = max(int(name.split(".")[5]) for name in answers)
    kept, size = {}, 0
    for name, tensor in reversed(answers.items()):
        size += tensor.nbytes + 200
        if f".experts.{last}." in name and size < LIMIT:
            kept[name] = tensor.contiguous()
    save_file(kept, answers_of(folder))


def main(path: str) -> None:
    folder = Path(path)
    for i, (name, case) in enumerate((ORDERED_CASES if ORDERED else CASES).items()):
        torch.manual_seed(1000 * ORDERED + i)
        make(case, folder / name)
    for file in sorted(folder.rglob("*.safetensors")):
        assert file.stat().st_size < LIMIT, file
        print(file.relative_to(folder), file.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
