"""gpt-oss as a whole model in Flax NNX on jmx: load it, prefill, decode, generate.

    from examples.gpt_oss import Runner, Sampler, load

    runner = Runner(load("path/to/gpt-oss-20b"))
    logits, cache = runner.prefill([[1, 2, 3]])
    logits, cache = runner.decode(Sampler()(logits, 0), cache)

Files, from the bottom up: `flash_prefill.py`, `flash_decode.py`, `attention.py`, `cache.py`, `model.py`, `sampling.py`,
`load.py`, `runner.py`, `text.py`, `generate.py`.
"""

from examples.gpt_oss.cache import Cache
from examples.gpt_oss.load import CONFIGS, RandomSource, from_source, load
from examples.gpt_oss.model import GptOss, MoERecord
from examples.gpt_oss.runner import Runner
from examples.gpt_oss.sampling import Sampler

__all__ = ["CONFIGS", "Cache", "GptOss", "MoERecord", "RandomSource", "Runner", "Sampler", "from_source", "load"]
