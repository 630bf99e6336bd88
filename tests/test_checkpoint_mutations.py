"""Corrupted checkpoints: every loader rejects them by name, or reads what is there.

What is read is held to three answers that the loaders have no part in: the safetensors package reads the same tensors
from the same files; written back they have the same bytes; and what no change touched is what it was before.
"""

import contextlib
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from conftest import SEED
from respelled_checkpoints import respelled
from test_checkpoint_compressed_tensors import write as write_tensors

from jmx.checkpoint import CheckpointError, compressed_tensors, gpt_oss, shards
from jmx.checkpoint.compressed_tensors.module import Module
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.gpt_oss import tensor_names
from tests import mutations
from tests.mutations import Files
from tests.test_checkpoint_gpt_oss import ORIGINAL_CONFIG, TINY, original_tensors, tensors_of

DATA = Path(__file__).parent / "data"
SECONDS = 10  # of this process: far more than any file here takes, and far less than an endless one
MEMORY = 2 << 30  # above what the process has
CHUNKS = 200
COUNT = int(os.environ.get("JMX_MUTATIONS", "200000"))  # of the slow test

# By what it is of, a tensor or an expert: of its weights, and of its inputs if it has some, the format and the bytes.
Loaded = Mapping[str, list[tuple[str, bytes]]]
Packages = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Subject:
    """A sound checkpoint, and how it is loaded.

    Args:
        files: its files.
        inner: whether the loader reads all of a tensor.
        load: reads all that the loader gives, and asserts that it is what the package found in the files.
        parts: what a tensor is part of, as a key of what `load` gives.
    """

    files: Files
    inner: Callable[[str], bool]
    load: Callable[[Path, Packages], Loaded]
    parts: Callable[[str], str]


# compressed-tensors, ModelOpt, Quark, and FP8 by Qwen


def load_compressed(directory: Path, packages: Packages) -> Loaded:
    reader, found = compressed_tensors.Reader(directory, "interleaved"), {}
    for name, tensor in reader.tensors.items():
        assert [*tensor.shape] == packages[name]["shape"]
        assert tensor.dtype == packages[name]["dtype"]
        assert tensor.view().tobytes() == packages[name]["data"]
    assert reader.tensors.keys() == packages.keys()
    for name, layer in reader.layers.items():
        arrays = {key: array.whole() for key, array in layer.arrays().items()}
        scales = {role: its for role in layer.modules if (its := layer.static_scales(role)) is not None}
        for expert in range(layer.num_experts):
            found[f"{name}.{expert}."] = [
                (f"{layer.format.name} {layer.scheme.storage}", bytes_of(expert, arrays)),
                (str(layer.scheme.inputs), bytes_of(expert, scales)),
            ]
        for module in layer.quantized:
            again = module_tensors(module.scheme, module.weight(), module.kept())
            assert again.keys() == module.pieces.keys()
            for key, array in again.items():
                assert array.tobytes() == module.pieces[key].view().tobytes(), module.pieces[key].tensor.name
    if not found:
        assert any(".experts." in name for name in reader.tensors)
        raise CheckpointError(directory, "holds no quantized experts")  # as `reader.layer` would say, by name
    return found


def bytes_of(expert: int, arrays: Mapping[str, np.ndarray]) -> bytes:
    """What arrays hold of an expert, with their names, dtypes and shapes."""
    return b"".join(f"{key} {a.dtype} {a.shape}".encode() + a[expert].tobytes() for key, a in arrays.items())


def expert_of(name: str) -> str:
    """Its name and a dot; of all, where that is before it."""
    front, middle, rest = name.partition(".experts.")
    expert = rest.partition(".")[0]
    return f"{front}{middle}{expert}." if expert.isdigit() else front + middle


def compressed(directory: Path) -> Subject:
    return of_experts(mutations.read(directory))


def of_experts(files: Files) -> Subject:
    return Subject(files, lambda name: ".experts." in name, load_compressed, expert_of)


