"""Tuned configurations: which one a backend's kernels run with, and where it was found.

"Engine" is another word for backend, in names here and in those of tables.

A configuration (block shapes, stages, splits) comes from the first of these that has one:

    override    `with tuning.override(...)`, which is part of jit's cache key;
    user        this user's cache, which `jmx tune` writes;
    table       the table that ships with jmx for this kind of device, jmx/selection/tuned/<engine>-<device>.json;
    heuristic   the backend's own rule, if none of them has the problem.

Nothing is measured here, nor while tracing. Files are read once in a process: jit would reuse earlier traces, so a file
that changed later would have no effect on them (see `reload`).
"""

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import os
import pathlib
import re
import sys
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util import atomic_files
from jmx.util.atomic_files import Kind

Source = Literal["override", "user", "table", "heuristic"]

# An entry tuned at T tokens serves the counts in T / REACH < count <= T that no lower entry serves.
REACH = 4


@typing.runtime_checkable
class Tunable[C](Protocol):
    """What a backend with tunable configurations has beside `jmx.selection.backend.Backend`.

    A configuration is a frozen dataclass whose fields are int, bool, str, or another such dataclass.
    """

    @property
    def name(self) -> str:
        """That of the backend."""
        ...

    @property
    def config_type(self) -> type[C]:
        """The dataclass. Its `__post_init__` raises ValueError for values that are valid for no problem."""
        ...

    def heuristic(self, problem: Problem, environment: Environment) -> C:
        """The configuration if none was measured. Pure and cheap; `problem.num_tokens` may be None."""
        ...

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[C]:
        """What `jmx tune` tries, the most promising first. Each passes `check`."""
        ...

    def check(self, config: C, problem: Problem, environment: Environment) -> None:
        """Raises ValueError, naming the field, its value and the rule, if `config` cannot run `problem`."""
        ...


class Choice[C](NamedTuple):
    """A configuration, and where it was found."""

    config: C
    source: Source


@dataclass(frozen=True)
class Entry:
    """A measured configuration: microseconds of one layer with it, and with the heuristic's (None: that failed)."""

    config: Any
    us: float
    heuristic_us: float | None


class Key(NamedTuple):
    """The problem that an entry was measured on: a shape class, and tokens of the call."""

    shape: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens} tokens"


Entries = dict[Key, Entry]


def shape_class(problem: Problem) -> str:
    """What configurations depend on in `problem`, except its number of tokens, as written in tables.

    Biases, the order of rows and the activation cost the same with all configurations, and are left out. Some of the
    experts among which tokens are routed count as all of them: each gets as many rows.
    """
    gate = "gated" if problem.gate_up_order is not None else "ungated"
    inputs = problem.input_format or f"{8 * jnp.dtype(problem.dtype).itemsize}-bit"
    sizes = f"E={problem.num_choices} k={problem.top_k} H={problem.hidden_size} I={problem.intermediate_size}"
    return f"{sizes} {gate} {problem.format} {inputs}"


def config[C](engine: Tunable[C], problem: Problem, environment: Environment) -> Choice[C]:
    """The configuration with which `engine` runs `problem`: the first that passes `engine.check`, and its source.

    A token count takes the entry of the lowest tuned count that is not below it, since blocks for more tokens also hold
    fewer, but not the reverse; the user's entry if both files have that count. An entry for `REACH` times as many
    tokens or more is not used. A count above all entries takes the heuristic, and so does a symbolic one.

    Raises:
        TypeError, ValueError: the configuration of an `override` is of another type, or cannot run the problem.
    """
    override = dict(_overrides.value).get(engine.name)
    if override is not None:
        if type(override) is not engine.config_type:
            raise TypeError(f"`config` (={override!r}) must be a {engine.config_type.__name__} for {engine.name!r}")
        engine.check(override, problem, environment)
        return Choice(override, "override")
    tables = _tables(engine, environment.device_kind)
    for tokens, rank in _serving(shape_class(problem), problem.num_tokens, [table.entries for table in tables]):
        source, file, entries = tables[rank]
        key = Key(shape_class(problem), tokens)
        try:
            engine.check(entries[key].config, problem, environment)
        except ValueError as e:
            _warn_once(f"{file}: the entry for {key} is ignored: {e}")
        else:
            return Choice(entries[key].config, source)
    return Choice(engine.heuristic(problem, environment), "heuristic")


