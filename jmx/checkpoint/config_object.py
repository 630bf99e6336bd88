"""JSON objects of configs, read key by key: a key that nothing reads is an error."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from jmx.checkpoint.shards import CheckpointError


class ConfigObject:
    """A JSON object whose entries are read one by one. `close` raises for entries that were not."""

    def __init__(self, file: Path, place: str, value: Any):
        self.file, self.place, self._prefix = file, place, f"{place}." if place else ""
        if not isinstance(value, dict):
            named = f"`{place}` (={value!r})" if place else "the file"
            raise CheckpointError(file, f"{named} must be an object")
        self.entries: Mapping[str, Any] = value
        self._left = set(value)

    @classmethod
    def of_method(cls, file: Path, place: str, value: Any, method: str, ignored: tuple[str, ...] = ()) -> Self:
        """The object at `place` of config.json, "" for a whole file, that describes a quantization of a `quant_method`.

        Raises:
            CheckpointError: it is of another method. Later, from methods: a key is unknown or missing, or has a value
                of another type or one that jmx does not support. The message names the key and its value.
        """
        entries = cls(file, place, value)
        entries.one_of("quant_method", (method,))
        entries.ignore(*ignored)
        return entries

    def error(self, key: str, rule: str) -> CheckpointError:
        return CheckpointError(self.file, f"`{self._prefix}{key}` (={self.entries[key]!r}) {rule}")

    def check(self, key: str, fits: Callable[[Any], bool], rule: str, *default: Any) -> Any:
        """The entry, or the default if it is missing. CheckpointError if both are missing, or `fits` is false."""
        self._left.discard(key)
        if key not in self.entries:
            if default:
                return default[0]
            raise CheckpointError(self.file, f"`{self._prefix}{key}` is missing")
        if not fits(self.entries[key]):
            raise self.error(key, rule)
        return self.entries[key]

    def ignore(self, *keys: str) -> None:
        """Accepts entries, whatever they are, or that they are missing."""
        self._left.difference_update(keys)

    def one_of(self, key: str, values: tuple[Any, ...], *default: Any) -> Any:
        """An entry that equals one of `values`, also in type: 1 is not true in JSON, as it is in Python."""

        def fits(value: Any) -> bool:
            return any(_same(value, wanted) for wanted in values)

        return self.check(key, fits, f"must be one of {list(values)}", *default)

    def equal(self, wanted: Mapping[str, Any], why: str) -> None:
        """Checks that entries equal those of `wanted`, also in type, and that inner objects have no others."""
        for key, value in wanted.items():
            if isinstance(value, Mapping):
                inner = self.object(key)
                inner.equal(value, why)
                inner.close()
            else:
                self.check(key, lambda found, value=value: _same(found, value), f"must be {value!r}, {why}")

    def object_or_none(self, key: str) -> Mapping[str, Any] | None:
        """An entry that must be an object or null; its contents are not checked. None if it is missing."""
        return self.check(key, lambda value: value is None or isinstance(value, dict), "must be an object", None)

    def strings(self, key: str, *default: Any) -> list[str]:
        def fits(value: Any) -> bool:
            return value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))

        return self.check(key, fits, "must be a list of strings", *default) or []

    def object(self, key: str) -> "ConfigObject":
        self._left.discard(key)
        if key not in self.entries:
            raise CheckpointError(self.file, f"`{self._prefix}{key}` is missing")
        return ConfigObject(self.file, f"{self._prefix}{key}", self.entries[key])

    def close(self) -> None:
        if self._left:
            key = min(self._left)
            raise CheckpointError(self.file, f"`{self._prefix}{key}` (={self.entries[key]!r}) is not a known key")


def _same(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and value == wanted
