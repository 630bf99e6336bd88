"""Kernels for the work between and after two grouped products, which some systems leave to their caller."""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

from benchmarks.peers.problem import Shape

_BLOCK = 1024


@triton.jit
def _swiglu_kernel(h, out, columns, alpha, beta, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    pairs = 2 * start + tl.arange(0, 2 * BLOCK)
    values = tl.load(h + row * 2 * columns + pairs, mask=pairs < 2 * columns, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    at = start + tl.arange(0, BLOCK)
    y = (up + beta) * gate * tl.sigmoid(alpha * gate)
    tl.store(out + row * columns + at, y.to(tl.bfloat16), mask=at < columns)


def swiglu(h: torch.Tensor, shape: Shape) -> torch.Tensor:
    """(R, 2I) bfloat16 with gate and up alternating -> (R, I) bfloat16."""
    rows, columns = h.shape[0], h.shape[1] // 2
    out = torch.empty(rows, columns, dtype=h.dtype, device=h.device)
    limit = float("inf") if shape.limit is None else shape.limit
    grid = (rows, triton.cdiv(columns, _BLOCK))
    _swiglu_kernel[grid](h, out, columns, float(shape.alpha), float(shape.beta), limit, BLOCK=_BLOCK)
    return out


@triton.jit
def _weighted_sum_kernel(y, weights, out, columns, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        part = tl.load(y + (token * K + slot) * columns + at, mask=at < columns, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + token * K + slot)
    tl.store(out + token * columns + at, total.to(tl.bfloat16), mask=at < columns)


def weighted_sum(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(T k, H) bfloat16 in the order of tokens and slots, and (T, k) float32 -> (T, H) bfloat16."""
    (num_tokens, top_k), columns = weights.shape, y.shape[1]
    out = torch.empty(num_tokens, columns, dtype=y.dtype, device=y.device)
    grid = (num_tokens, triton.cdiv(columns, _BLOCK))
    _weighted_sum_kernel[grid](y, weights, out, columns, K=top_k, BLOCK=_BLOCK)
    return out
