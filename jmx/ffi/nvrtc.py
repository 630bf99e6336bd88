"""CUDA sources compiled at run time by NVRTC, a library of the packages that jax's CUDA plugin depends on."""

import ctypes
import importlib.util
import pathlib

import jax

_OPTIONS = ("--std=c++17", "-default-device")
# Where the packages of CUDA 13 and 12 that jax depends on have NVRTC, and its name in a CUDA toolkit.
_NVRTC = (("nvidia.cu13", "lib/libnvrtc.so.13"), ("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"))


def compile_kernels(
    folder: pathlib.Path, headers: tuple[str, ...], architecture: str, source: str = "kernels.cu"
) -> bytes:
    """A source of a folder as a CUDA binary for "sm_90", or the like.

    Args:
        headers: names of the files in the folder that it includes.

    Raises:
        OSError: NVRTC is not there.
        RuntimeError: it does not compile them, with its output.
    """
    nvrtc = _load()
    texts = [(folder / name).read_bytes() for name in headers]
    text = (folder / source).read_bytes()
    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*texts)
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), len(headers), contents, names))
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_OPTIONS)]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        raise RuntimeError(_output(nvrtc, program, "ProgramLog").decode(errors="replace"))
    return _output(nvrtc, program, "CUBIN")


def architecture() -> str:
    """Of the first GPU."""
    return f"sm_{jax.devices('gpu')[0].compute_capability.replace('.', '')}"


def _load() -> ctypes.CDLL:
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
