#!/usr/bin/env python3
"""llama.cpp's MXFP4 layer on a CPU, through its library ggml: python benchmarks/peers/llama_cpp.py DIR

As a program it fetches llama-cpp-python's sources from the package index, and builds the ggml in them into DIR, for
this machine's instruction set (it needs pip, cmake and a C++ compiler, and some minutes). As a module it runs a layer
as llama.cpp runs gpt-oss's: `mul_mat_id` for gate, up and down, tokens quantized to 8 bits before each. Weights are in
the layout that ggml itself prefers on this machine, `CPU_REPACK`, where it has one.
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from jmx.util import atomic_files

VERSION = "0.3.36"  # of llama-cpp-python
_SOURCE = "vendor/llama.cpp/ggml/"
_PROJECT = "cmake_minimum_required(VERSION 3.20)\nproject(peer C CXX)\nadd_subdirectory(ggml)\n"
_LIBRARIES = ("libggml-base.so", "libggml-cpu.so")  # each needs those before it

_F32, _I32, _MXFP4 = 0, 26, 39  # ggml_type
_BLOCK = 32
_GRAPH_NODES = 4096
Array = np.ndarray[Any, Any]


def main(directory: str) -> None:
    """Creates `directory`, which appears when it is complete. FileExistsError if it exists."""
    with atomic_files.new_path(directory) as target, tempfile.TemporaryDirectory() as downloads:
        wanted = ["--no-deps", "--no-binary=llama-cpp-python", f"llama-cpp-python=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", downloads, *wanted], check=True)
        (sdist,) = pathlib.Path(downloads).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            for member in archive.getmembers():
                _, _, name = member.name.partition("/")
                if name.startswith(_SOURCE):
                    member.name = "ggml/" + name.removeprefix(_SOURCE)
                    archive.extract(member, downloads, filter="data")
        pathlib.Path(downloads, "CMakeLists.txt").write_text(_PROJECT)
        build = pathlib.Path(downloads, "build")
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON"]
        subprocess.run(["cmake", "-S", downloads, "-B", str(build), *flags], check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", str(os.cpu_count())], check=True)
        target.mkdir()
        for name in _LIBRARIES:
            (found,) = build.rglob(name)
            (target / name).write_bytes(found.read_bytes())
        (target / "versions.json").write_text(json.dumps({"llama-cpp-python": VERSION}))


class Weights(NamedTuple):
    """A layer as in gpt-oss's checkpoints: gate and up rows interleaved, the even element in the low nibble."""

    gate_up: Array  # (E, 2I, H/2) uint8
    gate_up_scales: Array  # (E, 2I, H/32) uint8
    gate_up_bias: Array  # (E, 2I) float32
    down: Array  # (E, H, I/2) uint8
    down_scales: Array  # (E, H, I/32) uint8
    down_bias: Array  # (E, H) float32


class Call(NamedTuple):
    """Inputs of a layer. Routing is not part of the call."""

    x: Array  # (T, H) float32
    expert_ids: Array  # (T, k) int32
    weights: Array  # (T, k) float32


