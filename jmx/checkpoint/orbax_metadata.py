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
Of a layer that holds shards of experts, or slots for copies of them, the entry also has "num_shards", "spare_experts"
and "num_ranks", those of its `jmx.parallel.experts_form.Form`; all else is that of the whole experts.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from jmx.checkpoint.config_object import ConfigObject
from jmx.experts import Experts
from jmx.numerics import layouts
from jmx.parallel.experts_form import Form, QuantizedExperts, inner, whole_experts

KEY = "jmx_experts"
VERSION = 1


_MOST = 1 << 20  # of shards, slots or ranks: no layer has more
_FORM = {"num_shards": 1, "spare_experts": 0, "num_ranks": 1}  # of whole experts


class Saved(NamedTuple):
    """How a checkpoint has the experts of a layer."""

    layout: str
    form: Form


class Layer(NamedTuple):
    """A MoE layer of a module: its path there, with dots (empty for the module itself), its experts and their form."""

    path: str
    experts: QuantizedExperts
    form: Form = Form()

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
        experts = inner(layer.experts)
        layout, format = layouts.get(experts.layout), experts.format
        if not layout.holds(format):
            raise ValueError(f"`layout` (={layout.name!r}) of {layer.path!r} must hold {format.name!r}")
    entries = {
        layer.path: {"layout": inner(layer.experts).layout, **_facts(layer.experts), **_form_entries(layer.form)}
        for layer in layers
    }
    return {KEY: {"version": VERSION, "layers": entries}}


def saved_as(note: ConfigObject, layers: Sequence[Layer]) -> list[Saved]:
    """The layouts and forms of these layers in the checkpoint of a note.

    Raises:
        CheckpointError: the note has another version, or differs from the layers in anything but these. It names
            the file and the first key.
    """
    note.equal({"version": VERSION}, "which is what this jmx reads and writes")
    stored = note.object("layers")
    note.close()
    found = [_saved_as(stored.object(layer.path), layer) for layer in layers]
    stored.close()
    return found


def _form_entries(form: Form) -> dict[str, int]:
    """Entries of a form, none of whole experts."""
    entries = {key: getattr(form, key) for key in _FORM}
    return {} if entries == _FORM else entries


def _facts(held: QuantizedExperts) -> dict[str, Any]:
    """A description of experts that does not depend on their layout and form, as JSON. Equal ones have equal arrays."""
    experts = jax.eval_shape(whole_experts, held)
    canonical = jax.eval_shape(Experts.canonical, experts)
    *leading_axes, num_experts, _, _ = canonical.gate_up.values.shape
    padded = {} if experts.padded_to is None else {"padded_to": [*experts.padded_to]}
    return padded | {
        "leading_axes": leading_axes,
        "num_experts": num_experts,
        "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size,
        "format": experts.format.name,
        "gate_up_order": experts.gate_up_order,
        "input_format": experts.input_format,
        "arrays": {name: f"{array.dtype}{list(array.shape)}" for name, array in canonical.arrays().items()},
    }


def _saved_as(entries: ConfigObject, layer: Layer) -> Saved:
    format = inner(layer.experts).format
    entries.equal(_facts(layer.experts), "as in `module`")
    layout = entries.one_of("layout", tuple(name for name, each in layouts.LAYOUTS.items() if each.holds(format)))
    found = {
        key: entries.check(key, partial(_is_count, least=least), f"must be an integer of at least {least}", least)
        for key, least in _FORM.items()
    }
    entries.close()
    return Saved(layout, dataclasses.replace(layer.form, **found))


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST
