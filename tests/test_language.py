"""Prose and names in the repository keep to the terms of docs/internals/style.md: banned words do not occur."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Each with what to write instead.
BANNED = {
    r"(?:de|re|un)?quantis\w*": "quantize",
    r"optimis\w*": "optimize",
    r"multiprocessors?": "SM",
    r"blocks? of threads": "CTA",
    r"houses?": "package, layout",
    r"rooms?": "module, space",
    r"(?<!-)walls?": "limit, bound",
    r"(?:is|are|was|were|be) told": "is given, is reported",
    r"told of": "given, signaled",
    r"tell each other": "signal",
    r"what stands": "name it",
    r"says? so": "states, reports",
    r"(?:is|are|be) had": "is available",
    r"a cut": "a slice, a split",
    r"the way of": "as ... does",
    r"go(?:es)? round": "strides, iterates",
    r"for good": "persistent, always",
    r"every so manieth": "every n-th",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)

CUDA = re.compile(r"\bCU_[A-Z0-9_]+")  # names of the driver's API are its own
FILES = re.compile(r"^```text files\n.*?^```$", re.MULTILINE | re.DOTALL)  # quotes first lines of modules

SUFFIXES = {".py", ".md", ".ipynb", ".html", ".cc", ".h", ".cu", ".cuh", ".sh", ".yml", ".css", ".js"}
NAMES = {"Makefile", "run", "release"}  # of files without a suffix
ELSEWHERE = {"results", "jax_include", "__pycache__"}  # folders of data, and of files that are not jmx's
ROOTS = ("docs", "benchmarks", "tests", "examples", ".ci", ".github")

# Each a case: the files at the root, those directly in jmx/, each package of jmx, and each of the other folders.
PLACES = {
    ".": [path for path in ROOT.iterdir() if path.is_file()],
    "jmx": [path for path in (ROOT / "jmx").iterdir() if path.is_file()],
    **{
        folder.relative_to(ROOT).as_posix(): [*folder.rglob("*")]
        for folder in (*sorted((ROOT / "jmx").iterdir()), *(ROOT / name for name in ROOTS))
        if folder.is_dir() and folder.name not in ELSEWHERE
    },
}
# These define the words.
EXEMPT = {"docs/internals/style.md", "tests/test_language.py"}


def hits(files: list[pathlib.Path]) -> list[str]:
    """Lines of files with a banned word: "file:line: word (write ...)"."""
    found = []
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix()
        read = path.suffix in SUFFIXES or path.name in NAMES
        if not read or name in EXEMPT or ELSEWHERE & {*name.split("/")}:
            continue
        text = FILES.sub(lambda block: re.sub(r".+", "", block[0]), path.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            words = PATTERN.findall(CUDA.sub("", line).replace("_", " "))  # of names, too
            found += [f"{name}:{number}: {word} (write: {instead(word)})" for word in words]
    return found


def instead(word: str) -> str:
    """What to write for a banned word."""
    return next(better for banned, better in BANNED.items() if re.fullmatch(banned, word, re.IGNORECASE))


@pytest.mark.parametrize("place", PLACES)
def test_no_banned_words(place):
    found = hits(PLACES[place])
    assert not found, "\n".join(found)


def test_banned_words_are_found():
    assert instead("Quantised") == "quantize"
    assert PATTERN.findall("the multiprocessors go round for good") == ["multiprocessors", "go round", "for good"]
    assert not PATTERN.findall("mushroom, household, quantized")
