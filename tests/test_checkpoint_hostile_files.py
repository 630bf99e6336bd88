"""Checkpoint files that are not files, never end, or cannot be opened: each is named, without delay, in one line."""

import json
import os
import pathlib
import shutil
import socket
import stat
import struct
import time

import numpy as np
import pytest

from jmx import cli
from jmx.checkpoint import CheckpointError, compressed_tensors, gpt_oss, quantizing, shards
from jmx.numerics.formats import FORMATS
from tests.float_checkpoints import write

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
DATA = pathlib.Path(__file__).parent / "data"
HUGE = 40 << 30  # bytes, of which none is on the disk


def sparse(file, start=b""):
    with file.open("wb") as stream:
        stream.write(start)
        stream.truncate(HUGE)


def a_socket(file):
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


def deep(file, depth):
    file.write_bytes(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")


# What is in a file's place: how it is made, and its error message.
HOSTILE = {
    "pipe": (os.mkfifo, "must be a regular file, but is a pipe"),
    "directory": (pathlib.Path.mkdir, "must be a regular file, but is a directory"),
    "socket": (a_socket, "must be a regular file, but is a socket"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "must be a regular file, but is a device"),
    "loop": (lambda file: file.symlink_to(file.name), "cannot be read: Too many levels of symbolic links"),
    "dangling link": (lambda file: file.symlink_to("nowhere"), "the file is missing: a link to 'nowhere'"),
    "empty": (lambda file: file.write_bytes(b""), "must"),
    "sparse": (sparse, "must"),
    "deep": (lambda file: deep(file, 10_000), "must"),
    "a little deep": (lambda file: deep(file, 150), "must"),
    "surrogate": (lambda file: file.write_bytes(b'{"a": "\xed\xa0\x80"}'), "must"),
}


@pytest.fixture
def published(tmp_path):
    """gpt-oss in shards, with an index and both configs."""
    path = tmp_path / "published"
    shutil.copytree(TINY, path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    found = shards.read_headers(TINY).values()
    shards.write(path, [shards.Output(t.name, t.dtype, t.shape, lambda t=t: [t.view()]) for t in found], 100_000)
    (path / "generation_config.json").write_text("{}")
    return path


@pytest.fixture
def floats(tmp_path, rng):
    """Float experts as Mixtral has them, in shards with an index."""
    shapes = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
    tensors = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": rng.standard_normal(shape, np.float32)
        for expert in range(16)
        for name, shape in shapes.items()
    }
    config = {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2, "hidden_act": "silu"}
    return write(tmp_path / "floats", tensors, config)


@pytest.fixture
def quantized(tmp_path):
    """A checkpoint that a tool wrote, with its quantization config in a separate file."""
    path = tmp_path / "quantized"
    shutil.copytree(DATA / "compressed_tensors" / "modelopt_nvfp4", path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["*.mlp.gate"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    return path


READERS = {
    "published": gpt_oss.Reader,
    "quantized": compressed_tensors.Reader,
    "floats": lambda path: quantizing.convert(path, path.parent / "out", FORMATS["nvfp4"]),
}
FILES = [
    ("published", "config.json"),
    ("published", "generation_config.json"),
    ("published", shards.INDEX),
    ("published", "a shard"),
    ("quantized", "config.json"),
    ("quantized", "hf_quant_config.json"),
    ("quantized", shards.SINGLE),
    ("floats", "config.json"),
    ("floats", shards.INDEX),
    ("floats", "a shard"),
]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(("checkpoint", "name"), FILES)
def test_what_is_no_file_of_a_checkpoint_is_named_by_readers_and_commands(checkpoint, name, kind, request, capsys):
    path = request.getfixturevalue(checkpoint)
    make, message = HOSTILE[kind]
    file = sorted(path.glob("*.safetensors"))[1] if name == "a shard" else path / name
    file.unlink()
    make(file)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        READERS[checkpoint](path)
    text = str(raised.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert not (path.parent / "out").exists()
    capsys.readouterr()
    for argv in (["explain", "--checkpoint", path], ["convert", path, path.parent / "out", "--to", "hf"]):
        if argv[0] == "convert" and checkpoint != "published":
            argv[3:] = ["--quantize", "nvfp4"]
        if (argv[0], checkpoint) == ("explain", "published") and name not in ("config.json", "generation_config.json"):
            continue  # the config is all that it needs
        if (argv[0], checkpoint) == ("convert", "quantized") and name != "config.json":
            continue  # it has nothing to round
        assert cli.main([*map(str, argv)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"jmx: error: {file}: ")
        assert len(err) < 1000
    assert time.monotonic() - start < 5  # nothing is waited for, nor read without end
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize(("checkpoint", "name"), FILES)
def test_a_file_that_may_not_be_read_is_named(checkpoint, name, request, monkeypatch):
    path = request.getfixturevalue(checkpoint)
    file = sorted(path.glob("*.safetensors"))[1] if name == "a shard" else path / name
    opened = pathlib.Path.open

    def refuse(self, *arguments, **options):  # root may read all files, so that their modes refuse it nothing
        if self == file:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(CheckpointError) as raised:
        READERS[checkpoint](path)
    assert str(raised.value) == f"{file}: the file cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("x" * 10_000, "tensor 'a' must be in a file, not in 'xx"),
        ("a\0b", "must be in a file, not in 'a\\x00b': embedded null byte"),
        ("\ud800", "must be in a file, not in '\\ud800': 'utf-8' codec can't encode"),
        ("", "must be in a file of the same directory, not ''"),
        ("..", "must be in a file of the same directory, not '..'"),
        (".", "must be in a file of the same directory, not '.'"),
        ("a/b", "must be in a file of the same directory, not 'a/b'"),
        ("/dev/zero", "must be in a file of the same directory"),
        ({}, "must be in a file of the same directory, not {}"),
        (None, "must be in a file of the same directory, not None"),
    ],
)
def test_names_that_no_shard_can_have_are_refused_by_the_index(place, message, tmp_path):
    index = tmp_path / shards.INDEX
    index.write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(CheckpointError) as raised:
        shards.read_headers(tmp_path)
    assert str(raised.value).startswith(f"{index}: ")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("length", [0, 2, shards.MAX_JSON_BYTES + 1, HUGE - 8, (1 << 64) - 1])
def test_a_header_is_never_read_beyond_what_it_may_have(length, tmp_path, monkeypatch):
    file = tmp_path / shards.SINGLE
    sparse(file, struct.pack("<Q", length) + b"{}")
    read = []
    reading = shards._read_bytes
    monkeypatch.setattr(shards, "_read_bytes", lambda *args: read.append(args[2]) or reading(*args))
    message = {0: "must be JSON", 2: "accounts for 10", (1 << 64) - 1: "must end within the file"}
    with pytest.raises(CheckpointError, match=message.get(length, "must have at most 100000000")):
        shards.read_headers(tmp_path)
    assert sum(read) <= 10


def test_a_header_may_be_as_long_as_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_JSON_BYTES", 1000)
    file = tmp_path / shards.SINGLE
    for size, fits in ((1000, True), (1001, False)):
        file.write_bytes(struct.pack("<Q", size) + b"{}".ljust(size))
        (tmp_path / "config.json").write_bytes(b"{}".ljust(size))
        if fits:
            assert shards.read_headers(tmp_path) == shards.read_object(tmp_path / "config.json") == {}
            continue
        with pytest.raises(CheckpointError, match="the header has 1001 bytes, but must have at most 1000"):
            shards.read_headers(tmp_path)
        with pytest.raises(CheckpointError, match="the file has 1001 bytes, but must have at most 1000"):
            shards.read_object(tmp_path / "config.json")


def test_nesting_is_limited_where_python_still_reads_it(tmp_path):
    file = tmp_path / "config.json"
    deep(file, shards.MAX_NESTING - 1)
    assert json.dumps(shards.read_json(file), indent=2)
    deep(file, shards.MAX_NESTING)
    with pytest.raises(CheckpointError, match="must nest arrays and objects at most 100 deep"):
        shards.read_json(file)


@pytest.mark.parametrize("again", [1, 4, 10_000])
def test_keys_that_are_repeated_are_found_in_one_pass(again, tmp_path):
    keys = [*map(str, range(50_000)), *map(str, range(again))]
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="must name each key once, but names") as raised:
        shards.parse_json(tmp_path, ("{" + ",".join(f'"{key}": 1' for key in keys) + "}").encode(), "the header")
    assert time.monotonic() - start < 5
    assert str(raised.value).endswith("again")
    assert ("others" in str(raised.value)) == (again > 3)
    assert len(str(raised.value)) < 200 + len(str(tmp_path))


def test_many_shards_are_read_in_one_pass(tmp_path):
    """Names times shards is not how long it takes, with an index or without."""
    count = 2000
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        header = json.dumps({str(number): {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    start = time.monotonic()
    assert len(shards.read_headers(tmp_path)) == count
    (tmp_path / shards.INDEX).write_text(json.dumps({"weight_map": {str(n): name for n, name in enumerate(names)}}))
    assert len(shards.read_headers(tmp_path)) == count
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "file"])
def test_a_directory_that_cannot_be_is_named(name, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for read in (gpt_oss.Reader, compressed_tensors.Reader, shards.read_headers):
        with pytest.raises(CheckpointError):
            read(tmp_path / name)
    capsys.readouterr()
    assert cli.main(["explain", "--checkpoint", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_directory_that_may_not_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        shards.read_headers(tmp_path)


def test_links_to_files_are_followed(published):
    """As in the cache of Hugging Face's hub."""
    blobs = published.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(published.iterdir())):
        if file.is_file():
            file.rename(blobs / str(number))
            file.symlink_to(blobs / str(number))
    assert stat.S_ISLNK(os.lstat(published / "config.json").st_mode)
    assert gpt_oss.Reader(published).config == gpt_oss.read_config(TINY)
