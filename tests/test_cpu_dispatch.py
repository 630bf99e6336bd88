"""The kernel for CPUs that a machine selects: by the processor's registers, whichever compiler built the library."""

import importlib.util
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

from jmx.ffi.cpu import library as ffi

ROOT = pathlib.Path(__file__).parents[1]
CPUINFO = pathlib.Path("/proc/cpuinfo")
FOUND = ffi.library()

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="features are those of x86-64"),
    pytest.mark.skipif(not CPUINFO.exists(), reason="needs /proc/cpuinfo to compare with"),
]

# As `Feature` of processor.h numbers them, by Linux's names.
FEATURES = ["fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"]
AVX512 = {"fma", "avx2", "avx512f", "avx512bw"}
NEEDS = {
    "portable": set(),
    "avx2": {"fma", "avx2"},
    "avx_vnni": {"fma", "avx2", "avx_vnni"},
    "avx512": AVX512,
    "avx512_vnni": AVX512 | {"avx512_vnni"},
    "avx512_bf16": AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx_bf16": AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
}
COMPILERS = {"g++": ["g++"], "clang++": ["clang++"], "zig": [sys.executable, "-m", "ziglang", "c++"]}


def flags():
    """The features that Linux reports, and enabled."""
    (line, *_) = [line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")]
    return {*line.partition(":")[2].split()}


def is_installed(compiler):
    return importlib.util.find_spec("ziglang") if compiler == "zig" else shutil.which(compiler)


@pytest.mark.skipif(FOUND.fault is not None, reason=str(FOUND.fault))
def test_kernels_are_those_that_the_processor_runs():
    """Compiled by a compiler that knows all of them: GCC 12, Clang 16."""
    assert FOUND.kernels == tuple(name for name, needs in NEEDS.items() if needs <= flags())


@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_compiler_reads_the_same_features(compiler, tmp_path):
    if not is_installed(compiler):
        pytest.skip(f"needs {compiler}")
    files = [ROOT / "jmx/ffi/cpu/src/processor.cc", ROOT / "tests/check_processor.cc"]
    include = f"-I{ROOT}/jmx/ffi/cpu/src"
    command = [*COMPILERS[compiler], "-std=gnu++20", "-O3", include, "-o", tmp_path / "check", *files]
    subprocess.run([*map(str, command)], check=True, timeout=300)
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = int(done.stdout)
    assert {name for bit, name in enumerate(FEATURES) if found >> bit & 1} == flags() & {*FEATURES}
