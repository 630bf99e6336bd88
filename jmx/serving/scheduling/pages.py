"""A pool of the pages of a paged cache: which are free, how many requests use each, and what full ones hold."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

# What a page holds, with all tokens before it: see `prefixes`.
Key = bytes


class Pool:
    """Pages 1 to `size`. Page 0 is no request's: padding is written there.

    A page without references keeps its key, and can be used again for it, until it is needed for something else. The
    one that was released first is taken first.
    """

    def __init__(self, size: int):
        self.size = size
        self._users = [0] * (size + 1)
        self._keys: dict[int, Key] = {}
        self._pages: dict[Key, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, size + 1))

    def copy(self) -> "Pool":
        """A pool with the same content, which changes independently."""
        other = Pool.__new__(Pool)
        other.size = self.size
        other._users, other._keys, other._pages = self._users.copy(), self._keys.copy(), self._pages.copy()
        other._free = self._free.copy()
        return other

    @property
    def num_free(self) -> int:
        """How many pages have no references."""
        return len(self._free)

    def users(self, page: int) -> int:
        """How many requests use a page."""
        return self._users[page]

    def find(self, key: Key) -> int | None:
        """The page with this content, if there is one."""
        return self._pages.get(key)

    def is_free(self, page: int) -> bool:
        """Whether a page has no references."""
        return page in self._free

    def share(self, pages: Iterable[int]) -> None:
        """Adds a user to each of some pages, which may be free."""
        for page in pages:
            self._free.pop(page, None)
            self._users[page] += 1

    def take(self, count: int) -> list[int]:
        """So many of the free pages, whose content is forgotten, for one user."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._users[page] = 1
            if (key := self._keys.pop(page, None)) is not None:
                del self._pages[key]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Removes a user of each page. Later pages of a request are of use to fewer others, and are taken first."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
                if page not in self._keys:  # its content cannot be reused
                    self._free.move_to_end(page, last=False)

    def name(self, page: int, key: Key) -> None:
        """Notes what a full page holds, unless another one holds the same."""
        if key not in self._pages and page not in self._keys:
            self._keys[page], self._pages[key] = key, page
