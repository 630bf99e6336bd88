"""Writing tokens into the pages of a cache, in place: kernels for Hopper GPUs, as XLA's scatter is slow.

A copy engine moves each token's heads, or a head's page, through shared memory.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jmx.pallas.attention.softmax import Ref
from jmx.pallas.sm90.launch import launch
from jmx.util.typing import Array, Int32, Shaped

_ALIGNMENT = 16  # bytes of a row that the copy engine moves

Pages = Shaped[Array, "parts pages heads page D"]


def fits(dim: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether the kernels have heads of this size."""
    return dim * jax.numpy.dtype(dtype).itemsize % _ALIGNMENT == 0


def write_rows(
    pages: Pages, new: Shaped[Array, "parts B heads D"], numbers: Int32[Array, " B"], offsets: Int32[Array, " B"]
) -> Pages:
    """The pages with a token of each row; the array is the same one, if it is donated.

    Args:
        pages: (parts, pages, heads, page, D).
        new: (parts, B, heads, D) of the same dtype.
        numbers: int32 (B,), the page of each token.
        offsets: int32 (B,), its place there.
    """
    parts, count, heads, dim = new.shape

    def entry(pages: Ref, new: Ref, numbers: Ref, offsets: Ref, held: Ref, full: Ref) -> None:
        part, row = lax.axis_index("part"), lax.axis_index("row")
        plgpu.copy_gmem_to_smem(new.at[part, row], held, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(held, pages.at[part, numbers[row], :, offsets[row]])
        plgpu.wait_smem_to_gmem(0)

    return _in_place(entry, pages, (parts, count), ("part", "row"), (heads, dim), new, numbers, offsets)


def write_blocks(pages: Pages, new: Shaped[Array, "parts M page heads D"], numbers: Int32[Array, " M"]) -> Pages:
    """The pages with whole ones replaced; the array is the same one, if it is donated.

    Args:
        pages: (parts, pages, heads, page, D).
        new: (parts, M, page, heads, D) of the same dtype.
        numbers: int32 (M,), the pages that they replace.
    """
    parts, count, page, heads, dim = new.shape

    def entry(pages: Ref, new: Ref, numbers: Ref, held: Ref, full: Ref) -> None:
        part, block, head = (lax.axis_index(axis) for axis in ("part", "block", "head"))
        plgpu.copy_gmem_to_smem(new.at[part, block, :, head], held, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(held, pages.at[part, numbers[block], head])
        plgpu.wait_smem_to_gmem(0)

    return _in_place(entry, pages, (parts, count, heads), ("part", "block", "head"), (page, dim), new, numbers)


def _in_place(
    entry: Callable[..., None],
    pages: jax.Array,
    grid: tuple[int, ...],
    names: tuple[str, ...],
    held: tuple[int, ...],
    *given: jax.Array,
) -> jax.Array:
    """Runs a kernel that changes `pages`, with shared memory of shape `held` and a barrier."""
    written = jax.new_ref(pages)

    def body(*refs: Ref) -> None:
        pl.run_scoped(lambda *scoped: entry(*refs, *scoped), plgpu.SMEM(held, pages.dtype), plgpu.Barrier())

    launch(plgpu.kernel(body, grid=grid, grid_names=names), written, *given)
    return written[...]
