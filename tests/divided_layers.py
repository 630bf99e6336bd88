"""Programs of layers that several H200s divide, compiled without having one."""

from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.ffi.library import load
from jmx.ffi.peer import library
from jmx.parallel import peer
from jmx.perf.shapes import Shape


def layer_over_h200s(shape: Shape, num_gpus: int, num_tokens: int, **of_split: Any) -> str:
    """The entry of the compiled program of a layer, whose experts and `num_tokens` tokens so many H200s divide.

    `of_split`: further arguments of `jmx.Split`, such as `exchange`.
    """
    mesh = aot.mesh_of("h200", num_gpus)
    (axis,) = mesh.axis_names
    split = jmx.Split(expert=axis, tokens=axis, mesh=mesh, **of_split)

    def call(x: Any, logits: Any, experts: jmx.Experts) -> jax.Array:
        return jmx.moe(x, jmx.Logits(logits, shape.method), experts, activation=shape.activation, split=split)

    experts = jax.eval_shape(lambda key: shape.experts(key).prepare("mosaic_sm90"), jax.random.key(0))
    x = jax.ShapeDtypeStruct((num_tokens, shape.hidden_size), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((num_tokens, shape.num_experts), jnp.float32)
    text = aot.program_over(mesh, call, x, logits, experts)
    return text[text.index("ENTRY ") :]


def lower_peer(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *modules: Any) -> None:
    """Lets programs for so many GPUs, which are not here, call the kernels of `peer`, which are those of `modules`."""
    library.register_handlers(load(library._PATH, {}))
    for module in modules:
        monkeypatch.setattr(module, "devices_of", lambda context, axes: np.arange(num_gpus))
    monkeypatch.setattr(peer, "fault", lambda *_: None)
