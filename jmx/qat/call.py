"""What a call has of master weights: the experts that they are rounded to, and what takes these experts' gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmx.autodiff import Sources
from jmx.backends import resolve_layout
from jmx.experts import Experts
from jmx.qat.masters import MasterExperts
from jmx.qat.rounding import clipped
from jmx.selection.environment import Environment
from jmx.selection.problem import resolve_input_format
from jmx.util.typing import Array, Float


class Rounded(NamedTuple):
    """Master weights in a call.

    Args:
        experts: those that they are rounded to, packed, as the backward pass reads them.
        sources: gate_up and down, which take the gradients of the weights of `experts`.
        prepared: shapes of `experts` in the layout that the machine's backends read.
    """

    experts: Experts
    sources: Sources
    prepared: Experts

    @classmethod
    def of(cls, masters: MasterExperts, input_format: str | None, environment: Environment) -> "Rounded":
        """Of a call with that `input_format`, on that machine."""
        experts = masters.quantize()
        layout = resolve_layout("auto", environment, experts.format, resolve_input_format(experts, input_format))
        return cls(experts, _sources_of(masters, experts), jax.eval_shape(lambda: experts.prepare(layout)))


def _sources_of(masters: MasterExperts, experts: Experts) -> tuple[Float[Array, "E N H"], Float[Array, "E H I"]]:
    weights = jnp.asarray(masters.gate_up), jnp.asarray(masters.down)
    if masters.gradients == "straight_through":
        return weights
    gate_up, down = (
        clipped(masters.format, weight, lax.stop_gradient(q))
        for weight, q in zip(weights, (experts.gate_up, experts.down), strict=True)
    )
    return gate_up, down
