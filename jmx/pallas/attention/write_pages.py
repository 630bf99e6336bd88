"""Writing tokens into the pages of a cache, in place: kernels for Hopper GPUs, as XLA's scatter is slow.

A copy engine moves each token's heads, or a head's page, through shared memory.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jmx.pallas.attention.softmax import Ref
from jmx.pallas.sm90.launch import kernel_name, launch
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

    def body(refs: _Operands, *, held: Ref, full: Ref) -> None:
        part, row = lax.axis_index("part"), lax.axis_index("row")
        _load(refs.new.at[part, row], held, full)
        _store(held, refs.pages.at[part, refs.numbers[row], :, refs.offsets[row]])

    operands = _Operands(pages=pages, new=new, numbers=numbers, offsets=offsets)
    name = kernel_name("write_rows", heads=heads, dim=dim)
    return _in_place(name, body, operands, {"part": parts, "row": count}, held=(heads, dim))


def write_blocks(pages: Pages, new: Shaped[Array, "parts M page heads D"], numbers: Int32[Array, " M"]) -> Pages:
    """The pages with whole ones replaced; the array is the same one, if it is donated.

    Args:
        pages: (parts, pages, heads, page, D).
        new: (parts, M, page, heads, D) of the same dtype.
        numbers: int32 (M,), the pages that they replace.
    """
    parts, count, page, heads, dim = new.shape

    def body(refs: _Operands, *, held: Ref, full: Ref) -> None:
        part, block, head = (lax.axis_index(axis) for axis in ("part", "block", "head"))
        _load(refs.new.at[part, block, :, head], held, full)
        _store(held, refs.pages.at[part, refs.numbers[block], head])

    operands = _Operands(pages=pages, new=new, numbers=numbers, offsets=None)
    name = kernel_name("write_blocks", page=page, dim=dim)
    return _in_place(name, body, operands, {"part": parts, "block": count, "head": heads}, held=(page, dim))


class _Operands(NamedTuple):
    """The kernel's operands, or references to them in global memory. `offsets` may be None."""

    pages: Ref
    new: Ref
    numbers: Ref
    offsets: Ref


@jax.named_scope("load")
def _load(source: Ref, held: Ref, full: Ref) -> None:
    plgpu.copy_gmem_to_smem(source, held, full)
    plgpu.barrier_wait(full)


@jax.named_scope("store")
def _store(held: Ref, target: Ref) -> None:
    plgpu.copy_smem_to_gmem(held, target)
    plgpu.wait_smem_to_gmem(0)


def _in_place(
    name: str, body: Callable[..., None], operands: _Operands, grid: dict[str, int], held: tuple[int, ...]
) -> jax.Array:
    """Runs a kernel that changes `operands.pages`.

    Args:
        name: of the kernel, in profiles.
        body: takes references to operands, as `held=` one to shared memory, and as `full=` a barrier.
        grid: the number of CTAs along each axis.
        held: the shape in shared memory, of the operands' dtype.
    """
    written = jax.new_ref(operands.pages)
    kernel = plgpu.kernel(
        body,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        scratch_types={"held": plgpu.SMEM(held, operands.pages.dtype), "full": plgpu.Barrier()},
    )
    launch(kernel, operands._replace(pages=written))
    return written[...]
