"""The package as others see it: names, version, types, the order of its files, and what importing it costs."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jmx
from jmx import _version

ROOT = pathlib.Path(jmx.__file__).parent
# Each file may import those before it; files of one entry stand side by side.
ORDER = [
    {"_version", "atomic_files", "checks", "codes", "first_order", "meshes", "tables"},
    {"formats", "rounding"},
    {"activations", "routing", "grouping", "mxfp8", "quantization"},
    {"inputs", "layouts"},
    {"experts"},
    {"expert_arrays"},
    {"selection"},
    {"refusals"},
    {"tuning"},
    {"xla_dot"},
    {"xla", "pallas", "ffi"},
    {"backends"},
    {"autodiff"},
    {"layer"},
    {"explain", "modules"},
    {"nnx", "linen"},
    {"checkpoint"},
    {"roofline", "shapes"},
    {"machine"},
    {"bench"},
    {"doctor", "tuner"},
    {"cli"},
]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT.parent)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_public_name_is_there_once_and_in_order():
    assert len({*jmx.__all__}) == len(jmx.__all__)
    assert all(getattr(jmx, name) is not None for name in jmx.__all__)
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert imported == {*jmx.__all__}


def test_public_functions_and_classes_say_what_they_are():
    for name in jmx.__all__:
        value = getattr(jmx, name)
        if callable(value):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), name


def test_version():
    assert jmx.__version__ == _version.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", jmx.__version__)


def test_the_package_is_typed():
    assert (ROOT / "py.typed").is_file()


def test_importing_all_of_it_touches_no_device_and_compiles_nothing():
    everything = "import jmx, jmx.nnx, jmx.linen, jmx.perf.bench, jmx.cli, jmx.checkpoint"
    nowhere = {"JAX_PLATFORMS": "nowhere"}  # initialising any device would fail
    told = run(
        f"{everything}\nassert jmx.explain and jmx.SwiGLU(limit=7.0) and jmx.Environment.named('h200')", **nowhere
    )
    assert told.returncode == 0, told.stderr
    assert "nowhere" in run("import jax; jax.devices()", **nowhere).stderr
    told = run(f"import logging, jax\njax.config.update('jax_log_compiles', True)\n{everything}", JAX_PLATFORMS="cpu")
    assert told.returncode == 0
    assert "ompil" not in told.stderr, told.stderr
    assert (
        "ompil"
        in run(
            "import warnings; warnings.simplefilter('ignore')\nimport jax\n"
            "jax.config.update('jax_log_compiles', True)\njax.numpy.ones(3)",
            JAX_PLATFORMS="cpu",
        ).stderr
    )


def test_importing_adds_little_to_jax_and_flax():
    told = run("import flax.nnx, time\nstart = time.perf_counter()\nimport jmx\nprint(time.perf_counter() - start)")
    assert told.returncode == 0, told.stderr
    assert float(told.stdout) < 5  # about 0.4 s on a machine that does nothing else


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jmx":
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "jmx" else [node.module]
            yield from (name.split(".")[1] for name in names)
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("jmx."))


def test_arrows_point_down():
    rank = {name: i for i, names in enumerate(ORDER) for name in names}
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    assert len(files) > len(rank) / 2
    for path in files:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in imports(path):
            if name != room and name != "__version__":
                assert rank[name] < rank[room], f"{path.relative_to(ROOT)} imports {name}, which stands above it"


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_flax_modules_are_imported_by_name(module):
    told = run(f"import jmx, jmx.{module}; print(jmx.{module}.MoE.__name__)")
    assert told.stdout.strip() == "MoE", told.stderr
