import json
import re
import struct
import sys
from pathlib import Path

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import strategies as st

from jmx.checkpoint import shards
from jmx.checkpoint.progress import progress_bar
from jmx.checkpoint.shards import CheckpointError, Output

# Of those that the safetensors package can hand to numpy.
NUMPY_DTYPES = {"U8": np.uint8, "I32": np.int32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}


def random_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"a": (3, 5), "b.c": (7,), "scalar": (), "d": (2, 3, 4), "last": (64, 33)}
    dtypes = [np.dtype(rng.choice(["uint8", "int32", "float16", "float32"])) for _ in shapes]
    return {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


def outputs(tensors: dict[str, np.ndarray]) -> list[Output]:
    spelt = {np.dtype(dtype): name for name, dtype in shards.DTYPES.items()}
    return [Output(name, spelt[a.dtype], a.shape, lambda a=a: [a]) for name, a in tensors.items()]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def raw_file(path: Path, header: object, data: bytes, length: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


@hypothesis.given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__" and "\x00" not in name),
        st.tuples(st.sampled_from(sorted(NUMPY_DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
)
def test_headers_and_views_are_those_of_the_safetensors_package(tmp_path_factory, tensors, seed):
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in tensors.items():
        dtype = np.dtype(NUMPY_DTYPES[dtype])
        arrays[name] = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    directory = tmp_path_factory.mktemp("files")
    theirs, ours = directory / "theirs.safetensors", directory / shards.SINGLE
    safetensors.numpy.save_file(arrays, theirs, {"any": "note"})
    found = shards.read_header(theirs)
    assert found.keys() == arrays.keys()
    assert all(same(found[name].view(), array) for name, array in arrays.items())

    shards.write(directory, outputs(arrays), 1 << 30)
    with safetensors.safe_open(ours, "numpy") as reader:
        assert set(reader.keys()) == arrays.keys()
        assert all(same(reader.get_tensor(name), array) for name, array in arrays.items())


def test_every_dtype_survives_writing_and_reading(tmp_path, rng):
    arrays = {}
    for name, dtype in shards.DTYPES.items():
        bits = rng.integers(0, 2 if name == "BOOL" else 256, (4, 6 * dtype.itemsize), np.uint8)
        arrays[name] = bits.view(dtype)
    shards.write(tmp_path, outputs(arrays), 1 << 30)
    found = shards.read_headers(tmp_path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: name for name in arrays}
    assert all(same(found[name].view(), array) for name, array in arrays.items())


def test_views_do_not_write_to_the_file(tmp_path, rng):
    shards.write(tmp_path, outputs(random_tensors(rng)), 1 << 30)
    view = shards.read_headers(tmp_path)["a"].view()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_shards_keep_order_and_size(tmp_path, rng):
    tensors = random_tensors(rng)
    shards.write(tmp_path, outputs(tensors), 300)
    index = json.loads((tmp_path / shards.INDEX).read_text())
    assert list(index["weight_map"]) == list(tensors)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    for file in files:
        inside = shards.read_header(file).values()
        assert len(inside) == 1 or sum(tensor.nbytes for tensor in inside) <= 300
    found = shards.read_headers(tmp_path)
    assert all(same(found[name].view(), array) for name, array in tensors.items())


def test_writing_tells_the_bytes_that_are_done_and_refuses_too_few(tmp_path, rng):
    tensors = random_tensors(rng)
    done = []
    shards.write(tmp_path, outputs(tensors), 1 << 30, done.append)
    assert sum(done) == sum(array.nbytes for array in tensors.values())
    short = [Output("x", "U8", (10,), lambda: [np.ones(9, np.uint8)])]
    with pytest.raises(CheckpointError, match=r"tensor 'x' must have 10 bytes"):
        shards.write(tmp_path, short, 1 << 30)


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"x": ENTRY}, b"abc", None, "tensor 'x' must end within the file.*cut short"),
        ({"x": ENTRY}, b"abcde", None, "its header accounts for"),
        ({"x": ENTRY}, b"abcd", 1 << 40, "the header must end within the file"),
        ({"x": ENTRY}, b"abcd", 20, "the header must be JSON"),
        (b"{nonsense", b"", None, "the header must be JSON"),
        (b"\xff\xfe{}", b"", None, "the header must be JSON"),
        (b'{"x": ' + b"1" * 5000 + b"}", b"", None, "the header must be JSON: Exceeds the limit"),
        (b"[1]", b"", None, "the header must be a JSON object, not list"),
        ({"__metadata__": {"a": 1}}, b"", None, "the header's __metadata__ must be an object of strings"),
        ({"__metadata__": "a"}, b"", None, "the header's __metadata__ must be an object of strings"),
        (b'{"x": {}, "x": {}}', b"", None, r"must name each key once, but names \['x'\] again"),
        ({"x": {"dtype": "U8"}}, b"", None, "entry of tensor 'x' must have dtype, shape and data_offsets"),
        ({"x": 1}, b"", None, "entry of tensor 'x' must have dtype, shape and data_offsets"),
        ({"x": ENTRY | {"dtype": "F3"}}, b"abcd", None, "tensor 'x' has dtype 'F3', but must have one of"),
        ({"x": ENTRY | {"dtype": ["U8"]}}, b"abcd", None, "tensor 'x' has dtype"),
        ({"x": ENTRY | {"shape": [-4]}}, b"abcd", None, "tensor 'x' has shape"),
        ({"x": ENTRY | {"shape": [True]}}, b"abcd", None, "tensor 'x' has shape"),
        ({"x": ENTRY | {"shape": [2, 3]}}, b"abcd", None, "two that are 6 bytes apart"),
        ({"x": ENTRY | {"data_offsets": [4, 0]}}, b"abcd", None, "two that are 4 bytes apart"),
        ({"x": ENTRY | {"data_offsets": "04"}}, b"abcd", None, "two that are 4 bytes apart"),
        ({"x": ENTRY, "y": ENTRY}, b"abcd", None, "tensor 'y' begins at byte"),
        ({"x": ENTRY, "y": ENTRY | {"data_offsets": [5, 9]}}, b"abcdefghi", None, "tensor 'y' begins at byte"),
    ],
)
def test_broken_files_are_named(tmp_path, header, data, length, message):
    file = raw_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=re.escape(str(file)) + ".*" + message):
        shards.read_header(file)
    with pytest.raises(safetensors.SafetensorError):  # no file is refused that the package would read
        safetensors.safe_open(file, "numpy").__enter__()


