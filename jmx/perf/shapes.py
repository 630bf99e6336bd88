"""Layers of published models by their sizes, with random weights and routing: what is measured and tuned."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmx.activations import Activation, SiLUAndMul, SwiGLU
from jmx.checkpoint.model_configs import deepseek_v3, gpt_oss, qwen3_moe
from jmx.experts import Experts
from jmx.numerics import formats
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.routing import Method, TopKSoftmax
from jmx.selection.problem import Problem

_STATIC_RANGE = 8.0  # that static scales of inputs cover: tokens are standard normal, and h is nearly


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer, and what it computes."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    method: Method
    activation: Activation
    gate_up_order: str | None
    bias: bool
    format: str = formats.MXFP4.name
    input_format: str | None = None

    def in_formats(self, pair: str) -> "Shape":
        """This shape in other formats: "WEIGHTS" or "WEIGHTS:INPUTS"."""
        weights, inputs = split_formats(pair)
        return dataclasses.replace(self, format=weights, input_format=inputs)

    def problem(self, num_tokens: int, layout: str) -> Problem:
        """A call on bfloat16 tokens, with weights in `layout`."""
        return Problem(
            num_tokens=num_tokens,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.method.top_k,
            dtype="bfloat16",
            format=self.format,
            input_format=self.input_format,
            activation=self.activation,
            gate_up_order=self.gate_up_order,
            bias=self.bias,
            layout=layout,
        )

    def experts(self, key: jax.Array) -> Experts:
        """Random weights of one layer, and static scales where its inputs have them."""
        sizes = (self.num_experts, self.hidden_size, self.intermediate_size)
        format = formats.FORMATS[self.format]
        experts = Experts.random(key, *sizes, gate_up_order=self.gate_up_order, format=format, bias=self.bias)
        if self.input_format is None or not INPUT_FORMATS[self.input_format].static:
            return experts
        scale = jnp.float32(_STATIC_RANGE / INPUT_FORMATS[self.input_format].largest)
        return experts.with_inputs(self.input_format, scale, scale)


def split_formats(pair: str) -> tuple[str, str | None]:
    """The names in "WEIGHTS" or "WEIGHTS:INPUTS": of the weights' format, and of the inputs' (None: of 16 bits).

    Whether formats have these names is not checked.
    """
    weights, colon, inputs = pair.partition(":")
    return weights, inputs if colon else None


def _gpt_oss(config: gpt_oss.Config) -> Shape:
    activation = SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)
    sizes = config.num_experts, config.hidden_size, config.intermediate_size
    return Shape(*sizes, TopKSoftmax(config.top_k), activation, "interleaved", True)


def _qwen3(config: qwen3_moe.Config) -> Shape:
    sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
    return Shape(*sizes, TopKSoftmax(config.top_k), SiLUAndMul(), "concatenated", False)


def _deepseek(config: deepseek_v3.Config) -> Shape:
    sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
    return Shape(*sizes, config.routing, SiLUAndMul(), "concatenated", False)


_GPT_OSS_20B = _gpt_oss(gpt_oss.PUBLISHED["gpt-oss-20b"])
_SMALL = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 256, "method": TopKSoftmax(2)}
MODELS = {
    "small": dataclasses.replace(_GPT_OSS_20B, **_SMALL),
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-120b": _gpt_oss(gpt_oss.PUBLISHED["gpt-oss-120b"]),
    "qwen3-30b-a3b": _qwen3(qwen3_moe.PUBLISHED["qwen3-30b-a3b"]),
    "deepseek-v3": _deepseek(deepseek_v3.PUBLISHED["deepseek-v3"]),
}

ROUTINGS = {
    "uniform": "every expert is as likely as every other",
    "zipf": "the n-th most popular expert of a layer is drawn in proportion to 1/n",
    "half": "half of the tokens go to one expert, among others",
    "top1": "uniform, with a single expert a token",
}


def routed_shape(model: str, routing: str) -> Shape:
    """The shape of a key of `MODELS` under a key of `ROUTINGS`, of which "top1" changes what is computed."""
    shape = MODELS[model]
    return shape if routing != "top1" else dataclasses.replace(shape, method=dataclasses.replace(shape.method, top_k=1))


def draw_logits(key: jax.Array, shape: tuple[int, int, int], kind: str) -> jax.Array:
    """Random router logits, float32 (L, T, E), each layer with its own popular experts; see `ROUTINGS`."""
    noise_key, rank_key, token_key = jax.random.split(key, 3)
    num_layers, num_tokens, num_experts = shape
    rank = jax.vmap(lambda key: jax.random.permutation(key, num_experts))(jax.random.split(rank_key, num_layers))
    if kind == "zipf":  # the largest of log p + Gumbel noise is a draw from p; the k largest are k draws
        return jax.random.gumbel(noise_key, shape) - jnp.log1p(rank)[:, None]
    logits = jax.random.normal(noise_key, shape)
    if kind == "half":
        taken = jax.random.permutation(token_key, num_tokens) < (num_tokens + 1) // 2
        logits += 8.0 * (taken[:, None] & (rank == 0)[:, None])  # 8 standard deviations
    return logits
