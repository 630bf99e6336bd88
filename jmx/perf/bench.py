"""Times one layer against the machine's own limits: the core of `jmx bench` and of benchmarks/layer.py.

A row is one backend at one token count. Several different layers run one after the other inside one jitted call, whose
time is divided by their number: so weights never come from a cache, and the gaps between kernels count. Routing from
logits is included. The floor of a row is its problem's bytes and flops at rates measured in the same run.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx import activations
from jmx.backends import registered_backends
from jmx.experts import Experts
from jmx.layer import moe
from jmx.numerics import layouts, quantization
from jmx.perf.machine import check_memory, describe_machine, measure_limits, out_of_memory, seconds
from jmx.perf.roofline import Limits, Report, Row
from jmx.perf.settings import Settings
from jmx.perf.shapes import Shape, draw_logits, routed_shape
from jmx.routing import Logits, Method, route
from jmx.selection import vllm_names
from jmx.selection.costs import Floor, Peak, flops, times_bfloat16
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem, weight_bytes
from jmx.selection.select import NoBackendError, select
from jmx.util.checks import check_one_of
from jmx.util.typing import Array, Float, Int32, Key, Shaped

RAGGED_DOT = "ragged_dot"  # the peer in every run: `jax.lax.ragged_dot` on the same weights in bfloat16

# bfloat16 operands give 2e-3 to 1e-2 against the float32 reference. Inputs rounded to e2m1 give up to 3.6e-2: where h
# in bfloat16 and h in float32 are on opposite sides of a midpoint, they round to elements one step apart. A larger
# error means another function.
TOLERANCE = 5e-2
_CHECKED_TOKENS = 64

# The host needs 150 to 250 us to launch a call. If the device finishes sooner, the time of a call is the host's; a
# layer of gpt-oss-120b takes an H200 28 us at 1 token.
_FEW_TOKENS = 16
_LAYERS_OF_FEW_TOKENS = 16
_LAYERS = 4


def run(
    model: str,
    tokens: Sequence[int],
    *,
    formats: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    **options: Any,
) -> Report:
    """Measures the machine's limits, then every backend and `lax.ragged_dot` at every token count.

    A failure in one row (out of memory, a backend that does not run here) is reported in that row.

    Args:
        model, tokens, formats, options: those of `Settings`. As many layers as in `layers_of_call`, by default, and
            fewer if the device's memory holds fewer.
        backends: names to measure, of the registered ones and `RAGGED_DOT`; None measures all. Backends that do not run
            here are left out, and so are those that lack one of several formats; with names and one format the row
            gives the reason.

    Raises:
        ValueError: an unknown backend, or as for `Settings`. Nothing has been measured yet.
    """
    settings = Settings(model, tokens, formats, **options)
    for backend in backends or ():
        check_one_of("backends", backend, systems(), vllm_names.meant)
    shape = routed_shape(model, settings.routing)
    device, environment = jax.devices()[0], Environment.probe()
    progress, repeats, layers = settings.progress, settings.repeats, settings.layers

    progress(f"measuring the limits of {device.device_kind}")
    limits = measure_limits(repeats)
    progress(f"copy {limits.copy_rate / 1e12:.3g} TB/s, dense {limits.dense_rate / 1e12:.3g} TFLOP/s")
    weights_key, data_key = jax.random.split(jax.random.key(settings.drawn_seed))
    layer_keys = jax.random.split(weights_key, layers_of_call(1, layers))  # no call has more

    machine, rows = describe_machine(device), []

    for pair in [None] if formats is None else formats:
        shape = shape if pair is None else shape.in_formats(pair)
        names_of_formats = {} if pair is None else {"format": shape.format, "input_format": shape.input_format}
        names = systems() if backends is None else backends
        if backends is None or len(formats or ()) > 1:
            names = _running_here(names, shape, tokens, environment, progress)
        cases = _cases(shape, tokens, settings.routing, layers, layer_keys[0], data_key) if names else []
        for name in names:
            built: dict[str, list[Any]] = {}  # the layers' weights, kept from one token count to the next
            for case in cases:
                row = _measure_row(name, shape, case, built, layer_keys, limits, environment, repeats)
                rows.append(dataclasses.replace(row, **names_of_formats))
                progress(str(rows[-1]))
                settings.so_far(Report(machine, limits, settings.as_dict(shape), tuple(rows)))
    return Report(machine, limits, settings.as_dict(shape), tuple(rows))


def layers_of_call(num_tokens: int, layers: int | None) -> int:
    """Different layers in one call on `num_tokens`: `layers`, or if that is None 16 up to 16 tokens and 4 beyond."""
    if layers is not None:
        return layers
    return _LAYERS_OF_FEW_TOKENS if num_tokens <= _FEW_TOKENS else _LAYERS


def systems() -> list[str]:
    """Names of everything that `run` can measure."""
    return [*(backend.name for backend in registered_backends()), RAGGED_DOT]


def _running_here(
    names: Sequence[str],
    shape: Shape,
    tokens: Sequence[int],
    environment: Environment,
    progress: Callable[[str], None],
) -> list[str]:
    """Those of `names` that run here at one or more of the token counts. `progress` gets a line for each other."""
    here = []
    for name in names:
        rejections = []
        for count in tokens:
            try:
                System.of(name, shape, count, environment)
            except NoBackendError as e:
                rejections.append(dict(e.trail)[name])
        if len(rejections) < len(tokens):
            here.append(name)
        else:
            progress(f"{name} does not run here: {rejections[0]}")
    return here


Layer = Callable[[Float[Array, "T H"], Float[Array, "T E"], Any], Float[Array, "T H"]]


class Case(NamedTuple):
    """The inputs of all backends at one token count."""

    x: Float[Array, "T H"]  # bfloat16
    logits: Float[Array, "L T E"]  # float32
    checked: Int32[Array, " n"]  # tokens of which the first layer's result is checked
    reference: Float[Array, "n H"]  # float32
    active: list[int]  # experts used, by layer

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @classmethod
    def draw(cls, shape: Shape, num_tokens: int, kind: str, layers: int, key: Key[Array, ""], first: Experts) -> "Case":
        """Random tokens and logits, and the reference's result for some of them, in float32 except for an input format.

        Args:
            kind: a key of `ROUTINGS`.
            layers: L.
            first: the first layer's weights, packed.
        """
        sizes = layers, num_tokens, shape.num_experts
        x, logits, checked, ids = _draw(key, sizes, shape.hidden_size, shape.method, kind)
        reference = _compiled_layer(shape, "xla", x[checked].astype(jnp.float32), logits[0, checked], first)
        return cls(x, logits, checked, reference, [len(np.unique(layer)) for layer in np.asarray(ids)])


# Compiled as a whole, and once for all formats: on a GPU single operations take longer than the timed call.
@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw(
    key: Key[Array, ""], sizes: tuple[int, int, int], hidden_size: int, method: Method, kind: str
) -> tuple[Float[Array, "T H"], Float[Array, "L T E"], Int32[Array, " n"], Int32[Array, "L T k"]]:
    """x (T, H), logits (L, T, E), the tokens that are checked, and all experts (L, T, k). `sizes`: L, T, E."""
    x_key, logits_key, checked_key = jax.random.split(key, 3)
    x = jax.random.normal(x_key, (sizes[1], hidden_size), jnp.bfloat16)
    logits = draw_logits(logits_key, sizes, kind)
    checked = jax.random.permutation(checked_key, sizes[1])[:_CHECKED_TOKENS]
    return x, logits, checked, lax.map(lambda layer: route(Logits(layer, method)).expert_ids, logits)


def _cases(
    shape: Shape, tokens: Sequence[int], kind: str, layers: int | None, first_key: Key[Array, ""], key: Key[Array, ""]
) -> list[Case]:
    first = shape.experts(first_key)
    return [
        Case.draw(shape, count, kind, layers_of_call(count, layers), jax.random.fold_in(key, count), first)
        for count in tokens
    ]


class System(NamedTuple):
    """A backend or a peer that computes the layer."""

    weights: str  # layout of its weights
    prepare: Callable[[Experts], Any]  # packed experts -> its own weights
    layer: Layer  # x (T, H), logits (T, E), its own weights -> y (T, H)

    @classmethod
    def of(cls, name: str, shape: Shape, num_tokens: int, environment: Environment) -> "System":
        """The one called `name`, of `systems`. NoBackendError if it does not run here."""
        if name == RAGGED_DOT:
            return cls("bf16", _expanded, partial(ragged_dot_layer, shape))
        # Packed first: the reference reads every layout, but inverts backends' own layouts at each call.
        layout = usable_layout(shape.problem(num_tokens, "packed"), environment, name)
        return cls(layout, lambda experts: experts.prepare(layout, donate=True), partial(_jmx_layer, shape, name))

    def build(self, shape: Shape, layer_keys: Key[Array, " L"], built: dict[str, list[Any]]) -> list[Any]:
        """Weights of as many layers as there are keys.

        Args:
            built: cache for the next call: one copy of the weights at a time, and no more layers than these.
        """
        if self.weights not in built:
            built.clear()
        weights = built.setdefault(self.weights, [])
        del weights[len(layer_keys) :]
        for key in layer_keys[len(weights) :]:
            weights.append(jax.block_until_ready(self.prepare(shape.experts(key))))  # failures are not cached
        return weights


def usable_layout(problem: Problem, environment: Environment, backend: str) -> str:
    """The problem's own layout if `backend` can read it, else the first that it can read.

    Raises:
        NoBackendError: there is none; the text is that for the problem's own layout.
    """
    rejections, engines = [], registered_backends()
    for layout in dict.fromkeys((problem.layout, *layouts.LAYOUTS)):
        try:
            select(dataclasses.replace(problem, layout=layout), environment, backend, engines)
            return layout
        except NoBackendError as e:
            rejections.append(e)
    raise rejections[0]


def _jmx_layer(
    shape: Shape, backend: str, x: Float[Array, "T H"], logits: Float[Array, "T E"], experts: Experts
) -> Float[Array, "T H"]:
    call: dict[str, Any] = {"activation": shape.activation, "input_format": shape.input_format, "backend": backend}
    return moe(x, Logits(logits, shape.method), experts, **call)


_compiled_layer = jax.jit(_jmx_layer, static_argnums=(0, 1))


class FloatWeights(NamedTuple):
    """A layer's weights as `lax.ragged_dot` takes them, bfloat16: gate_up (E, H, 2I), down (E, I, H), biases."""

    gate_up: Float[Array, "E H N"]
    down: Float[Array, "E I H"]
    gate_up_bias: Float[Array, "E N"] | None
    down_bias: Float[Array, "E H"] | None


