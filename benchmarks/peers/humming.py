"""Humming's MXFP4 products as vLLM calls them without expert parallelism: rows found through indices, tuned tiles."""
# pyright: reportMissingImports=false

import json
from collections.abc import Callable

import torch
from humming.layer import HummingLayer
from humming.ops import process_input
from humming.tune import get_heuristics_config
from torch.nn.functional import pad

from benchmarks.peers import elementwise, vllm_library
from benchmarks.peers.problem import Case, Shape, Weights, round_up

load = vllm_library.load

_INDEXED = json.dumps({"gemm_type": "indexed"})


def prepare(shape: Shape, weights: Weights) -> Callable[[Case], Callable[[], torch.Tensor]]:
    """Pads H and I to 128: Humming tunes no tile for 2880. Expert ids are given: routing is not part of the call."""
    h, i = round_up(shape.hidden_size, 128), round_up(shape.intermediate_size, 128)
    weights = weights.padded(h, i)
    gate_up = _layer(weights.gate_up, weights.gate_up_scales, weights.gate_up_bias)
    down = _layer(weights.down, weights.down_scales, weights.down_bias)
    activation = _activation(shape)

    def bind(case: Case) -> Callable[[], torch.Tensor]:
        x = pad(case.x, (0, h - shape.hidden_size))
        assignments = case.expert_ids.numel()
        tunings = [
            get_heuristics_config(layer_config=layer.humming_config, shape_m=assignments, gemm_type="indexed")
            for layer in (gate_up, down)
        ]
        blocks_m = [tuning["block_shape"][0] for tuning in tunings]
        tunings = [json.dumps(tuning) for tuning in tunings]

        def product(
            layer: HummingLayer, rows: torch.Tensor, blocks: tuple[torch.Tensor, ...], top_k: int, tuning: str
        ) -> torch.Tensor:
            order, experts, count = blocks
            return layer(
                rows,
                sorted_ids=order,
                expert_ids=experts,
                num_tokens_padded=count,
                top_k=top_k,
                valid_shape_m=assignments,
                compute_config=_INDEXED,
                tuning_config=tuning,
            )

        def call() -> torch.Tensor:
            blocks = vllm_library.align(case.expert_ids, shape.num_experts, blocks_m[0])
            y = product(gate_up, x, blocks, shape.top_k, tunings[0])
            y = process_input(y, activation_type="binary_interleaved", activation_impl=activation)[0]
            if blocks_m[1] != blocks_m[0]:
                blocks = vllm_library.align(case.expert_ids, shape.num_experts, blocks_m[1])
            y = product(down, y, blocks, 1, tunings[1])
            return elementwise.weighted_sum(y.view(assignments, h), case.weights)[:, : shape.hidden_size]

        return call

    return bind


def _layer(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> HummingLayer:
    num_experts, n, half_k = values.shape
    layer = HummingLayer(
        shape_n=n,
        shape_k=2 * half_k,
        weight_config={"quant_method": "gpt_oss_mxfp4"},
        num_experts=num_experts,
        has_bias=bias is not None,
        torch_dtype=torch.bfloat16,
    ).cuda()
    tensors = {"weight": values, "weight_scale": scales}
    layer.load_from_tensors(tensors if bias is None else tensors | {"bias": bias})
    layer.transform()
    return layer


def _activation(shape: Shape) -> str:
    """The activation of gate `a` and up `b` in CUDA C++, in the form that Humming expects."""
    gate, up = "a", "b"
    if shape.limit is not None:
        gate, up = f"fminf(a, {shape.limit}f)", f"fmaxf(fminf(b, {shape.limit}f), -{shape.limit}f)"
    clamped = f"const float gate = {gate}; const float up = {up};"
    gated = f"gate / (1.f + expf(-{shape.alpha}f * gate)) * (up + {shape.beta}f)"
    return f"[](float a, float b) {{ {clamped} return {gated}; }}(a, b)"
