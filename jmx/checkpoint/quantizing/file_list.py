"""The list of files that `convert` adds to its result, by which it later recognizes that result."""

import hashlib
from pathlib import Path
from typing import Any

from jmx.checkpoint import shards
from jmx.checkpoint.shards import CheckpointError
from jmx.util.atomic_files import Kind, write_json

FILE = "jmx-files.json"
_SCHEMA = "jmx.quantized-checkpoint/1"


def write_list(directory: Path) -> None:
    """Lists the files of a directory in `FILE`: sizes, and hashes; for weights the time of writing instead."""
    files = {file.name: _description(file) for file in sorted(directory.iterdir())}
    write_json(directory / FILE, {"schema": _SCHEMA, "files": files})


def _description(file: Path) -> dict[str, Any]:
    status = file.stat()
    found: dict[str, Any] = {"bytes": status.st_size}
    if file.suffix == ".safetensors":  # reading those would take minutes
        return found | {"written_ns": status.st_mtime_ns}
    with file.open("rb") as stream:
        return found | {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _fault(directory: Path) -> str | None:
    """Why `directory` differs from what `convert` wrote; None if it does not. Missing files are not reported."""
    file = directory / FILE
    if file.is_symlink() or not file.is_file():
        return f"it has no list {FILE} of the files that jmx wrote"
    try:
        contents = shards.read_object(file)
    except CheckpointError as error:
        return str(error)
    listed = contents.get("files")
    if contents.keys() != {"schema", "files"} or contents["schema"] != _SCHEMA or not isinstance(listed, dict):
        return f"its {FILE} is no list of the files that jmx wrote"
    for entry in sorted(directory.iterdir()):
        if entry.name != FILE and entry.name not in listed:
            return f"{entry.name!r} is not one of the files that jmx wrote"
        if entry.is_symlink() or not entry.is_file():
            return f"{entry.name!r} is not a regular file"
        if entry.name != FILE and _description(entry) != listed[entry.name]:
            return f"{entry.name!r} is not as jmx wrote it"
    return None


CHECKPOINT = Kind("a checkpoint that `jmx convert --quantize` wrote", _fault, directory=True)
