"""Shapes and file names of the tensors that decoders in the Hugging Face form have in common.

Neutral names are those of `jmx.checkpoint.gpt_oss.Reader`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from jmx.models.attention.module import AttentionConfig, Norms, norm_sizes
from jmx.models.config import Config
from jmx.models.sources.protocol import Shape, in_layer

# In files, names in a layer follow "model.layers.N.".
TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
NORM_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
}
ATTENTION_NAMES = {
    **{f"{p}_{kind}": f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")},
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_MLP = ("gate", "up", "down")
MLP_NAMES = {f"{p}_weight": f"mlp.{p}_proj.weight" for p in _MLP}
LAYER_NAMES = NORM_NAMES | ATTENTION_NAMES | MLP_NAMES | {"router_weight": "mlp.gate.weight"}


class PredictsFurther(Config, Protocol):
    """A configuration with layers that predict further tokens."""

    @property
    def num_nextn_predict_layers(self) -> int: ...


def top_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of the arrays outside layers, by neutral name."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"embedding": table, "final_norm": (config.hidden_size,)}
    return shapes if config.tie_word_embeddings else shapes | {"unembedding": table}


def norm_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of the norms before attention and before the experts."""
    return dict.fromkeys(NORM_NAMES, (config.hidden_size,))


def attention_shapes(
    config: AttentionConfig, *, qkv_bias: bool = False, out_bias: bool = False, norms: Norms | None = None
) -> dict[str, Shape]:
    """Shapes of the arrays of `Attention` with these arguments, by neutral name."""
    hidden, dim = config.hidden_size, config.head_dim
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    rows = {name: count * dim for name, count in heads.items()}
    shapes: dict[str, Shape] = {f"{name}_weight": (size, hidden) for name, size in rows.items()}
    shapes["o_weight"] = (hidden, rows["q"])
    biases = (rows if qkv_bias else {}) | ({"o": hidden} if out_bias else {})
    sizes = zip(("q_norm", "k_norm"), norm_sizes(config, norms), strict=True)
    return (
        shapes
        | {f"{name}_bias": (size,) for name, size in biases.items()}
        | {name: (size,) for name, size in sizes if size is not None}
    )


def mlp_shapes(hidden: int, intermediate: int) -> dict[str, Shape]:
    """Shapes of the arrays of one MLP for all tokens, by neutral name."""
    wide = (intermediate, hidden)
    return {"gate_weight": wide, "up_weight": wide, "down_weight": wide[::-1]}


def shared_names(module: str) -> dict[str, str]:
    """Names in files of shared experts, which are `module` of a layer."""
    return {f"shared_{p}_weight": f"{module}.{p}_proj.weight" for p in _MLP}


def shared_shapes(hidden: int, intermediate: int, *, gate: bool = False) -> dict[str, Shape]:
    """Shapes of the arrays of `SharedExperts`, by neutral name."""
    shapes = {f"shared_{name}": shape for name, shape in mlp_shapes(hidden, intermediate).items()}
    return shapes | ({"shared_expert_gate_weight": (1, hidden)} if gate else {})


def whole_model(
    config: Config, attention: Mapping[str, Shape], beside_experts: Mapping[str, Shape] = MappingProxyType({})
) -> dict[str, Shape]:
    """Shapes of all arrays outside the experts, by neutral name.

    Args:
        config: of the model; layers in `dense_layers` have an MLP, and others a router without bias.
        attention: shapes of each layer's attention.
        beside_experts: shapes of what else a layer with experts has.
    """
    router = {"router_weight": (config.num_experts, config.hidden_size)}
    dense = mlp_shapes(config.hidden_size, config.intermediate_size)
    found = top_shapes(config)
    for number in range(config.num_hidden_layers):
        rest = dense if number in config.dense_layers else router | {**beside_experts}
        found |= {
            in_layer(number, name): shape for name, shape in (norm_shapes(config) | {**attention, **rest}).items()
        }
    return found


def prediction_layers(config: PredictsFurther) -> tuple[str, ...]:
    """Names in files of the layers after the last one, which predict further tokens."""
    first = config.num_hidden_layers
    return tuple(f"model.layers.{layer}" for layer in range(first, first + config.num_nextn_predict_layers))


def file_name(name: str, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """The name in files of the tensor with a neutral name; `layer_names` are those in a layer."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, inner = name.split(".", 2)
    return f"model.layers.{layer}.{layer_names[inner]}"
