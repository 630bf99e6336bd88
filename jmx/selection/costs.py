"""What a call costs at least: bytes, flops, and the time that a device takes for them by its data sheet."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jmx.numerics import formats
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem, weight_shapes
from jmx.util.tables import decimal


@dataclass(frozen=True)
class Peak:
    """A device's peak rates: memory bandwidth in bytes/s, dense products in flop/s (in `PEAKS`, of bfloat16).

    `links`: bytes/s that a device sends to the others of its host; None: not known.
    """

    bandwidth: float
    flops: float
    links: float | None = None


# What an all-gather by NCCL sends over NVLink 4, measured on two H200s (its data sheet: 450e9 each way).
_NVLINK_4 = 245e9

# NVIDIA's data sheets, dense rates, by device kind: other parts of a family (PCIe, NVL) have other rates. Measured
# rates are lower: see `jmx bench`.
PEAKS = {
    "NVIDIA A100-SXM4-80GB": Peak(2.039e12, 312e12),
    "NVIDIA L4": Peak(0.3e12, 121e12),
    "NVIDIA L40S": Peak(0.864e12, 362e12),
    "NVIDIA H100 80GB HBM3": Peak(3.35e12, 989e12, _NVLINK_4),
    "NVIDIA H200": Peak(4.8e12, 989e12, _NVLINK_4),
    "NVIDIA B100": Peak(8.0e12, 1750e12),
    "NVIDIA B200": Peak(8.0e12, 2250e12),
    "NVIDIA GB200": Peak(8.0e12, 2500e12),
}


# Types that tensor cores multiply faster than bfloat16: the first compute capability, the speedup, and the elements
# that the type represents exactly (int8: twice those of e2m1). The fastest first.
_E2M1, _INT4 = np.dtype(jnp.float4_e2m1fn), np.dtype(jnp.int4)
_NARROW = (
    ((10, 0), 4, {_E2M1}),  # FP4
    ((8, 9), 2, {_E2M1, _INT4, np.dtype(jnp.float8_e4m3fn)}),  # FP8
    ((8, 0), 2, {_E2M1, _INT4, np.dtype(np.int8)}),  # int8
)


def times_bfloat16(problem: Problem, environment: Environment) -> int:
    """The ratio of tensor cores' dense rate for a problem's elements to that for bfloat16: 1, 2 or 4.

    By NVIDIA's data sheets, dense rates of the parts in `PEAKS`: int8 has twice the rate of bfloat16 from Ampere on,
    FP8 from Ada and Hopper on, and FP4 four times from Blackwell on. The fastest type that represents the elements of
    both weights and inputs counts, whichever type a backend uses. Inputs of 16 or 32 bits, other pairs, other devices
    and GPUs without such tensor cores: 1.
    """
    if problem.input_format is None or environment.platform != "gpu" or environment.compute_capability is None:
        return 1
    elements = {formats.FORMATS[problem.format].element_dtype, INPUT_FORMATS[problem.input_format].element_dtype}
    for since, times, held in _NARROW:
        if environment.compute_capability >= since and elements <= held:
            return times
    return 1


def active_experts(problem: Problem) -> float:
    """The expected number of experts in use under uniform random routing: E (1 - (1 - k/E)^T)."""
    assert problem.num_tokens is not None
    unused = max(0.0, 1 - problem.top_k / problem.num_experts) ** problem.num_tokens
    return problem.num_experts * (1 - unused)


def flops(problem: Problem) -> float:
    """Multiplications and additions of both products over all tokens."""
    assert problem.num_tokens is not None
    return 2 * problem.num_tokens * problem.top_k * sum(rows * columns for rows, columns in weight_shapes(problem))


@dataclass(frozen=True)
class Floor:
    """The minimum time of a problem on a device: `us` microseconds, `bound` by "memory", "compute" or "links"."""

    us: float
    bound: str
    peak: Peak

    @classmethod
    def of(cls, moved: float, operations: float, peak: Peak, sent: float = 0) -> "Floor":
        """The floor of a number of bytes, flops, and bytes sent to other devices: the longest of their times."""
        times = {"memory": 1e6 * moved / peak.bandwidth, "compute": 1e6 * operations / peak.flops}
        if sent:
            assert peak.links is not None
            times["links"] = 1e6 * sent / peak.links
        bound = max(times, key=lambda name: times[name])
        return cls(times[bound], bound, peak)

    def __str__(self) -> str:
        sheet = {"memory": scaled(self.peak.bandwidth, "B/s"), "compute": scaled(self.peak.flops, "FLOP/s")}
        limits = {bound: f"{rate} by data sheet" for bound, rate in sheet.items()}
        limits["links"] = f"{scaled(self.peak.links or 0, 'B/s')} measured with NCCL"
        return f"floor {decimal(self.us)} us ({self.bound}, {limits[self.bound]})"


def scaled(value: float, unit: str) -> str:
    """A value with three digits and the prefix of its unit: "4.8 TB/s"."""
    factor, prefix = next(
        ((f, p) for f, p in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= f), (1, "")
    )
    return f"{value / factor:.3g} {prefix}{unit}"
