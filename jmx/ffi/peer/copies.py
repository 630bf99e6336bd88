"""Rows that copy engines send between the GPUs of one process while these compute: `start`, and later `finish`.

Where the GPUs are not known when a program is lowered, as in `jax.export`, and on other platforms, XLA's collectives
run in `start`. Neither has a derivative. Both must run: what is started and never finished may still be sent when its
memory belongs to other arrays.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmx.ffi.peer.collectives import Names, devices_of, num_ranks, result_type
from jmx.ffi.peer.library import FINISH, START
from jmx.util.typing import Array, Shaped


class Sending(NamedTuple):
    """Rows on their way.

    sent: as they were given.
    received: where those of the other ranks arrive, without values before `finish`.
    """

    sent: Shaped[Array, "..."]
    received: Shaped[Array, "..."]


@partial(jax.jit, static_argnums=(1, 2), static_argnames="own")
def start(array: Shaped[Array, "T ..."], axes: Names, rows: tuple[int, int] | None, *, own: bool = True) -> Sending:
    """Begins to send rows along mesh axes to n ranks: `rows` from the first to before the last to each, or None: parts.

    What a rank receives is what the ranks send it, one after the other: (n t, ...) of t rows, or (T, ...) of parts. On
    GPUs it has what it sends itself, its `own`, if that is asked for.
    """
    return Sending(*_start.bind(array, axes=axes, num_ranks=num_ranks(axes), rows=rows, own=own))


@jax.jit
def finish(sending: Sending) -> Shaped[Array, "..."]:
    """What was received, once all rows have been sent and have arrived."""
    return _finish.bind(*sending)


def _types(array: Any, *, axes: Names, num_ranks: int, rows: tuple[int, int] | None, own: bool) -> list[Any]:
    del axes, own
    return [array, result_type(array, array.shape[0] if rows is None else (rows[1] - rows[0]) * num_ranks, ())]


def _by_xla(array: Any, *, axes: Names, num_ranks: int, rows: tuple[int, int] | None, own: bool) -> list[Any]:
    del num_ranks, own
    if rows is None:
        return [array, lax.all_to_all(array, axes, split_axis=0, concat_axis=0, tiled=True)]
    return [array, lax.all_gather(array[slice(*rows)], axes, tiled=True)]


def _start_on_gpu(ctx: Any, array: Any, *, axes: Names, num_ranks: int, rows: tuple[int, int] | None, own: bool) -> Any:
    """The whole array is an operand: XLA would send a slice from where it lies, but keep a copy."""
    devices = devices_of(ctx, axes)
    if devices is None:
        return _start_by_xla(ctx, array, axes=axes, num_ranks=num_ranks, rows=rows, own=own)
    (its,) = ctx.avals_in
    row_bytes = its.size // its.shape[0] * its.dtype.itemsize
    begin = np.int64(0 if rows is None else rows[0] * row_bytes)
    static = {"devices": devices, "num_ranks": np.int64(num_ranks), "parts": rows is None, "begin": begin, "own": own}
    rule = jax.ffi.ffi_lowering(START, has_side_effect=True)
    return [array, *rule(ctx.replace(avals_out=ctx.avals_out[1:]), array, **static)]


def _finish_on_gpu(ctx: Any, sent: Any, received: Any) -> Any:
    """By the platform alone: GPUs are not known inside of a nested `jax.shard_map`, which is where rows are made.

    Where XLA's collective ran in `start`, it waits for nothing.
    """
    if ctx.module_context.lowering_parameters.for_export:
        return [received]
    return jax.ffi.ffi_lowering(FINISH, has_side_effect=True, operand_output_aliases={1: 0})(ctx, sent, received)


def _start_of_batch(arrays: Any, dims: Any, **static: Any) -> Any:
    """The batch becomes the last axis."""
    moved = jnp.moveaxis(arrays[0], dims[0], -1)
    return _start.bind(moved, **static), [moved.ndim - 1] * 2


def _finish_of_batch(arrays: Any, dims: Any) -> Any:
    return _finish.bind(*arrays), dims[1]


_start, _finish = Primitive(START), Primitive(FINISH)
_start.multiple_results = True
_start_by_xla = mlir.lower_fun(_by_xla, multiple_results=True)
_start.def_abstract_eval(_types)
_finish.def_abstract_eval(lambda sent, received: received)
batching.primitive_batchers[_start] = _start_of_batch
batching.primitive_batchers[_finish] = _finish_of_batch
mlir.register_lowering(_start, _start_by_xla)
mlir.register_lowering(_finish, lambda ctx, sent, received: [received])
mlir.register_lowering(_start, _start_on_gpu, platform="cuda")
mlir.register_lowering(_finish, _finish_on_gpu, platform="cuda")
