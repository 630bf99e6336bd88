"""The backends, in order of preference, and the layouts that devices get. The only file that knows every engine."""

from jmx import layouts
from jmx.ffi import blackwell, blackwell_layouts, cutlass_layout
from jmx.ffi.cpu import Cpu
from jmx.ffi.cutlass import Cutlass
from jmx.formats import MXFP4, Format
from jmx.pallas import mosaic_sm90, mosaic_sm90_fp8, mosaic_sm90_fp8_layout, mosaic_sm90_layout, triton
from jmx.selection import Backend, Environment
from jmx.xla import Xla

# `xla` runs everything: what stands behind it runs on request alone, as `cutlass` does, which `mosaic` outruns, or not
# at all: the engines for Blackwell have no kernel yet.
BACKENDS: tuple[Backend, ...] = (
    *(mosaic_sm90.MosaicSm90(), mosaic_sm90_fp8.MosaicSm90Fp8(), Cpu(), triton.Triton(), Xla()),
    *(Cutlass(), *blackwell.ENGINES),
)
layouts.register(mosaic_sm90_layout.LAYOUT)
layouts.register(mosaic_sm90_fp8_layout.LAYOUT)
layouts.register(cutlass_layout.LAYOUT)
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
    if layout == "auto":
        if environment.compute_capability == (9, 0):
            if input_format is None and mosaic_sm90_layout.LAYOUT.holds(format):
                return mosaic_sm90_layout.LAYOUT.name
            if input_format in mosaic_sm90_fp8.INPUTS and mosaic_sm90_fp8_layout.LAYOUT.holds(format):
                return mosaic_sm90_fp8_layout.LAYOUT.name
        # Bytes rather than float4: in a loop XLA's CPU compiler widens whole float4 arrays, and its GPU compiler fuses
        # a gather of bytes, but not of float4, into what follows.
        return "packed"
    return layouts.get(layout).name
