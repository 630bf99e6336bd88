"""What `jmx chat` runs: lines of a user, and a model's answers to them."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from jmx.checkpoint.peft import Reader
from jmx.cli import compilation_cache, model_arguments, sampling_arguments
from jmx.cli.output import EXIT_OK, to_stderr
from jmx.models import Model, Runner
from jmx.models.sources.protocol import Source
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.dialog import Dialog, Piece
from jmx.models.text.harmony import FINAL
from jmx.models.text.stream import read_tokenizer

_PROMPT = "> "
_COMMANDS = {"/clear": "forgets the conversation", "/help": "lists these", "/exit": "ends jmx, as Ctrl-D does"}
_GREETING = "Ctrl-C ends an answer, Ctrl-D the conversation; /help lists commands."
_ENDED = {"length": "--max-new-tokens", "context": "the end of the model's context; /clear begins a new conversation"}


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    dialog = _start(arguments)
    on_terminal = sys.stdin is not None and sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lets `input` edit lines, and recall earlier ones)
        to_stderr(_GREETING)
    for line in _lines(on_terminal):
        command = line.strip()
        if command == "/exit":
            break
        if command == "/clear":
            dialog.clear()
        elif command == "/help":
            to_stderr("\n".join(f"{name:8}{what}" for name, what in _COMMANDS.items()))
        elif command:
            _answer(dialog, line)
    return EXIT_OK


def _start(arguments: argparse.Namespace) -> Dialog:
    """The dialog of parsed arguments. All of them are checked before weights are read."""
    model_arguments.check(arguments)
    sampling_arguments.check_stops(arguments.stop)
    sampler = sampling_arguments.sampler(arguments)
    directory = model_arguments.find(arguments.model)
    template, tokenizer = ChatTemplate.read(directory), read_tokenizer(directory)
    source = model_arguments.source(arguments, directory)
    model = make_model(arguments, source, model_arguments.adapters(arguments, source))
    return Dialog(
        Runner(model, store=compilation_cache.program_store()),
        tokenizer,
        template,
        sampler=sampler,
        max_new_tokens=arguments.max_new_tokens,
        system=arguments.system,
        stops=arguments.stop,
        context_length=model_arguments.context_length(directory),
    )


def make_model(arguments: argparse.Namespace, source: Source, adapters: Reader | None) -> Model:
    """The model with its weights, if they fit beside the cache of one answer."""
    return model_arguments.make(arguments, source, adapters, [1])


def _lines(on_terminal: bool) -> Iterator[str]:
    """The lines of a user, until Ctrl-D or the end of a file. On a terminal, Ctrl-C begins a line again.

    Raises:
        ValueError: a line of a file is not text in the encoding of stdin.
    """
    if not on_terminal:
        try:
            yield from (line.rstrip("\n") for line in sys.stdin or ())
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin must be text in {error.encoding}: {error.reason} at byte {error.start}") from error
        return
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            to_stderr(f"jmx: error: the line must be text in {error.encoding}: {error.reason}")
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:  # a signal that ends the command
                raise
            print()


def _answer(dialog: Dialog, message: str) -> None:
    """Prints an answer as it arrives. A message that cannot be answered is reported, and the dialog goes on."""
    with _interruptible() as interrupted, contextlib.closing(dialog.answer(message)) as parts:
        try:
            channel = FINAL
            for part in parts:
                if channel not in ("", FINAL, part.channel):
                    print(file=sys.stderr)
                channel = part.channel
                _show(part)
                if interrupted.is_set():
                    break
        except ValueError as error:
            to_stderr(f"jmx: error: {' '.join(str(error).split())}")
            return
    print(flush=True)
    if dialog.finish_reason in _ENDED:
        to_stderr(f"jmx: the answer was ended by {_ENDED[dialog.finish_reason]}")


def _show(piece: Piece) -> None:
    """Prints what is for the user on stdout, and other channels, such as gpt-oss' analysis, dim on stderr."""
    if piece.channel == FINAL:
        print(piece.text, end="", flush=True)
    elif piece.text:
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        print(f"{dim}{piece.text}{plain}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; a second one raises KeyboardInterrupt.

    An exception at any place could lose the cache, which is donated at each step.
    """
    interrupted = threading.Event()

    def first(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield interrupted
        return
    signal.signal(signal.SIGINT, first)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
