"""A flat dict of arrays, and a note beside them, as one Orbax checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jmx.checkpoint.shards import CheckpointError


class Stored(NamedTuple):
    """What a checkpoint holds: shape and dtype of each array by name, and the note."""

    arrays: dict[str, jax.ShapeDtypeStruct]
    note: Any


def write(path: Path, arrays: Mapping[str, Any], note: dict[str, Any]) -> None:
    """Writes arrays (jax or numpy) and a JSON-able note to a new checkpoint, which Orbax makes appear whole."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), dict(arrays), custom_metadata=note)
        checkpointer.wait_until_finished()  # in here: leaving waits again if this is interrupted


def describe(path: Path) -> Stored:
    """What the checkpoint at `path` holds, its arrays not read. CheckpointError if it is none of flat arrays."""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.absolute())
        tree = metadata.item_metadata.tree
        arrays = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tree.items()}
    except Exception as error:  # Orbax raises errors of many kinds, of which some are plain Exceptions
        raise CheckpointError(path, f"must be an Orbax checkpoint of arrays by name: {error}") from error
    return Stored(arrays, metadata.custom_metadata)


def check(path: Path, stored: Mapping[str, jax.ShapeDtypeStruct], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """CheckpointError, naming the array, unless `stored` has those of `wanted`, and no others, in shape and dtype."""
    for name, array in wanted.items():
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):  # stored as the integers that it is made of
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


def read(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of a checkpoint, each placed as its entry in `wanted` says, all of which must fit."""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path.absolute(), dict(wanted))
    except Exception as error:  # as in `describe`
        raise CheckpointError(path, f"the arrays cannot be read: {error}") from error


def read_one(path: Path, name: str) -> np.ndarray:
    """One array of a checkpoint, into the host's memory."""
    restore = ocp.args.PyTreeRestore(
        item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path.absolute(), args=restore)[name]
    except Exception as error:  # as in `describe`
        raise CheckpointError(path, f"array {name!r} cannot be read: {error}") from error
