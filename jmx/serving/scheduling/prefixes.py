"""Keys of pages: a hash of a page's tokens and of all before them. Requests with equal keys can share the page.

How long an answer takes shows whether its prompt's pages were there. Each owner of prompts has a salt, so that this
does not tell one of them what others asked.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from jmx.serving.scheduling.pages import Key, Pool


class Chain(NamedTuple):
    """The keys of a text's full pages, and the tokens after these.

    Args:
        last: the hash so far, of the salt if there is no full page yet.
        keys: of each full page.
        rest: tokens of the page that is not full.
    """

    last: bytes
    keys: tuple[Key, ...] = ()
    rest: tuple[int, ...] = ()

    @classmethod
    def of(cls, salt: bytes) -> "Chain":
        """The chain of no tokens."""
        return cls(hashlib.sha256(salt).digest())

    def add(self, tokens: Sequence[int], page: int) -> "Chain":
        """The chain with further tokens, at `page` tokens a page."""
        tokens = (*self.rest, *tokens)
        last, keys = self.last, list(self.keys)
        full = len(tokens) // page
        for number in range(full):
            its = array("I", tokens[number * page : (number + 1) * page])
            last = hashlib.sha256(last + its.tobytes()).digest()
            keys.append(last)
        return Chain(last, tuple(keys), tokens[full * page :])


def reusable(keys: Sequence[Key], pools: Sequence[Pool], windows: Sequence[int | None], page: int) -> int:
    """How many of the first pages of a text need not be computed again.

    Args:
        keys: of the text's full pages.
        pools: of the pages of each kind of layer.
        windows: of each kind, how many positions a token attends to, its own included; None for all.
        page: tokens of a page.

    Returns:
        The largest number of pages of which each kind has all that tokens after them attend to.
    """
    known = [[pool.find(key) is not None for key in keys] for pool in pools]

    def serves(count: int) -> bool:
        starts = (0 if window is None else first_page(count * page, window, page) for window in windows)
        return all(all(its[start:count]) for its, start in zip(known, starts, strict=True))

    return next(count for count in range(len(keys), -1, -1) if serves(count))


def first_page(position: int, window: int | None, page: int) -> int:
    """The first page that the token at a position attends to."""
    return 0 if window is None else max(position - window + 1, 0) // page
