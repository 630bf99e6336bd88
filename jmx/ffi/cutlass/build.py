"""Compiles the library of the backend `cutlass` from FlashInfer's sources, for `jmx build cutlass`.

FlashInfer is located, not imported: its Python needs torch, its C++ does not. Headers that are missing beside nvcc are
linked one by one from the packages that have them, whose other headers may be of another CUDA version.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from rich.console import Console

from jmx.ffi import build
from jmx.ffi.build import BuildError, Missing, Step
from jmx.ffi.cutlass import source
from jmx.ffi.cutlass.config import TILES
from jmx.ffi.cutlass.source import ARCHITECTURE, FLASHINFER, FOLDER, LIBRARY, OWN, SHARED, THEIRS
from jmx.util.atomic_files import Kind

OLDEST_NVCC = (12, 8)  # the first with 4-bit floats
# Headers that FlashInfer's sources include and nvcc may lack, each with a pattern of the headers it includes.
HEADERS = {"curand_kernel.h": "curand*.h", "cublas_v2.h": "cublas*.h", "nvrtc.h": "nvrtc*.h"}
_PACKAGES = {"curand_kernel.h": "nvidia-curand", "cublas_v2.h": "nvidia-cublas", "nvrtc.h": "nvidia-cuda-nvrtc"}
_NEWER_HEADERS = (
    "jmx was installed without a C++ compiler, and so without the headers of the oldest jax: this library will load "
    f"with jax {jax.__version__} and newer"
)
_EXTRA = "pip install 'jmx-moe[flashinfer]'"
_JOB_BYTES = 3 << 30  # host memory of the compiler for the largest source


@dataclass(frozen=True)
class Toolchain:
    """The compilers and sources of a build.

    Args:
        nvcc: path of the CUDA compiler.
        nvcc_version: its version, as it prints it.
        host: path of the C++ compiler that nvcc calls.
        host_version: the first line of its version.
        flashinfer: FlashInfer's folder of sources and headers.
        flashinfer_files: a digest of the list of files there.
        headers: the folder of each of `HEADERS`; None if nvcc has it.
        jax_headers: XLA's FFI headers. A library loads with the jax that they come from and with newer ones.
    """

    nvcc: str
    nvcc_version: str
    host: str
    host_version: str
    flashinfer: pathlib.Path
    flashinfer_files: str
    headers: tuple[tuple[str, pathlib.Path | None], ...]
    jax_headers: pathlib.Path


def find() -> Toolchain | list[Missing]:
    """The toolchain of this machine, or everything that is missing."""
    missing: list[Missing] = []
    nvcc = _find_nvcc()
    version, release = ("", None) if nvcc is None else _version(nvcc)
    if release is None or release < OLDEST_NVCC:
        found = "" if not version else f" (found {version} at {nvcc})"
        oldest = ".".join(map(str, OLDEST_NVCC))
        missing.append(
            Missing(f"nvcc {oldest} or newer{found}", f"install the CUDA toolkit and put nvcc into PATH, or {_EXTRA}")
        )
    host = shutil.which(os.environ.get("CXX", "g++"))
    if host is None:
        missing.append(Missing("a C++17 host compiler (g++)", "apt-get install g++, or set CXX to one"))
    flashinfer = _find_flashinfer()
    if isinstance(flashinfer, Missing):
        missing.append(flashinfer)
    headers: dict[str, pathlib.Path | None] = {}
    for name in HEADERS:
        if nvcc is not None and (pathlib.Path(nvcc).resolve().parent.parent / "include" / name).exists():
            headers[name] = None
            continue
        folder = next((folder for folder in _package_includes() if (folder / name).exists()), None)
        headers[name] = folder
        if folder is None:
            missing.append(Missing(f"the header {name}", f"pip install {_PACKAGES[name]}, or {_EXTRA}"))
    if not FOLDER.is_dir():
        missing.append(
            Missing(f"jmx's own sources at {FOLDER}", "reinstall jmx: pip install --force-reinstall jmx-moe")
        )
    if missing or nvcc is None or host is None or isinstance(flashinfer, Missing):
        return missing
    folder, files = flashinfer
    host_version = _first_line(host, "--version")
    return Toolchain(nvcc, version, host, host_version, folder, files, tuple(headers.items()), _find_jax_headers())


def library_path(toolchain: Toolchain) -> pathlib.Path:
    """The path of the library that `toolchain` builds, which differs between compilers, FlashInfer and FFI headers.

    Raises:
        RuntimeError: the user has no home directory.
    """
    built_with = build.fingerprint(
        *(toolchain.nvcc_version, toolchain.host_version, toolchain.flashinfer_files),
        *(header.read_bytes() for header in sorted(toolchain.jax_headers.rglob("*.h"))),
    )
    return source.cache_directory() / f"{LIBRARY}-{ARCHITECTURE}-{source.key()}-{built_with}.so"


def run(
    console: Console, *, output: pathlib.Path | None = None, jobs: int | None = None, again: bool = False
) -> tuple[pathlib.Path, bool]:
    """Compiles the library unless it exists; returns its path, and whether it was compiled now.

    Args:
        console: for progress.
        output: the file to write; None: in this user's cache, where the backend looks for it.
        jobs: compilers that run in parallel; None: as many as processors and memory allow.
        again: whether to compile even if it exists.

    Raises:
        BuildError: a dependency is missing (the message has the command that installs it), or a compiler failed.
        FileExistsError: `output` exists and is not such a library.
    """
    found = find()
    if isinstance(found, list):
        raise BuildError("; ".join(map(str, found)))
    if found.jax_headers != source.JAX_HEADERS:
        console.print(_NEWER_HEADERS, markup=False)
    target = library_path(found) if output is None else output.absolute()
    jobs = _jobs() if jobs is None else jobs
    made = build.install(target, lambda folder: _make(found, folder, jobs, console), console, _KIND, again=again)
    return target, made


def _fault(path: pathlib.Path) -> str | None:
    return None if source.KEY_FUNCTION.encode() in path.read_bytes() else f"it does not export {source.KEY_FUNCTION}"


_KIND = Kind("a library that `jmx build` compiled", _fault)


def _make(toolchain: Toolchain, folder: pathlib.Path, jobs: int, console: Console) -> pathlib.Path:
    (folder / "jmx_tiles.h").write_text(f'{source.tiles_header()}#define JMX_KEY "{source.key()}"\n', encoding="utf-8")
    for name, includes in toolchain.headers:
        if includes is not None:
            for header in includes.glob(HEADERS[name]):
                (folder / header.name).symlink_to(header)
    steps, objects = compile_steps(toolchain, folder)
    build.run_steps("compiling", steps, jobs, console)
    library = folder / f"{LIBRARY}.so"
    build.run_steps("linking", [link_step(toolchain, objects, library)], 1, console)
    return library


def compile_steps(toolchain: Toolchain, folder: pathlib.Path) -> tuple[list[Step], list[pathlib.Path]]:
    """The commands that compile into `folder`, longest first, and the objects that they write."""
    csrc = toolchain.flashinfer / "csrc"
    internal = csrc / "nv_internal"
    extensions = internal / "tensorrt_llm"
    includes = [
        *(folder, FOLDER, SHARED, csrc, internal, internal / "include", toolchain.jax_headers),
        *(extensions / "cutlass_extensions" / "include", extensions / "kernels" / "cutlass_kernels" / "include"),
        *(extensions / "kernels" / "cutlass_kernels", toolchain.flashinfer / "include"),
        *(toolchain.flashinfer / "cccl" / part for part in ("cub", "libcudacxx/include", "thrust")),
        *(toolchain.flashinfer / "cutlass" / part for part in ("include", "tools/util/include")),
        toolchain.flashinfer / "spdlog" / "include",
    ]
    common = (
        *(toolchain.nvcc, "-ccbin", toolchain.host, *source.FLAGS),
        f"-gencode=arch={ARCHITECTURE.replace('sm', 'compute')},code={ARCHITECTURE}",
        *(f"-I{include}" for include in includes),
        *("-include", "jmx_tiles.h"),
    )
    steps, objects = [], []

    def add(name: str, file: pathlib.Path, *flags: str) -> None:
        objects.append(folder / f"{name}.o")
        steps.append(Step(name, (*common, *flags, "-x", "cu", "-c", str(file), "-o", str(objects[-1]))))

    add("runner", FOLDER / OWN[0])
    for i in reversed(range(len(TILES))):  # the largest first
        add(f"tile-{TILES[i].name}", FOLDER / "tile.cu", f"-DJMX_TILE=JMX_TILE_{i}")
    for file in OWN[1:]:
        add(pathlib.Path(file).stem, FOLDER / file)
    for file in THEIRS:
        add(pathlib.Path(file).stem, internal / file)
    return steps, objects


def link_step(toolchain: Toolchain, objects: list[pathlib.Path], library: pathlib.Path) -> Step:
    """Links libcudart statically, to be independent of jax's, and hides all symbols but the exported ones."""
    options = ("--no-undefined", f"--version-script={FOLDER / 'exports.map'}", "--strip-all")
    return Step(
        library.name,
        (
            *(toolchain.nvcc, "-ccbin", toolchain.host, "-shared", "-cudart", "static"),
            *(part for option in options for part in ("-Xlinker", option)),
            *map(str, objects),
            *("-o", str(library)),
        ),
    )


