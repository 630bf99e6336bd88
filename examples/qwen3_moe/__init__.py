"""Qwen3-MoE as a whole model in Flax NNX on jmx: load it, prefill, decode, generate.

    from examples.qwen3_moe import Runner, Sampler, load

    runner = Runner(load("path/to/Qwen3-30B-A3B-NVFP4"))
    logits, cache = runner.prefill([[1, 2, 3]])
    logits, cache = runner.decode(Sampler()(logits, 0), cache)

What models share is in `examples.common`. The files of this one, from the bottom up: `model.py`,
`load.py`, `generate.py`.
"""

from examples.common.cache import Cache
from examples.common.model import MoERecord
from examples.common.runner import Runner
from examples.common.sampling import Sampler
from examples.qwen3_moe.load import RandomSource, from_source, load
from examples.qwen3_moe.model import Qwen3MoE
from jmx.checkpoint.model_configs.qwen3_moe import Config, read_config

__all__ = [
    "Cache",
    "Config",
    "MoERecord",
    "Qwen3MoE",
    "RandomSource",
    "Runner",
    "Sampler",
    "from_source",
    "load",
    "read_config",
]
