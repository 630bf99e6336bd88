"""Prints the oldest versions that pyproject.toml allows of what jmx and its tests need: requirements for pip."""

import pathlib
import re
import tomllib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]


def requirements(wanted: list[str], extras: dict[str, list[str]]) -> Iterator[str]:
    """`wanted` with each lower bound made exact, and jmx-moe[...] replaced by the requirements of those extras."""
    for requirement in wanted:
        if own := re.fullmatch(r"jmx-moe\[(.*)\]", requirement):
            for extra in own[1].split(","):
                yield from requirements(extras[extra], extras)
        else:
            yield requirement.replace(">=", "==")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "jmx-moe[test]"]
    print(*requirements(wanted, project["optional-dependencies"]), sep="\n")


if __name__ == "__main__":
    main()
