"""A model's name becomes a directory: a path here, or a repository of the Hugging Face Hub."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from jmx.util.checks import check_path

# What a model in the Hugging Face form consists of: the files at the root of its repository, without copies of the
# weights in the form of another program.
_NEEDED = ("*.safetensors", "*.json", "*.jinja")
_COPIES = ("*/*", "consolidated*.safetensors")

_ERRNO = re.compile(r"\[Errno -?\d+\] ")
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?")
_DEFAULT = "main"  # the revision of a name without one


def find(name: str | os.PathLike[str]) -> Path:
    """The directory of a model, which is downloaded if it is not on this machine.

    Args:
        name: a path, which is used as it is; or, if nothing has that path, `owner/name` or `owner/name@revision` on the
            Hub. Only the files that a model needs are downloaded, into huggingface_hub's cache, where
            `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meaning.

    Raises:
        TypeError: `name` is not a path.
        ValueError: neither a path nor of the form of a name on the Hub.
        FileNotFoundError: the Hub has no such repository or revision, or no model in it; or the Hub cannot be reached,
            and the model is not in the cache.
        PermissionError: the repository is gated.
        ImportError: huggingface_hub is not installed.
    """
    check_path("name", name)
    if os.path.exists(name) or _is_path(os.fspath(name)):
        return Path(name)
    named = _NAME.fullmatch(os.fspath(name))
    if named is None:
        raise ValueError(f"`model` (={os.fspath(name)!r}) must be a directory, or owner/name on the Hugging Face Hub")
    repository, revision = named["repository"], named["revision"]
    with _errors_in_one_line(os.fspath(name), repository, revision):
        found = _snapshot(repository, revision)
    for pattern in ("config.json", "*.safetensors"):
        if not any(found.glob(pattern)):
            raise FileNotFoundError(f"{os.fspath(name)} has no {pattern} on the Hugging Face Hub, which a model needs")
    return found


def _is_path(name: str) -> bool:
    """Whether a name that does not exist can only be a path: its reader then names the file that is missing."""
    return os.path.isabs(name) or name.startswith((".", "~")) or len(Path(name).parts) > 2


def _snapshot(repository: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"`model` (={repository!r}) is no directory here, and names on the Hugging Face Hub need huggingface_hub: "
            "pip install 'jmx-moe[hf]'"
        ) from error
    found = snapshot_download(
        repository, revision=revision, allow_patterns=[*_NEEDED], ignore_patterns=[*_COPIES], dry_run=False
    )
    return Path(found)


@contextlib.contextmanager
def _errors_in_one_line(name: str, repository: str, revision: str | None) -> Iterator[None]:
    """Replaces the errors of huggingface_hub, of many lines, by one line with what is to be done."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the machine, such as a full disk
            raise
        kind, message = _explained(error, name, repository, revision)
        raise kind(message) from error


def _explained(error: Exception, name: str, repository: str, revision: str | None) -> tuple[type[Exception], str]:
    """The class and the message of the error that replaces one of huggingface_hub."""
    from huggingface_hub import errors

    known = (
        (
            errors.GatedRepoError,
            PermissionError,
            f"{name} is gated: accept its terms at https://huggingface.co/{repository}, then log in with "
            "`hf auth login` or set HF_TOKEN",
        ),
        (
            errors.RepositoryNotFoundError,
            FileNotFoundError,
            f"{name} is neither a directory here nor a repository on the Hugging Face Hub that you may read",
        ),
        (
            errors.RevisionNotFoundError,
            FileNotFoundError,
            f"{repository} has no revision {revision or _DEFAULT!r} on the Hugging Face Hub",
        ),
        (
            errors.LocalEntryNotFoundError,  # that of an incomplete snapshot, too
            FileNotFoundError,
            f"{name} is not a directory here, nor whole in the cache of huggingface_hub, and the Hugging Face Hub "
            f"cannot be reached: {_reason(error)}",
        ),
        (errors.HFValidationError, ValueError, f"`model` (={name!r}) is no name on the Hub: {_reason(error)}"),
    )
    for kind, ours, message in known:  # the first is a special case of the second
        if isinstance(error, kind):
            return ours, message
    return OSError, f"{name} cannot be downloaded from the Hugging Face Hub: {_reason(error)}"


def _reason(error: Exception) -> str:
    """The first line of what caused an error of huggingface_hub, without the number of the system's error."""
    cause = error.__cause__ or error
    line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return _ERRNO.sub("", line)
