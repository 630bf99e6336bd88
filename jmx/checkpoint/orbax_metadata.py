"""The custom metadata of an Orbax checkpoint that describes its MoE layers.

It is the entry "jmx_experts" of an Orbax checkpoint's custom metadata, such as

    {
      "version": 1,
      "layers": {
        "blocks.0.moe": {
          "layout": "cutlass_sm90",
          "leading_axes": [],
          "num_experts": 8,
          "hidden_size": 64,
          "intermediate_size": 96,
          "format": "mxfp4",
          "gate_up_order": "interleaved",
          "input_format": null,
          "arrays": {"gate_up_values": "float4_e2m1fn[8, 192, 64]", ...}
        }
      }
    }

where `arrays` are those of the canonical layout, whatever the layout of the checkpoint. These sizes are needed since
layouts pad: arrays of different experts may have the same shape. On restoring they are compared with the module's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jmx.checkpoint.config_object import ConfigObject
from jmx.experts import Experts
from jmx.numerics import layouts

KEY = "jmx_experts"
VERSION = 1


class Layer(NamedTuple):
    """A MoE layer of a module: its path there, with dots (empty for the module itself), and its experts."""

    path: str
    experts: Experts

    @property
    def prefix(self) -> str:
        """The prefix of its arrays' names."""
        return f"{self.path}." if self.path else ""

    def named(self) -> dict[str, Any]:
        """The experts' arrays by their names in the module."""
        return {self.prefix + name: array for name, array in self.experts.arrays().items()}


def note_of(layers: Sequence[Layer]) -> dict[str, Any]:
    """The custom metadata of a checkpoint of these layers.

    Raises:
        ValueError: a layer in an unknown layout, or in one that does not support its format.
    """
    for layer in layers:
        layout, format = layouts.get(layer.experts.layout), layer.experts.format
        if not layout.holds(format):
            raise ValueError(f"`layout` (={layout.name!r}) of {layer.path!r} must hold {format.name!r}")
    entries = {layer.path: {"layout": layer.experts.layout, **_facts(layer.experts)} for layer in layers}
    return {KEY: {"version": VERSION, "layers": entries}}


def layouts_of(note: ConfigObject, layers: Sequence[Layer]) -> list[str]:
    """The layouts of these layers in the checkpoint of a note.

    Raises:
        CheckpointError: the note has another version, or differs from the layers in anything but the layout. It names
            the file and the first key.
    """
    note.equal({"version": VERSION}, "which is what this jmx reads and writes")
    stored = note.object("layers")
    note.close()
    found = [_layout_of(stored.object(layer.path), layer.experts) for layer in layers]
    stored.close()
    return found


def _facts(experts: Experts) -> dict[str, Any]:
    """A description of experts that does not depend on their layout, as JSON. Equal ones have the same arrays."""
    canonical = jax.eval_shape(Experts.canonical, experts)
    *leading_axes, num_experts, _, _ = canonical.gate_up.values.shape
    return {
        "leading_axes": leading_axes,
        "num_experts": num_experts,
        "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size,
        "format": experts.format.name,
        "gate_up_order": experts.gate_up_order,
        "input_format": experts.input_format,
        "arrays": {name: f"{array.dtype}{list(array.shape)}" for name, array in canonical.arrays().items()},
    }


def _layout_of(entries: ConfigObject, experts: Experts) -> str:
    entries.equal(_facts(experts), "as in `module`")
    layout = entries.one_of(
        "layout", tuple(name for name, each in layouts.LAYOUTS.items() if each.holds(experts.format))
    )
    entries.close()
    return layout
