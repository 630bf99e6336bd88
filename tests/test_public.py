"""The package as others see it: names, version, types, the order of its files, and what importing it costs."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from child_environment import importing

import jmx
from jmx import _version

ROOT = pathlib.Path(jmx.__file__).parent
# Each module may import those of earlier entries; those of one entry do not import each other.
ORDER = [
    {"_version", "util"},
    {"meshes", "guard"},
    {"numerics"},
    {"activations", "routing", "grouping"},
    {"experts"},
    {"selection"},
    {"engines"},
    {"xla", "pallas", "ffi"},
    {"backends"},
    {"autodiff"},
    {"lora", "qat"},
    {"parallel"},
    {"layer"},
    {"explain", "module_arguments"},
    {"module_call"},
    {"nnx", "linen"},
    {"checkpoint"},
    {"perf"},
    {"models", "plot"},
    {"training"},
    {"serving"},
    {"cli"},
]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=importing(ROOT.parent) | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_public_name_is_there_once_and_in_order():
    assert len({*jmx.__all__}) == len(jmx.__all__)
    assert all(getattr(jmx, name) is not None for name in jmx.__all__)
    tree = ast.parse((ROOT / "__init__.py").read_text())
    nodes = [*tree.body, *(inner for node in tree.body if isinstance(node, ast.If) for inner in node.body)]
    own = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmx")]
    imported = {a.asname or a.name for node in own for a in node.names}
    assert imported == {*jmx.__all__}
    assert {*jmx.__all__} <= {*dir(jmx)}


def test_public_functions_and_classes_say_what_they_are():
    for name in jmx.__all__:
        value = getattr(jmx, name)
        if callable(value):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), name


def changelog():
    return (ROOT.parent / "CHANGELOG.md").read_text()


def test_version():
    assert jmx.__version__ == _version.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", jmx.__version__)
    assert f"\nversion: {jmx.__version__}\n" in (ROOT.parent / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+) \((?:not released|\d{4}-\d\d-\d\d)\)$", changelog(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == jmx.__version__


def test_the_package_is_typed():
    assert (ROOT / "py.typed").is_file()


def test_importing_jmx_imports_nothing_optional_and_all_of_it_touches_no_device():
    """And so compiles nothing."""
    absent = "flax.nnx", "optax", "orbax.checkpoint", "rich.progress", "safetensors", "tensorstore", "jmx.checkpoint"
    all_of_it = "nnx", "linen", "perf.bench", "cli", "checkpoint", "models", "parallel", "plot", "training"
    done = run(
        f"import jmx, sys\nprint([name for name in {absent} if name in sys.modules])\n"
        f"import {', '.join(f'jmx.{name}' for name in all_of_it)}\n"
        "assert jmx.explain and jmx.SwiGLU(limit=7.0) and jmx.Environment.named('h200')\n"
        "import jax\ntry:\n    jax.numpy.ones(3)\nexcept RuntimeError as error:\n    print(error)",
        JAX_PLATFORMS="nowhere",  # initializing any device fails
    )
    assert done.returncode == 0, done.stderr
    imported, error = done.stdout.split("\n", 1)
    assert imported == "[]"
    assert "nowhere" in error
    with pytest.raises(AttributeError, match="module 'jmx' has no attribute 'checkpoints'"):
        jmx.checkpoints  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("use", ["jmx.", "from jmx import checkpoint; ", "from jmx import *; "])
def test_each_use_imports_checkpoints(use):
    done = run(f"import jmx, sys; {use}checkpoint.gpt_oss; print(sys.modules['jmx.checkpoint'] is jmx.checkpoint)")
    assert done.stdout.strip() == "True", done.stderr


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
                assert rank[there] < rank[here], f"{module} imports {imported}, which is above it"


def test_imports_have_no_circle():
    arrows = {module: {*imports(path)} - {module, "jmx"} for module, path in MODULES.items()}
    while leaves := {module for module, imported in arrows.items() if not imported & arrows.keys()}:
        arrows = {module: imported for module, imported in arrows.items() if module not in leaves}
    assert not arrows


def functions(path):
    """Functions and methods of a file, closures included: name and lines, without decorators."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_modules_have_at_most_450_lines_and_functions_90():
    assert not {module: n for module, path in MODULES.items() if (n := len(path.read_text().splitlines())) > 450}
    assert not [(m, name, n) for m, path in MODULES.items() for name, n in functions(path) if n > 90]


# Modules of less than 40 lines beside the fronts of packages, and why.
SHORT = {
    "_version": "the build reads it",
    "cli.__main__": "`python -m jmx.cli`",
    "cli.chat": "each command has a file, which imports what it runs when it runs",
    "models.families.grouped_experts": "two families import it",
    "models.families.mixtral": "each family has a file",
    "models.families.olmoe": "each family has a file",
    "models.families.qwen3_moe": "each family has a file",
    "numerics.tensor_scales": "the reference and a backend import it",
    "pallas.quiet": "both packages of kernels in Triton import it",
    "pallas.sm90.layout_inference": "jax 0.11 needs it, so that it goes as a whole",
    "parallel.exchanges": "the list of exchanges, each of which imports their protocol",
    "parallel.scatter": "`peer` and its chunks import it",
}


def test_modules_have_at_least_40_lines_or_a_reason():
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items() if path.stem != "__init__"}
    assert {module.removeprefix("jmx.") for module, count in lines.items() if count < 40} == SHORT.keys()


def test_few_modules_are_directly_in_the_package():
    assert len([*ROOT.glob("*.py")]) <= 14


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_flax_modules_are_imported_by_name(module):
    done = run(f"import jmx, jmx.{module}; print(jmx.{module}.MoE.__name__)")
    assert done.stdout.strip() == "MoE", done.stderr


def test_remedies_name_the_distribution_and_its_extras():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    texts = [
        file.read_text()
        for folder in (ROOT, ROOT.parent / "docs")
        for file in folder.rglob("*")
        if file.suffix in (".py", ".md")
    ]
    assert not [line for text in texts for line in re.findall(r"pip install [^'\"`]* jmx(?![\w-])", text)]
    found = [pair for text in texts for pair in re.findall(r"['`](jmx[\w-]*)\[([a-z{]\w*)\}?\]", text)]
    assert len(found) > 8
    assert {name for name, _ in found} == {project["name"]}
    assert {extra for _, extra in found} - {"{extra"} <= project["optional-dependencies"].keys()
