"""The kernels of `peer` on a GPU that threads of a CPU emulate: all but the instructions of ptx.h."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FLAGS = ("-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The check, compiled."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    made = tmp_path_factory.mktemp("kernels") / "check_kernels"
    folders = ("-I", str(ROOT / "tests"), "-I", str(ROOT / "jmx/ffi/peer/src"))
    subprocess.run([compiler, *FLAGS, *folders, str(ROOT / "tests/check_kernels.cc"), "-o", str(made)], check=True)
    return made


@pytest.mark.costly
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_gathers_and_sums_of_ranks_that_are_late(num_ranks: int, program: pathlib.Path) -> None:
    """By slots, from array to array, and of rows that are needed; memory of results begins as NaN."""
    done = subprocess.run([program, str(num_ranks), "4"], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{num_ranks} ranks, 4 calls: 0 wrong\n"
    assert done.returncode == 0
