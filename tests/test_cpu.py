"""What the backend `cpu` promises beyond its results: every instruction set, memory, threads, rejections."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
import threading

import cpu_product
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend_cases import (
    BLOCK,
    Case,
    assert_agrees,
    assert_rejects,
    decoded,
    draw_routing,
    draw_weights,
    draw_x,
    reference,
)
from cpu_product import protect
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from memory import abstract_step, compile_here, expert_bytes, temporary_bytes
from properties import examples

import jmx
from jmx import Environment, Experts, Reason
from jmx.ffi.cpu import library as ffi
from jmx.ffi.cpu.backend import Cpu
from jmx.ffi.library import LibraryWarning
from jmx.numerics.formats import BlockScaled

pytestmark = pytest.mark.usefixtures("on_cpu")
FOUND = ffi.library()
KERNELS = FOUND.kernels
built = pytest.mark.skipif(FOUND.fault is not None, reason=str(FOUND.fault))
HERE = Environment.named("cpu")
ON_A_CPU = os.environ | {"JAX_PLATFORMS": "cpu"}  # of other processes
# x's dtype, and the most rows an expert, or 0.
WAYS = [(np.float32, 0), (ml_dtypes.bfloat16, 0), (ml_dtypes.bfloat16, 4), (ml_dtypes.bfloat16, 1)]


def apply(case, x, routing, experts, instructions="best"):
    def run(x, routing, experts):
        return Cpu(instructions).apply(case.problem(), x, routing, experts, HERE)

    return np.asarray(jax.jit(run)(x, routing, experts))


def draw(rng, case):
    return draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)


# Instruction sets


@built
@pytest.mark.parametrize("instructions", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_every_instruction_set_computes_the_layer(instructions, dtype, tokens, rng):
    case = Case(tokens=tokens, hidden=160, intermediate=96, dtype=dtype, ids="anywhere", top_k=3)
    weights, x, routing = draw(rng, case)
    y = apply(case, x, routing, weights.experts(case), instructions)
    assert_agrees("cpu", case, y, reference(case, weights, x, routing))


@built
def test_an_element_has_the_same_bits_in_any_piece():
    """Few rows and many take different paths through the weights, and are in tiles of different sizes."""
    rng = np.random.default_rng(0)
    for instructions in KERNELS:
        for dtype, few in WAYS:
            x, codes, scales, bias = draw_product(rng, rows=19, columns=12, k=224, dtype=dtype)
            whole = product(instructions, x, codes, scales, bias, few)
            for rows in (1, 2, 3, 4, 5, 6, 7, 12):
                for columns in (4, 8):
                    part = product(instructions, x[-rows:], codes[:columns], scales[:columns], bias[:columns], few)
                    np.testing.assert_array_equal(part, whole[-rows:, :columns])


@built
@pytest.mark.parametrize("scale", [0, 1, 247, 254, 255])
def test_a_scale_far_off_changes_no_bits_of_other_weights(scale):
    """A tile with one among its scales takes another path through the weights."""
    rng = np.random.default_rng(0)
    for instructions in KERNELS:
        x, codes, scales, bias = draw_product(rng, rows=3, columns=8, k=224, dtype=ml_dtypes.bfloat16)
        plain = product(instructions, x, codes, scales, bias, few=4)
        scales[5, 3] = scale
        with np.errstate(over="ignore", invalid="ignore"):
            mixed = product(instructions, x, codes, scales, bias, few=4)
        np.testing.assert_array_equal(np.delete(mixed, 5, 1), np.delete(plain, 5, 1))


EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64")
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs a compiler for ARM: pip install ziglang")
@pytest.mark.parametrize("check", ["check_product", "check_threads"])
def test_the_portable_kernel_runs_on_arm(check, request, tmp_path):
    root, program = request.config.rootpath, str(tmp_path / "check")
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static", "-std=gnu++20"]
    flags = ["-O3", "-ffp-contract=fast", "-DJMX_INSTRUCTION_SET=kPortable", "-DJMX_CHECKED=kPortable"]
    flags += [f"-I{root}/jmx/ffi/cpu/src", "-o", program]
    files = [root / "jmx/ffi/cpu/src/product.cc", root / f"tests/{check}.cc"]
    subprocess.run([*command, *flags, *map(str, files)], check=True, timeout=600)
    assert EMULATOR is not None
    subprocess.run([EMULATOR, program], check=True, timeout=300)


@pytest.mark.costly
@pytest.mark.skipif("avx512_bf16" not in KERNELS, reason="needs AVX-512 BF16: not all is emulated")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernel_for_amx_multiplies_emulated_tiles(request, tmp_path):
    root = request.config.rootpath
    command = [
        "g++",
        "-std=gnu++20",
        "-O2",
        "-ffp-contract=fast",
        f"-I{root}/jmx/ffi/cpu/src",
        "-DkAvx512Bf16=kPortable",
    ]
    isa = ["-mavx512f", "-mavx512bw", "-mavx512bf16", "-mfma", "-mamx-tile", "-mamx-bf16"]
    emulated = ["-DJMX_INSTRUCTION_SET=kAmxBf16", "-include", str(root / "tests/emulated_tiles.h")]
    checked = ["-DJMX_CHECKED=kAmxBf16", "-DJMX_ROUNDS_WEIGHTS"]
    files = {
        "tiles.o": [*isa, *emulated, "-c", root / "jmx/ffi/cpu/src/product.cc"],
        "base.o": ["-DJMX_INSTRUCTION_SET=kPortable", "-c", root / "jmx/ffi/cpu/src/product.cc"],
        "check": [*checked, root / "tests/check_product.cc", "tiles.o", "base.o"],
    }
    for name, arguments in files.items():
        subprocess.run([*command, *map(str, arguments), "-o", name], cwd=tmp_path, check=True, timeout=600)
    subprocess.run([str(tmp_path / "check")], check=True, timeout=300)


# One tile, without XLA


def draw_product(rng, rows, columns, k, dtype, low=110, high=134):
    x = rng.standard_normal((rows, k)).astype(dtype)
    codes = rng.integers(0, 16, (columns, k), dtype=np.uint8)
    scales = rng.integers(low, high, (columns, k // BLOCK)).astype(np.uint8)
    return x, codes, scales, rng.standard_normal(columns).astype(np.float32)


def product(instructions, x, codes, scales, bias, few=0, before=0):
    weight = BlockScaled(codes[:, ::2] | codes[:, 1::2] << 4, scales)
    return cpu_product.product(instructions, x, weight, bias, few=few, before=before)


@built
@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 40),
    columns=st.integers(1, 9),
    blocks=st.integers(1, 40),
    way=st.sampled_from(WAYS),
    before=st.integers(0, 63),
)
def test_any_sizes_at_any_address(seed, rows, columns, blocks, way, before):
    rng = np.random.default_rng(seed)
    dtype, few = way
    x, codes, scales, bias = draw_product(rng, rows, 4 * columns, BLOCK * blocks, dtype)
    weights, x64 = decoded(codes, scales), x.astype(np.float64)
    expected = x64 @ weights.T + bias
    bound = np.abs(x64) @ np.abs(weights).T + np.abs(bias)
    for instructions in KERNELS:
        y = product(instructions, x, codes, scales, bias, few, before)
        assert (np.abs(y - expected) <= 1e-6 * bound).all(), instructions


@built
@pytest.mark.parametrize("instructions", KERNELS)
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("scale", [0, 1, 2, 127, 246, 247, 253, 254, 255])
@pytest.mark.parametrize(("dtype", "few"), WAYS)
def test_every_code_is_decoded_at_the_ends_of_the_range(instructions, rows, scale, dtype, few):
    """A one in x picks one weight: products are exact, and nothing is added to them but zeros."""
    codes = np.zeros((16, BLOCK), np.uint8)
    codes[:, 5] = np.arange(16)
    x = np.zeros((rows, BLOCK), dtype)
    x[:, 5] = 1
    scales = np.full((16, 1), scale, np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = decoded(codes, scales)[:, 5].astype(np.float32)
        if instructions.endswith("_bf16") and dtype != np.float32:  # its instruction reads subnormal numbers as zero
            expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)
        y = product(instructions, x, codes, scales, np.zeros(16, np.float32), few)
    np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


# Threads

BITS = """
import sys; sys.path.insert(0, "tests")
import test_cpu; print(test_cpu.digest())
"""


def digest():
    """Of results on seeded inputs large enough to be shared between threads."""
    rng, bits = np.random.default_rng(1), hashlib.sha256()
    for tokens, dtype in ((1, "bfloat16"), (300, "float32")):
        case = Case(tokens=tokens, hidden=512, intermediate=512, dtype=dtype, top_k=4)
        weights, x, routing = draw(rng, case)
        bits.update(apply(case, x, routing, weights.experts(case)).tobytes())
    return bits.hexdigest()


@pytest.mark.costly
@built
@pytest.mark.parametrize("limit", ["one thread", "one core"])
def test_bits_do_not_depend_on_the_number_of_threads(limit, request):
    if limit == "one core" and not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system gives a process no cores of its own")
    flags = os.environ.get("XLA_FLAGS", "") + (" --xla_cpu_multi_thread_eigen=false" if limit == "one thread" else "")
    code = (
        BITS if limit == "one thread" else "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})" + BITS
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=request.config.rootpath,
        env=ON_A_CPU | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == digest(), done.stderr


@built
def test_calls_from_many_threads_do_not_meet(rng):
    case = Case(tokens=40, hidden=256, intermediate=256, top_k=4)
    weights, _, routing = draw(rng, case)
    experts = weights.experts(case)
    xs = [draw_x(rng, case) for _ in range(8)]
    run = jax.jit(lambda x: Cpu().apply(case.problem(), x, jax.tree.map(jnp.asarray, routing), experts, HERE))
    expected = [np.asarray(run(x)) for x in xs]
    found = [[] for _ in xs]
    threads = [
        threading.Thread(target=lambda x, out: out.extend(np.asarray(run(x)) for _ in range(10)), args=pair)
        for pair in zip(xs, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, y in zip(found, expected, strict=True):
        assert len(outs) == 10
        for out in outs:
            np.testing.assert_array_equal(out, y)


# Memory

TOUCHED = """
import sys; sys.path.insert(0, "tests")
import test_cpu; test_cpu.run_on_unreadable_experts()
"""


def run_on_unreadable_experts():
    """Experts fill whole pages, of which those of the experts not used may not be read: a fault ends the process."""
    case = Case(tokens=3, hidden=128, intermediate=64, num_experts=8, top_k=2)
    weights, x, routing = draw(np.random.default_rng(2), case)
    used = np.array([1, 2, 6])
    routing.expert_ids[...] = used[routing.expert_ids % 3]
    routing.expert_ids[0] = 1, -1
    experts = weights.experts(case)
    for tokens in (1, 3):
        some = x[:tokens], jmx.Routing(routing.expert_ids[:tokens], routing.weights[:tokens])
        expected = apply(case, *some, experts)
        held, maps = [], []
        for role in (experts.gate_up, experts.down):
            values = np.asarray(role.values)
            maps.append(mmap.mmap(-1, values.nbytes))
            array = np.frombuffer(maps[-1], np.uint8).reshape(values.shape)
            array[...] = values
            size = values.nbytes // 8
            assert size % mmap.PAGESIZE == 0
            held.append(role._replace(values=jax.dlpack.from_dlpack(array)))
            assert held[-1].values.unsafe_buffer_pointer() == array.ctypes.data  # not a copy
            for expert in set(range(8)) - set(used[: 1 if tokens == 1 else 3]):
                assert protect(array.ctypes.data + expert * size, size, 0) == 0
        there = dataclasses.replace(experts, gate_up=held[0], down=held[1])
        y = apply(case, *some, there)
        np.testing.assert_array_equal(y, expected)
    print("read no other")


@pytest.mark.costly
@built
def test_weights_of_experts_not_used_are_never_read(request):
    done = subprocess.run(
        [sys.executable, "-c", TOUCHED],
        cwd=request.config.rootpath,
        env=ON_A_CPU,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "read no other", (done.returncode, done.stderr)


@built
@pytest.mark.parametrize(("form", "tokens"), [(f, t) for f in ("forward", "views") for t in (1, 64, 4096)])
def test_memory_does_not_grow_with_experts(form, tokens):
    size = 512
    few, many = (
        temporary_bytes(compile_here(step, *arguments))
        for step, arguments in (abstract_step(tokens, n, size, "packed", form) for n in (8, 128))
    )
    biases = 128 * 3 * size * 4  # float32, one row a block
    assert many - few < expert_bytes(size) + 2 * biases
    # Rows by expert, both products' results in float32 and the activation between them.
    assert many < 4 * tokens * size * 2 * (1 + 2 * 2 + 1 + 2) * 1.5 + 2 * expert_bytes(size) + 2 * biases


# Arguments


@built
def test_it_is_the_default_where_it_runs():
    experts = Experts.random(jax.random.key(0), 8, 64, 96, gate_up_order="interleaved")
    x = jax.ShapeDtypeStruct((5, 64), jnp.bfloat16)
    problem = jmx.Problem.of(x, 2, experts, jmx.SwiGLU())
    assert jmx.explain(problem, device="cpu").chosen == "cpu"


CASE = Case().problem()


@pytest.mark.parametrize(
    ("changed", "device", "reason"),
    [
        ({}, "h200", Reason.PLATFORM),
        ({"num_tokens": None}, "cpu", Reason.SYMBOLIC_TOKENS),
        ({"format": "fp8_channel"}, "cpu", Reason.FORMAT),
        ({"input_format": "mxfp8"}, "cpu", Reason.INPUT_FORMAT),
        ({"dtype": "float8_e5m2"}, "cpu", Reason.DTYPE),
        ({"layout": "canonical"}, "cpu", Reason.LAYOUT),
    ],
)
def test_what_it_refuses(changed, device, reason):
    assert_rejects(Cpu(), dataclasses.replace(CASE, **changed), Environment.named(device), reason)


@built
def test_instructions_that_are_not_here_are_refused():
    assert_rejects(Cpu("sse9"), CASE, HERE, Reason.LIBRARY, "`instructions` (='sse9')")


@pytest.mark.parametrize("file", ["missing", "broken"])
def test_without_its_library_explain_names_the_remedy(file, tmp_path, monkeypatch):
    path = tmp_path / "libjmx_cpu.so"
    if file == "broken":
        path.write_text("not a library")
    monkeypatch.setattr(ffi, "_PATH", path)
    monkeypatch.setattr(ffi, "library", ffi.library.__wrapped__)
    with pytest.warns(LibraryWarning) if file == "broken" else contextlib.nullcontext():
        found = jmx.explain(CASE, device="cpu")
    assert found.chosen == "xla"
    (rejection,) = [no for name, _, no in found.trail if name == "cpu"]
    assert rejection is not None
    assert rejection.reason is Reason.NOT_BUILT
    assert "pip install" in rejection.remedy
    assert ("without its kernels" if file == "missing" else "does not load") in rejection.detail


@built
@pytest.mark.parametrize(("argument", "value"), [("experts", 2), ("experts", -1), ("x_rows", 3), ("out_rows", -1)])
def test_blocks_outside_of_the_arrays_are_errors(argument, value):
    rows = {"experts": 1, "x_rows": 1, "out_rows": 0, "counts": 2} | {argument: value}
    blocks = [jnp.array([n], jnp.int32) for n in rows.values()]
    values, scales = jnp.zeros((2, 32, 16), jnp.uint8), jnp.zeros((2, 32, 1), jnp.uint8)
    call = jax.ffi.ffi_call(ffi.GROUPED_PRODUCT, jax.ShapeDtypeStruct((4, 32), jnp.float32))
    nothing = jnp.zeros(0)
    arguments = jnp.ones((4, 32)), nothing, values, scales, nothing.astype(jnp.int8), nothing, nothing[None], *blocks
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"block 0 \(`experts` .*\) is outside of the arrays"):
        jax.block_until_ready(call(*arguments, instructions="best", format="mxfp4", group=np.int64(32), few=False))


@built
def test_it_can_be_exported_by_the_name_of_its_call(rng):
    case = Case(tokens=5)
    weights, x, routing = draw(rng, case)
    experts = weights.experts(case)
    arguments = jnp.asarray(x), jnp.asarray(routing.expert_ids), jnp.asarray(routing.weights), experts.arrays()

    @jax.jit
    def run(x, ids, weights, arrays):
        held = experts.with_arrays(arrays)
        return jmx.moe(x, jmx.Routing(ids, weights), held, activation=case.activation, backend="cpu")

    known = [export.DisabledSafetyCheck.custom_call(ffi.GROUPED_PRODUCT)]
    exported = export.export(run, platforms=["cpu"], disabled_checks=known)(*arguments)
    y = export.deserialize(exported.serialize()).call(*arguments)
    assert_agrees("cpu", case, y, reference(case, weights, x, routing))
