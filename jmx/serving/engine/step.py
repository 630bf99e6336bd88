"""A step: one pass of a model over rows and blocks of many requests, then the choice of their next tokens.

Both are programs of their own, see `sampling`. A third one counts the tokens of each expert, in few of the steps.
Several passes of few rows, with the choices between them, are one program: the host needs as long for a call as the
device for such a pass.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmx
from jmx.models.block import MoERecord
from jmx.models.decoder import Model
from jmx.models.forward import Weights
from jmx.models.logprobs import LogProbabilities
from jmx.models.model_split import ModelSplit
from jmx.models.paged_cache import PagedLayer, Places
from jmx.serving.engine.sampling import History, Level, Rows, choose, choose_simply


class Device(NamedTuple):
    """What steps leave on the device; each one is given to the next and donated.

    Args:
        pages: of each layer, (parts, G * (pages + 1), heads, page, W), those of the first of G groups of devices first.
        tokens: int32 (slots,), the last token that each slot drew.
        history: of each slot.
    """

    pages: list[jax.Array]
    tokens: jax.Array
    history: History


class Inputs(NamedTuple):
    """What the host gives to a step: numpy arrays, of which padding is 0 unless noted.

    Each of G groups of devices, into which a mesh divides tokens, has B rows and M blocks. R is G * (B + M): the rows
    of the first group, its blocks, the rows of the second one, and so on.

    Args:
        tables: of each pool, int32 (R, N), with numbers of the group's own pages.
        positions: int32 (R,).
        row_tokens: int32 (G, B); -1 for the token that the slot drew last.
        block_tokens: int32 (G, M, page).
        counts: int32 (R,), tokens of each.
        slots: int32 (R,); of padding, the number of slots.
        draws: bool (R,), whether the slot's next token is drawn.
        sampling: parameters of R rows.
    """

    tables: tuple[np.ndarray, ...]
    positions: np.ndarray
    row_tokens: np.ndarray
    block_tokens: np.ndarray
    counts: np.ndarray
    slots: np.ndarray
    draws: np.ndarray
    sampling: Rows

    @classmethod
    def padding(cls, rows: int, blocks: int, page: int, widths: Sequence[int], slots: int, groups: int = 1) -> "Inputs":
        """A step that computes nothing, for a caller to fill: `rows` and `blocks` of each group, `slots` of all."""
        both = groups * (rows + blocks)
        return cls(
            tuple(np.zeros((both, width), np.int32) for width in widths),
            np.zeros(both, np.int32),
            np.zeros((groups, rows), np.int32),
            np.zeros((groups, blocks, page), np.int32),
            np.zeros(both, np.int32),
            np.full(both, slots, np.int32),
            np.zeros(both, bool),
            Rows.greedy(both),
        )

    @property
    def size(self) -> tuple[int, int]:
        """B and M."""
        return self.row_tokens.shape[1], self.block_tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        """Of all groups, with padding."""
        return self.row_tokens.size + self.block_tokens.size

    def by_group(self, array: Any) -> jax.Array:
        """An array (R, ...) as (G, B + M, ...)."""
        return jnp.asarray(array).reshape(len(self.row_tokens), -1, *array.shape[1:])


class Passed(NamedTuple):
    """What a model's pass returns besides pages.

    Args:
        logits: float32 (R, vocab_size), after rows and after the last tokens of blocks; divided as rows of a batch.
        router_logits: of each layer with experts, (layers, tokens, E), likewise.
    """

    logits: jax.Array
    router_logits: jax.Array


class Results(NamedTuple):
    """What the host reads of a step.

    Args:
        tokens: int32 (R,), drawn ones; of several passes (steps, R).
        logprobs: theirs, at `Level.ALL`.
    """

    tokens: jax.Array
    logprobs: LogProbabilities | None


class Decoded(NamedTuple):
    """What several passes of rows return.

    Args:
        pages, tokens: as in `Device`.
        results: for the host.
        router_logits: as in `Passed`, of the last pass.
    """

    pages: list[jax.Array]
    tokens: jax.Array
    results: Results
    router_logits: jax.Array


def pass_of(weights: Weights, pools: Sequence[int]) -> Callable[..., tuple[list[jax.Array], Passed]]:
    """The function of a model's pass: (arrays, pages, tokens of slots, inputs).

    Args:
        weights: of the model.
        pools: the pool of each layer.
    """

    def run(
        arrays: list[jax.Array], pages: list[jax.Array], last: jax.Array, inputs: Inputs
    ) -> tuple[list[jax.Array], Passed]:
        model: Model = weights.merge(arrays)
        (rows, blocks), page = inputs.size, inputs.block_tokens.shape[2]
        tokens, positions = _flat(last, inputs)
        places = [Places(jnp.asarray(tables), jnp.asarray(inputs.positions)) for tables in inputs.tables]
        layers = [PagedLayer(its, places[pool], rows) for its, pool in zip(pages, pools, strict=True)]
        records: list[MoERecord] = []
        x, layers = model(tokens[:, None], positions, layers, mask=_mask(inputs)[:, None], records=records)
        ends = rows + page * np.arange(blocks) + jnp.maximum(inputs.by_group(inputs.counts)[:, rows:], 1) - 1
        x = x.reshape(len(ends), -1, x.shape[-1])
        x = jnp.concatenate([x[:, :rows], jax.vmap(lambda its, ends: its[ends])(x, ends)], axis=1)
        logits = model.logits(x.reshape(-1, x.shape[-1]))
        router = jnp.stack([record.logits[:, 0] for record in records])
        router = router if model.split is None else model.split.place(router, None, "token")
        return [layer.pages for layer in layers], Passed(logits, router)

    return run


def decode_of(weights: Weights, pools: Sequence[int], steps: int) -> Callable[..., Decoded]:
    """The function of `steps` passes of rows, each with the tokens that the one before drew: (arrays, pages, tokens of
    slots, inputs of the first). No row needs `Level.ALL`."""
    once = pass_of(weights, pools)

    def run(arrays: list[jax.Array], pages: list[jax.Array], last: jax.Array, inputs: Inputs) -> Decoded:
        model: Model = weights.merge(arrays)

        def by_row(array: jax.Array) -> jax.Array:
            return array if model.split is None else model.split.place(array, "token")

        def step(carry: Any, number: jax.Array) -> Any:
            pages, known = carry
            integers, floats = inputs.sampling
            rows = Rows(jnp.asarray(integers).at[:, 2].add(number.astype(jnp.uint32)), floats)
            now = inputs._replace(row_tokens=known, positions=jnp.asarray(inputs.positions) + number)
            pages, passed = once(arrays, pages, last, now)
            drawn = choose_simply(passed.logits, rows, Level.RANDOM)
            return (pages, by_row(drawn.reshape(known.shape))), (drawn, passed.router_logits)

        # A row's next token comes from the device that drew it: groups of devices exchange nothing between passes.
        first = by_row(jnp.asarray(inputs.row_tokens))
        (pages, _), (drawn, router) = jax.lax.scan(step, (pages, first), jnp.arange(steps, dtype=jnp.int32))
        into = jnp.where(inputs.draws, inputs.slots, len(last))
        tokens, results = model.whole((last.at[into].set(drawn[-1], mode="drop"), Results(drawn, None)))
        router = router[-1] if model.split is None else model.split.place(router[-1], None, "token")
        return Decoded(pages, tokens, results, router)

    return run


def draw_of(split: ModelSplit | None) -> Callable[..., tuple[jax.Array, History, Results]]:
    """The function of the choice of tokens: ((), tokens of slots, history, logits, slots, draws, rows, level).

    It returns the slots' last tokens and history with the new ones, and what the host reads, whole on each device.

    Args:
        split: how a mesh divides the model, and so the logits' rows.
    """

    def draw(
        _: Sequence[jax.Array],
        tokens: jax.Array,
        history: History,
        logits: jax.Array,
        slots: np.ndarray,
        draws: np.ndarray,
        rows: Rows,
        *,
        level: Level,
    ) -> tuple[jax.Array, History, Results]:
        on_device = jnp.asarray(slots), jnp.asarray(draws)
        drawn, logprobs, history = choose(logits, rows, history, *on_device, level)
        into = jnp.where(on_device[1], on_device[0], len(tokens))
        done = tokens.at[into].set(drawn, mode="drop"), history, Results(drawn, logprobs)
        return done if split is None else split.place(done)

    return draw


def load_of(weights: Weights) -> Callable[..., jax.Array]:
    """The function that counts the tokens of each expert, int32 (layers, E): (arrays, router logits, inputs).

    A loop over the layers, which route alike: one after the other they would take seconds to compile.
    """

    def count(arrays: list[jax.Array], router_logits: jax.Array, inputs: Inputs) -> jax.Array:
        model, mask = weights.merge(arrays), _mask(inputs)
        moes: list[Any] = [layer.moe for layer in model.layers if hasattr(layer, "moe")]
        has_bias = moes[0].correction_bias is not None
        biases = jnp.stack([moe.correction_bias[...] for moe in moes]) if has_bias else None

        def of_layer(_: None, its: tuple[jax.Array, jax.Array | None]) -> tuple[None, jax.Array]:
            logits, bias = its
            routing = jmx.route(jmx.Logits(logits, moes[0].routing, bias), mask)
            return None, jmx.token_counts(routing, logits.shape[-1])

        return jax.lax.scan(of_layer, None, (model.whole(router_logits), biases))[1]

    return count


def _flat(last: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions of all tokens of a step, each (G * (B + M * page),), those of the first group first."""
    rows, page = inputs.size[0], inputs.block_tokens.shape[2]
    known, blocks = jnp.asarray(inputs.row_tokens), jnp.asarray(inputs.block_tokens)
    drawn = jnp.take(last, inputs.by_group(inputs.slots)[:, :rows], mode="clip")
    positions = inputs.by_group(inputs.positions)
    of_blocks = positions[:, rows:, None] + jnp.arange(page)[None, None]
    both = (jnp.where(known < 0, drawn, known), blocks), (positions[:, :rows], of_blocks)
    tokens, positions = (jnp.concatenate([its, more.reshape(len(its), -1)], axis=1).reshape(-1) for its, more in both)
    return tokens, positions


def _mask(inputs: Inputs) -> jax.Array:
    """Which tokens of a step are no padding, bool (G * (B + M * page),)."""
    rows, page = inputs.size[0], inputs.block_tokens.shape[2]
    counts = inputs.by_group(inputs.counts)
    filled = jnp.arange(page)[None, None] < counts[:, rows:, None]
    return jnp.concatenate([counts[:, :rows] > 0, filled.reshape(len(counts), -1)], axis=1).reshape(-1)
