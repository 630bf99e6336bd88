"""Reading tensors ahead of their use: several threads fill buffers, of which a bounded number of bytes is held.

A memory map is read page by page, when a page is first used, by the thread that uses it. Several threads that read
large pieces into memory are several times as fast, and a file that shrinks is an error instead of a SIGBUS.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jmx.checkpoint.host_arrays import ALIGNMENT, THREADS, aligned
from jmx.checkpoint.shards import CheckpointError, Tensor
from jmx.util.typing import UInt8

MOST_AHEAD = 1 << 32  # bytes
_PIECE = 1 << 24  # bytes that a thread reads at a time


class ReadsAhead:
    """A reader of files whose tensors can be read ahead. A family's reader defines `_stored`."""

    def read_ahead(self, order: Sequence[int | str]) -> contextlib.AbstractContextManager[None]:
        """A context in which threads read ahead. At most half a shard's bytes are held before they are used.

        What is read in the context is the same as outside, and in any order; `order` is the fastest.

        Args:
            order: keys of `layers`, whose experts will be read, and names of tensors that `dense` will read.

        Raises:
            CheckpointError: in the context, from whatever reads a tensor: its file has become shorter or is missing.
        """
        return reading_ahead([tensor for item in order for tensor in self._stored(item)])

    def _stored(self, item: int | str) -> Iterable[Tensor]:
        """The tensors of a key of `layers`, or of a name, in the order of their use."""
        raise NotImplementedError


@contextlib.contextmanager
def reading_ahead(tensors: Sequence[Tensor], limit: int | None = None) -> Iterator[None]:
    """A context in which `view` of each of `tensors` returns memory that threads have read; once, and then maps.

    Args:
        tensors: of one checkpoint, in the order of their use.
        limit: bytes that are held before they are used; None: half the largest file's, and at most `MOST_AHEAD`.
    """
    tensors = [tensor for tensor in dict.fromkeys(tensors) if tensor.nbytes]
    if not tensors or tensors[0].buffered.find is not None:  # nothing to read, or within another context
        yield
        return
    if limit is None:
        of_files: Counter[Path] = Counter()
        for tensor in tensors:
            of_files[tensor.file] += tensor.nbytes
        limit = min(max(of_files.values()) // 2, MOST_AHEAD)
    buffered = tensors[0].buffered
    with _Reads(tensors, limit) as reads:
        buffered.find = reads.take
        try:
            yield
        finally:
            buffered.find = None


class _Batch:
    """Tensors that are read together: one, in pieces, or some small ones."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.memory: dict[Tensor, UInt8[np.ndarray, " more"]] = {}
        self.unread = 0  # pieces
        self.started = False

    def start(self) -> list[tuple[Tensor, int]]:
        """Allocates memory, and returns the pieces to read: tensors, and first bytes in each."""
        self.memory = {tensor: np.empty(tensor.nbytes + ALIGNMENT, np.uint8) for tensor in self.tensors}
        pieces = [(tensor, at) for tensor in self.tensors for at in range(0, tensor.nbytes, _PIECE)]
        self.started, self.unread = True, len(pieces)
        return pieces


class _Reads:
    """Threads that read batches in order, while what was read and not taken is below `limit` bytes.

    All attributes are guarded by one lock, which no thread holds while it reads.
    """

    def __init__(self, tensors: Sequence[Tensor], limit: int):
        self._limit, self._held = limit, 0
        self._batches = deque(_batches(tensors))
        self._batch_of = {tensor: batch for batch in self._batches for tensor in batch.tensors}
        self._pieces: deque[tuple[_Batch, Tensor, int]] = deque()
        self._taken: weakref.WeakValueDictionary[Tensor, np.ndarray] = weakref.WeakValueDictionary()
        self._files: dict[Path, int] = {}
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "_Reads":
        try:
            for number in range(THREADS):
                self._threads.append(threading.Thread(target=self._run, name=f"jmx read ahead {number}"))
                self._threads[-1].start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            while thread in threading.enumerate():
                if thread.is_alive():
                    thread.join()
                else:  # an interrupt came while it was being started
                    time.sleep(1e-3)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._batches.clear()
        self._batch_of.clear()
        self._pieces.clear()

    def take(self, tensor: Tensor) -> UInt8[np.ndarray, " bytes"] | None:
        """The bytes of a tensor, which are waited for; None if they were taken, and are no longer used.

        Raises:
            CheckpointError: they cannot be read.
        """
        with self._changed:
            if tensor not in self._batch_of:
                memory = self._taken.get(tensor)
                return None if memory is None else aligned(memory)
            batch = self._batch_of[tensor]
            if not batch.started and self._error is None:
                self._batches.remove(batch)  # its place in the order is later, but waiting for that could be in vain
                self._start(batch)
            while batch.unread and self._error is None:
                self._changed.wait()
            if batch.unread or not batch.started:
                assert self._error is not None
                raise self._error
            del self._batch_of[tensor]
            self._taken[tensor] = memory = batch.memory.pop(tensor)
            self._held -= tensor.nbytes
            self._changed.notify_all()
            return aligned(memory)

    def _start(self, batch: _Batch) -> None:
        self._held += batch.nbytes
        self._pieces.extend((batch, *piece) for piece in batch.start())
        self._changed.notify_all()

    def _run(self) -> None:
        """What each thread does."""
        try:
            while (piece := self._next()) is not None:
                batch, tensor, at = piece
                self._read(tensor, at, aligned(batch.memory[tensor])[at : at + _PIECE])
                with self._changed:
                    batch.unread -= 1
                    if not batch.unread:
                        self._changed.notify_all()
        except BaseException as error:  # raised again by `take`, in the thread that needs the bytes
            with self._changed:
                self._error = self._error or error
                self._stopped = True
                self._changed.notify_all()

    def _next(self) -> tuple[_Batch, Tensor, int] | None:
        """The next piece to read, which may have to be waited for; None after the last."""
        with self._changed:
            while not self._stopped:
                if self._pieces:
                    return self._pieces.popleft()
                if not self._batches:
                    return None
                if not self._held or self._held + self._batches[0].nbytes <= self._limit:
                    self._start(self._batches.popleft())
                else:
                    self._changed.wait()
        return None

    def _read(self, tensor: Tensor, at: int, into: UInt8[np.ndarray, " bytes"]) -> None:
        try:
            descriptor = self._open(tensor.file)
            done = 0
            while done < into.size:
                count = os.preadv(descriptor, [into[done:].data], tensor.offset + at + done)
                if not count:
                    end = os.fstat(descriptor).st_size
                    problem = f"the file now ends at byte {end}, before the tensor does"
                    raise CheckpointError(tensor.file, f"tensor {tensor.name!r} can no longer be read: {problem}")
                done += count
        except OSError as error:
            problem = f"tensor {tensor.name!r} can no longer be read: {error.strerror or error}"
            raise CheckpointError(tensor.file, problem) from error

    def _open(self, file: Path) -> int:
        with self._changed:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[file]


def _batches(tensors: Iterable[Tensor]) -> Iterator[_Batch]:
    batch: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if batch and filled + tensor.nbytes > _PIECE:
            yield _Batch(batch)
            batch, filled = [], 0
        batch.append(tensor)
        filled += tensor.nbytes
    if batch:
        yield _Batch(batch)
