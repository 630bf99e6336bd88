"""Finds the configurations that tuning.py looks up, by measuring them: the core of `jmx tune`.

Each candidate is compiled into the jitted stack of different layers that `jmx bench` times, including routing from
logits. All candidates of a token count are compiled in parallel, and then measured one at a time. A candidate that
fails to compile or run, differs from the reference, or does not give the same bits twice, is reported and skipped. The
fastest few are timed again, longer: the minimum of many short times is partly chance.
"""

import pathlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jmx.backends import registered_backends, resolve_layout
from jmx.numerics.formats import FORMATS
from jmx.perf import bench, machine
from jmx.perf.shapes import Shape
from jmx.selection import tuning
from jmx.selection.backend import Rejection
from jmx.selection.environment import Environment
from jmx.selection.select import NoBackendError
from jmx.selection.tuning import Entry, Key, Tunable
from jmx.util.tables import FoldingTable, decimal, numbers, words
from jmx.util.typing import Array, Bool, Float, Shaped

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 32768)  # no gap wider than the reach of an entry, `tuning.REACH`
_REPEATS, _FINAL_REPEATS = 3, 7
_FINALISTS = 3
_MOST_COMPILERS = 8  # each needs host memory, and the main thread traces for all of them


@dataclass(frozen=True)
class Outcome:
    """What was found for one shape and token count.

    Args:
        key: what was measured.
        entry: the table's entry now; None if no candidate runs and is correct.
        tried: candidates that were measured; 0 if the entry was there before.
        failed: a line for each candidate that was skipped.
    """

    key: Key
    entry: Entry | None
    tried: int = 0
    failed: tuple[str, ...] = ()


def choose_engine(name: str | None, shape: Shape, num_tokens: int, environment: Environment) -> Tunable[Any]:
    """The backend called `name`, else the first one that can be tuned and runs `shape` here.

    Those that read the layout that such weights have here come before others.

    Raises:
        ValueError: it has nothing to tune.
        NoBackendError: it does not run here, or no tunable backend does.
    """
    layout = resolve_layout("auto", environment, FORMATS[shape.format], shape.input_format)
    problem = shape.problem(num_tokens, layout)
    trail: list[tuple[str, Rejection | None]] = []
    others: list[Tunable[Any]] = []
    for backend in registered_backends():
        if name not in (None, backend.name) or not isinstance(backend, Tunable):
            continue
        try:
            usable = bench.usable_layout(problem, environment, backend.name)
            if name is not None or usable == layout:
                return backend
            others.append(backend)
        except NoBackendError as e:
            if name is not None:
                raise
            trail.append((backend.name, dict(e.trail)[backend.name]))
    if others:
        return others[0]
    tunable = [backend.name for backend in registered_backends() if isinstance(backend, Tunable)]
    if name is not None:
        raise ValueError(f"`backend` (={name!r}) has nothing to tune; these have: {', '.join(tunable)}")
    reasons = "; ".join(f"{name!r} does not run: {rejection}" for name, rejection in trail)
    raise NoBackendError(f"no backend can be tuned on {environment.device_kind}: {reasons}", tuple(trail))


