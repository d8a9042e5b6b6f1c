"""What `/metrics` tells: Prometheus text, under vLLM's names where vLLM has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ballast.core.report import DeviceReport
from ballast.server.timing import Timing

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_BUCKETS_FIRST = (*_FIRST, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_BUCKETS_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_BUCKETS_ALL = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Seconds."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts and times of requests as this server saw them, and the device's last report."""

    def __init__(self, report: Callable[[], DeviceReport | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_DeviceCollector(report))
        label = ("model_name",)

        def counter(name: str, help: str, *more: str) -> Counter:
            return Counter(name, help, (*label, *more), registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, label, buckets=buckets, registry=self.registry)

        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of answered requests")
        self._generated = counter("vllm:generation_tokens", "Tokens generated")
        self._success = counter(
            "vllm:request_success", "Requests answered in full", "finished_reason"
        )
        self._failed = counter("ballast_request_failure", "Requests that failed", "code")
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to first token", _BUCKETS_FIRST
        )
        self._gap = histogram(
            "vllm:time_per_output_token_seconds", "From token to token", _BUCKETS_TOKEN
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token after the first, by request",
            _BUCKETS_TOKEN,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to last token", _BUCKETS_ALL
        )

    def token(self, model: str, timing: Timing, prompt_tokens: int, now: float) -> None:
        """A token came."""
        if timing.last is None:
            timing.first = now
            self._ttft.labels(model).observe(now - timing.arrived)
            self._prompt.labels(model).inc(prompt_tokens)
        else:
            self._gap.labels(model).observe(now - timing.last)
        timing.last = now
        self._generated.labels(model).inc()

    def finished(
        self, model: str, timing: Timing, output_tokens: int, reason: str, now: float
    ) -> None:
        """A request has ended well."""
        self._success.labels(model, reason).inc()
        self._e2e.labels(model).observe(now - timing.arrived)
        if timing.first is not None and timing.last is not None and output_tokens > 1:
            self._tpot.labels(model).observe((timing.last - timing.first) / (output_tokens - 1))

    def failed(self, model: str, code: str) -> None:
        """A request has failed."""
        self._failed.labels(model, code).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class _DeviceCollector(Collector):
    """The device's last report, at the moment of asking."""

    def __init__(self, report: Callable[[], DeviceReport | None]) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        if report is None:
            return
        yield from _pool(report)
        yield from _models(report)


def _pool(report: DeviceReport) -> Iterable[Metric]:
    pages = GaugeMetricFamily("ballast_pages", "Pages by owner", labels=("owner", "model"))
    held: dict[tuple[str, str], int] = {}
    for owner, n in report.owners.items():
        kind, _, name = owner.partition(":")
        key = (kind, "" if kind == "arena" else name)
        held[key] = held.get(key, 0) + n
    for key, n in held.items():
        pages.add_metric(key, n)
    yield pages
    for name, help, value in (
        ("ballast_page_bytes", "Bytes of a page", report.page_bytes),
        ("ballast_pool_pages", "Pages of the pool: owned, free and reclaiming", report.total),
        ("ballast_free_pages", "Pages that nobody owns", report.free),
        ("ballast_reclaiming_pages", "Pages given back, in use by a job", report.reclaiming),
    ):
        yield GaugeMetricFamily(name, help, value=value)
    yield CounterMetricFamily("ballast_jobs", "Jobs run", value=report.jobs)


def _models(report: DeviceReport) -> Iterable[Metric]:
    label = ("model_name",)
    for name, help, field in (
        ("vllm:num_requests_running", "Requests in the batch", "running"),
        ("vllm:num_requests_waiting", "Requests that wait for memory or a place", "waiting"),
        ("ballast_cached_pages", "Pages that hold cached prefixes only", "cached_pages"),
    ):
        gauge = GaugeMetricFamily(name, help, labels=label)
        for m in report.models:
            gauge.add_metric((m.name,), getattr(m, field))
        yield gauge
    for name, help, field in (
        ("vllm:num_preemptions", "Requests preempted", "preemptions"),
        ("ballast_activations", "Times its weights were brought in", "activations"),
        ("ballast_evictions", "Times its weights were evicted", "evictions"),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", "cached_tokens"),
    ):
        counter = CounterMetricFamily(name, help, labels=label)
        for m in report.models:
            counter.add_metric((m.name,), getattr(m, field))
        yield counter
    residency = GaugeMetricFamily(
        "ballast_residency", "1: where its weights are", labels=("model_name", "residency")
    )
    for m in report.models:
        residency.add_metric((m.name, m.residency), 1)
    yield residency