def modelopt_older(directory: Path) -> Files:
    """The same as older versions of ModelOpt wrote it: the quantization config is in a separate file only."""
    files = mutations.read(directory)
    config = json.loads(files[mutations.CONFIG])
    del config["quantization_config"]
    said = (directory / mutations.QUANTIZATION).read_bytes()
    return files | {mutations.CONFIG: json.dumps(config).encode(), mutations.QUANTIZATION: said}


# gpt-oss, in both forms


def load_gpt_oss(directory: Path, packages: Packages) -> Loaded:
    reader = gpt_oss.Reader(directory)
    found: dict[str, bytes] = {}
    shapes: dict[str, str] = {}
    for name in tensor_names.shapes(reader.config):
        view, (_, there) = reader.store.view(name), reader.store.where(name)
        reader.check_scales(name, view)
        found[there] = found.get(there, b"") + view.tobytes()
        shapes[there] = f"{shapes.get(there, '')} {view.dtype} {view.shape}"
    assert found.keys() == packages.keys()
    for name, raw in found.items():
        assert raw == packages[name]["data"], name
    return {name: [("", raw + shapes[name].encode())] for name, raw in found.items()}


def original() -> Files:
    arrays = original_tensors(tensors_of(TINY))
    config = mutations.spell(mutations.Object([*map(list, ORIGINAL_CONFIG.items())]))
    return {shards.SINGLE: safetensors.numpy.save(arrays), mutations.CONFIG: config.encode()}


def whole(files: Files) -> Subject:
    return Subject(files, lambda name: True, load_gpt_oss, lambda name: name)


@cache
def subjects() -> dict[str, Subject]:
    goldens = [path for path in sorted((DATA / "compressed_tensors").iterdir()) if path.is_dir()]
    goldens += [DATA / "qwen3_moe" / name for name in ("nvfp4", "fp8_block", "w4a16")]
    found = {f"{path.parent.name}_{path.name}": compressed(path) for path in goldens}
    with tempfile.TemporaryDirectory() as folder:
        for name, (arrays, config) in respelled().items():
            found[name] = compressed(write_tensors(Path(folder, name), arrays, config))
    found["modelopt_older"] = of_experts(modelopt_older(DATA / "compressed_tensors" / "modelopt_nvfp4"))
    return found | {"gpt_oss": whole(mutations.read(TINY)), "gpt_oss_original": whole(original())}


# One mutation


@pytest.mark.costly
def test_what_is_sound_is_read(tmp_path):
    for name, subject in subjects().items():
        assert baseline(name, tmp_path / name), name
        if shards.INDEX not in subject.files:
            write(tmp_path / f"{name}_split", mutations.split(subject.files, 3))
            assert subject.load(tmp_path / f"{name}_split", read_by_package(tmp_path / f"{name}_split"))


def test_older_files_of_modelopt_are_read_as_its_others(tmp_path):
    older, other = (baseline(name, tmp_path / name) for name in ("modelopt_older", "compressed_tensors_modelopt_nvfp4"))
    assert older == other


_BASELINES: dict[str, Loaded] = {}


def baseline(name: str, directory: Path) -> Loaded:
    if name not in _BASELINES:
        write(directory, subjects()[name].files)
        _BASELINES[name] = subjects()[name].load(directory, read_by_package(directory))
    return _BASELINES[name]


def write(directory: Path, files: Files) -> None:
    """The files, and no others. Each anew: what is mapped stays as it was."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for name, raw in files.items():
        (directory / name).write_bytes(raw)


def read_by_package(directory: Path) -> dict[str, dict[str, object]]:
    """All tensors by name: dtype, shape and data, as the safetensors package reads them."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: its for file in files for name, its in safetensors.deserialize(file.read_bytes())}


