"""Whole models in Flax NNX on jmx: load one, prefill, decode, generate.

    import jmx.models

    runner = jmx.models.Runner(jmx.models.load("path/to/gpt-oss-20b"))
    logits, cache = runner.prefill([[1, 2, 3]])
    logits, cache = runner.decode(jmx.models.Sampler()(logits, 0), cache)

A family of models is a module of `families`. What families share is, from the bottom up: `layers`, `rope`, `attention`,
`block`, `decoder`; `sources` and `loading` fill a model with weights, and `runner` runs one, by `programs` that are
compiled side by side and kept in a `ProgramStore`.
"""

from jmx.models.block import MoERecord
from jmx.models.cache import Cache
from jmx.models.decoder import Model
from jmx.models.families import FAMILIES
from jmx.models.families.choice import family_of
from jmx.models.families.deepseek_v3 import DeepseekV3
from jmx.models.families.family import Family
from jmx.models.families.glm4_moe import Glm4MoE
from jmx.models.families.gpt_oss import GptOss
from jmx.models.families.mixtral import Mixtral
from jmx.models.families.olmoe import OLMoE
from jmx.models.families.qwen2_moe import Qwen2MoE
from jmx.models.families.qwen3_moe import Qwen3MoE
from jmx.models.generation import Generation
from jmx.models.hub import find
from jmx.models.loading import from_source, load, random_source
from jmx.models.logprobs import LogProbabilities
from jmx.models.model_split import ModelSplit
from jmx.models.penalties import TokenCounts
from jmx.models.program_store import ProgramStore
from jmx.models.runner import Runner
from jmx.models.sampling import Sampler
from jmx.models.saving import restore, save

__all__ = [
    "FAMILIES",
    "Cache",
    "DeepseekV3",
    "Family",
    "Generation",
    "Glm4MoE",
    "GptOss",
    "LogProbabilities",
    "Mixtral",
    "MoERecord",
    "Model",
    "ModelSplit",
    "OLMoE",
    "ProgramStore",
    "Qwen2MoE",
    "Qwen3MoE",
    "Runner",
    "Sampler",
    "TokenCounts",
    "family_of",
    "find",
    "from_source",
    "load",
    "random_source",
    "restore",
    "save",
]
