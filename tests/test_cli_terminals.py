"""The command line on terminals, pipes and streams of all kinds."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from child_environment import importing

from jmx import cli
from jmx.perf import doctor, roofline

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROW = roofline.Row("mosaic_fp8", 8192, "mosaic_sm90_fp8", 16, 1234.5, 0.012, 1.02, 812.0, 127.96, 0.00123, 1.93, 1.2e-3)
EXPLAIN = ["explain", "--model", "gpt-oss-120b", "--device", "h200"]


@pytest.fixture
def saved(tmp_path):
    file = tmp_path / "report.json"
    rows = (dataclasses.replace(ROW, temporary_bytes=123_456_789), dataclasses.replace(ROW, tokens=1, error="[wrong]"))
    settings = {"model": "gpt-oss-120b", "routing": "uniform"}
    roofline.Report({"device": "NVIDIA H200"}, roofline.Limits(4.1e12, 8e14), settings, rows).save(str(file))
    return str(file)


def squeezed(text):
    return re.sub(r"[\s│┃|]", "", text)


@pytest.mark.parametrize("columns", ["40", "80", "200", "7", "0", "x", None])
@pytest.mark.parametrize("command", ["bench", "explain", "doctor"])
def test_tables_hold_all_at_every_width(command, columns, saved, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    found = doctor.examine() | {"advice": []}  # commands to be copied, which are not wrapped
    monkeypatch.setattr(doctor, "examine", lambda: found)
    argvs = {"bench": ["bench", "--from", saved], "explain": [*EXPLAIN, "--tokens", "8192"], "doctor": ["doctor"]}
    assert cli.main(argvs[command]) == (1 if command == "bench" else 0)
    out, err = capsys.readouterr()
    assert err == ""
    width = {"40": 40, "80": 80, "200": 200, "7": 40}.get(str(columns), 140)
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    expected = {
        "bench": ["1234.5", "1%", "1.02", "812", "128", "0.00123", "1.93", "1.2e-03", "16", "123.5", "8192", "[wrong]"],
        "explain": ["backend", "why", "chosen", "cutlass", "128of128experts", "1648.9"],
        "doctor": ["orbax-checkpoint", "capability", "memory", "mosaic_fp8"],
    }[command]
    for reported in expected:
        assert reported in squeezed(out) or reported in out
    if command == "explain":
        assert "about" not in out


def jmx(*argv, shell="{}", **environment):
    """Runs `shell`, in which {} stands for the command."""
    command = " ".join([sys.executable, "-m", "jmx.cli", *argv])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell.format(command)],
        env=importing(ROOT, JAX_PLATFORMS="cpu") | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.costly
@pytest.mark.parametrize("argv", [[], ["--version"], EXPLAIN])
def test_results_that_cannot_be_written_are_one_line_and_exit_code_1(argv):
    done = jmx(*argv, shell="{} > /dev/full")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "jmx: error: [Errno 28] No space left on device\n"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [(["--help"], ""), (["--help"], "1"), ([*EXPLAIN, "--tokens", ",".join(map(str, range(1, 99))), "--json"], "")],
)
def test_a_reader_that_goes_is_no_traceback(argv, unbuffered):
    done = jmx(*argv, shell="{} | head -c 1", PYTHONUNBUFFERED=unbuffered)
    assert (len(done.stdout), done.stderr) == (1, "")
    assert done.returncode in (0, 1)  # 0: all was written before the reader went


@pytest.mark.costly
def test_files_do_not_take_the_numbers_of_streams_that_are_closed(tmp_path):
    file = tmp_path / "r.json"
    roofline.Report({"device": "d"}, roofline.Limits(1.0, 1.0), {"model": "m", "routing": "r"}, (ROW,)).save(str(file))
    done = jmx("bench", "--from", str(file), "--json", str(tmp_path / "again"), shell="{} >&- 2>&- <&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()  # and no line of a stream in it


@pytest.mark.costly
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_errors_keep_their_code_and_stay_off_stdout_whatever_is_closed(closed):
    done = jmx("explain", "--hidden", "x", shell=f"{{}} {closed}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == (0 if "2>" in closed else 1)


@pytest.mark.costly
@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}])
def test_names_that_are_no_text_and_locales_without_utf_8(environment, tmp_path):
    name = os.fsdecode(bytes(tmp_path) + b"/gr\xfc\xdfe")
    command = [sys.executable, "-m", "jmx.cli", "bench", "--png", f"{name}/out.png"]
    variables = importing(ROOT) | environment
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert b"its directory does not exist" in done.stderr


@pytest.mark.costly
def test_tables_are_drawn_in_ascii_where_the_encoding_has_no_more():
    done = jmx(*EXPLAIN, PYTHONIOENCODING="ascii", LC_ALL="C", TERM="dumb")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert re.search(r"^\| mosaic +\| chosen \|", done.stdout, re.MULTILINE)


def test_no_color_and_terminals(capsys, monkeypatch):
    for name, value, colored in (("FORCE_COLOR", "1", True), ("NO_COLOR", "1", False)):
        monkeypatch.setenv(name, value)
        assert cli.main(EXPLAIN) == 0
        assert ("\x1b[3" in capsys.readouterr().out) == colored


def test_bare_jmx_prints_help(capsys):
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "exit codes:" in out


@pytest.mark.parametrize(
    "contents",
    ["", "[" * 100_000, "9" * 5000, "[]", "{}", "null", b"\xff", "sizes", "row", "types", "bool", "names", "huge"],
)
def test_what_is_no_saved_report_is_named(contents, saved, tmp_path, capsys):
    values = json.loads(pathlib.Path(saved).read_text())
    row = values["rows"][0]
    edits = {
        "sizes": values | {"copy_TBs": "fast"},
        "row": values | {"rows": [5]},
        "types": values | {"rows": [row | {"us": "quick"}]},
        "bool": values | {"rows": [row | {"tokens": True}]},
        "names": values | {"settings": {"model": [], "routing": "uniform"}},
        "huge": values | {"copy_TBs": 10**400},
    }
    file = tmp_path / "other.json"
    raw = json.dumps(edits[contents]) if contents in edits else contents
    file.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    assert cli.main(["bench", "--from", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"jmx: error: {file} is not a saved report of the benchmark: ")


def test_what_another_program_left_is_not_replaced(tmp_path, capsys, monkeypatch):
    (tmp_path / "r.json.part").write_text("mine")
    assert cli.main(["bench", "--json", str(tmp_path / "r.json")]) == 2
    assert "r.json.part is not a saved report" in capsys.readouterr().err
    assert (tmp_path / "r.json.part").read_text() == "mine"
