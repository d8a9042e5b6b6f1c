"""Count and time requests for `/metrics`, in Prometheus text, under vLLM's names where vLLM has
one, but for its colon.

Answers (`generate`), `Service` and `request_watch` call it; `/metrics` and `/admin/state` read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from ballast.core.clock import Clock
from ballast.server.observe.latency import Recent, Timing
from ballast.server.observe.metric_names import ExportedMetrics
from ballast.server.observe.token_metrics import TokenCollector, Tokens

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_BUCKETS_FIRST = (*_FIRST, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_BUCKETS_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_BUCKETS_PREFILL = tuple(m * 10.0**e for e in range(-5, 0) for m in (1, 2, 5))
_BUCKETS_ALL = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Upper bounds of the buckets for whole durations, in seconds."""
_BUCKETS_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_BUCKETS_CHOICES = (1, 2, 5, 10, 20, 50, 100)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(slots=True)
class _OfModel:
    """The series of one model, looked up once: counting a token must cost next to nothing."""

    prompt: Counter
    tokens: Tokens
    ttft: Histogram
    recent_ttft: Recent
    recent_tpot: Recent


_TIMES = {
    "e2e_request_latency": "From arrival to last token",
    "request_queue_time": "From arrival at the device to admission",
    "request_prefill_time": "From admission to first token",
    "request_decode_time": "From first to last token",
    "request_inference_time": "From admission to last token",
}
"""Histograms of a request's times in seconds, and their help."""

_SIZES = {
    "request_prompt_tokens": "Tokens of a prompt",
    "request_generation_tokens": "Tokens of an output",
    "request_prefill_kv_computed_tokens": "Tokens of a prompt that no cached prefix had",
    "request_params_max_tokens": "`max_tokens`, where the client named it",
}
"""Histograms of a request's sizes in tokens, and their help."""


def _counter(registry: CollectorRegistry, name: str, help: str, *labels: str) -> Counter:
    return Counter(name, help, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, help: str, buckets: Iterable[float], *labels: str
) -> Histogram:
    names = labels or ("model_name",)
    return Histogram(name, help, names, buckets=tuple(buckets), registry=registry)