def _expanded(experts: Experts) -> FloatWeights:
    expand = jax.jit(lambda q: quantization.dequantize(q, jnp.bfloat16, experts.format).mT)
    return FloatWeights(expand(experts.gate_up), expand(experts.down), experts.gate_up_bias, experts.down_bias)


def ragged_dot_layer(
    shape: Shape,
    x: Float[Array, "T H"],
    logits: Float[Array, "T E"],
    weights: FloatWeights,
    ragged_dot: Callable[..., Float[Array, "M N"]] = lax.ragged_dot,
) -> Float[Array, "T H"]:
    """The layer as a user of `lax.ragged_dot` writes it: sort by expert, two grouped products, weighted sum.

    `ragged_dot`: or another function of its first three arguments.
    """
    ids, router_weights = route(Logits(logits, shape.method))
    num_tokens, top_k = ids.shape
    order = jnp.argsort(ids.reshape(-1))
    experts = ids.reshape(-1)[order]
    sizes = jnp.bincount(experts, length=shape.num_experts)
    h = ragged_dot(x[order // top_k], weights.gate_up, sizes)
    if weights.gate_up_bias is not None:
        h += weights.gate_up_bias[experts]
    h = activations.apply(shape.activation, h, shape.gate_up_order)
    y = ragged_dot(h, weights.down, sizes)
    if weights.down_bias is not None:
        y += weights.down_bias[experts]
    y = y[jnp.argsort(order)].reshape(num_tokens, top_k, -1)
    return jnp.einsum("tkh,tk->th", y, router_weights, preferred_element_type=jnp.float32).astype(x.dtype)


def run_layers(
    layer: Layer, x: Float[Array, "T H"], logits: Float[Array, "L T E"], weights: Sequence[Any]
) -> tuple[Float[Array, "T H"], Float[Array, "T H"] | None]:
    """The layers one after the other, as residual blocks; also the first one's result, which is checked."""
    first = None
    for layer_logits, layer_weights in zip(logits, weights, strict=True):
        y = layer(x, layer_logits, layer_weights)
        first = y if first is None else first
        x = x + y
    return x, first


def _measure_row(
    name: str,
    shape: Shape,
    case: Case,
    built: dict[str, list[Any]],
    layer_keys: Key[Array, " L"],
    limits: Limits,
    environment: Environment,
    repeats: int,
) -> Row:
    problem = shape.problem(case.num_tokens, "packed")
    count = len(case.logits)
    while True:
        row = Row(name, case.num_tokens, layers=count, active=statistics.fmean(case.active[:count]))
        try:
            system = System.of(name, shape, case.num_tokens, environment)
            row = dataclasses.replace(row, weights=system.weights)
            compiled = compile_layers(system, shape, case, layer_keys[:count])
            fields = measure_layers(compiled, system, shape, case, built, layer_keys[:count], repeats)
            row = dataclasses.replace(row, **fields)
        except Exception as e:  # any failure of a backend is that row's result, and others still have to run
            if out_of_memory(e) and count > 1:
                count //= 2
                continue
            row = dataclasses.replace(row, error=f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
        dense_rate = limits.dense_rate * times_bfloat16(problem, environment)
        return judge(row, problem, dataclasses.replace(limits, dense_rate=dense_rate))


def judge(row: Row, problem: Problem, limits: Limits) -> Row:
    """The row with all that follows from its measurements: floor, ratio to it, rates, and whether the result is wrong.

    `limits`: the dense rate is that of the problem's own elements; see `costs.times_bfloat16`.
    """
    if row.active is None:
        return row
    least_bytes, operations = weight_bytes(problem, row.active), flops(problem)
    floor_us = Floor.of(least_bytes, operations, Peak(limits.copy_rate, limits.dense_rate)).us
    row = dataclasses.replace(row, floor_us=floor_us)
    if row.us is None or row.rel_err is None:
        return row
    wrong = f"wrong result: relative error {row.rel_err:.1e} is above {TOLERANCE:.0e}"
    return dataclasses.replace(
        row,
        tb_s=least_bytes / row.us / 1e6,
        tflop_s=operations / row.us / 1e6,
        over_floor=row.us / floor_us,
        error=None if row.rel_err <= TOLERANCE else wrong,
    )


def compile_layers(system: System, shape: Shape, case: Case, layer_keys: Key[Array, " L"]) -> jax.stages.Compiled:
    """The call that is timed, of as many layers as there are keys. Their weights need not exist yet."""
    abstract = jax.eval_shape(lambda key: system.prepare(shape.experts(key)), layer_keys[0])
    count = len(layer_keys)
    return jax.jit(partial(run_layers, system.layer)).lower(case.x, case.logits[:count], [abstract] * count).compile()


def measure_layers(
    compiled: jax.stages.Compiled,
    system: System,
    shape: Shape,
    case: Case,
    built: dict[str, list[Any]],
    layer_keys: Key[Array, " L"],
    repeats: int,
) -> dict[str, Any]:
    """The fields of a `Row` that are measured: us, spread, rel_err and temporary_bytes.

    Args:
        compiled: what `compile_layers` made of the same system, shape, case and keys.
        built: as of `System.build`.
    """
    temporary = check_memory(compiled)
    count = len(layer_keys)
    arguments = case.x, case.logits[:count], system.build(shape, layer_keys, built)
    _, y = compiled(*arguments)
    error = relative_error(y[case.checked], case.reference)
    del y
    time_s, spread = seconds(lambda: compiled(*arguments), repeats)
    return {"us": 1e6 * time_s / count, "spread": spread, "rel_err": error, "temporary_bytes": temporary}


def relative_error(result: Shaped[Any, "*shape"], reference: Shaped[Any, "*shape"]) -> float:
    """||result - reference|| / ||reference|| in float64; NaN where either has one."""
    result, reference = (np.asarray(array, np.float64) for array in (result, reference))
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))
