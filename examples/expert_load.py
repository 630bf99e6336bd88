"""A picture of how many tokens go to each expert of each layer: `python examples/expert_load.py [FILE.svg]`."""

import sys
from pathlib import Path

import jax
import numpy as np

import jmx
from jmx import plot
from jmx.models import MoERecord, load

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("expert_load.svg")
if file.exists():
    sys.exit(f"{file} exists: nothing is overwritten")
model = load(Path(__file__).parent / "gpt_oss_demo")
tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(4, 64))


@jax.jit
def loads(model, tokens):
    """Tokens by layer and expert, int32 (L, E)."""
    records: list[MoERecord] = []
    model(tokens, None, model.empty_cache(*tokens.shape).layers, records=records)
    counts = []
    for layer, record in zip(model.layers, records, strict=True):
        routing = jmx.route(jmx.Logits(record.logits, layer.moe.routing))
        counts.append(jmx.token_counts(routing, model.config.num_experts))
    return jax.numpy.stack(counts)


counts = np.asarray(loads(model, tokens))
plot.expert_load(counts).savefig(file)
print(f"{file}: most {counts.max()}, least {counts.min()}")
