"""The site of the documentation: its pages, their links, and that the API reference has every public name."""

import ast
import importlib
import inspect
import json
import pathlib
import re

import pytest

import jmx
from docs.site import api, built, markdown, navigation, notebooks, repository

ROOT = repository.ROOT

pytestmark = pytest.mark.every_case
PUBLIC = {
    *(f"jmx.{name}" for name in jmx.__all__ if name not in ("__version__", "checkpoint")),
    *("jmx.nnx.MoE", "jmx.linen.MoE"),
    *(
        f"jmx.{package}.{name}"
        for package in ("parallel", "models", "plot", "training", "lora")
        for name in importlib.import_module(f"jmx.{package}").__all__
    ),
    *(f"jmx.checkpoint.{name}" for name in jmx.checkpoint.__all__),
} - {"jmx.parallel.Split"}  # is jmx.Split


def test_every_public_name_is_on_one_page_of_the_reference():
    names = [name for _, names in api.PAGES.values() for name in names]
    assert len({*names}) == len(names)
    assert {*names} >= PUBLIC, f"missing in docs/site/api.py: {sorted(PUBLIC - {*names})}"


def imported(code):
    """Names of jmx that a program imports: `from jmx.a import b` is jmx.a.b."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jmx":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_name_that_the_guides_import_is_in_the_reference():
    names = {name for _, names in api.PAGES.values() for name in names}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    codes = [code for page in pages for code in re.findall(r"^```python.*?\n(.*?)^```", page.read_text(), re.M | re.S)]
    used = {name for code in codes for name in imported(code)}
    assert "jmx.models.load" in used

    def is_missing(name):
        owner, _, member = name.rpartition(".")
        value = getattr(importlib.import_module(owner), member, None)  # a module that was not imported has no attribute
        return (inspect.isroutine(value) or inspect.isclass(value)) and not {name, f"jmx.{member}"} & names

    assert [*filter(is_missing, sorted(used))] == []


@pytest.mark.parametrize("page", api.PAGES)
def test_names_of_the_reference_exist(page):
    text = api.markdown(page)
    for name in api.PAGES[page][1]:
        assert f"::: {name}\n" in text
        owner, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(owner), member), name


def test_the_navigation_has_every_page_once():
    pages = [page for pages in navigation.sections().values() for page in pages.values()]
    assert len({*pages}) == len(pages)
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert written <= {*pages}
    assert api.SECTION in navigation.sections()


def test_a_file_and_its_page_are_inverse():
    for path in [*repository.MOVED, "docs/concepts.md", "docs/internals/cpu.md"]:
        assert repository.file_of(repository.page_of(path)) == path


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("docs/a.md", "[x](concepts.md#the-layer)", "[x](concepts.md#the-layer)"),
        ("docs/a.md", "[x](../README.md#install)", "[x](index.md#install)"),
        ("docs/a.md", "[x](index.md)", "[x](pages.md)"),
        ("docs/internals/cpu.md", "[x](../../jmx/layer.py)", "[x](../source/jmx/layer.py.md)"),
        ("docs/internals/cpu.md", "![x](../images/a.svg)", "![x](../images/a.svg)"),
        ("README.md", "[x](docs/limits.md), [y](examples/)", "[x](limits.md), [y](source/examples.md)"),
        ("benchmarks/README.md", "![x](results/cpu.png)", "![x](results/cpu.png)"),
        ("benchmarks/README.md", "[x](NOTES.md) [y](#latest)", "[x](notes.md) [y](#latest)"),
        ("README.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
        ("README.md", "```python\nx[0](y)\n```", "```python\nx[0](y)\n```"),
    ],
)
def test_links_lead_to_pages(path, text, expected):
    assert repository.with_links_to_pages(text, path, repository.page_of(path)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two:\n* one\n* two\n", "Two:\n\n* one\n* two\n"),
        ("# Two\n1. one\n   more\n2. two\n", "# Two\n\n1. one\n   more\n2. two\n"),
        ("```python pyproject.toml\n* x\n```\n", '```python title="pyproject.toml"\n* x\n```\n'),
        ("```text output\nx\n* x\n```\n", "```text\nx\n* x\n```\n"),
    ],
)
def test_markdown_is_read_as_code_hosts_do(text, expected):
    assert markdown.converted(text) == expected


def test_options_of_commands_stay_whole():
    text = "<td><code>--max-users</code> or <code>-q</code>, not <code>a - b</code></td>"
    whole = text.replace("<code>-", '<code class="option">-')
    assert markdown.with_whole_options(text) == whole


def test_links_of_sources_are_found_outside_code():
    assert "jmx/layer.py" in {*repository.links("docs/internals/structure.md")}
    assert all((ROOT / path).exists() for path in repository.links("README.md"))


def test_a_source_page_has_the_text_and_is_not_searched():
    page = repository.source_page("jmx/_version.py")
    assert (ROOT / "jmx/_version.py").read_text().strip() in page
    assert "exclude: true" in page
    assert "* `dense_moe.py`\n" in repository.source_page("examples")


def test_broken_links_of_a_built_site_are_reported(tmp_path: pathlib.Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top"></h1><a href="b/c.html#x">x</a><a href="#top">y</a>')
    (tmp_path / "b" / "c.html").write_text(
        '<p id="x"><img src="../none.png"><a href="../index.html#low">z</a><a href="https://example.org/x">w</a>'
    )
    assert [*built.faults(tmp_path)] == [
        "b/c.html links to ../index.html#low, which has no element of that name",
        "b/c.html links to ../none.png, which does not exist",
    ]


def test_warnings_of_the_site_are_errors():
    """`make docs` fails with a warning: mkdocs counts those of `strict` only if it logs them."""
    (recipe,) = re.findall(r"^docs: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "$(mkdocs) build" in recipe
    assert not re.search(r"--quiet|\s-q\b|--no-strict", recipe)
    settings = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^strict: true$", settings, re.MULTILINE)
    for fault in ("omitted_files", "absolute_links", "unrecognized_links", "anchors"):
        assert f"\n  {fault}: warn\n" in settings


def test_a_notebook_is_a_page_with_its_outputs(tmp_path: pathlib.Path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]},
        {"output_type": "execute_result", "data": {"text/html": ["<p>a</p>\n\n<p>b</p>"], "text/plain": ["a"]}},
        {"output_type": "display_data", "data": {"image/png": "iVBO\nRw", "text/plain": ["<Figure>"]}},
        {"output_type": "execute_result", "data": {"text/plain": ["3"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["x = 1"], "outputs": outputs},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert notebooks.markdown(tmp_path / "a.ipynb") == (
        "# Title\ntext\n\n```python\nx = 1\n```\n\n```text\none\ntwo\n```\n\n"
        '<div class="output"><p>a</p>  <p>b</p></div>\n\n'
        "![what this cell draws](data:image/png;base64,iVBORw)\n\n```text\n3\n```\n"
    )
