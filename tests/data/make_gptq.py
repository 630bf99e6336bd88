"""How compressed_tensors/gptq_* and awq_* were made: by AutoGPTQ 0.7.1 and AutoAWQ 0.2.9, with torch 2.13, on a CPU.

    python tests/data/make_gptq.py tests/data/compressed_tensors

A folder holds a model of two layers, of which the first is a mixture of experts, named as Qwen3-MoE names its modules.
The packages' own modules pack the weights, with scales and zero points that are found here: files of the same kind need
no calibration of a whole model. The file beside it, of the same name, holds the weights that the packages make
of the last expert's up and down, in float32.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

# The packages' fronts import models that newer versions of transformers have moved; their modules need none of it.
for front, inner in {"auto_gptq": (), "awq": ("modules", "modules/linear")}.items():
    spec = importlib.util.find_spec(front)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for part in ("", *inner):
        package = types.ModuleType(".".join([front, *filter(None, part.split("/"))]))
        package.__path__ = [str(Path(spec.submodule_search_locations[0], part))]
        sys.modules[package.__name__] = package

import torch  # noqa: E402
from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear  # noqa: E402
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from tool_models import EXPERTS, make_all, qwen3_moe_config, save  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint: how weights are quantized, and its sizes."""

    group_size: int
    bits: int = 4
    symmetric: bool = True
    ordered: bool = False
    awq: bool = False
    num_experts: int = 3
    hidden: int = 96
    intermediate: int = 64


WIDE: dict[str, Any] = {"num_experts": 2, "hidden": 256, "intermediate": 128}
CASES = {
    "gptq_g32": Case(32),
    "gptq_g16_asym": Case(16, symmetric=False),
    "gptq_g32_asym_order": Case(32, symmetric=False, ordered=True),
    "gptq_g128_order": Case(128, ordered=True, **WIDE),
    "gptq_channel": Case(-1),
    "gptq_w8_g32_asym": Case(32, bits=8, symmetric=False),
    "awq_g32": Case(32, symmetric=False, awq=True),
    "awq_g128": Case(128, symmetric=False, awq=True, **WIDE),
}


def calibrated(weight: torch.Tensor, case: Case, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points (N, groups) from the largest values of each group."""
    most = 2**case.bits - 1
    scales, zeros = [], []
    for its in range(int(group.max()) + 1):
        block = weight[:, group == its]
        low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
        if case.symmetric:
            scale, zero = 2 * block.abs().amax(1) / most, torch.full_like(low, (most + 1) / 2)
        else:
            scale = (high - low) / most
            # From 1 on, as the older files hold one less.
            zero = torch.clamp(torch.round(-low / scale), 0 if case.awq else 1, most)
        scales.append(scale.half().float())
        zeros.append(zero)
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def clipped(
    weight: torch.Tensor, case: Case, scales: torch.Tensor, zeros: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """Weights within what elements represent: the packages do not clip them."""
    low, high = -zeros * scales, (2**case.bits - 1 - zeros) * scales
    return torch.minimum(torch.maximum(weight, low[:, group]), high[:, group])


def linear(rows: int, columns: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(columns, rows, bias=False)
    sizes = torch.exp2(torch.rand(rows, 1) * 4 - 6) * torch.exp2(torch.rand(1, columns) * 2)
    layer.weight.data = (torch.randn(rows, columns) + torch.randn(rows, 1) / 2) * sizes
    return layer.requires_grad_(False)


def pack_gptq(layer: torch.nn.Linear, case: Case, group: torch.Tensor) -> tuple[Any, Any]:
    """The module's tensors, and the weight that the package makes of them."""
    rows, columns = layer.weight.shape
    scales, zeros = calibrated(layer.weight.data, case, group)
    layer.weight.data = clipped(layer.weight.data, case, scales, zeros, group)
    packed = QuantLinear(case.bits, case.group_size, columns, rows, bias=False, weight_dtype=torch.float32)
    packed.pack(layer, scales, zeros, group.to(torch.int32))
    answer = packed(torch.eye(columns)).T.contiguous()
    found = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    return found | {"scales": found["scales"].half()}, answer


def pack_awq(layer: torch.nn.Linear, case: Case, group: torch.Tensor) -> tuple[Any, Any]:
    scales, zeros = calibrated(layer.weight.data, case, group)
    layer.weight.data = clipped(layer.weight.data, case, scales, zeros, group)
    packed = WQLinear_GEMM.from_linear(
        layer, case.bits, case.group_size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    answer = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), case.bits, case.group_size)
    return tensors, answer.T.contiguous().float()


def make(folder: Path, case: Case) -> None:
    tensors: dict[str, torch.Tensor] = {}
    answers: dict[str, torch.Tensor] = {}
    group = torch.empty(0)
    for expert in range(case.num_experts):
        for part in ("gate", "up", "down"):
            sizes = (case.intermediate, case.hidden) if part != "down" else (case.hidden, case.intermediate)
            layer = linear(*sizes)
            if part != "up":  # which has gate's inputs, and so its order
                size = sizes[1] if case.group_size == -1 else case.group_size
                group = torch.arange(sizes[1]) // size
                group = group[torch.randperm(sizes[1])] if case.ordered else group
            found, answer = pack_awq(layer, case, group) if case.awq else pack_gptq(layer, case, group)
            name = f"{EXPERTS}.{expert}.{part}_proj"
            tensors |= {f"{name}.{its}": tensor.contiguous() for its, tensor in found.items()}
            if expert == case.num_experts - 1 and part != "gate":
                answers[f"{name}.weight"] = answer
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(case.num_experts, case.hidden).half()
    for i in range(2):
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(case.hidden).half()
    # As `to_dict` of AutoGPTQ's BaseQuantizeConfig, and `to_transformers_dict` of AutoAWQ's AwqConfig.
    quantization: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": case.bits,
        "group_size": case.group_size,
        "damp_percent": 0.01,
        "desc_act": case.ordered,
        "static_groups": False,
        "sym": case.symmetric,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": None,
        "is_marlin_format": False,
    }
    if case.awq:
        quantization = {
            "quant_method": "awq",
            "zero_point": True,
            "group_size": case.group_size,
            "bits": case.bits,
            "version": "gemm",
            "modules_to_not_convert": ["gate"],
        }
    config = qwen3_moe_config(case.num_experts, case.hidden, case.intermediate, 2, quantization)
    save(folder, config, tensors, answers)


if __name__ == "__main__":
    make_all(sys.argv[1], {name: (case,) for name, case in CASES.items()}, make)
