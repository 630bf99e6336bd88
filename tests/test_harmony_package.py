"""openai-harmony's parser beside jmx's: when it is used, and that both find the same messages.

Messages are compared where the package is installed and `TIKTOKEN_ENCODINGS_BASE` names a directory with the published
vocabulary, which neither the package nor jmx ships.
"""

import base64
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_harmony import tokenizer

from jmx.models.text.dialog import Piece, _Reader
from jmx.models.text.harmony import Channels
from jmx.models.text.harmony_package import DIRECTORY, VOCABULARY, PackageChannels, _encoding, channels_of

tokenizers = pytest.importorskip("tokenizers")
PUBLISHED = os.environ.get(DIRECTORY, "")
has_package = importlib.util.find_spec("openai_harmony") is not None and Path(PUBLISHED, VOCABULARY).is_file()
with_package = pytest.mark.skipif(not has_package, reason=f"needs openai-harmony, and {VOCABULARY} in {DIRECTORY}")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in the package's place, which rejects each vocabulary."""

    class HarmonyError(Exception):
        pass

    def load_harmony_encoding(_: Any) -> None:
        raise HarmonyError("hash mismatch")

    module = types.ModuleType("openai_harmony")
    module.__spec__ = importlib.util.spec_from_loader("openai_harmony", None)
    vars(module).update(
        HarmonyError=HarmonyError,
        HarmonyEncodingName=types.SimpleNamespace(HARMONY_GPT_OSS="HarmonyGptOss"),
        load_harmony_encoding=load_harmony_encoding,
    )
    monkeypatch.setitem(sys.modules, "openai_harmony", module)
    return module


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("directory", [None, "", "missing", "empty"])
def test_without_a_vocabulary_the_package_is_not_asked(
    directory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv(DIRECTORY, raising=False)
    if directory is not None:
        monkeypatch.setenv(DIRECTORY, directory and str(tmp_path / directory))
    assert type(channels_of(tokenizer())) is Channels


def test_a_vocabulary_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / VOCABULARY).touch()
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert type(channels_of(tokenizer())) is Channels


@pytest.mark.usefixtures("package")
def test_another_vocabulary_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / VOCABULARY).touch()
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    with pytest.warns(match=r"openai-harmony is not used: .*o200k_base.tiktoken: hash mismatch"):
        assert type(channels_of(tokenizer())) is Channels
    assert type(channels_of(tokenizer())) is Channels  # warned of once


# With the package


@pytest.fixture(scope="module")
def published() -> Any:
    """The encoding, and a tokenizer that decodes its ids."""
    import openai_harmony  # pyright: ignore[reportMissingImports]

    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    lines = [line.split() for line in Path(PUBLISHED, VOCABULARY).read_text().splitlines()]
    words = {"".join(letters[byte] for byte in base64.b64decode(word)): int(n) for word, n in lines}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([encoding.decode([n]) for n in range(len(words), 200_020)])
    return encoding, made


def pieces(made: Any, ids: list[int]) -> list[Piece]:
    reader = _Reader(made, ())
    return [piece for piece in (*(reader.step(token) for token in ids), reader.flush()) if piece.text]


def answer(rng: np.random.Generator) -> str:
    """Messages to a user and to functions, in any order, the last one perhaps cut off."""
    texts = ["Let me é see.", "🙂", "", "{}", " a\n\nb", "to=functions.g", '{"a": "<b>"}', "漢字 x"]
    headers = [
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>final <|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.g<|channel|>commentary",
        "<|channel|>commentary",
    ]
    ends = ["<|end|>", "<|end|>", "<|call|>", "<|return|>", ""]
    found = ""
    for number in range(int(rng.integers(1, 6))):
        found += ("<|start|>assistant" if number else "") + headers[rng.integers(len(headers))] + "<|message|>"
        found += "".join(texts[n] for n in rng.integers(len(texts), size=rng.integers(4)))
        end = ends[rng.integers(len(ends))]
        found += end
        if not end:
            break
    return found


@with_package
def test_both_find_the_same_pieces(rng: np.random.Generator, published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, made = published
    for _ in range(300):
        ids = encoding.encode(answer(rng), allowed_special="all")
        assert type(channels_of(made)) is PackageChannels
        got = pieces(made, ids)
        with monkeypatch.context() as without:
            without.delenv(DIRECTORY)
            assert type(channels_of(made)) is Channels
            expected = pieces(made, ids)
        assert got == expected, encoding.decode(ids)


@with_package
def test_no_answer_is_an_error(rng: np.random.Generator, published: Any) -> None:
    encoding, made = published
    special = [*channels_of(made).special]
    for _ in range(300):
        text = encoding.encode(answer(rng), allowed_special="all")
        for at in sorted(rng.integers(len(text), size=4).tolist(), reverse=True):
            text[at : at + rng.integers(3)] = [special[n] for n in rng.integers(len(special), size=rng.integers(3))]
        pieces(made, text)


@with_package
def test_a_tokenizer_of_other_tokens(published: Any) -> None:
    assert _encoding(PUBLISHED) is not None
    assert type(channels_of(tokenizer())) is Channels
