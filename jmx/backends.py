"""The backends in order of preference, and each device's default layout. The only file that imports every backend.

"Engine" is another word for backend, in names such as `jmx.engines`.
"""

from collections.abc import Collection, Sequence

from jmx.ffi.cpu import library as cpu_library
from jmx.ffi.cpu.backend import Cpu
from jmx.ffi.cutlass import library as cutlass_library
from jmx.ffi.cutlass.backend import Cutlass
from jmx.ffi.cutlass.layout import LAYOUT as CUTLASS
from jmx.ffi.one_token import library as one_token_library
from jmx.ffi.peer import library as peer_library
from jmx.numerics import blackwell_layouts
from jmx.numerics import layouts as known_layouts
from jmx.numerics.formats import MXFP4, Format
from jmx.numerics.layouts import Layout
from jmx.pallas.float_sm90.backend import MosaicFloat
from jmx.pallas.mosaic_sm90.backend import MosaicSm90, takes_inputs
from jmx.pallas.mosaic_sm90.layout import LAYOUT as MOSAIC_SM90
from jmx.pallas.mosaic_sm90_fp8.backend import MosaicSm90Fp8, multiplies
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT as MOSAIC_SM90_FP8
from jmx.pallas.triton.backend import Triton
from jmx.selection.backend import Backend
from jmx.selection.environment import Environment
from jmx.selection.registry import GROUP, Registry
from jmx.util.checks import check_one_of
from jmx.xla.backend import Xla

# `xla` runs everything, so backends after it would run on request only.
REGISTRY = Registry((MosaicSm90(), MosaicSm90Fp8(), MosaicFloat(), Cpu(), Triton(), Cutlass(), Xla()), GROUP)

known_layouts.register(MOSAIC_SM90)
known_layouts.register(MOSAIC_SM90_FP8)
known_layouts.register(CUTLASS)
# No backend reads these yet: see docs/blackwell.md.
for layout in blackwell_layouts.LAYOUTS:
    known_layouts.register(layout)


def registered_backends() -> tuple[Backend, ...]:
    """All backends in order of preference: those of jmx and those registered since."""
    return REGISTRY.backends()


known_layouts.on_unknown_name(registered_backends)


def register_backend(backend: Backend, *, layouts: Sequence[Layout] = (), before: str | None = "xla") -> None:
    """Adds a backend to those that `jmx.moe`, `jmx.use_backend`, `jmx.explain` and the command line use.

    A package registers its backends by an entry point of the group `jmx.backends`, a function without arguments that
    calls this one. Entry points are loaded when backends are first asked for, not by `import jmx`; one that fails is a
    warning. Registering clears jax's caches (`jax.clear_caches`), so that calls traced before select again; what was
    compiled ahead of time does not change.

    Args:
        backend: see `jmx.selection.backend.Backend`; if it is a `jmx.selection.tuning.Tunable`, `jmx tune` can tune it.
        layouts: those that it reads and jmx does not have; they are registered too.
        before: name of the registered backend that it precedes; None: it comes last. `xla` runs everything, so a
            backend after it runs on request only.

    Raises:
        TypeError: `backend` lacks a member of the protocol, or `layouts` has something else than layouts.
        ValueError: the name of the backend or of a layout is taken, or no backend is called `before`.
    """
    REGISTRY.register(backend, layouts, before)


def register_handlers(targets: Collection[str]) -> None:
    """Registers the handlers of custom calls, which otherwise happens when a backend or a kernel is selected.

    For a process that loads compiled programs without tracing them.

    Args:
        targets: the names that a program calls. Libraries that have none of them are not loaded: some compile kernels.
    """
    for library in (cpu_library, cutlass_library, one_token_library, peer_library):
        if any(name in targets for name in library.TARGETS):
            library.library()
    for target in targets:
        peer_library.compile_for(target)


def resolve_layout(
    layout: str, environment: Environment, format: Format = MXFP4, input_format: str | None = None
) -> str:
    """The layout called `layout`; "auto": the one that the default backend for `format` on this machine reads.

    `input_format`: name of the input format that the weights will be used with; None: 16 bits.

    Raises:
        ValueError: no layout has that name.
    """
    registered_backends()  # and so their layouts
    if check_one_of("layout", layout, ("auto", *sorted(known_layouts.LAYOUTS))) == "auto":
        if environment.compute_capability == (9, 0):
            if MOSAIC_SM90_FP8.holds(format) and multiplies(format, input_format):
                return MOSAIC_SM90_FP8.name
            if takes_inputs(format, input_format) and MOSAIC_SM90.holds(format):
                return MOSAIC_SM90.name
        # Bytes rather than float4: in a loop XLA's CPU compiler widens whole float4 arrays, and its GPU compiler fuses
        # a gather of bytes into its consumer, but not one of float4.
        return "packed"
    return layout
