"""The sources of the library of the backend `cutlass`, and where it is once built: all that tracing needs.

A library must match the Python that calls it. So a key is computed from jmx's own sources and flags; it is compiled
into the library, and is part of the name of a built library.
"""

import functools
import hashlib
import pathlib

from jmx.ffi.cutlass.config import TILES
from jmx.selection import tuning

FLASHINFER = "0.7.2.post1"  # the version whose functions are specialized here; in another version they may differ
FOLDER = pathlib.Path(__file__).parent / "src"
SHARED = pathlib.Path(__file__).parents[1] / "include"  # headers shared by the libraries of jmx
JAX_HEADERS = pathlib.Path(__file__).parents[1] / "jax_include"  # of the oldest jax, copied by cmake/CMakeLists.txt
LIBRARY = "libjmx_cutlass"
KEY_FUNCTION = "jmx_cutlass_key"  # the library's function that returns the key of its sources
ARCHITECTURE = "sm_90a"

# FlashInfer's flags for its SM90 module. Without ENABLE_FP8 its headers lack a type; without NDEBUG its host code logs
# every call, and an assertion fails while the workspace size is computed.
FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-static-global-template-stub=false", "-w"),
    *("--compiler-options=-fPIC", "-DCOMPILE_HOPPER_TMA_GEMMS", "-DCOMPILE_HOPPER_TMA_GROUPED_GEMMS"),
    *("-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4", "-DUSING_OSS_CUTLASS_MOE_GEMM"),
    *("-DCUTLASS_ENABLE_GDC_FOR_SM90=1", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"),
    *("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"),
)

# Sources of jmx, besides tile.cu, which is compiled once per tile; and FlashInfer's, in its csrc/nv_internal.
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
    """A header with a macro for each tile: those on nvcc's command line cannot have commas."""
    lines = [f"#define JMX_TILE_{i} {tile.macro}" for i, tile in enumerate(TILES)]
    names = " ".join(f"JMX_TILE_{i}" for i in range(len(TILES)))
    return "\n".join(["#pragma once", *lines, f"#define JMX_TILES {names}", ""])


@functools.cache
def key() -> str:
    """16 hexadecimal digits that identify these sources and flags. Raises OSError if sources are not installed."""
    digest = hashlib.sha256(repr((FLASHINFER, ARCHITECTURE, FLAGS, OWN, THEIRS, tiles_header())).encode())
    for path in (*sorted(SHARED.iterdir()), *sorted(FOLDER.iterdir())):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> pathlib.Path:
    """Where `jmx build` puts libraries. Raises RuntimeError if the user has no home directory."""
    return tuning.cache_directory() / "build"


def built() -> list[pathlib.Path]:
    """Libraries that may be built from these sources: beside the package first, then this user's, newest first."""
    found = [pathlib.Path(__file__).parents[1] / f"{LIBRARY}.so"]
    try:
        users = list(cache_directory().glob(f"{LIBRARY}-{ARCHITECTURE}-{key()}-*.so"))
    except (RuntimeError, OSError):
        users = []
    return [path for path in (*found, *sorted(users, key=_modified, reverse=True)) if path.exists()]


def _modified(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0
