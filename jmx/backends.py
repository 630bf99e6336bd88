"""The backends, in order of preference, and the layouts that devices get. The only file that knows every engine."""

from jmx.ffi import blackwell, blackwell_layouts
from jmx.ffi.cpu.backend import Cpu
from jmx.ffi.cutlass.backend import Cutlass
from jmx.ffi.cutlass.layout import LAYOUT as CUTLASS
from jmx.numerics import layouts
from jmx.numerics.formats import MXFP4, Format
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.layout import LAYOUT as MOSAIC_SM90
from jmx.pallas.mosaic_sm90_fp8.backend import INPUTS, MosaicSm90Fp8
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT as MOSAIC_SM90_FP8
from jmx.pallas.triton.backend import Triton
from jmx.selection.backend import Backend
from jmx.selection.environment import Environment
from jmx.util.checks import check_one_of
from jmx.xla.backend import Xla

# `xla` runs everything: what stands behind it runs on request alone, as `cutlass` does, which `mosaic` outruns, or not
# at all: the engines for Blackwell have no kernel yet.
BACKENDS: tuple[Backend, ...] = (
    *(MosaicSm90(), MosaicSm90Fp8(), Cpu(), Triton(), Xla()),
    *(Cutlass(), *blackwell.ENGINES),
)
layouts.register(MOSAIC_SM90)
layouts.register(MOSAIC_SM90_FP8)
layouts.register(CUTLASS)
layouts.register(blackwell_layouts.CUTLASS_LAYOUT)
layouts.register(blackwell_layouts.TRTLLM_LAYOUT)


def resolve_layout(
    layout: str, environment: Environment, format: Format = MXFP4, input_format: str | None = None
) -> str:
    """The layout that `layout` names on this machine: "auto" is that of the engine family which runs `format` here.

    `input_format`: the name of that in which weights will be used; None: of 16 bits.

    Raises:
        ValueError: no layout has that name.
    """
    if check_one_of("layout", layout, ("auto", *sorted(layouts.LAYOUTS))) == "auto":
        if environment.compute_capability == (9, 0):
            if input_format is None and MOSAIC_SM90.holds(format):
                return MOSAIC_SM90.name
            if input_format in INPUTS and MOSAIC_SM90_FP8.holds(format):
                return MOSAIC_SM90_FP8.name
        # Bytes rather than float4: in a loop XLA's CPU compiler widens whole float4 arrays, and its GPU compiler fuses
        # a gather of bytes, but not of float4, into what follows.
        return "packed"
    return layout
