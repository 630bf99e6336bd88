"""Markdown as code hosts read it, turned into what Python-Markdown reads alike."""

import re

from docs.site import repository

_ITEM = re.compile(r"^(?:[*-]|\d+\.) ")
_FENCE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)


def converted(text: str) -> str:
    """A page's text, in which lists begin after an empty line, and fences name a title instead of a file."""
    text = _FENCE.sub(lambda fence: f"```{fence[1]}{_title(fence[2])}", text)
    return repository.outside_fences(text, _with_space_before_lists)


def _title(word: str) -> str:
    """The word after the language is a file's name, or marks output for the tests."""
    return f' title="{word}"' if "." in word else ""


def _with_space_before_lists(text: str) -> str:
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        if _ITEM.match(line) and before and not _ITEM.match(before) and not before.startswith("  "):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def with_whole_options(html: str) -> str:
    """Gives options of commands, such as `--name`, a class that keeps them whole: lines may break after hyphens."""
    return re.sub(r"<code>(--?\w[\w-]{,24})</code>", r'<code class="option">\1</code>', html)
