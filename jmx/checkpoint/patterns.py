"""Regular expressions in files, which may come from anyone: none may take exponential time to match."""

import re
import warnings

LONGEST = 1000  # characters
_MOST_REPEATS = 6


def compiled(pattern: str, within: str = "{}") -> re.Pattern[str]:
    """The regular expression `within`, with `pattern` in the place of its braces.

    Raises:
        ValueError: `pattern` is none, alone or there, or may take exponential time to match.
    """
    if len(pattern) > LONGEST:
        raise ValueError(f"pattern {pattern[:50] + '...'!r} must have at most {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for patterns that later versions of Python read differently
            re.compile(pattern)
            expression = re.compile(within.format(pattern))
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"pattern {pattern!r} must be a regular expression: {error}") from error
    if _may_hang(pattern):
        raise ValueError(
            f"pattern {pattern!r} must have at most {_MOST_REPEATS} repeats, none of a group that holds one or a choice"
        )
    return expression


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
