"""Tuned configurations: which one a call gets, from which file, and what happens to files that are broken."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from jmx import backends
from jmx.activations import ReLU, SiLU, SwiGLU
from jmx.selection import tuning
from jmx.selection.environment import Environment, known_devices
from jmx.selection.problem import Problem
from jmx.selection.tuning import REACH, Entry, Key, Tunable
from jmx.util.atomic_files import renaming

H200 = Environment.named("h200")
SHIPPED = pathlib.Path(tuning.__file__).parent / "tuned"


@dataclass(frozen=True)
class Product:
    block_n: int
    swap: bool

    def __post_init__(self):
        if self.block_n not in (64, 128, 256):
            raise ValueError(f"`block_n` (={self.block_n}) must be 64, 128 or 256")


@dataclass(frozen=True)
class Config:
    gate_up: Product
    down: Product
    schedule: str
    split_k: int


def config(block_n=64, split_k=1):
    return Config(Product(block_n, True), Product(64, False), "static", split_k)


HEURISTIC = config()


@dataclass(frozen=True)
class Engine:
    """Splits must divide the intermediate size."""

    name: str = "fake"
    config_type: type[Config] = Config

    def heuristic(self, problem, environment):
        return HEURISTIC

    def candidates(self, problem, environment):
        return [config(block_n) for block_n in (64, 128, 256)]

    def check(self, config, problem, environment):
        if problem.intermediate_size % config.split_k:
            raise ValueError(f"`split_k` (={config.split_k}) must divide {problem.intermediate_size}")


ENGINE: Tunable[Config] = Engine()


def problem(num_tokens: int | None = 1, **fields):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 8, "top_k": 2, "dtype": "bfloat16"}
    rest = {"format": "mxfp4", "activation": SwiGLU(), "gate_up_order": "interleaved", "bias": True, "layout": "packed"}
    return Problem(num_tokens=num_tokens, **sizes | rest | fields)


SHAPE = tuning.shape_class(problem())


def entries(*tokens, shape=SHAPE):
    """Entries with different splits, all of which divide the intermediate size."""
    splits = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
    return {
        Key(shape, count): Entry(config(128, split), 10.0 * count, 11.0 * count)
        for count, split in zip(tokens, splits, strict=False)
    }


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """(the user's file, the shipped file) for the fake engine on an H200, neither there yet, nothing read yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning.importlib.resources, "files", lambda package: tmp_path / package)
    tuning._tables.cache_clear()
    tuning._warn_once.cache_clear()
    yield tuning.cache_file("fake", H200.device_kind), tmp_path / "jmx.selection" / "tuned" / "fake-nvidia-h200.json"
    tuning._tables.cache_clear()
    tuning._warn_once.cache_clear()


def save(path, found):
    tuning.save(path, ENGINE, H200.device_kind, found)


def look_up(num_tokens: int | None = 1, **fields):
    return tuning.config(ENGINE, problem(num_tokens, **fields), H200)


def test_sources_win_in_their_order(files):
    user, shipped = files
    assert look_up() == (HEURISTIC, "heuristic")
    save(shipped, {Key(SHAPE, 1): Entry(config(128), 1.0, None)})
    tuning._tables.cache_clear()
    assert look_up() == (config(128), "table")
    save(user, {Key(SHAPE, 1): Entry(config(256), 1.0, 2.0)})
    tuning._tables.cache_clear()
    assert look_up() == (config(256), "user")
    with tuning.override("other", config(64, 3)):
        assert look_up() == (config(256), "user")
    with tuning.override("fake", config(64, 3)):
        assert look_up() == (config(64, 3), "override")
        with tuning.override("other", config()), tuning.override("fake", config(64, 2)):
            assert look_up() == (config(64, 2), "override")
        assert look_up() == (config(64, 3), "override")
    assert look_up() == (config(256), "user")


def served_by(num_tokens, tuned):
    """The definition, the long way: walk up from the count until an entry, or the reach, is met."""
    for tokens in range(num_tokens, REACH * num_tokens):
        if tokens in tuned:
            return tokens
    return None


@pytest.mark.parametrize("size", range(5))
def test_every_count_takes_the_next_entry_within_reach(size):
    for tuned in itertools.combinations((1, 2, 3, 7, 16, 40, 64), size):
        found = entries(*tuned)
        for count in range(80):
            served = tuning._serving(SHAPE, count, [found, {}])
            expected = served_by(count, tuned)
            assert (served[0][0] if served else None) == expected, (tuned, count)


def test_counts_split_between_the_two_files(files):
    user, shipped = files
    table, own = entries(1, 4, 16, 64), {Key(SHAPE, 16): Entry(config(256), 1.0, 1.0)}
    save(shipped, table)
    save(user, own)
    for count in range(70):
        tokens = served_by(count, (1, 4, 16, 64))
        expected = (HEURISTIC, "heuristic")
        if tokens is not None:
            expected = (config(256), "user") if tokens == 16 else (table[Key(SHAPE, tokens)].config, "table")
        assert look_up(count) == expected, count
    assert look_up(None) == (HEURISTIC, "heuristic")


def test_the_default_token_counts_leave_no_gap():
    from jmx.perf.tuner import TOKENS

    tuned = entries(*TOKENS)
    assert all(tuning._serving(SHAPE, count, [tuned]) for count in range(1, max(TOKENS) + 1))


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"num_experts": 9}, False),
        ({"top_k": 3}, False),
        ({"hidden_size": 96}, False),
        ({"intermediate_size": 64}, False),
        ({"format": "nvfp4"}, False),
        ({"dtype": "float32"}, False),
        ({"input_format": "fp8_token"}, False),
        ({"gate_up_order": None, "activation": ReLU()}, False),
        ({"dtype": "float16"}, True),
        ({"gate_up_order": "concatenated"}, True),
        ({"bias": False}, True),
        ({"activation": SiLU()}, True),
        ({"weights_on": "input"}, True),
    ],
)
def test_what_belongs_to_a_shape_class(fields, same, files):
    save(files[1], {Key(SHAPE, 1): Entry(config(256), 1.0, 1.0)})
    assert look_up(**fields).source == ("table" if same else "heuristic")


