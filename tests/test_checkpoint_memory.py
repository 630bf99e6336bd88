import json
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jmx.checkpoint import shards

pytestmark = pytest.mark.costly

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"

# Each reads the tiny checkpoint first, so that what stays in memory is there, and then the one that is measured.
READ = """
import sys
import jax
from jmx.checkpoint import gpt_oss
def act(path):
    reader = gpt_oss.Reader(path)
    return [reader.experts(i, "packed") for i in range(reader.config.num_hidden_layers)], reader.top()
act(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
arrays = jax.tree.leaves(act(sys.argv[2]))
print(sum(a.nbytes for a in arrays), flush=True)
sys.stdin.readline()
"""
CONVERT = """
import sys
from jmx.checkpoint import gpt_oss
gpt_oss.convert(sys.argv[1], sys.argv[3] + "_tiny", "original")
print("ready", flush=True)
sys.stdin.readline()
gpt_oss.convert(sys.argv[2], sys.argv[3], "original")
print(0, flush=True)
sys.stdin.readline()
"""

QUANTIZE = """
import sys
import jmx
from jmx.checkpoint import quantizing
quantizing.convert(sys.argv[1], sys.argv[3] + "_small", jmx.MXFP4)
print("ready", flush=True)
sys.stdin.readline()
quantizing.convert(sys.argv[2], sys.argv[3], jmx.MXFP4)
print(0, flush=True)
sys.stdin.readline()
"""


def write_big(path: Path, rng: np.random.Generator) -> int:
    """A checkpoint of 8 layers, nearly all of it experts. Gives one layer's packed bytes."""
    experts, size = 16, 1024
    config = json.loads((TINY / "config.json").read_text())
    config |= {"hidden_size": size, "intermediate_size": size, "num_local_experts": experts, "num_hidden_layers": 8}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    shapes = {"model.embed_tokens.weight": (320, size), "model.norm.weight": (size,), "lm_head.weight": (320, size)}
    layer = {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,), "self_attn.sinks": (4,)}
    for name, rows in (("q", 128), ("k", 64), ("v", 64)):
        layer |= {f"self_attn.{name}_proj.weight": (rows, size), f"self_attn.{name}_proj.bias": (rows,)}
    layer |= {"self_attn.o_proj.weight": (size, 128), "self_attn.o_proj.bias": (size,)}
    layer |= {"mlp.router.weight": (experts, size), "mlp.router.bias": (experts,)}
    packed = {}
    for name, rows in (("gate_up", 2 * size), ("down", size)):
        packed[f"mlp.experts.{name}_proj_blocks"] = (experts, rows, size // 32, 16)
        packed[f"mlp.experts.{name}_proj_scales"] = (experts, rows, size // 32)
        layer[f"mlp.experts.{name}_proj_bias"] = (experts, rows)
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(8) for name, shape in (layer | packed).items()}

    def part(name: str) -> list[np.ndarray]:
        if name.endswith(("blocks", "scales")):
            return [rng.integers(0, 255, shapes[name], np.uint8)]  # 255 is no scale
        return [rng.standard_normal(shapes[name]).astype(ml_dtypes.bfloat16)]

    outputs = [
        shards.Output(n, "U8" if n.endswith(("blocks", "scales")) else "BF16", s, lambda n=n: part(n))
        for n, s in shapes.items()
    ]
    shards.write(path, outputs, 60_000_000)
    return sum(int(np.prod(shape)) for shape in packed.values())


def peak_of(script: str, arguments: list[Path]) -> tuple[int, int]:
    """Peak anonymous memory of a process above what it had when it was ready, and what it reports to have kept."""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        status = Path(f"/proc/{child.pid}/status")

        def anonymous() -> int:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
            assert found is not None
            return int(found[1]) * 1024

        assert child.stdout.readline() == "ready\n"
        before = peak = anonymous()
        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0)[0]:
            peak = max(peak, anonymous())
            time.sleep(0.0005)
        peak = max(peak, anonymous())
        kept = int(child.stdout.readline())
        child.stdin.write("\n")
        child.stdin.flush()
    assert child.returncode == 0
    return peak - before, kept


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_reading_and_converting_hold_about_one_layer_in_host_memory(tmp_path, rng):
    layer_bytes = write_big(tmp_path / "big", rng)
    peak, kept = peak_of(READ, [TINY, tmp_path / "big"])
    assert kept >= 8 * layer_bytes
    # On a CPU the arrays themselves are anonymous memory: only memory beyond them is limited.
    assert 0.99 * kept <= peak <= kept + layer_bytes
    peak, _ = peak_of(CONVERT, [TINY, tmp_path / "big", tmp_path / "out"])
    assert peak <= layer_bytes


def write_floats(path: Path, rng: np.random.Generator, num_layers: int, size: int) -> int:
    """Layers of 16 float experts alone. Gives one layer's bytes."""
    names = [f"{e}.{part}_proj.weight" for e in range(16) for part in ("gate", "up", "down")]
    outputs = [
        shards.Output(
            f"model.layers.{layer}.mlp.experts.{name}",
            "BF16",
            (size, size),
            lambda: [rng.standard_normal((size, size), np.float32).astype(ml_dtypes.bfloat16)],
        )
        for layer in range(num_layers)
        for name in names
    ]
    path.mkdir()
    (path / "config.json").write_text("{}")
    shards.write(path, outputs, 60_000_000)
    return 2 * size * size * len(names)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_quantizing_holds_less_than_one_layer_in_host_memory(tmp_path, rng):
    write_floats(tmp_path / "small", rng, 1, 32)
    layer_bytes = write_floats(tmp_path / "big", rng, 2, 1024)
    # Rounding one matrix takes float32 copies of it, and the float64 in which errors are measured.
    peak, _ = peak_of(QUANTIZE, [tmp_path / "small", tmp_path / "big", tmp_path / "out"])
    assert peak <= 0.8 * layer_bytes
