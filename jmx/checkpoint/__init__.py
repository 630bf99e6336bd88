"""Checkpoints: a package for each family of files, whose reader gives experts without decoding them.

Modules are imported when they are first used, so that `import jmx` loads neither Orbax nor any reader.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jmx.checkpoint import compressed_tensors, gpt_oss, model_configs, orbax, peft, quantizing, shards
    from jmx.checkpoint.reader import ExpertLayer, Reader
    from jmx.checkpoint.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "ExpertLayer",
    "Reader",
    "compressed_tensors",
    "gpt_oss",
    "model_configs",
    "orbax",
    "peft",
    "quantizing",
    "shards",
]

# Names that are not modules -> the module that defines them.
_DEFINED_IN = {"CheckpointError": "shards", "ExpertLayer": "reader", "Reader": "reader"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_DEFINED_IN.get(name, name)}")
    found = getattr(module, name) if name in _DEFINED_IN else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
