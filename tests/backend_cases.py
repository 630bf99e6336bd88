"""What every backend is tested with: cases, random inputs, and a float64 reference that shares no code with jmx.

The reference loops over tokens and slots in numpy, on weights that ml_dtypes decodes. Inputs are numpy arrays until
`call` hands them to the layer.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dequantized import dequantized, with_odd_scales

import jmx
from jmx import GELU, Experts, GELUAndMul, ReLU, ReLU2, Routing, SiLU, SiLUAndMul, SwiGLU, SwiGLUStep
from jmx.backends import registered_backends
from jmx.numerics.formats import FORMATS, MXFP4, WHOLE_ROW, BlockScaled, pack, unpack
from jmx.numerics.input_formats import INPUT_FORMATS, dequantize, quantize
from jmx.numerics.layouts import LAYOUTS
from jmx.numerics.quantization import random
from jmx.pallas.triton.backend import Triton
from jmx.selection.backend import Backend, Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem

BLOCK = MXFP4.block_size
ONE = 127  # scale code of 1.0
NAN = 255  # scale code of NaN

# ||out - reference|| / ||reference||. Rounding to bfloat16 once after each product makes 2.3e-3, and once more before
# them 3.3e-3, on the average; but where there are few elements, up to twice that was seen.
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 1e-3}
FEW_ELEMENTS = 8192
# And where h is rounded to 3 bits: what sums of some 14 bits change of it moves some to another step. Sums cut off at
# 13 fractional bits, in numpy, gave 7e-3 on the average of these cases and 1.4e-2 at most, of hundreds; of a
# single token, whose h has few large elements, 3.8e-2.
ROUNDED_INPUTS = 5
ROUNDED_INPUTS_OF_FEW = 10
ROUNDED = "fp8_token"  # inputs of backends that take none of 16 bits
STATIC_SCALES = (jnp.float32(0.02), jnp.float32(0.05))  # of both products' inputs
# And where outputs of the first product of float experts are, before the activation: 3.4e-3 to 4.4e-3 in nine draws.
ROUNDED_H = 2
ON_INPUT = 4 / 3  # times as much where x times the routing weight is rounded, too
# And where weights are: 8 bits do not hold an integer, or e4m3, times a scale of 8 bits. All four roundings, in numpy,
# gave 3.4e-3 on the average of integers of 8 bits, and 3.7e-3 at most of 240 layers.
ROUNDED_WEIGHTS = 4 / 3
# And where both are rounded: what that changes of h moves some to another step of its format. In numpy and float64, 40
# layers of 40 and 300 tokens: 0.8e-2 to 1.6e-2 in e4m3 and int8, 1.4e-2 to 5.9e-2 in e2m1; 2.6e-2 of 40 on an H200.
# Float experts, whose outputs are rounded instead of their weights: 0.9e-2 to 1.2e-2 of 300 tokens.
ROUNDED_BOTH, ROUNDED_BOTH_TO_FP4 = 8, 20
# And where x is: float16, which a kernel rounds to bfloat16. Mixtral gave 2.85e-3 to 3.07e-3 in four draws.
ROUNDED_FLOAT16 = 4 / 3
TAKES = {
    "mosaic": "bfloat16",
    "mosaic_fp8": "bfloat16",
    "triton": "bfloat16",
    "triton_interpreted": "bfloat16",
    "cutlass": "bfloat16",
}  # backends whose products take a dtype that need not be x's

GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
BOTH, NEITHER = (True, True), (False, False)
INTERPRETED = Triton(interpret=True)
TESTED = (*registered_backends(), INTERPRETED)


@dataclass(frozen=True)
class Case:
    """One problem. `ids` names an entry of `IDS`; `bias` says which of (gate_up, down) have one."""

    tokens: int = 5
    hidden: int = 64
    intermediate: int = 96
    num_experts: int = 8
    top_k: int = 2
    dtype: str = "float32"
    activation: jmx.Activation = GPT_OSS
    order: str | None = "interleaved"
    bias: tuple[bool, bool] = BOTH
    weights_on: str = "output"
    ids: str = "distinct"
    layout: str = "packed"
    format: str = MXFP4.name
    input_format: str | None = None
    jit: bool = True
    note: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = f"{self.tokens}x{self.hidden}-{self.num_experts}x{self.intermediate}-top{self.top_k}-{self.dtype}"
        rest = (type(self.activation).__name__, self.order, self.ids, self.layout, self.weights_on, self.format)
        rest += (self.input_format or "mxfp4",)
        return "-".join([self.note or name, *(str(part) for part in rest if part not in DEFAULTS)])

    def problem(self) -> jmx.Problem:
        return jmx.Problem(
            num_tokens=self.tokens,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            dtype=self.dtype,
            format=self.format,
            input_format=self.input_format,
            activation=self.activation,
            gate_up_order=self.order,
            bias=any(self.bias),
            layout=self.layout,
            weights_on=self.weights_on,
        )


DEFAULTS = ("SwiGLU", "interleaved", "distinct", "packed", "output", "mxfp4")

# Shapes of models by name, their sizes divided by about 30.
MODELS = {
    "gpt-oss-20b": Case(hidden=96, intermediate=96, num_experts=32, top_k=4, dtype="bfloat16"),
    "gpt-oss-120b": Case(hidden=96, intermediate=96, num_experts=128, top_k=4, dtype="bfloat16"),
    "deepseek-v3": Case(
        hidden=224, intermediate=64, num_experts=256, top_k=8, activation=SiLUAndMul(), order="concatenated",
        bias=NEITHER, dtype="bfloat16",
    ),
    "mixtral": Case(
        hidden=128, intermediate=448, num_experts=8, top_k=2, activation=SiLUAndMul(), order="concatenated",
        bias=NEITHER, dtype="float16",
    ),
}  # fmt: skip

ACTIVATIONS = [
    SwiGLU(),
    GPT_OSS,
    SwiGLU(alpha=0.5, beta=-0.25, limit=0.5),
    SwiGLUStep(limit=0.5),
    SiLUAndMul(),
    GELUAndMul(approximate=True),
    GELUAndMul(approximate=False),
    SiLU(),
    GELU(approximate=True),
    GELU(approximate=False),
    ReLU(),
    ReLU2(),
]


class Weights(NamedTuple):
    """Experts as numpy: element codes (E, N, K) and scale codes (E, N, K / 32) of both roles, or, in other formats than
    MXFP4, canonical weights; and biases or None."""

    gate_up: Any
    down: Any
    gate_up_bias: np.ndarray | None
    down_bias: np.ndarray | None

    def experts(self, case: Case) -> Experts:
        """The same as `Experts`, made from the bytes of a checkpoint."""
        packed = [
            pack(q) if isinstance(q, BlockScaled) else BlockScaled(q[0][..., ::2] | q[0][..., 1::2] << 4, q[1])
            for q in self[:2]
        ]
        packed = jax.tree.map(jnp.asarray, packed)
        biases = [None if bias is None else jnp.asarray(bias) for bias in self[2:]]
        format = FORMATS[case.format]
        experts = Experts.of(*packed, *biases, gate_up_order=case.order, format=format)
        if case.input_format is not None:
            scales = STATIC_SCALES if INPUT_FORMATS[case.input_format].static else ()
            experts = experts.with_inputs(case.input_format, *scales)
        return experts.prepare(case.layout)

    def with_scales_of(self, rng: np.random.Generator, *dtypes: str) -> "Weights":
        """The same weights (not MXFP4) with each role's scales a little less, and in its dtype of `dtypes`."""
        gate_up, down = (
            q._replace(scales=(q.scales.astype(np.float32) * rng.uniform(0.9, 1, q.scales.shape)).astype(dtype))
            for q, dtype in zip(self[:2], map(jnp.dtype, dtypes), strict=True)
        )
        return self._replace(gate_up=gate_up, down=down)

    def floats(self, case: "Case") -> list[np.ndarray]:
        """Both roles in float64."""
        format = FORMATS[case.format]
        return [dequantized(q, format) if isinstance(q, BlockScaled) else decoded(*q) for q in self[:2]]


