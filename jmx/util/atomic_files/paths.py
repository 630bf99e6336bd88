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
    """Results of one kind, which may replace an earlier one of that kind.

    Args:
        name: what one is, such as "a report of `jmx bench`".
        fault: says why the regular file or directory at a path is none, or gives None where it is one.
        directory: whether one is a directory.
    """

    name: str
    fault: Callable[[Path], str | None]
    directory: bool = False

    def check(self, path: Path) -> None:
        """FileExistsError, which says why, unless what is at `path` is one."""
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
    """Raises what `new_path` raises before anything is written."""
    path = place(path)
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
    """ValueError where one of `paths`, by the names of arguments, is another one, or holds or lies in it.

    Symbolic links are followed; so are those in a directory, as what is read there lies where they point to.
    """
    given = {name: path for name, path in paths.items() if path is not None}
    for (name, path), (other, its) in itertools.permutations(given.items(), 2):
        if any(_holds(_real(place(path)), found) for found in _places(Path(its))):
            raise ValueError(
                f"`{name}` (={os.fspath(path)!r}) must not be, hold or lie in `{other}` (={os.fspath(its)!r})"
            )


def _places(path: Path) -> Iterator[Path]:
    """Where `path` is, and where the links in it point to."""
    yield _real(path)
    with contextlib.suppress(OSError):
        yield from (_real(entry) for entry in path.iterdir() if entry.is_symlink())


def _real(path: Path) -> Path:
    """As `Path.resolve`, but no error for a link to itself."""
    return Path(os.path.realpath(path))


def _holds(directory: Path, path: Path) -> bool:
    """Whether `path` is `directory` or lies in it, by names, and by what they are: a file system may have it twice."""
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


def place(path: str | os.PathLike[str]) -> Path:
    """The absolute path of the name that `path` ends with, which may be that of a link.

    Raises:
        ValueError: no file can have this name.
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
    """Errors of the system, such as a full disk, with the name of the file, which those of an open file lack."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(file)) from error
