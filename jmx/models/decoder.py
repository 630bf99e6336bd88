"""A decoder in Flax NNX on `jmx.nnx.MoE`: blocks between an embedding and logits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.backends import registered_backends
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.block import Block, DenseBlock, MoERecord
from jmx.models.cache import Cache, zeros
from jmx.models.config import check_config
from jmx.models.float_experts import ORDER, experts_of, format_of, masters_of
from jmx.models.layers import Linear, RMSNorm, Variables, project
from jmx.models.model_split import ModelSplit
from jmx.models.paged_cache import PagedLayer
from jmx.models.rope import rope_angles
from jmx.models.sharded_moe import ShardedMoE
from jmx.models.shared_experts import SharedExperts
from jmx.numerics import formats
from jmx.qat import QAT, MasterExperts
from jmx.selection.select import check_backend
from jmx.util.checks import check_array, check_bool, check_dtype, check_instance, check_int

DTYPES = (jnp.bfloat16, jnp.float32)  # of activations


class Model(nnx.Module):
    """A decoder of blocks; a family adds `make_attention`, and `angles` and `moe_options` where they are different.

    Activations, cache and dense weights are of `dtype`; norms, angles, softmax, routing and logits are float32;
    expert weights stay quantized.

    Args:
        config: sizes and constants.
        format: of the experts' weights, or its name; None: they are floats of `dtype`.
        qat: makes the experts' weights master weights, which each call rounds to `format`; None: they are in `format`.
        dtype: bfloat16 or float32.
        backend: name of the jmx backend that must run the experts, or None.
        split: how a mesh divides the model; None: it is on one device.
        rngs: `nnx.Rngs` with the stream `params`.

    Raises:
        TypeError, ValueError: an argument of another type, or an unknown format or backend; `qat` without `format`; a
            mesh that does not divide what it is to divide, or divides the intermediate axis of master weights.
    """

    def __init__(
        self,
        config: Any,
        *,
        format: jmx.Format | str | None = None,
        qat: QAT | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        backend: str | None = None,
        split: ModelSplit | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = check_config("config", config)
        self.format = None if format is None else formats.get(format)
        self.qat = check_instance("qat", qat, QAT | None, "a jmx.training.QAT, or None")
        if qat is not None and self.format is None:
            raise ValueError("`format` (=None) must be given for a model with `qat`")
        self.dtype = check_dtype("dtype", dtype, *DTYPES)
        check_backend(backend, registered_backends())
        self.backend = backend
        self.split = check_instance("split", split, ModelSplit | None, "a ModelSplit, or None")
        if split is not None:
            split.check(config)
            if qat is not None and split.intermediate:
                raise ValueError(f"`axes['intermediate']` (={split.intermediate}) must be None for a model with `qat`")
        check_instance("rngs", rngs, nnx.Rngs)
        self.embedding = nnx.Param(
            nnx.initializers.normal(1.0)(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        )
        self.layers: Any = nnx.List([self.make_block(layer, rngs) for layer in range(config.num_hidden_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        unembedding = None
        if not config.tie_word_embeddings:
            unembedding = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        self.unembedding = nnx.data(unembedding)
        if split is not None:
            split.mark_sums(self)

    router_bias: ClassVar[bool] = False

    def make_block(self, layer: int, rngs: nnx.Rngs) -> Any:
        """A layer: `Block`, or another module with its `sublayers` and `variables`."""
        config, dtype = self.config, self.dtype
        attention = self.make_attention(layer, rngs)
        if layer in config.dense_layers:
            return DenseBlock(config, attention, split=self.split, dtype=dtype, rngs=rngs)
        router = Linear(config.hidden_size, config.num_experts, bias=self.router_bias, dtype=dtype, rngs=rngs)
        moe, shared_experts = self.make_moe(None, rngs), self.make_shared_experts(rngs)
        return Block(config, attention, router, moe, shared_experts, self.split)

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Any:
        """A layer's attention, with the call of `Attention`."""
        raise NotImplementedError

    def make_shared_experts(self, rngs: nnx.Rngs) -> SharedExperts | None:
        """The shared experts of a layer with experts, if the family has some."""
        return None

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of the rotations of heads, float32 (B, T, half the rotated channels), of int32 positions
        (B, T)."""
        config = self.config
        return rope_angles(positions, config.head_dim, config.rope_theta, config.yarn)

    def moe_options(self) -> dict[str, Any]:
        """Arguments of `jmx.nnx.MoE`: activation, routing, and what else the family's experts have."""
        routing = jmx.SoftmaxTopK(self.config.top_k, renormalize=self.config.norm_topk_prob)
        return {"activation": jmx.SwiGLU(), "routing": routing}

    def make_moe(
        self, experts: jmx.Experts | jmx.ShardedExperts | FloatExperts | MasterExperts | None, rngs: nnx.Rngs
    ) -> jmx.nnx.MoE | ShardedMoE:
        """A block's `moe`: with loaded experts, whose format and inputs it keeps, or (None) with random ones.

        With `qat`, floats and quantized experts become master weights.
        """
        config = self.config
        options: dict[str, Any] = {"format": self.format, "qat": self.qat} | self.moe_options()
        if isinstance(experts, FloatExperts):
            if self.qat is None:
                experts = experts_of(experts, self.dtype)
            else:
                experts = masters_of(experts, options.get("gate_up_order", ORDER), options["format"], self.qat)
        elif experts is None and self.format is None:
            options |= {"format": format_of(self.dtype), "gate_up_order": ORDER}
        if isinstance(experts, jmx.ShardedExperts):
            backend = self.backend
            its = {name: options[name] for name in {"activation", "routing", "correction_bias"} & options.keys()}
            return ShardedMoE(experts, **its, backend=backend, split=self.split)
        if experts is not None:
            options |= {"format": experts.format, "gate_up_order": experts.gate_up_order}
        return jmx.nnx.MoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.top_k,
            **options,
            router=False,
            param_dtype=self.dtype,
            backend=self.backend,
            experts=experts,
            rngs=rngs,
        )

    def __call__[Layer: (jax.Array, PagedLayer)](
        self,
        tokens: jax.Array,
        starts: jax.Array | None,
        caches: Sequence[Layer],
        *,
        mask: jax.Array | None = None,
        expert_ids: Sequence[jax.Array] | None = None,
        records: list[MoERecord] | None = None,
        remat: bool = False,
    ) -> tuple[jax.Array, list[Layer]]:
        """Runs T consecutive tokens of each row, after those in the caches.

        Args:
            tokens: int32 (B, T).
            starts: int32 (B,), position of each row's first token, the number of its tokens in the caches; None for 0,
                which is faster: nothing is read from the caches.
            caches: one per layer, with capacity for position starts + T - 1; or in pages, see `PagedLayer`.
            mask: bool (B, T) or None; False is padding, which goes to no expert and must follow a row's tokens.
            expert_ids: int32 (B, T, top_k) per layer, instead of the router's choice of experts (not of their weights).
            records: a list to which each layer's `MoERecord` is appended, for comparisons.
            remat: whether a backward pass computes attention and experts of each layer again, and so keeps their inputs
                alone, two (B, T, H) a layer; otherwise it keeps what they compute.

        Returns:
            The last layer's residual stream (B, T, H), for `logits`, and the new caches.

        Raises:
            TypeError: `remat` is not a bool.
        """
        run = _run_twice if check_bool("remat", remat) else _run
        x, angles = self.embed(tokens, starts)
        written = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            ids = None if expert_ids is None else expert_ids[index]
            attention, experts = map(nnx.split, layer.sublayers())
            x, cache, routed = run(*attention, x, starts, angles, cache)
            x, record = run(*experts, x, mask, ids, routed)
            written.append(cache)
            if records is not None and record is not None:
                records.append(record)
        return x, written

    def finish(
        self, x: jax.Array, starts: jax.Array | None, cache: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The last layer of a pass of which the results of one token a row are wanted, as for the next one's logits.

        All tokens are written to the cache; the rest of the layer is computed as a step of that token.

        Args:
            x: (B, T, H), the residual stream before the layer.
            starts: as for the call.
            cache: the layer's.
            wanted: int32 (B,), the index of the token among a row's T.

        Returns:
            The residual stream (B, 1, H), and the new cache.
        """
        attention, experts = self.layers[-1].sublayers()
        positions = jnp.arange(x.shape[1])[None]
        angles = self.angles(positions if starts is None else starts[:, None] + positions)
        cache = attention.fill(x, starts, angles, cache)
        x = jnp.take_along_axis(x, wanted[:, None, None], axis=1)
        starts = wanted if starts is None else starts + wanted
        x, starts = self.by_row((x, starts))
        x, cache, routed = attention(x, starts, self.angles(starts[:, None]), cache)
        return experts(x, None, None, routed)[0], cache

    def embed(self, tokens: jax.Array, starts: jax.Array | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The residual stream before the first layer (B, T, H), and the angles of the positions of `tokens`."""
        positions = jnp.arange(tokens.shape[1])[None]
        angles = self.angles(positions if starts is None else starts[:, None] + positions)
        return self.by_row(self.embedding[...][tokens]), angles

    def cache_layers(self, batch: int, capacity: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtype of the arrays of a cache of `batch` rows with a capacity of `capacity` tokens each."""
        check_int("batch", batch, least=1)
        check_int("capacity", capacity, least=1)
        self.check_rows("batch", batch)
        found = []
        for its in (layer.attention for layer in self.layers):
            sharding = None if self.split is None else self.split.sharding(*its.cache_axes)
            found.append(jax.ShapeDtypeStruct(its.cache_shape(batch, capacity), self.dtype, sharding=sharding))
        return found

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A cache of no tokens, of `cache_layers`."""
        return zeros(self.cache_layers(batch, capacity), self.cache_lengths(batch))

    def cache_lengths(self, batch: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the lengths in a cache of `batch` rows."""
        self.check_rows("batch", check_int("batch", batch, least=1))
        sharding = None if self.split is None else self.split.sharding("token")
        return jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=sharding)

    def by_row[Tree](self, tree: Tree) -> Tree:
        """Arrays whose first axis is of rows of a batch, on the devices of these rows; also while tracing."""
        return tree if self.split is None else self.split.place(tree, "token")

    def put_rows(self, tree: Any) -> Any:
        """Numpy arrays as `by_row` has arrays, by one call."""
        return jax.device_put(tree) if self.split is None else self.by_row(tree)

    def whole[Tree](self, tree: Tree) -> Tree:
        """Arrays, such as tokens that the host reads, on every device; also while tracing."""
        return tree if self.split is None else self.split.place(tree)

    def check_rows(self, name: str, rows: int) -> None:
        """Raises ValueError, naming the argument, for rows of a batch that the mesh does not divide evenly."""
        if self.split is not None:
            self.split.check_rows(name, rows)

    def logits(self, x: jax.Array) -> jax.Array:
        """Next-token logits, float32 (..., vocab_size), of the residual stream (..., H)."""
        check_array("x", x, jnp.floating)
        weights = self.embedding if self.unembedding is None else self.unembedding.weights
        return self.by_row(project(x, weights.get_value(), None, self.final_norm))

    def variables(self) -> Variables:
        """The variables outside layers."""
        found: Variables = {("embedding",): self.embedding, ("final_norm",): self.final_norm.scale}
        return found if self.unembedding is None else found | {("unembedding",): self.unembedding.weights}


@partial(jax.jit, static_argnums=0)
def _run(graphdef: nnx.GraphDef[Any], state: Any, *arguments: Any) -> Any:
    """A sublayer's call. Those that are alike are traced and lowered once: their graphdefs are equal."""
    return nnx.merge(graphdef, state)(*arguments)


# `_run`, computed once more by a backward pass.
_run_twice = jax.jit(jax.checkpoint(_run, static_argnums=0), static_argnums=0)
