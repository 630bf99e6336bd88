"""Targets of configs: which modules an entry of `targets` or `ignore` selects, by name, by class or by pattern."""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass

from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.patterns import LONGEST, compiled
from jmx.checkpoint.shards import CheckpointError

PATTERN = "re:"


@dataclass(frozen=True)
class Target:
    """An entry: its text, and its pattern, if it is one, which matches from the first character of a name on."""

    text: str
    pattern: re.Pattern[str] | None

    def rank(self, module: str, module_class: str) -> int | None:
        """How the target selects the module: 0 by name, 1 by pattern, 2 by class; None if it does not."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        return 0 if self.text == module else 2 if self.text == module_class else None


def parse_target(text: str) -> Target:
    """Parses a target of compressed-tensors: a name, a class, or "re:" and a regular expression.

    Raises:
        ValueError: `text` is empty, or its pattern is not a regular expression or may take exponential time to match.
    """
    if not text.startswith(PATTERN):
        if not text:
            raise ValueError("a target must not be empty")
        return Target(text, None)
    return Target(text, compiled(text.removeprefix(PATTERN)))


def parse_glob(text: str) -> Target:
    """Parses a target of ModelOpt or Quark: a name in which "*" matches anything.

    Raises:
        ValueError: `text` is empty or too long.
    """
    if not 0 < len(text) <= LONGEST:
        raise ValueError(f"a target must have 1 to {LONGEST} characters, not {len(text)}")
    return Target(text, re.compile(fnmatch.translate(text)) if "*" in text else None)


def parse_module(text: str) -> Target:
    """The target of a module and all modules inside it, by its full name or the end of it after a dot.

    Raises:
        ValueError: `text` is empty or too long.
    """
    if not 0 < len(text) <= LONGEST:
        raise ValueError(f"a target must have 1 to {LONGEST} characters, not {len(text)}")
    return Target(text, re.compile(rf"(?:.*\.)?{re.escape(text)}(?:\..*)?$", re.DOTALL))


def targets_of(
    entries: ConfigObject, key: str, texts: list[str], parse: Callable[[str], Target] = parse_target
) -> tuple[Target, ...]:
    """The targets in the list at `key`. CheckpointError, naming the key, for one that cannot be parsed."""
    targets = []
    for text in texts:
        try:
            targets.append(parse(text))
        except ValueError as error:
            raise CheckpointError(entries.file, f"`{entries.place}.{key}`: {error}") from error
    return tuple(targets)
