"""Reading a gpt-oss checkpoint: headers are checked first, then tensors are read one by one to the device."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.assembly import experts_of
from jmx.checkpoint.gpt_oss import tensor_names
from jmx.checkpoint.gpt_oss.storage import open_store
from jmx.checkpoint.gpt_oss.tensor_names import EXPERT_NAMES, layer_name
from jmx.checkpoint.model_configs.gpt_oss import read_config
from jmx.checkpoint.placement import Index, ShardingLike, send
from jmx.checkpoint.progress import CountsBytes
from jmx.checkpoint.read_ahead import ReadsAhead
from jmx.checkpoint.shards import CheckpointError, Tensor
from jmx.experts import Experts
from jmx.numerics import element_codes
from jmx.numerics.formats import MXFP4, Format
from jmx.util.checks import check_bool, check_int, check_path, check_str
from jmx.util.typing import Array, Shaped


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer's experts, equal in all layers; see `jmx.checkpoint.ExpertLayer`."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    format: Format = MXFP4
    gate_up_order: str = "interleaved"
    has_bias: bool = True


class Reader(CountsBytes, ReadsAhead):
    """A `jmx.checkpoint.Reader` of gpt-oss, in the Hugging Face, the original or the Orbax form (see `convert`).

    The constructor reads config.json and the headers of the files and checks that every tensor is present. Tensors are
    then read one by one, each directly to its device; all forms give the same bits. A directory with the Hugging Face
    form and a folder `original` is read as the former; pass the folder to read the latter.

    Tensors have neutral names, the same for every form; `tensor_shapes(config)` lists them. With E experts, H hidden,
    I intermediate, V vocabulary, Q query heads, N key/value heads of D, all are bfloat16 (norms and sinks may be
    float32), and weights are (out, in), the contracted axis last, as in the files:
        embedding (V, H), final_norm (H,), unembedding (V, H);
        in layer n, after the prefix "layers.n.": input_norm (H,), post_attention_norm (H,), sinks (Q,),
            q_weight (Q D, H), k_weight (N D, H), v_weight (N D, H), o_weight (H, Q D),
            q_bias (Q D,), k_bias (N D,), v_bias (N D,), o_bias (H,) (only where `config.attention_bias`),
            router_weight (E, H), router_bias (E,);
        `experts(n)`: `jmx.Experts` of gate_up (E, 2 I, H) and down (E, H, I) with biases, gate and up interleaved.

    Args:
        path: the directory.

    Attributes:
        config: a `Config`.
        layers: a `Layer` by each layer's number.
        form: "hf", "original" or "orbax".
        store: the tensors, of which it returns views.

    Raises:
        CheckpointError: files that are wrong or broken. It names the file, the tensor and the expectation.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = check_path("path", path)
        self.config = read_config(path)
        self.store = open_store(self.path, self.config)
        self.form = self.store.form
        config = self.config
        layer = Layer(config.num_experts, config.hidden_size, config.intermediate_size)
        self.layers: Mapping[int, Layer] = dict.fromkeys(range(config.num_hidden_layers), layer)
        self._shapes = tensor_names.shapes(config)
        self._dense = tensor_names.tensor_shapes(config)

    def dense(self, name: str, sharding: ShardingLike = None) -> Shaped[Array, "..."]:
        """A tensor outside the experts, by its neutral name (see the class). `sharding` as in `experts`."""
        if check_str("name", name) not in self._dense:
            known = "a tensor outside the experts, such as 'embedding' or 'layers.0.router_weight'"
            raise ValueError(f"`name` (={name!r}) must be {known}")
        return jax.block_until_ready(self._send(name, name, sharding))

    def top(self, sharding: ShardingLike = None) -> dict[str, Shaped[Array, "..."]]:
        """The arrays outside layers, by name (see the class). `sharding` as in `experts`."""
        names = tensor_names.top_shapes(self.config)
        return {name: jax.block_until_ready(self._send(name, name, sharding)) for name in names}

    def layer(self, layer: int, sharding: ShardingLike = None) -> dict[str, Shaped[Array, "..."]]:
        """A layer's arrays except its experts, by their names after "layers.n.". `sharding` as in `experts`."""
        self._check_layer(layer)
        names = tensor_names.dense_shapes(self.config)
        return jax.block_until_ready({name: self._send(layer_name(layer, name), name, sharding) for name in names})

    def experts(self, layer: int, layout: str = "auto", sharding: ShardingLike = None) -> Experts:
        """A layer's experts, which stay quantized throughout.

        Args:
            layer: its number.
            layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is the one that this machine's backends prefer.
            sharding: a `jax.sharding.Sharding` for all arrays, or a mapping or function that gives one (or None) by
                the array's name in `Experts.arrays`. Only the slices that the devices need are read.
                None is the default device.

        Raises:
            CheckpointError: a scale is 255 (NaN). It names the tensor and the index.
            ValueError: an unknown `layout`, an unknown `layer`, a `sharding` that cannot split an array.
        """
        self._check_layer(layer)

        def read() -> dict[str, Shaped[Array, "E ..."]]:
            arrays = {name: self._send(layer_name(layer, name), name, sharding) for name in EXPERT_NAMES}
            return jax.block_until_ready(arrays)

        return experts_of(read, MXFP4, "interleaved", layout, sharding)

    def nbytes(self, layer: int | None = None) -> int:
        """Bytes of all tensors, or of one layer's experts."""
        if layer is not None:
            self._check_layer(layer)
        names = self._shapes if layer is None else [layer_name(layer, name) for name in EXPERT_NAMES]
        return sum(self._nbytes(name) for name in names)

    def check_scales(self, name: str, part: Shaped[np.ndarray, "..."], index: Index = ()) -> None:
        """CheckpointError if `part`, the slice `index` of the tensor with this neutral name, has a scale of 255."""
        if name.endswith("_scales") and part.max() == element_codes.SCALE_NAN:
            starts = [s.start or 0 for s in index] or [0] * part.ndim
            first = np.argwhere(part == element_codes.SCALE_NAN)[0]
            place = tuple(int(i) + start for i, start in zip(first, starts, strict=True))
            file, its_name = self.store.where(name)
            raise CheckpointError(file, f"tensor {its_name!r} must have no scale of 255 (NaN), but has one at {place}")

    def _nbytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * shards.DTYPES[self.store.dtype(name)].itemsize

    def _check_layer(self, layer: int) -> None:
        if not 0 <= check_int("layer", layer) < self.config.num_hidden_layers:
            raise ValueError(f"`layer` (={layer}) must be 0 to {self.config.num_hidden_layers - 1}")

    def _stored(self, item: int | str) -> list[Tensor]:
        names = [item] if isinstance(item, str) else [layer_name(item, name) for name in EXPERT_NAMES]
        return [tensor for name in names if (tensor := self.store.stored(name)) is not None]

    def _send(self, name: str, short_name: str, sharding: ShardingLike) -> Shaped[Array, "..."]:
        view = self.store.view(name)
        array = send(short_name, view, sharding, partial(self.check_scales, name))
        self._advance(view.nbytes)
        return array


def load(
    path: str | os.PathLike[str],
    layer: int = 0,
    layout: str = "auto",
    sharding: ShardingLike = None,
    progress: bool = False,
) -> Experts:
    """The experts of one layer of a gpt-oss checkpoint, 4-bit from disk to device.

    Args:
        path: a directory, as in `Reader`.
        layer, layout, sharding: as in `Reader.experts`.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken, of any layer. It names the file, the tensor and the
            expectation.
        ValueError: as `Reader.experts`.
    """
    check_bool("progress", progress)
    reader = Reader(path)
    with reader.progress(progress, reader.nbytes(layer) if progress else 0):
        return reader.experts(layer, layout, sharding)
