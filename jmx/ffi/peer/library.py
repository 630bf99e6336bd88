"""Loads the library of the exchange `peer` on first use, compiles its kernels, and registers its handlers with XLA."""

import ctypes
import functools
import importlib.util
import pathlib
from typing import NamedTuple

import jax

from jmx.ffi.library import load, load_fault, warn_of_fault

# Names of the custom calls.
GATHER = "jmx_peer_gather"
SCATTER = "jmx_peer_scatter"
SUM = "jmx_peer_sum"
START = "jmx_peer_start"
FINISH = "jmx_peer_finish"
GATHER_NEEDED = "jmx_peer_gather_needed"
SCATTER_NEEDED = "jmx_peer_scatter_needed"

BUILD = (
    "reinstall jmx with a C++20 compiler in PATH (g++ 12, clang 16): "
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary jmx-moe jmx-moe"
)
_FOLDER = pathlib.Path(__file__).parent
_PATH = _FOLDER / "libjmx_peer.so"
# What kernels.cu includes.
_HEADERS = ("region.h", "lines.h", "ptx.h", "calls.h", "units.h", "needed.h", "needed_kernels.h")
_OPTIONS = ("--std=c++17", "-default-device")
# Where the packages of CUDA 13 and 12 that jax depends on have NVRTC, and its name in a CUDA toolkit.
_NVRTC = (("nvidia.cu13", "lib/libnvrtc.so.13"), ("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"))


class Library(NamedTuple):
    """The outcome of loading; `fault`: why the GPUs of this process cannot exchange rows by these kernels, or None."""

    fault: str | None = None


@functools.cache
def library() -> Library:
    """Loads the library, compiles the kernels for the first GPU, and registers the handlers with XLA, once.

    A library that is present and does not load is a warning.
    """
    if not _PATH.exists():
        return Library("jmx was installed without its kernels in C++")
    try:
        num_gpus = jax.local_device_count("gpu")
    except RuntimeError:
        return Library("this process has no GPU: it compiles for others")
    try:
        loaded = load(_PATH, {"jmx_peer_set_image": ctypes.c_int, "jmx_peer_fault": ctypes.c_char_p})
        if fault := loaded.jmx_peer_fault(ctypes.c_int(num_gpus)).decode():
            return Library(fault)
        image = compile_kernels(_architecture())
        loaded.jmx_peer_set_image(ctypes.c_char_p(image), ctypes.c_size_t(len(image)))
        register(loaded)
    except Exception as e:  # such as a library for a newer jax: another exchange runs
        fault = load_fault(_PATH.name, e)
        warn_of_fault("peer", fault, BUILD)
        return Library(fault)
    return Library()


def register(loaded: ctypes.CDLL) -> None:
    """Registers the handlers of a loaded library with XLA."""
    for target in (GATHER, SCATTER, SUM, START, FINISH, GATHER_NEEDED, SCATTER_NEEDED):
        stages = {"execute": target}
        if target != FINISH:  # for which everything is there since the start
            stages["initialize"] = f"{target}_initialize"
        handlers = {stage: jax.ffi.pycapsule(getattr(loaded, name)) for stage, name in stages.items()}
        jax.ffi.register_ffi_target(target, handlers, platform="gpu")


def compile_kernels(architecture: str) -> bytes:
    """The kernels as a CUDA binary for "sm_90", or the like.

    Raises:
        OSError: NVRTC is not there.
        RuntimeError: it does not compile them, with its output.
    """
    nvrtc = _load_nvrtc()
    headers = {name: (_FOLDER / "src" / name).read_bytes() for name in _HEADERS}
    source = (_FOLDER / "src/kernels.cu").read_bytes()
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", len(headers), texts, names))
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_OPTIONS)]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        raise RuntimeError(_output(nvrtc, program, "ProgramLog").decode(errors="replace"))
    return _output(nvrtc, program, "CUBIN")


def _architecture() -> str:
    return f"sm_{jax.devices('gpu')[0].compute_capability.replace('.', '')}"


def _load_nvrtc() -> ctypes.CDLL:
    for package, file in _NVRTC:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (found and found.submodule_search_locations) or ():
            if (path := pathlib.Path(folder) / file).exists():
                return ctypes.CDLL(str(path))
    return ctypes.CDLL(pathlib.Path(_NVRTC[0][1]).name)


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data))
    return data.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvrtc.nvrtcGetErrorString(status).decode())
