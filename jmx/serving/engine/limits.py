"""The limits of an engine, and what follows from them: pools, and the sizes of steps for which programs exist."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jmx.models.decoder import Model
from jmx.serving.scheduling import Settings
from jmx.util.checks import check_bool, check_int

# Programs take minutes to compile: there are few, and smaller steps are padded. Padding goes to no expert.
_ROW_SIZES = 5
# With more rows, a step takes the device longer than the host, and new requests would wait for several.
_MOST_DECODE_ROWS = 8


@dataclass(frozen=True)
class Limits:
    """Limits of an engine.

    Args:
        max_users: requests that run at a time.
        max_length: the most tokens of a request, prompt and answer.
        cache_tokens: tokens that the cache holds, of all requests together, rounded up to pages; at least `max_length`.
        page: tokens of a page, and of a block of a prompt.
        prompt_tokens: the most tokens of prompts in one step, rounded up to blocks.
        reuse: whether requests with the same first tokens share pages.
        decode_steps: how many tokens up to 8 requests draw in one call, where none waits. More need less of the host,
            and come in groups; a request that arrives meanwhile waits for a group.

    Raises:
        TypeError, ValueError: sizes that are not positive integers, or a cache smaller than a request.
    """

    max_users: int = 64
    max_length: int = 8192
    cache_tokens: int = 65536
    page: int = 128
    prompt_tokens: int = 1024
    reuse: bool = True
    decode_steps: int = 4

    def __post_init__(self) -> None:
        for name in ("max_users", "max_length", "cache_tokens", "page", "prompt_tokens", "decode_steps"):
            check_int(name, getattr(self, name), least=1)
        check_int("max_length", self.max_length, least=2)
        check_bool("reuse", self.reuse)
        if self.cache_tokens < self.max_length:
            raise ValueError(
                f"`cache_tokens` (={self.cache_tokens}) must be at least `max_length` (={self.max_length})"
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of prompts in one step."""
        return -(-self.prompt_tokens // self.page)

    def of_group(self, groups: int) -> "Limits":
        """Those of each of `groups` groups of devices, which divide users, cache and tokens of prompts.

        Raises:
            ValueError: users that they do not divide evenly, or a cache too small for a request of each.
        """
        if self.max_users % groups:
            raise ValueError(
                f"`max_users` (={self.max_users}) must be a multiple of {groups}, the groups of devices that divide "
                "requests"
            )
        tokens = self.cache_tokens // groups
        if tokens < self.max_length:
            raise ValueError(
                f"`cache_tokens` (={self.cache_tokens}) must be at least {groups * self.max_length}: `max_length` "
                f"(={self.max_length}) in each of {groups} groups of devices"
            )
        prompts = -(-self.prompt_tokens // groups)
        return replace(self, max_users=self.max_users // groups, cache_tokens=tokens, prompt_tokens=prompts)

    def settings(self, windows: Sequence[int | None], groups: int = 1) -> Settings:
        """The scheduler's settings, with a pool for each of `windows`, if these are the limits of each group.

        A pool of sliding layers has what all users need at a time, or as many pages as the others if that is fewer.
        """
        whole = -(-max(self.cache_tokens, self.max_length) // self.page)
        blocks = self.max_blocks
        pages = []
        for window in windows:
            each = 0 if window is None else (window - 2) // self.page + 2
            pages.append(whole if window is None else min(whole, self.max_users * each + 2 * blocks + each))
        return Settings(
            tuple(pages),
            tuple(windows),
            self.max_length,
            self.max_users,
            blocks,
            self.max_users + blocks * self.page,
            self.page,
            self.reuse,
            self.decode_steps,
            max(self.decode_sizes(), default=1),
            groups,
        )

    def decode_sizes(self) -> list[int]:
        """Rows of the steps that draw several tokens of each, the smallest first; none if `decode_steps` is 1."""
        return sorted({1, min(self.max_users, _MOST_DECODE_ROWS)}) if self.decode_steps > 1 else []

    def sizes(self) -> list[tuple[int, int]]:
        """Rows and blocks of the steps that there are programs for, the smallest first."""
        several = self.decode_sizes()
        least, count = max(several, default=1), _ROW_SIZES - len(several)
        powers = [1 << at for at in range((least - 1).bit_length(), (self.max_users - 1).bit_length())]
        powers.append(self.max_users)
        kept = {powers[-(-at * (len(powers) - 1) // (count - 1))] for at in range(count)}
        alone = [(rows, 0) for rows in kept]
        mixed = {(1, self.max_blocks), (self.max_users, 1), (self.max_users, self.max_blocks)}
        return sorted({*alone, *mixed}, key=lambda size: (size[0] + self.page * size[1], size))


class Pools(NamedTuple):
    """The kinds of a model's layers.

    Args:
        windows: of each kind, how many positions a token attends to; None for all.
        of_layer: the kind of each layer.
    """

    windows: tuple[int | None, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, model: Model) -> "Pools":
        """Of a model's attention."""
        each = [getattr(layer.attention, "window", None) for layer in model.layers]
        windows = sorted({*each}, key=lambda window: (window is not None, window or 0))
        return cls(tuple(windows), tuple(windows.index(window) for window in each))
