"""Marlin's MXFP4 product of grouped rows, from the library that vLLM ships, called as vLLM calls it.

The layouts are those of vLLM's marlin_utils: weights in tiles of 16 x 64 whose nibbles are in the order in which the
threads of a warp multiply them, scales and biases permuted to match.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from benchmarks.peers import elementwise, vllm_library
from benchmarks.peers.problem import Case, Shape, Weights, round_up

load = vllm_library.load

_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # vLLM's id of the type: 2 exponent bits, 1 mantissa bit, signed, finite
_NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]
_SCALES = [i + 8 * j for i in range(8) for j in range(8)]
_BIASES = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def prepare(shape: Shape, weights: Weights) -> Callable[[Case], Callable[[], torch.Tensor]]:
    """Pads H to 256 and I to 128, as vLLM does. Expert ids are given: routing is not part of the call."""
    h, i = round_up(shape.hidden_size, 256), round_up(shape.intermediate_size, 128)
    weights = weights.padded(h, i)
    gate_up, gate_up_scales = repack(weights.gate_up), permute_scales(weights.gate_up_scales)
    down, down_scales = repack(weights.down), permute_scales(weights.down_scales)
    gate_up_bias, down_bias = (
        None if bias is None else permute_bias(bias) for bias in (weights.gate_up_bias, weights.down_bias)
    )
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")

    def bind(case: Case) -> Callable[[], torch.Tensor]:
        x = pad(case.x, (0, h - shape.hidden_size))
        assignments = case.expert_ids.numel()
        per_expert = assignments / shape.num_experts
        block_m = next((size for size in (8, 16, 32, 48) if per_expert / size < 0.9), 64)  # vLLM's choice

        def product(
            rows: torch.Tensor,
            matrix: torch.Tensor,
            bias: torch.Tensor | None,
            scales: torch.Tensor,
            blocks: tuple[torch.Tensor, ...],
            top_k: int,
            weigh: bool,
        ) -> torch.Tensor:
            m, n, k = rows.shape[0], scales.shape[2], rows.shape[1]
            unused = None, None, None  # scales of activations, global scales, zero points
            flags = False, True, False  # atomic adds, float32 sums, float zero points
            tiles = -1, -1, -1  # the library's own choice
            head = rows, None, matrix, bias, scales, *unused, workspace, *blocks, case.weights, block_m
            return torch.ops._moe_C.moe_wna16_marlin_gemm(*head, top_k, weigh, _E2M1, m, n, k, *flags, *tiles)

        def call() -> torch.Tensor:
            blocks = vllm_library.align(case.expert_ids, shape.num_experts, block_m)
            y = product(x, gate_up, gate_up_bias, gate_up_scales, blocks, shape.top_k, weigh=False)
            y = elementwise.swiglu(y, shape)
            y = product(y, down, down_bias, down_scales, blocks, 1, weigh=True)
            return y.view(-1, shape.top_k, h).sum(1)[:, : shape.hidden_size]

        return call

    return bind


def repack(values: torch.Tensor) -> torch.Tensor:
    """Packed bytes (E, N, K/2) -> Marlin's words (E, K/16, 2N) int32, an expert at a time to save memory."""
    device = values.device
    lanes = [
        16 * row + lane // 4 + 8 * half + 256 * tile
        for lane in range(32)
        for tile in range(4)
        for half in (0, 1)
        for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1)
    ]
    order = torch.tensor(lanes, device=device).view(-1, 8)[:, _NIBBLES].flatten()
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=device)

    def one(expert: torch.Tensor) -> torch.Tensor:
        n, k = expert.shape[0], expert.shape[1] * 2
        nibbles = torch.stack([expert & 15, expert >> 4], -1).view(n // 16, 16, k // 16, 16)
        nibbles = nibbles.permute(2, 0, 3, 1).reshape(-1, 1024)[:, order]
        words = (nibbles.view(-1, 8).int() << shifts).sum(-1, dtype=torch.int32)
        return words.view(k // 16, 2 * n)

    return torch.stack([one(expert) for expert in values])


def permute_scales(scales: torch.Tensor) -> torch.Tensor:
    """Codes (E, N, G) uint8 -> Marlin's (E, G, N) float8_e8m0fnu."""
    e, n, groups = scales.shape
    scales = scales.mT.reshape(e, -1, 64)[:, :, _SCALES].reshape(e, -1, 4)[:, :, [0, 2, 1, 3]]
    return scales.reshape(e, groups, n).view(torch.float8_e8m0fnu)


def permute_bias(bias: torch.Tensor) -> torch.Tensor:
    """(E, N) in Marlin's order of columns."""
    return bias.view(-1, 32)[:, _BIASES].view(bias.shape)
