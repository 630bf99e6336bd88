"""A text to train a language model on: its tokenizer, its tokens, random windows of them, and a part held out."""

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jmx.util.checks import check_int, check_path
from jmx.util.typing import Array, Int32

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Text:
    """A file of UTF-8 as tokens of a byte-level BPE that is learned from it.

    The last twentieth, from the beginning of a line on, is held out: neither the BPE nor windows see it.

    Args:
        path: of the file.
        vocab_size: of the BPE, with special tokens.
        special: names of special tokens, which get the last ids.

    Attributes:
        tokenizer: of the package tokenizers.
        tokens, held_out: int32 (N,), on the host.
        num_bytes, held_out_bytes: of the text of each.
        sha256: of the text that is trained on, in hexadecimal digits.

    Raises:
        TypeError, ValueError: arguments that are not as above; a text that is not UTF-8, has one line, or is too short
            for so many different tokens.
        OSError: the file cannot be read.
        ModuleNotFoundError: tokenizers is not installed: `pip install 'jmx-moe[hf]'`.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int, special: Sequence[str] = ()):
        check_path("path", path)
        named = isinstance(special, Sequence) and not isinstance(special, str)
        if not named or not all(isinstance(name, str) and name for name in special):
            raise TypeError(f"`special` (={special!r}) must be a sequence of names of tokens")
        check_int("vocab_size", vocab_size, least=256 + len(special))
        with open(path, "rb") as file:
            data = file.read()
        split = data.rfind(b"\n", 0, len(data) * 19 // 20) + 1
        if split == 0:
            raise ValueError(f"`path` (={os.fspath(path)}) must be a text of several lines")
        try:
            parts = [part.decode() for part in (data[:split], data[split:])]
        except UnicodeDecodeError as error:
            raise ValueError(f"`path` (={os.fspath(path)}) must be a text in UTF-8: {error}") from error
        self.tokenizer = _byte_level_bpe(parts[0], vocab_size, special)
        if (size := self.tokenizer.get_vocab_size()) != vocab_size:
            raise ValueError(
                f"`path` (={os.fspath(path)}) must be a longer text: it gives a vocabulary of {size} tokens, and "
                f"`vocab_size` is {vocab_size}"
            )
        self.tokens, self.held_out = (np.asarray(self.tokenizer.encode(part).ids, np.int32) for part in parts)
        self.num_bytes, self.held_out_bytes = split, len(data) - split
        self.sha256 = hashlib.sha256(data[:split]).hexdigest()

    def windows(self, batch: int, length: int, *, seed: int = 0) -> Callable[[int], Int32[Array, "batch window"]]:
        """A function from the number of a step to random windows of the text, the same in every run.

        Args:
            batch: windows of a step.
            length: tokens that a model predicts in each, which has one more.
            seed: of other windows, at least 0.

        Raises:
            TypeError, ValueError: arguments that are not as above; a length that the text does not have.
        """
        check_int("batch", batch, least=1)
        check_int("length", length, least=1)
        check_int("seed", seed, least=0)
        if length >= len(self.tokens):
            raise ValueError(f"`length` (={length}) must be less than the {len(self.tokens)} tokens of the text")

        def draw(step: int) -> jax.Array:
            starts = np.random.default_rng([seed, step]).integers(len(self.tokens) - length, size=batch)
            return jnp.asarray(self.tokens[starts[:, None] + np.arange(length + 1)])

        return draw


def _byte_level_bpe(text: str, vocab_size: int, special: Sequence[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([*special])
    return tokenizer
