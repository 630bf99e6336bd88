"""Names and shapes of gpt-oss' tensors: neutral ones, and those in the files of the two published forms.

Neutral names are jmx's: those of `Experts.arrays` for the experts, and plain ones for the rest. A tensor of a file
holds one neutral tensor, or several that are concatenated along the first axis (q, k and v in the original form).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jmx.checkpoint.model_configs.gpt_oss import Config
from jmx.checkpoint.shards import CheckpointError, Tensor
from jmx.numerics.formats import MXFP4
from jmx.util.checks import check_instance, check_one_of, check_str

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """The tensor names of a published form.

    Args:
        name: "hf" or "original".
        layer_prefix: of a layer's tensors, with `{}` for its number.
        top: neutral name -> name in the file, of tensors outside layers.
        layer: neutral name -> name in the file after the prefix. Neutral tensors with the same name are concatenated.
    """

    name: str
    layer_prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str]


Names = dict[str, tuple[str, str]]  # neutral name -> names in the forms "hf" and "original"


def _linear(name: str, hf: str, original: str) -> Names:
    """Names of the tensors of a linear map, from those of its module."""
    return {f"{name}_{part}": (f"{hf}.{part}", f"{original}.{part}") for part in ("weight", "bias")}


def _experts(role: str, hf: str, original: str) -> Names:
    """Names of the experts' tensors of "gate_up" or "down"."""
    return {
        f"{role}_values": (f"{hf}_blocks", f"{original}_weight.blocks"),
        f"{role}_scales": (f"{hf}_scales", f"{original}_weight.scales"),
        f"{role}_bias": (f"{hf}_bias", f"{original}_bias"),
    }


_TOP: Names = {
    "embedding": ("model.embed_tokens.weight", "embedding.weight"),
    "final_norm": ("model.norm.weight", "norm.scale"),
    "unembedding": ("lm_head.weight", "unembedding.weight"),
}
_LAYER: Names = {
    "input_norm": ("input_layernorm.weight", "attn.norm.scale"),
    **_linear("q", "self_attn.q_proj", "attn.qkv"),
    **_linear("k", "self_attn.k_proj", "attn.qkv"),
    **_linear("v", "self_attn.v_proj", "attn.qkv"),
    "sinks": ("self_attn.sinks", "attn.sinks"),
    **_linear("o", "self_attn.o_proj", "attn.out"),
    "post_attention_norm": ("post_attention_layernorm.weight", "mlp.norm.scale"),
    **_linear("router", "mlp.router", "mlp.gate"),
    **_experts("gate_up", "mlp.experts.gate_up_proj", "mlp.mlp1"),
    **_experts("down", "mlp.experts.down_proj", "mlp.mlp2"),
}


def _form(name: str, layer_prefix: str, column: int) -> Form:
    top, layer = ({neutral: names[column] for neutral, names in table.items()} for table in (_TOP, _LAYER))
    return Form(name, layer_prefix, top, layer)


HF = _form("hf", "model.layers.{}.", 0)
ORIGINAL = _form("original", "block.{}.", 1)
FORMS = {form.name: form for form in (HF, ORIGINAL)}

_IN_LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(\w+)")  # of neutral names

EXPERT_NAMES = ("gate_up_values", "gate_up_scales", "gate_up_bias", "down_values", "down_scales", "down_bias")


def layer_name(layer: int, name: str) -> str:
    """The neutral name, in the whole model, of a layer's tensor."""
    return f"layers.{layer}.{name}"


def top_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of the neutral tensors outside layers."""
    vocab, hidden = config.vocab_size, config.hidden_size
    return {"embedding": (vocab, hidden), "final_norm": (hidden,), "unembedding": (vocab, hidden)}


def dense_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of a layer's neutral tensors except its experts."""
    hidden = config.hidden_size
    rows = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    rows = {name: heads * config.head_dim for name, heads in rows.items()}
    shapes: dict[str, Shape] = {"input_norm": (hidden,), "post_attention_norm": (hidden,)}
    shapes |= {f"{name}_weight": (size, hidden) for name, size in rows.items()}
    shapes |= {"sinks": (config.num_attention_heads,), "o_weight": (hidden, rows["q"])}
    if config.attention_bias:
        shapes |= {f"{name}_bias": (size,) for name, size in (rows | {"o": hidden}).items()}
    return shapes | {"router_weight": (config.num_experts, hidden), "router_bias": (config.num_experts,)}


def layer_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of a layer's neutral tensors, packed ones as `jmx.numerics.formats` packs them."""
    hidden, experts, shapes = config.hidden_size, config.num_experts, dense_shapes(config)
    sizes = {"gate_up": (2 * config.intermediate_size, hidden), "down": (hidden, config.intermediate_size)}
    for role, (size, contracted) in sizes.items():
        packed = MXFP4.abstract((experts, size, contracted), packed=True)
        shapes |= {f"{role}_{name}": getattr(packed, name).shape for name in MXFP4.arrays}
        shapes[f"{role}_bias"] = (experts, size)
    return shapes


