"""A directory of compiled programs, each in a file named by all that it depends on."""

import contextlib
import hashlib
import os
import pickle
import re
import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path

from jax.experimental import serialize_executable
from jax.stages import Compiled

from jmx.backends import register_handlers
from jmx.models.program_identity import process_identity
from jmx.selection.environment import Device
from jmx.util import atomic_files
from jmx.util.checks import check_path

_MAGIC = b"jmx compiled program 2\n"  # and then the sha256 of the rest
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


class ProgramStore:
    """Compiled programs in a directory, which jax.experimental.serialize_executable writes and reads.

    Programs are found again by processes with the same files of jmx, versions, options, tuned tables and devices.
    Files are read with pickle, which can run any code: as Python's own sources, the directory has to be one to which
    only the user writes.

    Args:
        directory: is made if it does not exist.

    Raises:
        TypeError: `directory` is not a path.
        PermissionError: others than the user may write to the directory.
        OSError: it cannot be made.
    """

    def __init__(self, directory: Path):
        directory = check_path("directory", directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise PermissionError(f"{directory} must belong to this user, and no one else may write to it")
        self.directory = directory

    def key(self, identity: str, signature: Hashable, devices: Sequence[Device]) -> str:
        """The name of the file of a program that runs on these devices, which are in the order of their mesh."""
        order = [device.id for device in devices]
        return hashlib.sha256(f"{process_identity()} {identity} {signature!r} {order}".encode()).hexdigest()

    def has(self, key: str) -> bool:
        """Whether there is a file for the key, which may be damaged."""
        return self._file(key).is_file()

    def load(self, key: str, devices: Sequence[Device]) -> Compiled | None:
        """The program, to be run on `devices`; None, with a warning, if its file is damaged or does not load."""
        file = self._file(key)
        try:
            content = file.read_bytes()
            start = len(_MAGIC) + hashlib.sha256().digest_size
            payload = content[start:]
            if content[:start] != _MAGIC + hashlib.sha256(payload).digest():
                raise ValueError("the file is damaged")
            targets, program = pickle.loads(payload)
            register_handlers(targets)
            return serialize_executable.deserialize_and_load(*program, execution_devices=[*devices])
        except Exception as e:  # of any kind: XLA's too
            warnings.warn(f"{file} is not used, and the program is compiled again: {e}", stacklevel=2)
            with contextlib.suppress(OSError):
                file.unlink()
            return None

    def save(self, key: str, compiled: Compiled) -> None:
        """Writes the program; a warning if that is not possible."""
        try:
            targets = {*_TARGET.findall(compiled.as_text() or "")}
            payload = pickle.dumps((targets, serialize_executable.serialize(compiled)))
            atomic_files.write(self._file(key), _MAGIC + hashlib.sha256(payload).digest() + payload)
        except FileExistsError:  # another process was faster
            return
        except Exception as e:  # of any kind: XLA's too
            warnings.warn(f"a compiled program is not kept in {self.directory}: {e}", stacklevel=2)

    def _file(self, key: str) -> Path:
        return self.directory / f"{key}.jmxprogram"
