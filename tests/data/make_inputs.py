"""How inputs.safetensors was made: inputs in FP8 with one dynamic scale, by compressed-tensors 0.20.0 on a CPU.

    python tests/data/make_inputs.py tests/data/inputs.safetensors

Of each tensor x: the scale that the package computes for the dynamic strategy "tensor", and the elements that it rounds
to.
"""
# pyright: reportMissingImports=false

import sys

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file

ARGS = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=True)


def main(path: str) -> None:
    torch.manual_seed(0)
    tensors = {}
    for i, (shape, size) in enumerate([((5, 96), 1.0), ((2, 3, 40), 300.0), ((64,), 1e-3), ((7, 33), 1e4)]):
        x = torch.randn(shape) * size * torch.exp2(torch.rand(shape) * 6 - 5)
        module = torch.nn.Linear(shape[-1], 1)
        scale, zero_point = compute_dynamic_scales_and_zp(x, ARGS, module)
        q = quantize(x, scale, zero_point, ARGS, dtype=torch.float8_e4m3fn)
        tensors |= {f"{i}.x": x, f"{i}.scale": scale.float().reshape(()), f"{i}.values": q.view(torch.uint8)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
