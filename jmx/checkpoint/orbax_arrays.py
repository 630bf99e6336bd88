"""A flat dict of arrays, and a note beside them, as one Orbax checkpoint."""

from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError, read_object
from jmx.util.typing import Array, Shaped

# Orbax's own files in a checkpoint, both JSON objects.
CUSTOM_METADATA = "_CHECKPOINT_METADATA"
_TREE = "_METADATA"


class Stored(NamedTuple):
    """What a checkpoint holds: shape and dtype of each array by name, and its custom metadata."""

    arrays: dict[str, jax.ShapeDtypeStruct]
    custom_metadata: Any


def write(path: Path, arrays: Mapping[str, Shaped[Any, "..."]], custom_metadata: dict[str, Any]) -> None:
    """Writes arrays (jax or numpy) and a JSON object to a new checkpoint, which Orbax renames into place when complete.

    An interrupt such as Ctrl-C is raised when Orbax is done: its threads keep writing, and would recreate directories
    that were removed meanwhile.
    """

    def save() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.absolute(), dict(arrays), custom_metadata=custom_metadata)
            checkpointer.wait_until_finished()

    interrupted = None
    with futures.ThreadPoolExecutor(max_workers=1) as thread:  # signals interrupt the main thread alone
        saved = thread.submit(save)
        while not saved.done():
            try:
                futures.wait([saved])
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted
    saved.result()


def describe(path: Path) -> Stored:
    """What the checkpoint at `path` holds, without its arrays. CheckpointError if it is not a flat dict of arrays."""
    if not (path / _TREE).exists():
        raise CheckpointError(path, f"must be an Orbax checkpoint, a directory that holds {_TREE}")
    for name in (_TREE, CUSTOM_METADATA):  # Orbax ignores files that are not JSON, or does not name them
        if (path / name).exists():
            read_object(path / name)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.absolute())
    except Exception as error:  # Orbax raises many types of errors, some of them plain Exceptions
        raise CheckpointError(path, f"must be an Orbax checkpoint: {_text(error)}") from error
    if metadata.item_metadata is None:  # Orbax does not report what failed
        raise CheckpointError(path, "the arrays' shapes cannot be read: manifest.ocdbt or a file of `d` is damaged")
    try:
        tree = metadata.item_metadata.tree
        arrays = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tree.items()}
    except Exception as error:
        raise CheckpointError(path, f"must be an Orbax checkpoint of arrays by name: {_text(error)}") from error
    return Stored(arrays, metadata.custom_metadata)


def note(path: Path, stored: Stored, key: str) -> ConfigObject:
    """What jmx wrote as `key` of the custom metadata. CheckpointError, naming the file, if there is no such object."""
    file = path / CUSTOM_METADATA
    if not isinstance(stored.custom_metadata, dict) or key not in stored.custom_metadata:
        raise CheckpointError(file, f"must be that of a checkpoint that jmx wrote: its custom metadata lack {key!r}")
    return ConfigObject(file, key, stored.custom_metadata[key])


def check(path: Path, stored: Mapping[str, jax.ShapeDtypeStruct], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """CheckpointError, naming the array, unless `stored` has those of `wanted`, and no others, in shape and dtype."""
    for name, array in wanted.items():
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):  # stored as its integers
            array = jax.eval_shape(jax.random.key_data, array)
        if name not in stored:
            raise CheckpointError(path, f"array {name!r} is missing; it must be {array.dtype} {array.shape}")
        there = stored[name]
        if there.shape != array.shape or there.dtype != array.dtype:
            raise CheckpointError(
                path, f"array {name!r} is {there.dtype} {there.shape}, but must be {array.dtype} {array.shape}"
            )
    for name in stored:
        if name not in wanted:
            raise CheckpointError(path, f"array {name!r} is not one that is called for")


def read(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Shaped[Array, "..."]]:
    """The arrays of a checkpoint, each placed as its entry in `wanted` specifies. All must fit."""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path.absolute(), dict(wanted))
    except Exception as error:  # as in `describe`
        raise CheckpointError(path, f"the arrays cannot be read: {_text(error)}") from error


def read_one(path: Path, name: str) -> Shaped[np.ndarray, "..."]:
    """One array of a checkpoint, into the host's memory."""
    restore = ocp.args.PyTreeRestore(
        item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path.absolute(), args=restore)[name]
    except Exception as error:  # as in `describe`
        raise CheckpointError(path, f"array {name!r} cannot be read: {_text(error)}") from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
