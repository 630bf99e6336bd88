"""Compiled libraries: the jax that they are built for, and what happens where one does not load."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib import metadata

import jax
import pytest
from backend_cases import Case
from packaging.requirements import Requirement
from packaging.version import Version

import jmx
from jmx.ffi.cpu import library as cpu
from jmx.ffi.library import LibraryWarning, load

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILT = cpu._PATH.exists()
CASE = Case().problem()


def specifiers(requirements, name):
    (found,) = [r for r in map(Requirement, requirements) if r.name == name]
    return {(s.operator, Version(s.version)) for s in found.specifier}


def test_libraries_are_built_with_the_headers_of_the_oldest_jax():
    """An exact pin: pip takes the newest jax that a bound allows, whose handlers older jax rejects."""
    ((operator, pinned),) = specifiers(PROJECT["build-system"]["requires"], "jax")
    assert operator == "=="
    assert (">=", pinned) in specifiers(PROJECT["project"]["dependencies"], "jax")


# Being there

FFI = ROOT / "jmx" / "ffi"
BUILT_BY_PIP = sorted({source.parts[-3] for source in FFI.glob("*/src/*.cc")})


def sources(name):
    """The files of which a library is compiled."""
    found, todo = set(), [*(FFI / name / "src").glob("*.cc")]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            folders = path.parent, FFI / "include"
            names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            todo += [folder / its for its in names for folder in folders if (folder / its).exists()]
    return found


def builds_here(tmp_path):
    """Whether pip has installed this clone, in place, and could compile C++."""
    try:
        origin = json.loads(metadata.distribution("jmx-moe").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return False
    here = origin.get("dir_info", {}).get("editable") and origin["url"] == ROOT.as_uri()
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if not here or compiler is None:
        return False
    (tmp_path / "empty.cc").write_text("#include <bit>\nint main() { return std::popcount(0u); }\n")
    command = [compiler, "-std=c++20", "-fsyntax-only", tmp_path / "empty.cc"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.every_case
@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have fewer")
@pytest.mark.parametrize("name", BUILT_BY_PIP)
def test_pip_has_built_each_library_of_its_present_sources(name, tmp_path):
    """One that does not compile is left out without a word, and tests then skip it, or use an old one."""
    if not builds_here(tmp_path):
        pytest.skip("needs jmx installed from this clone, by `pip install -e .`, and a C++20 compiler")
    library = FFI / name / f"libjmx_{name}.so"
    assert library.exists(), "its build has failed: `pip install -e . -v` shows why"
    newer = [path.name for path in sources(name) if path.stat().st_mtime > library.stat().st_mtime]
    assert newer == [], f"newer than {library.name}: `pip install -e .` builds it again"


def test_cmake_builds_a_library_of_each_folder_with_sources():
    text = (ROOT / "cmake" / "CMakeLists.txt").read_text()
    (others,) = set(re.findall(r"foreach\(name ([\w ]+)\)", text))
    assert sorted([*re.findall(r"add_library\(jmx_(\w+) MODULE", text), *others.split()]) == BUILT_BY_PIP


# Not loading

NEWER = """#include "xla/ffi/api/c_api.h"
#define HANDLER(name)                                                                               \\
  XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {                                                   \\
    ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata->api_version.major_version = 99; \\
    return 0;                                                                                       \\
  }
HANDLER(jmx_cpu_grouped_product)
HANDLER(jmx_cpu_round_rows)
HANDLER(jmx_cpu_order_columns)
const char* jmx_cpu_kernels() { return "portable"; }
"""

# Prints how often the first calls of a process warned, the backend that ran, the warning, and why `cpu` did not run.
PROGRAM = """
import pathlib, sys, warnings
import jax, jax.numpy as jnp
import jmx
from jmx.ffi.cpu import library
from jmx.ffi.library import LibraryWarning
library._PATH = pathlib.Path(sys.argv[1])
experts = jmx.Experts.random(jax.random.key(0), 4, 64, 64, gate_up_order="interleaved")
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for tokens in (3, 2):
        x, routing = jnp.ones((tokens, 64)), jmx.Routing(jnp.ones((tokens, 2), jnp.int32), jnp.ones((tokens, 2)))
        assert jnp.isfinite(jmx.moe(x, routing, experts, activation="swiglu")).all()
    report = jmx.explain(x, routing, experts, activation="swiglu")
of_library = [w for w in found if w.category is LibraryWarning]
print(len(of_library), report.chosen, *(str(w.message) for w in of_library))
print(dict((name, str(no)) for name, _, no in report.trail)["cpu"])
"""


def run_program(library):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def newer(tmp_path):
    """A library whose handlers need a newer XLA than any."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "newer.c").write_text(NEWER)
    command = ["gcc", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-o", "newer.so", "newer.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path / "newer.so"


def truncated(folder, share):
    data = cpu._PATH.read_bytes()
    path = folder / "truncated.so"
    path.write_bytes(data[: int(share * len(data))])
    return path


@pytest.mark.costly
def test_a_library_for_a_newer_jax_is_one_warning_and_xla_runs(newer):
    first, rejection = run_program(newer)
    count, chosen, message = first.split(maxsplit=2)
    assert (count, chosen) == ("1", "xla")
    assert re.search(r"'cpu' cannot run.*newer\.so does not load: .* API version .*; remedy: .*pip install", message)
    assert re.search(r"newer\.so does not load: .* API version .*pip install", rejection)


@pytest.mark.costly
@pytest.mark.skipif(not BUILT, reason="needs the library")
def test_a_truncated_library_is_one_warning_and_xla_runs(tmp_path):
    """The dynamic linker would end the process."""
    first, rejection = run_program(truncated(tmp_path, 0.9))
    assert first.startswith("1 xla ")
    assert "the file is truncated" in rejection


@pytest.mark.costly
def test_a_missing_library_is_no_warning_and_xla_runs(tmp_path):
    first, rejection = run_program(tmp_path / "missing.so")
    assert first == "0 xla"
    assert "installed without its kernels in C++" in rejection
    assert "pip install" in rejection


@pytest.mark.skipif(not BUILT, reason="needs the library")
@pytest.mark.parametrize("share", [0, 1e-5, 0.001, 0.01, 0.5, 0.99, 0.99999])
def test_every_truncated_library_is_an_error(tmp_path, share):
    with pytest.raises(OSError, match="truncated"):
        load(truncated(tmp_path, share), {})


def test_a_library_without_its_functions_is_an_error(newer):
    with pytest.raises(AttributeError, match="jmx_cpu_none"):
        load(newer, {"jmx_cpu_none": int})


def test_it_warns_once_a_process(newer, monkeypatch):
    monkeypatch.setattr(cpu, "_PATH", newer)
    cpu.library.cache_clear()
    try:
        with pytest.warns(LibraryWarning, match="does not load") as found:
            faults = {cpu.library().fault for _ in range(3)}
        assert (len(found), len(faults)) == (1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert jmx.explain(CASE, device="cpu").chosen == "xla"
    finally:
        cpu.library.cache_clear()
