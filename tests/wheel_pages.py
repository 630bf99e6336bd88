"""Runs the program of README.md and the notebooks with an installed wheel: `python tests/wheel_pages.py`.

They run in a copy of what they read, `examples` and `docs/notebooks`, where there is no `jmx` that would be found
first. The environment needs `jmx-moe[bench,hf]` and optax.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]


def programs(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, str]]:
    """Names, the folder where each runs, and code."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    yield "README.md", folder, "\n".join(blocks)
    for notebook in sorted((folder / "docs" / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text())["cells"]
        yield notebook.name, notebook.parent, "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def main() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MPLBACKEND": "agg"}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part in ("examples", "docs/notebooks"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "LICENSE", folder)  # a text to train on
        ran = 0
        for title, where, code in programs(folder):
            check = f"import jmx, sys\nassert jmx.__file__.startswith(sys.prefix), jmx.__file__\n{code}"
            subprocess.run(
                [sys.executable, "-W", "error", "-c", check],
                cwd=where,
                env=environment,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=900,
            )
            print(f"{title} runs", flush=True)
            ran += 1
    assert ran == 5, ran


if __name__ == "__main__":
    main()
