"""Renaming that replaces nothing, unlike `os.rename`: to a free name, and exchanging two names.

Linux has a system call for both, renameat2 (https://man7.org/linux/man-pages/man2/rename.2.html). Some file systems do
not support it (NFS), nor do other platforms: there the name is claimed first by making an empty file or directory,
which fails if the name exists.
"""

import contextlib
import ctypes
import errno
import functools
import os
from pathlib import Path
from typing import Any

_AT_FDCWD = -100  # paths are relative to the working directory
_NOREPLACE, _EXCHANGE = 1, 2
_NOT_HERE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}  # EPERM: in sandboxes that forbid the call


def rename_new(source: Path, target: Path) -> None:
    """Renames a file or directory to a free name. FileExistsError if the name exists."""
    if not _renameat2(source, target, _NOREPLACE):
        _claim_and_rename(source, target)


def exchange(source: Path, target: Path) -> bool:
    """Exchanges the names of two files or directories in one step; False if that is not supported here."""
    return _renameat2(source, target, _EXCHANGE)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """False if the platform or file system does not support the call."""
    function = _system_call()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    if (number := ctypes.get_errno()) in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))


@functools.cache
def _system_call() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, TypeError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return function


def _claim_and_rename(source: Path, target: Path) -> None:
    """`rename_new` without the system call; `target` is an empty file or directory for an instant."""
    is_directory = source.is_dir()
    if is_directory:
        target.mkdir()
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    claim = target.lstat()
    try:
        source.rename(target)  # over a directory it fails if that is no longer empty
    except BaseException:
        with contextlib.suppress(OSError):
            if is_directory:
                target.rmdir()  # only if it is empty
            elif os.path.samestat(target.lstat(), claim):
                target.unlink()
        raise
