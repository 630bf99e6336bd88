"""The programs of an engine's steps: compiled side by side, and launched one after the other without waiting."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from jmx.models.decoder import Model
from jmx.models.forward import Weights
from jmx.models.model_split import ModelSplit
from jmx.models.program_store import ProgramStore
from jmx.models.programs import Program, signature
from jmx.serving.engine.limits import Limits, Pools
from jmx.serving.engine.sampling import Level
from jmx.serving.engine.sizes import Sizes
from jmx.serving.engine.step import Decoded, Device, Inputs, Passed, Results, decode_of, draw_of, load_of, pass_of


class Programs:
    """Of each size of a step: the model's pass, the choice of tokens at each level, and the count of experts' tokens.

    Of few rows also several passes in one program.

    Args:
        weights: of the model, or as `jax.ShapeDtypeStruct`, before `take`.
        pools: of its layers.
        split: how a mesh divides the model; None: it is on one device.
        decode_steps: how many passes.
        store: keeps compiled programs; None: nothing does.
    """

    def __init__(
        self,
        weights: Weights,
        pools: Pools,
        split: ModelSplit | None,
        decode_steps: int,
        store: ProgramStore | None,
    ):
        self._of_model, self._weights, self._split = weights, weights.arrays, split
        self._begun: Future[None] | None = None
        identity = f"{pools} {weights.graphdef!r}"
        self._pass = Program(
            pass_of(weights, pools.of_layer),
            weights.arrays,
            donate=("pages",),
            identity=f"serving pass {identity}",
            store=store,
        )
        self._decode = Program(
            decode_of(weights, pools.of_layer, decode_steps),
            weights.arrays,
            donate=("pages", "last"),
            identity=f"serving decode {decode_steps} {identity}",
            store=store,
        )
        self._draw = Program(
            draw_of(split), [], donate=("tokens", "history"), static=("level",), identity="serving draw", store=store
        )
        self._load = Program(load_of(weights), weights.arrays, identity=f"serving load {identity}", store=store)
        self._compiled: dict[Any, Any] = {}

    def take(self, weights: Weights) -> bool:
        """Whether these are programs of a model, whose weights they then have."""
        its = self._of_model
        if (its.graphdef, its.treedef, signature(its.arrays)) != (
            weights.graphdef,
            weights.treedef,
            signature(weights.arrays),
        ):
            return False
        self._of_model, self._weights = weights, weights.arrays
        return True

    def begin_in_thread(self, inputs: Sequence[Inputs], decoded: Sequence[Inputs], device: Device) -> None:
        """Calls `begin` in a thread. What fails there fails again when `begin` is called."""
        pool = ThreadPoolExecutor(1, "jmx-lower")
        self._begun = pool.submit(self._begin, inputs, decoded, device)
        pool.shutdown(wait=False)

    def begin(self, inputs: Sequence[Inputs], decoded: Sequence[Inputs], device: Device) -> None:
        """Begins to compile all programs: passes first, then those that take less time.

        Args:
            inputs: the sizes of single passes, those that take longest first.
            decoded: the sizes of several passes.
            device: what there is on the device.
        """
        if self._begun is not None:
            wait([self._begun])
        self._begin(inputs, decoded, device)

    def _begin(self, inputs: Sequence[Inputs], decoded: Sequence[Inputs], device: Device) -> None:
        for its in inputs:
            self._pass.compile(device.pages, device.tokens, its)
        for its in decoded:
            self._decode.compile(device.pages, device.tokens, its)
        passed: Passed = self._pass.shapes(device.pages, device.tokens, inputs[0])[1]
        layers, _, num_experts = passed.router_logits.shape
        for its in (*inputs, *decoded):
            shape = layers, its.num_tokens, num_experts
            self._load.compile(self._divided(shape, passed.router_logits.dtype, None, "token"), its)
        for its in inputs:
            logits = self._divided((len(its.slots), passed.logits.shape[1]), passed.logits.dtype, "token")
            for level in Level:
                given = its.slots, its.draws, its.sampling
                self._draw.compile(device.tokens, device.history, logits, *given, level=level)

    def _divided(self, shape: tuple[int, ...], dtype: Any, *keys: str | None) -> jax.ShapeDtypeStruct:
        """An array of a pass, whose axes the mesh divides as `keys` are."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if self._split is None else self._split.sharding(*keys))

    def run(
        self, device: Device, inputs: Inputs, level: Level, *, counts_load: bool
    ) -> tuple[Device, Results, jax.Array | None]:
        """Launches a step: what it leaves on the device, what the host reads, and the load of experts if asked for."""
        size = inputs.size
        pages, passed = self._call(self._pass, size, device.pages, device.tokens, inputs)
        load = self._call(self._load, size, passed.router_logits, inputs) if counts_load else None
        tokens, history, results = self._drawn(device, passed, inputs, level, size)
        return Device(pages, tokens, history), results, load

    def run_several(
        self, device: Device, inputs: Inputs, *, counts_load: bool
    ) -> tuple[Device, Results, jax.Array | None]:
        """As `run`, several steps of rows that need no `Level.ALL`."""
        size = inputs.size
        decoded: Decoded = self._call(self._decode, size, device.pages, device.tokens, inputs)
        load = self._call(self._load, size, decoded.router_logits, inputs) if counts_load else None
        return Device(decoded.pages, decoded.tokens, device.history), decoded.results, load

    def _drawn(self, device: Device, passed: Passed, inputs: Inputs, level: Level, size: tuple[int, int]) -> Any:
        given = inputs.slots, inputs.draws, inputs.sampling
        arguments = (device.tokens, device.history, passed.logits, *given)
        key = level, size
        if key not in self._compiled:
            self._compiled[key] = self._draw.compiled(*arguments, level=level)
        return self._compiled[key]([], *arguments)

    def _call(self, program: Program, size: tuple[int, int], *arguments: Any) -> Any:
        """A call of a program. Those of one size have one signature, which is not computed again."""
        key = program, size
        if key not in self._compiled:
            self._compiled[key] = program.compiled(*arguments)
        return self._compiled[key](self._weights, *arguments)


def begin_programs(model: Model, limits: Limits, store: ProgramStore | None) -> Programs:
    """Begins to compile the programs of an engine of one device, in a thread, before its weights are there.

    Args:
        model: of shapes, see `jmx.models.expected`.
        limits: of the engine.
        store: keeps compiled programs; None: nothing does.
    """
    sizes = Sizes(model, limits)
    programs = Programs(Weights.of(model), sizes.pools, None, limits.decode_steps, store)
    programs.begin_in_thread(*sizes.inputs(), sizes.device())
    return programs
