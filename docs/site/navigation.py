"""The site's navigation: that of docs/index.md, whose sections are tables of pages."""

import posixpath
import re
from typing import Any

from docs.site import api, repository

INDEX = "docs/index.md"
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_ROW = re.compile(r"^\| \[(.*?)\]\((.*?)\) \|", re.MULTILINE)


def sections() -> dict[str, dict[str, str]]:
    """Section of docs/index.md -> its pages: title -> path of the page on the site."""
    _, *parts = _SECTION.split((repository.ROOT / INDEX).read_text())
    return {
        title: {
            name: repository.page_of(posixpath.normpath(posixpath.join("docs", link)))
            for name, link in _ROW.findall(text)
        }
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def nav() -> list[dict[str, Any]]:
    """The value of `nav` in the configuration of mkdocs."""
    found: list[dict[str, Any]] = [{"Home": "index.md"}]
    for title, pages in sections().items():
        entries: list[dict[str, Any]] = [{name: page} for name, page in pages.items()]
        if title == api.SECTION:
            entries = [{"API": [{name: api.page_of(name)} for name in api.PAGES]}, *entries]
        found.append({title: entries})
    return [*found, {"All pages": "pages.md"}]