def test_an_entry_that_cannot_run_the_problem_gives_way_with_one_warning(files):
    user, shipped = files
    save(user, {Key(SHAPE, 4): Entry(config(256, 5), 1.0, 1.0)})
    save(shipped, {Key(SHAPE, 4): Entry(config(256, 3), 1.0, 1.0)})
    reported = f"{user}: the entry for {SHAPE}, 4 tokens is ignored: `split_k` (=5) must divide 96"
    with pytest.warns(UserWarning, match="split_k") as caught:
        assert look_up(4) == look_up(3) == (config(256, 3), "table")
    assert [str(warning.message) for warning in caught] == [reported]


def test_an_override_that_cannot_run_is_an_error():
    with tuning.override("fake", config(64, 5)), pytest.raises(ValueError, match=r"`split_k` \(=5\)"):
        look_up()
    with tuning.override("fake", Product(64, True)), pytest.raises(TypeError, match="must be a Config for 'fake'"):
        look_up()


@pytest.mark.parametrize("value", [None, {"split_k": 1}, Config, jax.ShapeDtypeStruct((1,), jnp.int8)])
def test_an_override_is_a_frozen_dataclass(value):
    with pytest.raises(TypeError, match="must be a frozen dataclass"), tuning.override("fake", value):
        pytest.fail("entered")


def test_an_override_traces_anew_and_the_old_trace_is_kept():
    traced = []

    @jax.jit
    def call(x):
        traced.append(tuning.config(ENGINE, problem(), H200))
        return x

    for _ in range(2):
        call(1)
        with tuning.override("fake", config(64, 3)):
            call(1)
    assert traced == [(HEURISTIC, "heuristic"), (config(64, 3), "override")]


def test_files_are_read_once_until_reload_which_also_forgets_traces(files, monkeypatch):
    traced = []

    @jax.jit
    def call(x):
        traced.append(tuning.config(ENGINE, problem(), H200))
        return x

    call(1)
    save(files[0], {Key(SHAPE, 1): Entry(config(256), 1.0, 1.0)})
    assert look_up() == (HEURISTIC, "heuristic")
    tuning.reload()
    call(1)
    assert traced == [(HEURISTIC, "heuristic"), (config(256), "user")]


def test_a_table_is_text_in_order_with_an_entry_a_line(files):
    small, large = (tuning.shape_class(problem(num_experts=n)) for n in (8, 128))
    save(files[1], entries(64, 4, shape=large) | entries(1, shape=small))
    other = '{"config": {"gate_up": {"block_n": 128, "swap": true}, "down": {"block_n": 64, "swap": false}, '
    assert files[1].read_text().splitlines() == [
        "{",
        ' "engine": "fake",',
        ' "device": "NVIDIA H200",',
        ' "entries": {',
        '  "E=8 k=2 H=64 I=96 gated mxfp4 16-bit": {',
        f'   "1": {other}"schedule": "static", "split_k": 1}}, "us": 10.0, "heuristic_us": 11.0}}',
        "  },",
        '  "E=128 k=2 H=64 I=96 gated mxfp4 16-bit": {',
        f'   "4": {other}"schedule": "static", "split_k": 2}}, "us": 40.0, "heuristic_us": 44.0}},',
        f'   "64": {other}"schedule": "static", "split_k": 1}}, "us": 640.0, "heuristic_us": 704.0}}',
        "  }",
        " }",
        "}",
    ]


