"""Notebooks as pages: their text, their code, and the outputs that are saved in them."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any


def markdown(notebook: pathlib.Path) -> str:
    """The page of a notebook, in Markdown."""
    return "\n\n".join(_parts(json.loads(notebook.read_text())["cells"])) + "\n"


def _parts(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
        elif cell["cell_type"] == "code":
            yield f"```python\n{source}\n```"
            yield from map(_output, cell["outputs"])


def _output(output: dict[str, Any]) -> str:
    """One output, in the form that a browser shows best."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        return f"![what this cell draws](data:image/png;base64,{image})"
    if "text/html" in data:  # on one line: an empty one would end it
        return f'<div class="output">{"".join(data["text/html"]).replace("\n", " ")}</div>'
    return f"```text\n{''.join(data['text/plain'])}\n```"