def shapes(config: Config) -> dict[str, Shape]:
    """Shapes of all neutral tensors of a model, by their name in it."""
    layer = layer_shapes(config)
    layers = {layer_name(i, name): shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    return top_shapes(config) | layers


def tensor_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of all tensors outside the experts, by their neutral name in the model, such as "layers.0.q_weight"."""
    check_instance("config", config, Config)
    layer = dense_shapes(config)
    layers = {layer_name(i, name): shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    return top_shapes(config) | layers


def file_name(name: str, form: str = "hf") -> str:
    """The name in a form's files of the tensor with a neutral name.

    "layers.0.q_weight" is "model.layers.0.self_attn.q_proj.weight" in the Hugging Face form ("hf"), and in the original
    form ("original") some rows of "block.0.attn.qkv.weight".

    Raises:
        ValueError: an unknown `name` or `form`.
    """
    names = FORMS[check_one_of("form", form, FORMS)]
    match = _IN_LAYER.fullmatch(check_str("name", name))
    layer, short_name = ("", name) if match is None else (names.layer_prefix.format(match[1]), match[2])
    known = names.top if match is None else names.layer
    if short_name not in known:
        raise ValueError(f"`name` (={name!r}) must be a neutral name, such as 'embedding' or 'layers.0.q_weight'")
    return layer + known[short_name]


def dtypes(name: str) -> tuple[str, ...]:
    """Dtypes that the neutral tensor `name` may have, in safetensors' spelling."""
    if name.endswith(("_values", "_scales")):
        return ("U8",)
    return ("BF16", "F32") if name.endswith(("_norm", "sinks")) else ("BF16",)


@dataclass(frozen=True)
class Member:
    """A neutral tensor inside a tensor of a file.

    Args:
        name: its neutral name in the whole model.
        shape: its neutral shape.
        start: its first row in the file's tensor.
    """

    name: str
    shape: Shape
    start: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor that a form's files hold.

    Args:
        name: in the file.
        shape: in the file.
        dtypes: those that are allowed.
        members: the neutral tensors in it, in order.
    """

    name: str
    shape: Shape
    dtypes: tuple[str, ...]
    members: tuple[Member, ...]


def file_tensors(form: Form, config: Config) -> list[FileTensor]:
    """Every tensor of a checkpoint in `form`, layer by layer."""

    def group(names: Mapping[str, str], shapes: Mapping[str, Shape], prefix: str, neutral: str) -> list[FileTensor]:
        grouped: dict[str, list[Member]] = {}
        for name, its_file_name in names.items():
            if name in shapes:
                members = grouped.setdefault(prefix + its_file_name, [])
                start = sum(member.shape[0] for member in members)
                members.append(Member(neutral + name, shapes[name], start))
        return [
            FileTensor(name, _file_shape(members), dtypes(members[0].name), tuple(members))
            for name, members in grouped.items()
        ]

    top = group(form.top, top_shapes(config), "", "")
    shapes = layer_shapes(config)
    layers = [
        group(form.layer, shapes, form.layer_prefix.format(i), layer_name(i, ""))
        for i in range(config.num_hidden_layers)
    ]
    return [*top[:1], *(tensor for layer in layers for tensor in layer), *top[1:]]


def _file_shape(members: list[Member]) -> Shape:
    """The shape in files, which split packed values into blocks: (..., N, K / 32, 16)."""
    rows, *rest = sum(member.shape[0] for member in members), *members[0].shape[1:]
    if members[0].name.endswith("_values"):
        *lead, size = rest
        block = MXFP4.block_size * MXFP4.element_bits // 8
        return (rows, *lead, size // block, block)
    return (rows, *rest)


def detect(directory: Path, found: Mapping[str, Tensor]) -> Form:
    """The form whose names `found` has. CheckpointError if there is none."""
    for form in FORMS.values():
        if form.top["embedding"] in found:
            return form
    names = " or ".join(f"{form.top['embedding']!r} ({form.name})" for form in FORMS.values())
    raise CheckpointError(directory, f"must hold a tensor {names}, but holds {len(found)} others")


def check_layers(directory: Path, found: Mapping[str, Tensor], config: Config) -> None:
    """CheckpointError if `config` has more layers than `found` has tensors: tables of layers might exhaust memory."""
    if config.num_hidden_layers > len(found):
        raise CheckpointError(
            directory,
            f"`num_hidden_layers` (={config.num_hidden_layers}) must fit the tensors, of which there are {len(found)}",
        )


def check(directory: Path, found: Mapping[str, Tensor], expected: list[FileTensor]) -> None:
    """CheckpointError unless `found` has every expected tensor in its shape and dtype, and no other."""
    for tensor in expected:
        shape = "(" + ", ".join(map(str, tensor.shape)) + ")"
        wanted = f"must be {' or '.join(tensor.dtypes)} {shape}"
        if tensor.name not in found:
            raise CheckpointError(directory, f"tensor {tensor.name!r} is missing; it {wanted}")
        there = found[tensor.name]
        if there.shape != tensor.shape or there.dtype not in tensor.dtypes:
            raise CheckpointError(there.file, f"tensor {tensor.name!r} is {there.dtype} {there.shape}, but {wanted}")
        if math.prod(there.shape) == 0:
            raise CheckpointError(there.file, f"tensor {tensor.name!r} is empty")
    names = {tensor.name for tensor in expected}
    for name, there in found.items():
        if name not in names:
            raise CheckpointError(there.file, f"tensor {name!r} is not one of a model with this config")
