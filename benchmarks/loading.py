#!/usr/bin/env python3
"""Times the loading of a whole model against what the disk and the bus allow, and measures its host memory.

    python benchmarks/loading.py gpt-oss-20b --json FILE

In one run, on files of random bytes that it writes to a temporary directory (of `--dir`) and removes: a plain read by
several threads, copies from the host to the device, and `jmx.models.load` three times: the first in the process, which
compiles; another one; and one of files that the page cache holds. Before the others the files are dropped from the page
cache, by posix_fadvise, which some systems ignore: then "cold" is as fast as "warm". Targets: the second loading is at
least 80% as fast as the slower of reading and copying, and holds at most one shard in host memory.
"""

import argparse
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import random_checkpoint
from jmx import models
from jmx.util import atomic_files

CHUNK = 1 << 24  # bytes of a read
COPY = 1 << 27  # bytes of a copy to the device
COPIED = 1 << 32  # bytes of all copies, at most
INTERVAL = 0.002  # s between samples of memory
COMPILING = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")


class Sampler:
    """While it is entered, a thread samples this process' memory, and where its main thread is.

    Attributes:
        peak: the most anonymous memory (RssAnon) above that at the start, in bytes. Mapped pages of files are not in
            it: they are the page cache.
        resident: the most resident memory (VmHWM) above that at the start, in bytes, mapped pages of files included.
        places: samples by the function of jmx that the main thread was in.
    """

    def __enter__(self) -> "Sampler":
        self.places: Counter[str] = Counter()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._before, self._resident = status("RssAnon"), status("VmHWM")
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.resident = status("VmHWM") - self._resident

    def _sample(self) -> None:
        main = threading.main_thread().ident
        while not self._stop.wait(INTERVAL):
            self.peak = max(self.peak, status("RssAnon") - self._before)
            frame = sys._current_frames().get(main or 0)
            while frame is not None and f"{os.sep}jmx{os.sep}" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None:
                file = frame.f_code.co_filename.rpartition(f"{os.sep}jmx{os.sep}")[2]
                self.places[f"{file}:{frame.f_code.co_name}"] += 1

    def shares(self, most: int = 8) -> dict[str, float]:
        """The functions in which the main thread was found most often, with their shares of the samples."""
        total = sum(self.places.values())
        return {place: round(count / total, 3) for place, count in self.places.most_common(most)}


def status(entry: str) -> int:
    """An entry of /proc/self/status, in bytes; 0 where there is none."""
    found = re.search(rf"^{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


@contextmanager
def compiling() -> Iterator[list[float]]:
    """Seconds of tracing, lowering and compiling, as jax reports them, one by one."""
    found: list[float] = []

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event.rpartition("/")[2] in COMPILING:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


def drop(files: Sequence[Path]) -> None:
    """Drops files from the page cache, if the system does so."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def plain_read(files: Sequence[Path], threads: int) -> float:
    """Seconds to read files by several threads, each into a buffer that it uses again."""
    buffers = threading.local()
    descriptors = [os.open(file, os.O_RDONLY) for file in files]

    def read(descriptor: int, at: int) -> None:
        if not hasattr(buffers, "own"):
            buffers.own = np.empty(CHUNK, np.uint8)
        os.preadv(descriptor, [buffers.own], at)

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            jobs = [(d, at) for d in descriptors for at in range(0, os.fstat(d).st_size, CHUNK)]
            for done in [pool.submit(read, *job) for job in jobs]:
                done.result()
        return time.perf_counter() - start
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def copy_rate(nbytes: int, threads: int) -> float:
    """Bytes a second of `jax.device_put` from several threads, each of arrays of `COPY` bytes."""
    rounds = max(2, min(nbytes, COPIED) // (COPY * threads))
    arrays = [np.random.default_rng(i).integers(0, 255, COPY, np.uint8) for i in range(threads)]

    def copy(array: np.ndarray) -> None:
        for _ in range(rounds):
            jax.block_until_ready(jax.device_put(array)).delete()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, arrays))  # the first copies allocate what later ones use
        start = time.perf_counter()
        list(pool.map(copy, arrays))
        return rounds * COPY * threads / (time.perf_counter() - start)


def timed_load(load: Callable[[], models.Model], nbytes: int) -> dict[str, Any]:
    """Times a loading, and measures the memory that it takes beside the arrays of the model."""
    with Sampler() as sampler, compiling() as compiled:
        start = time.perf_counter()
        model = load()
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - start
    kept = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)) if array.device.platform == "cpu")
    return {
        "seconds": seconds,
        "GB/s": nbytes / seconds / 1e9,
        "compiling_s": sum(compiled),
        "anonymous_GB": (sampler.peak - kept) / 1e9,
        "resident_GB": (sampler.resident - kept) / 1e9,
        "main_thread": sampler.shares(),
    }


def measure(directory: Path, nbytes: int, threads: int) -> dict[str, Any]:
    """All measurements of a checkpoint, printed as they are made. Rates are in GB/s, 10^9 bytes a second."""
    files = sorted(directory.glob("*.safetensors"))
    device = jax.devices()[0]
    found: dict[str, Any] = {"bytes": nbytes, "shard_bytes": max(file.stat().st_size for file in files)}

    def note(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)

    note("device", device.device_kind)
    drop(files)
    note("read_cold", nbytes / plain_read(files, threads) / 1e9)
    note("read_warm", nbytes / plain_read(files, threads) / 1e9)
    bus = float("inf")
    if device.platform != "cpu":  # on a CPU an array may be the numpy array itself
        note("copy", {threads: copy_rate(nbytes, threads) / 1e9 for threads in (1, 2, 4)})
        bus = max(found["copy"].values())
    for name in ("load_first", "load_cold", "load_warm"):
        if name != "load_warm":
            drop(files)
        note(name, timed_load(lambda: models.load(directory), nbytes))
        gc.collect()
    note("ratio", found["load_cold"]["GB/s"] / min(found["read_cold"], bus))
    note("ratio_first", found["load_first"]["GB/s"] / min(found["read_cold"], bus))
    note("ratio_warm", found["load_warm"]["GB/s"] / min(found["read_warm"], bus))
    anonymous = max(found[name]["anonymous_GB"] for name in ("load_first", "load_cold", "load_warm"))
    note("anonymous_of_shard", 1e9 * anonymous / found["shard_bytes"])
    return found


def main() -> int:
    """Prints the measurements, and writes them to --json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=random_checkpoint.MODELS)
    parser.add_argument("--layers", type=int, help="instead of the model's number")
    parser.add_argument("--small", action="store_true", help="small widths, to try the benchmark")
    parser.add_argument("--shard", type=float, default=5.0, help="GB of a shard, at most")
    parser.add_argument("--threads", type=int, default=8, help="of the plain read")
    parser.add_argument("--dir", type=Path, help="where to write the files; must have space for them")
    parser.add_argument("--json", type=Path, help="a new file for the results")
    arguments = parser.parse_args()
    if arguments.json:
        atomic_files.check_new(arguments.json)
    directory = Path(tempfile.mkdtemp(prefix="jmx-loading-", dir=arguments.dir))
    try:
        start = time.perf_counter()
        sizes = {"shard_bytes": int(arguments.shard * 1e9), "layers": arguments.layers, "small": arguments.small}
        nbytes = random_checkpoint.write(directory / "model", arguments.model, **sizes)
        print(f"wrote {nbytes / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s", flush=True)
        result = vars(arguments) | {"jax": jax.__version__} | measure(directory / "model", nbytes, arguments.threads)
    finally:
        shutil.rmtree(directory)
    text = json.dumps(result, default=str, indent=1)
    print(text)
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
