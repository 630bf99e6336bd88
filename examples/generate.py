"""Text from a whole model, token by token: `python examples/generate.py [DIRECTORY [PROMPT]]`."""

import sys
from pathlib import Path

from tokenizers import Tokenizer

from jmx.models import Runner, Sampler, load

directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "gpt_oss_demo"
prompt = sys.argv[2] if len(sys.argv) > 2 else "And God said"

tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
runner = Runner(load(directory))  # experts stay quantized
ids = tokenizer.encode(prompt, add_special_tokens=False).ids
sampler = Sampler(temperature=0.8, top_p=0.95, seed=0)
new = [int(token) for (token,) in runner.generate([ids], sampler, max_new_tokens=32)]
print(prompt + tokenizer.decode(new))
