"""Notebooks of docs/notebooks: their code runs, and what is saved in them is what it shows."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from child_environment import importing

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
ENVIRONMENT = importing(ROOT, JAX_PLATFORMS="cpu", MPLBACKEND="agg")


def code_cells(notebook: pathlib.Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def kinds(cells: list[Any]) -> list[list[str]]:
    """Of each cell the kinds of its outputs: MIME types of what it shows, "stream" of what it prints."""
    return [
        [kind for output in cell["outputs"] for kind in sorted(output.get("data", {output["output_type"]: None}))]
        for cell in cells
    ]


def test_there_are_four():
    assert [path.stem for path in NOTEBOOKS] == ["fine_tune", "load_and_errors", "replace_a_moe", "split_over_devices"]


@pytest.mark.costly
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_of_a_notebook_runs(notebook):
    """In a plain interpreter; the last expression of a cell shows nothing there."""
    code = "\n".join("".join(cell["source"]) for cell in code_cells(notebook))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=notebook.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = [
        "".join(output["text"]) for cell in code_cells(notebook) for output in cell["outputs"] if "text" in output
    ]
    for line in "".join(printed).splitlines():  # but for times, and last digits
        assert line.split(":")[0].split("  ")[0] in done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_have_no_error_and_a_picture_or_a_table(notebook):
    cells = code_cells(notebook)
    assert all(cell["execution_count"] == i for i, cell in enumerate(cells, 1)), "run all cells in order, and save"
    found = {kind for of_cell in kinds(cells) for kind in of_cell}
    assert "error" not in found
    assert found & {"text/html", "image/png"}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_shows_what_is_saved(notebook, monkeypatch):
    """The same kinds of outputs: pictures, tables and lines."""
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    read = nbformat.read(notebook, as_version=4)
    before = kinds([cell for cell in read.cells if cell.cell_type == "code"])
    client.NotebookClient(
        read, timeout=300, coalesce_streams=True, resources={"metadata": {"path": notebook.parent}}
    ).execute()
    assert kinds([cell for cell in read.cells if cell.cell_type == "code"]) == before
