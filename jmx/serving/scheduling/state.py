"""What the scheduler knows, what it is given, and what it returns: frozen values.

Those that there are many of in each step are named tuples, which Python makes several times as fast as dataclasses.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jmx.serving.scheduling.pages import Pool
from jmx.serving.scheduling.prefixes import Chain
from jmx.util.checks import check_bool, check_int


@dataclass(frozen=True)
class Settings:
    """Limits of a step and sizes of the cache: of each group of devices, which has requests and pages of its own.

    Args:
        page: tokens of a page, and of a block of a prompt.
        pages: of each pool, how many there are.
        windows: of each pool, how many positions a token of its layers attends to, its own included; None for all.
        max_length: the most tokens of a request, prompt and answer.
        max_rows: requests that run at a time.
        max_blocks: blocks of prompts in one step.
        budget: the most tokens of one step: a row has one, a block `page`.
        reuse: whether requests with the same first tokens share pages.
        decode_steps: how many tokens each row draws in one plan, one after the other, where no request waits.
        decode_rows: the most rows that draw several.
        groups: of devices.

    Raises:
        TypeError, ValueError: sizes that are not positive integers; a pool too small for one request; a budget too
            small for a token of every request and a block.
    """

    pages: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_length: int
    max_rows: int
    max_blocks: int
    budget: int
    page: int = 128
    reuse: bool = True
    decode_steps: int = 1
    decode_rows: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("max_length", "max_rows", "max_blocks", "budget", "page", "decode_steps", "decode_rows", "groups"):
            check_int(name, getattr(self, name), least=1)
        check_bool("reuse", self.reuse)
        if len(self.pages) != len(self.windows) or not self.pages:
            raise ValueError(f"`pages` (={self.pages}) must have one number for each of `windows` (={self.windows})")
        for number, (pages, window) in enumerate(zip(self.pages, self.windows, strict=True)):
            check_int(f"pages[{number}]", pages, least=1)
            if window is not None:
                check_int(f"windows[{number}]", window, least=1)
            if pages < self.most_pages(window):
                raise ValueError(
                    f"`pages[{number}]` (={pages}) must be at least {self.most_pages(window)}, those of a request of "
                    f"`max_length` (={self.max_length}) tokens"
                )
        if self.budget < self.max_rows + self.page:
            raise ValueError(
                f"`budget` (={self.budget}) must be at least {self.max_rows + self.page}: `max_rows` (={self.max_rows})"
                f" and the {self.page} tokens of a block"
            )

    def group_of(self, slot: int) -> int:
        """The group of a slot: the first `max_rows` are those of the first group, and so on."""
        return slot // self.max_rows

    def most_pages(self, window: int | None) -> int:
        """The most pages that one request uses at a time, of layers with this window."""
        most = -(-self.max_length // self.page)
        if window is None:
            return most
        return min(most, (window - 2) // self.page + 2 + self.max_blocks)


class Submit(NamedTuple):
    """An event: a new request.

    Args:
        id: unlike those of all requests so far.
        prompt: token ids, at least one.
        max_new_tokens: at least 1; with the prompt at most `Settings.max_length`.
        salt: only requests with the same salt share pages.
        waits: whether each token must be known before the next one is computed, as with a grammar.
        alone: whether a plan never draws several of its tokens.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    salt: bytes = b""
    waits: bool = False
    alone: bool = False

    def check(self, max_length: int) -> None:
        """ValueError unless the request has tokens, and at most `max_length` of them."""
        length = len(self.prompt)
        if not length or self.max_new_tokens < 1 or length + self.max_new_tokens > max_length:
            raise ValueError(
                f"`prompt` (of {length} tokens) and `max_new_tokens` (={self.max_new_tokens}) must be at least 1, and "
                f"together at most {max_length}"
            )


class Drawn(NamedTuple):
    """An event: the host has read the next token of a request. Those of requests that have ended are ignored."""

    id: int
    token: int


class End(NamedTuple):
    """An event: a request ends: it reached a stop, or its client is gone. Unknown ids are ignored."""

    id: int


Event = Submit | Drawn | End


class Request(NamedTuple):
    """A request that waits or runs.

    Args:
        number: in the order of arrival.
        chain: of the tokens that the host knows.
        known: how many these are.
        flying: tokens that steps so far draw and the host has not read.
        computed: tokens that are in the cache after the steps so far.
        most: tokens at which it ends.
        slot: the number of its place among the rows that run, of all groups; -1 while it waits.
        named: of its first pages, how many others can find by their keys.
        tables: of each pool, its page for each `page` tokens; 0 where layers do not attend to them any more.
    """

    id: int
    number: int
    chain: Chain
    known: int
    most: int
    waits: bool
    alone: bool
    tables: tuple[tuple[int, ...], ...]
    flying: int = 0
    computed: int = 0
    named: int = 0
    slot: int = -1

    @property
    def total(self) -> int:
        """All its tokens, read or not."""
        return self.known + self.flying


@dataclass(frozen=True)
class State:
    """All that the scheduler knows between two steps.

    Args:
        pools: of each group, one for each of `Settings.pages`.
        waiting: in the order of arrival.
        running: likewise. Of one group, they arrived before all that wait.
        arrived: requests so far.
    """

    settings: Settings
    pools: tuple[tuple[Pool, ...], ...]
    waiting: tuple[Request, ...] = ()
    running: tuple[Request, ...] = ()
    arrived: int = 0

    @classmethod
    def of(cls, settings: Settings) -> "State":
        """The state before any request."""
        return cls(settings, tuple(tuple(map(Pool, settings.pages)) for _ in range(settings.groups)))


@dataclass(frozen=True)
class Tokens:
    """`count` tokens of a request, from position `start` on; `slot` and `tables` as in `Request`.

    Args:
        draws: whether they are its last tokens, so that the next one is drawn.
    """

    id: int
    slot: int
    start: int
    count: int
    draws: bool
    tables: tuple[tuple[int, ...], ...]


class Plan(NamedTuple):
    """A step: what it computes, in the order in which requests arrived.

    Args:
        rows: one token each, which draws the next one.
        blocks: at most a page of a prompt each, from a page's first position on.
        admitted: requests that run from this step on, and how many of their tokens were in the cache.
        preempted: requests that wait again: their pages were needed by older ones.
        steps: how many tokens each row draws; 1 if there are blocks.
    """

    rows: tuple[Tokens, ...] = ()
    blocks: tuple[Tokens, ...] = ()
    admitted: tuple[tuple[int, int], ...] = ()
    preempted: tuple[int, ...] = ()
    steps: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.rows or self.blocks)
