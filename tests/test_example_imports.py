"""What examples take from jmx is public: an example is what a reader copies."""

import ast
import importlib
import inspect
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.every_case

EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

# The modules whose names are public: those that README.md and docs/ tell users to import, and CONTRIBUTING.md those who
# write files. Of each, its `__all__`, or, without one, what it defines under a name without a leading underscore.
PUBLIC = {
    "jmx",
    "jmx.nnx",
    "jmx.linen",
    "jmx.backends",  # docs/adding_a_backend.md
    "jmx.checkpoint",
    "jmx.checkpoint.compressed_tensors",
    "jmx.checkpoint.gpt_oss",
    "jmx.checkpoint.model_configs",
    "jmx.checkpoint.model_configs.gpt_oss",
    "jmx.checkpoint.model_configs.qwen3_moe",
    "jmx.checkpoint.orbax",
    "jmx.checkpoint.peft",
    "jmx.checkpoint.quantizing",
    "jmx.checkpoint.shards",
    "jmx.lora",
    "jmx.models",
    "jmx.parallel",
    "jmx.plot",
    "jmx.training",
    "jmx.util.atomic_files",  # CONTRIBUTING.md
}


def is_public(module: str, name: str) -> bool:
    """Whether `name` is a public name of `module`, or a public module in it."""
    if f"{module}.{name}" in PUBLIC:
        return True
    if module not in PUBLIC:
        return False
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None)
    return name in names if names is not None else hasattr(found, name) and not name.startswith("_")


def problems(source: str) -> Iterator[str]:
    """What a file takes from jmx that is not public: imports, and attributes of jmx and its modules by dotted name."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # by the name that the file gives them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jmx":
                    modules[alias.asname or "jmx"] = alias.name if alias.asname else "jmx"
                    if alias.name not in PUBLIC:
                        yield f"import {alias.name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jmx":
            for alias in node.names:
                if not is_public(node.module or "", alias.name):
                    yield f"from {node.module} import {alias.name}"
                if f"{node.module}.{alias.name}" in PUBLIC:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if (owner := dotted(node.value, modules)) in PUBLIC and not is_public(owner, node.attr):
            yield f"{owner}.{node.attr}"


def dotted(node: ast.expr, modules: dict[str, str]) -> str:
    """The module that an expression such as `jmx.checkpoint` names, or ""."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, modules)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.relative_to(ROOT / "examples").as_posix())
def test_examples_import_public_names_alone(file):
    assert not [*problems(file.read_text())]


@pytest.mark.parametrize(
    "source",
    [
        "from jmx.checkpoint.gpt_oss.tensor_names import HF",
        "from jmx.checkpoint import placement",
        "from jmx.checkpoint.gpt_oss import tensor_names",
        "from jmx import _version",
        "import jmx.layer",
        "import jmx\njmx.layer.flat_routing",
        "from jmx.checkpoint import gpt_oss\ngpt_oss.storage",
        "import jmx\njmx.checkpoint.placement.place",
    ],
)
def test_what_is_not_public_is_found(source):
    assert len([*problems(source)]) == 1


def test_public_modules_are_documented_ones():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    for module in PUBLIC:
        assert inspect.ismodule(importlib.import_module(module))
        assert module.rpartition(".")[2] in text, module
