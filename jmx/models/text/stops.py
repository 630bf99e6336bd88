"""Stop strings: texts at which generation ends, wherever tokens begin and end in them."""

from collections.abc import Sequence

from jmx.util.checks import check_str


class StopStrings:
    """Passes on streamed text up to the first stop string, and holds back what may be the beginning of one.

    The first one is the one that is complete first; of several complete at the same character, the longest.

    Args:
        strings: the stop strings, each of at least one character.

    Attributes:
        found: the stop string at which the text ended, or None. Nothing is passed on after it.

    Raises:
        TypeError: not a list of strings.
        ValueError: one of them is empty.
    """

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):  # whose characters would be taken for them
            raise TypeError(f"`strings` (={strings!r}) must be a list of strings")
        for number, string in enumerate(strings):
            check_str(f"strings[{number}]", string)
            if not string:
                raise ValueError(f"`strings[{number}]` (='') must have at least one character")
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def step(self, text: str) -> str:
        """What can be shown once `text` has followed."""
        if self.found is not None:
            return ""
        self._held += text
        starts = {string: start for string in self._strings if (start := self._held.find(string)) >= 0}
        if starts:
            self.found = min(starts, key=lambda string: (starts[string] + len(string), starts[string]))
            shown, self._held = self._held[: starts[self.found]], ""
            return shown
        kept = max((overlap(self._held, string) for string in self._strings), default=0)
        at = len(self._held) - kept
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def flush(self) -> str:
        """What was held back: no more text follows, so it begins no stop string."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that begins `string`."""
    most = min(len(text), len(string) - 1)
    return next((length for length in range(most, 0, -1) if string.startswith(text[-length:])), 0)
