"""Experts over many devices: where their copies are, how their load is balanced, and how their weights move."""

from jmx.parallel.balancer import POLICIES, balance, choose_policy
from jmx.parallel.exchange import Exchange
from jmx.parallel.exchanges import EXCHANGES
from jmx.parallel.expert_maps import expert_map, local_routing
from jmx.parallel.loads import Comparison, compare, imbalance, layer_counts, rank_loads
from jmx.parallel.placed_experts import PlacedExperts
from jmx.parallel.placement import Placement
from jmx.parallel.rebalancing import move, rebalance
from jmx.parallel.split import Split

__all__ = [
    "EXCHANGES",
    "POLICIES",
    "Comparison",
    "Exchange",
    "PlacedExperts",
    "Placement",
    "Split",
    "balance",
    "choose_policy",
    "compare",
    "expert_map",
    "imbalance",
    "layer_counts",
    "local_routing",
    "move",
    "rank_loads",
    "rebalance",
]
