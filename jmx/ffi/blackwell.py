"""Engines for Blackwell that are prepared and not bound: each has its layout and its quantiser here, and no kernel.

So their backends only ever reject. What each needs, and how it would be proven, says docs/blackwell.md.
"""

from dataclasses import dataclass
from typing import NoReturn

import jax

from jmx.experts import Experts
from jmx.ffi.blackwell_layouts import CUTLASS, TRTLLM
from jmx.routing import Routing
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Computation, Problem

_ELSEWHERE = "for Blackwell, and bound nowhere yet"


@dataclass(frozen=True)
class Prepared:
    """One engine without its kernels.

    Args:
        name: of the backend, and of the layout that is prepared for it.
        kernels: what they are, and who has them.
        capabilities: compute capabilities that flashinfer-python 0.7.2 runs them on.
        needs: what is left to do.
    """

    name: str
    kernels: str
    capabilities: tuple[tuple[int, int], ...]
    needs: str

    @property
    def summary(self) -> str:
        return f"{self.kernels}: layout and quantiser, no kernel"

    def supports(self, problem: Problem, environment: Environment) -> Rejection:
        del problem  # no problem is run
        if environment.platform != "gpu":
            return Rejection(Reason.PLATFORM, f"platform is {environment.platform!r}, not 'gpu'", _ELSEWHERE)
        found = environment.compute_capability
        if found not in self.capabilities:
            known = ", ".join(map(str, self.capabilities))
            return Rejection(Reason.COMPUTE_CAPABILITY, f"{found} is none of {known}", _ELSEWHERE)
        return Rejection(
            Reason.NOT_BUILT,
            f"jmx has the layout {self.name!r} and an MXFP8 quantiser, but binds no kernel; needs {self.needs}",
            "use xla",
        )

    def apply(
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> NoReturn:
        raise NotImplementedError(f"{self.name} has no kernel; `supports` says so to every problem")


ENGINES = (
    Prepared(
        CUTLASS.name,
        "FlashInfer's CUTLASS MXFP4 x MXFP8 for Blackwell",
        ((10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)),
        "FlashInfer's CUTLASS MXFP4 x MXFP8 layer, compiled and called with x in MXFP8",
    ),
    Prepared(
        TRTLLM.name,
        "TensorRT-LLM's MXFP4 kernels for Blackwell",
        ((10, 0), (10, 3), (10, 7)),
        "TensorRT-LLM's compiled kernels (FlashInfer downloads them) and their launcher, x in MXFP8 or bfloat16",
    ),
)
