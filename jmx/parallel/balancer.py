"""The balancer: a placement that gives ranks equal loads, from the tokens that each expert got. On the host, in numpy.

The method is that of DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB): groups of experts to hosts where routing is
limited to groups, greedy replication, packing. Added are exchanges of slots after packing, copies of an expert on
different ranks only, and a choice among placements that are as good of the one that moves the fewest weights.
"""

from dataclasses import dataclass

import numpy as np

from jmx.parallel import keeping, packing
from jmx.parallel.loads import check_counts
from jmx.parallel.packing import Table
from jmx.parallel.placement import EMPTY, Placement, check_alike, check_placement, most_copies, slots_needed
from jmx.util.checks import check_int, check_one_of
from jmx.util.typing import AnyArray, Float, Int, Num

POLICIES = ("auto", "global", "hierarchical")

_TOLERANCE = 1.01  # a load that is larger by less counts as equal
_FEWER = (0, 1, 2, 3, *(1 << i for i in range(2, 16)))  # so many copies less than there are slots are tried


def balance(
    counts: Num[AnyArray, "*layers E"],
    num_ranks: int,
    spare_experts: int = 0,
    ranks_per_host: int | None = None,
    groups: int | None = None,
    before: Placement | None = None,
    *,
    policy: str = "auto",
) -> Placement:
    """The placement whose fullest rank has little load for tokens routed as `counts`, and that moves few weights.

    The load of an expert is divided equally among its copies. The fullest rank has no more load than with `before` and
    with `Placement.identity`, where these keep to the policy. Among placements within 1 % of the best one found the one
    that moves the fewest slots from `before` is taken, and the next one from there, until none is better by 1 %: the
    placement itself as `before` is returned unchanged. An expert that stays on its rank keeps its slot. The same
    arguments give the same placement.

    Args:
        counts: the tokens of each expert, (E,), or (L, E) for a placement of L layers: finite numbers, 0 or more, such
            as sums of `jmx.token_counts`.
        num_ranks: the number of ranks. Those of a host have consecutive numbers.
        spare_experts: slots beside one an expert, for copies, rounded up as by `Placement.identity`.
        ranks_per_host: the number of ranks of a host; None: all are on one.
        groups: the number of groups of experts, if tokens are routed to experts of few groups only, as by
            `jmx.GroupedTopK`.
        before: the placement that the weights have now; None: `Placement.identity`.
        policy: "hierarchical": whole groups go to hosts, and an expert's copies are on one host, so that a token is
            sent to as few hosts as it has groups; "global": experts go to any rank; "auto": see `choose_policy`.

    Raises:
        TypeError, ValueError: wrong arguments, such as groups that do not divide the experts, or a `before` of other
            sizes.
    """
    loads = check_counts(counts)
    layers, num_experts = loads.shape[:-1], loads.shape[-1]
    num_slots = slots_needed(num_experts, num_ranks, spare_experts)
    hosts = _check_hosts(num_experts, num_ranks, ranks_per_host, groups)
    if choose_policy(hosts, groups, policy) == "global":
        hosts, groups = 1, 1
    if before is None:
        identity = Placement.identity(num_experts, num_ranks, spare_experts)
        before = Placement.stack([identity] * layers[0]) if layers else identity
    check_placement("before", before, layers=layers)
    check_alike("before", before, Placement.identity(num_experts, num_ranks, spare_experts))
    sizes = _Sizes(num_ranks, num_slots // num_ranks, hosts, groups or 1)
    old = np.asarray(before.expert_of_slot).reshape(-1, num_ranks, sizes.per_rank)
    pairs = zip(loads.reshape(-1, num_experts), old, strict=True)
    table = np.stack([_balance_layer(*pair, sizes) for pair in pairs]).reshape(*layers, num_slots)
    return Placement.of(table, num_experts=num_experts, num_ranks=num_ranks)


def choose_policy(hosts: int, groups: int | None, policy: str = "auto") -> str:
    """The policy that "auto" stands for: "hierarchical" if hosts, more than one, divide the groups; else "global".

    This is DeepSeek's rule. Another policy is returned as it is.

    Raises:
        ValueError, TypeError: an unknown policy, or "hierarchical" where hosts do not divide the groups.
    """
    check_one_of("policy", policy, POLICIES)
    possible = groups is not None and groups % hosts == 0
    if policy == "hierarchical" and not possible:
        raise ValueError(f"`policy` (='hierarchical') needs `groups` (={groups}), a multiple of the {hosts} hosts")
    if policy == "auto":
        return "hierarchical" if possible and hosts > 1 else "global"
    return policy


def _check_hosts(num_experts: int, num_ranks: int, ranks_per_host: int | None, groups: int | None) -> int:
    """The number of hosts."""
    if groups is not None and num_experts % check_int("groups", groups, least=1):
        raise ValueError(f"`groups` (={groups}) must divide the {num_experts} experts")
    if ranks_per_host is None:
        return 1
    if num_ranks % check_int("ranks_per_host", ranks_per_host, least=1):
        raise ValueError(f"`ranks_per_host` (={ranks_per_host}) must divide `num_ranks` (={num_ranks})")
    return num_ranks // ranks_per_host


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one layer's problem; one host and one group with the policy "global"."""

    num_ranks: int
    per_rank: int
    hosts: int
    groups: int


def _balance_layer(loads: Float[np.ndarray, " E"], before: Table, sizes: _Sizes) -> Table:
    """The table of one layer, improved until nothing found is better by 1 %: balancing it again moves nothing."""
    table = before
    while True:
        # An expert may leave a rank and come back, so what it keeps is its slot in the first table.
        better = keeping.kept(_improve_layer(loads, table, sizes), before, sizes.hosts)
        if np.array_equal(better, table):
            return table
        table = better


def _improve_layer(loads: Float[np.ndarray, " E"], before: Table, sizes: _Sizes) -> Table:
    """Of the tables within 1 % of the best one found, the one that moves the fewest slots; `before` if it is one."""
    slots = np.arange(before.size, dtype=np.int32)
    identity = np.where(slots < len(loads), slots, EMPTY).reshape(before.shape)
    given = [table for table in (before, identity) if _experts_of_hosts(table, len(loads), sizes)]
    found = [*given, _solve(loads, _assign_groups(loads, sizes), sizes, None)]
    if experts := _experts_of_hosts(before, len(loads), sizes):
        found.append(_solve(loads, experts, sizes, before))
    found = [keeping.kept(table, before, sizes.hosts) for table in found]
    fullest = [float(packing.rank_totals(loads, table).max()) for table in found]
    limit = min([min(fullest) * _TOLERANCE, *fullest[: len(given)]])
    return min(
        (table for table, load in zip(found, fullest, strict=True) if load <= limit),
        key=lambda table: keeping.moves(table, before),
    )


def _assign_groups(loads: Float[np.ndarray, " E"], sizes: _Sizes) -> list[Int[np.ndarray, " _"]]:
    """The experts of each host: as many whole groups each, of nearly equal loads."""
    groups = np.arange(len(loads)).reshape(sizes.groups, -1)
    totals = loads[groups].sum(1)
    table = packing.pack(totals, np.ones(len(totals), np.int64), sizes.hosts, sizes.groups // sizes.hosts)
    return [np.sort(groups[row].reshape(-1)) for row in packing.refine(totals, table, 0)]


def _experts_of_hosts(table: Table, num_experts: int, sizes: _Sizes) -> list[Int[np.ndarray, " _"]]:
    """The experts of each host, if each group is on one host only; else nothing."""
    hosts = table.reshape(sizes.hosts, -1)
    experts = [np.unique(host[host != EMPTY]) for host in hosts]
    group_size = num_experts // sizes.groups
    groups = [{*(its // group_size).tolist()} for its in experts]
    return experts if sum(map(len, groups)) == sizes.groups else []


def _solve(
    loads: Float[np.ndarray, " E"], experts: list[Int[np.ndarray, " _"]], sizes: _Sizes, start: Table | None
) -> Table:
    """The table of all hosts, each with its experts; changed from `start`, or packed from nothing."""
    tables = []
    for host, its in enumerate(experts):
        ranks = sizes.num_ranks // sizes.hosts
        if not len(its):  # with many spare slots a placement may leave a host empty
            tables.append(np.full((ranks, sizes.per_rank), EMPTY))
            continue
        local = None if start is None else start[host * ranks : (host + 1) * ranks]
        if local is not None:
            local = np.where(local == EMPTY, EMPTY, np.searchsorted(its, local)).astype(np.int32)
        table = _solve_host(loads[its], ranks, sizes.per_rank, local)
        tables.append(np.where(table == EMPTY, EMPTY, its[table]))
    return np.concatenate(tables).astype(np.int32)


def _solve_host(loads: Float[np.ndarray, " E"], num_ranks: int, per_rank: int, start: Table | None) -> Table:
    """The best table of some numbers of copies, the largest first: a copy less may be packed better."""
    num_experts, num_slots = len(loads), num_ranks * per_rank
    most = most_copies(num_experts, num_slots, num_ranks)
    share = (loads / packing.replicate(loads, num_slots, most)).max()  # the least that the largest copy can have
    enough = max(loads.sum() / num_ranks, share) * _TOLERANCE  # no table has less than that maximum
    best, least = None, np.inf
    spare = num_slots - num_experts
    for fewer in (*(fewer for fewer in _FEWER if fewer < spare), spare):
        copies = packing.replicate(loads, num_slots - fewer, most)
        table = (
            packing.pack(loads, copies, num_ranks, per_rank) if start is None else packing.adjust(loads, copies, start)
        )
        table = packing.refine(loads, table, enough)
        fullest = float(packing.rank_totals(loads, table).max())
        if fullest < least:
            best, least = table, fullest
        if least <= enough:
            break
    assert best is not None
    return best
