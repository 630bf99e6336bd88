"""README.md and docs/: what is printed there runs, and what is named there exists."""

import ast
import functools
import importlib
import importlib.util
import itertools
import math
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from typing import Any, NamedTuple

import pytest
from child_environment import importing

import jmx
from benchmarks import picture
from jmx import cli
from jmx.ffi.cpu import library as ffi
from jmx.perf.roofline import Report
from tests import file_map

ROOT = pathlib.Path(__file__).parents[1]
# README.md, and pages of docs/ by their path there.
PAGES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(ROOT / "docs").as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))
}
BESIDE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PROSE = [*PAGES.values(), *BESIDE, *sorted((ROOT / "benchmarks").glob("*.md"))]


class Block(NamedTuple):
    """Fenced code: its language, the file that the fence names or "", and its text."""

    language: str
    file: str
    text: str


# An editable install finds jmx before PYTHONPATH does.
WITHOUT_THE_INSTALLED = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildInplaceFinder"]
"""

FENCED = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in FENCED.findall(PAGES[page].read_text())]


def prose(page: str) -> str:
    return INDENTED.sub("", FENCED.sub("", PAGES[page].read_text()))


def python(page: str) -> str:
    """A page's Python, in order, but for what it calls files."""
    return "\n".join(block.text for block in blocks(page) if (block.language, block.file) == ("python", ""))


