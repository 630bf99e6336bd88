"""`jmx --print-completion`: the scripts, and what bash completes with its own."""

import shutil
import subprocess
import sys

import pytest

from jmx import cli
from jmx.numerics import formats
from jmx.perf import shapes
from jmx.selection.environment import known_devices

shtab = pytest.importorskip("shtab")


def script(shell, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["--print-completion", shell])
    out, err = capsys.readouterr()
    assert (raised.value.code, err) == (0, "")
    return out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_script_names_every_command_and_what_options_take(shell, capsys):
    out = script(shell, capsys)
    for word in ("explain", "doctor", "convert", "bench", "tune", "build", "--checkpoint", "--quantize", "nvfp4"):
        assert word in out
    assert {"bash": "-F _shtab_jmx jmx", "zsh": "#compdef jmx", "tcsh": "complete jmx"}[shell] in out


def completed(line, here, capsys):
    """What bash offers for the last word of `line`."""
    words = line.split(" ")
    ask = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _shtab_jmx; "
    code = f'{script("bash", capsys)}\n{ask}printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return {*done.stdout.split()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_names_and_files(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.json").write_text("{}")
    assert completed("jmx ex", tmp_path, capsys) == {"explain"}
    assert completed("jmx ", tmp_path, capsys) >= {"explain", "doctor", "convert", "bench", "tune", "build"}
    assert completed("jmx explain --dev", tmp_path, capsys) == {"--device"}
    assert completed("jmx explain --device ", tmp_path, capsys) == {*known_devices()}
    assert completed("jmx explain --format nv", tmp_path, capsys) == {"nvfp4"}
    assert completed("jmx generate --random gpt", tmp_path, capsys) == {"gpt-oss-20b", "gpt-oss-120b"}
    assert completed("jmx bench --model ", tmp_path, capsys) == {*shapes.MODELS}
    assert completed("jmx convert --quantize int4", tmp_path, capsys) <= {*formats.FORMATS}
    assert completed("jmx explain --checkpoint f", tmp_path, capsys) == {"folder"}
    assert completed("jmx convert f", tmp_path, capsys) == {"folder"}
    assert completed("jmx bench --png f", tmp_path, capsys) == {"folder", "file.json"}


def test_without_shtab_one_line_says_what_brings_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as raised:
        cli.main(["--print-completion", "bash"])
    expected = "jmx: error: `--print-completion` needs shtab: pip install 'jmx-moe[completion]'\n"
    assert (raised.value.code, *capsys.readouterr()) == (1, "", expected)


def test_an_unknown_shell_is_refused_with_the_list(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["--print-completion", "sh"])
    assert raised.value.code == 2
    err = capsys.readouterr().err
    assert all(shell in err for shell in ("bash", "zsh", "tcsh"))
