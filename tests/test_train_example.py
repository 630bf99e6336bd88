"""examples/train.py, on a short text: it goes on after a kill, and what it exports is what it trained."""

import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import serving_process
from child_environment import importing

from jmx.models import load

ROOT = Path(__file__).parents[1]
SHORT = ["--steps", "40", "--save-every", "20", "--batch", "2", "--length", "32"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "verses.txt"
    file.write_bytes(lzma.decompress((ROOT / "tests" / "data" / "kjv_last_twentieth.txt.xz").read_bytes()))
    return file


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", ROOT / "examples" / "train.py", *map(str, arguments)]
    environment = importing(ROOT, JAX_PLATFORMS="cpu", MPLBACKEND="agg")
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a training that nothing stopped, and what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, out, err = finish(start(text, folder, *SHORT))
    assert code == 0, err
    return folder, out


def losses(printed: str) -> dict[str, str]:
    return dict(re.findall(r"step (\d+): loss ([\d.]+)", printed))


def test_the_loss_falls_and_the_checkpoint_is_loaded(whole: tuple[Path, str]) -> None:
    folder, printed = whole
    found = losses(printed)
    assert found.keys() == {"20", "40"}
    assert float(found["40"]) < float(found["20"])
    exported, masters = map(float, re.findall(r"([\d.]+) of the (?:checkpoint|master weights)", printed))
    assert exported <= 1.01 * masters
    last, every = map(float, re.findall(r"([\d.]+) of `xz -9`", printed))
    assert 8 > last > every > 0.5
    assert (folder / "loss.png").stat().st_size > 1000
    assert load(folder / "checkpoint").config.num_experts == 16
    generated = subprocess.run(
        [sys.executable, "-m", "jmx.cli", "generate", folder / "checkpoint", "And", "--max-new-tokens", "4"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert generated.stdout


def test_the_commands_of_the_page_run(text: Path, whole: tuple[Path, str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "train_quantize_ship.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^    (?:python|jmx) .*$", page, re.MULTILINE)]
    assert [command[:2] for command in commands] == [
        ["python", "examples/train.py"],
        ["jmx", "generate"],
        ["jmx", "serve"],
        ["python", "examples/fine_tune.py"],
        ["jmx", "generate"],
    ]
    train, generate, serve, fine_tune, adapted = commands
    assert train[2:] == ["bible.txt", "run"]  # `whole` ran it
    places = {"run/checkpoint": str(whole[0] / "checkpoint"), "LICENSE": str(text), "adapters": str(tmp_path / "new")}
    environment = importing(ROOT, JAX_PLATFORMS="cpu")
    for command in generate, fine_tune, adapted:
        start_of = [sys.executable] if command[0] == "python" else [sys.executable, "-m", "jmx.cli"]
        rest = [places.get(word, word) for word in command[1:]]
        done = subprocess.run([*start_of, *rest], env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    with serving_process.running([places[word] for word in serve[2:]], tmp_path / "log.txt") as server:
        server.wait_until("ready", serving_process.SECONDS_TO_START)
        (model,) = json.loads(server.get("/v1/models")[1])["data"]
        body = {"model": model["id"], "prompt": "And", "max_tokens": 4}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["text"]


def test_a_run_that_was_killed_goes_on_with_the_same_losses(
    text: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(text, folder, *SHORT)
    while not (folder / "steps" / "20").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert not (folder / "checkpoint").exists()
    code, out, err = finish(start(text, folder, *SHORT))
    assert code == 0, err
    assert losses(out).items() <= losses(whole[1]).items()
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert all((folder / "checkpoint" / n).read_bytes() == (whole[0] / "checkpoint" / n).read_bytes() for n in names)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (["--rate", "1"], "`rate` (=1.0) must be 0.003, as when the training in "),
        (["--save-every", "30"], "`save_every` (=30) must be a multiple of `report_every` (=20)"),
    ],
)
def test_other_arguments_are_refused(text: Path, tmp_path: Path, change: list[str], error: str) -> None:
    (tmp_path / "run.json").write_text('{"rate": "0.003"}')
    code, _, err = finish(start(text, tmp_path, *SHORT, *change))
    assert code != 0
    assert error in err


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (["--steps", "0"], "`steps` (=0) must be at least 1"),
        (["--batch", "-1"], "`batch` (=-1) must be at least 1"),
        (["--length", "0"], "`length` (=0) must be at least 1"),
        (["--rate", "nan"], "`rate` (=nan) must be finite and above 0"),
        (["--length", "9999999"], "`length` (=9999999) must be less than the "),
    ],
)
def test_arguments_that_fit_no_training_are_refused(text: Path, tmp_path: Path, change: list[str], error: str) -> None:
    code, _, err = finish(start(text, tmp_path / "run", *SHORT, *change))
    assert code != 0
    assert error in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_text_of_too_few_words_is_refused(tmp_path: Path) -> None:
    code, _, err = finish(start(ROOT / "LICENSE", tmp_path / "run", *SHORT))
    assert code != 0
    assert re.search(r"must be a longer text: it gives a vocabulary of \d+ tokens, and `vocab_size` is 2048", err)


def test_nothing_is_overwritten(text: Path, whole: tuple[Path, str]) -> None:
    code, _, err = finish(start(text, whole[0], *SHORT))
    assert code != 0
    assert f"{whole[0] / 'checkpoint'} exists" in err


def test_a_loss_of_nan_stops_the_training(text: Path, tmp_path: Path) -> None:
    code, _, err = finish(start(text, tmp_path / "run", *SHORT, "--rate", "1e30"))
    assert code != 0
    assert re.search(r"the loss of step [2-5] is nan; step 0 was saved last", err)
