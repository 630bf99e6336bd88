"""Text from and to token ids, with a checkpoint's tokenizer.json."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jmx.checkpoint import CheckpointError


def read_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` of a checkpoint; the original form has its file in the folder above.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ImportError: the tokenizers package is not installed.
        CheckpointError: the file cannot be read, or is not a tokenizer's.
    """
    places = [directory, directory.parent] if directory.name == "original" else [directory]
    file = next((place / "tokenizer.json" for place in places if (place / "tokenizer.json").exists()), None)
    if file is None:
        raise FileNotFoundError(f"{directory / 'tokenizer.json'} is missing, which a text prompt needs")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("a text prompt needs the tokenizers package: pip install 'jmx-moe[hf]'") from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exceptions
        raise CheckpointError(file, f"must be a file of the tokenizers package: {error}") from error


@dataclass
class TextStream:
    """Decodes ids to text one by one, and holds back ids that end within a character."""

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    held: int = 0  # ids from here on have not been returned
    context: int = 0  # ids from here on are decoded: a token's text may depend on the one before it

    def prompt(self, ids: list[int]) -> str:
        """The text of a prompt."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def step(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        self.ids.append(token)
        return "" if self._pending().endswith("\ufffd") else self.flush()

    def flush(self) -> str:
        """The text of the ids that were held back."""
        text = self._pending()
        self.context, self.held = self.held, len(self.ids)
        return text

    def _pending(self) -> str:
        known = self.tokenizer.decode(self.ids[self.context : self.held], skip_special_tokens=False)
        return self.tokenizer.decode(self.ids[self.context :], skip_special_tokens=False)[len(known) :]
