"""gpt-oss as a whole model in Flax NNX on jmx: load it, prefill, decode, generate.

    from examples.gpt_oss import Runner, Sampler, load

    runner = Runner(load("path/to/gpt-oss-20b"))
    logits, cache = runner.prefill([[1, 2, 3]])
    logits, cache = runner.decode(Sampler()(logits, 0), cache)

What models share is in `examples.common`. The files of this one, from the bottom up: `rope.py`, `model.py`,
`load.py`, `generate.py`.
"""

from examples.common.cache import Cache
from examples.common.model import MoERecord
from examples.common.runner import Runner
from examples.common.sampling import Sampler
from examples.gpt_oss.load import RandomSource, from_source, load
from examples.gpt_oss.model import GptOss

__all__ = ["Cache", "GptOss", "MoERecord", "RandomSource", "Runner", "Sampler", "from_source", "load"]
