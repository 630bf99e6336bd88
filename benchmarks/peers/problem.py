"""One MXFP4 layer in PyTorch: its shape, random weights and tokens, and its float32 reference."""
# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

BLOCK = 32  # elements that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = (118, 124)  # codes drawn: outputs stay within a few orders of magnitude of their inputs
_BIAS = 0.1
_CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    """A layer of gated experts: E, k, H, I, and the parameters of `jmx.SwiGLU`; `limit` None is no clamp."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    alpha: float
    beta: float
    limit: float | None
    bias: bool


class Weights(NamedTuple):
    """Gate and up rows alternate. Values two a byte, the even column in the low nibble; scales as e8m0 codes."""

    gate_up: torch.Tensor  # (E, 2I, H/2) uint8
    gate_up_scales: torch.Tensor  # (E, 2I, H/32) uint8
    gate_up_bias: torch.Tensor | None  # (E, 2I) bfloat16
    down: torch.Tensor  # (E, H, I/2) uint8
    down_scales: torch.Tensor  # (E, H, I/32) uint8
    down_bias: torch.Tensor | None  # (E, H) bfloat16

    def padded(self, hidden_size: int, intermediate_size: int) -> "Weights":
        """The same layer padded with zeros to these sizes, for kernels that require whole tiles."""
        h = hidden_size - self.down.shape[1]
        i = intermediate_size - self.down.shape[2] * 2

        def bias(values: torch.Tensor | None, rows: int) -> torch.Tensor | None:
            return None if values is None else pad(values, (0, rows))

        return Weights(
            pad(self.gate_up, (0, h // 2, 0, 2 * i)),
            pad(self.gate_up_scales, (0, h // BLOCK, 0, 2 * i), value=127),
            bias(self.gate_up_bias, 2 * i),
            pad(self.down, (0, i // 2, 0, h)),
            pad(self.down_scales, (0, i // BLOCK, 0, h), value=127),
            bias(self.down_bias, h),
        )


class Case(NamedTuple):
    """Inputs of a layer: tokens, router logits, and the routing that follows from them."""

    x: torch.Tensor  # (T, H) bfloat16
    logits: torch.Tensor  # (T, E) bfloat16
    expert_ids: torch.Tensor  # (T, k) int32
    weights: torch.Tensor  # (T, k) float32, the softmax of a token's k logits

    @property
    def active(self) -> int:
        """How many experts have a token."""
        return self.expert_ids.unique().numel()


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def draw_weights(shape: Shape, device: str = "cuda") -> Weights:
    """Random weights of one layer."""
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        values = torch.randint(0, 256, (e, rows, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(*_SCALES, (e, rows, columns // BLOCK), dtype=torch.uint8, device=device)
        bias = _BIAS * torch.randn(e, rows, device=device) if shape.bias else None
        return values, scales, None if bias is None else bias.bfloat16()

    return Weights(*matrix(2 * i, h), *matrix(h, i))


def draw_case(shape: Shape, num_tokens: int, routing: str, device: str = "cuda") -> Case:
    """Random tokens, with a routing of `jmx.perf.shapes.ROUTINGS`, to the k largest logits."""
    x = torch.randn(num_tokens, shape.hidden_size, device=device).bfloat16()
    logits = draw_logits(num_tokens, shape.num_experts, shape.top_k, routing, device)
    top = logits.float().topk(shape.top_k, dim=-1)
    return Case(x, logits, top.indices.int(), top.values.softmax(-1))


def draw_logits(num_tokens: int, num_experts: int, top_k: int, routing: str, device: str = "cuda") -> torch.Tensor:
    """Router logits (T, E), bfloat16. No token's k-th largest equals its next, which would make two answers correct."""
    rank = torch.randperm(num_experts, device=device)
    taken = torch.randperm(num_tokens, device=device) < (num_tokens + 1) // 2
    logits = torch.empty(num_tokens, num_experts, dtype=torch.bfloat16, device=device)
    tied = torch.ones(num_tokens, dtype=torch.bool, device=device)
    while tied.any():
        noise = torch.randn(int(tied.sum()), num_experts, device=device)
        if routing == "zipf":  # the k largest of log p + Gumbel noise are k draws from p
            noise = -torch.log(torch.empty_like(noise).exponential_()) - torch.log1p(rank.float())
        elif routing == "half":
            noise[:, rank == 0] += 8.0 * taken[tied, None]  # 8 standard deviations
        logits[tied] = noise.bfloat16()
        if top_k == num_experts:
            break
        top = logits.topk(top_k + 1, dim=-1).values
        tied = top[:, -1] == top[:, -2]
    return logits


def relative_error(y: torch.Tensor, shape: Shape, weights: Weights, case: Case) -> float:
    """||y - ref|| / ||ref|| over up to 64 of the tokens, against float32 products of the decoded weights."""
    checked = torch.randperm(len(case.x), device=case.x.device)[:_CHECKED_TOKENS]
    expected = reference(shape, weights, Case(*(array[checked] for array in case)))
    return float((y[checked].float() - expected).norm() / expected.norm())


def reference(shape: Shape, weights: Weights, case: Case) -> torch.Tensor:
    """The layer in float32, (T, H), an expert at a time."""
    y = torch.zeros_like(case.x, dtype=torch.float32)
    for e in case.expert_ids.unique().tolist():
        h = case.x.float() @ _decode(weights.gate_up[e], weights.gate_up_scales[e]).T
        if weights.gate_up_bias is not None:
            h += weights.gate_up_bias[e].float()
        gate, up = h[:, 0::2], h[:, 1::2]
        if shape.limit is not None:
            gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
        h = (up + shape.beta) * gate * torch.sigmoid(shape.alpha * gate)
        part = h @ _decode(weights.down[e], weights.down_scales[e]).T
        if weights.down_bias is not None:
            part += weights.down_bias[e].float()
        y += part * ((case.expert_ids == e) * case.weights).sum(1, keepdim=True)
    return y


def _decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One expert's matrix in float32: (N, K/2) bytes and (N, K/32) codes to (N, K)."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=values.device)
    elements = table[torch.stack([values & 15, values >> 4], -1).flatten(1).long()]
    return elements * torch.exp2(scales.float() - 127).repeat_interleave(BLOCK, 1)
