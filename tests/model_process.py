"""One of two processes whose devices share a model: `python model_process.py PROCESS PORT CHECKPOINT`.

Prints, as JSON, how many bytes of tensors it read, and the tokens that it generates.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jmx.checkpoint import placement
from jmx.checkpoint.gpt_oss import reader
from jmx.models import Runner, Sampler, load

process, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
read = 0


class Counted:
    """A view that counts the bytes which are read of it."""

    def __init__(self, view: Any):
        self.shape, self.ndim, self._view = view.shape, view.ndim, view

    def __getitem__(self, index: Any) -> Any:
        global read
        part = self._view[index]
        read += part.nbytes
        return part


def counted(name: str, view: Any, *arguments: Any) -> jax.Array:
    return placement.send(name, Counted(view), *arguments)


reader.send = counted
model = load(path, dtype=jnp.float32, mesh=jax.make_mesh((2,), ("ep",)))
tokens = Runner(model).generate([[1, 2, 3], [4, 5]], Sampler(), 4)
print(json.dumps({"read": read, "tokens": [its.tolist() for its in tokens]}), flush=True)
jax.distributed.shutdown()
