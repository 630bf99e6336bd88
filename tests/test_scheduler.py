"""The scheduler, driven as a state machine: a cache that it plans for holds what each token has to attend to."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jmx.serving.scheduling import Drawn, End, Plan, Settings, State, Submit, Tokens, plan
from jmx.serving.scheduling.pages import Pool
from jmx.serving.scheduling.prefixes import Chain, first_page, reusable

VOCABULARY = 5
SETTINGS = [
    Settings((12, 7), (None, 5), max_length=30, max_rows=3, max_blocks=2, budget=11, page=4),
    Settings((40,), (None,), max_length=30, max_rows=5, max_blocks=3, budget=17, page=4),
    Settings((9, 9), (None, 1), max_length=9, max_rows=4, max_blocks=1, budget=6, page=2),
    Settings((30, 8), (None, 4), max_length=30, max_rows=2, max_blocks=4, budget=10, page=1),
]
# Each also with several tokens of a row in one plan.
SETTINGS += [replace(its, decode_steps=2 + number % 3, decode_rows=its.max_rows) for number, its in enumerate(SETTINGS)]
# And with groups of devices.
SETTINGS += [replace(its, groups=2 + number % 2) for number, its in enumerate(SETTINGS)]


def next_token(seen: Sequence[Sequence[int]]) -> int:
    """A model's next token: a hash of the tokens that it attends to in each kind of layer."""
    return hashlib.sha256(b"|".join(bytes(its) for its in seen)).digest()[0] % VOCABULARY


def answer(request: Submit, windows: Sequence[int | None]) -> list[int]:
    """The tokens that a request gets alone."""
    tokens = [*request.prompt]
    for _ in range(request.max_new_tokens):
        tokens.append(next_token([tokens if window is None else tokens[-window:] for window in windows]))
    return tokens[len(request.prompt) :]


