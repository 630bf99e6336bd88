#!/usr/bin/env python3
"""Forward, and forward + gradients, of a layer by torch's `grouped_mm` on bfloat16 weights, for benchmarks/training.py.

    python benchmarks/peers/grouped_mm.py '{"tokens": [64, 1024], "layers": 2, "repeats": 5, "shape": {...}}'

`shape`: fields of `problem.Shape`. Output as of benchmarks/training_layer.py. Calls are captured in one CUDA graph.
"""
# pyright: reportMissingImports=false

import json
import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import torch

from benchmarks.peers.problem import Shape

CHECKED = 32  # tokens of which results are checked
TOLERANCE = 5e-2  # relative error
_BIAS = 0.1


class Weights(NamedTuple):
    """bfloat16: gate_up (E, 2I, H), whose rows alternate, and down (E, H, I), as checkpoints have them; biases."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor


def draw_weights(shape: Shape, device: str) -> Weights:
    """Random weights, whose products keep the variance of their inputs."""
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def normal(*sizes: int, scale: float) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=device) * scale

    matrices = normal(e, 2 * i, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
    return Weights(*matrices, normal(e, 2 * i, scale=_BIAS), normal(e, h, scale=_BIAS))


def activation(shape: Shape, h: torch.Tensor) -> torch.Tensor:
    """That of `problem.reference`."""
    gate, up = h[..., 0::2], h[..., 1::2]
    if shape.limit is not None:
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return (up + shape.beta) * gate * torch.sigmoid(shape.alpha * gate)


def layer(shape: Shape, x: torch.Tensor, logits: torch.Tensor, weights: Weights) -> torch.Tensor:
    """x (T, H) -> y (T, H): sorts by expert, two grouped products, weighted sum."""
    grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or vars(torch)["_grouped_mm"]
    top = logits.topk(shape.top_k, dim=-1)
    experts, order = top.indices.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(shape.num_experts, device=x.device), right=True).int()
    h = grouped_mm(x[order // shape.top_k], weights.gate_up.mT, offs=ends) + weights.gate_up_bias[experts]
    out = grouped_mm(activation(shape, h), weights.down.mT, offs=ends) + weights.down_bias[experts]
    out = out * top.values.softmax(-1).flatten()[order, None].to(out.dtype)
    slots = torch.empty_like(out).index_copy(0, order, out).unflatten(0, (-1, shape.top_k))
    return slots.float().sum(1).to(x.dtype)


def reference(shape: Shape, x: torch.Tensor, logits: torch.Tensor, weights: Weights) -> torch.Tensor:
    """`layer` in float32, an expert at a time."""
    top, y = logits.topk(shape.top_k, dim=-1), torch.zeros_like(x)
    shares = top.values.softmax(-1)
    for e in top.indices.unique().tolist():
        h = x @ weights.gate_up[e].float().mT + weights.gate_up_bias[e].float()
        out = activation(shape, h) @ weights.down[e].float().mT + weights.down_bias[e].float()
        y = y + out * ((top.indices == e) * shares).sum(1, keepdim=True)
    return y


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def both(
    run: Callable[..., torch.Tensor], x: torch.Tensor, logits: torch.Tensor, weights: Weights, dy: torch.Tensor
) -> Results:
    """y, and gradients of x and logits."""
    x, logits = x.detach().requires_grad_(), logits.detach().requires_grad_()
    y = run(x, logits, weights)
    dx, dlogits = torch.autograd.grad(y, (x, logits), dy)
    return y.detach(), dx, dlogits


def draw_case(shape: Shape, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (T, H), logits (T, E) and dy (T, H)."""
    x, dy = torch.randn(2, tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
    return x, torch.randn(tokens, shape.num_experts, device=device), dy


def errors(shape: Shape, case: tuple[torch.Tensor, ...], weights: Weights, got: Results) -> dict[str, float]:
    """Relative errors of the results for some tokens."""
    x, logits, dy = case
    checked = torch.randperm(len(x), device=x.device)[:CHECKED]
    wanted = both(
        lambda *arguments: reference(shape, *arguments),
        x[checked].float(),
        logits[checked],
        weights,
        dy[checked].float(),
    )
    found = {}
    for name, mine, its in zip(("y", "dx", "dlogits"), got, wanted, strict=True):
        found[name] = float((mine[checked].float() - its).norm() / its.norm())
    return found


def measure(shape: Shape, layers: list[Weights], tokens: int, repeats: int) -> dict[str, Any]:
    """Checks the results of a layer, and times all of them, in us a layer."""
    from benchmarks.peers import timing

    cases = [draw_case(shape, tokens, "cuda") for _ in layers]

    def run(x: torch.Tensor, logits: torch.Tensor, weights: Weights) -> torch.Tensor:
        return layer(shape, x, logits, weights)

    found = errors(shape, cases[0], layers[0], both(run, *cases[0][:2], layers[0], cases[0][2]))
    if not max(found.values()) < TOLERANCE:
        return {"rel_err": found, "error": "the result is wrong"}
    row: dict[str, Any] = {"rel_err": found, "note": f"torch {torch.__version__}", "weights": "bf16"}
    for name in ("forward", "both"):

        def call(number: int, name: str = name) -> torch.Tensor:
            x, logits, dy = cases[number]
            if name == "both":
                return both(run, x, logits, layers[number], dy)[1]
            with torch.no_grad():
                return run(x, logits, layers[number])

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls = [partial(call, number) for number in range(len(layers))]
        row[f"{name}_us"], row[f"{name}_spread"], _ = timing.replay(calls, repeats)
        row[f"{name}_temporary_bytes"] = torch.cuda.max_memory_allocated() - before
    row["weight_bytes"] = sum(array.nbytes for array in layers[0])
    return row | {"over_forward": row["both_us"] / row["forward_us"]}


def main(text: str) -> None:
    settings = json.loads(text)
    shape = Shape(**settings["shape"])
    print(json.dumps({"compiled": 0}), flush=True)
    if not sys.stdin.readline():
        return
    layers = [draw_weights(shape, "cuda") for _ in range(settings["layers"])]
    for tokens in settings["tokens"]:
        try:
            row = measure(shape, layers, tokens, settings["repeats"])
        except Exception as error:  # any failure is the row's result, and the other rows still run
            row = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps({"tokens": tokens, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
