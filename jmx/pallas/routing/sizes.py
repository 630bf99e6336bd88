"""What is static of a call of the kernel, and the shapes of its results."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx.grouping import max_blocks, max_rows
from jmx.pallas.routing.choice import Choice

LEAST_COUNTERS = 4  # zeros that every kernel of products finds enough
MOST_ELEMENTS = 1 << 12  # of tokens by experts, both rounded up to powers of two, that one CTA routes and groups
MOST_OF_CHUNKS = 1 << 20  # the same of CTAs that each route a chunk of tokens
MOST_EXPERTS_OF_CHUNKS = 1 << 9
_LEAST_CHUNK, _CHUNK_ELEMENTS = 8, 1 << 12  # tokens; tokens by experts
_FEWEST_CHUNKS = 32  # if tokens suffice
_PLACERS = 32  # CTAs that place the tokens of all chunks: each adds up the counts of all chunks


def power_of_two(n: int) -> int:
    """n rounded up to a power of two."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Sizes:
    """What is static of a call.

    Args:
        num_tokens, num_experts, top_k: sizes.
        num_grouped: the experts for which rows are grouped, all or some of these.
        choice: how experts are chosen.
        form: of the blocks: "single", "few", "many", or None for none, as the functions of `jmx.grouping`.
        block_m, align, whole, largest_first: as those of `grouping.Cut`.
        interpret: whether Pallas interprets the kernel on a CPU.
    """

    num_tokens: int
    num_experts: int
    num_grouped: int
    top_k: int
    choice: Choice
    form: str | None
    block_m: int = 1
    align: int = 1
    whole: bool = False
    largest_first: bool = False
    interpret: bool = False

    @property
    def num_blocks(self) -> int:
        """B, the most blocks."""
        if self.form == "many":
            return max_blocks(self.num_tokens * self.top_k, self.num_grouped, self.block_m)
        return self.top_k if self.form == "single" else min(self.num_tokens * self.top_k, self.num_grouped)

    @property
    def num_rows(self) -> int:
        """R, the most rows."""
        return max_rows(self.num_tokens * self.top_k, self.num_grouped, self.align)

    @property
    def stride(self) -> int:
        """Rows from one block of `few` to the next."""
        return -(-self.num_tokens // self.align) * self.align

    @property
    def chunk(self) -> int | None:
        """The tokens of a chunk, a power of two; None if there are none, and one CTA does everything."""
        tokens, experts = power_of_two(self.num_tokens), power_of_two(self.num_experts)
        if tokens * experts <= MOST_ELEMENTS:
            return None
        return max(_LEAST_CHUNK, min(_CHUNK_ELEMENTS // experts, tokens // _FEWEST_CHUNKS))

    @property
    def num_chunks(self) -> int:
        """C, the number of chunks, if there are any."""
        return -(-self.num_tokens // (self.chunk or self.num_tokens))

    @property
    def num_placers(self) -> int:
        """CTAs of the second kernel, if there are chunks."""
        return min(self.num_chunks, _PLACERS)

    @property
    def num_warps(self) -> int:
        """Warps of a CTA that routes."""
        tokens, experts = self.tile
        return 1 << min(3, (tokens * experts // 128 + 1).bit_length() - 1)

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and experts of a CTA that routes, rounded up to powers of two."""
        return self.chunk or power_of_two(self.num_tokens), power_of_two(self.num_experts)


class Results(NamedTuple):
    """References to the results, or their shapes; all but `weights` int32.

    `expert_ids`, `weights`, `row_of` (T, k); `experts`, `rows`, `counts`, `num_blocks` (B,), the last one B times the
    same; `token_of_row` (R,); `counters`, zeros, B or more. None: not of this form.
    """

    expert_ids: Any
    weights: Any
    row_of: Any
    experts: Any
    counters: Any
    num_blocks: Any
    rows: Any
    counts: Any
    token_of_row: Any

    @classmethod
    def shapes(cls, sizes: Sizes) -> "Results":
        by_slot, blocks = (sizes.num_tokens, sizes.top_k), (sizes.num_blocks,)
        forms = {
            "expert_ids": (None, "single", "few", "many"),
            "row_of": ("single", "few", "many"),
            "experts": ("single", "few", "many"),
            "num_blocks": ("few", "many"),
            "rows": ("many",),
            "counts": ("many",),
            "token_of_row": ("many",),
        }
        shapes = {"expert_ids": by_slot, "row_of": by_slot, "token_of_row": (sizes.num_rows,)}
        made = {
            name: jax.ShapeDtypeStruct(shapes.get(name, blocks), jnp.int32) if sizes.form in its else None
            for name, its in forms.items()
        }
        counters = jax.ShapeDtypeStruct((max(LEAST_COUNTERS, *blocks),), jnp.int32) if sizes.form else None
        weights = None if sizes.choice.softmax_of is None else jax.ShapeDtypeStruct(by_slot, jnp.float32)
        return cls(weights=weights, counters=counters, **made)
