"""Safetensors files: headers, memory-mapped tensors, writing, and errors that name the file and the tensor.

A file is an 8 byte little-endian length, a JSON header of that length, and the tensors' bytes; see the safetensors
format, https://github.com/huggingface/safetensors#format. This module reads headers itself, instead of the safetensors
package, for three reasons: the errors of the package name neither file nor tensor, its numpy arrays lack the 8-bit
floats, and its writer needs all tensors in memory at once.
"""

import contextlib
import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jmx.util.atomic_files import named_errors, write_json
from jmx.util.checks import check_int
from jmx.util.typing import Shaped, UInt8

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
    }.items()
}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # not copied by a conversion, which writes its own
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
MAX_JSON_BYTES = 100_000_000  # of a header, the limit of the safetensors package, and of other JSON files
MAX_NESTING = 100  # of JSON: deeper than any config, and within the limits of Python's reader and writer
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_CHUNK = 1 << 24  # bytes read and written at a time


class CheckpointError(ValueError):
    """A checkpoint that is wrong or broken. The message names the file, the tensor or key, and the expectation.

    Attributes:
        file: the first part of the message.
        problem: the second part.
    """

    def __init__(self, file: str | os.PathLike[str], problem: str):
        super().__init__(f"{os.fspath(file)}: {problem}")
        self.file, self.problem = file, problem


@dataclass
class Buffered:
    """What is in memory already of the tensors of a checkpoint, which share this object.

    Attributes:
        find: returns the bytes of a tensor, or None; itself None unless `jmx.checkpoint.read_ahead` is reading.
    """

    find: "Callable[[Tensor], UInt8[np.ndarray, ' bytes'] | None] | None" = None


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is stored.

    Args:
        file: the safetensors file.
        name: its name there.
        dtype: in safetensors' spelling, a key of `DTYPES`.
        shape: row-major.
        offset: of its first byte from the start of the file.
        buffered: where its bytes may be in memory already.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    buffered: Buffered = field(default_factory=Buffered, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def view(self) -> Shaped[np.ndarray, "..."]:
        """The tensor as a read-only memory map of the file: bytes are read on access, and none is copied.

        If it was read ahead (see `jmx.checkpoint.read_ahead`), it is in memory of its own.
        """
        dtype = DTYPES[self.dtype]
        if not self.nbytes:
            return np.empty(self.shape, dtype)
        raw = None if self.buffered.find is None else self.buffered.find(self)
        if raw is None:
            try:
                raw = np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=(self.nbytes,))
            except (OSError, ValueError) as error:
                raise CheckpointError(self.file, f"tensor {self.name!r} can no longer be read: {error}") from error
        return raw.view(dtype).view(np.ndarray).reshape(self.shape)


# Reading


def read_json(file: Path) -> Any:
    """The contents of a JSON file. CheckpointError if it is missing, is not JSON or has more than `MAX_JSON_BYTES`."""
    size = _size(file)
    return parse_json(file, _read_json_bytes(file, 0, size, "the file"), "the file")


def read_object(file: Path) -> dict[str, Any]:
    """The contents of a JSON file that must hold an object; see `read_json`."""
    contents = read_json(file)
    if not isinstance(contents, dict):
        raise CheckpointError(file, f"must be a JSON object, not {type(contents).__name__}")
    return contents


