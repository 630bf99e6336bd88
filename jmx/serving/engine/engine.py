"""The engine: requests in, tokens out, one step of a model at a time. The host is a step ahead of the device."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jmx.models.decoder import Model
from jmx.models.forward import Weights
from jmx.models.program_store import ProgramStore
from jmx.models.sampling import Sampler
from jmx.models.token_rows import check_tokens
from jmx.serving import scheduling
from jmx.serving.engine.exported_step import ExportedStep, export_step
from jmx.serving.engine.guide import Guide, Guides
from jmx.serving.engine.limits import Limits
from jmx.serving.engine.programs import Programs
from jmx.serving.engine.request import FinishReason, Generate, Output, TokenLogProbabilities
from jmx.serving.engine.sampling import History, Level
from jmx.serving.engine.sizes import Sizes
from jmx.serving.engine.slots import Slots
from jmx.serving.engine.step import Device, Results
from jmx.util.checks import check_instance, check_int

# The load of experts is counted in one of so many steps.
LOAD_PERIOD = 32
# Requests of a warm-up: in its first calls a program makes CUDA graphs, and changes them as its memory moves.
_REHEARSALS = 4


@dataclass
class _Active:
    """A request that has not ended, and its tokens so far."""

    request: Generate
    tokens: list[int]
    cached: int | None = None  # not reported yet
    fresh: bool = True  # its slot has neither its sampler nor its history yet
    guide: Guide | None = None
    is_stuck: bool = False  # its guide and what is banned leave no token

    @functools.cached_property
    def level(self) -> Level:
        """What choosing its tokens needs."""
        forbids = bool(self.request.banned) or self.request.grammar is not None
        return Level.of(self.request.sampler, forbids=forbids, logprobs=self.request.logprobs)

    @property
    def drawn(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class _Launched(NamedTuple):
    """A step whose results have not been read: them, the load of experts or None, and the request of each row that
    draws."""

    results: Results
    load: jax.Array | None
    rows: list[tuple[int, int]]


@dataclass
class Statistics:
    """What an engine has done so far.

    Args:
        steps: computed, each of several in one call.
        prompt_tokens: computed, without those in the cache.
        cached_tokens: of prompts, in the cache.
        new_tokens: drawn, of requests that had not ended.
        preempted: requests, each time.
        load: int (layers with experts, E), tokens of each expert in one of `LOAD_PERIOD` steps.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    preempted: int = 0
    load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))


