"""Checks of a path before anything is written to it, and errors that name their file."""

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """A kind of result, which may replace an earlier result of the same kind.

    Args:
        name: what one is, such as "a report of `jmx bench`".
        fault: the reason why the regular file or directory at a path is not of this kind; None if it is.
        directory: whether it is a directory.
    """

    name: str
    fault: Callable[[Path], str | None]
    directory: bool = False

    def check(self, path: Path) -> None:
        """Raises FileExistsError, with the reason, unless the file at `path` is of this kind."""
        mode = path.lstat().st_mode
        if not (stat.S_ISDIR if self.directory else stat.S_ISREG)(mode):
            fault = f"it is {_file_type(mode)}"
        else:
            fault = self.fault(path)
        if fault is not None:
            raise FileExistsError(f"{path} must be {self.name}, to be replaced, but {fault}")


def _file_type(mode: int) -> str:
    types = {
        stat.S_ISLNK: "a symbolic link",
        stat.S_ISDIR: "a directory",
        stat.S_ISREG: "a regular file",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
    }
    return next((name for is_one, name in types.items() if is_one(mode)), "a device")


def check_new(path: str | os.PathLike[str], kind: Kind | None = None, *, overwrite: bool = False) -> None:
    """Raises the errors that `new_path` raises before anything is written."""
    path = absolute(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: it must be in a directory that exists")
    if not os.path.lexists(path):
        return
    if kind is None:
        raise FileExistsError(f"{path} must not exist yet: nothing is overwritten")
    if not overwrite:
        raise FileExistsError(f"{path} must not exist yet, unless `--overwrite` (`overwrite=True`) is given")
    kind.check(path)


def check_apart(**paths: str | os.PathLike[str] | None) -> None:
    """Raises ValueError if one of `paths`, by names of arguments, is the same as another one, contains it, or is in it.

    Symbolic links are followed, also those in a directory, whose targets are read.
    """
    given = {name: path for name, path in paths.items() if path is not None}
    for (name, path), (other, its) in itertools.permutations(given.items(), 2):
        if any(_holds(_real(absolute(path)), found) for found in _real_paths(Path(its))):
            raise ValueError(
                f"`{name}` (={os.fspath(path)!r}) must not be, hold or lie in `{other}` (={os.fspath(its)!r})"
            )


def _real_paths(path: Path) -> Iterator[Path]:
    """The real path of `path`, and the targets of the links in it."""
    yield _real(path)
    with contextlib.suppress(OSError):
        yield from (_real(entry) for entry in path.iterdir() if entry.is_symlink())


def _real(path: Path) -> Path:
    """As `Path.resolve`, without an error for a link to itself."""
    return Path(os.path.realpath(path))


def _holds(directory: Path, path: Path) -> bool:
    """Whether `path` is `directory` or in it, by names and by inodes: a file system may be mounted twice."""
    if path.is_relative_to(directory):
        return True
    try:
        itself = directory.stat()
    except OSError:
        return False
    for parent in (path, *path.parents):
        with contextlib.suppress(OSError):
            if os.path.samestat(itself, parent.stat()):
                return True
    return False


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path, in which a link as the last part is not followed.

    Raises:
        ValueError: not a valid file name.
    """
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        possible = False
    if not possible:
        raise ValueError(f"{os.fspath(path)!r} must be a name that a file can have")
    path = Path(path).absolute()
    return _real(path) if path.name in ("", "..") else path


@contextlib.contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """Adds the name of the file to errors of the system, such as a full disk, that have none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(file)) from error
