"""Which modules an entry of `targets` or `ignore` selects: one by its name, a class, or those that match a pattern."""

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
    """An entry: its text, and the pattern that it spells, if any, which matches from a name's first character on."""

    text: str
    pattern: re.Pattern[str] | None

    def rank(self, module: str, module_class: str) -> int | None:
        """How closely it selects the module: 0 by name, 1 by a pattern, 2 by class; None if it does not."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        return 0 if self.text == module else 2 if self.text == module_class else None


def parse_target(text: str) -> Target:
    """The target that `text` spells.

    Raises:
        ValueError: an empty text, or a pattern that is no regular expression or may take exponential time to match.
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
            warnings.simplefilter("error")  # of what a later Python reads otherwise
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"pattern {pattern!r} must be a regular expression: {error}") from error
    if _may_hang(pattern):
        raise ValueError(
            f"pattern {pattern!r} must have at most {_MOST_REPEATS} repeats, none of a group that holds one or a choice"
        )
    return Target(text, compiled)


def parse_glob(text: str) -> Target:
    """The target of a name in which "*" stands for anything, as ModelOpt and Quark have them.

    Raises:
        ValueError: an empty text, or one that is too long.
    """
    if not 0 < len(text) <= LONGEST:
        raise ValueError(f"a target must have 1 to {LONGEST} characters, not {len(text)}")
    return Target(text, re.compile(fnmatch.translate(text)) if "*" in text else None)


def targets_of(
    entries: ConfigObject, key: str, texts: list[str], parse: Callable[[str], Target] = parse_target
) -> tuple[Target, ...]:
    """The targets in a list of the entry `key`. CheckpointError, naming it, for one that is none."""
    targets = []
    for text in texts:
        try:
            targets.append(parse(text))
        except ValueError as error:
            raise CheckpointError(entries.file, f"`{entries.place}.{key}`: {error}") from error
    return tuple(targets)


def _may_hang(pattern: str) -> bool:
    """Whether matching might take time exponential in a name's length, or a power of it that is as bad.

    Files come from anywhere, and Python's engine tries every way to match. A group that repeats and holds another
    repeat, or a choice, is where their number explodes.
    """
    without_escapes = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "x", without_escapes)
    repeats, groups = 0, [False]  # of each group that is open: whether it holds a repeat or a choice
    risky = False  # whether the character before closes such a group
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
