"""A training in a folder: it continues after a kill, stops at NaN, and shows the loss and the speed."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jmx.training.finite import check_finite
from jmx.util.atomic_files import write_json
from jmx.util.checks import check_callable, check_instance, check_int, check_path, is_array
from jmx.util.typing import Array, Float

try:
    import fcntl
except ImportError:  # no such locks on this platform
    fcntl = None


class Run:
    """A training of so many steps in a folder, in which a process that was killed continues.

    The folder has the latest two checkpoints (`steps`, by Orbax), each complete or not there, and the arguments that
    the training began with (`run.json`).

    Args:
        folder: made when the training begins.
        arguments: all that the result depends on besides `steps`, such as sizes, rates and a hash of the data: JSON
            values by name.
        steps: of the whole training.
        save_every: steps between checkpoints, a multiple of `report_every`. The last step is saved, too.
        report_every: steps between two losses of the curve.

    Raises:
        TypeError, ValueError: arguments that are not as above; or that are not those of the training in `folder`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        arguments: Mapping[str, Any],
        *,
        steps: int,
        save_every: int = 100,
        report_every: int = 20,
    ):
        self._folder = check_path("folder", folder).absolute()
        check_instance("arguments", arguments, Mapping, "a mapping of names to JSON values")
        try:
            self._arguments = json.loads(json.dumps({**arguments}))
        except (TypeError, ValueError) as error:
            raise TypeError(f"`arguments` (={dict(arguments)!r}) must be JSON values by name: {error}") from error
        self._steps = check_int("steps", steps, least=1)
        self._report_every = check_int("report_every", report_every, least=1)
        self._save_every = check_int("save_every", save_every, least=1)
        if save_every % report_every:
            raise ValueError(f"`save_every` (={save_every}) must be a multiple of `report_every` (={report_every})")
        began = self._began_with()
        began = self._arguments if began is None else began
        for name in {**began, **self._arguments}:
            if (its := self._arguments.get(name)) != (value := began.get(name)):
                raise ValueError(f"`{name}` (={its}) must be {value}, as when the training in {folder} began")

    @property
    def _file(self) -> Path:
        return self._folder / "run.json"

    def _began_with(self) -> dict[str, Any] | None:
        """The arguments of the training in the folder; None if it has not begun."""
        try:
            found = json.loads(self._file.read_text())
        except FileNotFoundError:
            if (steps := self._folder / "steps").exists():
                raise ValueError(f"`folder` (={self._folder}) has {steps.name}, but not {self._file.name}") from None
            return None
        except ValueError as error:
            raise ValueError(f"{self._file} must be JSON, as a training wrote it: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{self._file} must be an object of JSON, as a training wrote it, and is {found!r}")
        return found

    def train(
        self, state: tuple[Any, ...], step: Callable[[int], Float[Array, ""]], *, tokens_per_step: int
    ) -> list[tuple[int, float]]:
        """Trains from the latest checkpoint on, or from `state` as it is, to the last step.

        stdout has a progress bar if it is a terminal, else a line for each loss of the curve.

        Args:
            state: a tuple of the NNX modules and optimizers that `step` updates, which get the arrays of a checkpoint.
            step: takes the number of a step, from 1 on, updates `state`, and returns the loss before, one number. For
                runs that continue to give the same bits, all that a step uses has to follow from its number.
            tokens_per_step: from which the speed follows.

        Returns:
            The curve: a number of a step, and the mean loss of the steps since the entry before.

        Raises:
            FloatingPointError: a loss, or a value that a checkpoint would have, is NaN or infinite. The message names
                the step, and the step that was saved last.
            TypeError, ValueError: arguments that are not as above; a state of other arrays than those of the latest
                checkpoint, one that is broken, or one of a later step than the last; a folder in which another
                process, or another `Run`, trains now.
        """
        kinds = nnx.Module, nnx.Optimizer
        if not isinstance(state, tuple) or not state or not all(isinstance(each, kinds) for each in state):
            raise TypeError(f"`state` (={state!r}) must be a tuple of NNX modules and optimizers")
        check_callable("step", step)
        check_int("tokens_per_step", tokens_per_step, least=1)
        self._folder.mkdir(parents=True, exist_ok=True)
        with _alone(self._folder):
            return self._train(state, step, tokens_per_step)

    def _train(
        self, state: tuple[Any, ...], step: Callable[[int], Float[Array, ""]], tokens_per_step: int
    ) -> list[tuple[int, float]]:
        if not self._file.exists():
            write_json(self._file, self._arguments)
        with _Checkpoints(self._folder / "steps") as checkpoints:
            if (latest := checkpoints.latest) > self._steps:
                raise ValueError(f"`steps` (={self._steps}) must be at least {latest}, the step that was saved last")
            done, curve = checkpoints.restore(state)
            with _Display(self._steps, done) as display:
                while done < self._steps:
                    since = time.perf_counter()
                    last = min(done - done % self._report_every + self._report_every, self._steps)
                    numbers = range(done + 1, last + 1)
                    losses = np.asarray(jax.device_get([_scalar(step(number)) for number in numbers]))
                    kept = f"; step {checkpoints.latest} was saved last"
                    for number, loss in zip(numbers, losses, strict=True):
                        if not np.isfinite(loss):
                            raise FloatingPointError(f"the loss of step {number} is {loss}{kept}")
                    done, mean = last, float(losses.mean())
                    curve.append((done, mean))
                    if done % self._save_every == 0 or done == self._steps:
                        checkpoints.save(done, state, curve)
                    display.show(done, mean, len(numbers) * tokens_per_step / (time.perf_counter() - since))
        return curve


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder, which a killed process loses, too; ValueError while another one has it."""
    if fcntl is None:
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`folder` (={folder}) must be of one training at a time: another one runs in it"
            ) from None
        except OSError:  # a file system without locks, on which two trainings are not kept apart
            pass
        yield
    finally:
        os.close(place)


class _Checkpoints:
    """The latest two states of a training."""

    def __init__(self, folder: Path):
        # Not while the next step runs, which writes over the arrays.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def __enter__(self) -> "_Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int:
        """The number of the step that was saved last; 0: none."""
        return self._manager.latest_step() or 0

    def restore(self, state: Any) -> tuple[int, list[tuple[int, float]]]:
        """Fills the modules from the latest checkpoint. Its step and the curve before; without one, 0 and none."""
        if not (step := self.latest):
            return 0, []
        curve = self._read(step, "curve", ocp.args.JsonRestore())
        _check_arrays(step, curve["arrays"], _described(state))
        leaves, structure = jax.tree.flatten(nnx.state(state))
        nnx.update(state, jax.tree.unflatten(structure, self._read(step, "state", ocp.args.StandardRestore(leaves))))
        return step, [(number, loss) for number, loss in curve["losses"]]

    def _read(self, step: int, item: str, how: ocp.args.CheckpointArgs) -> Any:
        """An item of a checkpoint; ValueError if it is broken."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:  # as Orbax and its libraries have it
            where = self._manager.directory / str(step)
            raise ValueError(
                f"the checkpoint {where} is broken: {error}; without that directory a training continues from the one "
                "before"
            ) from error

    def save(self, step: int, state: Any, curve: list[tuple[int, float]]) -> None:
        """Saves the modules' arrays. FloatingPointError if one of them has NaN: its next loss would be."""
        check_finite(nnx.state(state), step=step, kept=f"step {self.latest}")
        leaves = jax.tree.leaves(nnx.state(state))
        losses = {"losses": [list(entry) for entry in curve], "arrays": _described(state)}
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(leaves), curve=ocp.args.JsonSave(losses))
        )


