"""Digests of what the Hopper kernels compile to, without a GPU: equal before and after proves a refactoring.

    .venv-aot/bin/python tests/machine_code.py [--lowered] [--only TEXT] [--timeout SECONDS] > digests.txt

Each case is one layer with one configuration, or one call of an attention kernel. For each of its Mosaic GPU kernels a
line has the case, the number of machine instructions, a digest of them, and a digest of the MLIR module they are
compiled from. Labels and source locations are left out. All kernels get the same name here, since a kernel's name is an
operand of its machine code: of the instruction that returns from a subroutine, such as that of a division.

`--lowered` stops at the MLIR, which takes a second a case. Compilation is deterministic: the same MLIR has always given
the same machine code.
"""

import os

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # cuDNN and the driver are not needed to compile

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import aot
import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

import jmx
from jmx import Environment, Experts
from jmx.backends import resolve_layout
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas.attention.decode import flash_decode
from jmx.pallas.attention.latent_decode import flash_decode_latent
from jmx.pallas.attention.prefill import flash_prefill, flash_prefill_pages
from jmx.pallas.attention.write_pages import write_blocks, write_rows
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90_fp8.config import Config as Fp8Config
from jmx.selection import tuning

H200 = Environment.named("h200")
ACTIVATION = jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
_SYMBOL = re.compile(r"\.L_\w+|\$[\w$]+")


class Case(NamedTuple):
    """A layer, tokens, and a configuration; None for that of the shipped table or the heuristic."""

    tokens: int
    sizes: tuple[int, int, int, int]  # experts, top_k, hidden, intermediate
    format: str = "mxfp4"
    input_format: str | None = None
    config: Config | Fp8Config | None = None
    gate_up_order: str | None = "interleaved"
    bias: bool = True
    weights_on: str = "output"


GPT_OSS_20B, GPT_OSS_120B, DEEPSEEK_V3 = (32, 4, 2880, 2880), (128, 4, 2880, 2880), (256, 8, 7168, 2048)
SMALL, QWEN = (8, 2, 512, 640), (128, 8, 2048, 768)
CASES = {
    "mosaic-20b-1": Case(1, GPT_OSS_20B),  # split_k, warpgroups_k
    "mosaic-20b-4": Case(4, GPT_OSS_20B),  # five warpgroups along the columns
    "mosaic-20b-64": Case(64, GPT_OSS_20B),
    "mosaic-20b-256": Case(256, GPT_OSS_20B),  # wgmma
    "mosaic-120b-16": Case(16, GPT_OSS_120B),
    "mosaic-120b-1024": Case(1024, GPT_OSS_120B),
    "mosaic-20b-8192": Case(8192, GPT_OSS_20B),
    "mosaic-deepseek-64-no_bias": Case(64, DEEPSEEK_V3, bias=False),
    "mosaic-nvfp4-1": Case(1, SMALL, "nvfp4"),
    "mosaic-nvfp4-concatenated-32": Case(32, SMALL, "nvfp4", gate_up_order="concatenated", bias=False),
    "mosaic-int4_g64_order-2": Case(2, SMALL, "int4_g64_order"),  # act-order
    "mosaic-int4_g64_order-64": Case(64, SMALL, "int4_g64_order", config=Config(32, 2, 1, 2, 3)),
    "mosaic-fp8_block-40": Case(40, SMALL, "fp8_block", config=Config(16, 2, 2, 1, 4, 2)),
    "mosaic-int8_channel-64": Case(64, SMALL, "int8_channel", config=Config(40, 2, 2, 1, 3, 2)),
    "mosaic-up_first-16": Case(16, SMALL, gate_up_order="concatenated_up_first"),
    "mosaic-mxfp8-8192": Case(8192, GPT_OSS_20B, "mxfp4", "mxfp8"),
    "mosaic-nvfp4-nvfp4-64": Case(64, SMALL, "nvfp4", "nvfp4"),
    "mosaic-int4_g64-int8_token-1": Case(1, SMALL, "int4_g64", "int8_token"),
    "mosaic-int8_channel_asym-int8_token-8192": Case(8192, SMALL, "int8_channel_asym", "int8_token"),
    "mosaic-no_gate-16": Case(16, SMALL, gate_up_order=None),
    "mosaic-input_weights-16": Case(16, SMALL, weights_on="input"),
    "mosaic_fp8-mxfp4-1": Case(1, GPT_OSS_20B, "mxfp4", "fp8_token"),  # fuse_quantize, resident_rows
    "mosaic_fp8-mxfp4-8-shared": Case(8, (8, 2, 2048, 2048), "mxfp4", "fp8_token"),  # fuse_quantize, warpgroups_k
    "mosaic_fp8-mxfp4-16": Case(16, SMALL, "mxfp4", "fp8_token"),
    "mosaic_fp8-mxfp4-64-two": Case(64, SMALL, "mxfp4", "fp8_token", Fp8Config(24, 3, 2, 6)),
    "mosaic_fp8-mxfp4-block-16": Case(16, SMALL, "mxfp4", "fp8_block", Fp8Config(16, 2, 1, 4, 2, 1, False, True)),
    "mosaic_fp8-mxfp4-2048": Case(2048, (8, 2, 512, 640), "mxfp4", "fp8_token"),  # own_sums
    "mosaic_fp8-fp8_block-4": Case(4, (8, 2, 7168, 2048), "fp8_block", "fp8_block", bias=False),
    "mosaic_fp8-fp8_block-2048": Case(2048, (8, 2, 512, 640), "fp8_block", "fp8_block"),  # tokens as A
    "mosaic_fp8-fp8_channel-static-4": Case(4, GPT_OSS_20B, "fp8_channel", "fp8_static"),
    "mosaic_fp8-fp8_channel-token-64": Case(64, SMALL, "fp8_channel", "fp8_token", Fp8Config(16, 1, 2, 4, 2, 3)),
    "mosaic_fp8-fp8_channel-block-2048": Case(2048, (8, 2, 768, 896), "fp8_channel", "fp8_block"),
    "mosaic_fp8-int4_g128-int8-16": Case(16, SMALL, "int4_g128", "int8_token"),
    "mosaic_fp8-int4_channel-int8-2048": Case(2048, (8, 2, 512, 640), "int4_channel", "int8_token"),  # int32 own sums
    "mosaic_fp8-int4_channel-token-2048": Case(2048, (8, 2, 512, 640), "int4_channel", "fp8_token"),
    "mosaic_fp8-int8_g128-int8-2048": Case(2048, (8, 2, 512, 640), "int8_g128", "int8_token"),
    "mosaic_fp8-fp8_tensor-concatenated-300": Case(
        300, QWEN, "fp8_tensor", "fp8_token", gate_up_order="concatenated", weights_on="input"
    ),
}


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


