"""Counts and times of a server, and their Prometheus text.

Counting is a plain addition, in the event loop; what it costs to make Prometheus' text of it is paid by who asks for it.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retriever.batching import Batch, Batcher
from retriever.cache import AnswerCache
from retriever.query import Refused

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["CONTENT_TYPE", "Histogram", "Metrics", "MetricsMissing"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STAGES = ("queue", "encode", "search")


class MetricsMissing(Refused):
    """prometheus-client is not installed."""

    status = 501


class Histogram:
    """Counts of values by upper bounds, their number and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of an upper bound and the number of values at or below it, the last one `+Inf`."""
        names = [*map(str, self.bounds), "+Inf"]
        return [(name, float(sum(self.counts[: i + 1]))) for i, name in enumerate(names)]


class Metrics:
    """What a server counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.queries = 0
        self.reloads: Counter[str] = Counter()  # by how they went
        self.request_s = Histogram(SECONDS)  # of /retrieve, answered with 200
        self.batch_items = Histogram(BATCH_SIZES)
        self.stage_s = {stage: Histogram(SECONDS) for stage in STAGES}
        self.cache: Callable[[], AnswerCache | None] = lambda: None
        self.batcher: Callable[[], Batcher[Any, Any, Any] | None] = lambda: None

    def answered(self, queries: int, seconds: float) -> None:
        """Count a request to /retrieve that was answered."""
        self.requests["/retrieve", 200] += 1
        self.queries += queries
        self.request_s.observe(seconds)

    def batch(self, batch: Batch) -> None:
        """Count a batch."""
        self.batch_items.observe(batch.items)
        self.stage_s["queue"].observe(batch.queue_s)
        self.stage_s["encode"].observe(batch.prepare_s)
        self.stage_s["search"].observe(batch.work_s)

    def render(self) -> bytes:
        """Prometheus' text.

        Raises:
            MetricsMissing: prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ImportError as error:
            raise MetricsMissing("/metrics needs prometheus-client: pip install 'agentrl[retriever]'") from error
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self))
        return generate_latest(registry)


class _Collector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        requests = CounterMetricFamily("retriever_requests", "Requests answered.", labels=["route", "status"])
        for (route, status), count in metrics.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        yield CounterMetricFamily("retriever_queries", "Queries answered.", value=metrics.queries)
        reloads = CounterMetricFamily("retriever_reloads", "Times that the index was opened again.", labels=["outcome"])
        for outcome in ("done", "failed"):
            reloads.add_metric([outcome], metrics.reloads[outcome])
        yield reloads
        for name, about, histogram in (
            ("retriever_request_seconds", "From a request's head to its answer, /retrieve with 200.", metrics.request_s),
            ("retriever_batch_queries", "Queries of a batch.", metrics.batch_items),
        ):
            yield HistogramMetricFamily(name, about, buckets=histogram.cumulative(), sum_value=histogram.total)
        stages = HistogramMetricFamily("retriever_stage_seconds", "Of a batch in a stage; in the queue, the mean of its queries.", labels=["stage"])
        for stage, histogram in metrics.stage_s.items():
            stages.add_metric([stage], buckets=histogram.cumulative(), sum_value=histogram.total)
        yield stages
        for name, about, value in _gauges(metrics):
            yield GaugeMetricFamily(name, about, value=value)
        for name, about, value in _counts(metrics):
            yield CounterMetricFamily(name, about, value=value)


def _gauges(metrics: Metrics) -> Iterable[tuple[str, str, float]]:
    batcher, cache = metrics.batcher(), metrics.cache()
    yield "retriever_queue_depth", "Queries that wait.", batcher.waiting if batcher is not None else 0
    yield "retriever_cache_entries", "Answers in the cache.", len(cache) if cache is not None else 0
    yield "retriever_cache_bytes", "Their size, estimated.", cache.bytes if cache is not None else 0
    yield "retriever_resident_memory_bytes", "Of the process, pages of mapped files included.", _resident_bytes()
    if (faiss := sys.modules.get("faiss")) is not None:
        threshold = faiss.cvar.distance_compute_blas_threshold
        yield "retriever_faiss_blas_threshold", "FAISS searches by a matrix product from this number on (queries, or queries x dim).", threshold


def _counts(metrics: Metrics) -> Iterable[tuple[str, str, float]]:
    batcher, cache = metrics.batcher(), metrics.cache()
    yield "retriever_cache_hits", "Queries answered from the cache, of the index that is served.", cache.hits if cache is not None else 0
    yield "retriever_cache_misses", "Queries that were not there.", cache.misses if cache is not None else 0
    yield "retriever_cpu_seconds", "User and system time of the process.", time.process_time()
    yield "retriever_merged_queries", "Queries that joined an equal one that waited or was worked on.", batcher.merged if batcher is not None else 0
    yield "retriever_dropped_queries", "Queries dropped before any work: nobody waited for them.", batcher.dropped if batcher is not None else 0


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0
