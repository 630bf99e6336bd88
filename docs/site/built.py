"""Checks of the built site: each link within it leads to a file that exists, and to an element of that name."""

import functools
import html.parser
import pathlib
import urllib.parse
from collections.abc import Iterator


class _Page(html.parser.HTMLParser):
    """The links of a page, and the names that links to it may give."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value is not None and key in ("href", "src"):
                self.links.append(value)
            elif value is not None and key in ("id", "name"):
                self.names.add(value)


def faults(site: pathlib.Path) -> Iterator[str]:
    """A sentence for each link of a page of `site` that leads nowhere. Links to other sites are not followed."""
    read = functools.cache(lambda file: _Page(file.read_text()))
    for file in sorted(site.rglob("*.html")):
        if file.name == "404.html":  # whose links are from the root of a server
            continue
        for link in sorted({*read(file).links}):
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (file.parent / urllib.parse.unquote(url.path)).resolve() if url.path else file
            name = urllib.parse.unquote(url.fragment)
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{file.relative_to(site)} links to {link}, which does not exist"
            elif name and target.suffix == ".html" and not name.startswith("__") and name not in read(target).names:
                yield f"{file.relative_to(site)} links to {link}, which has no element of that name"
