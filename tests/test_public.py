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
    {"_version", "util", "meshes"},
    {"numerics"},
    {"activations", "routing", "grouping"},
    {"experts"},
    {"selection"},
    {"engines"},
    {"xla", "pallas", "ffi"},
    {"backends"},
    {"autodiff"},
    {"layer"},
    {"explain", "module_arguments"},
    {"nnx", "linen"},
    {"checkpoint"},
    {"perf"},
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


def module_name(path):
    """jmx/a/b.py is jmx.a.b, and jmx/a/__init__.py is jmx.a."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imports(path):
    """The modules of jmx that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jmx":
            of_names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from of_names & MODULES.keys() or {node.module}
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jmx")


def test_arrows_point_down():
    rank = {name: i for i, names in enumerate(ORDER) for name in names}
    assert {*rank} == {name.split(".")[1] for name in MODULES if "." in name}
    for module, path in MODULES.items():
        if module == "jmx":
            continue
        here = module.split(".")[1]
        for imported in imports(path):
            there = imported.partition(".")[2].partition(".")[0]
            if there not in (here, ""):
                assert rank[there] < rank[here], f"{module} imports {imported}, which stands above it"


def test_imports_have_no_circle():
    arrows = {module: {*imports(path)} - {module, "jmx"} for module, path in MODULES.items()}
    while leaves := {module for module, imported in arrows.items() if not imported & arrows.keys()}:
        arrows = {module: imported for module, imported in arrows.items() if module not in leaves}
    assert not arrows


def test_few_modules_lie_directly_in_the_package():
    assert len([*ROOT.glob("*.py")]) <= 14


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_flax_modules_are_imported_by_name(module):
    told = run(f"import jmx, jmx.{module}; print(jmx.{module}.MoE.__name__)")
    assert told.stdout.strip() == "MoE", told.stderr
