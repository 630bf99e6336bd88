"""`jmx.training.Run`: a training that stops and continues, its checkpoints, its curve, and what stops it."""

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jmx.training import Run

STEPS, GIVEN = 13, {"rate": 0.1}


class Training:
    """Weights that follow random targets; `stops` and `bad` are numbers of steps."""

    def __init__(self, folder: Path, *, steps: int = STEPS, stops: int = 0, bad: int = 0, spoiled: int = 0):
        self.model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        self.run = Run(folder, GIVEN, steps=steps, save_every=4, report_every=2)
        self.stops, self.bad, self.spoiled, self.taken = stops, bad, spoiled, []

    def step(self, number: int) -> jax.Array:
        if number == self.stops:
            raise KeyboardInterrupt
        self.taken.append(number)
        x = jnp.asarray(np.random.default_rng(number).standard_normal((4, 3)), jnp.float32)
        loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x) - 1).mean())(self.model)
        self.optimizer.update(self.model, gradients)
        if number == self.spoiled:
            self.model.kernel.set_value(self.model.kernel[...].at[0, 0].set(jnp.nan))
        return jnp.float32(jnp.nan) if number == self.bad else loss

    def train(self) -> list[tuple[int, float]]:
        return self.run.train((self.model, self.optimizer), self.step, tokens_per_step=4)

    def arrays(self) -> list[Any]:
        return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(nnx.state((self.model, self.optimizer)))]


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "steps").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, list[tuple[int, float]]]:
    training = Training(tmp_path_factory.mktemp("whole") / "run")
    return training, training.train()