@pytest.mark.parametrize("size", [0, 7])
def test_files_without_a_header_are_named(tmp_path, size):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x01" * size)
    with pytest.raises(CheckpointError, match=f"model.safetensors: the file has {size} bytes"):
        shards.read_header(file)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path, rng):
    shards.write(tmp_path, outputs(random_tensors(rng)), 1 << 30)
    tensor = shards.read_headers(tmp_path)["last"]
    with tensor.file.open("r+b") as stream:
        stream.truncate(tensor.offset + 10)
    with pytest.raises(CheckpointError, match="tensor 'last' can no longer be read"):
        tensor.view()


def test_directories_without_a_checkpoint_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: must be a directory"):
        shards.read_headers(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"must hold \*.safetensors files"):
        shards.read_headers(tmp_path)


def test_folders_inside_are_not_looked_into(tmp_path, rng):
    (tmp_path / "original").mkdir()
    tensors = random_tensors(rng)
    shards.write(tmp_path, outputs({"a": tensors["a"]}), 1 << 30)
    shards.write(tmp_path / "original", outputs(tensors), 1 << 30)
    assert list(shards.read_headers(tmp_path)) == ["a"]


def test_a_missing_shard_is_named_with_and_without_an_index(tmp_path, rng):
    shards.write(tmp_path, outputs(random_tensors(rng)), 100)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(file)) + ": the shard is missing"):
        shards.read_headers(tmp_path)
    (tmp_path / shards.INDEX).unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(file)) + ": the shard is missing"):
        shards.read_headers(tmp_path)


def test_shards_with_two_dashes_and_no_index_are_read(tmp_path, rng):
    tensors = random_tensors(rng)
    shards.write(tmp_path, outputs(tensors), 1000)
    (tmp_path / shards.INDEX).unlink()
    for file in tmp_path.glob("*.safetensors"):
        file.rename(file.with_name(file.name.replace("model-", "model--")))
    assert shards.read_headers(tmp_path).keys() == tensors.keys()
    (tmp_path / "model--00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model--00001-of-00002\.safetensors: the shard is missing"):
        shards.read_headers(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path, rng):
    tensors = random_tensors(rng)
    safetensors.numpy.save_file(tensors, tmp_path / "one.safetensors")
    safetensors.numpy.save_file({"a": tensors["a"]}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor 'a' must be in one file, but is in .*one"):
        shards.read_headers(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: "[", f"{shards.INDEX}: the file must be JSON"),
        (lambda index: json.dumps([index]), "must have `weight_map`"),
        (lambda index: json.dumps({"weight_map": {}}), "must have `weight_map`"),
        (
            lambda index: json.dumps({"weight_map": index | {"a": "../model.safetensors"}}),
            "tensor 'a' must be in a file",
        ),
        (lambda index: json.dumps({"weight_map": index | {"a": 3}}), "tensor 'a' must be in a file"),
        (lambda index: json.dumps({"weight_map": index | {"z": index["a"]}}), "tensor 'z' is missing"),
        (lambda index: json.dumps({"weight_map": {k: v for k, v in index.items() if k != "a"}}), "tensor 'a' is here"),
    ],
)
def test_an_index_that_is_wrong_is_named(tmp_path, rng, edit, message):
    shards.write(tmp_path, outputs(random_tensors(rng)), 1000)
    index = json.loads((tmp_path / shards.INDEX).read_text())["weight_map"]
    (tmp_path / shards.INDEX).write_text(edit(index))
    with pytest.raises(CheckpointError, match=message):
        shards.read_headers(tmp_path)


def test_the_bar_is_on_the_terminal_or_not_at_all(capsys, monkeypatch):
    for enabled in (True, False):
        with progress_bar("reading", 10, enabled) as advance:
            advance(10)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("reading", 10_000_000, True) as advance:
        advance(10_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading" in err
    assert "10.0/10.0 MB" in err
