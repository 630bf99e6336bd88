"""`Limits`: what a backend supports, as data, and the checks of a problem and a machine against it.

The checks run in a fixed order, from what is hardest to change to what is easiest: the machine, weight format, input
format, dtype, routing weights, token count, the backend's own checks, and the layout, which `experts.prepare` changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from jmx.numerics.formats import FORMATS, decoded_alike
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import WEIGHTS_ON, Problem

Check = Callable[[Problem], Rejection | None]


@dataclass(frozen=True)
class Limits:
    """What a backend supports. None: no limit of that kind.

    Args:
        platform: "cpu", "gpu" or "tpu".
        capabilities: compute capabilities of NVIDIA GPUs.
        machine: name of the machines it runs on, for the remedy; "": that of the platform.
        formats: names of weight formats.
        input_formats: names of input formats; None among them stands for inputs in the dtype of x.
        dtypes: names of the activations' dtypes.
        weights_on: what routing weights may multiply.
        activations_per_expert: whether the activation may have parameters of each expert.
        symbolic_tokens: whether the number of tokens may be symbolic.
        layout: name of the one layout that its kernels read.
        checks: what else it checks.
    """

    platform: str | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None
    machine: str = ""
    formats: tuple[str, ...] | None = None
    input_formats: tuple[str | None, ...] | None = (None,)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    weights_on: tuple[str, ...] = WEIGHTS_ON
    activations_per_expert: bool = False
    symbolic_tokens: bool = False
    layout: str | None = None
    checks: tuple[Check, ...] = ()

    def rejection(self, problem: Problem, environment: Environment, *more: Check) -> Rejection | None:
        """Why a backend with these limits cannot run `problem` on `environment`, or None if it can.

        `more`: further checks, of this instance of the backend.
        """
        checks = (
            self._format,
            self._blocks,
            self._input_format,
            self._dtype,
            self._weights_on,
            self._activation,
            self._tokens,
            *self.checks,
            *more,
            self._layout,
        )
        found = self._environment(environment)
        for check in checks:
            found = found or check(problem)
        return found

    @classmethod
    def hopper(
        cls,
        layout: str,
        formats: tuple[str, ...] | None,
        input_formats: tuple[str | None, ...] = (None,),
        *,
        activations_per_expert: bool = False,
        checks: tuple[Check, ...],
    ) -> "Limits":
        """The limits of kernels for Hopper GPUs that read weights in `layout`."""
        return cls(
            platform="gpu",
            capabilities=((9, 0),),
            machine="a Hopper GPU (H100, H200, GH200)",
            formats=formats,
            input_formats=input_formats,
            dtypes=("bfloat16", "float16"),
            activations_per_expert=activations_per_expert,
            layout=layout,
            checks=checks,
        )

    def _environment(self, environment: Environment) -> Rejection | None:
        if self.platform not in (None, environment.platform):
            machine = self.machine or f"a {self.platform.upper()}"
            detail = f"platform is {environment.platform!r}, not {self.platform!r}"
            return Rejection(Reason.PLATFORM, detail, f"run on {machine}")
        found = environment.compute_capability
        if self.capabilities is not None and found not in self.capabilities:
            known = ", ".join(map(str, self.capabilities))
            rule = "not" if len(self.capabilities) == 1 else "none of"
            return Rejection(Reason.COMPUTE_CAPABILITY, f"{found} is {rule} {known}", f"run on {self.machine}")
        return None

    def _format(self, problem: Problem) -> Rejection | None:
        if self.formats is None or decoded_alike(FORMATS[problem.format]) in self.formats:
            return None
        floats = all(FORMATS[name].is_float for name in self.formats)
        wanted = f"{'weights in' if floats else 'quantize to'} {' or '.join(self.formats)}"
        return Rejection(Reason.FORMAT, f"weights are {problem.format!r}", f"use xla, or {wanted}")

    def _blocks(self, problem: Problem) -> Rejection | None:
        """Kernels take a short last block of some formats alone."""
        format = FORMATS[problem.format]
        if self.formats is None or not format.needs_whole_blocks:
            return None
        why = f"the columns that share a scale in {problem.format}"
        return indivisible(hidden_and_intermediate(problem), format.block_size, why, "use xla, or experts.pad()")

    def _input_format(self, problem: Problem) -> Rejection | None:
        taken = self.input_formats
        if taken is None or problem.input_format in taken:
            return None
        # Preferably one that needs no scales of a checkpoint.
        asked = next((name for name in taken if name is None or not INPUT_FORMATS[name].static), taken[0])
        remedy = "leave inputs as they are" if asked is None else f"input_format={asked!r}"
        given = "of 16 or 32 bits" if problem.input_format is None else repr(problem.input_format)
        wanted = " or ".join("of 16 or 32 bits" if name is None else name for name in taken)
        return Rejection(Reason.INPUT_FORMAT, f"inputs are {given}, not {wanted}", remedy)

    def _dtype(self, problem: Problem) -> Rejection | None:
        if problem.dtype in self.dtypes:
            return None
        detail = f"activations are {problem.dtype}, not {' or '.join(self.dtypes)}"
        return Rejection(Reason.DTYPE, detail, f"cast x to {self.dtypes[0]}")

    def _weights_on(self, problem: Problem) -> Rejection | None:
        if problem.weights_on in self.weights_on:
            return None
        detail = f"routing weights multiply the {problem.weights_on}, not the {' or '.join(self.weights_on)}"
        return Rejection(Reason.WEIGHTS_ON, detail, "use xla")

    def _activation(self, problem: Problem) -> Rejection | None:
        if self.activations_per_expert or problem.activation.num_experts is None:
            return None
        return Rejection(Reason.ACTIVATION, "the activation has parameters of each expert", "use xla, or jmx.SwiGLU")

    def _tokens(self, problem: Problem) -> Rejection | None:
        if problem.num_tokens is not None or self.symbolic_tokens:
            return None
        return Rejection(
            Reason.SYMBOLIC_TOKENS,
            "the token count is symbolic, and tile sizes are chosen by its value",
            "trace or export with a concrete number of tokens, one trace for each bucket of token counts",
        )

    def _layout(self, problem: Problem) -> Rejection | None:
        if self.layout in (None, problem.layout):
            return None
        detail = f"weights are in {problem.layout!r}, not in {self.layout!r}"
        return Rejection(Reason.LAYOUT, detail, f"experts.prepare({self.layout!r})")


class LimitedBackend:
    """The base of a backend that runs every problem within its limits."""

    limits: ClassVar[Limits]

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        return self.limits.rejection(problem, environment)


def indivisible(sizes: Mapping[str, int], multiple: int, why: str, remedy: str = "use xla") -> Rejection | None:
    """The rejection of the first of `sizes`, by name, that is not a multiple of `multiple`; None if all are."""
    for name, size in sizes.items():
        if size % multiple:
            return Rejection(Reason.SHAPE, f"{name} (={size}) must be a multiple of {multiple}, {why}", remedy)
    return None


def hidden_and_intermediate(problem: Problem) -> dict[str, int]:
    """Both sizes by name, for `indivisible`."""
    return {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