def _serving(shape: str, num_tokens: int | None, tables: Sequence[Entries]) -> list[tuple[int, int]]:
    """(tuned tokens, number of the table) of the entries that may serve a call, best first."""
    if num_tokens is None:
        return []
    return sorted(
        (tokens, rank)
        for rank, entries in enumerate(tables)
        for of, tokens in entries
        if of == shape and num_tokens <= tokens < REACH * num_tokens
    )


def describe(config: Any, source: Source) -> str:
    """One line: the configuration and where it comes from."""
    origin = {
        "override": "an override in scope",
        "user": "this user's cache",
        "table": "the table that ships with jmx",
        "heuristic": "the heuristic, since no table has this shape and token count",
    }
    return f"{config!r}, by {origin[source]}"


# Keyed into jit's cache: changing it retraces. (engine, configuration) pairs, the inner ones last.
_overrides = jax.make_user_context(())


@contextlib.contextmanager
def override(engine_name: str, config: Any) -> Iterator[None]:
    """Context in which the engine called `engine_name` runs with `config`, whatever files say.

    Calls traced outside are traced again inside. Whether the configuration can run is checked when a layer is traced.

    Raises:
        TypeError: `config` is not a frozen dataclass.
    """
    if not dataclasses.is_dataclass(config) or type(config).__hash__ is None or isinstance(config, type):
        raise TypeError(f"`config` (={config!r}) must be a frozen dataclass, the engine's `config_type`")
    with _overrides((*_overrides.value, (engine_name, config))):
        yield


# How often `reload` was called.
_reloads = 0


def state() -> tuple[Any, ...]:
    """Hashable, and equal as long as problems are given the same configurations."""
    return _reloads, _overrides.value


class _Table(NamedTuple):
    source: Source
    file: Any  # a Path or another Traversable
    entries: Entries


@functools.cache
def _tables(engine: Tunable[Any], device_kind: str) -> list[_Table]:
    """The user's and the shipped table, in order of precedence."""
    shipped = importlib.resources.files("jmx.selection") / "tuned" / _file_name(engine.name, device_kind)
    tables = [_Table("table", shipped, read(shipped, engine, device_kind))]
    with contextlib.suppress(RuntimeError):  # no home directory: no cache
        file = cache_file(engine.name, device_kind)
        tables.insert(0, _Table("user", file, read(file, engine, device_kind)))
    return tables


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def reload() -> None:
    """Discards the files that were read, and (`jax.clear_caches`) all that jit has traced with them.

    For a process that continues after its tables were tuned. What was compiled ahead of time does not change.
    """
    global _reloads
    _tables.cache_clear()
    _warn_once.cache_clear()
    jax.clear_caches()
    _reloads += 1


def cache_file(engine_name: str, device_kind: str) -> pathlib.Path:
    """This user's own table for an engine on a kind of device, in `cache_directory`, which may raise RuntimeError."""
    return cache_directory() / "tuning" / _file_name(engine_name, device_kind)


def cache_directory() -> pathlib.Path:
    """The directory of jmx's files for this user: below $XDG_CACHE_HOME, or in the platform's directory of caches.

    Raises:
        RuntimeError: the user has no home directory.
    """
    chosen = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # other paths are to be ignored by the XDG base directory specification
        root = chosen
    elif sys.platform == "darwin":
        root = pathlib.Path.home() / "Library" / "Caches"
    else:
        root = pathlib.Path.home() / ".cache"
    return root / "jmx"


