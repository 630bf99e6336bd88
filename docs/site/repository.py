"""Which page of the site shows a file of the repository, and links between such pages.

Pages of docs/ are linked to each other and to files elsewhere by relative paths, as a code host resolves them. The site
shows README.md as its front page, some pages from outside docs/, and the text of each other file that a page links to.
"""

import pathlib
import posixpath
import re
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
# Files that are not at their place of docs/, by the path of their page, as mkdocs counts it: from docs/, in Markdown.
MOVED = {
    "README.md": "index.md",
    "docs/index.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/NOTES.md": "benchmarks/notes.md",
}
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".cc": "cpp", ".cpp": "cpp", ".cu": "cpp", ".h": "cpp", ".json": "json", ".sh": "bash"}

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)((?:#[^)\s]*)?\))")


def page_of(path: str) -> str:
    """The path of the page, or picture, that shows a file or folder of the repository, whose path is from its root."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    if path.endswith(PICTURES):
        return path
    return f"source/{path.rstrip('/')}.md"


def file_of(page: str) -> str:
    """The file that a page shows: the inverse of `page_of`, for pages that have links."""
    for path, moved in MOVED.items():
        if moved == page:
            return path
    return f"docs/{page}"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """`text` with what is not in fenced code changed."""
    parts, end = [], 0
    for fence in _FENCED.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def links(path: str) -> Iterator[str]:
    """The files and folders that a page of the repository links to, from the repository's root."""
    text = _FENCED.sub("", (ROOT / path).read_text())
    for _, target, _ in _LINK.findall(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def with_links_to_pages(text: str, path: str, page: str) -> str:
    """The text of the repository's file `path`, with its links as those of the page that shows it."""

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        shown = posixpath.relpath(page_of(target), posixpath.dirname(page) or ".")
        return f"{link[1]}{shown}{link[3]}"

    return outside_fences(text, lambda part: _LINK.sub(replace, part))


def source_page(path: str) -> str:
    """A page, in Markdown, with the text of a file, or the names of a folder's files."""
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    file = ROOT / path
    if file.is_dir():
        names = sorted(f"{inner.name}{'/' * inner.is_dir()}" for inner in file.iterdir() if inner.name[0] not in "._")
        return f"{hidden}# {path}/\n\n" + "".join(f"* `{name}`\n" for name in names)
    return f"{hidden}# {path}\n\n~~~~{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n~~~~\n"