class Metrics:
    """Counts and times requests as this server saw them, and exports them with the metrics of
    `device`.

    Labels are names of models, routes and error codes: never text that a client chose.
    """

    def __init__(self, device: Collector, clock: Clock) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(device)
        ProcessCollector(registry=self.registry)
        self._clock = clock
        self._models: dict[str, _OfModel] = {}
        counter, histogram = partial(_counter, self.registry), partial(_histogram, self.registry)
        model = "model_name"
        self._prompt = counter("vllm_prompt_tokens", "Prompt tokens of answered requests", model)
        self._success = counter(
            "vllm_request_success", "Requests that ended without error", model, "finished_reason"
        )
        self._failed = counter("ballast_request_failure", "Requests that failed", model, "code")
        self._ttft = histogram(
            "vllm_time_to_first_token_seconds", "From arrival to first token", _BUCKETS_FIRST
        )
        older = "vllm_time_per_output_token_seconds"
        self._tokens = TokenCollector(
            ("vllm_generation_tokens", "Tokens generated"),
            (
                ("vllm_inter_token_latency_seconds", "From token to token"),
                (older, "The same, as vLLM called it before"),
            ),
            _BUCKETS_TOKEN,
        )
        self.registry.register(self._tokens)
        self._tpot = histogram(
            "vllm_request_time_per_output_token_seconds",
            "Mean time per output token after the first, by request",
            _BUCKETS_TOKEN,
        )
        self._per_prefill_token = histogram(
            "vllm_time_per_prefill_token_request_seconds",
            "Time from admission to first token, per prompt token that no cached prefix had",
            _BUCKETS_PREFILL,
        )
        self._times = {
            name: histogram(f"vllm_{name}_seconds", help, _BUCKETS_ALL)
            for name, help in _TIMES.items()
        }
        self._sizes = {
            name: histogram(f"vllm_{name}", help, _BUCKETS_TOKENS) for name, help in _SIZES.items()
        }
        self._n = histogram("vllm_request_params_n", "`n`", _BUCKETS_CHOICES)
        route = ("handler", "method")
        self._http = counter("http_requests", "HTTP requests answered", *route, "status")
        self._http_seconds = histogram(
            "http_request_duration_seconds", "To the end of the response", _BUCKETS_ALL, *route
        )
        self._errors = counter("ballast_http_errors", "Error responses", "status", "code")
        self.open_streams = Gauge(
            "ballast_open_streams", "Responses being streamed", registry=self.registry
        )
        self.connections = Gauge(
            "ballast_open_connections", "Connections of clients", registry=self.registry
        )

    def asked(self, model: str, choices: int, max_tokens: int | None) -> None:
        """Count an accepted request of a client."""
        self._n.labels(model).observe(choices)
        if max_tokens is not None:
            self._sizes["request_params_max_tokens"].labels(model).observe(max_tokens)

    def token(
        self,
        model: str,
        timing: Timing,
        prompt_tokens: int,
        now: float,
        queued: float | None = None,
    ) -> None:
        """Count a token; `queued`, given with the first token, is how long the request waited, in
        seconds."""
        of = self._models.get(model) or self._of(model)
        if timing.last is None:
            timing.first, timing.queued = now, queued
            of.ttft.observe(now - timing.arrived)
            of.recent_ttft.add(now - timing.arrived)
            of.prompt.inc(prompt_tokens)
        else:
            of.tokens.gap(now - timing.last)
        timing.last = now
        of.tokens.count += 1

    def finished(
        self,
        model: str,
        timing: Timing,
        prompt_tokens: int,
        output_tokens: int,
        reason: str,
        now: float,
        cached_tokens: int = 0,
    ) -> None:
        """Count a request that has finished, or (`abort`) that its client left. `cached_tokens`:
        tokens of its prompt that the prefix cache had."""
        self._success.labels(model, reason).inc()
        computed = prompt_tokens - cached_tokens
        if reason != "abort":
            self._sizes["request_prefill_kv_computed_tokens"].labels(model).observe(computed)
        self._sizes["request_prompt_tokens"].labels(model).observe(prompt_tokens)
        self._sizes["request_generation_tokens"].labels(model).observe(output_tokens)
        tpot = timing.tpot(output_tokens)
        if tpot is not None:
            self._tpot.labels(model).observe(tpot)
            (self._models.get(model) or self._of(model)).recent_tpot.add(tpot)
        self._time("e2e_request_latency", model, now - timing.arrived)
        if timing.first is None and reason != "abort":  # answered without tokens: an embedding
            self._prompt.labels(model).inc(prompt_tokens)
        if timing.first is not None and timing.last is not None:
            self._time("request_decode_time", model, timing.last - timing.first)
            if timing.queued is not None:
                admitted = timing.arrived + timing.queued
                self._time("request_queue_time", model, timing.queued)
                self._time("request_prefill_time", model, timing.first - admitted)
                if reason != "abort" and computed > 0:
                    each = max(0.0, timing.first - admitted) / computed
                    self._per_prefill_token.labels(model).observe(each)
                self._time("request_inference_time", model, timing.last - admitted)

    def failed(self, model: str, code: str) -> None:
        """Count a request that has failed."""
        self._failed.labels(model, code).inc()

    def answered(
        self, route: str | None, method: str, status: int, code: str | None, seconds: float
    ) -> None:
        """Count an HTTP request that is over. `route`: its path pattern; `code`: of the error, if
        any."""
        where = (route or "other", method if method in _METHODS else "other")
        self._http.labels(*where, str(status)).inc()
        self._http_seconds.labels(*where).observe(seconds)
        if code is not None:
            self._errors.labels(str(status), code).inc()

    def generated(self, model: str) -> int:
        """Tokens generated so far. Safe from any thread, like `recent`."""
        of = self._models.get(model)
        return 0 if of is None else of.tokens.count

    def recent(self, model: str) -> tuple[Recent, Recent]:
        """Recent TTFT and TPOT of a model, over the last minute."""
        of = self._models.get(model)
        if of is None:
            return Recent(self._clock), Recent(self._clock)
        return of.recent_ttft, of.recent_tpot

    def text(self, deprecated: bool = False) -> bytes:
        """Encode all metrics in Prometheus' text format; `deprecated`: under their older names as
        well. Slow; safe from any thread."""
        return generate_latest(ExportedMetrics(self.registry, deprecated))

    def _time(self, name: str, model: str, seconds: float) -> None:
        self._times[name].labels(model).observe(max(0.0, seconds))

    def _of(self, model: str) -> _OfModel:
        made = self._models[model] = _OfModel(
            self._prompt.labels(model),
            self._tokens.of(model),
            self._ttft.labels(model),
            Recent(self._clock),
            Recent(self._clock),
        )
        return made
