"""Generate text, or token ids, with a Qwen3-MoE model: `python examples/qwen3_moe/generate.py --help`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script, from anywhere; this folder's own names must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jmx
from examples.common import command
from examples.common.command import Family
from examples.qwen3_moe.load import RandomSource, from_source, load
from examples.qwen3_moe.model import Qwen3MoE
from jmx.checkpoint.model_configs.qwen3_moe import PUBLISHED, Config, read_config


def random_model(config: Config, seed: int, format: jmx.Format | None = None, **made: Any) -> Qwen3MoE:
    return from_source(RandomSource(config, seed, format or jmx.MXFP4), **made)


FAMILY = Family(
    description="Generate with a Qwen3-MoE model whose experts stay in their checkpoint's format.",
    configs=PUBLISHED,
    read_config=read_config,
    load=load,
    random=random_model,
)

parse_arguments = partial(command.parse_arguments, FAMILY)
main = partial(command.main, FAMILY)

if __name__ == "__main__":
    sys.exit(main())
