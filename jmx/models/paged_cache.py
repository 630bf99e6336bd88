"""A cache in pages of some consecutive tokens of one row each; a row has a table of its pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jmx
from jmx.pallas.attention import write_pages


class Places(NamedTuple):
    """Where the tokens of a step are: first B rows of one token each, then M blocks of a page of tokens each.

    Args:
        tables: int32 (B + M, N), the pages of each row and block, the n-th with the positions from n times the page's
            tokens on. Page 0 is for padding; nothing attends to it.
        positions: int32 (B + M,), of each row's token, and of each block's first one, which begins a page.
    """

    tables: jax.Array
    positions: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedLayer:
    """A layer's pages, and the places of a step's tokens: given to a model in place of a layer of a `Cache`.

    The model's tokens are then int32 (B + M * page, 1), and its `starts` their positions.

    Args:
        pages: (parts, pages, heads, page, W), of what attention keeps of a token, such as keys and values.
        places: of the tokens.
        num_rows: B; static. If a mesh divides the rows of a batch, its groups of devices have B rows and M blocks each,
            one group after the other, and tables have numbers of a group's own pages.
    """

    pages: jax.Array
    places: Places
    num_rows: int = field(metadata={"static": True})

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.pages.shape[3]

    def tokens(self) -> tuple[jax.Array, jax.Array]:
        """Pages of the rows' tokens and of the blocks, and places there, int32 (B + M,)."""
        number, at = jnp.divmod(self.places.positions, self.page)
        return jnp.take_along_axis(self.places.tables, number[:, None], axis=1)[:, 0], at

    def with_pages(self, pages: jax.Array) -> "PagedLayer":
        """With other pages, such as those that a kernel wrote to."""
        return replace(self, pages=pages)

    def write(self, parts: Sequence[jax.Array]) -> "PagedLayer":
        """With parts (B + M * page, 1, heads, W) of the step's tokens in their pages."""
        rows, page = self.num_rows, self.page
        new = jnp.stack(parts)[:, :, 0].astype(self.pages.dtype)
        pages, at = self.tokens()
        written, kernels = self.pages, _takes_kernels(self.pages)
        if rows and kernels:
            written = write_pages.write_rows(written, new[:, :rows], pages[:rows], at[:rows])
        elif rows:
            # Index arrays around a slice: their axis comes first.
            written = written.at[:, pages[:rows], :, at[:rows]].set(new[:, :rows].swapaxes(0, 1))
        if rows < len(pages):
            blocks = new[:, rows:].reshape(new.shape[0], -1, page, *new.shape[2:])
            if kernels:
                written = write_pages.write_blocks(written, blocks, pages[rows:])
            else:
                written = written.at[:, pages[rows:]].set(blocks.swapaxes(2, 3))
        return self.with_pages(written)


def _takes_kernels(pages: jax.Array) -> bool:
    """Whether kernels write tokens: on a Hopper GPU, in the types that its kernels of attention read."""
    capability = jmx.Environment.probe(pages).compute_capability
    return capability == (9, 0) and pages.dtype == jnp.bfloat16 and write_pages.fits(pages.shape[-1], pages.dtype)
