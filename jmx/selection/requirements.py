"""What kernels for quantised weights do not take, whatever the GPU."""

from jmx.numerics.formats import MXFP4
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.selection.backend import Reason, Rejection
from jmx.selection.problem import Problem


def refusal(
    problem: Problem,
    layout: str,
    formats: tuple[str, ...] | None = (MXFP4.name,),
    inputs: tuple[str, ...] | None = None,
) -> Rejection | None:
    """Why a kernel that reads weights of `formats` (None: all) in `layout` cannot run `problem`; None where it can.

    `inputs`: the input formats that it takes; None: inputs of 16 bits alone.
    """
    if formats is not None and problem.format not in formats:
        wanted = " or ".join(formats)
        return Rejection(Reason.FORMAT, f"weights are {problem.format!r}, not {wanted}", f"quantise to {wanted}")
    if inputs is not None and problem.input_format not in inputs:
        wanted = " or ".join(inputs)
        given = "of 16 bits" if problem.input_format is None else repr(problem.input_format)
        asked = next((name for name in inputs if not INPUT_FORMATS[name].static), inputs[0])  # which needs no scales
        return Rejection(Reason.INPUT_FORMAT, f"inputs are {given}, not {wanted}", f"input_format={asked!r}")
    if inputs is None and problem.input_format is not None:
        return Rejection(
            Reason.INPUT_FORMAT, f"inputs are {problem.input_format!r}, not of 16 bits", "leave inputs as they are"
        )
    if problem.dtype not in ("bfloat16", "float16"):
        return Rejection(
            Reason.DTYPE, f"activations are {problem.dtype}, not bfloat16 or float16", "cast x to bfloat16"
        )
    if problem.layout != layout:
        return Rejection(
            Reason.LAYOUT, f"weights lie in {problem.layout!r}, not in {layout!r}", f"experts.prepare({layout!r})"
        )
    if problem.num_tokens is None:
        return Rejection(
            Reason.SYMBOLIC_TOKENS, "the number of tokens is symbolic", "export with a fixed number of tokens"
        )
    return None
