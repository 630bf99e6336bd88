"""How compressed_tensors/auto_round_* were made: by the modules of AutoRound 0.16.1, with torch 2.14, on a CPU.

    python tests/data/make_auto_round.py tests/data/compressed_tensors

A folder holds a mixture of experts, named as Qwen3-MoE names its modules, whose router the config leaves in 16 bits.
AutoRound's modules pack the weights, with scales and zero points that are found here. The file beside the folder, of
the same name, holds the weights that AutoRound makes of the last expert's up and down, in float32.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

# The package's front imports much that its modules do not need.
spec = importlib.util.find_spec("auto_round")
assert spec is not None
assert spec.submodule_search_locations is not None
for name in ("auto_round", "auto_round.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(Path(spec.submodule_search_locations[0], *name.split(".")[1:]))]
    package.get_packing_device = lambda device: "cpu"
    sys.modules[name] = package

import torch  # noqa: E402
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp  # noqa: E402
from tool_models import EXPERTS, make_all, qwen3_moe_config, save  # noqa: E402

COUNT, HIDDEN, INTERMEDIATE = 2, 96, 64
CASES = {  # packing, bits, group size, whether symmetric
    "auto_round_g32": ("auto_round:auto_gptq", 4, 32, True),
    "auto_round_w8_g32_asym": ("auto_round:auto_gptq", 8, 32, False),
    "auto_round_v2_g16_asym": ("auto_round", 4, 16, False),
}


def pack(rows: int, columns: int, packing: str, bits: int, size: int, symmetric: bool) -> tuple[Any, Any]:
    """A random module's tensors, and the weight that the package makes of them."""
    layer = torch.nn.Linear(columns, rows, bias=False).requires_grad_(False)
    layer.weight.data = (torch.randn(rows, columns) + torch.randn(rows, 1) / 2) * torch.exp2(torch.rand(rows, 1) * 4)
    most, blocks = 2**bits - 1, layer.weight.data.reshape(rows, -1, size)
    if symmetric:
        scales, zeros = blocks.abs().amax(2) * 2 / most, torch.full((rows, columns // size), (most + 1) / 2)
    else:
        low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
        scales = (high - low) / most
        zeros = torch.round(-low / scales).clamp(1, most)
    scales = scales.half().float()
    module = (qlinear_torch if packing == "auto_round" else qlinear_torch_zp).QuantLinear
    packed = module(bits, size, columns, rows, bias=False, weight_dtype=torch.float32)
    packed.device = "cpu"
    packed.pack(layer, scales, zeros, None, device="cpu")
    found = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales")}
    assert found.keys() == dict(packed.named_buffers()).keys()
    packed.scales = packed.scales.float()
    return found, packed(torch.eye(columns)).T.contiguous()


def make(folder: Path, packing: str, bits: int, size: int, symmetric: bool) -> None:
    tensors, answers = {}, {}
    for expert in range(COUNT):
        for part in ("gate", "up", "down"):
            sizes = (INTERMEDIATE, HIDDEN) if part != "down" else (HIDDEN, INTERMEDIATE)
            found, answer = pack(*sizes, packing, bits, size, symmetric)
            name = f"{EXPERTS}.{expert}.{part}_proj"
            tensors |= {f"{name}.{its}": tensor.contiguous() for its, tensor in found.items()}
            if expert == COUNT - 1 and part != "gate":
                answers[f"{name}.weight"] = answer
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(COUNT, HIDDEN).half()
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(HIDDEN).half()
    quantization = {
        "autoround_version": "0.16.1",
        "bits": bits,
        "block_name_to_quantize": "model.layers",
        "data_type": "int",
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
        "group_size": size,
        "iters": 0,
        "packing_format": packing,
        "quant_method": "auto-round",
        "sym": symmetric,
    }
    save(folder, qwen3_moe_config(COUNT, HIDDEN, INTERMEDIATE, 1, quantization), tensors, answers)


if __name__ == "__main__":
    make_all(sys.argv[1], CASES, make)
