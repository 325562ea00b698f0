"""Prometheus metrics of one server. Every series exists, at zero, from the start; no label takes a value from a request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pocketllm.backends.base import EngineStats
from pocketllm.outputs import TokenEvent

Outcome = Literal["stop", "length", "tool_calls", "cancelled", "timeout", "error", "refused", "rejected"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The bucket limits, in seconds, are those of vLLM, so that dashboards and alerts carry over.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_END_TO_END = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Metrics:
    """Counters and histograms of one server, in a registry of their own.

    Args:
        stats: the engine's gauges and totals now; zeros while it loads.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.first_token = self._histogram("time_to_first_token_seconds", "From the arrival of a request to its first token.", _FIRST_TOKEN)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", _INTER_TOKEN)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "From the arrival of a request to the end of its answer.", _END_TO_END)
        requests = Counter("pocketllm_requests", "Generation requests that have ended, by outcome.", ["outcome"], registry=self._registry)
        self._outcomes = {outcome: requests.labels(outcome) for outcome in get_args(Outcome)}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"pocketllm_{name}", text, buckets)
        self._registry.register(histogram)
        return histogram

    def count(self, outcome: Outcome) -> None:
        """One more generation request has ended so."""
        self._outcomes[outcome].inc()

    def render(self) -> bytes:
        """All series in Prometheus text format 0.0.4."""
        return generate_latest(self._registry)


class Histogram(Collector):
    """A histogram that one thread observes. The library's own takes two locks and walks through the buckets, which each streamed token would pay.

    Args:
        name, text: of the series.
        bounds: upper limits of the buckets, in rising order; one for anything above is added.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._labels = [str(float(bound)) for bound in bounds] + ["+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, buckets=list(zip(self._labels, accumulate(self._counts), strict=True)), sum_value=self._sum)


class RequestClock:
    """Times one request, from its construction to `end`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._last: float | None = None
        self._has_ended = False

    def event(self, event: TokenEvent) -> None:
        """Tokens have come."""
        count = len(event.token_ids)
        if not count:
            return
        now = time.perf_counter()
        gap = 0.0  # tokens that come with the first one
        if self._last is None:
            self._metrics.first_token.observe(now - self._arrival)
            count -= 1
        else:
            gap = (now - self._last) / count
        for _ in range(count):
            self._metrics.inter_token.observe(gap)
        self._last = now

    def end(self, outcome: Outcome) -> None:
        """The request has ended. Later calls say nothing new."""
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.count(outcome)
        if outcome in ("stop", "length", "tool_calls"):
            self._metrics.end_to_end.observe(time.perf_counter() - self._arrival)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield GaugeMetricFamily("pocketllm_num_requests_running", "Requests in the running batch.", value=stats.running)
        yield GaugeMetricFamily("pocketllm_num_requests_waiting", "Requests in the queue.", value=stats.waiting)
        yield GaugeMetricFamily("pocketllm_kv_cache_usage_ratio", "Used part of the KV cache, 0 to 1.", value=usage)
        yield CounterMetricFamily("pocketllm_prompt_tokens", "Prompt tokens of the requests that ran.", value=stats.prompt_tokens)
        yield CounterMetricFamily("pocketllm_generation_tokens", "Tokens generated.", value=stats.generated_tokens)
        yield CounterMetricFamily("pocketllm_prefix_cache_hit_tokens", "Prompt tokens whose KV came from the prefix cache.", value=stats.cached_tokens)
        yield CounterMetricFamily("pocketllm_preemptions", "Times that a running request gave up its KV.", value=stats.preemptions)
        yield CounterMetricFamily(
            "pocketllm_expert_cache_queries", "Routed experts that steps needed, where experts stay in their file.", value=stats.expert_lookups
        )
        yield CounterMetricFamily("pocketllm_expert_cache_hits", "Of those, experts that were in memory.", value=stats.expert_hits)
        yield GaugeMetricFamily("pocketllm_expert_cache_bytes", "Bytes of the routed experts in memory.", value=stats.expert_bytes)
