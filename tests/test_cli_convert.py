"""`jmx convert`: what it does not overwrite, two at once, and what signals leave at each of its stages."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stopped_converts
from child_environment import importing
from flax import nnx
from float_checkpoints import TINY

from jmx import cli
from jmx.checkpoint import compressed_tensors, gpt_oss, orbax, quantizing, shards
from jmx.checkpoint.quantizing import writer
from jmx.numerics.formats import FORMATS
from jmx.util.atomic_files import renaming

ROOT = Path(__file__).parents[1]
LAYER = "model.layers.3.mlp.experts"


def float_experts(path: Path, rng: np.random.Generator) -> Path:
    """A checkpoint of one small expert, a file beside it and a folder."""
    path.mkdir()
    weights = [rng.standard_normal((32, 32)).astype(np.float32) for _ in range(3)]
    names = [f"{LAYER}.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    outputs = [
        shards.Output(name, "F32", (32, 32), lambda weight=weight: [weight])
        for name, weight in zip(names, weights, strict=True)
    ]
    shards.write(path, outputs, 10**6)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text('{"a": 1}')
    (path / "folder").mkdir()
    (path / "folder" / "file").write_text("of the source")
    return path


def tree(path: Path) -> dict[str, object]:
    """Everything below `path`: kinds, contents, targets of links, permissions."""
    found: dict[str, object] = {}
    for entry in sorted(path.rglob("*")):
        status = entry.lstat()
        content = entry.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[str(entry.relative_to(path))] = (
            status.st_mode,
            status.st_ino,
            os.readlink(entry) if entry.is_symlink() else content,
        )
    return found


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator) -> Path:
    (tmp_path / "parent").mkdir()
    return float_experts(tmp_path / "parent" / "in", rng)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main(["convert", *map(str, arguments)])
    return code, capsys.readouterr().err


# What is at a path before the command: each makes it below a folder, given the source, and gives the path to write.


def _missing(folder: Path, source: Path) -> Path:
    return folder / "new"


def _file(folder: Path, source: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file"


def _json(folder: Path, source: Path) -> Path:
    (folder / "mine.json").write_text('{"schema": "jmx.quantize-report/1", "mine": 1}')
    return folder / "mine.json"


def _empty_directory(folder: Path, source: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _full_directory(folder: Path, source: Path) -> Path:
    (folder / "full" / "deep").mkdir(parents=True)
    (folder / "full" / "deep" / "thesis.txt").write_text("mine")
    return folder / "full"


def _foreign_checkpoint(folder: Path, source: Path) -> Path:
    shutil.copytree(TINY, folder / "theirs")  # a quantized one, with a config and its shards, that jmx did not write
    return folder / "theirs"


def _link_to_directory(folder: Path, source: Path) -> Path:
    _full_directory(folder, source)
    (folder / "link").symlink_to(folder / "full")
    return folder / "link"


def _link_to_result(folder: Path, source: Path) -> Path:
    _result(folder, source)
    (folder / "link").symlink_to(folder / "out")
    return folder / "link"


def _link_to_report(folder: Path, source: Path) -> Path:
    _report(folder, source)
    (folder / "link").symlink_to(folder / "errors.json")
    return folder / "link"


def _dangling_link(folder: Path, source: Path) -> Path:
    (folder / "dangling").symlink_to(folder / "nowhere")
    return folder / "dangling"


def _loop(folder: Path, source: Path) -> Path:
    (source / "loop").symlink_to("loop")
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


def _fifo(folder: Path, source: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def _result(folder: Path, source: Path) -> Path:
    quantizing.convert(source, folder / "out", FORMATS["mxfp4"], report=folder / "errors.json")
    return folder / "out"


def _report(folder: Path, source: Path) -> Path:
    _result(folder, source)
    return folder / "errors.json"


def _result_and(change: Callable[[Path], object]) -> Callable[[Path, Path], Path]:
    def make(folder: Path, source: Path) -> Path:
        change(_result(folder, source))
        return folder / "out"

    return make


def _moved_and_linked(file: Path) -> None:
    file.rename(file.parent.parent / "kept")
    file.symlink_to("../kept")


def _edited_report(folder: Path, source: Path) -> Path:
    file = _report(folder, source)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": "mine"}))
    return file


STATES: dict[str, Callable[[Path, Path], Path]] = {
    "missing": _missing,
    "file": _file,
    "json": _json,
    "empty directory": _empty_directory,
    "full directory": _full_directory,
    "foreign checkpoint": _foreign_checkpoint,
    "link to directory": _link_to_directory,
    "link to result": _link_to_result,
    "link to report": _link_to_report,
    "dangling link": _dangling_link,
    "loop of a link": _loop,
    "below a loop": lambda folder, source: _loop(folder, source) / "new",
    "fifo": _fifo,
    "earlier result": _result,
    "earlier report": _report,
    "edited report": _edited_report,
    "result and a file": _result_and(lambda out: (out / "notes.txt").write_text("mine")),
    "result and a shard": _result_and(lambda out: (out / "more.safetensors").write_text("mine")),
    "result and a folder": _result_and(lambda out: (out / "mine").mkdir()),
    "result and a link": _result_and(lambda out: (out / "link").symlink_to(out)),
    "result and a fifo": _result_and(lambda out: os.mkfifo(out / "fifo")),
    "result with a link for a file": _result_and(lambda out: _moved_and_linked(out / "tokenizer.json")),
    "result with an edited file": _result_and(lambda out: (out / "tokenizer.json").write_text('{"a": 2}')),
    "result with an edited config": _result_and(lambda out: (out / "config.json").write_text("{}")),
    "result with a longer shard": _result_and(
        lambda out: (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes() + b"!")
    ),
    "result without its list": _result_and(lambda out: (out / "jmx-files.json").unlink()),
    "result with another list": _result_and(lambda out: (out / "jmx-files.json").write_text('{"files": {}}')),
    "result that lacks a file": _result_and(lambda out: (out / "tokenizer.json").unlink()),
    "source": lambda folder, source: source,
    "parent of the source": lambda folder, source: source.parent,
    "inside the source": lambda folder, source: source / "new",
    "deep inside the source": lambda folder, source: source / "folder" / "new",
    "a file of the source": lambda folder, source: source / "config.json",
    "the source by a link": lambda folder, source: _linked(folder, source) / "new",
    "by dots": lambda folder, source: source / "folder" / "..",
    "no directory": lambda folder, source: folder / "no" / "new",
    "below a file": lambda folder, source: _file(folder, source) / "new",
}


def _linked(folder: Path, source: Path) -> Path:
    (folder / "alias").symlink_to(source)
    return folder / "alias"


REPLACED = {"out": ("earlier result", "result that lacks a file"), "report": ("earlier report",)}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("which", ["out", "report"])
def test_only_an_earlier_result_of_the_same_kind_is_replaced(
    which: str, state: str, overwrite: bool, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "here"
    folder.mkdir()
    path = STATES[state](folder, source)
    paths = {"out": tmp_path / "other", "report": tmp_path / "other.json"} | {which: path}
    arguments = [source, paths["out"], "--quantize", "fp8_channel", "--report", paths["report"]]
    accepted = state == "missing" or (overwrite and state in REPLACED[which])
    before = tree(tmp_path)
    if not accepted:
        monkeypatch.setattr(writer, "_read_config", lambda directory: pytest.fail("something was read"))
    code, reported = run(capsys, *arguments, *(["--overwrite"] if overwrite else []))
    if not accepted:
        assert (code, tree(tmp_path)) == (2, before)
        assert reported.startswith("jmx: error: ")
        assert reported.count("\n") == 1
        assert str(path) in reported or path.name in reported
        if state in REPLACED[which]:  # but for the flag
            assert "--overwrite" in reported
        return
    assert (code, reported) == (0, "")
    report = json.loads(paths["report"].read_text())
    assert (report["schema"], report["format"]) == ("jmx.quantize-report/1", "fp8_channel")
    assert sorted(entry.name for entry in paths["out"].iterdir()) == [
        "config.json", "jmx-files.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    changed = {*tree(tmp_path).items()} ^ {*before.items()}
    ours = tuple(str(its.relative_to(tmp_path)) for its in paths.values())
    assert all(name.startswith(ours) for name, _ in changed)


def _both(out: str, report: str) -> Callable[[Path, Path], tuple[str | Path, str | Path]]:
    return lambda folder, source: (folder / out, folder / report)


RELATED = {
    "the report in OUT": _both("out", "out/errors.json"),
    "the report deep in OUT": _both("out", "out/a/b/errors.json"),
    "OUT in the report": _both("errors.json/out", "errors.json"),
    "one path": _both("out", "out"),
    "one path by dots": _both("out", "../here/out"),
    "one path by a link": lambda folder, source: (folder / "out", _linked(folder, folder) / "out"),
    "OUT where a link of the source points": lambda folder, source: (
        _target(source / "link.json", folder / "out", folder / "out" / "tokenizer.json"),
        folder / "errors.json",
    ),
    "the report where a link of the source points": lambda folder, source: (
        folder / "new",
        _target(source / "link.json", folder / "errors.json", folder / "errors.json"),
    ),
    "the working directory": lambda folder, source: (folder / "out", "."),
    "the directory above": lambda folder, source: (folder / "out", ".."),
    "no name": lambda folder, source: (folder / "out", ""),
    "the root": lambda folder, source: ("/", folder / "errors.json"),
}


def _target(link: Path, path: Path, to: Path) -> Path:
    _result(path.parent, link.parent)
    link.symlink_to(to)
    return path


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("case", RELATED)
def test_neither_output_is_or_holds_or_is_in_the_other_or_the_source(
    case: str, overwrite: bool, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    monkeypatch.chdir(folder)
    out, report = RELATED[case](folder, source)
    before = tree(tmp_path)
    monkeypatch.setattr(writer, "_read_config", lambda directory: pytest.fail("something was read"))
    arguments = [source, out, "--quantize", "mxfp4", "--report", report, *(["--overwrite"] if overwrite else [])]
    code, reported = run(capsys, *arguments)
    assert (code, tree(tmp_path)) == (2, before)
    assert reported.count("\n") == 1


# Other writers of checkpoints, none of which replaces anything

GPT_OSS = TINY
QUANTIZED = ROOT / "tests" / "data" / "compressed_tensors" / "nvfp4"
WRITERS: dict[str, tuple[Path, Callable[[Path, Path], object]]] = {
    "hf": (GPT_OSS, lambda source, path: gpt_oss.convert(source, path, "hf")),
    "original": (GPT_OSS, lambda source, path: gpt_oss.convert(source, path, "original")),
    "orbax form": (GPT_OSS, lambda source, path: gpt_oss.convert(source, path, "orbax")),
    "compressed-tensors": (
        QUANTIZED,
        lambda source, path: compressed_tensors.convert(compressed_tensors.Reader(source), path),
    ),
    "module": (GPT_OSS, lambda source, path: orbax.save(path, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))),
}


@pytest.mark.parametrize("state", [state for state in STATES if not state.startswith(("result ", "missing"))])
@pytest.mark.parametrize("name", WRITERS)
def test_other_writers_replace_nothing(name: str, state: str, source: Path, tmp_path: Path) -> None:
    original, write = WRITERS[name]
    folder, own = tmp_path / "here", tmp_path / "own" / "in"
    folder.mkdir()
    shutil.copytree(original, own)
    (own / "folder").mkdir()
    (own / "folder" / "file").write_text("of the source")
    path = STATES[state](folder, own if "source" in state or state == "by dots" else source)
    if name == "module" and state in ("inside the source", "deep inside the source", "the source by a link"):
        return  # it has no source
    before = tree(tmp_path)
    with pytest.raises((OSError, ValueError), match="must ") as caught:
        write(own, path)
    assert type(caught.value) in (FileExistsError, FileNotFoundError, ValueError)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", WRITERS)
def test_other_writers_that_lose_a_race_leave_what_won(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write = WRITERS[name]
    rename = renaming.rename_new

    def late(new: Path, path: Path) -> None:
        path.mkdir()  # an empty one, which os.rename would replace
        rename(new, path)

    monkeypatch.setattr(renaming, "rename_new", late)
    with pytest.raises(FileExistsError, match=r"out must not exist yet, but appeared while it was being written"):
        write(source, tmp_path / "out")
    assert [(path.name, [*path.iterdir()]) for path in tmp_path.iterdir()] == [("out", [])]


# Two at once, and a full disk


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("which", ["out", "errors.json"])
def test_of_two_at_once_the_second_loses_with_one_line(
    which: str, overwrite: bool, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder, other = tmp_path / "here", tmp_path / "there"
    folder.mkdir()
    other.mkdir()
    _result(other, source)
    quantize, calls = writer.quantize, []

    def while_it_runs(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:  # the other one is done
            (other / which).rename(folder / which)
        return quantize(*arguments)  # pyright: ignore

    monkeypatch.setattr(writer, "quantize", while_it_runs)
    won = tree(other)
    flags = ["--quantize", "fp8_channel", "--report", folder / "errors.json", *(["--overwrite"] if overwrite else [])]
    code, reported = run(capsys, source, folder / "out", *flags)
    assert code == 2
    line = f"jmx: error: {folder / which} must not exist yet, but appeared while it was being written: it stays\n"
    assert reported == line
    assert {name: its for name, its in tree(folder).items() if name.startswith(which)} == {
        name: its for name, its in won.items() if name.startswith(which)
    }
    assert sorted(os.listdir(folder)) == [which] if which == "out" else ["errors.json", "out"]


@pytest.mark.parametrize("change", ["a file", "another result", "gone"])
def test_what_changes_while_it_is_being_replaced_stays(
    change: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    out = _result(folder, source)
    quantize = writer.quantize
    seen: list[dict[str, object]] = []

    def while_it_runs(*arguments: object) -> object:
        if not seen:
            if change == "a file":
                (out / "notes.txt").write_text("mine")
            else:
                out.rename(tmp_path / "elsewhere")
            if change == "another result":
                shutil.copytree(tmp_path / "elsewhere", out)
            seen.append({name: its for name, its in tree(folder).items() if not name.startswith(".")})
        return quantize(*arguments)  # pyright: ignore

    monkeypatch.setattr(writer, "quantize", while_it_runs)
    flags = ["--quantize", "fp8_channel", "--overwrite", "--report", folder / "errors.json"]
    code, reported = run(capsys, source, out, *flags)
    if change == "gone":
        assert (code, reported) == (0, "")
        assert not (tmp_path / "elsewhere" / "notes.txt").exists()
        return
    assert (code, reported.count("\n")) == (2, 1)
    assert str(out) in reported
    assert tree(folder) == seen[0]


@pytest.mark.costly
def test_a_full_disk_is_one_line_with_the_files_name_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from jmx import cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "out"), "--quantize", "int8_channel"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["JAX_PLATFORMS"] = "cpu"  # what drives a GPU writes files, too, and crashes at the limit
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jmx: error: [Errno 27] File too large: ")
    assert done.stderr.endswith("/new/out/model.safetensors'\n")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["parent"]


# Signals


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, selected: list[dict[str, object]]
) -> dict[tuple[str, int, bool], dict]:
    """The results of `stopped_converts.py` for each case that runs."""
    folder = tmp_path_factory.mktemp("stopped")
    float_experts(folder / "in", np.random.default_rng(7))
    chosen = [(case["stage"], case["number"], case["overwrite"]) for case in selected if "stage" in case]
    command = [sys.executable, str(Path(stopped_converts.__file__)), str(folder), json.dumps(chosen)]
    environment = importing(ROOT)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = map(json.loads, done.stdout.splitlines())
    return {(case["stage"], case["signal"], case["overwrite"]): case for case in found}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(("stage", "number", "overwrite"), [*stopped_converts.cases()])
def test_a_signal_leaves_nothing_half_written_and_the_next_run_goes_well(
    stage: str, number: int, overwrite: bool, stopped: dict[tuple[str, int, bool], dict]
) -> None:
    case = stopped[stage, number, overwrite]
    killed = number == signal.SIGKILL
    assert case["code"] == (-number if killed else 128 + number), case["reported"]
    if not killed:
        assert case["parts"] == []
        name = signal.Signals(number).name
        assert case["reported"].splitlines()[-1] == (
            "jmx: interrupted" if number == signal.SIGINT else f"jmx: ended by {name}"
        )
    outs = {name.removeprefix("out/"): bytes.fromhex(its) for name, its in case["left"].items() if "out/" in name[:4]}
    report = case["left"].get("errors.json")
    done = stage in ("renamed", "report renamed", "exchanged", "removal", "removed")
    assert bool(outs) == (done or overwrite)
    if outs:  # whole, and either the one or the other
        config = json.loads(outs["config.json"])["quantization_config"]
        assert config["format"] == ("float-quantized" if done else "pack-quantized")
        listed = json.loads(outs["jmx-files.json"])["files"]
        assert {name: len(its) for name, its in outs.items() if name != "jmx-files.json"} == {
            name: its["bytes"] for name, its in listed.items()
        }
    if report is not None:
        assert json.loads(bytes.fromhex(report))["format"] in ("fp8_channel", "int8_channel")
    if not killed:
        return
    assert case["again"] == 0, case["reported_again"]
    assert all(f"/{part}, which a process left" in case["reported_again"] for part in case["parts"])
    assert case["after"] == [
        "errors.json", "out", "out/config.json", "out/jmx-files.json", "out/model.safetensors", "out/tokenizer.json"
    ]  # fmt: skip


@pytest.mark.costly
def test_the_command_itself_ends_by_sigterm_and_ignores_what_nohup_ignores(source: Path, tmp_path: Path) -> None:
    """The source's tokenizer is a FIFO behind a link, so that copying it takes as long as this test wants."""
    os.mkfifo(tmp_path / "fifo")
    code = (
        "import os, shutil, signal, sys; from jmx import cli\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "shutil.copyfile = lambda *paths: (os.kill(os.getpid(), signal.SIGHUP), open(sys.argv.pop()).read())\n"
        "code = cli.main(sys.argv[1:-1])\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
        "sys.exit(code)"
    )
    arguments = ["convert", str(source), str(tmp_path / "out"), "--quantize", "mxfp4", str(tmp_path / "fifo")]
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with (tmp_path / "fifo").open("w"):  # it is being read: the directory is there
        assert [path.name[:5] for path in tmp_path.iterdir() if path.name.endswith(".part")] == [".out."]
        child.send_signal(signal.SIGTERM)
        assert (child.communicate(timeout=60)[1], child.returncode) == ("jmx: ended by SIGTERM\n", 143)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "parent"]


def test_handlers_of_others_are_left_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        arguments = source, tmp_path / "out", "--quantize", "x"
        thread = threading.Thread(target=lambda: seen.append(run(capsys, *arguments)[0]))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM, 2]
