"""What the machine code of every persistent kernel shows: its warpgroups' registers, and when stages are released."""

import re

import aot
from sass import early_releases, parse, register_limits

from jmx.pallas.sm90.config import BaseConfig

WARPGROUP = 128  # threads


def assert_registers(kernel: aot.Kernel, config: BaseConfig) -> None:
    """Each warpgroup uses those that it requests, consumers as many as `config` has, and a CTA has them all."""
    limits = register_limits(parse(kernel.sass))
    assert all(used <= limit for limit, used in limits), limits
    (compute, _), (fetch, _) = sorted(limits, reverse=True)
    assert compute == config.registers
    # A CTA has the registers that it was launched with. A warpgroup that requests more waits forever.
    launched = int(re.findall(r"Used (\d+) registers", kernel.report)[0]) * (config.num_warpgroups + 1)
    assert config.num_warpgroups * compute + fetch <= launched
    assert launched * WARPGROUP <= 65536


def assert_stages_are_released_late(kernel: aot.Kernel, config: BaseConfig, *, resident_rows: bool = False) -> None:
    """Each once all that a thread has loaded from it is there.

    Where partial sums or the scales of resident rows are loaded, too, only matrices are looked at: no copy by TMA waits
    for the arrivals behind those.
    """
    loads = "LDSM" if config.warpgroups_k > 1 or resident_rows else "LDS"
    assert early_releases(parse(kernel.sass), loads) == []