def test_a_table_comes_back_and_new_entries_replace_old_ones(files):
    file = files[0]
    save(file, entries(1, 4))
    save(file, {Key(SHAPE, 4): Entry(config(256), 2.5, None)})
    save(file, entries(1, shape="another shape"))
    expected = entries(1, 4) | {Key(SHAPE, 4): Entry(config(256), 2.5, None)} | entries(1, shape="another shape")
    assert tuning.load(file, ENGINE, H200.device_kind) == expected
    save(file, {})
    assert tuning.load(file, ENGINE, H200.device_kind) == expected


def test_writing_is_all_or_nothing(files, monkeypatch):
    file = files[0]
    save(file, entries(1))
    before = file.read_text()

    def interrupted(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(renaming, "exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(file, entries(2))
    assert [path.read_text() for path in file.parent.iterdir()] == [before]


@pytest.mark.parametrize("state", ["link", "dangling link", "directory", "fifo"])
def test_a_link_is_followed_and_what_is_no_file_is_kept_under_another_name(state, files):
    file, target = files[0], files[0].with_name("target.json")
    file.parent.mkdir(parents=True)
    if "link" in state:
        if state == "link":
            save(target, entries(1))
        file.symlink_to(target)
        save(file, entries(4))
        assert file.is_symlink()
        assert tuning.load(target, ENGINE, H200.device_kind) == ((entries(1) if state == "link" else {}) | entries(4))
        return
    file.mkdir() if state == "directory" else os.mkfifo(file)
    before = file.lstat()
    with pytest.warns(UserWarning, match=rf"cannot be read: it is not a regular file; it is kept as {file}\.old"):
        save(file, entries(4))
    assert os.path.samestat(file.with_name(f"{file.name}.old").lstat(), before)
    assert tuning.load(file, ENGINE, H200.device_kind) == entries(4)


def add(path, shape):
    for tokens in range(1, 21):
        save(path, entries(tokens, shape=shape))


@pytest.mark.costly
def test_processes_that_write_at_once_lose_nothing(files):
    pytest.importorskip("fcntl")
    writers = multiprocessing.get_context("spawn")
    processes = [writers.Process(target=add, args=(files[0], f"shape {i}")) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = tuning.load(files[0], ENGINE, H200.device_kind)
    assert found.keys() == {Key(f"shape {i}", tokens) for i in range(2) for tokens in range(1, 21)}
    assert [path.name for path in files[0].parent.iterdir()] == [files[0].name]


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"\xff\xfe",
    b"[" * 100_000,
    b"9" * 5000,
    b'{"engine": "fake", "device": "NVIDIA H200"}',
    b'{"engine": "fake", "device": "NVIDIA H200", "entries": []}',
    b'{"engine": "fake", "device": "NVIDIA H200", "entries": {"a": 1}}',
    b'{"engine": "fake", "device": "NVIDIA H100", "entries": {}}',
    b'{"engine": "mosaic", "device": "NVIDIA H200", "entries": {}}',
]


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: str(content[:70]))
def test_a_broken_file_is_ignored_with_one_warning_that_names_it(content, files):
    user, shipped = files
    save(shipped, entries(1))
    user.parent.mkdir(parents=True)
    user.write_bytes(content)
    with pytest.warns(UserWarning, match="is not a table") as caught:
        assert look_up() == look_up(1) == (entries(1)[Key(SHAPE, 1)].config, "table")
    (warning,) = caught
    assert str(warning.message).startswith(f"{user} is not a table of tuned configurations: ")
    with pytest.raises(ValueError, match="is not a table of tuned configurations"):
        tuning.load(user, ENGINE, H200.device_kind)
    with pytest.warns(UserWarning, match=rf"is not a table.*; it is kept as {user}\.old"):
        save(user, entries(4))
    assert tuning.load(user, ENGINE, H200.device_kind) == entries(4)
    assert user.with_name(f"{user.name}.old").read_bytes() == content


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(files):
    files[0].mkdir(parents=True)  # a directory in its place
    with pytest.warns(UserWarning, match="cannot be read"):
        assert look_up() == (HEURISTIC, "heuristic")


def changed(path, value):
    """The JSON of an entry with one value, below `path`, replaced; "..." takes it away."""
    whole = dataclasses.asdict(Entry(config(128), 1.0, 2.0))
    inner = whole
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return whole


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        (3, "3 is not of type Entry"),
        (changed(["us"], ...), "Entry lacks us"),
        (changed(["us"], "fast"), "us (='fast') must be float"),
        (changed(["speed"], 1.0), "Entry has no field speed"),
        (changed(["config"], ...), "Entry lacks config"),
        (changed(["config"], [1]), "[1] is not of type Config"),
        (changed(["config", "split_k"], ...), "Config lacks split_k"),
        (changed(["config", "split_k"], True), "split_k (=True) must be int"),
        (changed(["config", "split_k"], 1.0), "split_k (=1.0) must be int"),
        (changed(["config", "schedule"], None), "schedule (=None) must be str"),
        (changed(["config", "block_m"], 64), "Config has no field block_m"),
        (changed(["config", "down"], 64), "64 is not of type Product"),
        (changed(["config", "down", "swap"], 0), "swap (=0) must be bool"),
        (changed(["config", "down", "block_n"], 65), "`block_n` (=65) must be 64, 128 or 256"),
    ],
)
def test_an_entry_that_does_not_fit_is_ignored_with_one_warning_that_names_it(value, reported, files):
    user, shipped = files
    save(shipped, entries(1, 4))
    save(user, {Key(SHAPE, 4): Entry(config(256), 1.0, 1.0)})
    values = json.loads(user.read_text())
    values["entries"][SHAPE]["1"] = value
    user.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="is ignored") as caught:
        found = look_up(1), look_up(4)
    assert found == ((entries(1)[Key(SHAPE, 1)].config, "table"), (config(256), "user"))
    assert [str(warning.message) for warning in caught] == [
        f"{user}: the entry for {SHAPE}, 1 tokens is ignored: {reported}"
    ]


