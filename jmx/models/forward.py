"""A pass of a model over many tokens, by one program for each kind of sublayer instead of one program of all layers.

Layers are alike but for their weights, so the programs of one layer run all of them: compiling takes as long for a
hundred layers as for one. They are launched without waiting for the device, one after the other, which takes less time
than a layer needs for its tokens. A step of decoding is shorter than that: it is one program of all layers.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.models.decoder import Model
from jmx.models.program_identity import tracing_context
from jmx.models.program_store import ProgramStore
from jmx.models.programs import Program

# From so many tokens on, the last layer computes those alone after which logits are wanted: what that saves with fewer
# is not worth a further program.
LAST_ALONE = 256


class Weights(NamedTuple):
    """The variables of a module as a list, which is flattened faster than a module, and how to make it of them."""

    arrays: list[jax.Array]
    treedef: Any
    graphdef: nnx.GraphDef[Any]

    @classmethod
    def of(cls, module: nnx.Module) -> "Weights":
        graphdef, state = nnx.split(module)
        return cls(*jax.tree.flatten(state), graphdef)

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The module, with `arrays` in place of its own."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, arrays))


class Sublayer(NamedTuple):
    """The program of all sublayers that are alike, and the weights of one of them."""

    program: Program
    weights: list[jax.Array]


class Forward:
    """Runs a model on T tokens of each row, after those in a cache, and computes logits.

    Args:
        model: its present weights are used.
        store: keeps compiled programs; None: nothing does.
    """

    def __init__(self, model: Model, store: ProgramStore | None):
        # What is outside of the layers, and the last one: a call with all weights would take the host half a
        # millisecond, for which the device waits.
        end = copy(model)
        end.layers = nnx.List([model.layers[-1]])
        self._weights = weights = Weights.of(end)
        self._store = store
        self._programs: dict[Any, Program] = {}
        self._layers: list[tuple[Sublayer, Sublayer]] = []
        for layer in model.layers:
            attention, experts = layer.sublayers()
            self._layers.append((self._attention(Weights.of(attention)), self._experts(Weights.of(experts))))

        def embed(
            arrays: list[jax.Array], tokens: jax.Array, starts: jax.Array | None, lengths: jax.Array
        ) -> tuple[jax.Array, Any, jax.Array]:
            x, angles = weights.merge(arrays).embed(tokens, starts)
            return x, angles, jnp.arange(tokens.shape[1])[None] < lengths[:, None]

        def head(arrays: list[jax.Array], x: jax.Array, lengths: jax.Array | None) -> jax.Array:
            if lengths is not None:
                x = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
            return weights.merge(arrays).logits(x)

        def finish(
            arrays: list[jax.Array], x: jax.Array, starts: jax.Array | None, cache: jax.Array, lengths: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            model: Model = weights.merge(arrays)
            x, cache = model.finish(x, starts, cache, lengths - 1)
            return model.logits(x[:, 0]), cache

        self._embed, self._head = self._program(embed, weights), self._program(head, weights)
        self._finish = self._program(finish, weights, donate=("cache",))

    def __call__(
        self,
        tokens: jax.Array,
        starts: jax.Array | None,
        caches: Sequence[jax.Array],
        lengths: jax.Array,
        *,
        all_logits: bool = False,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Logits after the last of each row's tokens, float32 (B, vocab_size), and the new caches.

        Args:
            tokens: int32 (B, T).
            starts: int32 (B,), the tokens of each row in the caches; None for 0.
            caches: one per layer; donated.
            lengths: int32 (B,): how many of its T tokens each row has.
            all_logits: whether to return those after all tokens, (B, T, vocab_size).
        """
        x, angles, mask = self._embed(self._weights.arrays, tokens, starts, lengths)
        context = tracing_context()
        alone = not all_logits and tokens.shape[1] > 1 and tokens.size >= LAST_ALONE
        whole = list(zip(self._layers[: -1 if alone else None], caches, strict=False))
        # All programs are compiled side by side; those of experts, which take longest, begin first.
        kinds = dict.fromkeys(experts.program for (_, experts), _ in whole)
        feed_forward = {program: program.compile(x, mask, context=context) for program in kinds}
        like = {(its.program, cache.shape): cache for (its, _), cache in whole}
        attend = {key: key[0].compile(x, starts, angles, cache, context=context) for key, cache in like.items()}
        end, given = (self._finish, (starts, caches[-1])) if alone else (self._head, ())
        last = None if all_logits else lengths
        end.compile(x, *given, last, context=context)
        written = []
        for (attention, experts), cache in whole:
            run = attend[attention.program, cache.shape].result()
            x, cache = run(attention.weights, x, starts, angles, cache)
            x = feed_forward[experts.program].result()(experts.weights, x, mask)
            written.append(cache)
        found = end(self._weights.arrays, x, *given, last)
        return (found[0], [*written, found[1]]) if alone else (found, written)

    def _attention(self, weights: Weights) -> Sublayer:
        def attend(
            arrays: list[jax.Array], x: jax.Array, starts: jax.Array | None, angles: Any, cache: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            return weights.merge(arrays)(x, starts, angles, cache)[:2]

        return Sublayer(self._program(attend, weights, donate=("x", "cache")), weights.arrays)

    def _experts(self, weights: Weights) -> Sublayer:
        def feed_forward(arrays: list[jax.Array], x: jax.Array, mask: jax.Array) -> jax.Array:
            return weights.merge(arrays)(x, mask, None)[0]

        return Sublayer(self._program(feed_forward, weights, donate=("x",)), weights.arrays)

    def _program(self, function: Callable[..., Any], weights: Weights, donate: Sequence[str] = ()) -> Program:
        """A program of `function` of weights; the same one for all that are alike."""
        shapes = tuple((array.shape, array.dtype) for array in weights.arrays)
        kind = (function.__name__, weights.graphdef, weights.treedef, shapes)
        if kind not in self._programs:
            identity = f"{function.__name__} {weights.graphdef!r}"
            self._programs[kind] = Program(
                function, weights.arrays, donate=donate, identity=identity, store=self._store
            )
        return self._programs[kind]
