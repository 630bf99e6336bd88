"""config.json of a decoder in the Hugging Face form, read key by key, with the defaults of its family."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError, read_json
from jmx.util.checks import is_finite_number

FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ROPE_TYPES = "default", "yarn"  # of rotary positions
MOST_LAYERS = 1 << 20  # far beyond any model: a larger number is corrupt


class DecoderEntries(ConfigObject):
    """The entries of config.json. One that is missing or null has the default of its key, if there is one.

    Methods raise CheckpointError for an entry that is missing without a default, of another type, or out of range.

    Attributes:
        defaults: of keys.
        nulls: values of keys whose null is not their default.
    """

    defaults: Mapping[str, Any] = {}
    nulls: Mapping[str, Any] = {}

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_type: str, defaults: Mapping[str, Any]) -> Self:
        """The entries in the directory `path`, which must be of a model of that type.

        Raises:
            CheckpointError: a file is missing or is not JSON, or the type is another one. Later, from methods: a key
                is missing, has a value of another type or out of range, or would make it another model.
        """
        file = Path(path) / FILE
        entries = cls(file, file.name, read_json(file))
        entries.defaults = defaults
        entries.one_of("model_type", (model_type,))
        return entries

    def size(self, key: str, *default: int) -> int:
        """A whole number of at least 1."""
        if given := [*self._default(key), *(default if self.is_absent(key) else ())]:
            return given[0]
        return self.check(key, lambda value: type(value) is int and value >= 1, "must be a whole number of at least 1")

    def count(self, key: str) -> int:
        """A whole number of at least 0."""
        if given := self._default(key):
            return given[0]
        return self.check(key, lambda value: type(value) is int and value >= 0, "must be a whole number of at least 0")

    def flag(self, key: str) -> bool:
        return self.one_of(key, (True, False))

    def one_of(self, key: str, values: tuple[Any, ...], *default: Any) -> Any:
        """An entry that equals one of `values`, also in type: 1 is not true in JSON, as it is in Python."""
        if given := [*self._default(key), *(default if self.is_absent(key) else ())]:
            return given[0]
        return super().one_of(key, values)

    def number(self, key: str) -> float:
        """A positive number."""
        if given := self._default(key):
            return given[0]

        def fits(value: Any) -> bool:
            return is_finite_number(value) and value > 0

        return float(self.check(key, fits, "must be a positive number"))

    def is_absent(self, key: str) -> bool:
        """Whether the entry is missing or null."""
        return self.entries.get(key) is None

    def layers(self) -> int:
        """The number of layers, which can be counted."""
        layers = self.size("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise CheckpointError(self.file, f"`num_hidden_layers` (={layers}) must be at most {MOST_LAYERS}")
        return layers

    def rope_objects(self) -> "dict[str, DecoderEntries]":
        """The objects that describe rotary positions: `rope_scaling` in older files, `rope_parameters` in newer ones.

        CheckpointError if one is of none of `ROPE_TYPES`, or has one for each type of layer. One that does not state a
        type is "default", and must not have a `factor`.
        """
        found = {}
        for place in ("rope_scaling", "rope_parameters"):
            if not self.is_absent(place):
                found[place] = rope = DecoderEntries(self.file, f"{self.place}.{place}", self.entries[place])
                for key, value in rope.entries.items():
                    if isinstance(value, dict):
                        raise rope.error(key, "must not be an object: all layers have the same rotary positions")
                for kind in ("rope_type", "type"):
                    rope.one_of(kind, ROPE_TYPES, "default")
                if rope.is_absent("rope_type") and rope.is_absent("type") and not rope.is_absent("factor"):
                    raise rope.error("factor", f"must go with a `rope_type`, one of {list(ROPE_TYPES)}")
        return found

    def rope_number(self, key: str) -> float:
        """A number of rotary positions, from the config or its objects for these.

        CheckpointError if these are of positions of none of `ROPE_TYPES`, or differ in the number.
        """
        found: dict[str, float] = {}
        for place, rope in self.rope_objects().items():
            if not rope.is_absent(key):
                found[place] = rope.number(key)
        if not self.is_absent(key) or not found:
            found[key] = self.number(key)
        if len({*found.values()}) > 1:
            raise CheckpointError(self.file, f"`{key}` must be one number, but is {found}")
        return next(iter(found.values()))

    def dense_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers that `mlp_only_layers` names, and all except every `decoder_sparse_step`-th."""
        step = self.size("decoder_sparse_step")

        def fits(value: Any) -> bool:
            return value is None or (
                isinstance(value, list) and all(type(item) is int and 0 <= item < num_layers for item in value)
            )

        rule = f"must be a list of layers, of which there are {num_layers}"
        named = self.check("mlp_only_layers", fits, rule, *self._default("mlp_only_layers")) or []
        return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, of this config and of generation_config.json beside it; may be empty."""
        generation = self.file.parent / GENERATION_FILE
        sources: list[ConfigObject] = [self]
        if generation.exists():
            sources.append(ConfigObject(generation, generation.name, read_json(generation)))
        found: list[int] = []
        for source in sources:

            def fits(value: Any) -> bool:
                ids = value if isinstance(value, list) else [value]
                return value is None or all(type(item) is int and item >= 0 for item in ids)

            value = source.check("eos_token_id", fits, "must be an id or a list of ids", None)
            found += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(found))

    def _default(self, key: str) -> list[Any]:
        """The default of an entry that is missing or null, in a list; empty if there is none."""
        if key in self.nulls and key in self.entries and self.is_absent(key):
            return [self.nulls[key]]
        return [self.defaults[key]] if self.is_absent(key) and key in self.defaults else []
