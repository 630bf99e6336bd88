"""Backend `cutlass`: the whole layer over 4-bit weights on Hopper, by FlashInfer's CUTLASS kernels in one call.

FlashInfer sorts the assignments and runs the grouped GEMMs; `src/rows.cuh` has the kernels around them. Products take
bfloat16 and accumulate in float32, and the activation between them is rounded to bfloat16; float16 activations are
rounded to bfloat16 too, whose range includes float16's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import jax
import jax.numpy as jnp
import numpy as np

from jmx import activations
from jmx.activations import Activation
from jmx.experts import Experts
from jmx.ffi.cutlass.config import Config, candidates, check, heuristic, padded
from jmx.ffi.cutlass.layout import LAYOUT
from jmx.ffi.cutlass.library import BUILD, TARGET, library, workspace_bytes
from jmx.numerics.formats import MXFP4
from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits
from jmx.util.typing import AnyArray, Array, Float, Int32

_BIAS_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_PAIRS = 2**31 - 1  # of a token and an expert, which FlashInfer counts in an int


def _built(problem: Problem) -> Rejection | None:
    del problem  # as a check after the limits: building takes long, and helps no call that is beyond them
    fault = library().fault
    return None if fault is None else Rejection(Reason.NOT_BUILT, fault, BUILD)


def _activation(problem: Problem) -> Rejection | None:
    if _function(problem.activation) is not None:
        return None
    return Rejection(Reason.ACTIVATION, f"its kernels do not have {problem.activation}", "use another one")


def _bias_order(problem: Problem) -> Rejection | None:
    if not (problem.bias and is_up_first(problem.gate_up_order)):
        return None
    detail = f"biases are {problem.gate_up_order!r}, and its kernels read them with gate before up"
    return Rejection(Reason.LAYOUT, detail, "use mosaic, or experts with gate before up")


def _pairs(problem: Problem) -> Rejection | None:
    assert problem.num_tokens is not None
    rows = problem.num_tokens * (problem.top_k if problem.on_input else 1)
    if rows * problem.num_experts <= _MAX_PAIRS:
        return None
    detail = f"{rows} rows times {problem.num_experts} experts are more than {_MAX_PAIRS}"
    return Rejection(Reason.SHAPE, detail, "call the layer on fewer tokens at a time")


def _function(activation: Activation) -> str | None:
    """The handler's name of an activation, or None."""
    match activation:
        case activations.SwiGLU():
            return "swiglu"
        case activations.SiLUAndMul() | activations.SiLU():
            return "silu"
        case activations.GELUAndMul(approximate) | activations.GELU(approximate):
            return "gelu_tanh" if approximate else "gelu"
        case activations.ReLU():
            return "relu"
        case activations.ReLU2():
            return "relu2"
    return None


@dataclass(frozen=True)
class Cutlass(LimitedBackend):
    """The backend for compute capability 9.0 (H100, H200, GH200), once `jmx build cutlass` has compiled it."""

    name = "cutlass"
    summary = "FlashInfer's CUTLASS kernels for Hopper: MXFP4 weights dequantized in registers"
    limits = Limits.hopper(LAYOUT.name, (MXFP4.name,), checks=(_built, _activation, _bias_order, _pairs))
    config_type = Config

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        del environment
        return heuristic(problem)

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        del environment
        return candidates(problem)

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        del environment
        check(config, problem)

    def apply(
        self, problem: Problem, x: Float[AnyArray, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        config = tuning.config(self, problem, environment).config
        weights = routing.weights.astype(jnp.float32)
        if not problem.on_input:
            return _layer(x, Routing(routing.expert_ids, weights), experts, problem.activation, config, x.dtype)
        # Each slot becomes a token, because the handler computes an expert once per token, whatever the weight.
        num_slots = routing.expert_ids.size
        rows = (x[:, None, :] * weights[..., None]).astype(x.dtype).reshape(num_slots, -1)
        slots = Routing(routing.expert_ids.reshape(-1, 1), jnp.ones((num_slots, 1), jnp.float32))
        out = _layer(rows, slots, experts, problem.activation, config, jnp.float32)
        return out.reshape(*routing.expert_ids.shape, -1).sum(axis=1).astype(x.dtype)


def _layer(
    x: Float[AnyArray, "T H"],
    routing: Routing,
    experts: Experts,
    activation: Activation,
    config: Config,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "T H"]:
    """The FFI call: y (T, H) of `dtype`, which may be float32 for any x. `routing.weights` are float32."""
    swiglu = activation if isinstance(activation, activations.SwiGLU) else activations.SwiGLU()
    results = (jax.ShapeDtypeStruct(x.shape, dtype), _workspace(routing.expert_ids, experts))
    gate_up_bias, down_bias = _biases(experts)
    no_layer = jnp.zeros((0,), jnp.int32)
    y, _ = jax.ffi.ffi_call(TARGET, results)(
        *(x, routing.expert_ids, routing.weights),
        *(experts.gate_up.values, experts.gate_up.scales, gate_up_bias),
        *(experts.down.values, experts.down.scales, down_bias),
        no_layer if experts.index is None else experts.index.reshape(1),
        intermediate_size=experts.intermediate_size,
        gated=experts.gated,
        interleaved=is_interleaved(experts.gate_up_order),
        activation=_function(activation),
        alpha=np.float32(swiglu.alpha),
        beta=np.float32(swiglu.beta),
        limit=np.float32(inf if swiglu.limit is None else swiglu.limit),
        gate_up_tile=config.gate_up.name,
        down_tile=config.down.name,
        overlap=config.overlap,
    )
    return y


def _workspace(expert_ids: Int32[AnyArray, "T k"], experts: Experts) -> jax.ShapeDtypeStruct:
    """The workspace of a call, whose size the library computes."""
    num_tokens, top_k = expert_ids.shape
    hidden, intermediate = padded(experts.hidden_size), padded(experts.intermediate_size)
    num_bytes = workspace_bytes(num_tokens, top_k, experts.num_experts, hidden, intermediate, experts.gated)
    return jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)


def _biases(experts: Experts) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Both biases, of one dtype that the handler supports; an empty array if there is none."""
    biases = (experts.gate_up_bias, experts.down_bias)
    dtypes = {jnp.dtype(bias.dtype) for bias in biases if bias is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= {*map(jnp.dtype, _BIAS_DTYPES)} else jnp.dtype(jnp.float32)
    gate_up, down = (jnp.zeros((0,), dtype) if bias is None else bias.astype(dtype) for bias in biases)
    return gate_up, down
