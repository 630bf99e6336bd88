"""Compiling for a GPU on a machine that has none, with the CUDA plugin of jax, and what its compilers report."""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TARGETS = pathlib.Path(__file__).parent / "data"  # a description of each device, by its name


def mesh_of(device: str, count: int = 1) -> Mesh:
    """A mesh of `count` devices "a100", "l4" or "h200", of one host, that are not here."""
    target = (TARGETS / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{count}x1", target_config=target)
    return Mesh(np.array(topology.devices), ("device",), axis_types=(AxisType.Auto,))


def h200_mesh() -> Mesh:
    """A mesh of one H200 that is not here."""
    return mesh_of("h200")


def compile_for(device: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> jax.stages.Compiled:
    """`function` compiled for a device, its abstract arguments placed there. `options` are the compiler's."""
    mesh = mesh_of(device)
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*placed).compile(compiler_options=options)


def compile_for_h200(function: Callable[..., Any], *arguments: Any, **options: Any) -> jax.stages.Compiled:
    """`compile_for` an H200."""
    return compile_for("h200", function, *arguments, **options)


def program_over(mesh: Mesh, function: Callable[..., Any], *arguments: Any) -> str:
    """The compiled program of `function`, whose arguments' arrays are divided along their first axis over `mesh`."""
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    return jax.jit(function).lower(*placed).compile().as_text() or ""


def launches_on_h200(directory: pathlib.Path, function: Callable[..., Any], *arguments: Any) -> list[list[str]]:
    """`launches` of a call of `function`, compiled for an H200."""
    compile_for_h200(function, *arguments, xla_dump_to=str(directory))
    return launches(directory)


def launches(directory: pathlib.Path) -> list[list[str]]:
    """The host's launches, in order, in a call of a program that was compiled with `directory` as `xla_dump_to`.

    Each launch is a list of the kinds of XLA's *thunks* in it. That of a CUDA graph begins with "kCommandBuffer".
    """
    (file,) = directory.glob("*.thunk_sequence_after_thunk_passes.txt")
    found: list[list[str]] = []
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", file.read_text(), re.MULTILINE):
        if not indent:
            found.append([])
        found[-1].append(kind)
    return found


class Kernel(NamedTuple):
    """A compiled Mosaic GPU kernel: bytes of shared memory, ptxas' report, and the machine code with control bits."""

    shared_memory: int
    report: str
    sass: str


def kernels_for_h200(
    capfd: pytest.CaptureFixture[str], function: Callable[..., Any], *arguments: Any
) -> tuple[jax.stages.Compiled, list[Kernel]]:
    """As `compile_for_h200`, with its Mosaic GPU kernels in the order in which they run.

    A process compiles a kernel once, so a second compilation has no report.
    """
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("RESOURCES", "PTXAS", "SASS", "SASS_CTRL"):
            patch.setenv(f"MOSAIC_GPU_DUMP_{kind}", "1")
        compiled = compile_for_h200(function, *arguments)
    tools = _cuda() / "bin"
    if shutil.which("nvdisasm", path=tools) is None:
        pytest.skip(f"needs nvdisasm in {tools}, which the `aot` extra installs")
    log = capfd.readouterr().out
    # ptxas prints its numbered remarks on a kernel before the first line of its report.
    log = re.sub(r"((?:^ptxas info +: \(C.*\n)+)(ptxas info +: \d+ bytes gmem.*\n)", r"\2\1", log, flags=re.MULTILINE)
    memory = [_shared_memory(line) for line in re.findall(r"^Resources\(.*", log, re.MULTILINE)]
    parts = re.split(r"^(?=ptxas info +: \d+ bytes gmem)", log, flags=re.MULTILINE)[1:]
    halves = [part.split(".target", maxsplit=1) for part in parts]
    return compiled, [Kernel(bytes_, *half) for bytes_, half in zip(memory, halves, strict=True)]


def _cuda() -> pathlib.Path:
    """The directory of CUDA's tools, which Mosaic GPU sets when it is imported."""
    importlib.import_module("jax.experimental.mosaic.gpu")
    return pathlib.Path(os.environ["MOSAIC_GPU_CUDA_ROOT"])


def _shared_memory(resources: str) -> int:
    """Arrays and barriers, of 8 bytes each."""
    arrays = int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[0])
    return arrays + 8 * sum(
        int(n) * int(times) for n, times in re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    )


class TritonKernel(NamedTuple):
    """A compiled Pallas Triton kernel: bytes of shared memory, registers and bytes of spills of a thread, what ptxas
    was given, and the binary that it made."""

    shared_memory: int
    registers: int
    spilled: int
    ptx: str
    binary: pathlib.Path

    def sass(self) -> str:
        """The machine code as text."""
        return _disassembled(self.binary)


def sass_of(image: bytes, directory: pathlib.Path) -> dict[str, str]:
    """The machine code, with control bits, of the kernels in a CUDA binary, by their names."""
    binary = directory / "image.cubin"
    binary.write_bytes(image)
    sections = re.split(r"^\s*\.section\s+\.text\.(\w+)", _disassembled(binary, "-hex"), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def _disassembled(binary: pathlib.Path, *options: str) -> str:
    tool = shutil.which("nvdisasm", path=_cuda() / "bin")
    if tool is None:
        pytest.skip("needs nvdisasm, which the `aot` extra installs")
    return subprocess.run([tool, "-c", *options, binary], capture_output=True, text=True, check=True).stdout


def triton_kernels(
    device: str, directory: pathlib.Path, name: str, function: Callable[..., Any], *arguments: Any
) -> tuple[jax.stages.Compiled, list[TritonKernel]]:
    """As `compile_for`, with its kernels called `name`, or `name` and a number, in any order."""
    compiled = compile_for(device, function, *arguments, xla_dump_to=str(directory), xla_dump_emitter_re="ptx")
    launched = max(directory.glob("*.thunk_sequence*.txt"))  # after passes, where a graph was made
    memory = dict(re.findall(rf" ({name}\w*) grid.*shared_memory: (\d+) bytes", launched.read_text()))
    kernels, tool = [], shutil.which("ptxas", path=_cuda() / "bin") or shutil.which("ptxas")
    if tool is None:
        pytest.skip("needs ptxas, which the `aot` extra installs")
    for file in directory.glob("*.ptx"):
        text = file.read_text()
        entry = re.search(rf"^\.visible \.entry ({name}\w*)\(", text, re.MULTILINE)
        if entry is not None:
            target = re.findall(r"^\.target (\w+)", text, re.MULTILINE)[0]
            binary = directory / f"{entry[1]}.cubin"
            command = [tool, "-v", f"-arch={target}", file, "-o", binary]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            registers, spilled = (
                int(re.findall(pattern, report)[0])
                for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
            )
            kernels.append(TritonKernel(int(memory.pop(entry[1])), registers, spilled, text, binary))
    assert not memory, f"no PTX of {memory}"
    return compiled, kernels
