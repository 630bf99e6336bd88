"""Text from and to token ids, with a checkpoint's tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmx.checkpoint import CheckpointError

_NEAR = 4  # ids before a text that are decoded with it


def read_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` of a checkpoint; the original form has its file in the folder above.

    A file may have a length to which texts are cut or filled, that of batches in training: whole texts are encoded.

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
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exceptions
        raise CheckpointError(file, f"must be a file of the tokenizers package: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TextStream:
    """Decodes ids to text one by one, and holds back ids that end within a character.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        before: ids that the text continues, such as a prompt's. Some tokenizers leave out the space before the first
            word of all.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = [*before[-_NEAR:]]
        self._held = len(self._ids)  # ids from here on have not been returned
        self._context = 0  # ids from here on are decoded: a token's text may depend on the one before it

    def step(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        self._ids.append(token)
        return "" if self._pending().endswith("\ufffd") else self.flush()

    def flush(self) -> str:
        """The text of the ids that were held back."""
        text = self._pending()
        self._context, self._held = self._held, len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._held], skip_special_tokens=False)
        return self._tokenizer.decode(self._ids[self._context :], skip_special_tokens=False)[len(known) :]
