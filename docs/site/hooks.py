"""What mkdocs calls while it builds the site: see `hooks` in mkdocs.yml."""

import logging
import pathlib
from typing import Any

from docs.site import api, built, markdown, navigation, notebooks, repository

TITLE = "Quantized mixture-of-experts layers for JAX and Flax"  # of the front page, for search engines
log = logging.getLogger("mkdocs.plugins.jmx")
_SHOWN = [path for path in repository.MOVED if (repository.ROOT / path).exists()]


def on_config(config: Any) -> Any:
    """Reads the navigation from docs/index.md."""
    config["nav"] = navigation.nav()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not below docs/."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    files.remove(files.get_file_from_path("index.md"))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        content = notebooks.markdown(repository.ROOT / "docs" / file.src_uri)
        files.append(File.generated(config, repository.page_of(f"docs/{file.src_uri}"), content=content))
    for path in _SHOWN:
        content = (repository.ROOT / path).read_text()
        files.append(File.generated(config, repository.page_of(path), content=content))
    for name in api.PAGES:
        files.append(File.generated(config, api.page_of(name), content=api.markdown(name)))
    for path in sorted({target for page in {*pages, *_SHOWN} for target in repository.links(page)}):
        page, file = repository.page_of(path), repository.ROOT / path
        if path.startswith("docs/") or path in repository.MOVED or not file.exists():
            continue  # a link to a file that does not exist is reported by mkdocs
        if path.endswith(repository.PICTURES):
            files.append(File.generated(config, page, abs_src_path=str(file)))
        else:
            files.append(File.generated(config, page, content=repository.source_page(path)))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Turns the text of a file of the repository into that of a page."""
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta |= {"title": TITLE, "hide": ["navigation"]}
    if uri.startswith(("api/", "source/")):
        return text
    return markdown.converted(repository.with_links_to_pages(text, repository.file_of(uri), uri))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links the pages that docstrings name, and keeps options whole."""
    return markdown.with_whole_options(api.with_links_to_pages(html) if page.file.src_uri.startswith("api/") else html)


def on_post_build(config: Any) -> None:
    """Checks every link of the pages as they were written."""
    for fault in built.faults(pathlib.Path(config["site_dir"])):
        log.warning(fault)
