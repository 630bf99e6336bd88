"""The scheduler: which tokens of which requests the next step computes, and in which pages of the cache they are.

Requests are served in the order of arrival. Every running request whose prompt is in the cache has a row in every
step, and blocks of prompts fill what the budget leaves. If there is no page for a request, the youngest one that runs
gives its own back and is computed again later. The oldest one is never preempted, so each step brings it nearer to its
end.

Groups of devices have slots and pages of their own, and take requests from one queue. A request runs where it needs the
fewest blocks and is beside the fewest others, and all that it needs is of its group.

A plan is made while the step before it is computed. Steps are computed in order, so pages that one step has read last
may be written by the next one, but not by the same: pages are released when a plan is complete.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jmx.serving.scheduling.pages import Pool
from jmx.serving.scheduling.prefixes import Chain, first_page, reusable
from jmx.serving.scheduling.state import End, Event, Plan, Request, State, Submit, Tokens


def plan(state: State, events: Sequence[Event]) -> tuple[State, Plan]:
    """The state after some events and after planning a step, and that step.

    Raises:
        ValueError: a request that `Settings` does not allow, or with an id that is in use.
    """
    planner = _Planner(state)
    for event in events:
        planner.apply(event)
    return planner.plan()


class _Place(NamedTuple):
    """Where a request that waits can run: a slot, how many pages it reuses, and its tables with these.

    `cost`: the blocks that it needs there, and the requests that run there.
    """

    cost: int
    slot: int
    reused: int
    tables: tuple[tuple[int, ...], ...]


class _Planner:
    """A plan in the making. It changes copies of the pools only."""

    def __init__(self, state: State):
        self.settings = state.settings
        self.pools = tuple(tuple(pool.copy() for pool in pools) for pools in state.pools)
        self.arrived = state.arrived
        self.waiting = {request.id: request for request in state.waiting}
        self.running = {request.id: request for request in state.running}
        self.rows: list[Tokens] = []
        self.blocks: list[Tokens] = []
        self.admitted: list[tuple[int, int]] = []
        self.preempted: list[int] = []
        self.released: list[tuple[Pool, list[int]]] = []  # free from the next plan on
        self.steps = 1

    def apply(self, event: Event) -> None:
        if isinstance(event, Submit):
            self.waiting[event.id] = self._request(event)
        elif (requests := self.running if event.id in self.running else self.waiting).get(event.id) is None:
            return
        elif isinstance(event, End):
            self._end(requests.pop(event.id))
        else:
            request = requests[event.id]
            chain = request.chain.add((event.token,), self.settings.page)
            requests[event.id] = request._replace(chain=chain, known=request.known + 1, flying=request.flying - 1)

    def _request(self, event: Submit) -> Request:
        if event.id in self.waiting or event.id in self.running:
            raise ValueError(f"`id` (={event.id}) must be that of no other request")
        event.check(self.settings.max_length)
        length = len(event.prompt)
        chain = Chain.of(event.salt).add(event.prompt, self.settings.page)
        most = length + event.max_new_tokens
        self.arrived += 1
        return Request(event.id, self.arrived, chain, length, most, event.waits, event.alone, self._no_tables())

    def _no_tables(self) -> tuple[tuple[int, ...], ...]:
        return ((),) * len(self.settings.pages)

    def _pools(self, request: Request) -> tuple[Pool, ...]:
        """Those of a running request's group."""
        return self.pools[self.settings.group_of(request.slot)]

    def _of_group(self, group: int) -> list[Request]:
        """The running requests of a group."""
        first, count = group * self.settings.max_rows, self.settings.max_rows
        return [request for request in self.running.values() if first <= request.slot < first + count]

    def plan(self) -> tuple[State, Plan]:
        for request in [request for request in self.running.values() if request.known >= request.most]:
            self._end(self.running.pop(request.id))
        self.steps = self._steps()
        for id in [*self.running]:  # from the oldest on; those that are preempted meanwhile come later
            if id in self.running:
                self._continue(self.running[id])
        while self.waiting and self._admit():
            pass
        for pool, pages in self.released:
            pool.release(pages)
        state = State(
            self.settings, self.pools, tuple(self.waiting.values()), tuple(self.running.values()), self.arrived
        )
        rows, blocks = tuple(self.rows), tuple(self.blocks)
        return state, Plan(rows, blocks, tuple(self.admitted), tuple(self.preempted), self.steps)

    def _steps(self) -> int:
        """How many tokens each row draws: several only if all rows can, and nothing waits that could run meanwhile."""
        count = self.settings.decode_steps
        rows = [request for request in self.running.values() if request.total < request.most]
        if count == 1 or self.waiting or not rows:
            return 1
        for request in rows:
            if request.alone or request.waits or request.total + count > request.most:
                return 1
            if request.total - request.computed > 1:  # its prompt is not in the cache
                return 1
        for group, pools in enumerate(self.pools):
            its = [request for request in rows if self.settings.group_of(request.slot) == group]
            if len(its) > self.settings.decode_rows or not self._have_pages(its, pools, count):
                return 1
        return count

    def _have_pages(self, rows: Sequence[Request], pools: Sequence[Pool], count: int) -> bool:
        """Whether the pools of a group have pages for the tokens of `count` steps of its rows."""
        for number, pool in enumerate(pools):
            needed = (-(-(its.total + count - 1) // self.settings.page) - len(its.tables[number]) for its in rows)
            if sum(max(its, 0) for its in needed) > pool.num_free:
                return False
        return True

    def _continue(self, request: Request) -> None:
        """Plans what a running request needs next, as far as there are pages and budget for it."""
        if request.total >= request.most or (request.waits and request.flying):
            return
        end = request.total + self.steps - 1
        if request.total - request.computed > 1:
            end = min(end, request.computed + self._blocks_left(request.slot) * self.settings.page)
        while end > request.computed:
            if (tables := self._tables(request, end)) is not None:
                self._compute(request, end, tables)
                return
            youngest = self._of_group(self.settings.group_of(request.slot))[-1]
            if youngest.id == request.id:  # it goes on when older ones have ended
                return
            self._preempt(self.running.pop(youngest.id))

    def _blocks_left(self, slot: int) -> int:
        """Blocks that this step has place for in a slot's group, besides a token of every request that may run."""
        settings = self.settings
        by_budget, group = (settings.budget - settings.max_rows) // settings.page, settings.group_of(slot)
        used = sum(settings.group_of(block.slot) == group for block in self.blocks)
        return min(settings.max_blocks, by_budget) - used

    def _tables(self, request: Request, end: int) -> list[tuple[int, ...]] | None:
        """The tables with pages for tokens up to `end`; None if a pool lacks some."""
        further, pools = [-(-end // self.settings.page) - len(its) for its in request.tables], self._pools(request)
        if any(count > pool.num_free for count, pool in zip(further, pools, strict=True)):
            return None
        kinds = zip(request.tables, further, pools, strict=True)
        return [its if count <= 0 else (*its, *pool.take(count)) for its, count, pool in kinds]

    def _compute(self, request: Request, end: int, tables: list[tuple[int, ...]]) -> None:
        """Plans a request's tokens up to `end`, which have pages."""
        page, whole = self.settings.page, tuple(tables)
        draws = self.steps if end >= request.total else 0
        if request.total - request.computed == 1:
            self.rows.append(Tokens(request.id, request.slot, request.computed, 1, True, whole))
        else:
            for start in range(request.computed, end, page):
                count = min(page, end - start)
                last = bool(draws) and start + count == end
                self.blocks.append(Tokens(request.id, request.slot, start, count, last, whole))
        changed = self._named(request._replace(computed=end, flying=request.flying + draws, tables=whole))
        for number, (window, pool) in enumerate(zip(self.settings.windows, self._pools(request), strict=True)):
            if window is not None:
                tables[number] = self._seen(pool, tables[number], first_page(end, window, page))
        self.running[request.id] = changed if (seen := tuple(tables)) == whole else changed._replace(tables=seen)

    def _seen(self, pool: Pool, table: tuple[int, ...], first: int) -> tuple[int, ...]:
        """A table without its pages before `first`, which no later token attends to."""
        unseen = [page for page in table[:first] if page]
        if not unseen:
            return table
        self.released.append((pool, unseen))
        return (0,) * first + table[first:]

    def _named(self, request: Request) -> Request:
        """A request whose full pages others can find."""
        full = min(request.computed // self.settings.page, len(request.chain.keys))
        if not self.settings.reuse or full <= request.named:
            return request
        for table, pool in zip(request.tables, self._pools(request), strict=True):
            for number in range(request.named, full):
                if table[number]:
                    pool.name(table[number], request.chain.keys[number])
        return request._replace(named=full)

    def _preempt(self, request: Request) -> None:
        """Makes a request wait that ran. None of its tokens is in this step yet: younger requests come later."""
        self._release(request)
        self.preempted.append(request.id)
        waits = request._replace(computed=0, named=0, slot=-1, tables=self._no_tables())
        self.waiting = _in_order([waits, *self.waiting.values()])  # of its group, all others that wait came later

    def _end(self, request: Request) -> None:
        if request.slot >= 0:
            self._release(self._named(request))

    def _release(self, request: Request) -> None:
        """Gives back all pages of a request that runs. No token of it is in this step."""
        for table, pool in zip(request.tables, self._pools(request), strict=True):
            pool.release([page for page in table if page])

    def _admit(self) -> bool:
        """Lets the first request that waits run, if a group has pages for all of its tokens and one more."""
        request = next(iter(self.waiting.values()))
        if request.flying:  # it was preempted, and its last token is not known yet
            return False
        found = [its for group in range(self.settings.groups) if (its := self._place(request, group)) is not None]
        if not found:
            return False
        place = min(found, key=lambda its: its.cost)
        reused = place.reused * self.settings.page
        admitted = request._replace(computed=reused, named=place.reused, slot=place.slot, tables=place.tables)
        for pool, table in zip(self._pools(admitted), place.tables, strict=True):
            pool.share([page for page in table if page])
        del self.waiting[request.id]
        self.running = _in_order([*self.running.values(), admitted])
        self.admitted.append((request.id, reused))
        self._continue(admitted)
        return True

    def _place(self, request: Request, group: int) -> _Place | None:
        """Where a request can run in a group; None if it lacks a slot, pages, or place for a block."""
        settings, running = self.settings, self._of_group(group)
        used, first = {other.slot for other in running}, group * settings.max_rows
        slot = next((slot for slot in range(first, first + settings.max_rows) if slot not in used), None)
        if slot is None:
            return None
        pools = self.pools[group]
        keys = request.chain.keys[: (request.total - 1) // settings.page]  # the logits of its last token are needed
        count = reusable(keys, pools, settings.windows, settings.page) if settings.reuse else 0
        reused = count * settings.page
        if request.total - reused > 1 and not self._blocks_left(slot):
            return None
        tables: list[tuple[int, ...]] = []
        for pool, window in zip(pools, settings.windows, strict=True):
            start = first_page(reused, window, settings.page)
            shared = [pool.find(key) or 0 for key in keys[start:count]]
            further = -(-(request.total + 1) // settings.page) - count
            further = min(further, settings.most_pages(window) - len(shared))
            if further > pool.num_free - sum(map(pool.is_free, shared)):
                return None
            tables.append((*(0,) * start, *shared))
        return _Place(-(-(request.total - reused) // settings.page) + len(running), slot, count, tuple(tables))


def _in_order(requests: Iterable[Request]) -> dict[int, Request]:
    """Requests by id, in the order of their arrival."""
    return {request.id: request for request in sorted(requests, key=lambda its: its.number)}
