"""The model that a source will fill, as shapes, so that programs are compiled while its weights are read."""

from functools import partial

import jax
from flax import nnx

import jmx
from jmx.backends import resolve_layout
from jmx.checkpoint import ExpertLayer
from jmx.models.decoder import Model
from jmx.models.loading import shapes_of, with_biases_in
from jmx.models.sources.protocol import QuantizedSource, Source


def expected(source: Source, *, dtype: jax.typing.DTypeLike, backend: str | None) -> Model | None:
    """The model of shapes that `from_source` makes of most sources on one device. Nothing is read.

    Files can differ from it, for example in the dtype of their scales: compare it with the model, once that is there.

    Args:
        source: of the weights.
        dtype, backend: as in `from_source`.

    Returns:
        None for experts that are floats or padded, and where weights outside experts may stay quantized.
    """
    for its in source.layers.values():
        if its.format is None or (isinstance(source, QuantizedSource) and source.formats):
            return None
        if any(its.format.whole_size(size) != size for size in (its.hidden_size, its.intermediate_size)):
            return None
    model = shapes_of(source.config, dtype=dtype, backend=backend)
    for number, its in source.layers.items():
        experts = partial(_experts, dtype, its)
        model.layers[number].moe = nnx.eval_shape(lambda make=experts: model.make_moe(make(), nnx.Rngs(0)))
    return model


def _experts(dtype: jax.typing.DTypeLike, layer: ExpertLayer) -> jmx.Experts:
    assert layer.format is not None
    layout = resolve_layout("auto", jmx.Environment.probe(), layer.format)
    made = {"gate_up_order": layer.gate_up_order, "format": layer.format, "bias": layer.has_bias}
    sizes = layer.num_experts, layer.hidden_size, layer.intermediate_size
    return with_biases_in(dtype, jmx.Experts.random(jax.random.key(0), *sizes, **made).prepare(layout))