def _described(state: Any) -> dict[str, str]:
    """The dtype and shape of each array of a state, by its name."""
    named = jax.tree_util.tree_flatten_with_path(nnx.state(state))[0]
    return {jax.tree_util.keystr(path): f"{leaf.dtype} {tuple(leaf.shape)}" for path, leaf in named}


def _check_arrays(step: int, saved: dict[str, str], its: dict[str, str]) -> None:
    """Raises ValueError, naming the first array that differs. Orbax would convert dtypes, and pair arrays by number."""
    for name in [*saved, *its]:
        if saved.get(name) != its.get(name):
            there, here = saved.get(name, "missing"), its.get(name, "missing")
            raise ValueError(f"`state{name}` (={here}) must be {there}, as in the checkpoint of step {step}")


def _scalar(loss: Any) -> Any:
    if not (isinstance(loss, int | float) or (is_array(loss) and loss.shape == ())):
        found = f"shape {tuple(loss.shape)}" if is_array(loss) else type(loss).__name__
        raise TypeError(f"`step` (returning {found}) must return the loss, one number")
    return loss


class _Display:
    """A progress bar on a terminal; elsewhere lines."""

    def __init__(self, steps: int, done: int):
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        console = Console()
        self._lines = not console.is_terminal
        self._bar = Progress(*columns, console=console, disable=self._lines)
        self._task = self._bar.add_task("training", total=steps, completed=done)

    def __enter__(self) -> "_Display":
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def show(self, step: int, loss: float, speed: float) -> None:
        """`speed`: tokens a second."""
        self._bar.update(self._task, completed=step, description=f"loss {loss:.3f}, {speed:.0f} tokens/s")
        if self._lines:
            print(f"step {step}: loss {loss:.3f}, {speed:.0f} tokens/s", flush=True)