def _jobs() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(processors, memory // _JOB_BYTES))


def _find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(pathlib.Path(home) / "bin" / "nvcc" for home in homes), shutil.which("nvcc")]
    candidates += [pathlib.Path("/usr/local/cuda/bin/nvcc"), *(i.parent / "bin" / "nvcc" for i in _package_includes())]
    return next((_real(str(path)) for path in candidates if path and os.access(path, os.X_OK)), None)


def _real(nvcc: str) -> str:
    """The compiler that `nvcc` calls, if that is a script or a link: headers are relative to it."""
    output = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", output, re.MULTILINE)
    real = pathlib.Path(os.path.normpath(top[1])) / "bin" / "nvcc" if top else pathlib.Path(nvcc)
    return str(real if real.exists() else nvcc)


def _version(nvcc: str) -> tuple[str, tuple[int, int] | None]:
    """The version of a compiler as it prints it, and as (major, minor)."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+).*", output)
    return ("", None) if found is None else (found[0], (int(found[1]), int(found[2])))


def _first_line(*command: str) -> str:
    return (subprocess.run(command, capture_output=True, text=True).stdout.splitlines() or [""])[0]


def _find_flashinfer() -> tuple[pathlib.Path, str] | Missing:
    """FlashInfer's folder of sources and a digest of its files, from the metadata of its package."""
    command = f"{_EXTRA}, or without its dependencies: pip install --no-deps flashinfer-python=={FLASHINFER}"
    try:
        installed = importlib.metadata.distribution("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return Missing("the package flashinfer-python, whose sources are compiled", command)
    if installed.version != FLASHINFER:
        return Missing(f"flashinfer-python {FLASHINFER} (found {installed.version})", command)
    folder = pathlib.Path(str(installed.locate_file("flashinfer"))) / "data"
    if not (folder / "csrc" / "nv_internal").is_dir():
        return Missing(f"flashinfer-python's sources at {folder}", command)
    return folder, build.fingerprint(installed.version, installed.read_text("RECORD"))


def _find_jax_headers() -> pathlib.Path:
    """Those of the oldest jax that jmx allows, or the running jax's where jmx was installed without a compiler."""
    installed = source.JAX_HEADERS
    return installed if (installed / "xla/ffi/api/ffi.h").exists() else pathlib.Path(jax.ffi.include_dir())


def _package_includes() -> Iterator[pathlib.Path]:
    """Folders of headers in NVIDIA's packages: one for all since CUDA 13, before that one per package."""
    spec = importlib.util.find_spec("nvidia")
    for location in () if spec is None else spec.submodule_search_locations or ():
        yield from sorted(pathlib.Path(location).glob("*/include"))
