"""The protocol of a source of weights, and its neutral names."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax

import jmx
from jmx.checkpoint import ExpertLayer
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.config import Config
from jmx.models.quantized_weights import QuantizedWeights

Shape = tuple[int, ...]


class Source[C: Config](Protocol):
    """A source of weights: a `jmx.checkpoint.Reader`, or any object with these members.

    Tensors have the neutral names of `jmx.checkpoint.gpt_oss.Reader`, such as "embedding" and "layers.0.q_weight". A
    family without biases or sinks omits them, and one that normalizes heads adds q_norm and k_norm (D,). A bias of the
    choice of experts is "router_correction_bias" (E,). Shared experts are "shared_gate_weight" and "shared_up_weight"
    (I, H), "shared_down_weight" (H, I), and if they have a gate "shared_expert_gate_weight" (1, H). Tied models have no
    "unembedding".
    """

    @property
    def config(self) -> C: ...
    @property
    def layers(self) -> Mapping[int, ExpertLayer]:
        """What is known of experts before they are read, by the number of their layer."""
        ...

    def dense(self, name: str, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        """A tensor outside the experts, in floats; None: on the default device."""
        ...

    def experts(self, layer: int, *, sharding: jax.sharding.Sharding | None = None) -> jmx.Experts | FloatExperts:
        """A layer's experts, in the layout of this machine. `sharding`: of all arrays; None: the default device."""
        ...

    def progress(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which a bar on stderr (if that is a terminal) counts the bytes that are read."""
        ...


@runtime_checkable
class StoredSource(Protocol):
    """What a `Source` has besides if it reads files."""

    def read_ahead(self, order: Sequence[int | str]) -> contextlib.AbstractContextManager[None]:
        """A context in which the experts of layers, and tensors by neutral name, are read ahead in this order."""
        ...


@runtime_checkable
class QuantizedSource(Protocol):
    """What a `Source` has besides if some of its tensors outside the experts are quantized."""

    @property
    def formats(self) -> Mapping[str, jmx.Format]:
        """Formats of those tensors, by neutral name."""
        ...

    def quantized(self, name: str) -> QuantizedWeights:
        """One of those tensors as it is stored."""
        ...

    def report(self, kept: Collection[str]) -> None:
        """Takes notice of which of those tensors a model keeps as they are; it dequantizes the others."""
        ...


def in_layer(layer: int, name: str) -> str:
    """The neutral name, in the whole model, of a layer's tensor."""
    return f"layers.{layer}.{name}"