def test_the_curve_has_means_and_the_last_two_checkpoints_stay(
    tmp_path: Path, whole: tuple[Training, list[tuple[int, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path / "run")
    curve = training.train()
    assert curve == whole[1]
    assert [number for number, _ in curve] == [2, 4, 6, 8, 10, 12, 13]
    assert training.taken == [*range(1, STEPS + 1)]
    assert saved(tmp_path / "run") == {"12", "13"}
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == GIVEN
    assert f"step 13: loss {curve[-1][1]:.3f}, " in capsys.readouterr().out


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = Training(tmp_path / "run"), Training(tmp_path / "run")
    taken, messages = first.step, []

    def step(number: int) -> jax.Array:
        if number == 7:
            with pytest.raises(ValueError, match=r"`folder` \(=.*run\) must be of one training at a time"):
                second.train()
            messages.append(number)
        return taken(number)

    curve = first.run.train((first.model, first.optimizer), step, tokens_per_step=4)
    assert messages == [7]
    assert second.taken == []
    assert second.train() == curve  # of the last checkpoint


@pytest.mark.parametrize("stops", [1, 3, 5, 8, 9, 13])
def test_a_training_that_was_stopped_continues_with_the_same_bits(
    tmp_path: Path, whole: tuple[Training, list[tuple[int, float]]], stops: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path, stops=stops).train()
    training = Training(tmp_path)
    assert training.train() == whole[1]
    assert training.taken[0] == (stops - 1) // 4 * 4 + 1
    assert training.arrays() == whole[0].arrays()
    again = Training(tmp_path)
    assert again.train() == whole[1]
    assert again.taken == []
    assert again.arrays() == whole[0].arrays()


@pytest.mark.parametrize("most", [0, 100, 1000])
def test_a_save_to_a_full_disk_loses_nothing(
    tmp_path: Path, whole: tuple[Training, list[tuple[int, float]]], most: int
) -> None:
    """No file may grow beyond `most` bytes from step 8 on, so that its writes fail like those to a full disk."""
    training, limits = Training(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    take = training.step

    def step(number: int) -> jax.Array:
        if number == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        return take(number)

    training.step = step
    try:
        with pytest.raises((OSError, ValueError)):
            training.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = Training(tmp_path)
    assert again.train() == whole[1]
    assert again.taken[0] == 5  # after the one that was saved before
    assert again.arrays() == whole[0].arrays()


CHILD = """
import sys
from pathlib import Path
from test_training_run import Training
Training(Path(sys.argv[1])).train()
print("complete", flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_at_most_the_steps_since_the_last_save(
    tmp_path: Path, whole: tuple[Training, list[tuple[int, float]]], rng: np.random.Generator
) -> None:
    """Saves take most of the time of such small steps. A run of its own is killed until one is complete."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    killed, complete = 0, False
    while not complete:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            if killed < 4:
                child.stdout.readline()
                time.sleep(float(rng.uniform(0, 0.3)))
                child.kill()
                killed += 1
            complete = "complete" in child.stdout.read()
    training = Training(tmp_path / "run")
    assert training.train() == whole[1]
    assert training.taken == []
    assert training.arrays() == whole[0].arrays()


class Terminal(io.StringIO):
    """What a bar is drawn on."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_with_the_loss_and_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    curve = Training(tmp_path).train()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    last = re.split(r"[\r\n]+", shown.strip())[-1]
    assert re.search(rf"loss {curve[-1][1]:.3f}, \d+ tokens/s .* 13/13 ", last), last
    assert "step 13" not in shown


@pytest.mark.parametrize(("bad", "kept"), [(1, 0), (4, 0), (7, 4), (13, 12)])
def test_a_loss_of_nan_names_its_step(tmp_path: Path, bad: int, kept: int) -> None:
    with pytest.raises(FloatingPointError, match=rf"^the loss of step {bad} is nan; step {kept} was saved last$"):
        Training(tmp_path, bad=bad).train()
    assert Training(tmp_path).train()[-1][0] == STEPS


def test_weights_of_nan_replace_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"^step 8: .*kernel.*; the last good checkpoint is step 4$"):
        Training(tmp_path, spoiled=8).train()
    assert saved(tmp_path) == {"4"}


def test_another_training_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Training(folder, stops=1).train()
    for given in ({"rate": 0.2}, {}):
        with pytest.raises(ValueError, match=r"`rate` \(=(0.2|None)\) must be 0.1, as when the training in "):
            Run(folder, given, steps=STEPS)


def other_dtype(training: Training) -> None:
    training.model.kernel.set_value(training.model.kernel[...].astype(jnp.bfloat16))


def other_shape(training: Training) -> None:
    training.model.bias = nnx.Param(jnp.zeros(5))


def other_optimizer(training: Training) -> None:
    training.optimizer = nnx.Optimizer(training.model, optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_dtype, r"kernel.* \(=bfloat16 \(3, 2\)\) must be float32 \(3, 2\)"),
        (other_shape, r"bias.* \(=float32 \(5,\)\) must be float32 \(2,\)"),
        (other_optimizer, r"opt_state.* \(=missing\) must be int32 \(\)"),
    ],
)
def test_a_state_of_other_arrays_is_refused(tmp_path: Path, change: Callable[[Training], None], message: str) -> None:
    Training(tmp_path, steps=4).train()
    training = Training(tmp_path)
    change(training)
    before = training.arrays()
    with pytest.raises(ValueError, match=f"^`state.*{message}, as in the checkpoint of step 4$"):
        training.train()
    assert training.arrays() == before
    assert training.taken == []


@pytest.mark.parametrize("broken", ["curve", "state", "everything"])
def test_a_broken_checkpoint_is_named_and_the_one_before_it_is_as_good(
    tmp_path: Path, whole: tuple[Training, list[tuple[int, float]]], broken: str
) -> None:
    Training(tmp_path).train()
    last = tmp_path / "steps" / "13"
    for file in [each for each in last.rglob("*") if each.is_file()]:
        if broken in (*file.relative_to(last).parts, "everything"):
            file.write_bytes(file.read_bytes()[:7])
    with pytest.raises(ValueError, match=rf"^the checkpoint {last} is broken: .*; without that directory a training"):
        Training(tmp_path).train()
    shutil.rmtree(last)
    again = Training(tmp_path)
    assert again.train() == whole[1]
    assert again.taken == [13]
    assert again.arrays() == whole[0].arrays()


def test_fewer_steps_than_were_trained_are_refused(tmp_path: Path) -> None:
    Training(tmp_path).train()
    with pytest.raises(ValueError, match=r"`steps` \(=8\) must be at least 13, the step that was saved last"):
        Training(tmp_path, steps=8).train()


@pytest.mark.parametrize(("text", "message"), [("{", "must be JSON"), ("[1]", r"must be an object .* is \[1\]")])
def test_a_broken_file_of_arguments_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / 'run.json'} {message}"):
        Training(tmp_path)


def test_checkpoints_without_the_arguments_of_their_training_are_refused(tmp_path: Path) -> None:
    Training(tmp_path, steps=4).train()
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"`folder` \(=.*\) has steps, but not run.json"):
        Training(tmp_path)


@pytest.mark.parametrize(
    ("began", "goes_on", "message"),
    [
        ({"rate": 1}, {"rate": 2}, r"`rate` \(=2\) must be 1, as when"),
        ({"rate": 1}, {}, r"`rate` \(=None\) must be 1, as when"),
        ({"rate": 1}, {"rate": 1, "decay": 0.5}, r"`decay` \(=0.5\) must be None, as when"),
        ({}, {"rate": 1}, r"`rate` \(=1\) must be None, as when"),
    ],
)
def test_a_training_goes_on_with_its_own_arguments_only(tmp_path: Path, began: Any, goes_on: Any, message: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(began))
    Run(tmp_path, began, steps=1)
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, goes_on, steps=1)


@pytest.mark.parametrize(("loss", "found"), [(jnp.ones(2), r"shape \(2,\)"), (None, "NoneType")])
def test_a_loss_is_one_number(tmp_path: Path, loss: Any, found: str) -> None:
    training = Training(tmp_path)
    training.step = lambda number: loss
    with pytest.raises(TypeError, match=rf"`step` \(returning {found}\) must return the loss, one number"):
        training.train()


def test_nothing_is_written_before_the_training(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", GIVEN, steps=1)
    with pytest.raises(TypeError, match=r"`state` \(=\(\)\) must be a tuple of NNX modules and optimizers"):
        run.train((), jnp.float32, tokens_per_step=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"save_every": 30}, ValueError, r"`save_every` \(=30\) must be a multiple of `report_every` \(=20\)"),
        ({"arguments": {"rate": np.float32(1)}}, TypeError, r"`arguments` \(=.*\) must be JSON values by name"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Run(**{"folder": tmp_path, "arguments": GIVEN, "steps": 1} | options)
