"""jmx: a mixture-of-experts layer for Flax whose expert weights stay quantized."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jmx._version import __version__
from jmx.activations import (
    ACTIVATIONS,
    GELU,
    Activation,
    GELUAndMul,
    ReLU,
    ReLU2,
    SiLU,
    SiLUAndMul,
    SwiGLU,
    SwiGLUPerExpert,
    SwiGLUStep,
)
from jmx.backends import register_backend
from jmx.experts import Experts, ShardedExperts
from jmx.explain import Explanation, explain
from jmx.grouping import Groups, group
from jmx.layer import batched_moe, moe
from jmx.numerics.formats import (
    FORMATS,
    MXFP4,
    MXINT4,
    NVFP4,
    BlockScaled,
    Format,
    from_offset_binary,
    pack,
    unpack,
)
from jmx.numerics.quantization import dequantize, quantize
from jmx.numerics.resizing import pad, unpad
from jmx.parallel.split import Split
from jmx.routing import (
    NOWHERE,
    ROUTING_METHODS,
    Custom,
    GroupedTopK,
    Logits,
    Routing,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
    route,
    token_counts,
)
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.select import NoBackendError, Selection, select, use_backend

if TYPE_CHECKING:
    from jmx import checkpoint as checkpoint

__all__ = [
    "ACTIVATIONS",
    "FORMATS",
    "GELU",
    "MXFP4",
    "MXINT4",
    "NOWHERE",
    "NVFP4",
    "ROUTING_METHODS",
    "Activation",
    "BlockScaled",
    "Custom",
    "Environment",
    "Experts",
    "Explanation",
    "Format",
    "GELUAndMul",
    "GroupedTopK",
    "Groups",
    "Logits",
    "NoBackendError",
    "Problem",
    "ReLU",
    "ReLU2",
    "Reason",
    "Rejection",
    "Routing",
    "Selection",
    "ShardedExperts",
    "SiLU",
    "SiLUAndMul",
    "SigmoidTopK",
    "SoftmaxTopK",
    "Split",
    "SqrtSoftplusTopK",
    "SwiGLU",
    "SwiGLUPerExpert",
    "SwiGLUStep",
    "TopKSoftmax",
    "__version__",
    "batched_moe",
    "checkpoint",
    "dequantize",
    "explain",
    "from_offset_binary",
    "group",
    "moe",
    "pack",
    "pad",
    "quantize",
    "register_backend",
    "route",
    "select",
    "token_counts",
    "unpack",
    "unpad",
    "use_backend",
]


def __getattr__(name: str) -> ModuleType:
    """`jmx.checkpoint`, imported when first used: it imports Orbax, which takes as long as importing Flax."""
    if name == "checkpoint":
        return importlib.import_module("jmx.checkpoint")
    raise AttributeError(f"module 'jmx' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
