"""The lines of `peer_lines`: its kernels' functions on threads of a CPU, which calls it takes, and its compile."""

import pathlib
import re
import shutil
import subprocess
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jmx
from jmx.ffi import nvrtc
from jmx.ffi.peer import collectives, library
from jmx.parallel.exchange import Call
from jmx.parallel.exchanges import choose

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ROOT / "jmx" / "ffi" / "peer" / "src"


@pytest.mark.costly
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_that_are_late_get_the_lines_of_their_call(num_ranks: int, tmp_path: pathlib.Path) -> None:
    """Each rank is several threads, and some are held up at random; a result of another call would be wrong."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "check_lines"
    flags = ["-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-I", str(SOURCES)]
    subprocess.run([compiler, *flags, str(ROOT / "tests" / "check_lines.cc"), "-o", str(program)], check=True)
    calls = {2: 2000, 3: 1000, 8: 100}[num_ranks]
    done = subprocess.run([program, str(num_ranks), str(calls)], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{num_ranks} ranks, {calls} calls: 0 wrong\n"
    assert done.returncode == 0


def test_which_rows_can_be_lines() -> None:
    constants = dict(re.findall(r"(\w+) = (.*);", (SOURCES / "lines.h").read_text()))
    assert constants["kLineUnit"].split(";")[0] == str(collectives.LINE_BYTES)
    assert constants["kMostLineData"] == f"{collectives.MOST_LINE_BYTES >> 10} << 10"
    region = (SOURCES / "region.h").read_text()
    ways = re.findall(r"enum class Way : long long \{ (.*) \};", region)[0].split(", ")
    assert [name.removeprefix("k").upper() for name in ways] == [way.name for way in collectives.Way]
    assert collectives.can_be_lines([2880 * 2, 16, 16])
    assert collectives.can_be_lines([collectives.MOST_LINE_BYTES])
    assert not collectives.can_be_lines([collectives.MOST_LINE_BYTES - 8, 16])
    assert not collectives.can_be_lines([64, 10])


def call_of(num_tokens: int, **options: Any) -> Call:
    """A call of gpt-oss-120b on two ranks."""
    return Call(("ep",), 2, num_tokens, 4, 2880, 2, True, 128, 64, **options)


@pytest.mark.usefixtures("peer_by_collectives")
@pytest.mark.parametrize(
    ("num_tokens", "chosen"), [(1, "peer_lines"), (45, "peer_lines"), (46, "peer"), (65536, "peer")]
)
def test_few_rows_are_lines_unless_another_exchange_is_asked_for(num_tokens: int, chosen: str) -> None:
    call = call_of(num_tokens)
    assert choose(call).exchange.name == chosen
    for name in ("gather", "rows"):
        assert choose(call, name).exchange.name == name
    assert choose(call_of(num_tokens, capacity=1.0)).exchange.name == "rows"
    if num_tokens > 1:
        assert choose(call_of(num_tokens, chunks=2)).exchange.name == "peer"


@pytest.mark.usefixtures("peer_by_collectives")
def test_rows_that_cannot_be_lines_are_refused() -> None:
    rule = "264960 bytes of a device's tokens and twice 736 of their routing must be multiples of 4, and at most"
    with pytest.raises(ValueError, match=rule):
        choose(call_of(46), "peer_lines")
    odd = Call(("ep",), 2, 1, 1, 2881, 2, True, 128, 64)
    assert "5762 bytes of a device's tokens" in choose(odd).reasons["peer_lines"]
    assert choose(odd).exchange.name == "peer"


@pytest.mark.aot
def test_the_kernels_compile_for_hopper() -> None:
    lines = ("gather_lines", "reduce_bf16_lines", "reduce_f16_lines", "reduce_f32_lines")
    arrays = ("gather_arrays_16", "reduce_bf16_arrays_16", "reduce_f16_arrays_2", "reduce_f32_arrays_4")
    try:
        image = nvrtc.compile_kernels(library.FOLDER / "src", library.HEADERS, "sm_90")
    except OSError as e:
        pytest.skip(f"needs NVRTC, which the `aot` extra installs: {e}")
    for name in (*lines, *arrays, "gather_16"):
        assert name.encode() in image
    assert b"needed" not in image
    assert b"terms" not in image
    image = nvrtc.compile_kernels(library.FOLDER / "src", library.HEADERS, "sm_90", "needed.cu")
    for name in ("gather", "reduce_bf16", "reduce_f16", "reduce_f32"):
        assert f"{name}_needed".encode() in image
    image = nvrtc.compile_kernels(library.FOLDER / "src", library.HEADERS, "sm_90", "terms.cu")
    for name in ("reduce_bf16", "reduce_f16", "reduce_f32"):
        assert f"{name}_terms".encode() in image
        assert f"{name}_terms_arrays".encode() in image
        assert f"{name}_terms_few".encode() in image


def _call(x: Any, logits: Any, experts: Any, exchange: str) -> jax.Array:
    split = jmx.Split(expert="ep", tokens="ep", exchange=exchange)
    return jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(2)), experts, activation="swiglu", split=split)


@pytest.mark.gpu
@pytest.mark.devices(2)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 64])
def test_layers_have_the_bits_of_peer(num_tokens: int) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))
    experts = jmx.Experts.random(jax.random.key(0), 8, 256, 256, gate_up_order="interleaved")
    x = jax.random.normal(jax.random.key(1), (mesh.size * num_tokens, 256), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(2), (mesh.size * num_tokens, 8))
    with jax.set_mesh(mesh):
        expected, got = (jax.jit(partial(_call, exchange=name)) for name in ("peer", "peer_lines"))
        for _ in range(100):
            assert jnp.array_equal(got(x, logits, experts), expected(x, logits, experts))