def blocks(values: Array, scales: Array) -> Array:
    """Packed values (..., K/2) and codes (..., K/32) -> ggml's blocks (..., K/32, 17): the code, then 16 bytes.

    The low nibble of a byte is one of the first 16 elements of a block, the high nibble the one 16 after it.
    """
    pairs = values.reshape(*scales.shape, _BLOCK // 2)
    elements = np.stack([pairs & 15, pairs >> 4], -1).reshape(*scales.shape, _BLOCK)
    halves = elements[..., : _BLOCK // 2] | elements[..., _BLOCK // 2 :] << 4
    return np.concatenate([scales[..., None], halves], -1)


class _Parameters(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The library of `directory`, on `num_threads` threads."""

    def __init__(self, directory: str, num_threads: int) -> None:
        libraries = [ctypes.CDLL(str(pathlib.Path(directory, name)), ctypes.RTLD_GLOBAL) for name in _LIBRARIES]
        self._functions = dict.fromkeys(libraries)
        self.backend = self("backend_cpu_init")
        self("backend_cpu_set_n_threads", self.backend, ctypes.c_int(num_threads))
        self.plain = self("backend_cpu_buffer_type")

    def __call__(self, name: str, *arguments: Any, result: Any = ctypes.c_void_p) -> Any:
        """Calls ggml_<name>. Integers are int64, floats are float32, and results pointers, unless stated otherwise."""
        function = next(f for f in (getattr(lib, f"ggml_{name}", None) for lib in self._functions) if f is not None)
        function.restype = result
        kinds = {int: ctypes.c_int64, float: ctypes.c_float}
        return function(*(kinds.get(type(a), lambda a: a)(a) for a in arguments))

    def repacking(self) -> Any:
        """The buffer type that converts weights to the layout of this machine's fastest products, or None."""
        find = ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts")
        device = ctypes.c_void_p(self("backend_get_device", ctypes.c_void_p(self.backend)))
        address = self("backend_reg_get_proc_address", ctypes.c_void_p(self("backend_cpu_reg")), find)
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        for buffer in iter_pointers(types):
            if self("backend_buft_name", ctypes.c_void_p(buffer), result=ctypes.c_char_p) == b"CPU_REPACK":
                return buffer
        return None

    def context(self) -> ctypes.c_void_p:
        """Memory for the descriptions of tensors, not for their contents."""
        return ctypes.c_void_p(self("init", _Parameters(64 << 20, None, True)))

    def tensor(self, context: ctypes.c_void_p, kind: int, *sizes: int) -> ctypes.c_void_p:
        """A tensor of `sizes`, the fastest axis first."""
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        return ctypes.c_void_p(self("new_tensor", context, ctypes.c_int(kind), ctypes.c_int(len(sizes)), shape))

    def fill(self, tensor: ctypes.c_void_p, array: Array) -> None:
        """Copies an array into a whole tensor."""
        array = np.ascontiguousarray(array)
        size = self("nbytes", tensor, result=ctypes.c_size_t)
        assert size == array.nbytes, (size, array.nbytes)
        whole = ctypes.c_size_t(0), ctypes.c_size_t(size)
        self("backend_tensor_set", tensor, ctypes.c_void_p(array.ctypes.data), *whole)


def iter_pointers(pointers: Any) -> Any:
    """The items of a null-terminated list in C."""
    index = 0
    while pointers[index]:
        yield pointers[index]
        index += 1


class Layer:
    """One layer's weights in ggml."""

    def __init__(self, ggml: Ggml, weights: Weights) -> None:
        num_experts, hidden = weights.down_bias.shape
        inner = weights.gate_up_bias.shape[1] // 2
        self.ggml = ggml
        held, biases = ggml.context(), ggml.context()
        self.gate, self.up = (ggml.tensor(held, _MXFP4, hidden, inner, num_experts) for _ in range(2))
        self.down = ggml.tensor(held, _MXFP4, inner, hidden, num_experts)
        self.gate_bias, self.up_bias = (ggml.tensor(biases, _F32, inner, num_experts) for _ in range(2))
        self.down_bias = ggml.tensor(biases, _F32, hidden, num_experts)
        for context, kind in ((held, ggml.repacking() or ggml.plain), (biases, ggml.plain)):
            assert ggml("backend_alloc_ctx_tensors_from_buft", context, ctypes.c_void_p(kind)) is not None
        for first, matrix, bias in ((0, self.gate, self.gate_bias), (1, self.up, self.up_bias)):
            ggml.fill(matrix, blocks(weights.gate_up[:, first::2], weights.gate_up_scales[:, first::2]))
            ggml.fill(bias, weights.gate_up_bias[:, first::2])
        ggml.fill(self.down, blocks(weights.down, weights.down_scales))
        ggml.fill(self.down_bias, weights.down_bias)

    def build(self, context: ctypes.c_void_p, x: Any, ids: Any, weights: Any, alpha: float, limit: float) -> Any:
        """The layer's nodes, as llama.cpp makes them for gpt-oss; its result is (H, T)."""

        def node(name: str, *arguments: Any) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.ggml(name, context, *arguments))

        def product(matrix: Any, rows: Any, bias: Any) -> ctypes.c_void_p:
            return node("add_id", node("mul_mat_id", matrix, rows, ids), bias, ids)

        up, gate = product(self.up, x, self.up_bias), product(self.gate, x, self.gate_bias)
        y = product(self.down, node("swiglu_oai", gate, up, alpha, limit), self.down_bias)
        y = node("mul", y, weights)
        (hidden, top_k, num_tokens) = self.sizes(y)
        slots = [
            node("view_2d", y, hidden, num_tokens, ctypes.c_size_t(4 * hidden * top_k), ctypes.c_size_t(4 * hidden * k))
            for k in range(top_k)
        ]
        total = slots[0]
        for slot in slots[1:]:
            total = node("add", total, slot)
        return total if top_k > 1 else node("cont", total)

    @staticmethod
    def sizes(tensor: ctypes.c_void_p) -> tuple[int, int, int]:
        """The first three sizes of a tensor, which follow its type and its buffer in its description."""
        assert tensor.value is not None
        a, b, c = (ctypes.c_int64 * 3).from_address(tensor.value + 16)
        return a, b, c


class Program:
    """Layers on the same tokens, as one graph: `run` computes all, `result` is the first one's, float32 (T, H)."""

    def __init__(self, layers: Sequence[Layer], calls: Sequence[Call], alpha: float, limit: float) -> None:
        self.ggml = ggml = layers[0].ggml
        inputs, nodes = ggml.context(), ggml.context()
        size = ctypes.c_size_t(_GRAPH_NODES)
        self.graph = ctypes.c_void_p(ggml("new_graph_custom", nodes, size, ctypes.c_bool(False)))
        given, results = [], []
        for layer, call in zip(layers, calls, strict=True):
            (num_tokens, hidden), top_k = call.x.shape, call.expert_ids.shape[1]
            x = ggml.tensor(inputs, _F32, hidden, 1, num_tokens)
            ids = ggml.tensor(inputs, _I32, top_k, num_tokens)
            weights = ggml.tensor(inputs, _F32, 1, top_k, num_tokens)
            given += [(x, call.x), (ids, call.expert_ids), (weights, call.weights)]
            results.append(layer.build(nodes, x, ids, weights, alpha, limit))
            ggml("set_output", results[-1])
            ggml("build_forward_expand", self.graph, results[-1])
        assert ggml("backend_alloc_ctx_tensors_from_buft", inputs, ctypes.c_void_p(ggml.plain)) is not None
        for tensor, array in given:
            ggml.fill(tensor, array)
        allocator = ctypes.c_void_p(ggml("gallocr_new", ctypes.c_void_p(ggml.plain)))
        assert ggml("gallocr_alloc_graph", allocator, self.graph, result=ctypes.c_bool)
        self.first, self.shape = results[0], calls[0].x.shape

    def run(self) -> None:
        """Computes every layer, and returns when that is done."""
        status = self.ggml("backend_graph_compute", ctypes.c_void_p(self.ggml.backend), self.graph, result=ctypes.c_int)
        assert status == 0, status

    def result(self) -> Array:
        """The result of the last `run`."""
        out = np.full(self.shape, np.nan, np.float32)
        whole = ctypes.c_size_t(0), ctypes.c_size_t(out.nbytes)
        self.ggml("backend_tensor_get", self.first, ctypes.c_void_p(out.ctypes.data), *whole)
        return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
