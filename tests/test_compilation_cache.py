"""Where commands keep compiled programs: which setting comes first, what cannot be, and that later runs use them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from child_environment import importing

from jmx import cli
from jmx._version import __version__
from jmx.cli import compilation_cache
from jmx.models.program_store import ProgramStore

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
NAMES = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory of caches, and jax's settings as they are for users."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "caches" / "jmx" / "compiled" / __version__
    for name, value in before.items():
        jax.config.update(name, value)


def use(*argv: str | Path) -> tuple[Any, ...]:
    """jax's settings after a command line is parsed."""
    compilation_cache.use(cli.parser().parse_args([*map(str, argv)]))
    return tuple(getattr(jax.config, name) for name in NAMES)


COMMANDS = {"generate": ["generate", "m", "p"], "chat": ["chat", "m"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_run_models_keep_programs_in_the_users_directory(command: str, home: Path) -> None:
    assert use(*COMMANDS[command]) == (True, str(home), 0, -1)
    assert home.is_dir()
    store = compilation_cache.program_store()
    assert isinstance(store, ProgramStore)
    assert store.directory == home / "programs"


@pytest.mark.parametrize("argv", [["doctor"], ["explain"], ["bench"], ["tune"], ["convert", "a", "b", "--to", "hf"]])
def test_other_commands_keep_none(argv: list[str], home: Path) -> None:
    assert use(*argv)[:2] == (True, None)
    assert not home.exists()
    assert compilation_cache.program_store() is None


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("first", [True, False])
def test_options_come_before_the_default(command: str, first: bool, home: Path, tmp_path: Path) -> None:
    named, none = ["--compilation-cache", str(tmp_path / "mine")], ["--no-compilation-cache"]
    argv = COMMANDS[command]
    assert use(*(named + argv if first else argv + named)) == (True, str(tmp_path / "mine"), 0, -1)
    jax.config.update("jax_compilation_cache_dir", None)
    assert use(*(none + argv if first else argv + none))[:2] == (False, None)
    assert compilation_cache.program_store() is None
    assert not home.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_jax_is_set_to_comes_before_the_default(command: str, home: Path, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7)
    assert use(*COMMANDS[command])[:3] == (True, str(tmp_path / "jax"), 7)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert use(*COMMANDS[command])[:2] == (False, None)
    assert not home.exists()
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    jax.config.update("jax_enable_compilation_cache", True)
    assert use(*COMMANDS[command])[:2] == (True, "gs://bucket/cache")
    assert compilation_cache.program_store() is None


@pytest.mark.parametrize("fault", ["a file", "not writable", "no home"])
def test_a_default_directory_that_cannot_be_is_one_warning(
    fault: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home.parent.mkdir(parents=True)
    if fault == "a file":
        home.write_text("mine")
    elif fault == "not writable":
        monkeypatch.setattr(compilation_cache.os, "access", lambda *_: False)  # root may write everywhere
    else:
        monkeypatch.setattr("jmx.selection.tuning.cache_directory", lambda: exec("raise RuntimeError('no home')"))
    assert use("generate", "m", "p")[:2] == (True, None)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("jmx: warning: compiled programs are not kept for later runs: ")


def test_a_store_to_which_others_may_write_is_one_warning(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use("generate", "m", "p")
    (home / "programs").mkdir()
    (home / "programs").chmod(0o777)
    assert compilation_cache.program_store() is None
    assert capsys.readouterr().err.count("jmx: warning: compiled programs are not kept") == 1


def test_both_options_are_not_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["--no-compilation-cache", "--compilation-cache", "x", "doctor"])
    assert "not allowed with" in capsys.readouterr().err


# Processes, which share programs.


def start(cache: Path, *arguments: str, shell: str = "exec {}") -> "subprocess.Popen[str]":
    command = f"{sys.executable} -m jmx.cli generate {TINY} {' '.join(arguments)}"
    return subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", shell.format(command)],
        env=importing(ROOT, XDG_CACHE_HOME=str(cache), JAX_ENABLE_COMPILATION_CACHE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.costly
def test_later_runs_use_programs_and_end_well_in_pipes_and_by_signals(tmp_path: Path) -> None:
    arguments = ("Licensed", "--max-new-tokens", "2000", "--ignore-eos")
    first = start(tmp_path, *arguments, "--json")
    (out, err), programs = first.communicate(timeout=200), tmp_path / "jmx" / "compiled" / __version__ / "programs"
    assert first.returncode == 0, err
    made = {file: file.stat().st_mtime_ns for file in programs.iterdir()}
    assert len(made) > 2
    text = json.loads(out)["text"]

    piped = start(tmp_path, *arguments, shell="{} | head -c 2")
    out, err = piped.communicate(timeout=200)
    assert out.encode() == text.encode()[: len(out.encode())]
    assert piped.returncode in (0, 1)
    assert "Traceback" not in err

    stopped = start(tmp_path, *arguments)
    assert stopped.stdout is not None
    assert stopped.stdout.read(1) == text[0]
    time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=200)
    assert (text[0] + out).rstrip("\n") in text
    assert stopped.returncode == 130, err
    assert err.endswith("jmx: interrupted\n")
    assert {file: file.stat().st_mtime_ns for file in programs.iterdir()} == made
