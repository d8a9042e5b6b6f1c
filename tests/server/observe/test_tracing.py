"""Traces: what a span says, and that a collector gets it, or is missed without harm."""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers

from ballast.core.clock import VirtualClock
from ballast.core.errors import ConfigError
from ballast.core.settings import KeySettings
from ballast.server.http.request_context import Caller, RequestContext
from ballast.server.observe.latency import Timing
from ballast.server.observe.tracing import Tracing, tracing
from ballast.server.openai.records import Usage
from ballast.server.openai.request import ChatRequest
from tests.server.process import server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
KEY = Caller(KeySettings(name="team-a", key="sk-secret-of-the-tests"))
PARENT = "00f067aa0ba902b7"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass
class Answer:
    model: str = "atlas"
    usage: Usage = field(default_factory=lambda: Usage.of(7, 3, 4))
    timings: tuple[Timing, ...] = (Timing(10.1, first=11.0, last=12.5, queued=0.5),)
    finish_reasons: tuple[str | None, ...] = ("stop",)


def visit(path: str = "/v1/chat/completions", **more: Any) -> RequestContext:
    given: dict[str, Any] = {
        "headers": Headers({"traceparent": f"00-{TRACE}-{PARENT}-01"}),
        "began": 10.0,
        "ended": 13.0,
        "route": path,
        "status": 200,
    }
    return RequestContext("POST", path, **(given | more))


def spans(*visits: RequestContext) -> list[ReadableSpan]:
    """What is exported of the visits, on a wall clock that is 1000 seconds ahead."""
    exporter = InMemorySpanExporter()
    result = Tracing(exporter, VirtualClock(20.0), VirtualClock(1020.0))
    for each in visits:
        result(each)
    asyncio.run(result.close(10.0))
    return list(exporter.get_finished_spans())


def test_a_span_has_what_the_conventions_name() -> None:
    request = ChatRequest(
        model="atlas", messages=[{"role": "user", "content": "secret"}], max_tokens=9, seed=1, n=2
    )
    (span,) = spans(
        visit(request=request, answer_id="chatcmpl-1", caller=KEY, answer=Answer(), streamed=True)
    )
    assert span.name == "chat atlas"
    assert span.kind is SpanKind.SERVER
    assert (span.start_time, span.end_time) == (1010 * 10**9, 1013 * 10**9)
    assert span.resource.attributes["service.name"] == "ballast"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == f"{TRACE}-{PARENT}"
    assert span.attributes is not None
    assert "secret" not in str(dict(span.attributes))
    times = {k: v for k, v in span.attributes.items() if k.startswith("gen_ai.latency.")}
    assert times == pytest.approx(
        {
            "gen_ai.latency.time_to_first_token": 1.0,
            "gen_ai.latency.time_in_model_decode": 1.5,
            "gen_ai.latency.e2e": 2.5,
            "gen_ai.latency.time_in_queue": 0.5,
            "gen_ai.latency.time_in_model_prefill": 0.4,
        }
    )
    assert {k: v for k, v in span.attributes.items() if k not in times} == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "ballast.key": "team-a",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ballast",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.model": "atlas",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 1,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "atlas",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
    }


def test_a_client_without_a_trace_begins_one_and_nonsense_is_ignored() -> None:
    for headers in (Headers(), Headers({"traceparent": "nonsense"})):
        (span,) = spans(visit(headers=headers))
        assert span.parent is None


def test_what_the_client_does_not_sample_is_not_exported() -> None:
    assert not spans(visit(headers=Headers({"traceparent": f"00-{TRACE}-{PARENT}-00"})))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"status": 429, "code": "rate_limited"}, "rate_limited"),
        ({"status": 499}, "client_gone"),
        ({"status": 500}, "500"),
    ],
)
def test_errors_are_marked(given: dict[str, Any], kind: str) -> None:
    (span,) = spans(visit(**given))
    assert span.attributes is not None
    assert span.attributes["error.type"] == kind
    assert span.status.status_code is StatusCode.ERROR


def test_a_request_that_was_left_early_tells_what_it_has() -> None:
    answer = Answer(timings=(Timing(10.1),), finish_reasons=(None,))
    (span,) = spans(visit(answer=answer))
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.e2e" not in span.attributes


def test_probes_are_not_traced() -> None:
    assert not spans(visit("/health"), visit("/metrics"))


def test_names_come_from_the_fleet_and_the_router_only() -> None:
    odd, known = spans(
        visit("/etc/passwd", route=None, status=404, code="not_found"),
        visit("/v1/models", route="/v1/models"),
    )
    assert (odd.name, known.name) == ("POST", "POST /v1/models")


class Collector:
    """An OpenTelemetry collector on the loopback interface."""

    def __init__(self) -> None:
        self.got: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.got.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def span_names(self) -> list[str]:
        return [
            span.name
            for _, request in self.got
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_collector_gets_spans(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        if by_environment:
            monkeypatch.setenv(ENDPOINTS[0], collector.url)
        result = tracing(None if by_environment else collector.url, VirtualClock(), VirtualClock())
        assert result is not None
        result(visit(answer=Answer()))
        asyncio.run(result.close(10.0))
    assert [path for path, _ in collector.got] == ["/v1/traces"]
    assert collector.span_names == ["chat atlas"]


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracing(None, VirtualClock(), VirtualClock()) is None


def test_a_bad_endpoint_and_a_missing_library_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="http://"):
        tracing("localhost:4317", VirtualClock(), VirtualClock())
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError("it is not installed")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"ballast-serve\[otel\]"):
        tracing("http://127.0.0.1:4318", VirtualClock(), VirtualClock())


def test_a_collector_that_is_not_there_delays_nothing() -> None:
    with collecting() as gone:
        pass
    before = set(threading.enumerate())
    result = tracing(gone.url, VirtualClock(), VirtualClock())
    assert result is not None
    for _ in range(3000):  # more than a batch may hold
        result(visit())
    asyncio.run(result.close(0.5))
    for thread in set(threading.enumerate()) - before:
        thread.join(240)
        assert not thread.is_alive(), f"{thread.name} goes on trying"


def test_a_server_tells_the_collector_before_it_ends(
    echo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINTS[0], collector.url)
        with server(echo_file, "--echo") as running:
            model = running.client.models.list().data[0].id
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            stream = running.client.completions.create(
                model=model, prompt="hello", max_tokens=3, stream=True, extra_headers=headers
            )
            assert len(list(stream)) >= 3
            running.signal()
            assert running.wait() == 0
    assert f"text_completion {model}" in collector.span_names
    # Nothing but the one request was traced under the client's trace.
    traced = [
        span
        for _, request in collector.got
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if span.trace_id.hex() == TRACE
    ]
    (span,) = traced
    result = {a.key: a.value for a in span.attributes}
    assert result["gen_ai.usage.output_tokens"].int_value == 3
    assert result["gen_ai.latency.e2e"].double_value > 0