class Engine:
    """A model that serves many requests at once. Not safe to use from several threads.

    Args:
        model: on one device, or over a mesh. Where the mesh divides rows of a batch, groups of devices have requests
            and pages of their own.
        limits: of requests and of the cache, of all groups together.
        store: keeps compiled programs; None: nothing does.
        guides: for requests with a grammar; None: there are none of these.
        programs: of `begin_programs`, with the same limits; those of another model are not used.

    Raises:
        ValueError: a cache too small for a request of each group of devices, or users that they do not divide evenly.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        *,
        store: ProgramStore | None = None,
        guides: Guides | None = None,
        programs: Programs | None = None,
    ):
        check_instance("model", model, Model)
        self.limits: Limits = check_instance("limits", limits, Limits)
        self._sizes = sizes = Sizes(model, limits)
        weights = Weights.of(model)
        self._of_model, self._split = weights, model.split
        self._weights, self._vocab_size = weights.arrays, model.config.vocab_size
        self._settings, self._state = sizes.settings, scheduling.State.of(sizes.settings)
        pages = [jnp.zeros(its.shape, its.dtype, device=its.sharding) for its in sizes.pages]
        self._device = Device(pages, *model.whole(sizes.slots()))
        if programs is None or not programs.take(weights):
            programs = Programs(weights, sizes.pools, model.split, limits.decode_steps, store)
        self._programs = programs
        self._slots = Slots(limits.max_users, sizes.widths)
        self._forbidding: set[int] = set()  # slots in whose history not all tokens are allowed
        self._begin_slot = jax.jit(_begin_slot, donate_argnums=0)
        self._allow = jax.jit(_allow, donate_argnums=0)
        self._guides = guides
        self._events: list[scheduling.Event] = []
        self._active: dict[int, _Active] = {}
        self._launched: _Launched | None = None
        self.statistics = Statistics()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the programs of all steps, side by side, runs each once, and serves a few requests of its own.

        It comes before all requests.

        Args:
            progress: is called with the programs that are ready, and all of them.

        Raises:
            RuntimeError: there was a request.
        """
        if not self.is_idle or self._state.arrived:
            raise RuntimeError("`warm_up` must come before all requests")
        inputs, decoded = self._sizes.inputs()
        self._programs.begin(inputs, decoded, self._device)
        for number, its in enumerate((*decoded, *reversed(inputs)), 1):
            if number <= len(decoded):
                self._device, *results = self._programs.run_several(self._device, its, counts_load=True)
                jax.block_until_ready(results)
            else:
                for level in Level:
                    self._device, *results = self._programs.run(self._device, its, level, counts_load=True)
                    jax.block_until_ready(results)
            if progress is not None:
                progress(number, len(decoded) + len(inputs))
        self._set_history(self.limits.max_users, (), (), ())
        self._rehearse()

    def _rehearse(self) -> None:
        """Serves requests as those of a lone user, one after the other, and forgets them."""
        for number in range(_REHEARSALS):
            new = min(2 * self.limits.decode_steps + 2, self.limits.max_length - 1)
            prompt = (0,) * min(self.limits.prompt_tokens, self.limits.max_length - new)
            sampler = Sampler(temperature=float(number % 2), seed=number)
            self.submit(Generate(number, prompt, new, sampler, frozenset(), salt=str(number).encode()))
            while not self.is_idle:
                self.step()
        self._state, self.statistics = scheduling.State.of(self._settings), Statistics()

    def export(self, rows: int, checks: Sequence[jax.export.DisabledSafetyCheck] = ()) -> ExportedStep:
        """A step of so many rows and no blocks, for processes without jmx's models; see `export_step`.

        Args:
            rows: of each group of devices.
            checks: see `export_step`.
        """
        sizes = self._sizes
        inputs = sizes.padding(check_int("rows", rows, least=1, most=sizes.of_group.max_users), 0)
        return export_step(self._of_model, sizes.pools.of_layer, self._split, self._device, inputs, checks)

    def submit(self, request: Generate) -> None:
        """Adds a request, which waits for its turn.

        Raises:
            ValueError: an id that is in use, ids of tokens outside the vocabulary, or more tokens than a request may
                have. Nothing is changed.
        """
        check_instance("request", request, Generate)
        check_tokens("prompt", [request.prompt], self._vocab_size)
        if request.banned:
            check_tokens("banned", [request.banned], self._vocab_size)
        if len({*request.banned}) == self._vocab_size:
            raise ValueError(f"`banned` (of {self._vocab_size} tokens) must leave one")
        if request.id in self._active:
            raise ValueError(f"`id` (={request.id}) must be that of no other request")
        active, waits = _Active(request, [*request.prompt]), request.grammar is not None
        alone = active.level == Level.ALL
        event = scheduling.Submit(request.id, request.prompt, request.max_new_tokens, request.salt, waits, alone)
        event.check(self.limits.max_length)
        if request.grammar is not None:
            if self._guides is None:
                raise ValueError("`grammar` must be None: this engine has no guides")
            active.guide = self._guides.start(request.grammar, in_thoughts=request.in_thoughts)
        self._active[request.id] = active
        self._events.append(event)

    def cancel(self, id: int) -> None:
        """Ends a request without further outputs; its pages are free at the next step. Unknown ids are ignored."""
        if self._active.pop(id, None) is not None:
            self._events.append(scheduling.End(id))

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._active or self._events or self._launched or self._state.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._active) - self.num_running

    @property
    def num_running(self) -> int:
        """Requests that are in the cache."""
        return len(self._state.running)

    @property
    def pages(self) -> list[tuple[int, int]]:
        """Of each pool, the pages that requests use, and all, of all groups of devices."""
        kinds = zip(*self._state.pools, strict=True)
        return [(sum(its.size - its.num_free for its in kind), sum(its.size for its in kind)) for kind in kinds]

    def step(self) -> list[Output]:
        """Launches the next step, or several in one call, then reads the tokens of the one before."""
        events, self._events = self._events, []
        self._state, plan = scheduling.plan(self._state, events)
        self.statistics.preempted += len(plan.preempted)
        for id, cached in plan.admitted:
            self._active[id].fresh = True
            if self._active[id].cached is None:
                self._active[id].cached = cached
                self.statistics.cached_tokens += cached
        before, self._launched = self._launched, None if plan.is_empty else self._launch(plan)
        return [] if before is None else self._read(before)

    def _launch(self, plan: scheduling.Plan) -> _Launched:
        sizes = self._sizes.single if plan.steps == 1 else self._sizes.several
        (most_rows, rows), (most_blocks, blocks) = self._numbered(plan.rows), self._numbered(plan.blocks)
        size = next(size for size in sizes if size[0] >= most_rows and size[1] >= most_blocks)
        inputs, level, items = self._sizes.padding(*size), Level.GREEDY, (*plan.rows, *plan.blocks)
        places = [group * sum(size) + at for group, at in rows]
        places += [group * sum(size) + size[0] + at for group, at in blocks]
        drawing = [(place, item.id) for place, item in zip(places, items, strict=True) if item.draws]
        for item in items:
            active = self._active[item.id]
            if item.draws:
                level = max(level, active.level)
                if active.fresh or active.guide is not None:
                    self._prepare(item.slot, active)
        self._slots.fill(inputs, places, items)
        for at, row in zip(rows, plan.rows, strict=True):
            tokens = self._active[row.id].tokens
            inputs.row_tokens[at] = tokens[row.start] if row.start < len(tokens) else -1  # only the device knows it
        for at, block in zip(blocks, plan.blocks, strict=True):
            tokens = self._active[block.id].tokens
            inputs.block_tokens[at][: block.count] = tokens[block.start : block.start + block.count]
            self.statistics.prompt_tokens += block.count
        counts_load = self.statistics.steps % LOAD_PERIOD < plan.steps
        self.statistics.steps += plan.steps
        if plan.steps > 1:
            done = self._programs.run_several(self._device, inputs, counts_load=counts_load)
        else:
            done = self._programs.run(self._device, inputs, level, counts_load=counts_load)
        self._device, results, load = done
        jax.tree.map(lambda array: array.copy_to_host_async(), (results, load))
        return _Launched(results, load, drawing)

    def _numbered(self, items: Sequence[scheduling.Tokens]) -> tuple[int, list[tuple[int, int]]]:
        """The most items of a group of devices; and of each one its group, and its number among those of the group."""
        counts, found = [0] * self._sizes.groups, []
        for item in items:
            group = self._settings.group_of(item.slot)
            found.append((group, counts[group]))
            counts[group] += 1
        return max(counts), found

    def _prepare(self, slot: int, active: _Active) -> None:
        """Sets what the choice of a request's next token depends on, where that is not what it was."""
        request = active.request
        if active.fresh:
            self._slots.begin(slot, request.sampler, len(request.prompt))
            needs_history = request.sampler.has_penalties or request.banned or active.guide is not None
            if needs_history or slot in self._forbidding:  # by the slot's last request: this one is free of it
                self._set_history(slot, request.prompt, active.tokens[len(request.prompt) :], request.banned)
            active.fresh = False
        if active.guide is not None:
            active.is_stuck = not self._follow(slot, active.guide, request.banned)

    def _set_history(self, slot: int, prompt: Sequence[int], new: Sequence[int], banned: Sequence[int]) -> None:
        """Begins a slot's history: tokens of its prompt, and new ones, if it was preempted."""
        in_prompt = np.zeros(self._vocab_size, bool)
        in_prompt[np.asarray(prompt, np.int64)] = True
        counts = np.bincount(np.asarray(new, np.int64), minlength=self._vocab_size).astype(np.int32)
        history = self._begin_slot(self._device.history, np.int32(slot), in_prompt, counts, self._words(banned))
        self._device = self._device._replace(history=history)
        (self._forbidding.add if banned else self._forbidding.discard)(slot)

    def _follow(self, slot: int, guide: Guide, banned: Sequence[int]) -> bool:
        """Forbids what a guide does not allow next, besides what is banned. Returns whether it allows something."""
        allowed, found = self._words(banned), guide.allowed()
        allowed[: len(found)] &= found
        allowed[len(found) :] = 0
        self._device = self._device._replace(history=self._allow(self._device.history, np.int32(slot), allowed))
        self._forbidding.add(slot)
        return not guide.has_failed and bool(allowed.any())

    def _words(self, banned: Sequence[int]) -> np.ndarray:
        """A bit for each token that is not banned, uint32."""
        bits = np.ones(32 * self._device.history.allowed.shape[1], np.uint8)
        bits[np.asarray(banned, np.int64)] = 0
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def _read(self, launched: _Launched) -> list[Output]:
        """The outputs of a step, once the device has computed it."""
        tokens = np.atleast_2d(np.asarray(launched.results.tokens)).tolist()
        if launched.load is not None:
            load = np.asarray(launched.load).astype(np.int64)
            its = self.statistics
            its.load = load if its.load.shape != load.shape else its.load + load
        outputs = []
        for of_step, (place, id) in itertools.product(tokens, launched.rows):
            if (active := self._active.get(id)) is None:  # it ended while this was computed
                continue
            token = of_step[place]
            self._events.append(scheduling.Drawn(id, token))
            active.tokens.append(token)
            if active.guide is not None:
                active.guide.step(token)
            self.statistics.new_tokens += 1
            reason: FinishReason | None = None
            if active.is_stuck:
                reason = "error"
            elif token in active.request.stop_ids:
                reason = "stop"
            elif active.guide is not None and active.guide.has_failed:
                reason = "error"
            elif active.drawn == active.request.max_new_tokens:
                reason = "length"
            cached, active.cached = active.cached or 0, 0
            logprobs = self._logprobs(launched.results, place) if active.request.logprobs else None
            outputs.append(Output(id, None if reason == "error" else token, logprobs, reason, cached))
            if reason is not None:
                self.cancel(id)
        return outputs

    @staticmethod
    def _logprobs(results: Results, place: int) -> TokenLogProbabilities:
        found: Any = jax.tree.map(np.asarray, results.logprobs)
        pairs = zip(found.top_ids[place].tolist(), found.top[place].tolist(), strict=True)
        return TokenLogProbabilities(float(found.chosen[place]), tuple(pairs))


def _begin_slot(history: History, slot: jax.Array, in_prompt: jax.Array, new: jax.Array, allowed: jax.Array) -> History:
    counts = history.counts
    prompt = counts.prompt.at[slot].set(in_prompt, mode="drop")
    return History(
        counts._replace(prompt=prompt, new=counts.new.at[slot].set(new, mode="drop")),
        history.allowed.at[slot].set(allowed, mode="drop"),
    )


def _allow(history: History, slot: jax.Array, allowed: jax.Array) -> History:
    return history._replace(allowed=history.allowed.at[slot].set(allowed, mode="drop"))
