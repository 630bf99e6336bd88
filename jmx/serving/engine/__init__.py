"""The engine: a model that serves many requests at once, by steps over a paged cache."""

from jmx.serving.engine.cache_size import automatic_cache_tokens
from jmx.serving.engine.engine import Engine
from jmx.serving.engine.guide import Guides
from jmx.serving.engine.limits import Limits
from jmx.serving.engine.programs import begin_programs
from jmx.serving.engine.request import FinishReason, Generate, Output, TokenLogProbabilities

__all__ = [
    "Engine",
    "FinishReason",
    "Generate",
    "Guides",
    "Limits",
    "Output",
    "TokenLogProbabilities",
    "automatic_cache_tokens",
    "begin_programs",
]
