"""`jmx --print-completion SHELL`: a completion script for a shell, which shtab makes from the parser."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jmx.cli.output import EXIT_NO, EXIT_OK

SHELLS = ("bash", "zsh", "tcsh")
_DIRECTORIES = ("DIR", "IN", "OUT")  # metavars
_FILES = ("FILE",)


class PrintCompletion(argparse.Action):
    """Prints the script and exits. The names to complete come from jmx, which is imported here since it imports jax."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, choices=SHELLS, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(EXIT_NO, f"jmx: error: `{option_string}` needs shtab: pip install 'jmx-moe[completion]'\n")
        known = _known_names()
        for action in _actions(parser):
            if action.metavar in (*_DIRECTORIES, *_FILES):
                action.complete = shtab.DIRECTORY if action.metavar in _DIRECTORIES else shtab.FILE  # pyright: ignore
            elif (names := known.get(action.dest)) is not None:
                action.choices = [*names()]
        print(shtab.complete(parser, values))
        parser.exit(EXIT_OK)


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _known_names() -> dict[str, Callable[[], Iterable[str]]]:
    """Names that arguments accept, by the argument's `dest`."""
    from jmx.backends import registered_backends
    from jmx.checkpoint.quantizing import WRITABLE
    from jmx.cli.random_model import PUBLISHED
    from jmx.numerics import formats, layouts
    from jmx.perf import shapes
    from jmx.selection.environment import known_devices

    return {
        "backend": lambda: [backend.name for backend in registered_backends()],
        "device": known_devices,
        "engine": lambda: ["cutlass"],
        "format": lambda: formats.FORMATS,
        "layout": lambda: ["auto", *layouts.LAYOUTS],
        "model": lambda: shapes.MODELS,
        "quantize": lambda: WRITABLE,
        "random": lambda: PUBLISHED,
        "routing": lambda: shapes.ROUTINGS,
        "shape": lambda: shapes.MODELS,
    }
