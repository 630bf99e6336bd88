"""`jmx build`: what is missing, one build among many processes, nothing half done, and a key for what was compiled.

A shell script replaces nvcc: it writes the requested file, and is slow, fails or counts as a test needs.
"""

import dataclasses
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time

import jax
import light_process
import pytest
import slow_build
from rich.console import Console

from jmx import cli
from jmx.ffi import build
from jmx.ffi.build import BuildError, Missing, Step
from jmx.ffi.cutlass import build as cutlass_build
from jmx.ffi.cutlass import library as cutlass_library
from jmx.ffi.cutlass import source as cutlass_source
from jmx.ffi.cutlass.config import TILES
from jmx.ffi.library import LibraryWarning
from jmx.selection import tuning

QUIET = Console(quiet=True)
ROOT = pathlib.Path(cutlass_build.__file__).parents[3]

NVCC = """#!/bin/sh
echo "$@" >> {log}
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {release}, V{release}.1"; exit; fi
if [ "$1" = --dryrun ]; then echo "#$ TOP={top}" >&2; exit; fi
{extra}
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo "built jmx_cutlass_key" > "$2"; shift; done
"""


class Machine:
    """A machine with a compiler, FlashInfer and headers, all of them fakes in one folder."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        self.log = folder / "log"
        self.nvcc("13.0")
        (folder / "cuda" / "include").mkdir()
        self.headers("curand.h", "curand_kernel.h", "cublas_v2.h", "cublas_api.h", "nvrtc.h")
        self.flashinfer()
        self.jax_headers("0.3")
        for name in ("CUDA_PATH", "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr(cutlass_source, "JAX_HEADERS", folder / "jax_include")
        monkeypatch.setattr(cutlass_build, "_package_includes", lambda: [folder / "packages" / "include"])
        monkeypatch.setattr(cutlass_build.importlib.metadata, "distribution", self.distribution)

    def nvcc(self, release, extra=""):
        path = self.folder / "cuda" / "bin" / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NVCC.format(log=self.log, release=release, top=self.folder / "cuda", extra=extra))
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def headers(self, *names):
        folder = self.folder / "packages" / "include"
        folder.mkdir(parents=True, exist_ok=True)
        for header in folder.iterdir():
            header.unlink()
        for name in (*names, "cuda_runtime.h"):
            (folder / name).write_text("")

    def flashinfer(self, version=cutlass_source.FLASHINFER, files="one"):
        (self.folder / "site" / "flashinfer" / "data" / "csrc" / "nv_internal").mkdir(parents=True, exist_ok=True)
        self.version, self.files = version, files

    def jax_headers(self, version):
        header = self.folder / "jax_include" / "xla/ffi/api/ffi.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(f"// API {version}")

    def distribution(self, name):
        assert name == "flashinfer-python"
        if self.version is None:
            raise cutlass_build.importlib.metadata.PackageNotFoundError(name)
        return self

    def locate_file(self, name):
        return self.folder / "site" / name

    def read_text(self, name):
        assert name == "RECORD"
        return self.files

    def calls(self):
        return [line for line in self.log.read_text().splitlines() if not line.startswith("--")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def missing():
    found = cutlass_build.find()
    assert isinstance(found, list)
    return " ".join(map(str, found))


# What is missing


def test_a_machine_that_has_all(machine):
    found = cutlass_build.find()
    assert isinstance(found, cutlass_build.Toolchain), found
    assert found.nvcc == str(machine.folder / "cuda" / "bin" / "nvcc")
    assert found.nvcc_version == "release 13.0, V13.0.1"
    assert {folder for _, folder in found.headers} == {machine.folder / "packages" / "include"}


def test_every_missing_thing_is_reported_with_the_command_that_gets_it(machine, monkeypatch):
    machine.version = None
    machine.headers("nvrtc.h")
    (machine.folder / "cuda" / "bin" / "nvcc").unlink()
    monkeypatch.setattr(cutlass_build, "_find_nvcc", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    reported = missing()
    for part in (
        "nvcc 12.8 or newer is missing: install the CUDA toolkit",
        "host compiler (g++) is missing: apt-get install g++",
        "flashinfer-python, whose sources are compiled is missing: pip install 'jmx-moe[flashinfer]'",
        f"pip install --no-deps flashinfer-python=={cutlass_source.FLASHINFER}",
        "the header curand_kernel.h is missing: pip install nvidia-curand",
        "the header cublas_v2.h is missing: pip install nvidia-cublas",
    ):
        assert part in reported
    assert "nvrtc" not in reported
    with pytest.raises(BuildError, match=r"curand_kernel\.h is missing"):
        cutlass_build.run(QUIET)
    assert not machine.log.exists(), "something was compiled"
    assert not (machine.folder / "cache").exists()


def test_an_old_compiler_and_another_flashinfer_are_reported_with_what_was_found(machine):
    machine.nvcc("12.4")
    machine.flashinfer("0.6.0")
    reported = missing()
    assert "nvcc 12.8 or newer (found release 12.4" in reported
    assert f"flashinfer-python {cutlass_source.FLASHINFER} (found 0.6.0)" in reported


def test_headers_beside_the_compiler_come_first(machine):
    (machine.folder / "cuda" / "include" / "nvrtc.h").write_text("")
    found = cutlass_build.find()
    assert isinstance(found, cutlass_build.Toolchain)
    assert dict(found.headers)["nvrtc.h"] is None


def test_a_compiler_behind_a_script_is_found_by_what_it_says(machine, tmp_path):
    script = tmp_path / "elsewhere" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {machine.folder}/cuda/bin/nvcc "$@"\n')
    script.chmod(0o755)
    assert cutlass_build._real(str(script)) == str(machine.folder / "cuda" / "bin" / "nvcc")


# A build


def test_it_compiles_each_tile_once_and_moves_the_library_into_the_cache(machine):
    path, made = cutlass_build.run(QUIET, jobs=3)
    assert made
    assert path.read_text() == "built jmx_cutlass_key\n"
    assert path.parent == tuning.cache_directory() / "build"
    assert sorted(os.listdir(path.parent)) == sorted([path.name, f".{path.name}.lock"])
    *compiled, linked = machine.calls()
    tiles = [line for line in compiled if line.endswith(".o") and "/tile.cu" in line]
    assert sorted(line.split("-DJMX_TILE=")[1].split()[0] for line in tiles) == sorted(
        f"JMX_TILE_{i}" for i in range(len(TILES))
    )
    assert len(compiled) == len(TILES) + len(cutlass_source.OWN) + len(cutlass_source.THEIRS)
    assert all("-gencode=arch=compute_90a,code=sm_90a" in line and "-DENABLE_FP8 " in line for line in compiled)
    assert "-cudart static" in linked
    assert linked.count(".o ") == len(compiled)
    assert cutlass_build.run(QUIET, jobs=3) == (path, False)
    assert len(machine.calls()) == len(compiled) + 1
    assert cutlass_build.run(QUIET, jobs=3, again=True) == (path, True)
    assert len(machine.calls()) == 2 * (len(compiled) + 1)


def test_only_the_headers_that_are_wanted_come_from_packages(machine):
    """The others, such as cuda_runtime.h, may be of another CUDA version than the compiler."""
    machine.nvcc(
        "13.0",
        f'[ -e {machine.folder}/seen ] || ls "$(dirname "$(echo "$@" | sed "s/.*-o //")")" > {machine.folder}/seen',
    )
    cutlass_build.run(QUIET, jobs=1)
    seen = (machine.folder / "seen").read_text().split()
    assert {"curand.h", "curand_kernel.h", "cublas_v2.h", "cublas_api.h", "nvrtc.h", "jmx_tiles.h"} <= {*seen}
    assert "cuda_runtime.h" not in seen


def test_it_compiles_with_the_headers_of_the_oldest_jax(machine):
    """Not those of the jax that runs: older ones would not load the library."""
    cutlass_build.run(QUIET)
    *compiled, _ = machine.calls()
    assert all(f"-I{machine.folder / 'jax_include'} " in line for line in compiled)
    assert not any(jax.ffi.include_dir() in line for line in compiled)


def test_without_those_headers_it_compiles_with_the_running_jax_and_reports_it(machine, capsys):
    """As where jmx was installed without a compiler."""
    shutil.rmtree(machine.folder / "jax_include")
    assert cli.main(["build", "cutlass"]) == 0
    assert f"this library will load with jax {jax.__version__} and newer" in " ".join(capsys.readouterr().err.split())
    *compiled, _ = machine.calls()
    assert all(f"-I{jax.ffi.include_dir()} " in line for line in compiled)


def test_the_built_library_is_looked_for_where_it_was_put(machine):
    path, _ = cutlass_build.run(QUIET)
    assert path in cutlass_source.built()
    old = path.with_name(f"{cutlass_source.LIBRARY}-{cutlass_source.ARCHITECTURE}-{'0' * 16}-x.so")
    old.write_text("of other sources")
    assert old not in cutlass_source.built()


def test_what_changes_the_path_of_a_library(machine, monkeypatch):
    def path():
        found = cutlass_build.find()
        assert isinstance(found, cutlass_build.Toolchain)
        return cutlass_build.library_path(found)

    seen = [path()]
    assert path() == seen[0]
    machine.nvcc("13.1")
    seen.append(path())
    machine.files = "another"
    seen.append(path())
    machine.jax_headers("0.4")
    seen.append(path())
    monkeypatch.setattr(cutlass_source, "FLAGS", (*cutlass_source.FLAGS, "-DMORE"))
    cutlass_source.key.cache_clear()
    seen.append(path())
    monkeypatch.setattr(cutlass_source, "TILES", TILES[1:])
    cutlass_source.key.cache_clear()
    seen.append(path())
    folder = machine.folder / "sources"
    folder.mkdir()
    for source in cutlass_source.FOLDER.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(cutlass_source, "FOLDER", folder)
    cutlass_source.key.cache_clear()
    assert path() == seen[-1], "the folder's own place is no part of it"
    (folder / "rows.cuh").write_text("// changed")
    cutlass_source.key.cache_clear()
    seen.append(path())
    cutlass_source.key.cache_clear()
    assert len({*seen}) == len(seen)


def test_a_failing_step_is_reported_with_its_command_and_leaves_nothing(machine):
    machine.nvcc("13.0", 'case "$@" in *handler.cu*) echo "error: no such thing"; exit 2;; esac')
    with pytest.raises(BuildError, match=r"handler failed \(2\)(.|\n)*handler.cu(.|\n)*error: no such thing"):
        cutlass_build.run(QUIET, jobs=2)
    folder = tuning.cache_directory() / "build"
    assert [name for name in os.listdir(folder) if not name.endswith(".lock")] == []
    machine.nvcc("13.0")
    assert cutlass_build.run(QUIET)[1]


def test_no_step_begins_after_one_has_failed(machine):
    machine.nvcc("13.0", "exit 1")
    with pytest.raises(BuildError):
        cutlass_build.run(QUIET, jobs=1)
    assert len(machine.calls()) == 1


# Many processes


def test_of_processes_side_by_side_one_builds_and_the_others_wait(tmp_path):
    target, log = tmp_path / "cache" / "library.so", tmp_path / "log"
    processes = [light_process.start(slow_build.PROCESS, target, log, 0.5) for _ in range(3)]
    assert sorted(process.communicate()[0] for process in processes) == ["False\n", "False\n", "True\n"]
    assert log.read_text() == "begun\n"
    assert target.read_text() == "whole"


def test_waiting_is_reported(tmp_path):
    console = Console(record=True, file=open(os.devnull, "w"), width=200)  # noqa: SIM115
    with build.locked(tmp_path / "lock", QUIET):
        child = light_process.start(
            "import pathlib; from rich.console import Console; from jmx.ffi import build\n"
            "with build.locked(pathlib.Path(sys.argv[1]), Console(file=sys.stdout)): print('in')",
            tmp_path / "lock",
        )
        assert child.stdout is not None
        assert "another process builds it" in child.stdout.readline()
    assert child.communicate(timeout=60)[0] == "in\n"
    console.file.close()


def test_what_a_killed_process_left_is_removed_and_its_lock_is_free(tmp_path):
    target, log = tmp_path / "library.so", tmp_path / "log"
    process = light_process.start(slow_build.PROCESS, target, log, 60)
    while not log.exists():
        time.sleep(0.05)
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert not target.exists()
    assert len(list(tmp_path.glob(".library.so.*.part"))) == 1
    with pytest.warns(UserWarning, match=r"removed .*/\.library\.so\.\w{8}\.part, which a process left"):
        assert slow_build.run(target, log, 0)
    assert target.read_text() == "whole"
    assert list(tmp_path.glob("*.part")) == list(tmp_path.glob(".*.part")) == []


def test_interrupted_it_ends_its_compilers_and_leaves_nothing(machine):
    machine.nvcc("13.0", f"sleep 60 & echo $! >> {machine.folder}/pids; wait")
    code = (
        "import sys; from jmx import cli\n"
        "from jmx.ffi.cutlass import build as b, source as s\n"
        "import pathlib\n"
        f"nvcc = {str(machine.folder / 'cuda/bin/nvcc')!r}\n"
        "tools = b.Toolchain(nvcc, 'v', 'g++', 'g', pathlib.Path('/nowhere'), '', (), s.JAX_HEADERS)\n"
        "b.find = lambda: tools\n"
        "sys.exit(cli.main(['build', 'cutlass', '--jobs', '2']))"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are born ignoring it
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    pids = machine.folder / "pids"
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    reported = process.communicate(timeout=60)[1]
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert "interrupted" in reported
    time.sleep(0.2)
    for pid in map(int, pids.read_text().split()):
        assert (
            not pathlib.Path(f"/proc/{pid}").exists() or "Z" in pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2]
        )
    left = [name for name in os.listdir(machine.folder / "cache" / "jmx" / "build") if not name.endswith(".lock")]
    assert left == []


# The command


def test_the_command_tells_where_the_library_is(machine, capsys):
    target = machine.folder / "made.so"
    assert cli.main(["build", "cutlass", "--output", str(target), "--jobs", "2"]) == 0
    assert capsys.readouterr().out == f"compiled: {target}\n"
    assert cli.main(["build", "cutlass", "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"was compiled before: {target}\n"
    other = machine.folder / "notes.txt"
    other.write_text("mine")
    calls = machine.calls()
    for flags in ([], ["--again"]):
        assert cli.main(["build", "cutlass", "--output", str(other), *flags]) == cli.EXIT_USAGE
        assert "notes.txt must be a library that `jmx build` compiled" in capsys.readouterr().err
    assert (other.read_text(), machine.calls()) == ("mine", calls)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["cutlas"], "did you mean 'cutlass'?"),
        (["cutlass", "--arch", "sm_100a"], "`--arch` (='sm_100a') must be one of sm_90a"),
        (["cutlass", "--jobs", "0"], "`--jobs` (=0) must be at least 1"),
        (["cutlass", "--output", "/no/such/folder/x.so"], "its directory does not exist"),
    ],
)
def test_bad_arguments_are_reported_before_anything_is_done(machine, argv, part, capsys):
    assert cli.main(["build", *argv]) == cli.EXIT_USAGE
    assert part in capsys.readouterr().err
    assert not machine.log.exists()


def test_the_command_says_what_is_missing(machine, capsys):
    machine.version = None
    assert cli.main(["build", "cutlass"]) == cli.EXIT_NO
    assert "pip install --no-deps flashinfer-python" in capsys.readouterr().err


# Looking for what was built


@pytest.fixture
def unloaded(machine, monkeypatch):
    monkeypatch.setattr(cutlass_source, "LIBRARY", "libjmx_none")  # not the one that may be beside the package
    cutlass_library.forget()
    yield machine
    cutlass_library.forget()


def test_nothing_built_is_reported(unloaded):
    assert "not compiled on this machine" in str(cutlass_library.library().fault)
    with pytest.raises(RuntimeError, match="not compiled"):
        cutlass_library.workspace_bytes(1, 1, 1, 128, 128, True)


def test_a_library_that_does_not_load_is_a_warning(unloaded):
    folder = cutlass_source.cache_directory()
    folder.mkdir(parents=True)
    name = f"{cutlass_source.LIBRARY}-{cutlass_source.ARCHITECTURE}-{cutlass_source.key()}-x.so"
    (folder / name).write_text("no library")
    with pytest.warns(LibraryWarning, match="jmx build cutlass"):
        found = cutlass_library.library()
    assert f"{name} does not load" in str(found.fault)
    assert cutlass_library.library() is found  # and no second warning


def test_a_library_of_other_sources_is_refused(unloaded, tmp_path):
    folder = cutlass_source.cache_directory()
    folder.mkdir(parents=True)
    name = f"{cutlass_source.LIBRARY}-{cutlass_source.ARCHITECTURE}-{cutlass_source.key()}-x.so"
    source = tmp_path / "other.c"
    source.write_text(
        'const char* jmx_cutlass_key() { return "other"; }\n'
        'const char* jmx_cutlass_tiles() { return ""; }\n'
        "long jmx_cutlass_workspace_bytes() { return 0; }\n"
    )
    built = subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", folder / name], capture_output=True, check=False)
    if built.returncode:
        pytest.skip("needs a C compiler")
    with pytest.warns(LibraryWarning, match="compiled from other sources"):
        assert cutlass_library.library().fault is not None


def test_missing_things_are_values():
    assert dataclasses.replace(Missing("a", "b"), what="c") == Missing("c", "b")
    assert Step("a", ("b",)) == Step("a", ("b",))