SINKS = array(64, dtype=jnp.float32)
STEP, CACHE, CACHE_PAGES = array(2, 64, 64), array(2, 2, 8, 1024, 64), array(2, 33, 8, 128, 64)
PROMPT, KEYS, BLOCKS = array(2, 1024, 64, 64), array(2, 1024, 8, 64), array(2, 128, 64, 64)
TABLES, POSITIONS = numbers(2, 16), numbers(2)
ATTENTION = {  # functions of what is static, and arrays
    "attention-decode": (partial(flash_decode, window=None), STEP, CACHE, SINKS, POSITIONS),
    "attention-decode-padded-window": (
        partial(flash_decode, window=300),
        *(array(2, 6, 80), array(2, 2, 2, 1024, 80), array(6, dtype=jnp.float32), POSITIONS),
    ),
    "attention-decode-pages": (
        lambda query, cache, sinks, at, tables: flash_decode(query, cache, sinks, at, 300, tables),
        *(STEP, CACHE_PAGES, SINKS, POSITIONS, TABLES),
    ),
    "attention-decode_latent": (
        partial(flash_decode_latent, rank=512, scale=0.1, core_count=132),
        *(array(2, 20, 576), array(2, 1024, 576), POSITIONS),
    ),
    "attention-prefill": (partial(flash_prefill, window=None, core_count=8), PROMPT, KEYS, KEYS, SINKS),
    "attention-prefill-window": (partial(flash_prefill, window=300, core_count=8), PROMPT, KEYS, KEYS, SINKS),
    "attention-prefill-192": (
        partial(flash_prefill, window=None, core_count=8),
        *(array(1, 256, 8, 192), array(1, 256, 8, 192), array(1, 256, 8, 128), array(8, dtype=jnp.float32)),
    ),
    "attention-prefill-pages": (
        partial(flash_prefill_pages, window=None),
        *(BLOCKS, CACHE_PAGES, TABLES, POSITIONS, SINKS),
    ),
    "attention-write_rows": (write_rows, CACHE_PAGES, array(2, 2, 8, 64), POSITIONS, POSITIONS),
    "attention-write_blocks": (write_blocks, CACHE_PAGES, array(2, 2, 128, 8, 64), POSITIONS),
}


