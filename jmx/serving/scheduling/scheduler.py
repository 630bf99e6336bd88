"""The scheduler: which tokens of which requests the next step computes, and in which pages of the cache they are.

Requests are served in the order of arrival. Every running request whose prompt is in the cache has a row in every
step, and blocks of prompts fill what the budget leaves. If there is no page for a request, the youngest one that runs
gives its own back and is computed again later. The oldest one is never preempted, so each step brings it nearer to its
end.

A plan is made while the step before it is computed. Steps are computed in order, so pages that one step has read last
may be written by the next one, but not by the same: pages are released when a plan is complete.
"""

from collections.abc import Sequence

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


class _Planner:
    """A plan in the making. It changes copies of the pools only."""

    def __init__(self, state: State):
        self.settings = state.settings
        self.pools = tuple(pool.copy() for pool in state.pools)
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
        return Request(event.id, chain, length, most, event.waits, event.alone, self._no_tables())

    def _no_tables(self) -> tuple[tuple[int, ...], ...]:
        return ((),) * len(self.pools)

    def plan(self) -> tuple[State, Plan]:
        for request in [request for request in self.running.values() if request.known >= request.most]:
            self._end(self.running.pop(request.id))
        self.steps = self._steps()
        for id in [*self.running]:  # from the oldest on; those that are preempted meanwhile come later
            if id in self.running:
                self._continue(self.running[id])
        while self.waiting and len(self.running) < self.settings.max_rows and self._admit():
            pass
        for pool, pages in self.released:
            pool.release(pages)
        state = State(self.settings, self.pools, tuple(self.waiting.values()), tuple(self.running.values()))
        rows, blocks = tuple(self.rows), tuple(self.blocks)
        return state, Plan(rows, blocks, tuple(self.admitted), tuple(self.preempted), self.steps)

    def _steps(self) -> int:
        """How many tokens each row draws: several only if all rows can, and nothing waits that could run meanwhile."""
        count, page = self.settings.decode_steps, self.settings.page
        rows = [request for request in self.running.values() if request.total < request.most]
        if count == 1 or self.waiting or not 0 < len(rows) <= self.settings.decode_rows:
            return 1
        for request in rows:
            if request.alone or request.waits or request.total + count > request.most:
                return 1
            if request.total - request.computed > 1:  # its prompt is not in the cache
                return 1
        for number, pool in enumerate(self.pools):
            needed = (-(-(its.total + count - 1) // page) - len(its.tables[number]) for its in rows)
            if sum(max(its, 0) for its in needed) > pool.num_free:
                return 1
        return count

    def _continue(self, request: Request) -> None:
        """Plans what a running request needs next, as far as there are pages and budget for it."""
        if request.total >= request.most or (request.waits and request.flying):
            return
        end = request.total + self.steps - 1
        if request.total - request.computed > 1:
            end = min(end, request.computed + self._blocks_left() * self.settings.page)
        while end > request.computed:
            if (tables := self._tables(request, end)) is not None:
                self._compute(request, end, tables)
                return
            youngest = next(reversed(self.running))
            if youngest == request.id:  # it goes on when older ones have ended
                return
            self._preempt(self.running.pop(youngest))

    def _blocks_left(self) -> int:
        """Blocks that this step has place for, besides a token of every request that may run."""
        settings = self.settings
        by_budget = (settings.budget - settings.max_rows) // settings.page
        return min(settings.max_blocks, by_budget) - len(self.blocks)

    def _tables(self, request: Request, end: int) -> list[tuple[int, ...]] | None:
        """The tables with pages for tokens up to `end`; None if a pool lacks some."""
        further = [-(-end // self.settings.page) - len(its) for its in request.tables]
        if any(count > pool.num_free for count, pool in zip(further, self.pools, strict=True)):
            return None
        kinds = zip(request.tables, further, self.pools, strict=True)
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
        for number, window in enumerate(self.settings.windows):
            if window is not None:
                tables[number] = self._seen(self.pools[number], tables[number], first_page(end, window, page))
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
        for table, pool in zip(request.tables, self.pools, strict=True):
            for number in range(request.named, full):
                if table[number]:
                    pool.name(table[number], request.chain.keys[number])
        return request._replace(named=full)

    def _preempt(self, request: Request) -> None:
        """Makes a request wait that ran. None of its tokens is in this step yet: younger requests come later."""
        self._release(request)
        self.preempted.append(request.id)
        waits = request._replace(computed=0, named=0, slot=-1, tables=self._no_tables())
        self.waiting = {request.id: waits} | self.waiting  # it arrived before all others that wait

    def _end(self, request: Request) -> None:
        self._release(self._named(request))

    def _release(self, request: Request) -> None:
        """Gives back all pages of a request. No token of it is in this step."""
        for table, pool in zip(request.tables, self.pools, strict=True):
            pool.release([page for page in table if page])

    def _admit(self) -> bool:
        """Lets the first request that waits run, if there are pages for all of its tokens and one more."""
        settings, request = self.settings, next(iter(self.waiting.values()))
        if request.flying:  # it was preempted, and its last token is not known yet
            return False
        keys = request.chain.keys[: (request.total - 1) // settings.page]  # the logits of its last token are needed
        count = reusable(keys, self.pools, settings.windows, settings.page) if settings.reuse else 0
        reused = count * settings.page
        if not self._blocks_left() and request.total - reused > 1:
            return False
        tables: list[tuple[int, ...]] = []
        for pool, window in zip(self.pools, settings.windows, strict=True):
            start = first_page(reused, window, settings.page)
            shared = [pool.find(key) or 0 for key in keys[start:count]]
            further = -(-(request.total + 1) // settings.page) - count
            further = min(further, settings.most_pages(window) - len(shared))
            if further > pool.num_free - sum(map(pool.is_free, shared)):
                return False
            tables.append((*(0,) * start, *shared))
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share([page for page in table if page])
        used = {other.slot for other in self.running.values()}
        slot = next(slot for slot in range(settings.max_rows) if slot not in used)
        del self.waiting[request.id]
        admitted = request._replace(computed=reused, named=count, slot=slot, tables=tuple(tables))
        self.running[request.id] = admitted
        self.admitted.append((request.id, reused))
        self._continue(admitted)
        return True
