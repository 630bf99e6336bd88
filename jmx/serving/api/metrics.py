"""Metrics in Prometheus' text form: what the server measures itself, and what the engine reports."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jmx.serving.client import EngineClient

_FIRST = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_BETWEEN = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("jmx_requests", "Answers, by status of HTTP.", ["status"], registry=self.registry)
        self.prompt_tokens = Counter("jmx_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.new_tokens = Counter("jmx_new_tokens", "Generated tokens.", registry=self.registry)
        self.first_token = Histogram(
            "jmx_time_to_first_token_seconds",
            "From a request to its first token.",
            buckets=_FIRST,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "jmx_inter_token_seconds",
            "Between tokens of a request that the server receives one after the other.",
            buckets=_BETWEEN,
            registry=self.registry,
        )

    def watch(self, client: "EngineClient") -> None:
        """Adds what an engine reports."""
        self.registry.register(_Engine(client))

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self.registry)


class _Engine(Collector):
    """The engine's last report."""

    def __init__(self, client: "EngineClient"):
        self._client = client

    def collect(self) -> "Iterator[GaugeMetricFamily | CounterMetricFamily]":
        client, report = self._client, self._client.report
        yield GaugeMetricFamily("jmx_ready", "Whether requests are served.", int(client.status == "ready"))
        if report is None:
            return
        yield GaugeMetricFamily("jmx_requests_waiting", "Requests that wait for their turn.", report.waiting)
        yield GaugeMetricFamily("jmx_requests_running", "Requests that are in the cache.", report.running)
        used = GaugeMetricFamily("jmx_pages_used", "Pages of the cache that requests use, by pool.", labels=["pool"])
        whole = GaugeMetricFamily("jmx_pages", "Pages of the cache, by pool.", labels=["pool"])
        for pool, (count, size) in enumerate(report.pages):
            used.add_metric([str(pool)], count)
            whole.add_metric([str(pool)], size)
        yield used
        yield whole
        yield CounterMetricFamily("jmx_steps", "Steps computed.", report.steps)
        yield CounterMetricFamily("jmx_computed_prompt_tokens", "Tokens of prompts computed.", report.prompt_tokens)
        yield CounterMetricFamily("jmx_cached_prompt_tokens", "Tokens of prompts in the cache.", report.cached_tokens)
        yield CounterMetricFamily("jmx_preemptions", "Requests that were preempted, each time.", report.preempted)
        load = CounterMetricFamily(
            "jmx_expert_tokens", "Tokens of each expert, in one of 32 steps.", labels=["layer", "expert"]
        )
        for layer, experts in enumerate(report.load.tolist()):
            for expert, count in enumerate(experts):
                load.add_metric([str(layer), str(expert)], count)
        yield load
