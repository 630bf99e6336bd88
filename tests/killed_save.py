"""Saves models that a mesh divides, and kills itself in the second save: python killed_save.py CHECKPOINT FOLDER STAGE

FOLDER/earlier has the weights of the checkpoint, FOLDER/model other ones. STAGE: "writing", as soon as Orbax has
written a file of arrays; "written", before the directory is renamed; "renamed", right after that.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.models import load, save
from jmx.util.atomic_files import writing

jax.config.update("jax_num_cpu_devices", 4)
checkpoint, folder, stage = sys.argv[1], Path(sys.argv[2]), sys.argv[3]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing() -> None:
    while not any(file.is_file() for file in folder.glob(".model.*/new/*/*/d/*")):
        pass
    die()


rename = writing._rename_new


def renamed(new: Path, path: Path) -> None:
    if stage == "written":
        die()
    rename(new, path)
    die()


model = load(checkpoint, dtype=jnp.float32, mesh=jax.make_mesh((2, 2), ("dp", "ep")))
save(folder / "earlier", model)
for _, variable in nnx.to_flat_state(nnx.state(model)):
    if variable.get_value().dtype == jnp.float32:
        variable.set_value(variable.get_value() * 2)
writing._rename_new = renamed
if stage == "writing":
    threading.Thread(target=die_while_writing).start()
save(folder / "model", model)
