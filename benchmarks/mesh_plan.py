#!/usr/bin/env python3
"""Plans layers over more GPUs than were measured: bytes and microseconds of the exchanges; nothing here is measured.

    python benchmarks/mesh_plan.py

By `gather` a GPU receives the tokens of all others, and sends as many results. By `rows` a token goes once to each
other GPU that has one of its experts, in buffers of 1.5 times these rows, which are sent whole. By `peer` it does, too,
without a buffer, if a GPU has 4 MiB of tokens or more: fewer go to all. Routing is uniform. Tokens and results are
bfloat16, but for "FP8": there tokens are codes with 16 bits more for 128 of them. Tokens of a host stay in it: the
experts of a layer are divided inside one host, and hosts are data parallel. Nothing overlaps.
"""

import argparse
from dataclasses import dataclass
from math import comb

BFLOAT16_BYTES = 2
FP8_BYTES = 1 + 2 / 128  # of the codes of blocks of 128, as jmx/parallel/wire.py sends them
BUFFER = 1.5  # rows of a buffer over those of even routing, as jmx/parallel/row_plan.py has it
LEAST_BYTES = 4 << 20  # of a GPU's tokens, from which `peer` leaves rows out, as jmx/parallel/needed.py has it
SIZES = (64, 1024, 8192)  # tokens a GPU


@dataclass(frozen=True)
class Model:
    """One layer: its sizes, the groups that routing is limited to, and its experts' time for 8192 tokens a GPU, in us.

    That time is that of one GPU, an estimate for many, whose loads are not equal.
    """

    hidden: int
    experts: int
    top_k: int
    local_us: float
    groups: int = 1  # all experts; of DeepSeek-V3 a GPU of 8 has one group
    top_groups: int = 1
    fp8: bool = False  # whether experts round tokens to FP8


MODELS = {
    "gpt-oss-120b": Model(2880, 128, 4, 2775),
    "deepseek-v3": Model(7168, 256, 8, 10457, groups=8, top_groups=4, fp8=True),
}


def remote_ranks(model: Model, ranks: int) -> float:
    """How many other GPUs have one of a token's experts, on the average of uniform routing."""
    if model.groups == ranks:  # a GPU has a group, and k experts are chosen from those of the chosen groups
        per_group = model.experts // model.groups
        pool = per_group * model.top_groups
        reached = model.top_groups * (1 - comb(pool - per_group, model.top_k) / comb(pool, model.top_k))
    else:
        reached = ranks * (
            1 - comb(model.experts - model.experts // ranks, model.top_k) / comb(model.experts, model.top_k)
        )
    return reached * (ranks - 1) / ranks


@dataclass(frozen=True)
class Plan:
    """What one exchange costs: bytes that a GPU sends both ways, and microseconds of these and of the experts."""

    sent: float
    exchange_us: float
    local_us: float

    @property
    def efficiency(self) -> float:
        """The experts' time over that of the layer."""
        return self.local_us / (self.local_us + self.exchange_us)


def copies(model: Model, ranks: int, tokens: int, exchange: str) -> float:
    """Of a token, those that other GPUs get."""
    if exchange == "rows":
        return min(ranks - 1, BUFFER * remote_ranks(model, ranks))
    if exchange == "peer" and tokens * model.hidden * BFLOAT16_BYTES >= LEAST_BYTES:
        return remote_ranks(model, ranks)
    return ranks - 1


def plan(
    model: Model, ranks: int, tokens: int, exchange: str, link_gb_s: float, latency_us: float, fp8: bool = False
) -> Plan:
    """One layer over the GPUs of a host, with `tokens` a GPU. `fp8`: whether tokens are sent as codes."""
    sent = tokens * model.hidden * copies(model, ranks, tokens, exchange)
    sent *= BFLOAT16_BYTES + (FP8_BYTES if fp8 else BFLOAT16_BYTES)
    return Plan(sent, sent / link_gb_s / 1e3 + 2 * latency_us, model.local_us * tokens / 8192)


def table(link_gb_s: float, latency_us: float) -> str:
    """The table of docs/many_gpus.md, of 8 GPUs."""
    lines = [
        "| layer | tokens a GPU | exchange | MB sent, both ways | exchange, us | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        for tokens in SIZES:
            for exchange in ("gather", "peer", "rows", "rows, FP8")[: 4 if model.fp8 else 3]:
                fp8 = exchange == "rows, FP8"
                its = plan(model, 8, tokens, exchange.removesuffix(", FP8"), link_gb_s, latency_us, fp8)
                # Below some 1024 tokens a GPU the time is that of reading weights, which is not planned here.
                share = f"{its.efficiency:.0%}" if tokens >= 1024 else "-"
                cells = [name, str(tokens), exchange, f"{its.sent / 1e6:.1f}", f"{its.exchange_us:.0f}", share]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link-gb-s", type=float, default=245, help="of a GPU, one way (default: %(default)g)")
    parser.add_argument("--latency-us", type=float, default=11, help="of one collective (default: %(default)g)")
    arguments = parser.parse_args()
    print(table(arguments.link_gb_s, arguments.latency_us))


if __name__ == "__main__":
    main()
