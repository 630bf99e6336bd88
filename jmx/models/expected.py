"""The model that a source will fill, as shapes, so that programs are compiled while its weights are read."""

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx

import jmx
from jmx.backends import resolve_layout
from jmx.checkpoint import ExpertLayer
from jmx.models.decoder import Model
from jmx.models.loading import shapes_of, with_biases_in
from jmx.models.sources.protocol import QuantizedSource, Source


@dataclass(frozen=True)
class _Kind:
    """What decides the shapes of a layer's experts."""

    sizes: tuple[int, int, int]
    format: jmx.Format
    gate_up_order: str | None
    has_bias: bool


def expected(source: Source, *, dtype: jax.typing.DTypeLike, backend: str | None) -> Model | None:
    """The model of shapes that `from_source` makes of most sources on one device. Nothing is read.

    Files can differ from it, for example in the dtype of their scales: compare it with the model, once that is there.

    Args:
        source: of the weights.
        dtype, backend: as in `from_source`.

    Returns:
        None for experts that are floats, and where weights outside experts may stay quantized.
    """
    kinds: dict[int, _Kind] = {}
    for number, its in source.layers.items():
        if its.format is None or (isinstance(source, QuantizedSource) and source.formats):
            return None
        kinds[number] = _kind(its, its.format)
    model = shapes_of(source.config, dtype=dtype, backend=backend)
    for number, kind in kinds.items():
        experts = partial(_experts, dtype, kind)
        model.layers[number].moe = nnx.eval_shape(lambda make=experts: model.make_moe(make(), nnx.Rngs(0)))
    return model


def _kind(layer: ExpertLayer, format: jmx.Format) -> _Kind:
    sizes = layer.num_experts, format.whole_size(layer.hidden_size), format.whole_size(layer.intermediate_size)
    return _Kind(sizes, format, layer.gate_up_order, layer.has_bias)


def _experts(dtype: jax.typing.DTypeLike, kind: _Kind) -> jmx.Experts:
    layout = resolve_layout("auto", jmx.Environment.probe(), kind.format)
    made = {"gate_up_order": kind.gate_up_order, "format": kind.format, "bias": kind.has_bias}
    return with_biases_in(dtype, jmx.Experts.random(jax.random.key(0), *kind.sizes, **made).prepare(layout))
