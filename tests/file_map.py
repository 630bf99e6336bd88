"""The map of jmx in docs/internals/structure.md: each package and file with the first line of its docstring.

    python -m tests.file_map

writes it anew after a file was added, moved or removed, or a first line was changed.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "structure.md"
BLOCK = re.compile(r"(?<=^```text files\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_COLUMN = 32  # where first lines begin


def first_line(file: pathlib.Path) -> str:
    """The first line of a module's docstring, without its full stop; "" if it has none."""
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    return "" if docstring is None else docstring.splitlines()[0].removesuffix(".")


def lines(package: pathlib.Path, depth: int = 0) -> Iterator[str]:
    """A package's own line, its packages' lines, and those of its modules."""
    yield _line(f"{package.name}/", depth, package / "__init__.py")
    inner = sorted(package.iterdir())
    for folder in inner:
        if (folder / "__init__.py").exists():
            yield from lines(folder, depth + 1)
    for file in inner:
        if file.suffix == ".py" and file.name != "__init__.py":
            yield _line(file.name, depth + 1, file)


def _line(name: str, depth: int, file: pathlib.Path) -> str:
    return f"{'  ' * depth}{name}".ljust(_COLUMN) + first_line(file)


def current() -> str:
    """The map as it must be."""
    return "".join(f"{line.rstrip()}\n" for line in lines(ROOT / "jmx"))


def written() -> str:
    """The map as it is on the page."""
    found = BLOCK.search(PAGE.read_text())
    assert found is not None
    return found[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda _: current(), text))