def check(name: str, number: int, directory: Path) -> bool:
    """Whether one mutation, that which a name and a number stand for, was read.

    AssertionError, saying what was done, where it should not have been, or not so.
    """
    subject, rng = subjects()[name], random.Random(f"{SEED} {name} {number}")
    expected = baseline(name, directory)
    files = subject.files
    if shards.INDEX not in files and rng.random() < 0.3:
        files = mutations.split(files, rng.choice([2, 3]))
    draft = mutations.mutate(files, subject.inner, rng)
    changed = draft.files()
    write(directory, changed)
    start = time.process_time()
    where = f"JMX_TEST_SEED={SEED} {name} {number}: {'; '.join(draft.did)}"
    packages, found, named = _Packages(directory), None, False
    try:
        found = subject.load(directory, packages)
    except CheckpointError as error:
        named = str(error).startswith(str(directory))
    except BaseException as error:
        raise AssertionError(f"{where}: {error!r:.300}") from error
    finally:
        assert time.process_time() - start < SECONDS, where
    if found is None:
        assert named, f"{where}: the error names no file"
        return False
    assert not draft.refused, f"{where}: it was read"
    touched = {subject.parts(tensor) for tensor in draft.touched}
    for part in expected if "*" not in draft.touched else ():
        assert part in found, f"{where}: {part} was not read"
        mine = part in touched or part.rpartition(".experts.")[0] + ".experts." in touched
        for now, before in zip(found[part], expected[part], strict=True):
            # A config that names another format makes others of the same tensors, where both are stored so (INT4 a
            # byte, and GPTQ's zero points, which its older files hold less one). Of inputs in a format that is not
            # known no scales are read.
            other = draft.reread and now[0] != before[0]
            assert mine or other or now == before, f"{where}: {part} was not touched"
    return True


class _Packages(dict[str, dict[str, object]]):
    """What the safetensors package reads, once it is asked for: it need not read what is refused."""

    def __init__(self, directory: Path):
        super().__init__()
        self._directory: Path | None = directory

    def _read(self) -> None:
        if self._directory is not None:
            found, self._directory = read_by_package(self._directory), None
            self.update(found)

    def __getitem__(self, name: str) -> dict[str, object]:
        self._read()
        return super().__getitem__(name)

    def keys(self):
        self._read()
        return super().keys()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Within it, what asks for gigabytes gets none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(numbers: range, directory: Path) -> None:
    """Mutations by their numbers, of all subjects in turn."""
    names = [*subjects()]
    with little_memory():
        read = sum(check(names[number % len(names)], number, directory) for number in numbers)
    assert read > len(numbers) // 20, "a loader that refuses everything would not be seen"


def test_mutated_files_are_refused_by_name_or_read_as_they_are(tmp_path, rng, request):
    """A run that draws cases takes a fifth of them, another one each time."""
    size = 200
    parts = [int(rng.integers(5))] if request.config.getoption("--drawn") else range(5)
    for part in parts:
        run(range(part * size, (part + 1) * size), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_mutated_files_are_refused_by_name_or_read_as_they_are(tmp_path, chunk):
    size = COUNT // CHUNKS
    run(range(chunk * size, (chunk + 1) * size), tmp_path)


def zeros(tensor: shards.Tensor) -> np.ndarray:
    return np.zeros(tensor.shape, shards.DTYPES[tensor.dtype])


def trusting(file: Path, name: str, entry: dict[str, Any]) -> tuple[int, int, str, tuple[int, ...]]:
    return *entry["data_offsets"], entry["dtype"], (*entry["shape"],)


@pytest.mark.parametrize(
    ("owner", "name", "careless", "fault"),
    [
        (shards.Tensor, "view", zeros, None),
        (shards, "_entry", trusting, None),
        (Module, "_positive", lambda module, piece, **_: piece.view(), "scale"),
        (Module, "_order", lambda module: np.arange(module.shape[1], dtype=np.int32), "g_idx"),
    ],
    ids=["bytes", "headers", "scales", "order"],
)
def test_the_checks_see_what_a_careless_loader_does_not(tmp_path, monkeypatch, owner, name, careless, fault):
    for subject in subjects():
        baseline(subject, tmp_path / "sound" / subject)
    monkeypatch.setattr(owner, name, careless)
    with pytest.raises(AssertionError, match=fault):
        run(range(1000), tmp_path / "mutated")