class Device:
    """Executes plans on pools of pages that hold tokens instead of keys and values."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.pools = [
            [[[-1] * settings.page for _ in range(pages + 1)] for pages in settings.pages]
            for _ in range(settings.groups)
        ]
        self.last: dict[int, int] = {}  # by slot

    def run(self, step: Plan, texts: dict[int, list[int]]) -> list[tuple[int, int]]:
        """Writes all tokens of a step, then attends: as each layer does. Returns the drawn tokens."""
        drawn = self._run_once(step, texts)
        for number in range(1, step.steps):
            assert not step.blocks
            later = [replace(row, start=row.start + number) for row in step.rows]
            drawn += self._run_once(Plan(tuple(later)), texts)
        return drawn

    def _run_once(self, step: Plan, texts: dict[int, list[int]]) -> list[tuple[int, int]]:
        page = self.settings.page
        draws: list[tuple[Tokens, int]] = []
        for row in step.rows:
            text = texts[row.id]
            assert (row.count, row.draws) == (1, True)
            token = text[row.start] if row.start < len(text) else self.last[row.slot]
            self._write(row, [token])
            draws.append((row, row.start))
        for block in step.blocks:
            assert block.start % page == 0
            assert 1 <= block.count <= page
            self._write(block, texts[block.id][block.start : block.start + block.count])
            if block.draws:
                draws.append((block, block.start + block.count - 1))
        drawn = [(its, next_token(self._read(its, position))) for its, position in draws]
        self.last |= {its.slot: token for its, token in drawn}
        return [(its.id, token) for its, token in drawn]

    def _pools(self, item: Tokens) -> list[list[list[int]]]:
        return self.pools[self.settings.group_of(item.slot)]

    def _write(self, item: Tokens, tokens: Sequence[int]) -> None:
        for pool, table in zip(self._pools(item), item.tables, strict=True):
            for position, token in enumerate(tokens, item.start):
                number, at = divmod(position, self.settings.page)
                assert table[number] > 0, "a page that is read or written belongs to the request"
                pool[table[number]][at] = token

    def _read(self, item: Tokens, position: int) -> list[list[int]]:
        seen = []
        for pool, table, window in zip(self._pools(item), item.tables, self.settings.windows, strict=True):
            first = 0 if window is None else max(position - window + 1, 0)
            pages = range(first, position + 1)
            assert all(table[at // self.settings.page] for at in pages)
            seen.append([pool[table[at // self.settings.page]][at % self.settings.page] for at in pages])
        return seen


class Server:
    """The scheduler and a device, which the scheduler is one step ahead of, as in an engine."""

    def __init__(self, settings: Settings):
        self.settings, self.state, self.device = settings, State.of(settings), Device(settings)
        self.events: list = []
        self.texts: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.requests: dict[int, Submit] = {}
        self.stops: dict[int, int | None] = {}
        self.unread: list[tuple[int, int]] = []
        self.reused = 0

    def submit(self, request: Submit, stop: int | None = None) -> None:
        """`stop`: the number of the token with which it ends, if that is not its last."""
        self.stops[request.id] = stop
        self.requests[request.id], self.texts[request.id] = request, [*request.prompt]
        self.answers[request.id] = []
        self.events.append(request)

    def cancel(self, id: int) -> None:
        self.requests.pop(id, None)
        self.events.append(End(id))

    def step(self) -> Plan:
        self.state, step = plan(self.state, self.events)
        self.events = []
        unread, self.unread = self.unread, self.device.run(step, self.texts)
        for id, token in unread:
            if len(self.answers[id]) == self.stops[id]:  # tokens that were drawn after it
                continue
            self.texts[id].append(token)
            self.answers[id].append(token)
            self.events.append(Drawn(id, token))
            if len(self.answers[id]) == self.stops[id]:
                self.events.append(End(id))
        self.reused += sum(count for _, count in step.admitted)
        for group in range(self.settings.groups):
            rows, blocks = (
                sum(self.settings.group_of(item.slot) == group for item in items) for items in (step.rows, step.blocks)
            )
            assert rows <= self.settings.max_rows
            assert blocks <= self.settings.max_blocks
            assert rows + self.settings.page * blocks <= self.settings.budget
            assert step.steps == 1 or rows <= self.settings.decode_rows
        return step

    @property
    def unfinished(self) -> list[int]:
        return [id for id in self.requests if len(self.answers[id]) < self.wanted(id)]

    def wanted(self, id: int) -> int:
        """How many tokens a request gets."""
        return min(self.requests[id].max_new_tokens, self.stops[id] or 10**9)

    def check_pages(self) -> None:
        for group, pools in enumerate(self.state.pools):
            running = [its for its in self.state.running if self.settings.group_of(its.slot) == group]
            for number, pool in enumerate(pools):
                users = [page for request in running for page in request.tables[number] if page]
                for page in range(1, pool.size + 1):
                    assert pool.users(page) == users.count(page)
                    assert pool.is_free(page) == (page not in users)
        assert not any(page for request in self.state.waiting for table in request.tables for page in table)
        slots = [request.slot for request in self.state.running]
        assert len({*slots}) == len(slots)
        assert all(0 <= slot < self.settings.groups * self.settings.max_rows for slot in slots)
        for requests in (self.state.running, self.state.waiting):
            numbers = [request.number for request in requests]
            assert numbers == sorted(numbers)

    def finish(self) -> None:
        """Runs until nothing is left, within a bound: each step brings the oldest request nearer to its end."""
        needed = sum(
            -(-(len(its.prompt) + its.max_new_tokens) // self.settings.page) + 2 * its.max_new_tokens + 3
            for its in self.requests.values()
        )
        for _ in range(needed + 3):
            self.step()
            if not self.unfinished and not self.unread and not self.state.running:
                break
        assert not self.unfinished
        for id, request in self.requests.items():
            assert self.answers[id] == answer(request, self.settings.windows)[: self.wanted(id)]
        assert not self.state.running
        assert not self.state.waiting
        for pools in self.state.pools:
            assert [pool.num_free for pool in pools] == [*self.settings.pages]


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.servers: list[Server] = []

    @rule(settings=st.sampled_from(SETTINGS))
    @precondition(lambda self: not self.servers)
    def start(self, settings):
        self.servers = [Server(settings), Server(replace(settings, reuse=False))]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        new=st.integers(1, 12),
        salt=st.sampled_from([b"", b"a"]),
        waits=st.booleans(),
        alone=st.booleans(),
        stop=st.none() | st.integers(1, 12),
    )
    @precondition(lambda self: self.servers)
    def submit(self, prompt, new, salt, waits, alone, stop):
        most = self.servers[0].settings.max_length
        prompt = tuple(prompt[: most - 1])
        id = len(self.servers[0].texts)
        for server in self.servers:
            server.submit(Submit(id, prompt, min(new, most - len(prompt)), salt, waits, alone), stop)

    @rule(data=st.data())
    @precondition(lambda self: self.servers and self.servers[0].unfinished)
    def cancel(self, data):
        id = data.draw(st.sampled_from(self.servers[0].unfinished))
        for server in self.servers:
            server.cancel(id)

    @rule(count=st.integers(1, 8))
    @precondition(lambda self: self.servers)
    def step(self, count):
        for server in self.servers:
            for _ in range(count):
                server.step()

    @invariant()
    def pages_are_conserved(self):
        for server in self.servers:
            server.check_pages()

    def teardown(self):
        for server in self.servers:
            server.finish()


TestScheduler = Machine.TestCase
TestScheduler.settings = hypothesis_settings(max_examples=15, stateful_step_count=20)


def ran(server: Server, *requests: Submit) -> Server:
    for request in requests:
        server.submit(request)
    server.finish()
    return server


def test_equal_prompts_share_pages_of_one_salt_only():
    prompt = tuple(index % 3 for index in range(18))
    for salt, reused in ((b"", 16), (b"other", 0)):
        server = ran(Server(SETTINGS[1]), Submit(0, prompt, 2))
        assert ran(server, Submit(1, prompt, 2, salt)).reused == reused


def test_a_whole_prompt_in_the_cache_computes_its_last_page_again():
    prompt = tuple(index % 3 for index in range(16))
    server = ran(Server(SETTINGS[1]), Submit(0, prompt, 2))
    assert ran(server, Submit(1, prompt, 2)).reused == 12


def test_an_answer_is_reused_as_part_of_the_next_prompt():
    server = ran(Server(SETTINGS[1]), Submit(0, (1, 2, 3), 10))
    turn = (1, 2, 3, *server.answers[0], 1, 1)
    assert ran(server, Submit(1, turn, 2)).reused == 12


def test_windows_need_only_their_own_pages():
    """A prefix is reused where the pages in the window are known, though older ones of sliding layers are not."""
    pools = [Pool(8), Pool(8)]
    chain = Chain.of(b"").add(range(16), 4)
    for pool, keys in zip(pools, (chain.keys, chain.keys[2:3]), strict=True):
        for page, key in zip(pool.take(len(keys)), keys, strict=True):
            pool.name(page, key)
    assert reusable(chain.keys, pools, (None, 5), 4) == 3
    assert reusable(chain.keys, pools, (None, 6), 4) == 0
    assert reusable(chain.keys, pools, (None, 1), 4) == 4
    assert [first_page(12, window, 4) for window in (None, 1, 2, 5, 6, 99)] == [0, 3, 2, 2, 1, 0]


def test_rows_go_on_beside_a_long_prompt():
    server = Server(SETTINGS[1])
    server.submit(Submit(0, (1,), 20))
    server.step()
    server.submit(Submit(1, tuple(range(25)), 1))
    steps = [server.step() for _ in range(4)]
    assert [sum(block.count for block in step.blocks) for step in steps] == [12, 12, 0, 0]
    assert [[row.id for row in step.rows] for step in steps] == [[0], [0], [0, 1], [0]]


def test_rows_draw_several_tokens_where_nothing_waits():
    server = Server(SETTINGS[5])
    assert SETTINGS[5].decode_steps == 3
    server.submit(Submit(0, (1,), 9))
    assert [server.step().steps for _ in range(3)] == [1, 3, 3]
    server.submit(Submit(1, (1, 2, 3, 4, 5), 6, alone=True))
    assert [server.step().steps for _ in range(3)] == [1, 1, 1]
    server.submit(Submit(2, (1, 2), 3))
    server.finish()


def test_the_youngest_is_preempted_and_ends_all_the_same():
    settings = Settings((9,), (None,), max_length=32, max_rows=3, max_blocks=8, budget=40, page=4)
    server = Server(settings)
    for id in range(3):
        server.submit(Submit(id, (id, 1, 2, 3), 16))
    preempted = [id for _ in range(20) for id in server.step().preempted]
    assert preempted
    assert 0 not in preempted
    server.finish()


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("stop", [None, 2, 7])
def test_rows_that_draw_several_tokens_are_preempted_and_stopped(reuse, stop):
    """Pages run out after plans of several steps; the second request ends in the middle of one."""
    settings = Settings((10,), (None,), 32, 3, 8, 40, page=4, reuse=reuse, decode_steps=4, decode_rows=3)
    server = Server(settings)
    for id in range(3):
        server.submit(Submit(id, (1, 1, 2, 3), 20), stop if id == 1 else None)
    plans = [server.step() for _ in range(25)]
    assert any(step.steps == 4 and len(step.rows) == 3 for step in plans)
    if stop is None:
        assert any(step.preempted for step in plans)
    server.finish()


def test_groups_share_the_load_and_a_prefix_is_reused_where_it_is():
    settings = replace(SETTINGS[1], groups=3)
    server = Server(settings)
    prompt = tuple(index % 3 for index in range(24))
    for id in range(6):
        server.submit(Submit(id, (id, 1), 8))
    server.step()
    assert sorted(settings.group_of(its.slot) for its in server.state.running) == [0, 0, 1, 1, 2, 2]
    server.finish()
    server.submit(Submit(6, (1,), 4))
    server.submit(Submit(7, prompt, 1))
    server.step()
    assert [settings.group_of(its.slot) for its in server.state.running] == [0, 1]
    server.finish()
    server.submit(Submit(8, prompt, 1))
    assert server.step().admitted == ((8, 20),)
    assert [settings.group_of(its.slot) for its in server.state.running] == [1]
    server.finish()


def test_a_group_without_pages_preempts_its_own_youngest():
    """And the preempted one goes on in another group, if that has pages."""
    settings = Settings((9,), (None,), max_length=32, max_rows=2, max_blocks=8, budget=40, page=4, groups=2)
    server = Server(settings)
    for id, new in enumerate((26, 3, 26)):
        server.submit(Submit(id, (id, 1, 2, 3), new))
    groups, preempted = {}, []
    for _ in range(40):
        preempted += server.step().preempted
        for request in server.state.running:
            groups.setdefault(request.id, []).append(settings.group_of(request.slot))
    assert {*groups[0]} == {0}
    assert preempted == [2]
    assert {*groups[2]} == {0, 1}
    server.finish()


def test_wrong_requests_are_errors():
    state, _ = plan(State.of(SETTINGS[0]), [Submit(0, (1,), 1)])
    for wrong in (Submit(0, (1,), 1), Submit(1, (), 1), Submit(1, (1,), 0), Submit(1, (1,) * 30, 1)):
        with pytest.raises(ValueError, match="`"):
            plan(state, [wrong])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": 0}, "`page` .=0. must be at least 1"),
        ({"max_rows": 2.5}, "`max_rows` .*must be an integer"),
        ({"reuse": 1}, "`reuse`"),
        ({"pages": (7, 7)}, r"`pages\[0\]` .=7. must be at least 8"),
        ({"pages": (8, 3)}, r"`pages\[1\]` .=3. must be at least 4"),
        ({"pages": (8,)}, "`pages` .*one number for each"),
        ({"windows": (None, 0)}, r"`windows\[1\]`"),
        ({"budget": 6}, "`budget` .=6. must be at least 7"),
        ({"decode_steps": 0}, "`decode_steps` .=0. must be at least 1"),
        ({"decode_rows": 0}, "`decode_rows` .=0. must be at least 1"),
        ({"groups": 0}, "`groups` .=0. must be at least 1"),
    ],
)
def test_wrong_settings_are_errors(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(SETTINGS[0], **change)


def test_a_plan_changes_no_state():
    state, _ = plan(State.of(SETTINGS[0]), [Submit(0, (1, 2, 3, 4, 5), 3)])
    before = [pool.num_free for pool in state.pools[0]]
    first, second = plan(state, [Drawn(0, 1)]), plan(state, [Drawn(0, 1)])
    assert first[1] == second[1]
    assert [pool.num_free for pool in state.pools[0]] == before
    assert first[0].running == second[0].running


@pytest.mark.slow
def test_many_histories():
    many = hypothesis_settings(max_examples=500, stateful_step_count=60)
    run_state_machine_as_test(Machine, settings=many)