def parse_json(file: Path, raw: bytes, what: str) -> Any:
    """Parses bytes of `file` as JSON.

    Raises:
        CheckpointError: the bytes are not JSON, name a key twice, or nest deeper than `MAX_NESTING`. It names `what`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        contents = dict(pairs)
        if len(contents) < len(pairs):
            count = Counter(key for key, _ in pairs)
            again = sorted(key for key in count if count[key] > 1)
            more = f" and {len(again) - 3} others" if len(again) > 3 else ""
            raise CheckpointError(file, f"{what} must name each key once, but names {again[:3]}{more} again")
        return contents

    try:
        contents = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if _nests_deeper(contents, MAX_NESTING):
            raise RecursionError
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(file, f"{what} must nest arrays and objects at most {MAX_NESTING} deep") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of more digits than int() reads
        raise CheckpointError(file, f"{what} must be JSON: {error}") from error
    return contents


def _nests_deeper(contents: Any, limit: int) -> bool:
    level = [contents]
    for _ in range(limit + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return True


def _size(file: Path) -> int:
    """The size of a regular file. CheckpointError for any other kind: a pipe may block, and a device may be endless."""
    with _errors_named(file):
        status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file, f"must be a regular file, but is {_KINDS.get(stat.S_IFMT(status.st_mode), 'none')}")
    return status.st_size


def _read_json_bytes(file: Path, start: int, size: int, what: str) -> bytes:
    if size > MAX_JSON_BYTES:
        raise CheckpointError(file, f"{what} has {size} bytes, but must have at most {MAX_JSON_BYTES}")
    return _read_bytes(file, start, size)


def _read_bytes(file: Path, start: int, size: int) -> bytes:
    with _errors_named(file), file.open("rb") as stream:
        stream.seek(start)
        return stream.read(size)


@contextlib.contextmanager
def _errors_named(file: Path) -> Iterator[None]:
    """Turns errors of the operating system into CheckpointErrors of `file`."""
    try:
        yield
    except FileNotFoundError as error:
        if file.is_symlink():
            raise CheckpointError(file, f"the file is missing: a link to {os.readlink(file)!r}") from error
        gguf = next(file.parent.glob("*.gguf"), None)
        rest = "" if gguf is None else f", and {gguf.name!r} beside it is GGUF, which is not read"
        raise CheckpointError(file, f"the file is missing{rest}") from error
    except OSError as error:
        raise CheckpointError(file, f"the file cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a name with a null character or a surrogate
        raise CheckpointError(file, f"the file cannot be read: {error}") from error


def read_header(file: Path, buffered: Buffered | None = None) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name, in the order of their bytes.

    Args:
        file: the file.
        buffered: of the checkpoint that it belongs to; None: of its own.

    Raises:
        CheckpointError: not a regular file; an invalid header (its length, which is at most `MAX_JSON_BYTES`, its JSON,
            or an entry); tensors that overlap or leave gaps; a file shorter or longer than its header states.
    """
    size = _size(file)
    if size < 8:
        raise CheckpointError(file, f"the file has {size} bytes, but must begin with 8 that give the header's length")
    length = int.from_bytes(_read_bytes(file, 0, 8), "little")
    start = 8 + length
    if start > size:
        raise CheckpointError(file, f"the header must end within the file, at byte {start} of {size}")
    header = parse_json(file, _read_json_bytes(file, 8, length, "the header"), "the header")
    if not isinstance(header, dict):
        raise CheckpointError(file, f"the header must be a JSON object, not {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(file, "the header's __metadata__ must be an object of strings")
    tensors, end, buffered = [], start, buffered or Buffered()
    for name, (begin, stop, dtype, shape) in sorted(
        ((name, _entry(file, name, entry)) for name, entry in header.items()), key=lambda item: item[1][:2]
    ):
        if start + begin != end:
            raise CheckpointError(
                file,
                f"tensor {name!r} begins at byte {start + begin}, but must begin at {end}, after the last one",
            )
        end = start + stop
        if end > size:
            raise CheckpointError(
                file, f"tensor {name!r} must end within the file, at byte {end} of {size}: the file is cut short"
            )
        tensors.append(Tensor(file, name, dtype, shape, start + begin, buffered))
    if end != size:
        raise CheckpointError(file, f"the file has {size} bytes, but its header accounts for {end}")
    return {tensor.name: tensor for tensor in tensors}


def _entry(file: Path, name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """Checks a header entry, and returns its first and last byte within the data, dtype and shape."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(file, f"the header's entry of tensor {name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(file, f"tensor {name!r} has dtype {dtype!r}, but must have one of {sorted(DTYPES)}")
    if not sizes(shape):
        raise CheckpointError(file, f"tensor {name!r} has shape {shape!r}, but must have a list of sizes")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if not sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            file, f"tensor {name!r} has data_offsets {offsets!r}, but must have two that are {nbytes} bytes apart"
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def read_headers(directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name: of the shards in its index, or of every safetensors file in `directory`.

    Only headers are read.

    Raises:
        CheckpointError: no directory, no file, a missing shard, an index that disagrees with the shards, a tensor in
            two files, or an error of `read_header`.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(directory, "must be a directory that holds a checkpoint")
    with _errors_named(directory):
        names = os.listdir(directory)
    if INDEX in names:
        return _read_index(directory)
    files = [directory / name for name in sorted(names) if name.endswith(".safetensors")]
    if not files:
        raise CheckpointError(directory, "must hold *.safetensors files, but holds none")
    _check_numbers(directory, files)
    tensors: dict[str, Tensor] = {}
    buffered = Buffered()
    for file in files:
        for name, tensor in read_header(file, buffered).items():
            if name in tensors:
                raise CheckpointError(file, f"tensor {name!r} must be in one file, but is in {tensors[name].file} too")
            tensors[name] = tensor
    return tensors


def _read_index(directory: Path) -> dict[str, Tensor]:
    index = directory / INDEX
    contents = read_json(index)
    places = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(index, "must have `weight_map`, an object that gives each tensor's file")
    expected: dict[str, set[str]] = {}
    for name, place in places.items():
        if not isinstance(place, str) or place in ("", "..") or Path(place).name != place:
            raise CheckpointError(index, f"tensor {name!r} must be in a file of the same directory, not {place!r}")
        expected.setdefault(place, set()).add(name)
    for place, names in expected.items():
        _check_shard(index, min(names), place)
    tensors: dict[str, Tensor] = {}
    buffered = Buffered()
    for place in sorted(expected):
        file = directory / place
        found = read_header(file, buffered)
        for name in sorted(expected[place] - found.keys()):
            raise CheckpointError(file, f"tensor {name!r} is missing, which {INDEX} places here")
        for name in sorted(found.keys() - expected[place]):
            raise CheckpointError(file, f"tensor {name!r} is here, but not in {INDEX}")
        tensors |= found
    return tensors


def _check_shard(index: Path, tensor: str, place: str) -> None:
    """CheckpointError if the file that the index names does not exist, or its name is invalid."""
    try:
        os.lstat(index.parent / place)
    except FileNotFoundError as error:
        raise CheckpointError(index.parent / place, f"the shard is missing, which {INDEX} names") from error
    except (OSError, ValueError) as error:  # too long; a null, or a surrogate
        why = getattr(error, "strerror", None) or error
        shown = reprlib.Repr(maxstring=100).repr(place)
        raise CheckpointError(index, f"tensor {tensor!r} must be in a file, not in {shown}: {why}") from error


def _check_numbers(directory: Path, files: Sequence[Path]) -> None:
    """CheckpointError if a numbered shard is missing, which without an index only the file names show."""
    matches = (_NUMBERED.fullmatch(file.name) for file in files)
    names = {file.name for file in files}
    for stem, width, count in dict.fromkeys((m["stem"], len(m["number"]), m["count"]) for m in matches if m):
        for number in range(1, int(count) + 1):
            name = f"{stem}-{number:0{width}}-of-{count}.safetensors"
            if name not in names:
                others = f"others of which are {stem}-*-of-{count}.safetensors"
                raise CheckpointError(directory / name, f"the shard is missing, {others}")


# Writing


@dataclass(frozen=True)
class Output:
    """A tensor to be written: name, dtype (a key of `DTYPES`), shape, and the arrays that its bytes consist of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Shaped[np.ndarray, "..."]]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def check_shard_size(max_shard_bytes: int) -> None:
    """ValueError for a size that `write` does not accept, to be raised before anything is read."""
    check_int("max_shard_bytes", max_shard_bytes, least=1)


def write(
    directory: Path, outputs: Sequence[Output], max_shard_bytes: int, advance: Callable[[int], object] = lambda _: None
) -> None:
    """Writes tensors into `directory`: one `model.safetensors`, or numbered shards and their index.

    Tensors keep their order. A shard holds at most `max_shard_bytes` of tensors, unless a single one is larger.
    `advance` is called with the number of bytes after each write.
    """
    shards: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if shards[-1] and filled + output.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.nbytes
    if len(shards) == 1:
        write_file(directory / SINGLE, shards[0], advance)
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, advance)
    places = {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard}
    total = sum(output.nbytes for output in outputs)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_file(file: Path, outputs: Sequence[Output], advance: Callable[[int], object] = lambda _: None) -> None:
    """Writes tensors into one file; `advance` as of `write`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by readers of the Hugging Face form
    end = 0
    for output in outputs:
        offsets = [end, end := end + output.nbytes]
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": offsets}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the tensors' bytes to 8
    with named_errors(file), file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for output in outputs:
            begin = stream.tell()
            for part in output.parts():
                raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                for at in range(0, raw.size, _CHUNK):
                    advance(stream.write(raw[at : at + _CHUNK].data))
            if stream.tell() - begin != output.nbytes:
                raise CheckpointError(file, f"tensor {output.name!r} must have {output.nbytes} bytes")
        stream.flush()
        os.fsync(stream.fileno())
