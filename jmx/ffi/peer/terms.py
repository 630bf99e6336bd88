"""`reduce_scatter` of results that are not summed over a token's slots yet: one kernel does both.

Each rank sums the rows of its own experts as it sends them to the rank of the token. Where the order of the GPUs is not
known XLA sums, and then scatters. It has no derivative.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jmx import grouping
from jmx.ffi.peer.collectives import Names, Way, devices_of, num_ranks, result_type, way_of
from jmx.ffi.peer.library import SCATTER_TERMS, compile_for
from jmx.util.typing import Array, Float, Float32, Int32, UInt32

UNIT_BYTES = 16  # of which rows of results are a multiple, and those of terms


@partial(jax.jit, static_argnums=(4, 5, 6))
def reduce_scatter(
    rows: Float32[Array, "P R W"],
    row_of: Int32[Array, "nT k"],
    weights: Float32[Array, "nT k"],
    ranks: UInt32[Array, " nT"] | None,
    axes: Names,
    columns: int,
    dtype: Any,
) -> Float[Array, "T columns"]:
    """This rank's tokens' sums over all ranks, in float32 and in the order of the ranks, of what each adds up.

    Args:
        rows: their sum over P, in its first columns, are the terms.
        row_of: the row of each slot of all ranks' tokens; -1: none on this rank.
        weights: what the rows are multiplied with.
        ranks: a bit for each rank that has a term of a token, or may have one; None: all may.
        axes: mesh axes along which ranks are.
        columns, dtype: of the result, and of what a rank adds up.
    """
    tokens = row_of.shape[0] // num_ranks(axes)
    way = way_of([tokens * columns * jnp.dtype(dtype).itemsize], lines=False) if ranks is None else Way.ARRAYS
    static = {"axes": axes, "num_ranks": num_ranks(axes), "columns": columns, "dtype": jnp.dtype(dtype)}
    return _scatter.bind(rows, row_of, weights, *(() if ranks is None else (ranks,)), way=way, **static)[0]


def _types(
    rows: Any, row_of: Any, *_: Any, axes: Names, num_ranks: int, columns: int, dtype: Any, way: Way
) -> list[Any]:
    del axes
    tokens = row_of.shape[0]
    sums = rows.update(shape=(tokens, columns), dtype=dtype)
    memory = [sums] if way is Way.ARRAYS else []  # into which ranks write their sums
    return [result_type(sums, tokens // num_ranks, ()), *memory]


def _by_xla(
    rows: Any, row_of: Any, weights: Any, *_: Any, axes: Names, columns: int, dtype: Any, way: Way, **__: Any
) -> Any:
    work = grouping.Work(grouping.Blocks(None, 0, 0, 0, 0), row_of, None)
    sums = grouping.combine(rows[..., :columns], work, weights).astype(dtype)
    return [lax.psum_scatter(sums, axes, scatter_dimension=0, tiled=True), *([sums] if way is Way.ARRAYS else [])]


def _on_gpu(ctx: Any, *operands: Any, axes: Names, num_ranks: int, way: Way, **static: Any) -> Any:
    devices = devices_of(ctx, axes)
    if devices is None:
        return _lowered(ctx, *operands, axes=axes, num_ranks=num_ranks, way=way, **static)
    compile_for(SCATTER_TERMS)
    rule = jax.ffi.ffi_lowering(SCATTER_TERMS, has_side_effect=True)
    return rule(ctx, *operands, devices=devices, num_ranks=np.int64(num_ranks), way=np.int64(way))


_scatter = Primitive(SCATTER_TERMS)
_scatter.multiple_results = True
_scatter.def_abstract_eval(_types)
_lowered = mlir.lower_fun(_by_xla, multiple_results=True)
mlir.register_lowering(_scatter, _lowered)
mlir.register_lowering(_scatter, _on_gpu, platform="cuda")
