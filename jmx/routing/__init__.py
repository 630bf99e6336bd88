"""Routing: from router logits to expert ids and weights. The methods are in `jmx.routing.methods`."""

from jmx.routing.logits import Logits, route
from jmx.routing.methods import (
    ROUTING_METHODS,
    SCORINGS,
    Custom,
    GroupedTopK,
    Method,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
    get,
)
from jmx.routing.routing import NOWHERE, Routing, as_int32, check_mask, token_counts, validate

__all__ = [
    "NOWHERE",
    "ROUTING_METHODS",
    "SCORINGS",
    "Custom",
    "GroupedTopK",
    "Logits",
    "Method",
    "Routing",
    "SigmoidTopK",
    "SoftmaxTopK",
    "SqrtSoftplusTopK",
    "TopKSoftmax",
    "as_int32",
    "check_mask",
    "get",
    "route",
    "token_counts",
    "validate",
]
