"""vLLM's library of MoE operators, without vLLM: the grouping that Marlin and Humming run on, and Marlin itself."""
# pyright: reportMissingImports=false

import pathlib

import torch


def load(packages: str) -> None:
    """Registers the operators under `torch.ops._moe_C`. `packages` is the directory that fetch.py filled."""
    torch.ops.load_library(pathlib.Path(packages, "moe_C.so"))


def align(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assignments sorted by expert, each expert's padded to whole blocks; each block's expert; how many rows that is.

    `expert_ids` is (T, k) int32; all results are int32. Rows of padding hold T k.
    """
    assignments = expert_ids.numel()
    rows = assignments + num_experts * (block_m - 1)
    if assignments < num_experts:
        rows = min(assignments * block_m, rows)

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=expert_ids.device)

    order, experts, count = empty(rows), empty(-(-rows // block_m)), empty(1)
    torch.ops._moe_C.moe_align_block_size(expert_ids, num_experts, block_m, order, experts, count, None, None)
    return order, experts, count
