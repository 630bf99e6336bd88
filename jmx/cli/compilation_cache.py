"""Where commands keep compiled programs for later runs: jax's persistent compilation cache, and jmx' own beside it.

Commands that run whole models keep them by default, in this user's directory of caches. Others, such as `jmx tune`,
compile programs that no later run needs, and keep them only on request.
"""

import argparse
import os
import pathlib
from typing import TYPE_CHECKING

from jmx._version import __version__
from jmx.cli.output import to_stderr
from jmx.cli.parser import Parser

if TYPE_CHECKING:
    from jmx.models.program_store import ProgramStore


def add(parser: Parser) -> None:
    """Adds the options. They have no default, so that those before a command are not overwritten after it."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--compilation-cache",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="keep compiled programs in DIR, for later runs; without it `generate`, `chat` and `serve` keep them in "
        "this user's cache",
    )
    group.add_argument(
        "--no-compilation-cache",
        action="store_true",
        default=argparse.SUPPRESS,
        help="keep no compiled programs, and use none",
    )


def use(arguments: argparse.Namespace) -> None:
    """Sets jax's compilation cache as parsed arguments ask for.

    An option comes first, then what jax's own variables set, such as JAX_COMPILATION_CACHE_DIR, then the default, of
    commands with `keeps_programs`. A default directory that cannot be written is a warning.

    Raises:
        ValueError: the directory of `--compilation-cache` cannot be one.
    """
    if getattr(arguments, "no_compilation_cache", False):
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
    elif (directory := getattr(arguments, "compilation_cache", None)) is not None:
        _use_named(directory)
    elif getattr(arguments, "keeps_programs", False):
        _use_default()


def _use_named(directory: str) -> None:
    try:
        if not directory:
            raise ValueError("it has no name")
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ValueError(f"`--compilation-cache` (={directory!r}) cannot be a directory: {why}") from e
    _set(directory)


def _use_default() -> None:
    import jax

    from jmx.selection.tuning import cache_directory

    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    try:
        directory = cache_directory() / "compiled" / __version__  # another one's programs are of other files
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} may not be written to")
    except (OSError, RuntimeError) as e:
        _warn(e)
        return
    _set(str(directory))


def _warn(error: Exception) -> None:
    to_stderr(f"jmx: warning: compiled programs are not kept for later runs: {error}")


def program_store() -> "ProgramStore | None":
    """The store of a runner's programs, beside jax's cache; None, with a warning, if there cannot be one.

    jax's cache is keyed by what lowering a program returns, which takes as long as compiling it; the store's keys are
    known before.
    """
    import jax

    from jmx.models.program_store import ProgramStore

    directory = jax.config.jax_compilation_cache_dir
    if directory is None or not jax.config.jax_enable_compilation_cache or not os.path.isdir(directory):
        return None
    try:
        return ProgramStore(pathlib.Path(directory) / "programs")
    except OSError as e:
        _warn(e)
        return None


def _set(directory: str) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", directory)
    # Small programs, too: of a whole model there are dozens, each of which takes longer to compile than to read.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
