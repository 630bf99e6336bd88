"""Saves a model that a mesh divides, and kills itself meanwhile: python killed_save.py CHECKPOINT FOLDER STAGE

FOLDER/earlier is a model that was saved before, whose weights FOLDER/model has twice as large. STAGE: "writing", as
soon as Orbax has written a file of arrays; "written", before the directory is renamed; "renamed", after that.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

from flax import nnx  # noqa: E402

from jmx.models import load, save  # noqa: E402
from jmx.util.atomic_files import writing  # noqa: E402

checkpoint, folder, stage = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
model = load(checkpoint, mesh=jax.make_mesh((2, 2), ("dp", "ep")))
save(folder / "earlier", model)
for _, variable in nnx.to_flat_state(nnx.state(model)):
    if jax.numpy.issubdtype(variable.get_value().dtype, jax.numpy.floating):
        variable.set_value(variable.get_value() * 2)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def when_a_file_is_there() -> None:
    while not any(file.is_file() and "d" in file.parts[-2] for file in folder.rglob(".*model*/**/d/*")):
        pass
    die()


rename = writing._rename_new


def renaming(new: Path, path: Path) -> None:
    if stage == "written":
        die()
    rename(new, path)
    die()


if stage == "writing":
    threading.Thread(target=when_a_file_is_there, daemon=True).start()
writing._rename_new = renaming
save(folder / "model", model)
