"""Generate text, or token ids, with a gpt-oss model: `python examples/gpt_oss/generate.py --help`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script, from anywhere; this folder's own names must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jmx
from examples.common import command
from examples.common.command import Family
from examples.gpt_oss.load import RandomSource, from_source, load
from examples.gpt_oss.model import GptOss
from jmx.checkpoint.model_configs.gpt_oss import PUBLISHED, Config, read_config

TINY = Path(__file__).resolve().parent / "tiny"


def random_model(config: Config, seed: int, format: jmx.Format | None = None, **made: Any) -> GptOss:
    return from_source(RandomSource(config, seed, format or jmx.MXFP4), **made)


FAMILY = Family(
    description="Generate with a gpt-oss model whose experts stay as their checkpoint has them.",
    configs=PUBLISHED,
    default=TINY,
    prompt="Licensed under the Apache License",
    read_config=partial(read_config, quant_methods=None),
    load=load,
    random=random_model,
)

parse_arguments = partial(command.parse_arguments, FAMILY)
main = partial(command.main, FAMILY)

if __name__ == "__main__":
    sys.exit(main())
