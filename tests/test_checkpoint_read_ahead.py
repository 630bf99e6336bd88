"""Reading ahead: the same bytes in any order, a bounded number of them, and clear ends of what goes wrong."""

import contextlib
import errno
import gc
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jmx import models
from jmx.checkpoint import CheckpointError, gpt_oss, read_ahead, shards
from jmx.checkpoint.read_ahead import reading_ahead
from jmx.checkpoint.shards import Output, Tensor

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
DATA = Path(__file__).parent / "data"
SIZES = (1, 100, 0, 5000, 64, 4096, 9000, 3, 3, 3, 700, 1000)  # bytes


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("jmx read ahead")] == []


@pytest.fixture
def tensors(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of two files, read in pieces of 1024 bytes."""
    monkeypatch.setattr(read_ahead, "_PIECE", 1024)
    arrays = {f"t{i}": rng.integers(0, 256, size, np.uint8) for i, size in enumerate(SIZES)}
    outputs = [Output(name, "U8", array.shape, lambda array=array: [array]) for name, array in arrays.items()]
    shards.write(tmp_path, outputs, 12_000)
    found = shards.read_headers(tmp_path)
    assert len({tensor.file for tensor in found.values()}) == 2
    return [found[name] for name in arrays]


def maps(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.view().tobytes() for tensor in tensors]


@pytest.mark.parametrize("limit", [1, 3000, 1 << 30, None])
@pytest.mark.parametrize("order", ["same", "reverse", "random", "some"])
def test_bytes_are_those_of_the_files_in_any_order(tensors, rng, limit, order):
    expected = maps(tensors)
    places = [*range(len(tensors))]
    uses = {"same": places, "reverse": places[::-1], "random": rng.permutation(places), "some": places[::3]}[order]
    with reading_ahead(tensors, limit):
        for i in uses:
            view = tensors[i].view()
            assert view.tobytes() == expected[i]
            assert not view.size or (view.flags.writeable and view.ctypes.data % 64 == 0)
    assert maps(tensors) == expected


def test_views_of_one_tensor_share_memory_until_the_last_is_gone(tensors):
    (tensor,) = (each for each in tensors if each.nbytes == 9000)
    with reading_ahead(tensors):
        one, two = tensor.view(), tensor.view()
        assert np.shares_memory(one, two)
        del one, two
        assert not tensor.view().flags.writeable  # a map
        with reading_ahead(tensors):  # within another context, its threads read
            assert tensors[3].view().flags.writeable
        assert tensors[5].view().flags.writeable


def test_views_are_maps_outside_of_the_context_and_of_other_tensors(tensors):
    with reading_ahead(tensors[:4]):
        assert not tensors[5].view().flags.writeable
    assert not tensors[3].view().flags.writeable
    with reading_ahead([]):
        assert not tensors[3].view().flags.writeable


@pytest.mark.parametrize("limit", [1, 3000, 12_000])
def test_bytes_that_are_held_are_limited(tensors, limit):
    with read_ahead._Reads(tensors, limit) as reads:
        most = max(limit, max(SIZES))
        for tensor in (each for each in tensors if each.nbytes):
            time.sleep(0.01)
            assert reads._held <= most
            reads.take(tensor)
        assert reads._held == 0


# What goes wrong


def test_a_truncated_file_is_named(tensors):
    last = tensors[-1]
    os.truncate(last.file, last.offset + 10)
    end = rf"{last.file.name}: tensor '{last.name}' can no longer be read: the file now ends at byte {last.offset + 10}"
    with reading_ahead(tensors):
        tensors[0].view()
        with pytest.raises(CheckpointError, match=end):
            last.view()


def test_a_missing_file_is_named(tensors):
    os.unlink(tensors[-1].file)
    with reading_ahead(tensors), pytest.raises(CheckpointError, match=r"can no longer be read: No such file"):
        tensors[-1].view()


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            OSError(errno.EIO, "Input/output error"),
            CheckpointError,
            r"'t\d+' can no longer be read: Input/output error",
        ),
        (RuntimeError("a defect"), RuntimeError, "a defect"),
        (MemoryError("none left"), MemoryError, "none left"),
    ],
)
@pytest.mark.parametrize("calls", [0, 7])
def test_what_a_thread_raises_is_raised_where_the_bytes_are_needed(tensors, monkeypatch, error, raised, message, calls):
    fail_after(monkeypatch, calls, error)
    with reading_ahead(tensors), pytest.raises(raised, match=message):
        maps(tensors)


def test_memory_that_cannot_be_allocated_is_an_error(tensors, monkeypatch):
    def fail(*arguments: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(read_ahead._Batch, "start", fail)
    with pytest.raises(MemoryError), reading_ahead(tensors):
        tensors[0].view()


def test_threads_that_cannot_start_are_an_error(tensors, monkeypatch):
    start, started = threading.Thread.start, []

    def fail(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"), reading_ahead(tensors):
        pass


def fail_after(monkeypatch: pytest.MonkeyPatch, calls: int, error: BaseException) -> None:
    """Reads raise an error after some."""
    read, lock, left = os.preadv, threading.Lock(), [calls]

    def preadv(*arguments: Any) -> int:
        with lock:
            left[0] -= 1
        if left[0] < 0:
            raise error
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)


@contextlib.contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A read that does not return until the process has got SIGINT."""
    read, done = os.preadv, threading.Event()

    def preadv(*arguments: Any) -> int:
        done.wait(10)
        return read(*arguments)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        done.set()

    monkeypatch.setattr(os, "preadv", preadv)
    timer = threading.Timer(0.1, interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in a shell's background ignores it
    gc.disable()  # Python ignores an exception in a callback of its collector, and hypothesis has one
    timer.start()
    try:
        yield
    finally:
        timer.join()
        gc.enable()
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_waiting(tensors, monkeypatch):
    with interrupted(monkeypatch), pytest.raises(KeyboardInterrupt), reading_ahead(tensors):
        tensors[0].view()


# Whole models


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "gpt_oss": lambda _: TINY,
    "gpt_oss original": lambda folder: converted(folder, "original"),
    "gpt_oss orbax": lambda folder: converted(folder, "orbax"),
    **{f"qwen3_moe {name}": lambda _, name=name: DATA / "qwen3_moe" / name for name in ("bf16", "nvfp4", "w4a16")},
    "fp8 outside experts": lambda _: DATA / "qwen3_moe" / "fp8_block",
}


def converted(folder: Path, form: str) -> Path:
    gpt_oss.convert(TINY, folder / form, form)
    return folder / form


def arrays(path: Path, **options: Any) -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*outside experts are quantized")
        return [*map(np.asarray, jax.tree.leaves(nnx.state(models.load(path, **options))))]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_models_are_the_same_and_all_that_is_read_ahead_is_used(name, tmp_path, monkeypatch):
    path, left = CHECKPOINTS[name](tmp_path), []
    leave = read_ahead._Reads.__exit__

    def exit(reads: read_ahead._Reads, *error: object) -> None:
        left.append([tensor.name for tensor in reads._batch_of])
        leave(reads, *error)

    monkeypatch.setattr(read_ahead._Reads, "__exit__", exit)
    options = [{}, {"format": "mxfp4"}] if "bf16" in name else [{}]
    for option in options:
        left.clear()
        found = arrays(path, **option)
        assert left == ([[]] if name != "gpt_oss orbax" else [])
        with monkeypatch.context() as patch:
            patch.setattr(read_ahead.ReadsAhead, "read_ahead", lambda reader, order: contextlib.nullcontext())
            expected = arrays(path, **option)
        assert all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


def test_loading_a_file_that_shrinks_meanwhile_is_an_error(tmp_path, monkeypatch):
    path = shutil.copytree(TINY, tmp_path / "model")
    file, read = path / "model-00001-of-00002.safetensors", os.preadv

    def preadv(*arguments: Any) -> int:
        os.truncate(file, 100_000)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match=r"00001-of-00002.* can no longer be read: the file now ends at byte"):
        models.load(path)


def test_interrupting_a_loading_leaves_no_thread(monkeypatch):
    with interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        models.load(TINY)


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupting_the_start_of_a_thread_leaves_none(when, tensors, monkeypatch):
    """The interrupt comes in the call that starts the last thread, before or after the thread runs."""
    start, begun = threading.Thread.start, []

    def interrupted_start(thread: threading.Thread) -> None:
        if thread.name.startswith("jmx read ahead"):
            begun.append(thread)
        last = len(begun) == read_ahead.THREADS
        if not (last and when == "before"):
            start(thread)
        if last:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt), reading_ahead(tensors):
        raise AssertionError("no thread is started after the interrupt")
