"""One of two processes whose devices share a layer: `python rebalancing_process.py PROCESS PORT`.

They rebalance it three times: with the same placement, with different ones, and process 1 alone. Prints what came of
each: the error if there was one, and the placement that the layer has then.
"""

import os
import sys
import time

import jax
import numpy as np

import jmx
from jmx.parallel import PlacedExperts, Placement, rebalance

process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

TABLES = {
    "same": [[5, 4, 3, 2, 1, 0, 5, -1]] * 2,
    "different": [[1, 2, 3, 4, 5, 0, -1, -1], [0, 5, 4, 3, 2, 1, -1, -1]],
}
experts = jax.tree.map(np.asarray, jmx.Experts.random(jax.random.key(0), 6, 32, 32, gate_up_order=None))
first = Placement.identity(6, num_ranks=4, spare_experts=2)
layers = [PlacedExperts.of(experts, first).split(jax.make_mesh((4,), ("ep",)), "ep")]


def report(step: str, error: str) -> None:
    """Prints what came of a step, with the placement whose experts the slots have."""
    table = np.asarray(layers[0].placement.expert_of_slot)  # computing with it on the devices could wait for ever
    for name, array in layers[0].experts.arrays().items():
        for shard in array.addressable_shards:
            for expert, slot in zip(table[shard.index[0]], np.asarray(shard.data), strict=True):
                assert expert < 0 or np.array_equal(slot, experts.arrays()[name][expert]), name
    print(step, table.tolist(), error, flush=True)


def attempt(step: str, table: list[int], timeout_s: float) -> None:
    after = Placement.stack([Placement.of(np.array(table), num_experts=6, num_ranks=4)])
    error = ""
    try:
        rebalance(layers, after, timeout_s=timeout_s)
    except (RuntimeError, TimeoutError) as e:
        error = f"{type(e).__name__}: {e}"
    report(step, error)


for step, tables in TABLES.items():
    attempt(step, tables[process], 60)
if process == 0:
    time.sleep(600)  # it is killed
attempt("alone", TABLES["different"][1], 2)
os._exit(0)  # the transfer that never ends would hold up the interpreter's own exit