def run(*arguments: str | pathlib.Path, here: pathlib.Path = ROOT, warnings: str = "error") -> str:
    environment = importing(here, JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-W", warnings, *arguments],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_is_one_page_and_its_example_short():
    assert len(PAGES["README.md"].read_text().splitlines()) <= 100
    (example,) = [block for block in blocks("README.md") if block.language == "python"]
    assert len(example.text.splitlines()) <= 25


@pytest.mark.costly
@pytest.mark.parametrize("page", [page for page in PAGES if python(page)])
def test_python_runs_as_printed(page):
    out = run("-c", python(page))
    if ffi.library().fault is not None:
        pytest.skip("what is printed there is the output of jmx with its C++ kernels")
    for expected in (block.text for block in blocks(page) if (block.language, block.file) == ("text", "output")):
        assert expected.strip() in out


def install(package: pathlib.Path, site: pathlib.Path) -> None:
    """Installs a package into a directory: by pip, or, where it lacks what builds it, as pip would."""
    if importlib.util.find_spec("setuptools") and importlib.util.find_spec("pip"):
        options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--target"]
        run("-m", "pip", "install", *options, str(site), str(package), warnings="default")  # of pip's own
        return
    project = tomllib.loads((package / "pyproject.toml").read_text())
    name, version = project["project"]["name"], project["project"]["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(package / f"{module}.py", site)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[pathlib.Path, dict[str, str]]:
    """The package of docs/adding_a_backend.md: its folder, and an environment in which it is installed."""
    package, site = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("site")
    for block in blocks("adding_a_backend.md"):
        (package / block.file).write_text(block.text)
    install(package, site)
    return package, importing(site, ROOT, JAX_PLATFORMS="cpu")


@pytest.mark.costly
def test_the_backend_that_the_docs_build_works(installed, request):
    """Run with the page's own commands. If this run draws cases, so does that of jmx's tests."""
    package, environment = installed
    found = [line.strip() for line in INDENTED.findall(FENCED.sub("", PAGES["adding_a_backend.md"].read_text()))]
    assert [line.split()[0] for line in found] == ["pip", "python", "python"]
    (package / "conftest.py").write_text(WITHOUT_THE_INSTALLED)
    drawn = request.config.getoption("--drawn")
    for command, here, least in zip(found[1:], (package, ROOT), (5, 20 if drawn else 40), strict=True):
        arguments = [sys.executable, *shlex.split(command)[1:], *(["--drawn"] if drawn and here == ROOT else [])]
        done = subprocess.run(arguments, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None, done.stdout
        assert int(passed[1]) >= least


@pytest.mark.costly
def test_an_installed_backend_shows_everywhere(installed):
    _, environment = installed
    for arguments in (
        ["doctor"],
        ["explain", "--model", "gpt-oss-20b", "--layout", "swapped"],
        ["explain", "--model", "gpt-oss-20b", "--backend", "dense", "--layout", "swapped"],
    ):
        code = f"{WITHOUT_THE_INSTALLED}from jmx import cli\nsys.exit(cli.main({arguments}))"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert re.search(r"│ dense +│ (yes|chosen) ", done.stdout), done.stdout


def commands(start: str) -> list[list[str]]:
    lines = re.findall(rf"^    {start} (.*)$", "".join(page.read_text() for page in PAGES.values()), re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    return [[*itertools.takewhile(lambda word: word not in ("<", ">"), line)] for line in words]


def test_commands_are_ones_that_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= {target for target, *_ in commands("make")} <= {*targets}
    for arguments in (mine := commands("jmx")):
        cli.parser().parse_args(arguments)
    assert {"explain", "generate", "doctor", "convert", "bench"} <= {arguments[0] for arguments in mine}


def test_benchmarks_run_from_a_clone_alone():
    """Run as a file, a script finds neither jmx nor its neighbors unless it names the clone."""
    scripts = {word for line in commands("python") for word in line if re.fullmatch(r"benchmarks/.*\.py", word)}
    assert {"benchmarks/first_token.py", "benchmarks/mesh_table.py"} <= scripts
    for script in scripts:
        text = (ROOT / script).read_text()
        ours = re.search(r"^(from|import) (jmx|benchmarks)\b", text, re.MULTILINE)
        assert not ours or "sys.path.insert" in text[: ours.start()], script


def test_the_index_links_to_every_page():
    for page in PAGES.keys() - {"README.md", "index.md"}:
        assert f"({page})" in PAGES["index.md"].read_text(), page
    assert "(docs/index.md)" in PAGES["README.md"].read_text()


def anchors(path: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_anchors_exist(page):
    text = INDENTED.sub("", FENCED.sub("", page.read_text()))
    for link, anchor in re.findall(r"\]\((?!https:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_are_wrapped_at_120(page):
    """Except those of tables and code."""
    text = INDENTED.sub("", FENCED.sub("", page.read_text()))
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long


def test_the_readmes_speedup_is_that_of_the_saved_results():
    report = Report.load(str(ROOT / "benchmarks" / "results" / "h200-gpt-oss-120b.json"))
    ratios = picture.speedups(report)
    assert f"**{min(ratios):.2f} to {max(ratios):.2f} times as fast**" in PAGES["README.md"].read_text()


def test_the_table_of_backends_is_that_of_the_saved_results():
    """Microseconds with three digits, or whole ones."""
    rows = Report.load(str(ROOT / "benchmarks" / "results" / "h200-gpt-oss-120b.json")).rows
    by_tokens = {row.tokens: {} for row in rows}
    for row in rows:
        by_tokens[row.tokens][row.system] = row
    text = PAGES["backends.md"].read_text().partition("## Speed")[2]
    table = [[*map(str.strip, line.split("|")[1:-1])] for line in re.findall(r"^\| \d.*$", text, re.MULTILINE)]
    assert [int(tokens) for tokens, *_ in table] == sorted(by_tokens)
    for tokens, floor, *ours, fastest in table:
        systems = by_tokens[int(tokens)]
        expected = [systems["mosaic"].floor_us, *(systems[name].us for name in ("mosaic", "cutlass", "triton", "xla"))]
        fast = min(("triton_kernels", "marlin", "humming"), key=lambda name: systems[name].us)
        name, us = fastest.split()
        assert name.lower() == fast
        for shown, measured in zip([floor, *ours, us], [*expected, systems[fast].us], strict=True):
            assert shown == f"{measured:.{0 if measured >= 999.5 else 2 - int(math.log10(measured))}f}"


def test_the_readmes_picture_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    report = Report.load(str(ROOT / "benchmarks" / "results" / "h200-gpt-oss-120b.json"))
    assert picture.lines(report).keys() == picture.SYSTEMS.keys()
    picture.draw(report, str(tmp_path / "picture.svg"))
    assert (tmp_path / "picture.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize("page", PAGES)
def test_names_exist_and_the_readmes_are_public(page):
    for name in {*re.findall(r"\bjmx(?:\.[A-Za-z_]\w*)+", prose(page) + python(page))}:
        parts = name.split(".")[1:]
        if page == "README.md":
            assert parts[0] in {*jmx.__all__, "nnx", "linen", "models"}, name
        assert functools.reduce(_member, parts, jmx) is not None, name


def _member(owner: Any, name: str) -> Any:
    if hasattr(owner, "__path__") and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def test_the_package_is_listed_file_by_file():
    assert file_map.written() == file_map.current(), "run `python -m tests.file_map`"
    assert not [line for line in file_map.current().splitlines() if len(line.split(maxsplit=1)) < 2]
    for file in (ROOT / "jmx").rglob("*.py"):  # else the map would cut a sentence
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]
        assert first.endswith("."), f"the docstring of {file.relative_to(ROOT)} must begin with a sentence on one line"


def test_pages_that_sources_name_exist():
    found = {
        (page, file.relative_to(ROOT).as_posix())
        for folder in ("jmx", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cc", ".cu", ".h", ".cpp", ".sh")
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", file.read_text())
    }
    assert len(found) > 5
    assert not [(page, file) for page, file in sorted(found) if not (ROOT / page).exists()]


def test_names_in_the_walks_are_in_the_files():
    found = re.findall(r"`(\w+)`\s+in\s+\[[^]]+\]\(([^)]+)\)", file_map.PAGE.read_text())
    assert len(found) > 30
    for name, link in found:
        assert re.search(
            rf"\b(?:def|class) {name}\b|^{name}\b.* = ", (file_map.PAGE.parent / link).read_text(), re.MULTILINE
        ), name