def run(
    engine: Tunable[Any],
    shape: Shape,
    tokens: Sequence[int],
    file: pathlib.Path,
    *,
    strict: bool = False,
    again: bool = False,
    seconds: float | None = None,
    layers: int | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Measures `engine`'s candidates at every token count, and adds each count's best to the table in `file` at once.

    So an interrupted run keeps its results, and the next run continues from there.

    Args:
        engine: a registered backend.
        tokens: token counts.
        file: created if it does not exist.
        strict: whether another kind of file is an error, rather than renamed with a warning.
        again: whether to measure token counts that the file has already.
        seconds: start no further candidate of a token count after so many seconds. Those started by then are
            measured, at least the heuristic's own. None: start all of them.
        layers: as in `jmx.perf.bench.run`.
        console: takes the progress bar and the lines about candidates that failed; default: stderr.

    Raises:
        ValueError: `file` is another file than a table for `engine` and this device, and `strict`.
        RuntimeError: the device stopped responding. The text names the candidate.
    """
    environment = Environment.probe()
    known = (tuning.load if strict else tuning.read)(file, engine, environment.device_kind)
    file.parent.mkdir(parents=True, exist_ok=True)
    weights_key, data_key = jax.random.split(jax.random.key(secrets.randbits(32)))
    layer_keys = jax.random.split(weights_key, bench.layers_of_call(1, layers))  # no call has more
    built: dict[str, list[Any]] = {}
    outcomes = []
    console = console or Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for count in dict.fromkeys(tokens):
            key = Key(tuning.shape_class(shape.problem(count, "packed")), count)
            if key in known and not again:
                outcomes.append(Outcome(key, known[key]))
                continue
            try:
                rig = _rig_that_fits(
                    partial(_Rig, engine, shape, count, data_key, built),
                    layer_keys[: bench.layers_of_call(count, layers)],
                )
            except NoBackendError as e:
                rejected = f"{engine.name!r} does not run: {dict(e.trail)[engine.name]}"
                progress.console.print(f"{count} tokens: {rejected}", markup=False, soft_wrap=True)
                outcomes.append(Outcome(key, None, failed=(rejected,)))
                continue
            outcome = _tune(rig, key, seconds, progress)
            if outcome.entry is not None:
                tuning.save(file, engine, environment.device_kind, {key: outcome.entry})
            outcomes.append(outcome)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> FoldingTable:
    """The outcomes of `run`, a row each. Failures were reported during the run."""
    columns = [*numbers("tokens"), *words("chosen"), *numbers("us", "heuristic us", "ratio", "tried")]
    made = FoldingTable(columns, ", ".join(dict.fromkeys(outcome.key.shape for outcome in outcomes)))
    for outcome in outcomes:
        tokens, entry = str(outcome.key.tokens), outcome.entry
        if entry is None:
            made.add_row(tokens, "none", "-", "-", "-", str(outcome.tried), style="red")
            continue
        before = entry.heuristic_us
        ratio = ("-", "-") if before is None else (decimal(before), f"{entry.us / before:.3f}")
        made.add_row(tokens, repr(entry.config), decimal(entry.us), *ratio, str(outcome.tried or "before"))
    return made


def _tune(rig: "_Rig", key: Key, seconds: float | None, progress: Progress) -> Outcome:
    trials: list[_Trial] = []
    failed = []
    task = progress.add_task(f"{key.tokens} tokens, compiling", total=2 * len(rig.configs))
    begun, programs = _compile(rig, seconds, lambda: progress.advance(task))
    for config in begun:
        try:
            trials.append(rig.trial(config, programs.popleft().result()))
        except Exception as e:  # any failure of one candidate leaves the others to be measured
            failed.append(f"{config!r}: {type(e).__name__}: {' '.join(str(e).split())[:300]}")
            progress.console.print(f"{key.tokens} tokens: passed over {failed[-1]}", markup=False, soft_wrap=True)
            rig.check_alive(config)
        trials.sort(key=lambda trial: trial.us)
        # The other programs are released: each holds device memory.
        trials[_FINALISTS:] = [trial for trial in trials[_FINALISTS:] if trial.config == rig.heuristic]
        best = f", {decimal(trials[0].us)} us" if trials else ""
        progress.update(task, advance=1, description=f"{key.tokens} tokens{best}")
    if not trials:
        return Outcome(key, None, len(begun), tuple(failed))
    times = {trial.config: rig.time(trial.call, _FINAL_REPEATS) for trial in trials}
    chosen = min(times, key=lambda config: times[config])
    return Outcome(key, Entry(chosen, times[chosen], times.get(rig.heuristic)), len(begun), tuple(failed))


def _compile(
    rig: "_Rig", seconds: float | None, advance: Callable[[], None]
) -> tuple[list[Any], deque[Future[jax.stages.Compiled]]]:
    """The candidates that were started in time, the heuristic's own first, and the result of each; all are done.

    One is started when a compiler thread is free, so that an interrupted run has few to wait for.
    """
    start = time.monotonic()
    begun, programs = [], deque()
    num_compilers = min(len(rig.configs), machine.num_cpus(), _MOST_COMPILERS)
    free = threading.Semaphore(num_compilers)

    def done(_: Future[jax.stages.Compiled]) -> None:
        free.release()
        advance()

    with ThreadPoolExecutor(num_compilers) as compilers:
        for config in rig.configs:
            free.acquire()
            if begun and seconds is not None and time.monotonic() - start > seconds:
                break
            try:
                program = compilers.submit(rig.lower(config).compile)
            except Exception as e:  # reported when it would be measured
                program = Future()
                program.set_exception(e)
            program.add_done_callback(done)
            begun.append(config)
            programs.append(program)
    return begun, programs


class _Trial(NamedTuple):
    config: Any
    call: Callable[[], Any]
    us: float


class _Rig:
    """The call at one token count that configurations are measured on."""

    def __init__(
        self,
        engine: Tunable[Any],
        shape: Shape,
        num_tokens: int,
        data_key: Shaped[Array, ""],
        built: dict[str, list[Any]],
        layer_keys: Shaped[Array, " L"],
    ):
        """`built`: the layers' weights, from one token count to the next."""
        environment = Environment.probe()
        system = bench.System.of(engine.name, shape, num_tokens, environment)
        weights = system.build(shape, layer_keys, built)
        data_key = jax.random.fold_in(data_key, num_tokens)
        first = shape.experts(layer_keys[0])
        self._case = bench.Case.draw(shape, num_tokens, "uniform", len(layer_keys), data_key, first)
        del first
        self._arguments = self._case.x, self._case.logits, weights
        self._engine, self._layer = engine, system.layer
        problem = shape.problem(num_tokens, system.weights)
        self.heuristic = engine.heuristic(problem, environment)
        self.configs = [*dict.fromkeys([self.heuristic, *engine.candidates(problem, environment)])]
        self._expected: Float[Array, "T H"] | None = None

    def lower(self, config: Any) -> jax.stages.Lowered:
        """Traces the call. An override applies only to the thread that opens it, and so to this trace."""
        with tuning.override(self._engine.name, config):
            return jax.jit(partial(bench.run_layers, self._layer)).lower(*self._arguments)

    def trial(self, config: Any, compiled: jax.stages.Compiled) -> _Trial:
        """Checks and times. ValueError for a wrong result, or any exception of the candidate itself."""
        machine.check_memory(compiled)
        call = partial(compiled, *self._arguments)
        result = call()
        self._check(result[1])
        us = self.time(call, _REPEATS)
        if not all(_same_bits(*arrays) for arrays in zip(result, call(), strict=True)):
            raise ValueError("wrong result: not the same bits on every run")
        return _Trial(config, call, us)

    def time(self, call: Callable[[], Any], repeats: int) -> float:
        """Microseconds of one layer."""
        return 1e6 * machine.seconds(call, repeats)[0] / len(self._case.logits)

    def _check(self, y: Float[Array, "T H"]) -> None:
        """Compares the first correct result with the reference on some tokens, all others with it on every token."""
        if self._expected is None:
            error = bench.relative_error(y[self._case.checked], self._case.reference)
        else:
            error = float(_worst_token(y, self._expected))
        if not error <= bench.TOLERANCE:
            raise ValueError(f"wrong result: relative error {error:.1e} is above {bench.TOLERANCE:.0e}")
        if self._expected is None:
            self._expected = y

    def check_alive(self, config: Any) -> None:
        """Raises RuntimeError if the device no longer responds: an illegal access ends all work of its process."""
        try:
            jax.block_until_ready(self._case.x + 1)
        except Exception as e:
            raise RuntimeError(f"the device no longer responds since {config!r}: {e}") from e


def _rig_that_fits(rig: Callable[[Shaped[Array, " L"]], _Rig], layer_keys: Shaped[Array, " L"]) -> _Rig:
    """`rig(layer_keys)`, or of half the layers, and half of those, if the device's memory holds fewer."""
    while True:
        try:
            return rig(layer_keys)
        except Exception as e:
            if len(layer_keys) == 1 or not machine.out_of_memory(e):
                raise
            layer_keys = layer_keys[: len(layer_keys) // 2]


@jax.jit
def _worst_token(y: Float[Array, "T H"], expected: Float[Array, "T H"]) -> Float[Array, ""]:
    """The largest ||y - expected|| / ||expected|| of a token; a norm over all tokens would hide a single wrong one."""
    y, expected = y.astype(jnp.float32), expected.astype(jnp.float32)
    return (jnp.linalg.norm(y - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)).max()


@jax.jit
def _same_bits(one: Shaped[Array, "*shape"], other: Shaped[Array, "*shape"]) -> Bool[Array, ""]:
    one, other = (jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (one, other))
    return (one == other).all()
