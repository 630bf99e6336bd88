"""Channels of gpt-oss' answers by the package openai-harmony, where it is installed and has its vocabulary at hand."""

import functools
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

from jmx.models.text.harmony import Channels

DIRECTORY = "TIKTOKEN_ENCODINGS_BASE"  # the variable of openai-harmony that names the directory of vocabularies
VOCABULARY = "o200k_base.tiktoken"  # gpt-oss'
_HEADERS = "assistant analysis commentary final to=functions.f"


class PackageChannels(Channels):
    """`Channels` whose messages openai-harmony's parser reads. Those that it rejects are read as by `Channels`.

    Args:
        tokenizer: a `tokenizers.Tokenizer` with the encoding's tokens.
        encoding: an `openai_harmony.HarmonyEncoding`.
    """

    def __init__(self, tokenizer: Any, encoding: Any):
        from openai_harmony import Role, StreamableParser  # pyright: ignore[reportMissingImports]

        super().__init__(tokenizer)
        self._parser = StreamableParser(encoding, role=Role.ASSISTANT, strict=False)

    def step(self, token: int) -> bool:
        from openai_harmony import HarmonyError, StreamState  # pyright: ignore[reportMissingImports]

        is_text = super().step(token)
        try:
            self._parser.process(token)
        except HarmonyError:
            return is_text
        if token in self.special:  # others change nothing but the text
            self.in_body = self._parser.state == StreamState.CONTENT
            if self.in_body:
                self.name, self.recipient = self._parser.current_channel or "", self._parser.current_recipient or ""
        return is_text


def channels_of(tokenizer: Any) -> Channels:
    """What reads the channels of an answer of the model with this tokenizer.

    openai-harmony's parser where the package is installed, the directory that `DIRECTORY` names has the vocabulary, and
    the tokenizer has the same tokens; else `Channels`. Without that directory the package would download the
    vocabulary.
    """
    encoding = _encoding(os.environ.get(DIRECTORY, ""))
    if encoding is None or not _has_tokens_of(encoding, tokenizer):
        return Channels(tokenizer)
    return PackageChannels(tokenizer, encoding)


@functools.cache
def _encoding(directory: str) -> Any:
    """The package's encoding with the vocabulary in a directory, or None. A warning if it is not the published one."""
    if not directory or not Path(directory, VOCABULARY).is_file():
        return None
    if importlib.util.find_spec("openai_harmony") is None:
        return None
    from openai_harmony import (  # pyright: ignore[reportMissingImports]
        HarmonyEncodingName,
        HarmonyError,
        load_harmony_encoding,
    )

    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except HarmonyError as error:
        warnings.warn(f"openai-harmony is not used: {Path(directory, VOCABULARY)}: {error}", stacklevel=2)
        return None


def _has_tokens_of(encoding: Any, tokenizer: Any) -> bool:
    """Whether a tokenizer has the encoding's ids of the format's special tokens, and of what headers are made of."""
    special = Channels(tokenizer).special
    same = all(encoding.encode(name, allowed_special="all") == [token] for token, name in special.items())
    return same and tokenizer.decode(encoding.encode(_HEADERS), skip_special_tokens=False) == _HEADERS
