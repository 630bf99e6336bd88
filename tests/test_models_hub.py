"""Names of models: paths, the cache of huggingface_hub, and downloads from a server on this machine."""

import errno
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlparse

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jmx import cli
from jmx.models import find, load

pytestmark = pytest.mark.costly

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
COPIES = {
    "original/model.safetensors": b"original",
    "original/config.json": b"{}",
    "metal/model.bin": b"metal",
    "consolidated.00.safetensors": b"another program's",
    "pytorch_model.bin": b"pickle",
    "README.md": b"#",
}
NEEDED = {path.name: path.read_bytes() for path in TINY.iterdir() if path.suffix in (".json", ".safetensors")}
NEEDED |= {"chat_template.jinja": b"{{ messages }}", "tokenizer_config.json": b"{}"}
REPOSITORIES = {  # of the server, by commit
    COMMIT: NEEDED | COPIES,
    OTHER: {"README.md": b"#", "config.json": b"{}"},
}
CODES = {
    "gated": (403, "GatedRepo"),
    "none": (404, "RepoNotFound"),
    "private": (401, "RepoNotFound"),
    "headless": (404, "RevisionNotFound"),
}


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download asks of the Hub: a revision's commit, its files, and each file."""

    requests: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlparse(self.path).path.strip("/").split("/")
        if parts[0] == "api":
            name, kind, revision = parts[3], parts[4], parts[5]
            if name in CODES:
                return self.answer(*CODES[name])
            commit = {"main": COMMIT if name == "tiny" else OTHER, "v1": COMMIT}.get(revision, revision)
            if commit not in REPOSITORIES:
                return self.answer(404, "RevisionNotFound")
            if kind == "revision":
                return self.send({"id": f"owner/{name}", "sha": commit, "siblings": []})
            files = REPOSITORIES[commit].items()
            return self.send(
                [{"type": "file", "path": path, "size": len(file), "oid": oid(file)} for path, file in files]
            )
        path = "/".join(parts[4:])
        if self.command == "GET":
            self.requests.append(path)
        return self.send(REPOSITORIES[parts[3]][path], commit=parts[3])

    def answer(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, content: object, commit: str = "") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if commit:
            self.send_header("ETag", f'"{oid(body)}"')
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a Hub that nothing can reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    at(monkeypatch, "http://127.0.0.1:9")
    return tmp_path / "hub"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The Hub on this machine: the files that were downloaded from it."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    at(monkeypatch, f"http://127.0.0.1:{running.server_port}")
    Hub.requests = []
    yield Hub.requests
    running.shutdown()
    thread.join()
    running.server_close()


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )


def put_in_cache(cache: Path, files: dict[str, bytes], refs: tuple[str, ...] = ("main",)) -> Path:
    """owner/tiny as huggingface_hub stores it: blobs, links to them, and the commit of each revision."""
    folder = cache / "models--owner--tiny"
    snapshot = folder / "snapshots" / COMMIT
    for made in (folder / "blobs", folder / "refs", snapshot):
        made.mkdir(parents=True)
    for name, content in files.items():
        (folder / "blobs" / oid(content)).write_bytes(content)
        (snapshot / name).symlink_to(folder / "blobs" / oid(content))
    for ref in refs:
        (folder / "refs" / ref).write_text(COMMIT)
    return snapshot


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def online(_: pytest.MonkeyPatch) -> None:
    pass


# Paths


@pytest.mark.parametrize("name", [TINY, str(TINY), "/nowhere/model", "./none", "~/none", "a/b/c", "."])
def test_paths_are_taken_as_they_are(name: str | Path, cache: Path) -> None:
    assert find(name) == Path(name)


