"""Every option of every command with values that are wrong: one line on stderr, exit code 2, nothing done."""

import argparse
import os
import pathlib

import pytest

from jmx import cli
from jmx.checkpoint import quantizing
from jmx.checkpoint.gpt_oss import writer as gpt_oss_writer
from jmx.cli import conversation, generation
from jmx.ffi.cutlass import build
from jmx.perf import bench, tuner
from jmx.serving import server

TINY = str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "gpt_oss_tiny")

# What each command is given besides.
BASES = {
    "explain": ["--model", "small"],
    "generate": [TINY, "a"],
    "chat": [TINY],
    "serve": [TINY],
    "doctor": [],
    "convert": [TINY, "out", "--to", "hf"],
    "bench": ["--model", "small"],
    "tune": [],
    "build": ["cutlass"],
}
WRONG = ["", "0", "-1", "x", "9" * 30, "9" * 5000, "1e400", "nan", "missing/file", "directory", ",", "1,", "1.5"]
WRONG += ["a\0b", "\ud800", "x" * 5000, "é", ":", "mxfp4:", "NVFP4", "/dev/null"]

# Values of these that are right: any name of a file or directory to be made that can be one.
NAMES = {"0", "-1", "x", "9" * 30, "1e400", "nan", ",", "1,", "1.5", "é", ":", "mxfp4:", "NVFP4"}
RIGHT = {
    "compilation_cache": {*NAMES, "missing/file", "directory"},
    "target": NAMES,
    "report": NAMES,
    "json": NAMES,
    "png": NAMES,
    "output": NAMES,
    "seconds": {"9" * 30, "9" * 5000, "1e400", "1.5"},  # the two largest are infinite: as many as there are
    "seed": {"0"},
    "logits": NAMES,
    "stop_id": {"0"},
    "logprobs": {"0"},
    "temperature": {"0", "9" * 30, "1.5"},
    "generate-top_k": {"9" * 30},
    "chat-top_k": {"9" * 30},
    "system": {*WRONG},
    "name": {*WRONG} - {"", "a\0b", "\ud800"},
    "port": {"0"},
    "max_waiting": {"0"},
    "drain_seconds": {"0"},
    "stop": {*WRONG} - {""},
    "min_p": {"0"},
    "repetition_penalty": {"9" * 30, "1.5"},
    "presence_penalty": {"0", "-1", "1.5"},
    "frequency_penalty": {"0", "-1", "1.5"},
}


class Accepted(BaseException):
    """In place of the work that a command would begin."""


def options():
    (commands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        for action in command._actions:
            takes_one = action.nargs in (None, "?") and not isinstance(action, argparse.BooleanOptionalAction)
            if takes_one:
                yield pytest.param(name, action, id=f"{name}-{action.dest}")


def argv_of(name, action, value):
    if not action.option_strings:
        argv = [name, *BASES[name]]
        argv[1 + ["source", "target"].index(action.dest) if name == "convert" else 1] = value
        return argv
    base = BASES[name]
    if action.dest in ("quantize", "to"):
        base = [TINY, "out"]
    if action.dest == "report":
        base = [TINY, "out", "--quantize", "nvfp4"]
    if action.dest in ("top_k", "top_p", "min_p"):
        base = [*base, "--temperature", "1"]
    if action.dest == "checkpoint":
        base = []
    return [name, *base, action.option_strings[-1], value]


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    def stop(*arguments, **options):
        raise Accepted

    monkeypatch.setattr(bench, "measure_limits", stop)
    monkeypatch.setattr(tuner, "choose_engine", stop)
    monkeypatch.setattr(build, "run", stop)
    monkeypatch.setattr(generation, "make_model", stop)
    monkeypatch.setattr(conversation, "make_model", stop)
    monkeypatch.setattr(server, "listen", stop)
    monkeypatch.setattr(conversation.ChatTemplate, "read", lambda directory: None)  # TINY has none
    monkeypatch.setattr(gpt_oss_writer, "_write_weights", stop)
    monkeypatch.setattr(quantizing, "convert", stop)
    monkeypatch.setattr("jax.config.update", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()


@pytest.mark.parametrize(("name", "action"), [*options()])
def test_a_wrong_value_is_one_line_and_exit_code_2(name, action, stopped, capsys, tmp_path):
    for value in WRONG:
        try:
            code = cli.main(argv_of(name, action, value))
        except SystemExit as e:
            code = e.code
        except Accepted:
            code = 0
        out, err = capsys.readouterr()
        right = value in RIGHT.get(f"{name}-{action.dest}", RIGHT.get(action.dest, ()))
        assert code == (0 if right else 2), (value, out, err)
        if right:
            continue
        assert out == "", value
        assert err.startswith("jmx: error: "), value
        assert err.count("\n") == 1, value
        assert not (tmp_path / "out").exists()
    assert os.path.exists("/dev/null")
    assert not os.path.isfile("/dev/null")


def test_the_table_reaches_every_command():
    reached = [str(param.id) for param in options()]
    assert {name.split("-")[0] for name in reached} == {*BASES}
    assert len(reached) > 45
