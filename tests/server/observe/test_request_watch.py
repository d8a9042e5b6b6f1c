"""What is noted of HTTP requests, over an app without models."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from ballast.core.clock import VirtualClock
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import RequestContext, context_of
from ballast.server.observe.request_watch import Watch
from tests.server.observe.test_metrics import Scraped


class Watched:
    """An app behind a watch, asked in this process."""

    def __init__(self) -> None:
        self.scraped = Scraped()
        self.clock = VirtualClock(5.0)
        self.visits: list[RequestContext] = []
        self.open_while_streaming = 0.0
        app = FastAPI()

        @app.get("/things/{name}")
        async def thing(name: str, request: Request) -> Response:
            context = context_of(request.scope)
            context.answer_id = name
            self.clock.advance_to(7.0)
            if name == "none":
                return Fault(429, "too many", "rate_limited").response(context)
            return Response("it")

        @app.get("/stream")
        async def stream() -> Response:
            async def pieces() -> AsyncIterator[bytes]:
                self.open_while_streaming = self.scraped.one("ballast_open_streams")
                yield b"data: 1\n\n"

            return StreamingResponse(pieces(), media_type="text/event-stream")

        self.app = Watch(app, self.scraped.metrics, self.clock, [self.visits.append])

    def get(self, path: str) -> RequestContext:
        async def ask() -> None:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                await client.get(path, headers={"x-request-id": "r-1"})

        anyio.run(ask)
        return self.visits[-1]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_request_is_counted_by_its_route(watched: Watched) -> None:
    made = watched.get("/things/17")
    assert (made.method, made.path, made.route) == ("GET", "/things/17", "/things/{name}")
    assert (made.status, made.code, made.began, made.ended) == (200, None, 5.0, 7.0)
    assert made.headers["x-request-id"] == "r-1"
    assert (made.answer_id, made.request_id) == ("17", "r-1")
    one = watched.scraped.one
    assert one("http_requests_total", handler="/things/{name}", method="GET", status="200") == 1
    assert one("http_request_duration_seconds_sum", handler="/things/{name}") == 2.0
    watched.get("/things/18")
    assert watched.visits[-1] is not made
    assert made.answer_id == "17"


def test_the_code_of_an_error_is_counted(watched: Watched) -> None:
    assert watched.get("/things/none").code == "rate_limited"
    assert watched.scraped.one("ballast_http_errors_total", status="429", code="rate_limited") == 1


def test_what_no_route_knows_is_counted_together(watched: Watched) -> None:
    for path in ("/a", "/b"):
        assert watched.get(path).route is None
    assert watched.scraped.one("http_requests_total", handler="other", status="404") == 2


def test_a_stream_is_open_until_its_end(watched: Watched) -> None:
    assert watched.get("/stream").streamed
    assert watched.open_while_streaming == 1
    assert watched.scraped.one("ballast_open_streams") == 0