def test_a_directory_wins_over_the_hub(server: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("owner/tiny") == Path("owner/tiny")
    assert not server


@pytest.mark.parametrize("name", ["gpt-oss-20b", "", "a b/c", "owner/tiny@", "owner/tiny@a b", "own--er/x", "owner/-x"])
def test_a_misspelt_name_is_an_error(name: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"`model` \(=") as raised:
        find(name)
    assert len(str(raised.value).splitlines()) == 1


# The cache


# huggingface_hub asks for the files of a commit again and again, for half a minute, before it takes the Hub to be away.
AWAY = [(online, ""), (online, "@v1"), (offline, ""), (offline, "@v1")]


@pytest.mark.parametrize(("network", "revision"), [*AWAY, (offline, f"@{COMMIT}")])
def test_a_model_in_the_cache_needs_no_network(
    revision: str, network: Callable[[pytest.MonkeyPatch], None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_in_cache(cache, NEEDED, ("main", "v1"))
    network(monkeypatch)
    assert find(f"owner/tiny{revision}") == snapshot


def test_a_model_of_the_cache_loads_and_generates(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_cache(cache, NEEDED)
    offline(monkeypatch)
    assert load("owner/tiny").config == load(TINY).config
    assert cli.main(["generate", "owner/tiny", "Licensed", "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().err.startswith("Licensed\n")


@pytest.mark.parametrize(
    ("network", "name"),
    [(network, f"owner/tiny{revision}") for network, revision in AWAY]
    + [(online, "someone/else"), (offline, "someone/else"), (offline, f"owner/tiny@{OTHER}")],
)
def test_one_that_is_not_there_is_one_line(
    name: str,
    network: Callable[[pytest.MonkeyPatch], None],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name != "owner/tiny":
        put_in_cache(cache, NEEDED)
    network(monkeypatch)
    with pytest.raises(FileNotFoundError, match=rf"^{name} is not a directory here, nor whole in the cache"):
        find(name)
    assert cli.main(["generate", name, "a"]) == 2
    _, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert name in err


# Downloads


@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}"])
def test_only_what_a_model_needs_is_downloaded_and_once(revision: str, server: list[str]) -> None:
    found = find(f"owner/tiny{revision}")
    assert sorted(server) == sorted(NEEDED)
    assert {path.name: path.read_bytes() for path in found.iterdir()} == NEEDED
    server.clear()
    assert find(f"owner/tiny{revision}") == found
    assert not server


def test_a_download_that_was_interrupted_continues(
    server: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find("owner/tiny")
    (found / "model-00002-of-00002.safetensors").unlink()
    server.clear()
    with monkeypatch.context() as without:
        offline(without)
        with pytest.raises(FileNotFoundError, match="nor whole in the cache"):
            find("owner/tiny")
    assert find("owner/tiny") == found
    assert (found / "model-00002-of-00002.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("owner/gated", PermissionError, "is gated: accept its terms at https://huggingface.co/owner/gated"),
        ("owner/private", FileNotFoundError, "neither a directory here nor a repository"),
        ("owner/none", FileNotFoundError, "neither a directory here nor a repository"),
        ("owner/tiny@v9", FileNotFoundError, "owner/tiny has no revision 'v9'"),
        ("owner/headless", FileNotFoundError, "owner/headless has no revision 'main'"),
        ("owner/text", FileNotFoundError, r"has no \*.safetensors on the Hugging Face Hub"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    name: str, error: type[Exception], message: str, server: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message) as raised:
        find(name)
    assert len(str(raised.value).splitlines()) == 1
    capsys.readouterr()
    assert cli.main(["generate", name, "a"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"jmx: error: {name.split('@')[0]} ")


def test_other_errors_of_a_download_are_one_line_and_those_of_the_disk_stay(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: Exception = RuntimeError("broken\nin many lines")

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(OSError, match=r"^owner/tiny cannot be downloaded from the Hugging Face Hub: broken$"):
        find("owner/tiny")
    raised = LocalEntryNotFoundError("in many lines")
    raised.__cause__ = ConnectionError("[Errno -2] Name or service not known")
    with pytest.raises(FileNotFoundError, match=r"Hub cannot be reached: Name or service not known$"):
        find("owner/tiny")
    raised = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as full:
        find("owner/tiny")
    assert full.value.errno == errno.ENOSPC


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'jmx-moe\[hf\]'"):
        find("owner/tiny")
    assert find(TINY) == TINY
