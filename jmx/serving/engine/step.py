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
from jmx.models.paged_cache import PagedLayer, Places
from jmx.serving.engine.sampling import History, Level, Rows, choose, choose_simply


class Device(NamedTuple):
    """What steps leave on the device; each one is given to the next and donated.

    Args:
        pages: of each layer, (parts, pages + 1, heads, page, W).
        tokens: int32 (slots,), the last token that each slot drew.
        history: of each slot.
    """

    pages: list[jax.Array]
    tokens: jax.Array
    history: History


class Inputs(NamedTuple):
    """What the host gives to a step of B rows and M blocks: numpy arrays, of which padding is 0 unless noted.

    Args:
        tables: of each pool, int32 (B + M, N).
        positions: int32 (B + M,).
        row_tokens: int32 (B,); -1 for the token that the slot drew last.
        block_tokens: int32 (M, page).
        counts: int32 (B + M,), tokens of each.
        slots: int32 (B + M,); of padding, the number of slots.
        draws: bool (B + M,), whether the slot's next token is drawn.
        sampling: parameters of B + M rows.
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
    def padding(cls, rows: int, blocks: int, page: int, widths: Sequence[int], slots: int) -> "Inputs":
        """A step that computes nothing, for a caller to fill."""
        both = rows + blocks
        return cls(
            tuple(np.zeros((both, width), np.int32) for width in widths),
            np.zeros(both, np.int32),
            np.zeros(rows, np.int32),
            np.zeros((blocks, page), np.int32),
            np.zeros(both, np.int32),
            np.full(both, slots, np.int32),
            np.zeros(both, bool),
            Rows.greedy(both),
        )


class Passed(NamedTuple):
    """What a model's pass returns besides pages.

    Args:
        logits: float32 (B + M, vocab_size), after rows and after the last tokens of blocks.
        router_logits: of each layer with experts, (layers, B + M * page, E).
    """

    logits: jax.Array
    router_logits: jax.Array


class Results(NamedTuple):
    """What the host reads of a step.

    Args:
        tokens: int32 (B + M,), drawn ones; of several passes (steps, B).
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
        (blocks, page), rows = inputs.block_tokens.shape, inputs.row_tokens.shape[0]
        tokens, positions = _flat(last, inputs)
        places = [Places(jnp.asarray(tables), jnp.asarray(inputs.positions)) for tables in inputs.tables]
        layers = [PagedLayer(its, places[pool], rows) for its, pool in zip(pages, pools, strict=True)]
        records: list[MoERecord] = []
        x, layers = model(tokens[:, None], positions, layers, mask=_mask(inputs)[:, None], records=records)
        ends = rows + page * np.arange(blocks) + jnp.maximum(inputs.counts[rows:], 1) - 1
        logits = model.logits(jnp.concatenate([x[:rows, 0], x[ends, 0]]))
        router = jnp.stack([record.logits[:, 0] for record in records])
        return [layer.pages for layer in layers], model.whole(Passed(logits, router))

    return run


def decode_of(weights: Weights, pools: Sequence[int], steps: int) -> Callable[..., Decoded]:
    """The function of `steps` passes of rows, each with the tokens that the one before drew: (arrays, pages, tokens of
    slots, inputs of the first). No row needs `Level.ALL`."""
    once = pass_of(weights, pools)

    def run(arrays: list[jax.Array], pages: list[jax.Array], last: jax.Array, inputs: Inputs) -> Decoded:
        into = jnp.where(jnp.asarray(inputs.draws), jnp.asarray(inputs.slots), len(last))

        def step(carry: Any, number: jax.Array) -> Any:
            pages, last = carry
            integers, floats = inputs.sampling
            rows = Rows(jnp.asarray(integers).at[:, 2].add(number.astype(jnp.uint32)), floats)
            known = jnp.where(number == 0, jnp.asarray(inputs.row_tokens), -1)
            now = inputs._replace(row_tokens=known, positions=jnp.asarray(inputs.positions) + number)
            pages, passed = once(arrays, pages, last, now)
            drawn = choose_simply(passed.logits, rows, Level.RANDOM)
            return (pages, last.at[into].set(drawn, mode="drop")), (drawn, passed.router_logits)

        (pages, last), (drawn, router) = jax.lax.scan(step, (pages, last), jnp.arange(steps, dtype=jnp.int32))
        return Decoded(pages, last, Results(drawn, None), router[-1])

    return run


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
    """The choice of tokens: the slots' last tokens and history with them, and what the host reads."""
    on_device = jnp.asarray(slots), jnp.asarray(draws)
    drawn, logprobs, history = choose(logits, rows, history, *on_device, level)
    into = jnp.where(on_device[1], on_device[0], len(tokens))
    return tokens.at[into].set(drawn, mode="drop"), history, Results(drawn, logprobs)


def load_of(weights: Weights) -> Callable[..., jax.Array]:
    """The function that counts the tokens of each expert, int32 (layers, E): (arrays, router logits, inputs)."""

    def count(arrays: list[jax.Array], router_logits: jax.Array, inputs: Inputs) -> jax.Array:
        model, mask = weights.merge(arrays), _mask(inputs)
        moes: list[Any] = [layer.moe for layer in model.layers if hasattr(layer, "moe")]
        found = []
        for moe, logits in zip(moes, router_logits, strict=True):
            bias = None if moe.correction_bias is None else moe.correction_bias[...]
            routing = jmx.route(jmx.Logits(logits, moe.routing, bias), mask)
            found.append(jmx.token_counts(routing, logits.shape[-1]))
        return jnp.stack(found)

    return count


def _flat(last: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions of all tokens of a step, each (B + M * page,)."""
    rows, page = inputs.row_tokens.shape[0], inputs.block_tokens.shape[1]
    known = jnp.asarray(inputs.row_tokens)
    drawn = jnp.take(last, inputs.slots[:rows], mode="clip")
    of_blocks = jnp.asarray(inputs.positions[rows:])[:, None] + jnp.arange(page)
    tokens = jnp.concatenate([jnp.where(known < 0, drawn, known), jnp.asarray(inputs.block_tokens).reshape(-1)])
    return tokens, jnp.concatenate([jnp.asarray(inputs.positions[:rows]), of_blocks.reshape(-1)])


def _mask(inputs: Inputs) -> jax.Array:
    """Which tokens of a step are no padding, bool (B + M * page,)."""
    rows, page = inputs.row_tokens.shape[0], inputs.block_tokens.shape[1]
    filled = jnp.arange(page) < jnp.asarray(inputs.counts[rows:])[:, None]
    return jnp.concatenate([jnp.asarray(inputs.counts[:rows]) > 0, filled.reshape(-1)])
