"""Export a span for each HTTP request to an OpenTelemetry collector, where one is configured.

Attributes follow the GenAI semantic conventions, and vLLM where these have no name yet
(`gen_ai.latency.*`, in seconds).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ballast import __version__
from ballast.core.clock import Clock
from ballast.core.errors import ConfigError, install_extra
from ballast.server.http.request_context import ObservedAnswer, RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "embeddings",
    "/v1/score": "embeddings",
}
_UNTRACED = frozenset({"/live", "/health", "/metrics", "/admin/state", "/admin/requests"})
"""Paths that machines poll every few seconds; not traced."""
_LONGEST = 200
"""Most characters kept of text that clients chose."""

Value = str | int | float | bool | Sequence[str]


class Tracing:
    """Listener of `Watch` that records spans. A thread exports them; those beyond its queue are
    dropped."""

    def __init__(self, exporter: SpanExporter, clock: Clock, wall: Clock) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._exporter = exporter
        self._provider = provider(exporter)
        self._tracer = self._provider.get_tracer("ballast", __version__)
        self._clock = clock
        self._wall = wall
        self._propagator = TraceContextTextMapPropagator()
        self._server = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def __call__(self, context: RequestContext) -> None:
        """Record a finished request; as a child of the client's span, if the request named one."""
        if context.path in _UNTRACED or context.ended is None:
            return
        offset = self._wall.now() - self._clock.now()
        found = attributes(context)
        span = self._tracer.start_span(
            _name(context, found),
            context=self._propagator.extract(context.headers),
            kind=self._server,
            attributes=found,
            start_time=_nanoseconds(context.began + offset),
        )
        if "error.type" in found:
            span.set_status(self._failed)
        span.end(_nanoseconds(context.ended + offset))

    async def close(self, patience: float) -> None:
        """Export the remaining spans within `patience` seconds, and drop the rest: a collector that
        does not answer must not delay the end of the server."""
        ending = threading.Thread(target=self._provider.shutdown, name="ballast-spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, patience)
        if ending.is_alive():
            await asyncio.to_thread(self._exporter.shutdown)


def tracing(endpoint: str | None, clock: Clock, wall: Clock) -> Tracing | None:
    """Create tracing to the collector at `endpoint`, or at OTEL_EXPORTER_OTLP_ENDPOINT, over HTTP.

    None where neither is given. Raises ConfigError where OpenTelemetry is not installed, or the
    address is not HTTP.
    """
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    where = endpoint or next((os.environ[n] for n in names if os.environ.get(n)), None)
    if where is None:
        return None
    if not where.startswith(("http://", "https://")):
        raise ConfigError("otlp_endpoint", where, "it must begin with http:// or https://")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needed = f"tracing needs OpenTelemetry ({error}): {install_extra('otel')}"
        raise ConfigError("otlp_endpoint", where, needed) from None
    # Without an argument, the exporter reads the environment, by OpenTelemetry's own rules.
    address = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
    return Tracing(OTLPSpanExporter(endpoint=address), clock, wall)


def provider(exporter: SpanExporter) -> TracerProvider:
    """Create the provider of spans, which passes them to `exporter` in batches."""
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "ballast"}))
    made = TracerProvider(
        resource=resource.merge(Resource({SERVICE_VERSION: __version__})), shutdown_on_exit=False
    )
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def attributes(context: RequestContext) -> dict[str, Value]:
    """Collect a span's attributes from the context of a request."""
    found: dict[str, Value] = {
        "http.request.method": context.method,
        "url.path": context.path[:_LONGEST],
        "http.response.status_code": context.status,
    }
    if context.caller.name:
        found["ballast.key"] = context.caller.name
    if context.route is not None:
        found["http.route"] = context.route
    if context.code is not None:
        found["error.type"] = context.code
    elif context.status >= 499:
        found["error.type"] = "client_gone" if context.status == 499 else str(context.status)
    operation = _OPERATIONS.get(context.route or context.path)
    if operation is not None:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "ballast"}
    if context.answer_id is not None:
        found["gen_ai.response.id"] = context.answer_id
    if context.request is not None:
        found |= _asked(context)
    if context.answer is not None:
        found |= _answered(context.answer, context.began)
    return found


def _asked(context: RequestContext) -> dict[str, Value]:
    request = context.request
    assert request is not None
    given: Mapping[str, Value | None] = {
        "gen_ai.request.model": request.model[:_LONGEST],
        "gen_ai.request.max_tokens": request.most_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": request.choices if request.choices != 1 else None,
        "gen_ai.request.stream": bool(request.stream),
    }
    return {name: value for name, value in given.items() if value is not None}


def _answered(answer: ObservedAnswer, began: float) -> dict[str, Value]:
    usage = answer.usage
    found: dict[str, Value] = {
        "gen_ai.response.model": answer.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        "gen_ai.response.finish_reasons": [r or "abort" for r in answer.finish_reasons],
    }
    timings = answer.timings
    firsts = [t.first for t in timings if t.first is not None]
    lasts = [t.last for t in timings if t.last is not None]
    queued = [t.queued for t in timings if t.queued is not None]
    if firsts and lasts:
        found["gen_ai.latency.time_to_first_token"] = min(firsts) - began
        found["gen_ai.latency.time_in_model_decode"] = max(lasts) - min(firsts)
        found["gen_ai.latency.e2e"] = max(lasts) - began
    if queued and firsts:
        found["gen_ai.latency.time_in_queue"] = min(queued)
        arrived = min(t.arrived for t in timings)
        found["gen_ai.latency.time_in_model_prefill"] = max(
            0.0, min(firsts) - arrived - min(queued)
        )
    return found


def _name(context: RequestContext, found: Mapping[str, Value]) -> str:
    operation = found.get("gen_ai.operation.name")
    if operation is not None:
        # Only the fleet's model names, never a client's text: spans are grouped by name.
        model = found.get("gen_ai.response.model")
        return f"{operation} {model}" if model else str(operation)
    return f"{context.method} {context.route}" if context.route else context.method


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