def compile_case(name: str, directory: str | None) -> None:
    """Lowers a case, and compiles it where its dumps have a `directory`."""
    if name in ATTENTION:
        call, *arrays = ATTENTION[name]
        lowered_or_compiled(jax.jit(call), tuple(arrays), directory)
        return
    case = CASES[name]
    num_experts, top_k, hidden, intermediate = case.sizes
    backend = name.split("-", 1)[0]
    activation = ACTIVATION if case.gate_up_order is not None else jmx.ReLU2()

    def make(key: jax.Array) -> Experts:
        format, order = FORMATS[case.format], case.gate_up_order
        experts = Experts.random(
            key, num_experts, hidden, intermediate, gate_up_order=order, format=format, bias=case.bias
        )
        if case.input_format is not None:
            scales = (0.01, 0.02) if INPUT_FORMATS[case.input_format].static else ()
            experts = experts.with_inputs(case.input_format, *map(jnp.float32, scales))
        return experts.prepare(resolve_layout("auto", H200, format, case.input_format))

    def layer(x: Any, ids: Any, weights: Any, experts: Experts) -> jax.Array:
        routing = jmx.Routing(ids, weights)
        return jmx.moe(x, routing, experts, activation=activation, backend=backend, weights_on=case.weights_on)

    x = jax.ShapeDtypeStruct((case.tokens, hidden), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((case.tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32))
    experts = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    arguments, function = (x, ids, weights, experts), jax.jit(layer)
    if case.config is None:
        lowered_or_compiled(function, arguments, directory)
    else:
        with tuning.override(backend, case.config):
            lowered_or_compiled(function, arguments, directory)


def lowered_or_compiled(function: Any, arguments: Any, directory: str | None) -> None:
    if directory is not None:
        aot.compile_for_h200(function, *arguments)
        return
    mesh = aot.h200_mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function.lower(*placed)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def modules(name: str, directory: str | None) -> list[str]:
    """The MLIR of a case's kernels, all of which are named KERNEL."""
    found, lower, kernel = [], mgpu.core._mosaic_gpu_lowering_rule, plgpu.kernel

    def record(context: Any, *arguments: Any, module: Any, **options: Any) -> Any:
        text = module.operation.get_asm(enable_debug_info=False)
        found.append(re.sub(r'dump_basename = "\w+"|module @\w+', "", text))
        return lower(context, *arguments, module=module, **options)

    def renamed(*arguments: Any, **options: Any) -> Any:
        return kernel(*arguments, **{**options, "kernel_name": "KERNEL"})

    mgpu.core._mosaic_gpu_lowering_rule, plgpu.kernel = record, renamed
    try:
        compile_case(name, directory)
    finally:
        mgpu.core._mosaic_gpu_lowering_rule, plgpu.kernel = lower, kernel
    return found


def instructions(sass: str) -> Iterator[str]:
    """Machine instructions in order; labels by the order in which they are first named."""
    labels: dict[str, str] = {}
    for line in sass.splitlines():
        if found := re.match(r"\s*/\*[0-9a-f]+\*/\s+([^;]*);", line):
            yield _SYMBOL.sub(lambda symbol: labels.setdefault(symbol[0], f"L{len(labels)}"), found[1])
        elif found := re.match(r"\s*(\.L_\w+):", line):
            yield labels.setdefault(found[1], f"L{len(labels)}") + ":"


def report(name: str, lowered: bool) -> None:
    texts = modules(name, None if lowered else "")
    for nth, text in enumerate(texts):
        print(f"@module {name}#{nth} {digest(text)}")
        if "KEEP" in os.environ:
            with open(f"{os.environ['KEEP']}/{name}#{nth}.mlir", "w") as file:
                file.write(text)


def compiled(name: str, timeout: float) -> list[str]:
    """A process of its own, whose output has the machine code."""
    environment = {**os.environ, "MOSAIC_GPU_DUMP_SASS": "1"}
    command = [sys.executable, __file__, "--one", name]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return [f"{name} timed out"]
    if ran.returncode:
        return [f"{name} failed: {ran.stderr.strip().splitlines()[-1]}"]
    of_modules = re.findall(r"^@module (\S+) (\w+)$", ran.stdout, re.MULTILINE)
    programs = [[*instructions(part)] for part in re.split(r"^(?=\s*\.target)", ran.stdout, flags=re.MULTILINE)[1:]]
    assert len(programs) == len(of_modules), (len(programs), of_modules)
    return [
        f"{kernel} {sum(not line.endswith(':') for line in program)} {digest(chr(10).join(program))} {module}"
        for (kernel, module), program in zip(of_modules, programs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lowered", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=300)
    arguments = parser.parse_args()
    if arguments.one:
        report(arguments.one, lowered=False)
        return
    for name in (*CASES, *ATTENTION):
        if arguments.only not in name:
            continue
        if arguments.lowered:
            report(name, lowered=True)
        else:
            print(*compiled(name, arguments.timeout), sep="\n", flush=True)


if __name__ == "__main__":
    main()
