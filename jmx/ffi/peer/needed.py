"""`all_gather` and `reduce_scatter` of many rows that only some ranks need: those with an expert of the row's token.

Rows go from array to array, as `Way.ARRAYS` of collectives.py, where the order of the GPUs is known; elsewhere XLA's
collectives run, which send all rows. None has a derivative.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmx.ffi.peer import collectives
from jmx.ffi.peer.collectives import Names, devices_of, num_ranks, result_type
from jmx.ffi.peer.library import GATHER_NEEDED, SCATTER_NEEDED, compile_for
from jmx.util.typing import Array, Float, Int32, Shaped, UInt32

UNIT_BYTES = 16  # of which a row is a multiple
MOST_LOGITS = 512  # of a token, as jmx/ffi/peer/src/needed.h has it


class Chosen(NamedTuple):
    """How a token's routing tells which experts it has.

    Args:
        top_k: its experts. They are those of the largest logits, if its routing is one array, else the first array.
        each: experts of a rank.
    """

    top_k: int
    each: int


@partial(jax.jit, static_argnums=(2, 3, 4))
def all_gather(
    arrays: tuple[Shaped[Array, "T ..."], ...],
    firsts: Int32[Array, " R"],
    axes: Names,
    chosen: Chosen,
    rows: int | None = None,
) -> tuple[list[Shaped[Array, "..."]], UInt32[Array, " nT"]]:
    """Arrays of all ranks along mesh axes, one after the other, and for each token a bit for each rank that needs it.

    Args:
        arrays: rows (T, m) of tokens; then their routing, (T, E) float32 logits, or (T, k) int32 ids of experts and
            their (T, k) weights. In the result, rows of other ranks' tokens that this rank does not need are zeros.
        firsts: the first expert of each rank.
        axes, chosen: mesh axes; and what the routing is.
        rows: how many of the rows are sent, from the first on, of at least one; None: all. XLA would call a kernel
            twice for a slice in front of it.
    """
    rows = arrays[0].shape[0] if rows is None else rows
    *results, ranks = _gather.bind(*arrays, firsts, axes=axes, num_ranks=num_ranks(axes), chosen=chosen, rows=rows)
    return results, ranks


@partial(jax.jit, static_argnums=2)
def reduce_scatter(rows: Float[Array, "nt H"], ranks: UInt32[Array, " nT"], axes: Names) -> Float[Array, "t H"]:
    """This rank's rows of the sum over all ranks, of float32 and in the order of the ranks.

    `ranks`: as from `all_gather`, of T >= t tokens a rank, the last t of which are those of the rows. Rows of a token
    on other ranks than these must be zeros, and may not be read.
    """
    return _scatter.bind(rows, ranks, axes=axes, num_ranks=num_ranks(axes))[0]


def ranks_of(
    routing: Shaped[Array, "T _"], firsts: Int32[Array, " R"], chosen: Chosen, logits: bool
) -> UInt32[Array, " T"]:
    """The ranks that need each token, as bits; of equal logits more ranks than need it, perhaps.

    `routing`: ids (T, k), or `logits` (T, E).
    """
    if logits:
        keys = jnp.where(routing > -jnp.inf, jnp.minimum(routing, jnp.finfo(jnp.float32).max), -jnp.inf)
        experts = jnp.arange(routing.shape[1]) - firsts[:, None]
        own = (experts >= 0) & (experts < chosen.each)
        best = jnp.max(jnp.where(own, keys[:, None, :], -jnp.inf), axis=2)
        larger = jnp.sum(keys[:, None, :] > best[:, :, None], axis=2)
        needed = (best > -jnp.inf) & (larger < chosen.top_k)
    else:
        its = routing[:, None, :] - firsts[:, None]
        needed = jnp.any((its >= 0) & (its < chosen.each), axis=2)
    bits = np.uint32(1) << np.arange(firsts.size, dtype=np.uint32)
    return jnp.sum(jnp.where(needed, bits, np.uint32(0)), axis=1, dtype=jnp.uint32)


def _gather_types(*operands: Any, axes: Names, num_ranks: int, chosen: Chosen, rows: int) -> list[Any]:
    del axes, chosen
    x, *routing, _ = operands
    ranks = routing[0].update(shape=(routing[0].shape[0] * num_ranks,), dtype=jnp.dtype(jnp.uint32))
    sizes = (rows, *(array.shape[0] for array in routing))
    return [
        *(result_type(array, size * num_ranks, ()) for array, size in zip((x, *routing), sizes, strict=True)),
        ranks,
    ]


def _gather_by_xla(*operands: Any, axes: Names, num_ranks: int, chosen: Chosen, rows: int) -> list[Any]:
    x, *routing, firsts = operands
    ranks = ranks_of(routing[0], firsts, chosen, len(routing) == 1)
    *everyones, ranks = (lax.all_gather(array, axes, tiled=True) for array in (x[:rows], *routing, ranks))
    its = ranks.reshape(num_ranks, -1)[:, :rows].reshape(-1)
    index = lax.axis_index(axes)
    own = jnp.arange(its.size) // rows == index
    kept = own | (its >> index.astype(jnp.uint32) & 1 == 1)
    everyones[0] = jnp.where(kept[:, None], everyones[0], jnp.zeros((), x.dtype))
    return [*everyones, ranks]


def _gather_of_batch(operands: Any, dims: Any, *, axes: Names, rows: int, **static: Any) -> Any:
    """All ranks get all rows."""
    del static
    *arrays, firsts = operands
    assert dims[-1] is None, "the experts of a rank do not differ within a batch"
    moved = tuple(a if dim is None else jnp.moveaxis(a, dim, -1) for a, dim in zip(arrays, dims[:-1], strict=True))
    results = collectives.all_gather((moved[0][:rows], *moved[1:]), axes)
    first = results[1][(slice(None), *(0,) * (results[1].ndim - 1))]
    every = jnp.zeros_like(first, jnp.uint32) | np.uint32((1 << firsts.size) - 1)
    return [*results, every], [
        *(None if d is None else a.ndim - 1 for a, d in zip(results, dims[:-1], strict=True)),
        None,
    ]


def _gather_on_gpu(ctx: Any, *operands: Any, axes: Names, num_ranks: int, chosen: Chosen, rows: int) -> Any:
    devices = devices_of(ctx, axes)
    if devices is None:
        return _gather_lowered(ctx, *operands, axes=axes, num_ranks=num_ranks, chosen=chosen, rows=rows)
    compile_for(GATHER_NEEDED)
    rule = jax.ffi.ffi_lowering(GATHER_NEEDED, has_side_effect=True)
    of_experts = {"each": np.int64(chosen.each), "top_k": np.int64(chosen.top_k)}
    return rule(ctx, *operands, devices=devices, num_ranks=np.int64(num_ranks), **of_experts)


def _scatter_types(rows: Any, _: Any, *, axes: Names, num_ranks: int) -> list[Any]:
    del axes
    return [result_type(rows, rows.shape[0] // num_ranks, ()), rows]  # the second: memory that other ranks write


def _scatter_by_xla(rows: Any, _: Any, *, axes: Names, num_ranks: int) -> list[Any]:
    del num_ranks
    return [lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True), rows]


def _scatter_of_batch(operands: Any, dims: Any, **static: Any) -> Any:
    rows, _ = operands
    moved = rows if dims[0] is None else jnp.moveaxis(rows, dims[0], -1)
    dim = None if dims[0] is None else moved.ndim - 1
    return [collectives.reduce_scatter(moved, static["axes"]), moved], [dim] * 2


def _scatter_on_gpu(ctx: Any, *operands: Any, axes: Names, num_ranks: int) -> Any:
    devices = devices_of(ctx, axes)
    if devices is None:
        return _scatter_lowered(ctx, *operands, axes=axes, num_ranks=num_ranks)
    compile_for(SCATTER_NEEDED)
    rule = jax.ffi.ffi_lowering(SCATTER_NEEDED, has_side_effect=True)
    of_experts = {"each": np.int64(0), "top_k": np.int64(0)}
    return rule(ctx, *operands, devices=devices, num_ranks=np.int64(num_ranks), **of_experts)


_gather, _scatter = Primitive(GATHER_NEEDED), Primitive(SCATTER_NEEDED)
_gather.multiple_results = _scatter.multiple_results = True
_gather.def_abstract_eval(_gather_types)
_scatter.def_abstract_eval(_scatter_types)
batching.primitive_batchers[_gather] = _gather_of_batch
batching.primitive_batchers[_scatter] = _scatter_of_batch
_gather_lowered = mlir.lower_fun(_gather_by_xla, multiple_results=True)
_scatter_lowered = mlir.lower_fun(_scatter_by_xla, multiple_results=True)
mlir.register_lowering(_gather, _gather_lowered)
mlir.register_lowering(_scatter, _scatter_lowered)
mlir.register_lowering(_gather, _gather_on_gpu, platform="cuda")
mlir.register_lowering(_scatter, _scatter_on_gpu, platform="cuda")
