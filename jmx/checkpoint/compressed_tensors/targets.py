"""Targets of configs: which modules an entry of `targets` or `ignore` selects, by name, by class or by pattern."""

import fnmatch
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError

PATTERN = "re:"
LONGEST = 1000
_MOST_REPEATS = 6


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
    pattern = text.removeprefix(PATTERN)
    if len(pattern) > LONGEST:
        raise ValueError(f"pattern {pattern[:50] + '...'!r} must have at most {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for patterns that later versions of Python read differently
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"pattern {pattern!r} must be a regular expression: {error}") from error
    if _may_hang(pattern):
        raise ValueError(
            f"pattern {pattern!r} must have at most {_MOST_REPEATS} repeats, none of a group that holds one or a choice"
        )
    return Target(text, compiled)


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


def _may_hang(pattern: str) -> bool:
    """Whether matching might take time exponential, or a high power, in the length of a name.

    Files may come from anyone, and Python's engine backtracks. The number of attempts explodes where a repeated group
    holds another repeat or a choice.
    """
    without_escapes = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "x", without_escapes)
    repeats, groups = 0, [False]  # for each open group: whether it holds a repeat or a choice
    risky = False  # whether the previous character closed such a group
    for before, character in zip("^" + bare, bare, strict=False):
        if character == ")" and len(groups) > 1:
            risky = groups.pop()
            groups[-1] |= risky
            continue
        if character == "(":
            groups.append(False)
        elif character == "|" or (character == "?" and before != "("):
            groups[-1] = True
        elif character in "*+{":
            if risky:
                return True
            repeats += 1
            groups[-1] = True
        risky = False
    return repeats > _MOST_REPEATS