def decoded(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scale = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(scale, BLOCK, axis=-1)


def draw_weights(rng: np.random.Generator, case: Case) -> Weights:
    """Experts whose outputs are of the order of 1; biases float32 of the order of 0.5, so that none goes unnoticed."""
    rows = case.intermediate * (1 if case.order is None else 2)

    def role(n: int, k: int) -> Any:
        if case.format != MXFP4.name:
            format = FORMATS[case.format]
            q = random(jax.random.key(rng.integers(2**31)), (case.num_experts, n, k), format)
            return unpack(jax.tree.map(np.asarray, with_odd_scales(rng, q)), format)
        codes = rng.integers(0, 16, (case.num_experts, n, k), dtype=np.uint8)
        low = ONE - round(math.log2(3 * math.sqrt(k)))
        return codes, rng.integers(low, low + 3, (case.num_experts, n, k // BLOCK)).astype(np.uint8)

    biases = [
        rng.normal(0, 0.5, (case.num_experts, n)).astype(np.float32) if wanted else None
        for wanted, n in zip(case.bias, (rows, case.hidden), strict=True)
    ]
    return Weights(role(rows, case.hidden), role(case.hidden, case.intermediate), *biases)


def draw_x(rng: np.random.Generator, case: Case) -> np.ndarray:
    return rng.standard_normal((case.tokens, case.hidden)).astype(jnp.dtype(case.dtype))


def draw_routing(rng: np.random.Generator, case: Case) -> Routing:
    """Numpy routing: ids by the case's rule, weights of either sign.

    A token's weights of one expert have one sign: else they could cancel, and no bound holds relative to what is left.
    """
    ids = IDS[case.ids](rng, case).astype(np.int32)
    signs = rng.choice([-1, 1], (case.tokens, case.num_experts))
    weights = np.take_along_axis(signs, ids % case.num_experts, axis=1) * np.abs(rng.normal(0, 1, ids.shape))
    return Routing(ids, weights.astype(np.float32))


def _distinct(rng: np.random.Generator, case: Case) -> np.ndarray:
    order = rng.random((case.tokens, case.num_experts)).argsort(axis=1)
    return order[:, : case.top_k]


def _anywhere(rng: np.random.Generator, case: Case) -> np.ndarray:
    outside = [-1, -7, case.num_experts, case.num_experts + 1, 2**31 - 1, -(2**31), 2**30]
    ids = _repeated(rng, case)
    return np.where(rng.random(ids.shape) < 0.4, rng.choice(outside, ids.shape), ids)


def _repeated(rng: np.random.Generator, case: Case) -> np.ndarray:
    return rng.integers(0, case.num_experts, (case.tokens, case.top_k))


IDS = {
    "distinct": _distinct,
    "repeated": _repeated,  # an expert may be in several slots of a token
    "anywhere": _anywhere,  # some outside 0..E-1
    "nowhere": lambda rng, case: np.full((case.tokens, case.top_k), -1),
    "one_expert": lambda rng, case: np.full((case.tokens, case.top_k), case.num_experts - 1),
    "every_third": lambda rng, case: _repeated(rng, case) // 3 * 3,  # two in three experts are empty
}


def reference(
    case: Case, weights: Weights, x: np.ndarray, routing: Routing, mask: np.ndarray | None = None
) -> np.ndarray:
    """y (T, H) in float64, expert by expert."""
    gate_up, down = weights.floats(case)
    x64, y = x.astype(np.float64), np.zeros(x.shape)
    between = x.dtype if case.input_format is not None and x.dtype == jnp.bfloat16 else None
    wanted = np.ones(x.shape[0], bool) if mask is None else np.asarray(mask)
    ids, shares = np.asarray(routing.expert_ids), np.asarray(routing.weights, np.float64)
    of_expert = [np.nonzero((ids == expert) & wanted[:, None]) for expert in range(case.num_experts)]
    weight = [shares[its][:, None] for its in of_expert]
    rows = [
        x64[tokens] * (w if case.weights_on == "input" else 1) for (tokens, _), w in zip(of_expert, weight, strict=True)
    ]
    h = [a @ w.T for a, w in zip(all_rounded(case, rows, x.dtype, 0), gate_up, strict=True)]
    if weights.gate_up_bias is not None:
        h = [a + bias for a, bias in zip(h, weights.gate_up_bias, strict=True)]
    h = all_rounded(case, [activated(case, a) for a in h], between, 1)
    for expert, (tokens, _) in enumerate(of_expert):
        out = h[expert] @ down[expert].T
        if weights.down_bias is not None:
            out += weights.down_bias[expert]
        np.add.at(y, tokens, out * (weight[expert] if case.weights_on == "output" else 1))
    return y


def all_rounded(case: Case, parts: list[np.ndarray], dtype: Any, product: int) -> list[np.ndarray]:
    """`rounded_inputs` of the rows of each expert; of all together, if one scale belongs to all of them."""
    if case.input_format is None or INPUT_FORMATS[case.input_format].by_token:
        return [rounded_inputs(case, rows, dtype, product) for rows in parts]
    whole = rounded_inputs(case, np.concatenate(parts), dtype, product)
    return np.split(whole, np.cumsum([len(rows) for rows in parts])[:-1])


def rounded_inputs(case: Case, rows: np.ndarray, dtype: Any, product: int) -> np.ndarray:
    """Values of rows (T, K) in the case's input format, first rounded to `dtype` (None: float32)."""
    if case.input_format is None:
        return rows
    format = INPUT_FORMATS[case.input_format]
    given = jnp.asarray(rows.astype(np.float32)).astype(dtype or jnp.float32)
    q = quantize(given, format, STATIC_SCALES[product] if format.static else None)
    return np.asarray(dequantize(q, format)).astype(np.float64)


def activated(case: Case, h: np.ndarray) -> np.ndarray:
    """The activations' definitions, in float64, along the last axis."""
    if case.order in ("interleaved", "interleaved_up_first"):
        gate, up = h[..., 0::2], h[..., 1::2]
    elif case.order in ("concatenated", "concatenated_up_first"):
        gate, up = np.split(h, 2, axis=-1)
    else:
        gate, up = h, np.ones(())
    if case.order is not None and case.order.endswith("up_first"):
        gate, up = up, gate
    match case.activation:
        case SwiGLU(alpha, beta, limit):
            limit = np.inf if limit is None else limit
            gate = np.minimum(gate, limit)
            return gate * sigmoid(alpha * gate) * (np.clip(up, -limit, limit) + beta)
        case SwiGLUStep(limit):
            return np.minimum(gate * sigmoid(gate), limit) * np.clip(up, -limit, limit)
        case SiLUAndMul() | SiLU():
            return gate * sigmoid(gate) * up
        case GELUAndMul(approximate=True) | GELU(approximate=True):
            return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        case GELUAndMul() | GELU():
            return 0.5 * gate * (1 + np.vectorize(math.erf, otypes=[np.float64])(gate / math.sqrt(2))) * up
        case ReLU():
            return np.maximum(gate, 0)
        case ReLU2():
            return np.maximum(gate, 0) ** 2
    raise AssertionError(case.activation)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def suited(backend: str, case: Case) -> Case:
    """`case` in the `form` that a backend supports. Skips the test, with the backend's reason, if there is none."""
    found = form(next(b for b in TESTED if b.name == backend), case, jmx.Environment.probe())
    if isinstance(found, Rejection):
        pytest.skip(str(found))
    return found


OF_THE_MACHINE = {Reason.PLATFORM, Reason.COMPUTE_CAPABILITY, Reason.LIBRARY, Reason.NOT_BUILT}


@functools.lru_cache(maxsize=8)  # all backends are asked about a case in turn
def forms(case: Case) -> list[tuple[Case, jmx.Problem]]:
    """`case` in each dtype, layout and format of inputs that a backend may take it in, the preferred one first."""
    dtypes = (case.dtype, "bfloat16") if case.dtype == "float32" else (case.dtype,)
    inputs = (None, ROUNDED) if case.input_format is None else (case.input_format,)
    layouts = dict.fromkeys((case.layout, *LAYOUTS))
    found = [
        replace(case, dtype=dtype, layout=layout, input_format=format)
        for format, dtype, layout in itertools.product(inputs, dtypes, layouts)
    ]
    return [(one, one.problem()) for one in found]


def form(engine: Backend, case: Case, environment: jmx.Environment) -> Case | Rejection:
    """`case` as a backend takes it: in bfloat16 where it has no float32, its weights in a layout that it reads and that
    holds their format, its inputs rounded where it takes no others. Or why it takes it in no such form."""
    first: Rejection | None = None
    unheld: Case | None = None
    for one, problem in forms(case):
        rejection = engine.supports(problem, environment)
        if rejection is None and LAYOUTS[one.layout].holds(FORMATS[one.format]):
            return one
        if rejection is None:
            unheld = unheld or one
        elif rejection.reason in OF_THE_MACHINE:  # of every form
            return rejection
        else:
            first = first or rejection
    if unheld is not None:  # a backend need not reject what its layout cannot hold
        return Rejection(Reason.FORMAT, f"{unheld.layout!r} holds no {case.format!r}", "use another format")
    assert first is not None
    return first


def layer(
    x: Any, routing: Any, experts: Experts, mask: Any, activation: jmx.Activation, weights_on: str, backend: str
) -> jax.Array:
    return jmx.moe(x, routing, experts, activation=activation, weights_on=weights_on, mask=mask, backend=backend)


jitted = jax.jit(layer, static_argnums=(4, 5, 6))


def call(backend: str, case: Case, experts: Experts, x: Any, routing: Any, mask: Any = None) -> np.ndarray:
    """The layer's y on `backend`, in float64, out of memory that held NaN. `case` is one that `suited` gave."""
    poison_memory()
    run = jitted if case.jit else layer
    y = run(x, routing, experts, mask, case.activation, case.weights_on, backend)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    return np.asarray(y).astype(np.float64)


def assert_rejects(
    backend: Backend, problem: Problem, environment: Environment, reason: Reason, reported: str = ""
) -> None:
    """The backend cannot run the problem on that machine, for this reason, with this in its detail."""
    rejection = backend.supports(problem, environment)
    assert rejection is not None
    assert rejection.reason is reason
    assert reported in rejection.detail


def assert_close(y: np.ndarray, expected: np.ndarray, dtype: str, factor: float = 1) -> None:
    """Relative error of the whole, which one wrong token of 300 exceeds; exact where the reference is zero."""
    factor *= 2 if dtype == "bfloat16" and expected.size < FEW_ELEMENTS else 1
    norm = np.linalg.norm(expected)
    error = np.linalg.norm(y - expected)
    assert error <= factor * TOLERANCE[dtype] * norm, f"relative error {error / norm if norm else error:.2g}"


def assert_agrees(backend: str, case: Case, y: Any, expected: Any, factor: float = 1) -> None:
    """`assert_close` with the bound that `backend` has on `case`."""
    factor *= ON_INPUT if case.weights_on == "input" else 1
    format = FORMATS[case.format]
    rounds = backend in TAKES and format.scale_dtype.itemsize > 1 and format.block_size != WHOLE_ROW
    rounds_h = format.is_float and case.dtype == "bfloat16"
    factor *= ROUNDED_WEIGHTS if rounds else 1
    if case.input_format is not None and (rounds_h or (rounds and backend == "mosaic")):
        factor *= ROUNDED_BOTH_TO_FP4 if case.input_format in ("mxfp4", "nvfp4") else ROUNDED_BOTH
    elif rounds_h:
        factor *= ROUNDED_H
    factor *= ROUNDED_FLOAT16 if case.dtype == "float16" and TAKES.get(backend) == "bfloat16" else 1
    if backend == "mosaic_fp8":
        factor *= ROUNDED_INPUTS_OF_FEW if np.size(expected) < FEW_ELEMENTS else ROUNDED_INPUTS
    takes = TAKES.get(backend, case.dtype)
    # An h in float32 that is half way between two steps may be rounded to either: 8e-4 of 40 tokens was seen.
    takes = "bfloat16" if takes == "float32" and case.input_format is not None else takes
    assert_close(np.asarray(y, np.float64), np.asarray(expected, np.float64), takes, factor)


def poison_memory() -> None:
    """Leaves bits that are NaN in every dtype, and -1, in memory that the next results and temporaries may get."""
    held = [jnp.full(1 << size, 0xFFFFFFFF, jnp.uint32) for size in range(6, 21) for _ in range(3)]
    for array in jax.block_until_ready(held):
        array.delete()
