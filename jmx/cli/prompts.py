"""The prompts of `jmx generate`: from arguments, files or stdin to token ids."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from jmx.cli.output import to_stderr
from jmx.cli.parser import Parser

_STDIN = "-"


class Prompt(NamedTuple):
    """A prompt's token ids, and its text as the model is given it; None if ids were given."""

    ids: list[int]
    text: str | None


def add(parser: Parser) -> None:
    """Adds the arguments of which `read` makes prompts."""
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="raw text for the checkpoint's tokenizer.json; several are one batch; - reads stdin",
    )
    group = parser.add_argument_group("prompts from elsewhere, instead of PROMPT")
    group.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="the text of FILE (- for stdin) is a prompt, without a newline at its end; may be given several times",
    )
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="each line of FILE (- for stdin) is a prompt: raw text, or a string of JSON if FILE ends with .jsonl",
    )
    group.add_argument(
        "--prompt-ids",
        type=_ids,
        action="append",
        metavar="1,2,3",
        help="token ids; new ids are then shown as ids; may be given several times. Default with --random: 1024 random "
        "ones",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, for the checkpoint's chat template"
    )


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between") from None


def check(arguments: argparse.Namespace) -> None:
    """ValueError unless exactly one kind of prompts is given (with --random, none or ids). Nothing is read."""
    kinds = {
        "PROMPT": arguments.prompts,
        "--prompt-file": arguments.prompt_file,
        "--prompts-file": arguments.prompts_file is not None,
        "--prompt-ids": arguments.prompt_ids,
    }
    given = [name for name, values in kinds.items() if values]
    if arguments.chat and not {*given} - {"--prompt-ids"}:
        raise ValueError("`--chat` needs PROMPT, a user's message")
    if arguments.random is not None and {*given} - {"--prompt-ids"}:
        raise ValueError(f"`--random` has no tokenizer for {given[0]}: give --prompt-ids")
    if len(given) > 1 or (not given and arguments.random is None):
        raise ValueError(f"give one of PROMPT, --prompt-file, --prompts-file and --prompt-ids{_but(given)}")
    if [*arguments.prompts, *(arguments.prompt_file or ())].count(_STDIN) > 1:
        raise ValueError("stdin (-) must be given once: it is read to its end")


def _but(given: list[str]) -> str:
    return f", and not {' and '.join(given)}" if given else ""


def read_texts(arguments: argparse.Namespace) -> list[str]:
    """The texts of prompts; none if ids are given.

    Raises:
        ValueError: a file that cannot be read, a prompt that is not UTF-8, an empty line, or one that is not a string
            of JSON.
    """
    texts = [_read("PROMPT", _STDIN) if text == _STDIN else _checked("PROMPT", text) for text in arguments.prompts]
    texts += [_read("--prompt-file", name) for name in arguments.prompt_file or ()]
    if arguments.prompts_file is not None:
        texts += _lines(arguments.prompts_file)
    return texts


def _read(argument: str, name: str) -> str:
    """The whole text of a file that an argument names, or of stdin, without a newline at its end."""
    try:
        text = (_stdin() if name == _STDIN else Path(name).read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{_named(name)} must be UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"`{argument}` (={name!r}) cannot be read: {error.strerror or error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def _stdin() -> bytes:
    if sys.stdin is None:  # it was closed
        return b""
    return sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()


def _checked(name: str, text: str) -> str:
    """The text, which may have characters that stand for bytes of another encoding. ValueError if it has some."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be UTF-8: {error.reason} at character {error.start}") from error
    return text


def _named(name: str) -> str:
    return "stdin" if name == _STDIN else name


def _lines(name: str) -> list[str]:
    """The prompts of a file, one a line."""
    text = _read("--prompts-file", name)
    if not text:
        raise ValueError(f"{_named(name)} must have a line for each prompt, and is empty")
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        where, line = f"{_named(name)}, line {number}", line.removesuffix("\r")
        if not line.strip():
            raise ValueError(f"{where} is empty, and each line must be a prompt")
        lines.append(_of_json(where, line) if name.endswith(".jsonl") else line)
    return lines


def _of_json(where: str, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a string of JSON: {error}") from error
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string of JSON, and is of type {type(value).__name__}")
    return _checked(where, value)


def encode(texts: list[str], tokenizer: Any, template: Any) -> list[Prompt]:
    """Prompts of texts, each of them a user's message if there is a `ChatTemplate`. ValueError for one of no tokens."""
    if template is not None:
        texts = [template.render([{"role": "user", "content": text}]) for text in texts]
    found = [Prompt(tokenizer.encode(text, add_special_tokens=False).ids, text) for text in texts]
    for number, prompt in enumerate(found, 1):
        if not prompt.ids:
            raise ValueError(f"prompt {number} (={prompt.text!r}) must have at least one token")
    return found


def warn_of_beginning(prompts: list[Prompt], beginning: list[int], tokenizer: Any) -> None:
    """A line on stderr if the checkpoint's texts have a beginning of special tokens that some raw prompt lacks."""
    lacking = [number for number, its in enumerate(prompts, 1) if its.ids[: len(beginning)] != beginning]
    if lacking:
        text = tokenizer.decode(beginning, skip_special_tokens=False)
        to_stderr(f"jmx: warning: this model's texts begin with {text!r}, and prompt {lacking[0]} does not")