def _file_name(engine_name: str, device_kind: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return f"{engine_name}-{slug}.json"


def read(file: Any, engine: Tunable[Any], device_kind: str) -> Entries:
    """A table's entries; none, and a warning that names the file, if it is not such a table.

    An entry that does not fit `engine.config_type` is left out, with a warning that names it. A file that does not
    exist has no entries.

    Args:
        file: a `pathlib.Path`, or another `importlib.resources.abc.Traversable`.
    """
    try:
        return load(file, engine, device_kind)
    except (ValueError, OSError) as e:
        warnings.warn(f"{e}; ignored", stacklevel=2)
        return {}


def load(file: Any, engine: Tunable[Any], device_kind: str) -> Entries:
    """As `read`, but a file that is not a table for this engine and device is an error.

    Raises:
        ValueError, OSError: it is not, or cannot be read; the message names the file.
    """
    entries: Entries = {}
    for shape, tokens, value in _listed(file, engine, device_kind):
        try:
            entries[Key(shape, _token_count(tokens))] = _entry(engine.config_type, value)
        except ValueError as e:
            warnings.warn(f"{file}: the entry for {shape}, {tokens} tokens is ignored: {e}", stacklevel=3)
    return entries


def _listed(file: Any, engine: Tunable[Any], device_kind: str) -> list[tuple[str, str, Any]]:
    """The shape, tokens and JSON of a table's entries, which are not checked. Raises as `load`."""
    if isinstance(file, pathlib.Path) and file.exists() and not file.is_file():
        raise OSError(f"{file} cannot be read: it is not a regular file")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        for name, wanted in (("engine", engine.name), ("device", device_kind)):
            if values[name] != wanted:
                raise ValueError(f"its {name} is {values[name]!r}, not {wanted!r}")
        return [(shape, tokens, value) for shape, found in values["entries"].items() for tokens, value in found.items()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise OSError(f"{file} cannot be read: {e}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file} is not a table of tuned configurations: {type(e).__name__}: {e}") from None


def _token_count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,17}", text):
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(text)


def _entry(config_type: type, values: Any) -> Entry:
    entry = _build(Entry, values)
    return dataclasses.replace(entry, config=_build(config_type, entry.config))


def _build(kind: type, values: Any) -> Any:
    """The dataclass `kind` from JSON values, each of its field's type. ValueError for any other values."""
    hints = typing.get_type_hints(kind)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} is not of type {kind.__name__}")
    for fault, names in (("lacks", types.keys() - values.keys()), ("has no field", values.keys() - types.keys())):
        if names:
            raise ValueError(f"{kind.__name__} {fault} {', '.join(sorted(names))}")
    return kind(**{name: _field(name, types[name], value) for name, value in values.items()})


def _field(name: str, kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast("type", kind), value)
    if kind is not Any and type(value) not in (typing.get_args(kind) or (kind,)):  # isinstance: True is an int
        raise ValueError(f"{name} (={value!r}) must be {getattr(kind, '__name__', kind)}")
    return value


def save(path: pathlib.Path, engine: Tunable[Any], device_kind: str, entries: Mapping[Key, Entry]) -> None:
    """Adds `entries` to the table in `path`, replacing those with the same keys: all of them or none.

    Entries that other processes have added meanwhile are kept. A file that is not such a table is renamed, with a
    warning. Links are followed. The text is sorted, with one entry a line, to be read, compared and shipped.
    """
    path = pathlib.Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)

    def fault(file: pathlib.Path) -> str | None:
        try:
            _listed(file, engine, device_kind)
        except (ValueError, OSError) as e:
            return str(e)
        return None

    with _locked(path.parent):
        try:
            known = load(path, engine, device_kind)
        except (ValueError, OSError) as e:
            known = {}
            warnings.warn(f"{e}; it is kept as {atomic_files.set_aside(path)}", stacklevel=2)
        text = _text(engine.name, device_kind, {**known, **entries})
        atomic_files.write(path, text.encode(), Kind("a table of tuned configurations", fault))


def _text(engine_name: str, device_kind: str, entries: Mapping[Key, Entry]) -> str:
    shapes = sorted({key.shape for key in entries}, key=_natural)
    blocks = []
    for shape in shapes:
        tokens = sorted(key.tokens for key in entries if key.shape == shape)
        lines = [f'   "{count}": {json.dumps(dataclasses.asdict(entries[Key(shape, count)]))}' for count in tokens]
        blocks.append(f"  {json.dumps(shape)}: {{\n" + ",\n".join(lines) + "\n  }")
    head = f' "engine": {json.dumps(engine_name)},\n "device": {json.dumps(device_kind)},\n "entries": '
    return "{\n" + head + "{\n" + ",\n".join(blocks) + "\n }\n}\n"


def _natural(text: str) -> list[str]:
    return [part.zfill(18) for part in re.split("([0-9]+)", text)]


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """A lock against other processes that write there, if the platform and the file system have such locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