@pytest.mark.parametrize("tokens", ["0", "-1", "01", "1.0", "many", "", "٣", "9" * 5000])
def test_token_counts_in_files_are_whole_numbers(tokens, files):
    save(files[0], entries(1))
    files[0].write_text(files[0].read_text().replace('"1":', f'"{tokens}":'))
    with pytest.warns(UserWarning, match="is not a number of tokens"):
        assert look_up() == (HEURISTIC, "heuristic")


def test_where_the_users_cache_is(monkeypatch, tmp_path):
    name = pathlib.Path("jmx", "tuning", "fake-nvidia-h100-80gb-hbm3.json")
    file = tuning.cache_file("fake", known_devices()["h100"].device_kind)
    assert file == tmp_path / "cache" / name
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        for platform, below in (("linux", ".cache"), ("darwin", "Library/Caches")):
            monkeypatch.setattr(sys, "platform", platform)
            assert tuning.cache_file("fake", "NVIDIA H100 80GB HBM3") == tmp_path / "home" / below / name


def test_nobodys_home_is_no_cache(monkeypatch, files):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    save(files[1], entries(1))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert look_up().source == "table"


def test_a_choice_is_described_in_one_line(files):
    save(files[0], {Key(SHAPE, 1): Entry(config(256), 1.0, 1.0)})
    assert tuning.describe(*look_up(1)) == f"{config(256)!r}, by this user's cache"
    assert (
        tuning.describe(*look_up(2))
        == f"{HEURISTIC!r}, by the heuristic, since no table has this shape and token count"
    )
    assert "\n" not in tuning.describe(*look_up(1))


def test_tunable_engines_are_distinguished_from_others():
    assert isinstance(Engine(), Tunable)
    assert not any(isinstance(backend, Tunable) for backend in backends.registered_backends() if backend.name == "xla")


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*")), ids=lambda file: file.name)
def test_shipped_tables_hold_entries_that_can_run(file):
    values = json.loads(file.read_text())
    (engine,) = [engine for engine in backends.registered_backends() if engine.name == values["engine"]]
    assert isinstance(engine, Tunable)
    (environment,) = [known for known in known_devices().values() if known.device_kind == values["device"]]
    assert file.name == tuning._file_name(engine.name, environment.device_kind)
    found = tuning.load(file, engine, environment.device_kind)  # a warning, of an entry that does not fit, is an error
    assert found
    assert file.read_text() == tuning._text(engine.name, environment.device_kind, found)
