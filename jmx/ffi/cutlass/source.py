"""What the library of the backend `cutlass` is compiled from, and where it lies once it is: all that a trace needs.

A library and the Python that calls it belong together. So a key is made of jmx's own sources and flags; it is compiled
into the library, and is part of a built library's name.
"""

import functools
import hashlib
import pathlib

from jmx.ffi.cutlass.config import TILES
from jmx.selection import tuning

FLASHINFER = "0.7.2.post1"  # the version whose functions are specialised here: another one may have others
FOLDER = pathlib.Path(__file__).parent / "src"
SHARED = pathlib.Path(__file__).parents[1] / "include"  # headers of every library of jmx
JAX_HEADERS = pathlib.Path(__file__).parents[1] / "jax_include"  # of the oldest jax, copied by cmake/CMakeLists.txt
LIBRARY = "libjmx_cutlass"
KEY_FUNCTION = "jmx_cutlass_key"  # of the library: the key of its sources
ARCHITECTURE = "sm_90a"

# What FlashInfer compiles its SM90 module with. Without ENABLE_FP8 its headers lack a type; without NDEBUG its host
# code logs every call, and stops at an assertion that does not hold while workspace is counted.
FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-static-global-template-stub=false", "-w"),
    *("--compiler-options=-fPIC", "-DCOMPILE_HOPPER_TMA_GEMMS", "-DCOMPILE_HOPPER_TMA_GROUPED_GEMMS"),
    *("-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4", "-DUSING_OSS_CUTLASS_MOE_GEMM"),
    *("-DCUTLASS_ENABLE_GDC_FOR_SM90=1", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"),
    *("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"),
)

# Sources of jmx, of which tile.cu is compiled once for each tile, and those of FlashInfer, below its csrc/nv_internal.
OWN = ("runner.cu", "products.cu", "handler.cu", "interleave.cu")
THEIRS = (
    "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu",
    "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_tma_warp_specialized_input.cu",
    "cpp/common/envUtils.cpp",
    "cpp/common/logger.cpp",
    "cpp/common/stringUtils.cpp",
    "cpp/common/tllmException.cpp",
)


def tiles_header() -> str:
    """A header that names every tile, each by a macro: nvcc takes no commas in those on its command line."""
    lines = [f"#define JMX_TILE_{i} {tile.macro}" for i, tile in enumerate(TILES)]
    names = " ".join(f"JMX_TILE_{i}" for i in range(len(TILES)))
    return "\n".join(["#pragma once", *lines, f"#define JMX_TILES {names}", ""])


@functools.cache
def key() -> str:
    """Names these sources and flags, in 16 hexadecimal digits. OSError where the installation lacks the sources."""
    digest = hashlib.sha256(repr((FLASHINFER, ARCHITECTURE, FLAGS, OWN, THEIRS, tiles_header())).encode())
    for path in (*sorted(SHARED.iterdir()), *sorted(FOLDER.iterdir())):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> pathlib.Path:
    """Where `jmx build` leaves libraries; RuntimeError if the user has no home directory."""
    return tuning.cache_directory() / "build"


def built() -> list[pathlib.Path]:
    """Libraries that these sources may have become, best first: beside the package, then this user's, newest first."""
    found = [pathlib.Path(__file__).parents[1] / f"{LIBRARY}.so"]
    try:
        users = list(cache_directory().glob(f"{LIBRARY}-{ARCHITECTURE}-{key()}-*.so"))
    except (RuntimeError, OSError):
        users = []
    return [path for path in (*found, *sorted(users, key=_age, reverse=True)) if path.exists()]


def _age(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0
