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

FILES = re.compile(r"^```text files\n.*?^```$", re.MULTILINE | re.DOTALL)  # quotes first lines of modules

# Folders and files, each a case; a folder's cases are those below it that no other entry names.
PLACES = {
    "README.md": ("README.md",),
    "CONTRIBUTING.md": ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    "docs": ("docs/**/*.md", "docs/site/*.py"),
    "benchmarks": ("benchmarks/*.md", "benchmarks/*.py", "benchmarks/peers/*.py"),
    "jmx": ("jmx/*.py",),
    "jmx/routing": ("jmx/routing/**/*.py",),
    "jmx/numerics": ("jmx/numerics/**/*.py",),
    "jmx/experts": ("jmx/experts/**/*.py",),
    "jmx/selection": ("jmx/selection/**/*.py",),
    "tests": ("tests/**/*.py",),
    "jmx/util": ("jmx/util/**/*.py",),
    "jmx/pallas/sm90": ("jmx/pallas/*.py", "jmx/pallas/sm90/*.py"),
    "jmx/pallas/mosaic_sm90": ("jmx/pallas/mosaic_sm90/*.py",),
    "jmx/pallas/mosaic_sm90_fp8": ("jmx/pallas/mosaic_sm90_fp8/*.py",),
    "jmx/perf": ("jmx/perf/**/*.py",),
    "jmx/cli": ("jmx/cli/**/*.py",),
    "jmx/plot": ("jmx/plot/**/*.py",),
    "jmx/parallel": ("jmx/parallel/**/*.py",),
    "jmx/engines": ("jmx/engines/*.py",),
    "jmx/ffi/cutlass": ("jmx/ffi/*.py", "jmx/ffi/cutlass/**/*.py", "jmx/ffi/cutlass/src/*"),
    "jmx/pallas/triton": ("jmx/pallas/triton/*.py",),
    "jmx/xla": ("jmx/xla/*.py",),
    "jmx/ffi/cpu": ("jmx/ffi/cpu/**/*.py", "jmx/ffi/cpu/**/*.cc", "jmx/ffi/cpu/**/*.h"),
    "jmx/ffi/include": ("jmx/ffi/include/*.h",),
    "jmx/checkpoint": ("jmx/checkpoint/**/*.py",),
    "jmx/serving": ("jmx/serving/**/*.py", "jmx/serving/**/*.html"),
    "examples": ("examples/**/*.py", "examples/**/*.md"),
}
# These define the words.
EXEMPT = {"docs/internals/style.md", "tests/test_language.py"}


def hits(*globs: str) -> list[str]:
    """Lines of files with a banned word: "file:line: word (write ...)"."""
    found = []
    for path in sorted({path for glob in globs for path in ROOT.glob(glob)}):
        name = path.relative_to(ROOT).as_posix()
        if name not in EXEMPT and "results" not in path.parts:
            text = FILES.sub(lambda block: re.sub(r".+", "", block[0]), path.read_text())
            for number, line in enumerate(text.splitlines(), 1):
                words = PATTERN.findall(line.replace("_", " "))  # of names, too
                found += [f"{name}:{number}: {word} (write: {instead(word)})" for word in words]
    return found


def instead(word: str) -> str:
    """What to write for a banned word."""
    return next(better for banned, better in BANNED.items() if re.fullmatch(banned, word, re.IGNORECASE))


@pytest.mark.parametrize("place", PLACES)
def test_no_banned_words(place):
    found = hits(*PLACES[place])
    assert not found, "\n".join(found)


def test_banned_words_are_found():
    assert instead("Quantised") == "quantize"
    assert PATTERN.findall("the multiprocessors go round for good") == ["multiprocessors", "go round", "for good"]
    assert not PATTERN.findall("mushroom, household, quantized")
