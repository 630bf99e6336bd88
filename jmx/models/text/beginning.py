"""The special tokens that a checkpoint's texts begin with, which raw prompts have only where they are written."""

from pathlib import Path
from typing import Any

from jmx.checkpoint.shards import read_object

_FILE = "tokenizer_config.json"
_ANY = "a"


def beginning_of_texts(directory: Path, tokenizer: Any) -> list[int]:
    """Ids that transformers puts before a text: those of tokenizer.json, else `bos_token` if `add_bos_token` is set.

    Args:
        directory: of the checkpoint.
        tokenizer: the `tokenizers.Tokenizer` of its tokenizer.json.

    Raises:
        CheckpointError: tokenizer_config.json is not an object of JSON.
    """
    plain, whole = (tokenizer.encode(_ANY, add_special_tokens=its).ids for its in (False, True))
    starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
    if starts and starts[0] > 0:
        return whole[: starts[0]]
    file = directory / _FILE
    settings = read_object(file) if file.exists() else {}
    token = settings.get("bos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if settings.get("add_bos_token") is not True or not isinstance(text, str):
        return []
    id = tokenizer.token_to_id(text)
    return [] if id is None else [id]
