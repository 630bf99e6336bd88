"""What `jmx chat` runs: lines of a user, and a model's answers to them."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import jax.numpy as jnp

import jmx
from jmx.backends import registered_backends
from jmx.cli import sampling_arguments
from jmx.cli.common import EXIT_OK, check_known, to_stderr
from jmx.models import Runner, hub, load
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.dialog import Dialog, Piece
from jmx.models.text.harmony import FINAL
from jmx.models.text.stops import StopStrings
from jmx.models.text.stream import read_tokenizer

_PROMPT = "> "
_HELP = "Ctrl-C ends an answer, Ctrl-D or /exit the conversation."


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    dialog = _start(arguments)
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lets `input` edit lines, and recall earlier ones)
        to_stderr(_HELP)
    for line in _lines(on_terminal):
        if line.strip() == "/exit":
            break
        if line.strip():
            _answer(dialog, line)
    return EXIT_OK


def _start(arguments: argparse.Namespace) -> Dialog:
    """The dialog of parsed arguments. All of them are checked before weights are read."""
    if arguments.format is not None:
        check_known("--format", arguments.format, jmx.FORMATS)
    if arguments.backend is not None:
        check_known("--backend", arguments.backend, [backend.name for backend in registered_backends()])
    if arguments.max_new_tokens < 1:
        raise ValueError(f"`--max-new-tokens` (={arguments.max_new_tokens}) must be at least 1")
    try:
        StopStrings(arguments.stop)
    except ValueError as error:
        raise ValueError(f"`--stop`: {error}") from error
    sampler = sampling_arguments.sampler(arguments)
    directory = hub.find(arguments.model)
    if not directory.is_dir():
        raise FileNotFoundError(f"`MODEL` (={arguments.model}) is not a directory")
    template = ChatTemplate.read(directory)
    tokenizer = read_tokenizer(directory)
    model = load(
        directory,
        progress=True,
        format=None if arguments.format is None else jmx.FORMATS[arguments.format],
        dtype=jnp.dtype(arguments.dtype),
        backend=arguments.backend,
    )
    return Dialog(
        Runner(model),
        tokenizer,
        template,
        sampler=sampler,
        max_new_tokens=arguments.max_new_tokens,
        system=arguments.system,
        stops=arguments.stop,
    )


def _lines(on_terminal: bool) -> Iterator[str]:
    """The lines of a user, until Ctrl-D or the end of a file. On a terminal, Ctrl-C begins a line again."""
    if not on_terminal:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:  # a signal that ends the command
                raise
            print()


def _answer(dialog: Dialog, message: str) -> None:
    """Prints an answer as it arrives. A message that the template rejects is reported, and the dialog goes on."""
    with _interruptible() as interrupted, contextlib.closing(dialog.answer(message)) as parts:
        try:
            for part in parts:
                _show(part)
                if interrupted.is_set():
                    break
        except ValueError as error:
            to_stderr(f"jmx: error: {' '.join(str(error).split())}")
    print(flush=True)


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
